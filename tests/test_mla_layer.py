"""attention=mla: both forms of reading a cache, the published scale, DeepSeek's weights, what is counted and refused."""

import math

import pytest
import torch
from torch.testing import assert_close

from attnzoo.attention import AttentionSpec, SequenceInfo
from attnzoo.attention.mla import MLAttention, attend_latents
from attnzoo.attention.sdpa import SDPAttention
from attnzoo.errors import UserError
from attnzoo.hub import attention_from_huggingface, config_from_huggingface, from_huggingface
from attnzoo.models import from_config
from attnzoo.pictures import distances
from attnzoo_kernels import decode_attention, dispatch, latent_decode_attention
from benchmarks.accuracy import assert_accurate

transformers = pytest.importorskip("transformers")

SPEC = {"dim": 32, "n_heads": 4, "n_kv_heads": 4, "head_dim": 8, "layer": 0, "n_layers": 1, "causal": True, "positions": "rotary",
        "train_context": 64}
YARN = {"rope_scaling": "yarn", "rope_factor": 40.0, "rope_options": {"mscale": 0.707, "mscale_all_dim": 0.5}}


def build(options=None, **spec):
    torch.manual_seed(0)
    layer = MLAttention(AttentionSpec(**SPEC | spec), **options or {}).double().eval()
    layer.init_weights(0.3, 0.3)
    return layer


def positions(start, end):
    return SequenceInfo(torch.arange(start, end)[None])


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("options, spec", [({}, {"n_kv_heads": 2}), ({"q_lora_rank": 12, "kv_lora_rank": 300, "v_head_dim": 5}, YARN)])
def test_absorbed_and_expanded_decoding_are_equal(options, spec, new):
    layer, x = build(options, **spec), torch.randn(2, 24, 32, dtype=torch.float64)
    cache, seq = layer.new_cache(2, 40), positions(24 - new, 24)
    layer(x[:, : 24 - new], positions(0, 24 - new), cache)
    q, k, v = layer.project(x[:, 24 - new :])
    q, k = layer.apply_positions(q, k, seq)
    cache.append(*layer.kept(k, v))
    absorbed, expanded = layer.attend_cached(q, cache, seq), layer.attend_over(q, cache.read(), seq)
    assert_close(absorbed, expanded, rtol=0, atol=1e-12)
    assert cache.buffers[0].shape == (2, 40, 1, layer.kv_lora_rank + layer.qk_rope_head_dim) and len(cache.buffers) == 1
    assert not torch.equal(absorbed, expanded)  # they are two ways


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_kernels_read_the_cache_as_the_layer_does(impl, device):
    """What a GPU is asked for: one key head of 20 channels, whose first 16 are the values."""
    dtype = torch.float64 if impl == "reference" else torch.float32
    q, cache = (torch.randn(shape, dtype=dtype, device=device) for shape in ((2, 2, 3, 20), (2, 40, 1, 20)))
    lengths = torch.tensor([33, 2], dtype=torch.int32, device=device)
    options = {"cache_seqlens": lengths, "causal": True, "softmax_scale": 0.3, "impl": impl}
    expected = attend_latents(q, cache.squeeze(2), 16, lengths, 0.3)
    assert_close(decode_attention(q, cache, cache[..., :16], **options), expected)
    assert_close(latent_decode_attention(q, cache.squeeze(2), value_dim=16, **options), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("rank", [512, 48])
def test_the_kernel_for_latents_decodes_as_plain_pytorch_does(rank, new):
    """At the paper's width and at a narrow one."""
    x, found = torch.randn(2, 200, 32, device="cuda"), []
    for impl, dtype in ((None, torch.float32), ("reference", torch.float32), ("reference", torch.float64)):
        layer = build({"kv_lora_rank": rank, "qk_rope_head_dim": 64 if rank == 512 else 4, "impl": impl}).to("cuda", dtype)
        cache, at = layer.new_cache(2, 256), torch.arange(200, device="cuda")[None]
        with torch.no_grad():
            layer(x[:, :-new].to(dtype), SequenceInfo(at[:, :-new]), cache)
            dispatch.forget()
            found.append(layer(x[:, -new:].to(dtype), SequenceInfo(at[:, -new:]), cache))
        assert dispatch.implementations_taken() == ({"latent_decode forward": ["triton"]} if impl is None else {})
    assert_accurate(*found)


def test_the_forms_are_the_papers():
    """One head by hand: both parts of the scores, the shared rotated key, and the scale with YaRN's mscale."""
    layer, x = build({"q_lora_rank": 12}, **YARN, n_heads=1, n_kv_heads=1), torch.randn(9, 32, dtype=torch.float64)
    latent, k_rope = layer.kv_a_proj_with_mqa(x).split([32, 4], -1)
    latent = latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    q_latent = layer.q_a_proj(x)
    q = layer.q_proj(q_latent / (q_latent.square().mean(-1, keepdim=True) + 1e-6).sqrt())
    angles = torch.arange(9)[:, None] * torch.tensor(layer.rope.frequencies, dtype=torch.float64)
    magnitude = (0.1 * 0.707 * math.log(40) + 1) / (0.1 * 0.5 * math.log(40) + 1)
    turn = torch.polar(torch.full_like(angles, magnitude), angles)
    q_rope, k_rope = (torch.complex(*t.chunk(2, -1)) * turn for t in (q[:, 8:], k_rope))
    scores = q[:, :8] @ layer.k_proj(latent).T + (q_rope @ k_rope.mH).real
    scores = scores / math.sqrt(12) * (0.1 * 0.5 * math.log(40) + 1) ** 2
    weights = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf).softmax(-1)
    # the tables are in float32
    assert_close(layer(x[None], positions(0, 9))[0], layer.o_proj(weights @ layer.v_proj(latent)), rtol=1e-5, atol=1e-6)


