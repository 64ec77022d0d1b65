"""What the Hopper kernels of chosen blocks share: which rows a program walks over, the warps that gather them, and how parts are stored.

A program has one block of keys and some of the rows that chose it: TOGETHER of the ROWS heads of each pair (query, chosen block). Programs
of the same heads follow each other. Parts lie in the order of the programs: those of the first TOGETHER heads of all pairs come first.
An own row is a token times the number of heads, plus the head. A chosen block is an earlier one, so that it has all of its BLOCK_N keys.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from attnzoo_kernels._gluon.hopper import (
    async_load,
    await_empty,
    barriers,
    box,
    constants,
    mbarrier,
    place,
    product_layout,
    store_tile,
)
from attnzoo_kernels._gluon.tiles import find_sequence

STEP = gl.constexpr(64)  # rows of a step, which is what one matrix instruction takes
GATHER_WARPS = gl.constexpr(4)
UNIT = gl.constexpr(8)  # numbers that a thread copies at once, 16 bytes
NUMBERS = ["count", "none", "total", "total_q", "total_k"]


def heads_together(rows: int, most: int = STEP.value) -> int:
    """How many of the `rows` heads that choose together a program takes: a power of two that divides `rows`, at most `most` and STEP."""
    return min(rows & -rows, 1 << min(most, STEP.value).bit_length() - 1)


@dataclass(frozen=True)
class Tile:
    steps: int  # of a program at most
    stages: int  # tiles of rows in shared memory
    maxnreg: int  # registers of a thread, on average over all warps


def plan_launch(tile: Tile, together: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor, pair: Tensor, chosen_q: Tensor, rows: int,
                block_size: int) -> tuple[int, tuple[int, ...], dict[str, int]]:
    """How many programs a launch has, its NUMBERS, and its constants."""
    (tokens, heads, width), none = q.shape, chosen_q.shape[0] - 1
    total, turns, chunk = pair.numel() * rows, rows // together, tile.steps * STEP.value
    programs = (total // (chunk * turns) + none + 1) * turns
    return programs, (none // k.shape[1], none, total, tokens, k.shape[0]), {
        "HEADS": heads, "ROWS": rows, "TOGETHER": together, "SLOTS": place.shape[1], "BLOCK_N": block_size, "WIDTH": width,
        "VALUE_WIDTH": v.shape[-1], "CHUNK": chunk, "STAGES": tile.stages, "num_warps": 4, "maxnreg": tile.maxnreg}


def units_of(x: Tensor) -> tuple[int, int]:
    """The strides of tokens and heads in units of UNIT, so that the compiler knows that rows begin at multiples of 16 bytes."""
    return tuple(stride // UNIT.value for stride in x.stride()[:2])


@constants
class Constants:
    """Of both directions."""

    HEADS: gl.constexpr
    ROWS: gl.constexpr  # heads that choose together
    TOGETHER: gl.constexpr  # of which a program has so many, a power of two
    SLOTS: gl.constexpr
    BLOCK_N: gl.constexpr  # tokens of a block
    WIDTH: gl.constexpr
    VALUE_WIDTH: gl.constexpr
    CHUNK: gl.constexpr  # rows of a program
    STAGES: gl.constexpr  # tiles of rows in shared memory


class Item(NamedTuple):
    """What a program walks over."""

    pair: Any  # its first pair
    part: Any  # its first part row
    rows: Any  # how many rows it has, TOGETHER for each pair
    first_head: Any  # among the heads that choose together
    key: Any  # the first token of its block
    keys: Any  # how many the block has; 0 for the pairs that stand for no block
    key_head: Any
    nowhere: Any  # how many own rows there are: the number behind the last one


@gluon.jit
def find_item(cu_seqlens_q, cu_seqlens_k, count, none, total, total_q, total_k, config):
    """This program's Item. The bounds of the queries count rows of all ROWS heads."""
    SHARE: gl.constexpr = config.ROWS // config.TOGETHER
    slots = total // (config.CHUNK * SHARE) + none + 1
    slot = gl.program_id(0) % slots
    number = find_sequence(cu_seqlens_q, slot, none, config.CHUNK * SHARE)
    after = gl.minimum(number + 1, none)
    first = gl.load(cu_seqlens_q + number)
    end = gl.where(number == none, total, gl.load(cu_seqlens_q + after))
    key = gl.load(cu_seqlens_k + number)
    keys = gl.load(cu_seqlens_k + after) - key
    chunk = slot - first // (config.CHUNK * SHARE) - number
    rows = gl.minimum((end - first) // SHARE - chunk * config.CHUNK, config.CHUNK)
    key_head = number // count
    pair = first // config.ROWS + chunk * (config.CHUNK // config.TOGETHER)
    turn = gl.program_id(0) // slots
    return Item(pair=pair, part=turn * (total // SHARE) + pair * config.TOGETHER, rows=gl.maximum(rows, 0),
                first_head=turn * config.TOGETHER, key=key - key_head * total_k, keys=keys, key_head=key_head,
                nowhere=total_q * config.HEADS)


@gluon.constexpr_function
def row_layout(WIDTH):
    """Rows of 16-bit numbers, 16 bytes a thread."""
    threads = min(WIDTH // UNIT.value, 32)
    return gl.BlockedLayout([1, UNIT.value], [32 // threads, threads], [GATHER_WARPS.value, 1], [1, 0])


@gluon.jit
def own_rows(pair_ptr, item, at, config):
    """(the own rows [STEP] that the rows at .. at + STEP of an item stand for; which of them the item has, [STEP]). A thread has one row.
    In place of rows past its end stands the item's first row."""
    row = at + gl.arange(0, STEP, gl.BlockedLayout([1], [32], [GATHER_WARPS], [0]))
    inside = row < item.rows
    row = gl.where(inside, row, 0).to(gl.uint32)
    pair = gl.load(pair_ptr + item.pair + row // config.TOGETHER).to(gl.uint32)
    return pair // config.SLOTS * config.ROWS + item.first_head.to(gl.uint32) + row % config.TOGETHER, inside


@gluon.jit
def copy_rows(smem, ptr, strides, own, config, WIDTH: gl.constexpr):
    """Begins to copy the own rows [STEP] of a tensor (tokens, heads, WIDTH) into shared memory [STEP, WIDTH]. A thread finds out where one
    row lies, and copies parts of several. strides: of tokens and heads, see units_of."""
    layout: gl.constexpr = row_layout(WIDTH)
    start = ((own // config.HEADS).to(gl.int64) * strides[0] + (own % config.HEADS).to(gl.int64) * strides[1]) * UNIT
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    pointers = ptr + (gl.convert_layout(start, gl.SliceLayout(1, layout))[:, None] + column[None, :])
    async_copy.async_copy_global_to_shared(smem, pointers)


@gluon.jit
def row_barriers(STAGES: gl.constexpr):
    """The ring of barriers that `gather` fills: each thread that copies arrives, when its copies are complete."""
    return barriers(STAGES, 32 * GATHER_WARPS)


@gluon.jit
def _load_block(program):
    """Loads the item's keys and values."""
    item, k_desc, v_desc = program.item, program.k_desc, program.v_desc
    bar = program.bars.block_full.index(0)
    mbarrier.expect(bar, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    async_load(k_desc, [0, item.key_head, item.key, 0], bar, box(program.tiles.k.index(0), k_desc))
    async_load(v_desc, [0, item.key_head, item.key, 0], bar, box(program.tiles.v.index(0), v_desc))


@gluon.jit
def gather(COPY: gl.constexpr, program, config):
    """All that the warps that gather do, if the item has a block and rows: they load the block and fill a ring of STAGES tiles with the
    rows, one step after the other. COPY(slot, own rows, which of them the item has, program, config) begins the copies of a step. A reader
    that uses matrix instructions calls fence_async_shared first; called here, it would wait for all copies that are on their way."""
    item, bars = program.item, program.bars
    if (item.keys > 0) & (item.rows > 0):
        _load_block(program)
        own, inside = own_rows(program.pair, item, 0, config)
        for step in range(gl.cdiv(item.rows, STEP)):
            following = own_rows(program.pair, item, (step + 1) * STEP, config)
            slot = await_empty(bars.rows_empty, step, config.STAGES)
            COPY(slot, own, inside, program, config)
            async_copy.mbarrier_arrive(bars.rows_full.index(slot), increment_count=False)
            own, inside = following


@gluon.jit
def store_part(x, step, program):
    """Stores the part rows of a step that the item has, x [STEP, columns]."""
    item = program.item
    store_tile(program.part_desc, program.tiles.part.index(0), x, place(0, 0, item.part, step * STEP, item.rows, True), False)


@gluon.jit
def store_no_parts(WIDTH: gl.constexpr, program):
    """Stores zeros for the pairs that stand for no block."""
    for step in range(gl.cdiv(program.item.rows, STEP)):
        store_part(gl.zeros([STEP, WIDTH], gl.float32, product_layout(WIDTH)), step, program)
