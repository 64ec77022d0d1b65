"""The forward: a program has one tile of queries, goes over the keys, and accumulates O, the row maxima and the row sums."""

import triton
import triton.language as tl

from attnzoo_kernels._triton.mainloop import QueryTile, masked
from attnzoo_kernels._triton.softmax import add_dot, log_sum_exp, rescaled, score_dot, softmax_stats, softmax_weights
from attnzoo_kernels._triton.tiles import Operand, in_registers, key_rows, load_rows, own_rows, row_places, store_own


@triton.jit
def products_only(x, own, products, i, j, at):
    """SCORE where scores are the products: (scores, row_bias, derivative).

    row_bias is subtracted from all scores of a row, in the softmax's units; it is used under ROW_BIAS only. derivative is that of a score
    by its product.
    """
    return products, 0.0, 1.0


@triton.jit
def nothing_dropped(x, own, weights, at):
    """DROP where there is no dropout."""
    return weights


@triton.jit
def load_sequence(own, rows, at, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr, GUARD: tl.constexpr,
                  TMA: tl.constexpr):
    """LOAD where a sequence's rows lie one after the other."""
    return load_rows(rows, at, WIDTH, BLOCK, BLOCK_WIDTH, GUARD, TMA)


@triton.jit
def scored(q, k, x, own, at, position, edge, MASKED: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr = products_only):
    """(scores of a tile of keys k [BLOCK_N, BLOCK_D], -inf where masked; SCORE's row_bias)."""
    # [BLOCK_M, BLOCK_N]
    products = score_dot(q, k, x.shape.PRECISION)
    j = at + tl.arange(0, x.shape.BLOCK_N)[None, :]
    scores, row_bias, _ = SCORE(x, own, products, x.i, j, at)
    return masked(scores, -float("inf"), x, own, x.i, j, position, edge, MASKED, MASK), row_bias


@triton.jit
def forward_step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr, MASK: tl.constexpr,
                 SCORE: tl.constexpr = products_only, DROP: tl.constexpr = nothing_dropped, WEIGHTS: tl.constexpr = softmax_weights,
                 LAGS: tl.constexpr = True, ROW_BIAS: tl.constexpr = False, BY_WARP: tl.constexpr = False,
                 SUMS_LAST: tl.constexpr = False, LOAD: tl.constexpr = load_sequence):
    """Adds one tile of keys to the state: (O before the division by row sums [BLOCK_M, BLOCK_DV], row maxima, row sums).

    LAGS: see softmax_weights. ROW_BIAS: SCORE's row_bias is used. BY_WARP: see `rescaled`. SUMS_LAST: row sums are updated after the
    values' load, which is faster only under dropout with wide values.
    """
    acc, row_max, row_sum = state
    # [BLOCK_N, BLOCK_D]
    k = LOAD(own, x.key_rows, at, x.shape.HEAD_DIM, x.shape.BLOCK_N, x.shape.BLOCK_D, GUARD, x.shape.TMA)
    # [BLOCK_M, BLOCK_N]
    scores, row_bias = scored(x.q, k, x, own, at, position, edge, MASKED, MASK, SCORE)
    weights, new_max, rescale = WEIGHTS(scores, row_max, x.unit, MASKED != "none", x.shape.PRECISION == "ieee", LAGS,
                                        row_bias.reshape(x.shape.BLOCK_M) if ROW_BIAS else None)
    if not SUMS_LAST:
        row_sum = row_sum * rescale + tl.sum(weights, 1)
    kept = DROP(x, own, weights, at)
    acc = rescaled(acc, rescale, new_max, row_max, BY_WARP)  # before the values are needed
    # [BLOCK_N, BLOCK_DV]
    v = LOAD(own, x.value_rows, at, x.shape.VALUE_DIM, x.shape.BLOCK_N, x.shape.BLOCK_DV, GUARD, x.shape.TMA)
    if SUMS_LAST:
        row_sum = row_sum * rescale + tl.sum(weights, 1)
    # [BLOCK_M, BLOCK_DV]
    acc = add_dot(kept.to(v.dtype), v, acc, x.shape.PRECISION)
    return acc, new_max, row_sum


