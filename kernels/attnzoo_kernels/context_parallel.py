"""Context parallelism: several devices attend to one sequence, each for a part of the queries, by the same operators as one device.

Keys and values are gathered, and each device calls an operator for its own queries over them. Their gradients are summed in float32 in the
order of the ranks. So the forward reads the same keys in the same order as on one device, and no partial outputs are merged.

The tokens of one global order (a packed stream, or the rows of a dense batch) are cut into equal chunks. Each rank holds the same number of
chunks, one after the other (`context_placement`). By default it holds two, such that all ranks have equally many causal pairs of one
sequence. The chunks of packed documents can be dealt by their pairs. The gather is that of Llama 3 (arXiv:2407.21783, section 3.3.2).

    plan = ContextParallel(total, group)
    q, k, v = (plan.shard(x, dim=0) for x in whole)  # or made from the rank's own tokens
    parts = plan.parts(causal=True, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    out = plan.attend(lambda part, q, k, v: flash_attention(q, k, v, causal=True, **part.lengths), (q,), (k, v), parts)

Where the documents' lengths are known on the host:

    plan = ContextParallel(total, group, owned=deal(total, documents, ranks), documents=documents)
    parts = plan.parts(causal=True, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, merge=True)  # one call for all of a rank's chunks
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnzoo_kernels import checks
from attnzoo_kernels.context_gather import Gather, GatherAgain, Gathered, JoinPieces, ReduceGradients, SplitPieces
from attnzoo_kernels.context_placement import Part, Placement, Range

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.12


class ContextParallel(Placement):
    """Attention over the tokens that the ranks of a process group hold, see the module's docstring.

    total, chunk, owned, documents: as in `Placement`; the same on all ranks.
    group: a process group, or a DeviceMesh of one dimension; None for all processes.
    keep_keys: keep the gathered keys and values for the backward; else only the rank's own are kept, and the backward gathers them again.
    """

    def __init__(self, total: int, group: dist.ProcessGroup | DeviceMesh | None = None, *, chunk: int | None = None,
                 owned: Sequence[Sequence[int]] | None = None, documents: Sequence[int] | None = None, keep_keys: bool = False):
        self.group = group.get_group() if isinstance(group, DeviceMesh) else group
        self.keep_keys = keep_keys
        self._exchanges: dict[Any, Exchange] = {}
        super().__init__(total, dist.get_world_size(self.group), dist.get_rank(self.group), chunk, owned, documents)

    def attend(self, attention: Callable[..., Tensor], queries: Sequence[Tensor], keys: Sequence[Tensor],
               parts: Sequence[Part], groups: int = 1, overlap: bool = True) -> Tensor:
        """The outputs of attention(part, *queries, *keys) for all parts, concatenated in the order of the rank's own tokens.

        queries, keys: of the rank's own tokens, (batch, tokens, ...), or (tokens, ...) where the parts are packed. Attention is given a
            part's queries, and of all ranks' keys those that the part sees. Everything that belongs to a query goes with the queries.
        parts: from `parts`. Gradients of `keys` are sums over the ranks, so all ranks must run the backward. Those of anything else that
            `attention` reads, such as weights, are this rank's share.
        groups: heads are attended to in so many groups, one after the other. Queries, keys and output must then have their heads after the
            tokens, and `groups` must divide the numbers of heads. Attention gets one group's heads; for other tensors by head it uses
            `part.own_heads`. All ranks need the same number. With dropout it must be 1, because a mask depends on the number of a head.
        overlap: the keys of the next group and the gradients of the one before are in transit while a group is attended to. False: one
            group after the other, so that only one group's gathered keys and their gradients are in memory.
        """
        checks.integer("groups", groups, 1)
        dim = 0 if parts[0].lengths else 1
        for name, tensors in (("queries", queries), ("keys", keys)):
            for x in tensors:
                if x.dim() <= dim or x.shape[dim] != self.local:
                    raise ValueError(f"{name}: dimension {dim} must be the rank's {self.local} tokens, got shape {tuple(x.shape)}")
                if groups > 1 and (x.dim() <= dim + 1 or x.shape[dim + 1] % groups):
                    raise ValueError(f"groups: must divide the heads, which are dimension {dim + 1} of the {name}, got {groups} and shape "
                                     f"{tuple(x.shape)}")
        gathered = Gathered(self, dim, parts[0].of_ranks, keys, groups, merged=parts[0].keys is None, overlap=overlap)
        n = len(keys)
        links = ReduceGradients.apply(gathered, *keys)
        in_group = self.local // gathered.queries
        pieces = [SplitPieces.apply(gathered, x) for x in queries]
        give_back = not self.keep_keys and torch.is_grad_enabled()
        outs: list[Tensor] = []
        for group, link in enumerate(links):
            seen = Gather.apply(gathered, group, link)
            own = [
                attention(part._replace(head_group=group, head_groups=groups), *(of_x[group * in_group + part.index] for of_x in pieces),
                          *seen[i * n : (i + 1) * n])
                for i, part in enumerate(parts)]
            if give_back and any(out.requires_grad for out in own):
                own = GatherAgain.apply(gathered, group, *own)
            else:
                del gathered.buffers[group], seen  # the attention has saved what it needs
            outs += own
        return JoinPieces.apply(gathered, *outs)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The whole of x along its dimension `dim`, 0 or 1, from the ranks' own parts. Its gradient is the sum over the ranks."""
        gathered = Gathered(self, dim, (((0, self.total),),) * self.ranks, (x,))
        return Gather.apply(gathered, 0, *ReduceGradients.apply(gathered, x))[0]

    def gather_into(self, own: Sequence[Tensor], dim: int, later: bool) -> Callable[[Sequence[Tensor]], None]:
        """Begins to fetch the chunks of all ranks. Returns a function that waits for them and writes whole tensors, in the global order,
        with padding. later: the device may compute meanwhile. All tensors have the same dtype."""
        # (a rank's chunks, ..., chunk, ...), so that chunks of all ranks are rows, whatever else they hold
        own = [x.unflatten(dim, (len(self.chunks), self.chunk)).movedim(dim, 0) for x in own]
        sizes = [x[0].numel() for x in own]
        sent = own[0].contiguous().view(len(self.chunks), -1) if len(own) == 1 else own[0].new_empty(len(self.chunks), sum(sizes))
        if len(own) > 1:
            for rows, x in zip(sent.split(sizes, 1), own, strict=True):
                rows.unflatten(1, x.shape[1:]).copy_(x)
        received = sent.new_empty(self.ranks * len(self.chunks), sum(sizes))
        work = all_gather(received, sent, group=self.group, async_op=later)
        read = sent if later else None

        def finish(into: Sequence[Tensor]) -> None:
            _wait(work, read)
            targets, chunks = [], []
            for whole, rows, x in zip(into, received.split(sizes, 1), own, strict=True):
                batch = math.prod(x.shape[1 : dim + 1])
                for place, target in zip(self.places, whole.view(batch, len(self.places), -1).unbind(1), strict=True):
                    targets += target.unbind()
                    chunks += rows[place].view(batch, -1).unbind()
            # in few launches, and by vectors, where index_select moves one number at a time
            torch._foreach_copy_(targets, chunks)

        return finish

    def exchange_into(self, own: Sequence[Tensor], ranges: Sequence[Sequence[Range]], dim: int,
                      later: bool) -> Callable[[Sequence[Tensor]], None]:
        """Like gather_into, for this rank's ranges only, which are written one after the other. ranges: by rank."""
        exchange = self._exchange(ranges, _widths(own, dim))
        sent, kept = ([own[piece.tensor].narrow(dim, piece.own, piece.size) for piece in pieces]
                      for pieces in (exchange.given.pieces, exchange.kept))
        received = self._send(_joined(sent, own[0]), exchange.given, exchange.seen, later)

        def finish(into: Sequence[Tensor]) -> None:
            of_ranges = [x.split([end - first for first, end in ranges[self.rank]], dim) for x in into]
            targets = [of_ranges[piece.tensor][piece.index].narrow(dim, piece.place, piece.size)
                       for piece in (*exchange.seen.pieces, *exchange.kept)]
            torch._foreach_copy_(targets, [x.view(target.shape) for target, x in zip(targets, (*received(), *kept), strict=True)])

        return finish

    def reduce(self, gradients: Sequence[Sequence[Tensor]], ranges: Sequence[Sequence[Range]], dim: int,
               later: bool) -> Callable[[], list[Tensor]]:
        """Begins to fetch what all ranks have for the rank's own tokens of each tensor. What is returned waits for it and gives the sums.
        gradients: of each tensor, one for each range. ranges: by rank. later: the device may compute meanwhile.

        Gradients travel in their own dtype and are summed up in float32, or float64, in the order of the ranks, so that the sums repeat bit
        by bit.
        """
        like = [of_x[0] for of_x in gradients]
        exchange = self._exchange(ranges, _widths(like, dim))
        sent, kept = ([gradients[piece.tensor][piece.index].narrow(dim, piece.place, piece.size) for piece in pieces]
                      for pieces in (exchange.seen.pieces, exchange.kept))
        received = self._send(_joined(sent, like[0]), exchange.seen, exchange.given, later)
        shapes = [(*x.shape[:dim], self.local, *x.shape[dim + 1 :]) for x in like]
        wide = torch.promote_types(like[0].dtype, torch.float32)
        sizes, own = [x.numel() for x in kept], _joined(kept, like[0])

        def finish() -> list[Tensor]:
            # names no gradient, so that their memory does not wait for the other ranks
            sums = [own.new_zeros(shape, dtype=wide) for shape in shapes]
            found = zip((*exchange.given.pieces, *exchange.kept), (*received(), *own.split(sizes)), strict=True)
            # one addition for each range of a rank, which has each token once; only its numbers are wide in memory meanwhile
            for _, together in itertools.groupby(sorted(found, key=_rank_and_range), _rank_and_range):
                pieces, addends = zip(*together, strict=True)
                targets = [sums[piece.tensor].narrow(dim, piece.own, piece.size) for piece in pieces]
                addends = _joined(addends, own, wide).split([x.numel() for x in addends])
                torch._foreach_add_(targets, [x.view(target.shape) for target, x in zip(targets, addends, strict=True)])
            return sums

        return finish

    def _exchange(self, ranges: Sequence[Sequence[Range]], widths: tuple[int, ...]) -> "Exchange":
        """What travels for these ranges of all ranks. It is found once. widths: of each tensor, the numbers of a token in all rows."""
        if (ranges, widths) not in self._exchanges:
            def pieces(of: int, owner: int) -> list[Piece]:
                other = owner if of == self.rank else of
                return [Piece(other, tensor, *piece) for tensor in range(len(widths)) for piece in self._owned(ranges[of], owner)]

            seen = [pieces(self.rank, rank) if rank != self.rank else [] for rank in range(self.ranks)]
            given = [pieces(rank, self.rank) if rank != self.rank else [] for rank in range(self.ranks)]
            kept = pieces(self.rank, self.rank)
            self._exchanges[ranges, widths] = Exchange(_travel(seen, widths), _travel(given, widths), kept)
        return self._exchanges[ranges, widths]

    def _owned(self, ranges: Sequence[Range], owner: int) -> Iterator[tuple[int, int, int, int]]:
        """What of these ranges a rank owns: a range's index, places in the range and in the owner's own tokens, and the length."""
        for index, (first, end) in enumerate(ranges):
            for place, chunk in enumerate(self.owned[owner]):
                begin, stop = max(first, chunk * self.chunk), min(end, (chunk + 1) * self.chunk)
                if begin < stop:
                    yield index, begin - first, begin + (place - chunk) * self.chunk, stop - begin

    def _send(self, sent: Tensor, there: "Travel", back: "Travel", later: bool) -> Callable[..., Sequence[Tensor]]:
        """Begins to exchange pieces with the other ranks. What is returned waits for theirs, flat. sent: the
        pieces that go there, one after the other."""
        received = sent.new_empty(sum(back.counts))
        work = dist.all_to_all_single(received, sent, back.counts, there.counts, group=self.group, async_op=later)
        read = sent if later else None

        def finish() -> Sequence[Tensor]:
            _wait(work, read)
            return received.split(back.sizes)

        return finish


