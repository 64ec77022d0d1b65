"""AdamW's kernel: a program has a chunk of one tensor. Where tensors lie stands in a table on the device."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import on_device_of

if TYPE_CHECKING:
    from attnzoo_kernels.adamw import AdamWTensors

CHUNK = 1024  # elements of a program
ALIGNED = 16  # bytes, as torch allocates tensors; a parameter within another tensor may lie elsewhere


@triton.jit
def _address(table_ptr, row, tensor, count, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(table_ptr + row * count + tensor).to(tl.pointer_type(dtype))
    return tl.multiple_of(address, 16) if ALIGNED else address


@triton.jit
def _step(weights, gradients, means, squares, copies, inside, scale, rate, decay, beta1, beta2, rest1, rest2, eps, second,
          COPIES: tl.constexpr):
    """Pointers to a chunk's elements, and which of them there are; None are all."""
    # [CHUNK]
    gradient = tl.load(gradients, mask=inside).to(tl.float32) * scale
    mean = beta1 * tl.load(means, mask=inside) + rest1 * gradient
    square = beta2 * tl.load(squares, mask=inside) + rest2 * gradient * gradient
    weight = tl.load(weights, mask=inside) * decay
    weight -= rate * mean / (tl.sqrt(square) / second + eps)
    tl.store(means, mean, mask=inside)
    tl.store(squares, square, mask=inside)
    tl.store(weights, weight, mask=inside)
    if COPIES:
        tl.store(copies, weight.to(tl.bfloat16), mask=inside)


@triton.jit(do_not_specialize=["lr", "decay", "first", "second", "count"])
def adamw_kernel(table_ptr, chunks_ptr, scale_ptr, count, lr, decay, beta1, beta2, rest1, rest2, eps, first, second,
                 CHUNK: tl.constexpr, GRADIENT: tl.constexpr, COPIES: tl.constexpr, ALIGNED: tl.constexpr):
    """rest1, rest2: 1 - beta1 and 1 - beta2 as they are before betas are rounded. first, second: what means and the roots of squares are
    divided by, 1 - beta1 ** step and the root of 1 - beta2 ** step. decay: 1 - lr * weight_decay. chunks_ptr: the tensor of each program
    and its first element, then the elements of each tensor."""
    tensor = tl.load(chunks_ptr + 2 * tl.program_id(0))
    start = tl.multiple_of(tl.load(chunks_ptr + 2 * tl.program_id(0) + 1), CHUNK)
    size = tl.load(chunks_ptr + 2 * tl.num_programs(0) + tensor)
    weight_ptr = _address(table_ptr, 0, tensor, count, tl.float32, ALIGNED) + start
    gradient_ptr = _address(table_ptr, 1, tensor, count, GRADIENT, ALIGNED) + start
    mean_ptr = _address(table_ptr, 2, tensor, count, tl.float32, ALIGNED) + start
    square_ptr = _address(table_ptr, 3, tensor, count, tl.float32, ALIGNED) + start
    copy_ptr = weight_ptr
    if COPIES:
        copy_ptr = _address(table_ptr, 4, tensor, count, tl.bfloat16, ALIGNED) + start
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    rate = lr / first
    at = tl.arange(0, CHUNK)
    if start + CHUNK <= size:  # without a mask, which would be looked at by element
        _step(weight_ptr + at, gradient_ptr + at, mean_ptr + at, square_ptr + at, copy_ptr + at, None, scale, rate, decay, beta1, beta2,
              rest1, rest2, eps, second, COPIES)
    else:
        _step(weight_ptr + at, gradient_ptr + at, mean_ptr + at, square_ptr + at, copy_ptr + at, start + at < size, scale, rate, decay,
              beta1, beta2, rest1, rest2, eps, second, COPIES)


@functools.lru_cache(maxsize=16)
def _chunks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    places = [(tensor, start) for tensor, size in enumerate(sizes) for start in range(0, size, CHUNK)]
    return torch.tensor([n for place in places for n in place] + list(sizes), dtype=torch.int64).to(device)


@functools.lru_cache(maxsize=64)
def _table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    table = torch.tensor(addresses, dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def launch(tensors: AdamWTensors, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int,
           scale: Tensor | None) -> None:
    weights = tensors.weights
    lists = (weights, tensors.gradients, tensors.means, tensors.squares, *([] if tensors.copies is None else [tensors.copies]))
    addresses = tuple(x.data_ptr() for own in lists for x in own)
    sizes = tuple(x.numel() for x in weights)
    n_chunks = sum(-(-size // CHUNK) for size in sizes)
    if n_chunks == 0:
        return
    table, chunks = _table(addresses, weights[0].device), _chunks(sizes, weights[0].device)
    with on_device_of(weights[0]):
        adamw_kernel[(n_chunks,)](
            table, chunks, scale, len(weights), lr, 1.0 - lr * weight_decay, *betas, *(1.0 - beta for beta in betas), eps,
            1.0 - betas[0] ** step, (1.0 - betas[1] ** step) ** 0.5, CHUNK=CHUNK,
            GRADIENT=tl.bfloat16 if tensors.gradients[0].dtype == torch.bfloat16 else tl.float32, COPIES=tensors.copies is not None,
            ALIGNED=all(address % ALIGNED == 0 for address in addresses))
