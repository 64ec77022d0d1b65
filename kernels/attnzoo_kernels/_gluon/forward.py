"""The Hopper forward: what its warps share, and the body of its kernels.

A program stays on its multiprocessor and takes tiles of queries from a counter. One warp loads through TMA (`forward_producer`). Warp
groups of 64 queries each, the consumers, multiply and take the softmax (`forward_consumer`), from the last tile of keys that they see to
the first (`forward_mainloop`). These know no variant: what a variant is stands in its `Config`.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import barriers, constants

ROWS = gl.constexpr(64)  # of a consumer: what one matrix instruction takes
WORK = gl.constexpr(2)  # tiles that the loading warp may be ahead


@constants
class Config:
    """What a kernel is compiled for. Hooks get the Program and the Config last. A tile is what NEXT_TILE and TAKE return, a span what SPAN
    does: named tuples with the fields that the library's own have."""

    BLOCK_N: gl.constexpr  # keys of a tile
    BLOCK_DV: gl.constexpr
    STAGES: gl.constexpr  # tiles of keys and of values in shared memory
    CONSUMERS: gl.constexpr
    REGISTERS: gl.constexpr  # of a consumer's thread
    PACKED: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    BRANCHES: gl.constexpr  # softmaxes of a tile, one after the other
    MASK_IN_LOOP: gl.constexpr  # other tiles of keys than a consumer's first one may need a mask
    EMPTY_ROWS: gl.constexpr  # a row may still see no key after the first tile of keys
    Q_SLOTS: gl.constexpr  # a consumer's tiles of queries in shared memory
    Q_IN_REGISTERS: gl.constexpr  # its queries move on to registers, and their place is free at once
    JOINT_RELEASE: gl.constexpr  # keys of a step and values of the one before go back to the producer together
    INDEX_EARLY: gl.constexpr  # the producer asks for the next tile before it loads this one's
    Q_PLAIN: gl.constexpr  # packed queries are loaded by rows of all sequences, and do not end where theirs does
    K_BEFORE_PV: gl.constexpr  # wait for the next keys between the exponentials and the wait for P V (fault 4)
    HALF_TILE: gl.constexpr  # half of a consumer's first tile of keys is left out where no query sees it
    PREFETCH_TILE: gl.constexpr  # a consumer takes its next tile while the last product of this one is in flight
    ROW_MAX_NOT_NEGATIVE: gl.constexpr  # row maxima by integer instructions once none is below zero; not with MASK_IN_LOOP
    OPTIONS: gl.constexpr  # a variant's own constants, a struct like this one

    PRODUCE: gl.constexpr  # () the loading warp: one of forward_producer, or a variant's
    CONSUME: gl.constexpr  # (ME) a consumer: forward_consumer.consume, or a variant's
    NEXT_TILE: gl.constexpr  # (index) -> the tile of that index, or the next one that has rows; its `words` go to the consumers
    LOAD_TILE: gl.constexpr  # (tile, step, q_step) -> (step, q_step) behind the loads of a tile, for produce_segments
    NEXT_ENTRY: gl.constexpr  # (j, tile) -> the tile of keys behind the j-th, in forward_producer.load_segment; may be left out
    TAKE: gl.constexpr  # (taken) -> the consumers' tile, whose sequence is -1 behind the last one
    SPAN: gl.constexpr  # (tile, ME, taken) -> a consumer's rows and the tiles of keys that they see
    BEGIN: gl.constexpr  # (tile, span) -> what JOIN and FINISH need from memory, asked for early; may be left out
    MAINLOOP: gl.constexpr  # (q, tile, span, taken, step, q_step, BRANCH, ME) -> (product in flight, row_max, row_sum, step, q_step)
    JOIN: gl.constexpr  # (row_max, row_sum, begun) -> both with what joins a row without a value, and the output's factor; may be left out
    COLUMN: gl.constexpr  # (tile of keys, span, FIRST) -> its first key; FIRST: it is a consumer's first one
    KEY_BIAS: gl.constexpr  # (column, KEYS, span) -> [KEYS], what scores of KEYS keys are less by, in the products' unit; may be left out
    MASK: gl.constexpr  # (scores, column, span) -> -inf where a query does not see a key
    STEP_MASK: gl.constexpr  # (scores, where) -> MASK for those tiles in the loop that need it, under MASK_IN_LOOP
    INSIDE: gl.constexpr  # (tile, span, layout) -> (rows of lse and statistics, whether they are there)
    MORE: gl.constexpr  # (tile, span) -> what the LSE of rows is more by than their statistics, in base 2; may be left out
    WEIGHTS: gl.constexpr  # (scores, (step, last step, span)) -> weights that need no statistics of their row; left out: a softmax's
    FINISH: gl.constexpr  # (acc, inverse, tile, span, at, begun, BRANCH, ME): writes the output, which lies at the box `at`


