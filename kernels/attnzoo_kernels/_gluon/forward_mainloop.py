"""The forward's mainloop: a consumer's queries against the keys that the producer warp loads, with an online softmax.

A step is one tile of keys; steps are numbered over all tiles of queries of a program, so that a step's number gives its slot in the ring of
shared memory. A step computes the scores of its keys and, at the same time, the product of the weights and values of the step before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward import ROWS, place_of_queries
from attnzoo_kernels._gluon.hopper import (
    await_stage,
    fence_async_shared,
    mbarrier,
    product_layout,
    release,
    stage_of,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from attnzoo_kernels._gluon.softmax import packed, partial_row_sums, softmax_step, subtrahend, unpacked

# In base 2: row maxima between minus this and zero are raised to zero. The row's largest weight is then at least 2^-8.
BELOW_ZERO = gl.constexpr(8.0)


@gluon.jit
def rows_and_columns(scores, row, column):
    """(row numbers, column numbers) of a tile of scores whose corner is at (row, column)."""
    i = row + gl.arange(0, scores.shape[0], gl.SliceLayout(1, scores.type.layout))
    return i, column + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))


@gluon.jit
def between(scores, i, j, first, last, HAS_FIRST: gl.constexpr):
    """Masks, by -inf, the keys j after last[i] and, under HAS_FIRST, those before i + first."""
    scores = gl.where(j[None, :] <= last[:, None], scores, -float("inf"))
    if HAS_FIRST:
        scores = gl.where(j[None, :] >= (i + first)[:, None], scores, -float("inf"))
    return scores


@gluon.jit
def mask_scores(scores, row, column, len_q, len_k, window_left, window_right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """Masks, by -inf, the keys that a query does not see. Bounds are taken by row, so that an element needs one comparison for each
    side."""
    i, j = rows_and_columns(scores, row, column)
    last = i * 0 + (len_k - 1)
    if HAS_RIGHT:
        last = gl.minimum(last, i + (len_k - len_q + window_right))
    return between(scores, i, j, len_k - len_q - window_left, last, HAS_LEFT)


@gluon.jit
def hand_on(bars, step, count, config):
    """Releases the next `count` tiles of keys and values unread: only other consumers need them, but a slot becomes free when all consumers
    have released it. Returns the next step."""
    for _ in range(count):
        slot = await_stage(bars.k_full, step, config.STAGES)
        mbarrier.arrive(bars.k_empty.index(slot), count=1)
        await_stage(bars.v_full, step, config.STAGES)
        if not config.JOINT_RELEASE:
            mbarrier.arrive(bars.v_empty.index(slot), count=1)
        step += 1
    return step


@gluon.jit
def queries_in_registers(program, config, ME: gl.constexpr, taken, there):
    """Copies a consumer's queries of the taken-th tile to registers and releases their shared memory. It waits for them only if the tile is
    `there`."""
    mbarrier.wait(program.bars.q_full.index(ME), taken & 1, pred=there)
    q = program.tiles.q.index(ME).load(gl.DotOperandLayout(0, product_layout(config.BLOCK_N), 2))
    fence_async_shared()  # fault 2
    mbarrier.arrive(program.bars.q_empty.index(ME), count=1)
    return q


@gluon.jit
def parts_of(tiles, at, config):
    """The queries or keys at index `at`; with PARTS, the tuple of their parts."""
    if config.PARTS is None:
        found = tiles.index(at)
    else:
        found = ()
        for part in gl.static_range(config.PARTS):
            found = found + (tiles.index(at * config.PARTS + part),)
    return found


@gluon.jit
def scores_in_flight(q, keys, slot, nothing, program, config):
    """Starts the product of the queries and the keys in `slot`. With PARTS, the products of the parts are summed in one accumulator. With
    KEY_BIAS, the bias is added to it as the product of a matrix of ones and the bias. nothing: zeros of the result's shape."""
    if config.PARTS is None:
        pending = warpgroup_mma(q, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)
    else:
        pending = nothing
        for part in gl.static_range(config.PARTS):
            pending = warpgroup_mma(q[part], keys[part].permute((1, 0)), pending, use_acc=part > 0, is_async=True)
    if config.KEY_BIAS is not None:  # it may have another dtype than q and k, because only the accumulator is shared
        bias = config.KEY_BIAS(slot, nothing.shape[1], program, config)
        ones = gl.full([ROWS, bias.shape[0]], 1.0, bias.dtype, gl.DotOperandLayout(0, nothing.type.layout, 2))
        pending = warpgroup_mma(ones, bias, pending, is_async=True)
    return pending


