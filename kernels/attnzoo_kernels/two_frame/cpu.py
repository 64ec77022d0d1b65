"""Attention in two frames on a CPU: the frames are parts of a tile."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attnzoo_kernels._cpu.mainloop import operator
from attnzoo_kernels._cpu.tiles import Call, Part, Tile, in_window_of, numbers_of, row_tiles, window_span
from attnzoo_kernels.dispatch import without_autocast


def _tiles(call: Call) -> Iterator[Tile]:
    near_keys, far_keys = call.numbers
    near = call._replace(window=(near_keys - 1, 0))
    for rows in row_tiles(max(-call.diagonal, 0), call.len_q):
        keys = window_span(rows, near)
        parts = [Part(keys, in_window_of(rows, keys, near))]
        border = numbers_of(rows) + call.diagonal - near_keys  # the last far key of each row
        far = slice(0, max(min(rows.stop + call.diagonal - near_keys, far_keys), 0))
        if far.stop > 0:
            whole = far.stop <= rows.start + call.diagonal - near_keys + 1
            parts.append(Part(far, None if whole else torch.arange(far.stop, device="cpu") <= border[:, None], q_copy=1, k_copy=1))
        yield Tile(rows, parts)


attend = operator("two_frame", "two_frame_attention", _tiles)


@without_autocast
def two_frame_attention_cpu(q, k, v, *, near_keys, far_keys, softmax_scale, cu_seqlens_q, cu_seqlens_k) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp. Arguments are checked by the caller, who gives the frames of head h as heads 2 h and 2 h + 1 of q and k."""
    dtype = q.dtype
    q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    queries, keys = (torch.stack((x[..., ::2, :], x[..., 1::2, :])) for x in (q, k))
    out, lse = attend(queries, keys, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, softmax_scale=softmax_scale,
                      window_size=(-1, 0), exact=dtype.itemsize > 2, numbers=[near_keys, far_keys])
    return out.to(dtype), lse
