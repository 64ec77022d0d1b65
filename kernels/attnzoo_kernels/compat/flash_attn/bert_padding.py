"""flash-attn's `bert_padding`: `unpad_input` and its companions are those of `attnzoo_kernels.padding`."""

from torch import Tensor

from attnzoo_kernels.padding import pad_input, unpad_input, unpad_input_for_concatenated_sequences

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input", "unpad_input_for_concatenated_sequences"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices`, int64 (n,), of input (rows, ...): (n, ...). Rows may be taken more than once; their gradients are then added up."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """values (n, ...) at rows `indices`, int64 (n,) and all different, of (first_axis_dim, ...), which is zero elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)
