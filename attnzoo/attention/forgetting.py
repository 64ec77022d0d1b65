"""Forgetting attention: softmax attention with a forget gate by token and head (Lin et al. 2025, arXiv:2503.02130).

Runs on `attnzoo_kernels.forgetting_attention`, one kernel for the products and the gates' bias.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.attention.base import Attention, AttentionSpec, Impl, KVCache, SequenceInfo, Supports
from attnzoo_kernels import forgetting_attention


class ForgettingAttention(Attention):
    """FoX: scores get the sum of log f over the tokens behind the key up to the query, f = sigmoid(x W + b) by token and query head.

    The paper's models have no positions besides (model.positions=none); rotary and learned ones go with it. The parameter beside those of
    all variants is `fgate_proj`.

    impl: the operator's path, None for the fastest that runs ("gluon", "triton", "cpu", "reference").
    """

    supports = Supports(bidirectional=False, positions=("learned", "rotary", "none"), dropout=False,
                        context_parallel=("dense", "packed"))
    decodes_on_device = True

    def __init__(self, spec: AttentionSpec, *, impl: Impl | None = None):
        super().__init__(spec)
        self.impl = impl
        self.fgate_proj = nn.Linear(spec.dim, spec.n_heads)
        # what metrics() reports: the mean over the tokens of the last training step
        self.register_buffer("mean_gate", torch.full((), math.nan), persistent=False)

    def init_weights(self, std: float, residual_std: float) -> None:
        super().init_weights(std, residual_std)
        nn.init.normal_(self.fgate_proj.weight, std=std)
        nn.init.zeros_(self.fgate_proj.bias)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        logits = self.fgate_proj(x)
        log_f = F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        if self.training:
            with torch.no_grad():
                self.mean_gate.copy_(log_f.exp().mean())
        return *super().project(x), log_f

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo, log_f: Tensor) -> Tensor:
        return forgetting_attention(
            q, k, v, log_f, cu_seqlens_q=seq.cu_seqlens, cu_seqlens_k=seq.cu_seqlens_k, max_seqlen_q=seq.max_seqlen,
            max_seqlen_k=seq.max_seqlen_k, impl=self.impl)

    def kept(self, k: Tensor, v: Tensor, log_f: Tensor) -> tuple[Tensor, ...]:
        return k, v, log_f

    def attend_over(self, q: Tensor, kept: Sequence[Tensor], seq: SequenceInfo, log_f: Tensor) -> Tensor:
        k, v, log_f = kept
        return self.attend(q, k, v, seq, log_f)

    def attend_newest(self, q: Tensor, cache: KVCache, seq: SequenceInfo, log_f: Tensor) -> Tensor:
        return super().attend_newest(q, cache, seq)  # the cache has the gates, too

    def flops(self, lengths: list[int]) -> float:
        return super().flops(lengths) + 6.0 * self.fgate_proj.weight.numel() * sum(lengths)

    def metrics(self) -> dict[str, float]:
        """forget_gate: the mean over heads and tokens of the last training step."""
        return super().metrics() | {"forget_gate": self.mean_gate.item()}
