"""attention=nsa: contexts of many blocks, packed and with a cache; pools, what is counted, logged and refused."""

import math

import pytest
import torch
from torch.testing import assert_close

from attnzoo.attention import AttentionSpec, SequenceInfo
from attnzoo.attention.nsa import NSAttention, Pool
from attnzoo.models import GPT

SPEC = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "layer": 0, "n_layers": 1, "causal": True, "positions": "rotary",
        "train_context": 64}
SIZES = {"vocab_size": 53, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "train_context": 64, "bias": False}
SMALL = {"compress_size": 6, "compress_stride": 3, "block_size": 6, "block_count": 4, "window": 7}
LENGTHS = [70, 1, 0, 33, 16]
BLOCK_USE = ("block_entropy", "block_coverage")


def build(**options):
    torch.manual_seed(0)
    return GPT(**SIZES, attention=lambda spec: NSAttention(spec, **SMALL | options))


def ids(*shape):
    return torch.randint(SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(1))


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


@pytest.mark.parametrize("options", [{}, {"pooling": "mean", "independent_kv": False}], ids=str)
def test_packed_and_single_sequences_agree_and_so_does_reading_with_the_cache(options):
    model, tokens = build(**options).double().eval(), ids(sum(LENGTHS))
    single = torch.cat([model(part[None])[0] for part in tokens.split(LENGTHS) if len(part)])
    assert_close(model(tokens, cu_seqlens=bounds(LENGTHS), max_seqlen=70), single)
    assert_close(model(tokens[:2], cu_seqlens=bounds([2]), max_seqlen=2), single[:2])
    tokens = ids(2, 64)
    caches = model.new_cache(2, 64)
    steps = [model(part, cache=caches) for part in tokens.split([37, 1, 10, 1, 15], dim=1)]
    assert_close(torch.cat(steps, dim=1), model(tokens))


@pytest.mark.slow
def test_the_kernels_serve_the_layer(device):
    reference, model = build().double().eval(), build(impl="triton").to(device)
    tokens, lengths = ids(40), [27, 13]
    exact = reference(tokens, cu_seqlens=bounds(lengths), max_seqlen=27)
    ours = model(tokens.to(device), cu_seqlens=bounds(lengths).to(device), max_seqlen=27)
    assert_close(ours.double().cpu(), exact, rtol=1e-3, atol=1e-4)
    ours.logsumexp(-1).sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_pools():
    tokens = torch.randn(2, 14, 3, 8, dtype=torch.float64)
    chunks = tokens[:, :12].unflatten(1, (4, 3))
    assert_close(Pool(8, 6, 3, "mean")(chunks, None), torch.stack([tokens[:, 3 * c : 3 * c + 6].mean(1) for c in range(3)], 1))
    pool = Pool(8, 6, 3, "mlp").double()
    expected = torch.stack([
        pool.down(torch.nn.functional.gelu(pool.up(tokens[:, 3 * c : 3 * c + 6].transpose(1, 2).flatten(2)))) for c in range(3)], 1)
    assert_close(pool(chunks, None), expected)
    assert pool(chunks[:, :1], None).shape == (2, 0, 3, 8)


def test_what_is_counted():
    layer = NSAttention(AttentionSpec(**SPEC), compress_size=4, compress_stride=2, block_size=4, block_count=2, window=3)
    compressed = [0, 0, 0, 1, 1, 2, 2, 3, 3, 4]
    selected = [1, 2, 3, 4, 5, 6, 7, 8, 5, 6]
    assert layer.visible_pairs(10) == sum(compressed) + sum(selected) + 1 + 2 + 3 * 8
    weights = sum(p.weight.numel() for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, layer.branch_proj))
    pools = sum(p.numel() for p in (*layer.k_pool.parameters(), *layer.v_pool.parameters()) if p.dim() == 2)
    assert layer.flops([10]) == 60.0 * weights + 6.0 * 64 * layer.visible_pairs(10) + 6.0 * pools * 4 * 2 + 2.0 * 32 * sum(compressed)
    assert layer.k_proj.out_features == 3 * 16


def test_what_is_logged():
    layer = NSAttention(AttentionSpec(**SPEC), **SMALL).train()
    assert all(torch.isnan(torch.tensor(value)) for value in layer.metrics().values())
    layer(torch.randn(1, 50, 32), SequenceInfo(torch.arange(50)[None]))
    assert set(layer.metrics()) == {"gate_compressed", "gate_selected", "gate_window", "block_entropy", "block_coverage"}
    assert all(0 < value <= 1 for value in layer.metrics().values())


@pytest.mark.parametrize("block_count", [4, 3])
def test_a_choice_of_the_same_block_shows_in_the_logs(block_count):
    """Without scores the first of equal blocks is chosen, the second of a sequence. Blocks that are read in any case do not count: with
    three blocks there is no choice."""
    layer = NSAttention(AttentionSpec(**SPEC), **SMALL | {"compress_size": 6, "compress_stride": 6, "block_count": block_count}).train()
    torch.nn.init.zeros_(layer.q_proj.weight)
    layer(torch.randn(2, 97, 32), SequenceInfo(torch.arange(97)[None]))  # 16 blocks before the last token's, 14 of which may be chosen
    expected = {"block_entropy": 0.0, "block_coverage": 1 / 14} if block_count == 4 else dict.fromkeys(BLOCK_USE, math.nan)
    assert {name: layer.metrics()[name] for name in BLOCK_USE} == pytest.approx(expected, nan_ok=True)


def test_a_context_of_few_blocks_is_warned_about():
    with pytest.warns(UserWarning, match="attention.block_count=16, attention.block_size=64: queries read every block"):
        NSAttention(AttentionSpec(**SPEC))


@pytest.mark.parametrize("options, message", [
    ({"block_size": 7}, "attention.block_size=7: must be a multiple of attention.compress_stride=3"),
    ({"window": 0}, "attention.window=0: must be an integer of at least 1"),
    ({"pooling": "max"}, "attention.pooling='max': must be mlp or mean"),
])
def test_what_it_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        NSAttention(AttentionSpec(**SPEC), **SMALL | options)


@pytest.mark.parametrize("length", (0, 1, 5, 6, 7, 8, 9, 50))
def test_pairs_are_counted_without_a_loop_over_tokens(length):
    layer = NSAttention(AttentionSpec(**SPEC), **SMALL)
    compressed = [max(0, (t + 1 - 6) // 3 + 1) for t in range(length)]
    expected = sum(n + min(t // 6, 3) * 6 + t % 6 + 1 + min(t + 1, 7) for t, n in enumerate(compressed))
    assert layer.visible_pairs(length) == expected
