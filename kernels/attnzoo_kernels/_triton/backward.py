"""The backward in two kernels, each of which recomputes the weights: one makes dQ by tiles of queries, one dK and dV by tiles of keys.

This takes two more products than one fused loop, but no atomic additions, so every gradient repeats bit by bit. The kernel for dQ runs
first and stores the statistics of each row of queries (RowStats) for the second kernel. They are padded to whole tiles (maximum +inf,
delta 0), so that the second kernel reads them without a mask.

With weights P, scores S and dP = dO Vᵀ, which the code calls dweights:
    delta = rowsum(dO * O) - dLSE      dS = P * (dP - delta)      dQ = scale * dS K      dK = scale * dSᵀ Q      dV = Pᵀ dO
"""

import triton
import triton.language as tl

from attnzoo_kernels._triton.forward import products_only
from attnzoo_kernels._triton.mainloop import (
    KeyTile,
    QueryTile,
    RowStats,
    load_gradients,
    load_keys,
    load_query_rows,
    load_values,
    masked,
    window_seen,
)
from attnzoo_kernels._triton.softmax import add_dot, repeat_weights, score_dot
from attnzoo_kernels._triton.tiles import (
    in_registers,
    key_rows,
    load_own,
    load_rows,
    other_rows,
    own_rows,
    row_places,
    store_own,
    store_rows,
)

STATS_BLOCK = 128  # a sequence's row statistics begin at a multiple of this; dQ tiles' rows divide it, dK/dV tiles' rows divide dQ's


@triton.jit
def first_stats_row(head, seq, first_q, n_seqs, seqlen_q, heads, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """Where the row statistics of a sequence and head begin: at a multiple of BLOCK (STATS_BLOCK). Those of packed sequences have a place
    for each of find_tile's slots."""
    if PACKED:
        slots = seqlen_q // BLOCK + n_seqs + 1
        first = (head.to(tl.int64) * slots + first_q // BLOCK + seq) * BLOCK
    else:
        first = (seq * heads + head).to(tl.int64) * (tl.cdiv(seqlen_q, BLOCK) * BLOCK)
    return first


@triton.jit
def row_delta(out_rows, do, row, WIDTH: tl.constexpr):
    """rowsum(dO * O) of the rows from `row` on; do [BLOCK_M, BLOCK_DV] are these rows of dO."""
    o = load_rows(out_rows, row, WIDTH, do.shape[0], do.shape[1], True, False)
    return tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)


@triton.jit
def transposed_dot(keys, queries, PRECISION: tl.constexpr):
    """keys queriesᵀ. In float32 it is computed as (queries keysᵀ)ᵀ, which equals the other kernels' products to the last bit."""
    if PRECISION == "ieee":
        products = tl.trans(score_dot(queries, keys, PRECISION))
    else:
        products = score_dot(keys, queries, PRECISION)
    return products


@triton.jit
def nothing_dropped(x, own, weights, dweights, at, TRANSPOSED: tl.constexpr):
    """DROP without dropout: (the weights that multiplied V in the forward, the gradients of the weights)."""
    return weights, dweights


@triton.jit
def softmax_gradient(weights, dweights, delta):
    """GRADIENT of a softmax: the gradients of the scores, from those of the weights."""
    return weights * (dweights - delta)


@triton.jit
def repeated(q, k, stats, x, own, at, position, edge, MASKED: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr = products_only,
             WEIGHTS: tl.constexpr = repeat_weights, ROW_BIAS: tl.constexpr = False):
    """(the forward's weights for a tile of keys k [BLOCK_N, BLOCK_D], computed again; SCORE's derivative)."""
    PRECISION: tl.constexpr = x.shape.PRECISION
    # [BLOCK_M, BLOCK_N]
    products = score_dot(q, k, PRECISION)
    j = at + tl.arange(0, x.shape.BLOCK_N)[None, :]
    scores, row_bias, derivative = SCORE(x, own, products, x.i, j, x.place.row)
    base = stats.lse_log2[:, None]
    if ROW_BIAS:
        base += row_bias
    weights = WEIGHTS(scores, x.unit, base, stats.row_sum[:, None], PRECISION == "ieee")
    return masked(weights, 0.0, x, own, x.i, j, position, edge, MASKED, MASK), derivative


@triton.jit
def no_sums(x, own, dscores, at):
    """SUMS where dS is needed for dQ only."""


@triton.jit
def add_dq(dq, exact_delta, weights, dweights, derivative, k, stats, x, EXACT_DELTA: tl.constexpr,
           GRADIENT: tl.constexpr = softmax_gradient, own=None, at=0, SUMS: tl.constexpr = no_sums):
    """Adds a tile of keys to dq_step's state and returns the new state."""
    if EXACT_DELTA == "residual":
        exact_delta += tl.sum((weights * (dweights - stats.delta[:, None])).to(exact_delta.dtype), 1)
    elif EXACT_DELTA:
        exact_delta += tl.sum(weights * dweights, 1)
    dscores = GRADIENT(weights, dweights, stats.delta[:, None]) * derivative
    SUMS(x, own, dscores, at)
    # [BLOCK_M, BLOCK_D]
    return add_dot(dscores.to(k.dtype), k, dq, x.shape.PRECISION), exact_delta


@triton.jit
def dq_step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr, MASK: tl.constexpr = window_seen,
            SCORE: tl.constexpr = products_only, DROP: tl.constexpr = nothing_dropped, WEIGHTS: tl.constexpr = repeat_weights,
            GRADIENT: tl.constexpr = softmax_gradient, ROW_BIAS: tl.constexpr = False, SUMS: tl.constexpr = no_sums):
    """Adds one tile of keys to the state: (dQ without the softmax scale [BLOCK_M, BLOCK_D], exact_delta [BLOCK_M]).

    exact_delta is used under x.EXACT_DELTA only: rowsum(P * dP), or, if that is "residual", rowsum(P * (dP - delta)). SUMS is a hook for
    other sums of a tile of dS, which are not part of the state.
    """
    dq, exact_delta = state
    k = load_keys(x, x.key_rows, at, GUARD)
    v = load_values(x, at, GUARD)
    # [BLOCK_M, BLOCK_N]
    weights, derivative = repeated(x.q, k, x.stats, x, own, at, position, edge, MASKED, MASK, SCORE, WEIGHTS, ROW_BIAS)
    dweights = score_dot(x.do, v, x.shape.PRECISION)
    _, dweights = DROP(x, own, weights, dweights, at, False)
    return add_dq(dq, exact_delta, weights, dweights, derivative, k, x.stats, x, x.EXACT_DELTA, GRADIENT, own, at, SUMS)


