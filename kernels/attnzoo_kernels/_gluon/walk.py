"""The forward's inner walk: a warp group's queries against the keys that a loading warp brings, with one online softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import barrier, fence_async_shared, mbarrier, release, stage_of, warpgroup_mma, warpgroup_mma_wait
from attnzoo_kernels._gluon.softmax import log2, packed, partial_row_sums, softmax_step, unpacked

LN2 = gl.constexpr(0.6931471805599453)
BELOW_ZERO = gl.constexpr(8.0)  # in base 2: so far a row's maximum is raised to zero, its weights are then 2^-8 or more


@gluon.jit
def clear_rows(tile, valid, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Zeros in the rows of a shared tile from `valid` on: they are another sequence's, whatever they hold. Each warp group writes
    them without waiting for the others, which write the same."""
    PART: gl.constexpr = 32
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    for part in gl.static_range(ROWS // PART):
        rows = tile.slice(part * PART, PART)
        inside = (part * PART + gl.arange(0, PART, gl.SliceLayout(1, blocked)))[:, None] < valid
        x = rows.load(blocked)
        rows.store(gl.where(inside, x, gl.zeros([PART, WIDTH], x.dtype, blocked)))
    fence_async_shared()
    barrier()


@gluon.jit
def keys_seen(scores, row, column, len_q, len_k, window_left, window_right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """-inf where a query does not see a key; bounds by row, one comparison an element for each side."""
    scores_layout: gl.constexpr = scores.type.layout
    i = row + gl.arange(0, scores.shape[0], gl.SliceLayout(1, scores_layout))
    j = column + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores_layout))
    last = i * 0 + (len_k - 1)
    if HAS_RIGHT:
        last = gl.minimum(last, i + (len_k - len_q + window_right))
    scores = gl.where(j[None, :] <= last[:, None], scores, -float("inf"))
    if HAS_LEFT:
        scores = gl.where(j[None, :] >= (i + (len_k - len_q - window_left))[:, None], scores, -float("inf"))
    return scores


@gluon.jit
def hand_on(k_full, k_empty, v_full, v_empty, step, count, STAGES: gl.constexpr, JOINT_RELEASE: gl.constexpr):
    """Give back `count` tiles unread, which only other warp groups see; returns the next step."""
    for _ in range(count):
        slot, phase = stage_of(step, STAGES)
        mbarrier.wait(k_full.index(slot), phase)
        mbarrier.arrive(k_empty.index(slot), count=1)
        mbarrier.wait(v_full.index(slot), phase)
        if not JOINT_RELEASE:
            mbarrier.arrive(v_empty.index(slot), count=1)
        step += 1
    return step


@gluon.jit
def first_weights(q, keys, values, k_empty, v_full, phase, valid, masked, row, column, len_q, len_k, window_left, window_right, scale,
                  ROWS: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, CLEAR: gl.constexpr, HAS_LEFT: gl.constexpr,
                  HAS_RIGHT: gl.constexpr, norm_layout: gl.constexpr, weights_layout: gl.constexpr, FROM_ZERO: gl.constexpr):
    """(maximum, partial sums, weights) of the first tile; `keys` are its BLOCK_N keys, or half of them where no query sees the others.
    FROM_ZERO: a maximum somewhat below zero becomes zero, and weights are `packed`."""
    KEYS: gl.constexpr = keys.shape[0]
    dtype: gl.constexpr = keys.dtype
    tile_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    if isinstance(q, gl.tensor):  # it carries the layout of a whole tile's product
        q = gl.convert_layout(q, gl.DotOperandLayout(0, scores_layout, 2))
    # [ROWS, KEYS]
    pending = warpgroup_mma(q, keys.permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float32, scores_layout), use_acc=False, is_async=True)
    if CLEAR:
        if valid < BLOCK_N:
            mbarrier.wait(v_full, phase)
            clear_rows(values, valid, BLOCK_N, BLOCK_DV)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    release(k_empty)
    if masked:
        scores = keys_seen(scores, row, column, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT)
    top = gl.max(scores, 1)
    if FROM_ZERO:
        top = gl.where((top < 0) & (top >= -BELOW_ZERO / scale), 0.0, top)
    base = gl.where(top == -float("inf"), 0.0, top)
    weights = gl.exp2(scores * scale - (base * scale)[:, None])
    norm = gl.convert_layout(partial_row_sums(weights), norm_layout)
    if not FROM_ZERO:
        weights = weights.to(dtype)
    if KEYS < BLOCK_N:
        weights = gl.join(weights, gl.zeros([ROWS, KEYS], weights.dtype, scores_layout))
        weights = gl.convert_layout(gl.reshape(gl.permute(weights, (0, 2, 1)), [ROWS, BLOCK_N]), tile_layout)
    top = gl.convert_layout(top, gl.SliceLayout(1, tile_layout))
    if FROM_ZERO:
        weights = packed(gl.convert_layout(weights, tile_layout), dtype)
    else:
        weights = gl.convert_layout(weights, weights_layout)
    return top, norm, weights


