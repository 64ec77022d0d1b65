"""Decoding: a few queries against a long cache of keys, which all multiprocessors read together (Flash-Decoding, Dao et al. 2023)."""

import torch
from torch import Tensor

from attnzoo_kernels import autograd, checks, dispatch
from attnzoo_kernels.decode import ops
from attnzoo_kernels.decode.reference import decode_attention_reference

IMPLEMENTATIONS = ("triton", "reference")
LATENT_WIDTHS = 512, 64  # largest widths of a latent, and of the columns after it in a row of the cache


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    share_prefixes: bool = False,
    segments: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    check: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q kᵀ + bias) v of the newest tokens over a cache: `flash_attention` for few queries, without gradients.

    q: (batch, seqlen_q, heads, head_dim): one new token of each sequence, or a few.
    k_cache: (batch, max_len, kv_heads, head_dim), v_cache: (batch, max_len, kv_heads, value_dim): the new tokens are in it.
    cache_seqlens: int32 (batch,), on q's device: how many tokens each row has, the new ones included. What lies after them in the cache is
        never used and may be anything. On a GPU values are not checked; one above max_len counts as max_len. A row may be empty (0).
    block_table: int32 (batch, max_blocks), contiguous, for a cache in pages (PagedAttention, Kwon et al. 2023, arXiv:2309.06180).
        k_cache is then (num_blocks, block_size, kv_heads, head_dim), v_cache is alike, and max_len is max_blocks * block_size. Token t of
        row b lies in page block_table[b, t // block_size] at t % block_size. Rows may share pages. Entries after a row's tokens are not
        used and may be anything, such as -1. On a GPU, an entry for a row's tokens that names no page counts as a page of zeros.
    share_prefixes: with a block_table. Pages with which neighbouring rows of the table begin alike are read once for the queries of all
        these rows. The device finds them in each call, for groups of as many sequences as have 64 queries of a key head together. This
        costs some launches, so it pays only for batches that share long prefixes. Not with a window to the left nor with ALiBi.
    segments: int32 (batch, n, 2), contiguous, on q's device, for one new token of each row, whose query differs by range of keys. q is
        (batch, n, heads, head_dim), and query i of row b sees the keys segments[b, i, 0] to segments[b, i, 1] - 1 of its row. All scores of
        a row have one softmax: the output is (batch, 1, heads, value_dim). Ranges may come in any order and overlap; a key then counts once
        for each query that sees it. On a GPU values are not checked; what lies outside of the row counts as left out. Not with a
        block_table, a window, ALiBi or caches of 8 bits.
    All of one dtype: float16, bfloat16 or float32 (the reference also takes float64); last dimension contiguous, other strides free. Both
        caches may be float8_e4m3fn instead, which a GPU takes from compute capability 8.9 on.
    k_scale, v_scale: float32 (kv_heads,), positive, or None for 1: a number in the cache stands for itself times its key head's scale. In
        8 bits new tokens are written as (k / k_scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).
    head_dim and value_dim up to 256. kv_heads divides heads; query head h reads key head h // (heads // kv_heads).

    Query i is the token cache_seqlens - seqlen_q + i of its sequence. Scores are scaled, then capped, then biased, then masked, in the
    meaning of `flash_attention`: causal (with one query it says nothing), window_size (left, right), softcap,
    alibi_slopes float32 (heads,) or (batch, heads), sinks float32 (heads,). With 2 queries and 5 tokens, causal:
        1 1 1 1 0
        1 1 1 1 1
    A query that sees no key gives zeros and LSE -inf (the sink with sinks).

    softmax_scale: any finite number; default head_dim ** -0.5.
    out_dtype: dtype of the output: None for q's, or torch.float32, so that outputs that are merged later are rounded only once.
    return_lse: also return the natural log-sum-exp of the scores, float32, (batch, heads, seqlen_q), or (batch, heads, 1) with segments.
    check: check the values of cache_seqlens, block_table and scales, which waits for the device; on a CPU they are always checked.
    impl: "triton" | "reference"; None takes triton on CUDA tensors and the reference on CPU ones. A named path runs, or the call raises.

    The Triton path divides the tiles of all sequences evenly among as many programs as the GPU runs at once, whatever the lengths, and
    merges the partial results in a fixed order, so repeated calls give the same bits. Lengths are read on the device: the host does not
    wait, nothing is compiled anew for other lengths, and a CUDA graph may be replayed after lengths were changed in place.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks.
    """
    rows = k_cache, v_cache
    if block_table is not None:
        checks.tensor("q", q)
        if q.dim() != 4:
            raise ValueError(f"q: must be (batch, seqlen_q, heads, head_dim), got shape {tuple(q.shape)}")
        check_pages(q, k_cache, v_cache, block_table, q.shape[0])
        rows = (x[:1].expand(q.shape[0], -1, -1, -1) for x in rows)  # in the shapes that attention_inputs checks
    checks.attention_inputs(q, *rows, None, None, None, None, names=("q", "k_cache", "v_cache"), narrow=torch.float8_e4m3fn,
                            unpacked="; it takes no packed input, and one token of each sequence is q[:, None]")
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"v_cache: must have k_cache's dtype {k_cache.dtype}, got {v_cache.dtype}")
    batch, _, heads, head_dim = q.shape
    checks.flag("check", check)
    checks.flag("return_lse", return_lse)
    checks.flag("share_prefixes", share_prefixes)
    if out_dtype not in (None, torch.float32) or (out_dtype is not None and q.dtype == torch.float64):
        raise ValueError(f"out_dtype: must be None or torch.float32, and None for queries of torch.float64, got {out_dtype} for {q.dtype}")
    _check_lengths(cache_seqlens, q, k_cache.shape[1] * (1 if block_table is None else block_table.shape[1]), check)
    if block_table is not None:
        _check_pages(cache_seqlens, block_table, *k_cache.shape[:2], check)
    checks.non_negative("softcap", softcap)
    left, right = checks.window(window_size, causal)
    if alibi_slopes is not None:
        checks.per_head("alibi_slopes", alibi_slopes, q, heads, batch)
    if sinks is not None:
        checks.per_head("sinks", sinks, q, heads)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            checks.per_head(name, scale, q, k_cache.shape[-2])
            if (check or scale.device.type == "cpu") and not torch.compiler.is_compiling() and not (scale > 0).all():
                raise ValueError(f"{name}: must be positive, got {scale.tolist()}")
    softmax_scale = checks.softmax_scale(softmax_scale, head_dim)
    if share_prefixes and (block_table is None or left >= 0 or alibi_slopes is not None):
        raise ValueError("share_prefixes=True: must be False without block_table, with a window to the left or with alibi_slopes")
    if segments is not None:
        if block_table is not None or tuple(window_size) != (-1, -1) or alibi_slopes is not None or k_cache.dtype != q.dtype:
            raise ValueError("segments: must be None with block_table, window_size, alibi_slopes or caches of 8 bits")
        _check_segments(segments, q)

    if dispatch.takes_reference("decode", impl, "q", q, IMPLEMENTATIONS):
        out, lse = decode_attention_reference(
            q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=block_table, window_size=(left, right),
            softmax_scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, k_scale=k_scale, v_scale=v_scale,
            segments=segments)
        out = out.to(out_dtype or q.dtype)
    else:
        checks.no_gradient(alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale)
        autograd.refuse_derivatives('impl="triton"', "use flash_attention", q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks)
        softmax_scale, q = checks.positive_scale(softmax_scale, q)
        out, lse = ops.forward(q, k_cache, v_cache, cache_seqlens, block_table, alibi_slopes, sinks, softmax_scale, left, right, softcap,
                               k_scale, v_scale, share_prefixes, segments, out_dtype)
    return (out, lse) if return_lse else out


def latent_decode_attention(
    q: Tensor,
    cache: Tensor,
    *,
    value_dim: int,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    check: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`decode_attention` over one cache that all heads read, whose first columns are the values: multi-head latent attention in its
    absorbed form (DeepSeek-V2, 2024, arXiv:2405.04434). Without gradients.

    softmax(softmax_scale * q cacheᵀ) cache[..., :value_dim] for each head; a row of the cache is read once for both products.

    q: (batch, seqlen_q, heads, head_dim): one new token of each sequence, or a few. In DeepSeek-V2 a query is its 512 columns after
        the product with the head's key matrix, followed by its rotated part of 64 columns.
    cache: (batch, max_len, head_dim): for each token its normalised latent, followed by its rotated key. The new tokens are in it.
    value_dim: columns of a latent, 1 to 512. head_dim is at least as much, and at most 64 more.
    Both of one dtype: float16, bfloat16 or float32 (the reference also takes float64); last dimension contiguous, other strides free. The
        kernel reads a copy of queries that are not contiguous.
    cache_seqlens: int32 (batch,), on q's device: how many tokens each row has, the new ones included. What lies after them in the cache is
        never used and may be anything. On a GPU values are not checked; one above max_len counts as max_len. A row may be empty (0).
    block_table: int32 (batch, max_blocks), contiguous, for a cache in pages, as in `decode_attention`: cache is then (num_blocks,
        block_size, head_dim).

    Query i is the token cache_seqlens - seqlen_q + i of its sequence; causal, it sees no later one. With 2 queries and 5 tokens:
        1 1 1 1 0
        1 1 1 1 1
    A query that sees no key gives zeros and LSE -inf.

    softmax_scale: any finite number; default head_dim ** -0.5. DeepSeek-V2's is that of its heads before absorption, 192 ** -0.5.
    return_lse: also return the natural log-sum-exp of the scores, float32, (batch, heads, seqlen_q).
    check: check the values of cache_seqlens and block_table, which waits for the device; on a CPU they are always checked.
    impl: "triton" | "reference"; None takes triton on CUDA tensors and the reference on CPU ones. A named path runs, or the call raises.

    Returns (batch, seqlen_q, heads, value_dim) in q's dtype, to be multiplied by each head's value matrix.

    The Triton path divides the keys of all sequences evenly, whatever the lengths, and merges the partial results in a fixed order, so
    repeated calls give the same bits. The host does not wait, nothing is compiled anew for other lengths, and a CUDA graph may be replayed
    after lengths were changed in place.

    Raises TypeError or ValueError naming the argument, what it was and what it must be; NotImplementedError for what a path lacks.
    """
    _check_latents(q, cache, value_dim, block_table is not None)
    if block_table is not None:
        rows = cache.unsqueeze(2)
        check_pages(q, rows, rows, block_table, q.shape[0], ("cache", "cache"))
    elif cache.shape[0] != q.shape[0]:
        raise ValueError(f"cache: batch must be q's {q.shape[0]}, got {cache.shape[0]}")
    checks.flag("causal", causal)
    checks.flag("check", check)
    checks.flag("return_lse", return_lse)
    _check_lengths(cache_seqlens, q, cache.shape[1] * (1 if block_table is None else block_table.shape[1]), check)
    if block_table is not None:
        _check_pages(cache_seqlens, block_table, *cache.shape[:2], check)
    softmax_scale = checks.softmax_scale(softmax_scale, q.shape[-1])

    if dispatch.takes_reference("latent_decode", impl, "q", q, IMPLEMENTATIONS):
        keys = cache.unsqueeze(2)
        out, lse = decode_attention_reference(
            q, keys, keys[..., :value_dim], cache_seqlens=cache_seqlens, block_table=block_table, window_size=(-1, 0 if causal else -1),
            softmax_scale=softmax_scale, softcap=0.0, alibi_slopes=None, sinks=None)
    else:
        autograd.refuse_derivatives('impl="triton"', "use flash_attention", q=q, cache=cache)
        softmax_scale, q = checks.positive_scale(softmax_scale, q)
        out, lse = ops.latent_forward(q, cache, cache_seqlens, block_table, value_dim, softmax_scale, causal)
    return (out, lse) if return_lse else out


def _check_latents(q: Tensor, cache: Tensor, value_dim: int, paged: bool) -> None:
    wanted = "(num_blocks, block_size, head_dim)" if paged else "(batch, max_len, head_dim)"
    for name, x, layout in (("q", q, "(batch, seqlen_q, heads, head_dim)"), ("cache", cache, wanted)):
        checks.tensor(name, x)
        if x.dim() != layout.count(",") + 1:
            raise ValueError(f"{name}: must be {layout}, got shape {tuple(x.shape)}")
    if q.dtype not in checks.DTYPES:
        raise TypeError(f"q: must be float16, bfloat16, float32 or (by the reference) float64, got {q.dtype}")
    if q.shape[2] == 0:
        raise ValueError(f"q: must have a head, got shape {tuple(q.shape)}")
    if q.shape[-1] > 1 and q.stride(-1) != 1:
        raise ValueError(f"q: last dimension must be contiguous, got stride {q.stride(-1)}; call .contiguous()")
    checks.alike("cache", cache, "q", q, (*cache.shape[:2], q.shape[-1]))
    checks.integer("value_dim", value_dim, 1)
    widest, rest = LATENT_WIDTHS
    if value_dim > widest or not value_dim <= q.shape[-1] <= value_dim + rest:
        raise ValueError(f"value_dim: must be at most {widest}, and at most {rest} less than q's width {q.shape[-1]}, got {value_dim}")


def check_pages(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, batch: int, names: tuple[str, str] = ("k_cache", "v_cache")) -> None:
    """Checks keys and values in pages, which the caller calls `names`, and their table, but not their widths and dtypes."""
    for name, x in zip(names, (k, v), strict=True):
        checks.tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name}: must be (num_blocks, block_size, kv_heads, width), got shape {tuple(x.shape)}")
        if 0 in x.shape[:2]:
            raise ValueError(f"{name}: must have a page, and rows in it, got shape {tuple(x.shape)}")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"{names[1]}: must have {names[0]}'s pages {tuple(k.shape[:2])}, got {tuple(v.shape[:2])}")
    checks.tensor("block_table", block_table)
    if block_table.dim() != 2 or block_table.shape[0] != batch or block_table.dtype != torch.int32:
        raise ValueError(f"block_table: must be int32 (batch, max_blocks) with batch {batch}, got {block_table.dtype} of shape "
                         f"{tuple(block_table.shape)}")
    if block_table.device != q.device or not block_table.is_contiguous():
        raise ValueError(f"block_table: must be contiguous and on q's device {q.device}, got strides {block_table.stride()} on "
                         f"{block_table.device}")


