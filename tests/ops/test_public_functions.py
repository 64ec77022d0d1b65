"""What the public operators have in common: arguments, defaults, rules and messages."""

import inspect

import pytest
import torch
from paths import PATHS

import attnzoo_kernels
from attnzoo_kernels import (
    BlockLayout,
    bias_gelu,
    block_sparse,
    block_sparse_attention,
    decode_attention,
    differential,
    differential_attention,
    dispatch,
    distance_bias,
    distance_bias_attention,
    dual_chunk,
    dual_chunk_attention,
    flash,
    flash_attention,
    flash_attention_fp8,
    flash_fp8,
    forgetting,
    latent_decode_attention,
    moba,
    msa,
    nsa,
    padding,
    quantize_fp8,
    routed,
    sigmoid,
    sigmoid_attention,
    two_frame,
)
from attnzoo_kernels.block_sparse.patterns import dense
from attnzoo_kernels.compat import flash_attn
from benchmarks.accuracy import assert_accurate

ATTENTION = (flash_attention, block_sparse_attention, differential_attention, dual_chunk_attention, decode_attention, flash_attention_fp8,
             sigmoid_attention, distance_bias_attention, latent_decode_attention)
DEFAULTS = {
    "causal": False, "softmax_scale": None, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None, "sinks": None, "dropout_p": 0.0,
    "dropout_state": None, "cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": None, "max_seqlen_k": None, "return_lse": False,
    "deterministic": None, "impl": None,
}
TABLE = torch.linspace(0, 1, 8 * 8).view(8, 8)
BOUNDS = torch.tensor([0, 2, 5], dtype=torch.int32)


def operators(device: str) -> dict:
    """Each as a function of q, k and v, all causal."""
    cos, sin, lam = TABLE.cos().to(device), TABLE.sin().to(device), torch.tensor(0.5, device=device)
    layout = dense(5, block=16, device=device)
    return {
        "flash": lambda q, k, v, **options: flash_attention(q, k, v, causal=True, **options),
        "block_sparse": lambda q, k, v, **options: block_sparse_attention(q, k, v, layout, causal=True, **options),
        "differential": lambda q, k, v, **options: differential_attention(q, q, k, k.flip(-1), v, lam, causal=True, **options),
        "dual_chunk": lambda q, k, v, **options: dual_chunk_attention(q, k, v, cos=cos, sin=sin, chunk_size=8, local_size=2, causal=True,
                                                                      **options),
    }


@pytest.mark.parametrize("operator", ATTENTION, ids=lambda operator: operator.__name__)
def test_arguments_of_one_name_have_one_default_and_one_place(operator):
    parameters = {name: p for name, p in inspect.signature(operator).parameters.items() if name in DEFAULTS}
    assert {name: p.default for name, p in parameters.items()} == {name: DEFAULTS[name] for name in parameters}
    assert all(p.kind == p.KEYWORD_ONLY for p in parameters.values()) and "causal" in parameters and "impl" in parameters
    assert [name for name in parameters if name != "causal"] == [name for name in DEFAULTS if name in parameters and name != "causal"]
    assert all(hasattr(attnzoo_kernels, name) for name in attnzoo_kernels.__all__)


@pytest.mark.parametrize("operator", ("flash", "block_sparse", "differential", "dual_chunk"))
@pytest.mark.parametrize("impl, low", [(impl, torch.float32) for impl in PATHS] + [("cpu", torch.bfloat16)] * ("cpu" in PATHS))
@pytest.mark.parametrize("scale", (-0.3, 0.0))
def test_scales_that_are_not_positive(operator, impl, low, scale, device):
    attend = operators(device)[operator]
    torch.manual_seed(0)
    tensors = torch.randn(3, 4, 5, 8, 16, device=device)  # of few rows the rule would compare single rounding errors
    results = []
    for dtype, by in ((low, impl), (low, "reference"), (torch.float64, "reference")):
        leaves = [x.to(low).to(dtype).requires_grad_() for x in tensors]
        out = attend(*leaves, softmax_scale=scale, impl=by)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert_accurate(*results)


@pytest.mark.parametrize("impl", ("triton", "reference"))
@pytest.mark.parametrize("scale", (-0.3, 0.0))
def test_scales_of_decoding_that_are_not_positive(impl, scale, device):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 5, 8, 16, device=device)
    lengths = torch.full((4,), 5, dtype=torch.int32, device=device)
    out, eager, exact = (decode_attention(q.to(dtype), k.to(dtype), v.to(dtype), cache_seqlens=lengths, causal=True, softmax_scale=scale,
                                          impl=by)
                         for dtype, by in ((torch.float32, impl), (torch.float32, "reference"), (torch.float64, "reference")))
    assert_accurate(out, eager, exact)


@pytest.mark.parametrize("operator", ("flash", "differential", "dual_chunk"))
@pytest.mark.parametrize("impl", PATHS)
def test_packed_calls_need_no_longest_sequence(operator, impl, device):
    attend, bounds = operators(device)[operator], BOUNDS.to(device)
    q, k, v = torch.randn(3, 5, 1, 16, device=device)
    packed = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "impl": impl}
    assert torch.equal(attend(q, k, v, **packed), attend(q, k, v, **packed, max_seqlen_q=3, max_seqlen_k=4))


