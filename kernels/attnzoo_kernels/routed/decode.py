"""A few newest queries of each sequence, without gradients: decode's kernels read the blocks of a query as the pages of its keys.

A query of a head that chooses is a row of its own, whose pages are blocks of one key head. Pages lie where keys lie: a page's number counts
the largest step that divides the distances of all sequences, tokens and heads. A row's own block, read up to its own key, is its last page.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels import autograd, dispatch
from attnzoo_kernels._triton.launch import next_power_of_2, on_device_of, strides
from attnzoo_kernels._triton.search import last_up_to
from attnzoo_kernels.decode.forward import launch_forward
from attnzoo_kernels.routed.lists import bounds_of
from attnzoo_kernels.routed.routes import FEW

ROWS = 8


@triton.jit(do_not_specialize=["step_batch", "step_row", "step_head", "sequences", "steps", "seqlen_q", "seqlen_k", "size", "rows",
                               "choosers", "group", "slots", "width", "stride"],
            do_not_specialize_on_alignment=["blocks_ptr", "cu_seqlens_q", "cu_seqlens_k", "starts_ptr"])
def routed_pages_kernel(blocks_ptr, cu_seqlens_q, cu_seqlens_k, starts_ptr, table_ptr, lengths_ptr, step_batch, step_row, step_head,
                        sequences, steps, seqlen_q, seqlen_k, size, rows, choosers, group, slots, width, stride, SLOTS: tl.constexpr,
                        ROWS: tl.constexpr):
    """The pages (rows, slots + 1) of each row and how many keys they have. Dense if cu_seqlens_q is None. starts_ptr: where the keys of
    each sequence begin, if a key stands for a window of `width` tokens, and windows are `stride` apart; None if keys are tokens."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query = row // choosers
    inside = row < rows
    if cu_seqlens_q is None:
        position = query % seqlen_q + seqlen_k - seqlen_q
        first = query // seqlen_q * step_batch
    else:
        sequence = last_up_to(cu_seqlens_q, query, sequences, steps, inside)
        _, stop_q, start_k, stop_k, _ = bounds_of(cu_seqlens_q, cu_seqlens_k, sequence, inside)
        position = tl.where(query < stop_q, query - stop_q + stop_k - start_k, -1)
        if starts_ptr is not None:
            start_k = tl.load(starts_ptr + sequence, mask=inside, other=0)
        first = start_k * step_row
    first += row % choosers // group * step_head
    seen = tl.maximum(position + 1 - width + stride, 0) // stride  # keys of the sequence up to the query's own
    own = tl.maximum(seen - 1, 0) // size
    slot = tl.arange(0, SLOTS)
    # [ROWS, SLOTS]
    chosen = tl.full([ROWS, SLOTS], -1, tl.int32)
    if blocks_ptr is not None:
        chosen = tl.load(blocks_ptr + row[:, None] * slots + slot[None, :], mask=inside[:, None] & (slot < slots)[None, :], other=-1)
    read = (chosen >= 0) & (chosen < own[:, None])
    place = row[:, None] * (slots + 1) + tl.cumsum(read.to(tl.int32), 1) - 1
    tl.store(table_ptr + place, first[:, None] + chosen * size * step_row, mask=read)
    before = tl.sum(read.to(tl.int32), 1)
    tl.store(table_ptr + row * (slots + 1) + before, first + own * size * step_row, mask=inside)
    tl.store(lengths_ptr + row, tl.where(seen > 0, (before - own) * size + seen, 0), mask=inside)


def _steps(x: Tensor) -> tuple[int, tuple[int, ...]]:
    """The step that page numbers count, in elements, and a sequence's, a token's and a head's distance in such steps."""
    distances = [stride * (n > 1) for stride, n in zip(strides(x), (1, *x.shape)[-4:-1], strict=True)]
    step = math.gcd(*distances) or 1
    return step, tuple(distance // step for distance in distances)


def takes(q: Tensor, k: Tensor, v: Tensor, slots: int, size: int, queries: int | None) -> bool:
    """Whether `attend` computes a call: one of at most FEW queries a sequence, from which no gradient is wanted, where pages of keys and of
    values have the same numbers, in 32 bits."""
    if queries is None or queries > FEW or 0 in k.shape or torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return False
    steps = _steps(k)[1]
    last = sum((n - 1) * step for n, step in zip((1, *k.shape)[-4:-1], steps, strict=True))
    return steps == _steps(v)[1] and max(last, (slots + 1) * size) < 2**31


def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, size: int,
           softmax_scale: float, starts: Tensor | None = None, width: int = 1, stride: int = 1) -> tuple[Tensor, Tensor]:
    """Output and LSE of routed_attention, whose tensors these are. Without blocks each key head is one that chooses, and chooses none.

    starts: where the keys of each packed sequence begin, if each is one of a window of `width` tokens, and windows are `stride` apart. A
    query sees the windows that end at or before its own token. cu_seqlens_k are those of the tokens."""
    dispatch.choose("decode forward", "triton")
    autograd.refuse_tangents("routed_attention", 'impl="reference" takes it', q=q, k=k, v=v)
    heads, (choosers, slots) = q.shape[-2], (k.shape[-2], 0) if blocks is None else blocks.shape[-2:]
    rows = q.shape[:-2].numel() * choosers
    (k_step, steps), (v_step, _) = _steps(k), _steps(v)
    table, lengths = (torch.empty(shape, dtype=torch.int32, device=q.device) for shape in ((rows, slots + 1), (rows,)))
    sequences = 0 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    given = (None if x is None else x.contiguous() for x in (blocks, cu_seqlens_q, cu_seqlens_k, starts))
    with on_device_of(q):
        routed_pages_kernel[(triton.cdiv(rows, ROWS),)](
            *given, table, lengths, *steps, sequences, sequences.bit_length(), q.shape[-3], k.shape[-3], size, rows, choosers,
            choosers // k.shape[-2], slots, width, stride, SLOTS=next_power_of_2(slots), ROWS=ROWS, num_warps=1)
    # one key head, whose distance to others nothing reads; 1 would tell the compiler that rows begin at any address
    pages = (x.as_strided((1, 1, 1, x.shape[-1]), (step, x.stride(-3), x.stride(-3), 1)) for x, step in ((k, k_step), (v, v_step)))
    out, lse = launch_forward(q.reshape(rows, 1, heads // choosers, q.shape[-1]), *pages, lengths, table, None, None, softmax_scale, -1, -1,
                              0.0, page=size)
    return out.view(*q.shape[:-1], v.shape[-1]), lse.view(q.shape[:-1]).mT
