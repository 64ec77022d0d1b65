"""Rotary tables and ALiBi slopes: pure functions of position, so that no length is built in and nothing lands in a state dict."""

import torch
from torch import Tensor

ROPE_SCALINGS = ("none", "linear", "ntk")


@torch.library.custom_op("attnzoo::rotary_tables", mutates_args=())
def rotary_tables(position_ids: Tensor, rotary_dim: int, base: float, scaling: str, factor: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of rotary embedding (Su et al. 2021, arXiv:2104.09864), float32 (*position_ids.shape, rotary_dim / 2).

    scaling "linear" divides positions by factor (Chen et al. 2023, arXiv:2306.15595), "ntk" raises the base so that the slowest pair turns
    factor times slower and the fastest one as before. Angles are float64: float32 is off by 0.05 rad at a million tokens.
    """
    # an operator of its own, so that torch.compile keeps the tables instead of taking a sine for every head in every layer
    if scaling == "ntk":
        base = base * factor ** (rotary_dim / (rotary_dim - 2))
    pair = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=position_ids.device)
    angles = position_ids.double()[..., None] * base ** (-pair / rotary_dim)
    if scaling == "linear":
        angles = angles / factor
    return angles.cos().float(), angles.sin().float()


@rotary_tables.register_fake
def _(position_ids, rotary_dim, base, scaling, factor):
    shape = (*position_ids.shape, rotary_dim // 2)
    return position_ids.new_empty(shape, dtype=torch.float32), position_ids.new_empty(shape, dtype=torch.float32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (..., heads, head_dim) in half style: channel c pairs with c + head_dim / 2.

    cos, sin: (..., head_dim / 2), one row per token. Computed in at least float32, returned in x's dtype.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def alibi_slopes(n_heads: int, device: torch.device) -> Tensor:
    """ALiBi's slopes (Press et al. 2022, arXiv:2108.12409), float32 (n_heads,).

    2^(-8k/n) for n a power of two; else those of the power below, then every other one of the power above.
    """
    power = 2 ** (n_heads.bit_length() - 1)
    k = torch.arange(1, n_heads + 1, dtype=torch.float32, device=device)
    return torch.exp2(torch.where(k <= power, -8 * k / power, -4 * (2 * (k - power) - 1) / power))