def test_a_bound_on_the_longest_sequence_may_be_far_away():
    q, k, v = torch.randn(3, 5, 1, 16, dtype=torch.float64)
    packed = {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS}
    far = sigmoid_attention(q, k, v, **packed, max_seqlen_q=2**40, max_seqlen_k=2**40)
    torch.testing.assert_close(far, sigmoid_attention(q, k, v, **packed))


@pytest.mark.parametrize("attend", (flash_attention, sigmoid_attention))
def test_slopes_are_as_exact_as_the_tensors(attend):
    q, k, v = torch.randn(3, 1, 40, 2, 16, dtype=torch.float64)
    slopes = torch.rand(2)
    assert torch.equal(attend(q, k, v, alibi_slopes=slopes), attend(q, k, v, alibi_slopes=slopes.double()))


def test_a_compiled_reference_needs_no_longest_sequence():
    q, k, v = torch.randn(3, 5, 1, 16)
    packed = {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS, "impl": "reference"}
    compiled = torch.compile(flash_attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v, **packed), flash_attention(q, k, v, **packed))


def test_a_packed_layout_needs_the_longest_sequence():
    q, k, v = torch.randn(3, 5, 1, 16)
    with pytest.raises(ValueError, match="max_seqlen_q: must be an int of at least the longest sequence, .* got None"):
        block_sparse_attention(q, k, v, dense(5, block=16), cu_seqlens_q=BOUNDS, cu_seqlens_k=BOUNDS)


@pytest.mark.parametrize("operator", ("flash", "block_sparse", "differential", "dual_chunk"))
@pytest.mark.parametrize("impl", PATHS)
def test_autocast_changes_no_dtype(operator, impl, device):
    q, k, v = torch.randn(3, 1, 5, 1, 16, device=device)
    attend = operators(device)[operator]
    with torch.autocast(device, dtype=torch.bfloat16):
        out = attend(q, k, v, impl=impl)
    assert torch.equal(out, attend(q, k, v, impl=impl)) and out.dtype == torch.float32


@pytest.mark.parametrize("operator", ("flash", "block_sparse", "differential", "dual_chunk"))
def test_nothing_named_takes_the_path_for_cpus_there(operator):
    dispatch.forget()
    q, k, v = torch.randn(3, 1, 5, 1, 16)
    operators("cpu")[operator](q, k, v)
    assert dispatch.implementations_taken() == {f"{operator} forward": ["cpu"]}


def test_the_path_for_cpus_says_what_it_does_not_take():
    q, k, v = torch.randn(3, 1, 5, 2, 16)
    slopes = torch.ones(2, requires_grad=True)
    assert flash.why_not_cpu(q, k, v, softcap=1.0, dropout_p=0.5) is None
    assert flash.why_not_cpu(q, k, v, alibi_slopes=slopes) == "alibi_slopes require a gradient"
    dispatch.forget()
    flash_attention(q, k, v, alibi_slopes=slopes).sum().backward()
    assert slopes.grad.any() and dispatch.implementations_taken() == {"flash forward": ["reference"]}
    with pytest.raises(NotImplementedError, match='impl="cpu" does not take this call: alibi_slopes require a gradient; impl="ref'):
        flash_attention(q, k, v, alibi_slopes=slopes, impl="cpu")
    for attend in operators("meta").values():
        with pytest.raises(NotImplementedError, match='impl="cpu" does not take this call: q1? must be on a CPU, got meta'):
            attend(*(x.to("meta") for x in (q, k, v)), impl="cpu")


def test_why_not_gluon_is_asked_alike():
    q, k, v = torch.randn(3, 1, 5, 1, 16)
    table = TABLE.cos()
    calls = (
        (flash, (q, k, v), {"softcap": 1.0, "dropout_p": 0.5}), (block_sparse, (q, k, v, dense(5, block=16)), {"causal": True}),
        (differential, (q, q, k, None, v, torch.tensor(0.5)), {"window_size": (3, 0)}),
        (dual_chunk, (q, k, v), {"cos": table, "sin": table, "chunk_size": 8, "local_size": 2}), (flash_fp8, quantize_fp8(q, k, v)[:3], {}),
        (sigmoid, (q, k, v), {"causal": True}), (forgetting, (q, k, v, torch.zeros(1, 5, 1)), {}),
        (distance_bias, (q, k, v, torch.zeros(1, 9)), {"origin": 4}),
        (moba, (q, k, v), {"block_size": 2, "top_k": 2}),
        (msa, (q, k, v, k, k), {"block_size": 2, "top_k": 2}),
        (nsa, (q, k, v, k[:, :0], v[:, :0], torch.zeros(1, 5, 1, 3)), {}),
        (routed, (q, k, v, torch.zeros(1, 5, 1, 1, dtype=torch.int32)), {"block_size": 2}),
        (two_frame, (*(torch.stack((x, x), -2) for x in (q, k)), v), {"near_keys": 2}),
    )
    for module, inputs, options in calls:
        assert module.why_not_gluon(*inputs, **options) in ("q must be on a CUDA device, got cpu", "q1 must be on a CUDA device, got cpu")
        with pytest.raises(TypeError, match=": must be a tensor, got list"):
            module.why_not_gluon([], *inputs[1:], **options)


