"""Forgetting attention: softmax attention with a forget gate by token and head (Lin et al. 2025, arXiv:2503.02130).

Runs on `attnzoo_kernels.forgetting_attention`, one kernel for attention and the bias of the forget gates. The norms, the output gate and
the shifts of FoX (Pro) are plain PyTorch.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.attention.base import Attention, AttentionSpec, Impl, KVCache, SequenceInfo, Supports
from attnzoo.attention.norm import HeadwiseRMSNorm
from attnzoo.signatures import Positive
from attnzoo_kernels import forgetting_attention, padding


class ForgettingAttention(Attention):
    """FoX: the score of query i and key j gets a bias, the sum of log f_t over j < t <= i, with f = sigmoid(x W + b) per token and query
    head.

    The paper's models have no other positions (model.positions=none). Rotary and learned positions may be combined with it. `fgate_proj`
    is the only parameter that other variants do not have. FoX (Pro) is model.qk_norm=true, model.attention_gate=elementwise, shift_keys,
    shift_values and output_norm.

    shift_keys, shift_values: a token's key (value) becomes a k_before + (1 - a) k, where k_before is the key of the previous token of the
        sequence, zero for the first token, and a = sigmoid(x W) per token and key head, with a projection `k_shift` (`v_shift`). Keys are
        shifted before they are normalised and rotated. A cache then also holds the unshifted keys (values).
    output_norm: RMSNorm of each head's output, with one weight per head and channel, before the gate of model.attention_gate.
    qk_norm_eps: the eps of model.qk_norm's norms, None for model.norm_eps. The published weights use a different eps there.
    impl: the operator's implementation ("gluon", "triton", "cpu", "reference"), None for the fastest that runs.
    """

    supports = Supports(bidirectional=False, positions=("learned", "rotary", "none"), dropout=False,
                        context_parallel=("dense", "packed"))
    decodes_on_device = True
    divides_heads = True

    def __init__(self, spec: AttentionSpec, *, shift_keys: bool = False, shift_values: bool = False, output_norm: bool = False,
                 qk_norm_eps: Positive | None = None, impl: Impl | None = None):
        super().__init__(spec)
        self.impl = impl
        self.fgate_proj = nn.Linear(spec.dim, spec.n_heads)
        self.k_shift, self.v_shift = (
            nn.Linear(spec.dim, spec.n_kv_heads, bias=False) if shifts else None for shifts in (shift_keys, shift_values))
        self.output_norm = HeadwiseRMSNorm(spec.n_heads, spec.head_dim, spec.norm_eps) if output_norm else nn.Identity()
        if qk_norm_eps is not None:
            if not spec.qk_norm:
                raise ValueError(f"attention.qk_norm_eps={qk_norm_eps}: has no effect without model.qk_norm=true")
            self.q_norm.eps = self.k_norm.eps = qk_norm_eps
        # what metrics() reports: the mean over the tokens of the last training step
        self.register_buffer("mean_gate", torch.full((), math.nan), persistent=False)

    @property
    def matrices(self) -> list[nn.Linear]:
        return [*super().matrices, *filter(None, (self.fgate_proj, self.k_shift, self.v_shift))]

    def check_context_parallel(self, packed: bool) -> None:
        super().check_context_parallel(packed)
        if self.k_shift is not None or self.v_shift is not None:
            raise ValueError("trainer.context_parallel: the token before a part's first one is on another device; set "
                             "attention.shift_keys=false and attention.shift_values=false, or trainer.context_parallel=1")

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        logits = self.fgate_proj(x)
        log_f = F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        if self.training:
            with torch.no_grad():
                self.mean_gate.copy_(log_f.exp().mean())
        return *super().project(x), log_f

    def inputs(self, x: Tensor, seq: SequenceInfo, cache: KVCache | None) -> tuple[Tensor, ...]:
        q, k, v, log_f = self.project(x)
        shifts = (self.k_shift, self.v_shift)
        # in the cache, after keys, values and gates: the unshifted keys and values, which the next token's shift needs
        unshifted = [] if cache is None else [y for y, shift in zip((k, v), shifts, strict=True) if shift is not None]
        before = iter([] if cache is None else [cache.last(buffer) for buffer in cache.buffers[3:]])
        k, v = (y if shift is None else _shifted(y, shift(x), next(before, None), seq) for y, shift in zip((k, v), shifts, strict=True))
        return q, k, v, log_f, *unshifted

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo, log_f: Tensor, *unshifted: Tensor) -> Tensor:
        return forgetting_attention(
            q, k, v, log_f, cu_seqlens_q=seq.cu_seqlens, cu_seqlens_k=seq.cu_seqlens_k, max_seqlen_q=seq.max_seqlen,
            max_seqlen_k=seq.max_seqlen_k, impl=self.impl)

    def kept(self, k: Tensor, v: Tensor, log_f: Tensor, *unshifted: Tensor) -> tuple[Tensor, ...]:
        return k, v, log_f, *unshifted

    def attend_over(self, q: Tensor, kept: Sequence[Tensor], seq: SequenceInfo, *rest: Tensor) -> Tensor:
        k, v, log_f = kept[:3]
        return self.attend(q, k, v, seq, log_f)

    def attend_newest(self, q: Tensor, cache: KVCache, seq: SequenceInfo, *rest: Tensor) -> Tensor:
        return super().attend_newest(q, cache, seq)  # without `rest`: `attend` gets the gates from the cache

    def finish(self, out: Tensor) -> Tensor:
        return self.output_norm(out)

    def metrics(self) -> dict[str, float]:
        """forget_gate: the mean over heads and tokens of the last training step."""
        return super().metrics() | {"forget_gate": self.mean_gate.item()}


def _shifted(x: Tensor, logits: Tensor, before: Tensor | None, seq: SequenceInfo) -> Tensor:
    """a x[t - 1] + (1 - a) x[t] with a = sigmoid(logits), in at least float32.

    x: (..., tokens, heads, width). logits: (..., tokens, heads). before: (batch, 1, heads, width), the token before the first one of each
    row; None for zeros.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    first = torch.zeros_like(x[..., :1, :, :]) if before is None else before.to(x.dtype)
    previous = torch.cat((first, x[..., :-1, :, :]), dim=-3)
    if seq.cu_seqlens is not None:
        begins = seq.once("begins", lambda: padding.position_ids(seq.cu_seqlens, x.shape[0]) == 0)
        previous = previous.masked_fill(begins[:, None, None], 0)
    return torch.lerp(x.to(wide), previous.to(wide), logits.to(wide).sigmoid()[..., None]).to(x.dtype)
