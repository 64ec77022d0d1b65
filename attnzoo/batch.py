"""A batch: what a loader gives, and what of it a model reads."""

from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from attnzoo_kernels.context_parallel import ContextParallel

IGNORED = -100  # the label where nothing is asked


def sharing(trainer: Any) -> int:
    """How many neighbouring ranks of a run are given the same batches, of which each reads a part (`trainer.context_parallel`)."""
    return getattr(trainer, "context_parallel", 1)


class Inputs(TypedDict, total=False):
    """Keyword arguments of a model beside `input_ids`.

    position_ids: int64, as `input_ids`; each token's place in its sequence, zeros behind the last one.
    cu_seqlens: int32 (sequences + 1,), where packed sequences begin and end; the last value may be repeated, so that the shape stays.
    max_seqlen: at least the longest sequence.
    parents: int32 (segments,), where `cu_seqlens` bounds segments of trees, depth first: the number of the segment that each continues, -1
        where it begins a tree. Sequences are the paths from a root; positions and max_seqlen are those of these.
    attention_mask: bool (batch, seqlen), true for tokens and false for padding.
    max_tokens: the mask's sum.
    token_type_ids: int64, as `input_ids`.
    logits_at: int64 (n,), the flat indices of the places whose logits are computed; without it all are.
    context: the plan by which several devices read these sequences together; the tensors of tokens are then this device's part, and
        cu_seqlens and max_seqlen are of the whole.
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
    """Rows (batch, seqlen), or sequences packed one after the other (total,), which have `cu_seqlens`.

    Tensors go to the device. numpy arrays and numbers stay on the host, so that nobody waits for the device to read them.

    input_ids: int64, (batch, seqlen) or (total,).
    labels: int64, as `input_ids`, what the logits of the same place are to predict, or (sequences,), a class each; IGNORED (-100) where
        nothing is asked.
    weights: float32 (n,), what each target counts in the loss. `labels` are then (n,) as well, one for each of `logits_at`, which may name
        a place more than once: what several sequences share is followed by several tokens.
    lengths: numpy int64 (sequences,), tokens of each sequence; in trees of each path up to a segment's end.
    shared: numpy int64 (segments,), of these lengths the tokens that stand before the segment; only in trees.
    n_tokens: without padding.
    n_targets: labels that are not IGNORED.
    """

    input_ids: Tensor
    labels: Tensor
    weights: Tensor
    lengths: np.ndarray
    shared: np.ndarray
    n_tokens: int
    n_targets: int
