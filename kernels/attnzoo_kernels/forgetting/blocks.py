"""c for the 16-bit kernels, in the form of `flash.options.KeyBias`: blocks of rows of a sequence and head, each with c at its start and the
differences of the rows from that. Also which blocks of keys a block of queries may skip.

c_i - c_j is computed from the rows' differences and the difference of the two starts, in the same way in all kernels of a call, so that a
weight is the same number in each. This matters because the sums of dS by query and by key cancel over a whole sequence.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.call import Layout, layout, packed_sequences, strides
from attnzoo_kernels._triton.launch import Launch, are_aligned, block_width, on_device_of
from attnzoo_kernels._triton.tiles import Operand, first_lse, head_rows, load_rows, program_tile
from attnzoo_kernels.flash.options import C_BLOCK, KeyBias, Options
from attnzoo_kernels.forgetting import gates
from attnzoo_kernels.forgetting.gates import NEGLIGIBLE

LOG2E = tl.constexpr(math.log2(math.e))
MARGIN = tl.constexpr(NEGLIGIBLE)
PARTS = tl.constexpr(3)  # how many bfloat16 numbers have a float32 as their sum


@triton.jit(do_not_specialize=["n_seqs", "seqlen", "seqlen_k", "heads", "group", "before"],
            do_not_specialize_on_alignment=["c_ptr", "rows_ptr", "starts_ptr", "extremes_ptr", "longest_ptr", "parts_ptr", "cu_seqlens",
                                            "cu_seqlens_k"])
def forgetting_blocks_kernel(x_ptr, c_ptr, rows_ptr, starts_ptr, extremes_ptr, longest_ptr, parts_ptr, cu_seqlens, cu_seqlens_k,
                             stride_batch, stride_row, stride_head, unit, n_seqs, seqlen, seqlen_k, heads, group, before,
                             PACKED: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, IN_PARTS: tl.constexpr,
                             PRUNED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Stores c of a block of keys, or, under QUERIES, of the keys on the diagonal of a block of queries. x: these keys or queries.

    PRUNED: also the smallest c of the keys, or the largest c of the queries (extremes), and the largest norm of a row of x (longest).
    IN_PARTS: for keys also -c as the sum of PARTS bfloat16 numbers (parts).
    """
    place = program_tile(cu_seqlens, cu_seqlens_k, n_seqs, seqlen, seqlen_k, heads, BLOCK, PACKED, False)
    lanes = tl.arange(0, BLOCK)
    rows = place.row + lanes
    j = rows + (place.other_length - place.length)
    there = (rows < place.length) & (j >= 0) & (j < place.other_length)
    c_ptr += first_lse(place.batch, place.head, place.other_first, seqlen_k, heads, PACKED)
    c = tl.load(c_ptr + j, mask=there, other=0.0)
    first = tl.maximum(place.row + (place.other_length - place.length), 0)
    start = tl.load(c_ptr + first, mask=first < place.other_length, other=0.0)
    block = tl.program_id(0).to(tl.int64) + before
    more = tl.where(there, (c - start) * LOG2E, 0.0)
    if not QUERIES:
        more = more / unit
    more = more.to(tl.float32)
    tl.store(rows_ptr + block * BLOCK + lanes, more)
    if IN_PARTS and not QUERIES:
        rest = -more
        # each part has the sign, the exponent and the highest 8 bits of what the parts before it leave; nothing is left after the last one
        for part in tl.static_range(PARTS):
            high = (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
            tl.store(parts_ptr + (block * PARTS + part) * BLOCK + lanes, high.to(tl.bfloat16))
            rest -= high
    start *= LOG2E
    high = start.to(tl.float32)
    tl.store(starts_ptr + 2 * block, high)
    tl.store(starts_ptr + 2 * block + 1, (start - high).to(tl.float32))
    if PRUNED:
        if QUERIES:
            extreme = tl.max(tl.where(there, c, -float("inf")), 0)
        else:
            extreme = tl.min(tl.where(there, c, float("inf")), 0)
        tl.store(extremes_ptr + block, extreme)
        # [BLOCK, BLOCK_WIDTH]
        x = load_rows(head_rows(Operand(x_ptr, stride_batch, stride_row, stride_head), place.batch, place.head // group, place.first,
                                place.length, False), place.row, WIDTH, BLOCK, BLOCK_WIDTH, True, False).to(tl.float32)
        squares = tl.sum(x * x, 1)
        squares = tl.where(squares != squares, float("inf"), squares)  # a maximum would ignore a NaN
        tl.store(longest_ptr + block, tl.sqrt(tl.max(squares, 0)))


@triton.jit
def _longest(longest_ptr, first, count):
    """The largest norm of a row of `count` blocks."""
    longest = 0.0
    for start in range(0, count, 128):
        n = start + tl.arange(0, 128)
        longest = tl.maximum(longest, tl.max(tl.load(longest_ptr + first + n, mask=n < count, other=0.0), 0))
    return longest


@triton.jit(do_not_specialize=["n_seqs", "seqlen", "other_seqlen", "heads", "before", "other_before"],
            do_not_specialize_on_alignment=["extremes_ptr", "longest_ptr", "ends_ptr", "cu_seqlens", "other_cu_seqlens"])
def forgetting_ends_kernel(extremes_ptr, longest_ptr, ends_ptr, cu_seqlens, other_cu_seqlens, softmax_scale, n_seqs, seqlen, other_seqlen,
                           heads, before, other_before, PACKED: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr):
    """Stores, for a block of queries, the first block of keys that it must not skip; for a block of keys, the end of the blocks of queries
    that must not skip it.

    A weight is negligible where c_i - c_j < -farthest. The row's maximum is at least the score of the query's own key, and scores without
    gates differ from that by at most 2 * scale * max|q| * max|k|. The logarithm of the number of keys bounds the sum of all skipped
    weights.
    """
    place = program_tile(cu_seqlens, other_cu_seqlens, n_seqs, seqlen, other_seqlen, heads, BLOCK, PACKED, False)
    if PACKED:
        others = place.head.to(tl.int64) * (other_seqlen // BLOCK + n_seqs + 1) + place.other_first // BLOCK + place.sequence
    else:
        others = (place.batch * heads + place.head).to(tl.int64) * tl.cdiv(other_seqlen, BLOCK)
    others += other_before
    block = tl.program_id(0).to(tl.int64) + before
    own = tl.load(extremes_ptr + block)
    count = tl.cdiv(place.other_length, BLOCK)
    products = _longest(longest_ptr, block - place.row // BLOCK, tl.cdiv(place.length, BLOCK)) * _longest(longest_ptr, others, count)
    n_keys = place.other_length if QUERIES else place.length
    farthest = (2 * softmax_scale * products + tl.log(tl.maximum(n_keys, 1).to(tl.float32)) + MARGIN).to(tl.float64)
    end = count if QUERIES else 0
    for first in range(0, count, 128):
        n = first + tl.arange(0, 128)
        other = tl.load(extremes_ptr + others + n, mask=n < count, other=float("inf") if QUERIES else -float("inf"))
        # not ">= -farthest": with a NaN nothing is skipped
        counts = (n < count) & ~((own - other if QUERIES else other - own) < -farthest)
        if QUERIES:
            end = tl.minimum(end, tl.min(tl.where(counts, n, count), 0))
        else:
            end = tl.maximum(end, tl.max(tl.where(counts, n + 1, 0), 0))
    tl.store(ends_ptr + block, end)


@functools.lru_cache(maxsize=1024)
def _plans(device: torch.device, dtype: torch.dtype, aligned: bool, q: Layout, k: Layout, call: Options,
           in_parts: bool) -> tuple[list[Launch], list[Launch]]:
    """Launches of both kernels for keys and for queries."""
    (*_, heads, width), (*_, kv_heads, _) = q[0], k[0]
    sequences, seqlen_q, seqlen_k = call.sizes(q[0], k[0])
    of_keys, of_queries = (call.programs(heads, seqlen, sequences, C_BLOCK) for seqlen in (seqlen_k, seqlen_q))
    constants = [{"PACKED": call.packed, "QUERIES": queries, "BLOCK": C_BLOCK} for queries in (False, True)]
    of_blocks = [c | {"IN_PARTS": in_parts, "PRUNED": call.pruned, "WIDTH": width, "BLOCK_WIDTH": block_width(width)} for c in constants]
    scale, group = call.softmax_scale, heads // kv_heads
    unit = scale * math.log2(math.e)
    blocks = [Launch(forgetting_blocks_kernel, of_keys, (*strides(k), unit, sequences, seqlen_k, seqlen_k, heads, group, 0), of_blocks[0],
                     4, 1),
              Launch(forgetting_blocks_kernel, of_queries, (*strides(q), unit, sequences, seqlen_q, seqlen_k, heads, 1, of_keys),
                     of_blocks[1], 4, 1)]
    ends = [Launch(forgetting_ends_kernel, of_keys, (scale, sequences, seqlen_k, seqlen_q, heads, 0, of_keys), constants[0], 4, 1),
            Launch(forgetting_ends_kernel, of_queries, (scale, sequences, seqlen_q, seqlen_k, heads, of_keys, 0), constants[1], 4, 1)]
    return blocks, ends


def shapes(q: Tensor, k: Tensor, log_f: Tensor, options: Options) -> tuple[tuple[int, ...], ...]:
    """The shapes of KeyBias's c, starts and ends; the first dimension of a tensor that a call does not need is 0."""
    sequences, seqlen_q, seqlen_k = options.sizes(q.shape, k.shape)
    count = sum(options.programs(q.shape[-2], seqlen, sequences, C_BLOCK) for seqlen in (seqlen_k, seqlen_q))
    exact = q.dtype == torch.float32
    return (2, *log_f.mT.shape) if exact else (count, C_BLOCK), (0 if exact else count, 2), (count if options.pruned else 0,)


def empty_parts(q: Tensor, k: Tensor, options: Options) -> Tensor:
    """An uninitialised tensor for the parts of c, bfloat16 (blocks of keys, PARTS, C_BLOCK)."""
    sequences, _, seqlen_k = options.sizes(q.shape, k.shape)
    count = options.programs(q.shape[-2], seqlen_k, sequences, C_BLOCK)
    return torch.empty(count, PARTS.value, C_BLOCK, dtype=torch.bfloat16, device=q.device)


def key_bias(log_f: Tensor, q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options,
             parts: Tensor | None = None) -> KeyBias:
    """The KeyBias of a call. parts: `empty_parts`, which is filled with -c of the keys, relative to their block's start."""
    c = gates.cumulative(log_f, cu_seqlens_k)
    exact = q.dtype == torch.float32
    of_rows, of_starts, of_ends = shapes(q, k, log_f, options)
    ends = torch.empty(of_ends, dtype=torch.int32, device=c.device)
    if 0 in q.shape or 0 in k.shape or exact and not options.pruned:
        rows, starts = (torch.empty(shape, dtype=torch.float32, device=c.device) for shape in (of_rows, of_starts))
        return KeyBias(gates.in_two_parts(c) if exact else rows, starts, ends)
    blocks, ends_of = _plans(q.device, q.dtype, are_aligned(q, k), layout(q), layout(k), options, parts is not None)
    count = blocks[0].programs + blocks[1].programs
    rows, starts, longest = (torch.empty(shape, dtype=torch.float32, device=c.device) for shape in ((count, C_BLOCK), (count, 2), of_ends))
    extremes = c.new_empty(of_ends)
    with on_device_of(c):
        for launch, x, bounds in zip(blocks, (k, q), (cu_seqlens_k, cu_seqlens_q), strict=True):
            launch(x, c, rows, starts, extremes, longest, parts, bounds, cu_seqlens_k)
        if options.pruned:
            for launch, bounds in zip(ends_of, ((cu_seqlens_k, cu_seqlens_q), (cu_seqlens_q, cu_seqlens_k)), strict=True):
                launch(extremes, longest, ends, *bounds)
    return KeyBias(gates.in_two_parts(c), rows.new_empty(of_starts), ends) if exact else KeyBias(rows, starts, ends)


def passed_over(q: Tensor, k: Tensor, log_f: Tensor, *, softmax_scale: float, cu_seqlens_q: Tensor | None = None,
                cu_seqlens_k: Tensor | None = None) -> float:
    """The share of tiles of C_BLOCK queries and keys under the causal mask that `prune` skips. The host waits for the device."""
    options = Options(sequences=packed_sequences(cu_seqlens_q), softmax_scale=softmax_scale, window_right=0, key_bias=True, pruned=True)
    sequences, total_q, total_k = options.sizes(q.shape, k.shape)
    heads = q.shape[-2]
    first = key_bias(log_f, q, k, cu_seqlens_q, cu_seqlens_k, options).ends[options.programs(heads, total_k, sequences, C_BLOCK) :]
    if options.packed:
        bounds = list(zip(*(x.tolist() for x in (cu_seqlens_q[:-1], cu_seqlens_q.diff(), cu_seqlens_k.diff())), strict=True))
        first = first.view(heads, -1)
    else:
        bounds = [(0, total_q, total_k)]
        first = first.view(sequences * heads, -1)
    passed, seen = 0, 0
    for n, (begin, len_q, len_k) in enumerate(bounds):
        count = -(-len_q // C_BLOCK)
        slot = begin // C_BLOCK + n if options.packed else 0
        last = (torch.arange(1, count + 1, device=q.device) * C_BLOCK).clamp(max=len_q) - 1 + len_k - len_q
        tiles = (last // C_BLOCK + 1).clamp(min=0)
        passed += torch.minimum(first[:, slot : slot + count], tiles).sum().item()
        seen += tiles.sum().item() * first.shape[0]
    return passed / max(seen, 1)
