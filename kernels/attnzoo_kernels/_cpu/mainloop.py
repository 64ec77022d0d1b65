"""Attention by tiles of queries behind autograd, for operators that say which tiles there are.

Forward and backward go through the tiles one after the other, and the backward computes a tile's scores again, so that memory stays linear
in the lengths. Everything is computed in the tensors' dtype: an operator widens 16 bits where several results are added up.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from attnzoo_kernels import autograd, dispatch
from attnzoo_kernels._cpu import by_hand, fused
from attnzoo_kernels._cpu.part import Inputs, Rule
from attnzoo_kernels._cpu.tiles import Call, Part, Tile
from attnzoo_kernels.dropout import keep_mask

FEW_KEYS = 64  # up to which float32 is computed in float64: there every rounding more than eager's shows

Tiles = Callable[[Call], Iterator[Tile]]


def operator(name: str, public: str, tiles: Tiles) -> Callable:
    """attend(q, k, v, cu_seqlens_q, cu_seqlens_k, layout, alibi_slopes, rng_state, softmax_scale, softcap, dropout_p, window_left,
    window_right, exact, numbers) gives output and log-sum-exp; under torch.compile it is `attnzoo::<name>_cpu`.

    q, k: (copies, batch, seqlen, heads, width) or (copies, total, heads, width), v without copies. layout: bool (batch or 1, heads or 1,
    q_blocks, k_blocks). exact: whether the caller's tensors are of float32 or wider, so that the fused kernel's errors count.
    numbers: what `tiles` takes besides. The rest as in flash_attention. public: the operator's name in messages.
    """

    def fake(q, k, v, cu_seqlens_q, *_):
        lse_shape = autograd.lse_shape(q[0], cu_seqlens_q is not None)
        return v.new_empty(*q.shape[1:-1], v.shape[-1]), v.new_empty(lse_shape, dtype=torch.promote_types(v.dtype, torch.float32))

    @dispatch.without_autocast
    def forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, layout: Tensor | None,
        alibi_slopes: Tensor | None, rng_state: Tensor | None, softmax_scale: float, softcap: float, dropout_p: float, window_left: int,
        window_right: int, exact: bool, numbers: list[int],
    ) -> tuple[Tensor, Tensor]:
        dispatch.note(f"{name} forward", "cpu")
        out, lse = fake(q, k, v, cu_seqlens_q)
        out.zero_()
        lse.fill_(-torch.inf)
        for problem in _problems(q, k, cu_seqlens_q, cu_seqlens_k, layout, alibi_slopes, rng_state, softmax_scale, softcap, dropout_p,
                                 window_left, window_right, exact, numbers):
            _attend(problem, tiles, q, k, v, out, lse)
        return out, lse

    @dispatch.without_autocast
    def gradients(
        grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None, layout: Tensor | None, alibi_slopes: Tensor | None, rng_state: Tensor | None, softmax_scale: float,
        softcap: float, dropout_p: float, window_left: int, window_right: int, exact: bool, numbers: list[int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        dispatch.note(f"{name} backward", "cpu")
        dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
        for problem in _problems(q, k, cu_seqlens_q, cu_seqlens_k, layout, alibi_slopes, rng_state, softmax_scale, softcap, dropout_p,
                                 window_left, window_right, exact, numbers):
            _add_gradients(problem, tiles, grad_out, grad_lse, q, k, v, out, lse, dq, dk, dv)
        return dq, dk, dv

    def fake_gradients(grad_out, grad_lse, q, k, v, *_):
        return tuple(x.new_empty(x.shape) for x in (q, k, v))

    def setup_context(ctx, inputs, output):
        tensors, ctx.options = inputs[:8], inputs[8:]
        ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
        ctx.set_materialize_grads(False)

    def backward(gradients, ctx, grad_out, grad_lse):
        tensors = ctx.saved_tensors
        grad_out = torch.zeros_like(tensors[3]) if grad_out is None else grad_out
        return *gradients(grad_out, grad_lse, *tensors, *ctx.options), *(None,) * (5 + len(ctx.options))

    return autograd.differentiable(f"{name}_cpu", public, forward, fake, setup_context, backward, gradients,
                                   autograd.custom_op(f"{name}_cpu_backward", gradients, fake_gradients))


@dataclass(frozen=True)
class _Problem:
    """Queries and keys that meet: rows of a batch, or the tokens of a packed sequence.

    number: their place in the batch. group: query heads of a key head. alibi_slopes: (batch or 1, heads).
    """

    call: Call
    rule: Rule
    number: int
    batch: slice
    tokens_q: slice
    tokens_k: slice
    packed: bool
    heads: int
    group: int
    alibi_slopes: Tensor | None
    rng_state: Tensor | None
    dropout_p: float
    dtype: torch.dtype  # of the computation

    @property
    def way(self) -> ModuleType:
        return fused if self.call.fused else by_hand

    def queries(self, x: Tensor) -> Tensor:
        """(..., batch, heads, seqlen, width) of what lies like q; a view."""
        return self._view(x, self.tokens_q)

    def keys(self, x: Tensor) -> Tensor:
        return self._view(x, self.tokens_k)

    def _view(self, x: Tensor, tokens: slice) -> Tensor:
        x = x.unsqueeze(-4) if self.packed else x
        return x[..., self.batch, tokens, :, :].transpose(-3, -2)

    def rows(self, x: Tensor) -> Tensor:
        """(batch, heads, seqlen) of what lies like the log-sum-exp; a view."""
        return (x.unsqueeze(0) if self.packed else x)[self.batch, :, self.tokens_q]

    def place(self, tile: Tile) -> tuple[tuple[slice, ...], slice]:
        """Of the tile's queries in (batch, heads, seqlen, ...), and its key heads."""
        if tile.head is None:
            return (slice(None), slice(None), tile.rows), slice(None)
        kv_head = tile.head // self.group
        return (slice(None), slice(tile.head, tile.head + 1), tile.rows), slice(kv_head, kv_head + 1)

    def parts(self, tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> list[Inputs]:
        rows, heads = self.place(tile)
        return [Inputs(*(x.to(self.dtype) for x in (q[part.q_copy][rows], k[part.k_copy][:, heads, part.keys], v[:, heads, part.keys])),
                       self._bias(tile.rows, part), part.triangle, self._keep(tile.rows, part.keys)) for part in tile.parts]

    def _keep(self, rows: slice, keys: slice | Tensor) -> tuple[Tensor, float] | None:
        if self.dropout_p == 0:
            return None
        shape = self.batch.stop - self.batch.start, self.heads, rows.stop - rows.start, keys.stop - keys.start
        return keep_mask(self.rng_state, self.dropout_p, shape, (self.number * self.heads, rows.start, keys.start))

    def _bias(self, rows: slice, part: Part) -> Tensor | None:
        bias, dtype = None, torch.promote_types(self.dtype, torch.float32)
        if self.alibi_slopes is not None:
            distance = torch.arange(rows.start, rows.stop)[:, None] + self.call.diagonal - torch.arange(part.keys.start, part.keys.stop)
            bias = -self.alibi_slopes[:, :, None, None].to(dtype) * distance.abs()
        if part.seen is None:
            return bias
        bias = torch.zeros(part.seen.shape, dtype=dtype) if bias is None else bias
        return bias.masked_fill(~part.seen, -torch.inf)


def _problems(q, k, cu_seqlens_q, cu_seqlens_k, layout, alibi_slopes, rng_state, softmax_scale, softcap, dropout_p, window_left,
              window_right, exact, numbers) -> Iterator[_Problem]:
    packed = cu_seqlens_q is not None
    rule = Rule(softmax_scale, softcap)
    if packed:
        bounds = (itertools.pairwise(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k))
        places = [(n, slice(0, 1), slice(*x), slice(*y)) for n, (x, y) in enumerate(zip(*bounds, strict=True))]
    else:
        tokens = slice(0, q.shape[2]), slice(0, k.shape[2])
        batch = q.shape[1]
        by_row = layout is not None and layout.shape[0] > 1
        places = [(n, slice(n, n + 1), *tokens) for n in range(batch)] if by_row else [(0, slice(0, batch), *tokens)]
    is_fused = softcap == 0 and dropout_p == 0 and not exact  # its gradients have up to 2.5 times the error of eager float32
    for number, rows, tokens_q, tokens_k in places:
        len_q, len_k = tokens_q.stop - tokens_q.start, tokens_k.stop - tokens_k.start
        if min(len_q, len_k, rows.stop - rows.start) == 0:
            continue
        own = None if layout is None else layout[number if layout.shape[0] > 1 else 0]
        slopes = None if alibi_slopes is None else alibi_slopes.view(-1, alibi_slopes.shape[-1])
        if packed and slopes is not None and slopes.shape[0] > 1:
            slopes = slopes[number : number + 1]
        call = Call(len_q, len_k, (window_left, window_right), own, is_fused, slopes is not None, numbers)
        yield _Problem(call, rule, number, rows, tokens_q, tokens_k, packed, q.shape[-2], q.shape[-2] // k.shape[-2], slopes, rng_state,
                       dropout_p, torch.float64 if exact and len_k <= FEW_KEYS else q.dtype)


def _attend(problem: _Problem, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    q, k, v, out, lse = problem.queries(q), problem.keys(k), problem.keys(v), problem.queries(out), problem.rows(lse)
    for tile in tiles(problem.call):
        rows, _ = problem.place(tile)
        out[rows], lse[rows] = problem.way.forward(problem.parts(tile, q, k, v), problem.rule)


def _add_gradients(problem: _Problem, tiles: Tiles, grad_out, grad_lse, q, k, v, out, lse, dq, dk, dv) -> None:
    grad_out, q, out, dq = (problem.queries(x) for x in (grad_out, q, out, dq))
    k, v, dk, dv = (problem.keys(x) for x in (k, v, dk, dv))
    lse, grad_lse = problem.rows(lse), None if grad_lse is None else problem.rows(grad_lse)
    for tile in tiles(problem.call):
        rows, heads = problem.place(tile)
        of_rows = (None if x is None else x[rows].to(problem.dtype) for x in (grad_out, grad_lse, out))
        gradients = problem.way.backward(problem.parts(tile, q, k, v), problem.rule, *of_rows, lse[rows])
        for part, (dq_part, dk_part, dv_part) in zip(tile.parts, gradients, strict=True):
            dq[part.q_copy][rows].add_(dq_part)
            _add(dk[part.k_copy][:, heads], part.keys, dk_part)
            _add(dv[:, heads], part.keys, dv_part)


def _add(gradient: Tensor, keys: slice | Tensor, part: Tensor) -> None:
    if isinstance(keys, slice):
        gradient[:, :, keys].add_(part)
    else:
        gradient.index_add_(2, keys, part.to(gradient.dtype))
