"""PyTorch's own attention, `torch.nn.functional.scaled_dot_product_attention`: the baseline that other variants are compared with."""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.attention.base import Attention, KVCache, SequenceInfo, Supports
from attnzoo_kernels.packing import pad_packed, unpad_packed


class SDPAttention(Attention):
    """Softmax attention by the backend that PyTorch chooses. Packed sequences are padded first. ALiBi needs a mask of (queries, keys)."""

    supports = Supports(context_parallel=("dense",))
    plain = True
    decodes_on_device = True

    @property
    def divides_heads(self) -> bool:
        return self.spec.positions != "alibi"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo) -> Tensor:
        if seq.cu_seqlens is None:
            return self._dense(q, k, v, seq)
        rows = (pad_packed(x, seq.cu_seqlens, seq.max_seqlen) for x in (q, k, v))
        return unpad_packed(self._dense(*rows, seq), seq.cu_seqlens, q.shape[0])

    def attend_newest(self, q: Tensor, cache: KVCache, seq: SequenceInfo) -> Tensor:
        return masked_attention(q, cache.keys, cache.values, seq.once(("sdpa newest", q.dtype), lambda: self._newest_mask(q, cache, seq)))

    def _newest_mask(self, q: Tensor, cache: KVCache, seq: SequenceInfo) -> Tensor:
        distance = (cache.newest.positions[:, None] - torch.arange(cache.max_len, device=q.device))[:, None, None]
        if self.spec.positions != "alibi":
            return distance >= 0
        bias = -self.alibi_slopes(seq, q.shape[2], q.device)[:, None, None] * distance
        return bias.masked_fill(distance < 0, -torch.inf).to(q.dtype)

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo) -> Tensor:
        mask = self._mask(q, k, seq)
        is_causal = False
        # an if statement, because torch.compile would make `is_causal = <expression>` symbolic, and SDPA takes a plain bool only
        if mask is None and self.spec.causal and q.shape[1] > 1:
            is_causal = True
        return masked_attention(q, k, v, mask, dropout_p=self.dropout_p, is_causal=is_causal)

    def _mask(self, q: Tensor, k: Tensor, seq: SequenceInfo) -> Tensor | None:
        """A bool or float mask that broadcasts to (batch, heads, queries, keys); None where `is_causal` alone is enough."""
        queries, keys = q.shape[1], k.shape[1]
        if self.spec.positions == "alibi":
            return seq.once(("sdpa alibi", q.dtype), lambda: self._alibi_mask(q, k, seq))
        if self.spec.causal:
            # is_causal aligns the mask to the top left; a packed row's padding is at its end, where no real query sees it
            return None if queries in (1, keys) else self._visible(queries, keys, q.device)
        return None if seq.cu_seqlens is None else seq.once("sdpa padding", lambda: self._real_keys(seq))

    def _alibi_mask(self, q: Tensor, k: Tensor, seq: SequenceInfo) -> Tensor:
        queries, keys = q.shape[1], k.shape[1]
        distance = torch.arange(queries, device=q.device)[:, None] + (keys - queries) - torch.arange(keys, device=q.device)
        bias = -self.alibi_slopes(seq, q.shape[2], q.device)[:, None, None] * distance.abs()
        seen = self._visible(queries, keys, q.device)
        if not self.spec.causal:
            seen = torch.ones_like(seen) if seq.cu_seqlens is None else self._real_keys(seq)
        return torch.where(seen, bias, -torch.inf).to(q.dtype)

    @staticmethod
    def _visible(queries: int, keys: int, device: torch.device) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)

    @staticmethod
    def _real_keys(seq: SequenceInfo) -> Tensor:
        """True for keys that are not padding, bool (sequences, 1, 1, max_seqlen). An empty sequence sees its padding, because a row without
        any visible key may give NaN."""
        lengths = seq.cu_seqlens.diff()[:, None]
        real = (torch.arange(seq.max_seqlen, device=lengths.device) < lengths) | (lengths == 0)
        return real[:, None, None, :]


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options) -> Tensor:
    """F.scaled_dot_product_attention for tensors (batch, tokens, heads, width). k and v may have fewer heads than q (GQA). mask: bool or
    float, broadcasts to (batch, heads, queries, keys)."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=q.shape[-2] != k.shape[-2], **options)
    return out.transpose(1, 2)
