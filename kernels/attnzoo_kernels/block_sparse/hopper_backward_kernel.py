"""The Gluon kernel of the Hopper backward: the library's mainloop, each 128 keys along their list of tiles of 64 queries."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_consume import Gradients, all_queries
from attnzoo_kernels._gluon.backward_kernel import Config, run_pair
from attnzoo_kernels._gluon.backward_load import Operands, Source, load_step
from attnzoo_kernels._gluon.backward_step import pair_barriers, pair_tiles
from attnzoo_kernels._gluon.backward_tiles import KEYS, ROWS, KeyTile, Problem, word
from attnzoo_kernels._gluon.hopper import await_full
from attnzoo_kernels.block_sparse.hopper_lists import find_list, list_lengths, listed_tile


class Lists(NamedTuple):
    """The lists of the tiles of keys (`attnzoo_kernels.block_sparse.lists`)."""

    order: Any
    index: Any
    count: Any
    tiles: Any
    width: Any
    stride_batch: Any
    stride_head: Any
    numbers: Any  # where each stage's tile of queries is written down for the consumers, who would hold a number from memory in registers


@gluon.jit
def _listed_tile(problem, lists, c):
    """TILE: the next one, and the lengths of its list as segments."""
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
    """LOAD_STEPS: the list of the first query head's tile; the next entry is loaded a step ahead, for the queries would wait for it."""
    entry = find_list(lists.index, tile.number, lists.width)
    return 0, tile.end, (entry, gl.load(entry))


@gluon.jit
def _steps_of_head(lists, tile, member):
    """LOAD_STEPS: each query head of a group has its own list."""
    number = tile.number + member * lists.stride_head
    length, _ = list_lengths(lists.count, number)
    entry = find_list(lists.index, number, lists.width)
    return 0, length, (entry, gl.load(entry))


@gluon.jit
def _next_entry(lists, state, n):
    entry = state[0] + 1
    return state[1], (entry, gl.load(entry))


@gluon.jit
def _bounds_of_head(lists, smem, slot, member, bounds):
    """BOUNDS: of each query head its own."""
    length, clear = list_lengths(lists.count, word(smem.work, slot, "number") + member * lists.stride_head)
    return 0, 0, clear, length


@gluon.jit
def _load_queries(operands, stats_desc, smem, bars, lists, stage, batch, head, row, j, stats_tile, IN_TAIL: gl.constexpr, c):
    """LOAD_Q: says which tile it is."""
    lists.numbers.index(stage).store(gl.full([1], j, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    load_step(operands, stats_desc, smem, bars, stage, batch, batch, head, row, stats_tile)


@gluon.jit
def _row_tile(lists, bars, step, n, c):
    """ROW_TILE: as the loading warp says."""
    stage = await_full(bars.q_full, step, c.STAGES)
    return gl.max(lists.numbers.index(stage).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit(do_not_specialize=["window_left", "window_right", "seqlen_q", "seqlen_k", "kv_heads", "head_tiles", "n_tiles", "list_tiles",
                              "list_width", "stride_lb", "stride_lh"],
           do_not_specialize_on_alignment=["order", "index", "count", "counter"])
def block_sparse_bwd_hopper_kernel(q_desc, k_desc, v_desc, do_desc, stats_desc, dk_desc, dv_desc, dq_desc, order, index, count, counter,
                                   stride_lb, stride_lh, list_tiles, list_width, softmax_scale, scale, window_left, window_right, seqlen_q,
                                   seqlen_k, kv_heads, group, head_tiles, n_tiles, WIDTH: gl.constexpr, GROUPED: gl.constexpr,
                                   HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
                                   LOAD_REGISTERS: gl.constexpr):
    c = Config(HEAD_DIM=WIDTH, VALUE_DIM=WIDTH, WIDTH=WIDTH, VALUE_WIDTH=WIDTH, ROWS=ROWS, DQ_ROWS=ROWS, STAGES=STAGES, PACKED=False,
               HAS_LEFT=HAS_LEFT, HAS_RIGHT=HAS_RIGHT, LISTED=True, TILE=_listed_tile,
               BOUNDS=_bounds_of_head if GROUPED else all_queries, LOAD_STEPS=_steps_of_head if GROUPED else _steps, LOAD_NEXT=_next_entry,
               ROW_TILE=_row_tile, LOAD_Q=_load_queries)
    smem = pair_tiles(q_desc.dtype, c)
    bars = pair_barriers(c)
    numbers = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    run_pair(Source(Operands(q_desc, k_desc, v_desc, do_desc), None, stats_desc),
             Gradients(dk_desc, dv_desc, None, None, 0, 0, 0, 0, None, None), smem, bars, dq_desc, None,
             Problem(counter, None, None, 0, seqlen_q, seqlen_k, kv_heads, group, 0, head_tiles, n_tiles, window_left, window_right),
             Lists(order, index, count, list_tiles, list_width, stride_lb, stride_lh, numbers), scale, softmax_scale, REGISTERS,
             LOAD_REGISTERS, c)
