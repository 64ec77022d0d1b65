"""Sigmoid attention's forward in plain Triton: the kernel's entry point and its launch."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.call import Layout, layout, operand_strides, read_blocks, tma_kind
from attnzoo_kernels._triton.forward import forward, forward_step
from attnzoo_kernels._triton.launch import Launch, architecture, are_aligned, on_device_of
from attnzoo_kernels._triton.mainloop import key_loops, window_seen
from attnzoo_kernels._triton.masks import Window
from attnzoo_kernels._triton.scores import load_slope
from attnzoo_kernels._triton.softmax import in_units
from attnzoo_kernels._triton.tiles import Operand, Shape, program_tile
from attnzoo_kernels.flash.tiles import forward_tile
from attnzoo_kernels.sigmoid.hooks import Given, Loaded, biased, hardware_sigmoid_forward, load_bias, sigmoid_forward
from attnzoo_kernels.sigmoid.options import Options


@triton.jit
def _step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    return forward_step(state, x, own, at, position, edge, MASKED, GUARD, window_seen, biased,
                        WEIGHTS=hardware_sigmoid_forward if own.given.HARDWARE else sigmoid_forward)


@triton.jit
def _loops(x, given):
    ones = tl.full([x.shape.BLOCK_M], 1.0, tl.float32)
    return key_loops(_step, (tl.zeros([x.shape.BLOCK_M, x.shape.BLOCK_DV], tl.float32), ones, ones), x,
                     Loaded(given.window, given, load_bias(given, x.place.other_length, x.shape.PRECISION == "ieee"),
                            load_slope(given, x.place.sequence, x.place.head)), given.ONE_LOOP, True)


@triton.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "heads", "together"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "alibi_slopes"])
def sigmoid_fwd_kernel(q_source, k_source, v_source, out_ptr, cu_seqlens_q, cu_seqlens_k, alibi_slopes, q_strides, k_strides, v_strides,
                       o_strides, stride_ab, softmax_scale, sigmoid_bias, window_left, window_right, n_seqs, seqlen_q, seqlen_k, heads,
                       group, together, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                       PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr,
                       HAS_BIAS: tl.constexpr, HAS_ALIBI: tl.constexpr, HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr,
                       BLOCK_N: tl.constexpr, TMA: tl.constexpr, Q_REGISTERS: tl.constexpr, Q_SELECT: tl.constexpr, ONE_LOOP: tl.constexpr):
    forward(program_tile(cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, BLOCK_M, PACKED, HAS_RIGHT,
                         together if HAS_RIGHT and not HAS_LEFT else None), Operand(q_source, *q_strides), Operand(k_source, *k_strides),
            Operand(v_source, *v_strides), Operand(out_ptr, *o_strides), None, None, 0, in_units(softmax_scale, PRECISION == "ieee"), 1.0,
            Given(Window(window_left, window_right, HAS_LEFT, HAS_RIGHT), alibi_slopes, stride_ab, sigmoid_bias, n_seqs, HAS_BIAS,
                  HAS_ALIBI, HARDWARE, ONE_LOOP), seqlen_q, heads, group,
            Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PACKED, PRECISION, TMA), _loops, Q_REGISTERS, Q_SELECT, False)


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, aligned: bool, q: Layout, k: Layout, v: Layout, out: Layout,
          options: Options) -> Launch:
    def of_length(long: bool) -> Launch:
        constants = options.constants(q[0], v[0], dtype, device)
        tile = forward_tile(architecture(device), constants["BLOCK_D"], constants["BLOCK_DV"], dtype.itemsize, causal=options.causal,
                            window=options.window_left >= 0, packed=options.packed, long=long)
        constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "Q_REGISTERS": tile.q_registers, "Q_SELECT": tile.q_select,
                      "ONE_LOOP": tile.one_loop, "TMA": tma_kind(tile.tma and aligned, (q, k, v), dtype.itemsize, options.packed)}
        sequences, seqlen_q, _ = options.sizes(q[0], k[0])
        together = options.heads_together(q[0], k[0], (k[0][-1] + v[0][-1]) * k[0][-2] // q[0][-2], tile.block_m, device, dtype)
        return Launch(
            sigmoid_fwd_kernel, options.programs(q[0][-2], seqlen_q, sequences, tile.block_m),
            (*operand_strides(q, k, v, out), *options.scalars(q[0], k[0]), together), constants,
            tile.num_warps, tile.num_stages, read_blocks(tile, constants))

    long = not options.packed and k[0][1] > 4096
    launch = of_length(long)
    if not options.packed:
        launch.others = lambda: [of_length(not long)]
    return launch


def launch_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
                   alibi_slopes: Tensor | None, options: Options) -> Tensor:
    """Output: layout of q, value width."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    if out.numel():
        launch = _plan(q.device, q.dtype, are_aligned(q, k, v), layout(q), layout(k), layout(v), layout(out), options)
        with on_device_of(q):
            launch(q, k, v, out, cu_seqlens_q, cu_seqlens_k, alibi_slopes)
    return out