@triton.jit
def pass_on_softmax(stats_ptr, stride_stats, at, row_stats, stride_rows, inside, kept, PRECISION: tl.constexpr):
    """lse_log2 and row_sum of a tile's rows, from softmax_stats. In the rows `kept` they are also stored to the row statistics."""
    lse_log2 = tl.load(stats_ptr + at, mask=inside, other=float("inf"))
    row_sum = tl.load(stats_ptr + stride_stats + at, mask=inside, other=1.0)
    if PRECISION == "ieee":
        tl.store(row_stats + 2 * stride_rows, row_sum, mask=kept)
    else:
        lse_log2 += row_sum
    tl.store(row_stats, lse_log2, mask=kept)
    return lse_log2, row_sum


@triton.jit
def store_scaled(rows, dq, softmax_scale, place, own, shape):
    """FINISH of dQ: stores it times the softmax scale."""
    store_rows(rows, dq * softmax_scale, place.row, shape.HEAD_DIM, shape.BLOCK_M, shape.BLOCK_D)


@triton.jit
def backward_dq(place, queries, keys, values, out, grads, dq_out, grad_lse_ptr, stats_ptr, delta_ptr, row_stats_ptr, stride_stats,
                stride_rows, unit, softmax_scale, own, n_seqs, seqlen_q, heads, group, shape, LOOPS: tl.constexpr,
                HAS_GRAD_LSE: tl.constexpr, EXACT_DELTA: tl.constexpr, STATS_BLOCK: tl.constexpr, FINISH: tl.constexpr = store_scaled,
                stats_end=None, REFINED: tl.constexpr = False, STATISTICS: tl.constexpr = True, TWICE: tl.constexpr = False):
    """The whole program for dQ of one tile of queries. LOOPS(state, x, own) returns dq_step's last state. The program stores the rows'
    statistics, and FINISH stores dQ. A program without a tile does nothing.

    EXACT_DELTA: delta is also computed as rowsum(P * dP) - dLSE, which is free of O's rounding error, and is stored at delta_ptr, laid out
        as the LSE is. If it is "residual" (for float32 under REFINED only), rowsum(dS) - dLSE is stored; float32 adds it up in float64.
    stats_end: the first row whose statistics another program stores, for tiles that may end before BLOCK_M rows. Loads then stop at the
        tile's end, too.
    REFINED: in float32, delta is rowsum(dO * O) plus the sum of the residuals. This stays exact over many tiles, and where weights do not
        quite add up to one.
    STATISTICS: False for a rule whose weights depend on one score each; it has no statistics and needs no O.
    TWICE: 16-bit inputs go over the keys twice, as float32 does.
    """
    if place.row >= place.length:
        return
    PRECISION: tl.constexpr = shape.PRECISION
    i, lse_at, inside = row_places(place, place.head, seqlen_q, heads, shape.BLOCK_M, shape.PACKED)
    k_rows, v_rows = key_rows(keys, values, place, group, shape.TMA)
    # [BLOCK_M, BLOCK_DV]
    do = load_rows(own_rows(grads, place, shape.TMA), place.row, shape.VALUE_DIM, shape.BLOCK_M, shape.BLOCK_DV,
                   not shape.TMA or stats_end is not None, shape.TMA)
    grad_lse = tl.zeros([shape.BLOCK_M], tl.float32)
    lse_log2 = grad_lse
    row_sum = grad_lse
    delta = grad_lse
    if STATISTICS:
        delta = row_delta(own_rows(out, place, False), do, place.row, shape.VALUE_DIM)
        if HAS_GRAD_LSE:
            grad_lse = tl.load(grad_lse_ptr + lse_at, mask=inside, other=0.0).to(tl.float32)
            delta -= grad_lse
        row_stats = row_stats_ptr + first_stats_row(place.head, place.sequence, place.first, n_seqs, seqlen_q, heads, shape.PACKED,
                                                    STATS_BLOCK) + i
        lse_log2, row_sum = pass_on_softmax(stats_ptr, stride_stats, lse_at, row_stats, stride_rows, inside,
                                            None if stats_end is None else i < stats_end, PRECISION)
    # [BLOCK_M, BLOCK_D]
    q = load_own(queries, place, shape.HEAD_DIM, shape.BLOCK_M, shape.BLOCK_D, shape.TMA)
    if shape.TMA:
        do = in_registers(do)  # this saves shared memory, so that a second program fits on the multiprocessor

    exact_delta = tl.zeros([shape.BLOCK_M], tl.float32)
    # float32 goes over the keys twice. The first sweep sums delta from the same weights and in the same order as dS, so that the row sums
    # of dS cancel exactly. With rowsum(dO * O), which is summed in another order, they would not.
    SWEEPS: tl.constexpr = 2 if (PRECISION == "ieee" or TWICE) and STATISTICS else 1
    for sweep in tl.static_range(SWEEPS):
        if sweep == 1:
            delta = delta + (exact_delta - grad_lse).to(tl.float32) if REFINED else exact_delta - grad_lse
        state = (tl.zeros([shape.BLOCK_M, shape.BLOCK_D], tl.float32),
                 tl.zeros([shape.BLOCK_M], tl.float64 if EXACT_DELTA == "residual" and PRECISION == "ieee" else tl.float32))
        dq, exact_delta = LOOPS(state, QueryTile(q, do, RowStats(lse_log2, row_sum, delta), k_rows, v_rows, place,
                                                 place.row + tl.arange(0, shape.BLOCK_M)[:, None], unit, shape,
                                                 "residual" if REFINED and PRECISION == "ieee" and sweep == 0 else
                                                 EXACT_DELTA or PRECISION == "ieee" and STATISTICS,
                                                 sweep == SWEEPS - 1), own)
    if STATISTICS:
        tl.store(row_stats + stride_rows, delta, mask=None if stats_end is None else i < stats_end)
    FINISH(own_rows(dq_out, place, False), dq, softmax_scale, place, own, shape)
    if EXACT_DELTA == "residual" or EXACT_DELTA:
        tl.store(delta_ptr + lse_at, exact_delta - grad_lse, mask=inside)