def test_asking_draws_no_random_numbers(device):
    q, k, v = torch.randn(3, 1, 5, 1, 16, device=device)
    state = torch.cuda.get_rng_state if device == "cuda" else torch.get_rng_state
    before = state()
    assert flash.why_not_gluon(q, k, v, dropout_p=0.5)
    assert torch.equal(state(), before)


@pytest.mark.parametrize("rows", (torch.float16, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("weights", (torch.float16, torch.bfloat16, torch.float32))
def test_the_end_of_an_encoder_takes_rows_and_weights_of_unlike_dtypes(rows, weights):
    hidden, residual = torch.randn(2, 3, 16, dtype=rows)
    weight, bias = torch.randn(2, 16, dtype=weights).requires_grad_()
    out = padding.add_norm_pad_input(hidden, residual, weight, bias, torch.tensor([0, 2, 3]), 2, 2, impl="reference")
    assert out.dtype == rows and out.shape == (2, 2, 16)
    assert all(g.dtype == weights for g in torch.autograd.grad(out.float().sum(), (weight, bias)))


MASK = torch.ones(1, 1, 2, 2, dtype=torch.bool)


@pytest.mark.parametrize("call, error, message", [
    (lambda: BlockLayout(MASK.float(), 16, 16), TypeError, "mask: must be a bool tensor, got torch.float32"),
    (lambda: BlockLayout([[True]], 16, 16), TypeError, "mask: must be a bool tensor, got list"),
    (lambda: BlockLayout(MASK, 17, 16), ValueError, "block_q: must be one of 16, .* got 17"),
    (lambda: BlockLayout(MASK[0, 0], 16, 16), ValueError, "mask: must be .batch, heads, q_blocks, k_blocks. .* got shape .2, 2."),
    (lambda: BlockLayout(MASK.expand(1, 3, 2, 2), 16, 16), ValueError, "and contiguous, got shape .* with strides"),
    (lambda: bias_gelu(torch.zeros(2, 4).to(torch.float8_e4m3fn), torch.zeros(4)), TypeError, "x: must be float16, .*float8_e4m3fn"),
    (lambda: bias_gelu(torch.zeros(2, 4).long(), torch.zeros(4)), TypeError, "x: must be float16, .* got torch.int64"),
    (lambda: flash_attention(*[torch.zeros(1, 2, 1, 16).to_sparse()] * 3), TypeError, "q: must be a dense tensor, got torch.sparse_coo"),
    (lambda: flash_attention(*torch.zeros(3, 1, 2, 1, 16), return_lse=torch.ones(2)), TypeError, "return_lse: must be True or False"),
    (lambda: BlockLayout(MASK, torch.ones(2), 16), ValueError, "block_q: must be one of 16, "),
    (lambda: padding.position_ids(BOUNDS + 1, 5), ValueError, "cu_seqlens: must rise from 0, got"),
    (lambda: flash_attn.flash_attn_qkvpacked_func([1.0]), TypeError, "qkv: must be a tensor, got list"),
    (lambda: flash_attn.flash_attn_kvpacked_func(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 3, 1, 16)), ValueError,
     r"kv: must be \(batch, seqlen, 2, heads, head_dim\), got shape \(1, 2, 3, 1, 16\)"),
    (lambda: flash_attn.flash_attn_varlen_qkvpacked_func(torch.zeros(2, 1, 16), BOUNDS, 3), ValueError,
     r"qkv: must be \(total, 3, heads, head_dim\), got shape \(2, 1, 16\)"),
    (lambda: padding.token_indices(torch.ones(1, 2).to(torch.float8_e4m3fn)), TypeError, "attention_mask: must be bool, .*float8_e4m3fn"),
    (lambda: padding.token_indices_from_lengths(None, 3), TypeError, "lengths: must be a tensor or ints, got NoneType"),
    (lambda: padding.token_indices_from_lengths(["a"], 3), ValueError, "lengths: must be an integer, got 'a'"),
    (lambda: padding.token_indices_from_lengths([1], "3"), ValueError, "seqlen: must be an integer of at least 0, got '3'"),
    (lambda: padding.add_norm_pad_input(*torch.zeros(2, 2, 4), torch.ones(4, device="meta"), torch.zeros(4), torch.tensor([0, 1]), 1, 2),
     ValueError, "weight: must be on hidden's device cpu, got meta"),
])
def test_what_does_not_fit_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_rows_of_float8_are_moved():
    rows = torch.randn(3, 4).to(torch.float8_e4m3fn)
    indices = torch.tensor([0, 2, 3])
    out = padding.pad_input(rows, indices, 2, 2, impl="reference")
    assert torch.equal(padding.remove_padding(out, indices, impl="reference").float(), rows.float())
