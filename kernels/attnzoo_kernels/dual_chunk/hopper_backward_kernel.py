"""The Gluon kernel of the Hopper backward: the library's mainloop over queries that are rotated for the stage of the keys.

A tile of 128 keys lies in one chunk, and so do the queries of a step. dQ of each of the three stages is summed in a float32 buffer of its
own, because it is in that stage's frame. hopper_bwd_processing.py rotates it back.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_consume import Gradients
from attnzoo_kernels._gluon.backward_kernel import Config, run_pair_tiles
from attnzoo_kernels._gluon.backward_load import Operands, Source, load_step
from attnzoo_kernels._gluon.backward_tiles import Problem


class Stages(NamedTuple):
    """Where the stages begin for a tile of keys."""

    first: Any  # first tile of queries that is one chunk after the keys
    second: Any  # first tile of queries that uses the last copy
    copy: Any  # batch rows of a copy of the queries; for tails, sequences + 1
    buffer: Any  # tiles in a buffer of dQ


@gluon.jit
def _stages_of_tile(own, key, len_q, len_k, config):
    """TILE_PARAMS: `own` is (chunk, near, batches of a copy, tiles of a buffer)."""
    first = ((key // own[0] + 1) * own[0] - (len_k - len_q)) // config.ROWS
    return Stages(first, first + (own[1] + config.ROWS - 1) // config.ROWS, own[2], own[3])


@gluon.jit
def _stage(tile_params, j):
    return (j >= tile_params.first).to(gl.int32) + (j >= tile_params.second).to(gl.int32)


@gluon.jit
def _buffer(tile_params, j, config):
    """DQ_BUFFER: that of the stage."""
    return _stage(tile_params, j) * tile_params.buffer


@gluon.jit
def _load_queries(operands, stats_desc, smem, bars, tile_params, stage, batch, head, row, j, stats_tile, IN_TAIL: gl.constexpr, config):
    """LOAD_Q: of the copy for the stage. A copy of packed sequences is one batch, one of their ends is not."""
    copy = _stage(tile_params, j)
    if IN_TAIL or not config.PACKED:
        copy *= tile_params.copy
    load_step(operands, stats_desc, smem, bars, stage, copy + batch, batch, head, row, stats_tile)


@gluon.jit(do_not_specialize=["n_seqs", "copy", "seqlen_q", "seqlen_k",
                              "kv_heads", "head_group", "head_tiles", "n_tiles", "chunk", "near", "buffer"],
           do_not_specialize_on_alignment=["dq_semaphore", "cu_seqlens"])
def dual_chunk_bwd_hopper_kernel(q_desc, k_desc, v_desc, do_desc, stats_desc, q_tail_desc, k_tail_desc, v_tail_desc, do_tail_desc, dk_desc,
                                 dv_desc, dk_ptr, dv_ptr, dq_desc, counter, dq_semaphore, cu_seqlens, stride_dks, stride_dkh, stride_dvs,
                                 stride_dvh, dk_scale, n_seqs, copy, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles,
                                 n_tiles, chunk, near, buffer, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, WIDTH: gl.constexpr,
                                 PACKED: gl.constexpr, ORDERED: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
                                 DQ_WARP: gl.constexpr, DQ_LAGS: gl.constexpr, REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr):
    """copy and buffer: as `Stages` has them; the rest as pair_bwd_kernel."""
    run_pair_tiles(Source(Operands(q_desc, k_desc, v_desc, do_desc), Operands(q_tail_desc, k_tail_desc, v_tail_desc, do_tail_desc),
                          stats_desc), Gradients(dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dks, stride_dvs, stride_dkh, stride_dvh), dq_desc,
                   dq_semaphore,
                   Problem(counter, cu_seqlens, cu_seqlens, n_seqs, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles, n_tiles,
                           0, 0), (chunk, near, copy, buffer), 1.0, dk_scale, REGISTERS, LOAD_REGISTERS,
                   Config(HEAD_DIM=HEAD_DIM, VALUE_DIM=VALUE_DIM, WIDTH=WIDTH, VALUE_WIDTH=WIDTH, ROWS=ROWS, DQ_ROWS=ROWS, STAGES=STAGES,
                          PACKED=PACKED, HAS_RIGHT=True, ORDERED=ORDERED, DQ_CLEARED=True, DQ_WARP=DQ_WARP, DQ_LAGS=DQ_LAGS,
                          TILE_PARAMS=_stages_of_tile, LOAD_Q=_load_queries, DQ_BUFFER=_buffer))
