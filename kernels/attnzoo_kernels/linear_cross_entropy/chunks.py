"""The pass over the tokens, a chunk of logits after the other, and the kernel that turns logits into losses and their own gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels._triton.softmax import LN2, LOG2E, tanh
from attnzoo_kernels.linear_cross_entropy.eight_bits import EightBits

LOGITS = 2**28  # of a chunk, about, at most: half a gigabyte in 16 bits, which keeps the products large
LANE = tl.constexpr(8)  # logits of 16 bits that a thread loads at once
# Warps, and how many tiles of a row of logits they may keep in registers: rows are read once then, not twice. Nothing is kept until
# `benchmarks.linear_cross_entropy chunks`, which compares, has been run on a GPU.
IN_REGISTERS: tuple[tuple[int, int], ...] = ()
BLOCK = 4096  # columns of a tile of a row that is read twice
WARPS = 8


@triton.jit
def _load(logits_ptr, columns, vocab, softcap, HAS_SOFTCAP: tl.constexpr):
    """Logits in float32, by tanh within softcap; -inf behind the vocabulary."""
    z = tl.load(logits_ptr + columns, mask=columns < vocab, other=-float("inf"))
    return _capped(z, columns < vocab, softcap, HAS_SOFTCAP)


@triton.jit
def _capped(logits, inside, softcap, HAS_SOFTCAP: tl.constexpr):
    z = logits.to(tl.float32)
    if HAS_SOFTCAP:
        z = tl.where(inside, softcap * tanh(z / softcap, True, False), -float("inf"))
    return z


@triton.jit
def _finite(row_max):
    return tl.where(row_max == -float("inf"), 0.0, row_max)


@triton.jit
def _store_gradients(gradients_ptr, columns, z, row_max, log_sum, factor, less, vocab, rows, softcap, HAS_SOFTCAP: tl.constexpr):
    """Of all columns as if none was the target. log_sum: in base 2."""
    gradient = tl.exp2((z - row_max) * LOG2E - log_sum) * factor
    gradient = tl.where(columns < vocab, gradient - less, 0.0)
    if HAS_SOFTCAP:
        gradient *= tl.where(columns < vocab, 1.0 - (z / softcap) * (z / softcap), 0.0)
    tl.store(gradients_ptr + columns, gradient.to(gradients_ptr.dtype.element_ty), mask=columns < rows)


@triton.jit(do_not_specialize=["ignore_index"])
def cross_entropy_kernel(logits_ptr, gradients_ptr, unit_ptr, targets_ptr, scales_ptr, losses_ptr, rows, vocab, ignore_index, smoothing,
                         z_loss, softcap, HAS_UNIT: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
                         HAS_SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """A program has a row. Under GRADIENT the gradients of its loss times its scale, counted in units, go to gradients_ptr, which may be
    logits_ptr. TILES: of BLOCK logits, in which a row stays in registers; 0: it is read twice."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * rows
    gradients_ptr += row * rows
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if GRADIENT:
            for at in tl.range(0, rows, BLOCK):
                zeros = tl.zeros([BLOCK], tl.float32).to(gradients_ptr.dtype.element_ty)
                tl.store(gradients_ptr + at + columns, zeros, mask=at + columns < rows)
        return
    known = (target >= 0) & (target < vocab)
    # before any of the row is written over: sums below keep the program's warps together
    score = _capped(tl.load(logits_ptr + target, mask=known, other=float("nan")), known, softcap, HAS_SOFTCAP)
    total = 0.0
    tiles = ()
    if TILES > 0:
        for tile in tl.static_range(TILES):
            at = tile * BLOCK + columns
            # [BLOCK]
            tiles = tiles + (tl.load(logits_ptr + at, mask=at < vocab, other=-float("inf")),)
        maxima = tl.full([BLOCK], -float("inf"), tl.float32)
        totals = tl.zeros([BLOCK], tl.float32)
        for tile in tl.static_range(TILES):
            inside = tile * BLOCK + columns < vocab
            z = _capped(tiles[tile], inside, softcap, HAS_SOFTCAP)
            maxima = tl.maximum(maxima, z)
            if HAS_SMOOTHING:
                totals += tl.where(inside, z, 0.0)
        row_max = tl.max(maxima, 0)
        base = _finite(row_max)
        sums = tl.zeros([BLOCK], tl.float32)
        for tile in tl.static_range(TILES):
            z = _capped(tiles[tile], tile * BLOCK + columns < vocab, softcap, HAS_SOFTCAP)
            sums += tl.exp2((z - base) * LOG2E)
        row_sum = tl.sum(sums, 0)
        if HAS_SMOOTHING:
            total = tl.sum(totals, 0)
    else:
        row_max = -float("inf")
        sums = tl.zeros([BLOCK], tl.float32)
        totals = tl.zeros([BLOCK], tl.float32)
        for at in tl.range(0, vocab, BLOCK):
            z = _load(logits_ptr, at + columns, vocab, softcap, HAS_SOFTCAP)
            if HAS_SMOOTHING:
                totals += tl.where(at + columns < vocab, z, 0.0)
            new_max = tl.maximum(row_max, tl.max(z, 0))
            base = _finite(new_max)
            sums = sums * tl.exp(row_max - base) + tl.exp(z - base)
            row_max = new_max
        row_sum = tl.sum(sums, 0)
        if HAS_SMOOTHING:
            total = tl.sum(totals, 0)
    log_sum = tl.log2(row_sum)
    lse = row_max + log_sum * LN2
    loss = lse - (1.0 - smoothing) * score + z_loss * lse * lse
    if HAS_SMOOTHING:
        loss -= smoothing * (total / vocab)
    scale = 1.0
    if HAS_SCALES:
        scale = tl.load(scales_ptr + row).to(tl.float32)
    tl.store(losses_ptr + row, loss * scale)
    if GRADIENT:
        scale = tl.where(known, scale, float("nan"))
        if HAS_UNIT:
            scale /= tl.load(unit_ptr)
        factor = (1.0 + 2.0 * z_loss * lse) * scale
        less = smoothing / vocab * scale
        if TILES > 0:
            for tile in tl.static_range(TILES):
                at = tile * BLOCK + columns
                z = _capped(tiles[tile], at < vocab, softcap, HAS_SOFTCAP)
                _store_gradients(gradients_ptr, at, z, row_max, log_sum, factor, less, vocab, rows, softcap, HAS_SOFTCAP)
        else:
            for at in tl.range(0, rows, BLOCK):
                z = _load(logits_ptr, at + columns, vocab, softcap, HAS_SOFTCAP)
                _store_gradients(gradients_ptr, at + columns, z, row_max, log_sum, factor, less, vocab, rows, softcap, HAS_SOFTCAP)
        tl.debug_barrier()  # the target's is written over
        gradient = tl.exp2((score - row_max) * LOG2E - log_sum) * factor - less - (1.0 - smoothing) * scale
        if HAS_SOFTCAP:
            gradient *= 1.0 - (score / softcap) * (score / softcap)
        tl.store(gradients_ptr + target, gradient.to(gradients_ptr.dtype.element_ty), mask=known)


