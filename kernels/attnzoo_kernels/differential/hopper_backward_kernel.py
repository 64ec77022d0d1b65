"""The Gluon kernel of differential attention's Hopper backward: dQ1, dQ2, dK1, dK2 and dV in one mainloop, with transposed tiles (keys by
queries).

A program stays on its multiprocessor and takes tiles of 128 keys from a counter. One warp loads. Two consumers hold dK1, dK2 and dV of 64
keys each in registers. They go over the queries of all heads of a group in steps of 64, and within a step over one branch after the other;
dO Vᵀ and dV are one product for both branches. Each consumer makes one branch's dQ from both consumers' dS and adds it from registers to a
float32 buffer.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_consume import Gradients, pair_start, pair_store, store_keys
from attnzoo_kernels._gluon.backward_dq import add_to
from attnzoo_kernels._gluon.backward_kernel import Config, run_pair
from attnzoo_kernels._gluon.backward_load import Source
from attnzoo_kernels._gluon.backward_step import (
    Barriers,
    Shared,
    column_numbers,
    masked_scores,
    scores_in_flight,
    step_barriers,
    tile_words,
)
from attnzoo_kernels._gluon.backward_tiles import HALF, ROWS, Problem, word
from attnzoo_kernels._gluon.hopper import (
    await_full,
    barriers,
    fence_async_shared,
    mbarrier,
    product_layout,
    ring,
    shared_tiles,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from attnzoo_kernels._gluon.softmax import packed, unpacked_floats
from attnzoo_kernels.differential.hopper_loads import STATS, Branches, load_keys, load_queries_apart


@gluon.jit
def halves(x):
    """The left and the right half of the columns of x [M, N]. In a product's layout each thread holds some of both."""
    width: gl.constexpr = x.shape[1] // 2
    left, right = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, width]), (0, 2, 1)))
    return gl.convert_layout(left, product_layout(width)), gl.convert_layout(right, product_layout(width))


@gluon.jit
def whole(left, right, layout: gl.constexpr):
    """The inverse of `halves`, in a given layout."""
    x = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [left.shape[0], 2 * left.shape[1]])
    return gl.convert_layout(x, layout)


