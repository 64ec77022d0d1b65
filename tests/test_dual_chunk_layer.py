"""attention=dual_chunk: its defaults, weights of a flash checkpoint, what it refuses, the cache, its own counts."""

import pytest
import torch
from torch.testing import assert_close

from attnzoo.attention.base import AttentionSpec
from attnzoo.attention.dual_chunk import DualChunkAttention
from attnzoo.attention.flash import FlashAttention
from attnzoo.models import BERT, GPT
from attnzoo_kernels.dual_chunk.cases import Case

SIZES = {"vocab_size": 53, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "train_context": 16, "bias": False}
SPEC = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "layer": 0, "n_layers": 1, "causal": True, "positions": "rotary",
        "train_context": 16}


def model(attention=DualChunkAttention, kind=GPT, positions="rotary", **options):
    torch.manual_seed(0)
    return kind(**SIZES, attention=lambda spec: attention(spec, **options), positions=positions).double().eval()


def test_the_chunks_follow_the_training_context():
    layer = DualChunkAttention(AttentionSpec(**SPEC))
    assert (layer.variant, layer.chunk_size, layer.local_size) == ("paper", 16, 4)
    assert DualChunkAttention(AttentionSpec(**SPEC), chunk_size=8).local_size == 2


@pytest.mark.parametrize("kind", (GPT, BERT))
def test_the_weights_of_flash_load_and_agree_up_to_the_training_context(kind):
    flash, chunked = model(FlashAttention, kind), model(kind=kind)
    chunked.load_state_dict(flash.state_dict())
    ids = torch.randint(53, (2, 17), generator=torch.Generator().manual_seed(1))
    assert_close(chunked(ids[:, :16]), flash(ids[:, :16]))
    difference = (chunked(ids) - flash(ids)).abs().amax((0, 2))
    assert difference[16] > 1e6 * torch.finfo(torch.float64).eps  # one token beyond, the farthest distance is another one
    if kind is GPT:
        assert_close(chunked(ids)[:, :16], flash(ids)[:, :16])


@pytest.mark.parametrize("temperature", ("none", "yarn"))
def test_decoding_equals_reading_at_once_far_beyond_the_training_context(temperature):
    gpt = model(temperature=temperature)
    ids = torch.randint(53, (2, 70), generator=torch.Generator().manual_seed(2))
    caches = gpt.new_cache(2, 70)
    parts = [gpt(part, cache=caches) for part in ids.split([20, 1, 1, 30, *[1] * 18], dim=1)]
    assert_close(torch.cat(parts, dim=1), gpt(ids))


def test_the_temperature_acts_beyond_the_training_context_only():
    ids = torch.randint(53, (1, 40), generator=torch.Generator().manual_seed(3))
    plain, scaled = model()(ids), model(temperature="yarn")(ids)
    assert torch.equal(plain[:, :16], scaled[:, :16])
    assert not torch.isclose(plain[:, 16:], scaled[:, 16:]).all(-1).any()


def test_positions_of_the_caller_are_not_looked_at():
    gpt, ids = model(temperature="yarn"), torch.randint(53, (2, 40), generator=torch.Generator().manual_seed(5))
    assert torch.equal(gpt(ids), gpt(ids, position_ids=torch.arange(100, 140)[None]))


def test_packed_documents_have_their_own_chunks_and_temperature():
    gpt = model(temperature="yarn")
    ids, lengths = torch.randint(53, (75,), generator=torch.Generator().manual_seed(4)), [33, 2, 40]
    cu_seqlens = torch.tensor([0, 33, 35, 75], dtype=torch.int32)
    assert_close(gpt(ids, cu_seqlens=cu_seqlens, max_seqlen=40), torch.cat([gpt(part[None])[0] for part in ids.split(lengths)]))


@pytest.mark.parametrize("positions", ("learned", "alibi"))
def test_other_positions_are_refused_with_a_way_out(positions):
    with pytest.raises(ValueError, match=f"dual_chunk does not support positions={positions}; set model.positions=rotary"):
        model(positions=positions)


@pytest.mark.parametrize("options, message", [
    ({"chunk_size": 0}, "attention.chunk_size: must be an int of at least 1, got 0"),
    ({"local_size": 16}, "attention.local_size: must be less than chunk_size=16, got 16"),
    ({"variant": "qwen"}, "attention.variant: must be one of 'paper', 'chunkllama', got 'qwen'"),
    ({"stages": ["near"]}, "attention.stages: must name one or more"),
    ({"temperature": "log"}, "attention.temperature='log': must be one of none, yarn"),
])
def test_wrong_options_are_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        DualChunkAttention(AttentionSpec(**SPEC), **options)


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("stages", (("intra",), ("successive",), ("inter",), ("intra", "inter"), ("intra", "successive", "inter")))
def test_visible_pairs_are_those_of_the_stages(causal, stages):
    layer = DualChunkAttention(AttentionSpec(**SPEC | {"causal": causal}), stages=stages)
    for n in (1, 11, 12, 13, 24, 50):
        scores = Case(seqlen_q=n, chunk_size=16, local_size=4, stages=stages, causal=causal)
        expected = scores.pairs() if len(stages) < 3 else n * (n + 1) // 2 if causal else n * n
        assert layer.visible_pairs(n) == expected
