"""attention=block_sparse: patterns from the config, by layer and head, at lengths beyond one block; what it refuses."""

import pytest
import torch
from torch.testing import assert_close

from attnzoo.attention import AttentionSpec
from attnzoo.attention.block_sparse import BlockSparseAttention
from attnzoo.models import BERT, GPT
from attnzoo_kernels.block_sparse import patterns
from attnzoo_kernels.block_sparse.reference import element_mask

pytestmark = pytest.mark.filterwarnings("ignore:.*keeps every block of the model's context")
SPEC = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "layer": 0, "n_layers": 2, "causal": True, "positions": "rotary",
        "train_context": 64}
SIZES = {"vocab_size": 53, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "train_context": 64, "bias": False}
BIGBIRD = {"name": "bigbird", "window": 1, "n_random": 1, "n_global": 1}
LENGTHS = [70, 1, 0, 33, 16]


def build(kind=GPT, pattern="longformer", **options):
    torch.manual_seed(0)
    options = {"block": 16} | options
    model = kind(**SIZES, attention=lambda spec: BlockSparseAttention(spec, pattern=pattern, **options))
    return model.double().eval() if options.get("impl") != "triton" else model.eval()


def layer(pattern, **changes):
    block = changes.pop("block", 16)
    return BlockSparseAttention(AttentionSpec(**SPEC | changes), pattern=pattern, block=block)


