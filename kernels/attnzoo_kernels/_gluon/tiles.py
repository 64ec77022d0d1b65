"""Tiles of packed sequences, and the tiles of keys that queries see."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._triton.launch import L2_GROUP


def heads_together(heads: int, head_bytes: int, tiles: int, programs: int, ordered: bool) -> int:
    """How many heads' tiles a backward interleaves: as many as fit into L2.

    If these heads have fewer tiles than nine tenths of the programs, the longest tiles of the last heads would end late. Then the heads are
    divided into groups of about equal size with at least 1.5 tiles for each program. With ordered sums, larger groups would mean more
    waiting, so L2 alone decides.
    """
    in_l2 = max(1, L2_GROUP // head_bytes)
    if ordered or 10 * in_l2 * tiles >= 9 * programs:
        return in_l2
    return -(-heads // max(1, heads // -(-3 * programs // (2 * tiles))))


def masks_in_loop(window_left: int, window_right: int, shift: int | None, rows: int) -> bool:
    """Whether a consumer of `rows` queries may need masks after its first tile of keys: with a left window, or where the diagonal does not
    lie on multiples of `rows` keys. shift: seqlen_k - seqlen_q; None: packed sequences whose lengths differ."""
    return window_left >= 0 or window_right >= 0 and (shift is None or shift % rows != 0 or window_right % rows != 0)


@gluon.jit
def first_slot(token, sequence, block, own):
    """FIRST_SLOT for tiles of `block` rows."""
    return token // block + sequence


@gluon.jit
def find_sequence(cu_seqlens, slot, n_seqs, BLOCK: gl.constexpr, own=None, FIRST_SLOT: gl.constexpr = first_slot):
    """The sequence that has `slot`, see `_triton.tiles.find_tile`. Sequence b has the slots from FIRST_SLOT(cu_seqlens[b], b, BLOCK, own)
    on. n_seqs stands for the rows after the last sequence.

    A warp compares 32 sequences at a time, which lie `step` apart. It goes on from the last of these that begins at or before the slot,
    with a step 32 times smaller, until the step is 1.
    """
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    step = 1
    while step * 32 <= n_seqs:
        step *= 32
    sequence = 0
    while step > 0:
        b = sequence + lanes * step
        first = FIRST_SLOT(gl.load(cu_seqlens + b, mask=b <= n_seqs, other=0), b, BLOCK, own)
        sequence += (gl.sum(((first <= slot) & (b <= n_seqs)).to(gl.int32), 0) - 1) * step
        step //= 32
    return sequence


@gluon.jit
def sequence_bounds(cu_seqlens, sequence, n_seqs, seqlen, PACKED: gl.constexpr, REST: gl.constexpr):
    """(first row, length) of a sequence. Sequence n_seqs stands for the rows after the last one: under REST up to the total `seqlen`, else
    none."""
    if PACKED:
        first = gl.load(cu_seqlens + sequence)
        end = gl.load(cu_seqlens + gl.minimum(sequence + 1, n_seqs))
        if REST:
            end = gl.where(sequence == n_seqs, seqlen, end)
        length = end - first
    else:
        first = 0
        length = seqlen
    return first, length


@gluon.jit
def both_bounds(sequence, problem, PACKED: gl.constexpr):
    """(first query, number of queries, first key, number of keys) of a sequence. The rows after the last sequence see no key."""
    first_q, len_q = sequence_bounds(problem.cu_seqlens_q, sequence, problem.n_seqs, problem.seqlen_q, PACKED, True)
    first_k, len_k = sequence_bounds(problem.cu_seqlens_k, sequence, problem.n_seqs, problem.seqlen_k, PACKED, False)
    return first_q, len_q, first_k, len_k


@gluon.jit
def by_groups(index, tiles, heads, head_group, BEYOND: gl.constexpr):
    """(head, tile) of an index, where `heads` heads have `tiles` tiles each and the tiles of `head_group` heads are interleaved. BEYOND:
    the index may lie past the last tile."""
    first = index // (head_group * tiles) * head_group
    members = gl.minimum(head_group, heads - first)
    if BEYOND:
        members = gl.maximum(members, 1)
    place = index - first * tiles
    return first + place % members, place // members


@gluon.jit
def key_tiles(row, ROWS: gl.constexpr, len_q, len_k, window_left, window_right, BLOCK_N: gl.constexpr, HAS_LEFT: gl.constexpr,
              HAS_RIGHT: gl.constexpr):
    """The tiles of keys that ROWS queries from `row` on see: (begin, full_begin, full_end, end), counted in tiles. Tiles before full_begin
    and tiles from full_end on need a mask."""
    shift = len_k - len_q
    last = gl.minimum(row + ROWS, len_q) - 1
    end = len_k
    full_end = len_k
    begin = 0
    full_begin = 0
    if HAS_RIGHT:
        end = gl.minimum(end, gl.maximum(last + shift + window_right + 1, 0))
        full_end = gl.minimum(full_end, gl.maximum(row + shift + window_right + 1, 0))
    if HAS_LEFT:
        begin = gl.maximum(row + shift - window_left, 0)
        full_begin = gl.maximum(last + shift - window_left, 0)
    return begin // BLOCK_N, (full_begin + BLOCK_N - 1) // BLOCK_N, full_end // BLOCK_N, (end + BLOCK_N - 1) // BLOCK_N
