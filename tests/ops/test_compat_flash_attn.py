"""flash-attn's functions over ours: the same signatures, and the results that plain PyTorch maths gives (float64, reference path)."""

import inspect

import pytest
import torch

from attnzoo_kernels.compat import flash_attn
from attnzoo_kernels.compat.flash_attn import bert_padding

# Parameter names and defaults of flash-attn 2.8's public functions.
OPTIONS = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None,
    "deterministic": False, "return_attn_probs": False,
}
NONE = inspect.Parameter.empty
VARLEN = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), NONE)
SIGNATURES = {
    "flash_attn_func": {"q": NONE, "k": NONE, "v": NONE} | OPTIONS,
    "flash_attn_kvpacked_func": {"q": NONE, "kv": NONE} | OPTIONS,
    "flash_attn_qkvpacked_func": {"qkv": NONE} | OPTIONS,
    "flash_attn_varlen_func": {"q": NONE, "k": NONE, "v": NONE} | VARLEN | OPTIONS | {"block_table": None},
    "flash_attn_varlen_kvpacked_func": {"q": NONE, "kv": NONE} | VARLEN | OPTIONS,
    "flash_attn_varlen_qkvpacked_func": {"qkv": NONE, "cu_seqlens": NONE, "max_seqlen": NONE} | OPTIONS,
    "flash_attn_with_kvcache": dict.fromkeys(("q", "k_cache", "v_cache"), NONE) | dict.fromkeys(
        ("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table", "softmax_scale")) | {
        "causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0,
        "return_softmax_lse": False},
}


@pytest.mark.parametrize("name", flash_attn.__all__)
def test_signature_is_flash_attn_s(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    # as lists: the order is part of the signature, and nothing is keyword-only
    assert [(p.name, p.default) for p in parameters.values()] == list(SIGNATURES[name].items())
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("name, names", [
    ("unpad_input", ["hidden_states", "attention_mask", "unused_mask"]),
    ("unpad_input_for_concatenated_sequences", ["hidden_states", "attention_mask_in_length"]),
    ("pad_input", ["hidden_states", "indices", "batch", "seqlen"]),
])
def test_padding_has_flash_attn_s_names(name, names):
    """Ours are keyword-only."""
    parameters = inspect.signature(getattr(bert_padding, name)).parameters.values()
    assert [p.name for p in parameters if p.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD] == names


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def plain(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """Attention written out: (batch, seqlen, heads, dim) -> out, log-sum-exp (batch, heads, seqlen)."""
    (_, m, heads, dim), n = q.shape, k.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (dim**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(m)[:, None] + n - m - torch.arange(n)  # how far a key lies behind its query
    if slopes is not None:
        scores = scores - slopes.reshape(-1, heads, 1, 1) * distance.abs()
    hidden = distance < 0 if causal else torch.zeros(m, n, dtype=torch.bool)
    if window[0] >= 0:
        hidden = hidden | (distance > window[0])
    if window[1] >= 0:
        hidden = hidden | (-distance > window[1])
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).to(v.dtype), v), scores.logsumexp(-1)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SETTINGS = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"softmax_scale": 0.3}, {"scale": 0.3}),
    ({"window_size": (3, 2)}, {"window": (3, 2)}),
    ({"window_size": (4, -1), "causal": True}, {"window": (4, 0)}),
    ({"window_size": torch.tensor([3, 2])}, {"window": (3, 2)}),
    ({"window_size": [-2, 2]}, {"window": (-1, 2)}),
    ({"softcap": 2.0}, {"softcap": 2.0}),
    ({"softcap": -1.0}, {}),
    ({"alibi_slopes": SLOPES, "causal": True}, {"slopes": SLOPES, "causal": True}),
    ({"alibi_slopes": torch.stack([SLOPES, 2 * SLOPES])}, {"slopes": torch.stack([SLOPES, 2 * SLOPES])}),
]


@pytest.mark.parametrize(("options", "meaning"), SETTINGS, ids=lambda s: "-".join(s) or "default")
def test_flash_attn_func(options, meaning):
    q, k, v = randn(2, 7, 4, 16), randn(2, 11, 2, 16), randn(2, 11, 2, 16)
    out, lse, dmask = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    expected, expected_lse = plain(q, k, v, **meaning)
    torch.testing.assert_close(out, expected)
    assert lse.shape == (2, 4, 7)
    torch.testing.assert_close(lse, expected_lse, check_dtype=False)
    assert dmask.numel() == 0
    torch.testing.assert_close(flash_attn.flash_attn_func(q, k, v, **options), out, rtol=0, atol=0)
    dout = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout))


@pytest.mark.parametrize(("m", "n", "seen"), [(2, 5, [4, 5]), (5, 2, [0, 0, 0, 1, 2])])
def test_causal_is_aligned_to_the_bottom_right(m, n, seen):
    # equal scores: each row averages the one-hot values of the keys that it sees
    q, k, v = torch.zeros(1, m, 1, 8), torch.randn(1, n, 1, 8), torch.eye(n).view(1, n, 1, n)
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out[0, :, 0] > 0).sum(-1).tolist() == seen
    torch.testing.assert_close(lse[0, 0], torch.tensor(seen).log())  # log 0 = -inf where no key is seen


