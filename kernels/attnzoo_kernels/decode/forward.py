"""Flash-Decoding: the keys of all sequences are divided evenly among the programs, and a second small kernel merges the partial results."""

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
from attnzoo_kernels._triton.forward import empty_softmax, forward_step, scored
from attnzoo_kernels._triton.launch import (
    Launch,
    architecture,
    are_aligned,
    block_width,
    next_power_of_2,
    on_device_of,
    tma_takes_layout,
)
from attnzoo_kernels._triton.mainloop import QueryTile, range_loop, window_seen
from attnzoo_kernels._triton.masks import Window
from attnzoo_kernels._triton.scores import modified_scores
from attnzoo_kernels._triton.softmax import add_dot, in_units, log_sum_exp, rescaled, softmax_weights
from attnzoo_kernels._triton.tiles import Operand, Place, Shape, head_rows, load_rows, load_rows_at, store_rows_at
from attnzoo_kernels.decode.shares import add_parts, find_sequence, sequence_tiles, total_tiles
from attnzoo_kernels.decode.tiles import decode_tile

MERGED = 16384  # floats of partial results that the second kernel reads at once


class Pages(NamedTuple):
    """One key head of one sequence, whose rows lie in pages of the cache in any order."""

    source: Any  # the head's first row in the cache's first page
    table: Any  # the sequence's page numbers
    n_pages: Any  # pages of the cache
    length: Any
    stride_page: Any
    stride_row: Any


class Own(NamedTuple):
    window: Any
    slope: Any  # [BLOCK_M, 1]
    scale: Any
    softcap: Any
    PRESCALE: Any
    HAS_SOFTCAP: Any
    HAS_ALIBI: Any
    HARDWARE_TANH: Any
    PAGE: Any  # rows of a page; 0 if the cache has no pages
    DTYPE: Any  # dtype of the products; a cache of 8 bits is converted to it


@triton.jit
def _widened(own, tile):
    if tile.dtype != tl.uint16:  # pairs of columns are separated first
        tile = tile.to(own.DTYPE)
    return tile


