"""Temperature by position and gated outputs: the papers' formulas, by hand in float64 and against transformers' own layers."""

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

from attnzoo.attention import AttentionSpec, SequenceInfo
from attnzoo.attention.differential import DifferentialAttention
from attnzoo.attention.flash import FlashAttention
from attnzoo.attention.temperature import make_temperature
from attnzoo.models import BERT, GPT, from_config

transformers = pytest.importorskip("transformers")

SPEC = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "layer": 0, "n_layers": 1, "causal": True, "positions": "none",
        "train_context": 16}
SIZES = {"vocab_size": 53, "dim": 32, "n_layers": 2, "n_heads": 4, "train_context": 16, "attention": FlashAttention}
LLAMA4 = {"name": "llama4", "floor_scale": 8, "attn_scale": 0.3}


def layer_of(**spec):
    torch.manual_seed(0)
    layer = FlashAttention(AttentionSpec(**SPEC | spec)).double()
    layer.init_weights(0.4, 0.4)
    return layer


def by_hand(layer, x, factors):
    """Causal softmax attention without positions of x (tokens, dim), where row i's logits are multiplied by factors[head][i]."""
    shapes = layer.head_shapes()
    q, k, v = (projection(x).unflatten(-1, shapes[name]) for name, projection in
               (("q", layer.q_proj), ("k", layer.k_proj), ("v", layer.v_proj)))
    k, v = (t.repeat_interleave(shapes["q"][0] // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1]) * factors[:, :, None]
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


FORMULAS = {
    "log": ("log", lambda n: max(1.0, math.log(n) / math.log(16))),
    "yarn": ("yarn", lambda n: (0.1 * math.log(max(n / 16, 1)) + 1) ** 2),
    "llama4": (LLAMA4, lambda n: 0.3 * math.log(math.floor(n / 8) + 1) + 1),
    "ssmax": ("ssmax", math.log),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_temperatures_are_the_papers_formulas(name):
    given, formula = FORMULAS[name]
    layer = layer_of(temperature=given)
    heads = torch.ones(4, 1, dtype=torch.float64)
    if name == "ssmax":
        assert_close(layer.ssmax_scale * sum(map(math.log, range(1, 17))) / 16, torch.ones(4, dtype=torch.float64), rtol=1e-6, atol=0)
        layer.ssmax_scale.data = torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=torch.float64)
        heads = layer.ssmax_scale.detach()[:, None]
    x = torch.randn(40, 32, dtype=torch.float64)
    factors = heads * torch.tensor([formula(n) for n in range(1, 41)], dtype=torch.float64)
    found = layer(x[None], SequenceInfo(torch.arange(40)[None]))[0]
    # the factors are in float32
    assert_close(found, layer.o_proj(by_hand(layer, x, factors).flatten(-2)), rtol=1e-5, atol=1e-6)
    plain = layer_of()
    plain.load_state_dict(layer.state_dict(), strict=False)
    assert not torch.allclose(found, plain(x[None], SequenceInfo(torch.arange(40)[None]))[0], atol=1e-3)


@pytest.mark.parametrize("pieces", [[40], [20, 1, 19]])
def test_llama4s_temperature_is_that_of_transformers(pieces):
    from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

    config = transformers.Llama4TextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=4, floor_scale=8, attn_scale=0.3,
        attention_bias=False, attn_implementation="eager")
    theirs = Llama4TextAttention(config, 3)  # the fourth layer has no rotation, and the temperature
    ours = layer_of(temperature=LLAMA4).float()
    theirs.load_state_dict(ours.state_dict())
    x, end = torch.randn(1, 40, 32), 0
    mask = torch.zeros(40, 40).masked_fill(torch.ones(40, 40).triu(1).bool(), -math.inf)[None, None]
    cache, cached = transformers.DynamicCache(), ours.new_cache(1, 40)
    with torch.no_grad():
        for tokens in pieces:
            start, end = end, end + tokens
            expected, _ = theirs(x[:, start:end], None, mask[:, :, start:end, :end], past_key_values=cache)
            found = ours(x[:, start:end], SequenceInfo(torch.arange(start, end)[None]), cached)
            assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_bidirectional_model_counts_its_sequence():
    torch.manual_seed(0)
    model = BERT(**SIZES, attention_temperature="log").double().eval()
    plain = BERT(**SIZES).double().eval()
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(53, (1, 64))
    for short in (ids[:, :9], ids[:, :16]):
        assert torch.equal(model(short), plain(short))
    for block in plain.blocks:  # log 64 / log 16 = 1.5 on the queries of every token
        block.attention.q_proj.weight.data *= 1.5
        block.attention.q_proj.bias.data *= 1.5
    assert_close(model(ids), plain(ids), rtol=1e-6, atol=1e-6)


def test_a_temperature_is_read_and_taken_away_without_new_weights_unless_it_learns():
    attention = {"_target_": "attnzoo.attention.flash.FlashAttention"}
    model = {"_target_": "attnzoo.models.GPT", **{key: value for key, value in SIZES.items() if key != "attention"}}
    plain = from_config(model, attention)
    for temperature in ("none", "log", "yarn", "llama4", LLAMA4):
        from_config(model | {"attention_temperature": temperature}, attention).load_state_dict(plain.state_dict())
    learned = from_config(model | {"attention_temperature": "ssmax"}, attention)
    assert learned.state_dict().keys() - plain.state_dict().keys() == {f"blocks.{i}.attention.ssmax_scale" for i in range(2)}
    assert learned.metrics() == {f"attention/ssmax_scale/{i}": pytest.approx(16 / math.lgamma(17)) for i in range(2)}


def test_dual_chunk_has_one_temperature():
    sizes = {"_target_": "attnzoo.models.GPT", **{key: value for key, value in SIZES.items() if key != "attention"}}
    dual = {"_target_": "attnzoo.attention.dual_chunk.DualChunkAttention"}
    with pytest.raises(ValueError, match="attention.temperature=yarn: does not go with attention_temperature=log"):
        from_config(sizes | {"attention_temperature": "log"}, dual | {"temperature": "yarn"})
    torch.manual_seed(0)
    its_own = from_config(sizes, dual | {"temperature": "yarn"}).double().eval()
    the_models = from_config(sizes | {"attention_temperature": "yarn"}, dual).double().eval()
    the_models.load_state_dict(its_own.state_dict())
    ids = torch.randint(53, (1, 60))
    assert_close(the_models(ids), its_own(ids), rtol=1e-5, atol=1e-6)


def test_no_length_is_built_into_compiled_factors():
    torch._dynamo.reset()
    counter, temperature = CompileCounter(), make_temperature("log", 16)
    compiled = torch.compile(temperature.factor, backend=counter, fullgraph=True)
    for n in (9, 10, 40):
        assert torch.equal(compiled(torch.arange(1, n)), temperature.factor(torch.arange(1, n)))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("gate", ["elementwise", "head"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_gate_multiplies_the_output_by_a_sigmoid_of_the_input(gate, bias):
    layer = layer_of(gate=gate, bias=bias)
    x = torch.randn(12, 32, dtype=torch.float64)
    scores = layer.g_proj(x)
    assert scores.shape == (12, 32 if gate == "elementwise" else 4) and (layer.g_proj.bias is not None) is bias
    out = by_hand(layer, x, torch.ones(4, 12, dtype=torch.float64))
    gated = out * (1 / (1 + torch.exp(-scores))).view(12, 4, -1)
    assert_close(layer(x[None], SequenceInfo(torch.arange(12)[None]))[0], layer.o_proj(gated.flatten(-2)))


def test_qwen3_nexts_gated_layer_is_that_of_transformers():
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

    config = transformers.Qwen3NextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=4, max_position_embeddings=64,
        rms_norm_eps=1e-5, attn_implementation="eager")
    theirs = Qwen3NextAttention(config, 3)
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rope = config.rope_parameters
    ours = FlashAttention(AttentionSpec(**SPEC | {"head_dim": 16, "positions": "rotary", "qk_norm": True, "gate": "elementwise"},
                                        rope_base=rope["rope_theta"], partial_rotary_factor=rope["partial_rotary_factor"]))
    state = theirs.state_dict()
    queries, gates = state.pop("q_proj.weight").unflatten(0, (4, 2, 16)).unbind(1)
    state |= {"q_proj.weight": queries.flatten(0, 1), "g_proj.weight": gates.flatten(0, 1)}
    ours.load_state_dict(state | {name: 1 + state[name] for name in ("q_norm.weight", "k_norm.weight")})
    x, positions = torch.randn(2, 20, 32), torch.arange(20)[None]
    mask = torch.zeros(20, 20).masked_fill(torch.ones(20, 20).triu(1).bool(), -math.inf)[None, None]
    with torch.no_grad():
        expected, _ = theirs(x, Qwen3NextRotaryEmbedding(config)(x, positions), mask)
        assert_close(ours(x, SequenceInfo(positions)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("gate", ["none", "elementwise", "head"])
def test_a_narrowed_mlp_makes_up_for_what_the_baseline_has_not(version, gate):
    """The baseline has the gate, too."""
    sizes = {**SIZES, "dim": 64, "n_layers": 1, "attention_gate": gate, "mlp_dim": 200}
    counts = [sum(p.numel() for p in GPT(**sizes | {"attention": make}).blocks.parameters()) for make in (
        FlashAttention, lambda spec: DifferentialAttention(spec, version=version, match_parameters=True))]
    assert abs(counts[0] - counts[1]) <= 4 * (2 * 64 + 1) + 64
