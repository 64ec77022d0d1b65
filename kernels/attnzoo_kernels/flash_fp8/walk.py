"""The FP8 forward's inner walk: a warp group's queries against the keys that a loading warp brings.

Weights become the first operand of P V in the registers where the product Q Kᵀ left their scores, because the keys of a tile lie in the
order in which that operand counts: columns (h, w, b) of a tile of scores are its keys 4 w + 2 h + b.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import mbarrier, release, ring, warpgroup_mma, warpgroup_mma_wait
from attnzoo_kernels._gluon.softmax import partial_row_sums

KEYS = gl.constexpr(128)  # of a tile
WEIGHT_BITS = gl.constexpr(8)  # weights are up to 2**8: e4m3 ends at 448, and below 2**-9 it has nothing

TO_E4M3 = gl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}""")

# of every four powers one is made by products: 2**n from the exponent's bits, and a polynomial of the rest in [-1/2, 1/2], right to 7.5e-5,
# while an e4m3 has three bits of mantissa; at -125 it ends
EXP2_OF_FOUR = gl.constexpr("""{
    .reg .f32 x, shifted, whole, rest, power;
    .reg .b32 exponent, bits;
    ex2.approx.ftz.f32 $0, $4;
    ex2.approx.ftz.f32 $1, $5;
    ex2.approx.ftz.f32 $2, $6;
    max.f32 x, $7, 0fC2FA0000;
    add.rn.f32 shifted, x, 0f4B400000;
    sub.rn.f32 whole, shifted, 0f4B400000;
    sub.rn.f32 rest, x, whole;
    fma.rn.f32 power, rest, 0f3D61FBB0, 0f3E786F0E;
    fma.rn.f32 power, power, rest, 0f3F31798D;
    fma.rn.f32 power, power, rest, 0f3F7FFB49;
    mov.b32 exponent, shifted;
    mov.b32 bits, power;
    shl.b32 exponent, exponent, 23;
    add.s32 bits, bits, exponent;
    mov.b32 $3, bits;
}""")


