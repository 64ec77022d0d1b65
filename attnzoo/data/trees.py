"""Batches of prompts and their continuations, packed as trees of shared prefixes or as separate sequences."""

import logging
from typing import Any

import numpy as np
import torch

from attnzoo.batch import IGNORED, Batch
from attnzoo.data.datamodule import TextDataModule
from attnzoo.data.packing import packed_fields
from attnzoo.data.prompts import CLASSES, NumberPrompts, PromptFiles
from attnzoo.data.tokenized import SPLITS, TokenStore, prepare
from attnzoo.data.trie import pack

log = logging.getLogger(__name__)


class PromptRows:
    """One row for each prompt. A row has one sequence for each continuation: the prompt, the continuation and the end of text.

    Args:
        store: documents that are prompts, each followed by its continuations, with labels that tell them apart.
        seq_len: the length of the longest sequence. Longer ones are cut. A prompt that leaves no room for a continuation is left out.
        pad_id: the token in a batch without sequences.
        seed, shuffle: the seed of the epochs' order, and whether epochs are shuffled at all.
        trees: whether a prefix that sequences of a batch share is stored once.
        predict_prompts: whether prompts are predicted from their second token on, once for each of their continuations.

    Attributes:
        documents: int64 (n_rows, 2), the number of the prompt's document, and the number after its last continuation's.
    """

    def __init__(self, store: TokenStore, seq_len: int, *, pad_id: int, seed: int, shuffle: bool, trees: bool, predict_prompts: bool):
        self.store, self.seq_len, self.pad_id, self.seed, self.shuffle = store, seq_len, pad_id, seed, shuffle
        self.trees, self.predict_prompts = trees, predict_prompts
        prompts = np.flatnonzero(store.labels == CLASSES.index("prompt"))
        fits = store.lengths[prompts] - 1 < seq_len
        self.documents = np.stack([prompts, np.append(prompts[1:], len(store.labels))], 1)[fits]
        self.n_rows, self.n_left_out = int(fits.sum()), int((~fits).sum())

    def order(self, epoch: int, group: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.n_rows) if self.shuffle else np.arange(self.n_rows)

    def sequences(self, row: int) -> tuple[list[np.ndarray], int]:
        """The token ids of a prompt with each of its continuations, int64 and not cut, and the prompt's length in tokens."""
        prompt, *continuations = (np.array(self.store.tokens[slice(*self.store.offsets[document : document + 2])], np.int64)
                                  for document in range(*self.documents[row]))
        return [np.concatenate([prompt[:-1], text]) for text in continuations], len(prompt) - 1

    def batch(self, epoch: int, rows: np.ndarray) -> Batch:
        """The packed batch of these prompts. Each target is predicted by the token before it. Its weight is the number of sequences in
        which it is a target.

        Row numbers from `n_rows` on are left out. A batch of such numbers only has one padding token.
        """
        sequences, first_asked = [], []
        for row in rows[rows < self.n_rows]:
            own, prompt = self.sequences(int(row))
            sequences += [ids[: self.seq_len] for ids in own]
            first_asked += [1 if self.predict_prompts else prompt] * len(own)
        packed = pack(sequences or [np.array([self.pad_id])], first_asked or [1], share=self.trees)
        asked = np.flatnonzero(packed.counts)
        logits_at, labels, weights = packed.before[asked], packed.tokens[asked], packed.counts[asked]
        if len(asked) == 0:  # a model needs at least one position to predict from
            logits_at, labels, weights = np.array([0]), np.array([IGNORED]), np.array([0])
        fields = packed_fields(packed.lengths, self.seq_len, len(packed.lengths) + 1)
        if self.trees:
            shared = packed.depths[packed.starts]
            fields |= {"parents": torch.from_numpy(packed.parents), "position_ids": torch.from_numpy(packed.depths),
                       "lengths": packed.lengths + shared, "shared": shared}
        return {
            "input_ids": torch.from_numpy(packed.tokens),
            "labels": torch.from_numpy(labels),
            "weights": torch.from_numpy(weights.astype(np.float32)),
            "logits_at": torch.from_numpy(logits_at),
            **fields,
            "n_tokens": len(packed.tokens) if sequences else 0,
            "n_targets": len(asked),
        }


