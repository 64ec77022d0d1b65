"""Turns a layout's mask into what the kernels read: for each tile of one side a list of tiles of the other side, and an order of the
programs.

Two kernels and a sort make them; the host does not wait for the device. Lists are kept with the mask from which they were made.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from attnzoo_kernels.block_sparse.layout_cache import LayoutCache

MAX_KEPT = 16  # TileLists that are kept for one mask, for different tiles or lengths
MAX_PARTS = 32  # blocks in a tile, one bit each
CHUNK = 256  # tiles that a program handles at a time
ORDER_CHUNK = 1024
HEAVY = 4  # programs whose lists are longer than so many times the mean run first
BUNCH_TOKENS = 32768  # heads whose keys are about so many together run as one bunch


@dataclass(frozen=True)
class Grid:
    """A mask's blocks, a kernel's tiles, and the element mask (window, ends) that cuts both.

    packed: lengths are the layout's extent, and lists do not account for the element mask. Each sequence has its own ends and diagonal,
    which the kernel takes into account.
    """

    block_q: int
    block_k: int
    tile_m: int
    tile_n: int
    len_q: int
    len_k: int
    window_left: int
    window_right: int
    packed: bool

    @property
    def part(self) -> tuple[int, int]:
        """(queries, keys): the size in tokens of the intersection of a block and a tile."""
        return min(self.block_q, self.tile_m), min(self.block_k, self.tile_n)

    @property
    def parts(self) -> tuple[int, int]:
        """How many `part`s a tile has along each side."""
        return self.tile_m // self.part[0], self.tile_n // self.part[1]

    @property
    def tiles(self) -> tuple[int, int]:
        return max(1, -(-self.len_q // self.tile_m)), max(1, -(-self.len_k // self.tile_n))


@dataclass(frozen=True)
class TileLists:
    """The lists that one kernel reads. Its own side is queries, or keys for dK/dV; a list holds tiles of the other side.

    index: int32 (batch or 1, heads or 1, own tiles, other tiles + 1). A list begins with the tiles that need no mask; the masked ones
        follow. Both are ascending. What follows does not belong to the list but may be read: a kernel may look one entry ahead.
    count: int32 (batch or 1, heads or 1, own tiles, 2): how many tiles need no mask, and how many need one.
    bits: int32 like index: which blocks of the listed tile are kept, bit query_part * key_parts + key_part. None where a tile lies within
        one block.
    order: int32 (batch * heads * own tiles,): for each program (batch, head, tile) as one number. None where packed.
    """

    index: Tensor
    count: Tensor
    bits: Tensor | None
    order: Tensor | None

    @property
    def tensors(self) -> tuple:
        """The tensors in the order of the kernels' arguments."""
        return self.order, self.index, self.count, self.bits


