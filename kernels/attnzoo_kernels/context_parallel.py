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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from attnzoo_kernels import checks

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.12
MULTIPLE = 128  # tiles of queries begin in a chunk where they begin on one device


class Part(NamedTuple):
    """One of a rank's two chunks, as queries, and the keys that they may see.

    index: 0 or 1. begin: its first token in the global order. queries: tokens of it. keys: so many of the global order's first tokens.
    causal: whether these end with the chunk.
    lengths: of packed sequences, the arguments cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k of the operators; else empty.
        Every sequence of the stream is in them, in its place. Those before the chunk have keys and no queries, those behind it neither.
    """

    index: int
    begin: int
    queries: int
    keys: int
    causal: bool
    lengths: dict[str, Any]


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

    def parts(self, *, causal: bool, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> tuple[Part, ...]:
        """The rank's two chunks. cu_seqlens, max_seqlen: of the whole packed stream, as the operators take them; None if dense.

        Queries of a chunk are the last ones of the keys up to the chunk's end, so that masks aligned to the bottom right are the whole
        sequence's. Without `causal` all keys are seen, and no mask may depend on positions. The host waits for nothing.
        """
        parts = []
        for index, keys in enumerate(self._keys(self.rank, causal)):
            begin = self.chunks[index] * self.chunk
            lengths = {} if cu_seqlens is None else self._lengths(begin, keys, causal, cu_seqlens, max_seqlen)
            parts.append(Part(index, begin, self.chunk, keys, causal, lengths))
        return tuple(parts)

    def _keys(self, rank: int, causal: bool) -> tuple[int, int]:
        """How many keys a rank's chunks see."""
        return tuple((chunk + 1) * self.chunk if causal else self.total for chunk in (rank, 2 * self.ranks - 1 - rank))

    def _lengths(self, begin: int, keys: int, causal: bool, cu_seqlens: Tensor, max_seqlen: int | None) -> dict[str, Any]:
        return {
            "cu_seqlens_q": (cu_seqlens - begin).clamp(0, self.chunk),
            "cu_seqlens_k": cu_seqlens.clamp(max=keys) if causal else cu_seqlens,
            "max_seqlen_q": None if max_seqlen is None else min(max_seqlen, self.chunk),
            "max_seqlen_k": None if max_seqlen is None else min(max_seqlen, keys)}

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
            part's queries, and of all ranks' keys the first `part.keys`. Everything that belongs to a query goes with the queries.
        parts: from `parts`. Gradients of `keys` are sums over the ranks, so all ranks must run the backward. Those of anything else that
            `attention` reads, such as weights, are this rank's share.
        """
        dim = 0 if parts[0].lengths else 1
        for name, tensors in (("queries", queries), ("keys", keys)):
            for x in tensors:
                if x.dim() <= dim or x.shape[dim] != self.local:
                    raise ValueError(f"{name}: dimension {dim} must be the rank's {self.local} tokens, got shape {tuple(x.shape)}")
        gathered = _Gathered(self, dim, keys)
        n = len(keys)
        counts = [self._keys(rank, parts[0].causal) for rank in range(self.ranks)]
        seen = _Gather.apply(gathered, counts, *keys)
        out = torch.cat([
            attention(part, *(x.narrow(dim, part.index * self.chunk, self.chunk) for x in queries), *seen[i * n : (i + 1) * n])
            for i, part in enumerate(parts)], dim)
        if self.keep_keys or not (torch.is_grad_enabled() and out.requires_grad):
            return out
        gathered.release()
        return _Again.apply(gathered, out)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The whole of x along its dimension `dim`, 0 or 1, whose own part each rank has. Its gradient is the sum over the ranks."""
        return _Gather.apply(_Gathered(self, dim, (x,)), [(self.total,)] * self.ranks, x)[0]

    def gather_into(self, whole: Tensor, x: Tensor, dim: int) -> None:
        """The chunks of all ranks in the global order, with padding."""
        received = x.new_empty(self.ranks * x.shape[0], *x.shape[1:])
        all_gather(received, x.contiguous(), group=self.group)
        # (ranks, ..., 2 chunks, ...) to (..., chunks in the ranks' order, chunk, ...)
        chunks = received.unflatten(0, (self.ranks, -1)).unflatten(dim + 1, (2, self.chunk)).movedim(0, dim).flatten(dim, dim + 1)
        torch.index_select(chunks, dim, self._by_place(x.device), out=whole.view(chunks.shape))

    def reduce(self, gradients: Sequence[Tensor], counts: Sequence[tuple[int, ...]], dim: int) -> Tensor:
        """The rank's own tokens' sum of what all ranks have for the first so many tokens of the global order.

        counts: by rank, how many tokens each of its gradients has. They travel in their own dtype and are summed up in float32, or float64,
        in the order of the ranks, so that the sums repeat bit by bit.
        """
        given = [self._pieces(counts[self.rank], owner) for owner in range(self.ranks)]
        mine = [self._pieces(counts[rank], self.rank) for rank in range(self.ranks)]
        shape, dtype = list(gradients[0].shape), gradients[0].dtype
        shape[dim] = self.local
        own = gradients[0].new_zeros(shape, dtype=torch.promote_types(dtype, torch.float32))
        width = own.numel() // self.local
        sizes = [[width * sum(size for *_, size in pieces) for pieces in ranks] for ranks in (mine, given)]
        sent = torch.cat([gradients[index].narrow(dim, begin, size).flatten() for pieces in given for index, _, begin, size in pieces])
        received = sent.new_empty(sum(sizes[0]))
        dist.all_to_all_single(received, sent, *sizes, group=self.group)
        begin = 0
        for _, half, _, size in (piece for pieces in mine for piece in pieces):
            sums = own.narrow(dim, half * self.chunk, size)
            sums.add_(received[begin : begin + sums.numel()].view(sums.shape))
            begin += sums.numel()
        return own.to(dtype)

    def _pieces(self, counts: tuple[int, ...], owner: int) -> list[tuple[int, int, int, int]]:
        """Of gradients for the first so many tokens, what belongs to a rank: the gradient's index, which of the rank's two chunks it is for,
        where it begins and how long it is."""
        chunks = ((0, owner * self.chunk), (1, (2 * self.ranks - 1 - owner) * self.chunk))
        return [(index, half, begin, min(self.chunk, count - begin)) for index, count in enumerate(counts) for half, begin in chunks
                if count > begin]


class _Gathered:
    """Tensors of all ranks' tokens. Their memory is given back until the backward wants it."""

    def __init__(self, plan: ContextParallel, dim: int, own: Sequence[Tensor]):
        self.plan, self.dim, self.own = plan, dim, tuple(x.detach() for x in own)
        self.whole: tuple[Tensor, ...] = ()

    def gather(self) -> None:
        if not self.whole:
            shapes = ((*x.shape[: self.dim], self.plan.ranks * self.plan.local, *x.shape[self.dim + 1 :]) for x in self.own)
            self.whole = tuple(x.new_empty(shape) for x, shape in zip(self.own, shapes, strict=True))
        for whole, x in zip(self.whole, self.own, strict=True):
            storage = whole.untyped_storage()
            if storage.nbytes() == 0:
                storage.resize_(whole.nbytes)
            # .data, because what autograd saved of them is the same again
            self.plan.gather_into(whole.data, x, self.dim)

    def release(self) -> None:
        for whole in self.whole:
            whole.untyped_storage().resize_(0)


class _Gather(torch.autograd.Function):
    """The first so many tokens of the global order of each tensor, once for each number, so that each use has a gradient of its own."""

    @staticmethod
    def forward(ctx, gathered: _Gathered, counts: Sequence[tuple[int, ...]], *own: Tensor) -> tuple[Tensor, ...]:
        gathered.gather()
        ctx.gathered, ctx.counts = gathered, counts
        return tuple(whole.narrow(gathered.dim, 0, count) for count in counts[gathered.plan.rank] for whole in gathered.whole)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gathered, n = ctx.gathered, len(ctx.gathered.own)
        if not gathered.plan.keep_keys:
            gathered.release()
        own = (gathered.plan.reduce(gradients[i::n], ctx.counts, gathered.dim) if ctx.needs_input_grad[2 + i] else None for i in range(n))
        return None, None, *own


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
    for name in values:
        if any(other.get(name) != found[0].get(name) for other in found):
            listed = ", ".join(f"{other.get(name)!r} on rank {rank}" for rank, other in enumerate(found))
            raise ValueError(f"{name}: must be the same on all ranks, got {listed}")
