"""The order of pairs by block: the kernels give the integers that PyTorch's own operations give."""

import os

import pytest
import torch
from paths import GPU

from attnzoo_kernels.routed.routes import Blocks, routes

DEVICE = "cuda" if GPU else "cpu"
pytestmark = pytest.mark.skipif(not GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1")


def layout_by_torch(cu_seqlens_q, cu_seqlens_k, total_q, total_k, size):
    """first, bounds_q, bounds_k, sequence and own."""
    sequences = cu_seqlens_q.shape[0] - 1
    start_q, end_q, start_k, end_k = cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:]
    shift = (end_k - start_k) - (end_q - start_q)
    behind = ((end_k - start_k + size - 1) // size).clamp(min=1).cumsum(0, dtype=torch.int32)
    first = torch.cat([behind.new_zeros(1), behind[:-1]])
    block = torch.arange(total_k // size + sequences + 1, device=DEVICE, dtype=torch.int32)
    of = torch.searchsorted(behind, block, right=True).clamp(max=sequences - 1)
    at = (block - first[of]) * size
    bounds_k = torch.minimum(start_k[of] + at, end_k[of])
    bounds_q = torch.minimum(torch.maximum(start_q[of] + at - shift[of], start_q[of]), end_q[of])
    bounds_q = torch.where(at == 0, start_q[of], bounds_q)
    token = torch.arange(total_q, device=DEVICE, dtype=torch.int32)
    sequence = torch.searchsorted(end_q.contiguous(), token, right=True, out_int32=True).clamp(max=sequences - 1)
    position = token - start_q[sequence] + shift[sequence]
    own = torch.where((position >= 0) & (token < end_q[-1]), position.div(size, rounding_mode="floor"), -1).int()
    return first, torch.cat([bounds_q, end_q[-1:]]), torch.cat([bounds_k, end_k[-1:]]), sequence, own


def routes_by_torch(chosen, layout, heads, kv_heads, total_k):
    """place, pair, cu_seqlens_q and cu_seqlens_k."""
    first, _, bounds_k, sequence, own = layout
    (choosers, slots), count = chosen.shape[1:], bounds_k.shape[0] - 1
    key_head = torch.arange(choosers, device=DEVICE, dtype=torch.int32) // (choosers // kv_heads)
    number = key_head[:, None] * count + (first[sequence].view(-1, 1, 1) + chosen)
    number = torch.where((chosen >= 0) & (chosen < own.view(-1, 1, 1)), number, kv_heads * count).int().flatten()
    in_order, pair = torch.sort(number, stable=True)
    place = torch.empty_like(number).scatter_(0, pair, torch.arange(number.shape[0], device=DEVICE, dtype=torch.int32))
    numbers = torch.arange(kv_heads * count + 1, device=DEVICE, dtype=torch.int32)
    bounds = torch.searchsorted(in_order, numbers, out_int32=True) * (heads // choosers)
    starts = torch.arange(kv_heads, device=DEVICE, dtype=torch.int32)[:, None] * total_k
    bounds_k = torch.cat([(starts + bounds_k[:-1]).flatten(), numbers.new_full((1,), kv_heads * total_k)])
    return place.view(-1, slots), pair.int(), bounds, bounds_k


def cumulated(lengths):
    return torch.tensor((0, *lengths), device=DEVICE).cumsum(0, dtype=torch.int32)


# lengths of queries and of keys, further tokens behind the last sequence, tokens of a block, heads, key heads, choosers, slots
CASES = {
    "one sequence": ((37,), (37,), 0, 4, 4, 2, 4, 3),
    "empty sequences": ((0, 9, 0, 0, 21, 0), (0, 9, 0, 0, 21, 0), 0, 4, 4, 2, 2, 2),
    "sequences without keys": ((5, 7, 3), (0, 19, 0), 0, 8, 2, 1, 1, 3),
    "sequences without queries": ((0, 7, 0), (5, 7, 40), 3, 8, 2, 2, 2, 1),
    "more queries than keys": ((30, 12), (11, 3), 0, 4, 4, 4, 4, 2),
    "fewer queries than keys": ((3, 1, 8), (70, 33, 65), 0, 16, 4, 1, 4, 3),
    "tokens behind the last sequence": ((13, 6), (13, 9), 11, 4, 2, 2, 2, 2),
    "blocks of a token": ((6, 9), (6, 9), 2, 1, 2, 1, 2, 4),
    "blocks longer than all keys": ((6, 9), (6, 9), 0, 2**31 - 20, 2, 1, 2, 2),
    "no slots": ((17,), (17,), 0, 4, 2, 2, 2, 0),
    "more sequences than a tile": (tuple(n % 3 for n in range(1500)), tuple(n % 4 for n in range(1500)), 5, 2, 2, 2, 2, 1),
    "numbers of 32 bits": ((1100,), (1100,), 0, 1, 32, 32, 32, 1),
}


@pytest.mark.parametrize("lengths_q, lengths_k, more, size, heads, kv_heads, choosers, slots", CASES.values(), ids=CASES)
def test_the_kernels_order_as_torch_does(lengths_q, lengths_k, more, size, heads, kv_heads, choosers, slots, poisoned):
    bounds = cumulated(lengths_q), cumulated(lengths_k)
    total_q, total_k = sum(lengths_q) + more, sum(lengths_k) + more
    q, k = (torch.empty(total, 1, 16, device=DEVICE) for total in (total_q, total_k))
    blocks = Blocks.of(q, k, *bounds, size)
    expected = layout_by_torch(*bounds, total_q, total_k, size)
    assert blocks.count == expected[2].shape[0] - 1
    for name, wanted in zip(("first", "bounds_q", "bounds_k", "sequence", "own"), expected, strict=True):
        result = getattr(blocks, name)
        assert result.dtype == torch.int32 and torch.equal(result, wanted), name

    if slots == 0:  # attention does not ask for an order then
        return
    generator = torch.Generator(DEVICE).manual_seed(0)
    chosen = torch.randint(-2, max(lengths_k) // size + 3, (total_q, choosers, slots), generator=generator, device=DEVICE,
                           dtype=torch.int32)
    route = routes(chosen, blocks, heads, kv_heads, total_k)
    assert route.rows == heads // choosers
    for name, wanted in zip(("place", "pair", "cu_seqlens_q", "cu_seqlens_k"), routes_by_torch(chosen, expected, heads, kv_heads, total_k),
                            strict=True):
        result = getattr(route, name)
        assert result.dtype == torch.int32 and torch.equal(result, wanted), name


def test_dense_sequences_lie_one_behind_the_other():
    q, k = torch.empty(3, 10, 1, 16, device=DEVICE), torch.empty(3, 17, 1, 16, device=DEVICE)
    blocks = Blocks.of(q, k, None, None, 4)
    packed = Blocks.of(q.flatten(0, 1), k.flatten(0, 1), cumulated((10,) * 3), cumulated((17,) * 3), 4)
    assert all(map(torch.equal, blocks[2:], packed[2:]))


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("rows", (1, 2))
def test_rows_and_their_numbers_go_to_the_places_of_their_slots(rows, dtype, poisoned):
    from attnzoo_kernels.routed.parts import launch_spread

    tokens, heads, slots = 11, 4, 3
    place = torch.randperm(tokens * heads // rows * slots, device=DEVICE).int().view(-1, slots)
    own = torch.randn(heads, tokens, 24, device=DEVICE, dtype=dtype).transpose(0, 1)
    numbers = torch.randn(2, heads, tokens, device=DEVICE)
    part, part_numbers = launch_spread(own, numbers, place, rows)
    source = place.flatten().argsort() // slots
    assert torch.equal(part, own.reshape(-1, rows, 24)[source].view(-1, 1, 24))
    assert torch.equal(part_numbers, numbers.mT.reshape(2, -1, rows)[:, source].view(2, 1, -1))


@pytest.mark.parametrize("together", (1, 2, 3, 6))
def test_parts_of_some_heads_come_before_those_of_others(together):
    """Both orders give the same merge and the same sum."""
    from attnzoo_kernels.routed.parts import launch_merge, launch_sum

    tokens, rows, choosers, slots, width = 9, 6, 2, 3, 32
    place = torch.randperm(tokens * choosers * slots, device=DEVICE).int().view(-1, slots)
    own, part = (torch.randn(n, heads, width, device=DEVICE, dtype=torch.float16)
                 for n, heads in ((tokens, choosers * rows), (place.numel() * rows, 1)))
    lse, part_lse = torch.randn(choosers * rows, tokens, device=DEVICE), torch.randn(1, place.numel() * rows, device=DEVICE)

    def ordered(x):
        return x.view(place.numel(), rows // together, together, -1).transpose(0, 1).reshape(x.shape)

    stats = torch.stack((lse, torch.zeros_like(lse)))
    results = launch_merge(own, lse, stats, part, part_lse, None, place, rows, rows)
    assert all(map(torch.equal, launch_merge(own, lse, stats, ordered(part), ordered(part_lse), None, place, rows, together), results))
    assert torch.equal(launch_sum(own, ordered(part), place, rows, together), launch_sum(own, part, place, rows, rows))
