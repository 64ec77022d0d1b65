"""attention=two_frame: each method's formula, weights of a flash checkpoint, what it refuses, the cache, its own counts."""

import functools

import pytest
import torch
from torch.testing import assert_close

from attnzoo.attention.base import AttentionSpec, SequenceInfo
from attnzoo.attention.flash import FlashAttention
from attnzoo.attention.positions import rotate
from attnzoo.attention.two_frame import METHODS, TwoFrameAttention
from attnzoo.hub import from_huggingface
from attnzoo.models import GPT
from attnzoo_kernels.two_frame.cases import Case

SIZES = {"vocab_size": 53, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "train_context": 16, "bias": False}
SPEC = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "layer": 0, "n_layers": 1, "causal": True, "positions": "rotary",
        "train_context": 16}
OPTIONS = {"rerope": {}, "leaky_rerope": {"factor": 3}, "self_extend": {"window": 5, "factor": 3}, "lm_infinite": {"window": 6, "sinks": 3},
           "streaming_llm": {"window": 6, "sinks": 3}}
BOTH = pytest.mark.parametrize("method", METHODS)


def model(attention=TwoFrameAttention, **options):
    torch.manual_seed(0)
    return GPT(**SIZES, attention=lambda spec: attention(spec, **options), positions="rotary").double().eval()


def expected_distance(method, p, j, window, factor, sinks):
    """How far query p sees key j, by the papers; None for a key that it does not see."""
    if p - j < window:
        return p - j
    if method == "rerope":
        return window
    if method == "leaky_rerope":
        return window + (p - j - window) / factor
    if method == "self_extend":
        return p // factor + window - window // factor - j // factor
    if j >= sinks:
        return None
    return window if method == "lm_infinite" else min(p, window + sinks - 1) - j  # streaming_llm: in a cache that fills and then stays full


@BOTH
def test_scores_are_those_of_the_papers(method):
    torch.manual_seed(0)
    layer = TwoFrameAttention(AttentionSpec(**SPEC), method=method, **OPTIONS[method]).double()
    x = torch.randn(1, 30, 32, dtype=torch.float64)
    q, k, v = layer.project(x)
    k, v = (y.repeat_interleave(2, dim=2) for y in (k, v))
    weights = torch.zeros(4, 30, 30, dtype=torch.float64)
    for p in range(30):
        seen = {j: expected_distance(method, p, j, layer.frames.window, layer.frames.factor, layer.frames.sinks) for j in range(p + 1)}
        seen = {j: distance for j, distance in seen.items() if distance is not None}
        distances = torch.tensor([*seen.values()], dtype=torch.float64)[None]
        turned = rotate(q[:, p : p + 1].expand(-1, len(seen), -1, -1), *layer.rope.tables(distances))  # (1, seen, heads, width)
        weights[:, p, [*seen]] = ((turned * k[:, [*seen]]).sum(-1)[0].mT / 8**0.5).softmax(-1)
    expected = layer.o_proj(torch.einsum("hij,jhd->ihd", weights, v[0]).flatten(1))
    assert_close(layer(x, SequenceInfo(torch.arange(30)[None]))[0], expected, rtol=1e-6, atol=1e-6)  # cos and sin are float32


@BOTH
def test_the_weights_of_flash_load_and_agree_while_all_keys_are_near(method):
    flash, framed = model(FlashAttention), model(method=method, **OPTIONS[method])
    framed.load_state_dict(flash.state_dict())
    window = framed.blocks[0].attention.frames.window
    ids = torch.randint(53, (2, 30), generator=torch.Generator().manual_seed(1))
    assert_close(framed(ids)[:, :window], flash(ids)[:, :window], rtol=1e-6, atol=1e-6)
    assert not torch.isclose(framed(ids)[:, 25:], flash(ids)[:, 25:]).all(-1).any()


