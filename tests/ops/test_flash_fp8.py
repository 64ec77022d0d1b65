"""FP8 attention: its quantisation, its numbers under the 2x rule, and what its launches promise."""

from dataclasses import replace

import pytest
import torch
from busy_gpu import busy_gpu
from compiled_kernels import compiled_kernels

from attnzoo_kernels import flash_attention, flash_attention_fp8, quantize_fp8
from attnzoo_kernels.flash.cases import Case
from attnzoo_kernels.flash_fp8 import BLOCK, Fp8Inputs, why_not_gluon
from attnzoo_kernels.flash_fp8.cases import CORRECTNESS, with_outliers
from attnzoo_kernels.flash_fp8.reference import LARGEST, flash_fp8_reference, rotation, spread
from benchmarks import flash_fp8
from benchmarks.accuracy import assert_accurate, error_ratio
from benchmarks.flash_fp8 import tensor_cores

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SMALL = Case(batch=2, seqlen_q=300, heads=4, kv_heads=2, head_dim=64)


def values(x: Fp8Inputs) -> list[torch.Tensor]:
    """What the e4m3 values and their scales stand for, in float64."""
    return [t.double() * spread(s, t.double()) for t, s in zip(x[:3], x[3:], strict=True)]


def held_by_e4m3(case: Case, hadamard: bool, device: str) -> list[torch.Tensor]:
    """q, k, v whose scales are 1 and whose quantisation, rotation included, rounds nothing."""
    generator = torch.Generator(device).manual_seed(0)
    tensors = [torch.randint(-16, 17, x.shape, generator=generator, device=device).double() for x in case.inputs(device)[:3]]
    for x in tensors:
        x[:, ::BLOCK, :, 3] = LARGEST
    if hadamard:
        tensors = [x @ rotation(x.shape[-1], device).mT for x in tensors[:2]] + tensors[2:]
    return [x.to(case.dtype) for x in tensors]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("case", (SMALL, replace(SMALL, seqlen_q=1, seqlen_k=77)), ids=str)
@pytest.mark.parametrize("block", (None, BLOCK))
@pytest.mark.parametrize("hadamard", (False, True))
def test_quantisation_is_the_references(dtype, case, block, hadamard, device, poisoned):
    inputs = held_by_e4m3(replace(case, dtype=dtype), hadamard, device)
    ours, theirs = (quantize_fp8(*inputs, block=block, hadamard=hadamard, impl=impl) for impl in ("triton", "reference"))
    assert all((scale == 1).all() for scale in ours[3:]) and ours.q.float().abs().max() == LARGEST and ours.v.stride(1) == 1
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("block", (None, BLOCK))
def test_numbers_whose_scale_has_no_finite_inverse_become_zeros(block, device, poisoned):
    tiny = [t.float() * 2.0**-125 for t in SMALL.inputs(device)[:3]]
    for x in tiny:
        x[:, 0] = 0
    for impl in ("triton", "reference"):
        quantized = quantize_fp8(*tiny, block=block, impl=impl)
        assert all(not t.float().any() for t in quantized[:3]) and all((scale == 1).all() for scale in quantized[3:])
    quantized = quantize_fp8(*(x * 2.0**10 for x in tiny), block=block, impl="reference")
    assert all(t.float().abs().max() == LARGEST for t in quantized[:3])


@pytest.mark.gpu  # Triton's interpreter rounds otherwise: ties away from zero, and a carry into the exponent is lost
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("case", (SMALL, replace(SMALL, seqlen_q=1, seqlen_k=77, head_dim=96), replace(SMALL, strided=True)), ids=str)
@pytest.mark.parametrize("block", (None, BLOCK))
def test_rounding_is_the_references(dtype, case, block, poisoned):
    inputs = replace(case, dtype=dtype).inputs("cuda")[:3]
    ours, theirs = (quantize_fp8(*inputs, block=block, impl=impl) for impl in ("triton", "reference"))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("block", (None, BLOCK))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_rotation_in_the_kernel_is_as_right_as_eagers(block, head_dim):
    x = with_outliers(replace(SMALL, head_dim=head_dim).inputs("cuda"))
    ours, theirs = (values(quantize_fp8(*x[:3], block=block, hadamard=True, impl=impl)) for impl in ("triton", "reference"))
    matrix = rotation(head_dim, "cuda")
    for a, b, exact in zip(ours, theirs, (x.q.double() @ matrix, x.k.double() @ matrix, x.v.double()), strict=True):
        assert_accurate(a, b, exact)


