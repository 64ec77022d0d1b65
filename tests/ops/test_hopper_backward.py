"""The Gluon backward on a Hopper GPU against the reference in float64, under the 2x rule, behind the plain forward."""

from dataclasses import replace

import pytest
import torch

from attnzoo_kernels import flash_attention
from attnzoo_kernels.flash.cases import CORRECTNESS, Case
from benchmarks.accuracy import assert_accurate

pytestmark = pytest.mark.hopper
COVERED = [case for case in CORRECTNESS
           if not (case.softcap or case.alibi or case.sinks) and 32 < max(case.head_dim, case.value_dim or 0) <= 128
           and case.head_dim % 8 == 0 and (case.value_dim or 8) % 8 == 0]
EXTRA = (
    Case(batch=2, seqlen_q=1000, heads=4, kv_heads=2, head_dim=128, causal=True),
    Case(batch=2, seqlen_q=700, seqlen_k=900, heads=4, kv_heads=1, head_dim=128),
    Case(seqlen_q=900, seqlen_k=333, heads=2, head_dim=128, causal=True),  # many queries see no key, many keys whole tiles of them
    Case(seqlen_q=1025, head_dim=96, window_size=(200, 100)),
    Case(seqlen_q=1025, head_dim=64, window_size=(300, 0), causal=True, heads=4, kv_heads=2),
    Case(seqlen_q=400, seqlen_k=1300, head_dim=128, window_size=(-1, 77)),
    *(Case(lengths_q=(300, 0, 64, 129, 1000, 1), heads=4, kv_heads=2, head_dim=d, causal=causal)
      for d in (64, 128) for causal in (False, True)),
    Case(lengths_q=(300, 0, 64, 129, 1000, 7), lengths_k=(200, 5, 128, 700, 900, 0), heads=4, kv_heads=2, head_dim=128, causal=True),
    *(Case(lengths_q=tuple(n * 37 % 90 for n in range(sequences)), head_dim=64, causal=True) for sequences in (33, 1100)),
    Case(lengths_q=(500, 300), head_dim=96, window_size=(100, 30)),
    Case(lengths_q=(400, 700, 130), heads=2, head_dim=64, strided=True, causal=True),
    Case(batch=5, seqlen_q=1024, heads=8, head_dim=64, causal=True),  # more tiles than multiprocessors
    *(Case(seqlen_q=4160, seqlen_k=4200, heads=5, head_dim=d) for d in (64, 128)),
    Case(seqlen_q=4090, seqlen_k=3500, heads=10, kv_heads=5, head_dim=64),
)
CASES = [replace(case, dtype=dtype) for dtype in (torch.bfloat16, torch.float16) for case in (*COVERED, *EXTRA)]


def prepared(case: Case):
    """The arguments of launch_backward for the case, but for `deterministic`, and the gradient of the LSE among them."""
    from attnzoo_kernels.flash.forward import launch_forward
    from attnzoo_kernels.flash.options import Options

    inputs = case.inputs("cuda")
    right = 0 if case.causal else case.window_size[1]
    bounds = inputs.options.get("cu_seqlens_q"), inputs.options.get("cu_seqlens_k")
    options = Options.of(bounds[0], None, case.head_dim**-0.5, case.window_size[0], right, 0.0, 0.0)
    out, lse, stats = launch_forward(inputs.q, inputs.k, inputs.v, *bounds, None, None, None, options)
    dlse = torch.randn(lse.shape, generator=torch.Generator("cuda").manual_seed(6), device="cuda")
    return (inputs.dout, dlse, inputs.q, inputs.k, inputs.v, out, stats, *bounds, options), inputs


