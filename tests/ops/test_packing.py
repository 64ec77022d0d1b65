"""Packed batches without tokens, or with rows that belong to no sequence: every operator and path gives zeros there, gradients too."""

import pytest
import torch
import triton
import triton.language as tl
from paths import PATHS

from attnzoo_kernels import (
    BlockLayout,
    block_sparse_attention,
    differential_attention,
    dual_chunk_attention,
    flash_attention,
    sigmoid_attention,
    two_frame_attention,
)
from attnzoo_kernels._triton.tiles import find_tile
from attnzoo_kernels.dual_chunk.cases import rotary_tables
from attnzoo_kernels.packing import pad_packed, unpad_packed

gluon = pytest.param("gluon", marks=pytest.mark.hopper)


def operators(device):
    layout = BlockLayout.from_mask(torch.ones(1, 1, dtype=torch.bool, device=device), 16)
    table, lam = torch.ones(16, 8, device=device), torch.tensor(0.5, device=device)
    return {
        "flash": flash_attention,
        "block_sparse": lambda q, k, v, **options: block_sparse_attention(q, k, v, layout, **options),
        "differential": lambda q, k, v, **options: differential_attention(q, q, k, k, v, lam, **options),
        "dual_chunk": lambda q, k, v, **options: dual_chunk_attention(q, k, v, cos=table, sin=table, chunk_size=8, local_size=2,
                                                                      causal=True, **options),
        "sigmoid": sigmoid_attention,
        "two_frame": lambda q, k, v, **options: two_frame_attention(*(torch.stack((x, x), -2) for x in (q, k)), v, near_keys=3, **options),
    }


@pytest.mark.parametrize("operator", ("flash", "block_sparse", "differential", "dual_chunk", "sigmoid", "two_frame"))
@pytest.mark.parametrize("impl", PATHS)
@pytest.mark.parametrize("queries, longest", ((0, 0), (5, 0), (5, 5)))
def test_sequences_without_tokens(operator, impl, queries, longest, device):
    q = torch.randn(queries, 2, 16, device=device, requires_grad=True)
    k, v = (torch.randn(0, 1, 16, device=device, requires_grad=True) for _ in range(2))
    bounds = torch.tensor([0, longest, longest], dtype=torch.int32, device=device)
    out = operators(device)[operator](q, k, v, impl=impl, cu_seqlens_q=bounds, cu_seqlens_k=torch.zeros_like(bounds), max_seqlen_q=longest,
                                      max_seqlen_k=0)
    assert out.shape == (queries, 2, 16) and (out == 0).all()
    out.sum().backward()
    assert all(x.grad.shape == x.shape and (x.grad == 0).all() for x in (q, k, v))


@pytest.mark.parametrize("operator", ("flash", "block_sparse", "differential", "differential by head", "dual_chunk"))
@pytest.mark.parametrize("impl", (gluon, *PATHS))
def test_rows_behind_the_last_sequence_may_hold_anything(operator, impl, device):
    """Also what goes with tokens, as lambda or a multiplier, which may be made of positions that are not there."""
    if (operator, impl) == ("block_sparse", "gluon"):
        pytest.skip("it takes no packed sequences")
    real, total = 50, 60
    bounds = torch.tensor([0, 33, 33, real], dtype=torch.int32, device=device)

    def tokens(*shape, dtype=torch.float16):
        x = torch.rand(total, *shape, device=device).to(dtype)
        x[real:] = torch.nan
        return x.requires_grad_()

    q, q2, k, v, dout = (tokens(2, 64) for _ in range(5))
    lam, by_head = tokens(2, dtype=torch.float32), torch.rand(2, device=device, requires_grad=True)
    cos, sin = rotary_tables(160, 64, device)
    layout = BlockLayout.from_mask(torch.ones(3, 3, dtype=torch.bool, device=device), 16)
    attend, inputs, options = {
        "flash": (flash_attention, (q, k, v), {}),
        "block_sparse": (block_sparse_attention, (q, k, v, layout), {}),
        "differential": (differential_attention, (q, q2, k, None, v, lam), {}),
        "differential by head": (differential_attention, (q, q2, k, None, v, by_head), {}),
        "dual_chunk": (dual_chunk_attention, (q, k, v), {"cos": cos, "sin": sin, "chunk_size": 160, "local_size": 32, "causal": True,
                                                         "logit_multiplier": tokens(dtype=torch.float32).detach()}),
    }[operator]
    out = attend(*inputs, **options, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=33, max_seqlen_k=33, deterministic=False,
                 impl=impl)
    leaves = [x for x in inputs if isinstance(x, torch.Tensor)]
    grads = torch.autograd.grad(out, leaves, dout)
    assert all(x.isfinite().all() for x in (out, *grads))
    assert all((x[real:] == 0).all() for x in (out, *grads) if x.shape[0] == total)


