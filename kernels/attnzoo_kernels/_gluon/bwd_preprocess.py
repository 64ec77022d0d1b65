"""What runs before a Hopper backward's mainloop, in plain Triton: it computes row statistics, clears the float32 dQ if its sums have no
order, and makes the tails, which are copies of the ends of packed sequences."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo_kernels._triton.softmax import LOG2E
from attnzoo_kernels._triton.tiles import Operand, find_tile, sequence_rows


class RowTile(NamedTuple):
    """A program's rows row .. row + BLOCK of a head of a sequence."""

    batch: Any
    head: Any
    row: Any
    first: Any  # first token of its sequence
    length: Any
    number: Any  # number of the tile among all tiles of dQ and of row statistics


@triton.jit
def program_tile_of_queries(cu_seqlens, n_seqs, seqlen, heads, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """This program's RowTile. Programs of the same rows and different heads follow each other."""
    head = tl.program_id(0) % heads
    number = tl.program_id(0) // heads
    if PACKED:
        _, tile, first, length, _, _ = find_tile(cu_seqlens, cu_seqlens, number, n_seqs, seqlen, BLOCK)
        batch = tl.cast(0, tl.int64)
        place = head.to(tl.int64) * (seqlen // BLOCK + n_seqs + 1) + number
    else:
        tiles = tl.cdiv(seqlen, BLOCK)
        tile = number % tiles
        first, length = 0, seqlen
        batch = (number // tiles).to(tl.int64)
        place = (batch * heads + head) * tiles + tile
    return RowTile(batch, head, tile * BLOCK, first, length, place)


@triton.jit
def load_tile(operand, tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """A RowTile in float32, [BLOCK, COLUMNS], zero beyond WIDTH and the sequence's end."""
    rows = tile.row + tl.arange(0, BLOCK)
    columns = tl.arange(0, COLUMNS)
    mask = (rows < tile.length)[:, None] & (columns < WIDTH)[None, :]
    i = (tile.first + rows).to(tl.int64)[:, None]
    pointers = operand.source + tile.batch * operand.stride_batch + tile.head * operand.stride_head + i * operand.stride_row + columns
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def statistics_of(tile, seqlen, heads, BLOCK: tl.constexpr):
    """(where the statistics of a RowTile's rows lie, which rows are inside the sequence)."""
    rows = tile.row + tl.arange(0, BLOCK)
    return (tile.batch * heads + tile.head) * seqlen + tile.first + rows, rows < tile.length


@triton.jit
def clear(sums_ptr, number, SIZE: tl.constexpr):
    """Sets the number-th tile of SIZE float32 sums to zero."""
    PIECE: tl.constexpr = SIZE & -SIZE  # the largest power of two that divides SIZE
    empty = tl.arange(0, PIECE)
    for n in tl.static_range(SIZE // PIECE):
        tl.store(sums_ptr + number * SIZE + n * PIECE + empty, tl.zeros([PIECE], tl.float32))


@triton.jit
def load_softmax(stats_ptr, stride_stats, index, inside):
    """The forward's row maxima (+inf for a row that sees no key or does not exist) and logarithms of row sums, in base 2."""
    row_max = tl.load(stats_ptr + index, mask=inside, other=float("inf"))
    return row_max, tl.load(stats_ptr + stride_stats + index, mask=inside, other=0.0)


@triton.jit
def lse_log2(row_max, log_sum):
    """The LSE in base 2 from load_softmax; +inf for a row that sees no key or does not exist."""
    return tl.where(row_max == float("inf"), row_max, row_max + log_sum)


@triton.jit
def store_dsinks(sinks_ptr, dsinks_ptr, tile, delta, row_max, log_sum):
    """Stores a RowTile's share of the gradient of its head's sink: minus the sum of the sink's weight times delta. The sum is taken in
    float64, because the rows of a head nearly cancel."""
    # sink * log2(e) is rounded as in the forward, where it may be the row maximum; the fma with zero keeps the compiler from fusing the
    # product with the subtraction
    sink = tl.fma(tl.load(sinks_ptr + tile.head).to(tl.float32), LOG2E, 0.0)
    weight = tl.exp2(sink - row_max - log_sum)
    tl.store(dsinks_ptr + tile.number, -tl.sum(weight.to(tl.float64) * delta.to(tl.float64)))


@triton.jit
def reset(counter_ptr, semaphore_ptr, tile, SEMAPHORES: tl.constexpr):
    """Sets the counter of key tiles and a tile's dQ semaphores to zero."""
    if tl.program_id(0) == 0:
        tl.store(counter_ptr, 0)
    for n in tl.static_range(SEMAPHORES):
        tl.store(semaphore_ptr + tile * SEMAPHORES + n, 0)


@triton.jit
def write_statistics(out, residual_ptr, grads, stats_ptr, grad_lse_ptr, row_stats_ptr, sinks_ptr, dsinks_ptr, tile, stride_stats, seqlen,
                     heads, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, HAS_GRAD_LSE: tl.constexpr, BLOCK: tl.constexpr,
                     RESIDUAL: tl.constexpr, DSINKS: tl.constexpr):
    """Stores [2, BLOCK] of a RowTile: the LSE in base 2 (+inf for a row that sees no key or does not exist) and delta = rowsum(dO * O) -
    dLSE. RESIDUAL: O's rounding error is at residual_ptr, laid out as O is. DSINKS: the tile's share of the gradient of its head's sink is
    stored, too."""
    out_tile = load_tile(out, tile, VALUE_DIM, BLOCK, WIDTH)
    if RESIDUAL:
        residual = Operand(residual_ptr, out.stride_batch, out.stride_row, out.stride_head)
        out_tile += load_tile(residual, tile, VALUE_DIM, BLOCK, WIDTH)
    delta = tl.sum(out_tile * load_tile(grads, tile, VALUE_DIM, BLOCK, WIDTH), 1)
    at, inside = statistics_of(tile, seqlen, heads, BLOCK)
    if HAS_GRAD_LSE:
        delta -= tl.load(grad_lse_ptr + at, mask=inside, other=0.0)
    place = row_stats_ptr + tile.number * (2 * BLOCK) + tl.arange(0, BLOCK)
    row_max, log_sum = load_softmax(stats_ptr, stride_stats, at, inside)
    tl.store(place, lse_log2(row_max, log_sum))
    tl.store(place + BLOCK, delta)
    if DSINKS:
        store_dsinks(sinks_ptr, dsinks_ptr, tile, delta, row_max, log_sum)


@triton.jit
def clear_tile(dq_ptr, tile, own, SIZE: tl.constexpr):
    """CLEAR where dQ has one buffer."""
    clear(dq_ptr, tile.number, SIZE)


@triton.jit(do_not_specialize=["stride_stats", "n_seqs", "seqlen", "heads", "own_1", "own_2", "own_3", "own_4"],
            do_not_specialize_on_alignment=["stats_ptr", "grad_lse_ptr", "sinks_ptr", "semaphore_ptr", "cu_seqlens"])
def bwd_preprocess_kernel(out_ptr, residual_ptr, do_ptr, stats_ptr, grad_lse_ptr, row_stats_ptr, sinks_ptr, dsinks_ptr, dq_ptr,
                          counter_ptr, semaphore_ptr, cu_seqlens, stride_ob, stride_os, stride_oh, stride_dob, stride_dos, stride_doh,
                          stride_stats, n_seqs, seqlen, heads, own_1, own_2, own_3, own_4, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
                          PACKED: tl.constexpr, SEMAPHORES: tl.constexpr, HAS_GRAD_LSE: tl.constexpr, BLOCK: tl.constexpr,
                          STATISTICS: tl.constexpr = True, CLEAR: tl.constexpr = clear_tile, RESIDUAL: tl.constexpr = False,
                          DSINKS: tl.constexpr = False, DQ_WIDTH: tl.constexpr = None):
    """Stores a tile's statistics, if rows have any. CLEAR(dq_ptr, tile, own, size of a tile) sets dQ to zero; it is None where the first
    key tile overwrites dQ. The arguments that begin with own_ are passed to CLEAR. DQ_WIDTH: columns of dQ, where they are not WIDTH."""
    tile = program_tile_of_queries(cu_seqlens, n_seqs, seqlen, heads, PACKED, BLOCK)
    if STATISTICS:
        write_statistics(Operand(out_ptr, stride_ob, stride_os, stride_oh), residual_ptr,
                         Operand(do_ptr, stride_dob, stride_dos, stride_doh), stats_ptr, grad_lse_ptr, row_stats_ptr, sinks_ptr, dsinks_ptr,
                         tile, stride_stats, seqlen, heads, VALUE_DIM, WIDTH, HAS_GRAD_LSE, BLOCK, RESIDUAL, DSINKS)
    if CLEAR is not None:
        CLEAR(dq_ptr, tile, (own_1, own_2, own_3, own_4), BLOCK * (WIDTH if DQ_WIDTH is None else DQ_WIDTH))
    reset(counter_ptr, semaphore_ptr, tile.number, SEMAPHORES)


@triton.jit
def copy_tail(x_ptr, tails_ptr, cu_seqlens, stride_xs, stride_xh, sequence, head, n_seqs, seqlen, heads, DIM: tl.constexpr,
              WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copies the last, partial tile of a head of a packed sequence, filled up with zeros, into (sequences + 1, BLOCK, heads, WIDTH)."""
    first, end = sequence_rows(cu_seqlens, sequence, n_seqs, seqlen)
    r = tl.arange(0, BLOCK)
    c = tl.arange(0, WIDTH)
    rows = first + (end - first) // BLOCK * BLOCK + r
    mask = (rows < end)[:, None] & (c < DIM)[None, :]
    # [BLOCK, WIDTH]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride_xs + head * stride_xh + c[None, :], mask=mask, other=0.0)
    tl.store(tails_ptr + ((sequence.to(tl.int64) * BLOCK + r) * heads + head)[:, None] * WIDTH + c[None, :], x)


@triton.jit(do_not_specialize=["n_seqs", "heads"], do_not_specialize_on_alignment=["cu_seqlens"])
def bwd_tails_kernel(x_ptr, tails_ptr, cu_seqlens, stride_xs, stride_xh, n_seqs, seqlen, heads, DIM: tl.constexpr,
                     WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copies the last, partial tile of each packed sequence, filled up with zeros, into (sequences + 1, BLOCK, heads, WIDTH)."""
    copy_tail(x_ptr, tails_ptr, cu_seqlens, stride_xs, stride_xh, tl.program_id(0) // heads, tl.program_id(0) % heads, n_seqs, seqlen,
              heads, DIM, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["n_seqs", "seqlen_q", "seqlen_k", "heads", "kv_heads"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def bwd_all_tails_kernel(q_ptr, k_ptr, v_ptr, do_ptr, q_tails, k_tails, v_tails, do_tails, cu_seqlens_q, cu_seqlens_k, stride_qs,
                         stride_qh, stride_ks, stride_kh, stride_vs, stride_vh, stride_dos, stride_doh, n_seqs, seqlen_q, seqlen_k, heads,
                         kv_heads, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                         KEYS: tl.constexpr):
    """bwd_tails_kernel for q, k, v and dO in one launch: three more launches would take longer than the copies."""
    sequence = tl.program_id(0) // (2 * (heads + kv_heads))
    head = tl.program_id(0) % (2 * (heads + kv_heads))
    if head < heads:
        copy_tail(q_ptr, q_tails, cu_seqlens_q, stride_qs, stride_qh, sequence, head, n_seqs, seqlen_q, heads, HEAD_DIM, WIDTH, ROWS)
    elif head < 2 * heads:
        copy_tail(do_ptr, do_tails, cu_seqlens_q, stride_dos, stride_doh, sequence, head - heads, n_seqs, seqlen_q, heads, VALUE_DIM,
                  WIDTH, ROWS)
    elif head < 2 * heads + kv_heads:
        copy_tail(k_ptr, k_tails, cu_seqlens_k, stride_ks, stride_kh, sequence, head - 2 * heads, n_seqs, seqlen_k, kv_heads, HEAD_DIM,
                  WIDTH, KEYS)
    else:
        copy_tail(v_ptr, v_tails, cu_seqlens_k, stride_vs, stride_vh, sequence, head - 2 * heads - kv_heads, n_seqs, seqlen_k, kv_heads,
                  VALUE_DIM, WIDTH, KEYS)