@gluon.jit
def statistics(stats_tiles, stage, WHICH: gl.constexpr, SIDE: gl.constexpr, column: gl.constexpr, COUNT: gl.constexpr = ROWS // 2):
    """A statistic of COUNT of a step's queries, those of the SIDE-th COUNT. WHICH: 0 the first branch's LSE in base 2, 1 its delta, 2 the
    second branch's LSE, 3 its delta, 4 lambda."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    of_box: gl.constexpr = STATS // ROWS
    tile = stats_tiles.index(stage * 2 + WHICH // of_box)._reinterpret(gl.float32, [STATS], flat)
    return tile.slice(WHICH % of_box * ROWS + SIDE * COUNT, COUNT).load(column)[None, :]


@gluon.jit
def weights_of(scores, smem, stage, WHICH: gl.constexpr, SIDE: gl.constexpr, low, high, scale, config, MASKED: gl.constexpr):
    """The softmax weights of a step's scores, or of one half of their columns. WHICH: the branch's LSE, SIDE: as in `statistics`."""
    count: gl.constexpr = scores.shape[1]
    x = scores * scale - statistics(smem.stats, stage, WHICH, SIDE, gl.SliceLayout(0, scores.type.layout), count)
    if MASKED:
        x = masked_scores(x, smem.columns.slice(SIDE * count, count), low, high, config)
    return gl.exp2(x)


@gluon.jit
def _second_branch(scores, p, dweights, smem, stage, SIDE: gl.constexpr, low, high, scale, config, MASKED: gl.constexpr):
    """For half of a step's queries: (dS of the second branch, the combined weights P1 - lambda P2, rounded to 16 bits). p: P1, `packed`."""
    layout: gl.constexpr = scores.type.layout
    column: gl.constexpr = gl.SliceLayout(0, layout)
    dtype: gl.constexpr = smem.k.dtype
    weights = weights_of(scores, smem, stage, 2, SIDE, low, high, scale, config, MASKED)
    weights = weights * statistics(smem.stats, stage, 4, SIDE, column)
    ds = (weights * (statistics(smem.stats, stage, 3, SIDE, column) - dweights)).to(dtype)
    return ds, (unpacked_floats(p, layout, dtype) - weights).to(dtype)


@gluon.jit
def _first_scores(smem, bars, step, config, ME: gl.constexpr):
    """The first branch's scores of a step."""
    _, pending = scores_in_flight(smem.q[0], smem, bars, step, config, ME)
    return warpgroup_mma_wait(0, deps=(pending,))


@gluon.jit
def _step(scores, dk1, dk2, dv, smem, bars, dq_tile, step, scale, low, high, config, ME: gl.constexpr, SHARED_K: gl.constexpr,
          MASKED: gl.constexpr, LAST: gl.constexpr):
    """Adds a step's share to dK1, dK2 and dV. It takes the scores of its first branch and returns those of the next step."""
    q1_tiles, q2_tiles = smem.q
    k_tiles, ds_tiles = smem.k, smem.ds
    scores_layout: gl.constexpr = scores.type.layout
    dv_operand: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    dtype: gl.constexpr = q1_tiles.dtype
    second: gl.constexpr = 0 if SHARED_K else 2  # where the second branch's keys lie
    nothing = gl.zeros([HALF, ROWS], gl.float32, scores_layout)
    slot, slot_phase = ring(step, 2)
    stage = await_full(bars.do_full, step, config.STAGES)
    # [HALF, BLOCK_DV] x [BLOCK_DV, ROWS], for both branches
    pending = warpgroup_mma(smem.v.index(ME), smem.do.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    left, right = halves(scores)
    column: gl.constexpr = gl.SliceLayout(0, left.type.layout)
    row: gl.constexpr = gl.SliceLayout(1, left.type.layout)
    low = gl.convert_layout(low, row)
    high = gl.convert_layout(high, row)
    left = weights_of(left, smem, stage, 0, 0, low, high, scale, config, MASKED)
    right = weights_of(right, smem, stage, 0, 1, low, high, scale, config, MASKED)
    dleft, dright = halves(warpgroup_mma_wait(0, deps=(pending,)))
    ds1 = whole((left * (dleft - statistics(smem.stats, stage, 1, 0, column))).to(dtype),
                (right * (dright - statistics(smem.stats, stage, 1, 1, column))).to(dtype), scores_layout)
    pleft = packed(left, dtype, MOVABLE=False)
    pright = packed(right, dtype, MOVABLE=False)
    ds_tiles.index(slot * 4 + ME).store(ds1)
    fence_async_shared()
    mbarrier.arrive(bars.ds_full.index(slot * 2), count=1)
    # [HALF, BLOCK_D] x [BLOCK_D, ROWS]
    pending = warpgroup_mma(k_tiles.index(second + ME), q2_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    # [HALF, ROWS] x [ROWS, BLOCK_D]; dS is read from shared memory, where it lies for dQ: registers have no room for it
    dk1_pending = warpgroup_mma(ds_tiles.index(slot * 4 + ME), q1_tiles.index(stage), dk1, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(pending,))
    left, right = halves(scores)
    ds_left, p_left = _second_branch(left, pleft, dleft, smem, stage, 0, low, high, scale, config, MASKED)
    ds_right, p_right = _second_branch(right, pright, dright, smem, stage, 1, low, high, scale, config, MASKED)
    ds2 = whole(ds_left, ds_right, scores_layout)
    p = whole(p_left, p_right, dv_operand)
    # [HALF, ROWS] x [ROWS, BLOCK_DV]
    dv_pending = warpgroup_mma(p, smem.do.index(stage), dv, is_async=True)
    ds_tiles.index(slot * 4 + 2 + ME).store(ds2)
    fence_async_shared()
    mbarrier.arrive(bars.ds_full.index(slot * 2 + 1), count=1)
    if SHARED_K:
        dk1_pending = warpgroup_mma(ds_tiles.index(slot * 4 + 2 + ME), q2_tiles.index(stage), dk1_pending, is_async=True)
    else:
        dk2_pending = warpgroup_mma(ds_tiles.index(slot * 4 + 2 + ME), q2_tiles.index(stage), dk2, is_async=True)
    mbarrier.wait(bars.ds_full.index(slot * 2 + ME), slot_phase)
    width: gl.constexpr = dk1.shape[1]
    dq = gl.zeros([ROWS, width], gl.float32, product_layout(width))
    for half in gl.static_range(2):
        # [ROWS, HALF] x [HALF, BLOCK_D]
        dq = warpgroup_mma(ds_tiles.index(slot * 4 + ME * 2 + half).permute((1, 0)), k_tiles.index(second * ME + half), dq,
                           use_acc=half > 0, is_async=True)
    if SHARED_K:
        dv, dk1, p = warpgroup_mma_wait(1, deps=(dv_pending, dk1_pending, p))
    else:
        dv, dk1, dk2, p = warpgroup_mma_wait(1, deps=(dv_pending, dk1_pending, dk2_pending, p))
    mbarrier.arrive(bars.step_empty.index(stage), count=1)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    add_to(dq_tile, dq)
    if not LAST:  # only now, because the scores need the registers of dQ
        scores = _first_scores(smem, bars, step + 1, config, ME)
    return scores, dk1, dk2, dv


@gluon.jit
def branch_tiles(dtype: gl.constexpr, KEYS_OF: gl.constexpr, JOINT: gl.constexpr, config):
    """Shared of both branches. KEYS_OF: how many branches have keys, one or two. JOINT: a step's queries of both branches lie in one
    buffer, as neighbouring columns of scores, and dQ goes through shared memory. Otherwise each branch's queries have their own buffer,
    because reading both from one takes more registers, which would be spilled."""
    if JOINT:
        q = shared_tiles(dtype, 2 * config.STAGES, ROWS, config.WIDTH)
    else:
        q = shared_tiles(dtype, config.STAGES, ROWS, config.WIDTH), shared_tiles(dtype, config.STAGES, ROWS, config.WIDTH)
    do = shared_tiles(dtype, config.STAGES, ROWS, config.VALUE_WIDTH)
    k, v = shared_tiles(dtype, 2 * KEYS_OF, HALF, config.WIDTH), shared_tiles(dtype, 2, HALF, config.VALUE_WIDTH)
    if JOINT:
        ds, dq = shared_tiles(dtype, 4, HALF, 2 * ROWS), shared_tiles(gl.float32, 2, 128, 32)
    else:
        ds, dq = shared_tiles(dtype, 8, HALF, ROWS), ()  # of two steps, both branches and both consumers
    return Shared(q=q, do=do, k=k, v=v, ds=ds, dq=dq, out=shared_tiles(dtype, 2, HALF, 64),
                  stats=shared_tiles(gl.float32, 2 * config.STAGES, 1, STATS), columns=column_numbers(ROWS), work=tile_words())


class Own(NamedTuple):
    dq: Any  # both branches' float32 dQ
    dk2_desc: Any  # None where the branches share their keys
    dk2_ptr: Any


@gluon.jit
def _start(own, smem, slot, config):
    """INIT_GRADS: (dK1, dK2, dV, place in a branch's dQ)."""
    dk2 = 0
    if own.dk2_desc is not None:
        dk2 = gl.zeros([HALF, config.WIDTH], gl.float32, product_layout(config.WIDTH))
    dk1, dv = pair_start(own, smem, slot, config)
    return dk1, dk2, dv, word(smem.work, slot, "dq_tile").to(gl.int64) * (ROWS * config.WIDTH)


@gluon.jit
def _mainloop(state, at, bounds, low, high, own, slot, smem, bars, dq_desc, problem, scale, config, ME: gl.constexpr):
    """MAINLOOP: the first branch's scores are computed one step ahead, except for those of a head's first step."""
    dk1, dk2, dv, dq_place = state
    begin, full_begin, full_end, end = bounds
    dq_tile = own.dq[ME] + dq_place
    if end > begin:
        for _ in range(problem.group):
            scores = _first_scores(smem, bars, at, config, ME)
            before = at - begin
            segments = (begin, gl.maximum(gl.minimum(full_begin, end - 1), begin), gl.maximum(gl.minimum(full_end, end - 1), begin),
                        end - 1, end)
            for segment in gl.static_range(4):
                if segment != 2 or config.HAS_LEFT:
                    for i in range(segments[segment], segments[segment + 1]):
                        scores, dk1, dk2, dv = _step(
                            scores, dk1, dk2, dv, smem, bars, dq_tile + i * (ROWS * config.WIDTH), before + i, scale, low - i * ROWS,
                            high - i * ROWS, config, ME, own.dk2_desc is None, segment != 1, segment == 3)
            at = before + end
            dq_tile += problem.head_tiles * (ROWS * config.WIDTH)
    return (dk1, dk2, dv), at


@gluon.jit
def _store(grads, own, buffer, state, dk_scale, batch, kv_head, first_k, row, len_k, number, config, ME: gl.constexpr):
    """STORE_GRADS. grads: of the first branch and the values."""
    dk1, dk2, dv = state
    pair_store(grads, own, buffer, (dk1, dv), dk_scale, batch, kv_head, first_k, row, len_k, number, config, ME)
    if own.dk2_desc is not None:
        store_keys(own.dk2_desc, own.dk2_ptr, grads.stride_dk, grads.stride_dk_head, buffer, (dk2 * dk_scale).to(buffer.dtype), batch,
                   kv_head, first_k, row, len_k, config.HEAD_DIM, config.PACKED)


@gluon.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "kv_heads", "head_group", "head_tiles",
                              "n_tiles"],
           do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def differential_bwd_hopper_kernel(q1_desc, q2_desc, do_desc, k1_desc, k2_desc, v_desc, stats_desc, q1_tail_desc, q2_tail_desc,
                                   do_tail_desc, k1_tail_desc, k2_tail_desc, v_tail_desc, dk1_desc, dk2_desc, dv_desc, dk1_ptr, dk2_ptr,
                                   dv_ptr, dq1_ptr, dq2_ptr, counter, cu_seqlens_q, cu_seqlens_k, softmax_scale, scale, window_left,
                                   window_right, n_seqs, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles, n_tiles,
                                   HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
                                   PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, STAGES: gl.constexpr,
                                   REGISTERS: gl.constexpr):
    """k2, dk2 and their tails are None where the branches share their keys."""
    config = Config(HEAD_DIM=HEAD_DIM, VALUE_DIM=VALUE_DIM, WIDTH=BLOCK_D, VALUE_WIDTH=BLOCK_DV, ROWS=ROWS, STAGES=STAGES, PACKED=PACKED,
                    HAS_LEFT=HAS_LEFT, HAS_RIGHT=HAS_RIGHT, LOAD_Q=load_queries_apart, LOAD_K=load_keys, INIT_GRADS=_start,
                    MAINLOOP=_mainloop, STORE_GRADS=_store)
    smem = branch_tiles(q1_desc.dtype, 1 if k2_desc is None else 2, False, config)
    bars = Barriers(*step_barriers(STAGES, 2, 2), barriers(4, 2), (), (), ())
    run_pair(Source(Branches(q1_desc, q2_desc, do_desc, k1_desc, k2_desc, v_desc),
                    Branches(q1_tail_desc, q2_tail_desc, do_tail_desc, k1_tail_desc, k2_tail_desc, v_tail_desc), stats_desc),
             Gradients(dk1_desc, dv_desc, dk1_ptr, dv_ptr, kv_heads * HEAD_DIM, kv_heads * VALUE_DIM, HEAD_DIM, VALUE_DIM), smem, bars,
             None, None,
             Problem(counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles, n_tiles,
                     window_left, window_right), Own((dq1_ptr, dq2_ptr), dk2_desc, dk2_ptr), scale, softmax_scale, REGISTERS, 24, config)
