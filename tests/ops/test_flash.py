"""flash_attention's kernels against the reference in float64, under the 2x rule; in the interpreter where there is no GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from paths import PATHS

from attnzoo_kernels import flash_attention
from attnzoo_kernels.dropout import keep_mask
from attnzoo_kernels.flash import ops as flash_ops
from attnzoo_kernels.flash import why_not_gluon
from attnzoo_kernels.flash.cases import CORRECTNESS, DROPOUT, Case
from benchmarks.accuracy import assert_accurate

GPU = torch.cuda.is_available()
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if GPU else (torch.float32, torch.float16)  # the interpreter gets bfloat16 wrong
CASES = [replace(case, dtype=dtype) for dtype in DTYPES for case in CORRECTNESS + DROPOUT
         if GPU or (max(max(pair) for pair in case.lengths) <= 300 and (dtype == torch.float32 or case.packed or case.seqlen_q == 113))]


def run(case: Case, inputs, impl: str, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Output, LSE and all gradients, of a loss on output and LSE; rows without a key have their LSE replaced by a number."""
    tensors = [x.to(dtype or x.dtype, copy=True).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    if case.strided:
        tensors = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() if dtype else x for x in tensors]
    options = dict(inputs.options)
    if case.sinks:
        options["sinks"] = options["sinks"].to(dtype or torch.float32, copy=True).requires_grad_()
    torch.manual_seed(5)
    out, lse = flash_attention(*tensors, **options, return_lse=True, impl=impl)
    dlse = torch.randn(lse.shape, generator=torch.Generator(lse.device).manual_seed(6), device=lse.device)
    torch.autograd.backward([out, lse], [inputs.dout.to(out.dtype), dlse.to(lse.dtype)])
    results = {"out": out, "lse": lse.masked_fill(lse == -torch.inf, 7.0)} | dict(zip(("dq", "dk", "dv"), (x.grad for x in tensors),
                                                                                      strict=True))
    if case.sinks:
        results["dsinks"] = options["sinks"].grad
    return results


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, device, poisoned):
    inputs = case.inputs(device)
    ours, eager, exact = run(case, inputs, "triton"), run(case, inputs, "reference"), run(case, inputs, "reference", torch.float64)
    assert_accurate(ours, eager, exact)


@pytest.mark.slow
@pytest.mark.parametrize("case", (Case(batch=2, seqlen_q=70, heads=4, kv_heads=2, head_dim=40, value_dim=56, causal=True, sinks=True),
                                  Case(lengths_q=(50, 0, 33), heads=2, head_dim=64, sinks=True)), ids=str)
def test_the_residual_is_what_rounding_takes_from_the_output(case, device):
    """Weights are rounded, too, so that an error is left."""
    x = replace(case, dtype=torch.float16).inputs(device)
    options = dict(x.options)
    bounds = [options.get(f"cu_seqlens_{side}") for side in "qk"]
    arguments = (None, options["sinks"], None, True, "triton", False, case.head_dim**-0.5, -1, 0 if case.causal else -1, 0.0, 0.0)
    out, _, _, residual = flash_ops.forward(x.q, x.k, x.v, *bounds, *arguments)
    exact = flash_attention(*(t.double() for t in x[:3]), **options | {"sinks": options["sinks"].double()}, impl="reference")
    wide = out.double() + residual
    assert (residual.abs() <= out.abs() * 2.0**-11 + 1e-7).all() and (residual != 0).double().mean() > 0.5
    assert torch.linalg.vector_norm(wide - exact) < 0.9 * torch.linalg.vector_norm(out - exact)
    assert not flash_ops.forward(x.q, x.k, x.v, *bounds, *arguments[:3], False, *arguments[4:])[3].numel()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [replace(case, dtype=torch.float32) for case in (CORRECTNESS[3], CORRECTNESS[-1], DROPOUT[1])], ids=str)
def test_repeated_runs_are_bitwise_equal(case, device):
    inputs = case.inputs(device)
    first = run(case, inputs, "triton")
    for _ in range(20):
        again = run(case, inputs, "triton")
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("case", (Case(batch=2, seqlen_q=70, heads=3, causal=True, dtype=torch.float16),
                                  Case(lengths_q=(40, 0, 25), heads=6, causal=True, dtype=torch.float16)), ids=str)
