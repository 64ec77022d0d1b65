"""The host's side of a Hopper backward by two consumers: its tile, its descriptors, and the tails.

A tail is a copy of the last, partial tile of a packed sequence, filled up with zeros. The kernel reads it in place of the tile itself,
behind which the next sequence begins.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from attnzoo_kernels._gluon.backward_tiles import HALF
from attnzoo_kernels._gluon.bwd_postprocess import bwd_postprocess_kernel
from attnzoo_kernels._gluon.bwd_preprocess import bwd_all_tails_kernel, bwd_preprocess_kernel, bwd_tails_kernel, clear_tile
from attnzoo_kernels._gluon.hopper import descriptor
from attnzoo_kernels._triton.call import Call, Layout, filled, strides
from attnzoo_kernels._triton.launch import Launch

OWN_TENSORS, OWN_NUMBERS = 5, 4  # of a variant, in pair_bwd_kernel and bwd_preprocess_kernel


@dataclass(frozen=True)
class Tile:
    rows: int = 64  # queries of a step
    stages: int = 2
    dq_warp: bool = False  # a warp of its own adds dQ to memory
    dq_lags: bool = False  # dQ is made one step late, so that a consumer need not wait for the other's dS of the same step
    registers: int = 240  # of each consumer thread
    load_registers: int = 24

    def constants(self) -> dict[str, int]:
        """The tile's constants, which come last in a kernel's signature."""
        return {"ROWS": self.rows, "STAGES": self.stages, "DQ_WARP": self.dq_warp, "DQ_LAGS": self.dq_lags, "REGISTERS": self.registers,
                "LOAD_REGISTERS": self.load_registers}


def pair_tile(width: int, ordered: bool) -> Tile:
    """The tile with as many queries as there are registers for their scores. A warp of its own for dQ is faster at width 64, and with
    ordered sums, where it waits in place of the consumers. At width 128 without order it is slower."""
    return Tile(8192 // width, dq_warp=ordered or width == 64)


def mainloop_width(*widths: int) -> int:
    """The width of tiles that have room for rows of each of these widths."""
    return 64 if max(widths) <= 64 else 128


def tails(x: Layout, sequences: int, block: int, width: int) -> Launch:
    """The launch that makes the tails of a tensor."""
    return Launch(bwd_tails_kernel, (sequences + 1) * x[0][-2], (*strides(x)[1:], sequences, x[0][0], x[0][-2]),
                  {"DIM": x[0][-1], "WIDTH": width, "BLOCK": block}, 4, 1)


def copy_tails(launch: Launch, x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(sequences + 1, block, heads, width): the last, partial tile of each sequence of x with zeros behind it."""
    copies = x.new_empty(cu_seqlens.shape[0], launch.constants["BLOCK"], x.shape[-2], launch.constants["WIDTH"])
    launch(x, copies, cu_seqlens)
    return copies


def all_tails(q: Layout, k: Layout, v: Layout, grad_out: Layout, sequences: int, rows: int, keys: int, width: int) -> Launch:
    """The launch that makes the tails of all four tensors. A tile is `rows` queries or `keys` keys."""
    heads, kv_heads = q[0][-2], k[0][-2]
    by_row_and_head = [stride for x in (q, k, v, grad_out) for stride in strides(x)[1:]]
    return Launch(bwd_all_tails_kernel, (sequences + 1) * 2 * (heads + kv_heads),
                  (*by_row_and_head, sequences, q[0][0], k[0][0], heads, kv_heads),
                  {"HEAD_DIM": q[0][-1], "VALUE_DIM": v[0][-1], "WIDTH": width, "ROWS": rows, "KEYS": keys}, 4, 1)


def copy_all_tails(launch: Launch, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, cu_seqlens_q: Tensor,
                   cu_seqlens_k: Tensor) -> tuple[Tensor, ...]:
    """The result of copy_tails for each of the four tensors."""
    tensors, (rows, keys) = (q, k, v, grad_out), (launch.constants[name] for name in ("ROWS", "KEYS"))
    copies = tuple(x.new_empty(cu_seqlens_q.shape[0], block, x.shape[-2], launch.constants["WIDTH"])
                   for x, block in zip(tensors, (rows, keys, keys, rows), strict=True))
    launch(*tensors, *copies, cu_seqlens_q, cu_seqlens_k)
    return copies


def frame(call: Call, q: Layout, out: Layout | None, grad_out: Layout, dq: Layout, rows: int, width: int, *, value_dim: int,
          has_grad_lse: bool, ordered: bool, residual: bool = False, dsinks: bool = False,
          dq_width: int | None = None) -> tuple[Launch, Launch]:
    """The launches before and after the mainloop (preprocess, postprocess). A step of the mainloop has `rows` queries.

    out: None where rows have no statistics. residual: whether the output's rounding error was kept. dsinks: whether the gradient of sinks
    is wanted. dq_width: columns of tiles of dQ, where they are not `width`.
    """
    sequences, seqlen_q, _ = call.sizes(q[0], q[0])
    (heads, head_dim), of_rows = q[0][-2:], {"WIDTH": width, "PACKED": call.packed, "BLOCK": rows}
    programs = call.programs(heads, seqlen_q, sequences, rows)
    return Launch(
        bwd_preprocess_kernel, programs,
        (*strides(out or grad_out, grad_out), math.prod(q[0][:-1]), sequences, seqlen_q, heads, *filled((), OWN_NUMBERS)),
        of_rows | {"VALUE_DIM": value_dim, "SEMAPHORES": 1 if ordered else 0, "HAS_GRAD_LSE": has_grad_lse, "STATISTICS": out is not None,
                   "CLEAR": None if ordered else clear_tile, "RESIDUAL": residual, "DSINKS": dsinks,
                   "DQ_WIDTH": dq_width},
        4, 1), Launch(
            bwd_postprocess_kernel, programs, (*strides(dq), call.softmax_scale, sequences, seqlen_q, heads),
            of_rows | {"WIDTH": dq_width or width, "HEAD_DIM": head_dim, "ORDERED": ordered, "SPACING": 1}, 4, 1)


def sources(tensors: tuple[Tensor | None, ...], rows: int, width: int) -> list:
    """Descriptors of queries, keys, values and gradients of the output, or of their tails. None stays None."""
    blocks = rows, HALF.value, HALF.value, rows
    return [x if x is None else descriptor(x, block, width) for x, block in zip(tensors, blocks, strict=True)]
