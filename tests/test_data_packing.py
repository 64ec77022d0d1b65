"""Packed rows against a stream that is written out token by token."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnzoo.batch import IGNORED, Batch
from attnzoo.data.packing import CausalRows, packed_fields

EOS, PAD = 0, -1


class Documents:
    """The part of TokenStore that rows need: documents of distinct tokens, each ended by EOS."""

    def __init__(self, lengths):
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.tokens = np.arange(1, self.offsets[-1] + 1)
        self.tokens[self.offsets[1:] - 1] = EOS
        self.n_bytes = np.array(lengths) - 1


def make_rows(lengths, seq_len, *, ring=True, shuffle=True, cross_documents=False, seed=0):
    return CausalRows(Documents(lengths), seq_len, pad_id=PAD, seed=seed, shuffle=shuffle, ring=ring, cross_documents=cross_documents)


def sequences(batch):
    """The packed batch as (tokens, labels) of each sequence, by cu_seqlens alone."""
    cuts = batch["cu_seqlens"].long().unique()
    return [(batch["input_ids"][a:b].tolist(), batch["labels"][a:b].tolist()) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]


corpora = st.lists(st.integers(2, 40), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 9)


@settings(deadline=None, max_examples=60)
@given(corpora, st.integers(3, 9), st.booleans(), st.integers(0, 3))
def test_training_predicts_every_token_of_every_document(lengths, seq_len, shuffle, epoch):
    rows = make_rows(lengths, seq_len, shuffle=shuffle)
    batch = rows.batch(epoch, rows.order(epoch, 4))
    store = rows.store
    follower = {int(t): int(n) for t, n in zip(store.tokens[:-1], store.tokens[1:], strict=True) if t != EOS}
    seen = set()
    for tokens, labels in sequences(batch):
        assert len(tokens) <= seq_len
        assert all(labels[i] == tokens[i + 1] for i in range(len(tokens) - 1))
        assert EOS not in tokens[:-1]
        assert labels[-1] == (IGNORED if tokens[-1] == EOS else follower[tokens[-1]])
        seen |= {t for t in tokens if t != EOS}
    assert seen == follower.keys()
    assert batch["n_tokens"] == len(batch["input_ids"]) == rows.n_rows * seq_len
    assert batch.keys() <= Batch.__annotations__.keys()


@settings(deadline=None, max_examples=60)
@given(corpora, st.integers(3, 9), st.booleans())
def test_validation_predicts_each_token_once_in_order(lengths, seq_len, cross_documents):
    rows = make_rows(lengths, seq_len, ring=False, shuffle=False, cross_documents=cross_documents)
    batch = rows.batch(0, np.arange(rows.n_rows + 3))  # three rows of padding
    labels = batch["labels"].flatten()
    targets = labels[labels != IGNORED].tolist()
    starts = set(rows.store.offsets[:-1].tolist())
    expected = [int(t) for i, t in enumerate(rows.store.tokens) if (i > 0 if cross_documents else i not in starts)]
    assert targets == expected
    assert batch["n_targets"] == len(expected)
    assert batch["n_tokens"] == (batch["input_ids"] != PAD).sum()


def test_packed_fields_agree_with_each_other():
    rows = make_rows([7, 30, 5, 2, 2, 90], 16)
    batch = rows.batch(0, rows.order(0, 4)[:4])
    cu_seqlens = batch["cu_seqlens"]
    lengths = torch.from_numpy(batch["lengths"])
    n = len(lengths)
    assert cu_seqlens.dtype == torch.int32 and len(cu_seqlens) > n and len(cu_seqlens) % 8 == 0
    assert torch.equal(cu_seqlens[: n + 1].diff().long(), lengths)
    assert (cu_seqlens[n:] == 64).all()
    assert set(range(16, 65, 16)) <= set(cu_seqlens.tolist())  # sequences end with their row
    assert torch.equal(batch["position_ids"], torch.cat([torch.arange(i) for i in lengths]))
    assert batch["max_seqlen"] == 16 >= int(lengths.max())


def test_more_sequences_than_expected_double_the_entries():
    fields = packed_fields(np.array([2, 3, 1, 2]), 3, entries=4)
    assert fields["cu_seqlens"].tolist() == [0, 2, 5, 6, 8, 8, 8, 8]


def test_shapes_stay_the_same():
    rows = make_rows(np.random.default_rng(0).integers(2, 50, 400).tolist(), 32)
    shapes = {tuple((k, v.shape) for k, v in rows.batch(e, rows.order(e, 8)[:8]).items() if torch.is_tensor(v)) for e in range(5)}
    assert len(shapes) == 1


def test_rows_across_documents_are_dense():
    rows = make_rows([7, 30, 5], 8, cross_documents=True, shuffle=False)
    batch = rows.batch(0, np.arange(2))
    assert batch["input_ids"].tolist() == rows.store.tokens[:16].reshape(2, 8).tolist()
    assert batch["labels"].tolist() == rows.store.tokens[1:17].reshape(2, 8).tolist()
    assert "cu_seqlens" not in batch


def test_epochs_and_seeds_differ_and_repeat():
    def first(seed, epoch):
        rows = make_rows([7, 30, 5, 50], 8, seed=seed)
        return rows.batch(epoch, rows.order(epoch, 1)[:4])["input_ids"].tolist()

    assert first(0, 0) == first(0, 0)
    assert len({tuple(first(seed, epoch)) for seed in (0, 1) for epoch in (0, 1, 2)}) == 6


def test_an_earlier_epoch_can_be_asked_for_again():
    rows = make_rows([7, 30, 5, 50], 8)
    before = rows.batch(0, np.arange(4))["input_ids"]
    rows.batch(5, np.arange(4))
    assert torch.equal(rows.batch(0, np.arange(4))["input_ids"], before)


@pytest.mark.parametrize("lengths", [[10], [4, 7]])
def test_corpus_barely_longer_than_a_row(lengths):
    rows = make_rows(lengths, sum(lengths) - 1)
    assert rows.batch(0, np.arange(1))["n_tokens"] == sum(lengths) - 1
