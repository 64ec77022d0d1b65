"""What frames the Hopper backward's mainloop, in plain Triton: empty float32 dQs before it; behind it the sum of the stages' dQ, each
turned back from its frame, and dK turned back.

A float32 dQ lies in tiles of 64 or 128 queries, each 64 of them in the order in which the threads of a matrix product hold them.
"""

import triton
import triton.language as tl

from attnzoo_kernels._gluon.bwd_postprocess import by_rows
from attnzoo_kernels._gluon.bwd_preprocess import clear, program_tile_of_queries
from attnzoo_kernels.dual_chunk.rotation import load_angles, query_factor, rotate_pairs, scaled_gradient, stage_position, store_pairs


@triton.jit
def _has_copy(copy: tl.constexpr, position, chunk, near):
    """Whether a tile of queries from `position` on adds to this buffer of dQ."""
    if copy == 0:
        there = position == position
    elif copy == 1:
        there = (position >= chunk) & (position % chunk < near)
    else:
        there = (position >= 2 * chunk) | ((position >= chunk) & (position % chunk >= near))
    return there


@triton.jit
def clear_copies(dq_ptr, tile, own, SIZE: tl.constexpr):
    """CLEAR: what a tile's stages add to."""
    shift, chunk, near, copy_tiles = own
    for copy in tl.static_range(3):
        if _has_copy(copy, tile.row + shift, chunk, near):
            clear(dq_ptr, tile.number + copy * copy_tiles, SIZE)


@triton.jit(do_not_specialize=["n_seqs", "seqlen", "heads", "shift", "chunk", "top", "far", "near", "copy_tiles"],
            do_not_specialize_on_alignment=["multiplier", "cu_seqlens"])
def dual_chunk_bwd_postprocess_dq_kernel(sum_ptr, dq_ptr, cos, sin, multiplier, cu_seqlens, stride_dqb, stride_dqs, stride_dqh, stride_mb,
                                         softmax_scale, n_seqs, seqlen, heads, shift, chunk, top, far, near, copy_tiles,
                                         HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr,
                                         PACKED: tl.constexpr, HAS_MULTIPLIER: tl.constexpr, BLOCK: tl.constexpr):
    batch, head, row, first_row, length, tile = program_tile_of_queries(cu_seqlens, n_seqs, seqlen, heads, PACKED, BLOCK)
    inside = ((row + shift) % chunk + chunk) % chunk + tl.arange(0, BLOCK)
    first = tl.zeros([BLOCK, WIDTH // 2], tl.float32)
    second = tl.zeros([BLOCK, WIDTH // 2], tl.float32)
    linear = tl.arange(0, BLOCK * WIDTH)
    for copy in tl.static_range(3):
        if _has_copy(copy, row + shift, chunk, near):
            x = tl.load(sum_ptr + (tile + copy * copy_tiles) * (BLOCK * WIDTH) + linear)
            a, b = tl.split(by_rows(x, BLOCK, WIDTH).reshape(BLOCK, WIDTH // 2, 2))
            c, s = load_angles(cos, sin, stage_position(copy, inside, chunk, top, far), ROTARY_DIM, WIDTH)
            a, b = rotate_pairs(a, b, c, -s)
            first += a
            second += b
    factor = query_factor(multiplier, batch, first_row, row, length, stride_mb, softmax_scale, HAS_MULTIPLIER, BLOCK)[:, None]
    rows = dq_ptr + batch * stride_dqb + head.to(tl.int64) * stride_dqh + tl.cast(first_row, tl.int64) * stride_dqs
    store_pairs(rows, scaled_gradient(first, factor), scaled_gradient(second, factor), row, length, stride_dqs, HEAD_DIM, ROTARY_DIM, BLOCK,
                WIDTH, INTERLEAVED)


@triton.jit(do_not_specialize=["n_seqs", "seqlen", "heads", "chunk"], do_not_specialize_on_alignment=["cu_seqlens"])
def dual_chunk_bwd_postprocess_dk_kernel(turned_ptr, dk_ptr, cos, sin, cu_seqlens, stride_tb, stride_ts, stride_th, stride_dkb, stride_dks,
                                         stride_dkh, n_seqs, seqlen, heads, chunk, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
                                         INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    batch, head, row, first, length, _ = program_tile_of_queries(cu_seqlens, n_seqs, seqlen, heads, PACKED, BLOCK)
    i = row + tl.arange(0, BLOCK)
    columns = tl.arange(0, WIDTH)
    mask = (i < length)[:, None] & (columns < HEAD_DIM)[None, :]
    rows = (first + i).to(tl.int64)[:, None] * stride_ts
    # [BLOCK, WIDTH]
    x = tl.load(turned_ptr + batch * stride_tb + head.to(tl.int64) * stride_th + rows + columns, mask=mask, other=0.0).to(tl.float32)
    a, b = tl.split(x.reshape(BLOCK, WIDTH // 2, 2))
    c, s = load_angles(cos, sin, i % chunk, ROTARY_DIM, WIDTH)
    a, b = rotate_pairs(a, b, c, -s)
    rows_ptr = dk_ptr + batch * stride_dkb + head.to(tl.int64) * stride_dkh + tl.cast(first, tl.int64) * stride_dks
    store_pairs(rows_ptr, a, b, row, length, stride_dks, HEAD_DIM, ROTARY_DIM, BLOCK, WIDTH, INTERLEAVED)
