"""Softmax attention on a GPU: ours, PyTorch's and flash-attn's. One function each, from a `Case` and its `Inputs` to a `Pass`."""

import ctypes
import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnzoo_kernels import flash_attention
from attnzoo_kernels.dispatch import IMPLEMENTATIONS
from attnzoo_kernels.flash.cases import Case, Inputs
from benchmarks.harness import Backend, Pass, Unsupported, differentiable


def refuse(case: Case, *features: str) -> None:
    """Raise Unsupported if the case uses one of the features."""
    used = {
        "packed input": case.packed,
        "dense input": not case.packed,
        "window": case.window_size != (-1, -1),
        "softcap": case.softcap > 0,
        "alibi": case.alibi,
        "sinks": case.sinks,
        "dropout": case.dropout_p > 0,  # each has a random stream of its own, so that the result could not be checked
        "unlike causal lengths": case.causal and any(m != n for m, n in case.lengths),
        "unlike packed lengths": case.packed and any(m != n for m, n in case.lengths),
        "values of another width": case.value_dim not in (None, case.head_dim),
    }
    for feature in features:
        if used[feature]:
            raise Unsupported(f"cannot do: {feature}")


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def leaves(x: Inputs, learned: bool) -> tuple[Tensor, ...]:
    """What is differentiated: with the sinks, if they are learned."""
    return x.q, x.k, x.v, *((x.options["sinks"],) if learned else ())


