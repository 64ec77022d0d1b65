"""Rotary tables and ALiBi slopes. They are pure functions of the position: no maximum length is built in, and state dicts do not contain
them."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROPE_SCALINGS = ("none", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope")
# the options of the scalings that transformers computes, named as in its configs
ROPE_OPTIONS = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor", "attention_factor"),
}
_DEFAULTS = {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}  # the others' are transformers' own


@dataclass(frozen=True)
class Rope:
    """Rotary embedding (Su et al. 2021, arXiv:2104.09864) of the first `dim` channels of a head.

    scaling: "linear" divides positions by factor (Chen et al. 2023, arXiv:2306.15595). "ntk" raises the base so that the slowest pair of
    channels turns factor times slower and the fastest one as before. "dynamic" raises it only as far as the current length n requires:
    beyond `context` tokens the base is multiplied by (factor n / context - factor + 1)^(dim / (dim - 2)). "yarn" (Peng et al. 2023,
    arXiv:2309.00071) and "llama3" (Llama 3.1) slow each pair by its own amount. "longrope" (Ding et al. 2024, arXiv:2402.13753) takes the
    amounts from a list, and from a second list beyond `context`.
    context: the context length, in tokens, that the positions were trained on. frequencies: of each pair, in radians per token, where they
    are not powers of the base; `long`: those beyond `context`. magnitude: a factor of cos and sin (the attention factor of yarn and
    longrope). proportion: the fraction of the pairs that is rotated, the fastest ones (p-RoPE, Barbero et al. 2024, arXiv:2410.06205); the
    others are not rotated.

    n is the highest position in a forward pass, over all sequences of the batch, plus one. Keys in a cache are not rotated again when
    later tokens are read: as in transformers, they keep the frequencies of the length at which they were read.
    """

    dim: int
    base: float
    scaling: str = "none"
    factor: float = 1.0
    context: int = 1
    frequencies: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    magnitude: float = 1.0
    proportion: float = 1.0
    key: str = ""  # equal for equal tables

    def tables(self, position_ids: Tensor, *, scaled: bool = True) -> tuple[Tensor, Tensor]:
        """Cosine and sine, float32 (*position_ids.shape, dim / 2). scaled: times `magnitude`."""
        return rotary_tables(position_ids, self.dim, self.base, self.scaling, self.factor, self.context, self.frequencies, self.long,
                             self.magnitude if scaled else 1.0, self.proportion)


@functools.cache
def make_rope(dim: int, base: float, scaling: str, factor: float, context: int, options: tuple[tuple[str, Any], ...] = (),
              proportion: float = 1.0) -> Rope:
    """A Rope. options: those of ROPE_OPTIONS. Raises ValueError for longrope lists that do not have dim / 2 numbers."""
    key = f"rotary {dim} {base} {scaling} {factor} {context} {options} {proportion}"
    if scaling not in ROPE_OPTIONS:
        return Rope(dim, base, scaling, factor, context, proportion=proportion, key=key)
    given = _DEFAULTS.get(scaling, {}) | dict(options)
    if scaling == "longrope":
        for name in ("short_factor", "long_factor"):
            if not isinstance(given.get(name), Sequence) or len(given[name]) != dim // 2:
                raise ValueError(f"rope_options.{name}={given.get(name)!r}: must be a list of {dim // 2} numbers, one for each pair")
    short, magnitude = _frequencies_of_transformers(dim, base, scaling, factor, context, given, context)
    long = _frequencies_of_transformers(dim, base, scaling, factor, context, given, context + 1)[0] if scaling == "longrope" else ()
    return Rope(dim, base, scaling, factor, context, short, long, magnitude, proportion, key)


def _frequencies_of_transformers(dim: int, base: float, scaling: str, factor: float, context: int, options: Mapping[str, Any],
                                 length: int) -> tuple[tuple[float, ...], float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    options = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    parameters = {"rope_type": scaling, "rope_theta": base, "factor": factor, "original_max_position_embeddings": context, **options}
    config = LlamaConfig(hidden_size=dim, num_attention_heads=1, head_dim=dim, max_position_embeddings=round(context * factor),
                         rope_parameters=parameters)
    with torch.device("cpu"):  # also where a model is built on the meta device
        frequencies, magnitude = ROPE_INIT_FUNCTIONS[scaling](config, torch.device("cpu"), seq_len=length)
    return tuple(frequencies.tolist()), float(magnitude)


@torch.library.custom_op("attnzoo::rotary_tables", mutates_args=())
def rotary_tables(position_ids: Tensor, rotary_dim: int, base: float, scaling: str, factor: float, context: int = 1,
                  frequencies: Sequence[float] | None = None, long: Sequence[float] | None = None, magnitude: float = 1.0,
                  proportion: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32 (*position_ids.shape, rotary_dim / 2); arguments as in Rope.

    Angles are computed in float64: in float32 they would be off by 0.05 rad at a million tokens.
    """
    # a custom operator, so that torch.compile computes the tables once and not the sines again for every head in every layer
    device = position_ids.device
    if frequencies:
        radians = _pinned(tuple(frequencies), device.type == "cuda").to(device, non_blocking=True)
        if long and position_ids.numel():
            long_radians = _pinned(tuple(long), device.type == "cuda").to(device, non_blocking=True)
            radians = torch.where(position_ids.max() < context, radians, long_radians)
    else:
        pair = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device)
        if scaling == "ntk":
            base = base * factor ** (rotary_dim / (rotary_dim - 2))
        radians = base ** (-pair / rotary_dim)  # per token
        if scaling == "linear":
            radians = radians / factor
        if scaling == "dynamic" and position_ids.numel():
            length = (position_ids.max() + 1).double().clamp(min=context)
            radians = radians * (factor * length / context - (factor - 1)) ** (-pair / (rotary_dim - 2))
    if proportion < 1:
        radians = radians * (torch.arange(rotary_dim // 2, device=device) < int(proportion * rotary_dim / 2))
    angles = position_ids.double()[..., None] * radians
    return (angles.cos() * magnitude).float(), (angles.sin() * magnitude).float()


@functools.lru_cache(maxsize=64)
def _pinned(numbers: tuple[float, ...], pin: bool) -> Tensor:
    """The numbers as a float64 tensor on the host, in pinned memory if `pin`, so that a copy to the device does not make the host wait.

    They are not cached on the device, because a tensor that is created while a CUDA graph is captured lies in the graph's memory.
    """
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.float64, device="cpu", pin_memory=pin)


@rotary_tables.register_fake
def _(position_ids, rotary_dim, base, scaling, factor, context=1, frequencies=None, long=None, magnitude=1.0, proportion=1.0):
    shape = (*position_ids.shape, rotary_dim // 2)
    return position_ids.new_empty(shape, dtype=torch.float32), position_ids.new_empty(shape, dtype=torch.float32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (..., heads, head_dim) in half style: channel c pairs with c + half the rotated width; channels beyond that width stay.

    cos, sin: (..., width / 2), one row per token. Computed in at least float32, returned in x's dtype.
    """
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def alibi_slopes(n_heads: int, device: torch.device) -> Tensor:
    """ALiBi's slopes (Press et al. 2022, arXiv:2108.12409), float32 (n_heads,).

    For n heads, where n is a power of two, they are 2^(-8k/n). For other numbers, they are the slopes of the next lower power of two,
    followed by every other slope of the next higher one.
    """
    power = 2 ** (n_heads.bit_length() - 1)
    k = torch.arange(1, n_heads + 1, dtype=torch.float32, device=device)
    return torch.exp2(torch.where(k <= power, -8 * k / power, -4 * (2 * (k - power) - 1) / power))