class Descriptors(NamedTuple):
    q: Any
    k: Any
    v: Any
    out: Any


class Problem(NamedTuple):
    counter: Any  # of tiles that were taken
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    n_seqs: Any
    seqlen_q: Any  # of packed sequences the total
    seqlen_k: Any
    heads: Any
    group: Any  # heads of a key head
    head_group: Any  # heads whose tiles are taken in turn, so that their keys stay in L2
    n_tiles: Any
    window_left: Any
    window_right: Any


class Rows(NamedTuple):
    """Of the output: the scale that brings scores to base 2, and where statistics go."""

    scale: Any
    lse: Any
    stats: Any  # [2, rows]: row_max in base 2 and log2 of row_sum
    stride_stats: Any


class Tiles(NamedTuple):
    """In shared memory."""

    q: Any  # [Q_SLOTS * CONSUMERS, 64, BLOCK_D]
    out: Any  # [CONSUMERS, 64, BLOCK_DV]
    k: Any  # [STAGES, BLOCK_N, BLOCK_D]
    v: Any  # [STAGES, BLOCK_N, BLOCK_DV]
    work: Any  # words of the next tiles


class Barriers(NamedTuple):
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    work_full: Any
    work_empty: Any


class Program(NamedTuple):
    descs: Descriptors
    problem: Problem
    rows: Rows
    tiles: Tiles
    bars: Barriers
    own: Any  # a variant's


@gluon.jit
def tiles_like(desc, COUNT: gl.constexpr):
    """COUNT shared tiles of a descriptor's box."""
    SHAPE: gl.constexpr = desc.block_type.shape
    TILE: gl.constexpr = [SHAPE[len(SHAPE) - 2], SHAPE[len(SHAPE) - 1]]
    return gl.allocate_shared_memory(desc.dtype, [COUNT, TILE[0], TILE[1]], gl.NVMMASharedLayout.get_default_for(TILE, desc.dtype))


@gluon.jit
def work_and_barriers(config, WORDS: gl.constexpr = 3):
    """Where WORDS of the next tiles are written for the consumers, and Barriers."""
    work = gl.allocate_shared_memory(gl.int32, [WORDS * WORK, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    PLACES: gl.constexpr = config.Q_SLOTS * config.CONSUMERS
    bars = Barriers(barriers(PLACES, 1), barriers(PLACES, 1), barriers(config.STAGES, 1), barriers(config.STAGES, config.CONSUMERS),
                    barriers(config.STAGES, 1), barriers(config.STAGES, config.CONSUMERS), barriers(WORK, 1),
                    barriers(WORK, config.CONSUMERS))
    return work, bars


@gluon.jit
def allocate(descs, config, WORDS: gl.constexpr = 3):
    """(Tiles, Barriers). WORDS: of a tile, for the consumers."""
    q = tiles_like(descs.q, config.Q_SLOTS * config.CONSUMERS)
    out = tiles_like(descs.out, config.CONSUMERS)
    k = tiles_like(descs.k, config.STAGES)
    v = tiles_like(descs.v, config.STAGES)
    work, bars = work_and_barriers(config, WORDS)
    return Tiles(q, out, k, v, work), bars
