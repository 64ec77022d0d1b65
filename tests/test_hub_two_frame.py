"""use_two_frame: small random Llamas and Qwens against each method's mask and distances written out, decoding, and what is refused."""

import copy

import pytest
import torch
from test_hub_dual_chunk import YARN, llama
from torch.testing import assert_close

from attnzoo.attention.two_frame import METHODS
from attnzoo.hub import use_dual_chunk, use_two_frame

transformers = pytest.importorskip("transformers")

OPTIONS = {"rerope": {"window": 7}, "leaky_rerope": {"window": 6, "factor": 3}, "self_extend": {"window": 5, "factor": 3},
           "lm_infinite": {"window": 6, "sinks": 3}, "streaming_llm": {"window": 6, "sinks": 3}}
MODELS = {"Llama": {}, "Qwen2": {"rope_parameters": YARN}, "Qwen3": {"head_dim": 16}}
BOTH = pytest.mark.parametrize("method", METHODS)


@pytest.fixture
def tokens():
    return torch.randint(53, (2, 30), generator=torch.Generator().manual_seed(1))


def distance(method: str, i: int, j: int, window: int, factor: int = 1, sinks: int = 0) -> float:
    """At which the query at i sees the key at j <= i, by the papers; NaN where it does not."""
    if i - j < window:
        return i - j
    if method == "rerope":
        return window
    if method == "leaky_rerope":
        return window + (i - j - window) / factor
    if method == "self_extend":
        return i // factor + window - window // factor - j // factor
    if j >= sinks:
        return float("nan")
    return window if method == "lm_infinite" else min(i, window + sinks - 1) - j  # in a cache of window + sinks keys


