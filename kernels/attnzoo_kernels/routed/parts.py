"""What joins a query's own block and its chosen blocks: rows are copied into the order of blocks, and partial results are merged by LSE."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import block_width, next_power_of_2, on_device_of
from attnzoo_kernels._triton.softmax import LOG2E, exp_in_units
from attnzoo_kernels._triton.tiles import load_rows_at, store_rows_at

BLOCK_ROWS = 16
NUMBERS = ["tokens", "heads", "rows", "slots", "pairs", "together"]


@triton.jit
def rows_of_program(tokens, heads, BLOCK_ROWS: tl.constexpr):
    """(token, head) pairs of a program as one number, which of them there are, and where their LSEs lie in (heads, tokens)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return row, row < tokens.to(tl.int64) * heads, row % heads * tokens + row // heads


@triton.jit
def _part_row(place_ptr, row, inside, slot, rows, slots, pairs, together):
    """Where the row of a slot lies among the parts. `rows` heads choose together. The parts of `together` of them follow each other in a
    pair; those of the next `together` heads come after all pairs."""
    place = tl.load(place_ptr + row // rows * slots + slot, mask=inside, other=0).to(tl.int64)
    return (row % rows // together * pairs + place) * together + row % together


@triton.jit
def _part_rows(place_ptr, first, tokens, heads, rows, slots, pairs, together, BLOCK_ROWS: tl.constexpr, SLOTS: tl.constexpr):
    """_part_row of SLOTS slots from `first` on, [SLOTS * BLOCK_ROWS], and which of them there are. The rows of a slot follow each other."""
    n = tl.arange(0, SLOTS * BLOCK_ROWS)
    slot = first + n // BLOCK_ROWS
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + n % BLOCK_ROWS
    there = (row < tokens.to(tl.int64) * heads) & (slot < slots)
    return _part_row(place_ptr, row, there, slot, rows, slots, pairs, together), there


@triton.jit
def gather_tile(ptr, stride_row, stride_head, token, head, inside, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """[rows, BLOCK_WIDTH] of tokens and heads [rows] of a tensor (tokens, heads, width), in its dtype."""
    return load_rows_at(ptr + token.to(tl.int64) * stride_row + head.to(tl.int64) * stride_head, inside, WIDTH, BLOCK_WIDTH)


@triton.jit
def gather_rows(ptr, strides, row, inside, heads, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """gather_tile of rows [rows] that count the heads of all tokens. strides: of tokens and heads."""
    return gather_tile(ptr, *strides, row // heads, row % heads, inside, WIDTH, BLOCK_WIDTH)


@triton.jit
def load_tile(ptr, row, inside, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """[rows, BLOCK_WIDTH] in float32, of the rows `row` [rows]."""
    return load_rows_at(ptr + row * WIDTH, inside, WIDTH, BLOCK_WIDTH).to(tl.float32)


@triton.jit
def store_tile(ptr, row, inside, tile, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    store_rows_at(ptr + row * WIDTH, tile, inside, WIDTH, BLOCK_WIDTH)


@triton.jit(do_not_specialize=[*NUMBERS, "stride_own", "stride_part"],
            do_not_specialize_on_alignment=["own_numbers_ptr", "part_numbers_ptr"])
def routed_spread_kernel(own_ptr, own_numbers_ptr, place_ptr, part_ptr, part_numbers_ptr, stride_row, stride_head, stride_own, stride_part,
                         tokens, heads, rows, slots, pairs, together, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
                         BLOCK_ROWS: tl.constexpr, PER_ROW: tl.constexpr):
    """Copies each row, and its PER_ROW float32 numbers, to the places of its slots."""
    row, inside, lse_at = rows_of_program(tokens, heads, BLOCK_ROWS)
    tile = gather_rows(own_ptr, (stride_row, stride_head), row, inside, heads, WIDTH, BLOCK_WIDTH)
    for slot in range(slots):
        at = _part_row(place_ptr, row, inside, slot, rows, slots, pairs, together)
        store_tile(part_ptr, at, inside, tile, WIDTH, BLOCK_WIDTH)
        for n in tl.static_range(PER_ROW):
            number = tl.load(own_numbers_ptr + n * stride_own + lse_at, mask=inside, other=0.0)
            tl.store(part_numbers_ptr + n * stride_part + at, number, mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def routed_sum_kernel(own_ptr, part_ptr, place_ptr, out_ptr, tokens, heads, rows, slots, pairs, together, WIDTH: tl.constexpr,
                      BLOCK_WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, SLOTS: tl.constexpr):
    """Adds the parts of each row's slots to its own one."""
    row, inside, _ = rows_of_program(tokens, heads, BLOCK_ROWS)
    acc = load_tile(own_ptr, row, inside, WIDTH, BLOCK_WIDTH)
    for first in range(0, slots, SLOTS):
        part_row, there = _part_rows(place_ptr, first, tokens, heads, rows, slots, pairs, together, BLOCK_ROWS, SLOTS)
        parts = load_tile(part_ptr, part_row, there, WIDTH, BLOCK_WIDTH)
        acc += tl.sum(tl.reshape(parts, [SLOTS, BLOCK_ROWS, BLOCK_WIDTH]), 0)
    store_tile(out_ptr, row, inside, acc, WIDTH, BLOCK_WIDTH)


@triton.jit
def _load_top(lse_ptr, stats_ptr, stride_stats, at, inside, EXACT: tl.constexpr):
    """(top, sum), where exp(top) * sum is the sum of a part's weights; top is -inf if the part has no key. EXACT: from softmax_stats, whose
    maximum and sum lose no bits of float32 where scores are large."""
    if EXACT:
        top = tl.load(stats_ptr + at, mask=inside, other=float("inf"))
        top = tl.where(top == float("inf"), -float("inf"), top)
        total = tl.load(stats_ptr + stride_stats + at, mask=inside, other=1.0)
    else:
        top = tl.load(lse_ptr + at, mask=inside, other=-float("inf"))
        total = tl.full(top.shape, 1.0, tl.float32)
    return top, total


@triton.jit(do_not_specialize=[*NUMBERS, "stride_own", "stride_part"])
def routed_merge_kernel(own_ptr, own_lse_ptr, own_stats_ptr, part_ptr, part_lse_ptr, part_stats_ptr, place_ptr, out_ptr, lse_ptr, stats_ptr,
                        stride_own, stride_part, tokens, heads, rows, slots, pairs, together, WIDTH: tl.constexpr,
                        BLOCK_WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, SLOTS: tl.constexpr, EXACT: tl.constexpr):
    """Output, LSE and statistics of each row, from its own part and those of its slots."""
    row, inside, lse_at = rows_of_program(tokens, heads, BLOCK_ROWS)
    base, total = _load_top(own_lse_ptr, own_stats_ptr, stride_own, lse_at, inside, EXACT)
    acc = total[:, None] * load_tile(own_ptr, row, inside, WIDTH, BLOCK_WIDTH)
    for first in range(0, slots, SLOTS):
        part_row, there = _part_rows(place_ptr, first, tokens, heads, rows, slots, pairs, together, BLOCK_ROWS, SLOTS)
        parts = load_tile(part_ptr, part_row, there, WIDTH, BLOCK_WIDTH)
        top, part_sum = _load_top(part_lse_ptr, part_stats_ptr, stride_part, part_row, there, EXACT)
        top = tl.reshape(top, [SLOTS, BLOCK_ROWS])
        old, base = base, tl.maximum(base, tl.max(top, 0))
        finite = tl.where(base == -float("inf"), 0.0, base)  # avoids inf - inf in a row that sees no key
        rescale = exp_in_units(old - finite, True)
        weight = tl.reshape(part_sum, [SLOTS, BLOCK_ROWS]) * exp_in_units(top - finite[None, :], True)
        acc = acc * rescale[:, None] + tl.sum(weight[:, :, None] * tl.reshape(parts, [SLOTS, BLOCK_ROWS, BLOCK_WIDTH]), 0)
        total = total * rescale + tl.sum(weight, 0)
    empty = base == -float("inf")
    total = tl.where(total > 0, total, 1.0)
    store_tile(out_ptr, row, inside, acc / total[:, None], WIDTH, BLOCK_WIDTH)
    tl.store(lse_ptr + lse_at, tl.where(empty, -float("inf"), base + tl.log(total)), mask=inside)
    # as softmax_stats
    tl.store(stats_ptr + lse_at, tl.where(empty, float("inf"), base if EXACT else base * LOG2E), mask=inside)
    tl.store(stats_ptr + stride_own + lse_at, total if EXACT else tl.log2(total), mask=inside)


@triton.jit
def _derive_part(ptr, dpart_ptr, dlse_ptr, at, lse_at, weight, dlse, out, dout, inside, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    part = load_tile(ptr, at, inside, WIDTH, BLOCK_WIDTH)
    store_tile(dpart_ptr, at, inside, weight[:, None] * dout, WIDTH, BLOCK_WIDTH)
    tl.store(dlse_ptr + lse_at, weight * (tl.sum(dout * (part - out), 1) + dlse), mask=inside)


@triton.jit(do_not_specialize=[*NUMBERS, "stride_own", "stride_part"], do_not_specialize_on_alignment=["grad_lse_ptr"])
def routed_merge_bwd_kernel(dout_ptr, grad_lse_ptr, own_ptr, own_stats_ptr, part_ptr, part_stats_ptr, place_ptr, out_ptr, stats_ptr,
                            down_ptr, down_lse_ptr, dpart_ptr, dpart_lse_ptr, stride_own, stride_part, tokens, heads, rows, slots, pairs,
                            together, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, HAS_GRAD_LSE: tl.constexpr):
    """The merge's backward, for float32. An empty row has base +inf, which makes all of its weights zero."""
    row, inside, lse_at = rows_of_program(tokens, heads, BLOCK_ROWS)
    base = tl.load(stats_ptr + lse_at, mask=inside, other=0.0)
    total = tl.load(stats_ptr + stride_own + lse_at, mask=inside, other=1.0)
    dlse = tl.zeros([BLOCK_ROWS], tl.float32)
    if HAS_GRAD_LSE:
        dlse = tl.load(grad_lse_ptr + lse_at, mask=inside, other=0.0)
    out = load_tile(out_ptr, row, inside, WIDTH, BLOCK_WIDTH)
    dout = load_tile(dout_ptr, row, inside, WIDTH, BLOCK_WIDTH)
    top, part_sum = _load_top(None, own_stats_ptr, stride_own, lse_at, inside, True)
    _derive_part(own_ptr, down_ptr, down_lse_ptr, row, lse_at, part_sum * exp_in_units(top - base, True) / total, dlse, out, dout, inside,
                 WIDTH, BLOCK_WIDTH)
    for slot in range(slots):
        at = _part_row(place_ptr, row, inside, slot, rows, slots, pairs, together)
        top, part_sum = _load_top(None, part_stats_ptr, stride_part, at, inside, True)
        _derive_part(part_ptr, dpart_ptr, dpart_lse_ptr, at, at, part_sum * exp_in_units(top - base, True) / total, dlse, out, dout, inside,
                     WIDTH, BLOCK_WIDTH)


def _launch(kernel, tensors: tuple, like: Tensor, place: Tensor, rows: int, together: int, block_rows: int = BLOCK_ROWS,
            **constants) -> None:
    """`like`: (tokens, heads, width), the rows that programs are for. together: of how many heads the parts of a pair follow each other."""
    tokens, heads, width = like.shape
    if like.numel():
        with on_device_of(like):
            kernel[(triton.cdiv(tokens * heads, block_rows),)](
                *tensors, tokens, heads, rows, place.shape[1], place.numel(), together, WIDTH=width, BLOCK_WIDTH=block_width(width),
                BLOCK_ROWS=block_rows, **constants, num_warps=4)


def _at_once(part: Tensor, place: Tensor, thread_bytes: int) -> dict[str, int]:
    """How many rows a program joins, and how many of their slots it loads at once: `thread_bytes` a thread at most. The fewest rows are
    those that have a thread for every 16 bytes."""
    size = block_width(part.shape[-1]) * part.element_size()
    block_rows, most = triton.cdiv(2048, size), 128 * thread_bytes // size
    slots = min(next_power_of_2(place.shape[1]), most // block_rows)
    return {"block_rows": min(most // slots, BLOCK_ROWS), "SLOTS": slots}


def launch_spread(own: Tensor, numbers: Tensor | None, place: Tensor, rows: int) -> tuple[Tensor, Tensor | None]:
    """own (tokens, heads, width) in the order of places, (places * rows, 1, width), and numbers (..., heads, tokens), float32, likewise,
    (..., 1, places * rows)."""
    total = place.numel() * rows
    part = own.new_empty(total, 1, own.shape[-1])
    given, part_numbers, planes = None, None, 0
    if numbers is not None:
        given, planes = numbers.contiguous(), numbers.shape[:-2].numel()
        part_numbers = numbers.new_empty(*numbers.shape[:-2], 1, total)
    _launch(routed_spread_kernel, (own, given, place, part, part_numbers, *own.stride()[:2], own.shape[:2].numel(), total), own, place,
            rows, rows, PER_ROW=planes)
    return part, part_numbers


def launch_sum(own: Tensor, part: Tensor, place: Tensor, rows: int, together: int) -> Tensor:
    """own (tokens, heads, width) and each row's slots of part (places * rows, 1, width), added up in their order."""
    out = torch.empty_like(own)
    _launch(routed_sum_kernel, (own, part, place, out), out, place, rows, together, **_at_once(part, place, 128))
    return out


def launch_merge(own: Tensor, own_lse: Tensor, own_stats: Tensor, part: Tensor, part_lse: Tensor, part_stats: Tensor | None,
                 place: Tensor, rows: int, together: int) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE and statistics of all parts together, as one forward would give them. own: (tokens, heads, width); own_lse: (heads,
    tokens); own_stats: (2, heads, tokens); part: (places * rows, 1, width); part_lse: (1, places * rows); part_stats: (2, 1, places *
    rows), read in float32 only."""
    out, lse, stats = (torch.empty_like(x) for x in (own, own_lse, own_stats))
    _launch(routed_merge_kernel, (own, own_lse, own_stats, part, part_lse, part_stats, place, out, lse, stats, own_lse.numel(),
                                  part_lse.numel()),
            own, place, rows, together, EXACT=own.dtype == torch.float32, **_at_once(part, place, 256))
    return out, lse, stats


def launch_merge_backward(dout: Tensor, grad_lse: Tensor | None, own: Tensor, own_stats: Tensor, part: Tensor, part_stats: Tensor,
                          place: Tensor, out: Tensor, stats: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In float32, the gradients of own and its LSE, and of part and its LSE."""
    gradients = tuple(torch.empty_like(x) for pair in ((own, own_stats[0]), (part, part_stats[0])) for x in pair)
    _launch(routed_merge_bwd_kernel,
            (dout, grad_lse, own, own_stats, part, part_stats, place, out, stats, *gradients, own_stats[0].numel(), part_stats[0].numel()),
            own, place, rows, rows, HAS_GRAD_LSE=grad_lse is not None)
    return gradients
