"""Under torch.compile dQ, dK and dV are parts of one tensor, which the product that made q, k and v takes without a copy."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd

from attnzoo_kernels import flash_attention
from benchmarks.accuracy import assert_accurate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
IMPLS = ("triton", "gluon") if DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0) else ("triton",)
LONGEST = 313 if DEVICE == "cuda" else 35  # more than a tile
BOUNDS = (0, 20, 20, 20 + LONGEST, 30 + LONGEST)
ROWS = BOUNDS[-1] + 9  # the last ones belong to no sequence


def project(x, weight, shapes):
    parts = F.linear(x, weight).split([heads * width for heads, width in shapes], -1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "value_dim"), [(2, 2, 64, 64), (4, 2, 64, 40), (1, 1, 128, 128)])
def test_joint_gradients(impl, packed, heads, kv_heads, head_dim, value_dim, poisoned):
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim)
    width = sum(n * d for n, d in shapes)
    x = torch.randn(*((ROWS,) if packed else (2, LONGEST)), 32, generator=generator).to(DEVICE, DTYPE)
    weight = torch.randn(width, 32, generator=generator).to(DEVICE, DTYPE)
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device=DEVICE)
    options = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": LONGEST, "max_seqlen_k": LONGEST} if packed else {}

    def attend(x, weight, impl=impl):
        return flash_attention(*project(x, weight, shapes), **options, deterministic=impl == "triton", impl=impl)

    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    dout = torch.randn(*x.shape[:-1], heads, value_dim, generator=generator).to(DEVICE, DTYPE)

    def gradients(attend, dtype=DTYPE, **options):
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in (x, weight)]
        return torch.autograd.grad(attend(*leaves, **options), leaves, dout.to(dtype))

    joint, apart = gradients(compiled), gradients(attend)
    assert "flash_backward_joint" in graphs[-1].code
    if impl == "triton":  # Gluon's adds up dQ in any order
        assert all(torch.equal(a, b) for a, b in zip(joint, apart, strict=True))
    for value, *references in zip(joint, *(gradients(attend, dtype, impl="reference") for dtype in (DTYPE, torch.float64)), strict=True):
        assert_accurate(value, *references)


def test_what_cannot_be_joined_keeps_tensors_of_its_own():
    """Widths that would start the parts at other than whole 16 bytes, keys of another length."""
    torch._dynamo.reset()
    for seqlen_k, head_dim in ((7, 33), (9, 64)):
        q, k = (torch.randn(1, n, 1, head_dim, device=DEVICE, dtype=DTYPE, requires_grad=True) for n in (7, seqlen_k))
        dout = torch.randn_like(q)

        def attend(q, k):
            return flash_attention(q, k, k, impl="triton")

        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        grads = [torch.autograd.grad(f(q, k), (q, k), dout) for f in (attend, compiled)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
