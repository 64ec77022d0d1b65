"""Pathfinder's generator and images as sequences of pixels."""

import numpy as np
import pytest
import torch
from PIL import Image

from attnzoo.batch import IGNORED
from attnzoo.data import images, pathfinder
from attnzoo.data.pixels import FIRST_PIXEL, PathfinderSource
from attnzoo.data.synthetic import pathfinder as task

SMALL = task.Settings(contour_length=4, n_distractors=1, distractor_length=2)


def test_a_chunk_is_the_same_in_every_run_and_another_seed_gives_another():
    first, again, other = (task.chunk(seed, SMALL, count=20) for seed in ((0, 1), (0, 1), (0, 2)))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])
    pixels, labels = first
    assert pixels.shape == (20, 32, 32) and pixels.dtype == np.uint8 and set(labels) == {0, 1}
    assert (pixels.max((1, 2)) == 255).all() and (pixels == 0).mean() > 0.5


def test_contours_go_on_step_by_step_and_keep_clear_of_each_other():
    artist = task.Artist(task.LRA_32, 1, np.random.default_rng(0))
    _, pairs = artist.attempts()
    assert len(pairs.at) > 20 and pairs.at.shape[1:] == (2, 14, 2)
    assert artist.within(pairs.at).all()
    # a dash is drawn from its far end, so that neighbours' pixels lie between one and three radii apart
    apart = np.linalg.norm(np.diff(pairs.at[:, :, 1:], axis=2), axis=-1)
    assert apart.min() > 1 and apart.max() <= 2 * (artist.settings.dash_length + artist.margin) + 2
    one, two = pairs.at[:, 0], pairs.at[:, 1]
    # a dash is checked against all but the other contour's last one, which becomes an obstacle with the next step
    steps = np.arange(1, 14)
    checked = (steps[None, :] > steps[:, None]) | (steps[None, :] < steps[:, None] - 1)
    assert (np.abs(one[:, 1:, None] - two[:, None, 1:]).max(-1) > 0)[:, checked].all()


def test_few_dashes_begin_a_contour_and_few_distractors_are_drawn_as_in_the_original_program(monkeypatch):
    assert (np.flatnonzero(task._dashes(task.LRA_32, 1).begins) - 180).tolist() == list(range(-150, -120))
    assert [task._dashes(task.LRA_128, margin).begins.sum() for margin in (2, 3)] == [354, 360]
    with pytest.raises(ValueError, match="no contour can begin"):
        task.chunk(0, task.Settings(dash_length=1))
    drawn = []
    draw = task.Artist.draw

    def spy_draw(self, image, contours, contrast):
        drawn.append(len(image) if contours.at.shape[1] == 1 else 0)
        draw(self, image, contours, contrast)

    monkeypatch.setattr(task.Artist, "draw", spy_draw)
    task.chunk(0, task.LRA_32, count=256)
    assert 0.9 < sum(drawn) / 256 < 1.4


@pytest.mark.parametrize("label", (0, 1))
def test_the_class_says_whether_the_discs_lie_on_one_contour(label, monkeypatch):
    """Every image of one class, from the contours that were drawn and the pixels that were marked."""
    drawn, marked = [], []
    draw, mark = task.Artist.draw, task.Artist.mark

    def spy_draw(self, image, contours, contrast):
        drawn.append(contours)
        draw(self, image, contours, contrast)

    def spy_mark(self, image, at):
        marked.append(at)
        mark(self, image, at)

    monkeypatch.setattr(task.Artist, "draw", spy_draw)
    monkeypatch.setattr(task.Artist, "mark", spy_mark)
    _, labels = task.chunk(5, SMALL, count=40)
    begin, end = marked
    ends = drawn[0].at  # the two long contours
    for row in np.flatnonzero(labels == label):
        starts_on = [c for c in (0, 1) if (ends[row, c, 0] == begin[row]).all()]
        ends_on = [c for c in (0, 1) if (ends[row, c, -1] == end[row]).all()]
        assert bool(set(starts_on) & set(ends_on)) == (label == 1)


