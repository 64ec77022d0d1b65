"""Tiles of packed and dense sequences: where a program's tile lies, and how its rows are loaded and stored."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from attnzoo_kernels._triton import launch

BY_SEQUENCE = tl.constexpr(2)
SEQUENCE_END = tl.constexpr(launch.SEQUENCE_END)
INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # whether kernels are interpreted, as @triton.jit decides when this module is imported
NVIDIA = tl.constexpr(torch.version.hip is None and not knobs.runtime.interpret)


class Shape(NamedTuple):
    """A launch's constants."""

    HEAD_DIM: Any
    VALUE_DIM: Any
    BLOCK_D: Any  # HEAD_DIM, padded to a power of two
    BLOCK_DV: Any  # VALUE_DIM, padded to a power of two
    BLOCK_M: Any  # queries of a tile
    BLOCK_N: Any  # keys of a tile
    PACKED: Any
    PRECISION: Any  # "ieee" for float32, whose rounding follows eager PyTorch
    TMA: Any  # a value of load_rows' TMA


class Place(NamedTuple):
    """Where a program's tile lies: rows row .. row + BLOCK of one head of one sequence. A program with row >= length has no tile.

    A program's own side is that of its tile, queries or keys. The other side is the one that the mainloop goes over.
    """

    sequence: Any  # its number
    batch: Any  # index of the first dimension: the sequence's number if dense, 0 if packed
    head: Any
    row: Any  # counted from the sequence's first row
    first: Any  # the sequence's first row among all packed rows; 0 if dense
    length: Any
    other_first: Any  # the same on the other side
    other_length: Any


class Operand(NamedTuple):
    """A tensor (batch, seqlen, heads, width) as a kernel takes it."""

    source: Any  # a pointer, or a descriptor where TMA reads the tensor
    stride_batch: Any
    stride_row: Any
    stride_head: Any


class Rows(NamedTuple):
    """The rows of one head of one sequence of an Operand, for load_rows."""

    source: Any  # the descriptor as it is, or the pointer moved to the head's first row
    batch: Any
    head: Any
    first: Any
    length: Any
    stride: Any


@triton.jit
def sequence_rows(cu_seqlens, sequence, n_seqs, total):
    """(first row, end) of a packed sequence. Sequence n_seqs stands for the rows after the last sequence."""
    first = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + tl.minimum(sequence + 1, n_seqs))
    return first, tl.where(sequence == n_seqs, total, end)


