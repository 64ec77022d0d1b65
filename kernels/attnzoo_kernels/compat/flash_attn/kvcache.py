"""flash-attn's functions over caches of keys and values. They call `decode_attention`, which can read pages."""

import math

import torch
from torch import Tensor

from attnzoo_kernels import checks
from attnzoo_kernels.compat.flash_attn.layers.rotary import apply_rotary_emb
from attnzoo_kernels.compat.flash_attn.packed import sequence_of_tokens
from attnzoo_kernels.decode import check_pages, decode_attention
from attnzoo_kernels.packing import behind_last
from attnzoo_kernels.padding.inputs import values_known

FEW = 16  # decode_attention is made for up to this many queries of a sequence


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest tokens over a cache. With k and v, the new keys and values are first written to the cache. Without gradients.

    q: (batch, seqlen_q, heads, head_dim).
    k_cache, v_cache: (rows, max_len, kv_heads, head_dim), or with block_table pages (num_blocks, page, kv_heads, head_dim) of any size.
    k, v: (batch, new, kv_heads, head_dim), written to the cache in place, from position cache_seqlens on. The cache must have room for
        them.
    rotary_cos, rotary_sin: (at least max_len, rotary_dim / 2), only with k and v. New keys are rotated by their positions in the cache.
        With a causal mask or a window, queries are rotated by the positions from cache_seqlens on; otherwise all by position cache_seqlens.
    cache_seqlens: number of tokens in the cache without the new ones, an int or int32 (batch,). None: the cache is full; not with k and v.
    cache_batch_idx: whole numbers (batch,), the row of the cache for each sequence. None: the first rows.
    cache_leftpad: whole numbers (batch,), the position at which each sequence begins in its row.
    block_table: int32 (batch, max_blocks), as in `decode_attention`. It must name the pages of the new tokens, too.
    num_splits: accepted and ignored: the work is always divided evenly.
    The other arguments are those of `flash_attn_func`. On a GPU the values of lengths and tables are not checked, and the host does not
    wait.

    Returns out, shaped as q, and with return_softmax_lse also its log-sum-exp, float32 (batch, heads, seqlen_q).
    Raises TypeError or ValueError naming the argument; NotImplementedError for pages together with cache_batch_idx or cache_leftpad.
    """
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        checks.tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name}: must have four dimensions, got shape {tuple(x.shape)}")
    if block_table is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        name = "cache_leftpad" if cache_batch_idx is None else "cache_batch_idx"
        raise NotImplementedError(f"{name}: a cache in pages has its rows in block_table; leave {name} out")
    # all that can be wrong is checked before the cache is written to
    for name, value in (("return_softmax_lse", return_softmax_lse), ("causal", causal), ("rotary_interleaved", rotary_interleaved)):
        checks.flag(name, value)
    softmax_scale, softcap = checks.softmax_scale(softmax_scale, q.shape[-1]), plain_softcap(softcap)
    checks.non_negative("softcap", softcap)
    if alibi_slopes is not None:
        checks.per_head("alibi_slopes", alibi_slopes, q, q.shape[2], q.shape[0])
    if (k is None) != (v is None):
        raise ValueError("k, v: must be given both or neither")
    if k is None and (rotary_cos is not None or rotary_sin is not None):
        raise ValueError("rotary_cos, rotary_sin: need k and v, the new keys and values")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos, rotary_sin: must be given both or neither")
    batch, window_size, q = q.shape[0], plain_window(window_size), readable(q)
    if q.dtype != k_cache.dtype:
        raise TypeError(f"k_cache: must have q's dtype {q.dtype}, got {k_cache.dtype}")
    if v_cache.shape[:3] != k_cache.shape[:3] or v_cache.device != k_cache.device:
        raise ValueError(f"v_cache: must be on k_cache's device {k_cache.device} and {tuple(k_cache.shape[:3])} first, got "
                         f"{tuple(v_cache.shape)} on {v_cache.device}")
    if block_table is not None:
        checks.tensor("block_table", block_table)
        block_table = block_table.contiguous()
        check_pages(q, k_cache, v_cache, block_table, batch)
    max_len = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    lengths = _lengths(cache_seqlens, q, max_len, appended=k is not None)
    for name, x in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if x is not None:
            checks.whole_numbers(name, x, q, (batch,))
    rows = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx.long()
    if block_table is None:
        _check_rows(rows, k_cache, given=cache_batch_idx is not None)

    if k is not None:
        checks.attention_inputs(q, *(x[:1].expand(batch, -1, -1, -1) for x in (k_cache, v_cache)), None, None, None, None,
                                names=("q", "k_cache", "v_cache"))
        _check_new(k, v, k_cache, v_cache, batch)
        if rotary_cos is not None:
            q, k = _rotated(q, k, rotary_cos, rotary_sin, lengths, max_len, rotary_interleaved, causal or window_size != (-1, -1))
        _append(k, v, k_cache, v_cache, lengths, rows, block_table, max_len)
        lengths = lengths + k.shape[1]
    if cache_leftpad is not None:
        if values_known(lengths) and lengths.numel() and not 0 <= lengths.min() <= lengths.max() <= max_len:
            raise ValueError(f"cache_seqlens: must lie between 0 and the cache's {max_len} tokens, got {lengths.tolist()}")
        k_cache, v_cache, block_table = _behind_padding(k_cache, v_cache, rows, cache_leftpad)
        lengths = (lengths.clamp(max=max_len) - cache_leftpad).clamp(min=0).int()  # what follows in memory is another row's
    elif cache_batch_idx is not None:
        block_table = rows.int()[:, None]  # each row of the cache is a page
    elif block_table is None:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    return decode_attention(
        q, k_cache, v_cache, cache_seqlens=lengths, block_table=block_table, causal=causal, softmax_scale=softmax_scale,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, return_lse=return_softmax_lse)


def plain_window(window_size) -> tuple[int, int]:
    """(left, right) of a window. As in flash-attn, it may be a tensor, and any negative number counts as -1."""
    sides = window_size.tolist() if isinstance(window_size, Tensor) else window_size
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise ValueError(f"window_size: must be two ints (left, right), got {window_size!r}")
    for side in sides:
        checks.integer("window_size", side)
    return tuple(max(int(side), -1) for side in sides)


def plain_softcap(softcap: float) -> float:
    """As in flash-attn, any negative number counts as 0."""
    checks.number("softcap", softcap)
    return max(softcap, 0.0)


def readable(x: Tensor) -> Tensor:
    """x, or a copy if its last dimension is not contiguous. What is not a dense tensor is left to the checks of the operators."""
    return x.contiguous() if isinstance(x, Tensor) and x.layout == torch.strided and x.dim() and x.stride(-1) != 1 else x


def _lengths(cache_seqlens: int | Tensor | None, q: Tensor, max_len: int, appended: bool) -> Tensor:
    if isinstance(cache_seqlens, Tensor):
        checks.tensor("cache_seqlens", cache_seqlens)
        if cache_seqlens.shape != q.shape[:1] or cache_seqlens.dtype != torch.int32 or cache_seqlens.device != q.device:
            raise ValueError(f"cache_seqlens: must be an int, or int32 of shape ({q.shape[0]},) on q's device {q.device}, got "
                             f"{cache_seqlens.dtype} of shape {tuple(cache_seqlens.shape)} on {cache_seqlens.device}")
        return cache_seqlens.contiguous()
    if cache_seqlens is not None:
        checks.integer("cache_seqlens", cache_seqlens, 0)
    elif appended:
        raise ValueError("cache_seqlens: must say where k and v go, got None")
    return torch.full(q.shape[:1], max_len if cache_seqlens is None else cache_seqlens, dtype=torch.int32, device=q.device)


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor | None, lengths: Tensor, max_len: int, interleaved: bool,
             in_order: bool) -> tuple[Tensor, Tensor]:
    checks.tensor("rotary_cos", cos)
    checks.tensor("rotary_sin", sin)
    if cos.dim() != 2 or cos.shape[0] < max_len:
        raise ValueError(f"rotary_cos: must have a row for each of the cache's {max_len} places, got {tuple(cos.shape)}")
    k = apply_rotary_emb(k, cos, sin, interleaved, seqlen_offsets=lengths)
    if in_order:
        return apply_rotary_emb(q, cos, sin, interleaved, seqlen_offsets=lengths), k
    at_one_place = q.flatten(1, 2)[:, None]
    return apply_rotary_emb(at_one_place, cos, sin, interleaved, seqlen_offsets=lengths)[:, 0].unflatten(1, q.shape[1:3]), k


def _check_rows(rows: Tensor, k_cache: Tensor, given: bool) -> None:
    """given: whether rows are the caller's cache_batch_idx, and not the first ones."""
    n_rows = k_cache.shape[0]
    if not given and rows.shape[0] > n_rows:
        raise ValueError(f"k_cache: must have a row for each of q's {rows.shape[0]} sequences, got {n_rows}")
    if given and values_known(rows) and rows.numel() and rows.max() >= n_rows:
        raise ValueError(f"cache_batch_idx: must name rows of the cache, which has {n_rows}, got {rows.tolist()}")


