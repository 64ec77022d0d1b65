"""Rotary positions by the names and formulas of transformers, no positions, and heads that are rotated in part."""

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

from attnzoo.attention.flash import FlashAttention
from attnzoo.attention.positions import make_rope, rotate
from attnzoo.hub import config_from_huggingface, from_huggingface
from attnzoo.models import GPT, from_config

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OURS = {"vocab_size": 53, "dim": 32, "n_layers": 2, "n_heads": 4, "train_context": 16, "attention": FlashAttention}
LISTS = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0]}
PARAMETERS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn with options": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4, "beta_slow": 0.5, "attention_factor": 1.3},
    "yarn not truncated": {"factor": 4.0, "original_max_position_embeddings": 16, "truncate": False},
    "llama3": {"factor": 8.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"original_max_position_embeddings": 16, **LISTS},
    "proportional": {"partial_rotary_factor": 0.5},
    "proportional with factor": {"partial_rotary_factor": 0.75, "factor": 4.0},
    "longrope with factor": {"factor": 4.0, "original_max_position_embeddings": 16, **LISTS},
}


def theirs_of(kind, case, **options):
    """A random model of transformers with these rope parameters, all its weights random."""
    name = case.partition(" ")[0]
    context = 16 if name == "dynamic" else 64
    rope = {"rope_type": name, "rope_theta": 10000.0, **PARAMETERS[case]}
    sizes = {**SIZES, "max_position_embeddings": context, "rope_parameters": rope, **options}
    torch.manual_seed(0)
    if kind == "ministral3":
        rope |= {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": rope.get("original_max_position_embeddings", 8)}
        model = transformers.Ministral3ForCausalLM(transformers.Ministral3Config(**sizes, head_dim=8))
    elif kind == "phi3":
        model = transformers.Phi3ForCausalLM(transformers.Phi3Config(
            **sizes, sliding_window=None, original_max_position_embeddings=16 if name == "longrope" else context))
    elif kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=8))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


CASES = [("llama", case) for case in PARAMETERS] + [("qwen3", "default"), ("qwen3", "yarn"), ("phi3", "default"), ("phi3", "longrope"),
                                                      *(("ministral3", case) for case in ("default", "linear", "dynamic", "yarn"))]