@triton.jit
def load_row_stats(row_stats, stride_rows, at, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr):
    """The RowStats of BLOCK_M queries from `at` on."""
    lanes = tl.arange(0, BLOCK_M)
    lse_log2 = tl.load(row_stats + at + lanes)
    delta = tl.load(row_stats + stride_rows + at + lanes)
    row_sum = 1.0
    if PRECISION == "ieee":
        row_sum = tl.load(row_stats + 2 * stride_rows + at + lanes)
    return RowStats(lse_log2, row_sum, delta)


@triton.jit
def load_queries(x, own, at, GUARD: tl.constexpr):
    """LOAD_Q: queries at .. at + BLOCK_M, [BLOCK_M, BLOCK_D]."""
    return load_query_rows(x, x.query_rows, at, GUARD)


@triton.jit
def load_stats(x, own, at):
    """LOAD_STATS: the RowStats of these queries."""
    return load_row_stats(x.row_stats, x.stride_rows, at, x.shape.BLOCK_M, x.shape.PRECISION)


@triton.jit
def repeated_transposed(k, q, stats, x, own, at, position, edge, MASKED: tl.constexpr, MASK: tl.constexpr,
                        SCORE: tl.constexpr = products_only, WEIGHTS: tl.constexpr = repeat_weights, ROW_BIAS: tl.constexpr = False,
                        FROM_STATS: tl.constexpr = False):
    """(the forward's weights for a tile of queries, computed again, transposed [BLOCK_N, BLOCK_M]; SCORE's derivative)."""
    PRECISION: tl.constexpr = x.shape.PRECISION
    i = at + tl.arange(0, x.shape.BLOCK_M)[None, :]
    if FROM_STATS:
        products = tl.dot(k, tl.trans(q), tl.broadcast_to((stats.lse_log2 * (-1 / x.unit))[None, :], [x.shape.BLOCK_N, x.shape.BLOCK_M]))
    else:
        products = transposed_dot(k, q, PRECISION)
    scores, row_bias, derivative = SCORE(x, own, products, i, x.j, x.place.row)
    base = stats.lse_log2[None, :]
    if ROW_BIAS:
        base += row_bias
    if FROM_STATS:
        weights = tl.exp2(scores * x.unit)
    else:
        weights = WEIGHTS(scores, x.unit, base, stats.row_sum[None, :] if PRECISION == "ieee" else 1.0, PRECISION == "ieee")
    return masked(weights, 0.0, x, own, i, x.j, position, edge, MASKED, MASK), derivative


