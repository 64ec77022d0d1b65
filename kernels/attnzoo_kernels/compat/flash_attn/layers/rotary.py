"""flash-attn's `layers.rotary`: rotary positions (Su et al. 2021, arXiv:2104.09864), in plain PyTorch."""

import torch
from torch import Tensor

from attnzoo_kernels import checks
from attnzoo_kernels.compat.flash_attn.packed import sequence_of_tokens

__all__ = ["apply_rotary_emb"]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates the first rotary_dim channels of x by the positions of its tokens; the other channels stay as they are.

    x: (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim) with cu_seqlens, int32 (batch + 1,).
    cos, sin: (positions, rotary_dim / 2), cosine and sine of the angle of each pair of channels. A token at a position beyond them stays as
        it is.
    interleaved: pairs are channels 0 and 1, 2 and 3, and so on; otherwise 0 and rotary_dim / 2, 1 and rotary_dim / 2 + 1.
    inplace: the result is written to the memory of x, and x is returned. If x is a leaf that requires a gradient, and gradients are on,
        another tensor in the same memory is returned, and only that one carries the gradient.
    seqlen_offsets: the position of each sequence's first token, at least 0: an int, or whole numbers (batch,).
    max_seqlen: accepted and ignored.

    Returns a tensor of x's shape and dtype. It is computed in float32, or in float64 for x in float64.
    Raises TypeError or ValueError naming the argument.
    """
    for name, given in (("x", x), ("cos", cos), ("sin", sin)):
        checks.tensor(name, given)
        if given.dtype not in checks.DTYPES or given.device != x.device:
            raise TypeError(f"{name}: must be floating point of 16 to 64 bits on x's device {x.device}, got {given.dtype} on "
                            f"{given.device}")
    if x.dim() != (4 if cu_seqlens is None else 3):
        shape = "(batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens"
        raise ValueError(f"x: must be {shape}, got shape {tuple(x.shape)}")
    if cos.dim() != 2 or cos.shape != sin.shape or not cos.numel() or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(f"cos, sin: must both be (positions, rotary_dim / 2), with rotary_dim at most head_dim={x.shape[-1]}, got "
                         f"{tuple(cos.shape)} and {tuple(sin.shape)}")
    if cu_seqlens is not None:
        checks.cu_seqlens("cu_seqlens", cu_seqlens, x)
        checks.rising("cu_seqlens", cu_seqlens, x.shape[0])
    _check_offsets(seqlen_offsets, x, x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)
    offset = seqlen_offsets[:, None] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
    if cu_seqlens is None:
        position = torch.arange(x.shape[1], device=x.device)[None] + offset
    else:
        sequence, place = sequence_of_tokens(cu_seqlens, x.shape[0])
        position = place + (seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets)
    return _rotated(x, cos, sin, position.long(), interleaved, inplace)


def _check_offsets(offsets: int | Tensor, x: Tensor, batch: int) -> None:
    if isinstance(offsets, Tensor):
        checks.whole_numbers("seqlen_offsets", offsets, x, (batch,), "x")
    else:
        checks.integer("seqlen_offsets", offsets, 0)


class _Stored(torch.autograd.Function):
    """Writes a value to the memory of x. The gradient goes to the value."""

    @staticmethod
    def forward(ctx, value: Tensor, x: Tensor) -> Tensor:
        return x.copy_(value)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, interleaved: bool, inplace: bool) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    known = (position < cos.shape[0])[..., None]
    rows = position.clamp(max=cos.shape[0] - 1)
    # (..., seqlen, 1, rotary_dim / 2)
    cos, sin = (torch.where(known, table[rows], rest).to(wide).unsqueeze(-2) for table, rest in ((cos, 1), (sin, 0)))
    width, pair = 2 * cos.shape[-1], -1 if interleaved else -2
    first, second = x[..., :width].to(wide).unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(pair)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=pair).flatten(-2).to(x.dtype)
    if inplace and not (x.is_leaf and x.requires_grad and torch.is_grad_enabled()):
        x[..., :width] = turned
        return x
    out = torch.cat((turned, x[..., width:]), dim=-1)
    return _Stored.apply(out, x.detach()) if inplace else out
