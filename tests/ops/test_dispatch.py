"""Which implementation takes a call, and that every operator writes it down."""

import pytest
import torch
from paths import PATHS

from attnzoo_kernels import (
    block_sparse_attention,
    decode_attention,
    differential_attention,
    dispatch,
    distance_bias_attention,
    dual_chunk_attention,
    flash_attention,
    forgetting_attention,
    latent_decode_attention,
    moba_attention,
    msa_attention,
    nsa_attention,
    padding,
    quantize_fp8,
    sigmoid_attention,
    two_frame_attention,
)
from attnzoo_kernels.block_sparse.patterns import dense
from attnzoo_kernels.gelu import bias_gelu

ANGLES = torch.linspace(0, 1, 8 * 8).view(8, 8)


@pytest.fixture(autouse=True)
def fresh():
    dispatch.forget()
    yield
    dispatch.forget()


def function(operator: str, device: str, impl: str | None):
    """The operator as a function of one tensor, and that tensor."""
    q, k, v = (torch.randn(1, 5, 1, 16, device=device) for _ in range(3))
    indices = torch.tensor([0, 2], device=device)
    return {
        "flash": lambda q: flash_attention(q, k, v, impl=impl),
        "block_sparse": lambda q: block_sparse_attention(q, k, v, dense(5, block=16, device=device), impl=impl),
        "differential": lambda q: differential_attention(q, q, k, None, v, torch.tensor(0.5, device=device), impl=impl),
        "dual_chunk": lambda q: dual_chunk_attention(q, k, v, cos=ANGLES.cos().to(device), sin=ANGLES.sin().to(device), chunk_size=8,
                                                     local_size=2, causal=True, impl=impl),
        "distance_bias": lambda q: distance_bias_attention(q, k, v, torch.ones(1, 3, device=device), impl=impl),
        "forgetting": lambda q: forgetting_attention(q, k, v, -torch.ones(1, 5, 1, device=device), impl=impl),
        "moba": lambda q: moba_attention(q, k, v, block_size=2, top_k=2, impl=impl),
        "msa": lambda q: msa_attention(q, k, v, k, k, block_size=2, top_k=2, impl=impl),
        "nsa": lambda q: nsa_attention(q, k, v, k[:, :2], v[:, :2], torch.ones(1, 5, 1, 3, device=device), compress_size=2,
                                       compress_stride=2, block_size=2, block_count=2, window=2, impl=impl),
        "sigmoid": lambda q: sigmoid_attention(q, k, v, impl=impl),
        "two_frame": lambda q: two_frame_attention(*(torch.stack((x, x), -2) for x in (q, k)), v, near_keys=2, impl=impl),
        "decode": lambda q: decode_attention(q[:, :1], k, v, cache_seqlens=torch.full((1,), 4, dtype=torch.int32, device=device),
                                             impl=impl),
        "latent_decode": lambda q: latent_decode_attention(
            q[:, :1], k[:, :, 0], value_dim=9, cache_seqlens=torch.full((1,), 4, dtype=torch.int32, device=device), impl=impl),
        "quantize_fp8": lambda q: quantize_fp8(q, k, v, impl=impl)[0],
        "bias_gelu": lambda q: bias_gelu(q, torch.zeros(16, device=device), impl=impl),
        "padding": lambda q: padding.remove_padding(q.flatten(2), indices, impl=impl),
    }[operator], q


def call(operator: str, device: str, impl: str | None) -> torch.Tensor:
    run, q = function(operator, device, impl)
    gradient = operator not in ("decode", "latent_decode", "quantize_fp8")
    return run(q.requires_grad_(gradient))


OPERATORS = ("flash", "block_sparse", "differential", "dual_chunk", "sigmoid", "forgetting", "distance_bias", "two_frame", "decode",
             "latent_decode", "quantize_fp8", "bias_gelu", "padding")


@pytest.mark.parametrize("impl", ("triton", "reference"))
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_writes_down_what_it_took(operator, impl, device):
    out = call(operator, device, impl)
    backward = impl == "triton" and operator not in ("decode", "latent_decode", "quantize_fp8", "padding")
    if backward:
        out.sum().backward()
    assert dispatch.implementations_taken() == {f"{operator} {d}": [impl] for d in (("backward",) if backward else ()) + ("forward",)}


@pytest.mark.parametrize("impl", PATHS)
@pytest.mark.parametrize("operator", (*OPERATORS, "moba", "msa", "nsa"))
def test_torch_s_default_device_changes_nothing(operator, impl, device):
    if impl == "cpu" and operator in ("decode", "latent_decode", "quantize_fp8", "bias_gelu", "padding"):
        pytest.skip("it has no path for CPUs")
    run, q = function(operator, device, impl)
    results = []
    for default in (device, "meta"):
        with torch.device(default):
            leaf = q.detach().requires_grad_(operator not in ("decode", "latent_decode", "quantize_fp8"))
            out = run(leaf)
            results.append([out, *torch.autograd.grad(out.sum(), leaf)] if leaf.requires_grad else [out.float()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_implementation_that_does_not_exist_is_refused(operator, device):
    with pytest.raises(ValueError, match="impl: must be None or one of .*'reference', got 'cuda'"):
        call(operator, device, "cuda")


def test_the_first_that_has_nothing_against_a_call_takes_it(monkeypatch):
    monkeypatch.setattr(dispatch, "gluon_loads", lambda: True)
    assert dispatch.choose("a", None, lambda: None) == dispatch.choose("a", "gluon", lambda: None) == "gluon"
    assert dispatch.choose("a", None, lambda: "no") == dispatch.choose("a", "triton", lambda: None) == "triton"
    with pytest.raises(NotImplementedError, match="does not take this call: it is too long; "):
        dispatch.choose("b", "gluon", lambda: "it is too long")
    assert dispatch.choose_backward("b", "gluon", lambda: "it is too long") == "triton"
    assert dispatch.choose_backward("b", "gluon", lambda: None) == "gluon"
    assert dispatch.implementations_taken() == {"a": ["gluon", "triton"], "b": ["gluon", "triton"]}
    monkeypatch.setattr(dispatch, "gluon_loads", lambda: False)
    assert dispatch.choose("c", None, lambda: None) == "triton"
    with pytest.raises(NotImplementedError, match="does not work with the Triton that is installed"):
        dispatch.choose("c", "gluon", lambda: None)
