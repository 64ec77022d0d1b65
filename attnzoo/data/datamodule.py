"""The LightningDataModule for text, and one function for each kind of source that configs/data names."""

import functools
import inspect
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from attnzoo.data import sources, tokenizers
from attnzoo.data.batching import check_batching
from attnzoo.data.masking import MaskedRows
from attnzoo.data.packing import CausalRows
from attnzoo.data.rows import RowsDataModule
from attnzoo.data.tokenized import SPLITS, TokenStore, prepare
from attnzoo.signatures import check_options

OBJECTIVES = ("lm", "mlm")


class TextDataModule(RowsDataModule):
    """Training and validation batches of one text source, for language modelling ("lm") or masked language modelling ("mlm").

    Args:
        source: where the documents come from, see `attnzoo.data.sources`.
        tokenizer: "bytes", the name or path of a Hugging Face tokenizer, or a tokenizer object.
        objective: "lm" or "mlm".
        seq_len: the training context in tokens.
        batch_size: rows of one device in one micro-step.
        eval_batch_size: the same for validation; None takes `batch_size`.
        cross_documents: lm only: each row is a single sequence, even if it holds several documents.
        packed: mlm only: True puts sequences one after the other; False pads them to rows.
        mask_rate, eval_mask_rate: mlm only: share of the tokens to predict, in training and in validation.
        batching: mlm only: which sequences share a step in training: "random", "by_length", "scheduled" or "balanced", see
            `attnzoo.data.batching.StepOrder`.
        step_tokens: the fixed cost of a step for the batching "scheduled", as a number of tokens.
        min_seq_len: mlm only: sequences have random lengths from this to `seq_len`; None makes them as long as documents allow.
        shuffle: whether each epoch has its own order of documents and rows.
        seed: the seed of shuffling and masks.
        num_workers: processes of each loader; 0 makes batches in the training process, which is fast enough for memory-mapped tokens.
        cache_dir: where tokenised sources are kept; None takes the environment variable ATTNZOO_CACHE, or else ~/.cache/attnzoo.

    Raises:
        ValueError: an argument is out of its range. On first access `tokenizer` raises it too, if the tokenizer cannot be loaded or lacks a
            token that the objective needs.
    """

    def __init__(
        self,
        source,
        *,
        tokenizer: Any = "bytes",
        objective: str = "lm",
        seq_len: int,
        batch_size: int,
        eval_batch_size: int | None = None,
        cross_documents: bool = False,
        packed: bool = True,
        mask_rate: float = 0.3,
        eval_mask_rate: float = 0.15,
        batching: str = "random",
        step_tokens: int = 4096,
        min_seq_len: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
    ):
        super().__init__()
        self.source, self._given_tokenizer, self.objective = source, tokenizer, objective
        self.seq_len, self.batch_size, self.eval_batch_size = seq_len, batch_size, eval_batch_size or batch_size
        self.cross_documents, self.packed, self.batching, self.shuffle = cross_documents, packed, batching, shuffle
        self.step_tokens, self.min_seq_len = step_tokens, min_seq_len
        self.mask_rate, self.eval_mask_rate, self.seed, self.num_workers = mask_rate, eval_mask_rate, seed, num_workers
        self.cache_dir = Path(cache_dir or os.environ.get("ATTNZOO_CACHE") or "~/.cache/attnzoo").expanduser()
        self._folder: Path | None = None
        self._check()

    def _check(self) -> None:
        if self.objective not in OBJECTIVES:
            hint = "; texts with classes are data=text_classification and data=listops" if self.objective == "classification" else ""
            raise ValueError(f"data.objective={self.objective!r} must be one of {', '.join(OBJECTIVES)}{hint}")
        self.check_at_least(seq_len=3, batch_size=1, eval_batch_size=1, num_workers=0, seed=0, step_tokens=0)
        for key in ("mask_rate", "eval_mask_rate"):
            if not 0 < getattr(self, key) <= 1:
                raise ValueError(f"data.{key}={getattr(self, key)} must be above 0 and at most 1")
        if self.cross_documents and self.objective == "mlm":
            raise ValueError('data.cross_documents=true must go with objective "lm": masked sequences never cross documents')
        check_batching(self.batching, packed=self.packed, shuffle=self.shuffle)
        if self.batching != "random" and self.objective == "lm":
            raise ValueError(
                f'data.batching={self.batching} must go with objective "mlm": language modelling rows all have seq_len tokens'
            )
        if self.min_seq_len is not None and (self.objective == "lm" or not 3 <= self.min_seq_len <= self.seq_len):
            raise ValueError(
                f'data.min_seq_len={self.min_seq_len} must lie between 3 and data.seq_len={self.seq_len}, and go with objective "mlm"'
            )

    @property
    def packs(self) -> bool:
        return self.objective != "lm" or not self.cross_documents

    @property
    def kind(self) -> str:
        """The source's name in records and errors."""
        return self.source.kind

    @functools.cached_property
    def tokenizer(self):
        given = self._given_tokenizer
        tokenizer = tokenizers.load(given) if isinstance(given, str) else given
        needed = {"eos_id": "end of text (or separator)"} | ({"mask_id": "mask"} if self.objective == "mlm" else {})
        for attribute, role in needed.items():
            if getattr(tokenizer, attribute) is None:
                raise ValueError(f"data.tokenizer={tokenizer.name!r} must have a token for {role}, for objective {self.objective!r}")
        return tokenizer

    def prepare_data(self) -> None:
        """Tokenises the source unless its tokens are in the cache. Several processes may call this at once."""
        prepare(self.source, self.tokenizer, self.cache_dir)

    def setup(self, stage: str | None = None) -> None:
        """Opens the tokens; repeated calls do nothing.

        Raises:
            ValueError: with the objective "lm" a split has no more than `seq_len` tokens. With the stage "validate" this is checked only
                when rows of the split are made, by a loader.
            ValueError, OSError: what `attnzoo.data.tokenized.prepare` raises.
        """
        if self._folder is not None:
            return
        folder = prepare(self.source, self.tokenizer, self.cache_dir)
        self.stores = {split: TokenStore(folder, split) for split in SPLITS}
        if stage != "validate":  # this stage may read documents only, and no rows
            for split in SPLITS:
                self._check_length(split)
        self._folder = folder

    def _check_length(self, split: str) -> None:
        tokens = len(self.stores[split].tokens)
        if self.objective == "lm" and tokens <= self.seq_len:
            raise ValueError(f"data.seq_len={self.seq_len} must be below the {tokens} tokens of the {split} split: "
                             "lower it, give more text, or change data.val_fraction")

    def _rows(self, split: str, shuffle: bool = False):
        self._check_length(split)
        store, train = self.stores[split], split == "train"
        if self.objective == "lm":
            return CausalRows(
                store,
                self.seq_len,
                pad_id=self.tokenizer.pad_id,
                seed=self.seed,
                shuffle=shuffle,
                ring=train,
                cross_documents=self.cross_documents,
            )
        return MaskedRows(
            store,
            self.seq_len,
            tokenizer=self.tokenizer,
            mask_rate=self.mask_rate if train else self.eval_mask_rate,
            seed=self.seed if train else 0,  # every run is validated on the same masks
            shuffle=shuffle,
            packed=self.packed,
            batching=self.batching if train else "random",
            step_tokens=self.step_tokens,
            min_seq_len=self.min_seq_len,
        )

    def _settings(self) -> dict:
        record = self.record()
        settings = {"corpus": record["sha256"], "tokenizer": record["tokenizer"]["sha256"]}
        # the form in which runs have recorded it since there were only two choices
        settings["group_by_length"] = self.batching == "by_length"
        if self.batching == "scheduled":
            settings["step_tokens"] = self.step_tokens
        return settings | {key: getattr(self, key) for key in ("objective", "seq_len", "seed", "shuffle", "mask_rate")}

    def _newer_settings(self) -> dict:
        return {key: getattr(self, key) for key in ("batching", "cross_documents", "min_seq_len")}

    def record(self) -> dict:
        """The run's data as plain JSON: source, sha256 of its text, documents, bytes and tokens of each split, tokenizer, versions."""
        summary = {"name": self.tokenizer.name, "vocab_size": self.tokenizer.vocab_size, "sha256": tokenizers.fingerprint(self.tokenizer)}
        versions = {"python": platform.python_version(), **{name: version(name) for name in ("datasets", "tokenizers")}}
        return {**json.loads((self._folder / "record.json").read_text()), "tokenizer": summary, "versions": versions}

    def bytes_per_token(self, split: str) -> float:
        """Bytes of text per predicted token, so that bits per byte = loss / ln 2 / bytes_per_token, exactly."""
        store = self.stores[split]
        n_targets = len(store.tokens) - (1 if self.cross_documents else len(store.n_bytes))
        return float(store.n_bytes.sum() / n_targets)

    def documents(self, split: str):
        """The split's whole documents: a `datasets.Dataset` of `input_ids` (ended by the end of text) and `n_bytes`, as numpy int64."""
        return self.stores[split].dataset()


