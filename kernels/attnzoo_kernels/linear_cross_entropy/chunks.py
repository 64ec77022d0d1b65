"""The pass over the tokens, a chunk of logits after the other, and the kernel that turns logits into losses and their own gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels._triton.softmax import tanh

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
def cross_entropy_kernel(logits_ptr, targets_ptr, scales_ptr, losses_ptr, rows, vocab, ignore_index, smoothing, z_loss, softcap,
                         HAS_SCALES: tl.constexpr, HAS_SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
                         AHEAD: tl.constexpr):
    """A program has a row. Under GRADIENT its logits are replaced by the gradient of its loss times its scale."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * rows
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if GRADIENT:
            for at in tl.range(0, rows, BLOCK):
                tl.store(logits_ptr + at + columns, tl.zeros([BLOCK], logits_ptr.dtype.element_ty), mask=at + columns < rows)
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
            tl.store(logits_ptr + column, gradient.to(logits_ptr.dtype.element_ty), mask=column < rows)


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total += a b, in float32; total = a b if it is the first."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.mm(a, b, torch.float32, out=total) if first else torch.addmm(total, a, b, torch.float32, out=total)
    else:
        a, b = a.float(), b.float()
        torch.mm(a, b, out=total) if first else total.addmm_(a, b)


def passed_over(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scales: Tensor | None, ignore_index: int,
                label_smoothing: float, z_loss: float, softcap: float, vocab_size: int,
                gradient: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses (tokens,) times `scales`, and, under `gradient` (else empty), the gradients of their sum for x, weight and bias, of the latter
    two in float32."""
    tokens, rows = x.shape[0], weight.shape[0]
    matrix = weight.to(x.dtype)
    losses = torch.empty(tokens, dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x) if gradient else x.new_empty(0)
    dw = torch.empty(weight.shape if gradient else 0, dtype=torch.float32, device=x.device)
    if tokens == 0:
        dw.zero_()
    db = torch.zeros(rows if gradient and bias is not None else 0, dtype=torch.float32, device=x.device)
    n_chunks = max(1, -(-tokens * rows // LOGITS))  # alike, because a small last one leaves a part of the GPU idle
    for begin in range(0, tokens, step := 256 * max(1, -(-tokens // (256 * n_chunks)))):
        chunk = slice(begin, begin + step)
        part = x[chunk]
        # [tokens of the chunk, rows]
        logits = part @ matrix.t() if bias is None else torch.addmm(bias.to(x.dtype), part, matrix.t())
        with on_device_of(x):
            cross_entropy_kernel[(part.shape[0],)](
                logits, targets[chunk], None if scales is None else scales[chunk], losses[chunk], rows, vocab_size, ignore_index,
                label_smoothing, z_loss, softcap, HAS_SCALES=scales is not None, HAS_SOFTCAP=softcap > 0, GRADIENT=gradient,
                BLOCK=min(BLOCK, triton.next_power_of_2(rows)), AHEAD=AHEAD, num_warps=WARPS)
        if gradient:
            torch.mm(logits, matrix, out=dx[chunk])
            _add_product(dw, logits.t(), part, begin == 0)
            if bias is not None:
                db += logits.sum(0, dtype=torch.float32)
    return losses, dx, dw, db
