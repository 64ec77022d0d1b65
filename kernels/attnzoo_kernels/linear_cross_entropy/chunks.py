"""The pass over the tokens, one chunk of logits after the other, and the kernel that computes losses and the gradients of the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import on_device_of
from attnzoo_kernels._triton.softmax import LOG2E, exp_in_units, tanh
from attnzoo_kernels.linear_cross_entropy.eight_bits import EightBits

LOGITS = 2**28  # about the logits of a chunk: half a gigabyte in 16 bits, so that the products are large
CHUNKS = 4  # a call with more chunks than this has larger ones, up to this many times the size: each chunk reads and writes all of dW
BLOCK = 4096  # columns that a program has in registers
KEPT = 26  # the most tiles of BLOCK // 2 columns in 16 bits that stay in registers


@triton.jit
def _logits(ptr, column, vocab, CUT: tl.constexpr):
    """A tile of logits. CUT: the vocabulary may end in the tile; columns after it are -inf. Without a mask, loads are wide."""
    if CUT:
        logits = tl.load(ptr + column, mask=column < vocab, other=-float("inf"))
    else:
        logits = tl.load(ptr + column)
    return logits


@triton.jit
def _store(ptr, column, values, vocab, CUT: tl.constexpr):
    """As `_logits` loads."""
    values = values.to(ptr.dtype.element_ty)
    if CUT:
        tl.store(ptr + column, values, mask=column < vocab)
    else:
        tl.store(ptr + column, values)


@triton.jit
def _capped(logits, softcap, HAS_SOFTCAP: tl.constexpr):
    """Logits in float32, by tanh within softcap."""
    z = logits.to(tl.float32)
    if HAS_SOFTCAP:
        z = softcap * tanh(z / softcap, True, False)
    return z


@triton.jit
def _capped_in(column, logits, vocab, softcap, CUT: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """The same for a tile of `_logits`, in which columns after the vocabulary stay -inf."""
    z = _capped(logits, softcap, HAS_SOFTCAP)
    if CUT and HAS_SOFTCAP:
        z = tl.where(column < vocab, z, -float("inf"))
    return z


@triton.jit
def _exp_of_difference(a, b, EXACT: tl.constexpr):
    """exp(a - b) for a <= b, under EXACT to a float32's last bit, else by one multiplication and addition."""
    if EXACT:
        y = exp_in_units(a - b, True)
    else:
        y = tl.exp2(a * LOG2E - b * LOG2E)
    return y