def test_the_defaults_are_deepseeks_and_what_is_counted():
    layer = MLAttention(AttentionSpec(**SPEC | {"head_dim": 128}))
    assert (layer.kv_lora_rank, layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim) == (512, 128, 64, 128)
    layer = build({"q_lora_rank": 12})
    products = 32 * 12 + 12 * 4 * 12 + 32 * 36 + 32 * 4 * 16 + 32 * 32
    assert layer.flops([10]) == 6 * (10 * products + 55 * 4 * (12 + 8))


def test_its_keys_are_no_queries_for_a_picture_of_distances():
    with pytest.raises(UserError, match="attention=mla, what=distances: needs keys that are projected as wide as queries, got 4 and 12"):
        distances(build(), 8)


@pytest.mark.parametrize("options, spec, message", [
    ({"kv_lora_rank": 0}, {}, "attention.kv_lora_rank=0: must be an integer of at least 1"),
    ({"qk_rope_head_dim": 3}, {}, "attention.qk_rope_head_dim=3: must be even"),
    ({"qk_rope_head_dim": 2}, {"rope_scaling": "ntk", "rope_factor": 2.0}, "attention.qk_rope_head_dim=2: must be at least 4 with"),
    ({}, {"qk_norm": True}, "model.qk_norm=true: attention=mla has norms of the latents instead; set model.qk_norm=false"),
    ({}, {"partial_rotary_factor": 0.5}, "model.partial_rotary_factor=0.5: must be 1 with attention=mla"),
    ({}, {"rope_scaling": "longrope", "rope_options": {name: [1.0] * 4 for name in ("short_factor", "long_factor")}},
     "model.rope_scaling=longrope: must be none, linear"),
])
def test_what_it_refuses(options, spec, message):
    with pytest.raises(ValueError, match=message):
        build(options, **spec)


DEEPSEEK = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 4, "max_position_embeddings": 64, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
            "v_head_dim": 6, "first_k_dense_replace": 2, "rms_norm_eps": 1e-4, "q_lora_rank": None}
ROPES = {"yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.9,
                  "mscale_all_dim": 0.6}, "default": {"rope_type": "default", "rope_theta": 5000.0}}


def deepseek(version, rope="yarn", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"Deepseek{version}Config")(**DEEPSEEK | {"rope_parameters": ROPES[rope]} | options)
    theirs = getattr(transformers, f"Deepseek{version}ForCausalLM")(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return theirs


@pytest.mark.parametrize("version, rope, options", [
    ("V3", "yarn", {"q_lora_rank": 12}), ("V2", "yarn", {}), ("V2", "default", {"q_lora_rank": 12}), ("V3", "default", {}),
])
def test_logits_equal_those_of_transformers(version, rope, options):
    theirs = deepseek(version, rope, **options)
    ours = from_huggingface(theirs).eval()
    tokens = torch.randint(53, (2, 40))
    with torch.no_grad():
        assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
    again = from_config(config_from_huggingface(theirs.config), attention_from_huggingface(theirs.config)).eval()
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again(tokens), ours(tokens))
    assert again.blocks[1].attention.kv_lora_rank == 16


def test_another_attention_must_have_the_weights_parameters():
    theirs = deepseek("V3", attention_dropout=0.2)
    assert from_huggingface(theirs).blocks[0].attention.spec.dropout == 0.2
    for given, message in ((SDPAttention, "must have the weights' parameter blocks.0.attention.kv_a_proj_with_mqa.weight; leave it out"),
                           (MLAttention, r"blocks.0.attention.kv_a_proj_with_mqa.weight must have the weights' shape \(20, 32\) together")):
        with pytest.raises(ValueError, match=message):
            from_huggingface(theirs, attention=given)


@pytest.mark.parametrize("options, message", [
    ({"first_k_dense_replace": 1, "n_routed_experts": 4, "moe_intermediate_size": 8},
     "deepseek_v3 config first_k_dense_replace=1: the layers behind that are mixtures of experts.* must be the model's 2 layers"),
    ({"rope_interleave": False}, "deepseek_v3 config rope_interleave=False: not supported, must be True"),
    ({"attention_bias": True}, "deepseek_v3 config attention_bias=True: not supported, must be False"),
])
def test_a_config_beyond_our_models_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        config_from_huggingface(transformers.DeepseekV3Config(**DEEPSEEK | {"rope_parameters": ROPES["default"]} | options))
