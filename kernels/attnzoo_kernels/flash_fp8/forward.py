"""FP8 attention on Hopper in Gluon: the structure of the bfloat16 forward (`_gluon`), with its own mainloop and loads.

FP8's matrix instructions need both operands contiguous along the dimension that they sum over. So the tokens of the values follow each
other in memory. And of every four keys, TMA loads two into one half of a tile and two into the other half, which gives the weights the
order that `mainloop.py` needs. A step waits once: its keys share a barrier with the values of the tile before.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnzoo_kernels._gluon.forward import ROWS, Descriptors, Problem, Program, Rows, Tiles, tiles_like, work_and_barriers
from attnzoo_kernels._gluon.forward_consumer import LN2, write_span
from attnzoo_kernels._gluon.forward_kernel import Config, run_forward
from attnzoo_kernels._gluon.forward_mainloop import await_queries
from attnzoo_kernels._gluon.forward_producer import load_queries, produce_segments
from attnzoo_kernels._gluon.hopper import (
    async_load,
    await_empty_stage,
    await_stage,
    box,
    constants,
    descriptor,
    give_back,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from attnzoo_kernels._gluon.tile_scheduler import loaded_tiles, read_tile, span, tile_counter
from attnzoo_kernels._gluon.tiles import masks_in_loop
from attnzoo_kernels._triton.launch import L2_GROUP, Launch, architecture, descriptor_like, multiprocessors, on_device_of, tma_takes
from attnzoo_kernels.flash_fp8.layout import BLOCK, quantized_like
from attnzoo_kernels.flash_fp8.mainloop import KEYS, STAGES, WEIGHT_BITS, mainloop, usable
from attnzoo_kernels.flash_fp8.tiles import forward_tile


class Own(NamedTuple):
    q_scales: Any
    k_scales: Any
    v_scales: Any
    q_blocks: Any
    k_blocks: Any
    k_halves: Any  # the tiles of keys as TMA writes them, in halves


@constants
class OwnConfig:
    BY_BLOCK: gl.constexpr  # whether scales are for each BLOCK tokens; else for each key head


@gluon.jit
def load_tile(tile, step, q_step, program, config):
    """LOAD_TILE: the values of a tile are loaded together with the keys of the next tile."""
    bars, own, k_desc, v_desc = program.bars, program.own, program.descs.k, program.descs.v
    k_full, v_tiles = bars.k_full, program.tiles.v
    begin, end = loaded_tiles(tile, program, config)
    kv_head = tile.head // program.problem.group
    key = (end - 1) * KEYS
    for j in range(end - begin):
        slot = await_empty_stage(bars.k_empty, step, STAGES)
        if j == 0:
            mbarrier.expect(k_full.index(slot), 2 * k_desc.block_type.nbytes)
        else:
            mbarrier.expect(k_full.index(slot), 2 * k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        for half in gl.static_range(2):
            async_load(k_desc, [tile.sequence, kv_head, key // 4, 2 * half, 0], k_full.index(slot),
                       box(own.k_halves.index(2 * slot + half), k_desc))
        if j == 0:
            load_queries(program.descs.q, tile, q_step, program, config)
        else:  # the values of the tile before
            before = await_empty_stage(bars.v_empty, step - 1, STAGES)
            async_load(v_desc, [tile.sequence, kv_head, 0, key + KEYS], k_full.index(slot), box(v_tiles.index(before), v_desc))
        if j == end - begin - 1:
            await_empty_stage(bars.v_empty, step, STAGES)
            last_full = bars.v_full.index(q_step % STAGES)
            mbarrier.expect(last_full, v_desc.block_type.nbytes)
            async_load(v_desc, [tile.sequence, kv_head, 0, key], last_full, box(v_tiles.index(slot), v_desc))
        key -= KEYS
        step += 1
    return step, q_step + 1


@gluon.jit
def consume(program, config, ME: gl.constexpr):
    """CONSUME for 64 rows of each tile."""
    problem, rows, tiles, bars, own = program.problem, program.rows, program.tiles, program.bars, program.own
    BY_BLOCK: gl.constexpr = config.OPTIONS.BY_BLOCK
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    acc_row: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.BLOCK_DV, 32]))
    step = 0
    taken = 0
    tile = read_tile(taken, program, config)
    while tile.sequence >= 0:
        owner = tile.sequence * problem.heads + tile.head
        kv_owner = owner // problem.group
        seen = span(tile, ME, taken, program, config)
        skipped = seen.loaded_end - seen.end  # tiles that only other consumers see
        for n in range(skipped):
            slot = await_stage(bars.k_full, step, STAGES)
            mbarrier.arrive(bars.k_empty.index(slot), count=1)
            if n > 0:
                give_back(bars.v_empty, step - 1, STAGES)
            step += 1
        if BY_BLOCK:
            q_scale = usable(gl.load(own.q_scales + kv_owner * own.q_blocks + gl.minimum(seen.row // KEYS, own.q_blocks - 1)))
        else:
            q_scale = usable(gl.load(own.q_scales + kv_owner)) * usable(gl.load(own.k_scales + kv_owner))
        q_place = await_queries(taken, ME, program, config)
        acc, pending, row_max, row_sum, v_scale, step = mainloop(
            tiles.q.index(q_place), tiles.k, tiles.v, bars, step, skipped, taken, seen, rows.scale * q_scale,
            own.k_scales + kv_owner * own.k_blocks, own.v_scales + kv_owner * own.k_blocks, ROWS, config.BLOCK_DV, config.HAS_RIGHT,
            config.MASK_IN_LOOP, BY_BLOCK)
        if not BY_BLOCK:
            v_scale = usable(gl.load(own.v_scales + kv_owner))
        mbarrier.arrive(bars.q_empty.index(q_place), count=1)
        i = seen.row + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
        some = row_sum != 0  # true for NaN, too
        divisor = gl.where(some, row_sum, 1.0)
        lse = gl.where(some, (row_max - WEIGHT_BITS + gl.log2(divisor)) * LN2, -float("inf"))
        gl.store(rows.lse + owner.to(gl.int64) * problem.seqlen_q + i, lse, mask=i < seen.len_q)
        tma.store_wait(0)
        acc += warpgroup_mma_wait(0, deps=(pending,))
        give_back(bars.v_empty, step - 1, STAGES)
        out = (acc * gl.convert_layout(v_scale / divisor, acc_row)[:, None]).to(tiles.out.dtype)
        write_span(program.descs.out, out, seen, [tile.sequence, tile.head, seen.row, 0], ME, program)
        taken += 1
        tile = read_tile(taken, program, config)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch", "seqlen_q", "seqlen_k", "heads", "group", "head_group", "n_tiles", "q_blocks", "k_blocks"],
           do_not_specialize_on_alignment=["q_scales", "k_scales", "v_scales"])
def flash_fp8_hopper_kernel(q_desc, k_desc, v_desc, out_desc, lse_ptr, q_scales, k_scales, v_scales, counter, scale, batch, seqlen_q,
                            seqlen_k, heads, group, head_group, n_tiles, q_blocks, k_blocks, WIDTH: gl.constexpr, CONSUMERS: gl.constexpr,
                            CAUSAL: gl.constexpr, MASK_IN_LOOP: gl.constexpr, BY_BLOCK: gl.constexpr, REGISTERS: gl.constexpr):
    config = Config(
        BLOCK_N=KEYS, BLOCK_DV=WIDTH, STAGES=STAGES, CONSUMERS=CONSUMERS, REGISTERS=REGISTERS, PACKED=False, HAS_LEFT=False,
        HAS_RIGHT=CAUSAL, MASK_IN_LOOP=MASK_IN_LOOP, Q_SLOTS=2, OPTIONS=OwnConfig(BY_BLOCK=BY_BLOCK), PRODUCE=produce_segments,
        LOAD_TILE=load_tile, CONSUME=consume)
    dtype: gl.constexpr = q_desc.dtype
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, WIDTH], dtype)
    descs = Descriptors(q_desc, k_desc, v_desc, out_desc)
    q_tiles = tiles_like(q_desc, config.Q_SLOTS * CONSUMERS)
    out_tiles = tiles_like(out_desc, CONSUMERS)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, WIDTH], k_layout)
    k_halves = k_tiles._reinterpret(dtype, [2 * STAGES, KEYS // 2, WIDTH], k_layout)
    v_tiles = tiles_like(v_desc, STAGES)
    work, bars = work_and_barriers(config)
    problem = Problem(counter, None, None, batch, seqlen_q, seqlen_k, heads, group, head_group, n_tiles, -1, 0)
    own = Own(q_scales, k_scales, v_scales, q_blocks, k_blocks, k_halves)
    run_forward(Program(descs, problem, Rows(scale, lse_ptr, None, None), Tiles(q_tiles, out_tiles, k_tiles, v_tiles, work), bars, own),
                config)


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
    """The descriptor of half a tile of keys: two of every four."""
    batch, seqlen, heads, head_dim = k.shape
    by_batch, by_row, by_head, _ = k.stride()
    shape, strides = (batch, heads, -(-seqlen // 4), 4, head_dim), (by_batch, by_head, 4 * by_row, by_row, 1)
    return descriptor_like(_template(shape, strides, (1, 1, KEYS.value // 4, 2, width)), k)


def _value_descriptor(v: Tensor, width: int) -> TensorDescriptor:
    """The descriptor of values whose tokens follow each other in memory."""
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
        "WIDTH": width, "CONSUMERS": tile.consumers, "CAUSAL": causal, "MASK_IN_LOOP": loop_mask, "BY_BLOCK": blocks[0] > 0,
        "REGISTERS": tile.registers,
    }
    return Launch(flash_fp8_hopper_kernel, min(n_tiles, multiprocessors(device)), scalars, constants, 4, 1), width


def forward_reason(q: Tensor, k: Tensor, v: Tensor, out_dtype: torch.dtype) -> str | None:
    """Why this path does not take the call; None if it does."""
    if architecture(q) != 90:
        return "it runs on compute capability 9.0 (Hopper) only"
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    if head_dim != value_dim or not 32 < head_dim <= 128 or head_dim % 16:
        return f"head_dim and value_dim must be equal, 48 to 128 and multiples of 16, got {head_dim} and {value_dim}"
    if out_dtype not in (torch.bfloat16, torch.float16):
        return f"out_dtype must be bfloat16 or float16, got {out_dtype}"
    for name, x in (("q", q), ("k", k)):
        if not tma_takes(x):
            return f"{name} must begin at and have strides of multiples of 16 bytes, got strides {x.stride()}"
    return None


def _keys(k: Tensor) -> Tensor:
    """k, or a copy with room for a multiple of four tokens, because TMA reads them by fours."""
    last = k.storage_offset() + sum((n - 1) * stride for n, stride in zip(k.shape, k.stride(), strict=True))
    if last + -k.shape[1] % 4 * k.stride(1) < k.untyped_storage().nbytes():
        return k
    return quantized_like(k, False).copy_(k)


def _values(v: Tensor) -> Tensor:
    """v, or a copy whose tokens follow each other in memory."""
    if v.stride(1) == 1 and tma_takes(v.permute(0, 2, 3, 1)):
        return v
    return quantized_like(v, True).copy_(v)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None,
                   causal: bool, softmax_scale: float, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and LSE of a call for which forward_reason gives None."""
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
