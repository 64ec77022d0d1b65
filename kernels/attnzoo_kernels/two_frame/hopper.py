"""The forward of attention in two frames for Hopper in Gluon: flash's persistent programs, which switch to the far queries at the border.

A tile of queries goes over its near keys from the diagonal down, and then over its far keys, with the far frame's queries and keys. All
consumers read all loaded tiles, except those after the diagonal of their rows. On the border, keys of the other frame are masked.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward import ROWS
from attnzoo_kernels._gluon.forward_entry import hopper_fwd_kernel
from attnzoo_kernels._gluon.forward_launch import OWN_TENSORS, ForwardPlan, heads_in_l2, plan_forward, tile_width
from attnzoo_kernels._gluon.forward_mainloop import mainloop_in_turn, mask_scores
from attnzoo_kernels._gluon.forward_producer import Keys, load_keys, load_queries, load_values, produce_segments
from attnzoo_kernels._gluon.forward_tile import ForwardTile
from attnzoo_kernels._gluon.hopper import why_not_tma
from attnzoo_kernels._gluon.tile_scheduler import Span, Tile, tile_counter
from attnzoo_kernels._gluon.tiles import masks_in_loop
from attnzoo_kernels._triton.call import Layout, filled, layout, outputs
from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels.two_frame.options import Options
from attnzoo_kernels.two_frame.tiles import FEW, hopper_forward_tile


class Own(NamedTuple):
    near_keys: Any
    far_keys: Any


@gluon.jit
def own_keys(tensors, numbers, scale, config):
    """OWN: an Own."""
    return Own(*numbers)


class Far(NamedTuple):
    """A consumer's far keys, counted in tiles. Tiles from full_end on get a mask, the last one in any case (fault 22)."""

    full_end: Any
    end: Any


@gluon.jit
def near_tiles(row, COUNT: gl.constexpr, len_q, len_k, near_keys, BLOCK_N: gl.constexpr):
    """The tiles with near keys of COUNT queries from `row` on, at least one: (begin, full_begin, full_end, end), as in key_tiles."""
    shift = len_k - len_q
    last = gl.minimum(row + COUNT, len_q) - 1
    end = (gl.minimum(gl.maximum(last + shift + 1, 0), len_k) + BLOCK_N - 1) // BLOCK_N
    begin = gl.maximum(row + shift - near_keys + 1, 0) // BLOCK_N
    full_begin = (gl.maximum(last + shift - near_keys + 1, 0) + BLOCK_N - 1) // BLOCK_N
    full_end = gl.minimum(gl.maximum(row + shift + 1, 0), len_k) // BLOCK_N
    end = gl.maximum(end, 1)
    return gl.minimum(begin, end - 1), full_begin, full_end, end


@gluon.jit
def far_tiles(row, COUNT: gl.constexpr, len_q, len_k, own, BLOCK_N: gl.constexpr):
    """(full_end, end) of the tiles with far keys of COUNT queries from `row` on."""
    border = len_k - len_q - own.near_keys + 1
    last = gl.minimum(row + COUNT, len_q) - 1
    seen = gl.minimum(len_k, own.far_keys)
    end = (gl.minimum(gl.maximum(last + border, 0), seen) + BLOCK_N - 1) // BLOCK_N
    return gl.minimum(gl.maximum(row + border, 0), seen) // BLOCK_N, end


@gluon.jit
def load_frame(tile, keys, first, tiles, FRAME: gl.constexpr, step, q_step, program, config):
    """Loads `tiles` tiles of keys of a frame, the first one at the key `first`, the next ones below it, and the frame's queries beside the
    first one."""
    queries = Tile(tile.index, tile.words, tile.sequence, 2 * tile.head + FRAME, tile.row, tile.first_q, tile.len_q, tile.first_k,
                   tile.len_k, tile.own)
    of_frame = Keys(keys.sequence, 2 * keys.kv_head + FRAME, keys.first, keys.length)
    for j in range(tiles):
        load_keys(program.descs.k, step, of_frame, first, program, config)
        if j == 0:
            load_queries(program.descs.q, queries, q_step, program, config)
        load_values(step, keys, first, program, config)
        first -= config.BLOCK_N
        step += 1
    return step, q_step + (tiles > 0).to(gl.int32)


