"""Attention by tiles of queries, behind autograd. An operator gives a generator of its tiles.

Forward and backward go through the tiles one after the other. The backward computes a tile's scores again, so that memory stays linear in
the lengths. Everything is computed in the tensors' dtype; an operator converts 16-bit tensors to a wider dtype where it adds up several
results.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels import autograd, checks, dispatch
from attnzoo_kernels._cpu import by_hand, fused
from attnzoo_kernels._cpu.gates import Gates
from attnzoo_kernels._cpu.part import Inputs, Rule
from attnzoo_kernels._cpu.tiles import Call, Part, Tile, numbers_of
from attnzoo_kernels.dropout import keep_mask

FEW = 64  # up to so many keys (for gradients: or queries) float32 is computed in float64; there each rounding beyond eager's is visible

Tiles = Callable[[Call], Iterator[Tile]]


def operator(name: str, public: str, tiles: Tiles, way: ModuleType | None = None) -> Callable:
    """Makes attend(q, k, v, ...), which gives output and log-sum-exp. Under torch.compile it is `attnzoo::<name>_cpu`.

    tiles: the generator of tiles. way: the module that computes a tile; None: for softmax, `fused` or `by_hand`. public: the operator's
    name in messages.
    """

    def fake(q, k, v, log_f, cu_seqlens_q, *_):
        lse_shape = autograd.lse_shape(q[0], cu_seqlens_q is not None)
        return v.new_empty(*q.shape[1:-1], v.shape[-1]), v.new_empty(lse_shape, dtype=torch.promote_types(v.dtype, torch.float32))

    @dispatch.without_autocast
    def forward(
        q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
        layout: Tensor | None, blocks: Tensor | None, alibi_slopes: Tensor | None, rng_state: Tensor | None, table: Tensor | None,
        softmax_scale: float, softcap: float, score_bias: float | None, dropout_p: float, window_left: int, window_right: int, exact: bool,
        numbers: list[int],
    ) -> tuple[Tensor, Tensor]:
        dispatch.note(f"{name} forward", "cpu")
        out, lse = fake(q, k, v, log_f, cu_seqlens_q)
        out.zero_()
        lse.fill_(-torch.inf)
        for problem in _problems(way, q, k, log_f, cu_seqlens_q, cu_seqlens_k, layout, blocks, alibi_slopes, rng_state, table,
                                 softmax_scale, softcap, score_bias, dropout_p, window_left, window_right, exact, numbers):
            _attend(problem, tiles, q, k, v, out, lse)
        return out, lse

    @dispatch.without_autocast
    def gradients(
        grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, log_f: Tensor | None,
        cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, layout: Tensor | None, blocks: Tensor | None,
        alibi_slopes: Tensor | None, rng_state: Tensor | None, table: Tensor | None, softmax_scale: float, softcap: float,
        score_bias: float | None, dropout_p: float, window_left: int, window_right: int, exact: bool, numbers: list[int],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        dispatch.note(f"{name} backward", "cpu")
        dq, dk, dv, dlog_f, dtable = (q.new_zeros(0) if x is None else x.new_zeros(x.shape) for x in (q, k, v, log_f, table))
        dtable = dtable.double()
        for problem in _problems(way, q, k, log_f, cu_seqlens_q, cu_seqlens_k, layout, blocks, alibi_slopes, rng_state, table,
                                 softmax_scale, softcap, score_bias, dropout_p, window_left, window_right, exact, numbers, backward=True):
            _add_gradients(problem, tiles, grad_out, grad_lse, q, k, v, out, lse, dq, dk, dv, dlog_f, dtable)
        return dq, dk, dv, dlog_f, dtable.to(q.dtype if table is None else table.dtype)

    def fake_gradients(grad_out, grad_lse, q, k, v, out, lse, log_f, cu_seqlens_q, cu_seqlens_k, layout, blocks, alibi_slopes, rng_state,
                       table, *_):
        return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, log_f, table))

    def setup_context(ctx, inputs, output):
        tensors, ctx.options = inputs[:11], inputs[11:]
        ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
        ctx.set_materialize_grads(False)

    def backward(gradients, ctx, grad_out, grad_lse):
        tensors = ctx.saved_tensors
        grad_out = torch.zeros_like(tensors[3]) if grad_out is None else grad_out
        dq, dk, dv, dlog_f, dtable = gradients(grad_out, grad_lse, *tensors, *ctx.options)
        return (dq, dk, dv, None if tensors[5] is None else dlog_f, *(None,) * 6, None if tensors[12] is None else dtable,
                *(None,) * len(ctx.options))

    differentiable = autograd.differentiable(f"{name}_cpu", public, forward, fake, setup_context, backward, gradients,
                                             autograd.custom_op(f"{name}_cpu_backward", gradients, fake_gradients))

    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, softmax_scale: float, exact: bool,
        window_size: tuple[int, int] = (-1, -1), log_f: Tensor | None = None, layout: Tensor | None = None,
        blocks: Tensor | None = None, alibi_slopes: Tensor | None = None, rng_state: Tensor | None = None, softcap: float = 0.0,
        score_bias: float | None = None, dropout_p: float = 0.0, table: Tensor | None = None, numbers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """q, k: (copies, batch, seqlen, heads, width) or (copies, total, heads, width); v has no copies. exact: whether the caller's
        tensors are float32 or wider, for which the fused kernel is not exact enough. log_f: as in forgetting_attention, with gradient.
        layout: bool (batch or 1, heads or 1, q_blocks, k_blocks). blocks: as in routed_attention. score_bias: as sigmoid_bias in
        sigmoid_attention. table: as bias in distance_bias_attention, with gradient, by hand only; its origin is the first of the numbers.
        numbers: what `tiles` needs besides. The rest is as in flash_attention."""
        softmax_scale, q = checks.positive_scale(softmax_scale, q)  # the fused kernel masks before it scales
        return differentiable(q, k, v, log_f, cu_seqlens_q, cu_seqlens_k, layout, blocks, alibi_slopes, rng_state, table, softmax_scale,
                              softcap, score_bias, dropout_p, *window_size, exact, list(numbers))

    return attend


@dataclass(frozen=True)
class _Problem:
    """Queries and keys that belong together: rows of a batch, or the tokens of one packed sequence.

    number: its place in the batch. group: query heads of a key head. alibi_slopes: (batch or 1, heads).
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
    table: Tensor | None
    dropout_p: float
    dtype: torch.dtype  # in which it is computed
    way: ModuleType

    def queries(self, x: Tensor) -> Tensor:
        """(..., batch, heads, seqlen, width), a view, of a tensor laid out as q is."""
        return self._view(x, self.tokens_q)

    def keys(self, x: Tensor) -> Tensor:
        return self._view(x, self.tokens_k)

    def _view(self, x: Tensor, tokens: slice) -> Tensor:
        x = x.unsqueeze(-4) if self.packed else x
        return x[..., self.batch, tokens, :, :].transpose(-3, -2)

    def rows(self, x: Tensor) -> Tensor:
        """(batch, heads, seqlen), a view, of a tensor laid out as the log-sum-exp is."""
        return (x.unsqueeze(0) if self.packed else x)[self.batch, :, self.tokens_q]

    def key_heads(self, tile: Tile) -> slice:
        if tile.heads == slice(None):
            return tile.heads
        return slice(tile.heads.start // self.group, (tile.heads.stop - 1) // self.group + 1)

    def parts(self, tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> list[Inputs]:
        heads = self.key_heads(tile)
        return [Inputs(*(x.to(self.dtype) for x in (_rows_of(q[part.q_copy], tile), k[part.k_copy][:, heads, part.keys],
                                                    v[:, heads, part.keys])),
                       self._bias(tile.rows, part), part.triangle, self._keep(tile.rows, part.keys),
                       self._gates(tile.rows, part.keys, tile.heads)) for part in tile.parts]

    def positions(self, rows: slice) -> slice:
        """The queries' own keys."""
        return slice(rows.start + self.call.diagonal, rows.stop + self.call.diagonal)

    def entries(self, rows: slice, keys: slice) -> Tensor:
        """The table's entries for a tile's diagonals, from that of the first row and last key to that of the last row and first key."""
        first = self.call.numbers[0] + self.call.diagonal
        return numbers_of(slice(first + rows.start - keys.stop + 1, first + rows.stop - keys.start)).clamp(0, self.table.shape[1] - 1)

    def _gates(self, rows: slice, keys: slice | Tensor, heads: slice) -> tuple[Tensor, Tensor] | None:
        return None if self.call.gates is None else self.call.gates.of(self.positions(rows), keys, heads)

    def _keep(self, rows: slice, keys: slice | Tensor) -> tuple[Tensor, float] | None:
        if self.dropout_p == 0:
            return None
        shape = self.batch.stop - self.batch.start, self.heads, rows.stop - rows.start, keys.stop - keys.start
        return keep_mask(self.rng_state, self.dropout_p, shape, (self.number * self.heads, rows.start, keys.start))

    def _bias(self, rows: slice, part: Part) -> Tensor | None:
        bias, dtype = None, torch.promote_types(self.dtype, torch.float32)
        if self.alibi_slopes is not None:
            distance = numbers_of(rows)[:, None] + self.call.diagonal - numbers_of(part.keys)
            bias = -self.alibi_slopes[:, :, None, None].to(dtype) * distance.abs()
        if self.table is not None:
            bias = self.table[:, self.entries(rows, part.keys)].to(dtype).unfold(1, part.keys.stop - part.keys.start, 1).flip(-1)
        if part.seen is None:
            return bias
        bias = torch.zeros(part.seen.shape, dtype=dtype, device="cpu") if bias is None else bias
        return bias.masked_fill(~part.seen, -torch.inf)


def _problems(way, q, k, log_f, cu_seqlens_q, cu_seqlens_k, layout, blocks, alibi_slopes, rng_state, table, softmax_scale,
              softcap, score_bias, dropout_p, window_left, window_right, exact, numbers, backward=False) -> Iterator[_Problem]:
    packed = cu_seqlens_q is not None
    if packed:
        bounds = (itertools.pairwise(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k))
        places = [(n, slice(0, 1), slice(*x), slice(*y)) for n, (x, y) in enumerate(zip(*bounds, strict=True))]
    else:
        tokens = slice(0, q.shape[2]), slice(0, k.shape[2])
        batch = q.shape[1]
        by_row = blocks is not None or layout is not None and layout.shape[0] > 1
        places = [(n, slice(n, n + 1), *tokens) for n in range(batch)] if by_row else [(0, slice(0, batch), *tokens)]
    # not exact: the fused kernel's gradients have up to 2.5 times the error of eager float32
    is_fused = way is None and softcap == 0 and dropout_p == 0 and not exact
    for number, rows, tokens_q, tokens_k in places:
        len_q, len_k = tokens_q.stop - tokens_q.start, tokens_k.stop - tokens_k.start
        if min(len_q, len_k, rows.stop - rows.start) == 0:
            continue
        own = None if layout is None else layout[number if layout.shape[0] > 1 else 0]
        slopes = None if alibi_slopes is None else alibi_slopes.view(-1, alibi_slopes.shape[-1])
        if packed and slopes is not None and slopes.shape[0] > 1:
            slopes = slopes[number : number + 1]
        rule = Rule(softmax_scale, softcap, -math.log(len_k) if score_bias is None else score_bias)
        gates = None if log_f is None else _gates(log_f, q, k, packed, rows, tokens_q, tokens_k, softmax_scale)
        chosen = None if blocks is None else blocks[tokens_q] if packed else blocks[number]
        call = Call(len_q, len_k, (window_left, window_right), own, chosen, q.shape[-2], is_fused, slopes is not None, gates, numbers)
        yield _Problem(call, rule, number, rows, tokens_q, tokens_k, packed, q.shape[-2], q.shape[-2] // k.shape[-2], slopes, rng_state,
                       table, dropout_p, torch.float64 if exact and (len_k <= FEW or backward and len_q <= FEW) else q.dtype,
                       way or (fused if is_fused else by_hand))


def _gates(log_f: Tensor, q: Tensor, k: Tensor, packed: bool, batch: slice, tokens_q: slice, tokens_k: slice,
           softmax_scale: float) -> Gates:
    log_f, q, k = (x.unsqueeze(0) if packed else x for x in (log_f, q[0], k[0]))
    return Gates.summed(log_f[batch, tokens_k], *(x[batch, tokens].transpose(1, 2) for x, tokens in ((q, tokens_q), (k, tokens_k))),
                        softmax_scale)


def _attend(problem: _Problem, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    q, k, v, out, lse = problem.queries(q), problem.keys(k), problem.keys(v), problem.queries(out), problem.rows(lse)
    for tile in tiles(problem.call):
        results = problem.way.forward(problem.parts(tile, q, k, v), problem.rule)
        if isinstance(tile.rows, slice):
            _rows_of(out, tile)[:], _rows_of(lse, tile)[:] = results
        else:
            _join(out, lse, tile, *results)


def _join(out: Tensor, lse: Tensor, tile: Tile, more: Tensor, more_lse: Tensor) -> None:
    """Merges further results of a tile's queries into those so far. Each of these queries sees some further key, so that more_lse is
    finite."""
    before = _rows_of(lse, tile)
    share = torch.sigmoid(more_lse - before).unsqueeze(-1)
    out[:, tile.heads].index_copy_(2, tile.rows, torch.lerp(_rows_of(out, tile), more, share))
    lse[:, tile.heads].index_copy_(2, tile.rows, torch.logaddexp(before, more_lse))


def _add_gradients(problem: _Problem, tiles: Tiles, grad_out, grad_lse, q, k, v, out, lse, dq, dk, dv, dlog_f, dtable) -> None:
    grad_out, q, out, dq = (problem.queries(x) for x in (grad_out, q, out, dq))
    k, v, dk, dv = (problem.keys(x) for x in (k, v, dk, dv))
    lse, grad_lse = problem.rows(lse), None if grad_lse is None else problem.rows(grad_lse)
    gates = problem.call.gates
    dc = None if gates is None else torch.zeros_like(gates.c)
    for tile in tiles(problem.call):
        heads = problem.key_heads(tile)
        of_rows = (None if x is None else _rows_of(x, tile).to(problem.dtype) for x in (grad_out, grad_lse, out))
        gradients = problem.way.backward(problem.parts(tile, q, k, v), problem.rule, *of_rows, _rows_of(lse, tile))
        for part, own in zip(tile.parts, gradients, strict=True):
            _add(dq[part.q_copy][:, tile.heads], tile.rows, own.q)
            _add(dk[part.k_copy][:, heads], part.keys, own.k)
            _add(dv[:, heads], part.keys, own.v)
            if problem.table is not None:
                # row i is shifted by i, so that diagonals become columns
                skewed = F.pad(own.scores.sum(0).flip(-1), (0, own.scores.shape[-2])).flatten(1)[:, : -own.scores.shape[-2]]
                dtable.index_add_(1, problem.entries(tile.rows, part.keys),
                                  skewed.unflatten(1, (own.scores.shape[-2], -1)).sum(1, dtype=dtable.dtype))
            if dc is not None:
                dc[:, tile.heads, problem.positions(tile.rows)] += own.rows
                dc[:, tile.heads, part.keys] -= own.columns
    if dc is not None:
        problem.keys(dlog_f.unsqueeze(-1))[..., 0].copy_(dc.flip(-1).cumsum(-1).flip(-1))


def _rows_of(x: Tensor, tile: Tile) -> Tensor:
    """A tile's queries in (batch, heads, seqlen, ...); a view if they are a slice."""
    x = x[:, tile.heads]
    return x[:, :, tile.rows] if isinstance(tile.rows, slice) else x.index_select(2, tile.rows)


def _add(gradient: Tensor, tokens: slice | Tensor, part: Tensor) -> None:
    if isinstance(tokens, slice):
        gradient[:, :, tokens].add_(part)
    else:  # no index occurs twice, so this is right, and index_add_ would be slow: it goes token by token
        gradient.index_copy_(2, tokens, gradient.index_select(2, tokens).add_(part))
