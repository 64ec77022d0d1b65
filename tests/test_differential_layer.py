"""The differential layer: versions, parameter counts, lambda, the norm, and weights of unilm and of transformers' DiffLlama."""

import logging
import math
import warnings

import pytest
import torch
from torch.testing import assert_close

from attnzoo.attention import AttentionSpec, SequenceInfo
from attnzoo.attention.differential import DifferentialAttention, load_diffllama, load_unilm
from attnzoo.attention.flash import FlashAttention
from attnzoo.models import BERT, GPT, from_config
from benchmarks.accuracy import error_ratio

SPEC = {
    "dim": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "layer": 3, "n_layers": 4, "causal": True, "positions": "rotary",
    "train_context": 16,
}
SIZES = {"vocab_size": 53, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "train_context": 16}
LENGTHS = [7, 1, 0, 8]


def layer(version=1, spec=None, **options):
    torch.manual_seed(0)
    return DifferentialAttention(AttentionSpec(**SPEC | (spec or {})), version=version, **options).double()


def sequence(length):
    return SequenceInfo(position_ids=torch.arange(length)[None])


def interleaved_rope(x, base=10000.0):
    """GPT-J's rotation of neighbouring channels, for x (batch, seqlen, heads, width), by tables in float32 like the layer's."""
    width = x.shape[-1]
    angles = torch.arange(x.shape[1])[:, None] * base ** (-torch.arange(0, width, 2).double() / width)
    factors = torch.complex(angles.cos().float(), angles.sin().float())[:, None]
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * factors
    return torch.view_as_real(turned).flatten(-2)


def causal_map(q, k):
    """Softmax weights of one head, q and k (batch, seqlen, width)."""
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf).softmax(-1)


def unilm_state(version, dim=32, heads=4, kv_heads=2, width=8, norm_weight=True):
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.3

    if version == 2:
        return {"q_proj.weight": normal(2 * heads * width, dim), "k_proj.weight": normal(kv_heads * width, dim),
                "v_proj.weight": normal(kv_heads * width, dim), "o_proj.weight": normal(dim, heads * width),
                "lambda_proj.weight": normal(heads, dim)}
    state = {"q_proj.weight": normal(heads * width, dim), "k_proj.weight": normal(kv_heads * width, dim),
             "v_proj.weight": normal(kv_heads * width, dim), "out_proj.weight": normal(dim, heads * width)}
    state |= {f"lambda_{name}": normal(width) for name in ("q1", "k1", "q2", "k2")}
    return state | ({"subln.weight": normal(2 * width) + 1} if norm_weight else {})