def restated(model, ids, method: str, **options):
    """The model's layers written out, each logit <R(distance) q, k> by itself; `model` is as transformers made it, in float64."""
    n, layers = ids.shape[1], model.model
    hidden, rotary = layers.embed_tokens(ids), layers.rotary_emb
    apart = torch.tensor([[distance(method, i, j, **options) if j <= i else float("nan") for j in range(n)] for i in range(n)]).double()
    angles = torch.cat(2 * [apart.nan_to_num()[..., None] * rotary.inv_freq.double()], dim=-1)
    for layer in layers.layers:
        attention, x = layer.self_attn, layer.input_layernorm(hidden)
        q, k, v = (p(x).unflatten(-1, (-1, attention.head_dim)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        k, v = (t.repeat_interleave(attention.num_key_value_groups, 2) for t in (k, v))
        first, second = q.chunk(2, -1)
        turned = q[:, :, None] * angles.cos()[:, :, None] + torch.cat((-second, first), -1)[:, :, None] * angles.sin()[:, :, None]
        scores = (turned * k[:, None]).sum(-1).permute(0, 3, 1, 2) * attention.scaling * rotary.attention_scaling**2
        weights = scores.masked_fill(apart.isnan(), -torch.inf).softmax(-1)
        hidden = hidden + attention.o_proj((weights @ v.transpose(1, 2)).transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(layers.norm(hidden))


@BOTH
@pytest.mark.parametrize("kind, more", MODELS.items(), ids=MODELS)
@torch.no_grad()
def test_prefill_and_decoding_equal_the_method_written_out(method, kind, more, tokens):
    model = llama(kind, **more).double()
    expected, plain = restated(model, tokens, method, **OPTIONS[method]), model(tokens).logits
    use_two_frame(model, method=method, **OPTIONS[method])
    assert (plain - expected)[:, 20:].abs().amax(-1).min() > 1e-3
    assert_close(model(tokens).logits, expected, rtol=1e-6, atol=1e-6)  # transformers has norms in float32
    cache, parts = transformers.DynamicCache(config=model.config), []
    for part in tokens.split([7, 1, 10, *[1] * 12], dim=1):
        parts.append(model(part, past_key_values=cache).logits)
    assert_close(torch.cat(parts, dim=1), expected, rtol=1e-6, atol=1e-6)
    assert_close(model.float()(tokens).logits.double(), expected, rtol=1e-5, atol=1e-5)


def test_gradients_equal_those_of_the_method_written_out(tokens):
    model = llama().double()
    weights = [p.weight for layer in model.model.layers for p in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)]
    dlogits = torch.randn(2, 30, 53, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = torch.autograd.grad(restated(model, tokens, "self_extend", **OPTIONS["self_extend"]), weights, dlogits)
    use_two_frame(model, method="self_extend", **OPTIONS["self_extend"]).train()
    for ours, theirs in zip(torch.autograd.grad(model(tokens).logits, weights, dlogits), expected, strict=True):
        assert_close(ours, theirs, rtol=1e-6, atol=1e-6 * theirs.abs().max().item())


@pytest.mark.parametrize("kind, more", [("Cohere", {}), ("Glm", {"head_dim": 16, "partial_rotary_factor": 0.5, "pad_token_id": 0})])
@torch.no_grad()
def test_other_styles_of_rotation_agree_with_themselves_while_all_keys_are_near(kind, more, tokens):
    model = llama(kind, **more)
    expected = model(tokens).logits[:, :16]
    found = use_two_frame(model, window=16)(tokens).logits
    assert_close(found[:, :16], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_generation_equals_reading_everything_again(tokens):
    model = use_two_frame(llama(), method="self_extend", factor=3)
    model.generation_config.eos_token_id = None
    prompt = tokens[:, :20]
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    assert torch.equal(generated[:, 20:], model(generated).logits[:, 19:-1].argmax(-1))


@torch.no_grad()
def test_one_conversion_takes_the_place_of_another(tokens):
    plain = llama()
    chunked, framed = (use(copy.deepcopy(plain))(tokens).logits for use in (use_dual_chunk, use_two_frame))
    model = use_two_frame(use_dual_chunk(copy.deepcopy(plain)))
    assert torch.equal(model(tokens).logits, framed)
    model.set_attn_implementation("attnzoo_dual_chunk")
    with pytest.raises(ValueError, match="'attnzoo_dual_chunk' is for models that hub.use_dual_chunk converted, got LlamaAttention"):
        model(tokens)
    model.set_attn_implementation("sdpa")
    assert_close(model(tokens).logits, plain(tokens).logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(use_dual_chunk(model)(tokens).logits, chunked)


@pytest.mark.parametrize("options, same", [
    ({}, {"window": 8}), ({"context": 40}, {"window": 20}),
    ({"method": "lm_infinite"}, {"method": "lm_infinite", "window": 15, "sinks": 10}),
])
@torch.no_grad()
def test_the_window_follows_the_context(options, same, tokens):
    assert torch.equal(use_two_frame(llama(), **options)(tokens).logits, use_two_frame(llama(), **same)(tokens).logits)


@pytest.mark.parametrize("options, message", [
    ({"method": "yarn"}, "^method='yarn': must be one of rerope"), ({"window": 0}, "^window=0: must be an integer of at least 1"),
    ({"context": 0}, "^context: must be an integer of at least 1, got 0"), ({"factor": 4}, "^factor=4: has no effect with method=rerope"),
])
def test_wrong_options_leave_the_model_as_it_was(options, message, tokens):
    model = llama()
    before = model(tokens).logits
    with pytest.raises(ValueError, match=message):
        use_two_frame(model, **options)
    assert torch.equal(model(tokens).logits, before)


def test_inputs_that_it_would_read_wrongly_are_refused(tokens):
    with pytest.raises(ValueError, match="attention_mask: attention in two frames takes no padding .* got 5 padded keys"):
        use_two_frame(llama())(tokens, attention_mask=torch.arange(30).expand(2, -1) >= torch.tensor([[5], [0]]))


@pytest.mark.gpu
@BOTH
@torch.no_grad()
def test_kernels(method, tokens):
    model = llama(hidden_size=128, head_dim=32)
    expected = restated(copy.deepcopy(model).double(), tokens, method, **OPTIONS[method])
    model = use_two_frame(model.cuda(), method=method, **OPTIONS[method])
    assert_close(model(tokens.cuda()).logits.cpu().double(), expected, rtol=1e-3, atol=1e-3)  # float32 by kernels
