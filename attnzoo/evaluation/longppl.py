"""LongPPL (Fang et al. 2024, arXiv:2410.23771): perplexity over only those tokens that a long context makes much likelier.

    LSD(t) = log P0(t | long) - log P0(t | short)     the long-short difference
    LCL(t) = log P0(t | long)                         the long-context likelihood
    t is a key token if LSD(t) > alpha and LCL(t) > beta; published: alpha = 2, beta = -2
    LongPPL = exp(-mean of log P(t | long) over the key tokens)

`long` is everything before t in its window or document. `short` is the end of it, K to K + stride - 1 tokens, because `stride` neighbouring
tokens share one start of their short contexts (published: K = 4096, stride = 1024). A token whose long context is not longer than its short
one is no key token. P is the evaluated model, P0 the evaluator. Here both must have the same tokenizer, so that key tokens are tokens of
both.

The paper uses one strong evaluator for all models, because a model should not choose the tokens that it is judged on: it would choose only
tokens that it predicts well (beta bounds its LongPPL by e^2), and the fewer the worse it is. To compare readings or runs, name an
evaluator. Without one each model chooses its own key tokens, and the result says something about this model only. A row's note says which
model chose.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attnzoo.errors import UserError
from attnzoo.evaluation.perplexity import Scores, Window, mean_loss, place_windows, score
from attnzoo.evaluation.results import Row, language_model_rows
from attnzoo.signatures import Count

ITSELF, ITS_CHECKPOINT = "the model itself", "its checkpoint"  # names in notes of the model that chose the key tokens
Reader = Callable[[str | None, Mapping, Mapping], tuple[str, Callable[[], nn.Module]]]


class LongPPL:
    """Which model chooses the key tokens, and the criteria.

    alpha, beta: the thresholds. short_context: K, in tokens; None for three quarters of the training context. stride: number of tokens
    whose short contexts start at the same token; None for a third of K, so that by default no short context is longer than the training
    context.
    ckpt_path: the evaluator, a checkpoint or a run folder; None for the evaluated checkpoint. attention, model: overrides for the
    evaluator, as in eval.py's groups of these names. If none of the three is given, the evaluated model is its own evaluator.
    """

    def __init__(self, *, alpha: float = 2.0, beta: float = -2.0, short_context: Count | None = None, stride: Count | None = None,
                 ckpt_path: str | None = None, attention: Mapping[str, Any] | None = None, model: Mapping[str, Any] | None = None):
        if ckpt_path is not None and not Path(ckpt_path).expanduser().exists():
            raise UserError(f"longppl.ckpt_path={ckpt_path} does not exist; it must be a checkpoint (*.ckpt) or a run folder")
        self.alpha, self.beta, self.short_context, self.stride = alpha, beta, short_context, stride
        self.ckpt_path, self.attention, self.model = ckpt_path, dict(attention or {}), dict(model or {})
        self._evaluator: tuple[str, nn.Module] | None = None  # the last one
        self._read: WeakKeyDictionary[nn.Module, dict[tuple, Scores]] = WeakKeyDictionary()  # what each evaluator has read

    def short(self, context: int) -> tuple[int, int]:
        """K and the stride for this training context, in tokens."""
        k = self.short_context or max(1, context - context // 4)
        return k, self.stride or max(1, k // 3)

    def settings(self, reader: Reader | None) -> dict[str, Any]:
        """Plain JSON of everything besides the evaluated model that decides which tokens are chosen."""
        evaluator = self._named(reader)
        return {"alpha": self.alpha, "beta": self.beta, "short_context": self.short_context, "stride": self.stride,
                "evaluator": evaluator and evaluator[0]}

    def key_tokens(self, long: Scores, short: Scores, position: Tensor, k: int) -> Tensor:
        """Which of the n scored tokens are key tokens, bool (n,).

        long: the evaluator's scores of all n tokens with their long contexts. short: its scores with short contexts, in the same order, of
        those tokens with at least k tokens before them in their document. position: int64 (n,), each token's index in its document.
        """
        at = (position >= k).nonzero().squeeze(1)
        likely = long.nll[at] < -self.beta
        chosen = (short.nll - long.nll[at] > self.alpha) & likely & (long.context[at] > short.context)
        return torch.zeros(len(position), dtype=torch.bool).index_fill(0, at[chosen], True)

    def rows(self, model: nn.Module, reader: Reader | None, task: str, length: int, documents: Mapping[int, Sequence[int]],
             windows: Sequence[Window], scores: Scores, *, context: int, batch_tokens: int) -> list[Row]:
        """Rows for LongPPL, the mean loss of the key tokens, and their share among the targets of `windows`.

        scores: those that `model` gave to the targets. length: of the windows, in tokens. Below 2 K there are no rows, because few
        contexts are longer than the short ones. If no token is a key token, there is one row without a value that says so.
        """
        k, stride = self.short(context)
        if length < 2 * k:
            return []
        columns = {"task": task, "length": length}
        note = f"key tokens chosen by {self._who()} (short contexts of {k} to {k + stride - 1} tokens)"
        try:
            evaluator = self._choose_evaluator(model, reader)
            long = scores if evaluator is model else self._scores(evaluator, documents, windows, length, batch_tokens)
            behind = [replace(one, first=max(one.first, k)) for one in windows if one.end > k]
            short = self._scores(evaluator, documents, place_windows(behind, k + stride - 1, stride), k + stride - 1, batch_tokens)
        except (UserError, ValueError, RuntimeError) as error:  # running out of memory is a RuntimeError
            return [Row(**columns, note=f"the evaluator of LongPPL, {self._who()}, cannot read it: {str(error).partition(chr(10))[0]}")]
        if long.nll.isnan().any() or short.nll.isnan().any():
            return [Row(**columns, note=f"the losses of LongPPL's evaluator, {self._who()}, are NaN: no token can be chosen")]
        position = torch.cat([torch.arange(one.first, one.end) for one in windows])
        key = self.key_tokens(long, short, position, k)
        if not key.any():
            return [Row(**columns, note=f"none of {len(key)} tokens is a key token: {note.replace('chosen', 'would be chosen')}")]
        count = int(key.sum())
        loss, perplexity = language_model_rows(*mean_loss(scores, key), None, **columns, count=count, note=note)
        share = Row(**columns, metric="key_token_share", value=count / len(key), count=len(key), note=note)
        return [replace(perplexity, metric="longppl"), loss, share]

    def _named(self, reader: Reader | None) -> tuple[str, Callable[[], nn.Module]] | None:
        """A string that identifies the evaluator, and a function that loads it; None where the model is its own evaluator."""
        if self.ckpt_path is None and not self.attention and not self.model:
            return None
        if reader is None:
            raise ValueError("longppl: an evaluator can be named only where checkpoints are evaluated")
        return reader(self.ckpt_path, self.attention, self.model)

    def _choose_evaluator(self, model: nn.Module, reader: Reader | None) -> nn.Module:
        named = self._named(reader)
        if named is None:
            return model
        identity, load = named
        if self._evaluator is None or self._evaluator[0] != identity:
            self._evaluator = None  # frees its memory first
            self._evaluator = identity, load()
        return self._evaluator[1]

    def _who(self) -> str:
        if not (self.ckpt_path or self.attention or self.model):
            return ITSELF
        read = [f"attention={self.attention['_target_'].split('.')[-2]}"] if "_target_" in self.attention else []
        for group, options in (("attention", self.attention), ("model", self.model)):
            read += [f"{group}.{key}={value}" for key, value in options.items() if "_target_" not in options]
        return " ".join([self.ckpt_path or ITS_CHECKPOINT, *(["read with"] if read else []), *read])

    def _scores(self, evaluator: nn.Module, documents: Mapping, windows: Sequence[Window], length: int, batch_tokens: int) -> Scores:
        """As `perplexity.score`, but scores are kept: the evaluator reads the same windows only once for all models."""
        texts = tuple((i, hash(torch.as_tensor(documents[i]).numpy().tobytes())) for i in sorted(documents))
        read, name = self._read.setdefault(evaluator, {}), (tuple(windows), length, batch_tokens, texts)
        if name not in read:
            read[name] = score(evaluator, documents, windows, length, batch_tokens=batch_tokens)
        return read[name]
