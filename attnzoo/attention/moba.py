"""Mixture of block attention (Lu et al. 2025, arXiv:2502.13189): each query of each head chooses blocks by the mean of their keys.

Runs on `attnzoo_kernels.moba_attention`.
"""

import warnings

import torch
from torch import Tensor

from attnzoo.attention.base import Attention, AttentionSpec, Impl, KVCache, SequenceInfo, Supports
from attnzoo.attention.routing import BlockUse, blocks_before, pairs_of_blocks
from attnzoo_kernels import moba_attention


class MoBAAttention(Attention):
    """Softmax attention over top_k blocks of keys: the query's own block, with a causal mask, and the earlier blocks with the best scores.
    A block's score is q times the mean of its keys.

    It has the parameters of attention=flash, so that a checkpoint of one loads into the other. The choice itself has no gradient.

    block_size: tokens in a block, at least 1. top_k: blocks that a query reads, its own included. Warns if these are all blocks of the
        model's context, where the layer is then dense attention.
    impl: the operator's implementation ("gluon", "triton", "cpu", "reference"), None for the fastest that runs.
    """

    supports = Supports(bidirectional=False, positions=("learned", "rotary", "none"), dropout=False)
    decodes_on_device = True

    def __init__(self, spec: AttentionSpec, *, block_size: int = 64, top_k: int = 3, impl: Impl | None = None):
        super().__init__(spec)
        for name, value in (("block_size", block_size), ("top_k", top_k)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"attention.{name}={value!r}: must be an integer of at least 1")
        if top_k * block_size >= spec.train_context:
            # one text for all layers: Python shows it once
            warnings.warn(f"attention.top_k={top_k}, attention.block_size={block_size}: queries read every block of the model's context of "
                          f"{spec.train_context} tokens, so that it is dense attention there; set smaller ones, or a longer context",
                          stacklevel=2)
        self.block_size, self.top_k, self.impl = block_size, top_k, impl
        self.block_use = BlockUse()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo, **means: Tensor) -> Tensor:
        out, blocks = moba_attention(
            q, k, v, block_size=self.block_size, top_k=self.top_k, return_blocks=True, cu_seqlens_q=seq.cu_seqlens,
            cu_seqlens_k=seq.cu_seqlens_k, max_seqlen_q=seq.max_seqlen, max_seqlen_k=seq.max_seqlen_k, impl=self.impl, **means)
        if self.training:
            self.block_use.keep(blocks, self.block_size, seq)
        return out

    # A cache also keeps the means of whole blocks, so that a new token reads these and not all keys.

    def attend_cached(self, q: Tensor, cache: KVCache, seq: SequenceInfo) -> Tensor:
        k, v = cache.read()
        before = (cache.length - q.shape[1]) // self.block_size if cache.derived else 0
        if not cache.derived:
            wide = torch.promote_types(k.dtype, torch.float32)
            cache.derived = (k.new_zeros(cache.batch, max(cache.max_len // self.block_size, 1), *k.shape[2:], dtype=wide),)
        means, whole = cache.derived[0], cache.length // self.block_size
        if whole > before:
            chunks = k[:, before * self.block_size : whole * self.block_size].detach().unflatten(1, (-1, self.block_size))
            means[:, before:whole] = chunks.mean(2, dtype=means.dtype)
        return self.attend(q, k, v, seq, block_means=means)

    def attend_newest(self, q: Tensor, cache: KVCache, seq: SequenceInfo) -> Tensor:
        q, k, v, means = (x.flatten(0, 1) for x in (q, *cache.buffers, *cache.derived))
        size, room = self.block_size, cache.derived[0].shape[1]
        tokens, place = seq.once(("moba newest", size), lambda: cache.newest.last_windows(size, size, room))
        # every second sequence is the unused rest of a row
        starts = seq.once(("moba starts", room), lambda: (torch.arange(2 * cache.batch, device=q.device) // 2 * room).int())
        means.index_copy_(0, place, k[tokens].mean(1, dtype=means.dtype))
        return self.attend(q, k, v, self.newest_rows(cache, seq), block_means=means, block_starts=starts)[:, None]

    def visible_pairs(self, length: int) -> int:
        """The number of pairs of a query and a key that the query reads, in one sequence of this length."""
        return pairs_of_blocks(length, self.block_size, self.top_k)

    def flops(self, lengths: list[int]) -> float:
        """Includes the products of queries and blocks' mean keys, which have no backward."""
        heads, width = self.head_shapes()["q"]
        scores = sum(blocks_before(length, self.block_size) for length in lengths)
        return super().flops(lengths) + 2.0 * heads * width * scores

    def metrics(self) -> dict[str, float]:
        """block_entropy, block_coverage: see `attnzoo.attention.routing.BlockUse`."""
        return super().metrics() | self.block_use.metrics()

    def extra_repr(self) -> str:
        return f"block_size={self.block_size}, top_k={self.top_k}"
