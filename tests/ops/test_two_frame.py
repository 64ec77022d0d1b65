"""Attention in two frames: the reference against each method's formula, the other paths against the reference by the field's rule, and the
contract."""

import os
from dataclasses import replace

import pytest
import torch
from paths import GPU, PATHS
from torch.testing import assert_close

from attnzoo_kernels import flash_attention, two_frame_attention
from attnzoo_kernels.two_frame import ops
from attnzoo_kernels.two_frame.cases import CORRECTNESS, LARGE, Case
from benchmarks.accuracy import assert_accurate

DEVICE = "cuda" if GPU else "cpu"
TRITON = GPU or os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(not TRITON, reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1")
# Triton's interpreter computes bfloat16 wrongly
DTYPES = [torch.float16, torch.float32] + [torch.bfloat16] * GPU
pytestmark = pytest.mark.usefixtures("poisoned")
NAMES = ("out", "lse", "dq", "dk", "dv")


def run(case, impl, dtype=None, **changes):
    """By NAMES in `dtype` for inputs that were drawn in the case's; the LSE has a gradient, too."""
    x = case.inputs(DEVICE)
    leaves = [t.to(dtype or t.dtype).detach().requires_grad_() for t in x[:3]]
    out, lse = two_frame_attention(*leaves, return_lse=True, impl=impl, **x.options | changes)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    grads = torch.autograd.grad((out * x.dout).sum() + lse.sin().sum(), leaves)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def check(case, impl="triton", **changes):
    assert_accurate(run(case, impl, **changes), run(case, "reference"), run(case, "reference", torch.float64))


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CORRECTNESS, ids=str)
def test_kernels_keep_the_rule(case, dtype):
    check(replace(case, dtype=dtype))