@triton.jit
def load_pages(own, pages, at, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr, GUARD: tl.constexpr,
                TMA: tl.constexpr):
    """LOAD: rows of pages; zeros after the sequence's end, and where its table names no page of the cache."""
    lanes = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_WIDTH)
    rows = at + lanes
    inside = rows < pages.length
    if own.PAGE % BLOCK == 0:  # the tile lies in one page
        begin = tl.cast(at, tl.uint32)
        page = tl.load(pages.table + (begin // own.PAGE).to(tl.int32), mask=at < pages.length, other=-1)
        first = page.to(tl.int64) * pages.stride_page + (begin % own.PAGE).to(tl.int64) * pages.stride_row
        row = first + lanes * pages.stride_row
    else:
        place = rows.to(tl.uint32)
        page = tl.load(pages.table + (place // own.PAGE).to(tl.int32), mask=inside, other=-1)
        row = page.to(tl.int64) * pages.stride_page + (place % own.PAGE).to(tl.int64) * pages.stride_row
    inside = inside & (page >= 0) & (page < pages.n_pages)
    # added up in another order, pointers into pages of less than a tile take more instructions
    tile = tl.load(pages.source + row[:, None] + columns[None, :], mask=inside[:, None] & (columns < WIDTH)[None, :], other=0.0)
    return _widened(own, tile)


@triton.jit
def _load_rows(own, rows, at, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr, GUARD: tl.constexpr, TMA: tl.constexpr):
    """LOAD where the cache has no pages."""
    return _widened(own, load_rows(rows, at, WIDTH, BLOCK, BLOCK_WIDTH, GUARD, TMA))


@triton.jit
def _modified(x, own, products, i, j, at):
    scores = products
    if own.PRESCALE:
        scores, _ = modified_scores(products, i, j, x.place.other_length - x.place.length, own.slope, own.scale, own.softcap,
                                    own.HAS_SOFTCAP, own.HAS_ALIBI, x.shape.PRECISION == "ieee", own.HARDWARE_TANH)
    return scores, 0.0, 1.0


@triton.jit
def _step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    return forward_step(state, x, own, at, position, edge, MASKED, GUARD, window_seen, _modified, LAGS=False, LOAD=_load_rows)


@triton.jit
def _paged_step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    return forward_step(state, x, own, at, position, edge, MASKED, GUARD, window_seen, _modified, LAGS=False, LOAD=load_pages)


@triton.jit
def _half(own, pairs, HIGH: tl.constexpr):
    """The even columns of a tile of pairs of e4m3, or, HIGH, the odd ones."""
    one = (pairs >> 8 if HIGH else pairs & 255).to(tl.uint8)
    return one.to(tl.float8e4nv, bitcast=True).to(own.DTYPE)


@triton.jit
def _pairs_step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    """forward_step with values as pairs of e4m3 columns in 16 bits, and one product for each column of a pair.

    The instruction that reads a tile from shared memory and transposes it works on 16-bit numbers only.
    """
    even, odd, row_max, row_sum = state
    LOAD: tl.constexpr = load_pages if own.PAGE else _load_rows
    k = LOAD(own, x.key_rows, at, x.shape.HEAD_DIM, x.shape.BLOCK_N, x.shape.BLOCK_D, GUARD, False)
    scores, _ = scored(x.q, k, x, own, at, position, edge, MASKED, window_seen, _modified)
    weights, new_max, rescale = softmax_weights(scores, row_max, x.unit, MASKED != "none", x.shape.PRECISION == "ieee", False, None)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    even = rescaled(even, rescale, new_max, row_max, False)
    odd = rescaled(odd, rescale, new_max, row_max, False)
    # [BLOCK_N, BLOCK_DV // 2]
    v = LOAD(own, x.value_rows, at, x.shape.VALUE_DIM // 2, x.shape.BLOCK_N, x.shape.BLOCK_DV // 2, GUARD, False)
    weights = weights.to(own.DTYPE)
    even = add_dot(weights, _half(own, v, False), even, x.shape.PRECISION)
    odd = add_dot(weights, _half(own, v, True), odd, x.shape.PRECISION)
    return even, odd, new_max, row_sum


@triton.jit
def _in_float16(x):
    """(x times a power of two, in float16, the inverse of that power). The power brings x's largest magnitude close to 2^14."""
    x = x.to(tl.float32)
    exponent = tl.max(tl.max(tl.abs(x), 1), 0).to(tl.int32, bitcast=True) >> 23
    power = tl.minimum(268 - exponent, 253)
    return (x * (power << 23).to(tl.float32, bitcast=True)).to(tl.float16), ((254 - power) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _load_queries(rows, real, scale, k_source, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(queries of a tile, [BLOCK_M, BLOCK_D], the scale of their scores)."""
    q = load_rows_at(rows, real, HEAD_DIM, BLOCK_D)
    if k_source.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        # e4m3 becomes float16 by fewer instructions than bfloat16; a power of two keeps the queries in the range of float16
        q, less = _in_float16(q)
        scale *= less
    return q, scale


@triton.jit
def _tile_rows(piece, lanes, seq, counts, parts, seqlen_q, group, BLOCK_M: tl.constexpr, QUERIES: tl.constexpr):
    """(rows of a piece's tile, which of them exist). Rows are ordered by query, and within a query by head.

    A group's queries are those of its members, one member after the other, QUERIES of each.
    """
    row = piece % parts * BLOCK_M + lanes
    real = row < seqlen_q * group
    if QUERIES:
        real = real & (row // group < tl.load(counts + seq) * QUERIES)
    return row, real


@triton.jit
def _row_owner(row, seq, leaders, group, QUERIES: tl.constexpr):
    """(sequence, query) that rows belong to."""
    i = row // group
    if QUERIES:
        seq = tl.load(leaders + seq) + i // QUERIES
        i = i % QUERIES
    return seq, i


@triton.jit
def _places(sequence, i, head, queries, heads):
    """Where rows lie in (batch, queries, heads)."""
    return (tl.cast(sequence, tl.int64) * queries + i) * heads + head


@triton.jit
def _lse_places(sequence, i, head, queries, heads):
    """Where they lie in (batch, heads, queries)."""
    return (tl.cast(sequence, tl.int64) * heads + head) * queries + i


@triton.jit
def _store_result(acc, row_max, row_sum, out_ptr, lse_ptr, seq, head, i, real, queries, heads, VALUE_DIM: tl.constexpr,
                  BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr):
    """Stores output and LSE of the rows (query i, head), from their accumulator, maximum and sum."""
    divisor = tl.broadcast_to(tl.where(row_sum > 0, row_sum, 1.0)[:, None], acc.shape)
    result = tl.div_rn(acc, divisor) if PRECISION == "ieee" else acc / divisor
    index = _places(seq, i, head, queries, heads)
    store_rows_at(out_ptr + index * VALUE_DIM, result, real, VALUE_DIM, BLOCK_DV)
    lse_index = _lse_places(seq, i, head, queries, heads)
    tl.store(lse_ptr + lse_index, log_sum_exp(row_max, row_sum, PRECISION == "ieee"), mask=real)


@triton.jit(do_not_specialize=["window_left", "window_right", "batch", "max_len", "seqlen_q", "pieces", "parts", "programs",
                               "n_pages", "stride_table"],
            do_not_specialize_on_alignment=["sinks", "cache_seqlens", "alibi_slopes", "block_table", "k_scale", "v_scale", "leaders",
                                            "counts", "skips", "segments"])
def decode_split_kernel(q_ptr, k_source, v_source, out_ptr, lse_ptr, acc_ptr, stats_ptr, closes_ptr, sinks, cache_seqlens, alibi_slopes,
                        block_table, k_scale, v_scale, leaders, counts, skips, prefix_out, prefix_lse, segments, stride_qb, stride_qs,
                        stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_ab, stride_table,
                        softmax_scale, softcap, window_left, window_right, batch, max_len, n_pages, seqlen_q, heads, group, pieces, parts,
                        programs, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
                        HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRESCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
                        HAS_ALIBI: tl.constexpr, HARDWARE_TANH: tl.constexpr, PRECISION: tl.constexpr, HAS_SINKS: tl.constexpr,
                        HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                        TMA: tl.constexpr, PAGE: tl.constexpr, OVERLAP: tl.constexpr, QUERIES: tl.constexpr, SEGMENTS: tl.constexpr):
    """Attends over this program's share of the tiles. Pieces that it computes alone go to `out`; partial results of divided pieces go to
    slots of `acc` and `stats`.

    leaders, counts: each sequence is a group of sequences: its first member and number of members. skips: how many pages at a sequence's
    beginning are skipped, because prefix_out and prefix_lse hold what its group found there. segments: the first key and the end of each of
    SEGMENTS ranges of a sequence's keys, which have queries of their own.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    unit_scale = in_units(softmax_scale, PRECISION == "ieee")
    LEAST: tl.constexpr = 0 if QUERIES else 1  # groups that do not exist write nothing
    total = total_tiles(cache_seqlens, batch, max_len, seqlen_q, window_left, BLOCK_N, HAS_LEFT, LEAST) * pieces
    share = tl.cdiv(total, programs)
    unit = program * share
    end_unit = tl.minimum(unit + share, total)
    tl.store(closes_ptr + 4 * program, -1)
    if unit >= total:
        return
    seq, before = find_sequence(cache_seqlens, unit // pieces, batch, max_len, seqlen_q, window_left, BLOCK_N, HAS_LEFT,
                                LEAST)
    slot = 2 * program
    lanes = tl.arange(0, BLOCK_M)
    value_columns = tl.arange(0, BLOCK_DV)

    while unit < end_unit:
        len_k, first, tiles = sequence_tiles(cache_seqlens, seq, batch, max_len, seqlen_q, window_left, BLOCK_N, HAS_LEFT, LEAST)
        inside = unit - before * pieces
        piece = inside // tiles
        begin = inside - piece * tiles
        end = tl.minimum(tiles, begin + end_unit - unit)
        kv_head = piece // parts
        key_scale = unit_scale
        if HAS_K_SCALE:
            key_scale = unit_scale * tl.load(k_scale + kv_head)
        row, real = _tile_rows(piece, lanes, seq, counts, parts, seqlen_q, group, BLOCK_M, QUERIES)
        sequence, i = _row_owner(row, seq, leaders, group, QUERIES)
        head = kv_head * group + row % group
        q_rows = q_ptr + tl.cast(sequence, tl.int64) * stride_qb + tl.cast(i, tl.int64) * stride_qs + tl.cast(head, tl.int64) * stride_qh
        if not SEGMENTS:
            # [BLOCK_M, BLOCK_D]
            q, scale = _load_queries(q_rows, real, key_scale, k_source, HEAD_DIM, BLOCK_D)
        slope = tl.zeros([BLOCK_M, 1], tl.float32)
        if HAS_ALIBI:
            slope = tl.load(alibi_slopes + seq * stride_ab + head, mask=real, other=0.0).to(tl.float32)[:, None]
        row_table = seq
        if QUERIES:
            row_table = tl.load(leaders + seq)
        skip = 0
        if skips is not None:
            skip = tl.load(skips + seq)
        # a sink acts as a first key of weight one without a value; what a group found, as one with a value
        row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        if HAS_SINKS:
            row_max = tl.load(sinks + head, mask=real & (begin == 0) & (skip == 0), other=-float("inf")).to(tl.float32)
        if skips is not None:
            found = real & (begin == 0) & (skip > 0)
            lse_index = _lse_places(seq, i, head, seqlen_q, heads)
            row_max = tl.maximum(row_max, tl.load(prefix_lse + lse_index, mask=found, other=-float("inf")))
            index = _places(seq, i, head, seqlen_q, heads)
            acc = load_rows_at(prefix_out + index * VALUE_DIM, found, VALUE_DIM, BLOCK_DV)
        if HAS_SINKS or skips is not None:
            row_max = in_units(row_max, PRECISION == "ieee")
        row_sum = tl.where(row_max == -float("inf"), 0.0, 1.0)

        if PAGE:
            table = block_table + tl.cast(row_table, tl.int64) * stride_table + skip
            k_rows = Pages(k_source + tl.cast(kv_head, tl.int64) * stride_kh, table, n_pages, len_k, stride_kb, stride_ks)
            v_rows = Pages(v_source + tl.cast(kv_head, tl.int64) * stride_vh, table, n_pages, len_k, stride_vb, stride_vs)
        else:
            k_rows = head_rows(Operand(k_source, stride_kb, stride_ks, stride_kh), seq, kv_head, 0, len_k, TMA)
            v_rows = head_rows(Operand(v_source, stride_vb, stride_vs, stride_vh), seq, kv_head, 0, len_k, TMA)
        first_key = (first + begin) * BLOCK_N
        last_key = (first + end) * BLOCK_N
        # pointers guard every tile at no cost; TMA's tiles are guarded only where they cross the end
        if TMA:
            tail = tl.minimum(last_key, len_k // BLOCK_N * BLOCK_N)
        if v_source.dtype.element_ty == tl.uint16:
            even, odd = tl.split(acc.reshape(BLOCK_M, BLOCK_DV // 2, 2))
            even, odd, row_max, row_sum = range_loop(
                _pairs_step, (even, odd, row_max, row_sum),
                QueryTile(q, None, None, k_rows, v_rows, Place(seq, seq, kv_head, 0, 0, seqlen_q, 0, len_k), i[:, None],
                          1.0 if PRESCALE else scale,
                          Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, False, PRECISION, False), False),
                Own(Window(window_left, window_right, HAS_LEFT, HAS_RIGHT), slope, scale, softcap, PRESCALE, HAS_SOFTCAP, HAS_ALIBI,
                    HARDWARE_TANH, PAGE, q.dtype),
                first_key, last_key, 0, 0, BLOCK_N, "all", True, None)
            acc = tl.join(even, odd).reshape(BLOCK_M, BLOCK_DV)
        for part in tl.static_range(2 if TMA else SEGMENTS or 1):
            length = len_k
            if SEGMENTS:
                q, scale = _load_queries(q_rows + part * stride_qs, real, key_scale, k_source, HEAD_DIM, BLOCK_D)
                bounds = segments + 2 * (tl.cast(seq, tl.int64) * SEGMENTS + part)
                # tiles begin anywhere, so that the last one may go beyond this program's keys
                length = tl.minimum(tl.minimum(end * BLOCK_N, len_k), tl.load(bounds + 1))
                first_key, last_key = tl.maximum(begin * BLOCK_N, tl.load(bounds)), length
                k_rows = head_rows(Operand(k_source, stride_kb, stride_ks, stride_kh), seq, kv_head, 0, length, TMA)
                v_rows = head_rows(Operand(v_source, stride_vb, stride_vs, stride_vh), seq, kv_head, 0, length, TMA)
            if v_source.dtype.element_ty != tl.uint16:
                acc, row_max, row_sum = range_loop(
                    _paged_step if PAGE else _step, (acc, row_max, row_sum),
                    QueryTile(q, None, None, k_rows, v_rows, Place(seq, seq, kv_head, 0, 0, seqlen_q, 0, length), i[:, None],
                              1.0 if PRESCALE else scale,
                              Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, False, PRECISION, TMA), False),
                    Own(Window(window_left, window_right, HAS_LEFT, HAS_RIGHT), slope, scale, softcap, PRESCALE, HAS_SOFTCAP, HAS_ALIBI,
                        HARDWARE_TANH, PAGE, q.dtype),
                    tail if TMA and part == 1 else first_key, tail if TMA and part == 0 else last_key, 0, 0, BLOCK_N, "all",
                    not TMA or part == 1, None)

        if HAS_V_SCALE:
            acc *= tl.load(v_scale + kv_head)
        if begin == 0 and end == tiles:
            _store_result(acc, row_max, row_sum, out_ptr, lse_ptr, sequence, head, i, real, QUERIES or seqlen_q, heads, VALUE_DIM,
                          BLOCK_DV, PRECISION)
        else:
            part_index = tl.cast(slot, tl.int64) * BLOCK_M + lanes
            tl.store(acc_ptr + part_index[:, None] * BLOCK_DV + value_columns[None, :], acc, mask=real[:, None])
            tl.store(stats_ptr + 2 * part_index, row_max, mask=real)
            tl.store(stats_ptr + 2 * part_index + 1, row_sum, mask=real)
            if begin > 0 and end == tiles:
                # this is a piece's last part: store what the second kernel needs to find the other parts
                first_program = (unit - begin) // share
                tl.store(closes_ptr + 4 * program, first_program)
                tl.store(closes_ptr + 4 * program + 1, (unit - begin > first_program * share).to(tl.int32))
                tl.store(closes_ptr + 4 * program + 2, seq)
                tl.store(closes_ptr + 4 * program + 3, piece)
        slot = 2 * program + 1
        unit += end - begin
        if end == tiles and piece == pieces - 1:
            seq += 1
            before += tiles


@triton.jit
def _merge_piece(first, last, acc_ptr, stats_ptr, closes_ptr, out_ptr, lse_ptr, leaders, counts, seqlen_q, heads, group, parts, blocks,
                 VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
                 BLOCK_S: tl.constexpr, QUERIES: tl.constexpr):
    """Merges this program's block of rows of the piece that program `first` begins and program `last` closes."""
    inside = tl.load(closes_ptr + 4 * last + 1)
    seq = tl.load(closes_ptr + 4 * last + 2)
    piece = tl.load(closes_ptr + 4 * last + 3)
    columns = tl.arange(0, BLOCK_DV)
    lanes = tl.program_id(0) % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    row, real = _tile_rows(piece, lanes, seq, counts, parts, seqlen_q, group, BLOCK_M, QUERIES)
    state = empty_softmax(BLOCK_R, BLOCK_DV)
    for start in range(first, last + 1, BLOCK_S):
        program = start + tl.arange(0, BLOCK_S)
        slot = 2 * program + tl.where(program == first, inside, 0)
        # [BLOCK_R, BLOCK_S]
        there = real[:, None] & (program <= last)[None, :]
        index = tl.cast(slot, tl.int64)[None, :] * BLOCK_M + lanes[:, None]
        # [BLOCK_R, BLOCK_S, BLOCK_DV]
        at = index[:, :, None] * BLOCK_DV + columns[None, None, :]
        state = add_parts(state, stats_ptr + 2 * index, stats_ptr + 2 * index + 1, acc_ptr + at, there, PRECISION == "ieee")
    head = piece // parts * group + row % group
    sequence, i = _row_owner(row, seq, leaders, group, QUERIES)
    _store_result(*state, out_ptr, lse_ptr, sequence, head, i, real, QUERIES or seqlen_q, heads, VALUE_DIM, BLOCK_DV, PRECISION)


@triton.jit(do_not_specialize=["seqlen_q", "parts", "blocks"], do_not_specialize_on_alignment=["leaders", "counts"])
def decode_merge_kernel(acc_ptr, stats_ptr, closes_ptr, out_ptr, lse_ptr, leaders, counts, seqlen_q, heads, group, parts, blocks,
                        VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
                        BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, OVERLAP: tl.constexpr, QUERIES: tl.constexpr,
                        WINDOW: tl.constexpr, BLOCK_W: tl.constexpr, PROGRAMS: tl.constexpr):
    """Merges one of `blocks` blocks of rows of the piece that a program closes, from the piece's parts in the order of the keys.

    WINDOW: of the pieces that so many of the PROGRAMS programs close, most of which close none. 0: one program.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    if WINDOW == 0:
        last = tl.program_id(0) // blocks
        first = tl.load(closes_ptr + 4 * last)
        if first < 0:
            return
        _merge_piece(first, last, acc_ptr, stats_ptr, closes_ptr, out_ptr, lse_ptr, leaders, counts, seqlen_q, heads, group, parts, blocks,
                     VALUE_DIM, BLOCK_DV, PRECISION, BLOCK_M, BLOCK_R, BLOCK_S, QUERIES)
    else:
        begin = tl.program_id(0) // blocks * WINDOW
        end = tl.minimum(begin + WINDOW, PROGRAMS)
        place = begin + tl.arange(0, BLOCK_W)
        closes = tl.load(closes_ptr + 4 * place, mask=place < end, other=-1) >= 0
        last = tl.min(tl.where(closes, place, end), 0)
        while last < end:
            _merge_piece(tl.load(closes_ptr + 4 * last), last, acc_ptr, stats_ptr, closes_ptr, out_ptr, lse_ptr, leaders, counts, seqlen_q,
                         heads, group, parts, blocks, VALUE_DIM, BLOCK_DV, PRECISION, BLOCK_M, BLOCK_R, BLOCK_S, QUERIES)
            last = tl.min(tl.where(closes & (place > last), place, end), 0)


def overlaps(arch: int) -> bool:
    """Whether a kernel may be launched while the one before it still runs (programmatic dependent launch)."""
    return arch >= 90 and torch.version.cuda is not None


def most_groups(batch: int) -> int:
    """The largest possible number of groups of two sequences or more, at least 1."""
    return max(batch // 2, 1)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


class Group(NamedTuple):
    """Sequences that read the same keys and are treated as one. The tensors are int32, one number for each group."""

    at_most: int  # largest number of members
    leaders: Tensor  # first sequence of each
    counts: Tensor  # members of each, which follow each other


class Prefix(NamedTuple):
    """What was found at the beginning of sequences, in pages that are not read again."""

    skips: Tensor  # how many pages, int32 (batch,)
    out: Tensor  # float32, the output's shape; without v_scale
    lse: Tensor  # with the sinks


@dataclass(frozen=True)
class _Plan:
    """Both launches for one layout, and the shape of the partial results between them."""

    split: Launch
    merge: Launch
    acc_shape: tuple[int, int, int]
    pairs: bool


@functools.lru_cache(maxsize=1024)
def _plan(device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype, aligned: bool, has_sinks: bool, has_scales: tuple[bool, bool],
          slopes_stride: int | None, q: Layout, k: Layout, v: Layout, table: Layout | None, softmax_scale: float, window_left: int,
          window_right: int, softcap: float, out_dtype: torch.dtype | None, at_most: int, has_prefix: bool, page: int | None,
          has_segments: bool) -> _Plan:
    # a Launch keeps its compiled kernel; so out_dtype and has_prefix, which only tensors show, must be in the key
    batch, queries, heads, head_dim = q[0]
    segments, queries = (queries, 1) if has_segments else (0, queries)
    seqlen_q = queries
    if at_most:
        batch, seqlen_q = most_groups(batch), queries * at_most
    n_pages, length, kv_heads = k[0][:3]
    n_pages, page = (n_pages, length) if page is None else (2**31 - 1, page)
    max_len = page if table is None else table[0][1] * page
    group, value_dim = heads // kv_heads, v[0][-1]
    block_d, block_dv = block_width(head_dim), block_width(value_dim)
    arch = architecture(device)
    multiprocessors = _multiprocessors(device.index) if arch else 1
    pairs = None if cache_dtype.itemsize > 1 else aligned and value_dim % 2 == 0 and all(x % 2 == 0 for x in v[1][:3])
    tile = decode_tile(arch, block_d, block_dv, seqlen_q * group, dtype.itemsize, batch * kv_heads / multiprocessors, pairs=pairs,
                       paged=table is not None, shared=at_most > 0)
    programs = tile.programs * multiprocessors
    parts = math.ceil(seqlen_q * group / tile.block_m)
    precision = "ieee" if dtype == torch.float32 else "tf32"
    has_alibi = slopes_stride is not None
    if cache_dtype.itemsize == 1 and 0 < arch < 89:
        raise NotImplementedError(f"k_cache: float8_e4m3fn needs compute capability 8.9, got {arch / 10}; widen it, or take the reference")
    tma = (tile.tma and table is None and not segments and precision == "tf32" and cache_dtype == dtype and aligned
           and all(tma_takes_layout(*x, dtype.itemsize) for x in (k, v)))
    pairs = bool(pairs) and tile.pairs
    v_strides = tuple(x // 2 for x in v[1][:3]) if pairs else v[1][:3]
    overlap = overlaps(arch)
    pdl = {"launch_pdl": True} if overlap else {}
    split = Launch(
        decode_split_kernel, programs,
        (*q[1][:3], *k[1][:3], *v_strides, slopes_stride or 0, 0 if table is None else table[1][0], softmax_scale, softcap, window_left,
         window_right, batch, max_len, n_pages, seqlen_q, heads, group, kv_heads * parts, parts, programs),
        {
            "HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "BLOCK_D": block_d, "BLOCK_DV": block_dv, "HAS_LEFT": window_left >= 0,
            "HAS_RIGHT": window_right >= 0 and seqlen_q > 1,
            "PRESCALE": softcap > 0 or has_alibi,
            "HAS_SOFTCAP": softcap > 0, "HAS_ALIBI": has_alibi,
            "HARDWARE_TANH": dtype != torch.float32 and arch >= 75 and torch.version.cuda is not None,
            "PRECISION": precision, "HAS_SINKS": has_sinks,
            "HAS_K_SCALE": has_scales[0], "HAS_V_SCALE": has_scales[1], "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "TMA": tma,
            "PAGE": 0 if table is None else page, "OVERLAP": overlap,
            "QUERIES": queries if at_most else 0, "SEGMENTS": segments,
        },
        # a page's number is read as many stages before its rows as these are read before their product
        tile.num_warps, tile.num_stages if table is None else 2 * tile.num_stages - 1,
        {1: (tile.block_n, block_d), 2: (tile.block_n, block_dv)} if tma else {}, pdl)
    rows = min(next_power_of_2(seqlen_q * group), max(1024 // block_dv, 1), 8)
    blocks = math.ceil(min(seqlen_q * group, tile.block_m) / rows)
    merge = Launch(
        decode_merge_kernel, programs * blocks, (seqlen_q, heads, group, parts, blocks),
        {"VALUE_DIM": value_dim, "BLOCK_DV": block_dv, "PRECISION": precision, "BLOCK_M": tile.block_m, "BLOCK_R": rows,
         "BLOCK_S": min(MERGED // (rows * block_dv), 32), "OVERLAP": overlap,
         "QUERIES": queries if at_most else 0, "WINDOW": 0, "BLOCK_W": 1, "PROGRAMS": 0},
        4, 1, options=pdl)
    if at_most:
        # of the merge, two programs fit a multiprocessor. More of them would take turns, and cost time also where no pages are shared
        window = math.ceil(programs / max(2 * multiprocessors // blocks, 1))
        merge.programs = math.ceil(programs / window) * blocks
        merge.constants |= {"WINDOW": window, "BLOCK_W": next_power_of_2(window), "PROGRAMS": programs}
    return _Plan(split, merge, (2 * programs, tile.block_m, block_dv), pairs)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor, block_table: Tensor | None, alibi_slopes: Tensor | None,
                   sinks: Tensor | None, softmax_scale: float, window_left: int, window_right: int, softcap: float,
                   k_scale: Tensor | None = None, v_scale: Tensor | None = None,
                   out_dtype: torch.dtype | None = None, group: Group | None = None,
                   prefix: Prefix | None = None, page: int | None = None, segments: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output (batch, seqlen_q, heads, value_dim), by default in q's dtype, and LSE (batch, heads, seqlen_q). With segments, seqlen_q is 1.

    With a group, cache_seqlens are by group; rows of sequences in no group are not written. With a prefix, they are the lengths after it.
    page: rows of a page; only the strides and the first row of k and v are used then, and all numbers of pages are taken for right.
    """
    batch, queries, heads = q.shape[0], q.shape[1] if segments is None else 1, q.shape[2]
    out = q.new_empty(batch, queries, heads, v.shape[-1], dtype=out_dtype)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    slopes_stride = None if alibi_slopes is None else alibi_slopes.stride(0) if alibi_slopes.dim() == 2 else 0
    plan = _plan(q.device, q.dtype, k.dtype, are_aligned(q, k, v), sinks is not None, (k_scale is not None, v_scale is not None),
                 slopes_stride, layout(q), layout(k), layout(v), None if block_table is None else layout(block_table), softmax_scale,
                 window_left, window_right, softcap, out_dtype, 0 if group is None else group.at_most, prefix is not None, page,
                 segments is not None)
    leaders, counts = (None, None) if group is None else (group.leaders, group.counts)
    acc = torch.empty(plan.acc_shape, dtype=torch.float32, device=q.device)
    stats = torch.empty(*plan.acc_shape[:2], 2, dtype=torch.float32, device=q.device)
    closes = torch.empty(plan.acc_shape[0] // 2, 4, dtype=torch.int32, device=q.device)
    with on_device_of(out):
        plan.split(q, k, v.view(torch.uint16) if plan.pairs else v, out, lse, acc, stats, closes, sinks, cache_seqlens, alibi_slopes,
                   block_table, k_scale, v_scale, leaders, counts, *(prefix or (None, None, None)), segments)
        plan.merge(acc, stats, closes, out, lse, leaders, counts)
    return out, lse
