"""What frames the Hopper backward's walk, in plain Triton: row statistics, an empty float32 dQ (where sums have no order) and the ends of
packed sequences before it, dQ in 16 bits behind it.

The float32 dQ lies in tiles of 64 or 128 queries, each 64 of them in the order in which the threads of a matrix product hold them.
"""

import triton
import triton.language as tl

from attnzoo_kernels._triton.tiles import find_tile


@triton.jit
def program_tile_of_queries(cu_seqlens, n_seqs, seqlen, heads, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """(batch, head, first row, first token and length of its sequence, number of the tile in memory) of this program; programs of all heads
    of the same rows follow each other."""
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
    return batch, head, tile * BLOCK, first, length, place


@triton.jit
def write_statistics(out_ptr, do_ptr, stats_ptr, grad_lse_ptr, row_stats_ptr, batch, head, row, first, length, tile, stride_ob, stride_os,
                     stride_oh, stride_dob, stride_dos, stride_doh, stride_stats, seqlen, heads, VALUE_DIM: tl.constexpr,
                     WIDTH: tl.constexpr, HAS_GRAD_LSE: tl.constexpr, BLOCK: tl.constexpr):
    """[2, BLOCK] of a tile: the LSE in base 2 (+inf where a row sees no key, or is none), delta = rowsum(dO * O) - dLSE."""
    rows = row + tl.arange(0, BLOCK)
    columns = tl.arange(0, WIDTH)
    inside = rows < length
    mask = inside[:, None] & (columns < VALUE_DIM)[None, :]
    i = (first + rows).to(tl.int64)[:, None]
    # [BLOCK, WIDTH]
    out = tl.load(out_ptr + batch * stride_ob + head * stride_oh + i * stride_os + columns, mask=mask, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + batch * stride_dob + head * stride_doh + i * stride_dos + columns, mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(out * do, 1)
    lse_index = (batch * heads + head) * seqlen + first + rows
    if HAS_GRAD_LSE:
        delta -= tl.load(grad_lse_ptr + lse_index, mask=inside, other=0.0)
    top = tl.load(stats_ptr + lse_index, mask=inside, other=float("inf"))
    log_norm = tl.load(stats_ptr + stride_stats + lse_index, mask=inside, other=0.0)
    place = row_stats_ptr + tile * (2 * BLOCK) + tl.arange(0, BLOCK)
    tl.store(place, tl.where(top == float("inf"), top, top + log_norm))
    tl.store(place + BLOCK, delta)


@triton.jit(do_not_specialize=["stride_stats", "n_seqs", "seqlen", "heads"],
            do_not_specialize_on_alignment=["stats_ptr", "grad_lse_ptr", "turns_ptr", "cu_seqlens"])
def flash_bwd_rows_kernel(out_ptr, do_ptr, stats_ptr, grad_lse_ptr, row_stats_ptr, dq_ptr, counter_ptr, turns_ptr, cu_seqlens, stride_ob,
                          stride_os, stride_oh, stride_dob, stride_dos, stride_doh, stride_stats, n_seqs, seqlen, heads,
                          VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, TURNS: tl.constexpr,
                          HAS_GRAD_LSE: tl.constexpr, BLOCK: tl.constexpr):
    batch, head, row, first, length, tile = program_tile_of_queries(cu_seqlens, n_seqs, seqlen, heads, PACKED, BLOCK)
    write_statistics(out_ptr, do_ptr, stats_ptr, grad_lse_ptr, row_stats_ptr, batch, head, row, first, length, tile, stride_ob, stride_os,
                     stride_oh, stride_dob, stride_dos, stride_doh, stride_stats, seqlen, heads, VALUE_DIM, WIDTH, HAS_GRAD_LSE, BLOCK)
    if TURNS == 0:  # else the first key tile in turn writes
        empty = tl.arange(0, BLOCK * WIDTH)
        tl.store(dq_ptr + tile * (BLOCK * WIDTH) + empty, tl.zeros([BLOCK * WIDTH], tl.float32))
    if tl.program_id(0) == 0:
        tl.store(counter_ptr, 0)
    for n in tl.static_range(TURNS):
        tl.store(turns_ptr + tile * TURNS + n, 0)


@triton.jit
def by_rows(held, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """[BLOCK * WIDTH] in the order of registers as [BLOCK, WIDTH]."""
    # halves of 64 rows, 8 columns, 16 rows, row of 8, pair of columns, half of 16 rows, column of a pair
    held = tl.reshape(held, [BLOCK // 64, WIDTH // 8, 4, 8, 4, 2, 2])
    return tl.reshape(tl.permute(held, [0, 2, 5, 3, 1, 4, 6]), [BLOCK, WIDTH])


@triton.jit
def _write_dq(sum_ptr, dq_ptr, batch, head, row, first, length, tile, written, stride_dqb, stride_dqs, stride_dqh, softmax_scale,
              HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One tile in 16 bits; zeros if it was not written."""
    r = tl.arange(0, BLOCK)
    c = tl.arange(0, WIDTH)
    held = tl.load(sum_ptr + tile * (BLOCK * WIDTH) + tl.arange(0, BLOCK * WIDTH), mask=written, other=0.0) * softmax_scale
    dq = by_rows(held.to(dq_ptr.dtype.element_ty), BLOCK, WIDTH)
    rows = dq_ptr + batch * stride_dqb + head * stride_dqh + (first + row + r).to(tl.int64)[:, None] * stride_dqs
    tl.store(rows + c, dq, mask=(row + r < length)[:, None] & (c < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["n_seqs", "seqlen", "heads"], do_not_specialize_on_alignment=["cu_seqlens"])
def flash_bwd_dq_rows_kernel(sum_ptr, dq_ptr, cu_seqlens, stride_dqb, stride_dqs, stride_dqh, softmax_scale, n_seqs, seqlen, heads,
                             HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    batch, head, row, first, length, tile = program_tile_of_queries(cu_seqlens, n_seqs, seqlen, heads, PACKED, BLOCK)
    _write_dq(sum_ptr, dq_ptr, batch, head, row, first, length, tile, True, stride_dqb, stride_dqs, stride_dqh, softmax_scale, HEAD_DIM,
              WIDTH, BLOCK)


@triton.jit(do_not_specialize=["n_seqs", "seqlen", "heads"], do_not_specialize_on_alignment=["turns_ptr", "cu_seqlens"])
def flash_bwd_ordered_dq_rows_kernel(sum_ptr, turns_ptr, dq_ptr, cu_seqlens, stride_dqb, stride_dqs, stride_dqh, softmax_scale, n_seqs,
                                     seqlen, heads, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,
                                     BLOCK: tl.constexpr):
    """Where no key tile took its turn, the sum was never written."""
    batch, head, row, first, length, tile = program_tile_of_queries(cu_seqlens, n_seqs, seqlen, heads, PACKED, BLOCK)
    written = tl.load(turns_ptr + tile) > 0
    _write_dq(sum_ptr, dq_ptr, batch, head, row, first, length, tile, written, stride_dqb, stride_dqs, stride_dqh, softmax_scale, HEAD_DIM,
              WIDTH, BLOCK)


@triton.jit(do_not_specialize=["n_seqs", "heads"], do_not_specialize_on_alignment=["cu_seqlens"])
def flash_bwd_tails_kernel(x_ptr, tails_ptr, cu_seqlens, stride_xs, stride_xh, n_seqs, seqlen, heads, DIM: tl.constexpr,
                           WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The last, partial tile of each packed sequence with zeros behind its end, (sequences + 1, BLOCK, heads, WIDTH)."""
    sequence = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    first = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + tl.minimum(sequence + 1, n_seqs))
    end = tl.where(sequence == n_seqs, seqlen, end)
    r = tl.arange(0, BLOCK)
    c = tl.arange(0, WIDTH)
    rows = first + (end - first) // BLOCK * BLOCK + r
    mask = (rows < end)[:, None] & (c < DIM)[None, :]
    # [BLOCK, WIDTH]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride_xs + head * stride_xh + c[None, :], mask=mask, other=0.0)
    tl.store(tails_ptr + ((sequence.to(tl.int64) * BLOCK + r) * heads + head)[:, None] * WIDTH + c[None, :], x)