@pytest.mark.skipif(GPU, reason="the path for CPUs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [CORRECTNESS[4], CORRECTNESS[8], CORRECTNESS[-1]], ids=str)
def test_the_path_for_cpus_keeps_the_rule(case, dtype):
    check(replace(case, dtype=dtype), "cpu")


@needs_triton
@pytest.mark.parametrize("impl", PATHS)
def test_the_gradient_of_a_very_negative_lse(impl):
    """Queries without a far key have an LSE of -100, as others have."""
    q, k = (torch.zeros(1, 8, 1, 2, 16, device=DEVICE, dtype=torch.float16) for _ in range(2))
    q[..., 0], k[..., 0] = -20.0, 20.0
    v = torch.zeros(1, 8, 1, 16, device=DEVICE, dtype=torch.float16)
    _, lse = two_frame_attention(q.requires_grad_(), k.requires_grad_(), v, near_keys=4, return_lse=True, impl=impl)
    dq, dk = torch.autograd.grad(lse.sum(), (q, k))
    assert_close(dq[0, :, 0].sum(-2), torch.tensor([5.0] + 15 * [0.0], device=DEVICE, dtype=torch.float16).expand(8, -1))
    assert_close(dk.sum(), torch.tensor(-5.0 * 8, device=DEVICE, dtype=torch.float16), rtol=5e-3, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_kernels_keep_the_rule_at_length(case, dtype):
    check(replace(case, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [LARGE[1], LARGE[5], LARGE[7]], ids=str)
def test_launches_repeat_bit_by_bit(case):
    first, second = (run(case, None, deterministic=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


@pytest.mark.parametrize("far_keys", [None, 3])
def test_the_reference_is_the_formula(far_keys):
    x = Case(batch=2, seqlen_q=9, seqlen_k=11, heads=4, kv_heads=2, head_dim=8, near_keys=3, far_keys=far_keys).inputs(DEVICE)
    leaves = [t.double().requires_grad_() for t in x[:3]]
    out = two_frame_attention(*leaves, **x.options, impl="reference")
    q, k, v = leaves[0], *(t.repeat_interleave(2, 2) for t in leaves[1:])
    rows = []
    for i in range(9):
        seen = [(j, 0 if i + 2 - j < 3 else 1) for j in range(i + 3) if i + 2 - j < 3 or far_keys is None or j < far_keys]
        scores = torch.stack([(q[:, i, :, frame] * k[:, j, :, frame]).sum(-1) for j, frame in seen], -1) / 8**0.5
        rows.append(torch.einsum("bhj,bjhd->bhd", scores.softmax(-1), v[:, [j for j, _ in seen]]))
    expected = torch.stack(rows, 1)
    assert_close(out, expected)
    for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (out, expected)), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("impl", PATHS)
def test_one_frame_is_plain_attention_and_a_scale_may_be_negative(impl):
    x = Case(seqlen_q=40, heads=4, kv_heads=2, head_dim=16, near_keys=40, dtype=torch.float32).inputs(DEVICE)
    out, lse = two_frame_attention(*x[:3], near_keys=40, softmax_scale=-0.3, return_lse=True, impl=impl)
    plain, plain_lse = flash_attention(x.q[..., 0, :].contiguous(), x.k[..., 0, :].contiguous(), x.v, causal=True, softmax_scale=-0.3,
                                       return_lse=True, impl=impl)
    assert_close(out, plain)
    assert_close(lse, plain_lse)
    assert torch.equal(out, two_frame_attention(*x[:3], near_keys=2**40, softmax_scale=-0.3, impl=impl))


@needs_triton
def test_custom_operators_and_the_eager_path_agree_and_compile():
    x = Case(lengths_q=(9, 0, 31), head_dim=16, near_keys=7, dtype=torch.float16).inputs(DEVICE)
    inputs = tuple(t.detach().requires_grad_() for t in x[:3])
    bounds = x.options["cu_seqlens_q"]
    arguments = (inputs[0].flatten(1, 2), inputs[1].flatten(1, 2), inputs[2], bounds, bounds, "triton", True, 0.25, 7, 5)
    torch.library.opcheck(torch.ops.attnzoo.two_frame_forward, arguments,
                          test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))

    def attend(*leaves):
        return two_frame_attention(*leaves, near_keys=7, far_keys=5, softmax_scale=0.25, impl="triton", cu_seqlens_q=bounds,
                                   cu_seqlens_k=bounds)

    expected = attend(*inputs)
    wanted = torch.autograd.grad(expected, inputs, x.dout)
    for result in (torch.ops.attnzoo.two_frame_forward(*arguments)[0], ops.forward(*arguments)[0],
                   torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs)):
        assert torch.equal(result, expected)
        assert all(map(torch.equal, torch.autograd.grad(result, inputs, x.dout), wanted))


@pytest.mark.parametrize("impl", PATHS)
def test_empty_inputs(impl):
    for rows in ((0, 5), (2, 0)):
        leaves = [torch.zeros(*rows, *shape, 16, device=DEVICE, requires_grad=True) for shape in ((4, 2), (2, 2), (2,))]
        two_frame_attention(*leaves, near_keys=2, impl=impl).sum().backward()
        assert all(t.grad is not None and t.grad.shape == t.shape for t in leaves)


X = torch.zeros(1, 4, 2, 2, 16)
WRONG = {
    "one frame": ({"q": torch.zeros(1, 4, 2, 16)}, ValueError, r"q: must be .*heads, 2, head_dim\).* got shape \(1, 4, 2, 16\)"),
    "frames apart": ({"k": torch.zeros(1, 4, 2, 2, 16).transpose(2, 3)}, ValueError, "k: heads must lie two frames apart, got strides"),
    "no tensor": ({"k": None}, TypeError, "k: must be a tensor, got NoneType"),
    "nothing near": ({"near_keys": 0}, ValueError, "near_keys: must be an integer of at least 1, got 0"),
    "less than no far keys": ({"far_keys": -1}, ValueError, "far_keys: must be an integer of at least 0, got -1"),
    "values of other heads": ({"v": torch.zeros(1, 4, 1, 16)}, ValueError, "v: must have k's 2 heads, got 1"),
}


@pytest.mark.parametrize("change, error, message", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(change, error, message):
    with pytest.raises(error, match=message):
        two_frame_attention(**{"q": X, "k": X, "v": X[..., 0, :], "near_keys": 2} | change)
