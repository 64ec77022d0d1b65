"""Argument checks of padding removal. The host reads values of CPU tensors only, because it would have to wait for those of a GPU."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from attnzoo_kernels import checks


def mask(name: str, value: Tensor, like: Tensor | None = None) -> None:
    checks.tensor(name, value)
    if value.dim() != 2:
        raise ValueError(f"{name}: must have shape (batch, seqlen), got {tuple(value.shape)}")
    if value.is_complex() or value.is_floating_point() and value.element_size() == 1:
        raise TypeError(f"{name}: must be bool, integer or floating point of at least 16 bits, got {value.dtype}")
    if like is not None:
        same_rows(name, value, like)


def not_additive(name: str, value: Tensor) -> None:
    """Refuses a mask that is added to scores, which is 0 where a token is real. With it, padding would be kept and tokens dropped."""
    if not value.is_floating_point():
        return
    right, must = (value >= 0).all(), f"{name}: must be at least 0, and above 0 where a token is real"
    if not values_known(value):
        torch._assert_async(right, must)
    elif not right:
        raise ValueError(f"{must}, got {value.min()}; an additive mask goes in as mask == 0")


def same_rows(name: str, value: Tensor, like: Tensor) -> None:
    if value.shape != like.shape[:2]:
        raise ValueError(f"{name}: must have shape {tuple(like.shape[:2])}, the (batch, seqlen) of the rows, got {tuple(value.shape)}")
    if value.device != like.device:
        raise ValueError(f"{name}: must be on the rows' device {like.device}, got {value.device}")


def slots(batch: int, seqlen: int) -> int:
    checks.integer("batch", batch, 0)
    checks.integer("seqlen", seqlen, 0)
    if batch * seqlen >= 2**31:
        raise ValueError(f"batch, seqlen: product must be below 2**31, because cu_seqlens is int32, got {batch} * {seqlen}; split them")
    return batch * seqlen


def bound(name: str, value: int | None, most: int) -> int:
    """The number of entries to make room for: `value`, but at most `most`; `most` if `value` is None."""
    if value is None:
        return most
    checks.integer(name, value, 0)
    return min(value, most)


def lengths(name: str, value: Tensor, dim: int, seqlen: int) -> None:
    checks.tensor(name, value)
    if value.dim() != dim:
        raise ValueError(f"{name}: must have shape {'(batch,)' if dim == 1 else '(batch, seqlen)'}, got {tuple(value.shape)}")
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: must be int32 or int64, got {value.dtype}")
    if values_known(value) and value.numel():
        rows = value if dim == 1 else value.sum(1)
        if value.min() < 0 or rows.max() > seqlen:
            raise ValueError(f"{name}: must be at least 0 and at most seqlen={seqlen} a row, got {value.min()} and {rows.max()}")


def host_lengths(value: Sequence[int], seqlen: int) -> list[int]:
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise TypeError(f"lengths: must be a tensor or ints, got {type(value).__name__}")
    value = list(value)
    for n in value:
        checks.integer("lengths", n)
    if value and (min(value) < 0 or max(value) > seqlen):
        raise ValueError(f"lengths: must be at least 0 and at most seqlen={seqlen}, got {min(value)} and {max(value)}")
    return value


def to_device(value: list[int], device: torch.device | str | None) -> Tensor:
    """The values as int32 (batch,) on a device. For a GPU they are copied from pinned memory, so that the host does not wait."""
    device = torch.device(device or "cpu")
    tensor = torch.tensor(value, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


def rows(name: str, x: Tensor, leading: int) -> None:
    """Checks that x has `leading` dimensions and then contiguous ones, and elements of 1, 2, 4 or 8 bytes."""
    checks.tensor(name, x)
    if x.dim() < leading:
        raise ValueError(f"{name}: must be {'(batch, seqlen, ...)' if leading == 2 else '(tokens, ...)'}, got shape {tuple(x.shape)}")
    if x.element_size() not in (1, 2, 4, 8):
        raise TypeError(f"{name}: must have elements of 1, 2, 4 or 8 bytes, got {x.dtype}")
    if not contiguous_rows(x, leading):
        raise ValueError(f"{name}: dimensions from {leading} on must be contiguous, got shape {tuple(x.shape)} with strides {x.stride()}; "
                         "call .contiguous()")


def contiguous_rows(x: Tensor, leading: int) -> bool:
    expected = 1
    for size, stride in zip(reversed(x.shape[leading:]), reversed(x.stride()[leading:]), strict=True):
        if size != 1 and stride != expected and x.numel():
            return False
        expected *= size
    return True


def cu_seqlens(value: Tensor) -> None:
    checks.tensor("cu_seqlens", value, "an int32 tensor of shape (sequences + 1,)")
    if value.dim() != 1 or value.shape[0] < 1:
        raise ValueError(f"cu_seqlens: must have shape (sequences + 1,), got {tuple(value.shape)}")
    if value.dtype != torch.int32:
        raise TypeError(f"cu_seqlens: must be int32, got {value.dtype}")
    if value.stride(0) != 1:
        raise ValueError(f"cu_seqlens: must be contiguous, got stride {value.stride(0)}")
    checks.rising("cu_seqlens", value)


def indices(value: Tensor, x: Tensor, n_slots: int) -> None:
    checks.tensor("indices", value)
    if value.dim() != 1:
        raise ValueError(f"indices: must have shape (tokens,), got {tuple(value.shape)}")
    if value.dtype != torch.int64:
        raise TypeError(f"indices: must be int64, got {value.dtype}")
    if value.device != x.device:
        raise ValueError(f"indices: must be on the tokens' device {x.device}, got {value.device}")
    if values_known(value) and value.numel():
        if value[0] < 0 or value[-1] > n_slots:
            raise ValueError(f"indices: must lie in 0 .. batch * seqlen = {n_slots}, got {value[0]} .. {value[-1]}")
        if not ((value.diff() > 0) | (value[1:] == n_slots)).all():
            raise ValueError("indices: must be strictly ascending, as unpad_input gives them; sort them, and the tokens with them")


def values_known(x: Tensor) -> bool:
    """Whether values can be read without a wait for a device and without a break in a compiled graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()