def _tile(rows: int, itemsize: int) -> dict[str, int]:
    """How a program has a row of logits: in registers, by the fewest warps that can, or read twice."""
    for warps, tiles in IN_REGISTERS if itemsize == 2 else ():
        block = 32 * LANE.value * warps
        if rows <= tiles * block:
            return {"BLOCK": block, "TILES": triton.cdiv(rows, block), "num_warps": warps}
    return {"BLOCK": max(LANE.value, min(BLOCK, triton.next_power_of_2(rows))), "TILES": 0, "num_warps": WARPS}


class Plain:
    """The products of a chunk in x's dtype. The gradients of logits lie where the logits did."""

    unit = None

    def __init__(self, x: Tensor, weight: Tensor):
        self.x, self.matrix = x, weight.to(x.dtype)

    def logits(self, chunk: slice, bias: Tensor | None) -> Tensor:
        """[tokens of the chunk, rows]"""
        part = self.x[chunk]
        return part @ self.matrix.t() if bias is None else torch.addmm(bias.to(self.x.dtype), part, self.matrix.t())

    def room(self, logits: Tensor) -> Tensor:
        """For the gradients."""
        return logits

    def dx(self, chunk: slice, gradients: Tensor, out: Tensor) -> None:
        torch.mm(gradients, self.matrix, out=out)

    def add_dw(self, chunk: slice, gradients: Tensor, total: Tensor, first: bool) -> None:
        """total += dw, in float32; total = dw if it is the first."""
        a, b = gradients.t(), self.x[chunk]
        if a.is_cuda and a.dtype != torch.float32:
            torch.mm(a, b, torch.float32, out=total) if first else torch.addmm(total, a, b, torch.float32, out=total)
        else:
            a, b = a.float(), b.float()
            torch.mm(a, b, out=total) if first else total.addmm_(a, b)

    def db(self, gradients: Tensor) -> Tensor:
        return gradients.sum(0, dtype=torch.float32)


def passed_over(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scales: Tensor | None, ignore_index: int,
                label_smoothing: float, z_loss: float, softcap: float, vocab_size: int, fp8: bool,
                gradient: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses (tokens,) times `scales`, and, under `gradient` (else empty), the gradients of their sum for x, weight and bias, of the latter
    two in float32."""
    tokens, rows = x.shape[0], weight.shape[0]
    losses = torch.empty(tokens, dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x) if gradient else x.new_empty(0)
    dw = torch.empty(weight.shape if gradient else 0, dtype=torch.float32, device=x.device)
    if tokens == 0:
        dw.zero_()
    db = torch.zeros(rows if gradient and bias is not None else 0, dtype=torch.float32, device=x.device)
    products = None if tokens == 0 else EightBits(x, weight, scales, gradient) if fp8 else Plain(x, weight)
    n_chunks = max(1, -(-tokens * rows // LOGITS))  # alike, because a small last one leaves a part of the GPU idle
    for begin in range(0, tokens, step := 256 * max(1, -(-tokens // (256 * n_chunks)))):
        chunk = slice(begin, begin + step)
        logits = products.logits(chunk, bias)
        gradients = products.room(logits) if gradient else logits
        with on_device_of(x):
            cross_entropy_kernel[(logits.shape[0],)](
                logits, gradients, products.unit, targets[chunk], None if scales is None else scales[chunk], losses[chunk], rows,
                vocab_size, ignore_index, label_smoothing, z_loss, softcap, HAS_UNIT=products.unit is not None,
                HAS_SCALES=scales is not None, HAS_SMOOTHING=label_smoothing > 0, HAS_SOFTCAP=softcap > 0, GRADIENT=gradient,
                **_tile(rows, logits.element_size()))
        if gradient:
            products.dx(chunk, gradients, dx[chunk])
            products.add_dw(chunk, gradients, dw, begin == 0)
            if bias is not None:
                db += products.db(gradients)
    return losses, dx, dw, db
