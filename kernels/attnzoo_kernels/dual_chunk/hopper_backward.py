"""Dual Chunk attention's backward on Hopper: a softmax's mainloop between kernels that clear dQ and turn the gradients back.

Without an order the sums of dQ differ from run to run by their rounding.
"""

import functools

import torch
from torch import Tensor

from attnzoo_kernels._gluon.backward_plan import Tile, mainloop_width, pair_tile, sources
from attnzoo_kernels._gluon.backward_tiles import HALF, KEYS
from attnzoo_kernels._gluon.bwd_preprocess import bwd_preprocess_kernel, bwd_tails_kernel
from attnzoo_kernels._gluon.hopper import descriptor, why_not_tma
from attnzoo_kernels._gluon.tiles import heads_together
from attnzoo_kernels._triton.call import Call, Layout, layout
from attnzoo_kernels._triton.launch import Launch, multiprocessors, on_device_of, strides, tma_gradient
from attnzoo_kernels._triton.softmax import LN2
from attnzoo_kernels.dual_chunk.hopper_backward_kernel import dual_chunk_bwd_hopper_kernel
from attnzoo_kernels.dual_chunk.hopper_bwd_processing import (
    clear_copies,
    dual_chunk_bwd_postprocess_dk_kernel,
    dual_chunk_bwd_postprocess_dq_kernel,
)
from attnzoo_kernels.dual_chunk.options import Extras, Options
from attnzoo_kernels.dual_chunk.parts import parts
from attnzoo_kernels.dual_chunk.rotation import rotated_copies


def backward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why this path does not take the call; None if it does."""
    width = max(q.shape[-1], v.shape[-1])
    if not 32 < width <= 128:
        return f"the wider of head_dim and value_dim must be 33 to 128, got {width}"
    if not options.causal or options.stages != 7:
        return "causal must be True and stages must be all three"
    if options.packed:
        aligned = options.same_lengths
    else:
        aligned = (k.shape[1] - q.shape[1]) % pair_tile(mainloop_width(width), False).rows == 0
    if options.chunk % KEYS.value or not aligned:
        return ("chunks must be multiples of 128 tokens and queries must begin at a multiple of 64, of 128 up to head_dim 64 (packed: one "
                "cu_seqlens for both sides)")
    return why_not_tma(v)


@functools.lru_cache(maxsize=1024)
def _mainloop(device: torch.device, dtype: torch.dtype, packed: int | None, ordered: bool, chunk: int, near: int, q: Layout, k: Layout,
          v: Layout, dk: Layout, dv: Layout, tile: Tile) -> Launch:
    """The mainloop over copies of queries q (3 * batches, seqlen, heads, width) and keys k."""
    copies, seqlen_q, heads, dim = q[0]
    (_, seqlen_k, kv_heads, _), value_dim = k[0], v[0][-1]
    batches, width = copies // 3, mainloop_width(dim, value_dim)
    call, sequences, group = Call(sequences=packed, softmax_scale=1.0), batches if packed is None else packed, heads // kv_heads
    query_tiles = call.programs(heads, seqlen_q, sequences, tile.rows)
    key_tiles = call.programs(kv_heads, seqlen_k, sequences, KEYS.value)
    programs = min(key_tiles, multiprocessors(device))
    head_group = heads_together(batches * kv_heads, seqlen_q * width * 8 * group, -(-seqlen_k // KEYS.value), programs, ordered)
    return Launch(
        dual_chunk_bwd_hopper_kernel, programs,
        (*dk[1][-3:-1], *dv[1][-3:-1], LN2.value, sequences, batches if packed is None else packed + 1, seqlen_q,
         seqlen_k, kv_heads, group, head_group, query_tiles // (batches * heads), key_tiles, chunk, near, query_tiles),
        {"HEAD_DIM": dim, "VALUE_DIM": value_dim, "WIDTH": width, "PACKED": packed is not None, "ORDERED": ordered,
         **tile.constants()}, 4, 1)


def _ends(x: Tensor, block: int, width: int, cu_seqlens: Tensor) -> Tensor:
    """The last, partial tile of each packed sequence of x (copies, total, heads, dim), zeros behind it: (copies * (sequences + 1), block,
    heads, width)."""
    ends = x.new_empty(x.shape[0], cu_seqlens.shape[0], block, x.shape[-2], width)
    for copy, end in zip(x, ends, strict=True):
        bwd_tails_kernel[(cu_seqlens.shape[0] * x.shape[-2],)](
            copy, end, cu_seqlens, *copy.stride()[:2], cu_seqlens.shape[0] - 1, *copy.shape[:2], DIM=x.shape[-1], WIDTH=width, BLOCK=block,
            num_warps=4, num_stages=1)
    return ends.flatten(0, 1)


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor,
                    extras: Extras, options: Options, deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV as the plain path's launch_backward gives them, for calls that backward_reason accepts."""
    grad_out = tma_gradient(grad_out)
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    with on_device_of(q):
        for part in parts(q, k, extras, options, sums=12):
            _launch(*map(part.tokens, (grad_out, q, k, v, out, dq, dk, dv)), *map(part.rows, (grad_lse, stats)), part.extras,
                    options, deterministic)
    return dq, dk, dv