def test_how_many_heads_take_turns_changes_no_bit(case, device, monkeypatch):
    from attnzoo_kernels.flash import backward, forward
    from attnzoo_kernels.flash.options import Options

    inputs, results = case.inputs(device), []
    for together in (1, 2, 3, 6):
        monkeypatch.setattr(Options, "heads_together", lambda *_, together=together: together)
        for plan in (forward._plan, backward._dq_plan, backward._dkdv_plan):
            plan.cache_clear()
        results.append(run(case, inputs, "triton"))
    assert all(torch.equal(results[0][name], other[name]) for other in results[1:] for name in other)


@pytest.mark.parametrize("case", (Case(seqlen_q=50, head_dim=33, value_dim=17, causal=True, dtype=torch.float16),
                                  Case(lengths_q=(17, 0, 40), head_dim=40, value_dim=33, strided=True, dtype=torch.float16)), ids=str)
def test_widths_that_tma_cannot_read_are_copied_to_wider_ones(case, device, monkeypatch):
    monkeypatch.setattr("attnzoo_kernels._triton.launch.architecture", lambda where: 90)  # as on Hopper
    inputs = case.inputs(device)
    ours, eager, exact = run(case, inputs, "triton"), run(case, inputs, "reference"), run(case, inputs, "reference", torch.float64)
    assert ours["out"].is_contiguous()
    assert_accurate(ours, eager, exact)


def test_rows_without_a_key_are_zero_with_finite_gradients(device):
    case = Case(seqlen_q=40, seqlen_k=9, causal=True, dtype=torch.float32)
    for impl in PATHS:
        inputs = case.inputs(device)
        q, k, v = (x.requires_grad_() for x in inputs[:3])
        out, lse = flash_attention(q, k, v, causal=True, return_lse=True, impl=impl)
        assert (out[:, :31] == 0).all() and (lse[..., :31] == -torch.inf).all() and lse[..., 31:].isfinite().all()
        out.sum().backward()
        assert (q.grad[:, :31] == 0).all() and all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("impl", PATHS)
def test_a_sink_of_minus_infinity_is_no_sink(impl, device):
    """For queries that see no key as well."""
    tensors = torch.randn(3, 1, 8, 2, 16, device=device)
    results = []
    for sinks in (None, torch.full((2,), -torch.inf, device=device, requires_grad=True)):
        q, k, v = (x.clone().requires_grad_() for x in tensors)
        out, lse = flash_attention(q, k[:, :5], v[:, :5], causal=True, sinks=sinks, return_lse=True, impl=impl)
        loss = out.sum() + lse[:, :, 3:].sum()
        results.append([out, lse, *torch.autograd.grad(loss, (q, k, v), retain_graph=True)])
    assert not torch.autograd.grad(loss, sinks)[0].any()
    torch.testing.assert_close(*results)


def test_causal_picture_of_the_docstring(device):
    """Which keys reach which queries, from the weights themselves (values = identity)."""
    for rows, columns, picture in ((3, 5, "11100 11110 11111"), (5, 3, "000 000 100 110 111")):
        q, k = torch.zeros(1, rows, 1, 16, device=device), torch.zeros(1, columns, 1, 16, device=device)
        v = torch.eye(columns, device=device).view(1, columns, 1, columns)
        for impl in PATHS:
            seen = flash_attention(q, k, v, causal=True, impl=impl)[0, :, 0] > 0
            assert " ".join("".join(str(int(x)) for x in row) for row in seen) == picture


def test_a_window_beyond_32_bits_is_no_window(device):
    q, k, v = (torch.randn(1, 40, 2, 16, device=device) for _ in range(3))
    for impl in PATHS:
        for window, causal in (((2**31 - 1, 2**31 - 1), False), ((2**40, 5), True), ((-1, 2**30), False)):
            expected = flash_attention(q, k, v, causal=causal, impl=impl)
            assert torch.equal(flash_attention(q, k, v, causal=causal, window_size=window, impl=impl), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))  # on Hopper by pointers and by descriptors
