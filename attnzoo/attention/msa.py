"""MiniMax sparse attention (Lai et al. 2026, arXiv:2606.13392): a learned indexer chooses blocks of keys for each query.

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
from attnzoo.attention.routing import BlockUse, blocks_before, pairs_of_blocks
from attnzoo.signatures import Count
from attnzoo_kernels import msa_attention


class MSAttention(Attention):
    """Softmax attention over top_k blocks of keys: the query's own block, with a causal mask, and the earlier blocks with the best scores.
    A block's score is the largest index_q · index_k over its keys. Each key head has its own index query, and all key heads share the index
    key. The query heads of one key head read the same blocks.

    Parameters that other variants do not have: `index_q_proj` and `index_k_proj`, and with model.qk_norm `index_q_norm` and `index_k_norm`,
    as published. Index queries and keys are normalised and rotated like queries and keys. They are computed from the detached input, so
    that the indexer learns from its own loss alone. In training each layer adds this loss to the model's (`SequenceInfo.losses`). It is the
    cross-entropy between two distributions over the keys that a query reads: the attention weights, averaged over the query heads of a key
    head, are the target, and the softmax of the index scores is the prediction, see `msa_attention`. The loss is averaged over key heads
    and summed over tokens and layers, like the model's own.

    block_size: tokens in a block, at least 1. top_k: blocks that a query reads, its own included. Warns if these are all blocks of the
        model's context, where the layer is then dense attention.
    index_dim: width of index queries and keys, None for head_dim. index_weight: factor of the indexer's loss.
    warmup: queries read all earlier tokens, as in the first part of the paper's training; the indexer learns from these weights.
    impl: the operator's implementation ("gluon", "triton", "cpu", "reference"), None for the fastest that runs.
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
        """q, k and v, then index queries (..., kv_heads, index_dim) and index keys (..., 1, index_dim), which are rotated already."""
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
        """newest: the index keys of the newest tokens, unused, because index_k contains them."""
        learns = self.training and torch.is_grad_enabled()
        out, blocks, *loss = msa_attention(
            q, k, v, index_q, index_k, block_size=self.block_size, top_k=None if self.warmup else self.top_k, return_blocks=True,
            return_loss=learns, cu_seqlens_q=seq.cu_seqlens, cu_seqlens_k=seq.cu_seqlens_k, max_seqlen_q=seq.max_seqlen,
            max_seqlen_k=seq.max_seqlen_k, impl=self.impl)
        if self.training:
            self.block_use.keep(blocks, self.block_size, seq)
        if learns:
            total = loss[0].mean(-1).sum()
            with torch.no_grad():
                # what lies behind the last packed sequence is no token, and has a loss of 0
                self.mean_loss.copy_(total / (loss[0].shape[:-1].numel() if seq.cu_seqlens is None else seq.cu_seqlens[-1]))
            seq.losses.add(self.index_weight * total)
        return out

    def visible_pairs(self, length: int) -> int:
        """The number of pairs of a query and a key that the query reads, in one sequence of this length."""
        if self.warmup:
            return super().visible_pairs(length)
        return pairs_of_blocks(length, self.block_size, self.top_k)

    def flops(self, lengths: list[int]) -> float:
        """Includes two products of the indexer: with all keys of earlier blocks, for the choice, which has no backward, and with the keys
        that are read, for the loss, which has one. The attention weights that the loss needs are counted once, as part of attention."""
        index = self.spec.n_kv_heads * self.index_dim
        scored = 0 if self.warmup else self.block_size * sum(blocks_before(length, self.block_size) for length in lengths)
        return super().flops(lengths) + 2.0 * index * scored + 6.0 * index * sum(map(self.visible_pairs, lengths))

    def metrics(self) -> dict[str, float]:
        """index_loss: the indexer's cross-entropy in nats, the mean over key heads and tokens of the last training step. block_entropy,
        block_coverage: see `attnzoo.attention.routing.BlockUse`."""
        return super().metrics() | {"index_loss": self.mean_loss.item()} | self.block_use.metrics()

    def extra_repr(self) -> str:
        return f"block_size={self.block_size}, top_k={self.top_k}, index_dim={self.index_dim}, warmup={self.warmup}"
