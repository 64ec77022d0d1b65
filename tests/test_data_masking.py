"""Masked rows: whole documents, the published rates, the same masks in every layout."""

import numpy as np
import pytest
import torch

from attnzoo.batch import IGNORED, Batch
from attnzoo.data.loader import ResumableLoader
from attnzoo.data.masking import MaskedRows

VOCAB, EOS, PAD, MASK, CLS, SEP = 1000, 990, 991, 992, 993, 994


class FramedTokenizer:
    vocab_size, eos_id, pad_id, mask_id, cls_id, sep_id = VOCAB, EOS, PAD, MASK, CLS, SEP


class BareTokenizer(FramedTokenizer):
    cls_id = sep_id = None


class Documents:
    """The part of TokenStore that rows need, with tokens below 900 and EOS at each end."""

    def __init__(self, lengths):
        self.lengths = np.array(lengths)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.tokens = np.random.default_rng(0).integers(0, 900, self.offsets[-1])
        self.tokens[self.offsets[1:] - 1] = EOS


def make_rows(lengths, seq_len=16, *, tokenizer=FramedTokenizer, mask_rate=0.3, seed=0, shuffle=True, packed=True, **options):
    options = {"mask_rate": mask_rate, "seed": seed, "shuffle": shuffle, "packed": packed, **options}
    return MaskedRows(Documents(lengths), seq_len, tokenizer=tokenizer, **options)


def everything(rows, epoch=0):
    return rows.batch(epoch, np.arange(rows.n_rows))


@pytest.mark.parametrize("tokenizer", [FramedTokenizer, BareTokenizer])
def test_labels_restore_the_documents(tokenizer):
    rows = make_rows([2, 15, 16, 17, 40], tokenizer=tokenizer)
    batch = everything(rows)
    restored = torch.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"]).split(batch["lengths"].tolist())
    if tokenizer is FramedTokenizer:
        assert all(s[0] == CLS and s[-1] == SEP for s in restored)
        restored = [s[1:-1] for s in restored]
    assert max(batch["lengths"]) == 16
    assert torch.cat(restored).tolist() == rows.store.tokens[rows.store.tokens != EOS].tolist()
    assert batch["n_tokens"] == len(batch["input_ids"]) == batch["lengths"].sum()


@pytest.mark.parametrize("rate", [0.15, 0.3])
def test_rates(rate):
    batch = everything(make_rows([2001] * 100, 512, tokenizer=BareTokenizer, mask_rate=rate))
    chosen = batch["labels"] != IGNORED
    ids, labels = batch["input_ids"][chosen], batch["labels"][chosen]
    n, total = len(labels), batch["n_tokens"]

    def is_share(count, of, share):
        """Within five standard deviations of a binomial."""
        return abs(count - of * share) < 5 * (of * share * (1 - share)) ** 0.5

    assert is_share(n, total, rate)
    assert is_share(int((ids == MASK).sum()), n, 0.8 + 0.1 / VOCAB)
    assert is_share(int((ids == labels).sum()), n, 0.1 + 0.1 / VOCAB)
    random = ids[(ids != MASK) & (ids != labels)]
    assert random.min() >= 0 and random.max() < VOCAB and len(random.unique()) > 0.9 * VOCAB
    assert torch.equal(batch["input_ids"][~chosen], torch.from_numpy(_text(rows_of=[2001] * 100))[~chosen])


def _text(rows_of):
    documents = Documents(rows_of)
    return documents.tokens[documents.tokens != EOS]


def test_every_sequence_has_something_to_guess():
    batch = everything(make_rows([2] * 50, mask_rate=0.01))
    assert batch["n_targets"] == 50


def test_logits_at_are_the_targets():
    for packed in (True, False):
        batch = everything(make_rows([5, 40, 9], packed=packed))
        assert torch.equal(batch["logits_at"], (batch["labels"].flatten() != IGNORED).nonzero()[:, 0])
        assert batch["n_targets"] == len(batch["logits_at"])
        assert batch.keys() <= Batch.__annotations__.keys()