@gluon.jit
def unknown(x):
    """x, of which the compiler knows nothing: what is the same in all walks it would compute once and keep in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def keys_seen(scores, row, first_key, len_q, len_k, CAUSAL: gl.constexpr):
    """-inf where a query does not see a key."""
    layout: gl.constexpr = scores.type.layout
    i = row + gl.arange(0, scores.shape[0], gl.SliceLayout(1, layout))
    column = gl.arange(0, KEYS, gl.SliceLayout(0, layout))
    half = column // (KEYS // 2)
    rest = column % (KEYS // 2)
    j = first_key + rest // 2 * 4 + half * 2 + rest % 2
    last = i * 0 + (len_k - 1)
    if CAUSAL:
        last = gl.minimum(last, i + (len_k - len_q))
    return gl.where(j[None, :] <= last[:, None], scores, -float("inf"))


@gluon.jit
def row_maximum(x):
    """[M, KEYS] in a product's layout to [M]: in a tree, where gl.max would wait for each maximum of a chain."""
    ROWS: gl.constexpr = x.shape[0]
    x = gl.max(gl.reshape(x, [ROWS, KEYS // 8, 4, 2]), 3)
    for n in gl.static_range(4):
        x = gl.max(gl.reshape(x, [ROWS, 2, KEYS // (16 << n), 4]), 1)
    return gl.max(gl.reshape(x, [ROWS, 4]), 1)


@gluon.jit
def packed(weights):
    """[M, KEYS] in the registers of a product's result, columns (h, w, b), to e4m3 and the order of keys: int32 [M, KEYS / 4] of four keys
    each, as a loop would carry every e4m3 in a register of its own."""
    fours = gl.permute(gl.reshape(weights, [weights.shape[0], 2, KEYS // 4, 2]), (0, 2, 1, 3))
    even, odd = gl.split(fours)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return gl.inline_asm_elementwise(TO_E4M3, "=r,r,r,r,r", [first, second, third, fourth], gl.int32, True, 1)


@gluon.jit
def unpacked(words, layout: gl.constexpr):
    """What `packed` made, as the first operand of a product: e4m3 [M, KEYS], which costs no instruction."""
    twice = gl.join(words, words)
    spread = gl.convert_layout(gl.reshape(gl.join(twice, twice), [words.shape[0], KEYS]), layout)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [spread], gl.float8e4nv, True, 4)


@gluon.jit
def walk_keys(q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, step, begin, full_end, end, row, len_q, len_k, scale, k_scales,
              v_scales, ROWS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, LOOP_MASK: gl.constexpr,
              BY_BLOCK: gl.constexpr, SPREAD: gl.constexpr):
    """Key tiles end - 1 down to begin, which need a mask from full_end on; LOOP_MASK: not the first one only. BY_BLOCK: each has scales.
    SPREAD: instructions that wait for each other less and share out the exponentials, but are more of them.

    The weights of a tile times its values are a product of their own, which ordinary instructions add to those before: matrix
    instructions lose the small bits of what they add up.

    Returns the accumulator, the last product still in flight, the maximum in base 2, the sum, the scale of both products and the next step.
    """
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 4)
    score_row: gl.constexpr = gl.SliceLayout(1, scores_layout)
    acc_row: gl.constexpr = gl.SliceLayout(1, acc_layout)
    no_scores = gl.zeros([ROWS, KEYS], gl.float32, scores_layout)
    no_product = gl.zeros([ROWS, WIDTH], gl.float32, acc_layout)

    end = unknown(end)
    row = unknown(row)
    len_k = unknown(len_k)
    slot, phase = ring(step, STAGES)
    tile_scale = scale
    v_scale = 1.0
    if BY_BLOCK:  # each loaded a tile ahead
        tile_scale = scale * gl.load(k_scales + end - 1)
        v_scale = gl.load(v_scales + end - 1)
        next_k_scale = gl.load(k_scales + gl.maximum(end - 2, begin))
        next_v_scale = gl.load(v_scales + gl.maximum(end - 2, begin))
    mbarrier.wait(k_full.index(slot), phase)
    # [ROWS, KEYS]
    pending = warpgroup_mma(q, k_tiles.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(pending,))
    release(k_empty.index(slot))
    if end > full_end:
        scores = keys_seen(scores, row, (end - 1) * KEYS, len_q, len_k, CAUSAL)
    top = gl.convert_layout(row_maximum(scores), score_row) * tile_scale
    base = gl.where(top == -float("inf"), 0.0, top) - WEIGHT_BITS
    weights = gl.exp2(scores * tile_scale - base[:, None])
    norm = partial_row_sums(weights)
    p = packed(weights)
    # [ROWS, WIDTH]
    acc = no_product
    rescale = gl.full([ROWS], 0.0, gl.float32, score_row)
    step += 1

    last_step = step + end - 1 - begin
    tile = end - 1
    for s in range(step, last_step):
        slot, phase = ring(s, STAGES)
        before, phase_before = ring(s - 1, STAGES)
        tile -= 1
        if BY_BLOCK:
            tile_scale = scale * next_k_scale
            unit = v_scale / next_v_scale
            v_scale = next_v_scale
            next_k_scale = gl.load(k_scales + gl.maximum(tile - 1, begin))
            next_v_scale = gl.load(v_scales + gl.maximum(tile - 1, begin))
        mbarrier.wait(k_full.index(slot), phase)
        pending = warpgroup_mma(q, k_tiles.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), phase_before)
        product_pending = warpgroup_mma(unpacked(p, weights_layout), v_tiles.index(before).permute((1, 0)), no_product, use_acc=False,
                                        is_async=True)
        scores = warpgroup_mma_wait(1, deps=(pending,))
        release(k_empty.index(slot))
        if LOOP_MASK:
            if tile >= full_end:
                scores = keys_seen(scores, row, tile * KEYS, len_q, len_k, CAUSAL)
        if SPREAD:
            new_top = gl.convert_layout(row_maximum(scores), score_row)
            product = warpgroup_mma_wait(0, deps=(product_pending,))
            release(v_empty.index(before))
            acc = acc * gl.convert_layout(rescale, acc_row)[:, None] + product
        else:
            new_top = gl.max(scores, 1)
        new_top = gl.maximum(top, new_top * tile_scale)
        base = new_top
        if LOOP_MASK:  # a row that saw no key yet must not make inf - inf
            base = gl.where(new_top == -float("inf"), 0.0, new_top)
        next_rescale = gl.exp2(top - base)
        weights = scores * tile_scale - (base - WEIGHT_BITS)[:, None]
        if SPREAD and not LOOP_MASK:  # it makes no zeros of -inf
            weights = gl.inline_asm_elementwise(EXP2_OF_FOUR, "=f,=f,=f,=f,f,f,f,f", [weights], gl.float32, True, 4)
        else:
            weights = gl.exp2(weights)
        norm = norm * gl.convert_layout(next_rescale, gl.SliceLayout(1, norm.type.layout))[:, None] + partial_row_sums(weights)
        if not SPREAD:
            product = warpgroup_mma_wait(0, deps=(product_pending,))
            release(v_empty.index(before))
            acc = acc * gl.convert_layout(rescale, acc_row)[:, None] + product
        top = new_top
        rescale = next_rescale
        if BY_BLOCK:  # the accumulator is in units of its last tile's scale
            rescale = rescale * unit
        p = packed(weights)

    before, phase_before = ring(last_step - 1, STAGES)
    mbarrier.wait(v_full.index(before), phase_before)
    product_pending = warpgroup_mma(unpacked(p, weights_layout), v_tiles.index(before).permute((1, 0)), no_product, use_acc=False,
                                    is_async=True)
    acc = acc * gl.convert_layout(rescale, acc_row)[:, None]
    return acc, product_pending, top, gl.convert_layout(gl.sum(norm, 1), score_row), v_scale, last_step
