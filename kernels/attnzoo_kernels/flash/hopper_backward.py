"""FlashAttention's backward on Hopper: the float32 dQ that all key tiles add to is cleared with the row statistics and written out last.

Without an order the sums of dQ differ from run to run by their rounding. With one each query tile takes its key tiles from the last one
down, and nothing is cleared: the first writes. Two kernels: consumers that make all three gradients; and, for narrow heads with windows or
with few queries in order, with a warp group of its own for dQ.
"""

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnzoo_kernels._gluon.hopper import descriptor, why_not_tma
from attnzoo_kernels._gluon.tiles import heads_together
from attnzoo_kernels._triton.launch import Launch, multiprocessors, on_device_of, tma_takes_layout
from attnzoo_kernels.flash.hopper_gradients import flash_bwd_hopper_kernel
from attnzoo_kernels.flash.hopper_loads import HALF, KEYS
from attnzoo_kernels.flash.hopper_pair import flash_bwd_pair_kernel
from attnzoo_kernels.flash.hopper_rows import (
    flash_bwd_dq_rows_kernel,
    flash_bwd_ordered_dq_rows_kernel,
    flash_bwd_rows_kernel,
    flash_bwd_tails_kernel,
)
from attnzoo_kernels.flash.options import Layout, Options, layout, strides


@dataclass(frozen=True)
class Tile:
    stages: int
    dq_group: bool  # a warp group of its own makes dQ
    registers: int  # of a consumer
    load_registers: int
    rows: int = 64  # queries of a step
    writer: bool = False  # a warp of its own has dQ added to memory
    late: bool = False  # dQ is made a step late, so that the consumers need not keep step with each other


def backward_tile(width: int) -> Tile:
    """Measured at 16k tokens, hidden 2048. Width 64: a third stage gave 1 to 6 % less, 3 % more at length 16384; 192 and 40 registers 0 to
    4 % more without order. Width 128: a third stage 1 to 4 % less, 232 and 40 registers 12 to 17 % less."""
    return Tile(2, True, 200, 24) if width == 64 else Tile(2, False, 240, 24)


