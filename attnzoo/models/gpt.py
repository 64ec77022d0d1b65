"""GPT: the causal model, GPT-2 (Radford et al. 2019) or later by its options."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attnzoo.models.decoding import Decoding, draw
from attnzoo.models.transformer import INIT_STD, Transformer

__all__ = ["GPT", "draw"]


class GPT(Transformer):
    """Predicts the next token. Arguments as in `attnzoo.models.transformer.Transformer`, initialised as GPT-2."""

    causal = True

    def __init__(self, **config):
        super().__init__(**config)
        self.init_weights(residual_std=INIT_STD / (2 * len(self.blocks)) ** 0.5)

    def generate(self, input_ids: Tensor, max_new_tokens: int, **options) -> Tensor:
        """Continue each row: (batch, seqlen) to (batch * samples, seqlen + max_new_tokens), or fewer if all stop. options: of `stream`."""
        new = list(self.stream(input_ids, max_new_tokens, **options))
        input_ids = input_ids.repeat_interleave(options.get("samples", 1), dim=0)
        return torch.cat([input_ids, torch.cat(new, dim=1).to(input_ids.device)], dim=1) if new else input_ids

    def stream(self, input_ids: Tensor, max_new_tokens: int, *, stop: Sequence[int] = (), **options) -> Iterator[Tensor]:
        """The next tokens of each row of input_ids (batch, seqlen), one (batch * samples, 1) on the CPU after the other, in eval mode and
        with the KV cache. A variant without one reads everything again for each token.

        lengths: int64 (batch,), tokens of each row where they differ; what lies behind them is not read.
        temperature: logits are divided by it; 0 takes the likeliest token. top_k: draw among the k likeliest. top_p: draw among the
        likeliest whose probabilities, after temperature and top_k, sum to p or more (Holtzman et al. 2020).
        generator: on input_ids' device.
        samples: texts that go on with each row, which is read once; they are neighbours, and the draws those of as many equal rows.
        shared: the first tokens of all rows, which are equal, and are then read once; of a model with `reads_in_parts`.
        pages: texts that begin alike, by `samples` or `shared`, read their beginnings in the pages of one of them, once. Of a model with
        attention=flash. None takes pages where copies would have 2^17 tokens or more on a GPU, and `graph` or `lengths` let it.
        stop: tokens that end a row, which repeats its own until all rows have one.
        graph: each token is the replay of a CUDA graph, or ValueError says why it cannot be; None takes one where it can.

        On a GPU some tokens are made ahead of the one that is given. Raises ValueError where no token can be drawn, because logits are NaN.
        """
        training = self.training
        self.eval()
        try:
            yield from self.decoding(input_ids, max_new_tokens, **options).on_host(stop)
        finally:
            self.train(training)

    def decoding(self, input_ids: Tensor, max_new_tokens: int, **options) -> Decoding:
        """What draws one token of each row after the other, of a model in eval mode. options: as of `stream`, without `stop`."""
        return Decoding(self, input_ids, max_new_tokens, **options)