@pytest.mark.parametrize("operator", ("flash", "block_sparse", "differential", "dual_chunk"))
@pytest.mark.parametrize("name", ("max_seqlen_q", "max_seqlen_k"))
def test_a_longest_sequence_without_sequences_is_refused(operator, name):
    q, k, v = (torch.randn(1, 16, heads, 16) for heads in (2, 1, 1))
    attend = operators("cpu")[operator]
    assert attend(q, k, v).shape == q.shape
    with pytest.raises(ValueError, match=f"{name}: goes with cu_seqlens_q and cu_seqlens_k, got 16 without them"):
        attend(q, k, v, **{name: 16})


def test_padding_and_back():
    tokens = torch.arange(1.0, 8.0)[:, None]
    bounds = torch.tensor([0, 2, 2, 5, 5])
    rows = pad_packed(tokens, bounds, 3)
    assert rows.squeeze(-1).tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5], [0, 0, 0]]
    assert unpad_packed(rows, bounds, 7, fill=-1.0).squeeze(-1).tolist() == [1, 2, 3, 4, 5, -1, -1]


@triton.jit
def _places_kernel(places, cu_seqlens, other_cu_seqlens, n_seqs, total, spacing, BLOCK: tl.constexpr):
    place = find_tile(cu_seqlens, other_cu_seqlens, tl.program_id(0) * spacing, n_seqs, total, BLOCK)
    for field in tl.static_range(6):
        tl.store(places + tl.program_id(0) * 6 + field, place[field])


@pytest.mark.parametrize("lengths, others", (
    ((0,), (3,)), ((70,), (0,)), ((1, 0, 97, 17, 130, 0), (5, 0, 0, 64, 1, 2)), (tuple(n * 37 % 90 for n in range(150)), (4,) * 150)))
def test_every_row_has_one_tile(lengths, others, device):
    block, behind = 32, 40  # rows behind the last sequence
    bounds, other_bounds = ([sum(x[:n]) for n in range(len(x) + 1)] for x in (lengths, others))
    total = bounds[-1] + behind
    slots = total // block + len(lengths) + 1
    places = torch.empty(slots, 6, dtype=torch.int32, device=device)
    cu_seqlens, other_cu_seqlens = (torch.tensor(x, dtype=torch.int32, device=device) for x in (bounds, other_bounds))
    _places_kernel[(slots,)](places, cu_seqlens, other_cu_seqlens, len(lengths), total, 1, BLOCK=block)
    seen = []
    for sequence, tile, first, length, other_first, other_length in places.tolist():
        assert (first, length) == ((*bounds, total)[sequence], (*lengths, behind)[sequence])
        assert (other_first, other_length) == (other_bounds[sequence], (*others, 0)[sequence])
        seen += [first + row for row in range(tile * block, min((tile + 1) * block, length))]
    assert sorted(seen) == list(range(total))


@pytest.mark.parametrize("sequences", (127, 128, 16383, 16384, 17000))
def test_tiles_of_many_sequences(sequences, device):
    """The search for a sequence takes a stage more from 128 and from 16384 sequences on."""
    block, behind, spacing = 32, 40, 97
    lengths = torch.arange(sequences) * 37 % 90
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = bounds[-1].item() + behind
    slots = torch.arange(0, total // block + sequences + 1, spacing)
    places = torch.empty(len(slots), 6, dtype=torch.int32, device=device)
    cu_seqlens = bounds.int().to(device)
    _places_kernel[(len(slots),)](places, cu_seqlens, cu_seqlens, sequences, total, spacing, BLOCK=block)
    first_slots = bounds // block + torch.arange(sequences + 1)
    expected = torch.searchsorted(first_slots, slots, right=True) - 1
    assert places[:, 0].tolist() == expected.tolist()
    assert places[:, 1].tolist() == (slots - first_slots[expected]).tolist()
    assert places[:, 2].tolist() == bounds[expected].tolist()
