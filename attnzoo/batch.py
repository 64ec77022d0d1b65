"""A batch: what a loader returns, and the part of it that a model reads."""

from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from attnzoo_kernels.context_parallel import ContextParallel

IGNORED = -100  # the label of a token that has no target


def sharing(trainer: Any) -> int:
    """How many neighbouring ranks of a run share each batch, of which each rank reads a part (`trainer.context_parallel`)."""
    return getattr(trainer, "context_parallel", 1)


class Inputs(TypedDict, total=False):
    """Keyword arguments of a model beside `input_ids`.

    position_ids: int64, the shape of `input_ids`: each token's position in its sequence, zeros behind the last sequence.
    cu_seqlens: int32 (sequences + 1,), the bounds of packed sequences. The last value may be repeated, to keep the shape constant.
    max_seqlen: int, at least the longest sequence.
    parents: int32 (segments,), for trees of shared prefixes. `cu_seqlens` then bounds the trees' segments, in depth-first order. A
        segment's entry is the number of the segment that it continues, or -1 if it begins a tree. A sequence is the path from a root to a
        segment; positions and max_seqlen are those of paths.
    attention_mask: bool (batch, seqlen), true for tokens and false for padding.
    max_tokens: int, the mask's sum.
    token_type_ids: int64, the shape of `input_ids`.
    logits_at: int64 (n,), indices into input_ids.flatten() of the tokens whose logits are computed; without it those of all tokens are.
    context: the plan by which several devices share these sequences. Tensors by token are then this device's part; cu_seqlens and
        max_seqlen describe the whole sequences.
    dropout_states: int64 (layers, 2), seed and offset of each layer's attention dropout, the same on all devices of `context`. Without it
        each device draws its own.
    """

    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    parents: Tensor
    attention_mask: Tensor
    max_tokens: int
    token_type_ids: Tensor
    logits_at: Tensor
    context: "ContextParallel"
    dropout_states: Tensor


class Batch(Inputs):
    """Rows (batch, seqlen), or packed sequences (total,) with `cu_seqlens`.

    Tensors are moved to the device. numpy arrays and numbers stay on the host, so that reading them does not wait for the device.

    input_ids: int64, (batch, seqlen) or (total,).
    labels: int64. In the shape of `input_ids`: what the logits of the same token predict. Or (sequences,): the class of each sequence.
        IGNORED (-100) where there is no target.
    weights: float32 (n,), the weight of each target in the loss. `labels` are then (n,) too, one for each index of `logits_at`. That may
        contain an index more than once: a token that several sequences share is followed by several tokens.
    lengths: numpy int64 (sequences,), tokens of each sequence; in trees (segments,), tokens of the path up to each segment's end.
    shared: numpy int64 (segments,), only in trees: how many tokens of each of these paths come before the segment.
    n_tokens: the number of tokens without padding.
    n_targets: the number of labels that are not IGNORED.
    """

    input_ids: Tensor
    labels: Tensor
    weights: Tensor
    lengths: np.ndarray
    shared: np.ndarray
    n_tokens: int
    n_targets: int
