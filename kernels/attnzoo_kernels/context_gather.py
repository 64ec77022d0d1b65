"""How `context_parallel.attend` uses autograd: it gathers all ranks' keys in the forward and again in the backward, and sums gradients.

With groups of heads that overlap, the collectives of one group are in transit while another group is attended to. Autograd runs nodes that
are ready from the newest to the oldest, so the backward has the groups in reverse order, on all ranks alike:

    ReduceGradients   forward: nothing                                        backward: the last sums, of all groups
    Gather            forward: waits for its group, begins the next one       backward: begins to exchange its group's gradients
    attention
    GatherAgain       forward: gives the memory back                          backward: waits for its group, begins the one before
    JoinPieces        forward: one tensor of all groups' outputs              backward: nothing

Between the passes the graph keeps tensors only where autograd saves them. So activation checkpointing, which saves none, has nothing of its
blocks in memory.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from attnzoo_kernels.context_parallel import ContextParallel, Range


class Gathered:
    """The token ranges that each rank needs, gathered from all ranks, for some tensors (such as keys and values), by groups of heads.

    merged: a rank has one part, which sees all of its ranges. overlap: while one group is attended to, the next one is fetched, and the
        gradients of the one before are in transit.
    own, buffers: the rank's own tensors, and by group and tensor what was gathered: all tokens, or one range after the other. Between the
        passes `GatherAgain` has them.
    """

    def __init__(self, plan: "ContextParallel", dim: int, ranges: Sequence[Sequence["Range"]], own: Sequence[Tensor], groups: int = 1,
                 merged: bool = False, overlap: bool = True):
        self.plan, self.dim, self.ranges, self.groups = plan, dim, ranges, groups
        self.overlap = overlap and groups > 1  # one group has nothing to overlap with
        self.own, self.needs_gradient = tuple(x.detach() for x in own), tuple(x.requires_grad for x in own)
        self.n = len(own)
        self.shapes, self.dtypes = [x.shape for x in own], [x.dtype for x in own]
        self.queries = plan.local if merged else plan.chunk
        self.all = plan.gathers_all(ranges)
        mine = ranges[plan.rank]
        self.lengths = [end - first for first, end in mine]
        firsts = [first for first, _ in mine] if self.all else [0, *itertools.accumulate(self.lengths[:-1])]
        # where in a buffer each part's keys begin, and how many there are
        self.places = [(0, sum(self.lengths))] if merged else list(zip(firsts, self.lengths, strict=True))
        # tensors of one dtype share a collective, because larger ones are faster; but all heads of all tokens are sent without a copy
        self.bundles = [[i] for i in range(self.n)]
        if groups > 1 or not self.all:
            self.bundles = [[i for i, x in enumerate(own) if x.dtype == dtype] for dtype in dict.fromkeys(self.dtypes)]
        self.buffers: dict[int, Sequence[Tensor]] = {}
        self.begun: dict[int, list[Callable]] = {}  # by group: functions that wait for its keys
        self.exchanged: list[tuple[int, list[int], Callable[[], list[Tensor]]]] = []  # (group, tensors, function that waits for their sums)
        self.gradients: list[Tensor | None] = [None] * self.n

    def heads(self, x: Tensor, group: int) -> Tensor:
        """A group's heads, a view."""
        if self.groups == 1:
            return x
        heads = x.shape[self.dim + 1] // self.groups
        return x.narrow(self.dim + 1, group * heads, heads)

    def _fetch(self, group: int) -> list[Callable]:
        """Begins to gather a group. Returns a function for each bundle that waits for it and writes it."""
        finish = []
        for bundle in self.bundles:
            own = [self.heads(self.own[i], group) for i in bundle]
            if self.all:
                finish.append(self.plan.gather_into(own, self.dim, self.overlap))
            else:
                own = [x.contiguous() for x in own]  # so that slices of it are contiguous, too
                finish.append(self.plan.exchange_into(own, self.ranges, self.dim, self.overlap))
        return finish

    def gather(self, group: int, then: int) -> None:
        """Makes the device wait until the group has been gathered. then: the group that is used next, which begins; or none of that
        number."""
        if group not in self.buffers:
            self.buffers[group] = [self._buffer(group, i) for i in range(self.n)]
        into = []
        for buffer in self.buffers[group]:
            if buffer.untyped_storage().nbytes() == 0:
                buffer.untyped_storage().resize_(buffer.nbytes)
            into.append(buffer.data)  # it hides the writes from autograd; the buffer gets the values that autograd saved
        for bundle, finish in zip(self.bundles, self.begun.pop(group, None) or self._fetch(group), strict=True):
            finish([into[i] for i in bundle])
        if self.overlap and 0 <= then < self.groups:
            self.begun[then] = self._fetch(then)

    def _buffer(self, group: int, i: int) -> Tensor:
        x = self.heads(self.own[i], group)
        length = self.plan.ranks * self.plan.local if self.all else sum(self.lengths)
        return x.new_empty(*x.shape[: self.dim], length, *x.shape[self.dim + 1 :])

    def seen(self, group: int) -> tuple[Tensor, ...]:
        """The keys of this rank's parts: of each part, all tensors."""
        return tuple(buffer.narrow(self.dim, *place) for place in self.places for buffer in self.buffers[group])

    def release(self, group: int) -> tuple[Tensor, ...]:
        """Frees the memory of a group until `gather` fills it again. Returns the buffers."""
        buffers = tuple(self.buffers.pop(group))
        for buffer in buffers:
            buffer.untyped_storage().resize_(0)
        return buffers

    def reduce(self, group: int, gradients: Sequence[Tensor]) -> None:
        """Begins to sum up a group's gradients, which are in the order of `seen`."""
        self.collect()  # the group before overlapped with this one's attention; now its memory is freed
        for bundle in self.bundles:
            if chosen := [i for i in bundle if self.needs_gradient[i]]:
                of_parts = (gradients[i :: self.n] for i in chosen)
                # by range, also of a part that has all ranges
                of_each = [x[0].split(self.lengths, self.dim) if len(x) == 1 else x for x in of_parts]
                self.exchanged.append((group, chosen, self.plan.reduce(of_each, self.ranges, self.dim, self.overlap)))
                if not self.overlap:
                    self.collect()

    def collect(self) -> None:
        """Waits for the sums that were begun."""
        for group, chosen, finish in self.exchanged:
            for i, sums in zip(chosen, finish(), strict=True):
                if self.gradients[i] is None:
                    self.gradients[i] = sums.new_empty(self.shapes[i], dtype=self.dtypes[i])
                self.heads(self.gradients[i], group).copy_(sums)
        self.exchanged.clear()

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Of each group the tokens of the rank's parts, views."""
        return tuple(piece for group in range(self.groups) for piece in self.heads(x, group).split(self.queries, self.dim))

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`."""
        if len(pieces) == 1:
            return pieces[0]
        if self.groups == 1:
            return torch.cat(pieces, self.dim)
        shape = list(pieces[0].shape)
        shape[self.dim] = self.plan.local
        shape[self.dim + 1] *= self.groups
        whole = pieces[0].new_empty(shape)
        for place, piece in zip(self.split(whole), pieces, strict=True):
            place.copy_(piece)
        return whole


class ReduceGradients(torch.autograd.Function):
    """Links each group's `Gather` to the rank's own tensors, so that their gradients, which are collected in `Gathered`, are taken after
    those of all groups."""

    @staticmethod
    def forward(ctx, gathered: Gathered, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.gathered = gathered
        return tuple(own[0].new_empty(0) for _ in range(gathered.groups))

    @staticmethod
    @once_differentiable
    def backward(ctx, *links: Tensor) -> tuple[Tensor | None, ...]:
        gathered = ctx.gathered
        gathered.collect()
        gradients, gathered.gradients = gathered.gradients, [None] * gathered.n
        return None, *gradients


class Gather(torch.autograd.Function):
    """What a rank's parts see of each tensor, for one group of heads. Each part has gradients of its own."""

    @staticmethod
    def forward(ctx, gathered: Gathered, group: int, link: Tensor) -> tuple[Tensor, ...]:
        gathered.gather(group, group + 1)
        ctx.gathered, ctx.group = gathered, group
        return gathered.seen(group)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[None, None, None]:
        if ctx.group in ctx.gathered.buffers:
            ctx.gathered.release(ctx.group)
        ctx.gathered.reduce(ctx.group, gradients)
        return None, None, None


class GatherAgain(torch.autograd.Function):
    """The identity. It gives the group's memory back, and its backward gathers again what the attention before it has saved."""

    @staticmethod
    def forward(ctx, gathered: Gathered, group: int, *outs: Tensor) -> tuple[Tensor, ...]:
        ctx.gathered, ctx.group = gathered, group
        # a recomputation for the backward replaces them by its own, as it does with what the attention has saved
        ctx.save_for_backward(*gathered.own, *gathered.release(group))
        return tuple(out.view_as(out) for out in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gathered, saved = ctx.gathered, ctx.saved_tensors
        gathered.own, gathered.buffers[ctx.group] = saved[: gathered.n], saved[gathered.n :]
        gathered.gather(ctx.group, ctx.group - 1)
        gathered.own = None
        return None, None, *gradients


class SplitPieces(torch.autograd.Function):
    """`Gathered.split`, with a backward that writes the gradient once."""

    @staticmethod
    def forward(ctx, gathered: Gathered, x: Tensor) -> tuple[Tensor, ...]:
        ctx.gathered = gathered
        return gathered.split(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, ctx.gathered.join(gradients)


class JoinPieces(torch.autograd.Function):
    """`Gathered.join`."""

    @staticmethod
    def forward(ctx, gathered: Gathered, *pieces: Tensor) -> Tensor:
        ctx.gathered = gathered
        gathered.own = None  # else it would stay between the passes
        return gathered.join(pieces)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gathered.split(gradient)