def _check_new(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: int) -> None:
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        checks.tensor(name, x)
        if x.dim() != 4 or x.shape != (batch, k.shape[1], *cache.shape[2:]) or x.dtype != cache.dtype or x.device != cache.device:
            raise ValueError(f"{name}: must be (batch={batch}, new, kv_heads, head_dim) with the cache's dtype {cache.dtype}, last "
                             f"dimensions {tuple(cache.shape[2:])} and device {cache.device}, got {x.dtype} of shape "
                             f"{tuple(x.shape)} on {x.device}")


def _append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, rows: Tensor, block_table: Tensor | None,
            max_len: int) -> None:
    places = lengths.long()[:, None] + torch.arange(k.shape[1], device=k.device)
    if values_known(places) and places.numel() and not 0 <= places.min() <= places.max() < max_len:
        raise ValueError(f"cache_seqlens: must leave room for {k.shape[1]} new tokens among the cache's {max_len}, got {lengths.tolist()}")
    rows = rows[:, None]
    if block_table is not None:
        page = k_cache.shape[1]
        rows, places = block_table.long().gather(1, places // page), places % page
        if values_known(rows) and rows.numel() and not 0 <= rows.min() <= rows.max() < k_cache.shape[0]:
            raise ValueError(f"block_table: must name one of the cache's {k_cache.shape[0]} pages for each new token, got {rows.tolist()}")
    k_cache[rows, places], v_cache[rows, places] = k, v


def _behind_padding(k_cache: Tensor, v_cache: Tensor, rows: Tensor, leftpad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The caches as views with pages of one token each, and the block table of sequences that begin after their left padding."""
    n_rows, max_len = k_cache.shape[:2]
    per_row = {x.stride(0) / (x.stride(1) or math.nan) if n_rows > 1 else float(max_len) for x in (k_cache, v_cache)}
    if len(per_row) > 1 or not (tokens := per_row.pop()).is_integer():
        raise ValueError(f"cache_leftpad: k_cache and v_cache must have rows alike, a whole number of tokens apart, got strides "
                         f"{k_cache.stride()} and {v_cache.stride()}")
    n_tokens = (n_rows - 1) * int(tokens) + max_len
    pages = [x.as_strided((n_tokens, 1, *x.shape[2:]), (x.stride(1), *x.stride()[1:])) for x in (k_cache, v_cache)]
    first = rows * int(tokens) + leftpad
    return *pages, (first[:, None] + torch.arange(max_len, device=rows.device)).int()


def decoded_pages(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, block_table: Tensor,
                  **options) -> tuple[Tensor, Tensor]:
    """`flash_attn_varlen_func` over pages for few queries: out (total_q, heads, head_dim) and log-sum-exp (heads, total_q).

    The queries of each sequence are put at the end of a row of max_seqlen_q. Masks aligned to the bottom right then let each query see the
    same keys."""
    ends = cu_seqlens_q[1:].long()
    rows = q[(ends[:, None] + torch.arange(-max_seqlen_q, 0, device=q.device)).clamp(min=0)]
    out, lse = decode_attention(
        rows, k, v, cache_seqlens=cu_seqlens_k.diff(), block_table=block_table.contiguous(), return_lse=True, **options)
    sequence, place = sequence_of_tokens(cu_seqlens_q, q.shape[0])
    column = (place + max_seqlen_q - cu_seqlens_q.diff()[sequence]).clamp(max=max_seqlen_q - 1)
    behind = behind_last(cu_seqlens_q, q.shape[0])
    return out[sequence, column].masked_fill(behind[:, None, None], 0), lse[sequence, :, column].T.masked_fill(behind, -torch.inf)


def packed_pages(k: Tensor, v: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int, block_table: Tensor) -> tuple[Tensor, Tensor]:
    """Packed copies of keys and values from their pages. They have room for batch * max_seqlen_k tokens, so that the host does not wait."""
    sequence, place = sequence_of_tokens(cu_seqlens_k, block_table.shape[0] * max_seqlen_k)
    page = block_table[sequence, (place // k.shape[1]).clamp(max=block_table.shape[1] - 1).long()].long()
    if values_known(page) and (wrong := (page < 0) | (page >= k.shape[0]))[: cu_seqlens_k[-1]].any():
        at = int(wrong.nonzero()[0])
        raise ValueError(f"block_table: row {int(sequence[at])} needs a page from 0 to {k.shape[0] - 1} for its token {int(place[at])}, "
                         f"got {int(page[at])}")
    page, row = page.clamp(0, k.shape[0] - 1), (place % k.shape[1]).long()
    return k[page, row], v[page, row]