def reference(case: Case, inputs, dlse: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = [x.to(dtype, copy=True).requires_grad_() for x in inputs[:3]]
    out, lse = flash_attention(*tensors, **inputs.options, return_lse=True, impl="reference")
    torch.autograd.backward([out, lse], [inputs.dout.to(dtype), dlse.to(lse.dtype)])
    return dict(zip(("dq", "dk", "dv"), (x.grad for x in tensors), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("deterministic", (False, True))
def test_error_is_at_most_twice_that_of_eager(case, deterministic, poisoned):
    from attnzoo_kernels.flash.hopper_backward import backward_reason, launch_backward

    arguments, inputs = prepared(case)
    assert backward_reason(*arguments[2:5], arguments[-1]) is None
    ours = dict(zip(("dq", "dk", "dv"), launch_backward(*arguments, deterministic), strict=False))
    eager, exact = (reference(case, inputs, arguments[1], dtype) for dtype in (case.dtype, torch.float64))
    assert_accurate(ours, eager, exact)


@pytest.mark.parametrize("case", [replace(case, dtype=torch.bfloat16) for case in EXTRA], ids=str)
@pytest.mark.parametrize("deterministic", (False, True))
def test_error_with_dq_a_step_late(case, deterministic, poisoned):
    from attnzoo_kernels._gluon.backward_plan import pair_tile
    from attnzoo_kernels.flash.hopper_backward import launch_backward

    arguments, inputs = prepared(case)
    tile = replace(pair_tile(64 if max(case.head_dim, case.value_dim or 0) <= 64 else 128, deterministic), dq_lags=True)
    ours = dict(zip(("dq", "dk", "dv"), launch_backward(*arguments, deterministic, tile), strict=False))
    eager, exact = (reference(case, inputs, arguments[1], dtype) for dtype in (case.dtype, torch.float64))
    assert_accurate(ours, eager, exact)


@pytest.mark.parametrize("case", [
    *(Case(batch=3, seqlen_q=1500, heads=16, kv_heads=8, head_dim=d, causal=causal) for d in (64, 128) for causal in (False, True)),
    *(Case(lengths_q=(1000, 0, 3000, 77, 400), heads=8, head_dim=d, causal=True) for d in (64, 128)),
    Case(seqlen_q=4500, heads=8, head_dim=64, causal=True)], ids=str)
def test_ordered_gradients_repeat_bit_by_bit(case):
    from attnzoo_kernels.flash.hopper_backward import launch_backward

    arguments, _ = prepared(case)
    *first, of_sinks = launch_backward(*arguments, True)
    assert of_sinks is None
    for _ in range(250):
        assert all(torch.equal(a, b) for a, b in zip(first, launch_backward(*arguments, True)[:3], strict=True))


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("causal", (False, True))
def test_nothing_depends_on_what_lies_beyond_a_sequence(head_dim, causal):
    from attnzoo_kernels.flash.hopper_backward import launch_backward

    (dout, dlse, q, k, v, out, stats, *bounds, options), _ = prepared(
        Case(lengths_q=(100, 333, 67), heads=4, kv_heads=2, head_dim=head_dim, causal=causal))
    rows = slice(100, 433)
    results = []
    for poison in (False, True):
        tensors = [x.clone() for x in (dout, q, k, v, out)]
        for x in tensors:
            if poison:
                x[: rows.start] = torch.nan
                x[rows.stop:] = torch.nan
        grads = launch_backward(tensors[0], dlse, *tensors[1:], stats, *bounds, options, True)
        results.append([x[rows] for x in grads[:3]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("changes, options, words", [
    ({"dtype": torch.float32}, {}, "dtype must be float16 or bfloat16"),
    ({"head_dim": 192}, {}, "must be 33 to 128"),
    ({"head_dim": 111}, {}, "widths of multiples of 8"),
    ({}, {"softcap": 5.0}, "no softcap"),
])
def test_what_is_not_covered_has_a_reason(changes, options, words):
    from attnzoo_kernels.flash.hopper_backward import backward_reason

    arguments, _ = prepared(Case())
    q, k, v, _ = replace(Case(), **changes).inputs("cuda")[:4]
    assert words in backward_reason(q, k, v, replace(arguments[-1], **options))
