"""FlashAttention-3's forward for Hopper in Gluon: a warp loads through TMA, warp groups of 64 queries have products and softmax in flight.

A program stays on its multiprocessor and takes tiles from a counter. Each warp group of matrix instructions (a consumer) walks the keys
from the last tile that it sees to the first; while the tensor cores add up P V of one tile, they multiply Q K^T of the next.
"""

import functools
import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.counter import tile_counter
from attnzoo_kernels._gluon.forward import ROWS, Config, Descriptors, Problem, Program, Rows, allocate
from attnzoo_kernels._gluon.forward_consumer import consume, finish, inside, run_forward
from attnzoo_kernels._gluon.forward_mainloop import column, mainloop, mask, step_mask
from attnzoo_kernels._gluon.forward_producer import produce_prefetched
from attnzoo_kernels._gluon.hopper import descriptor, why_not_tma
from attnzoo_kernels._gluon.tile_scheduler import next_tile, span, take
from attnzoo_kernels._gluon.tiles import masks_in_loop
from attnzoo_kernels._triton.launch import L2_GROUP, Launch, multiprocessors, on_device_of
from attnzoo_kernels.flash.options import Layout, Options, layout
from attnzoo_kernels.flash.tiles import HopperTile, hopper_forward_tile


@gluon.jit(do_not_specialize=["stride_stats", "window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "heads", "group",
                              "head_group", "n_tiles"], do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def flash_fwd_hopper_kernel(q_desc, k_desc, v_desc, out_desc, lse_ptr, stats_ptr, cu_seqlens_q, cu_seqlens_k, counter, stride_stats, scale,
                            window_left, window_right, n_seqs, seqlen_q, seqlen_k, heads, group, head_group, n_tiles,
                            BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
                            CONSUMERS: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
                            LOOP_MASK: gl.constexpr, Q_SLOTS: gl.constexpr, JOINT_RELEASE: gl.constexpr, HOLD: gl.constexpr,
                            HALVED: gl.constexpr, AHEAD: gl.constexpr, FROM_ZERO: gl.constexpr, REGISTERS: gl.constexpr):
    config = Config(
        BLOCK_N=BLOCK_N, BLOCK_DV=BLOCK_DV, STAGES=STAGES, CONSUMERS=CONSUMERS, REGISTERS=REGISTERS, PACKED=PACKED, HAS_LEFT=HAS_LEFT,
        HAS_RIGHT=HAS_RIGHT, BRANCHES=1, MASK_IN_LOOP=LOOP_MASK, EMPTY_ROWS=LOOP_MASK, Q_SLOTS=Q_SLOTS, Q_IN_REGISTERS=Q_SLOTS == 1,
        JOINT_RELEASE=JOINT_RELEASE, K_BEFORE_PV=HOLD, HALF_TILE=HALVED, PREFETCH_TILE=AHEAD, ROW_MAX_NOT_NEGATIVE=FROM_ZERO,
        PRODUCE=produce_prefetched, CONSUME=consume, NEXT_TILE=next_tile, TAKE=take, SPAN=span, MAINLOOP=mainloop, COLUMN=column,
        MASK=mask, STEP_MASK=step_mask, INSIDE=inside, FINISH=finish)
    descs = Descriptors(q_desc, k_desc, v_desc, out_desc)
    tiles, bars = allocate(descs, config)
    problem = Problem(counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, group, head_group, n_tiles, window_left,
                      window_right)
    run_forward(Program(descs, problem, Rows(scale, lse_ptr, stats_ptr, stride_stats), tiles, bars, None), config)


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, same_lengths: bool, q: Layout, k: Layout, v: Layout, options: Options,
          tile: HopperTile | None = None) -> tuple[Launch, HopperTile, int, int]:
    sequences, seqlen_q, seqlen_k = options.sizes(q[0], k[0])
    heads, head_dim = q[0][-2:]
    value_dim, group = v[0][-1], heads // k[0][-2]
    width, value_width = 64 if head_dim <= 64 else 128, 64 if value_dim <= 64 else 128
    mean = seqlen_q if options.sequences is None else seqlen_q // sequences
    tile = tile or hopper_forward_tile(width, value_width, mean, causal=options.window_right >= 0, window=options.window_left >= 0,
                                       packed=options.sequences is not None)
    n_tiles = options.programs(heads, seqlen_q, sequences, ROWS.value * tile.consumers)
    head_group = max(1, L2_GROUP // (2 * seqlen_k * (width + value_width))) * group
    scalars = (math.prod(q[0][:-1]), options.softmax_scale * math.log2(math.e), options.window_left, options.window_right, sequences,
               seqlen_q, seqlen_k, heads, group, head_group, n_tiles)
    shift = 0 if same_lengths else seqlen_k - seqlen_q if options.sequences is None else None
    loop_mask = masks_in_loop(options.window_left, options.window_right, shift, ROWS.value)
    # half of the first tile left out: 64 causal 512, 2048, 8192 257, 436, 557 TFLOP/s for 247, 430, 550; at 128 351, 590, 712 for 347, 601,
    # 730; three consumers whose loop masks would spill
    halved = options.window_right >= 0 and (width == value_width == 64 or mean <= 512) and not (tile.consumers == 3 and loop_mask)
    constants = {
        "BLOCK_D": width, "BLOCK_DV": value_width, "BLOCK_N": tile.block_n, "STAGES": tile.stages,
        "CONSUMERS": tile.consumers, "PACKED": options.sequences is not None, "HAS_LEFT": options.window_left >= 0,
        "HAS_RIGHT": options.window_right >= 0, "LOOP_MASK": loop_mask, "Q_SLOTS": tile.q_slots, "JOINT_RELEASE": tile.joint_release,
        "HOLD": tile.hold, "HALVED": halved, "AHEAD": tile.ahead, "FROM_ZERO": tile.from_zero and not loop_mask,
        "REGISTERS": tile.registers,
    }
    launch = Launch(flash_fwd_hopper_kernel, min(n_tiles, multiprocessors(device)), scalars, constants, 4, 1)
    return launch, tile, width, value_width


def forward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options, *, sinks: bool) -> str | None:
    """Why this path does not take the call; None if it does."""
    if not (32 < q.shape[-1] <= 128 and 32 < v.shape[-1] <= 128):
        return f"head_dim and value_dim must be 33 to 128, got {q.shape[-1]} and {v.shape[-1]}"
    if options.softcap > 0 or options.slopes_stride is not None or options.dropout_p > 0 or sinks:
        return "it has no softcap, alibi_slopes, dropout_p or sinks"
    if options.softmax_scale <= 0:
        return f"softmax_scale must be positive, got {options.softmax_scale}"
    return why_not_tma(q, k, v)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
                   options: Options, tile: HopperTile | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE and statistics as the plain path's launch_forward gives them, for what forward_reason lets through."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse_shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    stats = torch.empty(2, *lse_shape, dtype=torch.float32, device=q.device)
    same_lengths = cu_seqlens_q is not None and cu_seqlens_q is cu_seqlens_k
    launch, tile, width, value_width = _plan(q.device, q.dtype, same_lengths, layout(q), layout(k), layout(v), options, tile)
    with on_device_of(q):
        descriptors = (descriptor(x, rows, columns, cu_seqlens_q is not None) for x, rows, columns in (
            (q, ROWS.value, width), (k, tile.block_n, width), (v, tile.block_n, value_width), (out, ROWS.value, value_width)))
        launch(*descriptors, lse, stats, cu_seqlens_q, cu_seqlens_k, tile_counter(q.device))
    return out, lse, stats