def test_a_temperature_that_transformers_does_not_read_is_none_of_ours():
    theirs = theirs_of("llama", "default")
    theirs.config.rope_parameters |= {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 8}
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert_close(from_huggingface(theirs).eval()(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_logits_equal_those_of_transformers(kind, case):
    theirs = theirs_of(kind, case)
    ours = from_huggingface(theirs).eval()
    for length in (12, 16, 17, 40):  # below and beyond the original context
        tokens = torch.randint(53, (2, length), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "case"), [("llama", "linear"), ("phi3", "longrope"), ("ministral3", "yarn")])
def test_the_older_name_of_a_rope_type_is_read(kind, case):
    """transformers keeps `type`, as published configs have it, beside the `rope_type` that it makes of it."""
    theirs = theirs_of(kind, case)
    theirs.config.rope_parameters["type"] = theirs.config.rope_parameters["rope_type"]
    tokens = torch.randint(53, (2, 40))
    with torch.no_grad():
        assert_close(from_huggingface(theirs).eval()(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


def test_partly_rotated_heads_equal_those_of_transformers():
    """Half of 16 channels, as Phi-4-mini rotates three quarters of 128."""
    theirs = theirs_of("phi3", "default", num_attention_heads=2, num_key_value_heads=2)
    theirs.config.rope_parameters["partial_rotary_factor"] = 0.5
    theirs = type(theirs)(theirs.config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    described = config_from_huggingface(theirs.config)
    assert described["partial_rotary_factor"] == 0.5
    tokens = torch.randint(53, (2, 40))
    with torch.no_grad():
        assert_close(from_huggingface(theirs).eval()(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_saved_weights_are_read(tied, tmp_path):
    theirs = theirs_of("qwen3", "default", tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(53, (2, 12))
    with torch.no_grad():
        assert_close(from_huggingface(tmp_path).eval()(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "options", "message"), [
    ("llama", {"attention_bias": True}, "llama config attention_bias=True: not supported, must be False"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu': not supported, must be 'silu'"),
    ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types: linear_attention not supported, must be"),
])
def test_what_our_models_have_not_is_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        from_huggingface(theirs_of(kind, "default", **options))


def angles(rope, positions):
    cos, sin = rope.tables(torch.as_tensor(positions))
    return torch.atan2(sin.double(), cos.double()), cos.double().square() + sin.double().square()


def test_p_rope_turns_the_fastest_pairs_only():
    whole, share = make_rope(16, 10000.0, "none", 1.0, 16), make_rope(16, 10000.0, "none", 1.0, 16, proportion=0.4)
    positions = torch.arange(40)
    for there, here, still in zip(whole.tables(positions), share.tables(positions), (1.0, 0.0), strict=True):
        assert torch.equal(here[:, :3], there[:, :3])  # three of the eight pairs, as three eighths are the last share below 0.4
        assert torch.equal(here[:, 3:], torch.full_like(here[:, 3:], still))
    # yarn's attention factor is that of all channels
    cos, _ = make_rope(16, 10000.0, "yarn", 4.0, 16, proportion=0.5).tables(positions)
    assert_close(cos[:, 4:], torch.full_like(cos[:, 4:], 0.1 * math.log(4) + 1))


def test_yarn_is_the_papers_formula():
    dim, base, factor, context = 64, 10000.0, 8.0, 1024
    low = math.floor(dim * math.log(context / (32 * 2 * math.pi)) / (2 * math.log(base)))
    high = math.ceil(dim * math.log(context / (2 * math.pi)) / (2 * math.log(base)))
    pair = torch.arange(dim // 2, dtype=torch.float64)
    plain = base ** (-2 * pair / dim)
    ramp = ((pair - low) / (high - low)).clamp(0, 1)
    found, magnitude = angles(make_rope(dim, base, "yarn", factor, context), [1])
    assert_close(found[0], plain / factor * ramp + plain * (1 - ramp), rtol=1e-5, atol=1e-7)
    assert_close(magnitude.sqrt(), torch.full_like(magnitude, 0.1 * math.log(factor) + 1), rtol=1e-6, atol=0)


def test_dynamic_scales_only_as_far_as_it_must():
    plain, dynamic = make_rope(8, 10000.0, "none", 1.0, 16), make_rope(8, 10000.0, "dynamic", 4.0, 16)
    for there, here in zip(plain.tables(torch.arange(16)), dynamic.tables(torch.arange(16)), strict=True):
        assert torch.equal(there, here)
    base = 10000.0 * (4 * 64 / 16 - 3) ** (8 / 6)
    last, _ = angles(dynamic, range(64))
    expected = 63 * base ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert_close(last[63], torch.atan2(expected.sin(), expected.cos()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_no_length_is_built_into_a_compiled_table(scaling):
    options = tuple((name, tuple(LISTS[name])) for name in LISTS) if scaling == "longrope" else ()
    rope = make_rope(8, 10000.0, scaling, 4.0, 16, options)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(rope.tables, backend=counter, fullgraph=True)
    for n in (9, 16, 17, 40):
        for found, expected in zip(compiled(torch.arange(n)), rope.tables(torch.arange(n)), strict=True):
            assert torch.equal(found, expected)
    assert counter.frame_count <= 2


def test_half_a_head_is_rotated_and_half_is_not():
    x = torch.randn(5, 3, 16)
    cos, sin = make_rope(8, 10000.0, "none", 1.0, 16).tables(torch.arange(5))
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[..., 8:], x[..., 8:]) and torch.equal(turned[..., :8], rotate(x[..., :8], cos, sin))
    torch.manual_seed(0)
    model = GPT(**OURS, partial_rotary_factor=0.5).eval()
    assert model.blocks[0].attention.rope.dim == 4


@pytest.mark.parametrize("attention", ["flash.FlashAttention", "sdpa.SDPAttention", "differential.DifferentialAttention"])
def test_without_positions_order_counts_by_the_causal_mask_alone(attention):
    sizes = {**{k: v for k, v in OURS.items() if k != "attention"}, "n_layers": 1, "_target_": "attnzoo.models.GPT", "positions": "none"}
    model = from_config(sizes, {"_target_": f"attnzoo.attention.{attention}"}).eval().double()
    ids = torch.randint(53, (1, 12), generator=torch.Generator().manual_seed(0))
    mixed = torch.cat([ids[:, torch.randperm(11, generator=torch.Generator().manual_seed(1))], ids[:, 11:]], dim=1)
    assert_close(model(mixed)[:, -1], model(ids)[:, -1])
    assert not torch.allclose(model(mixed)[:, 5], model(ids)[:, 5])
    rotary = from_config(sizes | {"positions": "rotary"}, {"_target_": f"attnzoo.attention.{attention}"}).eval().double()
    assert not torch.allclose(rotary(mixed)[:, -1], rotary(ids)[:, -1])


def test_queries_and_keys_are_normalised_by_head():
    torch.manual_seed(0)
    layer = GPT(**OURS, qk_norm=True, norm_eps=1e-6).blocks[0].attention
    q, k, _ = layer.project(torch.randn(2, 5, 32) * 100)
    for x, norm in ((q, layer.q_norm), (k, layer.k_norm)):
        assert_close(norm(x).square().mean(-1), torch.ones(*x.shape[:-1]))


def test_dual_chunk_takes_yarns_magnitude_as_its_softmax_scale():
    """Within one chunk it is flash with the same positions."""
    torch.manual_seed(0)
    options = {"_target_": "attnzoo.models.GPT", "rope_scaling": "yarn", "rope_factor": 4.0, "original_context": 16,
               **{k: v for k, v in OURS.items() if k != "attention"}}
    flash = from_config(options, {"_target_": "attnzoo.attention.flash.FlashAttention"}).eval()
    dual = from_config(options, {"_target_": "attnzoo.attention.dual_chunk.DualChunkAttention"}).eval()
    dual.load_state_dict(flash.state_dict())
    ids = torch.randint(53, (2, 12))
    with torch.no_grad():
        assert_close(dual(ids), flash(ids), rtol=0, atol=1e-5)


def test_a_cache_keeps_the_frequencies_of_the_length_that_was_read():
    """As in transformers: with dynamic positions the keys of a cache are not turned again."""
    theirs = theirs_of("llama", "dynamic")
    ours = from_huggingface(theirs).eval()
    ids = torch.randint(53, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first = theirs(ids[:, :20], use_cache=True)
        expected = theirs(ids[:, 20:], past_key_values=first.past_key_values, use_cache=True).logits
        cache = ours.new_cache(1, 40)
        ours(ids[:, :20], cache=cache)
        found = ours(ids[:, 20:], cache=cache)
        assert_close(found, expected, rtol=0, atol=1e-5)
        assert not torch.allclose(found, ours(ids)[:, 20:], atol=1e-3)


@pytest.mark.gpu
def test_frequencies_from_a_list_train_as_cuda_graphs(tmp_path):
    from tiny_run import column, compose_tiny

    from attnzoo import runner

    losses = []
    for mode in ("false", "reduce-overhead"):
        runner.train(compose_tiny(tmp_path / mode, "trainer=gpu", "attention=flash", "model.rope_scaling=yarn", "model.rope_factor=4",
                                  "model.original_context=16", f"compile={mode}"))
        losses.append(torch.tensor([float(loss) for loss in column(tmp_path / mode, "train/loss")]))
    assert_close(losses[1], losses[0], rtol=2e-2, atol=0)