class Piece(NamedTuple):
    """Tokens of a rank's range that one rank owns, of one tensor.

    rank: the other one, which owns them or whose range it is. index: of the range. place: in the range. own: place in the owner's tokens.
    """

    rank: int
    tensor: int
    index: int
    place: int
    own: int
    size: int


class Travel(NamedTuple):
    """Pieces that go to the other ranks, or come from them, in the order of the ranks; each one's numbers, and each rank's."""

    pieces: list[Piece]
    sizes: list[int]
    counts: list[int]


class Exchange(NamedTuple):
    """What of this rank's ranges the others own, what of their ranges it owns, and what of its own ranges it owns."""

    seen: Travel
    given: Travel
    kept: list[Piece]


def _travel(by_rank: Sequence[Sequence[Piece]], widths: Sequence[int]) -> Travel:
    sizes = [[widths[piece.tensor] * piece.size for piece in pieces] for pieces in by_rank]
    return Travel(list(itertools.chain(*by_rank)), list(itertools.chain(*sizes)), list(map(sum, sizes)))


def _rank_and_range(found: tuple[Piece, Tensor]) -> tuple[int, int]:
    return found[0].rank, found[0].index


def _widths(tensors: Sequence[Tensor], dim: int) -> tuple[int, ...]:
    """Of each tensor, the numbers of a token in all rows."""
    return tuple(x.numel() // x.shape[dim] for x in tensors)


def _joined(pieces: Sequence[Tensor], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Pieces one after the other, flat, in a dtype or that of `like`. It takes few launches where they are contiguous."""
    sizes = [piece.numel() for piece in pieces]
    flat = like.new_empty(sum(sizes), dtype=dtype)
    if pieces:
        torch._foreach_copy_([x.view(piece.shape) for x, piece in zip(flat.split(sizes), pieces, strict=True)], pieces)
    return flat


def _wait(work: dist.Work | None, read: Tensor | None) -> None:
    """The device's current stream, or a CPU's host, waits for a collective. read: what it reads, and must be kept as long."""
    if work is not None:
        work.wait()


def check_alike(group: dist.ProcessGroup | DeviceMesh | None = None, **values: Any) -> None:
    """ValueError on every rank where the ranks of a group have unlike values, naming the first one. Waits for all of them."""
    group = group.get_group() if isinstance(group, DeviceMesh) else group
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, values, group=group)
    for name in dict.fromkeys(name for other in found for name in other):
        if any(other.get(name) != found[0].get(name) for other in found):
            listed = ", ".join(f"{other.get(name)!r} on rank {rank}" for rank, other in enumerate(found))
            raise ValueError(f"{name}: must be the same on all ranks, got {listed}")