class ContinuationDataModule(TextDataModule):
    """Batches of prompts with their continuations for a GPT, packed as trees.

    The loss is that of separate sequences: the mean over all targets of all sequences, where a target that several sequences share counts
    once for each of them. It depends neither on `trees` nor on which prompts share a batch.

    Args:
        source: where the prompts come from, see `attnzoo.data.prompts`.
        trees: False packs each sequence by itself, for attention that does not support trees.
        predict_prompts: whether the prompts' tokens are targets too.
        seq_len: the length of the longest sequence in tokens.
        batch_size: prompts of one device in one micro-step.
        text: further keyword arguments of TextDataModule.
    """

    packs = True

    def __init__(self, source, *, trees: bool = True, predict_prompts: bool = False, objective: str = "lm", **text):
        if objective != "lm":
            raise ValueError(f"data={source.kind} must go with task=lm and a GPT: a continuation follows from its prompt; got task "
                             f"{objective!r}")
        super().__init__(source, objective=objective, **text)
        self.trees, self.predict_prompts = trees, predict_prompts

    def setup(self, stage: str | None = None) -> None:
        """Opens the tokens; repeated calls do nothing.

        Raises:
            ValueError: no prompt of a split leaves room for a continuation, the tokenizer gives no tokens for a text, or what
                `attnzoo.data.tokenized.prepare` raises.
        """
        if self._folder is not None:
            return
        folder = prepare(self.source, self.tokenizer, self.cache_dir)
        self.stores = {split: TokenStore(folder, split) for split in SPLITS}
        for split in SPLITS:
            rows = self._rows(split)
            if rows.n_rows == 0:
                raise ValueError(f"data.seq_len={self.seq_len} must be above the length of a prompt, and no prompt of the {split} split is "
                                 "shorter")
            if rows.n_left_out:
                log.warning("data=%s: %d of %d prompts of the %s split do not leave room in data.seq_len=%d and are left out", self.kind,
                            rows.n_left_out, rows.n_left_out + rows.n_rows, split, self.seq_len)
        self._folder = folder
        if any(split["empty_documents"] for split in self.record()["splits"].values()):
            raise ValueError(f"data.tokenizer={self.tokenizer.name!r} must make at least one token of each text, and makes none of some")

    def _rows(self, split: str, shuffle: bool = False) -> PromptRows:
        return PromptRows(self.stores[split], self.seq_len, pad_id=self.tokenizer.pad_id, seed=self.seed, shuffle=shuffle,
                          trees=self.trees, predict_prompts=self.predict_prompts)

    def _newer_settings(self) -> dict:
        return {**super()._newer_settings(), "predict_prompts": self.predict_prompts}

    def bytes_per_token(self, split: str) -> None:
        """None: sequences are cut, and shared tokens count more than once, so that a loss has no bits per byte of text."""

    def documents(self, split: str):
        """The split's sequences as a `datasets.Dataset` of `input_ids` (a prompt, a continuation, the end of text) and `n_bytes`, as numpy
        int64."""
        import datasets

        rows, n_bytes = self._rows(split), self.stores[split].n_bytes
        columns = {
            "input_ids": [ids for row in range(rows.n_rows) for ids in rows.sequences(row)[0]],
            "n_bytes": [n_bytes[prompt] + n_bytes[i] for prompt, end in rows.documents for i in range(prompt + 1, end)],
        }
        return datasets.Dataset.from_dict(columns).with_format("numpy")


def continuations(
    *, paths: str | list[str] | None = None, val_paths: str | list[str] | None = None, val_fraction: float = 0.1, n_train: int = 5000,
    n_validation: int = 200, n_numbers: int = 12, n_continuations: int = 4, **options: Any
) -> ContinuationDataModule:
    """A data module over JSON lines (`paths`, `val_paths`, `val_fraction`, see `attnzoo.data.prompts.PromptFiles`). Without `paths` it is
    over generated prompts (`n_train` and so on, see `NumberPrompts`). The other options are those of ContinuationDataModule."""
    if paths is None and val_paths is not None:
        raise ValueError(f"data.val_paths={val_paths!r} must go with data.paths")
    if paths is None:
        return ContinuationDataModule(NumberPrompts(n_train, n_validation, n_numbers, n_continuations), **options)
    return ContinuationDataModule(PromptFiles(paths, val_paths, val_fraction), **options)


continuations.options_of = (ContinuationDataModule,)