def test_packed_and_padded_hold_the_same():
    packed, padded = (everything(make_rows([5, 40, 9, 100], 100, packed=p), epoch=3) for p in (True, False))
    mask = padded["attention_mask"]
    assert mask.dtype == torch.bool and mask.shape == padded["input_ids"].shape == (5, 100)
    for key in ("input_ids", "labels"):
        assert torch.equal(padded[key][mask], packed[key])
    assert (padded["input_ids"][~mask] == PAD).all() and (padded["labels"][~mask] == IGNORED).all()
    assert torch.equal(padded["labels"].flatten()[padded["logits_at"]], packed["labels"][packed["logits_at"]])
    assert padded["n_tokens"] == packed["n_tokens"] == mask.sum()


def test_padding_is_no_longer_than_needed():
    assert everything(make_rows([5, 60], 512, packed=False))["input_ids"].shape == (2, 64)


def test_masks_depend_on_seed_epoch_and_sequence_only():
    rows = make_rows([30] * 20)
    alone = rows.batch(1, np.array([7]))["input_ids"]
    among = rows.batch(1, np.array([3, 7, 9]))
    begin = among["lengths"][0]
    assert torch.equal(among["input_ids"][begin : begin + len(alone)], alone)
    assert not torch.equal(rows.batch(2, np.array([7]))["input_ids"], alone)
    assert not torch.equal(make_rows([30] * 20, seed=1).batch(1, np.array([7]))["input_ids"], alone)


def test_order_is_a_permutation_by_epoch():
    rows = make_rows([30] * 20)
    assert sorted(rows.order(0, 4)) == sorted(rows.order(1, 4)) == list(range(rows.n_rows))
    assert rows.order(0, 4).tolist() != rows.order(1, 4).tolist()
    assert make_rows([30] * 20, shuffle=False).order(1, 4).tolist() == list(range(rows.n_rows))


def test_like_lengths_are_padded_less_and_least_by_a_schedule():
    lengths = np.random.default_rng(0).integers(2, 500, 1003).tolist()

    def efficiency(batching, step_tokens=0):
        rows = make_rows(lengths, 512, packed=False, batching=batching, step_tokens=step_tokens)
        order = rows.order(0, 8)
        assert len(order) == rows.n_slots(8) and sorted(order[order < rows.n_rows]) == list(range(rows.n_rows))
        batches = [rows.batch(0, order[i : i + 8]) for i in range(0, len(order), 8)]
        return sum(b["n_tokens"] for b in batches) / sum(b["input_ids"].numel() for b in batches), len(batches)

    assert efficiency("by_length")[0] > 0.85 > 0.65 > efficiency("random")[0]
    free, dear = efficiency("scheduled"), efficiency("scheduled", 10**6)
    assert free[0] >= dear[0] > efficiency("by_length")[0] and dear[1] == 126 <= free[1]


def test_a_schedules_steps_are_dealt_to_devices_and_end_with_the_epoch():
    rows = make_rows([20, 30, 40, 300, 310, 480, *[90] * 9], 512, packed=False, batching="scheduled", step_tokens=64)
    loaders = [ResumableLoader(rows, 4, rank=rank, world_size=2) for rank in (0, 1)]
    seen, (one, other) = [], (list(loader) for loader in loaders)
    assert len(one) == len(other) == len(loaders[0]) == rows.n_slots(8) // 8
    for a, b in zip(one, other, strict=True):
        numbers = [batch["attention_mask"].sum().item() and len(batch["lengths"]) * (batch["n_tokens"] > 0) for batch in (a, b)]
        assert abs(numbers[0] - numbers[1]) <= 1
        seen += [length for batch in (a, b) if batch["n_tokens"] for length in batch["lengths"].tolist()]
    assert sorted(seen) == sorted(rows._lengths + 2 * rows.frame)
    assert rows.order(0, 8).tolist() != rows.order(1, 8).tolist()


LENGTHS = np.random.default_rng(0).integers(20, 500, 1003).tolist()