def test_a_source_gives_the_chunks_images_in_every_split_and_does_not_depend_on_their_number():
    few, many = (list(PathfinderSource(n, 2, 2, 3, SMALL, processes=1).documents()) for n in (3, 5))
    train = [document for document in many if document["split"] == "train"]
    assert [len([d for d in few if d["split"] == split]) for split in PathfinderSource.splits] == [3, 2, 2]
    for a, b in zip(few[:3], train, strict=False):
        assert np.array_equal(a["ids"], b["ids"]) and a["label"] == b["label"]
    ids = few[0]["ids"]
    assert len(ids) == 1024 and ids.min() == FIRST_PIXEL and ids.max() == FIRST_PIXEL + 255
    assert few[0]["text"].encode("latin-1") == (ids - FIRST_PIXEL).astype(np.uint8).tobytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    (({"size": 64}, "data.size=64 must be one of 32, 128"), ({"n_train": 0}, "data.n_train=0"),
     ({"contour_length": 1}, "data.contour_length=1 must be a whole number, at least 2"),
     ({"thickness": 0.3}, "data.thickness=0.3 must be a multiple"), ({"seed_distance": 20}, "data.size=32 must be at least")),
)
def test_settings_that_cannot_be_drawn_are_refused(changes, message):
    given = {"n_train": 2, "n_validation": 2, "n_test": 2, "generator_seed": 0, "size": 32, "seq_len": 1025, "batch_size": 2}
    with pytest.raises(ValueError, match=message):
        pathfinder(**(given | changes))


def test_images_of_folders_become_gray_pixels_with_a_class(tmp_path):
    for split in ("train", "test"):
        for label, value in (("dark", 10), ("light", 200)):
            folder = tmp_path / "pictures" / split / label
            folder.mkdir(parents=True)
            for n in range(10):
                Image.new("RGB", (8, 8), (value + n,) * 3).save(folder / f"{n}.png")
    data = images(path=str(tmp_path / "pictures"), image_column="image", label_column="label", size=4, val_fraction=0.2,
                  test_split="test", seq_len=17, batch_size=4, cache_dir=str(tmp_path / "cache"))
    data.prepare_data()
    data.setup("fit")
    assert data.classes == ["dark", "light"]
    rows = data.documents("test")
    assert len(rows) == 20
    for row in rows:
        pixels = row["input_ids"][1:] - FIRST_PIXEL
        assert len(pixels) == 16 and (pixels < 100).all() == (row["label"] == 0)


@pytest.mark.parametrize("packed", (True, False), ids=("packed", "padded"))
def test_the_same_rows_can_be_pretrained_on_with_masks(packed, tmp_path):
    """Self-pretraining: sequences as the classifier reads them, with some pixels to guess."""
    given = {"n_train": 6, "n_validation": 3, "n_test": 2, "generator_seed": 0, "size": 32, "seq_len": 1025, "batch_size": 3,
             "processes": 1,
             "contour_length": 4, "cache_dir": str(tmp_path), "shuffle": False, "packed": packed}
    plain, masked = pathfinder(**given), pathfinder(**given, objective="mlm", mask_rate=0.3)
    for data in (plain, masked):
        data.prepare_data()
        data.setup("fit")
    assert plain._folder == masked._folder
    for seen, hidden in zip(plain.train_dataloader(), masked.train_dataloader(), strict=True):
        labels, guessed = hidden["labels"], hidden["labels"] != IGNORED
        assert torch.equal(torch.where(guessed, labels, hidden["input_ids"]), seen["input_ids"])
        assert torch.equal(hidden["logits_at"], guessed.flatten().nonzero()[:, 0])
        assert hidden["n_targets"] == guessed.sum() and 0.25 < guessed.float().sum() / hidden["n_tokens"] < 0.35
        assert (seen["input_ids"][guessed] >= FIRST_PIXEL).all(), "only pixels are hidden"
        assert torch.isin(hidden["input_ids"][guessed], torch.tensor(masked.tokenizer.mask_id)).float().mean() > 0.7
