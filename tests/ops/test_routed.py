"""routed_attention: the reference against the formula, the kernels against the reference by the field's rule, and the contract."""

import os
from dataclasses import replace

import pytest
import torch
from paths import GPU, PATHS
from torch.testing import assert_close

from attnzoo_kernels import flash_attention, routed_attention
from attnzoo_kernels.routed.cases import CORRECTNESS, LONG, Case
from benchmarks.accuracy import assert_accurate

DEVICE = "cuda" if GPU else "cpu"
TRITON = GPU or os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(not TRITON, reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1")
DTYPES = (torch.float16, torch.bfloat16, torch.float32) if GPU else (torch.float16, torch.float32)  # the interpreter gets bfloat16 wrong
CASES = [replace(case, dtype=dtype) for n, case in enumerate(CORRECTNESS) for dtype in DTYPES
         if GPU or dtype == torch.float16 or n % 2]
NAMES = ("out", "lse", "dq", "dk", "dv")


def run(case, impl, dtype=None, **changes):
    """By NAMES in `dtype` for inputs that were drawn in the case's; the LSE has a gradient, too."""
    x = case.inputs(DEVICE)
    leaves = [t.to(dtype or t.dtype).detach().requires_grad_() for t in x[:3]]
    out, lse = routed_attention(*leaves, x.blocks, return_lse=True, impl=impl, **x.options | changes)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    grads = torch.autograd.grad((out * x.dout).sum() + lse.sin().sum(), leaves)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def check(case, impl="triton", **changes):
    assert_accurate(run(case, impl, **changes), run(case, "reference"), run(case, "reference", torch.float64))


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, poisoned):
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LONG, ids=str)
@pytest.mark.parametrize("impl", ("triton", pytest.param("gluon", marks=pytest.mark.hopper)))
def test_error_is_at_most_twice_that_of_eager_at_length(case, dtype, impl):
    if impl == "gluon" and dtype == torch.float32:
        pytest.skip("the Hopper path takes 16 bits")
    check(replace(case, dtype=dtype), impl)