@triton.jit
def _gradient(z, base, factor, less, softcap, HAS_SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """exp(z - base) factor - less: the gradient of a row's loss by its logits."""
    gradient = _exp_of_difference(z, base, EXACT) * factor - less
    if HAS_SOFTCAP:
        gradient *= 1.0 - (z / softcap) * (z / softcap)
    return gradient


@triton.jit(do_not_specialize=["ignore_index"])
def cross_entropy_kernel(logits_ptr, gradients_ptr, unit_ptr, targets_ptr, scales_ptr, losses_ptr, rows, vocab, ignore_index, smoothing,
                         z_loss, softcap, HAS_UNIT: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
                         HAS_SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """A program has a row. Under GRADIENT the gradients of its loss times its scale, counted in units, go to gradients_ptr, which may be
    logits_ptr. TILES: the tiles of BLOCK columns that the vocabulary has, all of which stay in registers; 0: a row is read twice."""
    EXACT: tl.constexpr = logits_ptr.dtype.element_ty == tl.float32
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * rows
    gradients_ptr += row * rows
    columns = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], tl.float32)
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if GRADIENT:
            for at in tl.range(0, rows, BLOCK):
                tl.store(gradients_ptr + at + columns, zeros.to(gradients_ptr.dtype.element_ty), mask=at + columns < rows)
        return
    known = (target >= 0) & (target < vocab)
    # read before any of the row is overwritten: the sums below synchronise the program's warps
    score = _capped(tl.load(logits_ptr + target, mask=known, other=float("nan")), softcap, HAS_SOFTCAP)
    row_max = -float("inf")
    base = 0.0  # the same, but for a row of -inf
    # [BLOCK]
    sums = zeros
    totals = zeros
    kept = ()
    whole = vocab // BLOCK * BLOCK  # columns of tiles that the vocabulary fills
    if TILES:
        for tile in tl.static_range(TILES):
            kept += (_logits(logits_ptr, tile * BLOCK + columns, vocab, tile == TILES - 1),)
        maxima = kept[0].to(tl.float32)
        for tile in tl.static_range(1, TILES):
            maxima = tl.maximum(maxima, kept[tile].to(tl.float32))
        row_max = _capped(tl.max(maxima, 0), softcap, HAS_SOFTCAP)
        base = tl.where(row_max == -float("inf"), 0.0, row_max)
        for tile in tl.static_range(TILES):
            z = _capped_in(tile * BLOCK + columns, kept[tile], vocab, softcap, tile == TILES - 1, HAS_SOFTCAP)
            sums += _exp_of_difference(z, base, EXACT)
            if HAS_SMOOTHING:
                totals += tl.where(tile * BLOCK + columns < vocab, z, 0.0)
    else:
        for cut in tl.static_range(2):
            for at in tl.range(whole if cut else 0, vocab if cut else whole, BLOCK):
                logits = _logits(logits_ptr, at + columns, vocab, cut == 1)
                z = _capped_in(at + columns, logits, vocab, softcap, cut == 1, HAS_SOFTCAP)
                new_max = tl.maximum(row_max, tl.max(z, 0))
                base = tl.where(new_max == -float("inf"), 0.0, new_max)
                sums = sums * _exp_of_difference(row_max, base, EXACT) + _exp_of_difference(z, base, EXACT)
                row_max = new_max
                if HAS_SMOOTHING:
                    totals += tl.where(at + columns < vocab, z, 0.0)
    total = tl.sum(sums, 0)
    lse = row_max + tl.log(total)
    loss = lse - (1.0 - smoothing) * score - smoothing * (tl.sum(totals, 0) / vocab) + z_loss * lse * lse
    scale = 1.0
    if HAS_SCALES:
        scale = tl.load(scales_ptr + row).to(tl.float32)
    tl.store(losses_ptr + row, loss * scale)
    if GRADIENT:
        scale = tl.where(known, scale, float("nan"))
        if HAS_UNIT:
            scale /= tl.load(unit_ptr)
        factor = (1.0 + 2.0 * z_loss * lse) * scale / total
        less = smoothing / vocab * scale
        if TILES:
            for tile in tl.static_range(TILES):
                gradient = _gradient(_capped(kept[tile], softcap, HAS_SOFTCAP), base, factor, less, softcap, HAS_SOFTCAP, EXACT)
                _store(gradients_ptr, tile * BLOCK + columns, gradient, vocab, tile == TILES - 1)
        else:
            for cut in tl.static_range(2):
                for at in tl.range(whole if cut else 0, vocab if cut else whole, BLOCK):
                    z = _capped(_logits(logits_ptr, at + columns, vocab, cut == 1), softcap, HAS_SOFTCAP)
                    gradient = _gradient(z, base, factor, less, softcap, HAS_SOFTCAP, EXACT)
                    _store(gradients_ptr, at + columns, gradient, vocab, cut == 1)
        for at in tl.range(vocab, rows, BLOCK):
            tl.store(gradients_ptr + at + columns, zeros.to(gradients_ptr.dtype.element_ty), mask=at + columns < rows)
        tl.debug_barrier()  # the target's gradient overwrites what was stored there
        gradient = _gradient(score, base, factor, less + (1.0 - smoothing) * scale, softcap, HAS_SOFTCAP, EXACT)
        tl.store(gradients_ptr + target, gradient.to(gradients_ptr.dtype.element_ty), mask=known)


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


def _tiles(x: Tensor, vocab_size: int) -> tuple[int, int]:
    """BLOCK and TILES of the kernel."""
    block = min(BLOCK // 2, triton.next_power_of_2(vocab_size))
    tiles = -(-vocab_size // block)
    return (block, tiles) if x.element_size() == 2 and tiles <= KEPT else (min(BLOCK, triton.next_power_of_2(vocab_size)), 0)


def n_chunks(logits: int) -> int:
    """Into how many chunks a call with this many logits is cut."""
    small = -(-logits // LOGITS)
    return max(1, min(small, CHUNKS), -(-small // CHUNKS))


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
    block, tiles = _tiles(x, vocab_size)
    step = 256 * max(1, -(-tokens // (256 * n_chunks(tokens * rows))))  # equal sizes: a small last chunk would leave a part of the GPU idle
    for begin in range(0, tokens, step):
        chunk = slice(begin, begin + step)
        logits = products.logits(chunk, bias)
        gradients = products.room(logits) if gradient else logits
        with on_device_of(x):
            cross_entropy_kernel[(logits.shape[0],)](
                logits, gradients, products.unit, targets[chunk], None if scales is None else scales[chunk], losses[chunk], rows,
                vocab_size, ignore_index, label_smoothing, z_loss, softcap, HAS_UNIT=products.unit is not None,
                HAS_SCALES=scales is not None, HAS_SMOOTHING=label_smoothing != 0, HAS_SOFTCAP=softcap > 0,
                GRADIENT=gradient, BLOCK=block, TILES=tiles, num_warps=16 if tiles > 6 else 8)
        if gradient:
            products.dx(chunk, gradients, dx[chunk])
            products.add_dw(chunk, gradients, dw, begin == 0)
            if bias is not None:
                db += products.db(gradients)
    return losses, dx, dw, db
