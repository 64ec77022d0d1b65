"""Sigmoid attention (Ramapuram et al. 2024, arXiv:2409.04431): weights without a softmax, by `attnzoo_kernels.sigmoid_attention`."""

import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from attnzoo.attention.base import AttentionSpec, Impl, SequenceInfo, Supports
from attnzoo.attention.window import WindowedAttention
from attnzoo_kernels import sigmoid_attention


class SigmoidAttention(WindowedAttention):
    """Attention whose weights are sigmoid(score + sigmoid_bias), each without regard to the other scores.

    It has the parameters of attention=flash. The paper trains it with qk_norm, and with rotary positions or ALiBi.

    impl: the operator's implementation ("gluon", "triton", "cpu", "reference"), None for the fastest that runs.
    window_size: (left, right), how many keys before and after its own a query sees; -1 is unlimited. right is 0 in a causal model.
    sigmoid_bias: a number. None takes the paper's -log(context), with the context that the positions were trained on; it does not depend on
        the input, so that prompts, longer texts and single tokens over a cache have the same bias. "length" takes -log of each sequence's
        own length, in bidirectional models only.
    """

    supports = Supports(dropout=False, context_parallel=("dense", "packed"))
    decodes_on_device = True

    def __init__(self, spec: AttentionSpec, *, impl: Impl | None = None, window_size: Sequence[int] = (-1, -1),
                 sigmoid_bias: float | Literal["length"] | None = None):
        super().__init__(spec, window_size)
        if sigmoid_bias == "length" and spec.causal:
            raise ValueError("attention.sigmoid_bias=length: earlier tokens of a causal model would depend on how many follow; give a "
                             "number, or null for the training context's")
        self.impl = impl
        if sigmoid_bias is None:
            sigmoid_bias = -math.log(spec.known_context)
        self.sigmoid_bias = None if sigmoid_bias == "length" else float(sigmoid_bias)

    @property
    def divides_heads(self) -> bool:
        return self.spec.positions != "alibi"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo) -> Tensor:
        return sigmoid_attention(
            q, k, v, causal=self.spec.causal, window_size=self.window_size, sigmoid_bias=self.sigmoid_bias,
            alibi_slopes=self.alibi_slopes(seq, q.shape[-2], q.device), cu_seqlens_q=seq.cu_seqlens, cu_seqlens_k=seq.cu_seqlens_k,
            max_seqlen_q=seq.max_seqlen, max_seqlen_k=seq.max_seqlen_k, impl=self.impl)
