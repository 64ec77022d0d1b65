"""Learned biases by distance: T5's buckets (Raffel et al. 2020, arXiv:1910.10683), KERPLE (Chi et al. 2022, arXiv:2205.09921) and
FIRE (Li et al. 2024, arXiv:2310.04418).

The first two run on `attnzoo_kernels.distance_bias_attention`. The table of biases is computed from a layer's parameters in each forward
pass. FIRE's bias also depends on the query's position, so it does not fit into a table by distance. PyTorch's attention takes it as a mask,
one tile of queries at a time.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnzoo.attention.base import AttentionSpec, Impl, KVCache, SequenceInfo, Supports
from attnzoo.attention.fire import FireBias
from attnzoo.attention.sdpa import masked_attention
from attnzoo.attention.window import WindowedAttention
from attnzoo_kernels import distance_bias_attention
from attnzoo_kernels.packing import pad_packed, unpad_packed

KINDS = ("t5", "kerple_log", "kerple_power", "fire")
LEAST = 0.01  # lower bound of r1 and r2
PAIRS = 2**22  # pairs of a query and a key whose FIRE biases are in memory at once, for each head


class DistanceBiasAttention(WindowedAttention):
    """Softmax attention whose scores get a learned bias, which depends on the head and on the distance between query and key.

    The papers' models have no other positions (model.positions=none). Rotary and learned positions may be combined with it.

    kind: "t5": one bias for each of num_buckets buckets of distances, `relative_attention_bias`. Half of the buckets hold one distance
        each; the others hold ranges that grow up to max_distance; the last one also holds all larger distances. A bidirectional model
        uses half of the buckets for each direction. Unlike in T5, each layer has its own biases, and scores are scaled as in the other
        variants.
        "kerple_log": -r1 log(1 + r2 distance); "kerple_power": -r1 distance^r2. Each head has its `r1` and `r2`, the same for both
        directions. They are clamped to at least 0.01, and r2 of "kerple_power" to at most 2.
        "fire": see `attnzoo.attention.fire`; for causal models. It has no kernel. Memory is linear in the length, and the bias is rounded
        to the dtype of the queries.
    threshold: the initial value of the L of "fire", in tokens. For queries up to position L the bias depends on the distance alone.
    window_size: (left, right), how many keys before and after its own a query sees; -1 is unlimited. right is 0 in a causal model.
    impl: the operator's implementation ("gluon", "triton", "cpu", "reference"), None for the fastest that runs. Must be None with "fire".
    """

    supports = Supports(positions=("learned", "rotary", "none"), dropout=False, context_parallel=("dense", "packed"))
    decodes_on_device = True

    def __init__(self, spec: AttentionSpec, *, kind: Literal["t5", "kerple_log", "kerple_power", "fire"] = "t5", num_buckets: int = 32,
                 max_distance: int = 128, threshold: float = 512.0, window_size: Sequence[int] = (-1, -1), impl: Impl | None = None):
        super().__init__(spec, window_size)
        if kind not in KINDS:
            raise ValueError(f"attention.kind={kind!r}: must be one of {', '.join(KINDS)}")
        self.kind, self.num_buckets, self.max_distance, self.impl = kind, num_buckets, max_distance, impl
        if kind == "t5":
            parts = 2 if spec.causal else 4
            if num_buckets % parts or num_buckets < parts:
                raise ValueError(f"attention.num_buckets={num_buckets}: must be a positive multiple of {parts}")
            if max_distance <= num_buckets // parts:
                raise ValueError(f"attention.max_distance={max_distance}: must be more than the {num_buckets // parts} distances that "
                                 "have a bucket each")
            self.relative_attention_bias = nn.Embedding(num_buckets, spec.n_heads)
        elif kind == "fire":
            if not spec.causal:
                raise ValueError("attention.kind=fire: is for causal models; use a gpt model or attention.kind=t5")
            if impl is not None:
                raise ValueError(f"attention.impl={impl}: attention.kind=fire has no paths to choose from; set attention.impl=null")
            if not threshold > 0:
                raise ValueError(f"attention.threshold={threshold}: must be positive")
            self.fire = FireBias(spec.n_heads, threshold)
        else:
            self.r1, self.r2 = (nn.Parameter(torch.empty(spec.n_heads)) for _ in range(2))
        self._draw()

    @property
    def in_float32(self) -> tuple[nn.Module, ...]:
        return (self.fire,) if self.kind == "fire" else ()

    def _draw(self) -> None:
        """Initialises the bias's parameters like the authors."""
        if self.kind == "t5":
            nn.init.normal_(self.relative_attention_bias.weight, std=self.spec.dim**-0.5)
        elif self.kind == "fire":
            self.fire.draw()
        else:
            nn.init.uniform_(self.r1, 0, 2 if self.kind == "kerple_log" else 1)
            nn.init.uniform_(self.r2, 0, 1 if self.kind == "kerple_log" else 2)

    def init_weights(self, std: float, residual_std: float) -> None:
        super().init_weights(std, residual_std)
        self._draw()

    def check_context_parallel(self, packed: bool) -> None:
        super().check_context_parallel(packed)
        if self.kind == "fire":
            raise ValueError("trainer.context_parallel: does not go with attention.kind=fire; set trainer.context_parallel=1")
        if not self.spec.causal:  # the operator cannot tell how far the gathered keys are from this device's queries
            raise ValueError("trainer.context_parallel: does not go with attention=distance_bias in a bidirectional model; set "
                             "trainer.context_parallel=1")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo) -> Tensor:
        if self.kind == "fire":
            return self._with_fire(q, k, v, seq)
        length = k.shape[-3] if seq.cu_seqlens_k is None or seq.max_seqlen_k is None else seq.max_seqlen_k
        table, origin = self.table(length, q.device)
        return distance_bias_attention(
            q, k, v, table.to(torch.promote_types(q.dtype, torch.float32)), origin=origin, causal=self.spec.causal,
            window_size=self.window_size, cu_seqlens_q=seq.cu_seqlens, cu_seqlens_k=seq.cu_seqlens_k, max_seqlen_q=seq.max_seqlen,
            max_seqlen_k=seq.max_seqlen_k, impl=self.impl)

    def _with_fire(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo) -> Tensor:
        if seq.cu_seqlens is None:
            return self._by_tiles(q, k, v, torch.arange(k.shape[1] - q.shape[1], k.shape[1], device=q.device))
        rows = [pad_packed(q, seq.cu_seqlens, seq.max_seqlen), *(pad_packed(x, seq.cu_seqlens_k, seq.max_seqlen_k) for x in (k, v))]
        position = torch.arange(rows[0].shape[1], device=q.device)
        if seq.keys is not None:  # queries are the last tokens
            position = position + (seq.cu_seqlens_k.diff() - seq.cu_seqlens.diff())[:, None]
        return unpad_packed(self._by_tiles(*rows, position), seq.cu_seqlens, q.shape[0])

    def _by_tiles(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        """Attention in tiles of queries. position: (queries,) or (batch, queries), the queries' positions. With several tiles the backward
        computes each tile's bias again."""
        def attend(q: Tensor, position: Tensor) -> Tensor:
            return masked_attention(q, k, v, self._mask(position, k.shape[1], q.dtype))

        rows = max(1, PAIRS // max(1, k.shape[1] * (position.shape[0] if position.dim() > 1 else 1)))
        if q.shape[1] <= rows:
            return attend(q, position)
        tiles = zip(q.split(rows, 1), position.split(rows, -1), strict=True)
        again = torch.is_grad_enabled()
        return torch.cat([checkpoint(attend, *tile, use_reentrant=False) if again else attend(*tile) for tile in tiles], 1)

    def _mask(self, position: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
        """FIRE's biases of queries at `position` (..., rows), -inf for keys that they do not see: (..., n_heads, rows, keys)."""
        distance = position[..., None] - torch.arange(keys, device=position.device)
        hidden = distance < 0
        if self.window_size[0] >= 0:
            hidden = hidden | (distance > self.window_size[0])
        bias = self.fire(position, distance.clamp(min=0))
        return bias.masked_fill(hidden.unsqueeze(-3), -torch.inf).to(dtype)

    def attend_newest(self, q: Tensor, cache: KVCache, seq: SequenceInfo) -> Tensor:
        if self.kind != "fire":
            return super().attend_newest(q, cache, seq)
        return masked_attention(q, cache.keys, cache.values, self._mask(cache.newest.positions[:, None], cache.max_len, q.dtype))

    def metrics(self) -> dict[str, float]:
        if self.kind != "fire":
            return super().metrics()
        threshold = (self.fire.L_multiplier * self.fire.init_L).abs()
        return super().metrics() | {"fire_c": self.fire.c.item(), "fire_threshold": threshold.item()}

    def table(self, length: int, device: torch.device) -> tuple[Tensor, int]:
        """The bias of each distance, (n_heads, distances), for sequences of up to `length` tokens, and the index of distance 0."""
        farthest = self.max_distance if self.kind == "t5" else max(length, 1) - 1
        origin = 0 if self.spec.causal else farthest
        distance = torch.arange(-origin, farthest + 1, device=device)
        if self.kind == "t5":
            return self.relative_attention_bias(self.buckets(distance)).T, origin
        r1, r2 = self.r1[:, None], self.r2[:, None]
        # straight-through clamp: values outside the bounds keep their gradient, as if the parameters themselves were clamped
        r1, r2 = r1 + (r1.clamp(LEAST) - r1).detach(), r2 + (r2.clamp(LEAST, 2 if self.kind == "kerple_power" else None) - r2).detach()
        distance = distance.abs().to(torch.promote_types(r1.dtype, torch.float32))
        if self.kind == "kerple_log":
            return -r1 * torch.log1p(r2 * distance), origin
        # not 0 ** r2, whose derivative by r2 is no number
        return torch.where(distance == 0, 0.0, -r1 * distance.clamp(min=1) ** r2), origin

    def buckets(self, distance: Tensor) -> Tensor:
        """T5's bucket of each distance, which is the query's position minus the key's. In a bidirectional model negative distances (keys
        after the query) have the second half of the buckets."""
        count = self.num_buckets if self.spec.causal else self.num_buckets // 2
        exact = count // 2
        first = 0 if self.spec.causal else (distance < 0) * count
        distance = distance.clamp(min=0) if self.spec.causal else distance.abs()
        share = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        grown = (exact + (share * (count - exact)).long()).clamp(max=count - 1)
        return first + torch.where(distance < exact, distance, grown)
