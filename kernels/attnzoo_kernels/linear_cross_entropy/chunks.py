"""The pass over the tokens, a chunk of logits after the other, and the kernel that turns logits into losses and their own gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels._triton.softmax import tanh
from attnzoo_kernels.linear_cross_entropy.eight_bits import EightBits

LOGITS = 2**28  # of a chunk, about, at most: half a gigabyte in 16 bits, which keeps the products large
BLOCK = 4096  # columns that a program has in registers
WARPS = 8
AHEAD = False  # whether the next columns are loaded before those in registers are done


@triton.jit
def _capped(logits, softcap, HAS_SOFTCAP: tl.constexpr):
    """Logits in float32, by tanh within softcap."""
    z = logits.to(tl.float32)
    if HAS_SOFTCAP:
        z = softcap * tanh(z / softcap, True, False)
    return z


@triton.jit(do_not_specialize=["ignore_index"])
def cross_entropy_kernel(logits_ptr, gradients_ptr, unit_ptr, targets_ptr, scales_ptr, losses_ptr, rows, vocab, ignore_index, smoothing,
                         z_loss, softcap, HAS_UNIT: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
                         GRADIENT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """A program has a row. Under GRADIENT the gradients of its loss times its scale, counted in units, go to gradients_ptr, which may be
    logits_ptr."""
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
    score = _capped(tl.load(logits_ptr + target, mask=known, other=float("nan")), softcap, HAS_SOFTCAP)
    row_max = -float("inf")
    # [BLOCK]
    sums = tl.zeros([BLOCK], tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    if AHEAD:
        following = tl.load(logits_ptr + columns, mask=columns < vocab, other=0.0)
    for at in tl.range(0, vocab, BLOCK):
        inside = at + columns < vocab
        if AHEAD:
            logits = following
            following = tl.load(logits_ptr + at + BLOCK + columns, mask=at + BLOCK + columns < vocab, other=0.0)
        else:
            logits = tl.load(logits_ptr + at + columns, mask=inside, other=0.0)
        z = _capped(logits, softcap, HAS_SOFTCAP)
        totals += tl.where(inside, z, 0.0)
        z = tl.where(inside, z, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(z, 0))
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
        sums = sums * tl.exp(row_max - base) + tl.exp(z - base)
        row_max = new_max
    lse = row_max + tl.log(tl.sum(sums, 0))
    loss = lse - (1.0 - smoothing) * score - smoothing * (tl.sum(totals, 0) / vocab) + z_loss * lse * lse
    scale = 1.0
    if HAS_SCALES:
        scale = tl.load(scales_ptr + row).to(tl.float32)
    tl.store(losses_ptr + row, loss * scale)
    if GRADIENT:
        scale = tl.where(known, scale, float("nan"))
        if HAS_UNIT:
            scale /= tl.load(unit_ptr)
        if AHEAD:
            following = tl.load(logits_ptr + columns, mask=columns < vocab, other=0.0)
        for at in tl.range(0, rows, BLOCK):
            column = at + columns
            if AHEAD:
                logits = following
                following = tl.load(logits_ptr + BLOCK + column, mask=BLOCK + column < vocab, other=0.0)
            else:
                logits = tl.load(logits_ptr + column, mask=column < vocab, other=0.0)
            z = _capped(logits, softcap, HAS_SOFTCAP)
            gradient = tl.exp(z - lse) * (1.0 + 2.0 * z_loss * lse) - smoothing / vocab - tl.where(column == target, 1.0 - smoothing, 0.0)
            if HAS_SOFTCAP:
                gradient *= 1.0 - (z / softcap) * (z / softcap)
            gradient = tl.where(column < vocab, gradient * scale, 0.0)
            tl.store(gradients_ptr + column, gradient.to(gradients_ptr.dtype.element_ty), mask=column < rows)


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
                HAS_SCALES=scales is not None, HAS_SOFTCAP=softcap > 0, GRADIENT=gradient,
                BLOCK=min(BLOCK, triton.next_power_of_2(rows)), AHEAD=AHEAD, num_warps=WARPS)
        if gradient:
            products.dx(chunk, gradients, dx[chunk])
            products.add_dw(chunk, gradients, dw, begin == 0)
            if bias is not None:
                db += products.db(gradients)
    return losses, dx, dw, db