@triton.jit
def dkdv_step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr, MASK: tl.constexpr,
              SCORE: tl.constexpr = products_only, DROP: tl.constexpr = nothing_dropped, WEIGHTS: tl.constexpr = repeat_weights,
              GRADIENT: tl.constexpr = softmax_gradient, ROW_BIAS: tl.constexpr = False, FROM_STATS: tl.constexpr = False,
              LOAD_Q: tl.constexpr = load_queries, LOAD_STATS: tl.constexpr = load_stats, COLUMN_SUMS: tl.constexpr = False):
    """Adds one tile of queries to the state: (dK without the softmax scale [BLOCK_N, BLOCK_D], dV [BLOCK_N, BLOCK_DV]). Tiles of scores are
    transposed, keys by queries.

    FROM_STATS: the accumulators of both products begin with minus the row statistics, which then take no registers. This needs a SCORE that
        leaves the products unchanged.
    COLUMN_SUMS: the state has a third sum, of dS for each key [BLOCK_N], the gradient of a bias by key. It keeps the dtype of its initial
        value.
    """
    dk, dv = state[0], state[1]
    q = LOAD_Q(x, own, at, GUARD)
    do = load_gradients(x, at, GUARD)
    stats = LOAD_STATS(x, own, at)
    # [BLOCK_N, BLOCK_M]
    weights, derivative = repeated_transposed(x.k, q, stats, x, own, at, position, edge, MASKED, MASK, SCORE, WEIGHTS, ROW_BIAS,
                                              FROM_STATS)
    if FROM_STATS:
        dweights = tl.dot(x.v, tl.trans(do), tl.broadcast_to(-stats.delta[None, :], [x.shape.BLOCK_N, x.shape.BLOCK_M]))
    else:
        dweights = transposed_dot(x.v, do, x.shape.PRECISION)
    kept, dweights = DROP(x, own, weights, dweights, at, True)
    # [BLOCK_N, BLOCK_DV]
    dv = add_dot(kept.to(do.dtype), do, dv, x.shape.PRECISION)
    dscores = (weights * dweights if FROM_STATS else GRADIENT(weights, dweights, stats.delta[None, :])) * derivative
    # [BLOCK_N, BLOCK_D]
    dk = add_dot(dscores.to(q.dtype), q, dk, x.shape.PRECISION)
    return (dk, dv, state[2] + tl.sum(dscores.to(state[2].dtype), 1)) if COLUMN_SUMS else (dk, dv)


