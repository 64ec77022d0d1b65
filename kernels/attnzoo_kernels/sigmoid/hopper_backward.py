"""Sigmoid attention's backward on Hopper: flash attention's, without statistics of rows; a step makes its gradients of weights alone."""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_consume import Gradients, pair_mainloop
from attnzoo_kernels._gluon.backward_kernel import Config, run_pair_tiles
from attnzoo_kernels._gluon.backward_load import Operands, Source
from attnzoo_kernels._gluon.backward_plan import Tile
from attnzoo_kernels._gluon.backward_step import add_weights, masked_scores, products
from attnzoo_kernels._gluon.backward_tiles import Problem
from attnzoo_kernels._gluon.hopper import why_not_tma
from attnzoo_kernels.flash import hopper_backward as flash
from attnzoo_kernels.sigmoid.hopper import bias_of, sigmoid
from attnzoo_kernels.sigmoid.options import Options


@gluon.jit
def bias_of_tile(own, key, len_q, len_k, c):
    """OF_TILE: the bias."""
    return bias_of(own, len_k, c.OPTIONS)


@gluon.jit
def mainloop(state, at, bounds, low, high, of_tile, slot, smem, bars, dq_desc, problem, scale, c, ME: gl.constexpr):
    """MAINLOOP, whose steps take the bias beside the scale."""
    return pair_mainloop(state, at, bounds, low, high, of_tile, slot, smem, bars, dq_desc, problem, (scale, of_tile), c, ME)


@gluon.jit
def _gradient(weights, dweights, smem, stage, c):
    """GRADIENT."""
    dweights = weights * dweights
    return dweights - weights * dweights


@gluon.jit
def step(dk, dv, smem, bars, dq_desc, dq_tile, step, some, scale, low, high, c, ME: gl.constexpr, MASKED: gl.constexpr):
    """STEP. Queries behind a sequence's end have no gradient of the output, which makes all that they add zero."""
    stage, scores, dweights_pending = products(smem.q, smem, bars, step, c, ME)
    scores = scores * scale[0] + scale[1]
    if MASKED:
        scores = masked_scores(scores, smem.columns, low, high, c)
    return add_weights(dk, dv, sigmoid(scores), dweights_pending, smem, bars, dq_desc, dq_tile, step, stage, some, c, ME, _gradient)


@gluon.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "kv_heads", "head_group", "head_tiles",
                              "n_tiles"],
           do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "dq_semaphore"])
def sigmoid_bwd_kernel(q_desc, k_desc, v_desc, do_desc, stats_desc, q_tail_desc, k_tail_desc, v_tail_desc, do_tail_desc, dk_desc, dv_desc,
                       dk_ptr, dv_ptr, dq_desc, dv_from, dv_to, counter, dq_semaphore, cu_seqlens_q, cu_seqlens_k, bias, softmax_scale,
                       scale, window_left, window_right, n_seqs, seqlen_q, seqlen_k, kv_heads, stride_dk, stride_dv, group, head_group,
                       head_tiles, n_tiles, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, WIDTH: gl.constexpr, PACKED: gl.constexpr,
                       HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ORDERED: gl.constexpr, BY_LENGTH: gl.constexpr, ROWS: gl.constexpr,
                       STAGES: gl.constexpr, DQ_WARP: gl.constexpr, DQ_LAGS: gl.constexpr, REGISTERS: gl.constexpr,
                       LOAD_REGISTERS: gl.constexpr):
    """stats_desc, dv_from and dv_to are None."""
    run_pair_tiles(Source(Operands(q_desc, k_desc, v_desc, do_desc), Operands(q_tail_desc, k_tail_desc, v_tail_desc, do_tail_desc),
                          stats_desc),
                   Gradients(dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dk, stride_dv, HEAD_DIM, VALUE_DIM, dv_from, dv_to), dq_desc,
                   dq_semaphore,
                   Problem(counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles,
                           n_tiles, window_left, window_right), bias, scale, softmax_scale, REGISTERS, LOAD_REGISTERS,
                   Config(HEAD_DIM=HEAD_DIM, VALUE_DIM=VALUE_DIM, WIDTH=WIDTH, VALUE_WIDTH=WIDTH, ROWS=ROWS, DQ_ROWS=ROWS, STAGES=STAGES,
                          PACKED=PACKED, HAS_LEFT=HAS_LEFT, HAS_RIGHT=HAS_RIGHT, ORDERED=ORDERED, DQ_WARP=DQ_WARP, DQ_LAGS=DQ_LAGS,
                          OPTIONS=BY_LENGTH, OF_TILE=bias_of_tile, MAINLOOP=mainloop, STEP=step))


def backward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why this path does not take the call; None if it does."""
    if not 32 < max(q.shape[-1], v.shape[-1]) <= 128:
        return f"the wider of head_dim and value_dim must be 33 to 128, got {q.shape[-1]} and {v.shape[-1]}"
    if options.slopes_stride is not None:
        return "it has no alibi_slopes"
    return why_not_tma(q, k, v)


def launch_backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
                    options: Options, deterministic: bool, tile: Tile | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV, for what backward_reason lets through."""
    ordered = deterministic or flash.in_order_anyway(q, k, v, options)
    rule = flash.Rule(sigmoid_bwd_kernel, (options.base_2_bias(k.shape[-3]),), (("BY_LENGTH", options.by_length),))
    return flash.launch_backward(grad_out, None, q, k, v, None, None, cu_seqlens_q, cu_seqlens_k, options, ordered, tile, rule=rule)[:3]
