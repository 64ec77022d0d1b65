"""The chosen blocks in 16 bits: a program has one block of keys and goes over the queries that chose it, which it gathers. The forward
writes a part of the output for each query and chosen block, and the backward a part of dQ; parts.py merges the former and adds up the
latter. Hopper has kernels of its own for heads of 64 and 128 and blocks of 64 tokens, and of 128 in the forward: hopper.py and
hopper_backward.py.

Here parts lie in the order of `routes.Routes`: a part row is a pair's position times `rows`, plus the head among the `rows` heads that
choose together. An own row is a token times the number of heads, plus the head. A block has a program for each CHUNK of its part rows. The
shares of these programs in dK and dV are added up in a fixed order, so that they repeat bit by bit.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.forward import normalised
from attnzoo_kernels._triton.launch import architecture, block_width, on_device_of, value_block
from attnzoo_kernels._triton.softmax import in_units, log_sum_exp, softmax_step
from attnzoo_kernels._triton.tiles import Operand, find_tile, first_slot, head_rows, load_rows, store_rows
from attnzoo_kernels.flash.tiles import hopper_like
from attnzoo_kernels.routed.parts import BLOCK_ROWS, gather_rows, load_tile, rows_of_program, store_tile

NUMBERS = ["count", "none", "total", "total_k"]


@dataclass(frozen=True)
class Tile:
    block_m: int  # part rows of a step
    steps: int  # of a program at most
    num_warps: int
    num_stages: int


INTERPRETER = Tile(16, 2, 4, 1)  # arch 0: small tiles reach every branch of the code


def forward_tile(arch: int) -> Tile:
    """The kernel prefetches by itself, so that the loop has one stage."""
    return INTERPRETER if arch == 0 else Tile(64, 8, 4, 1)


def backward_tile(arch: int, large: bool, wide: bool) -> Tile:
    """large: blocks of more than 64 keys. wide: keys or values of more than 64 columns. Hopper's entries were measured on an H200, except
    for large blocks that are not wide. The others are the largest that compile without spills for sm_80 and fit 99 KB of shared memory."""
    if arch == 0:
        return INTERPRETER
    if hopper_like(arch):
        return Tile(64, 32, 8, 2) if large else Tile(64, 32, 4, 2) if wide else Tile(128, 8, 4, 2)
    return Tile(16, 64, 4, 2) if wide else Tile(32, 64, 4, 2)


def takes(q: Tensor, v: Tensor, block_size: int) -> bool:
    """Whether these kernels take the chosen blocks of a call. The backward of large blocks of wide keys needs Hopper's shared memory."""
    width = max(q.shape[-1], v.shape[-1])
    if q.dtype == torch.float32 or max(block_size, width) > 128:
        return False
    arch = architecture(q)
    return min(block_size, width) <= 64 or arch == 0 or hopper_like(arch)


@triton.jit
def _rows_of_block(cu_seqlens_q, cu_seqlens_k, count, none, total, total_k, CHUNK: tl.constexpr):
    """(this program's first part row, how many it has, its block's first key, how many keys that has, key head). Block `none` has the pairs
    that stand for no block, and no keys."""
    number, chunk, first, length, key, keys = find_tile(cu_seqlens_q, cu_seqlens_k, tl.program_id(0), none, total, CHUNK)
    head = number // count
    return first + chunk * CHUNK, tl.minimum(length - chunk * CHUNK, CHUNK), key - head * total_k, keys, head


@triton.jit
def _block_rows(ptr, strides, key, keys, head):
    """The Rows of a block in a tensor (tokens, heads, width)."""
    return head_rows(Operand(ptr, 0, strides[0], strides[1]), 0, head, key, keys, False)