@pytest.mark.parametrize("causal", (False, True))
def test_nothing_depends_on_what_lies_beyond_a_sequence(device, causal, dtype):
    """Packed sequences with NaN in their neighbours, and in the tokens behind the last one."""
    lengths = (33, 50, 19)
    total, bounds = 110, torch.tensor((0, *lengths), device=device).cumsum(0).int()
    cu_seqlens = torch.cat([bounds, bounds[-1:]])
    tensors = [torch.randn(total, 2, 32, device=device, generator=torch.Generator(device).manual_seed(i)).to(dtype) for i in range(4)]
    rows = slice(33, 83)
    poisoned = [x.clone() for x in tensors]
    for x in poisoned:
        x[: rows.start] = torch.nan
        x[rows.stop:] = torch.nan
    results = []
    for q, k, v, dout in (tensors, poisoned):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out, lse = flash_attention(q, k, v, causal=causal, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=50,
                                   max_seqlen_k=50,
                                   return_lse=True, impl="triton")
        out.backward(dout)
        assert (out[102:] == 0).all() and (lse[:, 102:] == -torch.inf).all()
        assert all((x.grad[102:] == 0).all() for x in (q, k, v))
        results.append([out[rows], lse[:, rows], *(x.grad[rows] for x in (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_dropout_mask_is_a_function_of_position(device):
    """The kernel drops what keep_mask says, whatever the tiles and lengths; the share of what stays is right."""
    values = 48
    q, k = torch.zeros(2, 70, 2, 16, device=device), torch.zeros(2, values, 2, 16, device=device)
    v = torch.eye(values, device=device).view(1, values, 1, values).expand(2, -1, 2, -1)
    torch.manual_seed(1)
    weights = flash_attention(q, k, v, dropout_p=0.3, impl="triton")
    torch.manual_seed(1)
    rng_state = torch.randint(0, 2**31 - 1, (2,), device=device)
    keep, probability = keep_mask(rng_state, 0.3, (2, 2, 70, values))
    assert torch.equal(weights.transpose(1, 2) > 0, keep)
    assert torch.equal(keep_mask(rng_state, 0.3, (2, 2, 16, 16))[0], keep[:, :, :16, :16])
    differs = keep[:, :, :, :16] != keep[:, :, :, 16:32]  # pairs whose fields share bits
    for sample, expected in ((keep, probability), (differs, 2 * probability * (1 - probability))):
        assert abs(sample.double().mean().item() - expected) < 5 * (expected * (1 - expected) / sample.numel()) ** 0.5
    torch.testing.assert_close(weights[weights > 0], torch.full_like(weights[weights > 0], 1 / values / probability))


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("impl", ("triton", "cpu", "reference"))
def test_parts_of_queries_drop_what_the_whole_drops(impl, packed, device):
    """dropout_state says which rows of its sequence's mask a part has; they need not begin where tiles do."""
    if impl == "cpu" and device == "cuda":
        pytest.skip("takes CPU tensors")
    generator = torch.Generator(device).manual_seed(0)
    rows, bounds = ((150,), (0, 60, 60, 150)) if packed else ((2, 150), None)
    tensors = [torch.randn(*rows, 2, width, device=device, generator=generator).requires_grad_() for width in (16, 16, 24)]
    q, k, v = tensors
    dout, seed = torch.randn(*rows, 2, 24, device=device, generator=generator), torch.tensor([123, 7], device=device)
    options = {"dropout_p": 0.3, "impl": impl}

    def lengths(of_q):
        names = ("cu_seqlens_q", "cu_seqlens_k")
        return {name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in zip(names, (of_q, bounds), strict=True)}

    whole = flash_attention(q, k, v, dropout_state=seed, **options, **(lengths(bounds) if packed else {}))
    expected = torch.autograd.grad(whole, tensors, dout)
    outs, of_q, of_k, of_v = [], [], 0, 0
    for begin, end in ((0, 37), (37, 101), (101, 150)):
        at, own = (slice(begin, end),) if packed else (slice(None), slice(begin, end)), {}
        first = [max(begin - n, 0) for n in bounds[:-1]] if packed else [begin, begin]
        if packed:
            own = lengths([min(max(n - begin, 0), end - begin) for n in bounds])
        part = q.detach()[at].requires_grad_()
        out = flash_attention(part, k, v, dropout_state=torch.cat([seed, torch.tensor(first, device=device)]), **options, **own)
        dq, dk, dv = torch.autograd.grad(out, (part, k, v), dout[at])
        outs.append(out), of_q.append(dq)
        of_k, of_v = of_k + dk, of_v + dv
    found = torch.cat(outs, -3), torch.cat(of_q, -3), of_k, of_v
    for one, other in zip(found, (whole, *expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_dropout_states_are_checked():
    x = torch.randn(2, 5, 1, 8)
    for state, error, message in (
            (torch.zeros(2), TypeError, "dropout_state: must be an int64 tensor, got torch.float32"),
            (torch.zeros(2, dtype=torch.int64).to_sparse(), TypeError, "dropout_state: must be a dense tensor, got torch.sparse_coo"),
            (torch.zeros(3, dtype=torch.int64), ValueError, r"dropout_state: must have shape \(2,\) or \(4,\), got \(3,\)"),
            (torch.zeros(4, dtype=torch.int64)[::2], ValueError, "dropout_state: must be contiguous, got stride 2")):
        with pytest.raises(error, match=message):
            flash_attention(x, x, x, dropout_p=0.1, dropout_state=state)


def test_reference_gradients_by_gradcheck():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 4, dtype=torch.float64, requires_grad=True) for n, h in ((5, 4), (7, 2), (7, 2)))
    sinks, slopes = torch.randn(4, dtype=torch.float64, requires_grad=True), torch.rand(4, dtype=torch.float64)

    def call(q, k, v, sinks):
        return flash_attention(q, k, v, sinks=sinks, alibi_slopes=slopes, softcap=2.0, window_size=(3, 2), return_lse=True)

    assert torch.autograd.gradcheck(call, (q, k, v, sinks))
    assert torch.autograd.gradgradcheck(lambda *x: call(*x)[0], (q, k, v, sinks))


@pytest.mark.parametrize("changes, error, message", [
    ({"q": torch.zeros(2, 8, 3, 16)}, ValueError, "k: its 2 heads must divide q's 3"),
    ({"k": torch.zeros(2, 8, 2, 8)}, ValueError, "k: head_dim must be q's 16, got 8"),
    ({"v": torch.zeros(2, 9, 2, 16)}, ValueError, r"v: must have k's leading shape \(2, 8\), got \(2, 9\)"),
    ({"v": torch.zeros(2, 8, 2, 16, dtype=torch.float16)}, TypeError, "v: must have q's dtype torch.float32, got torch.float16"),
    ({"q": torch.zeros(2, 8, 16, 4).transpose(2, 3)}, ValueError, "q: last dimension must be contiguous, got stride 4"),
    ({"q": torch.zeros(2, 8, 4, 16, dtype=torch.float8_e4m3fn)}, TypeError, "q: must be float16, bfloat16, float32 or .by the reference. "
     "float64, got torch.float8_e4m3fn; flash_attention_fp8 takes float8_e4m3fn"),
    ({"q": torch.zeros(2, 8, 4, 16, dtype=torch.int32)}, TypeError, "q: must be float16.*got torch.int32$"),
    ({"q": torch.zeros(8, 4, 16)}, ValueError, "q: must be .batch, seqlen, heads, head_dim., got shape"),
    ({"q": torch.zeros(2, 8, 4, 300), "k": torch.zeros(2, 8, 2, 300)}, ValueError, "q: width must be 1 to 256, got 300"),
    ({"dropout_p": 1.0}, ValueError, r"dropout_p: must lie in \[0, 1\), got 1.0"),
    ({"window_size": (4,)}, ValueError, "window_size: must be two ints"),
    ({"softcap": -1.0}, ValueError, "softcap: must be at least 0"),
    ({"sinks": [0.0] * 4}, TypeError, "sinks: must be a float32 tensor, got list"),
    ({"sinks": torch.zeros(3)}, ValueError, r"sinks: must have shape \(4,\), got \(3,\)"),
    ({"alibi_slopes": torch.zeros(4, dtype=torch.float16)}, TypeError, "alibi_slopes: must be float32"),
    ({"alibi_slopes": torch.zeros(8)[::2]}, ValueError, "alibi_slopes: last dimension must be contiguous, got stride 2"),
    ({"sinks": torch.zeros(()).expand(4)}, ValueError, "sinks: last dimension must be contiguous, got stride 0"),
    ({"window_size": (True, False)}, ValueError, r"window_size: must be two ints .* got \(True, False\)"),
    ({"dropout_p": "0.1"}, TypeError, r"dropout_p: must be a number in \[0, 1\), got '0.1'"),
    ({"dropout_p": None}, TypeError, r"dropout_p: must be a number in \[0, 1\), got None"),
    ({"softcap": None}, TypeError, r"softcap: must be a number of at least 0 \(0 is off\), got None"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale: must be a finite number, or None for head_dim .. -0.5, got nan"),
    ({"softmax_scale": -float("inf")}, ValueError, "softmax_scale: must be a finite number, or None for head_dim .. -0.5, got -inf"),
    ({"softmax_scale": "x"}, TypeError, "softmax_scale: must be a finite number, .* got 'x'"),
    ({"softmax_scale": True}, TypeError, "softmax_scale: must be a finite number, .* got True"),
    ({"softmax_scale": torch.ones(2)}, TypeError, r"softmax_scale: must be a finite number, .* got Tensor of shape \(2,\); .item.. makes"),
    ({"causal": "no"}, TypeError, "causal: must be True or False, got 'no'"),
    ({"causal": torch.ones(8, 8)}, TypeError, r"causal: must be True or False, got Tensor of shape \(8, 8\)"),
    ({"deterministic": "yes"}, TypeError, "deterministic: must be True or False or None, got 'yes'"),
    ({"softcap": float("inf")}, ValueError, "softcap: must be at least 0 .0 is off. and finite, got inf"),
    ({"impl": "cuda"}, ValueError, "impl: must be None or one of 'gluon', 'triton', 'cpu', 'reference', got 'cuda'"),
    ({"cu_seqlens_q": torch.tensor([0, 8])}, ValueError, r"q: must be \(total, heads, head_dim\)"),
    ({"impl": "triton", "alibi_slopes": torch.zeros(4, requires_grad=True)}, NotImplementedError,
     "alibi_slopes: only impl=\"reference\" has a gradient for it"),
    ({"impl": "triton", "q": torch.zeros(2, 8, 4, 16).double(), "k": torch.zeros(2, 8, 2, 16).double(), "v": torch.zeros(2, 8, 2,
                                                                                                                         16).double()},
     NotImplementedError, "q: impl=\"triton\" takes float16, bfloat16 and float32, got torch.float64"),
])
def test_errors_name_the_argument(changes, error, message):
    arguments = {"q": torch.zeros(2, 8, 4, 16), "k": torch.zeros(2, 8, 2, 16), "v": torch.zeros(2, 8, 2, 16)} | changes
    if GPU and arguments.get("impl") == "triton":
        arguments = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    with pytest.raises(error, match=message):
        flash_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_learned_slopes_are_taken_where_no_gradient_is_asked_for(device):
    q, k, v, slopes = *torch.randn(3, 1, 5, 2, 16, device=device), torch.ones(2, device=device, requires_grad=True)
    with torch.no_grad():
        out = flash_attention(q, k, v, alibi_slopes=slopes, impl="triton")
    assert torch.equal(out, flash_attention(q, k, v, alibi_slopes=slopes.detach(), impl="triton"))


def test_why_not_gluon_names_what_is_no_tensor():
    q = torch.zeros(2, 8, 4, 16)
    with pytest.raises(TypeError, match="q: must be a tensor, got list"):
        why_not_gluon([], q, q)
    assert why_not_gluon(q, q, q) == "q must be on a CUDA device, got cpu"


@pytest.mark.parametrize("scale", (2, np.float32(2), np.float64(2)))
def test_any_kind_of_number_is_a_scale(scale):
    q = torch.randn(1, 8, 2, 16)
    assert torch.equal(flash_attention(q, q, q, softmax_scale=scale), flash_attention(q, q, q, softmax_scale=2.0))


@pytest.mark.parametrize("change, error, message", [
    ({"cu_seqlens_k": None}, ValueError, "cu_seqlens_k: packed input needs cu_seqlens_q and cu_seqlens_k both"),
    ({"cu_seqlens_q": [0, 4, 8]}, TypeError, r"cu_seqlens_q: must be an int32 tensor of shape \(sequences \+ 1,\), got list; torch.tensor"),
    ({"cu_seqlens_q": torch.tensor([0, 4, 8])}, TypeError, "cu_seqlens_q: must be int32, got torch.int64"),
    ({"cu_seqlens_q": torch.tensor([0, 8], dtype=torch.int32)}, ValueError, "cu_seqlens_k: must have cu_seqlens_q's shape"),
    ({"max_seqlen_q": "4"}, ValueError, "max_seqlen_q: must be an integer of at least 0, got '4'"),
    ({"max_seqlen_k": torch.tensor(4)}, TypeError, "max_seqlen_k: must be a Python int"),
    ({"max_seqlen_k": 3}, ValueError, "max_seqlen_k: must be at least the longest sequence's 4, got 3"),
    ({"cu_seqlens_q": torch.tensor([0, 4, 9], dtype=torch.int32)}, ValueError, "cu_seqlens_q: must rise from 0 to at most the 8 tokens"),
])
def test_packed_errors_name_the_argument(change, error, message):
    x, cu_seqlens = torch.zeros(8, 2, 16), torch.tensor([0, 4, 8], dtype=torch.int32)
    packed = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": 4, "max_seqlen_k": 4}
    with pytest.raises(error, match=message):
        flash_attention(x, x, x, **(packed | change))
