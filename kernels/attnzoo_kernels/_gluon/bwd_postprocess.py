"""What follows a Hopper backward's mainloop, in plain Triton: the float32 dQ is scaled, rounded to 16 bits and stored row by row.

The float32 dQ lies in tiles of 64 or 128 queries, each 64 of them in register order, see `backward_dq`.
"""

import triton
import triton.language as tl

from attnzoo_kernels._gluon.bwd_preprocess import program_tile_of_queries


@triton.jit
def by_rows(x, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """x [BLOCK * WIDTH], in register order, as [BLOCK, WIDTH]."""
    # the dimensions: block of 64 rows, block of 8 columns, block of 16 rows, row of 8, pair of columns, half of the 16 rows, column of a
    # pair
    x = tl.reshape(x, [BLOCK // 64, WIDTH // 8, 4, 8, 4, 2, 2])
    return tl.reshape(tl.permute(x, [0, 2, 5, 3, 1, 4, 6]), [BLOCK, WIDTH])


@triton.jit(do_not_specialize=["n_seqs", "seqlen", "heads"], do_not_specialize_on_alignment=["semaphore_ptr", "cu_seqlens"])
def bwd_postprocess_kernel(sum_ptr, semaphore_ptr, dq_ptr, cu_seqlens, stride_dqb, stride_dqs, stride_dqh, softmax_scale, n_seqs, seqlen,
                           heads, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
                           ORDERED: tl.constexpr = False, SPACING: tl.constexpr = 1):
    """Stores dQ of a tile, which is every SPACING-th tile at sum_ptr. ORDERED: a sum is zero if its semaphore shows that no key tile took a
    turn, because then it was never written. WIDTH must be a power of two unless BLOCK is 64."""
    PIECE: tl.constexpr = WIDTH & -WIDTH  # columns of a piece: the largest power of two that divides WIDTH
    tl.static_assert(PIECE == WIDTH or BLOCK == 64)
    tile = program_tile_of_queries(cu_seqlens, n_seqs, seqlen, heads, PACKED, BLOCK)
    written = True
    if ORDERED:
        written = tl.load(semaphore_ptr + tile.number) > 0
    r = tl.arange(0, BLOCK)
    place = sum_ptr + tile.number * (SPACING * BLOCK * WIDTH) + tl.arange(0, BLOCK * PIECE)
    rows = dq_ptr + tile.batch * stride_dqb + tile.head * stride_dqh + (tile.first + tile.row + r).to(tl.int64)[:, None] * stride_dqs
    for n in tl.static_range(WIDTH // PIECE):
        c = n * PIECE + tl.arange(0, PIECE)
        dq = tl.load(place + n * (BLOCK * PIECE), mask=written, other=0.0) * softmax_scale
        dq = by_rows(dq.to(dq_ptr.dtype.element_ty), BLOCK, PIECE)
        tl.store(rows + c, dq, mask=(tile.row + r < tile.length)[:, None] & (c < HEAD_DIM)[None, :])