def ids(*shape):
    return torch.randint(SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pattern", [{"name": "sliding_window", "window": 1}, BIGBIRD, ["sliding_window", "dense"]], ids=str)
@pytest.mark.parametrize("kind", [GPT, BERT])
def test_packed_padded_and_single_sequences_agree(kind, pattern):
    model = build(kind, pattern)
    tokens = ids(sum(LENGTHS))
    single = torch.cat([model(part[None])[0] for part in tokens.split(LENGTHS) if len(part)])
    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    assert_close(model(tokens, cu_seqlens=cu_seqlens, max_seqlen=70), single)
    mask = torch.arange(70) < torch.tensor(LENGTHS)[:, None]
    rows = torch.zeros(mask.shape, dtype=torch.int64).masked_scatter(mask, tokens)
    assert_close(model(rows, attention_mask=mask)[mask], single)


@pytest.mark.parametrize("name", patterns.PATTERNS)
def test_reading_with_the_cache_equals_reading_at_once(name):
    if name == "global_tokens":
        pytest.skip("refused: most tokens do not see themselves")
    model = build(GPT, name)
    tokens = ids(2, 100)
    caches = model.new_cache(2, 100)
    steps = [model(part, cache=caches) for part in tokens.split([37, 1, 10, 1, 15, 1, 35], dim=1)]
    assert_close(torch.cat(steps, dim=1), model(tokens))


@pytest.mark.slow
def test_the_kernels_serve_the_layer(device):
    reference, model = build(GPT, BIGBIRD), build(GPT, BIGBIRD, impl="triton").to(device)
    tokens, cu_seqlens = ids(100), torch.tensor([0, 67, 100], dtype=torch.int32)
    exact = reference(tokens, cu_seqlens=cu_seqlens, max_seqlen=67)
    ours = model(tokens.to(device), cu_seqlens=cu_seqlens.to(device), max_seqlen=67)
    assert_close(ours.double().cpu(), exact, rtol=1e-3, atol=1e-4)
    ours.logsumexp(-1).sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("causal", [True, False])
def test_heads_see_what_the_pattern_gives_them_and_pairs_are_counted(causal):
    attention = layer({"name": "sparse_transformer_strided", "stride": 3}, causal=causal)
    assert attention.pattern.heads == 4
    for length in (0, 1, 16, 75, 128):
        layout = patterns.sparse_transformer_strided(length, stride=3, heads=4, block=16, causal=causal)
        seen = element_mask(layout.mask, 16, 16, length, length)[0]
        seen = seen.tril() if causal else seen
        assert attention.visible_pairs(length) == int(seen.sum()) // 4
        assert attention.visible_pairs(length) == attention.visible_pairs(length)
    assert layer("dense", causal=causal).visible_pairs(75) == (75 * 76 // 2 if causal else 75 * 75)
    assert not attention.plain and "sparse_transformer_strided" in repr(attention)


def test_a_token_moves_only_the_tokens_that_see_its_block():
    model = build(GPT, {"name": "streaming", "sinks": 1, "window": 0}, block=16)
    tokens = ids(1, 100)
    changed = tokens.clone()
    changed[0, 40] = (changed[0, 40] + 1) % SIZES["vocab_size"]
    moved = (model(tokens) != model(changed)).any(-1)[0]
    assert moved.nonzero().flatten().tolist() == list(range(40, 48))


def test_a_list_of_patterns_goes_round_the_layers():
    chosen = [layer(["sliding_window", BIGBIRD, "dense"], layer=n, n_layers=4).pattern for n in range(4)]
    assert [pattern.name for pattern in chosen] == ["sliding_window", "bigbird", "dense", "sliding_window"]
    assert chosen[1].options == {"block": 16, "window": 1, "n_random": 1, "n_global": 1, "causal": True, "heads": 4}
    assert layer({"name": "dense", "block": 32}).pattern.block == 32
    assert not build(BERT, BIGBIRD).blocks[0].attention.pattern.options["causal"]


@pytest.mark.parametrize(
    "pattern, changes, message",
    [
        ("global_tokens", {}, "in block 1 a token does not see itself"),
        ({"name": "vertical_slash", "slash": [1]}, {}, "in block 1 a token does not see itself; choose options that keep the diagonal"),
        ("star", {}, "must be one of dense, sliding_window"),
        ({"window": 1}, {}, "must be a pattern's name, or {name: ..., option: ...}"),
        ([], {}, "must name a pattern, got an empty list"),
        ({"name": "sliding_window", "widow": 1}, {}, "no option 'widow'; it takes window, block, causal"),
        ({"name": "random", "density": "much"}, {}, "attention.pattern, attention.block: "),
        ({"name": "random", "heads": 3}, {}, "heads=3: must be 1 or the model's 4"),
        ({"name": "dense", "causal": True}, {"causal": False}, "causal=True: follows the model"),
        ({"name": "bigbird", "last_global": True}, {}, "last_global: .*causal=False"),
        ("dense", {"block": 48}, "block: must be one of 16, 32, 64, 128, 256 tokens, got 48"),
        ("dense", {"positions": "alibi"}, "set model.positions=learned or model.positions=rotary"),
    ],
    ids=str,
)
def test_what_it_refuses(pattern, changes, message):
    with pytest.raises(ValueError, match=message):
        layer(pattern, **changes)


@pytest.mark.parametrize(
    "pattern, block, context, message",
    [
        ("longformer", 64, 128, r"keeps every block of the model's context of 128 tokens, .*; set attention.block=16"),
        ({"name": "sliding_window", "window": 9}, 16, 128, "choose smaller options, or a longer context"),
        (BIGBIRD | {"block": 64}, 16, 192, "set attention.block=32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [True, False])
def test_warns_where_a_pattern_drops_nothing(pattern, block, context, message, causal):
    with pytest.warns(UserWarning, match=message):
        layer(pattern, block=block, train_context=context, causal=causal)


@pytest.mark.filterwarnings("error")
def test_is_silent_where_a_pattern_drops_blocks_or_is_dense_by_name():
    layer("longformer", train_context=128)
    layer("dense", block=64)


def test_last_global_is_for_single_sequences():
    model = build(BERT, BIGBIRD | {"last_global": True})
    assert model(ids(2, 70)).shape == (2, 70, 53)
    with pytest.raises(ValueError, match="last_global depends on a sequence's end"):
        model(ids(70), cu_seqlens=torch.tensor([0, 70], dtype=torch.int32), max_seqlen=70)


def test_layouts_are_made_once_for_all_lengths_of_so_many_blocks(monkeypatch):
    model = build(GPT, "sliding_window")
    made, make = [], patterns._make_layout
    monkeypatch.setattr(patterns, "_make_layout", lambda *wanted: made.append(wanted) or make(*wanted))
    patterns._cache.recent.clear()
    for length in (33, 40, 48, 49):
        model(ids(1, length))
    assert [blocks for _, blocks, _, _ in made] == [3, 4]


def test_hydra_composes_patterns_from_the_command_line(tmp_path):
    from hydra.utils import instantiate
    from tiny_run import compose_tiny

    pattern = "attention.pattern=[{name:vertical_slash,vertical:[0,2]},dense]"
    cfg = compose_tiny(tmp_path, "attention=block_sparse", "attention.block=16", pattern)
    layers = [instantiate(cfg.attention)(AttentionSpec(**SPEC | {"layer": n})) for n in range(2)]
    assert layers[0].pattern.options["vertical"] == [0, 2] and layers[1].pattern.name == "dense"