@gluon.constexpr_function
def two_loops(config):
    """Whether a mainloop has two loops. The weights that one hands to the other are `packed`."""
    return config.ROW_MAX_NOT_NEGATIVE.value or config.UNMASKED_FROM.value is not None


@gluon.jit
def first_weights(q, keys, slot, k_empty, masked, column, span, scale, program, config):
    """(row_max, partial sums, weights) of the first tile of keys.

    keys: the BLOCK_N keys in `slot`, or their first half where no query sees the second. ROW_MAX_NOT_NEGATIVE: a maximum between
    -BELOW_ZERO and zero is raised to zero. With two_loops the weights are `packed`.
    """
    KEYS: gl.constexpr = keys.shape[0] if config.PARTS is None else config.BLOCK_N
    dtype: gl.constexpr = program.tiles.k.dtype
    tile_layout: gl.constexpr = product_layout(config.BLOCK_N)
    scores_layout: gl.constexpr = product_layout(KEYS)
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(config.BLOCK_DV), 2)
    if isinstance(q, gl.tensor):  # in registers: it has the layout for the product with a whole tile
        q = gl.convert_layout(q, gl.DotOperandLayout(0, scores_layout, 2))
    # [ROWS, KEYS]
    pending = scores_in_flight(q, keys, slot, gl.zeros([ROWS, KEYS], gl.float32, scores_layout), program, config)
    tile_bias = None if config.TILE_BIAS is None else config.TILE_BIAS(column, span, program, config)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    release(k_empty)
    if config.SCORE is not None:
        scores = config.SCORE(scores, column, span, program, config)
    if masked:
        scores = config.MASK(scores, column, span, program, config)
    row_max = 0
    row_sum = 0
    if config.WEIGHTS is None:
        row_max = gl.max(scores, 1)
        if tile_bias is not None:
            row_max = row_max - tile_bias[1]
        if config.ROW_MAX_NOT_NEGATIVE:
            row_max = gl.where((row_max < 0) & (row_max >= -BELOW_ZERO / scale), 0.0, row_max)
        base = gl.where(row_max == -float("inf"), 0.0, row_max)
        weights = gl.exp2(scores * scale - subtrahend(base, scale, tile_bias)[:, None])
        row_sum = gl.convert_layout(partial_row_sums(weights),
                                    partial_row_sums(gl.zeros([ROWS, config.BLOCK_N], gl.float32, tile_layout)).type.layout)
    else:
        weights = config.WEIGHTS(scores, (0, 0, span), program, config)
    if not two_loops(config):
        weights = weights.to(dtype)
    if KEYS < config.BLOCK_N:
        weights = gl.join(weights, gl.zeros([ROWS, KEYS], weights.dtype, scores_layout))
        weights = gl.convert_layout(gl.reshape(gl.permute(weights, (0, 2, 1)), [ROWS, config.BLOCK_N]), tile_layout)
    if config.WEIGHTS is None:
        row_max = gl.convert_layout(row_max, gl.SliceLayout(1, tile_layout))
    if two_loops(config):
        weights = packed(gl.convert_layout(weights, tile_layout), dtype)
    else:
        weights = gl.convert_layout(weights, weights_layout)
    return row_max, row_sum, weights


@gluon.jit
def first_step(q, slot, masked, column, span, scale, program, config):
    """The first step of a mainloop, over the keys in `slot`: (weights, acc, row_max, partial sums)."""
    keys, k_empty = parts_of(program.tiles.k, slot, config), program.bars.k_empty.index(slot)
    HALF: gl.constexpr = config.BLOCK_N // 2
    if config.HALF_TILE and span.row + ROWS + (span.len_k - span.len_q + program.problem.window_right) <= column + HALF:
        row_max, row_sum, p = first_weights(q, keys.slice(0, HALF), slot, k_empty, masked, column, span, scale, program, config)
    else:
        row_max, row_sum, p = first_weights(q, keys, slot, k_empty, masked, column, span, scale, program, config)
    # [ROWS, BLOCK_DV]
    return p, gl.zeros([ROWS, config.BLOCK_DV], gl.float32, product_layout(config.BLOCK_DV)), row_max, row_sum


