"""Dual Chunk attention in transformers' decoders: models trained on short contexts read long ones without new weights."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attnzoo.hub.unrotated import OwnRotation, convert
from attnzoo_kernels import dual_chunk_attention
from attnzoo_kernels.dual_chunk.geometry import STAGES, geometry, stage_bits


def use_dual_chunk(model: nn.Module, *, chunk_size: int | None = None, local_size: int | None = None, variant: str = "paper",
                   stages: Sequence[str] = STAGES, impl: str | None = None) -> nn.Module:
    """Gives a transformers decoder with rotary positions Dual Chunk attention (An et al. 2024, arXiv:2402.17463), in place; returns it.

    transformers rotates queries and keys before they reach attention. Here the model's rotary embedding becomes an identity, so that
    attention and the KV cache get queries and keys without rotation. The operator rotates them, in float32, with the frequencies of the
    model's config. The rotary embedding rotates again if another attention is chosen (`use_block_sparse`, `set_attn_implementation`); this
    needs a new cache. A further `use_dual_chunk` or `use_two_frame` replaces an earlier one. The model gets its own copy of its config.

    chunk_size: the context that the model was trained on, None for the config's max_position_embeddings. local_size: the part of it that is
    reserved for distances to the previous chunk, None for a quarter. variant, stages, impl: see `attnzoo_kernels.dual_chunk_attention`.

    Prefill, decoding with a cache that holds exactly the tokens read (DynamicCache, transformers' default) and training are supported. All
    rows of a batch must have the same length.

    Raises ValueError for models without exactly one rotary embedding, with frequencies that change with the length, with an unknown style
    of rotation, or with layers that rotate differently or not at all (each layer is tried on a few tokens). The forward pass raises
    ValueError for padding, packed rows, other positions, sliding windows, softcap, sinks and dropout.
    """
    def make(rotary: nn.Module, context: int) -> _DualChunk:
        size = context if chunk_size is None else chunk_size
        local = size // 4 if local_size is None and isinstance(size, int) else local_size
        return _DualChunk(rotary, size, local, variant, tuple(stages), impl)

    return convert(model, make)


class _DualChunk(OwnRotation):
    """Dual Chunk attention with the options and tables of one model."""

    title, implementation, converter = "dual chunk attention", "attnzoo_dual_chunk", "hub.use_dual_chunk"

    def __init__(self, rotary: nn.Module, chunk_size: int, local_size: int, variant: str, stages: tuple[str, ...], impl: str | None):
        super().__init__(rotary)
        self.positions = geometry(chunk_size, local_size, variant).positions
        stage_bits(stages)
        self.options = {"chunk_size": chunk_size, "local_size": local_size, "variant": variant, "stages": stages, "impl": impl}
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 (positions, rotary_dim / 2)."""
        if device not in self._tables:
            angles = torch.arange(self.positions, dtype=torch.float64)[:, None] * self.frequencies
            self._tables[device] = angles.cos().float().to(device), angles.sin().float().to(device)
        return self._tables[device]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> Tensor:
        cos, sin = self.tables(q.device)
        return dual_chunk_attention(q, k, v, cos=cos, sin=sin, softmax_scale=softmax_scale * self.magnitude**2, causal=causal,
                                    rope_interleaved=self.interleaved, **self.options)
