"""A model's linear layers by products of 8-bit floats, in training steps.

Parameters, their names and their gradients stay as they were. Outside of training steps the layers compute as any other does, because an
answer must not depend on what else is in its batch.
"""

import re
from collections.abc import Callable, Iterator
from itertools import chain

import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo_kernels.fp8 import MULTIPLE, linear, why_not

__all__ = ["Float8Linear", "convert", "linear", "product_of", "why_not", "without_bias"]


class Float8Linear(nn.Linear):
    """`linear` in training mode, torch's in eval mode. A torch.nn.Linear becomes one by its class alone."""

    def forward(self, x: Tensor) -> Tensor:
        return product_of(self)(x, self.weight, self.bias)


def product_of(*layers: nn.Linear) -> Callable[..., Tensor]:
    """How layers that share a product compute it, as a function of input, weight and bias."""
    return linear if all(isinstance(layer, Float8Linear) and layer.training for layer in layers) else F.linear


def without_bias(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer's product; its bias is left to what follows."""
    return product_of(layer)(x, layer.weight)


def convert(model: nn.Module) -> dict[str, list[str]]:
    """Makes the projections and MLPs of a model's `blocks` Float8Linear, and sets its `head_in_8_bits`, if it has that and its output layer
    fits. Returns the names of linear layers, "fp8" and "bfloat16", of all blocks in one.

    What has a size that is no multiple of 16 stays as it is, and so do a variant's own layers, gates by head and others outside of blocks.
    Raises ValueError where no layer of a block is left.
    """
    for layer in chain.from_iterable(group for block in model.blocks for group in _products(block) if all(map(_fits, group))):
        layer.__class__ = Float8Linear
    found = {"fp8": _names(model, Float8Linear), "bfloat16": _names(model, nn.Linear)}
    if not found["fp8"]:
        raise ValueError(f"precision=fp8 multiplies matrices whose sizes are multiples of {MULTIPLE}, and this model's blocks have none: "
                         + ", ".join(found["bfloat16"]))
    if getattr(model, "head_in_8_bits", None) is not None:
        rows, width = model.head_matrix.shape
        model.head_in_8_bits = rows % MULTIPLE == width % MULTIPLE == 0
        found["fp8" if model.head_in_8_bits else "bfloat16"].append(f"output layer ({rows} x {width})")
    return found


def _names(model: nn.Module, kind: type[nn.Linear]) -> list[str]:
    own = getattr(model, "head", None)  # which is named as the output layer
    layers = ((re.sub(r"\.\d+\.", ".*.", name), layer) for name, layer in model.named_modules() if type(layer) is kind and layer is not own)
    return [*dict.fromkeys(name if _fits(layer) else f"{name} ({layer.out_features} x {layer.in_features})" for name, layer in layers)]


def _products(block: nn.Module) -> Iterator[tuple[nn.Linear, ...]]:
    """The layers that may be converted, together those that share a product."""
    attention, mlp = block.attention, block.mlp
    yield attention.projections
    gate = attention.g_proj if attention.spec.gate == "elementwise" else None
    alone = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, gate, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    yield from ((layer,) for layer in alone if layer is not None and layer not in attention.projections)


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0