@triton.jit
def _load_block(ptr, strides, key, keys, head, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """[BLOCK_N, BLOCK_WIDTH], zero beyond the block's keys."""
    return load_rows(_block_rows(ptr, strides, key, keys, head), 0, WIDTH, BLOCK_N, BLOCK_WIDTH, True, False)


@triton.jit
def _own_rows(pair_ptr, part_row, inside, ROWS: tl.constexpr, SLOTS: tl.constexpr):
    """The own rows of part rows. The numbers of a model are constants, because a division by another number takes many instructions."""
    part_row = part_row.to(tl.uint32)
    pair = tl.load(pair_ptr + part_row // ROWS, mask=inside, other=0).to(tl.uint32)
    return pair // SLOTS * ROWS + part_row % ROWS


@triton.jit(do_not_specialize=NUMBERS)
def routed_walk_fwd_kernel(q_ptr, k_ptr, v_ptr, pair_ptr, cu_seqlens_q, cu_seqlens_k, part_ptr, lse_ptr, q_strides, k_strides, v_strides,
                           softmax_scale, count, none, total, total_k, HEADS: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
                           HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                           BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr):
    """Output and LSE of each part row. Those that stand for no block give zeros and -inf."""
    first, length, key, keys, head = _rows_of_block(cu_seqlens_q, cu_seqlens_k, count, none, total, total_k, CHUNK)
    if length <= 0:
        return
    # [BLOCK_N, BLOCK_D] and [BLOCK_N, BLOCK_DV]
    k = _load_block(k_ptr, k_strides, key, keys, head, HEAD_DIM, BLOCK_N, BLOCK_D)
    v = _load_block(v_ptr, v_strides, key, keys, head, VALUE_DIM, BLOCK_N, BLOCK_DV)
    is_key = tl.arange(0, BLOCK_N) < keys
    part_ptr += first.to(tl.int64) * VALUE_DIM
    # each step loads the query rows of the next one, and the numbers of the rows of the one after that
    lane = tl.arange(0, BLOCK_M)
    own_row = _own_rows(pair_ptr, first + lane, lane < length, ROWS, SLOTS)
    next_q = gather_rows(q_ptr, q_strides, own_row, (lane < length) & (keys > 0), HEADS, HEAD_DIM, BLOCK_D)
    own_row = _own_rows(pair_ptr, first + lane + BLOCK_M, lane + BLOCK_M < length, ROWS, SLOTS)
    for at in range(0, length, BLOCK_M):
        row = at + lane
        inside = row < length
        # [BLOCK_M, BLOCK_D]
        q = next_q
        next_q = gather_rows(q_ptr, q_strides, own_row, (row + BLOCK_M < length) & (keys > 0), HEADS, HEAD_DIM, BLOCK_D)
        own_row = _own_rows(pair_ptr, first + row + 2 * BLOCK_M, row + 2 * BLOCK_M < length, ROWS, SLOTS)
        # [BLOCK_M, BLOCK_N]
        scores = tl.where(is_key[None, :], tl.dot(q, tl.trans(k)), -float("inf"))
        row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
        weights, row_max, row_sum, _ = softmax_step(scores, row_max, tl.zeros([BLOCK_M], tl.float32), in_units(softmax_scale, False), True,
                                                    False)
        # [BLOCK_M, BLOCK_DV]
        out = normalised(tl.dot(weights.to(v.dtype), v), row_sum, 1.0, "tf32")
        store_tile(part_ptr, row, inside, out, VALUE_DIM, BLOCK_DV)
        tl.store(lse_ptr + first + row, log_sum_exp(row_max, row_sum, False), mask=inside)


@triton.jit(do_not_specialize=["tokens", "heads"], do_not_specialize_on_alignment=["grad_lse_ptr"])
def routed_walk_stats_kernel(out_ptr, do_ptr, stats_ptr, grad_lse_ptr, row_stats_ptr, tokens, heads, WIDTH: tl.constexpr,
                             BLOCK_WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, HAS_GRAD_LSE: tl.constexpr):
    """What the backward reads of each own row: the LSEs in units of log2, then delta. Behind the last row stands one that has no weights:
    its LSE is +inf."""
    row, inside, lse_at = rows_of_program(tokens, heads, BLOCK_ROWS)
    delta = tl.sum(load_tile(out_ptr, row, inside, WIDTH, BLOCK_WIDTH) * load_tile(do_ptr, row, inside, WIDTH, BLOCK_WIDTH), 1)
    if HAS_GRAD_LSE:
        delta -= tl.load(grad_lse_ptr + lse_at, mask=inside, other=0.0)
    rows = tokens.to(tl.int64) * heads
    row_max = tl.load(stats_ptr + lse_at, mask=inside, other=float("inf"))
    sum_log2 = tl.load(stats_ptr + rows + lse_at, mask=inside, other=0.0)
    tl.store(row_stats_ptr + row, row_max + sum_log2, mask=row <= rows)
    tl.store(row_stats_ptr + rows + 1 + row, delta, mask=row <= rows)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=["delta_ptr"])
def routed_walk_bwd_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, pair_ptr, cu_seqlens_q, cu_seqlens_k, dpart_ptr, dk_ptr, dv_ptr,
                           q_strides, k_strides, v_strides, do_strides, softmax_scale, count, none, total, total_k, HEADS: tl.constexpr,
                           ROWS: tl.constexpr, SLOTS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                           BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
                           CHUNK: tl.constexpr):
    """dQ of each part row, zeros for those that stand for no block, and this program's dK and dV."""
    first, length, key, keys, head = _rows_of_block(cu_seqlens_q, cu_seqlens_k, count, none, total, total_k, CHUNK)
    if length <= 0:
        return
    # [BLOCK_N, BLOCK_D] and [BLOCK_N, BLOCK_DV]
    k = _load_block(k_ptr, k_strides, key, keys, head, HEAD_DIM, BLOCK_N, BLOCK_D)
    v = _load_block(v_ptr, v_strides, key, keys, head, VALUE_DIM, BLOCK_N, BLOCK_DV)
    is_key = tl.arange(0, BLOCK_N) < keys
    unit = in_units(softmax_scale, False)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    dpart_ptr += first.to(tl.int64) * HEAD_DIM
    for at in range(0, length, BLOCK_M):
        row = at + tl.arange(0, BLOCK_M)
        inside = row < length
        seen = inside & (keys > 0)
        own_row = _own_rows(pair_ptr, first + row, inside, ROWS, SLOTS)
        # [BLOCK_M, BLOCK_D] and [BLOCK_M, BLOCK_DV]
        q = gather_rows(q_ptr, q_strides, own_row, seen, HEADS, HEAD_DIM, BLOCK_D)
        do = gather_rows(do_ptr, do_strides, own_row, seen, HEADS, VALUE_DIM, BLOCK_DV)
        lse_log2 = tl.load(lse_ptr + own_row, mask=seen, other=0.0)
        delta = tl.load(delta_ptr + own_row, mask=seen, other=0.0)
        # [BLOCK_N, BLOCK_M]; keys beyond the block's end may give any number. Rows beyond the chunk's end have q, dO and delta of zero
        weights = tl.exp2(tl.dot(k, tl.trans(q)) * unit - lse_log2[None, :])
        weights = tl.where(is_key[:, None], weights, 0.0)
        dv = tl.dot(weights.to(do.dtype), do, dv)
        dscores = (weights * (tl.dot(v, tl.trans(do)) - delta[None, :])).to(q.dtype)
        dk = tl.dot(dscores, q, dk)
        # dQ by its transpose, so that both products read the same dS
        dq = tl.trans(tl.dot(tl.trans(k), dscores)) * softmax_scale
        store_tile(dpart_ptr, row, inside, dq, HEAD_DIM, BLOCK_D)
    at = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    store_tile(dk_ptr, at, is_key, dk * softmax_scale, HEAD_DIM, BLOCK_D)
    store_tile(dv_ptr, at, is_key, dv, VALUE_DIM, BLOCK_DV)


