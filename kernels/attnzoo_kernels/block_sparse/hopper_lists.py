"""How the Hopper kernels find their tiles and lists, and the backward's loading warp (see `attnzoo_kernels.block_sparse.lists`)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import mbarrier, ring
from attnzoo_kernels.flash.hopper_loads import KEYS, ROWS, WORK, load_keys, load_step


@gluon.jit
def listed_tile(index, order, tiles, heads, n_tiles):
    """(batch, head, number) of the index-th tile; from the last one on the same."""
    entry = gl.load(order + gl.minimum(index, n_tiles - 1))
    return entry // tiles // heads, entry // tiles % heads, entry % tiles


@gluon.jit
def list_lengths(count, number):
    """A list's entries, and those of them that need no mask."""
    clear = gl.load(count + 2 * number)
    return clear + gl.load(count + 2 * number + 1), clear


@gluon.jit
def find_list(entries, number, width):
    return entries + number.to(gl.int64) * width


@gluon.jit
def load(descs, tiles, numbers, bars, work, lists, counter, kv_heads, group, head_tiles, n_tiles, STAGES: gl.constexpr):
    """The warp of a backward that takes tiles of keys, tells the others which, and loads what they need.

    numbers: where each stage's tile of queries is written down for the others, who would hold a number from memory in registers.
    """
    q_desc, do_desc, stats_desc = descs[0], descs[1], descs[2]
    order, entries, count, list_tiles, width, stride_batch, stride_head = lists
    step_empty, work_full, work_empty = bars[2], bars[6], bars[7]
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    w = gl.arange(0, 8, lane)
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
        words = gl.where(w == 0, more, gl.where(w == 1, batch, gl.where(w == 2, kv_head, gl.where(w == 3, tile * KEYS, gl.where(
            w == 4, length, gl.where(w == 5, clear, number))))))
        work.index(slot).store(words)
        mbarrier.arrive(work_full.index(slot), count=1)
        if more != 0:
            loaded = 0
            for member in range(group):
                head = kv_head * group + member
                stats_tile = (batch * kv_heads * group + head) * head_tiles
                entry = find_list(entries, number, width)
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
                if member + 1 < group:
                    number += stride_head
                    length, clear = list_lengths(count, number)
            if loaded == 0:
                load_keys(descs[3], descs[4], tiles, bars, taken, batch, kv_head, tile * KEYS)
        taken += 1
