"""The indexer's loss from what two attentions gave, row by row: one launch forward and one backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import next_power_of_2, on_device_of

BLOCK_ROWS = 16
NUMBERS = ["stride_row", "stride_head", "stride_lse_batch", "stride_lse_head", "stride_lse_row", "rows", "kv_heads", "group", "seqlen"]


@triton.jit
def _place(stride_lse_batch, stride_lse_head, stride_lse_row, rows, kv_heads, seqlen, BLOCK_ROWS: tl.constexpr):
    """(query, key head) pairs of a program: as one number, which there are, both, and where their log-sum-exps lie."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    query, head = row // kv_heads, row % kv_heads
    lse = query // seqlen * stride_lse_batch + head * stride_lse_head + query % seqlen * stride_lse_row
    return row, row < rows.to(tl.int64) * kv_heads, query, head, lse


@triton.jit
def _load(ptr, at, inside, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    column = tl.arange(0, BLOCK_WIDTH)
    return tl.load(ptr + at[:, None] + column[None, :], mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _mean(expected_ptr, row, inside, group, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Over the heads of a key head."""
    total = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float32)
    for member in range(group):
        total += _load(expected_ptr, (row * group + member) * WIDTH, inside, WIDTH, BLOCK_WIDTH)
    return total / group


@triton.jit(do_not_specialize=NUMBERS)
def msa_loss_kernel(index_ptr, expected_ptr, lse_ptr, loss_ptr, stride_row, stride_head, stride_lse_batch, stride_lse_head, stride_lse_row,
                    scale, rows, kv_heads, group, seqlen, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    row, inside, query, head, lse_at = _place(stride_lse_batch, stride_lse_head, stride_lse_row, rows, kv_heads, seqlen, BLOCK_ROWS)
    index = _load(index_ptr, query * stride_row + head * stride_head, inside, WIDTH, BLOCK_WIDTH)
    product = tl.sum(index * _mean(expected_ptr, row, inside, group, WIDTH, BLOCK_ROWS, BLOCK_WIDTH), 1)
    lse = tl.load(lse_ptr + lse_at, mask=inside, other=0.0)
    tl.store(loss_ptr + row, tl.where(lse > -float("inf"), lse - scale * product, 0.0), mask=inside)


@triton.jit(do_not_specialize=[*NUMBERS, "stride_dloss_row", "stride_dloss_head"], do_not_specialize_on_alignment=["dloss_ptr"])
def msa_loss_bwd_kernel(dloss_ptr, index_ptr, expected_ptr, lse_ptr, dindex_ptr, dexpected_ptr, dlse_ptr, stride_dloss_row,
                        stride_dloss_head, stride_row, stride_head, stride_lse_batch, stride_lse_head, stride_lse_row, scale, rows,
                        kv_heads, group, seqlen, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    row, inside, query, head, lse_at = _place(stride_lse_batch, stride_lse_head, stride_lse_row, rows, kv_heads, seqlen, BLOCK_ROWS)
    dloss = tl.load(dloss_ptr + query * stride_dloss_row + head * stride_dloss_head, mask=inside, other=0.0)
    dloss = tl.where(tl.load(lse_ptr + lse_at, mask=inside, other=0.0) > -float("inf"), dloss, 0.0)
    # [BLOCK_ROWS, BLOCK_WIDTH]
    dproduct = (-scale * dloss)[:, None]
    column = tl.arange(0, BLOCK_WIDTH)
    mask = inside[:, None] & (column < WIDTH)[None, :]
    dindex = dproduct * _mean(expected_ptr, row, inside, group, WIDTH, BLOCK_ROWS, BLOCK_WIDTH)
    tl.store(dindex_ptr + row[:, None] * WIDTH + column[None, :], dindex.to(dindex_ptr.dtype.element_ty), mask=mask)
    tl.store(dlse_ptr + lse_at, dloss, mask=inside)
    dexpected = dproduct / group * _load(index_ptr, query * stride_row + head * stride_head, inside, WIDTH, BLOCK_WIDTH)
    for member in range(group):
        at = (row * group + member) * WIDTH
        tl.store(dexpected_ptr + at[:, None] + column[None, :], dexpected.to(dexpected_ptr.dtype.element_ty), mask=mask)


def _launch(kernel, tensors: tuple, strides: tuple[int, ...], index_q: Tensor, expected: Tensor, lse: Tensor, scale: float) -> None:
    """index_q (rows, kv_heads, width), expected (rows, heads, width) contiguous, lse (batch, kv_heads, seqlen)."""
    rows, kv_heads, width = index_q.shape
    with on_device_of(index_q):
        kernel[(triton.cdiv(rows * kv_heads, BLOCK_ROWS),)](
            *tensors, *strides, *index_q.stride()[:2], *lse.stride(), scale, rows, kv_heads, expected.shape[1] // kv_heads, lse.shape[2],
            WIDTH=width, BLOCK_ROWS=BLOCK_ROWS, BLOCK_WIDTH=max(16, next_power_of_2(width)), num_warps=4)


def launch_loss(index_q: Tensor, expected: Tensor, lse: Tensor, scale: float) -> Tensor:
    """float32 (rows, kv_heads)."""
    loss = lse.new_empty(index_q.shape[:2])
    _launch(msa_loss_kernel, (index_q, expected, lse, loss), (), index_q, expected, lse, scale)
    return loss


def launch_loss_backward(dloss: Tensor, index_q: Tensor, expected: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of index_q, expected and lse."""
    dindex, dexpected, dlse = index_q.new_empty(index_q.shape), torch.empty_like(expected), torch.empty_like(lse)
    _launch(msa_loss_bwd_kernel, (dloss, index_q, expected, lse, dindex, dexpected, dlse), dloss.stride(), index_q, expected, lse, scale)
    return dindex, dexpected, dlse