@triton.jit
def columns_of_program(WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(number of this program's block of rows, its columns). Each BLOCK columns have a program; programs of the same rows follow each
    other."""
    blocks = tl.cdiv(WIDTH, BLOCK)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(0) // blocks, columns


@triton.jit
def first_slot(token, sequence, block, own):
    """FIRST_SLOT for tiles of `block` rows."""
    return token // block + sequence


@triton.jit
def find_sequence(cu_seqlens, slot, n_seqs, BLOCK: tl.constexpr, own=None, FIRST_SLOT: tl.constexpr = first_slot):
    """The sequence that has `slot`, see find_tile. Sequence b has the slots from FIRST_SLOT(cu_seqlens[b], b, BLOCK, own) on. n_seqs stands
    for the rows after the last sequence.

    The search compares 128 sequences at a time, which lie `step` apart. It goes on from the last of these that begins at or before the
    slot, with a step 128 times smaller, until the step is 1.
    """
    # 32 lanes are one warp, which adds them up without the others; four loads are in flight at a time
    lanes = tl.arange(0, 32)
    step = 1
    while step * 128 <= n_seqs:
        step *= 128
    sequence = 0
    while step > 0:
        before = tl.zeros([32], tl.int32)  # if carried by the loop, it would keep Triton 3.7 from overlapping loads in later loops
        for part in tl.static_range(4):
            b = sequence + (part * 32 + lanes) * step
            first = FIRST_SLOT(tl.load(cu_seqlens + b, mask=b <= n_seqs, other=0), b, BLOCK, own)
            before += ((b <= n_seqs) & (first <= slot)).to(tl.int32)
        sequence += (tl.sum(before, 0) - 1) * step
        step //= 128
    return sequence


@triton.jit
def find_tile(cu_seqlens, other_cu_seqlens, slot, n_seqs, total, BLOCK: tl.constexpr, own=None, FIRST_SLOT: tl.constexpr = first_slot):
    """The tile of packed sequences that belongs to `slot`: (sequence, tile, first, length, other_first, other_length).

    Slots number the tiles of all packed sequences without a prefix sum over tiles: sequence b has the slots from
    FIRST_SLOT(cu_seqlens[b], b, BLOCK, own) on. These are at least as many as its tiles; the tiles of the others lie past the sequence's
    length and are empty. There are FIRST_SLOT(total, n_seqs + 1, BLOCK, own) slots. Sequence n_seqs stands for the rows after the last one.
    """
    sequence = find_sequence(cu_seqlens, slot, n_seqs, BLOCK, own, FIRST_SLOT)
    after = tl.minimum(sequence + 1, n_seqs)
    first = tl.load(cu_seqlens + sequence)
    other_first = tl.load(other_cu_seqlens + sequence)
    length = tl.where(sequence == n_seqs, total, tl.load(cu_seqlens + after)) - first
    other_length = tl.load(other_cu_seqlens + after) - other_first
    return sequence, slot - FIRST_SLOT(first, sequence, BLOCK, own), first, length, other_first, other_length


@triton.jit
def program_tile(cu_seqlens, other_cu_seqlens, n_seqs, seqlen, other_seqlen, heads, BLOCK: tl.constexpr, PACKED: tl.constexpr,
                 LAST_FIRST: tl.constexpr, together=None):
    """This program's Place.

    Tiles of one head follow each other, so that they share the other side in L2. LAST_FIRST: the last tile of a sequence comes first; under
    a causal mask it has the most work. together: the tiles of this many heads are interleaved, so that the long tiles of all of them come
    before the short ones. It divides the number of heads (if dense, of the heads of all sequences).
    """
    if PACKED:
        slots = seqlen // BLOCK + n_seqs + 1
    else:
        slots = tl.cdiv(seqlen, BLOCK)
    # unsigned divisions take fewer instructions and registers
    program, all_slots = tl.program_id(0).to(tl.uint32), tl.cast(slots, tl.uint32)
    if together is None:
        slot = (program % all_slots).to(tl.int32)
        head = program // all_slots
    else:
        turns = tl.cast(together, tl.uint32)
        slot = (program // turns % all_slots).to(tl.int32)
        head = program // (turns * all_slots) * turns + program % turns
    if PACKED:
        seq, tile, first, length, other_first, other_length = find_tile(cu_seqlens, other_cu_seqlens, slot, n_seqs, seqlen, BLOCK)
        batch = 0
        head = head.to(tl.int32)
        tiles = tl.cdiv(length, BLOCK)
    else:
        tiles = slots
        tile = slot
        batch = (head // tl.cast(heads, tl.uint32)).to(tl.int32)
        head = (head % tl.cast(heads, tl.uint32)).to(tl.int32)
        seq, first, length, other_first, other_length = batch, 0, seqlen, 0, other_seqlen
    row = tile * BLOCK
    if LAST_FIRST:
        row = tl.where(tile < tiles, (tiles - 1 - tile) * BLOCK, length)
    return Place(seq, batch, head, row, first, length, other_first, other_length)


@triton.jit
def first_lse(batch, head, first, seqlen, heads, PACKED: tl.constexpr):
    """Index of a sequence's first row in (batch, heads, seqlen), or in (heads, total) where packed."""
    if PACKED:
        index = head.to(tl.int64) * seqlen + first
    else:
        index = (batch * heads + head).to(tl.int64) * seqlen
    return index


@triton.jit
def row_places(place, head, seqlen, heads, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """For the rows of a Place, three tensors [BLOCK]: their numbers in the sequence; their indices in (batch, heads, seqlen), or in (heads,
    total) if packed; and whether the sequence has them."""
    i = place.row + tl.arange(0, BLOCK)
    inside = i < place.length
    return i, first_lse(place.batch, head, place.first, seqlen, heads, PACKED) + i, inside


@triton.jit
def tile_source(source, batch, head, first, stride_batch, stride_row, stride_head, TMA: tl.constexpr):
    """The source of a head's Rows: a tensor descriptor as it is, or the pointer moved to the first row."""
    if TMA:
        moved = source
    else:
        moved = source + tl.cast(batch, tl.int64) * stride_batch + tl.cast(head, tl.int64) * stride_head
        moved += tl.cast(first, tl.int64) * stride_row
    return moved


@triton.jit
def head_rows(operand, batch, head, first, length, TMA: tl.constexpr):
    """The Rows of one head of one sequence."""
    moved = tile_source(operand.source, batch, head, first, operand.stride_batch, operand.stride_row, operand.stride_head, TMA)
    return Rows(moved, batch, head, first, length, operand.stride_row)


@triton.jit
def own_rows(operand, place, TMA: tl.constexpr):
    """The Rows of a Place's own side."""
    return head_rows(operand, place.batch, place.head, place.first, place.length, TMA)


@triton.jit
def other_rows(operand, place, head, TMA: tl.constexpr):
    """The Rows of a head on the other side of a Place."""
    return head_rows(operand, place.batch, head, place.other_first, place.other_length, TMA)


@triton.jit
def key_rows(keys, values, place, group, TMA: tl.constexpr):
    """The Rows of the keys and values that a Place's query head reads."""
    head = place.head // group
    return other_rows(keys, place, head, TMA), other_rows(values, place, head, TMA)


@triton.jit
def _offsets(stride, BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    return tl.arange(0, BLOCK)[:, None] * stride + tl.arange(0, BLOCK_WIDTH)[None, :]


@triton.jit
def load_rows(rows_of, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr, GUARD: tl.constexpr, TMA: tl.constexpr):
    """Rows row .. row + BLOCK of a sequence, [BLOCK, BLOCK_WIDTH]. They are zero beyond WIDTH and, under GUARD, beyond the sequence's
    length.

    TMA: 0 for pointers; 1 for a descriptor, which reads zeros beyond the tensor; BY_SEQUENCE for a descriptor that reads zeros beyond the
    sequence.
    """
    rows = row + tl.arange(0, BLOCK)
    if TMA:
        if TMA == BY_SEQUENCE:
            # so that the sequence's last row is the descriptor's last row, see launch.descriptor_geometry
            at = [SEQUENCE_END, rows_of.first + rows_of.length, rows_of.head, SEQUENCE_END - rows_of.length + row, 0]
        else:
            at = [rows_of.batch, rows_of.head, rows_of.first + row, 0]
        tile = rows_of.source.load(at).reshape(BLOCK, BLOCK_WIDTH)
        if GUARD:
            tile = tl.where((rows < rows_of.length)[:, None], tile, 0.0)
    else:
        columns = tl.arange(0, BLOCK_WIDTH)
        pointers = rows_of.source + tl.cast(row, tl.int64) * rows_of.stride + _offsets(rows_of.stride, BLOCK, BLOCK_WIDTH)
        if GUARD and WIDTH < BLOCK_WIDTH:
            tile = tl.load(pointers, mask=(rows < rows_of.length)[:, None] & (columns < WIDTH)[None, :], other=0.0)
        elif GUARD:
            tile = tl.load(pointers, mask=(rows < rows_of.length)[:, None], other=0.0)
        elif WIDTH < BLOCK_WIDTH:
            tile = tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def in_registers(tile):
    """A 16-bit tile, unchanged. On Hopper, a matrix product then takes it as first operand from registers, and a loop does not load it
    again.

    The inline assembly is empty. Without it, Triton sees a load and takes the operand from shared memory. A loop with two such operands
    must be checked: at 64x64 and head dim 64, ptxas 12.8 gave both the same registers.
    """
    if not INTERPRETED:
        tile = tl.inline_asm_elementwise("", "=r,0", [tile], dtype=tile.dtype, is_pure=True, pack=2)
    return tile


@triton.jit
def load_in_place(pointers):
    """Loads float32 numbers, which no kernel may write meanwhile, into the register layout of the pointers. A plain Triton load would
    choose its own layout and convert it through shared memory."""
    if NVIDIA:
        loaded = tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [pointers.to(tl.int64)], dtype=tl.float32, is_pure=True,
                                           pack=1)
    else:
        loaded = tl.load(pointers)
    return loaded


@triton.jit
def store_rows(rows_of, tile, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Stores [BLOCK, BLOCK_WIDTH] to rows row .. row + BLOCK of a sequence, only within its length and WIDTH."""
    rows = row + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_WIDTH)
    pointers = rows_of.source + tl.cast(row, tl.int64) * rows_of.stride + _offsets(rows_of.stride, BLOCK, BLOCK_WIDTH)
    tl.store(pointers, tile.to(rows_of.source.dtype.element_ty), mask=(rows < rows_of.length)[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def load_rows_at(pointers, inside, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """The rows that begin at pointers [rows], [rows, BLOCK_WIDTH]. They are zero beyond WIDTH and where not `inside` [rows]."""
    columns = tl.arange(0, BLOCK_WIDTH)
    return tl.load(pointers[:, None] + columns[None, :], mask=inside[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def store_rows_at(pointers, tile, inside, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Stores the rows of a tile [rows, BLOCK_WIDTH] that are `inside` [rows], up to WIDTH, from pointers [rows] on."""
    columns = tl.arange(0, BLOCK_WIDTH)
    tl.store(pointers[:, None] + columns[None, :], tile.to(pointers.dtype.element_ty), mask=inside[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def load_own(operand, place, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr, TMA: tl.constexpr):
    """A Place's own tile, [BLOCK, BLOCK_WIDTH]."""
    return load_rows(own_rows(operand, place, TMA), place.row, WIDTH, BLOCK, BLOCK_WIDTH, not TMA, TMA)


@triton.jit
def store_own(operand, tile, place, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Stores a Place's own tile [BLOCK, BLOCK_WIDTH]."""
    store_rows(own_rows(operand, place, False), tile, place.row, WIDTH, BLOCK, BLOCK_WIDTH)
