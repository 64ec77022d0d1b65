"""The consumers of a Hopper forward: warp groups that take tiles, run the mainloop and store the output and its statistics."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward import ROWS, Rows
from attnzoo_kernels._gluon.forward_mainloop import hand_on, queries_in_registers
from attnzoo_kernels._gluon.hopper import place, product_layout, release, store_tile, tma, warpgroup_mma_wait
from attnzoo_kernels._gluon.softmax import log2

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def store_statistics(rows, place, inside, row_max, row_sum, BEFORE: gl.constexpr = 0, lse_bias=None):
    """Stores the LSE and, for the backward, the maximum (+inf for a row without a key) and log2 of the sum. Returns the inverse of the sum.

    row_max is in base 2. lse_bias: added to row_max in the LSE, but not in the statistics. BEFORE: how many other softmaxes have their
    statistics before these in memory.
    """
    if BEFORE > 0:
        rows = Rows(rows.scale, rows.lse + BEFORE * rows.stride_stats, rows.stats + 2 * BEFORE * rows.stride_stats, rows.stride_stats)
    some = row_sum > 0
    divisor = gl.where(some, row_sum, 1.0)
    log_sum = log2(divisor)
    gl.store(rows.lse + place, gl.where(some, ((row_max if lse_bias is None else row_max + lse_bias) + log_sum) * LN2, -float("inf")),
             mask=inside)
    gl.store(rows.stats + place, gl.where(some, row_max, float("inf")), mask=inside)
    gl.store(rows.stats + rows.stride_stats + place, log_sum, mask=inside)
    return 1.0 / divisor


@gluon.jit
def rows_before(tile, problem, PACKED: gl.constexpr):
    """How many rows of statistics lie before those of a tile's sequence and head."""
    if PACKED:
        before = tile.head.to(gl.int64) * problem.seqlen_q + tile.first_q
    else:
        before = (tile.sequence * problem.heads + tile.head).to(gl.int64) * problem.seqlen_q
    return before


@gluon.jit
def stats_rows(tile, span, program, config):
    """STATS_ROWS: (where the statistics of the rows from span.row on lie, which of these rows the sequence has)."""
    i = span.row + gl.arange(0, ROWS, gl.SliceLayout(1, product_layout(config.BLOCK_N)))
    return rows_before(tile, program.problem, config.PACKED) + i, i < span.len_q


@gluon.jit
def write_tile(desc, x, at, ME: gl.constexpr, program):
    """Stores 64 rows by TMA, through shared memory. TMA must have read what was stored there before."""
    store_tile(desc, program.tiles.out.index(ME), x, at, True)


@gluon.jit
def write_span(desc, x, span, at, ME: gl.constexpr, program):
    """write_tile, if the span has rows."""
    if span.row < span.len_q:
        write_tile(desc, x, at, ME, program)


@gluon.jit
def finish(acc, inverse, tile, span, at, epilogue_params, BRANCH: gl.constexpr, ME: gl.constexpr, program, config):
    """FINISH of a softmax: divides the rows by their sums and stores them."""
    if span.row < span.len_q:
        write_tile(program.descs.out, acc * gl.convert_layout(inverse, gl.SliceLayout(1, acc.type.layout))[:, None], at, ME, program)


@gluon.jit
def finish_with_residual(acc, inverse, tile, span, at, epilogue_params, BRANCH: gl.constexpr, ME: gl.constexpr, program, config):
    """FINISH that also stores the output's rounding error. With OUT_SLOTS = 2 the error has a shared tile of its own; else it waits until
    TMA has read the output from the only tile."""
    if span.row < span.len_q:
        out = acc * gl.convert_layout(inverse, gl.SliceLayout(1, acc.type.layout))[:, None]
        write_tile(program.descs.out, out, at, ME, program)
        residual = out - out.to(program.tiles.out.dtype).to(gl.float32)
        if config.OUT_SLOTS is None:
            tma.store_wait(0)
            write_tile(program.descs.residual, residual, at, ME, program)
        else:
            write_tile(program.descs.residual, residual, at, config.CONSUMERS + ME, program)


@gluon.jit
def _take(taken, ME: gl.constexpr, program, config):
    """Takes the next tile; with Q_IN_REGISTERS it also loads the tile's queries."""
    tile = config.READ_TILE(taken, program, config)
    q = 0
    if config.Q_IN_REGISTERS:
        q = queries_in_registers(program, config, ME, taken, tile.sequence >= 0)
    return tile, q


@gluon.jit
def consume(program, config, ME: gl.constexpr):
    """CONSUME: the online softmax, or the weights of WEIGHTS, for this consumer's 64 rows of each tile."""
    step = 0
    taken = 0
    q_step = 0
    tile, q = _take(taken, ME, program, config)
    while tile.sequence >= 0:
        span = config.SPAN(tile, ME, taken, program, config)
        epilogue_params = 0
        if config.EPILOGUE_PARAMS is not None:
            epilogue_params = config.EPILOGUE_PARAMS(tile, span, program, config)
        for BRANCH in gl.static_range(config.BRANCHES):
            step = hand_on(program.bars, step, span.loaded_end - span.end, config)
            acc_pending, row_max, row_sum, step, q_step = config.MAINLOOP(q, tile, span, taken, step, q_step, BRANCH, ME, program, config)
            inverse = 0
            if config.WEIGHTS is None:
                row, there = config.STATS_ROWS(tile, span, program, config)
                if config.ADD_SINK is not None:
                    row_max, row_sum, factor = config.ADD_SINK(row_max, row_sum, epilogue_params, program, config)
                inverse = store_statistics(program.rows, row, there, row_max, row_sum, config.BRANCHES - 1 - BRANCH,
                                           None if config.LSE_BIAS is None else config.LSE_BIAS(tile, span, program, config))
                if config.ADD_SINK is not None:
                    inverse = inverse * factor
            at = place(tile.sequence, tile.head, tile.first_q, span.row, span.len_q, config.PACKED)
            done = tile
            if config.PREFETCH_TILE:
                taken += 1
                tile, q = _take(taken, ME, program, config)
            tma.store_wait(0)  # TMA has read the output tile that was stored before, so that FINISH may overwrite it
            acc = warpgroup_mma_wait(0, deps=(acc_pending,))
            if not config.JOINT_RELEASE:
                release(program.bars.v_empty.index((step - 1) % config.STAGES))
            config.FINISH(acc, inverse, done, span, at, epilogue_params, BRANCH, ME, program, config)
            if not config.PREFETCH_TILE:
                step = hand_on(program.bars, step, span.begin - span.loaded_begin, config)
        if not config.PREFETCH_TILE:
            taken += 1
            tile, q = _take(taken, ME, program, config)
    tma.store_wait(0)