@pytest.mark.gpu
def test_launches_repeat_bit_by_bit():
    first, second = (run(LONG[2], None, deterministic=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


@needs_triton
def test_all_blocks_give_plain_attention():
    x = Case(seqlen_q=37, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32).inputs(DEVICE)
    blocks = torch.arange(3, device=DEVICE, dtype=torch.int32).expand(1, 37, 2, 3)
    for impl in PATHS:
        results = routed_attention(*x[:3], blocks, block_size=16, return_lse=True, impl=impl)
        for ours, plain in zip(results, flash_attention(*x[:3], causal=True, return_lse=True, impl=impl), strict=True):
            assert_close(ours, plain)


def test_the_reference_reads_the_chosen_blocks_and_its_own():
    x = Case(seqlen_q=7, heads=2, head_dim=8, block_size=2).inputs(DEVICE)
    blocks = torch.tensor([[[-1]], [[0]], [[0]], [[-1]], [[1]], [[0]], [[3]]], device=DEVICE, dtype=torch.int32)[None].expand(1, 7, 2, 1)
    read = [[0], [0, 1], [0, 1, 2], [2, 3], [2, 3, 4], [0, 1, 4, 5], [6]]
    q, k, v = (t.double() for t in x[:3])
    out = routed_attention(q, k, v, blocks, block_size=2, impl="reference")
    for i, keys in enumerate(read):
        weights = (torch.einsum("hd,jhd->hj", q[0, i], k[0, keys]) / 8**0.5).softmax(-1)
        assert_close(out[0, i], torch.einsum("hj,jhd->hd", weights, v[0, keys]))


@needs_triton
@pytest.mark.parametrize("impl", [path for path in PATHS if path != "reference"])
def test_nothing_depends_on_what_lies_beyond_a_sequence(impl):
    """Packed sequences with NaN in their neighbours, and in the tokens behind the last one."""
    bounds = torch.tensor((0, 7, 25, 30, 30), device=DEVICE, dtype=torch.int32)
    tensors = [torch.randn(33, 1, 16, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(i)) for i in range(4)]
    blocks = torch.tensor([1, 0], device=DEVICE, dtype=torch.int32).expand(33, 1, 2)
    rows = slice(7, 25)
    results = []
    for poison in (False, True):
        q, k, v, dout = (torch.full_like(x, torch.nan).index_copy(0, torch.arange(7, 25, device=DEVICE), x[rows]) if poison else x.clone()
                         for x in tensors)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = routed_attention(*leaves, blocks, block_size=8, cu_seqlens_q=bounds, cu_seqlens_k=bounds, impl=impl)
        grads = torch.autograd.grad(out, leaves, dout)
        assert all((x[30:] == 0).all() for x in (out, *grads))
        results.append([x[rows] for x in (out, *grads)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
@needs_triton
def test_it_compiles_to_what_eager_mode_computes():
    x = Case(lengths_q=(9, 0, 21), head_dim=16, block_size=4, dtype=torch.float16).inputs(DEVICE)
    leaves = [t.detach().requires_grad_() for t in x[:3]]

    def attend(*leaves):
        return routed_attention(*leaves, x.blocks, impl="triton", **x.options)

    expected, result = attend(*leaves), torch.compile(attend, fullgraph=True, backend="aot_eager")(*leaves)
    assert torch.equal(result, expected)
    wanted, grads = (torch.autograd.grad(y, leaves, x.dout) for y in (expected, result))
    assert all(map(torch.equal, grads, wanted))


@pytest.mark.parametrize("impl", [pytest.param(path, marks=[needs_triton] * (path == "triton")) for path in PATHS])
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=str)
def test_empty_inputs(impl, dtype):
    for batch, queries, keys in ((0, 5, 5), (2, 0, 0), (2, 5, 0)):
        leaves = [torch.zeros(batch, *rest, 16, device=DEVICE, dtype=dtype, requires_grad=True)
                  for rest in ((queries, 4), (keys, 2), (keys, 2))]
        blocks = torch.zeros(batch, queries, 4, 2, device=DEVICE, dtype=torch.int32)
        routed_attention(*leaves, blocks, block_size=4, impl=impl).sum().backward()
        assert all(t.grad is not None and t.grad.shape == t.shape for t in leaves)


@needs_triton
def test_more_parts_than_the_kernels_can_number_are_refused():
    tokens, slots = 2**20, 32
    q, k, v = (torch.zeros(16, device=DEVICE).expand(1, tokens, heads, 16) for heads in (64, 1, 1))
    blocks = torch.zeros(1, device=DEVICE, dtype=torch.int32).expand(1, tokens, 1, slots)
    with pytest.raises(NotImplementedError, match="blocks: queries times heads times slots must be less than 2147483648"):
        routed_attention(q, k, v, blocks, block_size=64, impl="triton")


BLOCKS = torch.zeros(1, 4, 2, 1, dtype=torch.int32)
WRONG = {
    "blocks for three heads": ({"blocks": torch.zeros(1, 4, 3, 1)}, ValueError, r"blocks: must have shape .1, 4, 2. and slots, got"),
    "blocks as floats": ({"blocks": BLOCKS.float()}, TypeError, "blocks: must be int32, got torch.float32"),
    "no blocks": ({"blocks": None}, TypeError, "blocks: must be an int32 tensor, got NoneType"),
    "no tokens in a block": ({"block_size": 0}, ValueError, "block_size: must be an integer of at least 1, got 0"),
    "a path that there is not": ({"impl": "cuda"}, ValueError, "impl: must be None or one of 'gluon', .*'reference', got 'cuda'"),
}


@pytest.mark.parametrize("change, error, message", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(change, error, message):
    arguments = {name: torch.zeros(1, 4, 2, 16) for name in ("q", "k", "v")} | {"blocks": BLOCKS, "block_size": 4} | change
    with pytest.raises(error, match=message):
        routed_attention(**arguments)


@pytest.mark.parametrize("arch, width, block_size, dtype, taken", (
    (90, 128, 128, torch.bfloat16, True), (90, 128, 129, torch.bfloat16, False), (90, 136, 64, torch.bfloat16, False),
    (90, 64, 64, torch.float32, False), (86, 128, 64, torch.float16, True), (86, 64, 128, torch.float16, True),
    (86, 128, 128, torch.float16, False), (120, 128, 128, torch.float16, False)))
def test_chosen_blocks_have_kernels_of_their_own_where_they_fit(monkeypatch, arch, width, block_size, dtype, taken):
    from attnzoo_kernels.routed import walk

    monkeypatch.setattr(walk, "architecture", lambda where: arch)
    x = torch.zeros(1, 1, width, dtype=dtype)
    assert walk.takes(x, x, block_size) == taken
