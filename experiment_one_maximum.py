# ruff: noqa: E501
"""FlashDecoding++'s "one maximum for all parts" (arXiv:2311.01282), timed once beside `decode_attention`. An experiment, not part of the package.

    python experiment_one_maximum.py                 # on a GPU: checks, then times; one_maximum.csv goes to $OUT or here
    python experiment_one_maximum.py --interpret     # on a CPU, in Triton's interpreter: checks only
    python experiment_one_maximum.py --compile 90    # on a CPU: registers, spills and loops of the kernels, ahead of time

Every variant but A and A' is a copy of decoding's kernels for contiguous caches, with switches:

    A             decode_attention as it is; A' is the same once more, which shows what differences mean nothing
    A copy        the copy with running maxima: must take as long as A
    B walk        one given maximum for each row and head. The kernel that finds a final sum outside of 2^-64 .. 2^64 walks again over all
                  keys of that piece, with its own maximum
    B flag        the same, but it sets a flag, and two more launches of the ordinary kernels leave at once if it is not set
    C             one given maximum, no guard: bound for B. Row sums are added up over the threads for each tile
    C lazy        the same, row sums are added up over the threads after the last tile (B has these too)
    C one kernel  C lazy, and the program that comes last adds up the parts (an atomic counter for each piece): no second kernel
    C atomics     C lazy, parts are added by atomics; the program that comes last divides. Its bits differ from call to call
    E one kernel  running maxima, and the program that comes last merges: what one kernel gains without a given maximum
    A copy, 160   A copy with 160 registers at most in the first kernel. As it is, that takes all registers of a multiprocessor, so that no
                  program of the merge can be there before one of the first kernel ends. C lazy, 160 is the same of C lazy
"""

import csv
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback

STARTED = time.monotonic()
MODE = sys.argv[1] if len(sys.argv) > 1 else "gpu"
if MODE == "--interpret":
    os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), "kernels"), os.path.dirname(os.path.abspath(__file__))]

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: E402

from attnzoo_kernels import decode_attention  # noqa: E402
from attnzoo_kernels._triton.forward import scored  # noqa: E402
from attnzoo_kernels._triton.launch import Launch, architecture, block_width, next_power_of_2  # noqa: E402
from attnzoo_kernels._triton.mainloop import QueryTile, range_loop, window_seen  # noqa: E402
from attnzoo_kernels._triton.masks import Window  # noqa: E402
from attnzoo_kernels._triton.softmax import add_dot, exp_in_units, in_units, softmax_step  # noqa: E402
from attnzoo_kernels._triton.tiles import Operand, Place, Shape, head_rows  # noqa: E402
from attnzoo_kernels.decode.forward import (  # noqa: E402
    MERGED,
    Own,
    _load_queries,
    _load_rows,
    _lse_places,
    _modified,
    _step,
    _store_result,
    overlaps,
)
from attnzoo_kernels.decode.shares import find_sequence, sequence_tiles, total_tiles  # noqa: E402
from attnzoo_kernels.decode.tiles import decode_tile  # noqa: E402

DEADLINE = 80.0  # seconds after which nothing new is begun
DTYPE = torch.bfloat16
CELLS = [(1, 4096, 32, 64, True), (8, 1024, 16, 64, True), (1, 16384, 8, 48, False), (64, 4096, 2, 8, False)]
WALK_N = 32  # keys of a tile when the merge walks again: few, so that its program fits beside one of the first kernel

# ---------------------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def given_step(state, x, own, at, position, edge, MASKED: tl.constexpr, GUARD: tl.constexpr):
    """forward_step with a maximum that stays. The sums are [BLOCK_M], or [BLOCK_M, BLOCK_N] if they are added up later."""
    acc, row_max, sums = state
    k = _load_rows(own, x.key_rows, at, x.shape.HEAD_DIM, x.shape.BLOCK_N, x.shape.BLOCK_D, GUARD, x.shape.TMA)
    scores, _ = scored(x.q, k, x, own, at, position, edge, MASKED, window_seen, _modified)
    weights = exp_in_units(scores * x.unit - row_max[:, None], x.shape.PRECISION == "ieee")
    if len(sums.shape) == 2:
        sums += weights
    else:
        sums += tl.sum(weights, 1)
    v = _load_rows(own, x.value_rows, at, x.shape.VALUE_DIM, x.shape.BLOCK_N, x.shape.BLOCK_DV, GUARD, x.shape.TMA)
    acc = add_dot(weights.to(v.dtype), v, acc, x.shape.PRECISION)
    return acc, row_max, sums


@triton.jit
def walk(STEP: tl.constexpr, state, q, k_source, v_source, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, seq, kv_head,
         seqlen_q, len_k, scale, first_key, last_key, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
         BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr):
    """The state after the keys first_key .. last_key."""
    k_rows = head_rows(Operand(k_source, stride_kb, stride_ks, stride_kh), seq, kv_head, 0, len_k, False)
    v_rows = head_rows(Operand(v_source, stride_vb, stride_vs, stride_vh), seq, kv_head, 0, len_k, False)
    i = tl.zeros([BLOCK_M, 1], tl.int32)
    return range_loop(
        STEP, state,
        QueryTile(q, None, None, k_rows, v_rows, Place(seq, seq, kv_head, 0, 0, seqlen_q, 0, len_k), i, scale,
                  Shape(HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, False, PRECISION, False), False),
        Own(Window(-1, -1, False, False), tl.zeros([BLOCK_M, 1], tl.float32), scale, 0.0, False, False, False, False, 0, q.dtype),
        first_key, last_key, 0, 0, BLOCK_N, "all", True, STAGES)


