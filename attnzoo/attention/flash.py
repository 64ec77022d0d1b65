"""FlashAttention (Dao 2023, arXiv:2307.08691): exact attention in linear memory, by `attnzoo_kernels.flash_attention`.

A few new tokens over a KV cache are computed by `attnzoo_kernels.decode_attention`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attnzoo.attention.base import AttentionSpec, Impl, KVCache, SequenceInfo, Supports
from attnzoo.attention.window import WindowedAttention
from attnzoo_kernels import decode_attention, flash_attention


class FlashAttention(WindowedAttention):
    """Softmax attention, optionally in a sliding window, with capped scores or with a learned sink per head.

    impl: the operator's implementation ("gluon", "triton", "cpu", "reference"), None for the fastest that runs.
    window_size: (left, right), how many keys before and after its own a query sees; -1 is unlimited. right is 0 in a causal model.
    softcap: scores become softcap * tanh(score / softcap); 0 is off.
    sinks: whether each head learns a logit that is added to the softmax's denominator, so that the weights may sum to less than 1.
    """

    supports = Supports(trees=True, context_parallel=("dense", "packed"), context_dropout=True)

    def __init__(self, spec: AttentionSpec, *, impl: Impl | None = None, window_size: Sequence[int] = (-1, -1), softcap: float = 0.0,
                 sinks: bool = False):
        super().__init__(spec, window_size)
        if not softcap >= 0:
            raise ValueError(f"attention.softcap={softcap}: must be at least 0 (off)")
        self.impl = impl
        self.softcap = float(softcap)
        self.sinks = nn.Parameter(torch.zeros(spec.n_heads)) if sinks else None

    decodes_on_device = True
    reads_pages = True

    @property
    def plain(self) -> bool:
        return self.window_size == (-1, -1) and self.softcap == 0 and self.sinks is None

    @property
    def divides_heads(self) -> bool:
        return self.sinks is None and self.spec.positions != "alibi" and self.dropout_p == 0

    def check_trees(self) -> None:
        super().check_trees()
        # distances are differences of indices in the packed tokens, and tokens of other branches lie in between
        if self.window_size[0] >= 0:
            raise ValueError(f"attention.window_size={list(self.window_size)}: must be [-1, 0] in trees of shared prefixes, or set "
                             "data.trees=false")
        if self.spec.positions == "alibi":
            raise ValueError("positions=alibi: must be learned, rotary or none in trees of shared prefixes; set model.positions, or "
                             "data.trees=false")
        if self.spec.dropout > 0:
            raise ValueError(f"attention_dropout={self.spec.dropout}: must be 0 in trees of shared prefixes; set "
                             "model.attention_dropout=0, or data.trees=false")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo) -> Tensor:
        if seq.parents is not None:
            return flash_attention(q, k, v, softcap=self.softcap, sinks=None if self.sinks is None else self.sinks.float(),
                                   ranges=seq.tree_ranges, impl=self.impl)
        return flash_attention(
            q, k, v, causal=self.spec.causal, window_size=self.window_size, softcap=self.softcap,
            alibi_slopes=self.alibi_slopes(seq, q.shape[-2], q.device), sinks=None if self.sinks is None else self.sinks.float(),
            dropout_p=self.dropout_p, dropout_state=seq.dropout_state(self.spec.layer, q.shape[0]), cu_seqlens_q=seq.cu_seqlens,
            cu_seqlens_k=seq.cu_seqlens_k, max_seqlen_q=seq.max_seqlen, max_seqlen_k=seq.max_seqlen_k, impl=self.impl)

    def attend_cached(self, q: Tensor, cache: KVCache, seq: SequenceInfo) -> Tensor:
        if not self.decodes_by_kernel(q):
            return super().attend_cached(q, cache, seq)
        return self._decode(q, cache, seq, self.cache_lengths(cache, seq))

    def attend_newest(self, q: Tensor, cache: KVCache, seq: SequenceInfo) -> Tensor:
        return self._decode(q, cache, seq, cache.newest.lengths)

    def _decode(self, q: Tensor, cache: KVCache, seq: SequenceInfo, lengths: Tensor) -> Tensor:
        slopes = self.alibi_slopes(seq, q.shape[-2], q.device)
        share = cache.block_table is not None and self.window_size[0] < 0 and slopes is None
        keys, values = (cache.keys, cache.values) if cache.block_table is None else cache.pages()
        return decode_attention(
            q, keys, values, cache_seqlens=lengths, block_table=cache.block_table, share_prefixes=share, causal=True,
            window_size=self.window_size, softcap=self.softcap, alibi_slopes=slopes,
            sinks=None if self.sinks is None else self.sinks.float(), impl="reference" if self.impl == "reference" else None)
