"""FlashAttention on a CPU: PyTorch's fused kernel for whole sequences, and by tiles of queries where it lacks a feature."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnzoo_kernels._cpu.mainloop import operator
from attnzoo_kernels._cpu.part import finite
from attnzoo_kernels._cpu.tiles import Call, Part, Tile, in_window_of, row_tiles, window_span
from attnzoo_kernels.dispatch import without_autocast
from attnzoo_kernels.packing import behind_last


def window_tiles(call: Call) -> Iterator[Tile]:
    """The tiles of a causal mask, a window, or no mask. If PyTorch's fused kernel has the mask, one tile holds the whole sequence."""
    left, right = call.window
    if call.fused and not call.biased and left < 0 and (right < 0 or right == 0 == call.diagonal):
        yield Tile(slice(0, call.len_q), [Part(slice(0, call.len_k), triangle=right == 0)])
        return
    for rows in row_tiles(0, call.len_q):
        keys = window_span(rows, call)
        if keys.start < keys.stop:
            yield Tile(rows, [Part(keys, in_window_of(rows, keys, call))])


attend = operator("flash", "flash_attention", window_tiles)


@without_autocast
def flash_attention_cpu(q, k, v, *, window_size, softmax_scale, softcap, alibi_slopes, sinks, dropout_p, rng_state, cu_seqlens_q,
                        cu_seqlens_k, return_lse) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp. Arguments are checked by the caller."""
    dtype = q.dtype
    left, right = window_size
    aligned = cu_seqlens_q is cu_seqlens_k if cu_seqlens_q is not None else q.shape[1] in (1, k.shape[1])
    # one call of PyTorch's fused kernel, which computes in 16 bits itself
    one_call = left < 0 and (right < 0 or right == 0 and aligned) and softcap == 0 and alibi_slopes is None and dropout_p == 0
    if not one_call or sinks is not None or return_lse:
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    out, lse = attend(q.unsqueeze(0), k.unsqueeze(0), v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, alibi_slopes=alibi_slopes,
                      rng_state=rng_state, softmax_scale=softmax_scale, softcap=softcap, dropout_p=dropout_p, window_size=window_size,
                      exact=dtype.itemsize > 2)
    if sinks is not None:
        lse_of_keys, sinks = lse, sinks.to(lse.dtype).unsqueeze(-1)
        nothing = (lse_of_keys == -torch.inf) & (sinks == -torch.inf)  # a logarithm of 0, whose derivative would be NaN
        lse = torch.logaddexp(lse_of_keys.masked_fill(nothing, 0), sinks).masked_fill(nothing, -torch.inf)
        if cu_seqlens_q is not None:  # tokens after the last sequence have no sink
            lse = lse.masked_fill(behind_last(cu_seqlens_q, q.shape[0]), -torch.inf)
        share = torch.exp(lse_of_keys - finite(lse))
        out = out * share.transpose(-1, -2).unsqueeze(-1)
    return out.to(dtype), lse
