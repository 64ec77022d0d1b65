"""Native sparse attention (Yuan et al. 2025, arXiv:2502.11089): a gated sum of attention to compressed keys, chosen blocks and a window.

Runs on `attnzoo_kernels.nsa_attention`.
"""

import math
import warnings
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.attention.base import Attention, AttentionSpec, Impl, KVCache, SequenceInfo, Supports
from attnzoo.attention.routing import BlockUse, blocks_before, pairs_of_blocks
from attnzoo_kernels import nsa_attention
from attnzoo_kernels.nsa import compressed_bounds

BRANCHES = ("compressed", "selected", "window")


class Pool(nn.Module):
    """Pools each window of `size` tokens of a head into one token; windows start `stride` tokens apart.

    pooling: "mlp", an MLP over the concatenated channels of a window, or the mean. The MLP's first bias stands for the paper's position
    embedding inside a window, because adding that embedding to the tokens would only add a constant there.
    """

    def __init__(self, width: int, size: int, stride: int, pooling: str):
        super().__init__()
        self.overlap = size // stride
        self.up, self.down = (nn.Linear(size * width, 2 * width), nn.Linear(2 * width, width)) if pooling == "mlp" else (None, None)

    def forward(self, chunks: Tensor, rows: Tensor | None) -> Tensor:
        """Returns the pooled tokens, (..., compressed, kv_heads, width).

        chunks: (..., chunks, stride, kv_heads, width), consecutive tokens without overlap. rows: (compressed,), the first chunk of each
        window, for packed sequences; None for one sequence, whose windows start at every chunk.
        """
        if self.up is None:
            parts = (chunks.mean(-3) / self.overlap).unsqueeze(-2).expand(*chunks.shape[:-3], chunks.shape[-2], self.overlap, -1)
        else:
            # each chunk's share of the first product is computed once
            flat = chunks.transpose(-3, -2).flatten(-2)
            weight = self.up.weight.unflatten(1, (self.overlap, flat.shape[-1])).transpose(0, 1).flatten(0, 1)
            parts = F.linear(flat, weight).unflatten(-1, (self.overlap, -1))
        whole = chunks.shape[-4]
        if rows is None:
            count = max(whole - self.overlap + 1, 0)
            pooled = sum(parts[..., i : i + count, :, i, :] for i in range(self.overlap))
        else:  # indices beyond the last chunk are clamped: such results belong to no sequence and are unused
            pooled = sum(parts[..., i, :].index_select(-3, (rows + i).clamp(max=max(whole - 1, 0))) for i in range(self.overlap))
        return pooled if self.up is None else self.down(F.gelu(pooled + self.up.bias))


