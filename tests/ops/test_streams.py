"""Calls that run on several streams at once do not disturb each other: no counter or buffer is shared between them."""

import pytest
import torch

from attnzoo_kernels import (
    BlockLayout,
    block_sparse_attention,
    decode_attention,
    differential_attention,
    dual_chunk_attention,
    flash_attention,
    sigmoid_attention,
)

OPERATORS = ("flash", "flash causal", "block_sparse", "differential", "dual_chunk", "sigmoid", "decode")


def call(operator: str, q, k, v, other):
    """Output and, where there is a backward, gradients that repeat bit by bit."""
    if operator == "decode":
        lengths = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
        return [decode_attention(q[:, -1:], k, v, cache_seqlens=lengths)]
    tensors = [x.detach().requires_grad_() for x in (q, k, v)]
    if operator.startswith("flash"):
        out = flash_attention(*tensors, causal=operator.endswith("causal"), deterministic=True)
    elif operator == "sigmoid":
        out = sigmoid_attention(*tensors, causal=True, deterministic=True)
    elif operator == "block_sparse":
        blocks = q.shape[1] // 64
        mask = torch.arange(blocks, device=q.device)[:, None] % 3 != torch.arange(blocks, device=q.device) % 3
        out = block_sparse_attention(*tensors, BlockLayout.from_mask(mask, 64), causal=True, deterministic=True)
    elif operator == "differential":
        lam = torch.tensor(0.3, device=q.device)
        out = differential_attention(tensors[0], other, tensors[1], other, tensors[2], lam, causal=True, deterministic=True)
    else:
        table = torch.linspace(0, 1, 512 * 32, device=q.device).view(512, 32)
        out = dual_chunk_attention(*tensors, cos=table.cos(), sin=table.sin(), chunk_size=512, local_size=128, causal=True,
                                   deterministic=True)
    return [out, *torch.autograd.grad(out, tensors, other)]


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
def test_streams_at_once_give_what_one_gives(operator):
    torch.manual_seed(0)
    inputs = [[torch.randn(2, 1024, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)] for _ in range(4)]
    expected = [call(operator, *x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(10):
        results = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(call(operator, *x))
        torch.cuda.synchronize()
        for ours, alone in zip(results, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, alone, strict=True))
