"""FP8 attention and its quantisation in plain PyTorch: written to be read."""

import torch
from torch import Tensor

from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.flash.reference import visible
from attnzoo_kernels.flash_fp8.layout import BLOCK, SMALLEST

LARGEST = 448.0  # the largest number of e4m3
WEIGHTS_LARGEST = 256.0  # the kernel multiplies weights by this, so that small ones are not lost


def rotation(width: int, device: torch.device | str = "cpu") -> Tensor:
    """An orthonormal matrix, float64 (width, width): a Hadamard matrix whose rows are multiplied by pseudorandom, fixed signs."""
    index = torch.arange(width, device=device)
    common = index[:, None] & index
    for shift in (4, 2, 1):
        common = common ^ (common >> shift)
    mixed = (index * 0x9E3779B1) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x85EBCA6B) & 0xFFFFFFFF
    return (1 - 2 * ((common & 1) ^ (mixed >> 31)[:, None])).double() * width**-0.5


@without_autocast
def quantize_reference(x: Tensor, kv_heads: int, by_block: bool, rotate: bool) -> tuple[Tensor, Tensor]:
    """x (batch, seqlen, heads, width) in e4m3, and its scales, float32 (batch, kv_heads) or (batch, kv_heads, blocks)."""
    batch, seqlen, heads, width = x.shape
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if rotate:
        x = x @ rotation(width, x.device).to(x.dtype)
    blocks = -(-seqlen // BLOCK) if by_block else 1
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, blocks * BLOCK - seqlen if by_block else 0))
    largest = padded.abs().reshape(batch, blocks, -1, kv_heads, heads // kv_heads * width).amax((2, 4)).transpose(1, 2).float()
    descale = torch.where(largest >= SMALLEST, largest, LARGEST) / torch.full_like(largest, LARGEST)
    descale = descale if by_block else descale[..., 0]
    inverse = torch.ones_like(descale) / descale
    return (x * spread(inverse, x)).to(torch.float8_e4m3fn), descale.contiguous()


def spread(descale: Tensor, x: Tensor) -> Tensor:
    """The scale of each token and head of x (batch, seqlen, heads, width): (batch, seqlen, heads, 1), or (batch, 1, heads, 1) if all tokens
    have the same."""
    descale = descale.to(x.dtype).repeat_interleave(x.shape[2] // descale.shape[1], 1)
    if descale.dim() == 2:
        return descale[:, None, :, None]
    return descale.repeat_interleave(BLOCK, 2)[:, :, : x.shape[1]].transpose(1, 2)[..., None]


def usable(descale: Tensor) -> Tensor:
    """The scales, with NaN in place of those that are not positive and finite."""
    return descale.where((descale > 0) & (descale < torch.inf), torch.nan)


@without_autocast
def flash_fp8_reference(q, k, v, *, q_descale, k_descale, v_descale, causal, softmax_scale, dtype=torch.float32,
                        product=None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the e4m3 values times their scales, computed in `dtype`. Arguments are checked by the caller.

    product: None, or a function that gives the product (..., rows, columns) of e4m3 (..., rows, width) and (..., columns, width). With it
    the reference rounds as the kernel does: weights are rounded to e4m3, and their products with BLOCK values at a time are added up in
    `dtype`.
    """
    batch, rows, heads, _ = q.shape
    columns, kv_heads = k.shape[1:3]
    scales = [x.to(dtype).new_ones(1) if scale is None else spread(usable(scale), x.to(dtype)).transpose(1, 2)
              for x, scale in ((q, q_descale), (k, k_descale), (v, v_descale))]

    # (batch, heads, seqlen, width); a key head serves a contiguous group of query heads
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v, *scales[1:] = (x.repeat_interleave(heads // kv_heads, dim=1) if x.dim() == 4 else x for x in (k, v, *scales[1:]))
    scores = product(q, k).to(dtype) if product else q.to(dtype) @ k.to(dtype).mT
    scores = scores * scales[0] * (scales[1].mT if scales[1].dim() == 4 else scales[1]) * softmax_scale
    if causal:
        lengths = (torch.full((batch,), n, device=q.device) for n in (rows, columns))
        scores = scores.masked_fill(~visible(*lengths, rows, columns, (-1, 0)), -torch.inf)
    top = scores.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = torch.exp(scores - top)
    norm = weights.sum(-1, keepdim=True)
    if product is None:
        out = weights @ (v.to(dtype) * scales[2])
    else:
        weights = (weights * WEIGHTS_LARGEST).to(torch.float8_e4m3fn)
        v_scale = scales[2].expand(*v.shape[:-1], 1)
        out = sum(product(weights[..., n : n + BLOCK], v.mT[..., n : n + BLOCK]).to(dtype) * v_scale[..., n : n + 1, :]
                  for n in range(0, columns, BLOCK)) / WEIGHTS_LARGEST
    return (out / norm.masked_fill(norm == 0, 1)).transpose(1, 2), (top + norm.log()).squeeze(-1)
