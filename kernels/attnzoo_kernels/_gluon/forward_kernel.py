"""The Hopper forward: the constants and hooks that it is compiled for, and the body of its kernels.

A kernel is persistent: a program stays on its multiprocessor and takes tiles of queries from a counter. One producer warp loads through TMA
(`forward_producer`). The consumers are warp groups of 64 queries each. They compute the products and the softmax (`forward_consumer`), from
the last tile of keys that their queries see to the first (`forward_mainloop`). These modules know no variant: all that belongs to a variant
is in its `Config`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward import Program, allocate
from attnzoo_kernels._gluon.forward_consumer import consume, finish, stats_rows
from attnzoo_kernels._gluon.forward_mainloop import column, mainloop, mask, step_mask
from attnzoo_kernels._gluon.forward_producer import produce_prefetched
from attnzoo_kernels._gluon.hopper import constants, invalidate
from attnzoo_kernels._gluon.tile_scheduler import loaded_tiles, next_tile, read_tile, span


@constants
class Config:
    """What a kernel is compiled for: constants, switches and hooks.

    The comment at a hook gives its arguments and its result. Each hook also gets the Program and the Config as its last arguments, except
    CONSUME, whose last one is ME, the consumer's number. `tile` is what NEXT_TILE or READ_TILE returns, `span` is what SPAN returns: named
    tuples that have at least the fields of Tile, Taken and Span in `tile_scheduler`. A hook that "may be left out" is None by default.
    """

    BLOCK_N: gl.constexpr  # keys of a tile
    BLOCK_DV: gl.constexpr  # columns of values and of the output, padded
    STAGES: gl.constexpr  # tiles of keys and of values in shared memory
    CONSUMERS: gl.constexpr
    REGISTERS: gl.constexpr  # of each consumer thread
    PACKED: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    BRANCHES: gl.constexpr  # how many softmaxes a tile of queries has, one after the other
    MASK_IN_LOOP: gl.constexpr  # tiles of keys after a consumer's first one may need a mask, too
    EMPTY_ROWS: gl.constexpr  # a row may still see no key after the first tile of keys
    Q_SLOTS: gl.constexpr  # tiles of queries that a consumer has room for in shared memory
    Q_IN_REGISTERS: gl.constexpr  # the queries are copied to registers, and their shared memory is released at once
    JOINT_RELEASE: gl.constexpr  # the keys of a step and the values of the step before are released to the producer together
    INDEX_EARLY: gl.constexpr  # the producer takes the next tile's index from the counter before it loads this tile's tensors
    Q_UNGUARDED: gl.constexpr  # rows of packed queries past the end of their sequence are loaded as they are; otherwise they are zero
    K_BEFORE_PV: gl.constexpr  # wait for the next keys between the exponentials and the wait for P V (fault 4)
    HALF_TILE: gl.constexpr  # a consumer skips the second half of its first tile of keys where no query sees it
    PREFETCH_TILE: gl.constexpr  # a consumer takes its next tile while the last product of this one is in flight
    ROW_MAX_NOT_NEGATIVE: gl.constexpr  # once no row maximum is below zero, integer instructions take the maxima; not with MASK_IN_LOOP
    PARTS: gl.constexpr  # the columns of queries and keys are split into so many tiles; the queries are released before the last product.
    # Not with Q_IN_REGISTERS or HALF_TILE. None: they are not split
    OUT_SLOTS: gl.constexpr  # output tiles that a consumer has room for in shared memory; None: one
    TILE_WORDS: gl.constexpr  # how many `words` a tile has; None: the three of Tile
    OPTIONS: gl.constexpr  # a variant's own constants, a struct like this one

    PRODUCE: gl.constexpr = produce_prefetched  # (): all that the producer warp does
    CONSUME: gl.constexpr = consume  # (program, config, ME): all that a consumer does
    NEXT_TILE: gl.constexpr = next_tile  # (index) -> the tile of that index, or the next one that has rows; its `words` go to the consumers
    LOAD_TILE: gl.constexpr  # (tile, step, q_step) -> (step, q_step) after all loads of a tile; for produce_segments
    NEXT_KEYS: gl.constexpr  # (j, tile) -> the tile of keys to load after the j-th; for forward_producer.load_segment; may be left out
    READ_TILE: gl.constexpr = read_tile  # (taken) -> the next tile that the producer warp has published, as consumers know it; its
    # sequence is -1 after the last tile
    LOADED_TILES: gl.constexpr = loaded_tiles  # (tile as the producer or as a consumer knows it) -> (begin, end) of the tiles of keys
    # that the producer loads for a tile of queries, at least one; the same numbers for both
    SPAN: gl.constexpr = span  # (tile, ME, taken) -> a consumer's rows and the tiles of keys that they see
    SPAN_PARAMS: gl.constexpr  # (tile, row) -> the variant's parameters for a span: the `own` of the library's SPAN; may be left out
    EPILOGUE_PARAMS: gl.constexpr  # (tile, span) -> the variant's parameters for ADD_SINK and FINISH, loaded from global memory before
    # the mainloop; may be left out
    MAINLOOP: gl.constexpr = mainloop  # (q, tile, span, taken, step, q_step, BRANCH, ME) -> (product in flight, row_max, row_sum,
    # step, q_step)
    ADD_SINK: gl.constexpr  # (row_max, row_sum, epilogue_params) -> (both with the attention sink, a key that has no value; the output's
    # factor); may be left out
    COLUMN: gl.constexpr = column  # (tile of keys, span, FIRST) -> the tile's first key; FIRST: it is the consumer's first tile
    LOAD_BIAS: gl.constexpr  # (slot, tile, key): loads the bias of a tile of keys, with an arrival of its own at k_full; may be left out
    KEY_BIAS: gl.constexpr  # (slot, KEYS) -> [16, KEYS] in shared memory, whose rows are added to the products with the slot's first KEYS
    # keys; may be left out
    TILE_BIAS: gl.constexpr  # (column, span) -> (a bias that is the same for all scores of a tile, in base 2; the same in the scores'
    # unit). It is subtracted from the scores, together with the row maximum; may be left out; not with WEIGHTS
    SCORE: gl.constexpr  # (scores, column, span) -> scores with what the variant adds, before masks; may be left out
    MASK: gl.constexpr = mask  # (scores, column, span) -> scores with -inf where a query does not see a key
    STEP_MASK: gl.constexpr = step_mask  # (scores, where) -> scores, by MASK if the step's tile needs it; under MASK_IN_LOOP
    UNMASKED_FROM: gl.constexpr  # (last step, span) -> the step from which on no tile needs SCORE or STEP_MASK, and all tiles have the same
    # TILE_BIAS; these steps get a loop of their own; may be left out; not with ROW_MAX_NOT_NEGATIVE
    STATS_ROWS: gl.constexpr = stats_rows  # (tile, span) -> (where the rows' lse and statistics lie, which of the rows exist)
    LSE_BIAS: gl.constexpr  # (tile, span) -> a term of all scores of a row, in base 2, that the scores lack: it is added to the LSE, but
    # not to the statistics; may be left out
    WEIGHTS: gl.constexpr  # (scores, (step, last step, span)) -> weights, each from its score alone; the first tile of keys gets 0 for
    # both steps. If it is left out, the weights are those of a softmax
    FINISH: gl.constexpr = finish  # (acc, inverse, tile, span, at, epilogue_params, BRANCH, ME): stores the output at
    # the box coordinates `at`


@gluon.jit
def _consume(program, config, ME: gl.constexpr):
    config.CONSUME(program, config, ME)


@gluon.jit
def _produce(program, config):
    config.PRODUCE(program, config)


@gluon.jit
def run_tiles(descs, problem, rows, own, config):
    """The body of a kernel whose tiles and barriers are those of `allocate`."""
    tiles, bars = allocate(descs, config)
    run_forward(Program(descs, problem, rows, tiles, bars, own), config)


@gluon.jit
def run_forward(program, config):
    """The body of a kernel: starts the producer warp and the consumers. The kernel's default warps are the first consumer."""
    if config.CONSUMERS == 1:
        gl.warp_specialize([(_consume, (program, config, 0)), (_produce, (program, config))], [1], [24])
    elif config.CONSUMERS == 2:
        gl.warp_specialize([(_consume, (program, config, 0)), (_consume, (program, config, 1)), (_produce, (program, config))],
                           [4, 1], [config.REGISTERS, 24])
    else:
        gl.warp_specialize([(_consume, (program, config, 0)), (_consume, (program, config, 1)), (_consume, (program, config, 2)),
                            (_produce, (program, config))], [4, 4, 1], [config.REGISTERS, config.REGISTERS, 24])
    invalidate(program.bars)
