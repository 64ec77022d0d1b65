"""The host's side of a Hopper forward: a plan, which is made once for each layout, and the tensors of a launch."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnzoo_kernels._gluon.forward_tile import ForwardTile
from attnzoo_kernels._gluon.hopper import descriptor
from attnzoo_kernels._triton.call import Call, Layout
from attnzoo_kernels._triton.launch import L2_GROUP, Launch, block_width, multiprocessors

# scalars of every kernel; they go to do_not_specialize, so that no kernel is compiled anew for another length or count
SCALARS = ["stride_stats", "window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "heads", "group", "head_group", "n_tiles"]

OWN_TENSORS = 4  # of a variant, in hopper_fwd_kernel


class ForwardPlan(NamedTuple):
    launch: Launch
    tile: ForwardTile
    width: int
    value_width: int
    packed: bool

    def queries(self, x: Tensor) -> TensorDescriptor:
        return descriptor(x, 64, self.width, self.packed)

    def keys(self, x: Tensor) -> TensorDescriptor:
        return descriptor(x, self.tile.block_n, self.width, self.packed)

    def values(self, x: Tensor) -> TensorDescriptor:
        return descriptor(x, self.tile.block_n, self.value_width, self.packed)

    def output(self, x: Tensor) -> TensorDescriptor:
        return descriptor(x, 64, self.tile.part or self.value_width, self.packed)


def tile_width(width: int) -> int:
    """The width of the tiles for heads of `width`; TMA fills the rest with zeros."""
    return max(64, block_width(width))


def heads_in_l2(seqlen: int, columns: int, itemsize: int = 2) -> int:
    """How many heads fit into L2 together, at `columns` numbers for each of `seqlen` tokens; at least one."""
    return max(1, L2_GROUP // (itemsize * seqlen * columns))


def plan_forward(kernel: Any, device: torch.device, call: Call, tile: ForwardTile, q: Layout, k: Layout, v: Layout, scalars: dict[str, Any],
                 constants: dict[str, Any], options: dict[str, Any] | None = None) -> ForwardPlan:
    """The plan of a persistent kernel. The kernel gets those of `scalars`, `constants` and the common values that its signature names.

    scalars: `head_group` and the variant's own. One that has the name of a common value replaces it.
    """
    sequences, seqlen_q, seqlen_k = call.sizes(q[0], k[0])
    heads = q[0][-2]
    width, value_width = tile.part or tile_width(q[0][-1]), tile_width(v[0][-1])
    scalars = {
        "stride_stats": math.prod(q[0][:-1]), "scale": call.softmax_scale * math.log2(math.e), "window_left": call.window_left,
        "window_right": call.window_right, "n_seqs": sequences, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads": heads,
        "group": heads // k[0][-2], "n_tiles": call.programs(heads, seqlen_q, sequences, tile.block_m),
        "own_1": None, "own_2": None,
    } | scalars
    constants = tile.constants | {
        "BLOCK_DV": value_width, "PACKED": call.packed, "HAS_LEFT": call.window_left >= 0, "HAS_RIGHT": call.window_right >= 0,
        "PARTS": None if tile.part is None else -(-q[0][-1] // tile.part),
    } | constants
    launch = Launch(kernel, min(scalars["n_tiles"], tile.programs * multiprocessors(device)),
                    tuple(scalars[name] for name in kernel.arg_names if name in scalars),
                    {name: constants[name] for name in kernel.arg_names if name in constants}, 4, 1, options=options or {})
    return ForwardPlan(launch, tile, width, value_width, call.packed)


def compiled_together(plan_of: Callable[[Any], ForwardPlan], first: Any, *others: Any) -> ForwardPlan:
    """The first of several plans for the same tensors. The first launch of its kernel also compiles the kernels of the others."""
    plan = plan_of(first)
    plan.launch.others = lambda: (plan_of(other).launch for other in others)
    return plan
