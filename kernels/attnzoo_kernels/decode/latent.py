"""Decoding over latents that all heads read: a row of the cache is loaded once, as key and as value.

The tiles of all sequences are divided as in `shares`; a sequence is one piece. Neighbouring programs read the same tiles for different rows
of queries, so that the cache is read from memory once. A second kernel merges the partial results.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnzoo_kernels._triton.call import Layout, layout
from attnzoo_kernels._triton.forward import empty_softmax, normalised
from attnzoo_kernels._triton.launch import (
    SEQUENCE_END,
    Launch,
    architecture,
    are_aligned,
    block_width,
    multiprocessors,
    on_device_of,
    tma_takes_layout,
)
from attnzoo_kernels._triton.softmax import add_dot, in_units, log_sum_exp, score_dot, softmax_step
from attnzoo_kernels._triton.tiles import BY_SEQUENCE, Operand, head_rows, load_rows, load_rows_at
from attnzoo_kernels.decode.forward import Pages, load_pages, overlaps
from attnzoo_kernels.decode.shares import add_parts, find_sequence, sequence_tiles, total_tiles
from attnzoo_kernels.decode.tiles import latent_tile

COLUMNS = 128  # columns of a row that a program of the second kernel merges


class Own(NamedTuple):
    """What load_pages asks for."""

    PAGE: Any
    DTYPE: Any


@triton.jit
def _rows_of(source, block_table, seq, length, max_len, n_pages, stride_batch, stride_row, stride_table, PAGE: tl.constexpr,
             TMA: tl.constexpr):
    """The rows of a sequence in the cache, for _load."""
    if PAGE:
        rows = Pages(source, block_table + tl.cast(seq, tl.int64) * stride_table, n_pages, length, stride_batch, stride_row)
    else:
        rows = head_rows(Operand(source, stride_batch, stride_row, 0), seq, 0, seq * max_len if TMA else 0, length, TMA)
    return rows


@triton.jit
def _load(rows, at, q, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr, PAGE: tl.constexpr, TMA: tl.constexpr):
    """Rows at .. at + BLOCK, zeros behind the sequence."""
    if PAGE:
        tile = load_pages(Own(PAGE, q.dtype), rows, at, WIDTH, BLOCK, BLOCK_WIDTH, True, False)
    else:
        tile = load_rows(rows, at, WIDTH, BLOCK, BLOCK_WIDTH, not TMA, TMA)
    return tile


@triton.jit(do_not_specialize=["batch", "max_len", "n_pages", "seqlen_q", "heads", "parts", "shares", "stride_table"],
            do_not_specialize_on_alignment=["cache_seqlens", "block_table"])
def latent_split_kernel(q_ptr, latents_source, rest_source, acc_ptr, stats_ptr, programs_ptr, cache_seqlens, block_table, stride_cb,
                        stride_cs, stride_table, softmax_scale, batch, max_len, n_pages, seqlen_q, heads, parts, shares,
                        HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_REST: tl.constexpr,
                        CAUSAL: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
                        PAGE: tl.constexpr, OVERLAP: tl.constexpr):
    """Computes a share of the tiles for one part of the queries' rows. The result for each sequence goes to a slot of `acc` and `stats`.

    A slot's number is the sum of the numbers of the program and the sequence; from one slot to the next, one of these grows by one.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    EXACT: tl.constexpr = PRECISION == "ieee"
    REST: tl.constexpr = HEAD_DIM - VALUE_DIM
    part = tl.program_id(0) % parts
    program = tl.program_id(0) // parts
    scale = in_units(softmax_scale, EXACT)
    total = total_tiles(cache_seqlens, batch, max_len, seqlen_q, 0, BLOCK_N, False)
    share = tl.cdiv(total, shares)
    unit = program * share
    end_unit = tl.minimum(unit + share, total)
    if unit >= total:
        return
    seq, before = find_sequence(cache_seqlens, unit, batch, max_len, seqlen_q, 0, BLOCK_N, False)
    lanes = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_DV)
    row = part * BLOCK_M + lanes
    rows = seqlen_q * heads
    real = row < rows

    while unit < end_unit:
        length, _first, tiles = sequence_tiles(cache_seqlens, seq, batch, max_len, seqlen_q, 0, BLOCK_N, False)
        begin = unit - before
        end = tl.minimum(tiles, begin + end_unit - unit)
        q_rows = q_ptr + (tl.cast(seq, tl.int64) * rows + part * BLOCK_M) * HEAD_DIM + lanes * HEAD_DIM
        # [BLOCK_M, BLOCK_DV]
        q = load_rows_at(q_rows, real, VALUE_DIM, BLOCK_DV)
        latent_rows = _rows_of(latents_source, block_table, seq, length, max_len, n_pages, stride_cb, stride_cs, stride_table, PAGE, TMA)
        if REST:
            # [BLOCK_M, BLOCK_REST]
            q_rest = load_rows_at(q_rows + VALUE_DIM, real, REST, BLOCK_REST)
            rest_rows = _rows_of(rest_source, block_table, seq, length, max_len, n_pages, stride_cb, stride_cs, stride_table, PAGE, TMA)
        # the end of the keys that a row sees
        seen = tl.zeros([BLOCK_M], tl.int32) + length
        if CAUSAL:
            seen += tl.minimum(row // heads - seqlen_q + 1, 0)
        row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

        for at in tl.range(begin * BLOCK_N, end * BLOCK_N, BLOCK_N):
            # [BLOCK_N, BLOCK_DV]
            latents = _load(latent_rows, at, q, VALUE_DIM, BLOCK_N, BLOCK_DV, PAGE, TMA)
            # [BLOCK_M, BLOCK_N]
            scores = score_dot(q, latents, PRECISION)
            if REST:
                rest = _load(rest_rows, at, q_rest, REST, BLOCK_N, BLOCK_REST, PAGE, TMA)
                scores += score_dot(q_rest, rest, PRECISION)
            scores = tl.where((at + tl.arange(0, BLOCK_N))[None, :] < seen[:, None], scores, -float("inf"))
            weights, row_max, row_sum, rescale = softmax_step(scores, row_max, row_sum, scale, True, EXACT)
            acc = add_dot(weights.to(latents.dtype), latents, acc * rescale[:, None], PRECISION)

        slot = tl.cast(part * (shares + batch) + program + seq, tl.int64) * BLOCK_M
        tl.store(acc_ptr + slot * BLOCK_DV + lanes[:, None] * BLOCK_DV + columns[None, :], acc)
        tl.store(stats_ptr + 2 * slot + lanes, row_max)
        tl.store(stats_ptr + 2 * slot + BLOCK_M + lanes, row_sum)
        if end == tiles and part == 0:
            tl.store(programs_ptr + 2 * seq, before // share)
            tl.store(programs_ptr + 2 * seq + 1, program)
        unit += end - begin
        if end == tiles:
            seq += 1
            before += tiles


@triton.jit(do_not_specialize=["batch", "rows", "shares"])
def latent_merge_kernel(acc_ptr, stats_ptr, programs_ptr, out_ptr, lse_ptr, batch, rows, shares, VALUE_DIM: tl.constexpr,
                        BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
                        BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr):
    """Merges some columns of some rows of a sequence, from its programs' results, in the order of the keys."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    EXACT: tl.constexpr = PRECISION == "ieee"
    row_blocks = tl.cdiv(rows, BLOCK_R)
    block = tl.program_id(0) // (BLOCK_DV // BLOCK_C)
    column = tl.program_id(0) % (BLOCK_DV // BLOCK_C) * BLOCK_C
    seq = block // row_blocks
    row = block % row_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = column + tl.arange(0, BLOCK_C)
    real = row < rows
    first = tl.load(programs_ptr + 2 * seq)
    last = tl.load(programs_ptr + 2 * seq + 1)
    lane = row % BLOCK_M
    state = empty_softmax(BLOCK_R, BLOCK_C)
    for start in range(first, last + 1, BLOCK_S):
        program = start + tl.arange(0, BLOCK_S)
        # [BLOCK_R, BLOCK_S]
        there = real[:, None] & (program <= last)[None, :]
        slot = ((row // BLOCK_M * (shares + batch) + seq)[:, None] + program[None, :]).to(tl.int64) * BLOCK_M
        # [BLOCK_R, BLOCK_S, BLOCK_C]
        at = (slot + lane[:, None])[:, :, None] * BLOCK_DV + columns[None, None, :]
        maxima = stats_ptr + 2 * slot + lane[:, None]
        state = add_parts(state, maxima, maxima + BLOCK_M, acc_ptr + at, there, EXACT)
    acc, row_max, row_sum = state
    index = tl.cast(seq, tl.int64) * rows + row
    tl.store(out_ptr + index[:, None] * VALUE_DIM + columns[None, :], normalised(acc, row_sum, 1.0, PRECISION).to(out_ptr.dtype.element_ty),
             mask=real[:, None] & (columns < VALUE_DIM)[None, :])
    tl.store(lse_ptr + index, log_sum_exp(row_max, row_sum, EXACT), mask=real & (column == 0))


@dataclass(frozen=True)
class _Plan:
    """Both launches for one layout, and the shape of what lies between them."""

    split: Launch
    merge: Launch
    acc_shape: tuple[int, int, int]
    tma: bool


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, aligned: bool, q: torch.Size, cache: Layout, table: Layout | None, value_dim: int,
          softmax_scale: float, causal: bool) -> _Plan:
    batch, seqlen_q, heads, head_dim = q
    rows = seqlen_q * heads
    page = cache[0][1]
    max_len = page if table is None else table[0][1] * page
    arch = architecture(device)
    evenly = table is None and (batch == 1 or cache[1][0] == page * cache[1][1]) and batch * page < SEQUENCE_END
    tma = evenly and aligned and dtype.itemsize == 2 and value_dim % 8 == 0 and tma_takes_layout(*cache, 2) and not 0 < arch < 90
    tile = latent_tile(arch, block_width(value_dim), rows, dtype.itemsize, tma)
    block_dv, block_rest = (max(block_width(width), 64 if tile.tma else 16) for width in (value_dim, head_dim - value_dim))
    parts = math.ceil(rows / tile.block_m)
    shares = max(tile.programs * multiprocessors(device) // parts, 1) if arch else tile.programs
    constants = {"VALUE_DIM": value_dim, "BLOCK_DV": block_dv, "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
                 "BLOCK_M": tile.block_m, "OVERLAP": overlaps(arch)}
    pdl = {"launch_pdl": True} if constants["OVERLAP"] else {}
    # one row of many parts, or many rows of few
    block_r, block_s = (1, 64) if 4 * batch <= shares else (8, 8)
    block_c = min(block_dv, COLUMNS)
    return _Plan(
        Launch(
            latent_split_kernel, shares * parts,
            (*cache[1][:2], 0 if table is None else table[1][0], softmax_scale, batch, max_len, cache[0][0], seqlen_q, heads, parts,
             shares),
            constants | {"HEAD_DIM": head_dim, "BLOCK_REST": block_rest, "CAUSAL": causal and seqlen_q > 1, "BLOCK_N": tile.block_n,
                         "TMA": BY_SEQUENCE.value if tile.tma else 0, "PAGE": 0 if table is None else page},
            # a page's number is read as many stages before its rows as these are read before their product
            tile.num_warps, tile.num_stages if table is None else 2 * tile.num_stages - 1,
            {1: (tile.block_n, block_dv, True), 2: (tile.block_n, block_rest, True)} if tile.tma else {}, pdl),
        Launch(
            latent_merge_kernel, batch * math.ceil(rows / block_r) * (block_dv // block_c), (batch, rows, shares),
            constants | {"BLOCK_R": block_r, "BLOCK_S": block_s, "BLOCK_C": block_c}, 4, 1, options=pdl),
        (parts * (shares + batch), tile.block_m, block_dv), tile.tma)


def launch_forward(q: Tensor, cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None, value_dim: int, softmax_scale: float,
                   causal: bool) -> tuple[Tensor, Tensor]:
    """Output (batch, seqlen_q, heads, value_dim) and LSE (batch, heads, seqlen_q)."""
    out = q.new_empty(*q.shape[:-1], value_dim)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse.mT
    q = q.contiguous()  # pointers at constant distances take few registers
    plan = _plan(q.device, q.dtype, are_aligned(q, cache), q.shape, layout(cache),
                 None if block_table is None else layout(block_table), value_dim, softmax_scale, causal)
    acc = torch.empty(plan.acc_shape, dtype=torch.float32, device=q.device)
    stats = torch.empty(plan.acc_shape[0], 2, plan.acc_shape[1], dtype=torch.float32, device=q.device)
    programs = torch.empty(q.shape[0], 2, dtype=torch.int32, device=q.device)
    keys = cache.view(-1, 1, cache.shape[-1]) if plan.tma else cache
    latents, rest = keys[..., :value_dim], keys[..., value_dim:]
    with on_device_of(out):
        plan.split(q, latents, rest if rest.shape[-1] else latents, acc, stats, programs, cache_seqlens, block_table)
        plan.merge(acc, stats, programs, out, lse)
    return out, lse.mT
