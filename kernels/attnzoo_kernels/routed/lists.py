"""The kernels of routes.py: blocks of sequences and the order of pairs. All is int32, and nothing waits for the device."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels._triton.search import count_below, last_up_to
from attnzoo_kernels.padding.launch import Launch

BLOCK = 256
SEQUENCES = 1024


@triton.jit
def bounds_of(cu_seqlens_q, cu_seqlens_k, sequence, inside):
    """(first query, end of queries, first key, end of keys, how many more keys than queries) of each sequence."""
    start_q, stop_q = tl.load(cu_seqlens_q + sequence, mask=inside, other=0), tl.load(cu_seqlens_q + sequence + 1, mask=inside, other=0)
    start_k, stop_k = tl.load(cu_seqlens_k + sequence, mask=inside, other=0), tl.load(cu_seqlens_k + sequence + 1, mask=inside, other=0)
    return start_q, stop_q, start_k, stop_k, (stop_k - start_k) - (stop_q - start_q)


@triton.jit
def length_of(cu_seqlens, sequence, inside):
    return tl.load(cu_seqlens + sequence + 1, mask=inside, other=0) - tl.load(cu_seqlens + sequence, mask=inside, other=0)


@triton.jit
def store_before(ptr, before, counts, at, inside):
    """Stores for each of the neighbouring places `at` what is counted before it. Returns what is counted up to the last one."""
    tl.store(ptr + at, before + tl.cumsum(counts, 0) - counts, mask=inside)
    return before + tl.sum(counts, 0)


@triton.jit(do_not_specialize=["sequences", "size"], do_not_specialize_on_alignment=["cu_seqlens_k"])
def routed_first_kernel(cu_seqlens_k, first_ptr, sequences, size, SEQUENCES: tl.constexpr):
    """One program: each sequence's first block. A sequence without keys has one block all the same, for its queries."""
    before = 0
    for at in range(0, sequences, SEQUENCES):
        sequence = at + tl.arange(0, SEQUENCES)
        inside = sequence < sequences
        blocks = tl.where(inside, tl.maximum((length_of(cu_seqlens_k, sequence, inside) + size - 1) // size, 1), 0)
        before = store_before(first_ptr, before, blocks, sequence, inside)


@triton.jit(do_not_specialize=["sequences", "steps", "size", "count", "total_q"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def routed_layout_kernel(cu_seqlens_q, cu_seqlens_k, first_ptr, bounds_q_ptr, bounds_k_ptr, sequence_ptr, own_ptr, sequences, steps, size,
                         count, total_q, BLOCK: tl.constexpr):
    """What Blocks holds of `count` blocks and `total_q` queries, BLOCK of both by a program."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end_q, end_k = tl.load(cu_seqlens_q + sequences), tl.load(cu_seqlens_k + sequences)

    inside = at < count
    of = last_up_to(first_ptr, at, sequences, steps, inside)
    offset = (at - tl.load(first_ptr + of, mask=inside, other=0)) * size
    start_q, stop_q, start_k, stop_k, shift = bounds_of(cu_seqlens_q, cu_seqlens_k, of, inside)
    bound_q = tl.minimum(tl.maximum(start_q + offset - shift, start_q), stop_q)
    bound_q = tl.where(offset == 0, start_q, bound_q)  # queries before the first key belong to the first block
    tl.store(bounds_q_ptr + at, tl.where(inside, bound_q, end_q), mask=at <= count)
    tl.store(bounds_k_ptr + at, tl.where(inside, tl.minimum(start_k + offset, stop_k), end_k), mask=at <= count)

    inside = at < total_q
    of = last_up_to(cu_seqlens_q, at, sequences, steps, inside)
    start_q, _, _, _, shift = bounds_of(cu_seqlens_q, cu_seqlens_k, of, inside)
    position = at - start_q + shift
    tl.store(sequence_ptr + at, of, mask=inside)
    tl.store(own_ptr + at, tl.where((position >= 0) & (at < end_q), tl.maximum(position, 0) // size, -1), mask=inside)


@triton.jit(do_not_specialize=["pairs", "slots", "choosers", "group", "count", "none"],
            do_not_specialize_on_alignment=["chosen_ptr", "first_ptr", "sequence_ptr", "own_ptr"])
def routed_number_kernel(chosen_ptr, first_ptr, sequence_ptr, own_ptr, number_ptr, pairs, slots, choosers, group, count, none,
                         BLOCK: tl.constexpr):
    """Each pair's block number over all key heads; `group` choosers share a key head. `none` for a pair that stands for no block."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    chosen = tl.load(chosen_ptr + pair, mask=inside, other=-1)
    query = pair // slots // choosers
    key_head = pair // slots % choosers // group
    own = tl.load(own_ptr + query, mask=inside, other=-1)
    block = tl.load(first_ptr + tl.load(sequence_ptr + query, mask=inside, other=0), mask=inside, other=0) + chosen
    number = tl.where((chosen >= 0) & (chosen < own), key_head * count + block, none)
    tl.store(number_ptr + pair, number.to(number_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pairs", "steps", "rows", "count", "none", "total_k"], do_not_specialize_on_alignment=["bounds_k_ptr"])
def routed_order_kernel(number_ptr, source_ptr, bounds_k_ptr, place_ptr, pair_ptr, pairs_before_ptr, keys_before_ptr, pairs, steps, rows,
                        count, none, total_k, BLOCK: tl.constexpr):
    """Of numbers in order and the pairs that they belong to: each pair's place, the pair at each place, and where each number's pairs and
    keys begin."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pairs
    pair = tl.load(source_ptr + at, mask=inside, other=0)
    tl.store(place_ptr + pair, at, mask=inside)
    tl.store(pair_ptr + at, pair.to(tl.int32), mask=inside)

    inside = at <= none
    tl.store(pairs_before_ptr + at, count_below(number_ptr, at, pairs, steps, inside) * rows, mask=inside)
    key = tl.load(bounds_k_ptr + at % count, mask=inside, other=0)
    tl.store(keys_before_ptr + at, tl.where(at < none, at // count * total_k + key, none // count * total_k), mask=inside)


@functools.lru_cache(maxsize=256)
def launches(device: int, kernels: tuple, block: str, size: int, dtype: torch.dtype) -> tuple[Launch, ...]:
    """Kept by all that they are specialised on."""
    return tuple(Launch(kernel, {block: size}, 4, {}) for kernel in kernels)


def launch_layout(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, total_k: int, size: int, count: int) -> tuple[Tensor, ...]:
    """first, bounds_q, bounds_k, sequence and own of Blocks."""
    cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    sequences = cu_seqlens_q.shape[0] - 1
    first, bounds_q, bounds_k, sequence, own = (torch.empty(n, dtype=torch.int32, device=cu_seqlens_q.device)
                                                for n in (sequences, count + 1, count + 1, total_q, total_q))
    size = min(size, total_k + 1)  # a block longer than all keys is the same as one of this size
    device = cu_seqlens_q.get_device()
    (begin,) = launches(device, (routed_first_kernel,), "SEQUENCES", SEQUENCES, torch.int32)
    (lay_out,) = launches(device, (routed_layout_kernel,), "BLOCK", BLOCK, torch.int32)
    with on_device_of(first):
        begin(1, cu_seqlens_k, first, sequences, size)
        lay_out(triton.cdiv(max(count + 1, total_q), BLOCK), cu_seqlens_q, cu_seqlens_k, first, bounds_q, bounds_k, sequence, own,
                sequences, sequences.bit_length(), size, count, total_q)
    return first, bounds_q, bounds_k, sequence, own


def launch_order(chosen: Tensor, first: Tensor, bounds_k: Tensor, sequence: Tensor, own: Tensor, rows: int, kv_heads: int,
                 total_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """place, pair, cu_seqlens_q and cu_seqlens_k of Routes."""
    chosen = chosen.contiguous()
    total_q, choosers, slots = chosen.shape
    count, pairs = bounds_k.shape[0] - 1, chosen.numel()
    none = kv_heads * count
    # numbers of fewer bits take fewer sorting passes
    number = torch.empty(pairs, dtype=torch.int16 if none < 2**15 else torch.int32, device=chosen.device)
    place, pair, pairs_before, keys_before = (torch.empty(n, dtype=torch.int32, device=chosen.device)
                                              for n in (pairs, pairs, none + 1, none + 1))
    write, arrange = launches(chosen.get_device(), (routed_number_kernel, routed_order_kernel), "BLOCK", BLOCK, number.dtype)
    with on_device_of(chosen):
        write(triton.cdiv(pairs, BLOCK), chosen, first, sequence, own, number, pairs, slots, choosers, choosers // kv_heads, count, none)
        in_order, source = torch.sort(number, stable=True)  # stable, so that queries are ascending in each block
        arrange(triton.cdiv(max(pairs, none + 1), BLOCK), in_order, source, bounds_k, place, pair, pairs_before, keys_before,
                pairs, pairs.bit_length(), rows, count, none, total_k)
    return place.view(total_q * choosers, slots), pair, pairs_before, keys_before
