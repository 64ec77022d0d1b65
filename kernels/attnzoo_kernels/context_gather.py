"""How `context_parallel.attend` uses autograd: it gathers all ranks' keys in the forward and again in the backward, and sums gradients.

With groups of heads, the collectives of one group overlap with the attention of another. Autograd runs nodes that are ready from the
newest to the oldest, so the backward has the groups in reverse order, on all ranks alike:

    ReduceGradients   forward: begins to gather all groups            backward: the last sums, of all groups
    Gather            forward: waits for its group                    backward: begins to exchange its group's gradients
    attention
    GatherAgain       forward: nothing                                backward: waits for its group
    JoinPieces        forward: one tensor of all groups' outputs      backward: begins to gather all groups
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

    merged: a rank has one part, which sees all of its ranges. The memory of a released group is freed until the backward needs it again.
    """

    def __init__(self, plan: "ContextParallel", dim: int, ranges: Sequence[Sequence["Range"]], own: Sequence[Tensor], groups: int = 1,
                 merged: bool = False):
        self.plan, self.dim, self.ranges, self.groups = plan, dim, ranges, groups
        self.own, self.needs_gradient = tuple(x.detach() for x in own), tuple(x.requires_grad for x in own)
        self.queries = plan.local if merged else plan.chunk
        self.all = plan.gathers_all(ranges)
        mine = ranges[plan.rank]
        self.lengths = [end - first for first, end in mine]
        firsts = [first for first, _ in mine] if self.all else [0, *itertools.accumulate(self.lengths[:-1])]
        # where in a buffer each part's keys begin, and how many there are
        self.places = [(0, sum(self.lengths))] if merged else list(zip(firsts, self.lengths, strict=True))
        # tensors of one dtype share a collective, because larger ones are faster; but all heads of all tokens are sent without a copy
        self.bundles = [[i] for i in range(len(own))]
        if groups > 1 or not self.all:
            self.bundles = [[i for i, x in enumerate(own) if x.dtype == dtype] for dtype in dict.fromkeys(x.dtype for x in own)]
        self.buffers: list[list[Tensor]] = [[] for _ in range(groups)]  # by group and tensor: all tokens, or one range after the other
        self.missing = set(range(groups))
        self.begun: dict[int, list[Callable]] = {}  # by group: functions that wait for its keys
        self.exchanged: list[tuple[int, list[int], Callable[[], list[Tensor]]]] = []  # (group, tensors, function that waits for their sums)
        self.gradients: list[Tensor | None] = [None] * len(own)

    def heads(self, x: Tensor, group: int) -> Tensor:
        """A group's heads, a view."""
        if self.groups == 1:
            return x
        heads = x.shape[self.dim + 1] // self.groups
        return x.narrow(self.dim + 1, group * heads, heads)

    def begin(self, order: Sequence[int]) -> None:
        """Begins to gather the missing groups, which will be used in this order. With one group there is nothing to overlap with."""
        if self.groups > 1:
            for group in order:
                if group in self.missing and group not in self.begun:
                    self.begun[group] = [self._fetch(group, bundle) for bundle in self.bundles]

    def _fetch(self, group: int, bundle: list[int]) -> Callable:
        own = [self.heads(self.own[i], group) for i in bundle]
        if self.all:
            return self.plan.gather_into(own, self.dim, self.groups > 1)
        own = [x.contiguous() for x in own]  # so that slices of it are contiguous, too
        return self.plan.exchange_into(own, self.ranges, self.dim, self.groups > 1)

    def gather(self, group: int) -> None:
        """Makes the device wait until the group has been gathered."""
        begun = self.begun.pop(group, None)
        into = [self._memory(group, i) for i in range(len(self.own))]
        for number, bundle in enumerate(self.bundles):
            finish = begun[number] if begun else self._fetch(group, bundle)
            finish([into[i] for i in bundle])
        self.missing.discard(group)

    def _memory(self, group: int, i: int) -> Tensor:
        """The buffer for a tensor."""
        if len(self.buffers[group]) == i:
            x = self.heads(self.own[i], group)
            length = self.plan.ranks * self.plan.local if self.all else sum(self.lengths)
            self.buffers[group].append(x.new_empty(*x.shape[: self.dim], length, *x.shape[self.dim + 1 :]))
        buffer = self.buffers[group][i]
        if buffer.untyped_storage().nbytes() == 0:
            buffer.untyped_storage().resize_(buffer.nbytes)
        # .data hides the writes from autograd; the buffer gets the values that autograd saved
        return buffer.data

    def seen(self, group: int) -> tuple[Tensor, ...]:
        """The keys of this rank's parts: of each part, all tensors."""
        return tuple(buffer.narrow(self.dim, *place) for place in self.places for buffer in self.buffers[group])

    def release(self, group: int) -> None:
        for buffer in self.buffers[group]:
            buffer.untyped_storage().resize_(0)
        self.missing.add(group)

    def reduce(self, group: int, gradients: Sequence[Tensor]) -> None:
        """Begins to sum up a group's gradients, which are in the order of `seen`."""
        self.collect()  # the group before overlapped with this one's attention; now its memory is freed
        for bundle in self.bundles:
            if chosen := [i for i in bundle if self.needs_gradient[i]]:
                of_parts = (gradients[i :: len(self.own)] for i in chosen)
                # by range, also of a part that has all ranges
                of_each = [x[0].split(self.lengths, self.dim) if len(x) == 1 else x for x in of_parts]
                self.exchanged.append((group, chosen, self.plan.reduce(of_each, self.ranges, self.dim, self.groups > 1)))
                if self.groups == 1:
                    self.collect()

    def collect(self) -> None:
        """Waits for the sums that were begun."""
        for group, chosen, finish in self.exchanged:
            for i, sums in zip(chosen, finish(), strict=True):
                if self.gradients[i] is None:
                    self.gradients[i] = torch.empty_like(self.own[i], memory_format=torch.contiguous_format)
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
        gathered.begin(range(gathered.groups))
        ctx.gathered = gathered
        return tuple(own[0].new_empty(0) for _ in range(gathered.groups))

    @staticmethod
    @once_differentiable
    def backward(ctx, *links: Tensor) -> tuple[Tensor | None, ...]:
        gathered = ctx.gathered
        gathered.collect()
        gradients, gathered.gradients = gathered.gradients, [None] * len(gathered.own)
        return None, *gradients


class Gather(torch.autograd.Function):
    """What a rank's parts see of each tensor, for one group of heads. Each part has gradients of its own."""

    @staticmethod
    def forward(ctx, gathered: Gathered, group: int, link: Tensor) -> tuple[Tensor, ...]:
        gathered.gather(group)
        ctx.gathered, ctx.group = gathered, group
        return gathered.seen(group)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[None, None, None]:
        if not ctx.gathered.plan.keep_keys:
            ctx.gathered.release(ctx.group)
        ctx.gathered.reduce(ctx.group, gradients)
        return None, None, None


class GatherAgain(torch.autograd.Function):
    """The identity. Its backward gathers again what the attention before it has saved."""

    @staticmethod
    def forward(ctx, gathered: Gathered, group: int, *outs: Tensor) -> tuple[Tensor, ...]:
        ctx.gathered, ctx.group = gathered, group
        return tuple(out.view_as(out) for out in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.gathered.gather(ctx.group)
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
        return gathered.join(pieces)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gathered = ctx.gathered
        gathered.begin(range(gathered.groups - 1, -1, -1))
        return None, *gathered.split(gradient)
