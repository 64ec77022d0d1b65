"""What a launch of a Hopper backward by two consumers is planned from: its tile, and the copies of the ends of packed sequences."""

from dataclasses import dataclass

from torch import Tensor

from attnzoo_kernels._gluon.backward_tiles import HALF
from attnzoo_kernels._gluon.bwd_preprocess import bwd_tails_kernel
from attnzoo_kernels._gluon.hopper import descriptor
from attnzoo_kernels._triton.call import Layout, strides
from attnzoo_kernels._triton.launch import Launch


@dataclass(frozen=True)
class Tile:
    rows: int = 64  # queries of a step
    stages: int = 2
    dq_warp: bool = False  # a warp of its own has dQ added to memory
    dq_lags: bool = False  # dQ is made a step late, so that the consumers need not keep step with each other
    registers: int = 240  # of a consumer
    load_registers: int = 24

    def constants(self) -> dict[str, int]:
        """The last ones of a kernel's signature."""
        return {"ROWS": self.rows, "STAGES": self.stages, "DQ_WARP": self.dq_warp, "DQ_LAGS": self.dq_lags, "REGISTERS": self.registers,
                "LOAD_REGISTERS": self.load_registers}


def pair_tile(width: int, ordered: bool) -> Tile:
    """As many queries as the registers hold scores of. The warp for dQ gains at width 64, and in order, where it waits instead of the
    consumers; at width 128 without order it costs."""
    return Tile(8192 // width, dq_warp=ordered or width == 64)


def mainloop_width(*widths: int) -> int:
    """The width of tiles that take rows of these."""
    return 64 if max(widths) <= 64 else 128


def tails(x: Layout, sequences: int, block: int, width: int) -> Launch:
    """Copies the ends of packed sequences."""
    return Launch(bwd_tails_kernel, (sequences + 1) * x[0][-2], (*strides(x)[1:], sequences, x[0][0], x[0][-2]),
                  {"DIM": x[0][-1], "WIDTH": width, "BLOCK": block}, 4, 1)


def copy_tails(launch: Launch, x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(sequences + 1, block, heads, width): the last, partial tile of each sequence of x with zeros behind it."""
    copies = x.new_empty(cu_seqlens.shape[0], launch.constants["BLOCK"], x.shape[-2], launch.constants["WIDTH"])
    launch(x, copies, cu_seqlens)
    return copies


def sources(tensors: tuple[Tensor | None, ...], rows: int, width: int) -> list:
    """Descriptors of queries, keys, values and gradients of the output, or of their tails; None stays."""
    blocks = rows, HALF.value, HALF.value, rows
    return [x if x is None else descriptor(x, block, width) for x, block in zip(tensors, blocks, strict=True)]