@gluon.jit
def walk_keys(q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, step, begin, full_begin, full_end, end, row, len_q, len_k,
              window_left, window_right, scale, ROWS: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
              CLEAR: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, LOOP_MASK: gl.constexpr, JOINT_RELEASE: gl.constexpr,
              HOLD: gl.constexpr, listed=None, HALVED: gl.constexpr = False, FROM_ZERO: gl.constexpr = False):
    """Key tiles end - 1 down to begin, which need a mask from full_end on and before full_begin; LOOP_MASK: not the first one only.
    CLEAR: values behind len_k are another sequence's, whatever they hold. listed: (entries, first column) where these are positions of a
    list of tiles; the column is that of its last tile. HALVED: half of the first tile is left out where no query sees it.
    FROM_ZERO: row maxima by integer instructions once none is below zero; not with LOOP_MASK nor HOLD.

    Returns the accumulator with the last product still in flight, the maximum in base 2, the sum and the next step. The caller waits for
    the product and, unless JOINT_RELEASE, gives back the last V.
    """
    dtype: gl.constexpr = k_tiles.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    score_row: gl.constexpr = gl.SliceLayout(1, scores_layout)
    acc_row: gl.constexpr = gl.SliceLayout(1, acc_layout)
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, scores_layout)
    first_column = (end - 1) * BLOCK_N
    if listed is not None:
        first_column = listed[1]
    norm_layout: gl.constexpr = partial_row_sums(no_scores).type.layout
    slot, phase = stage_of(step, STAGES)
    mbarrier.wait(k_full.index(slot), phase)
    masked = end > full_end or (HAS_LEFT and end <= full_begin)
    if HALVED and row + ROWS + (len_k - len_q + window_right) <= first_column + BLOCK_N // 2:
        top, norm, p = first_weights(q, k_tiles.index(slot).slice(0, BLOCK_N // 2), v_tiles.index(slot), k_empty.index(slot),
                                     v_full.index(slot), phase, len_k - (end - 1) * BLOCK_N, masked, row, first_column, len_q, len_k,
                                     window_left, window_right, scale, ROWS, BLOCK_DV, BLOCK_N, CLEAR, HAS_LEFT, HAS_RIGHT, norm_layout,
                                     weights_layout, FROM_ZERO)
    else:
        top, norm, p = first_weights(q, k_tiles.index(slot), v_tiles.index(slot), k_empty.index(slot),
                                     v_full.index(slot), phase, len_k - (end - 1) * BLOCK_N, masked, row, first_column, len_q, len_k,
                                     window_left, window_right, scale, ROWS, BLOCK_DV, BLOCK_N, CLEAR, HAS_LEFT, HAS_RIGHT, norm_layout,
                                     weights_layout, FROM_ZERO)
    # [ROWS, BLOCK_DV]
    acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, acc_layout)
    step += 1

    last_step = step + end - 1 - begin
    if HOLD:
        slot, phase = stage_of(step, STAGES)
        mbarrier.wait(k_full.index(slot), phase, pred=step < last_step)
    middle = last_step
    if FROM_ZERO:
        if gl.min(top, 0) >= 0:
            middle = step
    for INTEGERS in gl.static_range(2 if FROM_ZERO else 1):
        first, last = (middle, last_step) if INTEGERS else (step, middle)
        for s in range(first, last):
            slot, phase = stage_of(s, STAGES)
            before, phase_before = stage_of(s - 1, STAGES)
            if not HOLD:
                mbarrier.wait(k_full.index(slot), phase)
            pending = warpgroup_mma(q, k_tiles.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), phase_before)
            weights = unpacked(p, weights_layout, dtype) if FROM_ZERO else p
            acc_pending = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(pending,))
            if not JOINT_RELEASE:
                release(k_empty.index(slot))
            if LOOP_MASK:
                tile = begin + last_step - 1 - s
                if (tile >= full_end) | (tile < full_begin):
                    if listed is not None:
                        tile = gl.load(listed[0] + tile)
                    scores = keys_seen(scores, row, tile * BLOCK_N, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT)
            weights, top, norm, rescale = softmax_step(scores, top, norm, scale, LOOP_MASK, INTEGERS == 1)
            if HOLD:  # the spin loop of this wait keeps the exponentials above the wait for the product, where they overlap with it
                after, phase_after = stage_of(s + 1, STAGES)
                mbarrier.wait(k_full.index(after), phase_after, pred=s + 1 < last_step)
            acc = warpgroup_mma_wait(0, deps=(acc_pending,))
            if JOINT_RELEASE:
                release(k_empty.index(slot))
            else:
                release(v_empty.index(before))
            acc = acc * gl.convert_layout(rescale, acc_row)[:, None]
            p = packed(weights, dtype) if FROM_ZERO else gl.convert_layout(weights.to(dtype), weights_layout)
    if FROM_ZERO:
        p = unpacked(p, weights_layout, dtype)

    before, phase_before = stage_of(last_step - 1, STAGES)
    mbarrier.wait(v_full.index(before), phase_before)
    acc_pending = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
    return acc_pending, top * scale, gl.convert_layout(gl.sum(norm, 1), score_row), last_step


@gluon.jit
def store_statistics(lse_ptr, stats_ptr, stride_stats, place, inside, top, total):
    """LSE, and for the backward the maximum (+inf for a row without a key) and log2 of the sum; returns the sum's inverse."""
    some = total > 0
    divisor = gl.where(some, total, 1.0)
    log_norm = log2(divisor)
    gl.store(lse_ptr + place, gl.where(some, (top + log_norm) * LN2, -float("inf")), mask=inside)
    gl.store(stats_ptr + place, gl.where(some, top, float("inf")), mask=inside)
    gl.store(stats_ptr + stride_stats + place, log_norm, mask=inside)
    return 1.0 / divisor


@gluon.jit
def store_rows(pointer, x, row, length, stride_row, WIDTH: gl.constexpr):
    """[M, N] at rows row .. row + M of a sequence, inside its length and WIDTH."""
    layout: gl.constexpr = x.type.layout
    r = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    gl.store(pointer + (r.to(gl.int64) * stride_row)[:, None] + column[None, :], x, mask=(r < length)[:, None] & (column < WIDTH)[None, :])