def python_stdlib(**options) -> TextDataModule:
    """A data module over `sources.python_stdlib`; options are those of both."""
    return _over(sources.python_stdlib, options)


def python_packages(**options) -> TextDataModule:
    """A data module over `sources.python_packages`; options are those of both."""
    return _over(sources.python_packages, options)


def text(**options) -> TextDataModule:
    """A data module over `sources.text_files`; options are those of both."""
    return _over(sources.text_files, options)


def hf(**options) -> TextDataModule:
    """A data module over `sources.HubSource`; options are those of both."""
    return _over(sources.HubSource, options)


def _over(make_source, options: dict) -> TextDataModule:
    by_length, balanced = (options.pop(key, False) for key in ("group_by_length", "balance_lengths"))  # keys in configs of earlier runs
    if by_length or balanced:
        options["batching"] = "balanced" if balanced else "by_length"
    keys = inspect.signature(make_source).parameters.keys() & options.keys()
    of_source = {key: options.pop(key) for key in keys}
    check_options("data", make_source, of_source)
    check_options("data", TextDataModule, options)
    return TextDataModule(make_source(**of_source), **options)


for _data, _source in ((python_stdlib, sources.python_stdlib), (python_packages, sources.python_packages), (text, sources.text_files),
                       (hf, sources.HubSource)):
    _data.options_of = (_source, TextDataModule)
