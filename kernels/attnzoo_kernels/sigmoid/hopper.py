"""Sigmoid attention's forward for Hopper in Gluon: flash's, with weights that each depend on their own score only."""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward import ROWS
from attnzoo_kernels._gluon.forward_consumer import write_span
from attnzoo_kernels._gluon.forward_entry import hopper_fwd_kernel
from attnzoo_kernels._gluon.forward_launch import ForwardPlan, compiled_together, heads_in_l2, plan_forward, tile_width
from attnzoo_kernels._gluon.forward_tile import ForwardTile
from attnzoo_kernels._gluon.hopper import why_not_tma
from attnzoo_kernels._gluon.tile_scheduler import Span, span, tile_counter
from attnzoo_kernels._gluon.tiles import masks_in_loop
from attnzoo_kernels._triton.call import Layout, layout
from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels.flash.tiles import FORWARD_LENGTHS, hopper_forward_tile, takes_half_tile
from attnzoo_kernels.sigmoid.hooks import HOPPER_REGISTERS, HOPPER_SIGMOID, TOGETHER
from attnzoo_kernels.sigmoid.options import Options


@gluon.jit
def sigmoid(scores):
    """Of scores in base 2."""
    powers = gl.exp2(scores)  # all at once: in the assembly, branches would separate them
    return gl.inline_asm_elementwise(HOPPER_SIGMOID, HOPPER_REGISTERS, [powers], dtype=gl.float32, is_pure=True, pack=TOGETHER)


@gluon.jit
def bias_of(bias, len_k, BY_LENGTH: gl.constexpr):
    """The bias in base 2. BY_LENGTH: minus the logarithm of the number of a packed sequence's keys."""
    if BY_LENGTH:
        bias = -gl.log2(gl.maximum(len_k, 1).to(gl.float32))
    return bias


@gluon.jit
def own_bias(tensors, numbers, scale):
    """OWN."""
    return numbers[0]


@gluon.jit
def biased_span(tile, ME: gl.constexpr, taken, program, config):
    """SPAN."""
    s = span(tile, ME, taken, program, config)
    return Span(s.row, s.len_q, s.len_k, s.loaded_begin, s.loaded_end, s.begin, s.full_begin, s.full_end, s.end,
                bias_of(program.own, s.len_k, config.OPTIONS))


@gluon.jit
def weights(scores, where, program, config):
    """WEIGHTS."""
    return sigmoid(scores * program.rows.scale + where[2].own)


@gluon.jit
def finish(acc, inverse, tile, span, at, begun, BRANCH: gl.constexpr, ME: gl.constexpr, program, config):
    """FINISH."""
    write_span(program.descs.out, acc, span, at, ME, program)


HOOKS = {"OWN": own_bias, "SPAN": biased_span, "WEIGHTS": weights, "FINISH": finish}


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, same_lengths: bool, q: Layout, k: Layout, v: Layout, options: Options,
          tile: ForwardTile | None = None) -> ForwardPlan:
    """Of a call's mean length; the kernels of all other lengths are compiled with it."""
    sequences, seqlen_q, seqlen_k = options.sizes(q[0], k[0])
    width, value_width = tile_width(q[0][-1]), tile_width(v[0][-1])
    shift = 0 if same_lengths else None if options.packed else seqlen_k - seqlen_q
    mask_in_loop = masks_in_loop(options.window_left, options.window_right, shift, ROWS.value)
    scalars = {"head_group": heads_in_l2(seqlen_k, width + value_width) * (q[0][-2] // k[0][-2]),
               "own_1": options.base_2_bias(seqlen_k)}

    def of_length(length: int) -> ForwardPlan:
        own = tile or hopper_forward_tile(width, value_width, length, causal=options.causal, window=options.window_left >= 0,
                                          packed=options.packed)
        half_tile = options.causal and takes_half_tile(own, width, value_width, length, mask_in_loop)
        constants = {"MASK_IN_LOOP": mask_in_loop, "HALF_TILE": half_tile, "OPTIONS": options.by_length} | HOOKS
        return plan_forward(hopper_fwd_kernel, device, options, own, q, k, v, scalars, constants)

    mean = seqlen_q // max(sequences, 1) if options.packed else seqlen_q
    return compiled_together(of_length, mean, *(FORWARD_LENGTHS if tile is None else ()))


def forward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why this path does not take the call; None if it does."""
    if not (32 < q.shape[-1] <= 128 and 32 < v.shape[-1] <= 128):
        return f"head_dim and value_dim must be 33 to 128, got {q.shape[-1]} and {v.shape[-1]}"
    if options.slopes_stride is not None:
        return "it has no alibi_slopes"
    return why_not_tma(q, k, v)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options,
                   tile: ForwardTile | None = None) -> Tensor:
    """Output, for what forward_reason lets through."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    same_lengths = cu_seqlens_q is not None and cu_seqlens_q is cu_seqlens_k
    plan = _plan(q.device, q.dtype, same_lengths, layout(q), layout(k), layout(v), options, tile)
    with on_device_of(q):
        plan.launch(plan.queries(q), plan.keys(k), plan.values(v), plan.output(out), *(None,) * 4, cu_seqlens_q, cu_seqlens_k,
                    tile_counter(q.device))
    return out
