"""Context parallelism: several devices attend to one sequence, each for a part of the queries, by the same operators as one device.

Keys and values are gathered, each device calls an operator for its own queries over them, and their gradients are summed up in float32 in
the order of the ranks. So the forward sees the same keys in the same order as on one device, and no partial outputs are merged.

The tokens of one global order (a packed stream, or the rows of a dense batch) are cut into equal chunks. Each rank holds equally many of
them, one behind the other (`context_placement`): by default two, so that all ranks have equally many causal pairs of one sequence. The
chunks of packed documents can be dealt by their pairs. The gather is that of Llama 3 (arXiv:2407.21783, section 3.3.2).

    plan = ContextParallel(total, group)
    q, k, v = (plan.shard(x, dim=0) for x in whole)  # or made from the rank's own tokens
    parts = plan.parts(causal=True, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    out = plan.attend(lambda part, q, k, v: flash_attention(q, k, v, causal=True, **part.lengths), (q,), (k, v), parts)

Where the documents' lengths are known on the host:

    plan = ContextParallel(total, group, owned=deal(total, documents, ranks), documents=documents)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from attnzoo_kernels.context_placement import Part, Placement, Range

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.12


class ContextParallel(Placement):
    """Attention over the tokens that the ranks of a process group hold, see the module's docstring.

    total, chunk, owned, documents: as in `Placement`; the same on all ranks.
    group: a process group, or a DeviceMesh of one dimension; None for all processes.
    keep_keys: keep the gathered keys and values for the backward. Else only the rank's own ones are kept, and the backward gathers again.
    """

    def __init__(self, total: int, group: dist.ProcessGroup | DeviceMesh | None = None, *, chunk: int | None = None,
                 owned: Sequence[Sequence[int]] | None = None, documents: Sequence[int] | None = None, keep_keys: bool = False):
        self.group = group.get_group() if isinstance(group, DeviceMesh) else group
        self.keep_keys = keep_keys
        super().__init__(total, dist.get_world_size(self.group), dist.get_rank(self.group), chunk, owned, documents)

    def attend(self, attention: Callable[..., Tensor], queries: Sequence[Tensor], keys: Sequence[Tensor],
               parts: Sequence[Part]) -> Tensor:
        """attention(part, *queries, *keys) of all parts, one behind the other like the rank's own tokens.

        queries, keys: of the rank's own tokens, (batch, tokens, ...), or (tokens, ...) where the parts are packed. Attention is given a
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
        # (ranks, ..., a rank's chunks, ...) to (..., chunks in the ranks' order, chunk, ...)
        each = (len(self.chunks), self.chunk)
        chunks = received.unflatten(0, (self.ranks, -1)).unflatten(dim + 1, each).movedim(0, dim).flatten(dim, dim + 1)
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
            for place, chunk in enumerate(self.owned[owner]):
                begin, stop = max(first, chunk * self.chunk), min(end, (chunk + 1) * self.chunk)
                if begin < stop:
                    pieces.append((index, begin - first, begin + (place - chunk) * self.chunk, stop - begin))
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
