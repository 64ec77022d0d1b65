"""Rotary positions inside the kernels, and the kernel that writes rotated copies of queries and keys.

Copies hold the channels of a pair side by side, 2c and 2c + 1, in both rotary styles. A rotation then combines neighbours only, which one
thread has in its registers. The half style is only another order of columns when q and k are loaded and their gradients are stored.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.call import Layout, layout, strides
from attnzoo_kernels._triton.launch import Launch, are_aligned, next_power_of_2, padded
from attnzoo_kernels._triton.tiles import program_tile
from attnzoo_kernels.dual_chunk.options import Extras, Options

ROTATE_ROWS = 64  # rows, counted over heads, that a program rotates
ROTATE_HEADS = 8  # heads among these that share the angles, if there are as many
REACH = tl.constexpr(256)  # largest number of queries of a tile


@triton.jit
def stage_position(copy, inside, chunk, top, far):
    """Rotary position of tokens `inside` their chunk in copy 0 (intra), 1 (successive) or 2 (inter)."""
    return tl.where(copy == 0, inside, tl.where(copy == 1, tl.minimum(inside + chunk, top), far))


@triton.jit
def load_angles(cos, sin, position, ROTARY_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Cosine and sine of each row's position and each pair, [BLOCK, BLOCK_D / 2]; no rotation beyond ROTARY_DIM."""
    pair = tl.arange(0, BLOCK_D // 2)
    index = position[:, None] * (ROTARY_DIM // 2) + pair[None, :]
    inside = (pair < ROTARY_DIM // 2)[None, :]
    return tl.load(cos + index, mask=inside, other=1.0), tl.load(sin + index, mask=inside, other=0.0)


@triton.jit
def _pair_columns(HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Where the first and second channel of each pair stand in the caller's tensors."""
    pair = tl.arange(0, BLOCK_D // 2)
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    elif ROTARY_DIM == HEAD_DIM:
        first, second = pair, pair + ROTARY_DIM // 2
    else:
        first = tl.where(pair < ROTARY_DIM // 2, pair, 2 * pair)
        second = tl.where(pair < ROTARY_DIM // 2, pair + ROTARY_DIM // 2, 2 * pair + 1)
    # bounds that are the same over a vector of channels, so that loads and stores may be vectors
    return first, second, pair < (HEAD_DIM + 1) // 2, pair < HEAD_DIM // 2


@triton.jit
def store_pairs(rows_ptr, a, b, row, end, stride_row, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK: tl.constexpr,
                BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Store first and second channels of rows row .. end, [BLOCK, BLOCK_D / 2] each, where the caller's tensors have them."""
    first, second, has_first, has_second = _pair_columns(HEAD_DIM, ROTARY_DIM, BLOCK_D, INTERLEAVED)
    inside = (row + tl.arange(0, BLOCK) < end)[:, None]
    pointers = rows_ptr + tl.cast(row, tl.int64) * stride_row + tl.arange(0, BLOCK)[:, None] * stride_row
    tl.store(pointers + first[None, :], a.to(rows_ptr.dtype.element_ty), mask=inside & has_first[None, :])
    tl.store(pointers + second[None, :], b.to(rows_ptr.dtype.element_ty), mask=inside & has_second[None, :])


@triton.jit
def rotate_pairs(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def turn_back(x, cos, sin, position, ROTARY_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rotates x [BLOCK, BLOCK_D], whose channels lie pair by pair, by minus the position's angles."""
    a, b = tl.split(x.reshape(BLOCK, BLOCK_D // 2, 2))
    c, s = load_angles(cos, sin, position, ROTARY_DIM, BLOCK_D)
    a, b = rotate_pairs(a, b, c, -s)
    return tl.join(a, b).reshape(BLOCK, BLOCK_D)


@triton.jit
def query_factor(multiplier_ptr, batch, first, row, end, stride_mb, scale, HAS_MULTIPLIER: tl.constexpr, BLOCK: tl.constexpr):
    """`scale` times each row's multiplier, [BLOCK]."""
    i = row + tl.arange(0, BLOCK)
    factor = tl.zeros([BLOCK], tl.float32) + scale
    if HAS_MULTIPLIER:
        factor *= tl.load(multiplier_ptr + tl.cast(batch, tl.int64) * stride_mb + first + i, mask=i < end, other=0.0)
    return factor


@triton.jit
def scaled_gradient(x, factor):
    """x times its rows' factor. Zeros stay zeros even if a multiplier is not finite, as may be the case after the last sequence."""
    return tl.where(x == 0, 0.0, x * factor)


@triton.jit
def _rows(pointer, batch, row, head, stride_batch, stride_row, stride_head, BLOCK: tl.constexpr):
    """Where rows row .. row + BLOCK of the heads begin, [BLOCK, HEADS, 1]."""
    start = tl.cast(batch, tl.int64) * stride_batch + tl.cast(row, tl.int64) * stride_row
    return pointer + start + (tl.arange(0, BLOCK) * stride_row)[:, None, None] + (tl.cast(head, tl.int64) * stride_head)[None, :, None]


@triton.jit(do_not_specialize=["n_seqs", "seqlen", "other_seqlen", "heads", "batches", "chunk", "top", "far", "near"],
            do_not_specialize_on_alignment=["multiplier", "cu_seqlens", "other_cu_seqlens"])
def rotate_kernel(x_ptr, copies_ptr, cos, sin, multiplier, cu_seqlens, other_cu_seqlens, stride_xb, stride_xs, stride_xh, stride_cb,
                  stride_cs, stride_ch, stride_mb, scale, n_seqs, seqlen, other_seqlen, heads, batches, chunk, top, far, near,
                  HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr,
                  HAS_MULTIPLIER: tl.constexpr, QUERIES: tl.constexpr, PACKED: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr,
                  HEADS: tl.constexpr, WIDTH: tl.constexpr):
    _, batch, bunch, row, first, length, _, other_length = program_tile(
        cu_seqlens, other_cu_seqlens, n_seqs, seqlen, other_seqlen, tl.cdiv(heads, HEADS), BLOCK, PACKED, False)
    if row >= length:
        return
    i = row + tl.arange(0, BLOCK)
    position = i
    last = row + BLOCK - 1
    factor = tl.full([BLOCK], 1.0, tl.float32)
    if QUERIES:
        position += other_length - length
        last += other_length - length
        factor = query_factor(multiplier, batch, first, row, length, stride_mb, scale, HAS_MULTIPLIER, BLOCK)
    inside = (position % chunk + chunk) % chunk

    # [BLOCK, HEADS, BLOCK_D / 2]
    head = bunch * HEADS + tl.arange(0, HEADS)
    kept = (i < length)[:, None, None] & (head < heads)[None, :, None]
    rows_x = _rows(x_ptr, batch, first + row, head, stride_xb, stride_xs, stride_xh, BLOCK)
    first_column, second_column, has_first, has_second = _pair_columns(HEAD_DIM, ROTARY_DIM, BLOCK_D, INTERLEAVED)
    a = tl.load(rows_x + first_column[None, None, :], mask=kept & has_first[None, None, :], other=0.0).to(tl.float32)
    b = tl.load(rows_x + second_column[None, None, :], mask=kept & has_second[None, None, :], other=0.0).to(tl.float32)
    channel = tl.arange(0, BLOCK_D)[None, None, :]
    for copy in tl.static_range(COPIES):
        # only queries with so many chunks before theirs are read at this stage, those before the first key at the first one; from the
        # near ones on the last copy serves for both stages of other chunks
        needed = copy == 0 or not QUERIES
        if copy == 1:
            needed = needed or ((last >= chunk) & (tl.min(inside) < near + REACH))
        if copy == 2:
            needed = needed or (last >= 2 * chunk) | ((last >= chunk) & (tl.max(inside) >= near))
        if needed:
            c, s = load_angles(cos, sin, stage_position(copy, inside, chunk, top, far), ROTARY_DIM, BLOCK_D)
            turned = rotate_pairs(a, b, (c * factor[:, None])[:, None, :], (s * factor[:, None])[:, None, :])
            rows_c = _rows(copies_ptr, copy * batches + batch, first + row, head, stride_cb, stride_cs, stride_ch, BLOCK)
            tile = tl.join(turned[0], turned[1]).reshape(BLOCK, HEADS, BLOCK_D).to(copies_ptr.dtype.element_ty)
            tl.store(rows_c + channel, tile, mask=kept & (channel < WIDTH))


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, aligned: bool, x: Layout, out: Layout, other_seqlen: int, copies: int, queries: bool,
          near: int, options: Options) -> Launch:
    batches, seqlen = (1, x[0][0]) if options.packed else x[0][:2]
    heads, head_dim = x[0][-2:]
    sequences = options.sequences if options.packed else batches
    bunch = min(ROTATE_HEADS, next_power_of_2(heads))
    block = ROTATE_ROWS // bunch
    scalars = (*strides(x), *strides(out), options.multiplier_stride or 0, options.query_scale(dtype), sequences, seqlen, other_seqlen,
               heads, batches, *options.chunks, near)
    constants = options.rotation_constants(head_dim) | {
        "HAS_MULTIPLIER": queries and options.has_multiplier, "QUERIES": queries, "PACKED": options.packed, "COPIES": copies,
        "BLOCK": block, "HEADS": bunch, "WIDTH": out[0][-1]}
    return Launch(rotate_kernel, options.programs(-(-heads // bunch), seqlen, sequences, block), scalars, constants, 4, 3)


def rotated_copies(x: Tensor, extras: Extras, options: Options, other_seqlen: int, copies: int, *, queries: bool,
                   near: int | None = None) -> Tensor:
    """x at the positions of the first `copies` stages, (copies * batch, seqlen, heads, width), batch 1 where packed; channels pair by pair.

    The width is padded with zeros to 16 bytes, as TMA wants it.
    near: queries of a chunk, from its first on, whose second copy is read where it is not the third as well; by default all.
    Queries are also multiplied by their row multiplier and, but in float32, by softmax scale and log2(e).
    """
    batches, seqlen = (1, x.shape[0]) if options.packed else x.shape[:2]
    heads, width = x.shape[-2], padded(x.shape[-1], x.element_size())
    # heads first: what a tile holds lies in one piece
    out = torch.empty(copies * batches, heads, seqlen, width, dtype=x.dtype, device=x.device).transpose(1, 2)
    if out.numel() == 0:
        return out
    own, other = (extras.cu_seqlens_q, extras.cu_seqlens_k) if queries else (extras.cu_seqlens_k, extras.cu_seqlens_q)
    launch = _plan(x.device, x.dtype, are_aligned(x, *extras[:2]), layout(x), layout(out), other_seqlen, copies, queries,
                   options.chunk if near is None else near, options)
    launch(x, out, *extras[:3], own, other)
    return out
