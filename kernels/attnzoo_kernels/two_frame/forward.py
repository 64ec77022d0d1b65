"""The forward of attention in two frames: the kernel's entry point and its launch."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.call import Layout, layout, operand_strides, outputs, read_blocks, tma_kind
from attnzoo_kernels._triton.forward import forward, forward_step, softmax_state
from attnzoo_kernels._triton.launch import Launch, architecture, are_aligned, on_device_of
from attnzoo_kernels._triton.mainloop import window_seen
from attnzoo_kernels._triton.softmax import in_units
from attnzoo_kernels._triton.tiles import Operand, Shape, program_tile
from attnzoo_kernels.flash.tiles import forward_tile
from attnzoo_kernels.two_frame.hooks import Frames, frame_loops
from attnzoo_kernels.two_frame.options import Options


@triton.jit
def _step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    return forward_step(state, x, own, at, position, edge, MASKED, GUARD, window_seen, BY_WARP=own.BY_WARP)


@triton.jit
def _loops(x, own):
    state = softmax_state(-float("inf"), x.shape)
    for near in range(2):
        state = frame_loops(_step, state, x, own, 1 - near, True)
    return state


@triton.jit(do_not_specialize=["near_keys", "far_keys", "n_seqs", "seqlen_q", "seqlen_k", "heads", "together", "stride_stats"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "lse_ptr", "stats_ptr"])
def two_frame_fwd_kernel(q_source, k_source, v_source, out_ptr, lse_ptr, stats_ptr, cu_seqlens_q, cu_seqlens_k, q_strides, k_strides,
                         v_strides, o_strides, stride_stats, softmax_scale, near_keys, far_keys, n_seqs, seqlen_q, seqlen_k, heads, group,
                         together, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                         PACKED: tl.constexpr, LIMITED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                         TMA: tl.constexpr, BY_WARP: tl.constexpr, Q_REGISTERS: tl.constexpr, Q_SELECT: tl.constexpr,
                         ONE_LOOP: tl.constexpr):
    forward(program_tile(cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, BLOCK_M, PACKED, True,
                         None if LIMITED else together), Operand(q_source, *q_strides), Operand(k_source, *k_strides),
            Operand(v_source, *v_strides), Operand(out_ptr, *o_strides), lse_ptr, stats_ptr, stride_stats,
            in_units(softmax_scale, PRECISION == "ieee"), 1.0,
            Frames(near_keys, far_keys, Operand(q_source, *q_strides),
                   Operand(k_source, *k_strides), None, softmax_scale, group, ONE_LOOP, Q_REGISTERS, Q_SELECT,
                   BY_WARP), seqlen_q, heads, group,
            Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA), _loops, False, False)


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, aligned: bool, q: Layout, k: Layout, v: Layout, out: Layout, stats_stride: int,
          options: Options) -> Launch:
    sequences, seqlen_q, _ = options.sizes(q[0], k[0])
    constants = options.constants(q[0], v[0], dtype)
    tile = forward_tile(architecture(device), constants["BLOCK_D"], constants["BLOCK_DV"], dtype.itemsize, causal=True, window=True,
                        packed=options.packed)
    tma = tma_kind(tile.tma and aligned, (q, k, v), dtype.itemsize, options.packed)
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "TMA": tma, "BY_WARP": tma > 0 and architecture(device) == 90,
                  "Q_REGISTERS": tile.q_registers, "Q_SELECT": tile.q_select, "ONE_LOOP": tile.one_loop}
    scalars = (*operand_strides(q, k, v, out), stats_stride, *options.scalars(q[0], k[0]),
               options.heads_together(out[0], v[0], (q[0][-1] + v[0][-1]) * v[0][-2] // out[0][-2], tile.block_m, device, dtype))
    return Launch(two_frame_fwd_kernel, options.programs(out[0][-2], seqlen_q, sequences, tile.block_m), scalars, constants, tile.num_warps,
                  tile.num_stages, read_blocks(tile, constants))


def launch_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
                   options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Output (one head for two of q, value width), LSE and, for the backward, the statistics (2, *lse.shape) of the softmax.

    q and k have the frames of head h as their heads 2 h (near) and 2 h + 1 (far).
    """
    out, lse, stats = outputs(q[..., ::2, :], v.shape[-1])
    if lse.numel() > 0:
        launch = _plan(q.device, q.dtype, are_aligned(q, k, v), *map(layout, (q, k, v, out)), stats.stride(0), options)
        with on_device_of(q):
            launch(q, k, v, out, lse, stats, cu_seqlens_q, cu_seqlens_k)
    return out, lse, stats
