"""Kernels that number the tokens of padded rows: a prefix sum in two levels (counts of blocks, then places inside each), no host wait.

All sums are int32 and integer, so that the result does not depend on the order. Rows are cut into blocks of BLOCK slots, one program each.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels._triton.search import last_up_to
from attnzoo_kernels.padding.launch import ASSERTING, Launch
from attnzoo_kernels.padding.tiles import INDEX_BLOCK, INDEX_WARPS


@triton.jit
def _sum_first(counts, n):
    """Sum of the first n entries."""
    lanes = tl.arange(0, 1024)
    total = tl.zeros([1024], tl.int32)
    for start in range(0, n, 1024):
        total += tl.load(counts + start + lanes, mask=start + lanes < n, other=0).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _longest_row(counts, rows, per_row):
    """The largest sum of `per_row` neighbouring entries."""
    longest = 0
    for row in range(0, rows, 64):
        r = row + tl.arange(0, 64)
        total = tl.zeros([64], tl.int32)
        for block in range(0, per_row, 16):
            c = block + tl.arange(0, 16)
            # [64, 16]
            inside = (r < rows)[:, None] & (c < per_row)[None, :]
            total += tl.sum(tl.load(counts + r[:, None] * per_row + c[None, :], mask=inside, other=0).to(tl.int32), 1)
        longest = tl.maximum(longest, tl.max(total, 0))
    return longest


@triton.jit
def _row_slots(pointer, row, slot, seqlen, stride_b, stride_s):
    """One value for each slot of a row, zero beyond its end."""
    return tl.load(pointer + tl.cast(row, tl.int64) * stride_b + slot.to(tl.int64) * stride_s, mask=slot < seqlen, other=0)


@triton.jit(do_not_specialize=["stride_vb", "stride_vs", "stride_ub", "stride_us", "seqlen", "blocks"],
            do_not_specialize_on_alignment=["values_ptr", "unused_ptr"])
def padding_count_kernel(values_ptr, unused_ptr, counts_ptr, stride_vb, stride_vs, stride_ub, stride_us, seqlen, blocks,
                         DOCUMENTS: tl.constexpr, HAS_UNUSED: tl.constexpr, BLOCK: tl.constexpr):
    """Writes counts of each block, (n, rows * blocks). Of a mask: kept slots, real tokens. Of document lengths: tokens, documents, longest
    document."""
    program = tl.program_id(0)
    row = program // blocks
    slot = program % blocks * BLOCK + tl.arange(0, BLOCK)
    values = _row_slots(values_ptr, row, slot, seqlen, stride_vb, stride_vs)
    nonzero = values != 0
    if DOCUMENTS:
        tl.device_assert(values >= 0, "attention_mask_in_length: must be at least 0")
        tl.store(counts_ptr + program, tl.sum(values.to(tl.int32), 0))
        tl.store(counts_ptr + 2 * tl.num_programs(0) + program, tl.max(values.to(tl.int32), 0))
    else:
        kept = nonzero
        if HAS_UNUSED:
            kept = nonzero | (_row_slots(unused_ptr, row, slot, seqlen, stride_ub, stride_us) != 0)
        tl.store(counts_ptr + program, tl.sum(kept.to(tl.int32), 0))
    tl.store(counts_ptr + tl.num_programs(0) + program, tl.sum(nonzero.to(tl.int32), 0))


@triton.jit(do_not_specialize=["stride_mb", "stride_ms", "stride_ub", "stride_us", "batch", "seqlen", "blocks", "max_tokens"],
            do_not_specialize_on_alignment=["mask_ptr", "unused_ptr", "counts_ptr"])
def padding_index_kernel(mask_ptr, unused_ptr, counts_ptr, indices_ptr, cu_seqlens_ptr, seqused_ptr, totals_ptr, stride_mb, stride_ms,
                         stride_ub, stride_us, batch, seqlen, blocks, max_tokens,
                         LENGTHS: tl.constexpr, HAS_UNUSED: tl.constexpr, BLOCK: tl.constexpr):
    """Writes indices, cu_seqlens, seqused and totals. counts: those of padding_count_kernel; under LENGTHS the lengths of the rows, without
    a mask."""
    program = tl.program_id(0)
    row = program // blocks
    block = program % blocks
    lane = tl.arange(0, BLOCK)
    slot = block * BLOCK + lane
    if LENGTHS:
        length = tl.load(counts_ptr + row).to(tl.int32)
        tl.device_assert((length >= 0) & (length <= seqlen), "lengths: must lie in 0 .. seqlen")
        before = _sum_first(counts_ptr, row) + tl.minimum(length, block * BLOCK)
        kept = slot < length
        used = length
        per_row = 1
    else:
        before = _sum_first(counts_ptr, program)
        kept = _row_slots(mask_ptr, row, slot, seqlen, stride_mb, stride_ms) != 0
        if HAS_UNUSED:
            kept = kept | (_row_slots(unused_ptr, row, slot, seqlen, stride_ub, stride_us) != 0)
        used = 0
        if block == 0:
            used = _sum_first(counts_ptr + tl.num_programs(0) + row * blocks, blocks)
        per_row = blocks

    # tokens take entries from the front, and slots without one from the back, so that every entry after the last token is written
    slots = batch * seqlen
    first = row * seqlen + block * BLOCK
    place = tl.cumsum(kept.to(tl.int32), 0)
    token = before + place - 1
    tl.store(indices_ptr + token, (first + lane).to(tl.int64), mask=kept & (token < max_tokens))
    entry = slots - 1 - (first - before) - (lane - place)
    empty = tl.zeros([BLOCK], tl.int64) + slots
    tl.store(indices_ptr + entry, empty, mask=(slot < seqlen) & (kept == 0) & (entry < max_tokens))

    if block == blocks - 1:
        tl.store(cu_seqlens_ptr + row + 1, before + tl.sum(kept.to(tl.int32), 0))
    if block == 0:
        tl.store(seqused_ptr + row, used)
    if program == 0:
        total = _sum_first(counts_ptr, batch * per_row)
        tl.device_assert(total <= max_tokens, "max_tokens: must be at least the number of tokens")
        tl.store(cu_seqlens_ptr, 0)
        tl.store(totals_ptr, total)
        tl.store(totals_ptr + 1, _longest_row(counts_ptr, batch, per_row))


@triton.jit(do_not_specialize=["stride_lb", "stride_ls", "seqlen", "blocks", "max_documents"],
            do_not_specialize_on_alignment=["lengths_ptr"])
def padding_document_kernel(lengths_ptr, counts_ptr, cu_seqlens_ptr, row_lengths_ptr, totals_ptr, stride_lb, stride_ls, seqlen, blocks,
                            max_documents, BLOCK: tl.constexpr):
    """Writes cu_seqlens over the nonzero lengths (padded with its last value), the tokens of each row, and totals."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    row = program // blocks
    block = program % blocks
    lane = tl.arange(0, BLOCK)
    length = _row_slots(lengths_ptr, row, block * BLOCK + lane, seqlen, stride_lb, stride_ls).to(tl.int32)
    total = _sum_first(counts_ptr, programs)
    documents = _sum_first(counts_ptr + programs, programs)
    # a document's entry in cu_seqlens holds its end; the entry of the first document is 1
    entry = _sum_first(counts_ptr + programs, program) + tl.cumsum((length != 0).to(tl.int32), 0)
    end = _sum_first(counts_ptr, program) + tl.cumsum(length, 0)
    tl.store(cu_seqlens_ptr + entry, end, mask=(length != 0) & (entry <= max_documents))
    entry = program * BLOCK + lane + 1
    tl.store(cu_seqlens_ptr + entry, tl.zeros([BLOCK], tl.int32) + total, mask=(entry > documents) & (entry <= max_documents))
    if block == 0:
        row_length = _sum_first(counts_ptr + row * blocks, blocks)
        tl.device_assert(row_length <= seqlen, "attention_mask_in_length: must sum to at most seqlen in a row")
        tl.store(row_lengths_ptr + row, row_length)
    if program == 0:
        tl.device_assert(documents <= max_documents, "max_documents: must be at least the number of documents")
        tl.store(cu_seqlens_ptr, 0)
        tl.store(totals_ptr, total)
        tl.store(totals_ptr + 1, documents)
        tl.store(totals_ptr + 2, _longest_row(counts_ptr + 2 * programs, programs, 1))