class NSAttention(Attention):
    """The gated sum of three softmax attentions ("branches"): over compressed keys, over the blocks whose compressed keys have the largest
    weights, and over a window of the last keys. Gates are sigmoid(x W + b) per token, head and branch. Parameters that other variants do
    not have: `branch_proj`, `k_pool` and `v_pool`.

    compress_size: tokens that are pooled into one compressed key. compress_stride: tokens from one compressed key's start to the next's.
        block_size: tokens in a block. block_count: blocks that the query heads of one key head read together. window: the last tokens,
        which are always read. See `attnzoo_kernels.nsa_attention`. compress_stride must divide compress_size and block_size.
    pooling: "mlp" as in the paper, or "mean". independent_kv: whether each branch has its own keys and values, as in the paper. If not, all
        branches share the keys and values, whose projections may come from a checkpoint of attention=flash.
    impl: the operator's implementation ("gluon", "triton", "cpu", "reference"), None for the fastest that runs.
    """

    supports = Supports(bidirectional=False, positions=("learned", "rotary", "none"), dropout=False)
    decodes_on_device = True
    drawn_with = "attention.independent_kv=false attention.pooling=mean"

    def __init__(self, spec: AttentionSpec, *, compress_size: int = 32, compress_stride: int = 16, block_size: int = 64,
                 block_count: int = 16, window: int = 512, pooling: Literal["mlp", "mean"] = "mlp", independent_kv: bool = True,
                 impl: Impl | None = None):
        self.branches = len(BRANCHES) if independent_kv else 1  # before super().__init__, which calls head_shapes
        super().__init__(spec)
        self.sizes = {"compress_size": compress_size, "compress_stride": compress_stride, "block_size": block_size,
                      "block_count": block_count, "window": window}
        for name, value in self.sizes.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"attention.{name}={value!r}: must be an integer of at least 1")
            if name in ("compress_size", "block_size") and value % compress_stride:
                raise ValueError(f"attention.{name}={value}: must be a multiple of attention.compress_stride={compress_stride}")
        if pooling not in ("mlp", "mean"):
            raise ValueError(f"attention.pooling={pooling!r}: must be mlp or mean")
        if block_size * block_count >= spec.train_context:
            # one text for all layers: Python shows it once
            warnings.warn(f"attention.block_count={block_count}, attention.block_size={block_size}: queries read every block of the "
                          f"model's context of {spec.train_context} tokens, so that nothing is chosen there; set smaller ones, or a longer "
                          "context", stacklevel=2)
        self.impl = impl
        self.branch_proj = nn.Linear(spec.dim, spec.n_heads * len(BRANCHES))
        self.k_pool, self.v_pool = (Pool(spec.head_dim, compress_size, compress_stride, pooling) for _ in range(2))
        self.block_use = BlockUse(always_read=True)
        # what metrics() reports: each branch's mean gate over the tokens of the last training step
        self.register_buffer("mean_gates", torch.full((len(BRANCHES),), math.nan), persistent=False)

    def head_shapes(self) -> dict[str, tuple[int, int]]:
        shapes = super().head_shapes()
        return shapes | {name: (self.branches * shapes[name][0], shapes[name][1]) for name in ("k", "v")}

    def init_weights(self, std: float, residual_std: float) -> None:
        super().init_weights(std, residual_std)
        for linear in (self.branch_proj, *self.k_pool.children(), *self.v_pool.children()):
            # 1 / sqrt(in_features) keeps the scale of the pooled keys and values
            nn.init.normal_(linear.weight, std=std if linear is self.branch_proj else linear.in_features**-0.5)
            nn.init.zeros_(linear.bias)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        q, *rest = super().project(x)
        gates = self.branch_proj(x).sigmoid().unflatten(-1, (self.spec.n_heads, len(BRANCHES)))
        if self.training:
            with torch.no_grad():
                self.mean_gates.copy_(gates.flatten(0, -2).mean(0))
        return q, *rest, gates.to(q.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo, gates: Tensor) -> Tensor:
        return self._attend(q, k, v, *(self._compressed(pool, x, seq) for pool, x in self._pooled(k, v)), seq, gates)

    def _pooled(self, k: Tensor, v: Tensor) -> tuple[tuple[Pool, Tensor], ...]:
        """Each pool with the heads that it pools."""
        heads = k.shape[-2] // self.branches
        return (self.k_pool, k[..., :heads, :]), (self.v_pool, v[..., :heads, :])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, k_cmp: Tensor, v_cmp: Tensor, seq: SequenceInfo, gates: Tensor) -> Tensor:
        keys, values = (x.chunk(self.branches, dim=-2) for x in (k, v))
        selected = min(1, self.branches - 1)
        out, blocks = nsa_attention(
            q, keys[selected], values[selected], k_cmp, v_cmp, gates, k_window=keys[-1], v_window=values[-1], return_blocks=True,
            cu_seqlens_q=seq.cu_seqlens, cu_seqlens_k=seq.cu_seqlens_k, max_seqlen_q=seq.max_seqlen, max_seqlen_k=seq.max_seqlen_k,
            impl=self.impl, **self.sizes)
        if self.training:
            self.block_use.keep(blocks, self.sizes["block_size"], seq)
        return out

    def _compressed(self, pool: Pool, x: Tensor, seq: SequenceInfo) -> Tensor:
        size, stride = self.sizes["compress_size"], self.sizes["compress_stride"]
        if seq.cu_seqlens_k is None:
            whole = x.shape[1] // stride
            return pool(x[:, : whole * stride].unflatten(1, (whole, stride)), None).to(x.dtype)
        tokens, rows = seq.once(("nsa", size, stride), lambda: _packed_chunks(seq.cu_seqlens_k, x.shape[0], size, stride))
        return pool(x[tokens], rows).to(x.dtype)

    # A cache also keeps the compressed keys and values, so that a new token pools one window and not the whole text.

    def attend_cached(self, q: Tensor, cache: KVCache, seq: SequenceInfo, gates: Tensor) -> Tensor:
        size, stride = self.sizes["compress_size"], self.sizes["compress_stride"]
        k, v = cache.read()
        pooled = self._pooled(k, v)
        before = 0  # windows that were pooled before
        if cache.derived:
            before = self._windows(cache.length - q.shape[1])
        else:
            cache.derived = tuple(x.new_zeros(cache.batch, max(cache.max_len // stride, 1), *x.shape[2:]) for _, x in pooled)
        count = self._windows(cache.length)
        if count > before:
            for (pool, x), compressed in zip(pooled, cache.derived, strict=True):
                chunks = x[:, before * stride : (count - 1) * stride + size].unflatten(1, (-1, stride))
                compressed[:, before:count] = pool(chunks, None)
        return self._attend(q, k, v, *(compressed[:, :count] for compressed in cache.derived), seq, gates)

    def attend_newest(self, q: Tensor, cache: KVCache, seq: SequenceInfo, gates: Tensor) -> Tensor:
        q, k, v, gates, *kept = (x.flatten(0, 1) for x in (q, *cache.buffers, gates, *cache.derived))
        size, stride = self.sizes["compress_size"], self.sizes["compress_stride"]
        rows = self.newest_rows(cache, seq)
        tokens, place, order = seq.once(("nsa newest", size, stride), lambda: _newest_windows(cache, rows.cu_seqlens_k, size, stride))
        for (pool, x), compressed in zip(self._pooled(k, v), kept, strict=True):
            compressed.index_copy_(0, place, pool(x[tokens], None).flatten(0, 1).to(x.dtype))
        return self._attend(q, k, v, *(compressed[order] for compressed in kept), rows, gates)[:, None]

    def visible_pairs(self, length: int) -> int:
        """The number of scores that a head computes: pairs of a query and a key or compressed key, summed over the branches."""
        inside = min(length, self.sizes["window"])
        window = inside * (inside + 1) // 2 + (length - inside) * self.sizes["window"]
        return self._compressed_pairs(length) + pairs_of_blocks(length, self.sizes["block_size"], self.sizes["block_count"]) + window

    def _windows(self, length: int) -> int:
        """The number of compressed keys of a sequence."""
        return max((length - self.sizes["compress_size"]) // self.sizes["compress_stride"] + 1, 0)

    def _compressed_pairs(self, length: int) -> int:
        """The number of pairs of a query and a compressed key that it sees, in one sequence of this length."""
        queries = max(length - self.sizes["compress_size"] + 1, 0)  # that see a compressed key
        return queries + blocks_before(queries, self.sizes["compress_stride"])

    def flops(self, lengths: list[int]) -> float:
        """Includes gates and pooling, and the scores of compressed keys for the choice of blocks, which have no backward."""
        pooled = sum(map(self._windows, lengths)) * self.spec.n_kv_heads
        weights = sum(linear.weight.numel() for pool in (self.k_pool, self.v_pool) for linear in pool.children())
        scores = sum(map(self._compressed_pairs, lengths))
        return (super().flops(lengths) + 6.0 * self.branch_proj.weight.numel() * sum(lengths) + 6.0 * weights * pooled
                + 2.0 * self.spec.n_heads * self.spec.head_dim * scores)

    def metrics(self) -> dict[str, float]:
        """gate_<branch>: the mean over heads and tokens of the last training step. block_entropy, block_coverage: see BlockUse."""
        gates = dict(zip((f"gate_{name}" for name in BRANCHES), self.mean_gates.tolist(), strict=True))
        return super().metrics() | gates | self.block_use.metrics()

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.sizes.items())


def _packed_chunks(cu_seqlens: Tensor, total: int, size: int, stride: int) -> tuple[Tensor, Tensor]:
    """The tokens of each chunk, (total // stride, stride), and the first chunk of each compressed key, (total // stride,).

    Chunks do not cross the boundaries of packed sequences. Both shapes are upper bounds; entries after the last one are unused.
    """
    count = total // stride
    whole = cu_seqlens.diff() // stride
    first_chunk = torch.cat([whole.new_zeros(1), whole.cumsum(0)])
    sequence, place = _places(first_chunk, count)
    tokens = (cu_seqlens[sequence] + place * stride)[:, None] + torch.arange(stride, device=cu_seqlens.device)
    sequence, place = _places(compressed_bounds(cu_seqlens, size, stride), count)
    return tokens.clamp(max=max(total - 1, 0)), first_chunk[sequence] + place


def _places(bounds: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """For each number from 0 to count - 1: the sequence between whose bounds it lies, and its index there. Numbers beyond the last bound
    belong to the last sequence."""
    number = torch.arange(count, device=bounds.device)
    sequence = torch.searchsorted(bounds[1:].long(), number, right=True).clamp(max=bounds.shape[0] - 2)
    return sequence, number - bounds[sequence]


def _newest_windows(cache: KVCache, cu_seqlens_k: Tensor, size: int, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, (batch, size // stride, stride), and place in `derived`, (batch,), of each row's last whole window, as in
    `Newest.last_windows`; places of all compressed keys in the order of packed sequences, (batch * max_len // stride,))."""
    room = cache.derived[0].shape[1]
    tokens, last = cache.newest.last_windows(size, stride, room)
    sequence, place = _places(compressed_bounds(cu_seqlens_k, size, stride), cache.batch * cache.max_len // stride)
    order = sequence // 2 * room + place.clamp(max=room - 1)  # every second sequence is the unused rest of a row
    return tokens.unflatten(1, (-1, stride)), last, order
