"""What torch.compile is told of the operators is what they do: schema, shapes and strides of the results, for inputs with heads first."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnzoo_kernels import (
    BlockLayout,
    autograd,
    block_sparse_attention,
    decode_attention,
    differential_attention,
    distance_bias_attention,
    dual_chunk_attention,
    flash_attention,
    forgetting_attention,
    latent_decode_attention,
    moba_attention,
    msa_attention,
    nsa_attention,
    sigmoid_attention,
    two_frame_attention,
)

GPU = torch.cuda.is_available()
WIDTH, KEYS, BLOCK = (64, 128, 64) if GPU else (16, 20, 16)  # on a GPU what Gluon takes


class Calls(TorchDispatchMode):
    """Writes down the first call of each of our operators."""

    def __init__(self):
        super().__init__()
        self.first = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "attnzoo":
            self.first.setdefault(operator, args)
        return operator(*args, **(kwargs or {}))


def heads_first(seqlen: int, heads: int, device: str) -> torch.Tensor:
    x = torch.randn(2, heads, seqlen, WIDTH, device=device, dtype=torch.bfloat16 if GPU else torch.float32)
    return x.transpose(1, 2).requires_grad_()


def call(operator: str, queries: int, device: str, impl: str | None):
    q, q2, k, k2, v = (heads_first(*shape, device) for shape in ((queries, 2), (queries, 2), (KEYS, 1), (KEYS, 1), (KEYS, 1)))
    table = torch.linspace(0, 1, 64 * WIDTH // 2, device=device).view(64, -1)
    layout = BlockLayout.from_mask(torch.ones(-(-queries // BLOCK), 2, dtype=torch.bool, device=device), BLOCK)
    if operator == "decode":
        lengths = torch.full((2,), KEYS - 9, dtype=torch.int32, device=device)
        return decode_attention(*(x.detach() for x in (q, k, v)), cache_seqlens=lengths, impl=impl)
    if operator == "latent_decode":
        lengths = torch.full((2,), KEYS - 9, dtype=torch.int32, device=device)
        return latent_decode_attention(q.detach(), k.detach()[:, :, 0], value_dim=WIDTH - 8, cache_seqlens=lengths, impl=impl)
    out = {
        "flash": lambda: flash_attention(q, k, v, causal=True, impl=impl),
        "block_sparse": lambda: block_sparse_attention(q, k, v, layout, causal=True, impl=impl),
        "differential": lambda: differential_attention(q, q2, k, k2, v, torch.rand(2, device=device), causal=True, impl=impl),
        "dual_chunk": lambda: dual_chunk_attention(q, k, v, cos=table.cos(), sin=table.sin(), chunk_size=24, local_size=8, causal=True,
                                                   impl=impl),
        "distance_bias": lambda: distance_bias_attention(q, k, v, torch.rand(2, 9, device=device, requires_grad=True), causal=True,
                                                         impl=impl),
        "forgetting": lambda: forgetting_attention(q, k, v, -torch.rand(*k.shape[:-2], q.shape[-2], device=device), impl=impl),
        "moba": lambda: moba_attention(q, k, v, block_size=6, top_k=2, impl=impl),
        "msa": lambda: msa_attention(q, k, v, q[..., :1, :], k, block_size=6, top_k=2, impl=impl),
        "nsa": lambda: nsa_attention(q, k, v, k[:, :9], v[:, :9], torch.rand(*q.shape[:-1], 3, device=device).to(q.dtype), compress_size=4,
                                     compress_stride=2, block_size=4, block_count=3, window=5, impl=impl),
        "sigmoid": lambda: sigmoid_attention(q, k, v, causal=True, impl=impl),
        "two_frame": lambda: two_frame_attention(*(torch.stack(x, -2) for x in ((q, q2), (k, k2))), v, near_keys=5, impl=impl),
    }[operator]()
    return torch.autograd.grad(out.float().sum(), (q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("operator", ("flash", "block_sparse", "differential", "dual_chunk", "sigmoid", "forgetting",
                                      "distance_bias", "moba", "msa", "nsa", "two_frame", "decode", "latent_decode"))
@pytest.mark.parametrize("queries", (KEYS, KEYS - 9))
@pytest.mark.parametrize("impl", (None, "triton") if GPU else ("triton", "cpu"))
def test_fakes_tell_what_operators_give(operator, queries, impl, device, monkeypatch):
    if "decode" in operator and impl == "cpu":
        pytest.skip("it has no path for CPUs")
    monkeypatch.setattr(autograd, "compiling", lambda: True)
    with Calls() as calls:
        call(operator, queries, device, impl)
    monkeypatch.undo()
    # flash has another backward where queries are as many as keys
    lists = 2 * (impl != "cpu" and operator in ("moba", "msa", "nsa"))  # operators that order the chosen blocks
    of_nsa = (8,) if impl == "cpu" else (11, 12)
    assert len(calls.first) - lists in {"decode": (1,), "latent_decode": (1,), "moba": (3,), "msa": (3,), "nsa": of_nsa}.get(operator, (2,))
    for custom, args in calls.first.items():
        args = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)
        torch.library.opcheck(custom, args, test_utils=("test_schema", "test_faketensor"))