def steps(rows, epoch, group, devices):
    """The batches of all devices in an epoch, whose last step is filled with its first rows."""
    order = rows.order(epoch, group)
    assert sorted(order) == list(range(rows.n_rows))
    order = np.resize(order, -(-len(order) // group) * group)
    return [rows.batch(epoch, mine) for mine in order.reshape(-1, group // devices)]


@pytest.mark.parametrize("tokenizer", [FramedTokenizer, BareTokenizer])
@pytest.mark.parametrize(("group", "devices"), [(32, 1), (32, 2), (24, 4), (15, 1)])
def test_balanced_steps_have_one_shape_and_little_padding(tokenizer, group, devices):
    rows, plain = (make_rows(LENGTHS, 512, tokenizer=tokenizer, mask_rate=0.15, batching=b) for b in ("balanced", "random"))
    batches = [batch for epoch in range(2) for batch in steps(rows, epoch, group, devices)]
    keys = ("input_ids", "labels", "position_ids", "logits_at", "cu_seqlens")
    (slots,) = {tuple(len(batch[key]) for key in keys) for batch in batches}
    # one shape for random steps would have to be that of the longest
    assert slots[0] < max(batch["n_tokens"] for batch in steps(plain, 0, group, devices))
    assert rows.order(0, group).tolist() != rows.order(1, group).tolist()


def test_a_balanced_batch_holds_the_same_as_a_plain_one():
    plain, balanced = make_rows(LENGTHS, 512), make_rows(LENGTHS, 512, batching="balanced")
    chosen = balanced.order(0, 16)[:16]
    a, b = plain.batch(0, chosen), balanced.batch(0, chosen)
    n, targets = a["n_tokens"], a["n_targets"]
    assert (n, targets) == (b["n_tokens"], b["n_targets"])
    assert len(b["input_ids"]) % 128 == 0 and len(b["logits_at"]) % 64 == 0
    for key in ("input_ids", "labels", "position_ids"):
        assert torch.equal(a[key], b[key][:n])
    assert torch.equal(a["logits_at"], b["logits_at"][:targets])
    assert torch.equal(a["cu_seqlens"], b["cu_seqlens"]) and b["lengths"].sum() == n
    assert (b["input_ids"][n:] == PAD).all() and not b["position_ids"][n:].any()
    assert len(b["logits_at"]) > targets and (b["labels"][b["logits_at"][targets:]] == IGNORED).all()


def test_more_tokens_than_usual_get_more_slots():
    rows = make_rows([20] * 99 + [500], 512, mask_rate=0.5, batching="balanced", seed=1)
    usual, more = (rows.batch(0, np.array([row] * 30)) for row in (0, 99))
    assert len(usual["input_ids"]) < more["n_tokens"] < len(more["input_ids"])
    assert len(usual["logits_at"]) < more["n_targets"] <= len(more["logits_at"])


def test_random_lengths_keep_every_token():
    documents = [2, 9000, 12, 17, *range(60, 100), 5000]
    rows = make_rows(documents, 64, tokenizer=BareTokenizer, min_seq_len=16)
    batch = everything(rows)
    restored = torch.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])
    assert restored.tolist() == _text(documents).tolist()
    lengths = batch["lengths"]
    assert set(lengths) == {1, 11, *range(16, 65)}  # two documents are shorter than the shortest sequence
    assert make_rows([9000], 64, min_seq_len=16, seed=1).n_rows == make_rows([9000], 64, min_seq_len=16, seed=2).n_rows


def test_rows_beyond_the_end_are_left_out():
    rows = make_rows([5, 9], shuffle=False)
    batch = rows.batch(0, np.array([1, 2, 3]))
    assert batch["lengths"].tolist() == [10]
    for packed in (True, False):
        nothing = make_rows([5, 9], packed=packed).batch(0, np.array([2, 3]))
        assert (nothing["n_tokens"], nothing["n_targets"], len(nothing["logits_at"])) == (0, 0, 0)
        assert (nothing["labels"] == IGNORED).all() and nothing["input_ids"].flatten()[0] == PAD
