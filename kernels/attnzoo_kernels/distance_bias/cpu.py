"""Attention with a bias by distance on a CPU: tiles of queries, by hand, because PyTorch's fused kernels give no gradient of scores."""

import torch
from torch import Tensor

from attnzoo_kernels._cpu import by_hand
from attnzoo_kernels._cpu.mainloop import operator
from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.flash.cpu import window_tiles

attend = operator("distance_bias", "distance_bias_attention", window_tiles, by_hand)


@without_autocast
def distance_bias_attention_cpu(q, k, v, bias, *, origin, window_size, softmax_scale, **lengths) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp. Arguments are checked by the caller."""
    dtype = q.dtype
    q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    out, lse = attend(q.unsqueeze(0), k.unsqueeze(0), v, table=bias, softmax_scale=softmax_scale, window_size=window_size,
                      exact=dtype.itemsize > 2, numbers=[origin], **lengths)
    return out.to(dtype), lse
