"""GPT: the causal model, GPT-2 (Radford et al. 2019) or later by its options."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnzoo.models.transformer import INIT_STD, Transformer


class GPT(Transformer):
    """Predicts the next token. Arguments as in `attnzoo.models.transformer.Transformer`, initialised as GPT-2."""

    causal = True

    def __init__(self, **config):
        super().__init__(**config)
        self.init_weights(residual_std=INIT_STD / (2 * len(self.blocks)) ** 0.5)

    def generate(self, input_ids: Tensor, max_new_tokens: int, **options) -> Tensor:
        """Continue each row: (batch, seqlen) to (batch, seqlen + max_new_tokens). options: as in `stream`."""
        return torch.cat([input_ids, *self.stream(input_ids, max_new_tokens, **options)], dim=1)

    @torch.no_grad()
    def stream(self, input_ids: Tensor, max_new_tokens: int, *, temperature: float = 1.0, top_k: int | None = None,
               top_p: float | None = None, generator: torch.Generator | None = None) -> Iterator[Tensor]:
        """The next tokens of each row of input_ids (batch, seqlen), one (batch, 1) after the other, in eval mode and with the KV cache. A
        variant without one reads everything again for each token.

        temperature: logits are divided by it; 0 takes the likeliest token. top_k: draw among the k likeliest. top_p: draw among the
        likeliest whose probabilities, after temperature and top_k, sum to p or more (Holtzman et al. 2020).
        generator: on input_ids' device.
        """
        if input_ids.dim() != 2 or input_ids.shape[1] < 1:
            raise ValueError(f"input_ids: must be (batch, seqlen) with at least one token, got shape {tuple(input_ids.shape)}")
        if max_new_tokens < 0 or temperature < 0 or (top_k is not None and top_k < 1):
            raise ValueError(f"max_new_tokens={max_new_tokens}, temperature={temperature} must be at least 0, top_k={top_k} at least 1")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p}: must lie in (0, 1]; None draws from all tokens")
        batch, seqlen = input_ids.shape
        # the last token drawn is never read
        self._check_length(seqlen + max_new_tokens - 1)
        cache = self.new_cache(batch, seqlen + max_new_tokens) if self.supports.cache else None
        training = self.training
        self.eval()
        try:
            step = input_ids
            for _ in range(max_new_tokens):
                last = torch.arange(1, batch + 1, device=step.device) * step.shape[1] - 1
                logits = self(step, cache=cache, logits_at=last).float()
                drawn = draw(logits, temperature, top_k, top_p, generator)
                yield drawn
                step = drawn if cache else torch.cat([step, drawn], dim=1)
        finally:
            self.train(training)


def draw(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
         generator: torch.Generator | None = None) -> Tensor:
    """One token per row of logits (batch, vocab_size), as (batch, 1); options as in `GPT.stream`."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    weights = (logits / temperature).softmax(-1)
    if top_p is not None:
        ordered, indices = weights.sort(-1, descending=True)
        # a token goes when those before it reach p already; the first always stays
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)
        weights = torch.zeros_like(weights).scatter(-1, indices, ordered)
    return torch.multinomial(weights, 1, generator=generator)
