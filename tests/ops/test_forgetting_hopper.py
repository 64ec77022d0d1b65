"""Forgetting attention's Gluon path: its numbers under the 2x rule, and what its launches promise."""

from dataclasses import replace

import pytest
import torch
from compiled_kernels import compiled_kernels
from test_forgetting import NAMES, run

from attnzoo_kernels import dispatch, forgetting_attention
from attnzoo_kernels.forgetting import ops
from attnzoo_kernels.forgetting.cases import LONG, Case
from benchmarks.accuracy import assert_accurate

pytestmark = pytest.mark.usefixtures("poisoned")
EDGES = tuple(Case(batch=2, seqlen_q=m, seqlen_k=n, heads=4, kv_heads=2, head_dim=d, value_dim=dv, window_size=window, gate=5.0)
              for d, dv in ((64, 64), (128, 128), (96, 64)) for m, n in ((192, 192), (777, 777), (333, 777), (777, 333))
              for window in ((-1, -1), (100, 0)))
PACKED = tuple(Case(lengths_q=(100, 0, 333, 1, 700), heads=4, kv_heads=2, head_dim=d, gate=gate, resets=0.02)
               for d in (64, 128) for gate in (-2.0, 6.0))
COVERED = [replace(case, dtype=dtype) for dtype in (torch.bfloat16, torch.float16) for case in LONG + EDGES + PACKED
           if case.head_dim <= 128]


@pytest.mark.hopper
@pytest.mark.parametrize("case", COVERED, ids=str)
def test_error_is_at_most_twice_that_of_eager(case):
    dispatch.forget()
    ours = run(case, "gluon", deterministic=False)
    covered = case.dtype == torch.bfloat16 and all(m == n for m, n in case.lengths)
    assert dispatch.implementations_taken() == {"forgetting forward": ["gluon"], "forgetting backward": ["gluon" if covered else "triton"]}
    assert_accurate(ours, run(case, "reference"), run(case, "reference", torch.float64))


@pytest.mark.hopper
@pytest.mark.parametrize("case", COVERED, ids=str)
def test_what_the_default_does_not_choose_keeps_the_rule_too(case):
    dispatch.forget()
    ours = run(case, "gluon", deterministic=False, prune=not ops.prunes(case.inputs().k, case.window_size[0], None))
    assert dispatch.implementations_taken()["forgetting forward"] == ["gluon"]
    assert_accurate(ours, run(case, "reference"), run(case, "reference", torch.float64))


# By a model of the kernels the gradient of log f breaks the rule here without the residual, and keeps it with the residual.
MEANS = tuple(replace(case, head_dim=d, gate=gate, mean=1.0, dtype=torch.bfloat16) for d in (64, 128) for gate in (4.0, 6.0) for case in (
    Case(seqlen_q=1024, heads=4), Case(seqlen_q=2048, heads=4, kv_heads=2), Case(lengths_q=(1000, 0, 300, 2048), heads=4)))


@pytest.mark.hopper
@pytest.mark.parametrize("case", MEANS, ids=str)
def test_keys_and_values_with_a_mean_keep_the_rule(case):
    dispatch.forget()
    ours = run(case, "gluon", deterministic=False)
    assert dispatch.implementations_taken() == {"forgetting forward": ["gluon"], "forgetting backward": ["gluon"]}
    assert_accurate(ours, run(case, "reference"), run(case, "reference", torch.float64))


@pytest.mark.hopper
@pytest.mark.parametrize("case", MEANS + (replace(MEANS[0], window_size=(100, 0)),), ids=str)
def test_the_residual_is_what_rounding_takes_from_the_output(case):
    """Weights are rounded, too, so that an error is left."""
    x = case.inputs("cuda")
    bounds = [x.options.get(f"cu_seqlens_{side}") for side in "qk"]
    numbers = "gluon", False, case.head_dim**-0.5, case.window_size[0], None
    out, residual, *_ = ops.forward(*x[:4], *bounds, True, *numbers)
    plain, nothing, *_ = ops.forward(*x[:4], *bounds, False, *numbers)
    assert torch.equal(out, plain) and nothing.numel() == 0
    exact = forgetting_attention(*(t.double() for t in x[:4]), impl="reference", **x.options)
    assert (residual.abs() <= out.abs() * 2.0**-8).all() and (residual != 0).double().mean() > 0.5
    assert torch.linalg.vector_norm(out.double() + residual - exact) < 0.9 * torch.linalg.vector_norm(out - exact)


# The gates of MOST and SOME leave nothing of a weight within a block, so that not even a bit may change. MOST is passed over for the most
# part, and its tiles of queries at head dim 64 lie in two blocks
MOST = tuple(replace(case, gate=-3.0, dtype=torch.bfloat16) for d in (64, 128) for kv_heads in (1, 4) for case in (
    *(Case(batch=2, seqlen_q=m, seqlen_k=n, heads=4, kv_heads=kv_heads, head_dim=d) for m, n in ((2048, 2048), (2000, 2000), (2048, 2100))),
    Case(lengths_q=(2048, 0, 100, 1999), heads=4, kv_heads=kv_heads, head_dim=d)))
