"""Shapes of `flash_attention_fp8`, and inputs with outliers, shared by the tests and the benchmark."""

import torch

from attnzoo_kernels.flash.cases import Case, Inputs


def with_outliers(x: Inputs, seed: int = 7) -> Inputs:
    """Adds FlashAttention-3's outliers to standard normal q, k, v: normal numbers of standard deviation 10 to one entry in a thousand."""
    generator = torch.Generator(x.q.device).manual_seed(seed)

    def normal(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator, device=like.device)

    def add(like: torch.Tensor) -> torch.Tensor:
        there = torch.rand(like.shape, generator=generator, device=like.device) < 1e-3
        return (like.float() + 10 * normal(like) * there).to(like.dtype)

    return x._replace(q=add(x.q), k=add(x.k), v=add(x.v))


CORRECTNESS: tuple[Case, ...] = tuple(
    Case(seqlen_q=m, seqlen_k=n, head_dim=d, causal=causal, **shape)
    for d in (64, 128) for causal in (False, True)
    for m, n, shape in (
        (1, 1025, {"batch": 4, "heads": 8}), (17, 97, {}), (113, 113, {"batch": 2, "heads": 6, "kv_heads": 2}), (128, 128, {}),
        (192, 384, {"batch": 2, "heads": 4, "kv_heads": 1}), (333, 777, {"heads": 4, "kv_heads": 2}),
        (777, 333, {"heads": 4, "kv_heads": 2}), (1025, 1025, {}), (512, 512, {"q_scale": 20.0}),
        (4096, 4096, {"heads": 4, "kv_heads": 2}))
) + tuple(Case(seqlen_q=333, head_dim=d, causal=True) for d in (48, 80, 96, 112))
