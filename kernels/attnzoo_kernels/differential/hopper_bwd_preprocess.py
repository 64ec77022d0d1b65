"""Row statistics of differential attention's Hopper backward, in plain Triton; it also clears what the mainloop adds to."""

import triton
import triton.language as tl

from attnzoo_kernels._gluon.bwd_preprocess import clear, load_softmax, load_tile, lse_log2, program_tile_of_queries, reset, statistics_of
from attnzoo_kernels._triton.tiles import Operand, tile_source


@triton.jit
def _lambda(lam, tile, inside, BLOCK: tl.constexpr):
    rows = tile_source(lam.source, tile.batch, tile.head, tile.first, lam.stride_batch, lam.stride_row, lam.stride_head, False)
    return tl.load(rows + (tile.row + tl.arange(0, BLOCK)).to(tl.int64) * lam.stride_row, mask=inside, other=0.0)


@triton.jit
def _load_pair(out_ptr, out2_ptr, offsets, mask):
    """Both branches' outputs in float32."""
    return tl.load(out_ptr + offsets, mask=mask, other=0.0).to(tl.float32), tl.load(out2_ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_lse(row_stats, apart, stats_ptr, stride_stats, at, inside):
    """Stores both branches' LSE in base 2 (+inf for a row that sees no key or does not exist) to the row statistics. apart: the distance
    between the two in memory. Returns the second one."""
    for branch in tl.static_range(2):
        row_max, log_sum = load_softmax(stats_ptr + 2 * branch * stride_stats, stride_stats, at, inside)
        lse = lse_log2(row_max, log_sum)
        tl.store(row_stats + branch * apart, lse)
    return lse


@triton.jit
def _store_r(r_ptr, at, r, lse, inside):
    """Stores r, the gradient of -lambda. It is zero in rows that see no key, whatever dO is after the last sequence."""
    tl.store(r_ptr + at, tl.where(lse == float("inf"), 0.0, r), mask=inside)


@triton.jit(do_not_specialize=["stride_stats", "n_seqs", "seqlen", "heads", "stride_lb", "stride_ls", "stride_lh"],
            do_not_specialize_on_alignment=["lam_ptr", "stats_ptr", "r_ptr", "cu_seqlens"])
def differential_bwd_preprocess_kernel(out_ptr, out2_ptr, do_ptr, lam_ptr, stats_ptr, row_stats_ptr, dq1_ptr, dq2_ptr, r_ptr, counter_ptr,
                                 cu_seqlens, stride_ob, stride_os, stride_oh, stride_dob, stride_dos, stride_doh, stride_lb, stride_ls,
                                 stride_lh, stride_stats, n_seqs, seqlen, heads, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                                 BLOCK_DV: tl.constexpr, PACKED: tl.constexpr, STATS: tl.constexpr, BLOCK: tl.constexpr,
                                 DQ_TILE: tl.constexpr):
    """Stores [2, STATS] for each tile: LSE and delta of the first branch, LSE and delta of the second, and lambda."""
    tile = program_tile_of_queries(cu_seqlens, n_seqs, seqlen, heads, PACKED, BLOCK)
    at, inside = statistics_of(tile, seqlen, heads, BLOCK)
    # [BLOCK, BLOCK_DV]
    do = load_tile(Operand(do_ptr, stride_dob, stride_dos, stride_doh), tile, VALUE_DIM, BLOCK, BLOCK_DV)
    columns = tl.arange(0, BLOCK_DV)
    i = (tile.first + (tile.row + tl.arange(0, BLOCK))).to(tl.int64)[:, None]
    out, out2 = _load_pair(out_ptr, out2_ptr, tile.batch * stride_ob + tile.head * stride_oh + i * stride_os + columns,
                           inside[:, None] & (columns < VALUE_DIM)[None, :])
    lam = _lambda(Operand(lam_ptr, stride_lb, stride_ls, stride_lh), tile, inside, BLOCK)
    r = tl.sum(out2 * do, 1)
    delta = tl.sum(out * do, 1) + lam * r
    row_stats = row_stats_ptr + tile.number * (2 * STATS) + tl.arange(0, BLOCK)
    _store_r(r_ptr, at, r, _store_lse(row_stats, 2 * BLOCK, stats_ptr, stride_stats, at, inside), inside)
    tl.store(row_stats + BLOCK, delta)
    tl.store(row_stats + 3 * BLOCK, r)
    tl.store(row_stats + 4 * BLOCK, lam)
    empty = tile.number * DQ_TILE + tl.arange(0, BLOCK * BLOCK_D)
    tl.store(dq1_ptr + empty, tl.zeros([BLOCK * BLOCK_D], tl.float32))
    tl.store(dq2_ptr + empty, tl.zeros([BLOCK * BLOCK_D], tl.float32))
    reset(counter_ptr, None, tile.number, 0)


@triton.jit(do_not_specialize=["stride_stats", "n_seqs", "seqlen", "heads", "stride_lb", "stride_ls", "stride_lh", "n_tiles"],
            do_not_specialize_on_alignment=["lam_ptr", "stats_ptr", "r_ptr", "cu_seqlens"])
def differential_bwd_preprocess_by_branch_kernel(
    out_ptr, out2_ptr, do_ptr, lam_ptr, stats_ptr, do2_ptr, row_stats_ptr, dq_ptr, r_ptr, counter_ptr, cu_seqlens, stride_ob, stride_os,
    stride_oh, stride_dob, stride_dos, stride_doh, stride_lb, stride_ls, stride_lh, stride_stats, n_seqs, seqlen, heads, n_tiles,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_TILES: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Stores, for each branch and WIDTH columns of the values, a softmax's [2, BLOCK] statistics of each tile. It also stores do2 = -lambda
    dO, the output gradient of the second branch's softmax, and r = rowsum(dO * out2)."""
    tile = program_tile_of_queries(cu_seqlens, n_seqs, seqlen, heads, PACKED, BLOCK)
    at, inside = statistics_of(tile, seqlen, heads, BLOCK)
    i = (tile.first + (tile.row + tl.arange(0, BLOCK))).to(tl.int64)[:, None]
    lam = _lambda(Operand(lam_ptr, stride_lb, stride_ls, stride_lh), tile, inside, BLOCK)
    r = tl.zeros([BLOCK], tl.float32)
    for n in tl.static_range(VALUE_TILES):
        columns = n * WIDTH + tl.arange(0, WIDTH)
        mask = inside[:, None] & (columns < VALUE_DIM)[None, :]
        offsets = tile.batch * stride_ob + tile.head * stride_oh + i * stride_os + columns
        # [BLOCK, WIDTH]
        do = tl.load(do_ptr + tile.batch * stride_dob + tile.head * stride_doh + i * stride_dos + columns, mask=mask, other=0.0)
        do = do.to(tl.float32)
        out, out2 = _load_pair(out_ptr, out2_ptr, offsets, mask)
        do2 = (-lam[:, None] * do).to(do2_ptr.dtype.element_ty)
        tl.store(do2_ptr + offsets, do2, mask=mask)
        of_columns = tl.sum(out2 * do, 1)
        r += of_columns
        row_stats = row_stats_ptr + (n * n_tiles + tile.number) * (2 * BLOCK) + tl.arange(0, BLOCK)
        tl.store(row_stats + BLOCK, tl.sum(out * do, 1) + lam * of_columns)
        tl.store(row_stats + (VALUE_TILES * n_tiles * 2 + 1) * BLOCK, tl.sum(out2 * do2.to(tl.float32), 1))
        lse = _store_lse(row_stats, VALUE_TILES * n_tiles * 2 * BLOCK, stats_ptr, stride_stats, at, inside)
    _store_r(r_ptr, at, r, lse, inside)
    clear(dq_ptr, tile.number, BLOCK * WIDTH)
    if tl.program_id(0) == 0:
        tl.store(counter_ptr + tl.arange(0, 8 * VALUE_TILES), 0)