@gluon.jit
def await_early_keys(step, last_step, program, config):
    """Under K_BEFORE_PV, waits for the keys of a step before last_step, if it is one, ahead of the product with the values before it."""
    if config.K_BEFORE_PV:
        await_stage(program.bars.k_full, step, config.STAGES, last_step)


@gluon.jit
def attend_step(q, p, acc, row_max, row_sum, s, last_step, where, scale, program, config, NOT_NEGATIVE: gl.constexpr = False,
                UNMASKED: gl.constexpr = False, tile_bias=None):
    """Step s of a mainloop: (weights, acc, row_max, partial sums).

    Two products run at once: queries times the keys of this step, and the weights `p` times the values of the step before. The softmax of
    this step overlaps with the second product. where: says which tile of keys this is, for STEP_MASK, TILE_BIAS, SCORE and WEIGHTS.
    UNMASKED: the step needs neither STEP_MASK nor SCORE, and its TILE_BIAS is `tile_bias`. NOT_NEGATIVE: no row_max is negative.
    """
    bars, tiles = program.bars, program.tiles
    dtype: gl.constexpr = tiles.k.dtype
    acc_layout: gl.constexpr = acc.type.layout
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    no_scores = gl.zeros([ROWS, config.BLOCK_N], gl.float32, product_layout(config.BLOCK_N))
    slot, phase = stage_of(s, config.STAGES)
    before, phase_before = stage_of(s - 1, config.STAGES)
    if not config.K_BEFORE_PV:
        mbarrier.wait(bars.k_full.index(slot), phase)
    # [ROWS, BLOCK_N]
    pending = scores_in_flight(q, parts_of(tiles.k, slot, config), slot, no_scores, program, config)
    mbarrier.wait(bars.v_full.index(before), phase_before)
    weights = unpacked(p, weights_layout, dtype) if two_loops(config) else p
    # [ROWS, BLOCK_DV]
    acc_pending = warpgroup_mma(weights, tiles.v.index(before), acc, is_async=True)
    if config.TILE_BIAS is not None and not UNMASKED:  # from global memory, while the products run
        tile_bias = config.TILE_BIAS(_column_of(where, program, config), where[2], program, config)
    scores = warpgroup_mma_wait(1, deps=(pending,))
    if not config.JOINT_RELEASE:
        release(bars.k_empty.index(slot))
    if config.SCORE is not None and not UNMASKED:
        scores = config.SCORE(scores, _column_of(where, program, config), where[2], program, config)
    if config.MASK_IN_LOOP and not UNMASKED:
        scores = config.STEP_MASK(scores, where, program, config)
    if config.WEIGHTS is None:
        weights, row_max, row_sum, rescale = softmax_step(scores, row_max, row_sum, scale, config.EMPTY_ROWS, NOT_NEGATIVE,
                                                            tile_bias)
    else:
        weights = config.WEIGHTS(scores, where, program, config)
    await_early_keys(s + 1, last_step, program, config)  # fault 4: its spin loop keeps the exponentials above the wait for the product
    acc = warpgroup_mma_wait(0, deps=(acc_pending,))
    if config.JOINT_RELEASE:
        release(bars.k_empty.index(slot))
    else:
        release(bars.v_empty.index(before))
    if config.WEIGHTS is None:
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc_layout))[:, None]
    p = packed(weights, dtype) if two_loops(config) else gl.convert_layout(weights.to(dtype), weights_layout)
    return p, acc, row_max, row_sum


@gluon.jit
def attend_steps(q, p, acc, row_max, row_sum, first, second, stop, last_step, PLACE: gl.constexpr, place, TWO_LOOPS: gl.constexpr,
                 NOT_NEGATIVE: gl.constexpr, UNMASKED: gl.constexpr, tile_bias, scale, program, config):
    """Steps first .. stop of a mainloop: (weights, acc, row_max, partial sums). Under TWO_LOOPS, those from `second` on have a loop of
    their own, for which NOT_NEGATIVE and UNMASKED hold. PLACE(s, stop, place) gives attend_step's `where`."""
    for s in range(first, second if TWO_LOOPS else stop):
        p, acc, row_max, row_sum = attend_step(q, p, acc, row_max, row_sum, s, last_step, PLACE(s, stop, place), scale, program, config)
    if TWO_LOOPS:
        for s in range(second, stop):
            p, acc, row_max, row_sum = attend_step(q, p, acc, row_max, row_sum, s, last_step, PLACE(s, stop, place), scale, program, config,
                                                   NOT_NEGATIVE, UNMASKED, tile_bias)
    return p, acc, row_max, row_sum