@pytest.mark.parametrize("width", (16, 64, 128, 256))
def test_rotation_keeps_products_and_spreads_outliers(width):
    matrix = rotation(width)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(width, dtype=torch.float64))
    assert (matrix.abs() - width**-0.5).abs().max() < 1e-12  # a single outlier is the same everywhere
    offset = torch.ones(width, dtype=torch.float64) @ matrix  # of all columns: signs keep it from meeting in one
    assert offset.abs().max() <= 0.5 * width**0.5


@pytest.mark.parametrize("block", (None, BLOCK))
@pytest.mark.parametrize("hadamard", (False, True))
def test_values_reach_the_largest_and_stand_for_the_inputs(block, hadamard):
    case = replace(SMALL, dtype=torch.float64)
    x = case.inputs()
    quantized = quantize_fp8(*(t.float() for t in x[:3]), block=block, hadamard=hadamard)
    assert all(t.float().abs().max() == LARGEST for t in quantized[:3])
    q, k, v = values(quantized)
    exact = flash_attention(*x[:3], **x.options)
    out = flash_attention(q, k, v, **x.options)
    assert (out - exact).square().mean() < 2 * 2**-8 * exact.square().mean()  # three bits of mantissa in each of q, k and v


@pytest.mark.parametrize("block", (None, BLOCK))
@pytest.mark.parametrize("causal", (False, True))
def test_reference_is_flash_attentions_on_the_values(block, causal, device):
    inputs = quantize_fp8(*replace(SMALL, seqlen_k=200, dtype=torch.float32).inputs(device)[:3], block=block, impl="reference")
    exact, lse = flash_attention(*values(inputs), causal=causal, return_lse=True, impl="reference")
    ours = flash_fp8_reference(**inputs._asdict(), causal=causal, softmax_scale=SMALL.head_dim**-0.5, dtype=torch.float64)
    torch.testing.assert_close(ours, (exact, lse))
    out, lse32 = flash_attention_fp8(**inputs._asdict(), causal=causal, return_lse=True, out_dtype=torch.float32, impl="reference")
    torch.testing.assert_close((out.double(), lse32.double()), (exact, lse), rtol=1e-4, atol=1e-4)


