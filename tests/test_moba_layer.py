"""attention=moba: blocks shorter than a sequence, packed and with a cache; what is counted, logged and refused."""

import pytest
import torch
from torch.testing import assert_close

from attnzoo.attention import AttentionSpec, SequenceInfo
from attnzoo.attention.moba import MoBAAttention
from attnzoo.attention.routing import BlockUse, blocks_before, pairs_of_blocks
from attnzoo.models import GPT
from attnzoo_kernels import moba_attention

SPEC = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "layer": 0, "n_layers": 1, "causal": True, "positions": "rotary",
        "train_context": 64}
SIZES = {"vocab_size": 53, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "train_context": 64, "bias": False}
LENGTHS = [70, 1, 0, 33, 16]


def build(**options):
    torch.manual_seed(0)
    return GPT(**SIZES, attention=lambda spec: MoBAAttention(spec, **{"block_size": 5, "top_k": 3} | options))


def ids(*shape):
    return torch.randint(SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(1))


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def test_packed_and_single_sequences_agree_and_so_does_reading_with_the_cache():
    model, tokens = build().double().eval(), ids(sum(LENGTHS))
    single = torch.cat([model(part[None])[0] for part in tokens.split(LENGTHS) if len(part)])
    assert_close(model(tokens, cu_seqlens=bounds(LENGTHS), max_seqlen=70), single)
    tokens = ids(2, 64)
    caches = model.new_cache(2, 64)
    steps = [model(part, cache=caches) for part in tokens.split([37, 1, 10, 1, 15], dim=1)]
    assert_close(torch.cat(steps, dim=1), model(tokens))


@pytest.mark.slow
def test_the_kernels_serve_the_layer(device):
    reference, model = build(block_size=8).double().eval(), build(block_size=8, impl="triton").to(device)
    tokens, lengths = ids(40), [27, 13]
    exact = reference(tokens, cu_seqlens=bounds(lengths), max_seqlen=27)
    ours = model(tokens.to(device), cu_seqlens=bounds(lengths).to(device), max_seqlen=27)
    assert_close(ours.double().cpu(), exact, rtol=1e-3, atol=1e-4)
    ours.logsumexp(-1).sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_the_layer_is_the_operator():
    torch.manual_seed(0)
    layer, x = MoBAAttention(AttentionSpec(**SPEC), block_size=4, top_k=2), torch.randn(1, 21, 32)
    q, k, v = layer.project(x)
    seq = SequenceInfo(torch.arange(21)[None])
    q, k = layer.apply_positions(q, k, seq)
    assert_close(layer(x, seq), layer.o_proj(moba_attention(q, k, v, block_size=4, top_k=2).flatten(-2)))
    assert layer.visible_pairs(10) == (1 + 2 + 3 + 4) + (5 + 6 + 7 + 8) + (5 + 6)
    # the attention has a backward, which costs twice the forward; the choice of blocks has none
    dense = 6.0 * sum(p.weight.numel() for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)) * 10
    assert layer.flops([10]) == dense + 6.0 * 4 * 16 * layer.visible_pairs(10) + 2.0 * 32 * (4 + 2 * 2)


def test_what_is_logged_of_the_choice():
    seq = SequenceInfo(torch.arange(33)[None])
    even, same = torch.arange(33)[:, None, None] // 8 % 4, torch.zeros(33, 1, 1)  # of every eighth query; 32 tokens before are 4 blocks
    for blocks, entropy, coverage in ((even, 0.96, 1.0), (same, 0.0, 0.25)):
        use = BlockUse()
        use.keep(blocks[None].int(), 8, seq)
        assert use.metrics() == pytest.approx({"block_entropy": entropy, "block_coverage": coverage}, abs=5e-3)
        packed = BlockUse()
        packed.keep(torch.cat([blocks[:8], -blocks[:1] - 1, blocks[1:]]).int(), 8, SequenceInfo(cu_seqlens=bounds([34]), max_seqlen=34))
        assert packed.metrics()["block_coverage"] <= coverage
    layer = MoBAAttention(AttentionSpec(**SPEC), block_size=4).train()
    assert torch.isnan(torch.tensor(layer.metrics()["block_entropy"]))
    layer(torch.randn(1, 40, 32), SequenceInfo(torch.arange(40)[None]))
    assert all(0 < value <= 1 for value in layer.metrics().values())


def test_a_context_of_few_blocks_is_warned_about():
    with pytest.warns(UserWarning, match="attention.top_k=4, attention.block_size=16: queries read every block of the model's"):
        MoBAAttention(AttentionSpec(**SPEC), block_size=16, top_k=4)


@pytest.mark.parametrize("options, message", [
    ({"block_size": 0}, "attention.block_size=0: must be an integer of at least 1"),
    ({"top_k": 1.5}, "attention.top_k=1.5: must be an integer of at least 1"),
])
def test_what_it_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        MoBAAttention(AttentionSpec(**SPEC), **{"block_size": 4} | options)


@pytest.mark.parametrize("block", (1, 3, 16))
@pytest.mark.parametrize("top_k", (1, 2, 5))
def test_pairs_are_counted_without_a_loop_over_tokens(block, top_k):
    for length in (0, 1, 16, 17, 33, 100):
        assert blocks_before(length, block) == sum(i // block for i in range(length))
        assert pairs_of_blocks(length, block, top_k) == sum(min(i // block, top_k - 1) * block + i % block + 1 for i in range(length))
