"""Differential attention's forward for Hopper in Gluon: one launch, in which a program computes both softmaxes of a tile, one after the
other.

Two accumulators at once would leave no registers for the overlap of products and softmax that flash's forward has. So each consumer first
attends with the second branch and keeps that result in float32: in shared memory, or, above head_dim 64, in global memory that stays in L2.
Then it attends with the first branch and subtracts. Both branches read the values; the second time they come from L2.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward import ROWS, Descriptors, Problem, Rows
from attnzoo_kernels._gluon.forward_consumer import write_span
from attnzoo_kernels._gluon.forward_kernel import Config, run_tiles
from attnzoo_kernels._gluon.forward_launch import SCALARS, ForwardPlan, heads_in_l2, plan_forward, tile_width
from attnzoo_kernels._gluon.forward_producer import Keys, load_segment, produce_segments
from attnzoo_kernels._gluon.forward_tile import ForwardTile
from attnzoo_kernels._gluon.hopper import constants, product_layout, why_not_tma
from attnzoo_kernels._gluon.tile_scheduler import loaded_tiles, tile_counter
from attnzoo_kernels._gluon.tiles import masks_in_loop
from attnzoo_kernels._triton.call import Layout, layout, outputs
from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels.differential.options import Options, lambda_strides
from attnzoo_kernels.differential.tiles import hopper_forward_tile


class Own(NamedTuple):
    q2: Any  # descriptors of the second branch
    k2: Any
    out2: Any
    lam: Any
    stride_lb: Any
    stride_ls: Any
    stride_lh: Any
    kept: Any  # where a consumer keeps the second branch's output: in shared memory, or, under IN_MEMORY, in global memory


@constants
class OwnConfig:
    SAVE: gl.constexpr  # whether the second branch's output is stored, too
    IN_MEMORY: gl.constexpr


@gluon.jit
def load_tile(tile, step, q_step, program, config):
    """LOAD_TILE: a segment of the second branch's keys, then one of the first branch's."""
    begin, end = loaded_tiles(tile, program, config)
    keys = Keys(tile.sequence, tile.head // program.problem.group, tile.first_k, tile.len_k)
    step, q_step = load_segment(program.own.q2, program.own.k2, tile, keys, 0, end - 1, end - begin, step, q_step, program, config)
    return load_segment(program.descs.q, program.descs.k, tile, keys, 0, end - 1, end - begin, step, q_step, program, config)


@gluon.jit
def load_lambda(tile, span, program, config):
    """EPILOGUE_PARAMS: loads lambda early, because global memory is slow. Where no query sees a key, as after the last packed sequence, it
    is zero."""
    own = program.own
    i = span.row + gl.arange(0, ROWS, gl.SliceLayout(1, product_layout(config.BLOCK_N)))
    batch = tile.sequence
    if config.PACKED:
        batch = 0
    return gl.load(own.lam + batch.to(gl.int64) * own.stride_lb + (tile.first_q + i).to(gl.int64) * own.stride_ls
                   + tile.head * own.stride_lh, mask=(i < span.len_q) & (span.len_k > 0), other=0.0)


@gluon.jit
def places(pointer, ME: gl.constexpr, x, config):
    """Addresses in global memory where a consumer keeps x. Each thread reads only the elements that it has written."""
    r = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    c = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    first = (gl.program_id(0) * config.CONSUMERS + ME) * (x.shape[0] * x.shape[1])
    return pointer + first + (r * x.shape[1])[:, None] + c[None, :]


@gluon.jit
def subtract(acc, inverse, tile, span, at, lam, BRANCH: gl.constexpr, ME: gl.constexpr, program, config):
    """FINISH: keeps lambda times the second branch's output, and subtracts it from the first branch's output."""
    row: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    kept = program.own.kept
    out = acc * gl.convert_layout(inverse, row)[:, None]
    if BRANCH == 0:
        second = out * gl.convert_layout(lam, row)[:, None]
        if config.OPTIONS.IN_MEMORY:
            gl.store(places(kept, ME, second, config), second)
        else:
            kept.index(ME).store(second)
        if config.OPTIONS.SAVE:
            write_span(program.own.out2, out, span, at, ME, program)
    else:
        if config.OPTIONS.IN_MEMORY:
            out = out - gl.load(places(kept, ME, out, config))
        else:
            out = out - kept.index(ME).load(acc.type.layout)
        write_span(program.descs.out, out, span, at, ME, program)


@gluon.jit(do_not_specialize=[*SCALARS, "stride_lb", "stride_ls", "stride_lh"],
           do_not_specialize_on_alignment=["lam_ptr", "cu_seqlens_q", "cu_seqlens_k"])
def differential_fwd_hopper_kernel(q1_desc, q2_desc, k1_desc, k2_desc, v_desc, out_desc, out2_desc, lse_ptr, stats_ptr, lam_ptr,
                                   scratch_ptr, cu_seqlens_q, cu_seqlens_k, counter, stride_stats, stride_lb, stride_ls, stride_lh, scale,
                                   window_left, window_right, n_seqs, seqlen_q, seqlen_k, heads, group, head_group, n_tiles,
                                   BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
                                   REGISTERS: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
                                   MASK_IN_LOOP: gl.constexpr, JOINT_RELEASE: gl.constexpr, K_BEFORE_PV: gl.constexpr,
                                   ROW_MAX_NOT_NEGATIVE: gl.constexpr, SAVE: gl.constexpr, IN_MEMORY: gl.constexpr):
    kept = scratch_ptr
    if not IN_MEMORY:
        kept = gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS, BLOCK_DV],
                                         gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_DV], gl.float32))
    run_tiles(Descriptors(q1_desc, k1_desc, v_desc, out_desc),
              Problem(counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, group, head_group, n_tiles, window_left,
                      window_right), Rows(scale, lse_ptr, stats_ptr, stride_stats),
              Own(q2_desc, k2_desc, out2_desc, lam_ptr, stride_lb, stride_ls, stride_lh, kept),
              Config(BLOCK_N=BLOCK_N, BLOCK_DV=BLOCK_DV, STAGES=STAGES, CONSUMERS=CONSUMERS, REGISTERS=REGISTERS, PACKED=PACKED,
                     HAS_LEFT=HAS_LEFT, HAS_RIGHT=HAS_RIGHT, BRANCHES=2, MASK_IN_LOOP=MASK_IN_LOOP, EMPTY_ROWS=MASK_IN_LOOP, Q_SLOTS=2,
                     JOINT_RELEASE=JOINT_RELEASE, K_BEFORE_PV=K_BEFORE_PV, ROW_MAX_NOT_NEGATIVE=ROW_MAX_NOT_NEGATIVE,
                     OPTIONS=OwnConfig(SAVE=SAVE, IN_MEMORY=IN_MEMORY), PRODUCE=produce_segments, LOAD_TILE=load_tile,
                     EPILOGUE_PARAMS=load_lambda, FINISH=subtract))


def forward_reason(q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor) -> str | None:
    """Why this path does not take the call; None if it does."""
    head_dim, value_dim = q1.shape[-1], v.shape[-1]
    if not (32 < head_dim <= 128 and 32 < value_dim <= (128 if head_dim <= 64 else 256)):
        return f"head_dim must be 33 to 128 and value_dim 33 to 128, above head_dim 64 to 256, got {head_dim} and {value_dim}"
    return why_not_tma(q1, q2, k1, k1 if k2 is None else k2, v)


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, same_lengths: bool, save: bool, shared_k: bool, q: Layout, k: Layout, v: Layout,
          lam: tuple[int, int, int], options: Options, tile: ForwardTile | None = None) -> ForwardPlan:
    sequences, seqlen_q, seqlen_k = options.sizes(q[0], k[0])
    width, value_width = tile_width(q[0][-1]), tile_width(v[0][-1])
    tile = tile or hopper_forward_tile(width, value_width)
    # groups of heads whose keys stay in L2, of equal sizes: else the longest tiles of a small last group would end late
    kv_heads = k[0][-2] * (1 if options.packed else sequences)
    groups = -(-kv_heads // heads_in_l2(seqlen_k, (1 if shared_k else 2) * width + value_width))
    shift = 0 if same_lengths else None if options.packed else seqlen_k - seqlen_q
    mask_in_loop = masks_in_loop(options.window_left, options.window_right, shift, ROWS.value)
    scalars = {"head_group": -(-kv_heads // groups) * (q[0][-2] // k[0][-2]), "stride_lb": lam[0], "stride_ls": lam[1], "stride_lh": lam[2]}
    constants = {"MASK_IN_LOOP": mask_in_loop, "ROW_MAX_NOT_NEGATIVE": tile.row_max_not_negative and not mask_in_loop, "SAVE": save,
                 "IN_MEMORY": width > 64}
    return plan_forward(differential_fwd_hopper_kernel, device, options, tile, q, k, v, scalars, constants)


def launch_forward(q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor,
                   cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, save: bool, options: Options,
                   tile: ForwardTile | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the plain path's launch_forward gives, for calls that forward_reason accepts."""
    out, lse, stats = outputs(q1, v.shape[-1], 2)
    out2 = torch.empty_like(out) if save else out
    plan = _plan(q1.device, q1.dtype, options.packed and cu_seqlens_q is cu_seqlens_k, save, k2 is None, layout(q1), layout(k1), layout(v),
                 lambda_strides(lam, options.packed), options, tile)
    scratch = None
    if plan.launch.constants["IN_MEMORY"]:  # small enough to stay in L2
        scratch = torch.empty(plan.launch.programs * plan.tile.block_m * plan.value_width, dtype=torch.float32, device=q1.device)
    with on_device_of(q1):
        plan.launch(plan.queries(q1), plan.queries(q2), plan.keys(k1), plan.keys(k1 if k2 is None else k2), plan.values(v),
                    plan.output(out), plan.output(out2), lse, stats, lam, scratch, cu_seqlens_q, cu_seqlens_k, tile_counter(q1.device))
    return (out, lse, out2, stats) if save else (out, lse, out.new_empty(0), lse.new_empty(0))
