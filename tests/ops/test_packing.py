"""Packed batches without tokens: every operator and path gives empty results, and gradients that are zeros and not missing."""

import pytest
import torch

from attnzoo_kernels import BlockLayout, block_sparse_attention, differential_attention, dual_chunk_attention, flash_attention
from attnzoo_kernels.packing import pad_packed, unpad_packed


def operators(device):
    layout = BlockLayout.from_mask(torch.ones(1, 1, dtype=torch.bool, device=device), 16)
    table, lam = torch.ones(16, 8, device=device), torch.tensor(0.5, device=device)
    return {
        "flash": flash_attention,
        "block_sparse": lambda q, k, v, **options: block_sparse_attention(q, k, v, layout, **options),
        "differential": lambda q, k, v, **options: differential_attention(q, q, k, k, v, lam, **options),
        "dual_chunk": lambda q, k, v, **options: dual_chunk_attention(q, k, v, cos=table, sin=table, chunk_size=8, local_size=2, **options),
    }


@pytest.mark.parametrize("operator", ("flash", "block_sparse", "differential", "dual_chunk"))
@pytest.mark.parametrize("impl", ("triton", "reference"))
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


def test_padding_and_back():
    tokens = torch.arange(1.0, 8.0)[:, None]
    bounds = torch.tensor([0, 2, 2, 5, 5])
    rows = pad_packed(tokens, bounds, 3)
    assert rows.squeeze(-1).tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5], [0, 0, 0]]
    assert unpad_packed(rows, bounds, 7, fill=-1.0).squeeze(-1).tolist() == [1, 2, 3, 4, 5, -1, -1]