@triton.jit
def empty_softmax(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """(accumulator, row maxima, row sums) of a softmax that has no key yet."""
    return tl.zeros([ROWS, WIDTH], tl.float32), tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def softmax_state(sink, shape):
    """The state of forward_step before the first key. sink: the attention sink's score, which has no value; -inf if there is none."""
    row_max = tl.zeros([shape.BLOCK_M], tl.float32) + sink
    row_sum = tl.where(row_max == -float("inf"), 0.0, 1.0)
    return tl.zeros([shape.BLOCK_M, shape.BLOCK_DV], tl.float32), row_max, row_sum


@triton.jit
def normalised(acc, row_sum, keep_prob, PRECISION: tl.constexpr):
    """acc [M, N] / (row_sum [M] * keep_prob). Rows whose sum is zero give zeros."""
    divisor = (tl.where(row_sum > 0, row_sum, 1.0) * keep_prob)[:, None]
    return tl.div_rn(acc, tl.broadcast_to(divisor, acc.shape)) if PRECISION == "ieee" else acc * (1.0 / divisor)


@triton.jit
def load_first_operand(q_rows, row, shape, Q_REGISTERS: tl.constexpr, Q_SELECT: tl.constexpr):
    """A tile of queries, [BLOCK_M, BLOCK_D]. Q_REGISTERS: it is an operand in registers, not in shared memory. Q_SELECT: it passes through
    a select on its way there."""
    q = load_rows(q_rows, row, shape.HEAD_DIM, shape.BLOCK_M, shape.BLOCK_D, not shape.TMA or Q_SELECT, shape.TMA)
    if shape.TMA and Q_REGISTERS and not Q_SELECT:
        q = in_registers(q)
    return q


@triton.jit
def forward(place, queries, keys, values, out, lse_ptr, stats_ptr, stride_stats, unit, keep_prob, own, seqlen_q, heads, group, shape,
            LOOPS: tl.constexpr, Q_REGISTERS: tl.constexpr, Q_SELECT: tl.constexpr, STATISTICS: tl.constexpr = True,
            LSE_BIAS: tl.constexpr = None, CHECKED: tl.constexpr = True, RESIDUAL: tl.constexpr = False, residual_ptr=None):
    """The whole program for one tile of queries. LOOPS(x, own) returns forward_step's last state. The program stores O, the LSE and the
    statistics for the backward.

    Q_REGISTERS, Q_SELECT: see load_first_operand.
    STATISTICS: False for a rule whose weights depend on one score each, such as a sigmoid. Rows are then not divided by their sums, and
        only O is stored.
    LSE_BIAS(place, own, rows): a term of all scores of a row that SCORE left out; it is added to the LSE of the rows [BLOCK_M].
    CHECKED: a program may have no tile.
    RESIDUAL: O's rounding error is stored at residual_ptr, laid out as O is.
    """
    if CHECKED:
        if place.row >= place.length:
            return
    PRECISION: tl.constexpr = shape.PRECISION
    q_rows = own_rows(queries, place, shape.TMA)
    k_rows, v_rows = key_rows(keys, values, place, group, shape.TMA)
    q = load_first_operand(q_rows, place.row, shape, Q_REGISTERS, Q_SELECT)
    i = place.row + tl.arange(0, shape.BLOCK_M)[:, None]
    acc, row_max, row_sum = LOOPS(QueryTile(q, None, None, k_rows, v_rows, place, i, unit, shape, False), own)

    if STATISTICS:
        acc = normalised(acc, row_sum, keep_prob, PRECISION)
    store_own(out, acc, place, shape.VALUE_DIM, shape.BLOCK_M, shape.BLOCK_DV)
    if STATISTICS:
        i, at, inside = row_places(place, place.head, seqlen_q, heads, shape.BLOCK_M, shape.PACKED)
        store_softmax(lse_ptr, stats_ptr, stride_stats, at, inside, row_max, row_sum, PRECISION,
                      lse_bias=None if LSE_BIAS is None else LSE_BIAS(place, own, i))
    if RESIDUAL:
        residual = Operand(residual_ptr, out.stride_batch, out.stride_row, out.stride_head)
        store_own(residual, acc - acc.to(out.source.dtype.element_ty).to(tl.float32), place, shape.VALUE_DIM, shape.BLOCK_M, shape.BLOCK_DV)


@triton.jit
def store_softmax(lse_ptr, stats_ptr, stride_stats, at, inside, row_max, row_sum, PRECISION: tl.constexpr, SAVE: tl.constexpr = True,
                  lse_bias=None):
    """Stores the LSE and, under SAVE, the softmax_stats of a tile's rows. lse_bias: added to row_max in the LSE only."""
    tl.store(lse_ptr + at, log_sum_exp(row_max if lse_bias is None else row_max + lse_bias, row_sum, PRECISION == "ieee"), mask=inside)
    if SAVE:
        row_max, sum_stat = softmax_stats(row_max, row_sum, PRECISION == "ieee")
        tl.store(stats_ptr + at, row_max, mask=inside)
        tl.store(stats_ptr + stride_stats + at, sum_stat, mask=inside)