@triton.jit
def walk_again(q_ptr, k_source, v_source, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
               out_ptr, lse_ptr, seq, piece, seqlen_q, heads, group, len_k, softmax_scale, first_row, end_row, HEAD_DIM: tl.constexpr,
               VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
               PRECISION: tl.constexpr):
    """Rows first_row .. end_row of a piece over all of its keys, with their own maxima; stores the result. One query, one part."""
    row = tl.arange(0, BLOCK_M)
    real = (row < group) & (row >= first_row) & (row < end_row)
    head = piece * group + row
    rows = q_ptr + tl.cast(seq, tl.int64) * stride_qb + tl.cast(head, tl.int64) * stride_qh
    q, scale = _load_queries(rows, real, in_units(softmax_scale, PRECISION == "ieee"), k_source, HEAD_DIM, BLOCK_D)
    state = (tl.zeros([BLOCK_M, BLOCK_DV], tl.float32), tl.full([BLOCK_M], -float("inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32))
    acc, row_max, row_sum = walk(_step, state, q, k_source, v_source, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, seq,
                                 piece, seqlen_q, len_k, scale, 0, len_k, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
                                 PRECISION, 1)
    _store_result(acc, row_max, row_sum, out_ptr, lse_ptr, seq, head, tl.zeros([BLOCK_M], tl.int32), real, seqlen_q, heads, VALUE_DIM,
                  BLOCK_DV, PRECISION)


@triton.jit
def fails(row_sum, real, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Whether a row's final sum is not in LOW .. HIGH; NaN is not."""
    good = (row_sum >= LOW) & (row_sum <= HIGH)
    return tl.max(tl.where(real & (good == 0), 1, 0), 0) > 0


@triton.jit
def given_maxima(phi_ptr, seq, head, real, seqlen_q, heads, PRECISION: tl.constexpr):
    phi = tl.load(phi_ptr + _lse_places(seq, 0, head, seqlen_q, heads), mask=real, other=0.0)
    return in_units(phi, PRECISION == "ieee")


@triton.jit
def merged(first, last, inside, lanes, real, row_max, acc_ptr, stats_ptr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, GIVEN: tl.constexpr, CACHED: tl.constexpr):
    """Values, maxima and sums of the rows `lanes` of a piece, from the parts of the programs first .. last. row_max: -inf, or the given."""
    columns = tl.arange(0, BLOCK_DV)
    row_sum = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    for start in range(first, last + 1, BLOCK_S):
        program = start + tl.arange(0, BLOCK_S)
        slot = 2 * program + tl.where(program == first, inside, 0)
        there = real[:, None] & (program <= last)[None, :]
        index = tl.cast(slot, tl.int64)[None, :] * BLOCK_M + lanes[:, None]
        if GIVEN:
            sums = tl.load(stats_ptr + index, mask=there, other=0.0, cache_modifier=CACHED)
        else:
            maxima = tl.load(stats_ptr + 2 * index, mask=there, other=-float("inf"), cache_modifier=CACHED)
            sums = tl.load(stats_ptr + 2 * index + 1, mask=there, other=0.0, cache_modifier=CACHED)
        values = tl.load(acc_ptr + index[:, :, None] * BLOCK_DV + columns[None, None, :], mask=there[:, :, None], other=0.0,
                         cache_modifier=CACHED)
        if GIVEN:
            row_sum += tl.sum(sums, 1)
            acc += tl.sum(values, 1)
        else:
            weights, row_max, _sum, rescale = softmax_step(maxima, row_max, row_sum, 1.0, True, PRECISION == "ieee")
            row_sum = row_sum * rescale + tl.sum(weights * sums, 1)
            acc = acc * rescale[:, None] + tl.sum(values * weights[:, :, None], 1)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["batch", "max_len", "seqlen_q", "pieces", "programs"], do_not_specialize_on_alignment=["cache_seqlens"])
def split_kernel(q_ptr, k_source, v_source, out_ptr, lse_ptr, acc_ptr, stats_ptr, closes_ptr, cache_seqlens, phi_ptr, alone_ptr, flag_ptr,
                 counter_ptr, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
                 softmax_scale, batch, max_len, seqlen_q, heads, group, pieces, programs, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                 BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, OVERLAP: tl.constexpr, GIVEN: tl.constexpr, LAZY: tl.constexpr,
                 FALLBACK: tl.constexpr, PREDICATED: tl.constexpr, ONE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """decode_split_kernel for one query, one part and contiguous rows.

    GIVEN: maxima from phi. LAZY: see given_step. FALLBACK: what a failing piece that this program computes alone does: "walk" again here,
    set a "flag" of its program, or "none". PREDICATED: leaves if the flag is not set. ONE: the last program of a piece finishes it, from
    "slots" or from sums by "atomics"; "" leaves it to the second kernel.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    if PREDICATED:
        if tl.load(flag_ptr) == 0:
            return
    program = tl.program_id(0)
    unit_scale = in_units(softmax_scale, PRECISION == "ieee")
    total = total_tiles(cache_seqlens, batch, max_len, seqlen_q, -1, BLOCK_N, False, 1) * pieces
    share = tl.cdiv(total, programs)
    unit = program * share
    end_unit = tl.minimum(unit + share, total)
    if ONE == "":
        tl.store(closes_ptr + 4 * program, -1)
    if FALLBACK == "flag":
        tl.store(alone_ptr + program, 0)
        if program == 0:
            tl.store(flag_ptr, 0)
    if unit >= total:
        return
    seq, before = find_sequence(cache_seqlens, unit // pieces, batch, max_len, seqlen_q, -1, BLOCK_N, False, 1)
    slot = 2 * program
    lanes = tl.arange(0, BLOCK_M)
    value_columns = tl.arange(0, BLOCK_DV)
    while unit < end_unit:
        len_k, first, tiles = sequence_tiles(cache_seqlens, seq, batch, max_len, seqlen_q, -1, BLOCK_N, False, 1)
        inside = unit - before * pieces
        piece = inside // tiles
        begin = inside - piece * tiles
        end = tl.minimum(tiles, begin + end_unit - unit)
        real = lanes < group
        head = piece * group + lanes
        q_rows = q_ptr + tl.cast(seq, tl.int64) * stride_qb + tl.cast(head, tl.int64) * stride_qh
        q, scale = _load_queries(q_rows, real, unit_scale, k_source, HEAD_DIM, BLOCK_D)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        if GIVEN:
            row_max = given_maxima(phi_ptr, seq, head, real, seqlen_q, heads, PRECISION)
        else:
            row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M, BLOCK_N] if LAZY else [BLOCK_M], tl.float32)
        acc, row_max, row_sum = walk(given_step if GIVEN else _step, (acc, row_max, row_sum), q, k_source, v_source, stride_kb, stride_ks,
                                     stride_kh, stride_vb, stride_vs, stride_vh, seq, piece, seqlen_q, len_k, scale, begin * BLOCK_N,
                                     end * BLOCK_N, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, None)
        if LAZY:
            row_sum = tl.sum(row_sum, 1)
        none = tl.zeros([BLOCK_M], tl.int32)
        if begin == 0 and end == tiles:
            _store_result(acc, row_max, row_sum, out_ptr, lse_ptr, seq, head, none, real, seqlen_q, heads, VALUE_DIM, BLOCK_DV, PRECISION)
            if FALLBACK != "none":
                if fails(row_sum, real, LOW, HIGH):
                    if FALLBACK == "flag":
                        tl.store(alone_ptr + program, 1)
                    else:
                        tl.debug_barrier()  # the same rows are stored once more, perhaps by other threads
                        walk_again(q_ptr, k_source, v_source, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb,
                                   stride_vs, stride_vh, out_ptr, lse_ptr, seq, piece, seqlen_q, heads, group, len_k, softmax_scale, 0,
                                   BLOCK_M, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION)
        elif ONE == "atomics":
            owner = seq * pieces + piece
            index = tl.cast(owner, tl.int64) * BLOCK_M + lanes
            tl.atomic_add(acc_ptr + index[:, None] * BLOCK_DV + value_columns[None, :], acc, mask=real[:, None], sem="relaxed")
            tl.atomic_add(stats_ptr + index, row_sum, mask=real, sem="relaxed")
            others = (unit - begin + tiles - 1) // share - (unit - begin) // share
            tl.debug_barrier()
            if tl.atomic_add(counter_ptr + owner, 1, sem="acq_rel") == others:
                tl.debug_barrier()
                row = tl.arange(0, BLOCK_R)
                there = row < group
                sum_places = stats_ptr + tl.cast(owner, tl.int64) * BLOCK_M + row
                places = acc_ptr + (tl.cast(owner, tl.int64) * BLOCK_M + row)[:, None] * BLOCK_DV + value_columns[None, :]
                total_sum = tl.load(sum_places, mask=there, other=0.0, cache_modifier=".cg")
                total_acc = tl.load(places, mask=there[:, None], other=0.0, cache_modifier=".cg")
                maxima = given_maxima(phi_ptr, seq, piece * group + row, there, seqlen_q, heads, PRECISION)
                _store_result(total_acc, maxima, total_sum, out_ptr, lse_ptr, seq, piece * group + row, tl.zeros([BLOCK_R], tl.int32), there,
                              seqlen_q, heads, VALUE_DIM, BLOCK_DV, PRECISION)
                tl.debug_barrier()
                tl.store(sum_places, tl.zeros([BLOCK_R], tl.float32), mask=there)
                tl.store(places, tl.zeros([BLOCK_R, BLOCK_DV], tl.float32), mask=there[:, None])
                tl.store(counter_ptr + owner, 0)
        else:
            part_index = tl.cast(slot, tl.int64) * BLOCK_M + lanes
            tl.store(acc_ptr + part_index[:, None] * BLOCK_DV + value_columns[None, :], acc, mask=real[:, None])
            if GIVEN:
                tl.store(stats_ptr + part_index, row_sum, mask=real)
            else:
                tl.store(stats_ptr + 2 * part_index, row_max, mask=real)
                tl.store(stats_ptr + 2 * part_index + 1, row_sum, mask=real)
            if ONE == "slots":
                owner = seq * pieces + piece
                first_program = (unit - begin) // share
                last_program = (unit - begin + tiles - 1) // share
                tl.debug_barrier()
                if tl.atomic_add(counter_ptr + owner, 1, sem="acq_rel") == last_program - first_program:
                    tl.debug_barrier()
                    row = tl.arange(0, BLOCK_R)
                    there = row < group
                    if GIVEN:
                        maxima = given_maxima(phi_ptr, seq, piece * group + row, there, seqlen_q, heads, PRECISION)
                    else:
                        maxima = tl.full([BLOCK_R], -float("inf"), tl.float32)
                    total_acc, maxima, total_sum = merged(first_program, last_program,
                                                          (unit - begin > first_program * share).to(tl.int32), row, there, maxima, acc_ptr,
                                                          stats_ptr, BLOCK_DV, PRECISION, BLOCK_M, BLOCK_R, BLOCK_S, GIVEN, ".cg")
                    _store_result(total_acc, maxima, total_sum, out_ptr, lse_ptr, seq, piece * group + row, tl.zeros([BLOCK_R], tl.int32),
                                  there, seqlen_q, heads, VALUE_DIM, BLOCK_DV, PRECISION)
                    tl.store(counter_ptr + owner, 0)
            elif begin > 0 and end == tiles:
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


@triton.jit(do_not_specialize=["seqlen_q", "blocks"], do_not_specialize_on_alignment=["cache_seqlens"])
def merge_kernel(acc_ptr, stats_ptr, closes_ptr, out_ptr, lse_ptr, phi_ptr, alone_ptr, flag_ptr, q_ptr, k_source, v_source, cache_seqlens,
                 seqlen_q, heads, group, blocks, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
                 stride_vh, softmax_scale, max_len, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                 BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
                 BLOCK_S: tl.constexpr, OVERLAP: tl.constexpr, GIVEN: tl.constexpr, FALLBACK: tl.constexpr, PREDICATED: tl.constexpr,
                 LOW: tl.constexpr, HIGH: tl.constexpr):
    """decode_merge_kernel for one query, one part."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    if PREDICATED:
        if tl.load(flag_ptr) == 0:
            return
    last = tl.program_id(0) // blocks
    first = tl.load(closes_ptr + 4 * last)
    if FALLBACK == "flag":
        if tl.load(alone_ptr + last) > 0:
            tl.store(flag_ptr, 1)
    if first < 0:
        return
    inside = tl.load(closes_ptr + 4 * last + 1)
    seq = tl.load(closes_ptr + 4 * last + 2)
    piece = tl.load(closes_ptr + 4 * last + 3)
    lanes = tl.program_id(0) % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    real = lanes < group
    head = piece * group + lanes
    if GIVEN:
        row_max = given_maxima(phi_ptr, seq, head, real, seqlen_q, heads, PRECISION)
    else:
        row_max = tl.full([BLOCK_R], -float("inf"), tl.float32)
    acc, row_max, row_sum = merged(first, last, inside, lanes, real, row_max, acc_ptr, stats_ptr, BLOCK_DV, PRECISION, BLOCK_M, BLOCK_R,
                                   BLOCK_S, GIVEN, "")
    _store_result(acc, row_max, row_sum, out_ptr, lse_ptr, seq, head, tl.zeros([BLOCK_R], tl.int32), real, seqlen_q, heads, VALUE_DIM,
                  BLOCK_DV, PRECISION)
    if FALLBACK != "none":
        if fails(row_sum, real, LOW, HIGH):
            if FALLBACK == "flag":
                tl.store(flag_ptr, 1)
            else:
                tl.debug_barrier()  # the same rows are stored once more, perhaps by other threads
                first_row = tl.program_id(0) % blocks * BLOCK_R
                len_k = tl.minimum(tl.maximum(tl.load(cache_seqlens + seq), 0), max_len)
                walk_again(q_ptr, k_source, v_source, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
                           stride_vh, out_ptr, lse_ptr, seq, piece, seqlen_q, heads, group, len_k, softmax_scale, first_row,
                           first_row + BLOCK_R, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION)


# ----------------------------------------------------------------------------------------------------------------------------- launches

VARIANTS = {
    "A": None,
    "A'": None,
    "A copy": {},
    "B walk": {"GIVEN": True, "LAZY": True, "FALLBACK": "walk"},
    "B flag": {"GIVEN": True, "LAZY": True, "FALLBACK": "flag"},
    "C": {"GIVEN": True},
    "C lazy": {"GIVEN": True, "LAZY": True},
    "C one kernel": {"GIVEN": True, "LAZY": True, "ONE": "slots"},
    "C atomics": {"GIVEN": True, "LAZY": True, "ONE": "atomics"},
    "E one kernel": {"ONE": "slots"},
    "A copy, 160": {"REGISTERS": 160},
    "C lazy, 160": {"GIVEN": True, "LAZY": True, "REGISTERS": 160},
}
DEFAULTS = {"GIVEN": False, "LAZY": False, "FALLBACK": "none", "PREDICATED": False, "ONE": ""}
TARGET = {"arch": None, "multiprocessors": None}  # of --compile


def make(name, q, k, v):
    """call(q, k, v, lengths, phi) -> (out, lse) for tensors of this layout. Buffers that must be zero between calls are made here."""
    options = VARIANTS[name]
    if options is None:
        return lambda q, k, v, lengths, phi: decode_attention(q, k, v, cache_seqlens=lengths, impl="triton", return_lse=True)
    registers = options.get("REGISTERS")
    options = DEFAULTS | {key: value for key, value in options.items() if key != "REGISTERS"}
    batch, queries, heads, width = q.shape
    kv_heads, max_len, device = k.shape[2], k.shape[1], q.device
    group = heads // kv_heads
    assert queries == 1 and group <= 16
    arch = architecture(device) if TARGET["arch"] is None else TARGET["arch"]
    processors = TARGET["multiprocessors"] or (torch.cuda.get_device_properties(device).multi_processor_count if arch else 1)
    block_d = block_width(width)
    tile = decode_tile(arch, block_d, block_d, group, q.element_size(), batch * kv_heads / processors)
    programs = tile.programs * processors
    overlap = overlaps(arch) or TARGET["arch"] == 90
    pdl = {"launch_pdl": True} if overlap else {}
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    rows = min(next_power_of_2(group), max(1024 // block_d, 1), 8)
    blocks = math.ceil(group / rows)
    # float16 holds weights up to 2^16 and down to 2^-24
    # and a float32 exponent that is far from zero has fewer bits after the point than float32's results need
    exponents = {torch.float16: (-6, 14), torch.float32: (-4, 4), torch.bfloat16: (-64, 64)}[q.dtype]
    low, high = (2.0**x for x in exponents)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    common = {"HEAD_DIM": width, "VALUE_DIM": width, "BLOCK_D": block_d, "BLOCK_DV": block_d, "PRECISION": precision, "BLOCK_M": tile.block_m,
              "BLOCK_R": rows, "BLOCK_S": min(MERGED // (rows * block_d), 32), "OVERLAP": overlap, "LOW": low, "HIGH": high}
    if options["ONE"] and blocks > 1:
        raise NotImplementedError("one kernel merges at most 8 rows")

    def launches(options):
        split = Launch(split_kernel, programs, (*strides, width**-0.5, batch, max_len, 1, heads, group, kv_heads, programs),
                       common | options | {"BLOCK_N": tile.block_n}, tile.num_warps, tile.num_stages,
                       options=pdl | ({"maxnreg": registers} if registers and arch else {}))
        walks = options["FALLBACK"] == "walk"
        scalars = (*strides, width**-0.5, max_len) if walks else (None,) * 11
        constants = common | {key: options[key] for key in ("GIVEN", "FALLBACK", "PREDICATED")} | {"BLOCK_N": WALK_N}
        merge = Launch(merge_kernel, programs * blocks, (1, heads, group, blocks, *scalars), constants, 4, 1, options=pdl)
        return split, merge

    split, merge = launches(options)
    ordinary = launches(DEFAULTS | {"PREDICATED": True}) if options["FALLBACK"] == "flag" else None
    atomics = options["ONE"] == "atomics"
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    counter = torch.zeros(batch * kv_heads, dtype=torch.int32, device=device) if options["ONE"] else None
    sums = torch.zeros(batch * kv_heads, tile.block_m, block_d + 1, device=device) if atomics else None

    def call(q, k, v, lengths, phi):
        out = torch.empty_like(q)
        lse = torch.empty(batch, heads, 1, dtype=torch.float32, device=device)
        if atomics:
            flat = sums.view(-1)
            acc, stats = flat[: sums[..., 0].numel() * block_d], flat[sums[..., 0].numel() * block_d :]
        else:
            acc = torch.empty(2 * programs, tile.block_m, block_d, dtype=torch.float32, device=device)
            stats = torch.empty(2 * programs, tile.block_m, 1 if options["GIVEN"] else 2, dtype=torch.float32, device=device)
        closes = None if options["ONE"] else torch.empty(programs, 4, dtype=torch.int32, device=device)
        alone = torch.empty(programs, dtype=torch.int32, device=device) if ordinary else None
        maxima = phi if options["GIVEN"] else None
        split(q, k, v, out, lse, acc, stats, closes, lengths, maxima, alone, flag if ordinary else None, counter)
        if not options["ONE"]:
            again = (q, k, v, lengths) if options["FALLBACK"] == "walk" else (None,) * 4
            merge(acc, stats, closes, out, lse, maxima, alone, flag if ordinary else None, *again)
        if ordinary:
            acc, stats = torch.empty_like(acc), torch.empty(2 * programs, tile.block_m, 2, dtype=torch.float32, device=device)
            ordinary[0](q, k, v, out, lse, acc, stats, closes, lengths, None, None, flag, None)
            ordinary[1](acc, stats, closes, out, lse, None, None, flag, None, None, None, None)
        return out, lse

    call.launches = [split, *([] if options["ONE"] else [merge]), *(ordinary or ())]
    call.buffers = [x for x in (flag, counter, sums) if x is not None]
    return call


# ------------------------------------------------------------------------------------------------------------------------------- checks


def bad_maxima(lse, seed=0):
    """Kinds of wrong maxima for rows of this LSE."""
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    generator = torch.Generator().manual_seed(seed)
    shifts = torch.tensor([0.0, 1.0, -30.0, 30.0, -43.0, 43.0, -50.0, 50.0, -100.0, 100.0, torch.inf, -torch.inf, torch.nan])
    chosen = shifts[torch.randint(len(shifts), lse.shape, generator=generator)].to(lse.device)
    return {"too small": lse - 100.0, "too large": lse + 100.0, "just inside, small": lse - 43.0, "just inside, large": lse + 43.0,
            "mixed": lse + chosen, "zero": torch.zeros_like(lse), "nan": torch.full_like(lse, torch.nan)}


def check(names, q, k, v, lengths, rows, report, calls=None):
    """Largest errors of all variants beside those of eager attention in q's dtype, over some sequences. Returns {name: ok}."""
    rows = torch.tensor(rows, device=q.device)

    def reference(dtype):
        outs = [decode_attention(q[r : r + 1].to(dtype), k[r : r + 1].to(dtype), v[r : r + 1].to(dtype), cache_seqlens=lengths[r : r + 1],
                                 impl="reference", return_lse=True) for r in rows.tolist()]
        return [torch.cat(x) for x in zip(*outs, strict=True)]

    exact, exact_lse = reference(torch.float64)
    eager, eager_lse = reference(q.dtype)
    eager_error = (eager.double() - exact).abs().max().item()
    seen = exact_lse > -torch.inf
    eager_lse_error = (eager_lse.double() - exact_lse)[seen].abs().max().item()
    whole = torch.zeros(*q.shape[:1], q.shape[2], 1, device=q.device)
    whole += decode_attention(q, k, v, cache_seqlens=lengths, impl="triton", return_lse=True)[1].nan_to_num(0.0, neginf=0.0)
    whole[rows] = exact_lse.float().masked_fill(~seen, 0.0)
    good = whole + 0.5 * torch.randn(whole.shape, generator=torch.Generator().manual_seed(1)).to(q.device)
    report(f"  eager's error {eager_error:.3e}, of its LSE {eager_lse_error:.1e}; |out| up to {exact.abs().max().item():.3f}")
    oks = {}
    for name in names:
        try:
            call = (calls or {}).get(name) or make(name, q, k, v)
            kinds = {"good": good} | (bad_maxima(whole) if "FALLBACK" in (VARIANTS[name] or {}) else {})
            texts, worst = [], 0.0
            for kind, phi in kinds.items():
                call(q, k, v, lengths, phi.contiguous())
                out, lse = call(q, k, v, lengths, phi.contiguous())  # the second call finds what the first one left
                difference = (out[rows].double() - exact).abs().max().item()
                lse_error = (lse[rows].double() - exact_lse)[seen].abs().max().item()
                same = bool(((lse[rows] == -torch.inf) == ~seen).all())
                ratio = difference / eager_error
                wrong = not ratio <= 2.0 or not lse_error <= max(1e-3, 2 * eager_lse_error) or not same
                worst = math.inf if wrong or math.isnan(ratio) else max(worst, ratio)
                texts.append(f"{kind} {difference:.2e} = {ratio:.2f} eager, LSE {lse_error:.0e}" + (" WRONG" if wrong else ""))
            oks[name] = worst <= 2.0
            report(f"  {name:13s} " + "; ".join(texts))
        except Exception as error:
            oks[name] = False
            report(f"  {name:13s} FAILED: {type(error).__name__}: {str(error)[:500]}")
            traceback.print_exc(limit=4)
    return oks


# ------------------------------------------------------------------------------------------------------------------------------ timing


def graph_of(call, inputs, calls):
    """(a CUDA graph of so many calls, one input after the other; the outputs of each call)."""
    for x in inputs[:2]:
        call(*x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [call(*inputs[n % len(inputs)])[0] for n in range(calls)]
    graph.replay()
    torch.cuda.synchronize()
    return graph, outs


def read(graph, calls, milliseconds):
    """Microseconds a call: one replay that is not timed, and as many as fill so many milliseconds."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    times = min(max(math.ceil(milliseconds / max(begin.elapsed_time(end), 1e-3)), 2), 50)
    time.sleep(0.01)
    graph.replay()
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / (times * calls)


def clock():
    try:
        text = subprocess.run(["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_throttle_reasons.active",
                               "--format=csv,noheader"], capture_output=True, text=True, timeout=10).stdout
        return text.strip().splitlines()[0]
    except Exception as error:
        return f"unknown ({type(error).__name__})"


def on_gpu():
    lines, rows = [], []
    folder = os.environ.get("OUT", ".")

    def report(text):
        print(f"[{time.monotonic() - STARTED:5.1f}] {text}", flush=True)
        lines.append(text)

    def save():
        with open(os.path.join(folder, "one_maximum.txt"), "w") as file:
            file.write("\n".join(lines) + "\n")
        if rows:
            with open(os.path.join(folder, "one_maximum.csv"), "w", newline="") as file:
                writer = csv.DictWriter(file, rows[0].keys())
                writer.writeheader()
                writer.writerows(rows)

    device = torch.device("cuda", 0)
    gpu = torch.cuda.get_device_name(0)
    report(f"{gpu}, {torch.cuda.get_device_properties(0).multi_processor_count} multiprocessors, torch {torch.__version__}, triton "
           f"{triton.__version__}; {clock()}")
    heads, kv_heads, width = 32, 8, 128
    # batch, length, caches, calls in a graph, whether one cache is also timed alone; the most important first
    cells = CELLS
    for batch, length, caches, calls, alone in cells:
        if time.monotonic() - STARTED > DEADLINE:
            report(f"{batch} x {length}: no time left")
            continue
        try:
            cell(report, rows, device, gpu, batch, length, caches, calls, alone, heads, kv_heads, width)
        except Exception as error:
            report(f"{batch} x {length} FAILED: {type(error).__name__}: {str(error)[:500]}")
            traceback.print_exc(limit=4)
        save()
        torch.cuda.empty_cache()
    report(f"end; {clock()}")
    save()


def cell(report, rows, device, gpu, batch, length, caches, calls, alone, heads, kv_heads, width):
    generator = torch.Generator(device).manual_seed(batch + length)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device, dtype=DTYPE)

    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    inputs = []
    for _ in range(caches):
        q, k, v = normal(batch, 1, heads, width), normal(batch, length, kv_heads, width), normal(batch, length, kv_heads, width)
        lse = decode_attention(q, k, v, cache_seqlens=lengths, impl="triton", return_lse=True)[1]
        noise = 0.5 * torch.randn(lse.shape, generator=generator, device=device)  # the last token's LSE is not this one's
        inputs.append((q, k, v, lengths, lse + noise))
    report(f"{batch} x {length}, {heads} heads over {kv_heads} of {width}, bfloat16: errors")
    q, k, v = inputs[0][:3]
    made = {}
    for name in VARIANTS:
        try:
            made[name] = make(name, q, k, v)
        except Exception as error:
            report(f"  {name} FAILED: {type(error).__name__}: {str(error)[:500]}")
    chosen = [0] if batch == 1 else [0, batch // 2, batch - 1]
    names = [name for name in made if name != "A'"]
    oks = check(names, q, k, v, lengths, chosen, report, made)
    if (batch, length) == CELLS[0][:2]:
        report(f"{batch} x {length}, queries times 8: errors")
        check([name for name in names if name != "A copy"], q * 8, k, v, lengths, chosen, report, made)
        uneven = torch.full_like(lengths, length * 3 // 4 + 5)
        report(f"{batch} x {length * 3 // 4 + 5} of {length}: errors")
        check([name for name in names if name != "A copy"], q, k, v, uneven, chosen, report, made)
    oks["A'"] = True
    size = 2 * batch * length * kv_heads * width * 2
    for layout, given in (("many caches", inputs), ("one cache", inputs[:1])):
        if layout == "one cache" and not alone:
            continue
        if time.monotonic() - STARTED > DEADLINE:
            report(f"{batch} x {length}, {layout}: no time left")
            continue
        graphs = {}
        for name in made:
            try:
                graphs[name] = graph_of(made[name], given, calls)
            except Exception as error:
                report(f"  {name} has no graph: {type(error).__name__}: {str(error)[:500]}")
                traceback.print_exc(limit=4)
        walked = None
        if "B walk" in graphs and batch == 1:
            try:  # what failing rows cost
                walked = {f"{name}, all fail": graph_of(made[name], [(*x[:4], x[4] + 100.0) for x in given], calls)
                          for name in ("B walk", "B flag")}
                graphs |= walked
            except Exception as error:
                report(f"  no graph of failing rows: {type(error).__name__}: {str(error)[:500]}")
        readings = {name: [] for name in graphs}
        order = random.Random(0)
        rounds = 15 if size < 2**28 else 9
        for number in range(rounds):
            if number >= 7 and time.monotonic() - STARTED > DEADLINE:
                break
            for name in order.sample(list(graphs), len(graphs)):
                time.sleep(0.005)
                readings[name].append(read(graphs[name][0], calls, 4.0))
        differences = {name: max((a.float() - b.float()).abs().max().item() for a, b in zip(outs, graphs["A"][1], strict=True))
                       for name, (_, outs) in graphs.items()} if "A" in graphs else {}
        report(f"{batch} x {length}, {layout} ({len(given)}, {size / 2**20:.1f} MiB each), {calls} calls a graph, {len(readings['A'])} rounds; "
               "us a call: median [quartiles] least; A's time / its time, median and range over rounds; largest difference from A's outputs")
        for name, values in readings.items():
            low, middle, high = statistics.quantiles(values, n=4)
            ratios = [a / b for a, b in zip(readings["A"], values, strict=True)]
            row = {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__, "batch": batch, "length": length, "layout": layout,
                   "caches": len(given), "calls": calls, "rounds": len(values), "variant": name, "us": round(middle, 4), "us_q25": round(low, 4),
                   "us_q75": round(high, 4), "us_min": round(min(values), 4), "us_max": round(max(values), 4),
                   "rate_of_A": round(statistics.median(ratios), 4), "rate_min": round(min(ratios), 4), "rate_max": round(max(ratios), 4),
                   "TB_s": round(size / middle / 1e6, 4), "right": oks.get(name, ""), "difference": differences.get(name, ""),
                   "readings": " ".join(f"{x:.3f}" for x in values)}
            rows.append(row)
            report(f"  {name:17s} {middle:8.3f} [{low:.3f}, {high:.3f}] {min(values):8.3f}   x{row['rate_of_A']:.3f} "
                   f"({row['rate_min']:.3f} to {row['rate_max']:.3f})  {row['TB_s']:.2f} TB/s  {differences.get(name, math.nan):.1e}"
                   + ("" if oks.get(name, True) else "  ITS RESULTS ARE WRONG"))
        del graphs, walked


# ---------------------------------------------------------------------------------------------------------------------- on a CPU


def in_interpreter():
    for dtype in (torch.float32, torch.float16):
        for lengths, heads, kv_heads, width, longest in (((100, 0, 33, 65), 8, 2, 64, 128), ((500,), 8, 2, 32, 512), ((31,) * 7, 4, 4, 16, 40)):
            generator = torch.Generator().manual_seed(len(lengths))
            q = torch.randn(len(lengths), 1, heads, width, generator=generator).to(dtype)
            k, v = (torch.randn(len(lengths), longest, kv_heads, width, generator=generator).to(dtype) for _ in range(2))
            counts = torch.tensor(lengths, dtype=torch.int32)
            print(f"{dtype}, lengths {lengths}, {heads} heads over {kv_heads} of {width}")
            made = {name: make(name, q, k, v) for name in VARIANTS if name != "A'" and "," not in name}
            oks = check(list(made), q, k, v, counts, range(len(lengths)), print, made)
            left = [name for name, call in made.items() if VARIANTS[name] and "FALLBACK" not in VARIANTS[name]
                    and any(x.any() for x in call.buffers)]
            print("  ALL RIGHT" if all(oks.values()) and not left else f"  WRONG: {[n for n in oks if not oks[n]]} {left}")


def ahead_of_time(arch):
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self):
            return arch

        def get_current_stream(self, device=None):
            return 0

    def listing(cubin, tool, *options):
        path = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin", tool)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout

    def loops(cubin):
        """Instructions, barriers, shuffles and products of the innermost loops that hold products."""
        lines = [x for x in listing(cubin, "nvdisasm", "-c").splitlines() if re.search(r"^\s*(\.L|/\*[0-9a-f]{4,}\*/)", x)]
        labels = {match[1]: n for n, x in enumerate(lines) if (match := re.match(r"(\.L_x?_?\w+):", x.strip()))}
        found = [(labels.get(match[1], n), n) for n, x in enumerate(lines) if (match := re.search(r"BRA\b.*?(\.L_x?_?\w+)", x))]
        found = [(b, e) for b, e in found if b < e and any("MMA" in x for x in lines[b:e])]
        inner = [(b, e) for b, e in found if not any((x, y) != (b, e) and b <= x and y <= e for x, y in found)]
        texts = []
        for b, e in inner:
            body = [x for x in lines[b : e + 1] if "/*" in x]
            counts = {word: sum(word in x for x in body) for word in ("BAR.SYNC", "SHFL", "MMA", "LDGSTS", "MUFU.EX2")}
            texts.append(f"{len(body)} instructions " + " ".join(f"{key}:{value}" for key, value in counts.items()))
        return texts

    triton.runtime.driver.set_active(Driver())
    compiled, run = [], JITFunction.run

    def warm_up(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.fn.__name__, options, kernel))
        return None

    JITFunction.run = warm_up
    from attnzoo_kernels.decode import forward

    forward.architecture, forward._multiprocessors = lambda device: arch, lambda index: 132
    forward.overlaps = lambda arch: arch >= 90
    TARGET.update(arch=arch, multiprocessors=132)
    for batch in (1, 64):
        q, cache = torch.zeros(batch, 1, 32, 128, dtype=torch.bfloat16), torch.zeros(batch, 128, 8, 128, dtype=torch.bfloat16)
        lengths, phi = torch.zeros(batch, dtype=torch.int32), torch.zeros(batch, 32, 1)
        for name in VARIANTS:
            if name == "A'":
                continue
            compiled.clear()
            begin = time.monotonic()
            if name == "A":
                forward.launch_forward(q, cache, cache, lengths, None, None, None, 128**-0.5, -1, 0, 0.0)
            else:
                make(name, q, cache, cache)(q, cache, cache, lengths, phi)
            print(f"batch {batch}, {name} ({time.monotonic() - begin:.1f} s)")
            for kernel_name, _options, kernel in compiled:
                text = listing(kernel.asm["cubin"], "cuobjdump", "--dump-resource-usage")
                registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
                trap = " TRAP" if "trap;" in kernel.asm["ptx"] else ""
                print(f"   {kernel_name:22s} {registers} registers, {stack} bytes of stack, {kernel.metadata.shared} bytes shared, "
                      f"{kernel.metadata.num_warps} warps{trap}; " + " | ".join(loops(kernel.asm["cubin"])))


if __name__ == "__main__":
    if MODE == "--interpret":
        in_interpreter()
    elif MODE == "--compile":
        ahead_of_time(int(sys.argv[2]))
    else:
        try:
            on_gpu()
        except Exception:
            traceback.print_exc()
        sys.exit(0)
