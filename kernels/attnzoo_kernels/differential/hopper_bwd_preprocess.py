"""Row statistics of differential attention's Hopper backward, in plain Triton; it also clears what the mainloop adds to."""

import triton
import triton.language as tl

from attnzoo_kernels._gluon.bwd_preprocess import lse_log2, program_tile_of_queries
from attnzoo_kernels._triton.tiles import tile_source


@triton.jit(do_not_specialize=["stride_stats", "n_seqs", "seqlen", "heads", "stride_lb", "stride_ls", "stride_lh"],
            do_not_specialize_on_alignment=["lam_ptr", "stats_ptr", "r_ptr", "cu_seqlens"])
def differential_bwd_preprocess_kernel(out_ptr, out2_ptr, do_ptr, lam_ptr, stats_ptr, row_stats_ptr, dq1_ptr, dq2_ptr, r_ptr, counter_ptr,
                                 cu_seqlens, stride_ob, stride_os, stride_oh, stride_dob, stride_dos, stride_doh, stride_lb, stride_ls,
                                 stride_lh, stride_stats, n_seqs, seqlen, heads, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                                 BLOCK_DV: tl.constexpr, PACKED: tl.constexpr, STATS: tl.constexpr, BLOCK: tl.constexpr,
                                 DQ_TILE: tl.constexpr):
    """[2, STATS] of each tile: LSE in base 2 (+inf where a row sees no key, or is none) and delta of the first branch, both of the second,
    lambda; out2's rows times dO are also the gradient of -lambda."""
    batch, head, row, first, length, tile = program_tile_of_queries(cu_seqlens, n_seqs, seqlen, heads, PACKED, BLOCK)
    rows = row + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_DV)
    inside = rows < length
    mask = inside[:, None] & (columns < VALUE_DIM)[None, :]
    i = (first + rows).to(tl.int64)[:, None]
    # [BLOCK, BLOCK_DV]
    do = tl.load(do_ptr + batch * stride_dob + head * stride_doh + i * stride_dos + columns, mask=mask, other=0.0).to(tl.float32)
    place = batch * stride_ob + head * stride_oh + i * stride_os + columns
    out = tl.load(out_ptr + place, mask=mask, other=0.0).to(tl.float32)
    out2 = tl.load(out2_ptr + place, mask=mask, other=0.0).to(tl.float32)
    lam_rows = tile_source(lam_ptr, batch, head, first, stride_lb, stride_ls, stride_lh, False)
    lam = tl.load(lam_rows + rows.to(tl.int64) * stride_ls, mask=inside, other=0.0)
    r = tl.sum(out2 * do, 1)
    delta = tl.sum(out * do, 1) + lam * r
    lse_index = (batch * heads + head) * seqlen + first + rows
    row_stats = row_stats_ptr + tile * (2 * STATS) + tl.arange(0, BLOCK)
    for branch in tl.static_range(2):
        lse = lse_log2(stats_ptr + 2 * branch * stride_stats, stride_stats, lse_index, inside)
        tl.store(row_stats + 2 * branch * BLOCK, lse)
    # rows that see no key have none, whatever dO is behind the last sequence
    tl.store(r_ptr + lse_index, tl.where(lse == float("inf"), 0.0, r), mask=inside)
    tl.store(row_stats + BLOCK, delta)
    tl.store(row_stats + 3 * BLOCK, r)
    tl.store(row_stats + 4 * BLOCK, lam)
    empty = tile * DQ_TILE + tl.arange(0, BLOCK * BLOCK_D)
    tl.store(dq1_ptr + empty, tl.zeros([BLOCK * BLOCK_D], tl.float32))
    tl.store(dq2_ptr + empty, tl.zeros([BLOCK * BLOCK_D], tl.float32))
    if tl.program_id(0) == 0:
        tl.store(counter_ptr, 0)


@triton.jit(do_not_specialize=["stride_stats", "n_seqs", "seqlen", "heads", "stride_lb", "stride_ls", "stride_lh", "n_tiles"],
            do_not_specialize_on_alignment=["lam_ptr", "stats_ptr", "r_ptr", "cu_seqlens"])
def differential_bwd_preprocess_by_branch_kernel(
    out_ptr, out2_ptr, do_ptr, lam_ptr, stats_ptr, do2_ptr, row_stats_ptr, dq_ptr, r_ptr, counter_ptr, cu_seqlens, stride_ob, stride_os,
    stride_oh, stride_dob, stride_dos, stride_doh, stride_lb, stride_ls, stride_lh, stride_stats, n_seqs, seqlen, heads, n_tiles,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_TILES: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):
    """A softmax's [2, BLOCK] statistics of each tile, for each branch and WIDTH columns of the values; do2 = -lambda dO, what the second
    branch's softmax would have got by itself; r = rowsum(dO * out2)."""
    batch, head, row, first, length, tile = program_tile_of_queries(cu_seqlens, n_seqs, seqlen, heads, PACKED, BLOCK)
    rows = row + tl.arange(0, BLOCK)
    inside = rows < length
    i = (first + rows).to(tl.int64)[:, None]
    lam_rows = tile_source(lam_ptr, batch, head, first, stride_lb, stride_ls, stride_lh, False)
    lam = tl.load(lam_rows + rows.to(tl.int64) * stride_ls, mask=inside, other=0.0)
    lse_index = (batch * heads + head) * seqlen + first + rows
    r = tl.zeros([BLOCK], tl.float32)
    for n in tl.static_range(VALUE_TILES):
        columns = n * WIDTH + tl.arange(0, WIDTH)
        mask = inside[:, None] & (columns < VALUE_DIM)[None, :]
        place = batch * stride_ob + head * stride_oh + i * stride_os + columns
        # [BLOCK, WIDTH]
        do = tl.load(do_ptr + batch * stride_dob + head * stride_doh + i * stride_dos + columns, mask=mask, other=0.0).to(tl.float32)
        out = tl.load(out_ptr + place, mask=mask, other=0.0).to(tl.float32)
        out2 = tl.load(out2_ptr + place, mask=mask, other=0.0).to(tl.float32)
        do2 = (-lam[:, None] * do).to(do2_ptr.dtype.element_ty)
        tl.store(do2_ptr + place, do2, mask=mask)
        of_columns = tl.sum(out2 * do, 1)
        r += of_columns
        row_stats = row_stats_ptr + (n * n_tiles + tile) * (2 * BLOCK) + tl.arange(0, BLOCK)
        tl.store(row_stats + BLOCK, tl.sum(out * do, 1) + lam * of_columns)
        tl.store(row_stats + (VALUE_TILES * n_tiles * 2 + 1) * BLOCK, tl.sum(out2 * do2.to(tl.float32), 1))
        for branch in tl.static_range(2):
            lse = lse_log2(stats_ptr + 2 * branch * stride_stats, stride_stats, lse_index, inside)
            tl.store(row_stats + branch * VALUE_TILES * n_tiles * 2 * BLOCK, lse)
    # rows that see no key have none, whatever dO is behind the last sequence
    tl.store(r_ptr + lse_index, tl.where(lse == float("inf"), 0.0, r), mask=inside)
    tl.store(dq_ptr + tile * (BLOCK * WIDTH) + tl.arange(0, BLOCK * WIDTH), tl.zeros([BLOCK * WIDTH], tl.float32))
    if tl.program_id(0) == 0:
        tl.store(counter_ptr + tl.arange(0, 8 * VALUE_TILES), 0)
