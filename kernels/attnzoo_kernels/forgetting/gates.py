"""From log f to c, its sums along each sequence, and from the gradient of c back to that of log f.

Sums are taken in integers (fixed point), so that they are exact in any order. So a packed sequence's sums can be computed as differences of
sums over all tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels.packing import token_positions

NEGLIGIBLE = 17.0  # e**-17 is less than float32's rounding of one
FIXED = 2.0**38  # the integer that stands for 1.0: an int64 holds c up to 3e7


def cumulative(log_f: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """c in float64, (batch, heads, seqlen) of (batch, seqlen, heads), or (heads, total) of (total, heads)."""
    sums = (log_f.detach().mT.double() * FIXED).round().to(torch.int64).contiguous().cumsum(-1)
    if cu_seqlens is not None:
        total = log_f.shape[0]
        starts = torch.arange(total, device=log_f.device) - token_positions(cu_seqlens, total)
        sums -= F.pad(sums, (1, 0))[..., starts]
    return sums.double() / FIXED


def in_two_parts(c: Tensor) -> Tensor:
    """c for the plain kernels with float32 inputs: float32 (2, *c.shape), the high parts and then the low parts, whose sum is c."""
    high = c.float()
    return torch.stack((high, (c - high).float()))


def gradient(columns: Tensor, rows: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> Tensor:
    """The gradient of log f, float32, laid out as log f. columns, rows: the sums of dS by key, and by query (in float64), laid out as c and
    as the LSE.

    dc is the sum by query minus the sum by key, and the gradient of log f sums dc over all tokens from its own on. Without rounding, the
    sums by query would be zero. They must be included, because otherwise the rounding errors of later queries would add up.
    """
    dc = -columns.double()
    if cu_seqlens_q is None:
        shift = dc.shape[-1] - rows.shape[-1]
        dc[..., max(shift, 0) :] += rows[..., max(-shift, 0) :]
    elif cu_seqlens_q is cu_seqlens_k:
        both = min(dc.shape[-1], rows.shape[-1])  # behind the last sequence, queries may be more or fewer than keys
        dc[..., :both] += rows[..., :both]
    elif dc.shape[-1] > 0:
        total = rows.shape[-1]
        sequence_starts = torch.arange(total, device=rows.device) - token_positions(cu_seqlens_q, total)
        starts = cu_seqlens_k[torch.searchsorted(cu_seqlens_q[1:], sequence_starts.int(), right=True).clamp(max=len(cu_seqlens_q) - 2)]
        keys = starts + token_positions(cu_seqlens_q, total, cu_seqlens_k)
        dc.index_add_(-1, keys.clamp(0, dc.shape[-1] - 1), rows)
    if dc.numel() == 0:
        return dc.mT.float()
    scale = 2.0**60 / dc.abs().sum(-1, keepdim=True).clamp(min=1e-200)
    fixed = (dc * scale).round().to(torch.int64)
    sums = fixed.cumsum(-1)
    if cu_seqlens_k is None:
        after = sums[..., -1:] - sums
    else:
        token = torch.arange(dc.shape[-1], device=dc.device)
        ends = cu_seqlens_k[1:].long()
        last = ends[torch.searchsorted(ends, token, right=True).clamp(max=len(ends) - 1)] - 1
        after = sums[..., last.clamp(min=0)] - sums
    return ((after + fixed).double() / scale).mT.float()
