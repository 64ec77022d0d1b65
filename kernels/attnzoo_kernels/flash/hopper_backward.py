"""FlashAttention's backward on Hopper, in three launches: the preprocess computes row statistics, the mainloop makes all gradients, and the
postprocess converts dQ to 16 bits. In the mainloop all key tiles add to a float32 dQ.

Without an order, the sums of dQ differ from run to run by rounding; the preprocess clears them. With an order, the key tiles of each query
tile add from the last one down, and the first one overwrites dQ, which need not be cleared.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo_kernels._gluon.backward_kernel import pair_bwd_kernel
from attnzoo_kernels._gluon.backward_plan import (
    OWN_NUMBERS,
    OWN_TENSORS,
    Tile,
    all_tails,
    copy_all_tails,
    frame,
    mainloop_width,
    pair_tile,
    sources,
)
from attnzoo_kernels._gluon.backward_tiles import HALF, KEYS
from attnzoo_kernels._gluon.hopper import descriptor, why_not_tma
from attnzoo_kernels._gluon.tiles import heads_together
from attnzoo_kernels._triton.call import Call, Layout, filled, layout, strides
from attnzoo_kernels._triton.launch import Launch, multiprocessors, on_device_of, tma_gradient
from attnzoo_kernels.flash.options import Options


def backward_tile(width: int, ordered: bool, full: bool, window: bool, queries: float) -> Tile:
    """The tile for a width of 64 or 128. ordered: sums of dQ have an order. full: there is no mask. queries: how many queries see a key
    tile. dQ is made one step late where measurements show that it is faster. At width 64, the masks of a window and the scores of 128
    queries together would spill."""
    if width == 64 and window:
        return Tile(64, dq_warp=True)
    return replace(pair_tile(width, ordered), dq_lags=queries >= 2048 if width == 64 else ordered and full)


# (wider than 64, causal, longest sequence, fewest tiles of keys for each multiprocessor) for which ordered sums cost at most 3 %.
# They need no clearing, but programs wait for their turns: with short sequences and many tiles they are even faster.
ORDER_COSTS_LITTLE = (
    (False, True, 512, 0), (False, True, 1024, 7.5), (False, True, 4096, 15), (False, True, 16384, 30),
    (False, False, 4096, 7.5), (False, False, 16384, 30),
    (True, True, 512, 15), (True, False, 2048, 7.5), (True, False, 4096, 15),
)


def in_order_anyway(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Whether sums of dQ get an order although none is asked for: where that costs little. This was measured with equal numbers of heads
    and equal lengths of queries and keys. Calls at width 128 without a mask and with 8192 tokens are not among them: no order is faster
    there.
    """
    if options.sequences is not None or options.window_left >= 0 or options.window_right > 0 or q.shape[1:-1] != k.shape[1:-1]:
        return False
    wide, causal, length = max(q.shape[-1], v.shape[-1]) > 64, options.window_right == 0, k.shape[1]
    tiles = q.shape[0] * k.shape[2] * -(-length // KEYS.value) / multiprocessors(q.device)
    return any((wide, causal) == entry[:2] and length <= entry[2] and tiles >= entry[3] for entry in ORDER_COSTS_LITTLE)


def backward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why this path does not take the call; None if it does."""
    if not 32 < max(q.shape[-1], v.shape[-1]) <= 128:
        return f"the wider of head_dim and value_dim must be 33 to 128, got {q.shape[-1]} and {v.shape[-1]}"
    if options.softcap > 0 or options.slopes_stride is not None or options.dropout_p > 0:
        return "it has no softcap, alibi_slopes or dropout_p"
    return why_not_tma(q, k, v)


class Rule(NamedTuple):
    """What another operator passes to `pair_bwd_kernel` in place of a softmax's constants and hooks."""

    constants: tuple = ()  # pairs of name and value
    numbers: tuple = ()  # up to four, for the hook OWN
    parts: int = 1  # into how many parts it may divide a tile of keys


SOFTMAX = Rule()


@dataclass
class Plan:
    """The launches for one layout of the arguments."""

    tile: Tile
    width: int
    preprocess: Launch
    tails: Launch | None  # copies the tails of q, k, v and dO; None for dense input
    mainloop: Launch
    postprocess: Launch


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, has_grad_lse: bool, ordered: bool, q: Layout, k: Layout, v: Layout, out: Layout | None,
          grad_out: Layout, dq: Layout, dk: Layout, dv: Layout, residual: bool, dsinks: bool, options: Call, tile: Tile | None,
          rule: Rule) -> Plan:
    sequences, seqlen_q, seqlen_k = options.sizes(q[0], k[0])
    (heads, head_dim), (kv_heads, value_dim) = q[0][-2:], v[0][-2:]
    width, packed, group = mainloop_width(head_dim, value_dim), options.packed, heads // kv_heads
    full = options.window_left < 0 and options.window_right < 0
    queries = group * seqlen_q / (sequences if packed else 1) / (1 if full else 2)
    tile = tile or backward_tile(width, ordered, full, options.window_left >= 0, queries)
    query_tiles = options.programs(heads, seqlen_q, sequences, tile.rows)
    key_tiles = options.programs(kv_heads, seqlen_k, sequences, KEYS.value)
    preprocess, postprocess = frame(options, q, out, grad_out, dq, tile.rows, width, value_dim=value_dim, has_grad_lse=has_grad_lse,
                                    ordered=ordered, residual=residual, dsinks=dsinks)
    copies = all_tails(q, k, v, grad_out, sequences, tile.rows, KEYS.value, width) if packed else None
    programs = multiprocessors(device)
    head_group = heads_together(sequences * kv_heads, seqlen_q * width * 8 * group, -(-seqlen_k // KEYS.value), programs, ordered)
    head_tiles = query_tiles // heads if packed else query_tiles // (heads * sequences)
    mainloop = Launch(
        pair_bwd_kernel, min(rule.parts * key_tiles, programs),
        (*filled(rule.numbers, OWN_NUMBERS), options.softmax_scale, options.softmax_scale * math.log2(math.e), options.window_left,
         options.window_right, sequences, seqlen_q, seqlen_k, kv_heads, strides(dk)[1], strides(dv)[1], group, head_group, head_tiles,
         key_tiles),
        {"HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "WIDTH": width, "PACKED": packed, "HAS_LEFT": options.window_left >= 0,
         "HAS_RIGHT": options.window_right >= 0, "ORDERED": ordered, **tile.constants(), **dict(rule.constants)}, 4, 1)
    return Plan(tile, width, preprocess, copies, mainloop, postprocess)


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, stats: Tensor | None,
                    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Call, deterministic: bool,
                    tile: Tile | None = None, into: tuple[Tensor, Tensor, Tensor] | None = None, rule: Rule = SOFTMAX,
                    dv_sums: tuple[Tensor | None, Tensor | None] = (None, None), own: tuple[Tensor | None, ...] = (),
                    residual: Tensor | None = None, sinks: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dQ, dK and dV, as the plain path's launch_backward gives them, for calls that backward_reason accepts, and the gradient of `sinks`,
    (heads,) in float64. sinks: given only if their gradient is wanted.

    into: tensors in which dQ, dK and dV are stored, 16-byte aligned, with the heads of a row side by side. rule: another operator's Rule.
    If its rows have no statistics, out and stats are None. residual: O's rounding error, laid out as O is; delta is then free of that
    error. dv_sums: dv_from and dv_to of `Gradients`, for calls that add up dV over several launches. own: up to five tensors for the rule's
    OWN.
    """
    grad_out = tma_gradient(grad_out)
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    dq, dk, dv = into or (x.new_empty(x.shape) for x in (q, k, v))
    plan = _plan(q.device, q.dtype, grad_lse is not None, deterministic, *map(layout, (q, k, v)), None if out is None else layout(out),
                 *map(layout, (grad_out, dq, dk, dv)), residual is not None, sinks is not None, options, tile, rule)
    query_tiles, width, rows = plan.preprocess.programs, plan.width, plan.tile.rows
    floats = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
    row_stats = None if out is None else floats(query_tiles, 1, 2 * rows)
    dsinks = None if sinks is None else torch.empty(query_tiles, dtype=torch.float64, device=q.device)
    dq_sum = floats(1, query_tiles * rows * width // 32, 1, 32)
    counter, semaphore = (torch.empty(n, dtype=torch.int32, device=q.device) for n in (1, query_tiles if deterministic else 0))
    tensors, ends = (q, k, v, grad_out), (None,) * 4
    with on_device_of(q):
        plan.preprocess(out, residual, grad_out, stats, grad_lse, row_stats, sinks, dsinks, dq_sum, counter, semaphore, cu_seqlens_q)
        if plan.tails is not None:
            ends = copy_all_tails(plan.tails, *tensors, cu_seqlens_q, cu_seqlens_k)
        plan.mainloop(*filled(own, OWN_TENSORS), *sources(tensors, rows, width),
                      None if out is None else descriptor(row_stats, 1, 2 * rows), *sources(ends, rows, width),
                      descriptor(dk, HALF.value, width), descriptor(dv, HALF.value, width), dk, dv,
                      descriptor(dq_sum, rows * width // 64, 32), *dv_sums, counter, semaphore, cu_seqlens_q, cu_seqlens_k)
        plan.postprocess(dq_sum, semaphore, dq, cu_seqlens_q)
    if dsinks is not None:
        dsinks = dsinks.view(1 if options.packed else q.shape[0], q.shape[-2], -1).sum((0, 2))
    return dq, dk, dv, dsinks