def ratios(inputs: dict, causal: bool, dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """Of the Gluon path's output and LSE, against eager products of e4m3 and e4m3 weights."""
    out, lse = flash_attention_fp8(**inputs, causal=causal, return_lse=True, out_dtype=dtype, impl="gluon")
    options = inputs | {"causal": causal, "softmax_scale": inputs["q"].shape[-1] ** -0.5}
    options |= {f"{name}_descale": None for name in "qkv" if f"{name}_descale" not in inputs}
    eager = flash_fp8_reference(**options, product=tensor_cores)
    exact = flash_fp8_reference(**options, dtype=torch.float64)
    rows = [x.masked_fill(x == -torch.inf, 7.0) for x in (lse, eager[1], exact[1])]
    return {"out": error_ratio(out, eager[0].to(dtype), exact[0]), "lse": error_ratio(*rows)}


@pytest.mark.hopper
@pytest.mark.parametrize("case", CORRECTNESS, ids=str)
@pytest.mark.parametrize("block", (None, BLOCK))
def test_error_is_at_most_twice_that_of_eager(case, block, poisoned):
    inputs = quantize_fp8(*with_outliers(case.inputs("cuda"))[:3], block=block, hadamard=case.head_dim in (64, 128))._asdict()
    found = ratios(inputs, case.causal)
    assert max(found.values()) <= 1, found


@pytest.mark.hopper
@pytest.mark.parametrize("head_dim", (64, 128))
def test_long_sums_keep_their_small_bits(head_dim):
    """Values of one sign: what matrix instructions add up alone over 16384 keys is 18 % too small."""
    x = Case(seqlen_q=256, seqlen_k=16384, heads=1, head_dim=head_dim).inputs("cuda")
    found = ratios(quantize_fp8(x.q, x.k, x.v + 1)._asdict(), False)
    assert max(found.values()) <= 1, found


@pytest.mark.hopper
@pytest.mark.parametrize("block", (None, BLOCK))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_rows_without_a_positive_score(head_dim, causal, block):
    """Scores of most rows are negative, with all keys or with the last ones, where a walk begins: other steps take maxima there."""
    x = Case(batch=2, seqlen_q=640, heads=4, kv_heads=2, head_dim=head_dim).inputs("cuda")
    q, k = x.q + 1, x.k - 2
    k[1, :512] += 4
    q[:, 64:128] -= 1
    inputs = quantize_fp8(q, k, x.v, block=block)
    found = ratios(inputs._asdict(), causal)
    assert max(found.values()) <= 1, found


@pytest.mark.hopper
@pytest.mark.parametrize("causal", (False, True))
def test_layouts_and_scales_that_others_bring(causal):
    """No scales, some, values column by column, keys that end with their memory, heads first, another output dtype."""
    case = replace(SMALL, seqlen_q=333, seqlen_k=333, causal=causal)
    inputs = quantize_fp8(*case.inputs("cuda")[:3])._asdict()
    plain = {name: x.clone(memory_format=torch.contiguous_format) for name, x in inputs.items()}
    assert plain["k"].untyped_storage().nbytes() == plain["k"].numel() and plain["v"].stride(-1) == 1
    expected = flash_attention_fp8(**inputs, causal=causal)
    assert torch.equal(flash_attention_fp8(**plain, causal=causal), expected)
    for name in "qkv":
        plain[name] = plain[name].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(flash_attention_fp8(**plain, causal=causal), expected)
    tensors = {name: inputs[name] for name in "qkv"}
    for some in ({}, {"v_descale": inputs["v_descale"]}):
        assert max(ratios(tensors | some, causal).values()) <= 1
    assert max(ratios(inputs, causal, torch.float16).values()) <= 1


@pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="needs compute capability 9.0, or the reference on a CPU")
@pytest.mark.parametrize("block", (None, BLOCK))
@pytest.mark.parametrize("name", ("q_descale", "k_descale", "v_descale"))
@pytest.mark.parametrize("wrong", (-1.0, 0.0, torch.inf, torch.nan))
def test_a_scale_that_is_not_positive_and_finite_gives_nan(block, name, wrong, device):
    inputs = quantize_fp8(*replace(SMALL, dtype=torch.float32).inputs(device)[:3], block=block)._asdict()
    right = flash_attention_fp8(**inputs, return_lse=True)
    inputs[name][1, 0] *= wrong  # of the second sequence's first key head, or of all of its blocks
    out, lse = flash_attention_fp8(**inputs, return_lse=True)
    assert out[1, :, :2].isnan().all() and (name == "v_descale" or lse[1, :2].isnan().all())
    out[1, :, :2], lse[1, :2] = right[0][1, :, :2], right[1][1, :2]
    assert torch.equal(out, right[0]) and torch.equal(lse, right[1])


@pytest.mark.hopper
def test_nothing_depends_on_what_lies_behind_a_sequence():
    x = quantize_fp8(*replace(SMALL, seqlen_q=301).inputs("cuda")[:3])
    expected = flash_attention_fp8(**x._asdict())
    for t in x[1:3]:  # the rest of the room
        whole = t.as_strided((*t.shape[:1], 304, *t.shape[2:]), t.stride())
        whole[:, 301:] = torch.nan
    assert torch.equal(flash_attention_fp8(**x._asdict()), expected)


@pytest.mark.hopper
@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("block", (None, BLOCK))
def test_100_repeats_are_bitwise_equal_and_a_graph_replays_them(head_dim, block):
    x = Case(batch=2, seqlen_q=2048, heads=16, head_dim=head_dim, causal=True).inputs("cuda")

    def run():
        return flash_attention_fp8(**quantize_fp8(*x[:3], block=block, hadamard=True)._asdict(), causal=True)

    first = run()
    assert all(torch.equal(run(), first) for _ in range(100))
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(2):
        out.zero_()
        graph.replay()
        assert torch.equal(out, first)


@pytest.mark.hopper
@pytest.mark.parametrize("head_dim", (64, 128))
def test_no_tile_is_lost_where_another_process_shares_the_gpu(head_dim):
    """A program that is stopped and resumed finds its shared memory as it left it, also what lies in place of barriers."""
    inputs = quantize_fp8(*Case(batch=16, seqlen_q=8192, heads=8, head_dim=head_dim, causal=True).inputs("cuda")[:3])._asdict()
    first = flash_attention_fp8(**inputs, causal=True)
    with busy_gpu():
        for _ in range(300):
            torch.full_like(first, torch.nan)  # the next output lies where this was
            assert torch.equal(flash_attention_fp8(**inputs, causal=True), first)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="needs compute capability 9.0, or the reference on a CPU")