@pytest.mark.parametrize("kind, options", [("Llama", {}), ("Qwen3", {"head_dim": 16})])
@torch.no_grad()
def test_weights_of_llama_and_qwen_are_read(kind, options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 53, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 16}
    theirs = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes | options)).eval()
    ours = from_huggingface(theirs, attention=functools.partial(TwoFrameAttention, method="self_extend", window=9)).eval()
    ids = torch.randint(53, (1, 40), generator=torch.Generator().manual_seed(1))
    assert_close(ours(ids)[:, :9], theirs(ids).logits[:, :9], rtol=1e-4, atol=1e-4)
    assert not torch.isclose(ours(ids)[:, 20:], theirs(ids).logits[:, 20:], rtol=1e-4, atol=1e-4).all(-1).any()


@BOTH
def test_decoding_and_packing_equal_reading_at_once(method):
    gpt = model(method=method, **OPTIONS[method])
    ids = torch.randint(53, (2, 40), generator=torch.Generator().manual_seed(2))
    caches = gpt.new_cache(2, 40)
    parts = [gpt(part, cache=caches) for part in ids.split([11, 1, 1, 20, 1, 1, 5], dim=1)]
    assert_close(torch.cat(parts, dim=1), gpt(ids))
    packed = gpt(ids[0], cu_seqlens=torch.tensor([0, 7, 7, 40], dtype=torch.int32), max_seqlen=33)
    assert_close(packed, torch.cat([gpt(part[None])[0] for part in ids[0].split([7, 33])]))


@pytest.mark.parametrize("method, window, factor, sinks", [
    ("rerope", 8, 1, None), ("leaky_rerope", 8, 16, None), ("self_extend", 4, 16, None), ("lm_infinite", 15, 1, 10),
    ("streaming_llm", 12, 1, 4)])
def test_defaults_follow_the_training_context(method, window, factor, sinks):
    frames = TwoFrameAttention(AttentionSpec(**SPEC), method=method).frames
    assert (frames.window, frames.factor, frames.sinks) == (window, factor, sinks)
    reach = {"rerope": 1000, "leaky_rerope": 16 * 8, "self_extend": 16 * 12, "lm_infinite": 1000, "streaming_llm": 1000}[method]
    farthest = max(distance for j in range(reach)
                   if (distance := expected_distance(method, reach - 1, j, window, factor, sinks)) is not None)
    assert farthest < 16  # what training has seen


@pytest.mark.parametrize("options, message", [
    ({"method": "yarn"}, "attention.method='yarn': must be one of rerope, leaky_rerope"),
    ({"window": 0}, "attention.window=0: must be an integer of at least 1, or left out"),
    ({"factor": 4}, "attention.factor=4: has no effect with method=rerope; leave it out, or set method to leaky_rerope or self_extend"),
    ({"method": "self_extend", "sinks": 4}, "attention.sinks=4: has no effect with method=self_extend"),
    ({"method": "self_extend", "factor": 1.5}, "attention.factor=1.5: must be an integer of at least 1"),
])
def test_wrong_options_are_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        TwoFrameAttention(AttentionSpec(**SPEC), **options)


@pytest.mark.parametrize("change, message", [
    ({"positions": "alibi"}, "two_frame does not support positions=alibi; set model.positions=rotary"),
    ({"causal": False}, "attention=two_frame is causal only; use a gpt model"),
])
def test_other_models_are_refused_with_a_way_out(change, message):
    with pytest.raises(ValueError, match=message):
        TwoFrameAttention(AttentionSpec(**SPEC | change))


@BOTH
def test_visible_pairs_are_those_of_the_operator(method):
    frames = TwoFrameAttention(AttentionSpec(**SPEC), method=method, **OPTIONS[method]).frames
    for n in (1, 6, 7, 9, 10, 50):
        case = Case(seqlen_q=n, near_keys=frames.window, far_keys=frames.sinks)
        assert frames.visible_pairs(n) == (n * (n + 1) // 2 if frames.sinks is None else case.pairs())