@triton.jit
def _tile_bits(mask, m_tile, n_tile, listed, q_blocks, k_blocks, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr,
               TILE_N: tl.constexpr):
    """Which parts of each tile are kept: bit query_part * key_parts + key_part. Tiles that are not `listed` have none."""
    PART_Q: tl.constexpr = min(BLOCK_Q, TILE_M)
    PART_K: tl.constexpr = min(BLOCK_K, TILE_N)
    bits = (m_tile + n_tile) * 0
    for m in tl.static_range(TILE_M // PART_Q):
        for n in tl.static_range(TILE_N // PART_K):
            row = (m_tile * TILE_M + m * PART_Q) // BLOCK_Q
            column = (n_tile * TILE_N + n * PART_K) // BLOCK_K
            kept = tl.load(mask + row * k_blocks + column, mask=listed & (row < q_blocks) & (column < k_blocks), other=0)
            bits |= (kept != 0).to(tl.int32) << (m * (TILE_N // PART_K) + n)
    return bits


@triton.jit
def _tiles_seen(m_tile, n_tile, len_q, len_k, window_left, window_right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
                TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """(tiles that the element mask leaves whole, tiles that it leaves any element of)."""
    first_i = m_tile * TILE_M
    first_j = n_tile * TILE_N
    last_i = tl.minimum(first_i + TILE_M, len_q) - 1
    last_j = tl.minimum(first_j + TILE_N, len_k) - 1
    whole = (first_i + TILE_M <= len_q) & (first_j + TILE_N <= len_k)
    touched = (first_i < len_q) & (first_j < len_k)
    shift = len_k - len_q
    if HAS_RIGHT:
        whole = whole & (last_j <= first_i + shift + window_right)
        touched = touched & (first_j <= last_i + shift + window_right)
    if HAS_LEFT:
        whole = whole & (first_j >= last_i + shift - window_left)
        touched = touched & (last_j >= first_i + shift - window_left)
    return whole, touched


@triton.jit(do_not_specialize=["q_blocks", "k_blocks", "own_tiles", "other_tiles", "len_q", "len_k", "window_left", "window_right"])
def block_sparse_lists_kernel(mask_ptr, index_ptr, count_ptr, bits_ptr, q_blocks, k_blocks, own_tiles, other_tiles, len_q, len_k,
                              window_left, window_right,
                              BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
                              BY_KEYS: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
                              CHUNK: tl.constexpr):
    """Each program writes one list. A first sweep over the tiles counts; a second one places the masked tiles after the others."""
    number = tl.program_id(0)
    own = number % own_tiles
    mask = mask_ptr + (number // own_tiles).to(tl.int64) * q_blocks * k_blocks
    first = number.to(tl.int64) * (other_tiles + 1)
    EVERY: tl.constexpr = (1 << ((TILE_M // min(BLOCK_Q, TILE_M)) * (TILE_N // min(BLOCK_K, TILE_N)))) - 1
    clear = 0
    masked = 0
    for sweep in tl.static_range(2):
        behind = clear
        clear = 0
        masked = 0
        for start in range(0, other_tiles, CHUNK):
            other = start + tl.arange(0, CHUNK)
            m_tile = other if BY_KEYS else own
            n_tile = own if BY_KEYS else other
            listed = other < other_tiles
            bits = _tile_bits(mask, m_tile, n_tile, listed, q_blocks, k_blocks, BLOCK_Q, BLOCK_K, TILE_M, TILE_N)
            is_whole = bits == tl.cast(EVERY, tl.uint32).to(tl.int32, bitcast=True)
            is_kept = bits != 0
            if not PACKED:
                whole, touched = _tiles_seen(m_tile, n_tile, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT, TILE_M, TILE_N)
                is_whole = is_whole & whole
                is_kept = is_kept & touched
            is_clear = (is_whole & is_kept).to(tl.int32)
            is_masked = is_kept.to(tl.int32) - is_clear
            if sweep == 1:
                place = tl.where(is_clear != 0, clear + tl.cumsum(is_clear, 0), behind + masked + tl.cumsum(is_masked, 0)) - 1
                tl.store(index_ptr + first + place, other, mask=is_kept)
                if EVERY > 1:
                    tl.store(bits_ptr + first + place, bits, mask=is_kept)
            clear += tl.sum(is_clear, 0)
            masked += tl.sum(is_masked, 0)
    tl.store(count_ptr + 2 * number, clear)
    tl.store(count_ptr + 2 * number + 1, masked)


@triton.jit
def _list_lengths(count_ptr, entry, n, tiles, heads, stride_batch, stride_head, group):
    """How many tiles the programs `entry` read in total; each reads `group` lists."""
    head = entry // tiles % heads
    number = entry // tiles // heads * stride_batch + head * group * stride_head + entry % tiles
    length = entry * 0
    for member in range(group):
        at = count_ptr + 2 * (number + member * stride_head)
        length += tl.load(at, mask=entry < n, other=0) + tl.load(at + 1, mask=entry < n, other=0)
    return length


@triton.jit(do_not_specialize=["n", "tiles", "heads", "stride_batch", "stride_head", "group", "limit", "bunch"])
def block_sparse_order_kernel(count_ptr, key_ptr, n, tiles, heads, stride_batch, stride_head, group, limit, bunch, HEAVY: tl.constexpr,
                              CHUNK: tl.constexpr):
    """int64 sort keys of the programs. Programs that are longer than HEAVY times the mean come first, the longest at the front. The others
    are sorted by bunches of heads, whose keys then stay in L2, and within a bunch by length, longest first."""
    lanes = tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.int64)
    for start in range(0, n, CHUNK):
        total += _list_lengths(count_ptr, start + lanes, n, tiles, heads, stride_batch, stride_head, group)
    entry = tl.program_id(0) * CHUNK + lanes
    length = _list_lengths(count_ptr, entry, n, tiles, heads, stride_batch, stride_head, group).to(tl.int64)
    is_heavy = length * n > HEAVY * tl.sum(total, 0)
    key = tl.where(is_heavy, -length, (entry // tiles // bunch).to(tl.int64) * (limit + 1) + limit - length)
    tl.store(key_ptr + entry, key, mask=entry < n)


_kept = WeakTensorKeyDictionary()


def tile_lists(mask: Tensor, grid: Grid, batch: int, heads: int, group: int, by_keys: bool) -> TileLists:
    """The lists of each tile of queries and each of `heads`; by_keys: of each tile of keys and each key head, for `group` query heads
    together."""
    kept = _kept.get(mask)
    if kept is None:
        kept = _kept.setdefault(mask, LayoutCache(MAX_KEPT))
    wanted = (grid, batch, heads, group, by_keys)
    return kept.get(wanted, mask.device, lambda: _make(mask, *wanted))


def _make(mask: Tensor, grid: Grid, batch: int, heads: int, group: int, by_keys: bool) -> TileLists:
    own, other = reversed(grid.tiles) if by_keys else grid.tiles
    mask_batch, mask_heads, q_blocks, k_blocks = mask.shape
    index = torch.empty(mask_batch, mask_heads, own, other + 1, dtype=torch.int32, device=mask.device)
    count = torch.empty(mask_batch, mask_heads, own, 2, dtype=torch.int32, device=mask.device)
    bits = torch.empty_like(index) if math.prod(grid.parts) > 1 else None
    block_sparse_lists_kernel[(mask_batch * mask_heads * own,)](
        mask.view(torch.uint8), index, count, bits, q_blocks, k_blocks, own, other, grid.len_q, grid.len_k, grid.window_left,
        grid.window_right, BLOCK_Q=grid.block_q, BLOCK_K=grid.block_k, TILE_M=grid.tile_m, TILE_N=grid.tile_n, BY_KEYS=by_keys,
        PACKED=grid.packed, HAS_LEFT=grid.window_left >= 0, HAS_RIGHT=grid.window_right >= 0, CHUNK=CHUNK, num_warps=4)
    if grid.packed:
        return TileLists(index, count, bits, None)
    group = group if by_keys else 1
    programs = batch * heads // group * own
    keys = torch.empty(programs, dtype=torch.int64, device=mask.device)
    stride_batch, stride_head = mask_heads * own if mask_batch > 1 else 0, own if mask_heads > 1 else 0
    block_sparse_order_kernel[(-(-programs // ORDER_CHUNK),)](
        count, keys, programs, own, heads // group, stride_batch, stride_head, group, other * group,
        max(1, BUNCH_TOKENS // max(1, grid.len_k)), HEAVY=HEAVY, CHUNK=ORDER_CHUNK, num_warps=4)
    return TileLists(index, count, bits, keys.argsort(stable=True).int())
