"""Dual Chunk attention (An et al. 2024, arXiv:2402.17463): long contexts at trained rotary distances, by `dual_chunk_attention`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnzoo.attention.base import Attention, AttentionSpec, Impl, KVCache, SequenceInfo, Supports
from attnzoo.attention.positions import rotate
from attnzoo.attention.temperature import make_temperature
from attnzoo_kernels import decode_attention, dual_chunk_attention, padding
from attnzoo_kernels.dual_chunk.geometry import STAGES, geometry, stage_bits, stage_positions

TEMPERATURES = ("none", "yarn")


class DualChunkAttention(Attention):
    """Softmax attention whose rotary distances stay within chunk_size, however long the sequence.

    It has the parameters of attention=flash. A checkpoint of attention=flash that was trained with rotary positions can therefore read
    longer contexts with this variant. The cache holds keys without rotation. Positions are counted from each sequence's start; the
    caller's position_ids are ignored.

    impl: the operator's implementation ("gluon", "triton", "cpu", "reference"), None for the fastest that runs.
    variant: which position is the largest: chunk_size - 1 ("paper") or chunk_size ("chunkllama").
    chunk_size: the bound of the rotary positions. None takes the context that they were trained on: model.original_context, else the
        training context.
    local_size: the part of chunk_size that is reserved for distances to the previous chunk, None for a quarter. A chunk has
        chunk_size - local_size tokens.
    stages: which chunks a query sees: its own ("intra"), the neighbouring ones ("successive"), those farther away ("inter").
    temperature: "yarn" multiplies the logits of a query at position p by (0.1 ln((p + 1) / context) + 1)^2 where p + 1 is more than
        the context that the positions were trained on.
    """

    supports = Supports(positions=("rotary",), dropout=False, context_parallel=("dense", "packed"))
    decodes_on_device = True
    divides_heads = True
    extends_context = True

    def __init__(self, spec: AttentionSpec, *, impl: Impl | None = None, variant: str = "paper", chunk_size: int | None = None,
                 local_size: int | None = None, stages: Sequence[str] = STAGES, temperature: str = "none"):
        super().__init__(spec)
        self.impl = impl
        self.variant = variant
        self.chunk_size = spec.known_context if chunk_size is None else chunk_size
        if local_size is None and isinstance(self.chunk_size, int):
            local_size = self.chunk_size // 4
        self.local_size = local_size
        self.stages = tuple(stages)
        if temperature not in TEMPERATURES:
            raise ValueError(f"attention.temperature={temperature!r}: must be one of {', '.join(TEMPERATURES)}")
        if temperature != "none" and self.temperature is not None:
            raise ValueError(f"attention.temperature={temperature}: does not go with attention_temperature={spec.temperature}; set one of "
                             "them to none")
        self.chunk_temperature = None if temperature == "none" else make_temperature(temperature, spec.known_context)
        try:
            self.geometry = geometry(self.chunk_size, self.local_size, variant)
            stage_bits(self.stages)
        except ValueError as error:
            raise ValueError(f"attention.{error}") from error

    def apply_positions(self, q: Tensor, k: Tensor, seq: SequenceInfo) -> tuple[Tensor, Tensor]:
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo) -> Tensor:
        cos, sin = self._tables(seq, q)
        return dual_chunk_attention(
            q, k, v, cos=cos, sin=sin, chunk_size=self.chunk_size, local_size=self.local_size, variant=self.variant,
            softmax_scale=self._softmax_scale(q), causal=self.spec.causal, stages=self.stages,
            logit_multiplier=self._multiplier(q, k, seq), cu_seqlens_q=seq.cu_seqlens,
            cu_seqlens_k=seq.cu_seqlens_k, max_seqlen_q=seq.max_seqlen, max_seqlen_k=seq.max_seqlen_k, impl=self.impl)

    def _softmax_scale(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 * self.rope.magnitude**2

    def attend_cached(self, q: Tensor, cache: KVCache, seq: SequenceInfo) -> Tensor:
        if cache.rotated:
            raise ValueError("cache: its keys were rotated for decoding on a device, which goes on with one token of each row at a time")
        return super().attend_cached(q, cache, seq)

    def _append_newest(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, seq: SequenceInfo) -> Tensor:
        """Returns a query for each stage, (batch, 3, heads, width), the farthest one first.

        The kernels for prompts rotate keys themselves. Here the first call rotates the cached keys in place, by their position within
        their chunk, and each call rotates the newest keys.
        """
        if not cache.rotated:
            inside = torch.arange(cache.max_len, device=q.device) % self.geometry.chunk
            cache.keys.copy_(rotate(cache.keys, *(table[inside] for table in self._tables(seq, q))))
            cache.rotated = True
        tables = seq.once(("dual_chunk newest", self.geometry, self.rope.key), lambda: self._stage_tables(cache))
        return self._append_rotated(q, k, v, tables, cache)

    def attend_newest(self, q: Tensor, cache: KVCache, seq: SequenceInfo) -> Tensor:
        """Runs `decode_attention` once, with each stage's query for the keys of the stage's chunks."""
        segments = seq.once(("dual_chunk segments", self.geometry, self.stages), lambda: self._segments(cache))
        if (multiplier := self._newest_multiplier(cache, seq)) is not None:
            q = (q * multiplier[:, None, None, None]).to(q.dtype)
        return decode_attention(
            q, cache.keys, cache.values, cache_seqlens=cache.newest.lengths, segments=segments, softmax_scale=self._softmax_scale(q),
            impl="reference" if self.impl == "reference" else None)

    def _stage_tables(self, cache: KVCache) -> tuple[Tensor, Tensor]:
        """cos and sin of the newest queries in each stage, (batch, 3, rotated channels / 2). The last one is also that of the newest keys.

        The largest position is that of the farthest stage, as in `_tables`: some scalings depend on it.
        """
        positions = stage_positions(cache.newest.positions, self.geometry)
        return self.rope.tables(torch.stack(positions[::-1], dim=1), scaled=False)

    def _segments(self, cache: KVCache) -> Tensor:
        """The first key and the end of each stage for the newest queries, int32 (batch, 3, 2). A stage that is left out has no key."""
        at, chunk = cache.newest.positions, self.geometry.chunk
        own = at - at % chunk
        before, none = (own - chunk).clamp(min=0), torch.zeros_like(own)
        ranges = {"inter": (none, before), "successive": (before, own), "intra": (own, at + 1)}
        chosen = (ranges[stage] if stage in self.stages else (none, none) for stage in STAGES[::-1])
        return torch.stack([torch.stack(bounds, dim=1) for bounds in chosen], dim=1).int()

    def _newest_multiplier(self, cache: KVCache, seq: SequenceInfo) -> Tensor | None:
        if (temperature := self.chunk_temperature) is None:
            return None
        return seq.once(("dual_chunk newest", *temperature.key), lambda: temperature.factor(cache.newest.positions + 1))

    def _tables(self, seq: SequenceInfo, q: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of every rotary position that occurs in chunks, float32 (positions, rotated channels / 2)."""
        positions = self.geometry.positions
        return seq.once(("dual_chunk", positions, self.rope.key),
                        lambda: self.rope.tables(torch.arange(positions, device=q.device), scaled=False))

    def _multiplier(self, q: Tensor, k: Tensor, seq: SequenceInfo) -> Tensor | None:
        """The factor of each query's logits, float32, or None. It depends on the query's own position only, so that later tokens do not
        change it."""
        if (temperature := self.chunk_temperature) is None:
            return None

        def make() -> Tensor:
            if seq.keys is not None:
                return temperature.factor(seq.position_ids + 1)
            if seq.cu_seqlens is not None:
                return temperature.factor(padding.position_ids(seq.cu_seqlens, q.shape[0]) + 1)
            return temperature.factor(torch.arange(k.shape[1] - q.shape[1], k.shape[1], device=q.device) + 1)

        return seq.once(("dual_chunk", *temperature.key), make)

    def check_context_parallel(self, packed: bool) -> None:
        super().check_context_parallel(packed)
        if not self.spec.causal:
            raise ValueError("trainer.context_parallel: attention=dual_chunk goes with it in a causal model only")

    def visible_pairs(self, length: int) -> int:
        chunk = self.geometry.chunk
        whole, rest = divmod(length, chunk)
        if self.spec.causal:
            intra = whole * chunk * (chunk + 1) // 2 + rest * (rest + 1) // 2
        else:
            intra = whole * chunk * chunk + rest * rest
        successive = (1 if self.spec.causal else 2) * (max(whole - 1, 0) * chunk * chunk + (rest * chunk if whole else 0))
        pairs = {"intra": intra, "successive": successive, "inter": super().visible_pairs(length) - intra - successive}
        return sum(pairs[stage] for stage in set(self.stages))
