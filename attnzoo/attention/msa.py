"""MiniMax sparse attention (Lai et al. 2026, arXiv:2606.13392): an indexer chooses blocks of keys, and learns from the attention over them.

Runs on `attnzoo_kernels.msa_attention`.
"""

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attnzoo.attention.base import Attention, AttentionSpec, Impl, KVCache, SequenceInfo, Supports
from attnzoo.attention.norm import RMSNorm
from attnzoo.attention.positions import rotate
from attnzoo.attention.routing import BlockUse
from attnzoo.signatures import Count
from attnzoo_kernels import msa_attention


class MSAttention(Attention):
    """Softmax attention over top_k blocks of keys: the query's own, causally, and the earlier ones with the largest index_q · index_k of a
    query and a key in them. The heads of a key head read the same blocks; each key head has an index query of its own, and all share the
    index key.

    The parameters beside those of all variants are `index_q_proj` and `index_k_proj`, and with model.qk_norm `index_q_norm` and
    `index_k_norm`, as published. Index queries and keys are normalised and rotated as the others are. The layer's input is held fixed for
    them, so that they learn from their own loss alone: in training each layer adds it to the model's (`SequenceInfo.losses`). The loss is
    the cross-entropy of the index weights under the mean weights of the key head's heads, over the tokens that are read, as
    `msa_attention` has it; the mean over key heads, summed over tokens and layers, like the model's own.

    block_size: tokens of a block, any number from 1 on. top_k: blocks that a query reads, its own included. Warns where they are all blocks
        of the model's context, which then is dense attention.
    index_dim: width of index queries and keys, None for head_dim. index_weight: the loss's factor.
    warmup: all tokens are read, as in the first part of the paper's training, and the indexer learns from that.
    impl: the operator's path, None for the fastest that runs ("gluon", "triton", "cpu", "reference").
    """

    supports = Supports(bidirectional=False, positions=("learned", "rotary", "none"), dropout=False)
    decodes_on_device = True

    def __init__(self, spec: AttentionSpec, *, block_size: int = 128, top_k: int = 16, index_dim: Count | None = None,
                 index_weight: float = 1.0, warmup: bool = False, impl: Impl | None = None):
        super().__init__(spec)
        self.index_dim = spec.head_dim if index_dim is None else index_dim
        for name, value in (("block_size", block_size), ("top_k", top_k), ("index_dim", self.index_dim)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"attention.{name}={value!r}: must be an integer of at least 1")
        if not 0 < index_weight < math.inf:
            raise ValueError(f"attention.index_weight={index_weight}: must be a finite number above 0")
        if top_k * block_size >= spec.train_context and not warmup:
            # one text for all layers: Python shows it once
            warnings.warn(f"attention.top_k={top_k}, attention.block_size={block_size}: queries read every block of the model's context of "
                          f"{spec.train_context} tokens, so that it is dense attention there; set smaller ones, or a longer context",
                          stacklevel=2)
        self.block_size, self.top_k, self.index_weight, self.warmup, self.impl = block_size, top_k, index_weight, warmup, impl
        self.index_q_proj = nn.Linear(spec.dim, spec.n_kv_heads * self.index_dim, bias=spec.bias)
        self.index_k_proj = nn.Linear(spec.dim, self.index_dim, bias=spec.bias)
        self.index_q_norm, self.index_k_norm = (
            RMSNorm(self.index_dim, eps=spec.norm_eps) if spec.qk_norm else nn.Identity() for _ in range(2))
        self.index_rope = spec.rope(self.index_dim) if spec.positions == "rotary" else None
        self.block_use = BlockUse()
        # what metrics() reports: the mean over the tokens of the last training step
        self.register_buffer("mean_loss", torch.full((), math.nan), persistent=False)

    @property
    def matrices(self) -> list[nn.Linear]:
        return [*super().matrices, self.index_q_proj, self.index_k_proj]

    def inputs(self, x: Tensor, seq: SequenceInfo, cache: KVCache | None) -> tuple[Tensor, ...]:
        """q, k and v, and index queries (..., kv_heads, index_dim) and keys (..., 1, index_dim) with their positions."""
        fixed = x.detach()
        index_q = self.index_q_norm(self.index_q_proj(fixed).unflatten(-1, (self.spec.n_kv_heads, self.index_dim)))
        index_k = self.index_k_norm(self.index_k_proj(fixed).unsqueeze(-2))
        if self.index_rope is not None:
            cos, sin = seq.once(self.index_rope.key, lambda: self.index_rope.tables(seq.position_ids))
            index_q, index_k = rotate(index_q, cos, sin), rotate(index_k, cos, sin)
        return *self.project(x), index_q, index_k

    def kept(self, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor) -> tuple[Tensor, ...]:
        return k, v, index_k

    def attend_over(self, q: Tensor, kept: Sequence[Tensor], seq: SequenceInfo, index_q: Tensor, index_k: Tensor) -> Tensor:
        k, v, index_k = kept
        return self.attend(q, k, v, seq, index_k, index_q)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo, index_k: Tensor, index_q: Tensor, *newest: Tensor) -> Tensor:
        """newest: the index keys of the newest tokens, which index_k has, too."""
        learns = self.training and torch.is_grad_enabled()
        out, blocks, *loss = msa_attention(
            q, k, v, index_q, index_k, block_size=self.block_size, top_k=None if self.warmup else self.top_k, return_blocks=True,
            return_loss=learns, cu_seqlens_q=seq.cu_seqlens, cu_seqlens_k=seq.cu_seqlens_k, max_seqlen_q=seq.max_seqlen,
            max_seqlen_k=seq.max_seqlen_k, impl=self.impl)
        if self.training:
            self.block_use.keep(blocks, self.block_size, seq)
        if learns:
            with torch.no_grad():
                self.mean_loss.copy_(loss[0].mean())
            seq.losses.add(self.index_weight * loss[0].mean(-1).sum())
        return out

    def visible_pairs(self, length: int) -> int:
        """Pairs of a query and a key that it reads."""
        if self.warmup:
            return super().visible_pairs(length)
        return sum(min(i // self.block_size, self.top_k - 1) * self.block_size + i % self.block_size + 1 for i in range(length))

    def flops(self, lengths: list[int]) -> float:
        """With the index queries' products with all keys of earlier blocks, which have no backward, and those with the keys that are read,
        which have one. The weights that these learn from are counted once, as the attention's."""
        index = self.spec.n_kv_heads * self.index_dim
        scored = 0 if self.warmup else sum(i // self.block_size * self.block_size for length in lengths for i in range(length))
        return super().flops(lengths) + 2.0 * index * scored + 6.0 * index * sum(map(self.visible_pairs, lengths))

    def metrics(self) -> dict[str, float]:
        """index_loss: the indexer's cross-entropy in nats, the mean over key heads and tokens of the last training step. block_entropy,
        block_coverage: see `attnzoo.attention.routing.BlockUse`."""
        return super().metrics() | {"index_loss": self.mean_loss.item()} | self.block_use.metrics()

    def extra_repr(self) -> str:
        return f"block_size={self.block_size}, top_k={self.top_k}, index_dim={self.index_dim}, warmup={self.warmup}"
