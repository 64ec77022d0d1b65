"""FP8 attention on Hopper in Gluon: the bfloat16 forward's structure (`flash/hopper.py`), with a walk of its own and other loads.

FP8's matrix instructions read both operands along the dimension that they sum over. Values therefore lie token by token, and of every four
keys TMA brings two and two into the halves of a tile, which gives weights the order that `walk.py` needs. A step of the walk waits once:
its keys share a barrier with the values of the tile before.
"""

import functools
import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnzoo_kernels._gluon.counter import tile_counter
from attnzoo_kernels._gluon.hopper import (
    async_load,
    async_store,
    box,
    descriptor,
    fence_async_shared,
    invalidate,
    load_tile,
    mbarrier,
    ring,
    stage_of,
    tma,
    warpgroup_mma_wait,
)
from attnzoo_kernels._gluon.tiles import masks_in_loop
from attnzoo_kernels._gluon.walk import LN2
from attnzoo_kernels._gluon.work import consumer_tiles, forward_barriers, leave_at_zero, loaded_tiles, next_tile, publish, take
from attnzoo_kernels._triton.launch import L2_GROUP, Launch, architecture, descriptor_like, multiprocessors, on_device_of, tma_takes
from attnzoo_kernels.flash_fp8.layout import BLOCK, quantized_like
from attnzoo_kernels.flash_fp8.tiles import forward_tile
from attnzoo_kernels.flash_fp8.walk import KEYS, STAGES, WEIGHT_BITS, usable, walk_keys

ROWS = gl.constexpr(64)  # of a consumer: what one matrix instruction takes
Q_SLOTS = gl.constexpr(2)


