"""Differential attention on a CPU: both maps are heads of one attention, and their outputs are subtracted in float32."""

import torch
from torch import Tensor

from attnzoo_kernels._cpu.mainloop import operator
from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.flash.cpu import window_tiles
from attnzoo_kernels.packing import behind_last

attend = operator("differential", "differential_attention", window_tiles)


@without_autocast
def differential_attention_cpu(q1, q2, k1, k2, v, lam, *, window_size, softmax_scale, cu_seqlens_q, cu_seqlens_k) -> tuple[Tensor, Tensor]:
    """Output and both log-sum-exps. Arguments are checked by the caller."""
    dtype, heads = q1.dtype, q1.shape[-2]
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = (torch.cat(pair, dim=-2).to(wide) for pair in ((q1, q2), (k1, k1 if k2 is None else k2), (v, v)))
    out, lse = attend(q.unsqueeze(0), k.unsqueeze(0), v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                      softmax_scale=softmax_scale, window_size=window_size, exact=dtype.itemsize > 2)
    first, second = out.split(heads, dim=-2)
    # per head or per token and head
    lam = lam.unsqueeze(-1) if lam.dim() else lam
    out = (first - lam * second).to(dtype)
    if cu_seqlens_q is not None:  # lambda may be anything there, and so may the output's gradient
        out = out.masked_fill(behind_last(cu_seqlens_q, len(out))[:, None, None], 0)
    return out, lse.unflatten(-2, (2, heads)).movedim(-3, 0).detach()