def attnzoo(impl: str | None, deterministic: bool = False, learned: bool = False) -> Callable[[Case, Inputs], Pass]:
    """learned: the sinks have a gradient, too."""

    def make(case: Case, x: Inputs) -> Pass:
        def attend(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
            options = x.options | {"sinks": sinks[0]} if sinks else x.options
            return flash_attention(q, k, v, impl=impl, deterministic=deterministic, **options)

        return differentiable(attend, leaves(x, learned), x.dout)

    return make


def sdpa(backend: SDPBackend) -> Callable[[Case, Inputs], Pass]:
    def make(case: Case, x: Inputs) -> Pass:
        refuse(case, "packed input", "window", "softcap", "alibi", "sinks", "dropout", "unlike causal lengths")
        if backend == SDPBackend.FLASH_ATTENTION:
            refuse(case, "values of another width")
        gqa = x.q.shape[-2] != x.k.shape[-2]

        def attend(q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=gqa)

        inputs = tuple(map(heads_first, (x.q, x.k, x.v)))
        return differentiable(attend, inputs, heads_first(x.dout), lambda y: y.transpose(1, 2), lambda: sdpa_kernel(backend))

    return make


@functools.cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 256  # each shape and mask is compiled for itself, its best case
    torch._functorch.config.donated_buffer = False  # the backward is run many times over one graph
    return torch.compile(flex_attention, dynamic=False)


def flex_mask(case: Case, device: torch.device | str) -> Callable[..., Tensor] | None:
    """FlexAttention's mask_mod; a packed batch is one sequence with a document mask. None where every key is seen."""
    left, right = case.window_size[0], 0 if case.causal else case.window_size[1]
    shift = 0 if case.packed else case.lengths[0][1] - case.lengths[0][0]
    document = None
    if case.packed:
        lengths = torch.tensor(case.lengths_q, device=device)
        document = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    if left < 0 and right < 0 and document is None:
        return None

    def mask(b, h, i, j):
        seen = j >= 0
        if left >= 0:
            seen = seen & (j >= i + shift - left)
        if right >= 0:
            seen = seen & (j <= i + shift + right)
        if document is not None:
            seen = seen & (document[i] == document[j])
        return seen

    return mask


def flex_score(case: Case, x: Inputs) -> Callable[..., Tensor] | None:
    """FlexAttention's score_mod: softcap, then ALiBi."""
    softcap, slopes = case.softcap, x.options.get("alibi_slopes")
    shift = 0 if case.packed else case.lengths[0][1] - case.lengths[0][0]
    if not softcap and slopes is None:
        return None

    def score_mod(score, b, h, i, j):
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[h] * (i + shift - j).abs()
        return score

    return score_mod


def flex(case: Case, x: Inputs) -> Pass:
    from torch.nn.attention.flex_attention import create_block_mask

    refuse(case, "sinks", "dropout", "unlike packed lengths")
    q, k, v, dout = (heads_first(t[None] if case.packed else t) for t in (x.q, x.k, x.v, x.dout))
    mask = flex_mask(case, q.device)
    block_mask = create_block_mask(mask, None, None, q.shape[2], k.shape[2], device=q.device) if mask else None
    attend = functools.partial(
        compiled_flex_attention(), block_mask=block_mask, score_mod=flex_score(case, x), enable_gqa=q.shape[1] != k.shape[1])
    return differentiable(attend, (q, k, v), dout, lambda y: y.transpose(1, 2)[0] if case.packed else y.transpose(1, 2))


def packing(x: Inputs) -> dict:
    """cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k; nothing of a dense case."""
    return {name: value for name, value in x.options.items() if "seqlen" in name}


def varlen(case: Case, x: Inputs) -> Pass:
    from torch.nn.attention.varlen import varlen_attn

    refuse(case, "dense input", "softcap", "alibi", "sinks", "dropout")
    options = {"window_size": (case.window_size[0], 0 if case.causal else case.window_size[1])}
    if x.q.shape[-2] != x.k.shape[-2]:
        options["enable_gqa"] = True
    return differentiable(lambda q, k, v: varlen_attn(q, k, v, *packing(x).values(), **options), (x.q, x.k, x.v), x.dout)


def importable(module: str, name: str | None = None, where: str = "") -> Callable[[], str | None]:
    """A backend's `missing`. name: what the module must have. where: how to get it."""

    @functools.cache
    def missing() -> str | None:
        try:
            found = importlib.import_module(module)
            if name is not None:
                getattr(found, name)
        except (ImportError, OSError, AttributeError) as problem:
            return f"not importable ({problem})" + (f"; {where}" if where else "")
        return None

    return missing


@functools.cache
def fa3_missing() -> str | None:
    """FlashAttention-3's operators: from its own package, or from the shared library that the variable FA3_LIBRARY names."""
    try:
        if library := os.environ.get("FA3_LIBRARY"):
            for runtime in sorted(Path(library).parent.glob("libcudart.so*")):
                ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
            torch.ops.load_library(library)
        else:
            import flash_attn_interface  # noqa: F401
    except (ImportError, OSError) as problem:
        return f"not importable ({problem}); FA3_LIBRARY may name its shared library"
    return None if hasattr(torch.ops.flash_attn_3, "fwd") else "loaded, but torch.ops.flash_attn_3.fwd is not there"


@functools.cache
def sglang_missing() -> str | None:
    """SGLang's build of FlashAttention-3, of its package sglang-kernel, or of the shared library that SGLANG_LIBRARY names."""
    try:
        if library := os.environ.get("SGLANG_LIBRARY"):
            torch.ops.load_library(library)
        else:
            import sgl_kernel.flash_ops  # noqa: F401
    except (ImportError, OSError) as problem:
        return f"not importable ({problem}); SGLANG_LIBRARY may name its flash_ops.abi3.so"
    return None if hasattr(torch.ops.sgl_kernel, "fwd") else "loaded, but torch.ops.sgl_kernel.fwd is not there"


def fa3(case: Case, x: Inputs, deterministic: bool = False) -> Pass:
    refuse(case, "alibi", "sinks", "dropout")
    q, k, v, dout = x[:4]
    left, right = case.window_size
    options = packing(x) | {"is_causal": case.causal, "window_size_left": left, "window_size_right": right, "softcap": case.softcap}
    saved: list[Tensor] = []

    def forward() -> Tensor:
        return torch.ops.flash_attn_3.fwd(q, k, v, **options)[0]

    def backward() -> tuple[Tensor, ...]:
        if not saved:
            saved.extend(torch.ops.flash_attn_3.fwd(q, k, v, **options)[:2])
        grads = tuple(map(torch.empty_like, (q, k, v)))
        torch.ops.flash_attn_3.bwd(dout, q, k, v, *saved, *grads, **options, deterministic=deterministic)
        return grads

    return Pass(forward, backward, saved)


fa4_missing = importable("flash_attn.cute")


def fa4(case: Case, x: Inputs, deterministic: bool = False, learned: bool = False) -> Pass:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    refuse(case, "alibi", "dropout")
    left, right = (None if side < 0 else side for side in case.window_size)
    options = packing(x) | {"causal": case.causal, "window_size": (left, right), "softcap": case.softcap}
    if deterministic:
        options["deterministic"] = True
    function = flash_attn_varlen_func if case.packed else flash_attn_func

    def attend(q, k, v, *sinks):
        result = function(q, k, v, learnable_sink=sinks[0] if sinks else x.options.get("sinks"), **options)
        return result[0] if isinstance(result, tuple) else result

    return differentiable(attend, leaves(x, learned), x.dout)


def offered(impl: str) -> str | None:
    return None if impl in IMPLEMENTATIONS else f"flash_attention has no impl={impl!r}"


PEER_LIMIT = 1.5  # flash-attn's own tests allow three times eager's error in gradients where our rule allows two

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("attnzoo-gluon", attnzoo("gluon"), lambda: offered("gluon")),
        Backend("attnzoo-triton", attnzoo("triton"), lambda: offered("triton")),
        Backend("sdpa-fa2", sdpa(SDPBackend.FLASH_ATTENTION), limit=PEER_LIMIT),
        Backend("sdpa-cudnn", sdpa(SDPBackend.CUDNN_ATTENTION), limit=PEER_LIMIT),
        Backend("flex", flex, limit=PEER_LIMIT),
        Backend("varlen", varlen, limit=PEER_LIMIT),
        Backend("fa3", fa3, fa3_missing, limit=PEER_LIMIT),
        Backend("fa4", fa4, fa4_missing, limit=PEER_LIMIT),
        Backend("attnzoo-reference", attnzoo("reference")),
    )
}

DETERMINISTIC: dict[str, Backend] = {  # of those above that have one, the mode whose gradients repeat bit by bit
    name: replace(BACKENDS[name], name=f"{name} deterministic", make=make)
    for name, make in (
        ("attnzoo-gluon", attnzoo("gluon", deterministic=True)),
        ("attnzoo-triton", attnzoo("triton", deterministic=True)),
        ("fa3", functools.partial(fa3, deterministic=True)),
        ("fa4", functools.partial(fa4, deterministic=True)),
        ("attnzoo-reference", attnzoo("reference")),
    )
}
