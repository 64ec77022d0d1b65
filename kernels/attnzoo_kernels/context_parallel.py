"""Context parallelism: several devices attend to one sequence, each for a part of the queries, by the same operators as one device.

Keys and values are gathered, each device calls an operator for its own queries over them, and their gradients are summed up in float32 in
the order of the ranks. So the forward sees the same keys in the same order as on one device, and no partial outputs are merged.

The tokens of one global order (a packed stream, or the rows of a dense batch) are cut into 2R equal chunks for R ranks. Rank r holds
chunks r and 2R - 1 - r, one behind the other, so that all ranks have equally many causal pairs ("zigzag", Zhu 2024,
github.com/zhuzilin/ring-flash-attention; the gather is that of Llama 3, arXiv:2407.21783, section 3.3.2). Documents need no divisibility:
what is missing in the last chunks is padding, which is not seen by any token and whose outputs mean nothing.

    plan = ContextParallel(total, group)
    q, k, v = (plan.shard(x, dim=0) for x in whole)  # or made from the rank's own tokens
    parts = plan.parts(causal=True, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    out = plan.attend(lambda part, q, k, v: flash_attention(q, k, v, causal=True, **part.lengths), (q,), (k, v), parts)
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from attnzoo_kernels import checks

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.12
Range = tuple[int, int]  # the first token, and the end
MULTIPLE = 128  # tiles of queries begin in a chunk where they begin on one device


class Part(NamedTuple):
    """One of a rank's two chunks, as queries, and the keys that they may see.

    index: 0 or 1. begin: its first token in the global order. queries: tokens of it. keys: the first of them and their end, in that order.
    lengths: of packed sequences, the arguments cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k of the operators; else empty.
        Every sequence of the stream is in them, in its place. Those before the chunk have keys and no queries, those behind it neither.
    of_ranks: `keys` of both parts of every rank.
    """

    index: int
    begin: int
    queries: int
    keys: "Range"
    lengths: dict[str, Any]
    of_ranks: list[tuple["Range", ...]]


class Zigzag:
    """Which rank holds which tokens.

    total: tokens of the global order. ranks, rank: how many there are, and which one this is.
    chunk: tokens of a chunk, by default total / 2R rounded up to a multiple of 128.
    """

    def __init__(self, total: int, ranks: int, rank: int, chunk: int | None = None):
        checks.integer("total", total, 1)
        checks.integer("ranks", ranks, 1)
        checks.integer("rank", rank, 0)
        if rank >= ranks:
            raise ValueError(f"rank: must be below the {ranks} ranks, got {rank}")
        if chunk is None:
            chunk = -(-total // (2 * ranks * MULTIPLE)) * MULTIPLE
        checks.integer("chunk", chunk, 1)
        if 2 * ranks * chunk < total:
            raise ValueError(f"chunk: 2 x {ranks} ranks of {chunk} tokens must hold the {total} tokens")
        self.total, self.ranks, self.rank, self.chunk = total, ranks, rank, chunk
        self.chunks = (rank, 2 * ranks - 1 - rank)

    @property
    def local(self) -> int:
        """Tokens of a rank, with padding."""
        return 2 * self.chunk

    def shard(self, x: Tensor, dim: int, fill: float = 0) -> Tensor:
        """The rank's own part of x along its dimension `dim`, `total` long: 2 chunks, with `fill` behind the last token."""
        if x.shape[dim] != self.total:
            raise ValueError(f"x: dimension {dim} must be the {self.total} tokens of the global order, got shape {tuple(x.shape)}")
        pieces = []
        for chunk in self.chunks:
            begin = min(chunk * self.chunk, self.total)
            piece = x.narrow(dim, begin, min(self.chunk, self.total - begin))
            if missing := self.chunk - piece.shape[dim]:
                shape = list(x.shape)
                shape[dim] = missing
                piece = torch.cat([piece, x.new_full(shape, fill)], dim)
            pieces.append(piece)
        return torch.cat(pieces, dim)

    def parts(self, *, causal: bool, window: int = -1, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> tuple[Part, ...]:
        """The rank's two chunks.

        causal: queries of a chunk are the last ones of the keys up to the chunk's end, so that masks aligned to the bottom right are the
            whole sequence's. Otherwise all keys are seen, and no mask may depend on positions.
        window: so many keys before its own does a causal query see at most; -1 is unlimited. What lies before is not gathered.
        cu_seqlens, max_seqlen: of the whole packed stream, as the operators take them; None if dense. The host waits for nothing.
        """
        checks.integer("window", window, -1)
        if window >= 0 and not causal:
            raise ValueError(f"window: must be -1 without causal, got {window}")
        of_ranks = [tuple(self._keys(chunk, causal, window) for chunk in (rank, 2 * self.ranks - 1 - rank)) for rank in range(self.ranks)]
        parts = []
        for index, keys in enumerate(of_ranks[self.rank]):
            begin = self.chunks[index] * self.chunk
            lengths = {} if cu_seqlens is None else self._lengths(begin, keys, cu_seqlens, max_seqlen)
            parts.append(Part(index, begin, self.chunk, keys, lengths, of_ranks))
        return tuple(parts)

    def _keys(self, chunk: int, causal: bool, window: int) -> Range:
        """The keys that a chunk's queries see."""
        if not causal:
            return 0, self.total
        # tiles of keys begin where they begin without a window
        step = math.gcd(self.chunk, MULTIPLE)
        return max(0, (chunk * self.chunk - window) // step * step) if window >= 0 else 0, (chunk + 1) * self.chunk

    def _lengths(self, begin: int, keys: Range, cu_seqlens: Tensor, max_seqlen: int | None) -> dict[str, Any]:
        first, end = keys
        return {
            "cu_seqlens_q": (cu_seqlens - begin).clamp(0, self.chunk),
            "cu_seqlens_k": (cu_seqlens - first).clamp(0, end - first),
            "max_seqlen_q": None if max_seqlen is None else min(max_seqlen, self.chunk),
            "max_seqlen_k": None if max_seqlen is None else min(max_seqlen, end - first)}

    def _by_place(self, device: torch.device) -> Tensor:
        """Where in the order of the ranks each chunk stands, int64 (2R,)."""
        chunk = torch.arange(2 * self.ranks, device=device)
        high = chunk >= self.ranks
        return 2 * torch.where(high, 2 * self.ranks - 1 - chunk, chunk) + high


class ContextParallel(Zigzag):
    """Attention over the tokens that the ranks of a process group hold, see the module's docstring.

    total, chunk: as in `Zigzag`; the same on all ranks.
    group: a process group, or a DeviceMesh of one dimension; None for all processes.
    keep_keys: keep the gathered keys and values for the backward. Else only the rank's own ones are kept, and the backward gathers again.
    """

    def __init__(self, total: int, group: dist.ProcessGroup | DeviceMesh | None = None, *, chunk: int | None = None,
                 keep_keys: bool = False):
        self.group = group.get_group() if isinstance(group, DeviceMesh) else group
        self.keep_keys = keep_keys
        super().__init__(total, dist.get_world_size(self.group), dist.get_rank(self.group), chunk)

    def attend(self, attention: Callable[..., Tensor], queries: Sequence[Tensor], keys: Sequence[Tensor],
               parts: Sequence[Part]) -> Tensor:
        """attention(part, *queries, *keys) of both parts, one behind the other like the rank's own tokens.

        queries, keys: of the rank's own tokens, (batch, 2 chunks, ...), or (2 chunks, ...) where the parts are packed. Attention is given a
            part's queries, and of all ranks' keys `part.keys`. Everything that belongs to a query goes with the queries.
        parts: from `parts`. Gradients of `keys` are sums over the ranks, so all ranks must run the backward. Those of anything else that
            `attention` reads, such as weights, are this rank's share.
        """
        dim = 0 if parts[0].lengths else 1
        for name, tensors in (("queries", queries), ("keys", keys)):
            for x in tensors:
                if x.dim() <= dim or x.shape[dim] != self.local:
                    raise ValueError(f"{name}: dimension {dim} must be the rank's {self.local} tokens, got shape {tuple(x.shape)}")
        gathered = _Gathered(self, dim, parts[0].of_ranks, keys)
        n = len(keys)
        seen = _Gather.apply(gathered, *keys)
        out = torch.cat([
            attention(part, *(x.narrow(dim, part.index * self.chunk, self.chunk) for x in queries), *seen[i * n : (i + 1) * n])
            for i, part in enumerate(parts)], dim)
        if self.keep_keys or not (torch.is_grad_enabled() and out.requires_grad):
            return out
        gathered.release()
        return _Again.apply(gathered, out)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The whole of x along its dimension `dim`, 0 or 1, whose own part each rank has. Its gradient is the sum over the ranks."""
        return _Gather.apply(_Gathered(self, dim, [((0, self.total),)] * self.ranks, (x,)), x)[0]

    def gather_into(self, whole: Tensor, x: Tensor, dim: int) -> None:
        """The chunks of all ranks in the global order, with padding."""
        received = x.new_empty(self.ranks * x.shape[0], *x.shape[1:])
        all_gather(received, x.contiguous(), group=self.group)
        # (ranks, ..., 2 chunks, ...) to (..., chunks in the ranks' order, chunk, ...)
        chunks = received.unflatten(0, (self.ranks, -1)).unflatten(dim + 1, (2, self.chunk)).movedim(0, dim).flatten(dim, dim + 1)
        torch.index_select(chunks, dim, self._by_place(x.device), out=whole.view(chunks.shape))

    def exchange_into(self, seen: Sequence[Tensor], x: Tensor, ranges: Sequence[Sequence[Range]], dim: int) -> None:
        """Of the ranks' x what this rank's ranges are. ranges: by rank."""
        given = [self._pieces(ranges[rank], self.rank) for rank in range(self.ranks)]
        mine = [self._pieces(ranges[self.rank], owner) for owner in range(self.ranks)]
        sent = [x.narrow(dim, own, size) for pieces in given for _, _, own, size in pieces]
        targets = [seen[index].narrow(dim, place, size) for pieces in mine for index, place, _, size in pieces]
        for target, received in zip(targets, self._exchange(sent, given, mine, x), strict=True):
            target.copy_(received.view(target.shape))

    def reduce(self, gradients: Sequence[Tensor], ranges: Sequence[Sequence[Range]], dim: int) -> Tensor:
        """The rank's own tokens' sum of what all ranks have for their ranges. ranges: by rank, one for each of its gradients.

        Gradients travel in their own dtype and are summed up in float32, or float64, in the order of the ranks, so that the sums repeat bit
        by bit.
        """
        given = [self._pieces(ranges[self.rank], owner) for owner in range(self.ranks)]
        mine = [self._pieces(ranges[rank], self.rank) for rank in range(self.ranks)]
        shape, dtype = list(gradients[0].shape), gradients[0].dtype
        shape[dim] = self.local
        sums = gradients[0].new_zeros(shape, dtype=torch.promote_types(dtype, torch.float32))
        sent = [gradients[index].narrow(dim, place, size) for pieces in given for index, place, _, size in pieces]
        targets = [sums.narrow(dim, own, size) for pieces in mine for _, _, own, size in pieces]
        for target, received in zip(targets, self._exchange(sent, given, mine, sums), strict=True):
            target.add_(received.view(target.shape))
        return sums.to(dtype)

    def _pieces(self, ranges: Sequence[Range], owner: int) -> list[tuple[int, int, int, int]]:
        """What of these ranges a rank owns: a range's index, places in the range and in the owner's own tokens, and the length."""
        pieces = []
        for index, (first, end) in enumerate(ranges):
            for half, chunk in enumerate((owner, 2 * self.ranks - 1 - owner)):
                begin, stop = max(first, chunk * self.chunk), min(end, (chunk + 1) * self.chunk)
                if begin < stop:
                    pieces.append((index, begin - first, begin + (half - chunk) * self.chunk, stop - begin))
        return pieces

    def _exchange(self, sent: Sequence[Tensor], given: Sequence, mine: Sequence, like: Tensor) -> Sequence[Tensor]:
        """The pieces that the other ranks send, flat. given, mine: by rank, what goes there and what comes. like: (..., tokens, ...)."""
        width = like.numel() // self.local
        lengths = [[[width * size for *_, size in pieces] for pieces in ranks] for ranks in (mine, given)]
        flat = torch.cat([x.flatten() for x in sent])  # never empty: a rank sees its own tokens
        received = flat.new_empty(sum(map(sum, lengths[0])))
        dist.all_to_all_single(received, flat, *([sum(pieces) for pieces in ranks] for ranks in lengths), group=self.group)
        return received.split([n for pieces in lengths[0] for n in pieces])


class _Gathered:
    """Ranges of the tokens of all ranks, by rank, of each of some tensors. Their memory is given back until the backward wants it."""

    def __init__(self, plan: ContextParallel, dim: int, ranges: Sequence[Sequence[Range]], own: Sequence[Tensor]):
        self.plan, self.dim, self.ranges, self.own = plan, dim, ranges, tuple(x.detach() for x in own)
        most = max(sum(end - first for first, end in of_rank) for of_rank in ranges)
        # else each range comes by itself, where that is less
        self.all = most >= plan.ranks * plan.local or not any(first for of_rank in ranges for first, _ in of_rank)
        self.buffers: list[list[Tensor]] = []  # of each tensor, the whole or its ranges

    def gather(self) -> None:
        for i, x in enumerate(self.own):
            if len(self.buffers) == i:
                lengths = [self.plan.ranks * self.plan.local] if self.all else [end - first for first, end in self.ranges[self.plan.rank]]
                self.buffers.append([x.new_empty(*x.shape[: self.dim], length, *x.shape[self.dim + 1 :]) for length in lengths])
            for buffer in self.buffers[i]:
                if buffer.untyped_storage().nbytes() == 0:
                    buffer.untyped_storage().resize_(buffer.nbytes)
            # .data, because what autograd saved of them is the same again
            into = [buffer.data for buffer in self.buffers[i]]
            if self.all:
                self.plan.gather_into(into[0], x, self.dim)
            else:
                self.plan.exchange_into(into, x, self.ranges, self.dim)

    def seen(self) -> tuple[Tensor, ...]:
        """This rank's ranges, of all tensors one after the other."""
        return tuple(buffers[0].narrow(self.dim, first, end - first) if self.all else buffers[index]
                     for index, (first, end) in enumerate(self.ranges[self.plan.rank]) for buffers in self.buffers)

    def release(self) -> None:
        for buffer in (buffer for buffers in self.buffers for buffer in buffers):
            buffer.untyped_storage().resize_(0)


class _Gather(torch.autograd.Function):
    """A rank's ranges of each tensor; each has a gradient of its own."""

    @staticmethod
    def forward(ctx, gathered: _Gathered, *own: Tensor) -> tuple[Tensor, ...]:
        gathered.gather()
        ctx.gathered = gathered
        return gathered.seen()

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gathered, n = ctx.gathered, len(ctx.gathered.own)
        if not gathered.plan.keep_keys:
            gathered.release()
        own = (gathered.plan.reduce(gradients[i::n], gathered.ranges, gathered.dim) if ctx.needs_input_grad[1 + i] else None
               for i in range(n))
        return None, *own


class _Again(torch.autograd.Function):
    """The identity, whose backward gathers again what the attention before it has saved."""

    @staticmethod
    def forward(ctx, gathered: _Gathered, out: Tensor) -> Tensor:
        ctx.gathered = gathered
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.gathered.gather()
        return None, gradient


def check_alike(group: dist.ProcessGroup | DeviceMesh | None = None, **values: Any) -> None:
    """ValueError on every rank where the ranks of a group have unlike values, naming the first one. Waits for all of them."""
    group = group.get_group() if isinstance(group, DeviceMesh) else group
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, values, group=group)
    for name in dict.fromkeys(name for other in found for name in other):
        if any(other.get(name) != found[0].get(name) for other in found):
            listed = ", ".join(f"{other.get(name)!r} on rank {rank}" for rank, other in enumerate(found))
            raise ValueError(f"{name}: must be the same on all ranks, got {listed}")