def pair_tile(width: int, ordered: bool) -> Tile:
    """Without a warp group for dQ: as many queries as registers hold scores of. The warp that writes gave 2 to 10 % at width 64 and took 0
    to 2 % at 128 without order; in order it is what waits, instead of the consumers (causal 8192 568 instead of 460 TFLOP/s)."""
    return Tile(2, False, 240, 24, rows=8192 // width, writer=ordered or width == 64)


def late(tile: Tile, width: int, ordered: bool, full: bool, queries: float) -> Tile:
    """The tile with dQ a step late where that is faster, by how many queries a key tile sees: TFLOP/s at head dim 64 full 2048 522 for 501,
    causal 8192 576 for 551, 2048 418 for 421, 512 190 for 208; at 128 in order full 8192 635 for 608, causal 565 for 572."""
    return replace(tile, late=queries >= 2048 if width == 64 else ordered and full)


# (wider than 64, causal, longest sequence, tiles of keys for each multiprocessor): up to and from which on sums in order cost at most 3 %.
# How many times the rate in any order they have, as nothing is cleared but programs wait for turns, with 31, 15, 8 and 4 tiles: 64 causal
# 512 1.13, 1.10, 1.08, 1.01, 2048 1.04, 1.01, 0.97, 0.89, 4096 1.01, 0.98, 0.94, 8192 0.99, 0.96, 0.91, 16384 0.98; full 512 1.04, -, 1.00,
# 2048 1.05, 1.04, 1.02, 0.96, 4096 0.99, 1.01, 0.98, 8192 0.98, 0.96. With 15, 8 and 4 tiles: 128 full 512 1.06, 1024 1.03, 2048 1.01,
# 0.98, 0.91, 4096 0.99, 0.95, 8192 0.98, 0.93, 16384 0.96; causal 512 1.06, 2048 0.97, 4096 0.94.
ORDER_COSTS_LITTLE = (
    (False, True, 512, 0), (False, True, 1024, 7.5), (False, True, 4096, 15), (False, True, 16384, 30),
    (False, False, 4096, 7.5), (False, False, 16384, 30),
    (True, True, 512, 15), (True, False, 2048, 7.5), (True, False, 4096, 15),
)


def in_order_anyway(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Whether sums have an order though none is asked for: where that costs little, as measured with as many key heads and keys as there
    are query heads and queries. At 128 full 8192 it would, too, but any order is ahead there."""
    if options.sequences is not None or options.window_left >= 0 or options.window_right > 0 or q.shape[1:-1] != k.shape[1:-1]:
        return False
    wide, causal, length = max(q.shape[-1], v.shape[-1]) > 64, options.window_right == 0, k.shape[1]
    tiles = q.shape[0] * k.shape[2] * -(-length // KEYS.value) / multiprocessors(q.device)
    return any((wide, causal) == entry[:2] and length <= entry[2] and tiles >= entry[3] for entry in ORDER_COSTS_LITTLE)


def backward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options, exact_delta: bool = False) -> str | None:
    """Why this path does not take the call; None if it does."""
    if not 32 < max(q.shape[-1], v.shape[-1]) <= 128:
        return f"the wider of head_dim and value_dim must be 33 to 128, got {q.shape[-1]} and {v.shape[-1]}"
    if options.softcap > 0 or options.slopes_stride is not None or options.dropout_p > 0 or exact_delta:
        return "it has no softcap, alibi_slopes, dropout_p or gradient of sinks"
    if options.softmax_scale <= 0:
        return f"softmax_scale must be positive, got {options.softmax_scale}"
    return why_not_tma(q, k, v)


@dataclass
class Plan:
    """The launches for one layout of the arguments."""

    tile: Tile
    width: int
    rows: Launch
    tails: tuple[Launch, ...]  # of q, dO, k and v; none for dense input
    walk: Launch
    dq_rows: Launch


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, has_grad_lse: bool, ordered: bool, q: Layout, k: Layout, v: Layout, out: Layout,
          grad_out: Layout, dq: Layout, dk: Layout, dv: Layout, options: Options, tile: Tile | None = None) -> Plan:
    sequences, seqlen_q, seqlen_k = options.sizes(q[0], k[0])
    packed = options.sequences is not None
    (heads, head_dim), (kv_heads, value_dim) = q[0][-2:], v[0][-2:]
    width = 64 if max(head_dim, value_dim) <= 64 else 128
    full, group = options.window_left < 0 and options.window_right < 0, heads // kv_heads
    queries = group * seqlen_q / (sequences if packed else 1) / (1 if full else 2)
    # at width 64 windows' masks spill beside the scores of 128 queries; in order full attention gains 3 % by the warp group where dQ is not
    # made late (591 TFLOP/s at 8192, by the warp group 556)
    helped = width == 64 and (options.window_left >= 0 or ordered and full and queries < 2048)
    tile = tile or (backward_tile(width) if helped else late(pair_tile(width, ordered), width, ordered, full, queries))
    query_tiles = options.programs(heads, seqlen_q, sequences, tile.rows)
    key_tiles = options.programs(kv_heads, seqlen_k, sequences, KEYS.value)
    head_tiles = query_tiles // heads if packed else query_tiles // (heads * sequences)
    rows = Launch(
        flash_bwd_rows_kernel, query_tiles,
        (*strides(out), *strides(grad_out), math.prod(q[0][:-1]), sequences, seqlen_q, heads),
        {"VALUE_DIM": value_dim, "WIDTH": width, "PACKED": packed, "TURNS": 1 if ordered else 0,
         "HAS_GRAD_LSE": has_grad_lse, "BLOCK": tile.rows}, 4, 1)
    tails = ()
    if packed:
        tails = tuple(Launch(flash_bwd_tails_kernel, (sequences + 1) * x[0][-2], (*strides(x)[1:], sequences, x[0][0], x[0][-2]),
                             {"DIM": x[0][-1], "WIDTH": width, "BLOCK": block}, 4, 1)
                      for x, block in ((q, tile.rows), (grad_out, tile.rows), (k, KEYS.value), (v, KEYS.value)))
    programs = multiprocessors(device)
    head_group = heads_together(sequences * kv_heads, seqlen_q * width * 8 * group, -(-seqlen_k // KEYS.value), programs, ordered)
    constants = {"HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "WIDTH": width, "PACKED": packed, "HAS_LEFT": options.window_left >= 0,
                 "HAS_RIGHT": options.window_right >= 0, "ORDERED": ordered}
    constants |= {"STAGES": tile.stages} if tile.dq_group else {
        "ROWS": tile.rows, "STAGES": tile.stages, "WRITER": tile.writer, "LATE": tile.late}
    walk = Launch(
        flash_bwd_hopper_kernel if tile.dq_group else flash_bwd_pair_kernel, min(key_tiles, programs),
        (options.softmax_scale, options.softmax_scale * math.log2(math.e), options.window_left, options.window_right, sequences, seqlen_q,
         seqlen_k, kv_heads, strides(dk)[1], strides(dv)[1], group, head_group, head_tiles, key_tiles),
        constants | {"REGISTERS": tile.registers, "LOAD_REGISTERS": tile.load_registers}, 4, 1)
    dq_rows = Launch(flash_bwd_ordered_dq_rows_kernel if ordered else flash_bwd_dq_rows_kernel, query_tiles,
                     (*strides(dq), options.softmax_scale, sequences, seqlen_q, heads),
                     {"HEAD_DIM": head_dim, "WIDTH": width, "PACKED": packed, "BLOCK": tile.rows}, 4, 1)
    return Plan(tile, width, rows, tails, walk, dq_rows)


def _tails(plan: Plan, tensors: tuple[Tensor, ...], blocks: tuple[int, ...], cu_seqlens: tuple[Tensor, ...]) -> list[Tensor]:
    """The ends of packed sequences, (sequences + 1, block, heads, width)."""
    copies = []
    for launch, x, block, bounds in zip(plan.tails, tensors, blocks, cu_seqlens, strict=True):
        copies.append(x.new_empty(bounds.shape[0], block, x.shape[-2], plan.width))
        launch(x, copies[-1], bounds)
    return copies


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor,
                    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, alibi_slopes: Tensor | None, rng_state: Tensor | None,
                    exact_delta: bool, options: Options, deterministic: bool, tile: Tile | None = None,
                    into: tuple[Tensor, Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ, dK, dV and an empty delta, as the plain path's launch_backward gives them, for what backward_reason lets through.

    into: where the first three go, 16-byte aligned, the heads of a row side by side.
    """
    if grad_out.data_ptr() % 16 or grad_out.stride(-1) != 1 or not tma_takes_layout(grad_out.shape, grad_out.stride(), 2):
        grad_out = grad_out.clone(memory_format=torch.contiguous_format)  # autograd may hand over an expanded gradient
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    dq, dk, dv = into or (x.new_empty(x.shape) for x in (q, k, v))
    plan = _plan(q.device, q.dtype, grad_lse is not None, deterministic, *map(layout, (q, k, v, out, grad_out, dq, dk, dv)), options, tile)
    query_tiles, width, rows = plan.rows.programs, plan.width, plan.tile.rows
    row_stats = stats.new_empty(query_tiles, 1, 2 * rows)
    dq_sum = stats.new_empty(1, query_tiles * rows * width // 32, 1, 32)
    counter = torch.empty(1, dtype=torch.int32, device=q.device)
    turns = torch.empty(query_tiles * plan.rows.constants["TURNS"], dtype=torch.int32, device=q.device)
    blocks = (rows, HALF.value, HALF.value, rows)
    with on_device_of(q):
        plan.rows(out, grad_out, stats, grad_lse, row_stats, dq_sum, counter, turns, cu_seqlens_q)
        tails = (None,) * 4
        if plan.tails:
            q_tails, do_tails, k_tails, v_tails = _tails(plan, (q, grad_out, k, v), (rows, rows, KEYS.value, KEYS.value),
                                                         (cu_seqlens_q, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k))
            tails = [descriptor(x, block, width) for x, block in zip((q_tails, k_tails, v_tails, do_tails), blocks, strict=True)]
        plan.walk(*(descriptor(x, block, width) for x, block in zip((q, k, v, grad_out), blocks, strict=True)),
                  descriptor(row_stats, 1, 2 * rows), *tails, descriptor(dk, HALF.value, width), descriptor(dv, HALF.value, width),
                  dk, dv, *((dq_sum,) if plan.tile.dq_group else (descriptor(dq_sum, rows * width // 64, 32), None, None)), counter, turns,
                  cu_seqlens_q, cu_seqlens_k)
        plan.dq_rows(*((dq_sum, turns) if deterministic else (dq_sum,)), dq, cu_seqlens_q)
    return dq, dk, dv, stats.new_empty(0)
