"""The newest token's way into a cache in one launch: its queries and keys rotated, its keys and values put in their place."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import architecture, next_power_of_2, on_device_of


@triton.jit
def _store(target, x, scale, DTYPE: tl.constexpr, mask):
    """Stores x, which is of DTYPE, or will be: divided by the scale, where there is one, and no further away from zero than e4m3 goes."""
    if scale is not None:
        x = tl.div_rn(x.to(DTYPE).to(tl.float32), x.to(tl.float32) * 0.0 + scale)
        x = tl.clamp(x, -448.0, 448.0)
    tl.store(target, x.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _put_rotated(source, target, scale, cos_ptr, sin_ptr, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr,
                 BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr):
    DTYPE: tl.constexpr = source.dtype.element_ty
    if ROTATED > 0:
        half = tl.arange(0, BLOCK_HALF)
        inside = half < ROTATED // 2
        cos = tl.load(cos_ptr + half, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + half, mask=inside, other=0.0)
        first = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + ROTATED // 2 + half, mask=inside, other=0.0).to(tl.float32)
        _store(target + half, first * cos - second * sin, scale, DTYPE, inside)
        _store(target + ROTATED // 2 + half, second * cos + first * sin, scale, DTYPE, inside)
    if ROTATED < HEAD_DIM:
        column = ROTATED + tl.arange(0, BLOCK_D)
        _store(target + column, tl.load(source + column, mask=column < HEAD_DIM, other=0.0), scale, DTYPE, column < HEAD_DIM)


@triton.jit
def append_rotated_kernel(q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, out_ptr, k_cache_ptr, v_cache_ptr, places_ptr, k_scale, v_scale,
                          stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_cb, turns, heads, kv_heads, v_heads,
                          HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr,
                          BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr):
    """A program has a head of a row: of the queries, by rotation, of the keys, or of the values."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = tl.load(places_ptr + row)
    queries = turns * heads
    if head < queries + kv_heads:
        source = q_ptr + row * stride_qb + head % heads * stride_qh
        target = out_ptr + (row * queries + head) * HEAD_DIM
        cos, sin = cos_ptr, sin_ptr
        if ROTATED > 0:
            table = row * stride_cb + tl.minimum(head // heads, turns - 1) * (ROTATED // 2)
            cos += table
            sin += table
        if k_scale is None:
            if head >= queries:
                source = k_ptr + row * stride_kb + (head - queries) * stride_kh
                target = k_cache_ptr + (place * kv_heads + head - queries) * HEAD_DIM
            _put_rotated(source, target, None, cos, sin, HEAD_DIM, ROTATED, BLOCK_HALF, BLOCK_D)
        else:  # whose pointers are of two types
            if head >= queries:
                source = k_ptr + row * stride_kb + (head - queries) * stride_kh
                narrow = k_cache_ptr + (place * kv_heads + head - queries) * HEAD_DIM
                scale = tl.load(k_scale + head - queries)
                _put_rotated(source, narrow, scale, cos, sin, HEAD_DIM, ROTATED, BLOCK_HALF, BLOCK_D)
            else:
                _put_rotated(source, target, None, cos, sin, HEAD_DIM, ROTATED, BLOCK_HALF, BLOCK_D)
    else:
        value_head = head - queries - kv_heads
        value_column = tl.arange(0, BLOCK_DV)
        value = tl.load(v_ptr + row * stride_vb + value_head * stride_vh + value_column, mask=value_column < VALUE_DIM, other=0.0)
        value_scale = None
        if v_scale is not None:
            value_scale = tl.load(v_scale + value_head)
        _store(v_cache_ptr + (place * v_heads + value_head) * VALUE_DIM + value_column, value, value_scale, v_ptr.dtype.element_ty,
               value_column < VALUE_DIM)


def append_rotated(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, k_cache: Tensor, v_cache: Tensor,
                   places: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None) -> Tensor:
    """Puts keys and values of one token of each row into a cache, and returns its queries; queries and keys are rotated in half style.
    Returns (batch, n, heads, head_dim): the queries rotated by each of n tables. Keys are rotated by the last one.

    q (batch, 1, heads, head_dim), k, v alike: of one dtype, 16 bits or float32, last dimension contiguous. cos, sin: float32 (batch or 1,
    n, rotated channels / 2), contiguous; channels behind the rotated ones stay; None: all do, and n is 1. k_cache, v_cache: (batch,
    max_len, heads, width) of that dtype, contiguous. places: int64 (batch,), where in all rows of the cache, one behind the other, each
    token stands.
    k_scale, v_scale: float32 (heads,), positive, for caches of float8_e4m3fn, which a GPU takes from compute capability 8.9 on: numbers are
    written as (x / scale).clamp(-448, 448). That has not been run on a GPU yet.
    Computed in float32 without fused multiply-adds, bit by bit as plain PyTorch does.
    """
    for name, cache, scale in (("k_scale", k_cache, k_scale), ("v_scale", v_cache, v_scale)):
        if (cache.dtype == torch.float8_e4m3fn) != (scale is not None):
            raise ValueError(f"{name}: must be given for a cache of float8_e4m3fn and for no other, got {scale} for one of {cache.dtype}")
    if k_scale is not None and 0 < (arch := architecture(q)) < 89:
        raise NotImplementedError(f"k_cache: float8_e4m3fn needs compute capability 8.9, got {arch / 10}")
    batch, _, heads, head_dim = q.shape
    kv_heads, (v_heads, value_dim) = k.shape[2], v.shape[2:]
    turns, rotated = (1, 0) if cos is None else (cos.shape[1], 2 * cos.shape[-1])
    out = q.new_empty(batch, turns, heads, head_dim)
    with on_device_of(q):
        append_rotated_kernel[(batch, turns * heads + kv_heads + v_heads)](
            q, k, v, cos, sin, out, k_cache, v_cache, places, k_scale, v_scale,
            q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2),
            cos.stride(0) if rotated and cos.shape[0] > 1 else 0,
            turns, heads, kv_heads, v_heads, HEAD_DIM=head_dim, ROTATED=rotated, VALUE_DIM=value_dim,
            BLOCK_HALF=next_power_of_2(max(rotated // 2, 1)), BLOCK_D=next_power_of_2(max(head_dim - rotated, 1)),
            BLOCK_DV=next_power_of_2(value_dim), num_warps=1, enable_fp_fusion=False)
    return out
