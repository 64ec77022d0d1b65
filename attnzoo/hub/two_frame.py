"""Attention with two frames of positions in transformers' decoders: models trained on short contexts read long ones without new weights."""

import torch
from torch import Tensor, nn

from attnzoo.attention.two_frame import Frames, Method
from attnzoo.hub.unrotated import OwnRotation, convert
from attnzoo_kernels import checks, two_frame_attention
from attnzoo_kernels.dual_chunk.reference import rotate


def use_two_frame(model: nn.Module, *, method: Method = "rerope", context: int | None = None, window: int | None = None,
                  factor: int | None = None, sinks: int | None = None, impl: str | None = None) -> nn.Module:
    """Gives a transformers decoder with rotary positions attention in two frames, in place; returns the model.

    `attnzoo.attention.two_frame.Frames` has the formulas. As with `use_dual_chunk`, the model's rotary embedding becomes an identity, and
    attention and the KV cache get queries and keys without rotation; the rotary embedding rotates again if another attention is chosen. A
    cache holds each key once. Each pass rotates all keys of the cache for both frames, so that decoding reads the cache more than once and
    needs room for two copies of one layer's keys.

    method: "rerope" and "leaky_rerope" (Su 2023, https://kexue.fm/archives/9708), "self_extend" (Jin et al. 2024, arXiv:2401.01325),
    "lm_infinite" (Han et al. 2023, arXiv:2308.16137) or "streaming_llm" (Xiao et al. 2023, arXiv:2309.17453).
    context: the context that the model was trained on, from which the default of `window` follows; None for the config's
    max_position_embeddings. window, factor, sinks: the options of `attnzoo.attention.two_frame.TwoFrameAttention`.
    impl: see `attnzoo_kernels.two_frame_attention`.

    Supports the same as `use_dual_chunk`, and raises ValueError in the same cases and for wrong options.
    """
    def make(rotary: nn.Module, trained: int) -> _TwoFrame:
        return _TwoFrame(rotary, Frames(method, trained if context is None else context, window, factor, sinks), impl)

    if context is not None:
        checks.integer("context", context, 1)
    return convert(model, make)


class _TwoFrame(OwnRotation):
    """Attention in two frames, with the options and tables of one model."""

    title, implementation, converter = "attention in two frames", "attnzoo_two_frame", "hub.use_two_frame"

    def __init__(self, rotary: nn.Module, frames: Frames, impl: str | None):
        super().__init__(rotary)
        self.frames, self.impl = frames, impl
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, ...]] = {}

    def tables(self, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Six tables: cos and sin of the near frame, then of the far queries, then of the far keys. Each is (1, at least tokens,
        rotary_dim / 2), with one row for each position, because a token's position in a frame depends on its position alone."""
        known = self._tables.get((device, dtype))
        if known is None or known[0].shape[1] < tokens:
            position = torch.arange(1 << (tokens - 1).bit_length(), dtype=torch.float64)
            angles = [p[None, :, None] * self.frequencies for p in (position, *self.frames.far_positions(position))]
            known = tuple((x * self.magnitude).to(device, dtype) for angle in angles for x in (angle.cos(), angle.sin()))
            self._tables[device, dtype] = known
        return known

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> Tensor:
        keys, first = k.shape[1], k.shape[1] - q.shape[1]
        tables = self.tables(keys, q.device, torch.promote_types(q.dtype, torch.float32))
        near, far_q, far_k = (tables[i : i + 2] for i in (0, 2, 4))

        def framed(x: Tensor, far: tuple[Tensor, ...], start: int) -> Tensor:
            """(batch, tokens, heads, 2, width)"""
            return torch.stack([rotate(x, *(table[:, start:keys] for table in frame), self.interleaved) for frame in (near, far)], dim=-2)

        return two_frame_attention(framed(q, far_q, first), framed(k, far_k, 0), v, near_keys=self.frames.window,
                                   far_keys=self.frames.sinks, softmax_scale=softmax_scale, impl=self.impl)
