"""A BERT that classifies whole sequences."""

import torch
from torch import Tensor, nn

from attnzoo.attention.base import KVCache
from attnzoo.models.bert import BERT
from attnzoo_kernels import padding

POOLINGS = ("cls", "mean")


class BERTClassifier(BERT):
    """Scores classes for whole sequences. Arguments as in `attnzoo.models.bert.BERT`, whose encoder it shares, and

    n_classes: the number of classes.
    pooling: the input of the head. "cls" is the first token's final state after a dense layer and tanh (BERT's pooler). "mean" is the mean
        of all tokens' final states.
    towers: the number of sequences that get one class together: 1, or 2 for pairs, whose sequences are neighbours in the batch. Both go
        through the same encoder. The classifier reads their pooled states a and b as (a, b, a * b, a - b), through a hidden layer
        (Tay et al. 2020, arXiv:2011.04006).
    """

    def __init__(self, *, n_classes: int, pooling: str = "cls", dropout: float = 0.0, towers: int = 1, **config):
        if pooling not in POOLINGS:
            raise ValueError(f"task.pooling={pooling!r} must be one of {', '.join(POOLINGS)}")
        if not isinstance(n_classes, int) or n_classes < 2:
            raise ValueError(f"model.n_classes={n_classes!r} must be a whole number, at least 2")
        if towers not in (1, 2):
            raise ValueError(f"model.towers={towers!r} must be 1 or 2")
        super().__init__(dropout=dropout, **config)
        self.n_classes, self.pooling, self.towers = n_classes, pooling, towers
        self.head_in_8_bits = None
        self.head = self.head_dense = self.head_norm = self.head_bias = None  # those of masked language modelling
        self.pooler = nn.Sequential(nn.Linear(self.dim, self.dim), nn.Tanh()) if pooling == "cls" else nn.Identity()
        hidden = [nn.Linear(4 * self.dim, self.dim), nn.GELU()] if towers == 2 else []
        self.classifier = nn.Sequential(nn.Dropout(dropout), *hidden, nn.Linear(self.dim, n_classes))
        for module in (*self.pooler.modules(), *self.classifier.modules()):
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.init_std)
                nn.init.zeros_(module.bias)

    def forward(
        self, input_ids: Tensor, *, position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
        attention_mask: Tensor | None = None, max_tokens: int | None = None, token_type_ids: Tensor | None = None,
        cache: list[KVCache] | None = None,
    ) -> Tensor:
        """Scores (sequences, n_classes) of the rows of input_ids (batch, seqlen), or of the cu_seqlens.shape[0] - 1 packed sequences.

        With two towers the scores are (sequences / 2, n_classes), and an odd number of sequences raises ValueError. Inputs as in
        `Transformer.forward`. For a sequence without tokens the input of the head is zeros.
        """
        self._check_layout(input_ids, cu_seqlens, max_seqlen, attention_mask, cache)
        batch, seqlen = input_ids.shape if input_ids.dim() == 2 else (cu_seqlens.shape[0] - 1, max_seqlen)
        if attention_mask is not None:
            ids, indices, cu_seqlens, max_seqlen, _ = padding.unpad_input(input_ids, attention_mask, max_tokens=max_tokens)
            position_ids, token_type_ids = (
                None if x is None else padding.remove_padding(x.expand(batch, seqlen), indices) for x in (position_ids, token_type_ids))
            input_ids = ids
        inputs = {"position_ids": position_ids, "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "token_type_ids": token_type_ids}
        if cu_seqlens is None:
            starts, lengths = torch.arange(batch, device=input_ids.device) * seqlen, None
        else:
            starts, lengths = cu_seqlens[:-1].long().clamp(max=input_ids.shape[0] - 1), cu_seqlens.diff()
        if self.pooling == "cls":
            pooled = super().forward(input_ids, logits_at=starts, **inputs)
        else:
            pooled = _mean(super().forward(input_ids, **inputs), cu_seqlens, lengths)
        if lengths is not None:
            pooled = pooled * (lengths > 0)[:, None]
        pooled = self.pooler(pooled)
        if self.towers == 2:
            if pooled.shape[0] % 2:
                raise ValueError(f"input_ids: a model of two towers takes pairs of sequences, got {pooled.shape[0]} sequences")
            one, other = pooled.unflatten(0, (-1, 2)).unbind(1)
            pooled = torch.cat([one, other, one * other, one - other], -1)
        return self.classifier(pooled)

    def logits(self, x: Tensor) -> Tensor:
        """x unchanged: scores are computed for sequences, not for tokens."""
        return x

    def head_products(self) -> int:
        """Zero per token, because the head reads one vector per sequence."""
        return 0


def _mean(x: Tensor, cu_seqlens: Tensor | None, lengths: Tensor | None) -> Tensor:
    """The mean of each sequence's tokens: x (batch, seqlen, dim) or packed (total, dim) to (batch, dim), at least in float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if cu_seqlens is None:
        return x.mean(dim=1)
    sums = torch.segment_reduce(x, "sum", offsets=cu_seqlens.long(), initial=0, unsafe=True)  # without it the host waits to check offsets
    return sums / lengths.clamp(min=1)[:, None]
