"""Tiles of the Hopper kernels and their lists (`attnzoo_kernels.block_sparse.lists`): found, in the backward also loaded and given back."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import mbarrier, ring
from attnzoo_kernels.flash.hopper_gradients import store_tile
from attnzoo_kernels.flash.hopper_loads import HALF, KEYS, ROWS, WORK, announce, load_keys, load_step, word


@gluon.jit
def listed_tile(index, order, tiles, heads, n_tiles):
    """(batch, head, number) of the index-th tile; from the last one on the same."""
    entry = gl.load(order + gl.minimum(index, n_tiles - 1))
    return entry // tiles // heads, entry // tiles % heads, entry % tiles


@gluon.jit
def list_lengths(count, number):
    """A list's entries, and those of them that need no mask. To be read anew for each head: lengths that a loop over heads carries and
    that only bound its inner loops are taken for dead by Triton (3.6, 3.7) and keep their first value."""
    clear = gl.load(count + 2 * number)
    return clear + gl.load(count + 2 * number + 1), clear


@gluon.jit
def find_list(entries, number, width):
    return entries + number.to(gl.int64) * width


@gluon.jit
def end_tile(work, slot, bars, dk_desc, dv_desc, out_tile, dk, dv, dk_scale, ME: gl.constexpr):
    """A consumer gives back a tile of keys and writes its 64 rows of dK and dV."""
    kv_empty, work_empty = bars[5], bars[7]
    mbarrier.arrive(kv_empty, count=1)
    batch, kv_head, row = word(work, slot, 1), word(work, slot, 2), word(work, slot, 3) + ME * HALF
    mbarrier.arrive(work_empty.index(slot), count=1)
    store_tile(dv_desc, out_tile, dv.to(out_tile.dtype), batch, kv_head, row)
    dk = dk * dk_scale
    store_tile(dk_desc, out_tile, dk.to(out_tile.dtype), batch, kv_head, row)


@gluon.jit
def load(descs, tiles, numbers, bars, work, lists, counter, kv_heads, group, head_tiles, n_tiles, STAGES: gl.constexpr,
         GROUPED: gl.constexpr):
    """The warp of a backward that takes tiles of keys, tells the others which, and loads what they need.

    numbers: where each stage's tile of queries is written down for the others, who would hold a number from memory in registers.
    """
    q_desc, do_desc, stats_desc = descs[0], descs[1], descs[2]
    order, entries, count, list_tiles, width, stride_batch, stride_head = lists
    step_empty, work_full, work_empty = bars[2], bars[6], bars[7]
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    step = 0
    taken = 0
    more = 1
    while more != 0:
        slot, phase = ring(taken, WORK)
        mbarrier.wait(work_empty.index(slot), phase ^ 1)
        index = gl.atomic_add(counter, 1, sem="relaxed")
        batch, kv_head, tile = listed_tile(index, order, list_tiles, kv_heads, n_tiles)
        number = batch * stride_batch + kv_head * group * stride_head + tile
        length, clear = list_lengths(count, number)
        more = (index < n_tiles).to(gl.int32)
        announce(work, work_full, slot, (more, batch, kv_head, tile * KEYS, length, clear, number))
        if more != 0:
            loaded = 0
            for member in range(group):
                head = kv_head * group + member
                stats_tile = (batch * kv_heads * group + head) * head_tiles
                of_head = number + member * stride_head
                if GROUPED:
                    length, _ = list_lengths(count, of_head)
                entry = find_list(entries, of_head, width)
                listed = gl.load(entry)
                for _ in range(length):
                    row_tile = listed
                    entry += 1
                    listed = gl.load(entry)  # a step ahead: the loads of queries would wait for it
                    stage, stage_phase = ring(step, STAGES)
                    mbarrier.wait(step_empty.index(stage), stage_phase ^ 1)
                    numbers.index(stage).store(gl.full([1], row_tile, gl.int32, lane))
                    load_step(q_desc, do_desc, stats_desc, tiles, bars, stage, batch, head, row_tile * ROWS, stats_tile + row_tile)
                    if loaded == 0:  # behind the first queries: keys and values have one buffer, which is freed late
                        load_keys(descs[3], descs[4], tiles, bars, taken, batch, kv_head, tile * KEYS)
                        loaded = 1
                    step += 1
            if loaded == 0:
                load_keys(descs[3], descs[4], tiles, bars, taken, batch, kv_head, tile * KEYS)
        taken += 1
