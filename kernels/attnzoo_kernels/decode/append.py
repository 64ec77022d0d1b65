"""The newest token's way into a cache in one launch: its queries and keys rotated, its keys and values put in their place."""

import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import next_power_of_2, on_device_of


@triton.jit
def append_rotated_kernel(q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, out_ptr, k_cache_ptr, v_cache_ptr, places_ptr, stride_qb, stride_qh,
                          stride_kb, stride_kh, stride_vb, stride_vh, stride_cb, heads, kv_heads, v_heads, HEAD_DIM: tl.constexpr,
                          ROTATED: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr,
                          BLOCK_DV: tl.constexpr):
    """A program has a head of a row: of the queries, of the keys, or of the values."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = tl.load(places_ptr + row)
    if head < heads + kv_heads:
        source = q_ptr + row * stride_qb + head * stride_qh
        target = out_ptr + (row * heads + head) * HEAD_DIM
        if head >= heads:
            source = k_ptr + row * stride_kb + (head - heads) * stride_kh
            target = k_cache_ptr + (place * kv_heads + head - heads) * HEAD_DIM
        if ROTATED > 0:
            half = tl.arange(0, BLOCK_HALF)
            inside = half < ROTATED // 2
            cos = tl.load(cos_ptr + row * stride_cb + half, mask=inside, other=0.0)
            sin = tl.load(sin_ptr + row * stride_cb + half, mask=inside, other=0.0)
            first = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(source + ROTATED // 2 + half, mask=inside, other=0.0).to(tl.float32)
            tl.store(target + half, (first * cos - second * sin).to(target.dtype.element_ty), mask=inside)
            tl.store(target + ROTATED // 2 + half, (second * cos + first * sin).to(target.dtype.element_ty), mask=inside)
        if ROTATED < HEAD_DIM:
            column = ROTATED + tl.arange(0, BLOCK_D)
            tl.store(target + column, tl.load(source + column, mask=column < HEAD_DIM, other=0.0), mask=column < HEAD_DIM)
    else:
        value_head = head - heads - kv_heads
        value_column = tl.arange(0, BLOCK_DV)
        value = tl.load(v_ptr + row * stride_vb + value_head * stride_vh + value_column, mask=value_column < VALUE_DIM, other=0.0)
        tl.store(v_cache_ptr + (place * v_heads + value_head) * VALUE_DIM + value_column, value, mask=value_column < VALUE_DIM)


def append_rotated(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, k_cache: Tensor, v_cache: Tensor,
                   places: Tensor) -> Tensor:
    """Puts keys and values of one token of each row into a cache, and returns its queries; queries and keys are rotated in half style.

    q (batch, 1, heads, head_dim), k, v alike: of one dtype, 16 bits or float32, last dimension contiguous. cos, sin: float32 (batch or 1,
    1, rotated channels / 2), contiguous; channels behind the rotated ones stay; None: all do. k_cache, v_cache: (batch, max_len, heads,
    width) of that dtype, contiguous. places: int64 (batch,), where in all rows of the cache, one behind the other, each token stands.
    Computed in float32 without fused multiply-adds, bit by bit as plain PyTorch does.
    """
    batch, _, heads, head_dim = q.shape
    kv_heads, (v_heads, value_dim) = k.shape[2], v.shape[2:]
    rotated = 0 if cos is None else 2 * cos.shape[-1]
    out = q.new_empty(q.shape)
    with on_device_of(q):
        append_rotated_kernel[(batch, heads + kv_heads + v_heads)](
            q, k, v, cos, sin, out, k_cache, v_cache, places, q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2),
            cos.stride(0) if rotated and cos.shape[0] > 1 else 0,
            heads, kv_heads, v_heads, HEAD_DIM=head_dim, ROTATED=rotated, VALUE_DIM=value_dim,
            BLOCK_HALF=next_power_of_2(max(rotated // 2, 1)), BLOCK_D=next_power_of_2(max(head_dim - rotated, 1)),
            BLOCK_DV=next_power_of_2(value_dim), num_warps=1, enable_fp_fusion=False)
    return out
