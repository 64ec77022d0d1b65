"""Block-sparse attention (Dao et al. 2022, arXiv:2205.14135) in a published pattern, by `attnzoo_kernels.block_sparse_attention`."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnzoo.attention.base import Attention, AttentionSpec, Impl, KVCache, SequenceInfo, Supports
from attnzoo.attention.sdpa import masked_attention
from attnzoo_kernels import block_sparse_attention, decode_attention
from attnzoo_kernels.block_sparse.layout import BLOCKS
from attnzoo_kernels.block_sparse.patterns import PATTERNS, Pattern

CHECKED_BLOCKS = 256


class BlockSparseAttention(Attention):
    """Softmax attention over the blocks that a pattern keeps. The layout of blocks is computed once for each sequence length and cached.

    pattern: a name in `attnzoo_kernels.block_sparse.patterns.PATTERNS`, or {name: ..., option: ...} with that function's options, or a list
        of these, which the layers take in turn: [sliding_window, dense] alternates local and global attention. A pattern that differs by
        head is given the model's number of heads. In packed input each sequence has its own pattern, starting at its first token.
    block: tokens in a block (16, 32, 64, 128, 256), unless the pattern's options say it. Warns if the pattern keeps every block of the
        model's context, where the layer is then dense attention.
    impl: the operator's implementation ("gluon", "triton", "cpu", "reference"), None for the fastest that runs.
    """

    supports = Supports(positions=("learned", "rotary"), dropout=False, context_parallel=("dense", "packed"))
    decodes_on_device = True
    merges_chunks = False

    def __init__(self, spec: AttentionSpec, *, pattern: str | Mapping[str, Any] | Sequence = "longformer", block: int = 64,
                 impl: Impl | None = None):
        super().__init__(spec)
        self.impl = impl
        patterns = [pattern] if isinstance(pattern, str | Mapping) else list(pattern)
        if not patterns:
            raise ValueError("attention.pattern: must name a pattern, got an empty list")
        try:
            self.pattern = _make_pattern(patterns[spec.layer % len(patterns)], block, spec)
        except (TypeError, ValueError) as error:
            raise ValueError(f"attention.pattern, attention.block: {error}") from error
        self._pairs: dict[int, int] = {}
        blocks = max(CHECKED_BLOCKS, -(-spec.train_context // self.pattern.block))
        diagonal = self.pattern.layout(blocks * self.pattern.block).mask.diagonal(dim1=-2, dim2=-1)
        if not diagonal.all():
            raise ValueError(f"attention.pattern={self.pattern}: in block {int((~diagonal).nonzero()[0, -1])} a token does not see itself; "
                             "choose options that keep the diagonal, or another pattern")
        if self.pattern.name != "dense" and _is_dense(self.pattern, spec.train_context):
            # one text for all layers: Python shows it once
            warnings.warn(f"attention.pattern={self.pattern}: keeps every block of the model's context of {spec.train_context} tokens, so "
                          f"that it is dense attention there; {_way_out(self.pattern, spec.train_context)}", stacklevel=2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo) -> Tensor:
        if seq.cu_seqlens is not None and not self.pattern.prefix_stable:
            raise ValueError(f"attention.pattern={self.pattern}: last_global depends on a sequence's end, which packed and padded "
                             "sequences do not share; set last_global=false, or read dense sequences of one length without attention_mask")
        return block_sparse_attention(
            q, k, v, self.pattern, causal=self.spec.causal, cu_seqlens_q=seq.cu_seqlens, cu_seqlens_k=seq.cu_seqlens_k,
            max_seqlen_q=seq.max_seqlen, max_seqlen_k=seq.max_seqlen_k, impl=self.impl)

    def check_context_parallel(self, packed: bool) -> None:
        super().check_context_parallel(packed)
        if not self.spec.causal or not self.pattern.prefix_stable:
            raise ValueError(f"trainer.context_parallel: attention.pattern={self.pattern} must be causal and without last_global, because "
                             "each device places it on the keys up to its own queries")

    @property
    def page(self) -> int:
        return self.pattern.block if self.pattern.heads == 1 else 1

    def attend_newest(self, q: Tensor, cache: KVCache, seq: SequenceInfo) -> Tensor:
        """If all heads have one pattern, the kept blocks are read as pages of the cache. If not, a mask over the whole cache is used."""
        if self.pattern.heads == 1 and cache.max_len % self.page == 0:
            table, lengths = seq.once(("block_sparse pages", self.pattern.key), lambda: self._newest_pages(cache))
            return decode_attention(q, *cache.pages(self.page), cache_seqlens=lengths, block_table=table,
                                    impl="reference" if self.impl == "reference" else None)
        mask = seq.once(("block_sparse newest", self.pattern.key), lambda: self._newest_mask(cache))
        return masked_attention(q, cache.keys, cache.values, mask)

    def _newest_pages(self, cache: KVCache) -> tuple[Tensor, Tensor]:
        """`decode_attention`'s block_table and cache_seqlens: the kept blocks up to the new token's own block, which comes last."""
        block, positions = self.pattern.block, cache.newest.positions
        layout = self.pattern.layout(cache.max_len, positions.device).mask[0, 0]
        own, blocks = positions // block, torch.arange(layout.shape[-1], device=positions.device)
        kept = layout[own] & (blocks <= own[:, None])
        # the kept blocks first, in ascending order
        order = torch.where(kept, blocks, len(blocks)).sort(-1).values.clamp(max=len(blocks) - 1)
        table = cache.newest.row_starts[:, None] // block + order
        return table.int(), ((kept.sum(-1) - 1) * block + positions % block + 1).int()

    def _newest_mask(self, cache: KVCache) -> Tensor:
        """(batch, 1 or heads, 1, max_len)"""
        positions, keys = cache.newest.positions, torch.arange(cache.max_len, device=cache.keys.device)
        # (heads, blocks, blocks) to (batch, heads, keys)
        kept = self.pattern.layout(cache.max_len, cache.keys.device).mask[0]
        kept = kept[:, positions // self.pattern.block].transpose(0, 1)[..., keys // self.pattern.block]
        return (kept & (keys <= positions[:, None, None]))[:, :, None]

    def visible_pairs(self, length: int) -> int:
        """The number of pairs of a query and a key that the query sees, in one sequence of this length: the mean over heads."""
        if length not in self._pairs:
            mask = self.pattern.layout(length).mask[0]
            size = (length - self.pattern.block * torch.arange(mask.shape[-1])).clamp(max=self.pattern.block)
            pairs = size[:, None] * size
            if self.spec.causal:
                pairs = pairs.tril(-1) + torch.diag(size * (size + 1) // 2)
            self._pairs[length] = int((mask * pairs).sum()) // len(mask)
        return self._pairs[length]

    def extra_repr(self) -> str:
        return repr(self.pattern)


def _is_dense(pattern: Pattern, seqlen: int) -> bool:
    kept = pattern.layout(seqlen).mask
    return bool((kept | kept.new_ones(kept.shape[-2:]).triu(1) if pattern.options["causal"] else kept).all())


def _way_out(pattern: Pattern, seqlen: int) -> str:
    for block in reversed([size for size in BLOCKS if size < pattern.block]):
        if not _is_dense(Pattern(pattern.name, **pattern.options | {"block": block}), seqlen):
            return f"set attention.block={block}"
    return "choose smaller options, or a longer context"


def _make_pattern(chosen: str | Mapping[str, Any], block: int, spec: AttentionSpec) -> Pattern:
    if isinstance(chosen, str):
        chosen = {"name": chosen}
    if not isinstance(chosen, Mapping) or "name" not in chosen:
        raise ValueError(f"must be a pattern's name, or {{name: ..., option: ...}}, got {chosen!r}")
    name = chosen["name"]
    given = {key: list(v) if isinstance(v, Sequence) and not isinstance(v, str) else v for key, v in chosen.items() if key != "name"}
    options = {"block": block} | given
    if options.setdefault("causal", spec.causal) != spec.causal:
        raise ValueError(f"causal={options['causal']}: follows the model, whose attention has causal={spec.causal}; leave it out")
    if "heads" in inspect.signature(PATTERNS.get(name, PATTERNS["dense"])).parameters:
        options.setdefault("heads", spec.n_heads)
    pattern = Pattern(name, **options)
    if pattern.heads not in (1, spec.n_heads):
        raise ValueError(f"heads={pattern.heads}: must be 1 or the model's {spec.n_heads}; leave it out")
    return pattern