@gluon.jit
def _produce(loads, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr):
    """Takes tiles, tells the consumers which (-1 ends), and loads what they need."""
    (q_desc, k_desc, v_desc, q_tiles, k_halves, v_tiles, work, bars, counter, batch, seqlen_q, seqlen_k, heads, group, head_group,
     n_tiles) = loads
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = bars
    TILE: gl.constexpr = CONSUMERS * ROWS
    step = 0
    taken = 0
    index, sequence, head, row, _, _, _, _ = next_tile(
        gl.program_id(0), counter, counter, counter, batch, seqlen_q, seqlen_k, heads, head_group, n_tiles, TILE, False, CAUSAL)
    while index < n_tiles:
        publish(work, work_full, work_empty, taken, sequence, head, row)
        begin, end = loaded_tiles(row, TILE, seqlen_q, seqlen_k, -1, 0, KEYS, False, CAUSAL)
        kv_head = head // group
        key = (end - 1) * KEYS
        for j in range(end - begin):
            slot, phase = stage_of(step, STAGES)
            mbarrier.wait(k_empty.index(slot), phase ^ 1)
            if j == 0:
                mbarrier.expect(k_full.index(slot), 2 * k_desc.block_type.nbytes)
            else:
                mbarrier.expect(k_full.index(slot), 2 * k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            for half in gl.static_range(2):
                async_load(k_desc, [sequence, kv_head, key // 4, 2 * half, 0], k_full.index(slot),
                           box(k_halves.index(2 * slot + half), k_desc))
            if j == 0:
                q_slot, q_phase = ring(taken, Q_SLOTS)
                for c in gl.static_range(CONSUMERS):
                    place = q_slot * CONSUMERS + c
                    mbarrier.wait(q_empty.index(place), q_phase ^ 1)
                    load_tile(q_desc, q_tiles, q_full, place, sequence, head, row + c * ROWS)
            else:  # values of the tile before
                before, phase_before = stage_of(step - 1, STAGES)
                mbarrier.wait(v_empty.index(before), phase_before ^ 1)
                async_load(v_desc, [sequence, kv_head, 0, key + KEYS], k_full.index(slot), box(v_tiles.index(before), v_desc))
            if j == end - begin - 1:
                mbarrier.wait(v_empty.index(slot), phase ^ 1)
                last_full = v_full.index(taken % STAGES)
                mbarrier.expect(last_full, v_desc.block_type.nbytes)
                async_load(v_desc, [sequence, kv_head, 0, key], last_full, box(v_tiles.index(slot), v_desc))
                # not earlier: the next tile is for the program that is ready for it first
                index = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
                index, sequence, head, row, _, _, _, _ = next_tile(
                    index, counter, counter, counter, batch, seqlen_q, seqlen_k, heads, head_group, n_tiles, TILE, False, CAUSAL)
            key -= KEYS
            step += 1
        taken += 1
    leave_at_zero(counter, index, n_tiles)
    publish(work, work_full, work_empty, taken, -1, 0, 0)


@gluon.jit
def _consume(rows, WIDTH: gl.constexpr, CONSUMERS: gl.constexpr, ME: gl.constexpr, CAUSAL: gl.constexpr, LOOP_MASK: gl.constexpr,
             BY_BLOCK: gl.constexpr):
    """64 rows of each tile."""
    (out_desc, lse_ptr, q_scales, k_scales, v_scales, q_tiles, k_tiles, v_tiles, out_tiles, work, bars, seqlen_q, seqlen_k, heads, group,
     q_blocks, k_blocks, scale) = rows
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = bars
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    acc_row: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32]))
    step = 0
    taken = 0
    sequence, head, row = take(work, work_full, work_empty, taken)
    while sequence >= 0:
        owner = sequence * heads + head
        kv_owner = owner // group
        my_row, begin, loaded_end, _, _, full_end, end = consumer_tiles(
            row, ME, ROWS, CONSUMERS, seqlen_q, seqlen_k, -1, 0, KEYS, False, CAUSAL)
        skipped = loaded_end - end  # what only other warp groups see
        for n in range(skipped):
            slot, phase = stage_of(step, STAGES)
            mbarrier.wait(k_full.index(slot), phase)
            mbarrier.arrive(k_empty.index(slot), count=1)
            if n > 0:
                before, _ = stage_of(step - 1, STAGES)
                mbarrier.arrive(v_empty.index(before), count=1)
            step += 1
        if BY_BLOCK:
            q_scale = usable(gl.load(q_scales + kv_owner * q_blocks + gl.minimum(my_row // KEYS, q_blocks - 1)))
        else:
            q_scale = usable(gl.load(q_scales + kv_owner)) * usable(gl.load(k_scales + kv_owner))
        q_slot, q_phase = ring(taken, Q_SLOTS)
        q_place = q_slot * CONSUMERS + ME
        mbarrier.wait(q_full.index(q_place), q_phase)
        acc, pending, top, total, v_scale, step = walk_keys(
            q_tiles.index(q_place), k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, step, skipped, taken, begin, full_end, end,
            my_row, seqlen_q, seqlen_k, scale * q_scale, k_scales + kv_owner * k_blocks, v_scales + kv_owner * k_blocks, ROWS, WIDTH,
            CAUSAL, LOOP_MASK, BY_BLOCK)
        if not BY_BLOCK:
            v_scale = usable(gl.load(v_scales + kv_owner))
        mbarrier.arrive(q_empty.index(q_place), count=1)
        i = my_row + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
        some = total != 0  # NaN too
        divisor = gl.where(some, total, 1.0)
        lse = gl.where(some, (top - WEIGHT_BITS + gl.log2(divisor)) * LN2, -float("inf"))
        gl.store(lse_ptr + owner.to(gl.int64) * seqlen_q + i, lse, mask=i < seqlen_q)
        tma.store_wait(0)
        acc += warpgroup_mma_wait(0, deps=(pending,))
        before, _ = stage_of(step - 1, STAGES)
        mbarrier.arrive(v_empty.index(before), count=1)
        out = (acc * gl.convert_layout(v_scale / divisor, acc_row)[:, None]).to(out_tiles.dtype)
        if my_row < seqlen_q:
            out_tiles.index(ME).store(out)
            fence_async_shared()
            async_store(out_desc, [sequence, head, my_row, 0], box(out_tiles.index(ME), out_desc))
        taken += 1
        sequence, head, row = take(work, work_full, work_empty, taken)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch", "seqlen_q", "seqlen_k", "heads", "group", "head_group", "n_tiles", "q_blocks", "k_blocks"],
           do_not_specialize_on_alignment=["q_scales", "k_scales", "v_scales"])
def flash_fp8_hopper_kernel(q_desc, k_desc, v_desc, out_desc, lse_ptr, q_scales, k_scales, v_scales, counter, scale, batch, seqlen_q,
                            seqlen_k, heads, group, head_group, n_tiles, q_blocks, k_blocks, WIDTH: gl.constexpr, CONSUMERS: gl.constexpr,
                            CAUSAL: gl.constexpr, LOOP_MASK: gl.constexpr, BY_BLOCK: gl.constexpr, REGISTERS: gl.constexpr):
    dtype: gl.constexpr = q_desc.dtype
    out_dtype: gl.constexpr = out_desc.dtype
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, WIDTH], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [Q_SLOTS * CONSUMERS, ROWS, WIDTH],
                                        gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype))
    out_tiles = gl.allocate_shared_memory(out_dtype, [CONSUMERS, ROWS, WIDTH],
                                          gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], out_dtype))
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, WIDTH], k_layout)
    k_halves = k_tiles._reinterpret(dtype, [2 * STAGES, KEYS // 2, WIDTH], k_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, WIDTH, KEYS], gl.NVMMASharedLayout.get_default_for([WIDTH, KEYS], dtype))
    work, bars = forward_barriers(Q_SLOTS * CONSUMERS, STAGES, CONSUMERS)
    loads = (q_desc, k_desc, v_desc, q_tiles, k_halves, v_tiles, work, bars, counter, batch, seqlen_q, seqlen_k, heads, group, head_group,
             n_tiles)
    rows = (out_desc, lse_ptr, q_scales, k_scales, v_scales, q_tiles, k_tiles, v_tiles, out_tiles, work, bars, seqlen_q, seqlen_k, heads,
            group, q_blocks, k_blocks, scale)
    # partitions get constants only where the tuple is written out
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (rows, WIDTH, CONSUMERS, 0, CAUSAL, LOOP_MASK, BY_BLOCK)),
            (_consume, (rows, WIDTH, CONSUMERS, 1, CAUSAL, LOOP_MASK, BY_BLOCK)),
            (_produce, (loads, CONSUMERS, CAUSAL)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consume, (rows, WIDTH, CONSUMERS, 0, CAUSAL, LOOP_MASK, BY_BLOCK)),
            (_consume, (rows, WIDTH, CONSUMERS, 1, CAUSAL, LOOP_MASK, BY_BLOCK)),
            (_consume, (rows, WIDTH, CONSUMERS, 2, CAUSAL, LOOP_MASK, BY_BLOCK)),
            (_produce, (loads, CONSUMERS, CAUSAL)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
    invalidate(bars)


@functools.lru_cache(maxsize=1024)
def _template(shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.float8e4nv)
    strides = [stride if n > 1 or d == len(shape) - 1 else 16 for d, (n, stride) in enumerate(zip(shape, strides, strict=True))]
    return TensorDescriptor(torch.empty(0, dtype=torch.float8_e4m3fn), list(shape), strides, list(block), layout)


def _query_descriptor(q: Tensor, width: int) -> TensorDescriptor:
    batch, seqlen, heads, head_dim = q.shape
    by_batch, by_row, by_head, _ = q.stride()
    return descriptor_like(_template((batch, heads, seqlen, head_dim), (by_batch, by_head, by_row, 1), (1, 1, ROWS.value, width)), q)


def _key_descriptor(k: Tensor, width: int) -> TensorDescriptor:
    """Half of a tile: of every four keys two."""
    batch, seqlen, heads, head_dim = k.shape
    by_batch, by_row, by_head, _ = k.stride()
    shape, strides = (batch, heads, -(-seqlen // 4), 4, head_dim), (by_batch, by_head, 4 * by_row, by_row, 1)
    return descriptor_like(_template(shape, strides, (1, 1, KEYS.value // 4, 2, width)), k)


def _value_descriptor(v: Tensor, width: int) -> TensorDescriptor:
    """Token by token."""
    batch, seqlen, heads, value_dim = v.shape
    by_batch, _, by_head, by_column = v.stride()
    return descriptor_like(_template((batch, heads, value_dim, seqlen), (by_batch, by_head, by_column, 1), (1, 1, width, KEYS.value)), v)


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, q: torch.Size, k: torch.Size, blocks: tuple[int, int], causal: bool, softmax_scale: float,
          out_dtype: torch.dtype) -> tuple[Launch, int]:
    """The launch for shapes, blocks of scales (0: by head) and an output dtype, and the width of its tiles."""
    batch, seqlen_q, heads, head_dim = q
    seqlen_k, group = k[1], heads // k[2]
    width = 64 if head_dim <= 64 else 128
    loop_mask = masks_in_loop(-1, 0 if causal else -1, seqlen_k - seqlen_q, ROWS.value)
    tile = forward_tile(width, loop_mask=loop_mask)
    n_tiles = heads * batch * -(-seqlen_q // (ROWS.value * tile.consumers))
    head_group = max(1, L2_GROUP // (seqlen_k * 2 * width)) * group
    scalars = (softmax_scale * math.log2(math.e), batch, seqlen_q, seqlen_k, heads, group, head_group, n_tiles, *blocks)
    constants = {
        "WIDTH": width, "CONSUMERS": tile.consumers, "CAUSAL": causal, "LOOP_MASK": loop_mask, "BY_BLOCK": blocks[0] > 0,
        "REGISTERS": tile.registers,
    }
    return Launch(flash_fp8_hopper_kernel, min(n_tiles, multiprocessors(device)), scalars, constants, 4, 1), width


def forward_reason(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, out_dtype: torch.dtype) -> str | None:
    """Why this path does not take the call; None if it does."""
    if architecture(q) != 90:
        return "it runs on compute capability 9.0 (Hopper) only"
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    if head_dim != value_dim or not 32 < head_dim <= 128 or head_dim % 16:
        return f"head_dim and value_dim must be equal, 48 to 128 and multiples of 16, got {head_dim} and {value_dim}"
    if softmax_scale <= 0:
        return f"softmax_scale must be positive, got {softmax_scale}"
    if out_dtype not in (torch.bfloat16, torch.float16):
        return f"out_dtype must be bfloat16 or float16, got {out_dtype}"
    for name, x in (("q", q), ("k", k)):
        if not tma_takes(x):
            return f"{name} must begin at and have strides of multiples of 16 bytes, got strides {x.stride()}"
    return None


def _keys(k: Tensor) -> Tensor:
    """k, or a copy with room for whole fours of tokens, which TMA reads together."""
    last = k.storage_offset() + sum((n - 1) * stride for n, stride in zip(k.shape, k.stride(), strict=True))
    if last + -k.shape[1] % 4 * k.stride(1) < k.untyped_storage().nbytes():
        return k
    return quantized_like(k, False).copy_(k)


def _values(v: Tensor) -> Tensor:
    """v, or a copy whose tokens follow each other."""
    if v.stride(1) == 1 and tma_takes(v.permute(0, 2, 3, 1)):
        return v
    return quantized_like(v, True).copy_(v)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None,
                   causal: bool, softmax_scale: float, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and LSE of what forward_reason lets through."""
    batch, seqlen_q, heads, _ = q.shape
    k, v = _keys(k), _values(v)
    descales = q_descale, k_descale, v_descale
    by_block = any(x is not None and x.dim() == 3 for x in descales)
    blocks = [-(-x.shape[1] // BLOCK) if by_block else 0 for x in (q, k, v)]
    q_descale, k_descale, v_descale = (
        torch.ones(batch * k.shape[2] * max(n, 1), dtype=torch.float32, device=q.device) if x is None else x
        for x, n in zip(descales, blocks, strict=True))
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=out_dtype, device=q.device)
    lse = torch.empty(batch, heads, seqlen_q, dtype=torch.float32, device=q.device)
    launch, width = _plan(q.device, q.shape, k.shape, tuple(blocks[:2]), causal, softmax_scale, out_dtype)
    with on_device_of(q):
        launch(_query_descriptor(q, width), _key_descriptor(k, width), _value_descriptor(v, width), descriptor(out, ROWS.value, width), lse,
               q_descale, k_descale, v_descale, tile_counter(q.device))
    return out, lse
