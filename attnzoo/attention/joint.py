"""Several projections of one input by one matrix product: at GPT-2's widths narrow products leave a part of the GPU idle.

The projections stay separate parameters, under the names that checkpoints, optimizers and other variants use. `lay_side_by_side` makes them
adjacent in memory. Without gradients they are then read as one matrix, without a copy. If something moves them apart (FSDP, a parameter
that is replaced), the result is the same, but each call concatenates them. With gradients each call always concatenates them: under
autocast the weights must be copied anyway, to cast them.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo import fp8
from attnzoo_kernels import autograd


def joined(projections: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The concatenated weight and bias of one linear layer, whose output is the concatenation of all projections' outputs."""
    biases = [p.bias for p in projections if p.bias is not None]
    return torch.cat([p.weight for p in projections]), torch.cat(biases) if biases else None


def product(x: Tensor, projections: Sequence[nn.Linear]) -> Tensor:
    """The concatenated outputs of all projections of x (..., in_features): (..., sum of out_features)."""
    exporting = torch.compiler._is_exporting_flag  # is_exporting() is true in torch.compile, too, in torch 2.11
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active() or exporting:
        return fp8.product_of(*projections)(x, *joined(projections))
    device = x.device.type
    cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64  # autocast does not cast float64
    biases = [p.bias for p in projections if p.bias is not None]
    return _product(x.to(torch.get_autocast_dtype(device)) if cast else x, [p.weight for p in projections], biases, cast)


def _joint_product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], cast: bool) -> Tensor:
    weight, bias = _as_one(weights), _as_one(biases) if biases else None
    if cast:
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return F.linear(x, weight, bias)


def _fake_joint_product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], cast: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))


# a custom operator, because torch.compile does not know whether parameters are adjacent in memory
_product = autograd.forward_only("joint_product", _joint_product, _fake_joint_product)


def _as_one(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors concatenated along the first dimension: a view if they are adjacent in memory, else a copy."""
    first = tensors[0]
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride()) if are_side_by_side(tensors) else torch.cat(tensors)


def are_side_by_side(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors are adjacent, in this order, in one storage."""
    def storage(x: Tensor) -> tuple:
        return x.untyped_storage()._cdata, x.dtype

    ends = [x.storage_offset() + x.numel() for x in tensors]
    return (all(type(x) in (Tensor, nn.Parameter) and x.is_contiguous() and storage(x) == storage(tensors[0]) for x in tensors)
            and all(x.storage_offset() == end for x, end in zip(tensors[1:], ends, strict=False)))


@torch.no_grad()
def lay_side_by_side(projections: Sequence[nn.Linear]) -> None:
    """Moves the weights, and the biases, into one storage each, so that `product` need not copy them.

    Nothing is moved if a parameter shares its storage with other tensors or is not a plain nn.Parameter.
    """
    for parameters in ([p.weight for p in projections], [p.bias for p in projections if p.bias is not None]):
        kinds = {(p.dtype, p.device, p.shape[1:]) for p in parameters}
        if len(parameters) > 1 and len(kinds) == 1 and all(map(_alone, parameters)):
            together = torch.cat([p.detach() for p in parameters])
            for parameter, part in zip(parameters, together.split(list(map(len, parameters))), strict=True):
                parameter.data = part


def _alone(parameter: Tensor) -> bool:
    """Whether this is a plain nn.Parameter that has its storage to itself."""
    return type(parameter) is nn.Parameter and parameter.is_contiguous() and parameter.untyped_storage().nbytes() == parameter.nbytes
