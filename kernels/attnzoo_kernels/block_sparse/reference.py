"""block_sparse_attention's contract in plain PyTorch: written to be read, differentiable twice, quadratic in memory."""

import torch
from torch import Tensor

from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.flash.reference import visible
from attnzoo_kernels.packing import pad_packed, sequence_lengths, unpad_packed


def element_mask(mask: Tensor, block_q: int, block_k: int, rows: int, columns: int) -> Tensor:
    """The mask of a layout for each query and key: bool (batch or 1, heads or 1, rows, columns)."""
    i = torch.arange(rows, device=mask.device) // block_q
    j = torch.arange(columns, device=mask.device) // block_k
    return mask[:, :, i[:, None], j]


@without_autocast
def block_sparse_attention_reference(q, k, v, mask, *, block_q, block_k, window_size, softmax_scale, cu_seqlens_q, cu_seqlens_k,
                                     max_seqlen_q, max_seqlen_k) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; packed input is padded, attended to and packed again. Arguments are checked by the caller."""
    packed = cu_seqlens_q is not None
    total_q = q.shape[0]
    if packed:
        q = pad_packed(q, cu_seqlens_q, max_seqlen_q)
        k, v = (pad_packed(x, cu_seqlens_k, max_seqlen_k) for x in (k, v))
    batch, rows, heads, _ = q.shape
    columns, kv_heads = k.shape[1:3]
    len_q = sequence_lengths(cu_seqlens_q, batch, rows, q.device)
    len_k = sequence_lengths(cu_seqlens_k, batch, columns, q.device)

    # (batch, heads, seqlen, width); a key head serves a contiguous group of query heads
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))

    scores = (q @ k.mT) * softmax_scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    seen = visible(len_q, len_k, rows, columns, window_size) & element_mask(mask, block_q, block_k, rows, columns)
    scores = scores.masked_fill(~seen, -torch.inf)

    # softmax by hand: a row that sees no key gives zeros, and no NaN in any gradient
    top = scores.amax(-1, keepdim=True) if columns else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    top = top.detach().masked_fill(top == -torch.inf, 0)
    weights = torch.exp(scores - top)
    norm = weights.sum(-1, keepdim=True)
    empty = norm == 0
    norm = norm.masked_fill(empty, 1)
    lse = (top + norm.log()).masked_fill(empty, -torch.inf).squeeze(-1)
    out = ((weights / norm).to(v.dtype) @ v).transpose(1, 2)
    if packed:
        out = unpad_packed(out, cu_seqlens_q, total_q)
        lse = unpad_packed(lse.transpose(1, 2), cu_seqlens_q, total_q, fill=-torch.inf).transpose(0, 1)
    return out, lse
