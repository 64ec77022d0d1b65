"""Padding removal: from padded rows to packed tokens and back by a prefix sum over the mask (EffectiveTransformer; ByteTransformer,
Zhai et al. 2023, arXiv:2210.03052), with flash-attn's names, order and meaning for `unpad_input` and `pad_input`.

    rows  (batch 2, seqlen 4)    a b . .     indices     0 1 5 7
                                 . c . d     cu_seqlens  0 2 4
    tokens (total 4)             a b c d

If the host must not wait for the device, the caller gives an upper bound on the tokens. Shapes are then static, and the calls can be
captured in a CUDA graph and compiled without a graph break. Without a bound the host waits exactly once, for the sizes of the results.

impl, everywhere: "triton" | "reference"; None takes triton on CUDA tensors and the reference on CPU ones. A named path runs, or it raises.
Wrong values (a bound too low, a length too long, indices out of order) raise ValueError on a CPU; on a GPU, where the host would have to
wait to see them, a device-side assertion fails.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo_kernels import checks, dispatch
from attnzoo_kernels.padding import inputs, ops, reference

__all__ = [
    "Packing",
    "add_norm_pad_input",
    "pad_input",
    "position_ids",
    "remove_padding",
    "token_indices",
    "token_indices_from_lengths",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]

IMPLEMENTATIONS = ("triton", "reference")


class Packing(NamedTuple):
    """Where the tokens of padded rows (batch, seqlen) go when they are packed.

    indices: (tokens,) int64 into the flattened rows, ascending; entries after the last token, up to a given bound, are batch * seqlen.
    cu_seqlens: (batch + 1,) int32. max_seqlen: int, the longest sequence, or seqlen as a bound on it if the host did not wait.
    seqused: (batch,) int32, real tokens of each row, without unused slots. total, longest: () int32 on the device.
    """

    indices: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    seqused: Tensor
    total: Tensor
    longest: Tensor


def token_indices(attention_mask: Tensor, unused_mask: Tensor | None = None, *, max_tokens: int | None = None,
                  impl: str | None = None) -> Packing:
    """The packing of rows by their mask.

    attention_mask: (batch, seqlen), bool, integer or floating point, nonzero where a token is real, in any pattern, with any strides.
        Masks that are added to scores (0 and -inf) mean the opposite, so negative floating point values are refused.
    unused_mask: a second such mask, nonzero where a slot is kept although it is not used.
    max_tokens: upper bound on the tokens kept; `indices` has as many entries (at most batch * seqlen), and the host does not wait.

    Raises TypeError or ValueError naming the argument; ValueError or a device-side assertion if more than max_tokens are kept.
    """
    inputs.mask("attention_mask", attention_mask)
    if unused_mask is not None:
        inputs.mask("unused_mask", unused_mask, attention_mask)
    slots = inputs.slots(*attention_mask.shape)
    inputs.not_additive("attention_mask", attention_mask)
    bound = inputs.bound("max_tokens", max_tokens, slots)
    path = _path(impl, attention_mask)
    result = path.mask_indices(attention_mask, unused_mask, bound)
    return _packing(path, *result, attention_mask.shape[1], max_tokens)


def token_indices_from_lengths(lengths: Tensor | Sequence[int], seqlen: int, *, max_tokens: int | None = None,
                               device: torch.device | str | None = None, impl: str | None = None) -> Packing:
    """The packing of rows (batch, seqlen) whose first `lengths[b]` slots are tokens.

    lengths: (batch,) int32 or int64 tensor; or ints on the host, which go to `device` without waiting and give exact shapes.
    max_tokens: upper bound on the sum of a tensor's lengths, as in `token_indices`.
    """
    checks.integer("seqlen", seqlen, 0)
    total = longest = None
    if not isinstance(lengths, Tensor):
        lengths = inputs.host_lengths(lengths, seqlen)
        total, longest = sum(lengths), max(lengths, default=0)
        max_tokens = inputs.bound("max_tokens", max_tokens, total) if max_tokens is not None else total
        if total > max_tokens:
            raise ValueError(f"max_tokens: must be at least the {total} tokens of lengths, got {max_tokens}")
        lengths = inputs.to_device(lengths, device)
    inputs.lengths("lengths", lengths, 1, seqlen)
    bound = inputs.bound("max_tokens", max_tokens, inputs.slots(lengths.shape[0], seqlen))
    path = _path(impl, lengths)
    _check_lengths(path, lengths, seqlen)
    packing = _packing(path, *path.length_indices(lengths, seqlen, bound), seqlen, max_tokens)
    return packing if longest is None else packing._replace(max_seqlen=longest)


def remove_padding(x: Tensor, indices: Tensor, *, impl: str | None = None) -> Tensor:
    """Gather packed tokens (tokens, ...) from padded rows x (batch, seqlen, ...), differentiable as often as wanted.

    indices: (tokens,) int64, strictly ascending, as `token_indices` gives them; only entries batch * seqlen may repeat, and give zeros.
    x: any dtype of 1 to 8 bytes; dimensions from the third on contiguous, batch and seqlen with any strides.
    """
    inputs.rows("x", x, 2)
    inputs.indices(indices, x, x.shape[0] * x.shape[1])
    return _path(impl, x).remove(x, indices)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int, *, impl: str | None = None) -> Tensor:
    """Put packed tokens (tokens, ...) back at `indices` of rows (batch, seqlen, ...), with zeros everywhere else, in one pass.

    indices: as in `remove_padding`, whose derivative this is; tokens at entries batch * seqlen are left out.
    hidden_states: any dtype of 1 to 8 bytes; dimensions from the second on contiguous, tokens with any stride.
    """
    inputs.rows("hidden_states", hidden_states, 1)
    inputs.indices(indices, hidden_states, inputs.slots(batch, seqlen))
    if hidden_states.shape[0] != indices.shape[0]:
        raise ValueError(f"indices: must hold one entry for each of the {hidden_states.shape[0]} tokens of hidden_states, got "
                         f"{indices.shape[0]}")
    return _path(impl, hidden_states).restore(hidden_states, indices, batch, seqlen)


def add_norm_pad_input(hidden: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, indices: Tensor, batch: int, seqlen: int, *,
                       eps: float = 1e-12, impl: str | None = None) -> Tensor:
    """pad_input of LayerNorm(hidden + residual), the end of a post-norm encoder, in one pass (ByteTransformer); rows without a token are 0.

    hidden, residual: (tokens, width), 16- or 32-bit floating point, tokens with any stride. weight, bias: (width,), floating point.
    indices, batch, seqlen: as in `pad_input`; tokens that are left out must be finite if gradients are taken, because gradients include
    zero times their values. Sums are float32; the derivative can be taken once.
    """
    for name, x in (("hidden", hidden), ("residual", residual)):
        inputs.rows(name, x, 1)
        if x.dim() != 2 or x.shape != hidden.shape or x.dtype != hidden.dtype or not x.is_floating_point():
            raise ValueError(f"{name}: must be (tokens, width) and floating point, as hidden {tuple(hidden.shape)} of {hidden.dtype}, "
                             f"got {tuple(x.shape)} of {x.dtype}")
    for name, x in (("weight", weight), ("bias", bias)):
        checks.tensor(name, x)
        if x.shape != hidden.shape[1:] or not x.is_floating_point():
            raise ValueError(f"{name}: must be floating point of shape {tuple(hidden.shape[1:])}, got {tuple(x.shape)} of {x.dtype}")
    for name, x in (("residual", residual), ("weight", weight), ("bias", bias)):
        if x.device != hidden.device:
            raise ValueError(f"{name}: must be on hidden's device {hidden.device}, got {x.device}")
    checks.finite("eps", eps)
    inputs.indices(indices, hidden, inputs.slots(batch, seqlen))
    if hidden.shape[0] != indices.shape[0]:
        raise ValueError(f"indices: must hold one entry for each of hidden's {hidden.shape[0]} tokens, got {indices.shape[0]}")
    return _path(impl, hidden).add_norm(hidden, residual, weight, bias, indices, batch, seqlen, eps)


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None, *, max_tokens: int | None = None,
                impl: str | None = None) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Remove the padding of hidden_states (batch, seqlen, ...).

    attention_mask, unused_mask, max_tokens: as in `token_indices`. hidden_states: as x in `remove_padding`.

    Returns (tokens (tokens, ...), indices, cu_seqlens, max_seqlen, seqused) as in `Packing`. Without max_tokens their shapes are exact and
    the host waits once. With it, entries after the last token are zeros, and max_seqlen is seqlen.
    """
    inputs.rows("hidden_states", hidden_states, 2)
    inputs.mask("attention_mask", attention_mask, hidden_states)
    packing = token_indices(attention_mask, unused_mask, max_tokens=max_tokens, impl=impl)
    tokens = remove_padding(hidden_states, packing.indices, impl=impl)
    return tokens, packing.indices, packing.cu_seqlens, packing.max_seqlen, packing.seqused


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor, *, max_tokens: int | None = None, max_documents: int | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Remove the padding of rows that hold several documents one after the other, so that attention stays inside each document.

    hidden_states: (batch, seqlen, ...). attention_mask_in_length: (batch, seqlen) int32 or int64, the lengths of a row's documents in
    order and zeros. The documents fill the row from its first slot on, for example [2, 3, 0, 0, 0, 0] for a a b b b . of seqlen 6.
    max_tokens, max_documents: upper bounds, both or neither.

    Returns (tokens, indices, cu_seqlens, max_seqlen). cu_seqlens is (documents + 1,) int32 over all documents; with bounds it is
    (max_documents + 1,), padded with its last value. max_seqlen is the longest document; with bounds it is seqlen.
    """
    inputs.rows("hidden_states", hidden_states, 2)
    lengths, seqlen = attention_mask_in_length, hidden_states.shape[1]
    inputs.lengths("attention_mask_in_length", lengths, 2, seqlen)
    inputs.same_rows("attention_mask_in_length", lengths, hidden_states)
    if (max_tokens is None) != (max_documents is None):
        raise ValueError(f"max_tokens, max_documents: must be given both or neither, got {max_tokens} and {max_documents}")
    slots = inputs.slots(*lengths.shape)
    path = _path(impl, hidden_states)
    _check_lengths(path, lengths, seqlen)
    cu_seqlens, row_lengths, totals = path.document_lengths(lengths, inputs.bound("max_documents", max_documents, slots))
    indices = path.length_indices(row_lengths, seqlen, inputs.bound("max_tokens", max_tokens, slots))[0]
    _check_bound(path, "max_tokens", totals[0], max_tokens)
    _check_bound(path, "max_documents", totals[1], max_documents)
    max_seqlen = seqlen
    if max_tokens is None:
        total, documents, max_seqlen = totals.tolist()
        indices, cu_seqlens = indices[:total], cu_seqlens[: documents + 1]
    return remove_padding(hidden_states, indices, impl=impl), indices, cu_seqlens, max_seqlen


def position_ids(cu_seqlens: Tensor, total: int, *, impl: str | None = None) -> Tensor:
    """Position of each packed token in its sequence, (total,) int64, from 0 at each start; 0 for tokens behind the last sequence.

    cu_seqlens: (sequences + 1,) int32, may repeat values (empty sequences, padding).
    """
    inputs.cu_seqlens(cu_seqlens)
    checks.integer("total", total, 0)
    return _path(impl, cu_seqlens).position_ids(cu_seqlens, total)


def _path(impl: str | None, x: Tensor) -> ModuleType:
    """The module `ops` (Triton) or `reference`. Both have functions of the same names."""
    return reference if dispatch.takes_reference("padding", impl, "x", x, IMPLEMENTATIONS, dtypes=None) else ops


def _check_lengths(path: ModuleType, lengths: Tensor, seqlen: int) -> None:
    """Raises for lengths that do not fit into the rows, unless the host has already checked them or a kernel asserts it."""
    if path is reference and not inputs.values_known(lengths):
        rows = lengths if lengths.dim() == 1 else lengths.sum(1)
        torch._assert_async((lengths >= 0).all() & (rows <= seqlen).all(), f"lengths: must be at least 0 and at most seqlen={seqlen} a row")


def _check_bound(path: ModuleType, name: str, count: Tensor, most: int | None) -> None:
    """Raises for a bound that is too low, unless the host does not know the count and a kernel asserts it."""
    if most is None:
        return
    if inputs.values_known(count):
        if count > most:
            raise ValueError(f"{name}: must be at least the {int(count)} that there are, got {most}")
    elif path is reference:
        torch._assert_async(count <= most, f"{name}: must be at least the number that there is, got {most}")


def _packing(path: ModuleType, indices: Tensor, cu_seqlens: Tensor, seqused: Tensor, totals: Tensor, seqlen: int,
             max_tokens: int | None) -> Packing:
    """The Packing. Without a bound it is cut to the exact shapes, for which the host must wait."""
    _check_bound(path, "max_tokens", totals[0], max_tokens)
    max_seqlen = seqlen
    if max_tokens is None:
        total, max_seqlen = totals.tolist()
        indices = indices[:total]
    return Packing(indices, cu_seqlens, max_seqlen, seqused, totals[0], totals[1])
