"""Row statistics of differential attention's Hopper backward, in plain Triton; it also clears what the walk adds to."""

import triton
import triton.language as tl

from attnzoo_kernels._triton.tiles import tile_source
from attnzoo_kernels.flash.hopper_rows import program_tile_of_queries


@triton.jit(do_not_specialize=["stride_stats", "n_seqs", "seqlen", "heads", "stride_lb", "stride_ls", "stride_lh"],
            do_not_specialize_on_alignment=["lam_ptr", "stats_ptr", "r_ptr", "cu_seqlens"])
def differential_bwd_rows_kernel(out_ptr, out2_ptr, do_ptr, lam_ptr, stats_ptr, row_stats_ptr, dq1_ptr, dq2_ptr, r_ptr, counter_ptr,
                                 cu_seqlens, stride_ob, stride_os, stride_oh, stride_dob, stride_dos, stride_doh, stride_lb, stride_ls,
                                 stride_lh, stride_stats, n_seqs, seqlen, heads, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                                 BLOCK_DV: tl.constexpr, PACKED: tl.constexpr, STATS: tl.constexpr, BLOCK: tl.constexpr):
    """[2, STATS] of each tile: LSE in base 2 (+inf where a row sees no key, or is none) and delta of the first path, both of the second,
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
    tl.store(r_ptr + lse_index, r, mask=inside)
    row_stats = row_stats_ptr + tile * (2 * STATS) + tl.arange(0, BLOCK)
    for path in tl.static_range(2):
        top = tl.load(stats_ptr + 2 * path * stride_stats + lse_index, mask=inside, other=float("inf"))
        log_norm = tl.load(stats_ptr + (2 * path + 1) * stride_stats + lse_index, mask=inside, other=0.0)
        tl.store(row_stats + 2 * path * BLOCK, tl.where(top == float("inf"), top, top + log_norm))
    tl.store(row_stats + BLOCK, delta)
    tl.store(row_stats + 3 * BLOCK, r)
    tl.store(row_stats + 4 * BLOCK, lam)
    empty = tile * (BLOCK * BLOCK_D) + tl.arange(0, BLOCK * BLOCK_D)
    tl.store(dq1_ptr + empty, tl.zeros([BLOCK * BLOCK_D], tl.float32))
    tl.store(dq2_ptr + empty, tl.zeros([BLOCK * BLOCK_D], tl.float32))
    if tl.program_id(0) == 0:
        tl.store(counter_ptr, 0)


@triton.jit(do_not_specialize=["n_rows", "seqlen", "heads", "stride_lb", "stride_ls", "stride_lh"],
            do_not_specialize_on_alignment=["lam_ptr", "r_ptr"])
def differential_bwd_paths_kernel(out_ptr, out2_ptr, do_ptr, lam_ptr, out1_ptr, do2_ptr, r_ptr, stride_dob, stride_dos, stride_doh,
                                  stride_lb, stride_ls, stride_lh, n_rows, seqlen, heads, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
                                  BLOCK: tl.constexpr):
    """What the paths' softmaxes would have given and got by themselves: out1 = out + lambda out2, do2 = -lambda dO; and r = rowsum(dO *
    out2). All but dO contiguous, a row for each token and head."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head, i, batch = row % heads, row // heads % seqlen, row // heads // seqlen
    columns = tl.arange(0, BLOCK_DV)
    inside = row < n_rows
    mask = inside[:, None] & (columns < VALUE_DIM)[None, :]
    place = row[:, None] * VALUE_DIM + columns
    # [BLOCK, BLOCK_DV]
    do_rows = batch * stride_dob + i * stride_dos + head * stride_doh
    do = tl.load(do_ptr + do_rows[:, None] + columns, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + place, mask=mask, other=0.0).to(tl.float32)
    out2 = tl.load(out2_ptr + place, mask=mask, other=0.0).to(tl.float32)
    lam = tl.load(lam_ptr + batch * stride_lb + i * stride_ls + head * stride_lh, mask=inside, other=0.0)
    tl.store(out1_ptr + place, (out + lam[:, None] * out2).to(out1_ptr.dtype.element_ty), mask=mask)
    tl.store(do2_ptr + place, (-lam[:, None] * do).to(do2_ptr.dtype.element_ty), mask=mask)
    tl.store(r_ptr + row, tl.sum(out2 * do, 1), mask=inside)
