"""The Hopper forward: what its warps share, and the body of its kernels.

A program stays on its multiprocessor and takes tiles of queries from a counter. One warp loads through TMA (`forward_producer`). Warp
groups of 64 queries each, the consumers, multiply and take the softmax (`forward_consumer`), from the last tile of keys that they see to
the first (`forward_mainloop`). These know no variant: what a variant is stands in its `Config`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward import Program, allocate
from attnzoo_kernels._gluon.forward_consumer import consume, finish, inside
from attnzoo_kernels._gluon.forward_mainloop import column, mainloop, mask, step_mask
from attnzoo_kernels._gluon.forward_producer import produce_prefetched
from attnzoo_kernels._gluon.hopper import constants, invalidate
from attnzoo_kernels._gluon.tile_scheduler import next_tile, span, take


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
    PARTS: gl.constexpr  # queries and keys lie in so many tiles each, beside each other, of which a place is freed early; not with
    # Q_IN_REGISTERS or HALF_TILE; None: they lie in one
    OUTS: gl.constexpr  # tiles of outputs that a consumer has a place for; None: one
    OPTIONS: gl.constexpr  # a variant's own constants, a struct like this one

    PRODUCE: gl.constexpr = produce_prefetched  # () the loading warp
    CONSUME: gl.constexpr = consume  # (ME) a consumer
    NEXT_TILE: gl.constexpr = next_tile  # (index) -> the tile of that index, or the next one that has rows; its `words` go to the consumers
    LOAD_TILE: gl.constexpr  # (tile, step, q_step) -> (step, q_step) behind the loads of a tile, for produce_segments
    NEXT_ENTRY: gl.constexpr  # (j, tile) -> the tile of keys behind the j-th, in forward_producer.load_segment; may be left out
    TAKE: gl.constexpr = take  # (taken) -> the consumers' tile, whose sequence is -1 behind the last one
    SPAN: gl.constexpr = span  # (tile, ME, taken) -> a consumer's rows and the tiles of keys that they see
    BEGIN: gl.constexpr  # (tile, span) -> what JOIN and FINISH need from memory, asked for early; may be left out
    MAINLOOP: gl.constexpr = mainloop  # (q, tile, span, taken, step, q_step, BRANCH, ME) -> (product in flight, row_max, row_sum,
    # step, q_step)
    JOIN: gl.constexpr  # (row_max, row_sum, begun) -> both with what joins a row without a value, and the output's factor; may be left out
    COLUMN: gl.constexpr = column  # (tile of keys, span, FIRST) -> its first key; FIRST: it is a consumer's first one
    KEY_BIAS: gl.constexpr  # (column, KEYS, span) -> [KEYS], what scores of KEYS keys are less by, in the products' unit; may be left out
    MASK: gl.constexpr = mask  # (scores, column, span) -> -inf where a query does not see a key
    STEP_MASK: gl.constexpr = step_mask  # (scores, where) -> MASK for those tiles in the loop that need it, under MASK_IN_LOOP
    INSIDE: gl.constexpr = inside  # (tile, span, layout) -> (rows of lse and statistics, whether they are there)
    MORE: gl.constexpr  # (tile, span) -> what the LSE of rows is more by than their statistics, in base 2; may be left out
    WEIGHTS: gl.constexpr  # (scores, (step, last step, span)) -> weights that need no statistics of their row; left out: a softmax's
    FINISH: gl.constexpr = finish  # (acc, inverse, tile, span, at, begun, BRANCH, ME): writes the output, which lies at the box `at`


@gluon.jit
def _consume(program, config, ME: gl.constexpr):
    config.CONSUME(program, config, ME)


@gluon.jit
def _produce(program, config):
    config.PRODUCE(program, config)


@gluon.jit
def run_tiles(descs, problem, rows, own, config, WORDS: gl.constexpr = 3):
    """The body of a kernel with the tiles and barriers of `allocate`."""
    tiles, bars = allocate(descs, config, WORDS)
    run_forward(Program(descs, problem, rows, tiles, bars, own), config)


@gluon.jit
def run_forward(program, config):
    """The kernel's body: the default warps are the first consumer."""
    if config.CONSUMERS == 1:
        gl.warp_specialize([(_consume, (program, config, 0)), (_produce, (program, config))], [1], [24])
    elif config.CONSUMERS == 2:
        gl.warp_specialize([(_consume, (program, config, 0)), (_consume, (program, config, 1)), (_produce, (program, config))],
                           [4, 1], [config.REGISTERS, 24])
    else:
        gl.warp_specialize([(_consume, (program, config, 0)), (_consume, (program, config, 1)), (_consume, (program, config, 2)),
                            (_produce, (program, config))], [4, 4, 1], [config.REGISTERS, config.REGISTERS, 24])
    invalidate(program.bars)
