"""GPT: the causal model. Its options give GPT-2 (Radford et al. 2019) or a later design."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attnzoo.models.decoding import Decoding, draw
from attnzoo.models.transformer import Transformer

__all__ = ["GPT", "draw"]


class GPT(Transformer):
    """Predicts the next token. Arguments as in `attnzoo.models.transformer.Transformer`, initialised as GPT-2."""

    causal = True

    def __init__(self, **config):
        super().__init__(**config)
        self.init_weights(residual_std=self.init_std / (2 * len(self.blocks)) ** 0.5)

    def generate(self, input_ids: Tensor, max_new_tokens: int, **options) -> Tensor:
        """Continue each row: (batch, seqlen) to (batch * samples, seqlen + max_new_tokens), or fewer if all stop. options: see `stream`."""
        new = list(self.stream(input_ids, max_new_tokens, **options))
        input_ids = input_ids.repeat_interleave(options.get("samples", 1), dim=0)
        return torch.cat([input_ids, torch.cat(new, dim=1).to(input_ids.device)], dim=1) if new else input_ids

    def stream(self, input_ids: Tensor, max_new_tokens: int, *, stop: Sequence[int] = (), **options) -> Iterator[Tensor]:
        """Yields the next token of each row of input_ids (batch, seqlen) as a CPU tensor (batch * samples, 1), again and again. The model
        is in eval mode and uses the KV cache. A variant without a cache reads the whole text again for each token.

        lengths: int64 (batch,), the number of tokens in each row where rows differ; later tokens of a row are not read.
        temperature: logits are divided by it; 0 takes the likeliest token. top_k: draw among the k likeliest. top_p: draw among the
        likeliest whose probabilities, after temperature and top_k, sum to p or more (Holtzman et al. 2020).
        generator: on input_ids' device.
        samples: the number of continuations of each row. The row is read once. Its continuations are neighbours in the output and are the
        same draws as those of that many equal rows.
        shared: the number of leading tokens that are equal in all rows. They are read once. Needs a model with `reads_in_parts`.
        pages: texts with a common beginning, from `samples` or `shared`, read it from the cache pages of one of them. Needs
        attention=flash. None uses pages on a GPU if copies would take 2^17 tokens or more, and a graph or `lengths` is used.
        stop: tokens that end a row. A row that has ended repeats its stop token until all rows have ended.
        graph: True computes each token by replaying a CUDA graph and raises ValueError where that is impossible. None uses a graph if
        possible.

        A GPU computes some tokens ahead of the one that is yielded. Raises ValueError if logits are NaN, so that no token can be drawn;
        with temperature 0 the likeliest token of NaN is one like any other.
        """
        training = self.training
        self.eval()
        try:
            yield from self.decoding(input_ids, max_new_tokens, **options).on_host(stop)
        finally:
            self.train(training)

    def decoding(self, input_ids: Tensor, max_new_tokens: int, **options) -> Decoding:
        """The object that draws the tokens step by step. The model must be in eval mode. options: as in `stream`, without `stop`."""
        return Decoding(self, input_ids, max_new_tokens, **options)
