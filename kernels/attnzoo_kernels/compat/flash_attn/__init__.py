"""flash-attn 2.8's functions over `attnzoo_kernels.flash_attention`: change the import, keep the calls.

    from attnzoo_kernels.compat.flash_attn import flash_attn_func, flash_attn_with_kvcache
    from attnzoo_kernels.compat.flash_attn.bert_padding import index_first_axis
    from attnzoo_kernels.compat.flash_attn.layers.rotary import apply_rotary_emb

Arguments, shapes and meanings are flash-attn's: causal masks and windows are aligned to the bottom right, `softcap <= 0` is off,
`alibi_slopes` is float32 (heads,) or (batch, heads), and queries, keys and values whose last dimension is not contiguous are copied.
Unlike flash-attn, the functions also accept float32, values wider or narrower than keys, and CPU tensors.

With `return_attn_probs=True` they return (out, softmax_lse, S_dmask). softmax_lse is float32, (batch, heads, seqlen_q) or
(heads, total_q), and carries a gradient. In rows that see no key, out is zero and softmax_lse is -inf (+inf in flash-attn). S_dmask is an
empty tensor, as in flash-attn without dropout. With dropout, flash-attn returns its attention matrix there, for its own tests; here that
raises NotImplementedError.

`deterministic=False` follows `torch.use_deterministic_algorithms`; True always asks for a deterministic result.
"""

import torch
from torch import Tensor

from attnzoo_kernels import checks
from attnzoo_kernels.compat.flash_attn.kvcache import (
    FEW,
    decoded_pages,
    flash_attn_with_kvcache,
    packed_pages,
    plain_softcap,
    plain_window,
    readable,
)
from attnzoo_kernels.decode import check_pages
from attnzoo_kernels.flash import flash_attention
from attnzoo_kernels.padding.inputs import values_known

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, Tensor]


def _parts(name: str, x: Tensor, parts: int, packed: bool) -> tuple[Tensor, ...]:
    """The parts of x, which lie side by side: queries, keys and values, or only keys and values."""
    checks.tensor(name, x)
    shape = f"({'total' if packed else 'batch, seqlen'}, {parts}, heads, head_dim)"
    if x.dim() != (4 if packed else 5) or x.shape[-3] != parts:
        raise ValueError(f"{name}: must be {shape}, got shape {tuple(x.shape)}")
    return x.unbind(-3)


def _attend(
    q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, **packing
) -> Result:
    checks.probability("dropout_p", dropout_p)
    checks.flag("return_attn_probs", return_attn_probs)
    if return_attn_probs and dropout_p > 0:
        raise NotImplementedError("return_attn_probs: S_dmask with dropout_p > 0 is not kept; use return_attn_probs=False or dropout_p=0.0")
    # a max_seqlen that is a tensor is left out: the host would wait to read it, and no kernel needs it
    packing |= {name: None for name in ("max_seqlen_q", "max_seqlen_k") if isinstance(packing.get(name), Tensor)}
    out = flash_attention(
        *map(readable, (q, k, v)), causal=causal, softmax_scale=softmax_scale, window_size=plain_window(window_size),
        softcap=plain_softcap(softcap),
        alibi_slopes=alibi_slopes, dropout_p=dropout_p, return_lse=return_attn_probs, deterministic=deterministic or None, **packing)
    return (*out, q.new_empty(0)) if return_attn_probs else out


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, kv_heads, head_dim) -> out as q."""
    return _attend(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """q (batch, seqlen_q, heads, head_dim), kv (batch, seqlen_k, 2, kv_heads, head_dim) -> out as q."""
    return _attend(q, *_parts("kv", kv, 2, False),
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """qkv (batch, seqlen, 3, heads, head_dim) -> out (batch, seqlen, heads, head_dim)."""
    return _attend(*_parts("qkv", qkv, 3, False),
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """q (total_q, heads, head_dim), k and v (total_k, kv_heads, head_dim), cu_seqlens int32 (batch + 1,) -> out as q.

    block_table: int32 (batch, max_blocks), as in `decode_attention`; k and v are then pages (num_blocks, page, kv_heads, head_dim). With a
    max_seqlen_q of at most 16, and without gradients or dropout, the pages are read in place. Otherwise keys and values are copied, in room
    for batch * max_seqlen_k tokens.
    """
    if block_table is not None:
        block_table = _checked_pages(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
        checks.probability("dropout_p", dropout_p)
        checks.flag("return_attn_probs", return_attn_probs)
        graph = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        if q.shape[0] and 1 <= max_seqlen_q <= FEW and dropout_p == 0 and not graph:
            out, lse = decoded_pages(
                *map(readable, (q, k, v)), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, block_table, softmax_scale=softmax_scale,
                causal=causal, window_size=plain_window(window_size), softcap=plain_softcap(softcap), alibi_slopes=alibi_slopes)
            return (out, lse, q.new_empty(0)) if return_attn_probs else out
        k, v = packed_pages(k, v, cu_seqlens_k, max_seqlen_k, block_table)
    return _attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)


def _checked_pages(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table) -> Tensor:
    checks.tensor("q", q)
    if q.dim() != 3:
        raise ValueError(f"q: must be (total_q, heads, head_dim), got shape {tuple(q.shape)}")
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        checks.cu_seqlens(name, x, q)
    batch = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k.shape[0] != batch + 1:
        raise ValueError(f"cu_seqlens_k: must have cu_seqlens_q's shape {(batch + 1,)}, got {tuple(cu_seqlens_k.shape)}")
    checks.tensor("block_table", block_table)
    block_table = block_table.contiguous()
    check_pages(q, k, v, block_table, batch, ("k", "v"))
    checks.attention_inputs(*map(readable, (q[None, :1], k[:1], v[:1])), None, None, None, None)
    checks.integer("max_seqlen_q", max_seqlen_q, 0)
    checks.integer("max_seqlen_k", max_seqlen_k, 0)
    checks.packed_lengths("q", cu_seqlens_q, max_seqlen_q, q.shape[0])
    checks.packed_lengths("k", cu_seqlens_k, max_seqlen_k, block_table.numel() * k.shape[1])
    longest = block_table.shape[1] * k.shape[1]
    if values_known(cu_seqlens_k) and (cu_seqlens_k.diff() > longest).any():
        raise ValueError(f"cu_seqlens_k: a sequence must have at most the {longest} tokens that a row of block_table has, got "
                         f"{cu_seqlens_k.tolist()}")
    return block_table


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """q (total_q, heads, head_dim), kv (total_k, 2, kv_heads, head_dim), cu_seqlens int32 (batch + 1,) -> out as q."""
    return _attend(
        q, *_parts("kv", kv, 2, True),
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """qkv (total, 3, heads, head_dim), cu_seqlens int32 (batch + 1,) -> out (total, heads, head_dim)."""
    return _attend(
        *_parts("qkv", qkv, 3, True),
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen)