SOME = tuple(replace(case, gate=-3.0, resets=0.0, dtype=torch.bfloat16) for case in EDGES + PACKED[::2]
             if case.packed or case.seqlen_q > 192)
NOTHING = tuple(replace(case, gate=6.0) for case in MOST)
SHARES = [*((case, 0.6, 0.9) for case in MOST), *((case, 0.01, 0.9) for case in SOME), *((case, 0, 0) for case in NOTHING)]


@pytest.mark.hopper
@pytest.mark.parametrize("case, least, most", SHARES, ids=str)
def test_pruning_keeps_the_rule(case, least, most):
    from attnzoo_kernels.forgetting.blocks import passed_over

    x = case.inputs("cuda")
    bounds = {name: bound for name, bound in x.options.items() if name.startswith("cu_seqlens")}
    assert least <= passed_over(x.q, x.k, x.log_f, softmax_scale=case.head_dim**-0.5, **bounds) <= most
    dispatch.forget()
    ours = run(case, "gluon", deterministic=False, prune=True)
    same = all(m == n for m, n in case.lengths)
    assert dispatch.implementations_taken() == {"forgetting forward": ["gluon"], "forgetting backward": ["gluon" if same else "triton"]}
    assert_accurate(ours, run(case, "reference"), run(case, "reference", torch.float64))


@pytest.mark.hopper
@pytest.mark.parametrize("case", MOST + SOME, ids=str)
def test_what_is_passed_over_changes_no_bit(case):
    every, pruned = (run(case, "gluon", deterministic=False, prune=prune) for prune in (False, True))
    assert [name for name in ("out", "lse", "dk", "dv") if not torch.equal(every[name], pruned[name])] == []


@pytest.mark.hopper
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_default_does_not_read_what_is_passed_over(head_dim, packed, kv_heads):
    lengths = {"lengths_q": (2048, 0, 100)} if packed else {"seqlen_q": 2048}
    case = Case(**lengths, heads=4, kv_heads=kv_heads, head_dim=head_dim, gate=-3.0, dtype=torch.bfloat16)
    for pruned, choice in ((False, {"impl": "gluon", "prune": False}), (True, {"impl": "gluon"}), (True, {})):
        x = case.inputs("cuda")
        q, k, v, log_f = (t.detach() for t in x[:4])
        v, dout = v.clone(), x.dout.clone()
        of_v, of_dout = (t if packed else t[0] for t in (v, dout))
        of_v[:128] = torch.nan  # a weight of zero times NaN is NaN
        of_dout[1920:2048] = torch.nan
        leaves = [t.requires_grad_() for t in (q, k, v)]
        dispatch.forget()
        out = forgetting_attention(*leaves, log_f, deterministic=False, **choice, **x.options)
        _, dk, dv = torch.autograd.grad(out, leaves, dout)
        assert dispatch.implementations_taken() == {"forgetting forward": ["gluon"], "forgetting backward": ["gluon"]}
        far = [t.detach() if packed else t.detach()[0] for t in (out, dk, dv)]
        assert far[0][512:2048].isfinite().all().item() == pruned
        assert all(t[512:1536].isfinite().all().item() == pruned for t in far[1:])
        if packed:
            assert all(t[2048:].isfinite().all() for t in far)


@pytest.mark.hopper
@pytest.mark.parametrize("case", [PACKED[0], Case(batch=2, seqlen_q=2048, heads=8, head_dim=128, gate=6.0)], ids=str)
def test_repeats_are_bitwise_equal(case):
    case = replace(case, dtype=torch.bfloat16)
    x = case.inputs("cuda")
    first = forgetting_attention(*x[:4], impl="gluon", return_lse=True, **x.options)
    for _ in range(250):
        again = forgetting_attention(*x[:4], impl="gluon", return_lse=True, **x.options)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    first, second = (run(case, "gluon", deterministic=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


@pytest.mark.tables
@pytest.mark.slow
def test_kernels_fit_and_spill_little():
    kernels = compiled_kernels("forgetting_hopper_ahead_of_time.py")
    assert {kernel["kernel"] for kernel in kernels} == {"hopper_fwd_kernel", "pair_bwd_kernel"}
    most = {("hopper_fwd_kernel", False): 8, ("hopper_fwd_kernel", True): 40, ("pair_bwd_kernel", False): 352}
    wrong = [kernel for kernel in kernels if kernel["shared"] > 232448 or kernel["complaints"]
             or kernel["stack"] > most[kernel["kernel"], kernel.get("residual", False)]]
    assert not wrong, "\n".join(map(str, wrong))
