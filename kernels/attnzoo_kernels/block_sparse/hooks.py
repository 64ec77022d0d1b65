"""Hooks of `_triton`'s mainloops for block-sparse attention: which tile a program has, its list of tiles to read, and which of these need a
mask.

The lists are those of `attnzoo_kernels.block_sparse.lists`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnzoo_kernels._triton.mainloop import listed_loop
from attnzoo_kernels._triton.masks import key_ranges, keys_seen, queries_seeing, query_ranges
from attnzoo_kernels._triton.tiles import Place, program_tile


class Lists(NamedTuple):
    """What all programs of a launch share: the window, and the lists' tensors, extent and strides."""

    window: Any
    index: Any
    count: Any
    bits: Any
    tiles: Any
    width: Any
    stride_batch: Any
    stride_head: Any
    n_seqs: Any
    PART_Q: Any
    PART_K: Any


class TileList(NamedTuple):
    """One tile's list: its entries, the bits of the kept blocks in each, and `spans` as masked_position takes them."""

    window: Any
    entries: Any
    bits: Any
    spans: Any
    PART_Q: Any
    PART_K: Any
    PACKED: Any


@triton.jit
def listed_tile(order, cu_seqlens, other_cu_seqlens, n_seqs, seqlen, other_seqlen, heads, BLOCK: tl.constexpr, PACKED: tl.constexpr,
                LAST_FIRST: tl.constexpr):
    """Like program_tile, but dense programs run in the order of TileLists.order."""
    if PACKED:
        place = program_tile(cu_seqlens, other_cu_seqlens, n_seqs, seqlen, other_seqlen, heads, BLOCK, PACKED, LAST_FIRST)
    else:
        entry = tl.load(order + tl.program_id(0))
        tiles = tl.cdiv(seqlen, BLOCK)
        head = entry // tiles % heads
        batch = entry // tiles // heads
        place = Place(batch, batch, head, entry % tiles * BLOCK, 0, seqlen, 0, other_seqlen)
    return place


@triton.jit
def find_list(lists, sequence, head, tile):
    """(number of a tile's list, position of its first entry). A tile past the layout sees nothing, but gets the number of a valid list."""
    number = tl.minimum(sequence, lists.n_seqs - 1) * lists.stride_batch + head * lists.stride_head + tl.minimum(tile, lists.tiles - 1)
    return number, number.to(tl.int64) * lists.width


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
    """Which positions of a list to read: (clear_begin, clear_end, n_masked, spans); masked_position takes spans.

    entries: a list of `clear` tiles that need no mask, followed by `masked` ones that do. Packed lists do not know the sequence's lengths.
    There, the bounds (begin, full_begin, full_end, _, end) of key_ranges or query_ranges say which tiles the element mask cuts and which
    lie outside of it.
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
    """The position of the n-th tile that needs a mask: first the cut tiles before the clear ones, then the cut tiles after them, then the
    tiles with dropped blocks."""
    if PACKED:
        first, before, shift, behind, holes = spans
        position = tl.where(n < before, first + n, tl.where(n < behind, shift + n, holes + n - behind))
    else:
        position = spans[4] + n
    return position


@triton.jit
def _blocks_kept(bits, m, n, BLOCK_N: tl.constexpr, PART_Q: tl.constexpr, PART_K: tl.constexpr):
    """Which elements of a tile lie in kept blocks; m and n count from the tile's corner and broadcast to the tile."""
    return ((bits >> (m // PART_Q) * (BLOCK_N // PART_K) + n // PART_K) & 1) != 0


@triton.jit
def seen(x, own, i, j, position):
    """MASK of forward and dQ: the window, and in partly kept tiles the kept blocks."""
    kept = keys_seen(i, j, x.place.length, x.place.other_length, own.window)
    if own.PART_Q < x.shape.BLOCK_M or own.PART_K < x.shape.BLOCK_N:
        m = tl.arange(0, x.shape.BLOCK_M)[:, None]
        n = tl.arange(0, x.shape.BLOCK_N)[None, :]
        kept = kept & _blocks_kept(tl.load(own.bits + position), m, n, x.shape.BLOCK_N, own.PART_Q, own.PART_K)
    return kept


@triton.jit
def seen_transposed(x, own, i, j, position):
    """MASK of dK/dV: like `seen`, transposed."""
    kept = queries_seeing(i, j, x.place.other_length, x.place.length, own.window)
    if own.PART_Q < x.shape.BLOCK_M or own.PART_K < x.shape.BLOCK_N:
        m = tl.arange(0, x.shape.BLOCK_M)[None, :]
        n = tl.arange(0, x.shape.BLOCK_N)[:, None]
        kept = kept & _blocks_kept(tl.load(own.bits + position), m, n, x.shape.BLOCK_N, own.PART_Q, own.PART_K)
    return kept


@triton.jit
def listed(own, n, MASKED: tl.constexpr):
    """NTH_TILE: (position in the list, number) of the n-th tile."""
    position = masked_position(n, own.spans, own.PACKED) if MASKED == "all" else n
    return position, tl.load(own.entries + position)


@triton.jit
def listed_loops(STEP: tl.constexpr, state, x, lists, head, bounds, BLOCK: tl.constexpr, OWN_BLOCK: tl.constexpr, JOINT: tl.constexpr):
    """Steps over a program's listed tiles of BLOCK rows: one loop for the tiles that need no mask, one for those that do.

    JOINT: one loop for both, where two loops would spill registers.
    """
    PARTS: tl.constexpr = lists.PART_Q < x.shape.BLOCK_M or lists.PART_K < x.shape.BLOCK_N
    number, first = find_list(lists, x.place.sequence, head, x.place.row // OWN_BLOCK)
    clear, masked = tl.load(lists.count + 2 * number), tl.load(lists.count + 2 * number + 1)
    entries = lists.index + first
    clear_begin, clear_end, n_masked, spans = list_ranges(entries, clear, masked, bounds, BLOCK, x.shape.PACKED)
    bits = lists.bits + first if PARTS else lists.bits
    for part in tl.static_range(1 if JOINT else 2):
        # TMA reads zeros past the sequence's end; pointers need a guard where a tile may cross it
        state = listed_loop(
            STEP, listed, state, x, TileList(lists.window, entries, bits, spans, lists.PART_Q, lists.PART_K, x.shape.PACKED),
            clear_begin if part == 0 else 0, clear + masked if JOINT else clear_end if part == 0 else n_masked, spans[4], BLOCK,
            "edges" if JOINT else "none" if part == 0 else "all", part == 1 and not x.shape.TMA)
    return state


@triton.jit
def listed_keys(STEP: tl.constexpr, state, x, lists):
    """Steps over the listed keys of a QueryTile."""
    bounds = key_ranges(x.place.row, x.place.length, x.place.other_length, lists.window, x.shape.BLOCK_M, x.shape.BLOCK_N, True)
    return listed_loops(STEP, state, x, lists, x.place.head, bounds, x.shape.BLOCK_N, x.shape.BLOCK_M, False)


@triton.jit
def listed_queries(STEP: tl.constexpr, state, x, lists):
    """Steps over the listed queries of a KeyTile."""
    bounds = query_ranges(x.place.row, x.place.other_length, x.place.length, lists.window, x.shape.BLOCK_M, x.shape.BLOCK_N, True)
    return listed_loops(STEP, state, x, lists, x.head, bounds, x.shape.BLOCK_M, x.shape.BLOCK_N, x.shape.TMA and not x.shape.PACKED)
