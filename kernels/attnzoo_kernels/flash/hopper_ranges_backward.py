"""FlashAttention's backward for Hopper over key ranges: the backward of one dense sequence, in which a tile of keys goes over the queries
of several ranges.

The producer warp and the consumers go over the ranges that a tile of keys touches, from the last one to the first, and over the queries of
each range from its first tile on. Sums of dQ have no order. `_triton.range_order` says in which order programs take the tiles, and that the
longest tiles are divided in two parts. An `entry` is the number of a range in the table by keys.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_consume import hand_on_last_dq, head_steps, pair_store
from attnzoo_kernels._gluon.backward_dq import add_tile, announce, await_flag, sum_so_far, write_to
from attnzoo_kernels._gluon.backward_plan import Tile, mainloop_width, pair_tile
from attnzoo_kernels._gluon.backward_tiles import HALF, KEYS, KeyTile, word
from attnzoo_kernels._gluon.hopper import product_layout
from attnzoo_kernels._gluon.ranges import UNLIMITED, WIDTH, Table, load_range, touching
from attnzoo_kernels._gluon.tiles import by_groups
from attnzoo_kernels._triton.launch import L2_GROUP, multiprocessors, on_device_of
from attnzoo_kernels._triton.range_order import divided_tiles, launch_order, parts_of
from attnzoo_kernels._triton.ranges import queries_seeing_keys
from attnzoo_kernels.flash import hopper_backward
from attnzoo_kernels.flash.options import Options


class Own(NamedTuple):
    table: Any  # the Table of the ranges by keys
    order: Any  # the items of key_tile_order_kernel
    last: Any  # the row behind the items
    sums: Any  # float32: a flag for each divided tile and consumer; behind all flags, dK and dV of the tiles' first parts
    divided: Any  # for how many divided tiles `sums` has room


@gluon.jit
def own(tensors, numbers, problem, dtype: gl.constexpr, config):
    """OWN. numbers: how many ranges there are, rows of `order` before the last one, and divided tiles."""
    table = Table(tensors[0], numbers[0], gl.where(problem.window_left < 0, UNLIMITED, problem.window_left), problem.window_right)
    return Own(table, tensors[1], tensors[1] + numbers[1] * WIDTH, tensors[2], numbers[2])


@gluon.jit
def table_of(own, key, len_q, len_k, config):
    """TILE_PARAMS: the Table."""
    return own.table


@gluon.jit
def queries_of(table, entry, key, ROWS: gl.constexpr):
    """(range, begin, full_begin, full_end, end): an entry's range, and the tiles of queries that see the KEYS keys from `key` on in it. The
    tiles are counted over all queries. Those before full_begin and those from full_end on need a mask."""
    r = load_range(table, entry, True)
    begin, end, first, last = queries_seeing_keys(r, key, KEYS)
    some = end > begin
    full_begin = r.other_first + gl.maximum(last - r.right, 0)
    full_end = r.other_first + gl.minimum(r.other_length, first + r.left + 1)
    begin = (r.other_first + begin) // ROWS
    end = gl.where(some, (r.other_first + end + ROWS - 1) // ROWS, begin)
    whole = (key >= r.first) & (key + KEYS <= r.first + r.length)
    full_begin = gl.where(whole, gl.minimum(gl.maximum((full_begin + ROWS - 1) // ROWS, begin), end), end)
    full_end = gl.maximum(gl.minimum(full_end // ROWS, end), full_begin)
    return r, begin, full_begin, full_end, end


@gluon.jit
def first_and_last(r, key, ROWS: gl.constexpr):
    """(first, last) query that sees each of the HALF keys from `key` on in a range, counted over all queries."""
    shift = r.length - r.other_length
    j = gl.arange(0, HALF, gl.SliceLayout(1, product_layout(ROWS))) + (key - r.first)
    low = gl.maximum(j - shift - r.right, 0) + r.other_first
    low = gl.where((j >= 0) & (j < r.length), low, UNLIMITED)
    return low, gl.minimum(j - shift + r.left, r.other_length - 1) + r.other_first


class RangesTile(NamedTuple):
    """A tile of keys and its ranges, in place of a KeyTile. Fields without a comment are those of KeyTile, at the same places."""

    more: Any
    batch: Any
    kv_head: Any
    key: Any
    first_member: Any  # the query heads of the group for which this part of the tile is computed are first_member .. end_member
    first_entry: Any  # the entry of the last range that touches the tile, with which a query head's steps begin
    end_member: Any
    steps: Any  # of a query head
    len_q: Any
    len_k: Any
    first_k: Any
    dq_tile: Any
    number: Any  # 3 * (number of the divided tile) + 1 for its first part, + 2 for its second one; a multiple of 3 if it is not divided


@gluon.constexpr_function
def _in_key_tile(name):
    """The KeyTile's field at the place of the RangesTile's field `name`."""
    names, fields = RangesTile._fields, KeyTile._fields
    return fields[names.index(name)]


@gluon.jit
def ranges_word(work, slot, NAME: gl.constexpr):
    """The field NAME of the RangesTile in a slot."""
    FIELD: gl.constexpr = _in_key_tile(NAME)
    return word(work, slot, FIELD)


@gluon.jit
def next_key_tile(problem, own, config):
    """NEXT_TILE: a RangesTile."""
    index = gl.atomic_add(problem.counter, 1, sem="relaxed")
    items = gl.load(own.last)
    more = (index < items * problem.kv_heads).to(gl.int32)
    kv_head, rank = by_groups(gl.where(more != 0, index, 0), items, problem.kv_heads, gl.load(own.last + 1), False)
    item = own.order + rank * WIDTH
    tile = gl.load(item)
    part = gl.load(item + 3)
    of_first = problem.group - problem.group // 2
    first_member = gl.where(part == 2, of_first, 0)
    end_member = gl.where(part == 1, of_first, problem.group)
    number = 3 * (gl.load(item + 4) * problem.kv_heads + kv_head) + part
    return RangesTile(more, 0, kv_head, tile * KEYS, first_member, gl.load(item + 1), end_member, gl.load(item + 2), problem.seqlen_q,
                      problem.seqlen_k, 0, kv_head * problem.group * problem.head_tiles, number), 0, 0


@gluon.jit
def steps_of_part(table, tile, member):
    """LOADED_STEPS. The state is (entry, next tile of queries, end of the entry's tiles of queries, first key). At first the entry's tiles
    are at an end, so that _next_step looks for the first entry."""
    steps = gl.where((member >= tile.first_member) & (member < tile.end_member), tile.steps, 0)
    return 0, steps, (tile.first_entry + 1, 0, 0, tile.key)


@gluon.jit
def _next_step(table, state, ROWS: gl.constexpr):
    """(the next step's tile of queries, the next state)."""
    entry, j, end, key = state
    while j >= end:
        entry = touching(table, entry - 1, key)
        _, j, _, _, end = queries_of(table, entry, key, ROWS)
    return j, (entry, j + 1, end, key)


@gluon.jit
def next_step_of_64(table, state, n):
    """NEXT_QUERIES for steps of 64 queries."""
    return _next_step(table, state, 64)


@gluon.jit
def next_step_of_128(table, state, n):
    """NEXT_QUERIES for steps of 128 queries."""
    return _next_step(table, state, 128)


@gluon.jit
def mainloop(state, at, bounds, low, high, table, slot, smem, bars, dq_desc, problem, scale, config, ME: gl.constexpr):
    """MAINLOOP: for each query head, the steps of all ranges, in segments with a mask and without."""
    ROWS: gl.constexpr = config.ROWS
    step = at
    dq_tile = word(smem.work, slot, "dq_tile") + ranges_word(smem.work, slot, "first_member") * problem.head_tiles
    dq_end = dq_tile  # the end of the dQ tiles made so far
    known = -1
    following = -1
    begin, full_begin, full_end, end = 0, 0, 0, 0
    for _ in range(ranges_word(smem.work, slot, "first_member"), ranges_word(smem.work, slot, "end_member")):
        entry = ranges_word(smem.work, slot, "first_entry")
        while entry >= 0:
            if entry != known:  # where a tile has one range, it is known from the first head on
                key = word(smem.work, slot, "key")
                r, begin, full_begin, full_end, end = queries_of(table, entry, key, ROWS)
                low, high = first_and_last(r, key + ME * HALF, ROWS)
                following = touching(table, entry - 1, key)
                known = entry
            state = head_steps(state, at, step - begin, (begin, full_begin, full_end, end), dq_tile, dq_end, low, high, table, smem, bars,
                               dq_desc, scale, config, ME)
            step += end - begin
            dq_end = gl.where(end > begin, dq_tile + end, dq_end)
            entry = following
        dq_tile += problem.head_tiles
    hand_on_last_dq(at, step, dq_end, smem, bars, dq_desc, config, ME)
    return state, step


@gluon.jit
def add_ranges(dq_desc, dq_semaphore, smem, bars, first, step, seen, table, problem, config):
    """DQ_STEPS: adds dQ range by range, in the order in which the consumers make it."""
    first_member, first_entry, end_member = seen.begin, seen.full_begin, seen.full_end  # `seen` is read from a RangesTile
    first += first_member * problem.head_tiles
    for _ in range(first_member, end_member):
        entry = first_entry
        while entry >= 0:
            _, begin, _, _, end = queries_of(table, entry, seen.key, config.ROWS)
            for j in range(begin, end):
                add_tile(dq_desc, dq_semaphore, smem, bars, first + j, j, step, seen, table, problem.window_right, config)
                step += 1
            entry = touching(table, entry - 1, seen.key)
        first += problem.head_tiles
    return step


@gluon.jit
def store_part(grads, own, buffer, state, dk_scale, batch, kv_head, first_k, row, len_k, number, config, ME: gl.constexpr):
    """STORE_GRADS: the first part of a divided tile writes its sums to memory, and the second part adds them to its own. It waits for them.
    That is no deadlock: the first part was taken from the counter earlier, and waits for nothing."""
    dk, dv = state
    layout: gl.constexpr = product_layout(config.WIDTH)
    tile = number // 3
    part = number % 3
    flag = own.sums.to(gl.pointer_type(gl.int32), bitcast=True) + 2 * tile + ME
    sums = own.sums + 2 * own.divided
    if part == 1:
        write_to(sums + (4 * tile + ME).to(gl.int64) * (HALF * config.WIDTH), dk)
        write_to(sums + (4 * tile + 2 + ME).to(gl.int64) * (HALF * config.WIDTH), dv)
        announce(flag)
    else:
        await_flag(flag, part == 2)
        before = gl.where(part == 2, sums.to(gl.int64, bitcast=True), 0).to(sums.dtype, bitcast=True)
        dk += sum_so_far(before, 2 * tile, ME, config.WIDTH, layout)
        dv += sum_so_far(before, 2 * tile + 1, ME, config.WIDTH, layout)
        pair_store(grads, own, buffer, (dk, dv), dk_scale, batch, kv_head, first_k, row, len_k, number, config, ME)


HOOKS = (("HAS_LEFT", True), ("HAS_RIGHT", True), ("OWN", own), ("TILE_PARAMS", table_of), ("NEXT_TILE", next_key_tile),
         ("LOADED_STEPS", steps_of_part), ("MAINLOOP", mainloop), ("DQ_STEPS", add_ranges))
IN_PARTS = (("NEEDS_NUMBER", True), ("STORE_GRADS", store_part))


def backward_tile(width: int, window: bool, queries: float) -> Tile:
    """hopper_backward.backward_tile for key ranges. queries: how many queries see a tile of keys."""
    if width == 64 and window:
        return Tile(64, dq_warp=True)
    return replace(pair_tile(width, ordered=False), dq_lags=width == 64 and queries >= 2048)


def head_groups(kv_heads: int, head_bytes: int) -> int:
    """Into how many groups the key heads are divided at most, so that a group's queries stay in L2. head_bytes: of one query head."""
    return -(-kv_heads // max(1, L2_GROUP // head_bytes))


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, table: Tensor,
                    options: Options, into: tuple[Tensor, Tensor, Tensor] | None = None,
                    tile: Tile | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV, as the plain path's launch_backward gives them. table: of the ranges by keys."""
    width, kv_heads, group = mainloop_width(q.shape[-1], v.shape[-1]), k.shape[1], q.shape[1] // k.shape[1]
    queries = group * q.shape[0] / max(options.sequences, 1) / 2
    tile = tile or backward_tile(width, options.window_left >= 0, queries)
    programs, parts, block = multiprocessors(q.device), parts_of(group), KEYS.value
    divided = divided_tiles(group, programs)
    # flags, and behind them dK and dV of both consumers' keys
    sums = torch.empty(divided * (2 + 4 * HALF.value * width), dtype=torch.float32, device=q.device)
    with on_device_of(q):
        order = launch_order(table, sums[: 2 * divided].view(torch.int32), k.shape[0], kv_heads, group,
                             head_groups(kv_heads, q.shape[0] * width * 8), programs, (options.window_left, options.window_right), block,
                             tile.rows)
    hooks = (*HOOKS, ("NEXT_QUERIES", next_step_of_64 if tile.rows == 64 else next_step_of_128), *(IN_PARTS if parts == 2 else ()))
    rule = hopper_backward.Rule(hooks, (options.sequences, len(order) - 1, divided), parts)
    *dense, of_out = (x[None] for x in (q, k, v, out, grad_out))
    into = None if into is None else tuple(x[None] for x in into)
    *grads, _ = hopper_backward.launch_backward(of_out, grad_lse, *dense, stats, None, None,
                                                replace(options, sequences=None, ranges=False), False, tile, into, rule,
                                                own=(table, order, sums))
    return tuple(x[0] for x in grads)
