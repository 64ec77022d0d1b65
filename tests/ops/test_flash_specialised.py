"""The plain forward whose warps Triton's compiler specialises: compiled ahead of time, and on a Hopper GPU under the 2x rule."""

from dataclasses import replace

import pytest
import torch
import triton
from busy_gpu import busy_gpu
from compiled_kernels import compiled_kernels
from test_flash import run

from attnzoo_kernels import flash_attention
from attnzoo_kernels.flash.cases import Case
from benchmarks.accuracy import error_ratio

pytestmark = pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="only Triton 3.6 takes descriptors of halved tiles")
hopper = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU")
PLAIN = Case(batch=2, seqlen_q=300, seqlen_k=256, heads=4, head_dim=128)
CAUSAL = Case(batch=2, seqlen_q=512, heads=4, head_dim=128, causal=True)
NARROW = replace(CAUSAL, head_dim=64)
CASES = [replace(case, dtype=dtype, **changes) for dtype in (torch.bfloat16, torch.float16) for case, changes in (
    (PLAIN, {}), (PLAIN, {"seqlen_q": 1025, "seqlen_k": 1024, "kv_heads": 1}), (PLAIN, {"seqlen_q": 1, "seqlen_k": 128}),
    (PLAIN, {"seqlen_k": 512, "value_dim": 96}), (PLAIN, {"batch": 5, "sinks": True}), (PLAIN, {"seqlen_k": 1152, "q_scale": 20.0}),
    (PLAIN, {"seqlen_q": 1023, "seqlen_k": 2048, "kv_heads": 2}),
    (CAUSAL, {}), (CAUSAL, {"seqlen_q": 1000, "seqlen_k": 1024, "kv_heads": 1}), (CAUSAL, {"seqlen_q": 1, "seqlen_k": 384}),
    (CAUSAL, {"seqlen_q": 200, "seqlen_k": 1152}), (CAUSAL, {"batch": 7, "sinks": True, "seqlen_q": 384}), (CAUSAL, {"value_dim": 96}),
    (CAUSAL, {"q_scale": 20.0, "seqlen_q": 2048, "heads": 40, "batch": 3}),
    (PLAIN, {"softcap": 5.0}), (CAUSAL, {"softcap": 5.0, "sinks": True, "seqlen_q": 1000, "seqlen_k": 1152, "kv_heads": 1}),
    (NARROW, {}), (NARROW, {"seqlen_q": 128, "seqlen_k": 384, "kv_heads": 1}), (NARROW, {"seqlen_q": 512, "heads": 80, "batch": 6}),
    (NARROW, {"batch": 7, "sinks": True, "seqlen_q": 384, "q_scale": 20.0}), (NARROW, {"value_dim": 40}))]


def is_specialised(case: Case, x) -> bool:
    """Whether this path computes the case."""
    from attnzoo_kernels.flash import forward, forward_specialised
    from attnzoo_kernels.flash.options import Options, layout

    options = Options.of(None, None, case.head_dim**-0.5, -1, 0 if case.causal else -1, case.softcap, 0.0)
    launch = forward._plan(x.q.device, x.q.dtype, True, case.sinks, layout(x.q), layout(x.k), layout(x.v), options)
    return isinstance(launch, forward_specialised.HalvedLaunch)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, poisoned):
    inputs = case.inputs("cuda")
    assert is_specialised(case, inputs)
    ours, eager, exact = run(case, inputs, "triton"), run(case, inputs, "reference"), run(case, inputs, "reference", torch.float64)
    ratios = {name: error_ratio(ours[name].detach(), eager[name].detach(), exact[name].detach()) for name in exact}
    assert max(ratios.values()) <= 1, {name: round(ratio, 2) for name, ratio in ratios.items()}


@pytest.mark.gpu
@hopper
def test_nothing_depends_on_what_lies_beyond_a_sequence():
    """Queries, keys and values of one sequence as parts of a larger tensor, which is NaN elsewhere."""
    results = []
    for filling in (0.0, torch.nan):
        everything = torch.full((3, 384, 4, 5, 128), filling, device="cuda", dtype=torch.bfloat16)
        torch.manual_seed(3)
        everything[1, :, :, 1:4] = torch.randn(384, 4, 3, 128)
        q, k, v = (everything[1:2, :, :, n] for n in (1, 2, 3))
        results.append(flash_attention(q[:, :333], k, v, return_lse=True, impl="triton"))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("case", (PLAIN, CAUSAL, NARROW), ids=str)
def test_no_compiling_for_a_new_length(case):
    """The first call compiles what other lengths take, too."""
    from triton import knobs

    compiled = []
    knobs.runtime.jit_post_compile_hook = lambda **event: compiled.append(event["fn"].name)
    try:
        for index, seqlen in enumerate((64, 128, 640, 999, 1, 8192)):
            x = replace(case, batch=index % 3 + 1, seqlen_q=seqlen, seqlen_k=seqlen, heads=3).inputs("cuda")
            flash_attention(x.q, x.k, x.v, causal=case.causal, impl="triton")
            if index == 0:
                before = len(compiled)
        assert len(compiled) == before, compiled[before:]
    finally:
        knobs.runtime.jit_post_compile_hook = None


@pytest.mark.gpu
@pytest.mark.slow
@hopper
@pytest.mark.parametrize("case", (replace(PLAIN, seqlen_q=4096, seqlen_k=4096), replace(CAUSAL, seqlen_q=4096),
                                  replace(NARROW, seqlen_q=512)), ids=str)
def test_no_tile_is_lost_where_another_process_shares_the_gpu(case):
    """A program that is stopped and resumed finds its shared memory as it left it, also what lies in place of barriers."""
    case = replace(case, batch=65536 // case.seqlen_q, heads=8)
    x = case.inputs("cuda")
    assert is_specialised(case, x)
    first = flash_attention(x.q, x.k, x.v, causal=case.causal, impl="triton")
    with busy_gpu():
        for _ in range(300):
            torch.full_like(first, torch.nan)  # the next output lies where this was
            assert torch.equal(flash_attention(x.q, x.k, x.v, causal=case.causal, impl="triton"), first)


@pytest.mark.slow
def test_the_compiler_specialises_the_warps_and_leaves_no_barrier_under_data():
    kernels = compiled_kernels("specialised_ahead_of_time.py")
    assert len(kernels) == 16
    for kernel in kernels:
        assert kernel["specialised"] and not kernel["stack"] and not kernel["clash"] and kernel["shared"] <= 232448, kernel
        assert kernel["unused_barriers"] == kernel["invalidated"] == [0, 8], kernel
