"""`python -m attnzoo.show`: pictures agree with what is known of each variant otherwise."""

import re

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from matplotlib.image import imread
from omegaconf import OmegaConf
from tiny_run import ROOT, write_checkpoint

from attnzoo import pictures
from attnzoo.attention import AttentionSpec
from attnzoo.attention.base import SequenceInfo
from attnzoo.attention.flash import FlashAttention
from attnzoo.errors import UserError

VARIANTS = sorted(path.stem for path in (ROOT / "configs" / "attention").glob("*.yaml"))
SPEC = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "layer": 0, "n_layers": 1, "causal": True, "positions": "rotary",
        "train_context": 160}
SMALL = {"block_sparse": {"block": 16, "pattern": "bigbird"}, "moba": {"block_size": 16}, "msa": {"block_size": 16, "top_k": 3},
         "nsa": {"compress_size": 8, "compress_stride": 4, "block_size": 8, "block_count": 4, "window": 16, "pooling": "mean",
                 "independent_kv": False}}
LENGTH = 100


def layer(name, causal=True, **options):
    torch.manual_seed(0)
    config = OmegaConf.load(ROOT / "configs" / "attention" / f"{name}.yaml")
    return instantiate(config, **SMALL.get(name, {}), **options)(AttentionSpec(**SPEC | {"causal": causal}))


def draw(tmp_path, *overrides):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("show", overrides=[f"run_dir={tmp_path}", f"output={tmp_path / 'a.png'}", *overrides])
    return pictures.show(cfg, overrides)


@pytest.mark.parametrize("causal", [True, False])
def test_each_variants_mask_has_the_pairs_that_it_counts(causal):
    for variant in VARIANTS:
        if not causal and not layer(variant).supports.bidirectional:
            continue
        built = layer(variant, causal)
        seen = pictures.mask(built, LENGTH) > 0
        # nsa counts compressed keys, and sees all tokens through them
        pairs = LENGTH * (LENGTH + 1) // 2 if variant == "nsa" else built.visible_pairs(LENGTH)
        assert seen.sum() // len(seen) == pairs, variant
        assert not causal or not seen.triu(1).any(), variant
    window = pictures.mask(layer("flash", window_size=[5, 0]), LENGTH)
    ones = torch.ones(LENGTH, LENGTH)
    assert torch.equal(window[0].float(), ones.tril() * ones.triu(-5))


def test_distances_are_those_of_the_papers():
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)

    def check(found, expected):
        for head in found:
            torch.testing.assert_close(head, expected.double().where(j <= i, torch.nan), rtol=0, atol=0.02, equal_nan=True)

    for variant in ("sdpa", "flash", "differential"):
        check(pictures.distances(layer(variant), LENGTH), i - j)
    chunk_size, chunk = 24, 18  # a quarter of 24 is kept for the chunk before
    for variant, top, far in (("paper", chunk_size - 1, chunk_size - 1), ("chunkllama", chunk_size, chunk_size)):
        apart = i // chunk - j // chunk
        query = torch.where(apart == 0, i % chunk, torch.where(apart == 1, (i % chunk + chunk).clamp(max=top), far))
        check(pictures.distances(layer("dual_chunk", variant=variant, chunk_size=chunk_size), LENGTH), query - j % chunk)
    with pytest.raises(UserError, match="each token sees itself"):
        pictures.distances(layer("dual_chunk", chunk_size=chunk_size, stages=["inter"]), LENGTH)


def test_weights_of_a_checkpoint_are_its_softmax(tmp_path, monkeypatch):
    model = write_checkpoint(tmp_path / "a.ckpt")
    found, figure = [], pictures._figure
    monkeypatch.setattr(pictures, "_figure", lambda panels, *rest: found.append(torch.stack([*panels.values()])) or figure(panels, *rest))
    ckpt_path = f"ckpt_path={tmp_path / 'a.ckpt'}"
    said = draw(tmp_path, ckpt_path, "text='one two'")
    assert "weights of attention=flash, layer 0, 7 tokens" in said and imread(tmp_path / "a.png").ndim == 3
    attention, seq = model.blocks[0].attention, SequenceInfo(torch.arange(7)[None])
    x = model.blocks[0].attention_norm(model.embed(torch.tensor([list(b"one two")]), seq.position_ids, None))
    q, k, _ = attention.project(x)
    q, k = (y[0].transpose(0, 1) for y in attention.apply_positions(q, k, seq))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(found[0], scores.softmax(-1))
    assert "attention=dual_chunk, layer 1" in draw(tmp_path, ckpt_path, "text=one", "attention=dual_chunk", "layer=1")



def test_what_cannot_be_drawn_is_refused(tmp_path):
    class Squared(FlashAttention):
        def attend(self, q, k, v, seq):
            return super().attend(q, k, v, seq) ** 2

    with pytest.raises(ValueError, match="belongs in finish"):
        pictures.mask(Squared(AttentionSpec(**SPEC)), LENGTH)
    for overrides, message in (
        (["layer=4"], "layer=4: must be below the model's 4 layers"),
        (["length=32", "head=4"], "head=4: must be below the layer's 4 heads"),
        (["what=distances", "model.positions=alibi"], "needs model.positions=rotary, got alibi"),
        (["what=weights"], "a checkpoint's weights need both"),
        (["output=a.jpg"], "must end in .png"),
        (["attention=nsa", "length=32"], "can be drawn only with attention.independent_kv=false attention.pooling=mean"),
        (["attention=nsa", "length=64", "attention.independent_kv=false"], "can be drawn only with"),
        (["length=1"], "length=1: must be a whole number of at least 2"),
    ):
        with pytest.raises((UserError, ValueError), match=re.escape(message)):
            draw(tmp_path, *overrides)
