"""Conversion between packed tokens and padded rows by cu_seqlens alone. If max_seqlen is given, shapes are static and the host does not
wait. For references and dense fallbacks."""

import torch
from torch import Tensor


def sequence_lengths(cu_seqlens: Tensor | None, batch: int, seqlen: int, device: torch.device) -> Tensor:
    """Length of each sequence, (batch,) int64; without cu_seqlens all have the length `seqlen`."""
    if cu_seqlens is None:
        return torch.full((batch,), seqlen, device=device)
    return cu_seqlens.diff().long()


def pad_packed(tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int | None) -> Tensor:
    """(total, ...) to (sequences, max_seqlen, ...), zeros after each sequence's end.

    max_seqlen: None: the longest sequence, for which the host waits; in a compiled graph the total, which is a bound.
    """
    if max_seqlen is None:
        max_seqlen = tokens.shape[0] if torch.compiler.is_compiling() else int(cu_seqlens.diff().amax())
    elif not torch.compiler.is_compiling():
        max_seqlen = min(max_seqlen, tokens.shape[0])
    position = torch.arange(max_seqlen, device=tokens.device)
    start, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    index = start[:, None] + position
    real = (index < end[:, None]).view(*index.shape, *(1,) * (tokens.dim() - 1))
    if tokens.shape[0] == 0:  # add one token to index, so that the result still depends on `tokens` for autograd
        tokens = torch.cat([tokens, tokens.new_zeros(1, *tokens.shape[1:])])
    return tokens[index.clamp(max=tokens.shape[0] - 1)].masked_fill(~real, 0)


def token_positions(cu_seqlens: Tensor, total: int, cu_seqlens_k: Tensor | None = None) -> Tensor:
    """Position of each packed token in its sequence, (total,) int64; with cu_seqlens_k, in its sequence of keys, aligned to the end.

    Tokens after the last sequence count as its continuation.
    """
    token = torch.arange(total, device=cu_seqlens.device)
    starts, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    if cu_seqlens_k is not None:
        starts = starts - (cu_seqlens_k.diff() - cu_seqlens.diff()).long()
    return token - starts[torch.searchsorted(end, token, right=True).clamp(max=end.numel() - 1)]


def behind_last(cu_seqlens: Tensor, total: int) -> Tensor:
    """Which tokens belong to no sequence: bool (total,)."""
    return torch.arange(total, device=cu_seqlens.device) >= cu_seqlens[-1]


def unpad_packed(rows: Tensor, cu_seqlens: Tensor, total: int, fill: float = 0.0) -> Tensor:
    """(sequences, max_seqlen, ...) to (total, ...); tokens after the last sequence get `fill`."""
    token = torch.arange(total, device=rows.device)
    end = cu_seqlens[1:].long()
    sequence = torch.searchsorted(end, token, right=True)
    inside = (sequence < end.numel()).view(-1, *(1,) * (rows.dim() - 2))
    if rows.shape[0] * rows.shape[1] == 0:
        return torch.cat([rows.flatten(0, 1), rows.new_full((total, *rows.shape[2:]), fill)])
    sequence = sequence.clamp(max=end.numel() - 1)
    position = (token - cu_seqlens[:-1].long()[sequence]).clamp(max=rows.shape[1] - 1)
    return rows[sequence, position].masked_fill(~inside, fill)


def padded(of_q: list[Tensor], of_k: list[Tensor], cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int | None,
           max_seqlen_k: int | None) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Tensors along the queries and along the keys of a packed or dense call, as padded rows (batch, seqlen, ...), and the lengths of both
    sides."""
    if cu_seqlens_q is not None:
        of_q = [pad_packed(x, cu_seqlens_q, max_seqlen_q) for x in of_q]
        of_k = [pad_packed(x, cu_seqlens_k, max_seqlen_k) for x in of_k]
    len_q, len_k = (sequence_lengths(bounds, *x.shape[:2], x.device) for bounds, x in ((cu_seqlens_q, of_q[0]), (cu_seqlens_k, of_k[0])))
    return of_q, of_k, len_q, len_k


def unpadded(out: Tensor, lse: Tensor, cu_seqlens_q: Tensor | None, total: int) -> tuple[Tensor, Tensor]:
    """The inverse of `padded` for an output (batch, seqlen, heads, width) and its LSE (batch, heads, seqlen), which becomes (heads,
    total)."""
    if cu_seqlens_q is None:
        return out, lse
    return (unpad_packed(out, cu_seqlens_q, total),
            unpad_packed(lse.transpose(1, 2), cu_seqlens_q, total, fill=-torch.inf).transpose(0, 1))


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as (batch, heads, seqlen, width). Key heads are repeated: each serves a contiguous group of query heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return q, *(x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