@pytest.mark.parametrize("block", (None, BLOCK))
def test_a_compiled_graph_gives_the_same(block, device):
    x = replace(SMALL, dtype=torch.float32).inputs(device)

    def run():
        return flash_attention_fp8(**quantize_fp8(*x[:3], block=block, hadamard=True, impl="triton")._asdict(), causal=True)

    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(), run())


def test_what_is_wrong_is_named():
    q, k, v = replace(SMALL, dtype=torch.float32).inputs()[:3]
    x = quantize_fp8(q, k, v)
    options = x._asdict()
    for error, message, change in (
        (TypeError, "q: must be float8_e4m3fn, got torch.float32; quantize_fp8 makes it", {"q": q}),
        (ValueError, r"k: must have q's batch and head_dim \(2, 64\), got \(1, 64\)", {"k": x.k[:1]}),
        (ValueError, r"v: must have k's batch, seqlen and heads \(2, 300, 2\), got \(2, 200, 2\)", {"v": x.v[:, :200]}),
        (ValueError, "k: its 2 heads must divide q's 3", {"q": x.q[:, :, :3]}),
        (NotImplementedError, r"k: FP8 has no packed sequences .* got shape \(300, 2, 64\)", {"k": x.k[0]}),
        (ValueError, r"q: must have no empty dimension, got shape \(2, 0, 4, 64\)", {"q": x.q[:, :0]}),
        (ValueError, r"q_descale: must have shape \(2, 2\) or \(2, 2, 3\), got \(2, 4\)", {"q_descale": torch.ones(2, 4)}),
        (TypeError, "v_descale: must be a float32 tensor, got torch.float64", {"v_descale": torch.ones(2, 2).double()}),
        (ValueError, "must be all by head or all by block", {"k_descale": torch.ones(2, 2, 3)}),
        (TypeError, "out_dtype: must be torch.bfloat16, torch.float16 or torch.float32, got torch.float64", {"out_dtype": torch.float64}),
        (NotImplementedError, 'impl="gluon" does not take this call: q must be on a CUDA device, got cpu', {"impl": "gluon"}),
        (TypeError, "causal: must be True or False, got 'no'", {"causal": "no"}),
        (ValueError, "softmax_scale: must be a finite number.* got inf", {"softmax_scale": float("inf")}),
        (TypeError, "softmax_scale: must be a finite number.* got 'x'", {"softmax_scale": "x"}),
        (NotImplementedError, "q_descale: requires a gradient", {"q_descale": torch.ones(2, 2, requires_grad=True)}),
    ):
        with pytest.raises(error, match=message):
            flash_attention_fp8(**options | change)
    with pytest.raises(NotImplementedError, match="q: FP8 has no packed sequences"):
        quantize_fp8(q[0], k[0], v[0])
    with pytest.raises(NotImplementedError, match="block: must be None .* or 128 tokens, got 64"):
        quantize_fp8(q, k, v, block=64)
    with pytest.raises(TypeError, match="hadamard: must be True or False, got 'no'"):
        quantize_fp8(q, k, v, hadamard="no")
    with pytest.raises(NotImplementedError, match="hadamard: needs a head_dim that is a power of two of 16 to 256, got 48"):
        quantize_fp8(q[..., :48], k[..., :48], v, hadamard=True)
    with pytest.raises(NotImplementedError, match="q: requires a gradient, which FP8 attention does not have"):
        quantize_fp8(q.requires_grad_(), k, v)
    with torch.no_grad():
        quantize_fp8(q, k, v)
    assert "CUDA" in why_not_gluon(*x[:3])


def test_dry_run_covers_every_table(tmp_path):
    assert flash_fp8.main(["--dry-run", *flash_fp8.TABLES, "--rounds", "1", "--pause", "0", "--rep", "1", "--warmup", "1",
                           "--output", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("*.csv")} == {f"flash_fp8-{table}.csv" for table in flash_fp8.TABLES}


@pytest.mark.slow
def test_every_tile_compiles_fits_and_keeps_its_products_in_flight():
    kernels = compiled_kernels("flash_fp8_ahead_of_time.py")
    assert len(kernels) == 2 * 3
    wrong = [kernel for kernel in kernels if kernel["shared"] > 232448 or kernel["complaints"] or kernel["shuffled"] or kernel["spilled"]]
    assert not wrong, "\n".join(map(str, wrong))
