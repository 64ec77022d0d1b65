"""Walking the lists of `attnzoo_kernels.block_sparse.lists`: a program's tile, its list, and the parts of it that need a mask."""

import triton
import triton.language as tl

from attnzoo_kernels._triton.tiles import program_tile


@triton.jit
def listed_tile(order, cu_seqlens, other_cu_seqlens, n_seqs, seqlen, other_seqlen, heads, BLOCK: tl.constexpr, PACKED: tl.constexpr,
                LAST_FIRST: tl.constexpr):
    """As program_tile, dense programs in the order of the lists."""
    if PACKED:
        place = program_tile(cu_seqlens, other_cu_seqlens, n_seqs, seqlen, other_seqlen, heads, BLOCK, PACKED, LAST_FIRST)
    else:
        entry = tl.load(order + tl.program_id(0))
        tiles = tl.cdiv(seqlen, BLOCK)
        head = entry // tiles % heads
        batch = entry // tiles // heads
        place = batch, batch, head, entry % tiles * BLOCK, 0, seqlen, 0, other_seqlen
    return place


@triton.jit
def find_list(seq, head, tile, n_seqs, tiles, width, stride_batch, stride_head):
    """Where a tile's list lies: (its number, its first entry). A tile beyond the layout, which has nothing to see, gets a list to read."""
    number = tl.minimum(seq, n_seqs - 1) * stride_batch + head * stride_head + tl.minimum(tile, tiles - 1)
    return number, number.to(tl.int64) * width


@triton.jit
def _entries_below(entries, count, limit):
    """How many of `count` ascending entries lie below the limit."""
    lanes = tl.arange(0, 128)
    below = 0
    for start in range(0, count, 128):
        entry = tl.load(entries + start + lanes, mask=start + lanes < count, other=2147483647)
        below += tl.sum((entry < limit).to(tl.int32), 0)
    return below


@triton.jit
def list_ranges(entries, clear, masked, bounds, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """The positions to walk: (clear_begin, clear_end, n_masked, spans), spans being what masked_position takes.

    entries: a list of `clear` tiles that need no mask and `masked` ones that do. Where packed, nothing is known of the sequence's lengths
    in it; the bounds (begin, full_begin, full_end, _, end) of key_ranges or query_ranges say which tiles are cut and which lie outside.
    """
    clear_begin = 0
    clear_end = clear
    n_masked = masked
    spans = (0, 0, 0, clear, clear)
    if PACKED:
        begin = bounds[0] // BLOCK
        end = tl.cdiv(bounds[4], BLOCK)
        first = _entries_below(entries, clear, begin)
        clear_begin = _entries_below(entries, clear, bounds[1] // BLOCK)
        clear_end = _entries_below(entries, clear, bounds[2] // BLOCK)
        last = _entries_below(entries, clear, end)
        first_masked = clear + _entries_below(entries + clear, masked, begin)
        last_masked = clear + _entries_below(entries + clear, masked, end)
        before = clear_begin - first
        behind = before + last - clear_end
        spans = (first, before, clear_end - before, behind, first_masked)
        n_masked = behind + last_masked - first_masked
    return clear_begin, clear_end, n_masked, spans


@triton.jit
def masked_position(n, spans, PACKED: tl.constexpr):
    """Position of the n-th tile that needs a mask: cut tiles before the clear ones, cut tiles behind them, tiles with holes."""
    if PACKED:
        first, before, shift, behind, holes = spans
        position = tl.where(n < before, first + n, tl.where(n < behind, shift + n, holes + n - behind))
    else:
        position = spans[4] + n
    return position


@triton.jit
def blocks_kept(bits, i, j, TILE_M: tl.constexpr, TILE_N: tl.constexpr, PART_Q: tl.constexpr, PART_K: tl.constexpr):
    """Which elements of a tile lie in kept blocks; i and j count from the tile's corner and broadcast to the tile."""
    place = (i // PART_Q) * (TILE_N // PART_K) + j // PART_K
    return ((bits >> place) & 1) != 0
