"""use_dual_chunk: a small random Llama against brute force over (i, j), prefill and decoding, and what is refused."""

import copy

import pytest
import torch
from torch.testing import assert_close

from attnzoo.hub import use_block_sparse, use_dual_chunk

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 53, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


def llama(kind: str = "Llama", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture
def tokens():
    return torch.randint(53, (2, 50), generator=torch.Generator().manual_seed(1))


def distance(i: int, j: int, chunk: int, top: int) -> int:
    if i // chunk == j // chunk:
        return i - j
    return (min(i % chunk + chunk, top) if i // chunk == j // chunk + 1 else top) - j % chunk


def brute_force(model, ids, chunk: int, top: int):
    """Llama's layers written out, each logit <R(distance) q, k> by itself; `model` is as transformers made it."""
    n, layers = ids.shape[1], model.model
    rotary, hidden = layers.rotary_emb, layers.embed_tokens(ids)
    apart = torch.tensor([[distance(i, j, chunk, top) if j <= i else 0 for j in range(n)] for i in range(n)])
    cos, sin = rotary(hidden, apart.flatten()[None])
    scale = rotary.attention_scaling  # on queries and keys alike
    cos, sin = (table.view(n, n, -1) * scale for table in (cos, sin))
    for layer in layers.layers:
        attention, x = layer.self_attn, layer.input_layernorm(hidden)
        q, k, v = (p(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
                   for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        k, v = (t.repeat_interleave(attention.num_key_value_groups, 1) for t in (k, v))
        first, second = q.chunk(2, -1)
        turned = q[:, :, :, None] * cos + torch.cat((-second, first), -1)[:, :, :, None] * sin
        scores = (turned * k[:, :, None]).sum(-1) * attention.scaling
        weights = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
        hidden = hidden + attention.o_proj((weights @ v).transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(layers.norm(hidden))


@pytest.mark.parametrize("options", ({}, {"rope_parameters": YARN}), ids=("default", "yarn"))
@torch.no_grad()
def test_prefill_and_decoding_equal_brute_force(options, tokens):
    model = llama(**options)
    expected = brute_force(model, tokens, chunk=12, top=15)
    use_dual_chunk(model, chunk_size=16)
    assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)  # two orders of the same float32 sums
    cache, parts = transformers.DynamicCache(config=model.config), []
    for part in tokens.split([7, 20, 1, 10, *[1] * 12], dim=1):
        parts.append(model(part, past_key_values=cache).logits)
    assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_it_is_the_model_s_own_attention_up_to_chunk_size_and_not_beyond(tokens):
    plain = llama()
    chunked = use_dual_chunk(copy.deepcopy(plain))
    within, beyond = (chunked(tokens).logits - plain(tokens).logits).abs().amax((0, 2)).split([16, 34])
    assert within.max() < 1e-4 < 1e-2 < beyond.min()
    assert sorted(chunked.state_dict()) == sorted(plain.state_dict())


@torch.no_grad()
def test_generation_equals_reading_everything_again(tokens):
    model = use_dual_chunk(llama(), chunk_size=12, local_size=2, variant="chunkllama")
    model.generation_config.eos_token_id = None
    prompt = tokens[:, :20]
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    assert generated.shape[1] == 32
    assert torch.equal(generated[:, 20:], model(generated).logits[:, 19:-1].argmax(-1))


def test_two_models_keep_their_own_options(tokens):
    one, other = use_dual_chunk(llama(), chunk_size=16), use_dual_chunk(llama(), chunk_size=8)
    again = use_dual_chunk(llama(), chunk_size=16)
    assert torch.equal(one(tokens).logits, again(tokens).logits) and not torch.allclose(one(tokens).logits, other(tokens).logits)


SWITCHES = {
    "block_sparse": lambda model: use_block_sparse(model, "dense"),
    "flash": lambda model: model.set_attn_implementation("attnzoo_flash"),
    "sdpa": lambda model: model.set_attn_implementation("sdpa"),
    "eager": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
@pytest.mark.parametrize("kind, options", [("Llama", {"rope_parameters": YARN}), ("Qwen3", {"head_dim": 16})])
@torch.no_grad()
def test_another_attention_chosen_later_has_its_positions(kind, options, switch, tokens):
    model = llama(kind, **options)
    expected = model(tokens).logits
    chunked = use_dual_chunk(model)(tokens).logits
    switch(model)
    assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    model.set_attn_implementation("attnzoo_dual_chunk")
    assert torch.equal(model(tokens).logits, chunked)


@torch.no_grad()
def test_a_second_call_takes_the_first_one_s_place(tokens):
    model, direct = use_dual_chunk(llama(), chunk_size=16), use_dual_chunk(llama(), chunk_size=8, variant="chunkllama")
    first = model(tokens).logits
    with pytest.raises(ValueError, match="local_size: must be less than chunk_size=8"):
        use_dual_chunk(model, chunk_size=8, local_size=8)
    assert torch.equal(model(tokens).logits, first)
    use_dual_chunk(model, chunk_size=8, variant="chunkllama")
    assert torch.equal(model(tokens).logits, direct(tokens).logits)
    assert sorted(name for name, _ in model.named_modules()) == sorted(name for name, _ in direct.named_modules())
    use_block_sparse(model, "dense")
    use_dual_chunk(model, chunk_size=16)
    assert torch.equal(model(tokens).logits, first)


@pytest.mark.parametrize("convert", (use_dual_chunk, use_block_sparse))
@torch.no_grad()
def test_a_model_that_shares_the_config_keeps_its_attention(convert, tokens):
    model = llama()
    config = model.config
    other = transformers.LlamaForCausalLM(config).eval()
    assert other.config is config and other.model.layers[0].self_attn.config is config
    before, described = other(tokens).logits, config.to_dict()
    convert(model)
    assert config.to_dict() == described
    assert torch.equal(other(tokens).logits, before)
    assert {id(module.config) for module in model.modules() if hasattr(module, "config")} == {id(model.config)} != {id(config)}


def test_a_copy_of_a_converted_model_switches_by_itself(tokens):
    plain, model = llama()(tokens).logits, use_dual_chunk(llama())
    chunked, other = model(tokens).logits, copy.deepcopy(model)
    other.set_attn_implementation("sdpa")
    assert torch.equal(model(tokens).logits, chunked) and torch.equal(other(tokens).logits, plain)


def test_what_would_read_without_positions_or_rotate_twice_is_refused(tokens):
    model = use_dual_chunk(llama())
    with pytest.raises(ValueError, match="attn_implementation: 'attnzoo_dual_chunk' is for models that hub.use_dual_chunk converted, got "):
        transformers.LlamaForCausalLM(model.config)(tokens)
    attention = model.model.layers[1].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="must be one for all layers .* got attnzoo_dual_chunk, sdpa; choose one"):
        model(tokens)


def test_gradients_equal_those_of_brute_force(tokens):
    model = llama()
    weights = [p.weight for layer in model.model.layers for p in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)]
    dlogits = torch.randn(2, 50, 53, generator=torch.Generator().manual_seed(2))
    expected = torch.autograd.grad(brute_force(model, tokens, chunk=12, top=15), weights, dlogits)
    found = torch.autograd.grad(use_dual_chunk(model, chunk_size=16).train()(tokens).logits, weights, dlogits)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize("kind, options", [
    ("Qwen3", {"head_dim": 16}), ("Cohere", {}), ("Glm", {"head_dim": 16, "partial_rotary_factor": 0.5, "pad_token_id": 0}),
])
@torch.no_grad()
def test_other_decoders_agree_with_themselves_up_to_chunk_size(kind, options, tokens):
    """Norms of q and k, interleaved channels, a part of the channels."""
    plain = llama(kind, **options)
    expected = plain(tokens[:, :16]).logits
    assert_close(use_dual_chunk(plain)(tokens[:, :16]).logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("make, message", [
    (lambda: torch.nn.Linear(1, 1), "model: must be a transformers model, got Linear"),
    (lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1)), "must have one rotary embedding.* none"),
    (lambda: llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "rope_type='dynamic' changes"),
])
def test_models_without_fixed_rotary_positions_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        use_dual_chunk(make())


@pytest.mark.parametrize("kind, options, message", [
    ("Falcon", {}, "must call transformers' attention interface.* FalconForCausalLM does not"),
    ("GptOss", {"num_local_experts": 4}, "GptOssForCausalLM's layers do not take tables as Llama's do"),
    ("SmolLM3", {"num_hidden_layers": 4, "pad_token_id": 0}, "must rotate queries and keys.* layer 3 of"),  # one layer without positions
    ("HunYuanDenseV1", {"head_dim": 16, "pad_token_id": 0}, "must rotate queries and keys.* layer 0 of"),  # norms behind the rotation
])
def test_models_that_rotate_otherwise_are_refused_and_left_as_they_were(kind, options, message, tokens):
    model = llama(kind, **options).train()
    before = copy.deepcopy(model).eval()(tokens).logits
    with pytest.raises(ValueError, match=message):
        use_dual_chunk(model)
    assert model.training
    assert torch.equal(model.eval()(tokens).logits, before)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@torch.no_grad()
def test_models_in_16_bits_are_taken(dtype, tokens):
    model = use_dual_chunk(llama(rope_parameters=YARN).to(dtype))
    assert model(tokens).logits.isfinite().all()


@pytest.mark.parametrize("options, message", [
    ({"chunk_size": 0}, "chunk_size: must be an int of at least 1"), ({"local_size": 16}, "local_size: must be less than chunk_size=16"),
    ({"variant": "qwen"}, "variant: must be one of"), ({"stages": ["near"]}, "stages: must name"),
])
def test_wrong_options_leave_the_model_as_it_was(options, message, tokens):
    model = llama()
    before = model(tokens).logits
    with pytest.raises(ValueError, match=message):
        use_dual_chunk(model, **options)
    assert torch.equal(model(tokens).logits, before)


@pytest.mark.parametrize("changes, message", [
    ({"attention_mask": torch.tensor([[0] * 5 + [1] * 45, [1] * 50])}, "attention_mask: .* takes no padding .* got 5 padded keys"),
    ({"position_ids": torch.arange(1, 51)[None]}, "position_ids: must count from the cache's 0 tokens on, 0 to 49, got 1 to 50"),
    ({"position_ids": torch.cat((torch.arange(20), torch.arange(30)))[None], "use_cache": False}, "attention mask: .* no packed rows"),
])
def test_inputs_that_it_would_read_wrongly_are_refused(changes, message, tokens):
    with pytest.raises(ValueError, match=message):
        use_dual_chunk(llama())(tokens, **changes)


def test_models_with_windows_or_dropout_are_refused(tokens):
    with pytest.raises(ValueError, match="attention mask: .* config.sliding_window=None"):
        use_dual_chunk(llama("Mistral", sliding_window=8))(tokens)
    with pytest.raises(ValueError, match="dropout: dual chunk attention has none, got 0.1"):
        use_dual_chunk(llama(attention_dropout=0.1)).train()(tokens)