def test_packed_forms_equal_flash_attn_func():
    qkv = randn(2, 7, 3, 2, 16)
    expected = flash_attn.flash_attn_func(*qkv.unbind(2), causal=True)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), qkv)
    for out in (
        flash_attn.flash_attn_qkvpacked_func(qkv, causal=True),
        flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=True),
    ):
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), qkv)[0], expected_grad)


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize(("options", "meaning"), SETTINGS[:-1], ids=lambda s: "-".join(s) or "default")
def test_varlen_is_each_sequence_alone(options, meaning):
    lengths_q, lengths_k = [3, 5, 1], [6, 5, 4]
    q, k, v = randn(9, 4, 16), randn(15, 2, 16), randn(15, 2, 16)
    out, lse, dmask = flash_attn.flash_attn_varlen_func(
        q, k, v, cumulative(lengths_q), cumulative(lengths_k), 5, 6, return_attn_probs=True, **options)
    expected = [
        plain(*(x[None] for x in rows), **meaning)
        for rows in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    ]
    torch.testing.assert_close(out, torch.cat([o[0] for o, _ in expected]))
    assert lse.shape == (4, 9)
    torch.testing.assert_close(lse, torch.cat([l[0] for _, l in expected], dim=-1), check_dtype=False)
    assert dmask.numel() == 0


def test_varlen_packed_forms_equal_flash_attn_varlen_func():
    qkv, cu_seqlens = torch.randn(9, 3, 2, 16), cumulative([3, 0, 6])
    expected = flash_attn.flash_attn_varlen_func(*qkv.unbind(1), cu_seqlens, cu_seqlens, 6, 6, causal=True)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 6, causal=True)
    kv_packed = flash_attn.flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], cu_seqlens, cu_seqlens, 6, 6, causal=True)
    torch.testing.assert_close(packed, expected, rtol=0, atol=0)
    torch.testing.assert_close(kv_packed, expected, rtol=0, atol=0)


def test_a_last_dimension_may_be_strided_and_a_longest_sequence_a_tensor():
    q, k, v = (randn(9, 2, 32)[..., ::2] for _ in range(3))
    bounds = cumulative([3, 6])
    plain_call = (q.contiguous(), k.contiguous(), v.contiguous(), bounds, bounds, 6, 6)
    out = flash_attn.flash_attn_varlen_func(q, k, v, bounds, bounds, *torch.tensor([6, 6]), causal=True)
    assert torch.equal(out, flash_attn.flash_attn_varlen_func(*plain_call, causal=True))


@pytest.mark.parametrize("words, options", [
    ("window_size: must be two ints", {"window_size": None}), ("window_size: must be an integer, got 1.5", {"window_size": (1.5, 0)}),
    ("softcap: must be a number, got None", {"softcap": None}), ("dropout_p: must be a number", {"dropout_p": None}),
    ("return_attn_probs: must be True or False, got 1", {"return_attn_probs": 1}),
])
def test_a_wrong_option_is_named(words, options):
    with pytest.raises((TypeError, ValueError), match=words):
        flash_attn.flash_attn_func(*torch.zeros(3, 1, 4, 1, 8), **options)


def test_rows_that_are_not_there_are_named():
    rows = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="indices: must lie in 0 .. 2, got 3 .. 3"):
        bert_padding.index_first_axis(rows, torch.tensor([3]))
    with pytest.raises(ValueError, match="values: must have a row for each of the 2 indices, got shape"):
        bert_padding.index_put_first_axis(rows, torch.tensor([0, 1]), 4)
    with pytest.raises(ValueError, match="indices: must be int64"):
        bert_padding.index_put_first_axis(rows, torch.zeros(3), 4)


def test_dropout_keeps_and_rescales():
    # one key per query: the output is the value, or zero where it was dropped
    q, k, v = torch.randn(64, 1, 8, 16), torch.randn(64, 1, 8, 16), torch.ones(64, 1, 8, 16)
    out = flash_attn.flash_attn_func(q, k, v, dropout_p=0.5)
    assert set(out.flatten().tolist()) == {0.0, 2.0}


def test_what_is_not_there_says_so():
    x = torch.randn(4, 1, 8)
    with pytest.raises(NotImplementedError, match="return_attn_probs"):
        flash_attn.flash_attn_func(x[None], x[None], x[None], dropout_p=0.1, return_attn_probs=True)


@pytest.mark.parametrize("asked", [False, True])
def test_deterministic_is_passed_on(monkeypatch, asked):
    seen = {}
    monkeypatch.setattr(flash_attn, "flash_attention", lambda q, *_, **kwargs: seen.update(kwargs) or q)
    flash_attn.flash_attn_func(torch.zeros(1, 1, 1, 8), None, None, deterministic=asked)
    assert seen["deterministic"] is (True if asked else None)
