"""Attention with two frames of rotary positions, by `two_frame_attention`.

Near keys are seen at their true distances. Far keys are seen at distances that occurred in training.
"""

from typing import Literal

import torch
from torch import Tensor

from attnzoo.attention.base import Attention, AttentionSpec, Impl, SequenceInfo, Supports
from attnzoo.attention.positions import rotate
from attnzoo_kernels import two_frame_attention

Method = Literal["rerope", "leaky_rerope", "self_extend", "lm_infinite", "streaming_llm"]
METHODS = ("rerope", "leaky_rerope", "self_extend", "lm_infinite", "streaming_llm")
FACTOR = {"leaky_rerope": 16, "self_extend": 16}  # enough for 8 and 12 times the context with the default window
SINKS = {"lm_infinite": 10, "streaming_llm": 4}


class Frames:
    """The rotary positions that a method gives to a query at position p and a key at position j. In the near frame, p - j < window, both
    have their own positions. Keys that are farther away are in the far frame:

    method          the query stands at                      the key at    which keys
    rerope          window                                   0             all
    leaky_rerope    p / factor + window - window / factor    j / factor    all
    self_extend     p // factor + window - window // factor  j // factor   all
    lm_infinite     window                                   0             the first `sinks` of the sequence
    streaming_llm   min(p, window + sinks - 1)               j             the first `sinks` of the sequence

    context: the context length, in tokens, that the positions were trained on. It sets the default of `window`: a half of it (rerope,
    leaky_rerope), a quarter (self_extend), or the largest window with which no distance exceeds it (lm_infinite, streaming_llm).
    """

    def __init__(self, method: str, context: int, window: int | None, factor: int | None, sinks: int | None):
        if method not in METHODS:
            raise ValueError(f"method={method!r}: must be one of {', '.join(METHODS)}")
        for name, value, known, least in (("factor", factor, FACTOR, 1), ("sinks", sinks, SINKS, 0)):
            if value is not None and method not in known:
                raise ValueError(f"{name}={value}: has no effect with method={method}; leave it out, or set method to {' or '.join(known)}")
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{name}={value!r}: must be an integer of at least {least}")
        self.method = method
        self.factor = FACTOR.get(method, 1) if factor is None else factor
        self.sinks = SINKS.get(method) if sinks is None else sinks
        if window is None:
            window = {"self_extend": context // 4, "lm_infinite": context - 1, "streaming_llm": context - (self.sinks or 0)}.get(
                method, context // 2)
            window = max(window, 1)
        if not isinstance(window, int) or isinstance(window, bool) or window < 1:
            raise ValueError(f"window={window!r}: must be an integer of at least 1, or left out")
        self.window = window

    @property
    def key(self) -> tuple:
        """A key for `SequenceInfo.once`: equal for frames with equal positions."""
        return self.method, self.window, self.factor, self.sinks

    def far_positions(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """The far frame's positions of the queries and of the keys at `position`, each float64 and of its shape. A query is never placed
        beyond its own position."""
        p, zeros = position.double(), torch.zeros_like(position, dtype=torch.float64)
        constant = zeros + self.window
        queries, keys = {
            "rerope": (constant, zeros),
            "leaky_rerope": (p / self.factor + (self.window - self.window / self.factor), p / self.factor),
            "self_extend": (p // self.factor + (self.window - self.window // self.factor), p // self.factor),
            "lm_infinite": (constant, zeros),
            "streaming_llm": (constant + ((self.sinks or 0) - 1), p),
        }[self.method]
        return torch.minimum(queries, p), keys

    def visible_pairs(self, length: int) -> int:
        """The number of pairs of a query and a key that the query sees, in one sequence of this length."""
        if self.sinks is None:
            return length * (length + 1) // 2
        near, rest = min(length, self.window), max(length - self.window, 0)
        sinks = min(self.sinks, rest)
        return near * (near + 1) // 2 + rest * near + rest * sinks - sinks * (sinks - 1) // 2


class TwoFrameAttention(Attention):
    """Softmax attention that sees near keys at their true rotary distances, and far keys at other distances or not at all.

    It has the parameters of attention=flash. A checkpoint of attention=flash that was trained with rotary positions can therefore read
    longer contexts with this variant. `Frames` has the formulas. The cache holds each key twice, once rotated for each frame. It also keeps
    keys that no later query sees.

    impl: the operator's implementation ("gluon", "triton", "cpu", "reference"), None for the fastest that runs.
    method: "rerope" and "leaky_rerope" (Su 2023, https://kexue.fm/archives/9708), "self_extend" (Jin et al. 2024, arXiv:2401.01325),
        "lm_infinite" (Han et al. 2023, arXiv:2308.16137), "streaming_llm" (Xiao et al. 2023, arXiv:2309.17453).
    window: how many keys are near: a query's own key and those just before it. None for the method's default.
    factor: the divisor of far positions, None for 16; for leaky_rerope and self_extend only.
    sinks: how many of a sequence's first keys every query sees; for lm_infinite (None: 10) and streaming_llm (None: 4) only.
    """

    supports = Supports(bidirectional=False, positions=("rotary",), dropout=False, context_parallel=("dense", "packed"))
    decodes_on_device = True
    divides_heads = True
    extends_context = True

    def __init__(self, spec: AttentionSpec, *, impl: Impl | None = None, method: Method = "rerope", window: int | None = None,
                 factor: int | None = None, sinks: int | None = None):
        super().__init__(spec)
        self.impl = impl
        try:
            self.frames = Frames(method, spec.known_context, window, factor, sinks)
        except ValueError as error:
            raise ValueError(f"attention.{error}") from error

    def apply_positions(self, q: Tensor, k: Tensor, seq: SequenceInfo) -> tuple[Tensor, Tensor]:
        """q and k rotated for the near frame and for the far frame, concatenated in this order: (..., heads, 2 head_dim)."""
        (near, far_q, far_k) = seq.once(("two_frame", self.frames.key, self.rope.key), lambda: self._tables(seq.position_ids))
        return tuple(torch.cat((rotate(x, *near), rotate(x, *far)), dim=-1) for x, far in ((q, far_q), (k, far_k)))

    def _tables(self, position: Tensor) -> list[tuple[Tensor, Tensor]]:
        """cos and sin of the near frame, the far queries and the far keys, float32 (*position.shape, rotated channels / 2)."""
        # in one call, because rope_scaling=dynamic and longrope depend on the highest position, which must be the same for both frames
        cos, sin = self.rope.tables(torch.stack((position.double(), *self.frames.far_positions(position))))
        return list(zip(cos, sin, strict=True))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo) -> Tensor:
        q, k = (x.unflatten(-1, (2, -1)) for x in (q, k))
        return two_frame_attention(
            q, k, v, near_keys=self.frames.window, far_keys=self.frames.sinks, cu_seqlens_q=seq.cu_seqlens,
            cu_seqlens_k=seq.cu_seqlens_k, max_seqlen_q=seq.max_seqlen, max_seqlen_k=seq.max_seqlen_k, impl=self.impl)

    def visible_pairs(self, length: int) -> int:
        return self.frames.visible_pairs(length)
