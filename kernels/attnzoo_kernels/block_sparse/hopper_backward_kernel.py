"""Hooks of the Hopper backward's kernel: each tile of 128 keys goes over its list of tiles of 64 queries."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_load import load_step
from attnzoo_kernels._gluon.backward_tiles import KEYS, KeyTile, word
from attnzoo_kernels._gluon.hopper import await_full, read_word, write_word
from attnzoo_kernels.block_sparse.hopper_lists import find_list, list_lengths, listed_tile


class Lists(NamedTuple):
    """The lists of the tiles of keys (`attnzoo_kernels.block_sparse.lists`)."""

    order: Any
    index: Any
    count: Any
    stride_batch: Any
    stride_head: Any
    tiles: Any
    width: Any
    numbers: Any  # in shared memory: each stage's tile of queries; consumers that read the list would hold it in registers


@gluon.jit
def _listed_tile(problem, lists, config):
    """NEXT_TILE: the next tile of keys, with the lengths of its list as segments of steps."""
    index = gl.atomic_add(problem.counter, 1, sem="relaxed")
    batch, kv_head, tile = listed_tile(index, lists.order, lists.tiles, problem.kv_heads, problem.n_tiles)
    number = batch * lists.stride_batch + kv_head * problem.group * lists.stride_head + tile
    length, clear = list_lengths(lists.count, number)
    more = (index < problem.n_tiles).to(gl.int32)
    dq_tile = (batch * problem.kv_heads + kv_head) * problem.group * problem.head_tiles
    return (KeyTile(more, batch, kv_head, tile * KEYS, 0, 0, clear, length, problem.seqlen_q, problem.seqlen_k, 0, dq_tile, number), batch,
            0)


@gluon.jit
def _steps(lists, tile, member):
    """LOADED_STEPS: the list of the first query head's tile. The next entry is loaded one step ahead, so that the queries do not wait for
    it."""
    entry = find_list(lists.index, tile.number, lists.width)
    return 0, tile.end, (entry, gl.load(entry))


@gluon.jit
def _steps_of_head(lists, tile, member):
    """LOADED_STEPS: each query head of a group has its own list."""
    number = tile.number + member * lists.stride_head
    length, _ = list_lengths(lists.count, number)
    entry = find_list(lists.index, number, lists.width)
    return 0, length, (entry, gl.load(entry))


@gluon.jit
def _next_entry(lists, state, n):
    """NEXT_QUERIES: the state is (pointer to the next entry, its value)."""
    entry = state[0] + 1
    return state[1], (entry, gl.load(entry))


@gluon.jit
def _bounds_of_head(lists, smem, slot, member, bounds):
    """BOUNDS: each query head has its own."""
    length, clear = list_lengths(lists.count, word(smem.work, slot, "number") + member * lists.stride_head)
    return 0, 0, clear, length


@gluon.jit
def _load_queries(operands, stats_desc, smem, bars, lists, stage, batch, head, row, j, stats_tile, IN_TAIL: gl.constexpr, config):
    """LOAD_Q: also tells the consumers which tile of queries it is."""
    write_word(lists.numbers.index(stage), j)
    load_step(operands, stats_desc, smem, bars, stage, batch, batch, head, row, stats_tile)


@gluon.jit
def _query_tile(lists, bars, step, n, config):
    """QUERY_TILE: the number that the producer warp has written to shared memory."""
    stage = await_full(bars.q_full, step, config.STAGES)
    return read_word(lists.numbers.index(stage))


@gluon.jit
def _own(tensors, numbers, problem, dtype: gl.constexpr, config):
    """OWN: the Lists."""
    return Lists(tensors[0], tensors[1], tensors[2], *numbers,
                 gl.allocate_shared_memory(gl.int32, [config.STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])))


def hooks(grouped: bool) -> tuple:
    """The kernel's hooks. grouped: a key head has several query heads."""
    of_head = (("BOUNDS", _bounds_of_head), ("LOADED_STEPS", _steps_of_head)) if grouped else (("LOADED_STEPS", _steps),)
    return (("LISTED", True), ("OWN", _own), ("NEXT_TILE", _listed_tile), *of_head, ("NEXT_QUERIES", _next_entry),
            ("QUERY_TILE", _query_tile), ("LOAD_Q", _load_queries))