def unilm_version_1(state, x, depth):
    """The published layer, head by head: 2 pairs over 1 pair of keys and one value head of width 16."""
    q, k = (interleaved_rope((x @ state[f"{n}_proj.weight"].T).unflatten(-1, (-1, 8))) for n in "qk")
    v = x @ state["v_proj.weight"].T
    initial = 0.8 - 0.6 * math.exp(-0.3 * depth)
    lam = (state["lambda_q1"] @ state["lambda_k1"]).exp() - (state["lambda_q2"] @ state["lambda_k2"]).exp() + initial
    outputs = []
    for pair in range(2):
        first, second = (causal_map(q[:, :, 2 * pair + i], k[:, :, i]) for i in range(2))
        out = (first - lam * second) @ v
        out = out * (out.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        outputs.append(out * state.get("subln.weight", torch.ones(16, dtype=out.dtype)) * (1 - initial))
    return torch.cat(outputs, -1) @ state["out_proj.weight"].T


def unilm_version_2(state, x):
    """The published layer, head by head: 4 pairs of query heads, two to each of the 2 key and value heads."""
    q, k = (interleaved_rope((x @ state[f"{n}_proj.weight"].T).unflatten(-1, (-1, 8))) for n in "qk")
    v = (x @ state["v_proj.weight"].T).unflatten(-1, (-1, 8))
    lam = (x @ state["lambda_proj.weight"].T).sigmoid()
    outputs = []
    for pair in range(4):
        first, second = (causal_map(q[:, :, 2 * pair + i], k[:, :, pair // 2]) @ v[:, :, pair // 2] for i in range(2))
        outputs.append(first - lam[..., pair, None] * second)
    return torch.cat(outputs, -1) @ state["o_proj.weight"].T


@pytest.mark.parametrize("norm_weight", [True, False])
def test_unilm_s_version_1_gives_the_same_output_from_the_same_weights(norm_weight):
    state, x = unilm_state(1, norm_weight=norm_weight), torch.randn(2, 9, 32, dtype=torch.float64)
    ours = layer(1)
    load_unilm(ours, state)
    assert_close(ours(x, sequence(9)), unilm_version_1(state, x, depth=3))


def test_unilm_s_version_2_gives_the_same_output_from_the_same_weights():
    state, x = unilm_state(2), torch.randn(2, 9, 32, dtype=torch.float64)
    ours = layer(2)
    load_unilm(ours, state)
    assert_close(ours(x, sequence(9)), unilm_version_2(state, x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (8, 4), (4, 2)])
def test_diffllama_gives_the_same_output_from_the_same_weights(heads, kv_heads, bias):
    from transformers import DiffLlamaConfig
    from transformers.models.diffllama import modeling_diffllama as theirs

    config = DiffLlamaConfig(hidden_size=64, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16, rms_norm_eps=1e-4,
                             attention_bias=bias, rope_theta=500.0, attn_implementation="eager")
    torch.manual_seed(0)
    attention = theirs.DiffLlamaAttention(config, layer_idx=2)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    spec = {"dim": 64, "n_heads": heads, "n_kv_heads": kv_heads, "head_dim": 16, "layer": 2, "bias": bias, "rope_base": 500.0}
    ours = layer(spec=spec, norm_eps=1e-4).float()
    load_diffllama(ours, attention.state_dict())
    x = torch.randn(2, 11, 64)

    def expected(dtype):
        positions = theirs.DiffLlamaRotaryEmbedding(config)(x, torch.arange(11)[None])
        mask = torch.full((11, 11), -torch.inf, dtype=dtype).triu(1)[None, None]
        return attention.to(dtype)(x.to(dtype), tuple(t.to(dtype) for t in positions), mask)[0]

    assert error_ratio(ours(x, sequence(11)), expected(torch.float32), expected(torch.float64)) <= 1


@pytest.mark.parametrize("options", [{"version": 2}, {"norm": False}])
def test_diffllama_s_weights_fit_version_1_with_its_norm_only(options):
    with pytest.raises(ValueError, match="layer: must be of version 1 with its norm"):
        load_diffllama(layer(**options), {})


def test_version_1_has_the_baseline_s_parameters_and_those_of_lambda_and_norm():
    ours, flash = layer(1), FlashAttention(AttentionSpec(**SPEC))
    counts = [sum(p.numel() for p in module.parameters()) for module in (ours, flash)]
    assert counts[0] == counts[1] + 4 * 8 + 2 * 8


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_mlp_narrows_to_the_baseline_s_parameters_and_both_counts_are_logged(mlp, bias, caplog):
    def model(attention):
        return GPT(**SIZES, mlp=mlp, bias=bias, attention=attention)

    flash = model(FlashAttention)
    wide = model(lambda spec: DifferentialAttention(spec, version=2))
    with caplog.at_level(logging.INFO):
        matched = model(lambda spec: DifferentialAttention(spec, version=2, match_parameters=True))
    assert wide.n_parameters > flash.n_parameters and wide.blocks[0].mlp.up_proj.out_features == flash.blocks[0].mlp.up_proj.out_features
    # half of 8 hidden units a layer
    assert abs(matched.n_parameters - flash.n_parameters) <= 2 * 4 * (3 * 64 + 2)
    block, baseline = ([p.numel() for n, p in m.blocks[0].named_parameters() if "down_proj.bias" not in n and "_norm" not in n]
                       for m in (matched, flash))
    assert len(caplog.records) == 1
    assert f"{sum(block)} parameters" in caplog.text and f"the baseline has {sum(baseline)} " in caplog.text


def test_an_mlp_too_narrow_to_match_is_refused():
    with pytest.raises(ValueError, match="match_parameters=true: the MLP of width 8"):
        GPT(**SIZES, mlp_dim=8, attention=lambda spec: DifferentialAttention(spec, version=2, match_parameters=True))


def test_lambda_starts_near_lambda_init_and_is_logged_by_layer():
    model = GPT(**SIZES | {"n_layers": 3}, attention=DifferentialAttention)
    metrics = model.metrics()
    for depth in range(3):
        attention = model.blocks[depth].attention
        vectors = [getattr(attention, f"lambda_{name}").double() for name in ("q1", "k1", "q2", "k2")]
        expected = (vectors[0] @ vectors[1]).exp() - (vectors[2] @ vectors[3]).exp() + 0.8 - 0.6 * math.exp(-0.3 * depth)
        assert metrics[f"attention/lambda/{depth}"] == pytest.approx(expected.item())


def test_version_2_logs_the_mean_of_its_last_training_step():
    model = GPT(**SIZES, attention=lambda spec: DifferentialAttention(spec, version=2)).train()
    seen = []
    model.blocks[1].attention.lambda_proj.register_forward_hook(lambda module, inputs, output: seen.append(output.sigmoid().mean().item()))
    model(torch.arange(12)[None])
    assert model.metrics()["attention/lambda/1"] == pytest.approx(seen[0])
    model.eval()(torch.arange(5)[None])
    assert model.metrics()["attention/lambda/1"] == pytest.approx(seen[0]) != seen[1]


def test_without_its_norm_version_1_is_linear_in_the_values():
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    outputs = {}
    for norm in (True, False):
        ours = layer(norm=norm)
        assert hasattr(ours.head_norm, "weight") == norm
        outputs[norm] = ours(x, sequence(6))
        with torch.no_grad():
            ours.v_proj.weight *= 3
        linear = torch.allclose(ours(x, sequence(6)), 3 * outputs[norm])
        assert linear != norm
    assert not torch.allclose(outputs[True], outputs[False])


@pytest.mark.parametrize("model", [GPT, BERT])
@pytest.mark.parametrize("options", [{"version": 2}, {"version": 2, "match_parameters": True}, {"norm": False}], ids=str)
def test_packed_padded_and_single_sequences_agree_for_every_option(model, options):
    # the contract test covers version 1 as configured
    torch.manual_seed(0)
    config = {"_target_": "attnzoo.attention.differential.DifferentialAttention", **options}
    net = from_config({"_target_": f"attnzoo.models.{model.__name__}", **SIZES}, config).double().eval()
    ids = torch.randint(53, (sum(LENGTHS),))
    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    single = torch.cat([net(part[None])[0] for part in ids.split(LENGTHS) if len(part)])
    assert_close(net(ids, cu_seqlens=cu_seqlens, max_seqlen=8), single)
    mask = torch.arange(8) < torch.tensor(LENGTHS)[:, None]
    rows = torch.zeros(mask.shape, dtype=torch.int64).masked_scatter(mask, ids)
    assert_close(net(rows, attention_mask=mask)[mask], single)
    net.train()(ids, cu_seqlens=cu_seqlens, max_seqlen=8).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in net.parameters())


def test_version_2_reads_with_the_cache_as_at_once():
    torch.manual_seed(0)
    net = GPT(**SIZES, attention=lambda spec: DifferentialAttention(spec, version=2)).double().eval()
    ids = torch.randint(53, (2, 12))
    caches = net.new_cache(2, 12)
    assert_close(torch.cat([net(part, cache=caches) for part in ids.split([6, 1, 5], dim=1)], dim=1), net(ids))


def test_norm_under_autocast_is_pytorchs_fused_one():
    """Which takes input and weight of one dtype only, and else warns at the first call of a process."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings(action="error"):
            ours = layer().float()
            ours(torch.randn(1, 5, 32), sequence(5)).sum().backward()
    finally:
        torch.set_warn_always(always)
    assert ours.head_norm.weight.grad.dtype == torch.float32


def test_flops_count_both_maps():
    for version, heads, extra in ((1, 4 * (8 + 16), 0), (2, 8 * (8 + 8), 32 * 4)):
        ours = layer(version)
        products = sum(p.weight.numel() for p in (ours.q_proj, ours.k_proj, ours.v_proj, ours.o_proj)) + extra
        assert ours.flops([5]) == 6 * (products * 5 + heads * 15)


@pytest.mark.parametrize("change, options, message", [
    ({"n_heads": 3, "n_kv_heads": 1}, {}, "n_heads=3: attention=differential pairs heads"),
    ({"n_kv_heads": 1}, {}, r"n_kv_heads=1: .*set model\.n_kv_heads, or attention\.version=2"),
    ({}, {"version": 3}, "attention.version=3: must be 1 or 2"),
    ({"dropout": 0.1}, {}, "no attention dropout"),
    ({"positions": "alibi"}, {}, "does not support positions=alibi"),
])
def test_what_cannot_be_is_refused(change, options, message):
    with pytest.raises(ValueError, match=message):
        layer(spec=change, **options)


def test_one_key_head_serves_version_2():
    assert layer(2, spec={"n_kv_heads": 1})(torch.randn(1, 4, 32, dtype=torch.float64), sequence(4)).isfinite().all()
