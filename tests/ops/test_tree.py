"""Tree attention: the reference against independent sequences in float64, the kernels against the reference, and the contract."""

import os
from dataclasses import replace

import pytest
import torch
from paths import GPU
from torch.testing import assert_close

from attnzoo_kernels import flash_attention, tree_attention
from attnzoo_kernels.ranges import times_seen
from attnzoo_kernels.tree import tree_positions, tree_ranges
from attnzoo_kernels.tree.cases import CORRECTNESS, drawn, rollouts
from benchmarks import tree as benchmark
from benchmarks.accuracy import assert_accurate

DEVICE = "cuda" if GPU else "cpu"
TRITON = GPU or os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(not TRITON, reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * GPU  # Triton's interpreter computes bfloat16 wrongly
pytestmark = pytest.mark.usefixtures("poisoned")


def run(case, impl, dtype=None):
    x = case.inputs(DEVICE)
    leaves = [t.to(dtype or t.dtype).detach().requires_grad_() for t in x[:3]]
    out, lse = tree_attention(*leaves, **x.options, return_lse=True, impl=impl)
    grads = torch.autograd.grad((out * x.dout).sum() + lse.sin().sum(), leaves)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))


@needs_triton
@pytest.mark.parametrize("case", CORRECTNESS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_keep_the_rule(case, dtype):
    case = replace(case, dtype=dtype)
    assert_accurate(run(case, "triton"), run(case, "reference"), run(case, "reference", torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("case", (rollouts(1000, 300, 5, groups=2, heads=4, kv_heads=2, head_dim=128), drawn(300, 40, 1, head_dim=64)),
                         ids=str)
def test_kernels_keep_the_rule_at_length(case):
    assert_accurate(run(case, "triton"), run(case, "reference"), run(case, "reference", torch.float64))


@pytest.mark.parametrize("case", (CORRECTNESS[0], drawn(25, 9, 7, heads=4, kv_heads=2, head_dim=8)), ids=str)
def test_it_is_independent_sequences_and_gradients_are_their_sums(case):
    x = case.inputs(DEVICE)
    q, k, v = leaves = [t.double().requires_grad_() for t in x[:3]]
    out = tree_attention(q, k, v, **x.options, impl="reference")
    positions = tree_positions(**x.options, total=len(q))
    sequences = [torch.tensor(tokens, dtype=torch.int64, device=DEVICE) for tokens in case.leaves]
    alone = [flash_attention(*(t[tokens][None] for t in leaves), causal=True, impl="reference")[0] for tokens in sequences]
    for tokens, own in zip(sequences, alone, strict=True):
        assert_close(out[tokens], own)
        assert torch.equal(positions[tokens], torch.arange(len(tokens), device=DEVICE))
    # a loss that differs from sequence to sequence
    joint = sum(((n + 1) * out[tokens] * x.dout[tokens]).sum() for n, tokens in enumerate(sequences))
    apart = sum(((n + 1) * own * x.dout[tokens]).sum() for n, (tokens, own) in enumerate(zip(sequences, alone, strict=True)))
    for ours, theirs in zip(*(torch.autograd.grad(loss, leaves) for loss in (joint, apart)), strict=True):
        assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@needs_triton
@pytest.mark.parametrize("segments", (1, 64, 150))
def test_the_kernel_finds_the_ranges_of_the_reference(segments):
    x = drawn(segments, 5, segments, heads=1, head_dim=8).inputs(DEVICE)
    ours, reference = (tree_ranges(**x.options, impl=impl).ranges for impl in ("triton", "reference"))
    assert torch.equal(ours, reference)


def test_no_tokens():
    x = torch.zeros(0, 2, 16, device=DEVICE, requires_grad=True)
    places = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    tree_attention(x, x, x, places[1:] - 1, places).sum().backward()
    assert x.grad.shape == x.shape


def test_tokens_behind_the_last_segment_may_hold_anything():
    x = CORRECTNESS[0].inputs(DEVICE)
    q, k, v = (torch.cat([t.double(), torch.full_like(t[:2], torch.nan).double()]).requires_grad_() for t in x[:3])
    out, lse = tree_attention(q, k, v, **x.options, return_lse=True, impl="reference")
    alone, lse_alone = tree_attention(*(t[:-2] for t in (q, k, v)), **x.options, return_lse=True, impl="reference")
    assert_close(out[:-2], alone)
    assert_close(lse[:, :-2], lse_alone)
    assert not out[-2:].any() and (lse[:, -2:] == -torch.inf).all()
    for grad, own in zip(*(torch.autograd.grad(y.sum(), (q, k, v)) for y in (out, alone)), strict=True):
        assert_close(grad, own)
        assert not grad[-2:].any()


def test_the_benchmark_compares_equals(capsys):
    x = CORRECTNESS[0].inputs()
    tokens = torch.arange(x.q.shape[0])
    seen = times_seen(tree_ranges(**x.options).ranges, len(tokens), len(tokens), (-1, -1)) == 1
    assert torch.equal(benchmark.mask_of(CORRECTNESS[0], x)(0, 0, tokens[:, None], tokens[None]), seen)
    assert benchmark.main(["--dry-run"]) == 0
    assert "paths attnzoo-reference" in capsys.readouterr().out


WRONG = {
    "another order": ({"parents": torch.tensor([-1, 0, -1, 0])}, ValueError, "parents: segments must lie depth first, .*ment 3 .* got 0"),
    "a parent behind": ({"parents": torch.tensor([-1, 2, 1, -1])}, ValueError, "segment 1 must have -1 for a parent, or 0 or .* got 2"),
    "too few parents": ({"parents": torch.tensor([-1, 0])}, ValueError, r"parents: must be contiguous and have shape \(4,\), .* got shape"),
    "parents as floats": ({"parents": torch.zeros(4)}, TypeError, "parents: must be int32, got torch.float32"),
    "more tokens than there are": ({"cu_seqlens": torch.tensor([0, 1, 2, 3, 5], dtype=torch.int32)}, ValueError,
                                   "cu_seqlens: must rise from 0 to at most the 4 tokens, got"),
    "no bounds": ({"cu_seqlens": [0, 4]}, TypeError, "cu_seqlens: must be an int32 tensor"),
}


@pytest.mark.parametrize("shapes, message", (
    (((1, 4, 2, 16), (1, 4, 2, 16)), "q: must be \\(total, heads, head_dim\\), got shape \\(1, 4, 2, 16\\)"),
    (((4, 2, 16), (1, 4, 2, 16)), "k: must be \\(total, kv_heads, head_dim\\), got shape"),
    (((4, 2, 16), (3, 2, 16)), "k: must have q's 4 tokens, got 3"),
    (((4, 2, 16), (9, 2, 16)), "k: must have q's 4 tokens, got 9"),
))
def test_queries_and_keys_are_those_of_one_tree(shapes, message):
    q, k = map(torch.zeros, shapes)
    with pytest.raises(ValueError, match=message):
        tree_attention(q, k, k, torch.tensor([-1], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32))


@pytest.mark.parametrize("change, error, message", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(change, error, message):
    arguments = {"parents": torch.tensor([-1, 0, 0, -1]), "cu_seqlens": torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32)} | change
    if isinstance(arguments["parents"], torch.Tensor) and not arguments["parents"].is_floating_point():
        arguments["parents"] = arguments["parents"].int()
    with pytest.raises(error, match=message):
        tree_attention(*torch.zeros(3, 4, 2, 16), **arguments)
    with pytest.raises(error, match=message):
        tree_positions(**arguments, total=4)
