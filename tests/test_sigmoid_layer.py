"""Sigmoid attention's layer: which bias it takes, and what it refuses."""

import math

import pytest
import torch

from attnzoo.attention import AttentionSpec, SequenceInfo
from attnzoo.attention.sigmoid import SigmoidAttention
from attnzoo_kernels import sigmoid_attention

SPEC = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "layer": 0, "n_layers": 1, "positions": "none", "train_context": 16}


@pytest.mark.parametrize("causal, given, expected", [
    (True, {}, -math.log(16)), (False, {}, -math.log(16)), (True, {"sigmoid_bias": -2}, -2.0),
    (False, {"sigmoid_bias": "length"}, -math.log(7)),
])
def test_the_bias(causal, given, expected):
    torch.manual_seed(0)
    layer, x = SigmoidAttention(AttentionSpec(**SPEC, causal=causal), **given), torch.randn(1, 7, 32)
    q, k, v = layer.project(x)
    by_hand = layer.o_proj(sigmoid_attention(q, k, v, causal=causal, sigmoid_bias=expected).flatten(-2))
    torch.testing.assert_close(layer(x, SequenceInfo(torch.arange(7)[None])), by_hand)


def test_a_longer_training_keeps_the_bias_of_the_first():
    spec = AttentionSpec(**SPEC | {"train_context": 64}, original_context=16, causal=True)
    assert SigmoidAttention(spec).sigmoid_bias == -math.log(16)


@pytest.mark.parametrize("options, message", [
    ({"sigmoid_bias": "length"}, "attention.sigmoid_bias=length: earlier tokens of a causal model would depend on how many follow"),
    ({"window_size": [1]}, "attention.window_size"),
])
def test_what_it_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        SigmoidAttention(AttentionSpec(**SPEC, causal=True), **options)
