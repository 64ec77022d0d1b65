"""Packed calls with a Pattern whose first sequence has fewer queries than keys, because the call has only a part of a longer stream's
queries (`context_parallel`)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels.block_sparse import ops
from attnzoo_kernels.block_sparse.layout import BlockLayout
from attnzoo_kernels.block_sparse.patterns import Pattern


def attend(call: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, cu_seqlens_q: Tensor,
           cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int) -> tuple[Tensor, Tensor]:
    """Output and LSE, by one call for the first sequence that has queries and one for the sequences after it. The host does not wait.

    call: the operator after its checks, with all other arguments bound. Raises ValueError, on a CPU, if another sequence has fewer queries
    than keys.
    """
    n = cu_seqlens_q.shape[0] - 1
    first = (cu_seqlens_q[1:] <= 0).sum(0, keepdim=True).clamp(max=n - 1)  # the last one where there are no queries
    end = cu_seqlens_q.index_select(0, first + 1)
    k_begin, k_end = cu_seqlens_k.index_select(0, first), cu_seqlens_k.index_select(0, first + 1)
    before = k_end - k_begin - end  # how many tokens of the sequence lie before its queries
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        _check(cu_seqlens_q.diff(), cu_seqlens_k.diff(), int(first))

    # its queries are padded at the front to a block's first token; the padding sees nothing
    block, zero = pattern.block, cu_seqlens_q.new_zeros(1)
    len_q, blocks = min(max_seqlen_q, q.shape[0]) + block, max(1, -(-max_seqlen_k // block))
    mask = ops.pattern_mask(pattern.key, pattern.heads, blocks, blocks, q.device)
    rows = (before // block + torch.arange(-(-len_q // block), device=q.device)).clamp(max=blocks - 1)
    of_first = call(
        F.pad(q, (0, 0, 0, 0, block, 0)), k, v, BlockLayout(mask.index_select(2, rows), block, block),
        torch.cat([zero, zero, block - before % block, block + end]), torch.cat([zero, k_begin, k_begin, k_end]), len_q, max_seqlen_k)

    # the other sequences have as many keys as queries; in this call the first one's queries have no keys
    of_others = call(q, k, v, pattern, torch.cat([zero, cu_seqlens_q.clamp(min=end)]), torch.cat([zero, cu_seqlens_k]), max_seqlen_k,
                     max_seqlen_k)
    is_first = torch.arange(q.shape[0], device=q.device) < end
    return (torch.where(is_first[:, None, None], of_first[0][block:], of_others[0]),
            torch.where(is_first, of_first[1][:, block:], of_others[1]))


def _check(queries: Tensor, keys: Tensor, first: int) -> None:
    """Checks lengths by sequence."""
    other = torch.arange(len(queries), device=queries.device) != first
    if (wrong := (queries > keys) | other & (queries > 0) & (queries < keys)).any():
        at = int(wrong.nonzero()[0, 0])
        raise ValueError(f"cu_seqlens_q: of a Pattern's packed sequences the first one that has queries may have fewer than keys, and no "
                         f"other; sequence {at} has {int(queries[at])} queries and {int(keys[at])} keys")
