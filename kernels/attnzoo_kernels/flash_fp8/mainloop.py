"""The FP8 forward's mainloop: a consumer's queries against the keys that the producer warp brings.

The weights become the first operand of P V in the same registers in which the product Q Kᵀ left their scores. For this, the keys of a tile
lie in the order that this operand needs: column (h, w, b) of a tile of scores is key 4 w + 2 h + b.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward_mainloop import between, rows_and_columns
from attnzoo_kernels._gluon.hopper import await_stage, give_back, mbarrier, release, stage_of, warpgroup_mma, warpgroup_mma_wait
from attnzoo_kernels._gluon.softmax import row_maximum

KEYS = gl.constexpr(128)  # keys of a tile
STAGES = gl.constexpr(4)  # tiles in flight
WEIGHT_BITS = gl.constexpr(8)  # the base-2 logarithm of the largest scaled weight, just below what e4m3 can hold

TO_E4M3 = gl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}""")


@gluon.jit
def unknown(x):
    """x, unchanged, but opaque to the compiler (fault 11)."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def usable(scale):
    """The scale, or NaN if it is not positive and finite."""
    bits = scale.to(gl.int32, bitcast=True)
    return gl.where((bits > 0) & (bits < 0x7F800000), scale, float("nan"))


@gluon.jit
def keys_seen(scores, row, first_key, len_q, len_k, CAUSAL: gl.constexpr):
    """Masks, by -inf, the keys that a query does not see."""
    i, column = rows_and_columns(scores, row, 0)
    half = column // (KEYS // 2)
    rest = column % (KEYS // 2)
    j = first_key + rest // 2 * 4 + half * 2 + rest % 2
    last = i * 0 + (len_k - 1)
    if CAUSAL:
        last = gl.minimum(last, i + (len_k - len_q))
    return between(scores, i, j, 0, last, False)


@gluon.jit
def of_four_keys(x):
    """Splits [M, KEYS], with columns (h, w, b), into four [M, KEYS / 4]: the first, second, third and fourth of each four keys."""
    fours = gl.permute(gl.reshape(x, [x.shape[0], 2, KEYS // 4, 2]), (0, 2, 1, 3))
    even, odd = gl.split(fours)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def packed(first, second, third, fourth):
    """Weights rounded to e4m3, four numbers in each int32 of [M, KEYS / 4] (fault 5)."""
    return gl.inline_asm_elementwise(TO_E4M3, "=r,r,r,r,r", [first, second, third, fourth], gl.int32, True, 1)


@gluon.jit
def unpacked(words, layout: gl.constexpr):
    """The inverse of `packed`: e4m3 [M, KEYS] as the first operand of a product. It costs no instruction."""
    twice = gl.join(words, words)
    spread = gl.convert_layout(gl.reshape(gl.join(twice, twice), [words.shape[0], KEYS]), layout)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [spread], gl.float8e4nv, True, 4)


@gluon.jit
def partial_sums(first, second, third, fourth):
    """Sums of the weights, [M, 4]: each thread adds up what it holds."""
    x = (first + second) + (third + fourth)
    return gl.sum(gl.reshape(x, [x.shape[0], KEYS // 16, 4]), 1)


@gluon.jit
def take_steps(q, k_tiles, v_tiles, bars, step, last_step, tile, full_end, row, len_q, len_k, scale, k_scales,
               v_scales, v_scale, row_max, row_sum, p, acc, rescale, CAUSAL: gl.constexpr, LOOP_MASK: gl.constexpr, BY_BLOCK: gl.constexpr,
               NOT_NEGATIVE: gl.constexpr):
    """Steps of the mainloop from `step` on. NOT_NEGATIVE: no row maximum is below zero before them.

    Returns what they carry on: the last tile, the scale of its values, the row maximum in base 2, partial sums, the weights, the
    accumulator without the product of these weights, and the factor by which it must still be multiplied.
    """
    WIDTH: gl.constexpr = acc.shape[1]
    score_row: gl.constexpr = row_max.type.layout
    scores_layout: gl.constexpr = score_row.parent
    acc_layout: gl.constexpr = acc.type.layout
    no_scores = gl.zeros([acc.shape[0], KEYS], gl.float32, scores_layout)
    no_product = gl.zeros(acc.shape, gl.float32, acc_layout)
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    tile_scale = scale
    await_stage(bars.k_full, step, STAGES, last_step)
    for s in range(step, last_step):
        slot, phase = stage_of(s, STAGES)
        before, _ = stage_of(s - 1, STAGES)
        tile -= 1
        if BY_BLOCK:
            tile_scale = scale * usable(gl.load(k_scales + tile))
            last_v_scale = v_scale
            v_scale = usable(gl.load(v_scales + tile))
        # [ROWS, KEYS]
        pending = warpgroup_mma(q, k_tiles.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        # [ROWS, WIDTH]
        product_pending = warpgroup_mma(unpacked(p, weights_layout), v_tiles.index(before).permute((1, 0)), no_product, use_acc=False,
                                        is_async=True)
        scores = warpgroup_mma_wait(1, deps=(pending,))
        release(bars.k_empty.index(slot))
        if LOOP_MASK:
            if tile >= full_end:
                scores = keys_seen(scores, row, tile * KEYS, len_q, len_k, CAUSAL)
        new_max = gl.maximum(row_max, gl.convert_layout(row_maximum(scores, NOT_NEGATIVE), score_row) * tile_scale)
        base = new_max
        if LOOP_MASK:  # avoids inf - inf in a row that has seen no key yet
            base = gl.where(new_max == -float("inf"), 0.0, new_max)
        next_rescale = gl.exp2(row_max - base)
        first, second, third, fourth = of_four_keys(scores)
        offset = gl.convert_layout(base - WEIGHT_BITS, gl.SliceLayout(1, first.type.layout))[:, None]
        if WIDTH == 128:  # half of the exponentials beside the product; three warp groups compute enough beside each other's products
            first = gl.exp2(first * tile_scale - offset)
            second = gl.exp2(second * tile_scale - offset)
            # fault 4: it never waits
            mbarrier.wait(bars.k_full.index(slot), phase, pred=row < 0)
        await_stage(bars.k_full, s + 1, STAGES, last_step)  # the next keys and this tile's values
        product = warpgroup_mma_wait(0, deps=(product_pending,))
        release(bars.v_empty.index(before))
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc_layout))[:, None] + product
        if WIDTH != 128:
            first = gl.exp2(first * tile_scale - offset)
            second = gl.exp2(second * tile_scale - offset)
        third = gl.exp2(third * tile_scale - offset)
        fourth = gl.exp2(fourth * tile_scale - offset)
        row_sum = row_sum * gl.convert_layout(next_rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None] + partial_sums(
            first, second, third, fourth)
        row_max = new_max
        rescale = next_rescale
        if BY_BLOCK:  # the accumulator is in units of the scale of its last tile's values
            rescale = rescale * (last_v_scale / v_scale)
        p = packed(first, second, third, fourth)
    return tile, v_scale, row_max, row_sum, p, acc, rescale


@gluon.jit
def mainloop(q, k_tiles, v_tiles, bars, step, skipped, taken, span, scale, k_scales, v_scales, ROWS: gl.constexpr, WIDTH: gl.constexpr,
             CAUSAL: gl.constexpr, LOOP_MASK: gl.constexpr, BY_BLOCK: gl.constexpr):
    """Tiles of keys span.end - 1 down to span.loaded_begin. Those from full_end on need a mask; LOOP_MASK: not only the first tile may need
    one. BY_BLOCK: each tile has scales of its own. A tile's values arrive with the keys of the next tile; those of the last tile arrive at
    the barrier v_full of `taken`. skipped: the number of tiles that were skipped before these. The values of the last one of them are still
    to be released.

    Each product of a tile's weights and values is computed alone, and ordinary instructions add it to the accumulator, because matrix
    instructions lose the small bits of what they add up.

    Returns the accumulator, the last product still in flight, the row maximum in base 2, the row sum, the scale of both products and the
    next step.
    """
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    score_row: gl.constexpr = gl.SliceLayout(1, scores_layout)
    no_scores = gl.zeros([ROWS, KEYS], gl.float32, scores_layout)
    no_product = gl.zeros([ROWS, WIDTH], gl.float32, acc_layout)

    begin, full_end, len_q = span.loaded_begin, span.full_end, span.len_q  # without a window all rows see the first tile
    end = unknown(span.end)
    row = unknown(span.row)
    len_k = unknown(span.len_k)
    tile_scale = scale
    v_scale = 1.0
    if BY_BLOCK:
        tile_scale = scale * usable(gl.load(k_scales + end - 1))
        v_scale = usable(gl.load(v_scales + end - 1))
    slot = await_stage(bars.k_full, step, STAGES)
    if skipped > 0:
        give_back(bars.v_empty, step - 1, STAGES)
    # [ROWS, KEYS]
    pending = warpgroup_mma(q, k_tiles.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    release(bars.k_empty.index(slot))
    if end > full_end:
        scores = keys_seen(scores, row, (end - 1) * KEYS, len_q, len_k, CAUSAL)
    row_max = gl.convert_layout(row_maximum(scores, False), score_row) * tile_scale
    base = gl.where(row_max == -float("inf"), 0.0, row_max) - WEIGHT_BITS
    first, second, third, fourth = of_four_keys(gl.exp2(scores * tile_scale - base[:, None]))
    row_sum = partial_sums(first, second, third, fourth)
    p = packed(first, second, third, fourth)
    acc = no_product
    rescale = gl.full([ROWS], 0.0, gl.float32, score_row)
    step += 1

    last_step = step + end - 1 - begin
    tile = end - 1
    middle = last_step
    if not LOOP_MASK:
        if gl.min(row_max, 0) >= 0:
            middle = step
    tile, v_scale, row_max, row_sum, p, acc, rescale = take_steps(
        q, k_tiles, v_tiles, bars, step, middle, tile, full_end, row, len_q, len_k, scale, k_scales,
        v_scales, v_scale, row_max, row_sum, p, acc, rescale, CAUSAL, LOOP_MASK, BY_BLOCK, False)
    if not LOOP_MASK:
        tile, v_scale, row_max, row_sum, p, acc, rescale = take_steps(
            q, k_tiles, v_tiles, bars, middle, last_step, tile, full_end, row, len_q, len_k, scale,
            k_scales, v_scales, v_scale, row_max, row_sum, p, acc, rescale, CAUSAL, LOOP_MASK, BY_BLOCK, True)

    await_stage(bars.v_full, taken, STAGES)
    before, _ = stage_of(last_step - 1, STAGES)
    product_pending = warpgroup_mma(unpacked(p, weights_layout), v_tiles.index(before).permute((1, 0)), no_product, use_acc=False,
                                    is_async=True)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc_layout))[:, None]
    return acc, product_pending, row_max, gl.convert_layout(gl.sum(row_sum, 1), score_row), v_scale, last_step