@gluon.jit
def _of_span(s, stop, span):
    """PLACE where the steps go over one span: the `where` that step_mask reads."""
    return s, stop, span


@gluon.jit
def _column_of(where, program, config):
    """The first key of a step's tile, from step_mask's argument."""
    s, last_step, span = where
    return config.COLUMN(span.begin + last_step - 1 - s, span, False, program, config)


@gluon.jit
def last_product(p, acc, last_step, program, config):
    """Starts the product of the last weights and their values and leaves it in flight."""
    before = await_stage(program.bars.v_full, last_step - 1, config.STAGES)
    return warpgroup_mma(p, program.tiles.v.index(before), acc, is_async=True)


@gluon.jit
def last_sums(p, acc, row_max, row_sum, last_step, scale, program, config):
    """What a mainloop returns: (accumulator with last_product in flight, row_max in base 2, row_sum). p: of its last step."""
    if two_loops(config):
        p = unpacked(p, gl.DotOperandLayout(0, acc.type.layout, 2), program.tiles.k.dtype)
    acc_pending = last_product(p, acc, last_step, program, config)
    if config.WEIGHTS is None:
        row_max = row_max * scale
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, product_layout(config.BLOCK_N)))
    return acc_pending, row_max, row_sum


@gluon.jit
def attend(q, span, step, program, config, q_empty=None):
    """Goes over the tiles of keys from span.end - 1 down to span.begin. Tiles from full_end on and tiles before full_begin need a mask.

    q_empty: the barrier to arrive at as soon as the queries have been read.

    Returns (accumulator with the last product still in flight, row_max in base 2, row_sum, next step); row_max and row_sum mean nothing
    under WEIGHTS. The caller waits for the product and, unless JOINT_RELEASE, releases the last values.
    """
    bars, scale = program.bars, program.rows.scale
    column = config.COLUMN(span.end - 1, span, True, program, config)
    slot = await_stage(bars.k_full, step, config.STAGES)
    masked = span.end > span.full_end or (config.HAS_LEFT and span.end <= span.full_begin)
    p, acc, row_max, row_sum = first_step(q, slot, masked, column, span, scale, program, config)
    step += 1

    last_step = step + span.end - 1 - span.begin
    await_early_keys(step, last_step, program, config)
    second = last_step
    if config.ROW_MAX_NOT_NEGATIVE:
        if gl.min(row_max, 0) >= 0:
            second = step
    tile_bias = None
    if config.UNMASKED_FROM is not None:
        second = gl.minimum(gl.maximum(config.UNMASKED_FROM(last_step, span, program, config), step), last_step)
        if config.TILE_BIAS is not None:
            tile_bias = config.TILE_BIAS(config.COLUMN(span.begin, span, False, program, config), span, program, config)
    p, acc, row_max, row_sum = attend_steps(q, p, acc, row_max, row_sum, step, second, last_step, last_step, _of_span, span,
                                            two_loops(config), config.ROW_MAX_NOT_NEGATIVE, config.UNMASKED_FROM is not None, tile_bias,
                                            scale, program, config)
    if q_empty is not None:
        mbarrier.arrive(q_empty, count=1)
    acc_pending, row_max, row_sum = last_sums(p, acc, row_max, row_sum, last_step, scale, program, config)
    return acc_pending, row_max, row_sum, last_step


@gluon.jit
def await_queries(q_step, ME: gl.constexpr, program, config):
    """Waits for a consumer's queries of the q_step-th load; returns their index in shared memory."""
    at, phase = place_of_queries(q_step, ME, config)
    mbarrier.wait(program.bars.q_full.index(at), phase)
    return at


