"""Dual Chunk attention's forward: `_triton.forward` for a tile of queries of one chunk, relation after relation, with one softmax."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.call import Layout, layout, operand_strides, outputs, read_blocks
from attnzoo_kernels._triton.forward import forward, forward_step, softmax_state
from attnzoo_kernels._triton.launch import Launch, architecture, are_aligned, on_device_of, tma_readable, tma_takes_layout
from attnzoo_kernels._triton.tiles import Operand, Shape
from attnzoo_kernels.dual_chunk.chunks import chunk_tile
from attnzoo_kernels.dual_chunk.hooks import Chunked, first_relation, relation_loops, seen
from attnzoo_kernels.dual_chunk.options import Extras, Options
from attnzoo_kernels.dual_chunk.parts import parts
from attnzoo_kernels.dual_chunk.rotation import rotated_copies
from attnzoo_kernels.dual_chunk.tiles import forward_tile


@triton.jit
def _step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    return forward_step(state, x, own, at, position, edge, MASKED, GUARD, seen)


@triton.jit
def _step_by_warp(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    return forward_step(state, x, own, at, position, edge, MASKED, GUARD, seen, BY_WARP=True)


@triton.jit
def _relations(STEP: tl.constexpr, x, own):
    state = softmax_state(-float("inf"), x.shape)
    for relation in range(first_relation(own), 3 if own.CAUSAL else 5):
        state = relation_loops(STEP, state, x, own, relation, True)
    return state


@triton.jit
def _loops(x, own):
    return _relations(_step, x, own)


@triton.jit
def _loops_by_warp(x, own):
    return _relations(_step_by_warp, x, own)


@triton.jit(do_not_specialize=["n_seqs", "seqlen_q", "seqlen_k", "heads", "batches", "chunk", "stages", "stride_stats"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "lse_ptr", "stats_ptr"])
def dual_chunk_fwd_kernel(q_source, k_source, v_source, out_ptr, lse_ptr, stats_ptr, cu_seqlens_q, cu_seqlens_k, q_strides, k_strides,
                          v_strides, o_strides, stride_stats, logit_scale, n_seqs, seqlen_q, seqlen_k, heads, batches, chunk, stages, group,
                          HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
                          PACKED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                          TMA: tl.constexpr, BY_WARP: tl.constexpr):
    place, index, len_q = chunk_tile(cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, chunk, BLOCK_M, True, PACKED,
                                     CAUSAL)
    forward(place, Operand(q_source, *q_strides), Operand(k_source, *k_strides), Operand(v_source, *v_strides),
            Operand(out_ptr, *o_strides), lse_ptr, stats_ptr, stride_stats, logit_scale if PRECISION == "ieee" else 1.0, 1.0,
            Chunked(Operand(q_source, *q_strides), Operand(k_source, *k_strides), batches, index,
                    chunk, stages, place.row + place.other_length - len_q, group, CAUSAL), seqlen_q, heads, group,
            Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA), _loops_by_warp if BY_WARP else _loops,
            False, False)


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, aligned: bool, queries: Layout, keys: Layout, q: torch.Size, k: torch.Size, v: Layout,
          out: Layout, stats_stride: int, options: Options) -> Launch:
    sequences, seqlen_q, seqlen_k = options.sizes(q, k)
    constants = options.constants(q, out[0], dtype)  # v may be a wider copy
    tile = forward_tile(architecture(device), constants["BLOCK_D"], constants["BLOCK_DV"], dtype.itemsize)
    tma = tile.tma and aligned and all(tma_takes_layout(*x, dtype.itemsize) for x in (queries, keys, v))
    # by Hopper's products, whose threads hold two rows of 64 where four warps share them
    by_warp = tma and architecture(device) == 90 and tile.block_m == 16 * tile.num_warps
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "TMA": int(tma), "BY_WARP": by_warp}
    scalars = (*operand_strides(queries, keys, v, out), stats_stride, options.logit_scale(dtype), *options.scalars(q, k))
    return Launch(dual_chunk_fwd_kernel, options.chunk_programs(q[-2], sequences, seqlen_q, seqlen_k - seqlen_q, tile.block_m), scalars,
                  constants, tile.num_warps, tile.num_stages, read_blocks(tile, constants), tile.launch_options(tma))


def launch_forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Output (layout of q, value width), LSE and, for the backward, the statistics (2, *lse.shape) of the softmax."""
    out, lse, stats = outputs(q, v.shape[-1])
    if lse.numel() > 0:
        with on_device_of(q):
            for part in parts(q, k, extras, options):
                _launch(part.tokens(q), part.tokens(k), part.tokens(v), part.tokens(out), part.rows(lse), part.rows(stats), part.extras,
                        options)
    return out, lse, stats


def _launch(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, stats: Tensor, extras: Extras, options: Options) -> None:
    _, seqlen_q, seqlen_k = options.sizes(q.shape, k.shape)
    queries = rotated_copies(q, extras, options, seqlen_k, 3, queries=True)
    keys = rotated_copies(k, extras, options, seqlen_q, options.key_copies, queries=False)
    v = tma_readable(v)
    launch = _plan(q.device, q.dtype, are_aligned(queries, keys, v, out), layout(queries), layout(keys), q.shape, k.shape, layout(v),
                   layout(out), stats.stride(0), options)
    launch(queries, keys, v, out, lse, stats, *extras[3:])
