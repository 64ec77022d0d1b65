"""Adapter that gives a model of this project the interface of the lm-evaluation-harness. Needs the package lm_eval."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

MAX_NEW_TOKENS = 256  # for tasks that set no limit


class HarnessModel(TemplateLM):
    """model: causal, on its device. tokenizer: one of attnzoo.data.tokenizers. max_length: the longest input in tokens; longer ones
    lose their beginning. batch_tokens: about as many tokens are in a batch."""

    def __init__(self, model: torch.nn.Module, tokenizer, *, max_length: int, batch_tokens: int):
        super().__init__()
        self.model, self.text, self.max_length, self.batch_tokens = model, tokenizer, max_length, batch_tokens
        self._device = next(model.parameters()).device
        # numbers of inputs: all; truncated at the start; with less room for the answer than the task asks for
        self.inputs = self.cut = self.short = 0

    @property
    def eot_token_id(self) -> int:
        return self.text.eos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        return self.text.encode(string)

    def limits(self) -> str:
        """Says how many inputs were truncated, or left too little room for the answer; "" if none."""
        said = f"of {self.inputs} inputs are longer than max_length={self.max_length} allows"
        cut = f"{self.cut} {said} and were read without their beginning" if self.cut else ""
        short = f"{self.short} {said} and left the answer less room than the task gives" if self.short else ""
        return "; ".join(filter(None, (cut, short)))

    def _count(self, *, cut: bool, short: bool = False) -> None:
        self.inputs, self.cut, self.short = self.inputs + 1, self.cut + cut, self.short + short

    def loglikelihood(self, requests, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests: list[tuple[Any, list[int], list[int]]], **kwargs) -> list[tuple[float, bool]]:
        """For each continuation of a context: its log-likelihood in nats, and whether greedy decoding would produce it."""
        for _, _, continuation in requests:
            if len(continuation) > self.max_length:
                raise ValueError(f"max_length={self.max_length} must be at least {len(continuation)}, a continuation's tokens")
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        while order:
            longest = min(self.max_length, len(requests[order[0]][1]) + len(requests[order[0]][2]) - 1)
            n = max(1, self.batch_tokens // longest)
            batch, order = order[:n], order[n:]
            for i, result in zip(batch, self._score([requests[i][1:] for i in batch], longest), strict=True):
                found[i] = result
        return found

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]], longest: int) -> list[tuple[float, bool]]:
        """Padding is on the right, where a causal model's earlier positions do not see it."""
        input_ids = torch.zeros(len(pairs), longest, dtype=torch.int64)
        at, targets = [], []
        for row, (context, continuation) in enumerate(pairs):
            tokens = (context + continuation)[-(self.max_length + 1) :]
            self._count(cut=len(context + continuation) > len(tokens))
            input_ids[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
            end = row * longest + len(tokens) - 1
            at += range(end - len(continuation), end)
            targets += continuation
        targets = torch.tensor(targets, device=self._device)
        logits = self.model(input_ids.to(self._device), logits_at=torch.tensor(at, device=self._device)).float()
        nll, greedy = F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets
        sizes = [len(continuation) for _, continuation in pairs]
        parts = zip(nll.double().cpu().split(sizes), greedy.cpu().split(sizes), strict=True)
        return [(-losses.sum().item(), bool(hits.all())) for losses, hits in parts]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = True) -> list[float]:
        """The log-likelihood in nats of whole texts, in windows of max_length. Each token is predicted once; the first follows the end of
        text."""
        windows, owners = [], []
        for i, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[i] += value
        return totals

    @torch.inference_mode()
    def generate_until(self, requests, disable_tqdm: bool = True) -> list[str]:
        """What the model writes behind each context, up to the end of text or one of the task's stops."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else until
        asked = options.get("max_gen_toks", MAX_NEW_TOKENS)
        n_new = min(asked, self.max_length - 1)
        whole = self.tok_encode(context) or [self.prefix_token_id]
        prompt = whole[n_new - self.max_length :]
        self._count(cut=len(prompt) < len(whole), short=n_new < asked)
        temperature = options.get("temperature", 0.0) if options.get("do_sample", False) else 0.0
        input_ids = torch.tensor([prompt], device=self._device)
        written = self.model.generate(input_ids, n_new, temperature=temperature)[0, len(prompt) :].tolist()
        if self.eot_token_id in written:
            written = written[: written.index(self.eot_token_id)]
        text = self.text.decode(written)
        return text[: min((text.find(stop) for stop in until if stop and stop in text), default=len(text))]
