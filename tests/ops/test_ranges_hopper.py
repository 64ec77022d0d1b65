"""The Hopper kernels over key ranges: the rule, repeated launches, graphs, and what they do not take."""

from dataclasses import replace

import pytest
import torch
from compiled_kernels import compiled_kernels

from attnzoo_kernels import dispatch, flash_attention, tree_attention
from attnzoo_kernels.flash.range_cases import CORRECTNESS, TREE, RangeCase
from attnzoo_kernels.tree.cases import drawn, rollouts
from benchmarks.accuracy import assert_accurate

DTYPES = (torch.float16, torch.bfloat16)
SHARED_MEMORY = 232448
SPILLS = {"pair_bwd_kernel": 272}  # at head dim 64 in the loops with a mask, at 128 between the loops
MANY = tuple((n % 2990, n % 2990 + n % 11, n * 7 % 2900, n * 7 % 2900 + n % 97, n % 3) for n in range(10_000))
PACKED = tuple((a, b, a, b, 1) for a, b in ((0, 700), (700, 701), (701, 1900), (1900, 2500)))
CASES = (
    *(replace(case, head_dim=64, value_dim=None, softcap=0.0) for case in CORRECTNESS),
    RangeCase(lengths_q=(70,), head_dim=128, heads=4, kv_heads=2, ranges=TREE, label="tree"),
    RangeCase(lengths_q=(70,), head_dim=40, value_dim=96, ranges=TREE, window_size=(11, -1), label="tree"),
    RangeCase(lengths_q=(2500,), head_dim=128, heads=4, kv_heads=2, ranges=PACKED, label="packed"),
    RangeCase(lengths_q=(2500,), head_dim=64, ranges=PACKED, window_size=(300, -1), label="packed"),
    RangeCase(lengths_q=(3000,), lengths_k=(2999,), head_dim=64, kv_heads=1, ranges=MANY, label="many"),
    RangeCase(lengths_q=(3000,), lengths_k=(2999,), head_dim=128, ranges=MANY, window_size=(5, 20), label="many"),
)
TREES = (rollouts(1000, 300, 5, groups=2, heads=4, kv_heads=2, head_dim=128), drawn(300, 40, 1, head_dim=64),
         drawn(3000, 3, 2, head_dim=128), rollouts(500, 150, 3, heads=3, kv_heads=1, head_dim=128),
         rollouts(2048, 256, 4, heads=8, kv_heads=1, head_dim=64))


def run(attend, x, impl, dtype=None, **options):
    leaves = [t.to(dtype or t.dtype).detach().requires_grad_() for t in x[:3]]
    options = {name: t.to(dtype) if name == "sinks" and dtype else t for name, t in x.options.items()} | options
    out, lse = attend(*leaves, return_lse=True, impl=impl, **options)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    grads = torch.autograd.grad((out * x.dout).sum() + lse.sin().sum(), leaves)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads), strict=True))


@pytest.mark.hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("attend, case", [(flash_attention, case) for case in CASES] + [(tree_attention, case) for case in TREES],
                         ids=lambda x: getattr(x, "__name__", str(x)))
def test_kernels_keep_the_rule(attend, case, dtype):
    x = replace(case, dtype=dtype).inputs("cuda")
    dispatch.forget()
    ours = run(attend, x, "gluon", deterministic=False)
    assert dispatch.implementations_taken() == {"flash forward": ["gluon"], "flash backward": ["gluon"]}
    assert_accurate(ours, run(attend, x, "reference"), run(attend, x, "reference", torch.float64))


@pytest.mark.hopper
@pytest.mark.parametrize("case", (CASES[7], CASES[9]), ids=str)
def test_the_forward_repeats_bit_by_bit_in_graphs_too_and_a_backward_that_must_is_plain_tritons(case):
    x = case.inputs("cuda")
    first = run(flash_attention, x, "gluon", deterministic=True)
    for _ in range(20):
        assert all(torch.equal(first[name], again) for name, again in run(flash_attention, x, "gluon", deterministic=True).items())
    dispatch.forget()
    run(flash_attention, x, "gluon", deterministic=True)
    assert dispatch.implementations_taken()["flash backward"] == ["triton"]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attention(*x[:3], impl="gluon", **x.options)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, first["out"])


@pytest.mark.hopper
def test_nothing_waits():
    x = replace(CASES[7], dtype=torch.bfloat16).inputs("cuda")
    run(flash_attention, x, "gluon", deterministic=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        leaves = [t.detach().requires_grad_() for t in x[:3]]
        flash_attention(*leaves, impl="gluon", deterministic=False, **x.options).backward(x.dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
def test_tiles_fit_and_spill_little():
    kernels = compiled_kernels("ranges_hopper_ahead_of_time.py")
    assert len(kernels) == 6
    wrong = [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY or kernel["complaints"]
             or kernel["stack"] > SPILLS.get(kernel["kernel"], 0)]
    assert not wrong, "\n".join(map(str, wrong))
