"""FlashAttention's forward on Hopper with Triton's own warp specialisation: one group of warps loads, two keep 64 queries each.

For dense attention without masks. The compiler makes the groups' code from an ordinary loop (`warp_specialize`), in ways that the kernel
has to follow:

- it halves the queries' tile between the two groups, and their descriptor's block, but not the box that the host encodes: `HalvedLaunch`;
  the rows must be the descriptor's first dimension. Triton 3.7 refuses such a descriptor;
- a loop with an `else` is left as it is, and a second loop comes out wrong: so there is one, for whole tiles of keys only;
- it makes barriers that nobody waits for: `_invalidated`.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from attnzoo_kernels._triton.launch import Launch, block_width, descriptor_like, multiprocessors, tma_takes_layout
from attnzoo_kernels._triton.softmax import in_units, log_sum_exp, softmax_stats, softmax_step
from attnzoo_kernels._triton.tiles import first_lse, load_rows, store_rows
from attnzoo_kernels.flash.options import Layout, Options, strides
from attnzoo_kernels.flash.tiles import SpecialisedTile


def takes(tile: SpecialisedTile | None, dtype: torch.dtype, aligned: bool, q: Layout, k: Layout, v: Layout, options: Options) -> bool:
    """Whether this kernel computes the call."""
    if tile is None or options.sequences is not None or not triton.__version__.startswith("3.6."):
        return False
    (batch, seqlen, heads, head_dim), (by_batch, by_row, by_head) = q[0], strides(q)
    return (dtype.itemsize == 2 and aligned and options.softmax_scale > 0 and options.slopes_stride is None
            and options.softcap == options.dropout_p == 0 and options.window_left < 0 and options.window_right < 0
            and k[0][1] % tile.block_n == 0 and head_dim == 128 and all(tma_takes_layout(*x, 2) for x in (q, k, v))
            and (batch == 1 or by_batch == seqlen * by_row) and by_row >= heads * by_head)


@triton.jit
def _invalidated(x):
    """x, when the two words at the beginning of shared memory are barriers no more.

    The compiler makes barriers there that nobody waits for, and lays keys over them. A program that is stopped for another process and
    resumed would not find the keys as they were.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;"
        " @first mbarrier.inval.shared::cta.b64 [global_smem]; @first mbarrier.inval.shared::cta.b64 [global_smem+8];"
        " fence.proxy.async.shared::cta; mov.b32 $0, $1; }", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "heads", "items", "stride_stats"], do_not_specialize_on_alignment=["sinks"])
def flash_fwd_specialised_kernel(q_source, k_source, v_source, out_ptr, lse_ptr, stats_ptr, sinks, stride_qh, stride_ob, stride_os,
                                 stride_oh, stride_stats, scale, seqlen_q, seqlen_k, heads, group, items, HEAD_DIM: tl.constexpr,
                                 VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_SINKS: tl.constexpr,
                                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr):
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    zero = _invalidated(items - items)
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), warp_specialize=True, num_stages=STAGES):
        row = item % tiles * BLOCK_M
        batch = item // tiles // heads
        head = item // tiles % heads
        # [BLOCK_M, BLOCK_D]
        q = q_source.load([batch * seqlen_q + row, head * stride_qh])
        sink = -float("inf")
        if HAS_SINKS:
            sink = in_units(tl.load(sinks + head).to(tl.float32), False)
        top = tl.zeros([BLOCK_M], tl.float32) + sink
        norm = tl.where(top == -float("inf"), 0.0, 1.0)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        for column in tl.range(0, seqlen_k, BLOCK_N, num_stages=STAGES):
            # [BLOCK_N, BLOCK_D]
            k = load_rows(k_source, batch, head // group, zero, column, seqlen_k, 0, HEAD_DIM, BLOCK_N, BLOCK_D, False, 1)
            # [BLOCK_M, BLOCK_N]
            scores = tl.dot(q, tl.trans(k))
            weights, top, norm, rescale = softmax_step(scores, top, norm, scale, False, False)
            # [BLOCK_N, BLOCK_DV]
            v = load_rows(v_source, batch, head // group, 0, column, seqlen_k, 0, VALUE_DIM, BLOCK_N, BLOCK_DV, False, 1)
            # [BLOCK_M, BLOCK_DV]
            acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])
        acc *= (1.0 / norm)[:, None]
        out = out_ptr + tl.cast(batch, tl.int64) * stride_ob + tl.cast(head, tl.int64) * stride_oh
        store_rows(out, acc, row, seqlen_q, stride_os, VALUE_DIM, BLOCK_M, BLOCK_DV)
        i = row + tl.arange(0, BLOCK_M)
        lse_index = first_lse(batch, head, 0, seqlen_q, heads, False) + i
        tl.store(lse_ptr + lse_index, log_sum_exp(top, norm, False), mask=i < seqlen_q)
        tl.store(stats_ptr + lse_index, top, mask=i < seqlen_q)
        tl.store(stats_ptr + stride_stats + lse_index, softmax_stats(top, norm, False)[1], mask=i < seqlen_q)


@dataclass
class HalvedLaunch(Launch):
    """A launch whose first descriptor the compiler has halved: its box, too, is one of half as many rows. Called as the other forward."""

    queries: TensorDescriptor | None = None

    def __call__(self, q, k, v, *results):
        if self.compiled is None:
            self.compiled = self.compile(descriptor_like(self.queries, q), k, v, *results[:4])
            self.compiled.metadata.tensordesc_meta[0]["block_size"][0] = self.constants["BLOCK_M"] // 2
            self.other.compile(q, k, v, *results)
        super().__call__(descriptor_like(self.queries, q), k, v, *results[:4])


def plan(device: torch.device, dtype: torch.dtype, has_sinks: bool, q: Layout, k: Layout, v: Layout, tile: SpecialisedTile,
         options: Options, other: Launch) -> HalvedLaunch:
    (batch, seqlen_q, heads, head_dim), value_dim = q[0], v[0][-1]
    _, by_row, by_head = strides(q)
    # heads side by side: rows of all sequences by columns of all heads
    queries = TensorDescriptor(torch.empty(0), [batch * seqlen_q, (heads - 1) * by_head + head_dim], [by_row, 1], [tile.block_m, head_dim])
    items = options.programs(heads, seqlen_q, batch, tile.block_m)
    scalars = (by_head, seqlen_q * heads * value_dim, heads * value_dim, value_dim, math.prod(q[0][:-1]),
               options.softmax_scale * math.log2(math.e), seqlen_q, k[0][1], heads, heads // k[0][2], items)
    constants = {"HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "BLOCK_D": block_width(head_dim), "BLOCK_DV": block_width(value_dim),
                 "HAS_SINKS": has_sinks, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "STAGES": tile.stages}
    blocks = {1: (tile.block_n, constants["BLOCK_D"]), 2: (tile.block_n, constants["BLOCK_DV"])}
    programs = min(items, multiprocessors(device))
    return HalvedLaunch(flash_fwd_specialised_kernel, programs, scalars, constants, 4, tile.stages, blocks, queries=queries, other=other)
