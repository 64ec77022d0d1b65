"""The Hopper kernels of chosen blocks: their numbers under the 2x rule, and what their launches promise."""

import pytest
import torch
from compiled_kernels import compiled_kernels
from test_routed import NAMES, check, run

from attnzoo_kernels import dispatch, routed_attention
from attnzoo_kernels.routed.cases import Case

SHARED_MEMORY = 232448
DTYPES = (torch.bfloat16, torch.float16)
CASES = [Case(dtype=dtype, **case) for dtype in DTYPES for case in (
    {"seqlen_q": 777, "heads": 4, "kv_heads": 2, "head_dim": 64, "block_size": 64, "slots": 3},
    {"seqlen_q": 1500, "heads": 16, "kv_heads": 1, "head_dim": 128, "block_size": 64, "slots": 7, "shared": True},
    {"batch": 2, "seqlen_q": 600, "heads": 12, "kv_heads": 2, "head_dim": 128, "value_dim": 64, "block_size": 64, "shared": True},
    {"seqlen_q": 500, "heads": 5, "kv_heads": 1, "head_dim": 64, "value_dim": 128, "block_size": 64, "slots": 4, "shared": True},
    {"lengths_q": (1, 0, 300, 65, 700, 63), "heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": 64, "slots": 3, "shared": True},
    {"lengths_q": (70, 0, 300, 5), "lengths_k": (500, 33, 400, 0), "heads": 4, "kv_heads": 4, "head_dim": 64, "block_size": 64},
    {"seqlen_q": 50, "seqlen_k": 900, "heads": 4, "kv_heads": 2, "head_dim": 128, "block_size": 64, "slots": 5, "shared": True},
    {"seqlen_q": 60, "heads": 2, "head_dim": 64, "block_size": 64, "slots": 3},  # no earlier block
    {"seqlen_q": 700, "heads": 2, "head_dim": 128, "block_size": 64, "slots": 12, "q_scale": 50.0},
    {"seqlen_q": 900, "heads": 4, "kv_heads": 1, "head_dim": 128, "block_size": 64, "shared": True, "strided": True},
    {"seqlen_q": 1300, "heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": 128, "slots": 4, "shared": True},
    {"lengths_q": (900, 0, 127, 400), "heads": 6, "kv_heads": 2, "head_dim": 64, "block_size": 128, "slots": 3, "shared": True},
)]


def taken(forward: str, backward: str) -> dict[str, list[str]]:
    return {"routed forward": [forward], "routed backward": [backward]}


@pytest.mark.hopper
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, poisoned):
    dispatch.forget()
    check(case, "gluon")
    kernels = {name: impls for name, impls in dispatch.implementations_taken().items() if name in taken("", "")}
    assert kernels == {name: impls + ["reference"] * (name == "routed forward")
                       for name, impls in taken("gluon", "gluon" if case.block_size == 64 else "triton").items()}


@pytest.mark.hopper
@pytest.mark.parametrize("impl, block_size, head_dim, forward, backward", (
    (None, 64, 128, "gluon", "gluon"), ("triton", 64, 128, "triton", "triton"), ("gluon", 128, 64, "gluon", "triton"),
    ("gluon", 32, 64, "triton", "triton"), (None, 64, 96, "triton", "triton")))
def test_which_kernels_take_the_chosen_blocks(impl, block_size, head_dim, forward, backward):
    dispatch.forget()
    run(Case(seqlen_q=300, head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16), impl)
    kernels = dispatch.implementations_taken()
    assert {name: kernels[name] for name in taken("", "")} == taken(forward, backward)


@pytest.mark.hopper
@pytest.mark.parametrize("rows", (4, 12))
def test_parts_do_not_depend_on_how_many_heads_a_program_takes(rows, monkeypatch):
    from attnzoo_kernels.routed import hopper, hopper_backward

    case = Case(seqlen_q=1000, heads=2 * rows, kv_heads=2, head_dim=128, block_size=64, slots=5, shared=True, dtype=torch.bfloat16)
    results = []
    for together in (1, 2, 4):
        for module in (hopper, hopper_backward):
            monkeypatch.setattr(module, "heads_together", lambda *_, heads=together: heads)
        results.append(run(case, "gluon"))
    for name in ("out", "lse", "dq"):  # dK and dV are added up in another order
        assert all(torch.equal(result[name], results[0][name]) for result in results)


@pytest.mark.hopper
@pytest.mark.parametrize("block_size", (64, 128))
def test_100_repeats_are_bitwise_equal(block_size):
    case = Case(lengths_q=(3000, 0, 1000, 77), heads=16, kv_heads=4, head_dim=128, block_size=block_size, slots=7, shared=True,
                dtype=torch.bfloat16)
    first = run(case, "gluon")
    for _ in range(100):
        again = run(case, "gluon")
        assert all(torch.equal(first[name], again[name]) for name in NAMES)


@pytest.mark.hopper
@pytest.mark.parametrize("block_size", (64, 128))
def test_nothing_depends_on_what_lies_beyond_a_sequence(block_size):
    bounds = torch.tensor([0, 100, 433, 500, 500], device="cuda", dtype=torch.int32)
    tensors = [torch.randn(520, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    blocks = torch.tensor([3, 1, 0], device="cuda", dtype=torch.int32).expand(520, 2, 3)
    rows, results = slice(100, 433), []
    poisoned = [torch.full_like(x, torch.nan) for x in tensors]
    for x, y in zip(poisoned, tensors, strict=True):
        x[rows] = y[rows]
    for q, k, v, dout in (tensors, poisoned):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = routed_attention(q, k, v, blocks, block_size=block_size, cu_seqlens_q=bounds, cu_seqlens_k=bounds, impl="gluon")
        out.backward(dout)
        assert all((x[500:] == 0).all() for x in (out, q.grad, k.grad, v.grad))
        results.append([x[rows] for x in (out, q.grad, k.grad, v.grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.hopper
def test_a_call_waits_for_nothing():
    case = Case(lengths_q=(100, 0, 333), heads=2, head_dim=64, block_size=64, dtype=torch.bfloat16)
    x = case.inputs("cuda")
    leaves = [t.detach().requires_grad_() for t in x[:3]]

    def call():
        return torch.autograd.grad(routed_attention(*leaves, x.blocks, impl="gluon", **x.options), leaves, x.dout)

    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
def test_tiles_fit_and_do_not_spill():
    kernels = compiled_kernels("routed_hopper_ahead_of_time.py")
    assert len(kernels) == 8
    wrong = [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY or kernel["complaints"] or kernel["stack"]]
    assert not wrong, "\n".join(map(str, wrong))