def _launch(grad_out, q, k, v, out, dq, dk, dv, grad_lse, stats, extras, options, ordered) -> None:
    (sequences, seqlen_q, seqlen_k), heads, kv_heads = options.sizes(q.shape, k.shape), q.shape[-2], k.shape[-2]
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    width = mainloop_width(head_dim, value_dim)
    tile, cu_seqlens = pair_tile(width, ordered), extras.cu_seqlens_q
    packed = options.sequences
    queries = rotated_copies(q, extras, options, seqlen_k, 3, queries=True, near=options.near)
    keys = rotated_copies(k, extras, options, seqlen_q, 1, queries=False)
    n_tiles = options.programs(heads, seqlen_q, sequences, tile.rows)
    row_stats = stats.new_empty(n_tiles, 1, 2 * tile.rows)
    dq_sums = stats.new_empty(1, 3 * n_tiles * tile.rows * width // 32, 1, 32)
    counter = torch.empty(1, dtype=torch.int32, device=q.device)
    semaphore = torch.empty(n_tiles if ordered else 0, dtype=torch.int32, device=q.device)
    shift = 0 if options.packed else seqlen_k - seqlen_q
    of_tiles = {"WIDTH": width, "PACKED": options.packed, "BLOCK": tile.rows}
    bwd_preprocess_kernel[(n_tiles,)](
        out, None, grad_out, stats, grad_lse, row_stats, None, None, dq_sums, counter, semaphore, cu_seqlens, *strides(out),
        *strides(grad_out), stats.stride(0), sequences, seqlen_q, heads, shift, options.chunk, options.near, n_tiles, VALUE_DIM=value_dim,
        SEMAPHORES=1 if ordered else 0, HAS_GRAD_LSE=grad_lse is not None, CLEAR=clear_copies, **of_tiles)
    ends = (None,) * 4
    if options.packed:
        ends = (_ends(queries, tile.rows, width, cu_seqlens), _ends(keys, KEYS.value, width, cu_seqlens),
                _ends(v[None], KEYS.value, width, cu_seqlens), _ends(grad_out[None], tile.rows, width, cu_seqlens))
    turned = torch.empty_like(keys)
    mainloop = _mainloop(q.device, q.dtype, packed, ordered, options.chunk, options.near,
                         *map(layout, (queries, keys, v, turned, dv)), tile)
    run(mainloop, tile.rows, width, (queries, keys, v, grad_out), row_stats, ends, turned, dv, dq_sums, counter, semaphore, cu_seqlens)
    rotation = {"HEAD_DIM": head_dim, "ROTARY_DIM": options.rotary_dim, "INTERLEAVED": options.rope_interleaved}
    dual_chunk_bwd_postprocess_dq_kernel[(n_tiles,)](
        dq_sums, dq, *extras[:3], cu_seqlens, *strides(dq), options.multiplier_stride or 0,
        options.softmax_scale, sequences, seqlen_q, heads, shift, options.chunk, options.top, options.far, options.near, n_tiles,
        HAS_MULTIPLIER=options.has_multiplier, **rotation, **of_tiles)
    dual_chunk_bwd_postprocess_dk_kernel[(options.programs(kv_heads, seqlen_k, sequences, tile.rows),)](
        turned, dk, *extras[:2], cu_seqlens, *strides(turned), *strides(dk), sequences, seqlen_k, kv_heads, options.chunk,
        **rotation, **of_tiles)


def run(mainloop: Launch, rows: int, width: int, operands: tuple[Tensor, ...], row_stats: Tensor, ends: tuple, dk: Tensor, dv: Tensor,
        dq_sums: Tensor, *rest) -> None:
    """operands: queries, keys, values and gradients of the output; ends: theirs, of packed sequences."""
    mainloop(*sources(operands, rows, width), descriptor(row_stats, 1, 2 * rows), *sources(ends, rows, width),
             descriptor(dk, HALF.value, width), descriptor(dv, HALF.value, width), dk, dv,
             descriptor(dq_sums, rows * width // 64, 32), *rest)