def _check_segments(segments: Tensor, q: Tensor) -> None:
    checks.tensor("segments", segments)
    if segments.dtype != torch.int32 or segments.shape != (*q.shape[:2], 2) or not segments.is_contiguous():
        raise ValueError(f"segments: must be int32 (batch, seqlen_q, 2) = {(*q.shape[:2], 2)} and contiguous, got {segments.dtype} of "
                         f"shape {tuple(segments.shape)}")
    if segments.shape[1] == 0:
        raise ValueError(f"segments: must have a range of keys for each row, got shape {tuple(segments.shape)}")
    if segments.device != q.device:
        raise ValueError(f"segments: must be on q's device {q.device}, got {segments.device}")


def _check_pages(cache_seqlens: Tensor, block_table: Tensor, n_pages: int, page: int, check: bool) -> None:
    if torch.compiler.is_compiling() or not (check or block_table.device.type == "cpu"):
        return
    used = torch.arange(block_table.shape[1], device=block_table.device) * page < cache_seqlens[:, None]
    wrong = used & ((block_table < 0) | (block_table >= n_pages))
    if wrong.any():
        row, column = (int(x) for x in wrong.nonzero()[0])
        raise ValueError(f"block_table: row {row} needs a page from 0 to {n_pages - 1} at {column} for its {int(cache_seqlens[row])} "
                         f"tokens, got {int(block_table[row, column])}")


