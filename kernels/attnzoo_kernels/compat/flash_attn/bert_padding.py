"""flash-attn's `bert_padding`: `unpad_input` and its companions are those of `attnzoo_kernels.padding`."""

import torch
from torch import Tensor

from attnzoo_kernels import checks
from attnzoo_kernels.padding import pad_input, unpad_input, unpad_input_for_concatenated_sequences
from attnzoo_kernels.padding.inputs import values_known

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input", "unpad_input_for_concatenated_sequences"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows `indices`, int64 (n,), of input (rows, ...): (n, ...). A row may be taken several times; its gradients are then added up."""
    checks.tensor("input", input)
    _check_rows(indices, input.shape[0] if input.dim() else 0, input)
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """A tensor (first_axis_dim, ...) with values (n, ...) at the rows `indices`, int64 (n,) and all different, and zeros elsewhere."""
    checks.tensor("values", values)
    checks.integer("first_axis_dim", first_axis_dim, 0)
    _check_rows(indices, first_axis_dim, values)
    if values.shape[:1] != indices.shape:
        raise ValueError(f"values: must have a row for each of the {indices.shape[0]} indices, got shape {tuple(values.shape)}")
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def _check_rows(indices: Tensor, rows: int, like: Tensor) -> None:
    checks.tensor("indices", indices)
    if indices.dim() != 1 or indices.dtype != torch.int64 or indices.device != like.device:
        raise ValueError(f"indices: must be int64 of shape (n,) on {like.device}, got {indices.dtype} of shape {tuple(indices.shape)} on "
                         f"{indices.device}")
    if values_known(indices) and indices.numel() and not 0 <= indices.min() <= indices.max() < rows:
        raise ValueError(f"indices: must lie in 0 .. {rows - 1}, got {indices.min()} .. {indices.max()}")
