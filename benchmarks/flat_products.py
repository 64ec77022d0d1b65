"""Flat products, of 1 to 16 rows with a large matrix, as decoding makes them: TB/s of the weights, beside cuBLAS and a copy of the weights.

    python -m benchmarks.flat_products                # GPT-2's and Llama 3's matrices, 1, 4 and 16 rows
    python -m benchmarks.flat_products --rows 8
    python -m benchmarks.flat_products tiles          # candidates for `flat_tile`

FlashDecoding++ (Hong et al. 2024, arXiv:2311.01282) has 8 rows in a tile instead of 64, and two buffers. Here the product is transposed:
the weights are the operand of 64 rows, as Hopper's instruction wants them, the activations that of 16, and up to five buffers hold what
comes next. All programs read equal shares of the weights, and the last one to finish a tile adds its parts up in the order of the programs.
The next product is launched while this one still runs.

A model reads one matrix after the other. So a reading replays a CUDA graph of products with as many matrices as hold 1 GB: what the
launches cost counts, what the host costs does not, and nothing is left of a matrix in the L2 cache when it is read again. Not run on a GPU
yet.
"""

import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnzoo_kernels._triton.launch import architecture
from benchmarks import harness
from benchmarks.accuracy import error_ratio
from benchmarks.decode import only_forward
from benchmarks.harness import Backend, Entry, Line, Pass, Session, replayed
from benchmarks.report import Row

TRAFFIC = 2**30  # bytes of weights that a graph reads
ROWS = 16  # of a tile: at most as many have a flat product
MATRICES = {  # (outputs, inputs)
    "gpt2 qkv": (2304, 768), "gpt2 out": (768, 768), "gpt2 up": (3072, 768), "gpt2 down": (768, 3072), "gpt2 head": (50257, 768),
    "llama qkv": (6144, 4096), "llama out": (4096, 4096), "llama gate, up": (28672, 4096), "llama down": (4096, 14336),
    "llama head": (128256, 4096),
}


@dataclass(frozen=True)
class Case:
    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.rows}x{self.inputs}x{self.outputs}"

    def bytes(self) -> int:
        return self.outputs * self.inputs * self.dtype.itemsize

    def operands(self, device: str, matrices: int = 1) -> tuple[Tensor, Tensor]:
        """Activations (rows, inputs) and weights (matrices, outputs, inputs)."""
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(self.rows, self.inputs, generator=generator, device=device, dtype=self.dtype)
        return x, torch.randn(matrices, self.outputs, self.inputs, generator=generator, device=device, dtype=self.dtype)


@dataclass(frozen=True)
class FlatTile:
    block_n: int  # outputs
    block_k: int  # inputs
    num_warps: int
    num_stages: int
    programs: int  # of a multiprocessor
    ahead: int = 0  # steps whose weights are asked for before the product before this one has ended


def flat_tile(outputs: int, inputs: int, itemsize: int = 2) -> FlatTile:
    """Not measured yet: 32 KB in flight of each of two programs."""
    if itemsize == 4:
        return FlatTile(64, 32, 4, 3, 2)
    return FlatTile(64, 128, 4, 4, 2) if outputs * inputs >= 2**22 else FlatTile(64, 64, 4, 4, 2)