@gluon.jit
def mainloop(q, tile, span, taken, step, q_step, BRANCH: gl.constexpr, ME: gl.constexpr, program, config):
    """MAINLOOP over one span of keys. Queries in shared memory are those of the branch, if each branch has a slot, else those of the
    taken-th tile."""
    if not config.Q_IN_REGISTERS:
        if config.Q_SLOTS == config.BRANCHES:
            at = BRANCH * config.CONSUMERS + ME
            mbarrier.wait(program.bars.q_full.index(at), taken & 1)
        else:
            at = await_queries(taken, ME, program, config)
        q = parts_of(program.tiles.q, at, config)
    if config.PARTS is None:
        acc_pending, row_max, row_sum, step = attend(q, span, step, program, config)
        if not config.Q_IN_REGISTERS:
            mbarrier.arrive(program.bars.q_empty.index(at), count=1)
    else:
        acc_pending, row_max, row_sum, step = attend(q, span, step, program, config, program.bars.q_empty.index(at))
    return acc_pending, row_max, row_sum, step, q_step


@gluon.jit
def mainloop_in_turn(end, span, step, q_step, scale, FIRST: gl.constexpr, ENDS: gl.constexpr, PLACE: gl.constexpr,
                     ME: gl.constexpr, program, config, UNMASKED_FROM: gl.constexpr = None):
    """A MAINLOOP over two or three segments of keys under one softmax. Each segment has its own queries, in slots that follow each other.

    end: the tile after the last one of the first segment, which is not empty; the mainloop begins with tile end - 1.
    FIRST(span): whether that tile needs a mask.
    ENDS(end, step, span, program, config): for each segment the step after its last one.
    PLACE(s, stop, (n, first, span)): attend_step's `where` for step s of the n-th segment, whose steps in the loop are first .. stop.
    UNMASKED_FROM(n, stop, span): the step from which on no step of the n-th segment needs a mask; those get a loop without masks. It leaves
    at least one step of each segment to the loop with masks (fault 22). May be left out.
    """
    bars, tiles = program.bars, program.tiles
    at = await_queries(q_step, ME, program, config)
    slot = await_stage(bars.k_full, step, config.STAGES)
    masked = FIRST(span)
    p, acc, row_max, row_sum = first_step(tiles.q.index(at), slot, masked, (end - 1) * config.BLOCK_N, span, scale, program, config)
    ends = ENDS(end, step, span, program, config)
    last_step = ends[len(ends) - 1]
    step += 1
    await_early_keys(step, last_step, program, config)
    for n in range(len(ends)):
        stop = _nth(ends, n)
        if (n > 0) & (stop > step):
            mbarrier.arrive(bars.q_empty.index(at), count=1)
            q_step += 1
            at = await_queries(q_step, ME, program, config)
        unmasked = stop
        if UNMASKED_FROM is not None:
            unmasked = gl.minimum(gl.maximum(UNMASKED_FROM(n, stop, span), step), stop)
        p, acc, row_max, row_sum = attend_steps(tiles.q.index(at), p, acc, row_max, row_sum, step, unmasked, stop, last_step, PLACE,
                                                (n, step, span), UNMASKED_FROM is not None, False, True, None, scale, program, config)
        step = gl.maximum(step, stop)
    mbarrier.arrive(bars.q_empty.index(at), count=1)
    acc_pending, row_max, row_sum = last_sums(p, acc, row_max, row_sum, last_step, scale, program, config)
    return acc_pending, row_max, row_sum, last_step, q_step + 1


@gluon.jit
def _nth(numbers, n):
    if len(numbers) == 2:
        number = gl.where(n == 0, numbers[0], numbers[1])
    else:
        number = gl.where(n == 0, numbers[0], gl.where(n == 1, numbers[1], numbers[2]))
    return number


@gluon.jit
def column(tile, span, FIRST: gl.constexpr, program, config):
    """COLUMN where the n-th tile of keys begins at n * BLOCK_N."""
    return tile * config.BLOCK_N


@gluon.jit
def mask(scores, column, span, program, config):
    """MASK of a causal mask or a window; keys after the sequence's end are masked, too."""
    return mask_scores(scores, span.row, column, span.len_q, span.len_k, program.problem.window_left, program.problem.window_right,
                       config.HAS_LEFT, config.HAS_RIGHT)


@gluon.jit
def step_mask(scores, where, program, config):
    """STEP_MASK: masks the tiles that lie outside of the span's full_begin .. full_end."""
    s, last_step, span = where
    tile = span.begin + last_step - 1 - s
    if (tile >= span.full_end) | (tile < span.full_begin):
        scores = config.MASK(scores, config.COLUMN(tile, span, False, program, config), span, program, config)
    return scores
