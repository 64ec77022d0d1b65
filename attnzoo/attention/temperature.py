"""Temperature by position: a factor of the queries that keeps attention sharp in longer contexts. It is applied outside of the kernels."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TEMPERATURES: dict[str, dict[str, float]] = {  # each kind's options with their defaults, named as in transformers
    "ssmax": {},
    "log": {},
    "yarn": {},
    "llama4": {"floor_scale": 8192, "attn_scale": 0.1, "first": 1},
}


@dataclass(frozen=True)
class Temperature:
    """The factor of a query that may see n tokens, itself included: those up to it in a causal model, its whole sequence in a bidirectional
    one.

    kind: "ssmax": log n, which each head multiplies by a learned scalar (Nakanishi 2025, arXiv:2501.19399). "log": log n / log context,
    at least 1 (Qwen's log-n attention). "yarn": (0.1 log(n / context) + 1)^2, at least 1 (Peng et al. 2023, arXiv:2309.00071).
    "llama4": attn_scale log(floor(n / floor_scale) + 1) + 1. Here `first` is the number that the first token counts as: 1, or 0 as in
    Ministral 3, which replaces n by n - 1. context: the context length, in tokens, that the positions were trained on.
    """

    kind: str
    context: int
    floor_scale: float = 0.0
    attn_scale: float = 0.0
    first: int = 1

    def factor(self, n: Tensor) -> Tensor:
        """The factors for n, a tensor of whole numbers: float32, of the same shape."""
        return temperature_factor(n, self.kind, self.context, self.floor_scale, self.attn_scale, self.first)

    @property
    def key(self) -> tuple:
        """A key for `SequenceInfo.once`: equal for temperatures with equal factors."""
        return "temperature", self.kind, self.context, self.floor_scale, self.attn_scale, self.first

    @property
    def mean_log(self) -> float:
        """The mean of log n over n from 1 to context."""
        return math.lgamma(self.context + 1) / self.context


def make_temperature(given: str | Mapping[str, Any], context: int) -> Temperature | None:
    """given: "none", a name of TEMPERATURES, or {name: ..., option: ...}. None for no temperature. Raises ValueError for anything else."""
    options = dict(given) if isinstance(given, Mapping) else {"name": given}
    name = options.pop("name", None)
    if name == "none" and not options:
        return None
    if name not in TEMPERATURES:
        raise ValueError(f"attention_temperature={given!r}: must be none, {', '.join(TEMPERATURES)}, or {{name: ..., option: ...}} with "
                         "one of these names; set model.attention_temperature")
    known = TEMPERATURES[name]
    if unknown := options.keys() - known.keys():
        raise ValueError(f"attention_temperature: {', '.join(sorted(unknown))} must be {', '.join(known) or 'left out'} with name={name}")
    if options.get("first", 1) not in (0, 1):
        raise ValueError(f"attention_temperature.first={options['first']!r}: must be 0 or 1")
    for option, value in options.items():
        if option != "first" and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise ValueError(f"attention_temperature.{option}={value!r}: must be a number above 0")
    if name in ("ssmax", "log") and context < 2:
        raise ValueError(f"attention_temperature={name}: needs a context of at least 2 tokens, got {context}")
    return Temperature(name, context, **known | options)


@torch.library.custom_op("attnzoo::temperature_factor", mutates_args=())
def temperature_factor(n: Tensor, kind: str, context: int, floor_scale: float, attn_scale: float, first: int) -> Tensor:
    """As in Temperature. Computed in float64."""
    # a custom operator, so that torch.compile computes the factors once and not a logarithm for every channel of every head
    n = n.double()
    if kind == "ssmax":
        factor = n.log()
    elif kind == "log":
        factor = (n.log() / math.log(context)).clamp(min=1)
    elif kind == "yarn":
        factor = (0.1 * (n / context).clamp(min=1).log() + 1) ** 2
    else:
        factor = attn_scale * (torch.floor((n - 1 + first) / floor_scale) + 1).log() + 1
    return factor.float()


@temperature_factor.register_fake
def _(n, kind, context, floor_scale, attn_scale, first):
    return torch.empty_like(n, dtype=torch.float32)
