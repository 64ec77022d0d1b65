"""The layer with a learned bias by distance: its tables against the papers' formulas, what it learns, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from transformers.models.t5.modeling_t5 import T5Attention

from attnzoo.attention import AttentionSpec, SequenceInfo, distance_bias
from attnzoo.attention.distance_bias import DistanceBiasAttention

SPEC = AttentionSpec(dim=32, n_heads=4, n_kv_heads=2, head_dim=8, layer=0, n_layers=1, positions="none", train_context=16, causal=True)
KINDS = ("t5", "kerple_log", "kerple_power")


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("num_buckets, max_distance", ((32, 128), (8, 20), (64, 1000)))
def test_buckets_are_those_of_t5(causal, num_buckets, max_distance):
    layer = DistanceBiasAttention(replace(SPEC, causal=causal), num_buckets=num_buckets, max_distance=max_distance)
    distance = torch.arange(-2 * max_distance, 2 * max_distance)
    theirs = T5Attention._relative_position_bucket(-distance, not causal, num_buckets, max_distance)
    assert torch.equal(layer.buckets(distance), theirs)
    table, origin = layer.table(5, "cpu")
    wanted = layer.relative_attention_bias(theirs).T
    assert_close(table[:, (distance + origin).clamp(0, table.shape[1] - 1)], wanted)


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_is_the_formula(kind, causal):
    torch.manual_seed(0)
    layer, x, n = DistanceBiasAttention(replace(SPEC, causal=causal), kind=kind, max_distance=10, num_buckets=8).double(), torch.randn(
        1, 19, 32, dtype=torch.float64), 19
    layer.init_weights(0.2, 0.2)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    if kind == "t5":
        bias = layer.relative_attention_bias(T5Attention._relative_position_bucket(-distance, not causal, 8, 10)).permute(2, 0, 1)
    else:
        r1, r2 = layer.r1.clamp(0.01)[:, None, None], layer.r2.clamp(0.01)[:, None, None]
        bias = -r1 * (1 + r2 * distance.abs()).log() if kind == "kerple_log" else -r1 * distance.abs() ** r2
    mask = bias.masked_fill(distance < 0, -torch.inf) if causal else bias
    q, k, v = layer.project(x)
    expected = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask.double(),
                                                                enable_gqa=True)
    expected = layer.o_proj(expected.transpose(1, 2).flatten(-2))
    out = layer(x, SequenceInfo(torch.arange(n)[None]))
    assert_close(out, expected)
    grads = (torch.autograd.grad(y.square().sum(), list(layer.parameters())) for y in (out, expected))
    for ours, theirs in zip(*grads, strict=True):
        assert_close(ours, theirs)
        assert ours.isfinite().all() and ours.any()


def fire(**options) -> DistanceBiasAttention:
    torch.manual_seed(0)
    layer = DistanceBiasAttention(SPEC, kind="fire", **{"threshold": 6.0} | options).double()
    layer.init_weights(0.2, 0.2)
    with torch.no_grad():
        layer.fire.L_multiplier.fill_(-1.1)  # as the authors, by its absolute value
    return layer


def by_the_paper(layer: DistanceBiasAttention, x: torch.Tensor, left: int = 10**6) -> torch.Tensor:
    """One sequence (1, n, dim), pair by pair."""
    n, own = x.shape[1], layer.fire
    bias = torch.full((4, n, n), -torch.inf, dtype=x.dtype)
    for i in range(n):
        for j in range(max(0, i - left), i + 1):
            farthest = torch.maximum(own.L_multiplier.abs() * own.init_L, x.new_tensor(i))
            share = torch.log(own.c * (i - j) + 1) / (torch.log(own.c * farthest + 1) + 1e-6)
            bias = bias.index_put((torch.arange(4), torch.tensor(i), torch.tensor(j)), own.mlp(share[None]))
    q, k, v = (t.transpose(1, 2) for t in layer.project(x))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    return layer.o_proj(out.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("pairs", (2**22, 40), ids=("one tile", "tiles"))
@pytest.mark.parametrize("left", (-1, 4))
def test_fire_is_the_formula_dense_and_packed(pairs, left, monkeypatch):
    monkeypatch.setattr(distance_bias, "PAIRS", pairs)
    layer, x = fire(window_size=(left, 0)), torch.randn(1, 17, 32, dtype=torch.float64)
    bounds = (0, 9, 9, 15)  # two tokens belong to no sequence
    wanted = [by_the_paper(layer, part, 10**6 if left < 0 else left) for part in (x, x[:, :9], x[:, 9:15])]
    packed = SequenceInfo(torch.arange(17), torch.tensor(bounds, dtype=torch.int32), 9)
    whole, parts = layer(x, SequenceInfo(torch.arange(17)[None])), layer(x[0], packed)
    assert_close(whole, wanted[0])
    assert_close(parts[:15], torch.cat(wanted[1:], 1)[0])
    for ours, theirs in ((whole, wanted[0]), (parts[:15], torch.cat(wanted[1:], 1)[0])):
        grads = (torch.autograd.grad(y.square().sum(), list(layer.parameters())) for y in (ours, theirs))
        for mine, expected in zip(*grads, strict=True):
            assert_close(mine, expected)
            assert mine.isfinite().all() and mine.any()


def test_fire_has_the_authors_names_and_counts_far_in_16_bits():
    layer = DistanceBiasAttention(SPEC, kind="fire")
    assert {name for name in layer.state_dict() if name.startswith("fire")} == {
        "fire.c", "fire.init_L", "fire.L_multiplier", "fire.mlp.0.weight", "fire.mlp.0.bias", "fire.mlp.2.weight", "fire.mlp.2.bias"}
    assert layer.metrics() == {"fire_c": pytest.approx(0.1), "fire_threshold": 512.0}
    position = torch.tensor([100_000, 100_001])
    distance = position[:, None] - torch.arange(3)
    exact = layer.double().fire(position, distance)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(layer.float().fire(position, distance), exact.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", (*KINDS, "fire"))
def test_reading_with_the_cache_equals_reading_at_once(kind):
    torch.manual_seed(0)
    layer, x = DistanceBiasAttention(SPEC, kind=kind, max_distance=5, num_buckets=4, threshold=4), torch.randn(2, 12, 32)
    positions = torch.arange(12)[None]
    whole, cache = layer(x, SequenceInfo(positions)), layer.new_cache(2, 20)
    parts = [layer(x[:, part], SequenceInfo(positions[:, part]), cache) for part in (slice(0, 7), slice(7, 8), slice(8, 12))]
    assert_close(torch.cat(parts, 1), whole)


def test_what_is_cut_off_still_learns():
    layer = DistanceBiasAttention(SPEC, kind="kerple_power")
    with torch.no_grad():
        layer.r1.fill_(-1.0)
        layer.r2.fill_(3.0)
    table, _ = layer.table(4, "cpu")
    assert_close(table[0].detach(), -0.01 * torch.arange(4.0) ** 2)
    assert all(g.any() for g in torch.autograd.grad(table.sum(), (layer.r1, layer.r2)))


@pytest.mark.parametrize("options, message", [
    ({"kind": "alibi"}, "attention.kind='alibi': must be one of t5, kerple_log, kerple_power, fire"),
    ({"kind": "fire", "impl": "triton"}, "attention.impl=triton: attention.kind=fire has no paths to choose from; set attention.impl=null"),
    ({"kind": "fire", "threshold": 0}, "attention.threshold=0: must be positive"),
    ({"num_buckets": 3}, "attention.num_buckets=3: must be a positive multiple of 2"),
    ({"max_distance": 16}, "attention.max_distance=16: must be more than the 16 distances"),
    ({"window_size": [1]}, "attention.window_size"),
])
def test_what_it_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        DistanceBiasAttention(SPEC, **options)


def test_several_devices_read_causal_sequences_only():
    DistanceBiasAttention(SPEC).check_context_parallel(packed=True)
    with pytest.raises(ValueError, match="does not go with attention.kind=fire; set trainer.context_parallel=1"):
        DistanceBiasAttention(SPEC, kind="fire").check_context_parallel(packed=False)
    with pytest.raises(ValueError, match="attention.kind=fire: is for causal models; use a gpt model or attention.kind=t5"):
        DistanceBiasAttention(replace(SPEC, causal=False), kind="fire")
    with pytest.raises(ValueError, match="does not go with attention=distance_bias in a bidirectional model"):
        DistanceBiasAttention(replace(SPEC, causal=False)).check_context_parallel(packed=False)