@triton.jit(do_not_specialize=["sequences", "total", "steps"], do_not_specialize_on_alignment=["cu_seqlens_ptr"])
def padding_position_kernel(cu_seqlens_ptr, positions_ptr, sequences, total, steps, BLOCK: tl.constexpr):
    """Positions by binary search: each token's sequence is the last that starts at or before it."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < total
    sequence = last_up_to(cu_seqlens_ptr, token, sequences + 1, steps, inside)
    start = tl.load(cu_seqlens_ptr + sequence, mask=inside, other=0)
    tl.store(positions_ptr + token, tl.where(sequence < sequences, token - start, 0).to(tl.int64), mask=inside)


@functools.lru_cache(maxsize=256)
def _mask_plan(device: int, mask: torch.dtype, unused: torch.dtype | None, wide: bool) -> tuple[Launch, Launch]:
    constants = {"HAS_UNUSED": unused is not None, "BLOCK": INDEX_BLOCK}
    return (Launch(padding_count_kernel, {"DOCUMENTS": False, **constants}, INDEX_WARPS, {}),
            Launch(padding_index_kernel, {"LENGTHS": False, **constants}, INDEX_WARPS))


def launch_mask_indices(attention_mask: Tensor, unused_mask: Tensor | None, max_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask, unused = _loadable(attention_mask), None if unused_mask is None else _loadable(unused_mask)
    batch, seqlen = mask.shape
    results = _empty_indices(mask, batch, seqlen, max_tokens)
    if mask.numel():
        blocks = triton.cdiv(seqlen, INDEX_BLOCK)
        counts = mask.new_empty(2, batch * blocks, dtype=torch.int32)
        strides = (*mask.stride(), *(mask if unused is None else unused).stride())
        count, number = _mask_plan(mask.get_device(), mask.dtype, None if unused is None else unused.dtype, max(strides) >= 2**31)
        with on_device_of(mask):
            count(batch * blocks, mask, unused, counts, *strides, seqlen, blocks)
            number(batch * blocks, mask, unused, counts, *results, *strides, batch, seqlen, blocks, max_tokens)
    return results


def launch_length_indices(lengths: Tensor, seqlen: int, max_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lengths, batch = lengths.contiguous(), lengths.shape[0]
    results = _empty_indices(lengths, batch, seqlen, max_tokens)
    if batch * seqlen:
        blocks = triton.cdiv(seqlen, INDEX_BLOCK)
        padding_index_kernel[(batch * blocks,)](
            None, None, lengths, *results, 0, 0, 0, 0, batch, seqlen, blocks, max_tokens,
            LENGTHS=True, HAS_UNUSED=False, BLOCK=INDEX_BLOCK, num_warps=INDEX_WARPS, **ASSERTING)
    return results


def launch_document_lengths(lengths: Tensor, max_documents: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, seqlen = lengths.shape
    new = torch.empty if lengths.numel() else torch.zeros
    results = tuple(new(n, dtype=torch.int32, device=lengths.device) for n in (max_documents + 1, batch, 3))
    if lengths.numel():
        blocks = triton.cdiv(seqlen, INDEX_BLOCK)
        counts = lengths.new_empty(3, batch * blocks, dtype=torch.int32)
        padding_count_kernel[(batch * blocks,)](
            lengths, None, counts, *lengths.stride(), 0, 0, seqlen, blocks,
            DOCUMENTS=True, HAS_UNUSED=False, BLOCK=INDEX_BLOCK, num_warps=INDEX_WARPS, **ASSERTING)
        padding_document_kernel[(batch * blocks,)](
            lengths, counts, *results, *lengths.stride(), seqlen, blocks, max_documents,
            BLOCK=INDEX_BLOCK, num_warps=INDEX_WARPS, **ASSERTING)
    return results


def launch_position_ids(cu_seqlens: Tensor, total: int) -> Tensor:
    positions = cu_seqlens.new_empty(total, dtype=torch.int64)
    sequences = cu_seqlens.shape[0] - 1
    if total:
        padding_position_kernel[(triton.cdiv(total, INDEX_BLOCK),)](
            cu_seqlens, positions, sequences, total, sequences.bit_length(), BLOCK=INDEX_BLOCK, num_warps=INDEX_WARPS)
    return positions


def _loadable(mask: Tensor) -> Tensor:
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _empty_indices(like: Tensor, batch: int, seqlen: int, max_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new = torch.empty if batch * seqlen else torch.zeros
    indices = torch.empty(max_tokens, dtype=torch.int64, device=like.device)
    return indices, *(new(n, dtype=torch.int32, device=like.device) for n in (batch + 1, batch, 2))