@gluon.jit
def load_tile(tile, step, q_step, program, config):
    """LOAD_TILE: the near frame, and then the far one, if it has keys."""
    BLOCK_M: gl.constexpr = config.CONSUMERS * ROWS
    keys = Keys(tile.sequence, tile.head // program.problem.group, tile.first_k, tile.len_k)
    begin, _, _, end = near_tiles(tile.row, BLOCK_M, tile.len_q, tile.len_k, program.own.near_keys, config.BLOCK_N)
    step, q_step = load_frame(tile, keys, (end - 1) * config.BLOCK_N, end - begin, 0, step, q_step, program, config)
    _, far_end = far_tiles(tile.row, BLOCK_M, tile.len_q, tile.len_k, program.own, config.BLOCK_N)
    return load_frame(tile, keys, (far_end - 1) * config.BLOCK_N, far_end, 1, step, q_step, program, config)


@gluon.jit
def span(tile, ME: gl.constexpr, taken, program, config):
    """SPAN of the near frame; its `own` is the Far."""
    BLOCK_M: gl.constexpr = config.CONSUMERS * ROWS
    len_q, len_k = tile.len_q, tile.len_k
    begin, _, _, loaded_end = near_tiles(tile.row, BLOCK_M, len_q, len_k, program.own.near_keys, config.BLOCK_N)
    row = tile.row + ME * ROWS
    _, full_begin, full_end, end = near_tiles(row, ROWS, len_q, len_k, program.own.near_keys, config.BLOCK_N)
    end = gl.where(row < len_q, gl.minimum(gl.maximum(end, begin + 1), loaded_end), loaded_end)
    _, far_end = far_tiles(tile.row, BLOCK_M, len_q, len_k, program.own, config.BLOCK_N)
    far_full_end, _ = far_tiles(row, ROWS, len_q, len_k, program.own, config.BLOCK_N)
    return Span(row, len_q, len_k, begin, loaded_end, begin, full_begin, full_end, end,
                Far(gl.minimum(far_full_end, far_end - 1), far_end))


@gluon.jit
def mask(scores, column, span, program, config):
    """MASK of the near frame."""
    return mask_scores(scores, span.row, column, span.len_q, span.len_k, program.own.near_keys - 1, 0, True, True)


@gluon.jit
def step_mask(scores, where, program, config):
    """STEP_MASK: where is (whether the frame is the far one, the tile, the span)."""
    far, tile, span = where
    if gl.where(far, tile >= span.own.full_end, (tile >= span.full_end) | (tile < span.full_begin)):
        # far keys count as a sequence of their own; the window says where it lies relative to the queries
        length = gl.where(far, gl.minimum(span.len_k, program.own.far_keys), span.len_k)
        left = gl.where(far, span.len_k, program.own.near_keys - 1)
        right = gl.where(far, span.len_k - length - program.own.near_keys, 0)
        scores = mask_scores(scores, span.row, tile * config.BLOCK_N, span.len_q, length, left, right, True, True)
    return scores


@gluon.jit
def _first(span):
    """FIRST: whether the first tile of near keys needs a mask."""
    return (span.end > span.full_end) | (span.end <= span.full_begin)


@gluon.jit
def _ends(end, step, span, program, config):
    """ENDS: the segments are the near and the far frame."""
    far_step = step + span.end - span.begin
    return far_step, far_step + span.own.end


@gluon.jit
def _place(s, stop, place):
    """PLACE: the `where` that step_mask reads."""
    n, _, span = place
    return n > 0, gl.where(n == 0, span.begin, 0) + stop - 1 - s, span


@gluon.jit
def mainloop(q, tile, span, taken, step, q_step, BRANCH: gl.constexpr, ME: gl.constexpr, program, config):
    """MAINLOOP over the near keys and then the far ones of 64 queries."""
    return mainloop_in_turn(span.end, span, step, q_step, program.rows.scale, _first, _ends, _place, ME, program, config)


@gluon.jit
def _unmasked_from(n, stop, span):
    """UNMASKED_FROM: the far keys below full_end need no mask."""
    return gl.where(n == 0, stop, stop - span.own.full_end)


@gluon.jit
def mainloop_in_two_loops(q, tile, span, taken, step, q_step, BRANCH: gl.constexpr, ME: gl.constexpr, program, config):
    """`mainloop` with a loop of its own, without masks, for the far keys past the border."""
    return mainloop_in_turn(span.end, span, step, q_step, program.rows.scale, _first, _ends, _place, ME, program, config,
                            UNMASKED_FROM=_unmasked_from)


HOOKS = {"HAS_LEFT": True, "HAS_RIGHT": True, "MASK_IN_LOOP": True, "INDEX_EARLY": True, "OWN": own_keys, "PRODUCE": produce_segments,
         "LOAD_TILE": load_tile, "SPAN": span, "MAINLOOP": mainloop, "MASK": mask, "STEP_MASK": step_mask}


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, same_lengths: bool, q: Layout, k: Layout, v: Layout, out: Layout, options: Options,
          tile: ForwardTile | None) -> ForwardPlan:
    _, seqlen_q, seqlen_k = options.sizes(out[0], v[0])
    width, value_width = tile_width(q[0][-1]), tile_width(v[0][-1])
    in_two_loops = options.far_keys >= FEW
    tile = tile or hopper_forward_tile(width, value_width, in_two_loops)
    shift = 0 if same_lengths else None if options.packed else seqlen_k - seqlen_q
    scalars = {"own_1": options.near_keys, "own_2": options.far_keys,
               "head_group": heads_in_l2(seqlen_k, 2 * width + value_width) * (out[0][-2] // v[0][-2])}
    # for rows whose own key is not in their first tile of keys, or does not exist
    constants = {"EMPTY_ROWS": masks_in_loop(-1, 0, shift, ROWS.value) or shift < 0} | HOOKS
    if in_two_loops:
        constants["MAINLOOP"] = mainloop_in_two_loops
    rows = (out[0][:-1] + q[0][-1:], ())  # one head for two of q
    return plan_forward(hopper_fwd_kernel, device, options, tile, rows, v, v, scalars, constants)


def forward_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why this path does not take the call; None if it does."""
    if not (32 < q.shape[-1] <= 128 and 32 < v.shape[-1] <= 128):
        return f"head_dim and value_dim must be 33 to 128, got {q.shape[-1]} and {v.shape[-1]}"
    return why_not_tma(q, k, v)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options,
                   tile: ForwardTile | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE and statistics as the plain path's launch_forward gives them, for calls that forward_reason accepts."""
    out, lse, stats = outputs(q[..., ::2, :], v.shape[-1])
    same_lengths = cu_seqlens_q is not None and cu_seqlens_q is cu_seqlens_k
    plan = _plan(q.device, q.dtype, same_lengths, *map(layout, (q, k, v, out)), options, tile)
    with on_device_of(q):
        plan.launch(plan.queries(q), plan.keys(k), plan.values(v), plan.output(out), None, lse, stats, *filled((), OWN_TENSORS),
                    cu_seqlens_q, cu_seqlens_k, tile_counter(q.device))
    return out, lse, stats