@triton.jit
def add_members(state, k, v, place, queries, grads, row_stats_ptr, stride_rows, unit, own, n_seqs, seqlen_q, heads, group, members, shape,
                LOOPS: tl.constexpr, STATS_BLOCK: tl.constexpr):
    """dkdv_step's state after the first `members` of the `group` query heads of a key head. LOOPS(state, x, own) adds one query head."""
    for member in range(members):
        head = place.head * group + member
        q_rows = other_rows(queries, place, head, shape.TMA)
        do_rows = other_rows(grads, place, head, shape.TMA)
        row_stats = row_stats_ptr + first_stats_row(head, place.sequence, place.other_first, n_seqs, seqlen_q, heads, shape.PACKED,
                                                    STATS_BLOCK)
        state = LOOPS(state, KeyTile(k, v, q_rows, do_rows, row_stats, stride_rows, place, head,
                                     place.row + tl.arange(0, shape.BLOCK_N)[:, None], unit, shape), own)
    return state


@triton.jit
def backward_dkdv(place, queries, keys, values, grads, dk_out, dv_out, row_stats_ptr, stride_rows, unit, softmax_scale, keep_prob, own,
                  n_seqs, seqlen_q, heads, group, shape, LOOPS: tl.constexpr, STATS_BLOCK: tl.constexpr, third=None,
                  FINISH: tl.constexpr = None):
    """The whole program for dK and dV of one tile of keys: goes over all query heads of the group and stores dK and dV. A program without a
    tile does nothing.

    third: the initial value of a third sum, if there is one. FINISH(sum, softmax_scale, own, place, shape) stores that sum.
    """
    if place.row >= place.length:
        return
    # [BLOCK_N, BLOCK_D]
    k = load_own(keys, place, shape.HEAD_DIM, shape.BLOCK_N, shape.BLOCK_D, shape.TMA)
    # [BLOCK_N, BLOCK_DV]
    v = load_own(values, place, shape.VALUE_DIM, shape.BLOCK_N, shape.BLOCK_DV, shape.TMA)
    state = (tl.zeros([shape.BLOCK_N, shape.BLOCK_D], tl.float32), tl.zeros([shape.BLOCK_N, shape.BLOCK_DV], tl.float32))
    if third is not None:
        state = (state[0], state[1], third)
    state = add_members(state, k, v, place, queries, grads, row_stats_ptr, stride_rows, unit, own, n_seqs, seqlen_q, heads, group,
                        group, shape, LOOPS, STATS_BLOCK)
    store_own(dk_out, state[0] * softmax_scale, place, shape.HEAD_DIM, shape.BLOCK_N, shape.BLOCK_D)
    store_own(dv_out, state[1] / keep_prob, place, shape.VALUE_DIM, shape.BLOCK_N, shape.BLOCK_DV)
    if FINISH is not None:
        FINISH(state[2], softmax_scale, own, place, shape)