def _check_lengths(cache_seqlens: Tensor, q: Tensor, max_len: int, check: bool) -> None:
    checks.tensor("cache_seqlens", cache_seqlens, way_out="; torch.full((batch,), length, dtype=torch.int32, device=q.device) makes one")
    if tuple(cache_seqlens.shape) != (q.shape[0],):
        raise ValueError(f"cache_seqlens: must have shape (batch,) = ({q.shape[0]},), got {tuple(cache_seqlens.shape)}")
    if cache_seqlens.dtype != torch.int32:
        raise TypeError(f"cache_seqlens: must be int32, got {cache_seqlens.dtype}")
    if cache_seqlens.device != q.device:
        raise ValueError(f"cache_seqlens: must be on q's device {q.device}, got {cache_seqlens.device}")
    if cache_seqlens.shape[0] > 1 and cache_seqlens.stride(0) != 1:
        raise ValueError(f"cache_seqlens: must be contiguous, got stride {cache_seqlens.stride(0)}; call .contiguous()")
    if (check or cache_seqlens.device.type == "cpu") and not torch.compiler.is_compiling() and cache_seqlens.numel():
        low, high = cache_seqlens.aminmax()
        if low < 0 or high > max_len:
            raise ValueError(f"cache_seqlens: must lie between 0 and the cache's {max_len} tokens, got {cache_seqlens.tolist()}")
