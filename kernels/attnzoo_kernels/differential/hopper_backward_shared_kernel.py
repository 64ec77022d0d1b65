"""The Gluon kernel of differential attention's Hopper backward where both branches read the same keys: a softmax's mainloop over pairs of
branches.

A step is 64 queries of both branches, as 128 columns of scores with the same keys. Scores, dK and dQ are one product each for both
branches, and so are dO Vᵀ and dV with the combined weights. Each consumer makes one branch's dQ from both consumers' dS, one step late, so
that it need not wait for the other's dS of the same step. A warp adds dQ to memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_consume import Gradients
from attnzoo_kernels._gluon.backward_kernel import Config, run_pair
from attnzoo_kernels._gluon.backward_load import Source
from attnzoo_kernels._gluon.backward_step import add_step, pair_barriers, products
from attnzoo_kernels._gluon.backward_tiles import ROWS, Problem
from attnzoo_kernels._gluon.hopper import product_layout, warpgroup_mma, warpgroup_mma_wait
from attnzoo_kernels.differential.hopper_backward_kernel import branch_tiles, halves, statistics, weights_of, whole
from attnzoo_kernels.differential.hopper_loads import Branches, load_keys, load_queries

BOTH = gl.constexpr(128)  # columns of a step: its queries, once for each branch


@gluon.jit
def _step(sums, smem, bars, dq_desc, dq_tile, step, some, scale, low, high, config, ME: gl.constexpr, MASKED: gl.constexpr):
    """STEP: hands on branch ME's dQ of the step before, if there was `some`."""
    dk, dv = sums
    column: gl.constexpr = gl.SliceLayout(0, product_layout(ROWS))
    dtype: gl.constexpr = smem.q.dtype
    q_tiles = smem.q._reinterpret(dtype, [config.STAGES, BOTH, config.WIDTH], smem.q.layout)
    stage, scores, dweights_pending = products(q_tiles, smem, bars, step, config, ME)
    left, right = halves(scores)
    left = weights_of(left, smem, stage, 0, 0, low, high, scale, config, MASKED)
    right = weights_of(right, smem, stage, 2, 0, low, high, scale, config, MASKED)
    right = right * statistics(smem.stats, stage, 4, 0, column, ROWS)
    p = gl.convert_layout((left - right).to(dtype), gl.DotOperandLayout(0, dv.type.layout, 2))
    # [HALF, ROWS] x [ROWS, BLOCK_DV]
    dv = warpgroup_mma(p, smem.do.index(stage), dv, is_async=True)
    dweights = warpgroup_mma_wait(1, deps=(dweights_pending,))
    left = left * (dweights - statistics(smem.stats, stage, 1, 0, column, ROWS))
    right = right * (statistics(smem.stats, stage, 3, 0, column, ROWS) - dweights)
    dscores = whole(left.to(dtype), right.to(dtype), product_layout(BOTH))
    return add_step((dk, dv), p, dscores, q_tiles, smem, bars, dq_desc, dq_tile, step, stage, some, (), scale, config, ME, True)


@gluon.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "kv_heads", "head_group", "head_tiles",
                              "n_tiles"],
           do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def differential_bwd_shared_kernel(q1_desc, q2_desc, do_desc, k_desc, v_desc, stats_desc, q1_tail_desc, q2_tail_desc, do_tail_desc,
                                   k_tail_desc, v_tail_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, dq_desc, counter, cu_seqlens_q,
                                   cu_seqlens_k, softmax_scale, scale, window_left, window_right, n_seqs, seqlen_q, seqlen_k, kv_heads,
                                   group, head_group, head_tiles, n_tiles, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
                                   BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr,
                                   HAS_RIGHT: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr):
    config = Config(HEAD_DIM=HEAD_DIM, VALUE_DIM=VALUE_DIM, WIDTH=BLOCK_D, VALUE_WIDTH=BLOCK_DV, ROWS=ROWS, DQ_ROWS=BOTH, STAGES=STAGES,
                    PACKED=PACKED, HAS_LEFT=HAS_LEFT, HAS_RIGHT=HAS_RIGHT, DQ_WARP=True, DQ_LAGS=True, LOAD_Q=load_queries,
                    LOAD_K=load_keys, STEP=_step)
    smem = branch_tiles(q1_desc.dtype, 1, True, config)
    run_pair(Source(Branches(q1_desc, q2_desc, do_desc, k_desc, None, v_desc),
                    Branches(q1_tail_desc, q2_tail_desc, do_tail_desc, k_tail_desc, None, v_tail_desc), stats_desc),
             Gradients(dk_desc, dv_desc, dk_ptr, dv_ptr, kv_heads * HEAD_DIM, kv_heads * VALUE_DIM, HEAD_DIM, VALUE_DIM), smem,
             pair_barriers(config), dq_desc, None,
             Problem(counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles, n_tiles,
                     window_left, window_right), (), scale, softmax_scale, REGISTERS, 24, config)