@triton.jit
def flat_product_kernel(x_ptr, w_ptr, out_ptr, parts_ptr, counts_ptr, rows, outputs, inputs, share, BLOCK_M: tl.constexpr,
                        BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
                        OVERLAP: tl.constexpr, AHEAD: tl.constexpr):
    """A program has `share` steps of BLOCK_K inputs each, of one tile of outputs or of several that follow each other."""
    program = tl.program_id(0)
    steps = tl.cdiv(inputs, BLOCK_K)  # of a tile
    unit = program * share
    end = tl.minimum(unit + share, tl.cdiv(outputs, BLOCK_N) * steps)
    row = tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_N)
    if OVERLAP:
        gdc_launch_dependents()
        for n in tl.static_range(AHEAD):
            column = (unit + n) % steps * BLOCK_K + tl.arange(0, BLOCK_K // 32) * 32
            weight_row = tl.minimum((unit + n) // steps * BLOCK_N + lane, outputs - 1).to(tl.int64)
            tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l",
                                      [w_ptr + weight_row[:, None] * inputs + tl.minimum(column, inputs - 1)[None, :]], dtype=tl.int32,
                                      is_pure=False, pack=1)
        gdc_wait()
    inside = lane[:, None] * BLOCK_M + row[None, :]  # [BLOCK_N, BLOCK_M], of a part
    while unit < end:
        tile = unit // steps
        first = unit - tile * steps
        count = tl.minimum(steps - first, end - unit)
        output = tile * BLOCK_N + lane
        # an output beyond the last one reads the last one's weights
        w_rows = w_ptr + tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * inputs
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for step in range(first, first + count):
            at = step * BLOCK_K + tl.arange(0, BLOCK_K)
            if EVEN:
                w = tl.load(w_rows + at[None, :], eviction_policy="evict_first")
                x = tl.load(x_ptr + row[:, None] * inputs + at[None, :], mask=(row < rows)[:, None], other=0.0)
            else:
                w = tl.load(w_rows + at[None, :], mask=(at < inputs)[None, :], other=0.0, eviction_policy="evict_first")
                x = tl.load(x_ptr + row[:, None] * inputs + at[None, :], mask=(row < rows)[:, None] & (at < inputs)[None, :], other=0.0)
            acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
        whole = count == steps
        if count < steps:
            tl.store(parts_ptr + (2 * program + (first == 0).to(tl.int32)) * (BLOCK_N * BLOCK_M) + inside, acc)
            tl.debug_barrier()  # all of a part is written before it is counted
            whole = tl.atomic_add(counts_ptr + tile, count) + count == steps
            if whole:
                leader = tile * steps // share
                acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                for one in range(leader, (tile * steps + steps - 1) // share + 1):
                    slot = 2 * one + (one == leader).to(tl.int32)
                    acc += tl.load(parts_ptr + slot * (BLOCK_N * BLOCK_M) + inside, cache_modifier=".cg")
                tl.store(counts_ptr + tile, 0)  # as the next product expects it
        if whole:
            tl.store(out_ptr + row[None, :].to(tl.int64) * outputs + output[:, None], acc.to(out_ptr.dtype.element_ty),
                     mask=(row < rows)[None, :] & (output < outputs)[:, None])
        unit += count


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def flat_product(x: Tensor, weight: Tensor, tile: FlatTile | None = None, scratch: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """x weightᵀ: x (rows, inputs) of up to 16 rows and weight (outputs, inputs), contiguous; sums in float32, in a fixed order.

    scratch: of `make_scratch`, which products that follow each other share.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    if rows > ROWS:
        raise ValueError(f"x: must have at most {ROWS} rows, got {rows}")
    tile = tile or flat_tile(outputs, inputs, x.itemsize)
    parts, counts = scratch or make_scratch(x.device, outputs, tile)
    tiles = triton.cdiv(outputs, tile.block_n)
    total = tiles * triton.cdiv(inputs, tile.block_k)
    share = triton.cdiv(total, tile.programs * multiprocessors(x.device))
    out = x.new_empty(rows, outputs)
    overlap = architecture(x.device) >= 90
    flat_product_kernel[(triton.cdiv(total, share),)](
        x, weight, out, parts, counts, rows, outputs, inputs, share, BLOCK_M=ROWS, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        EVEN=inputs % tile.block_k == 0, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", OVERLAP=overlap, AHEAD=tile.ahead,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **({"launch_pdl": True} if overlap else {}))
    return out


def make_scratch(device: torch.device, outputs: int, tile: FlatTile) -> tuple[Tensor, Tensor]:
    """Room for the parts of divided tiles, and how many steps of each tile are done, which is zero between products."""
    parts = torch.empty(2 * tile.programs * multiprocessors(device), tile.block_n, ROWS, device=device)
    return parts, torch.zeros(triton.cdiv(outputs, tile.block_n), dtype=torch.int32, device=device)


Products = Callable[[Tensor, Tensor], Callable[[], Tensor]]  # from x and all weights to a call of their products, which gives the first


def ours(x: Tensor, weights: Tensor, tile: FlatTile | None = None) -> Callable[[], Tensor]:
    tile = tile or flat_tile(*weights.shape[1:], x.itemsize)
    scratch = make_scratch(x.device, weights.shape[1], tile)
    return lambda: [flat_product(x, weight, tile, scratch) for weight in weights][0]


def early(x: Tensor, weights: Tensor) -> Callable[[], Tensor]:
    tile = flat_tile(*weights.shape[1:], x.itemsize)
    return ours(x, weights, replace(tile, ahead=tile.num_stages))


def cublas(x: Tensor, weights: Tensor) -> Callable[[], Tensor]:
    return lambda: [F.linear(x, weight) for weight in weights][0]


def copied(x: Tensor, weights: Tensor) -> Callable[[], Tensor]:
    target = torch.empty_like(weights)

    def call() -> Tensor:
        for source, to in zip(weights, target, strict=True):
            to.copy_(source)
        return F.linear(x, target[0])

    return call


def of(products: Products) -> Callable[[Case, tuple[Tensor, Tensor]], Pass]:
    def make(case: Case, operands: tuple[Tensor, Tensor]) -> Pass:
        call = products(*operands)
        return only_forward(replayed(call) if operands[0].is_cuda else call)

    return make


def missing() -> str | None:
    return None if torch.cuda.is_available() else "needs an NVIDIA GPU"


BACKENDS = {one.name: one for one in (
    Backend("attnzoo-triton", of(ours), missing), Backend("attnzoo-triton-early", of(early), missing), Backend("cublas", of(cublas)),
    Backend("copy", of(copied)))}


def entries(case: Case, x: Tensor, weights: Tensor, backends: list[Backend]) -> list[Entry]:
    """A copy's bytes are those it reads and those it writes."""
    eager, exact = (F.linear(x.to(dtype), weights[0].to(dtype)) for dtype in (case.dtype, torch.float64))

    def check(run: Pass) -> float:
        return error_ratio(run.forward(), eager, exact)

    work = weights.shape[0] * case.bytes()
    return [Entry(one.name, one, case, (x, weights), {"forward": work * (2 if one.name == "copy" else 1)}, check) for one in backends]


def operands(session: Session, case: Case) -> tuple[Tensor, Tensor]:
    return case.operands(session.device, 2 if session.options.dry_run else max(2, TRAFFIC // case.bytes()))


def speed(session: Session) -> Iterator[list[Row]]:
    """Each matrix by the number of rows, and at last how many times cuBLAS's rate ours is."""
    ratios = []
    for (name, (outputs, inputs)), rows in itertools.product(MATRICES.items(), session.options.rows):
        shape = (outputs // 64, inputs // 64) if session.options.dry_run else (outputs, inputs)
        case = Case(rows, *shape, session.dtype)
        found = harness.compare(Line("flat_products", "speed", f"{name} {outputs}x{inputs}", rows),
                                entries(case, *operands(session, case), session.backends), ["forward"], session.timing, unit="TB/s")
        ratios += [row.ratio for row in found if row.label == "cublas" and row.baseline != "cublas" and row.ratio]
        yield found
    if ratios:
        print(f"geometric mean of {len(ratios)}: {statistics.geometric_mean(ratios):.3f} times cuBLAS's rate")


def tiles(session: Session) -> Iterator[list[Row]]:
    """Candidates by tile; the first column is `flat_tile`'s."""
    candidates = [FlatTile(*shape) for shape in itertools.product((64, 128), (64, 128, 256), (4, 8), (2, 3, 4, 6), (1, 2, 3, 4))]
    # at least 64 KB in flight on a multiprocessor, at most its shared memory; a warp has 16 rows, so that eight need two tiles of 64
    candidates = [t for t in candidates if 2**16 <= 2 * t.block_n * t.block_k * (t.num_stages - 1) * t.programs
                  and 2 * (t.block_n + ROWS) * t.block_k * t.num_stages * t.programs <= 220_000 and t.num_warps * 16 == t.block_n]
    for name in ("gpt2 down", "llama out", "llama gate, up"):
        outputs, inputs = MATRICES[name]
        case = Case(8, *((outputs // 64, inputs // 64) if session.options.dry_run else (outputs, inputs)), session.dtype)
        given = operands(session, case)
        columns = [Backend("table", of(ours)), *(
            Backend("{}x{} {} warps {} stages {} programs {} ahead".format(*vars(tile).values()), of(functools.partial(ours, tile=tile)))
            for tile in candidates[: 2 if session.options.dry_run else None])]
        yield harness.compare(Line("flat_products", "tiles", name, case.rows), entries(case, *given, columns), ["forward"],
                              session.timing, unit="TB/s")


TABLES = {"speed": speed, "tiles": tiles}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("flat_products", list(TABLES), list(BACKENDS))
    command.add_argument("--rows", nargs="+", type=harness.positive, default=[1, 4, 16], help="of the activations (default: 1 4 16)")
    return harness.main(command, TABLES, BACKENDS, None, {}, arguments)


if __name__ == "__main__":
    sys.exit(main())