@triton.jit(do_not_specialize=["count", "total_k", "turns", "programs_a_turn"])
def routed_walk_sum_kernel(own_ptr, part_ptr, cu_seqlens_q, cu_seqlens_k, own_strides, count, total_k, turns, programs_a_turn,
                           WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_ROWS: tl.constexpr,
                           CHUNK: tl.constexpr):
    """Adds to own_ptr, in place, what a block's programs gave, for BLOCK_ROWS of its keys. A block has a program for each CHUNK of its rows
    in each of `turns`. CHUNK counts the rows of all turns."""
    number = tl.program_id(0) // (BLOCK_N // BLOCK_ROWS)
    at = tl.program_id(0) % (BLOCK_N // BLOCK_ROWS) * BLOCK_ROWS
    first, end = tl.load(cu_seqlens_q + number), tl.load(cu_seqlens_q + number + 1)
    if first == end:
        return
    key = tl.load(cu_seqlens_k + number)
    keys = tl.load(cu_seqlens_k + number + 1) - key
    head = number // count
    rows = _block_rows(own_ptr, own_strides, key - head * total_k, keys, head)
    acc = load_rows(rows, at, WIDTH, BLOCK_ROWS, BLOCK_WIDTH, True, False).to(tl.float32)
    lane = at + tl.arange(0, BLOCK_ROWS)
    chunks = tl.cdiv(end - first, CHUNK)
    for n in range(chunks * turns):
        program = first_slot(first, number, CHUNK, None) + n % chunks + n // chunks * programs_a_turn
        acc += load_tile(part_ptr, program.to(tl.int64) * BLOCK_N + lane, lane < keys, WIDTH, BLOCK_WIDTH)
    store_rows(rows, acc, at, WIDTH, BLOCK_ROWS, BLOCK_WIDTH)


def row_statistics(out: Tensor, grad_out: Tensor, stats: Tensor, grad_lse: Tensor | None) -> Tensor:
    """What routed_walk_stats_kernel gives: (2, tokens * heads + 1)."""
    tokens, heads, width = out.shape
    row_stats = stats.new_empty(2, tokens * heads + 1)
    routed_walk_stats_kernel[(triton.cdiv(tokens * heads + 1, BLOCK_ROWS),)](
        out, grad_out, stats, grad_lse, row_stats, tokens, heads, WIDTH=width, BLOCK_WIDTH=block_width(width), BLOCK_ROWS=BLOCK_ROWS,
        HAS_GRAD_LSE=grad_lse is not None, num_warps=4)
    return row_stats


def add_keys(dk: Tensor, dv: Tensor, dk_part: Tensor, dv_part: Tensor, chosen_q: Tensor, chosen_k: Tensor, chunk: int,
             turns: int) -> None:
    """Adds the programs' shares (programs, block, width) to dk and dv, (tokens, heads, width). chunk: CHUNK of the kernel."""
    programs, block_n, _ = dk_part.shape
    none = chosen_q.shape[0] - 1
    for own, part in ((dk, dk_part), (dv, dv_part)):
        total_k, heads, width = own.shape
        routed_walk_sum_kernel[(none * (block_n // BLOCK_ROWS),)](
            own, part, chosen_q, chosen_k, own.stride()[:2], none // heads, total_k, turns, programs // turns, WIDTH=width,
            BLOCK_WIDTH=block_width(width), BLOCK_N=block_n, BLOCK_ROWS=BLOCK_ROWS, CHUNK=chunk, num_warps=4)


def _constants(q: Tensor, v: Tensor, place: Tensor, rows: int, block_size: int, backward: bool) -> dict[str, int]:
    width, value_width = block_width(q.shape[-1]), value_block(q.shape[-1], v.shape[-1])
    block_n = block_width(block_size)
    arch = architecture(q)
    tile = backward_tile(arch, block_n > 64, max(width, value_width) > 64) if backward else forward_tile(arch)
    return {"HEADS": q.shape[1], "ROWS": rows, "SLOTS": place.shape[1], "HEAD_DIM": q.shape[-1], "VALUE_DIM": v.shape[-1],
            "BLOCK_D": width, "BLOCK_DV": value_width, "BLOCK_N": block_n, "BLOCK_M": tile.block_m, "CHUNK": tile.block_m * tile.steps,
            "num_warps": tile.num_warps, "num_stages": tile.num_stages}


def _numbers(k: Tensor, pair: Tensor, chosen_q: Tensor, rows: int) -> tuple[int, int, int, int]:
    """The kernels' NUMBERS."""
    none = chosen_q.shape[0] - 1
    return none // k.shape[1], none, pair.numel() * rows, k.shape[0]


def launch_forward(q: Tensor, k: Tensor, v: Tensor, place: Tensor, pair: Tensor, chosen_q: Tensor, chosen_k: Tensor, rows: int,
                   block_size: int, softmax_scale: float) -> tuple[Tensor, Tensor, int]:
    """Output (pairs * rows, 1, width) and LSE (1, pairs * rows) of the parts, and how many heads of a pair have theirs side by side."""
    _, none, total, _ = numbers = _numbers(k, pair, chosen_q, rows)
    constants = _constants(q, v, place, rows, block_size, False)
    part = q.new_empty(total, 1, v.shape[-1])
    lse = torch.empty(1, total, dtype=torch.float32, device=q.device)
    with on_device_of(q):
        routed_walk_fwd_kernel[(total // constants["CHUNK"] + none + 1,)](
            q, k, v, pair, chosen_q, chosen_k, part, lse, *(x.stride()[:2] for x in (q, k, v)), softmax_scale, *numbers, **constants)
    return part, lse, rows


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, place: Tensor,
                    pair: Tensor, chosen_q: Tensor, chosen_k: Tensor, rows: int, block_size: int, softmax_scale: float, dk: Tensor,
                    dv: Tensor) -> tuple[Tensor, int]:
    """dQ of the parts, (pairs * rows, 1, width), and how many heads of a pair have theirs side by side. What they give for keys and values
    is added to dk and dv. grad_out, grad_lse and out are contiguous; out and stats are those of all parts together."""
    _, none, total, _ = numbers = _numbers(k, pair, chosen_q, rows)
    constants = _constants(q, v, place, rows, block_size, True)
    block_n, chunk = constants["BLOCK_N"], constants["CHUNK"]
    programs = total // chunk + none + 1
    dpart = q.new_empty(total, 1, q.shape[-1])
    dk_part, dv_part = (stats.new_empty(programs, block_n, x.shape[-1]) for x in (k, v))
    with on_device_of(q):
        row_stats = row_statistics(out, grad_out, stats, grad_lse)
        routed_walk_bwd_kernel[(programs,)](
            q, k, v, grad_out, *row_stats, pair, chosen_q, chosen_k, dpart, dk_part, dv_part,
            *(x.stride()[:2] for x in (q, k, v, grad_out)), softmax_scale, *numbers, **constants)
        add_keys(dk, dv, dk_part, dv_part, chosen_q, chosen_k, chunk, 1)
    return dpart, rows
