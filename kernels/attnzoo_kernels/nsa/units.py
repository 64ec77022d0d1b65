"""The kernels of fold.py, which says what a unit is. A query's place is unit * stride + its number in the unit. A folded tensor has a row
for each place, (units, kv_heads * stride * group, width); others have a row for each query, (total_q, heads, width)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo_kernels._triton.launch import next_power_of_2, on_device_of
from attnzoo_kernels._triton.search import last_up_to
from attnzoo_kernels.routed.lists import BLOCK, SEQUENCES, bounds_of, launches, length_of, store_before
from attnzoo_kernels.routed.parts import BLOCK_ROWS, gather_tile, load_tile, rows_of_program, store_tile

HEADS = ["total_q", "kv_heads", "group", "stride"]


@triton.jit
def _floor(x, divisor):
    """x // divisor, rounded down for negative x too."""
    quotient = x // divisor
    return tl.where(quotient * divisor > x, quotient - 1, quotient)


@triton.jit(do_not_specialize=["sequences", "size", "stride"], do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def nsa_bounds_kernel(cu_seqlens_q, cu_seqlens_k, bounds_ptr, units_ptr, sequences, size, stride, SEQUENCES: tl.constexpr):
    """Stores cu_seqlens of the compressed keys (bounds) and of the units. It has one program."""
    keys, units = 0, 0
    for at in range(0, sequences, SEQUENCES):
        sequence = at + tl.arange(0, SEQUENCES)
        inside = sequence < sequences
        len_q, len_k = length_of(cu_seqlens_q, sequence, inside), length_of(cu_seqlens_k, sequence, inside)
        of_keys = tl.where(inside, tl.maximum(len_k - size + stride, 0) // stride, 0)
        of_units = tl.where(inside, len_k // stride - _floor(len_k - len_q + 1, stride) + 1, 0)
        keys = store_before(bounds_ptr, keys, of_keys, sequence, inside)
        units = store_before(units_ptr, units, of_units, sequence, inside)
    tl.store(bounds_ptr + sequences, keys)
    tl.store(units_ptr + sequences, units)


@triton.jit
def _begin(cu_seqlens_q, cu_seqlens_k, units_ptr, of, stride, inside):
    """(first query, query behind the last, place minus query) of each of the sequences `of`."""
    start_q, stop_q, _, _, shift = bounds_of(cu_seqlens_q, cu_seqlens_k, of, inside)
    position = shift + 1
    place = position - _floor(position, stride) * stride + tl.load(units_ptr + of, mask=inside, other=0) * stride
    return start_q, stop_q, place - start_q


@triton.jit(do_not_specialize=["sequences", "steps", "stride", "total_q", "room"],
            do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"])
def nsa_places_kernel(cu_seqlens_q, cu_seqlens_k, units_ptr, place_ptr, source_ptr, sequences, steps, stride, total_q, room,
                      BLOCK: tl.constexpr):
    """Stores each query's place, and each place's query (-1 if it has none). A program handles BLOCK of both. Queries after the last
    sequence have places behind its units."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(cu_seqlens_q + sequences)
    behind = tl.load(units_ptr + sequences) * stride - end

    inside = at < total_q
    of = last_up_to(cu_seqlens_q, at, sequences, steps, inside)
    _, _, shift = _begin(cu_seqlens_q, cu_seqlens_k, units_ptr, of, stride, inside)
    tl.store(place_ptr + at, at + tl.where(at < end, shift, behind), mask=inside)

    inside = at < room
    of = last_up_to(units_ptr, at // stride, sequences, steps, inside)
    start, stop, shift = _begin(cu_seqlens_q, cu_seqlens_k, units_ptr, of, stride, inside)
    last = at >= behind + end
    query = at - tl.where(last, behind, shift)
    there = tl.where(last, query < total_q, (query >= start) & (query < stop))
    tl.store(source_ptr + at, tl.where(there, query, -1), mask=inside)


@triton.jit
def _rows(total_q, kv_heads, group, BLOCK_ROWS: tl.constexpr):
    """A program's pairs (query, head), each [BLOCK_ROWS]: (query * heads + head, whether there is such a pair, query, head)."""
    heads = kv_heads * group
    row, inside, _ = rows_of_program(total_q, heads, BLOCK_ROWS)
    return row, inside, row // heads, row % heads


@triton.jit
def _folded_row(place_ptr, query, head, inside, kv_heads, group, stride):
    """The row of a query and head in a folded tensor, seen as (units * kv_heads * stride * group, width)."""
    place = tl.load(place_ptr + query, mask=inside, other=0).to(tl.int64)
    return (((place // stride) * kv_heads + head // group) * stride + place % stride) * group + head % group


@triton.jit(do_not_specialize=["rows", "kv_heads", "group", "stride", "stride_gate", "stride_gate_head"],
            do_not_specialize_on_alignment=["gates_ptr"])
def nsa_fold_kernel(x_ptr, gates_ptr, source_ptr, out_ptr, stride_row, stride_head, stride_gate, stride_gate_head, rows, kv_heads, group,
                    stride, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, GATED: tl.constexpr):
    """Folds x: copies each query's row to its place; places without a query get zeros. GATED: times the first gate of query and head."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = row < rows
    place = row // (kv_heads * stride * group) * stride + row // group % stride
    head = row // (group * stride) % kv_heads * group + row % group
    query = tl.load(source_ptr + place, mask=inside, other=-1).to(tl.int64)
    there = inside & (query >= 0)
    tile = gather_tile(x_ptr, stride_row, stride_head, query, head, there, WIDTH, BLOCK_WIDTH)
    if GATED:
        gate = tl.load(gates_ptr + query * stride_gate + head * stride_gate_head, mask=there, other=0.0).to(tl.float32)
        tile = tile.to(tl.float32) * gate[:, None]
    store_tile(out_ptr, row, inside, tile, WIDTH, BLOCK_WIDTH)


@triton.jit(do_not_specialize=HEADS)
def nsa_unfold_kernel(x_ptr, place_ptr, out_ptr, total_q, kv_heads, group, stride, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
                      BLOCK_ROWS: tl.constexpr):
    """The inverse of nsa_fold_kernel, without gates."""
    row, inside, query, head = _rows(total_q, kv_heads, group, BLOCK_ROWS)
    folded = _folded_row(place_ptr, query, head, inside, kv_heads, group, stride)
    store_tile(out_ptr, row, inside, load_tile(x_ptr, folded, inside, WIDTH, BLOCK_WIDTH), WIDTH, BLOCK_WIDTH)


@triton.jit(do_not_specialize=["total_q", "kv_heads", "group", "stride", "units"])
def nsa_unfold_lse_kernel(lse_ptr, place_ptr, out_ptr, total_q, kv_heads, group, stride, units, BLOCK: tl.constexpr):
    """(kv_heads * stride * group, units) to (heads, total_q), a head's BLOCK queries by a program."""
    tiles = tl.cdiv(total_q, BLOCK)
    head = tl.program_id(0) // tiles
    query = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    inside = query < total_q
    place = tl.load(place_ptr + query, mask=inside, other=0)
    row = (head // group * stride + place % stride) * group + head % group
    lse = tl.load(lse_ptr + row.to(tl.int64) * units + place // stride, mask=inside, other=0.0)
    tl.store(out_ptr + head.to(tl.int64) * total_q + query, lse, mask=inside)


@triton.jit
def _gates(gates_ptr, query, head, inside, stride_gate, stride_gate_head, stride_branch):
    """The gates of the compressed, the selected and the window branch, each [BLOCK_ROWS, 1]."""
    at = gates_ptr + query * stride_gate + head * stride_gate_head
    compressed = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    selected = tl.load(at + stride_branch, mask=inside, other=0.0).to(tl.float32)
    near = tl.load(at + 2 * stride_branch, mask=inside, other=0.0).to(tl.float32)
    return compressed[:, None], selected[:, None], near[:, None]


@triton.jit(do_not_specialize=[*HEADS, "stride_gate", "stride_gate_head", "stride_branch"], do_not_specialize_on_alignment=["gates_ptr"])
def nsa_combine_kernel(compressed_ptr, selected_ptr, near_ptr, gates_ptr, place_ptr, out_ptr, stride_gate, stride_gate_head, stride_branch,
                       total_q, kv_heads, group, stride, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """The sum of the branches times their gates; the compressed branch is folded."""
    row, inside, query, head = _rows(total_q, kv_heads, group, BLOCK_ROWS)
    folded = _folded_row(place_ptr, query, head, inside, kv_heads, group, stride)
    compressed, selected, near = _gates(gates_ptr, query, head, inside, stride_gate, stride_gate_head, stride_branch)
    out = compressed * load_tile(compressed_ptr, folded, inside, WIDTH, BLOCK_WIDTH)
    out += selected * load_tile(selected_ptr, row, inside, WIDTH, BLOCK_WIDTH)
    out += near * load_tile(near_ptr, row, inside, WIDTH, BLOCK_WIDTH)
    store_tile(out_ptr, row, inside, out, WIDTH, BLOCK_WIDTH)


@triton.jit(do_not_specialize=[*HEADS, "stride_gate", "stride_gate_head", "stride_branch"],
            do_not_specialize_on_alignment=["gates_ptr", "dgates_ptr"])
def nsa_combine_bwd_kernel(dout_ptr, compressed_ptr, selected_ptr, near_ptr, gates_ptr, place_ptr, dselected_ptr, dnear_ptr, dgates_ptr,
                           stride_gate, stride_gate_head, stride_branch, total_q, kv_heads, group, stride, WIDTH: tl.constexpr,
                           BLOCK_WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Gradients of the gates and of the branches that are not folded."""
    row, inside, query, head = _rows(total_q, kv_heads, group, BLOCK_ROWS)
    folded = _folded_row(place_ptr, query, head, inside, kv_heads, group, stride)
    _, selected, near = _gates(gates_ptr, query, head, inside, stride_gate, stride_gate_head, stride_branch)
    dout = load_tile(dout_ptr, row, inside, WIDTH, BLOCK_WIDTH)
    store_tile(dselected_ptr, row, inside, selected * dout, WIDTH, BLOCK_WIDTH)
    store_tile(dnear_ptr, row, inside, near * dout, WIDTH, BLOCK_WIDTH)
    of_compressed = tl.sum(dout * load_tile(compressed_ptr, folded, inside, WIDTH, BLOCK_WIDTH), 1)
    of_selected = tl.sum(dout * load_tile(selected_ptr, row, inside, WIDTH, BLOCK_WIDTH), 1)
    of_near = tl.sum(dout * load_tile(near_ptr, row, inside, WIDTH, BLOCK_WIDTH), 1)
    tl.store(dgates_ptr + row * 3, of_compressed.to(dgates_ptr.dtype.element_ty), mask=inside)
    tl.store(dgates_ptr + row * 3 + 1, of_selected.to(dgates_ptr.dtype.element_ty), mask=inside)
    tl.store(dgates_ptr + row * 3 + 2, of_near.to(dgates_ptr.dtype.element_ty), mask=inside)


def launch_layout(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, size: int, stride: int) -> tuple[Tensor, ...]:
    """(cu_seqlens of the compressed keys, cu_seqlens of the units, place (total_q,), source (places,)), see Fold."""
    cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    sequences = cu_seqlens_q.shape[0] - 1
    room = (total_q // stride + 2 * sequences + 1) * stride
    bounds, units, place, source = (cu_seqlens_q.new_empty(n) for n in (sequences + 1, sequences + 1, total_q, room))
    device = cu_seqlens_q.get_device()
    (begin,) = launches(device, (nsa_bounds_kernel,), "SEQUENCES", SEQUENCES, torch.int32)
    (arrange,) = launches(device, (nsa_places_kernel,), "BLOCK", BLOCK, torch.int32)
    with on_device_of(bounds):
        begin(1, cu_seqlens_q, cu_seqlens_k, bounds, units, sequences, size, stride)
        arrange(triton.cdiv(room, BLOCK), cu_seqlens_q, cu_seqlens_k, units, place, source, sequences, sequences.bit_length(), stride,
                total_q, room)
    return bounds, units, place, source


def _launch(kernel, tensors: tuple, numbers: tuple[int, ...], rows: int, width: int, **constants) -> None:
    with on_device_of(tensors[0]):
        kernel[(triton.cdiv(rows, BLOCK_ROWS),)](*tensors, *numbers, WIDTH=width, BLOCK_WIDTH=max(16, next_power_of_2(width)),
                                                 BLOCK_ROWS=BLOCK_ROWS, **constants, num_warps=4)


def launch_fold(x: Tensor, gates: Tensor | None, source: Tensor, kv_heads: int, stride: int) -> Tensor:
    """x (total_q, heads, width) at its places: (units, kv_heads * stride * group, width). gates: (total_q, heads, 3), its factor is the
    first."""
    _, heads, width = x.shape
    out = x.new_empty(source.shape[0] // stride, stride * heads, width)
    of_gates = (0, 0) if gates is None else gates.stride()[:2]
    rows = source.shape[0] * heads
    _launch(nsa_fold_kernel, (x, gates, source, out), (*x.stride()[:2], *of_gates, rows, kv_heads, heads // kv_heads, stride), rows, width,
            GATED=gates is not None)
    return out


def launch_unfold(x: Tensor, place: Tensor, kv_heads: int, stride: int) -> Tensor:
    """The inverse of launch_fold, without gates: (total_q, heads, width)."""
    heads, width = x.shape[1] // stride, x.shape[2]
    out = x.new_empty(place.shape[0], heads, width)
    _launch(nsa_unfold_kernel, (x, place, out), (place.shape[0], kv_heads, heads // kv_heads, stride), place.shape[0] * heads, width)
    return out


def launch_unfold_lse(lse: Tensor, place: Tensor, kv_heads: int, stride: int) -> Tensor:
    """lse (kv_heads * stride * group, units), contiguous; (heads, total_q)."""
    heads, total_q = lse.shape[0] // stride, place.shape[0]
    out = lse.new_empty(heads, total_q)
    with on_device_of(lse):
        nsa_unfold_lse_kernel[(heads * triton.cdiv(total_q, BLOCK),)](lse, place, out, total_q, kv_heads, heads // kv_heads, stride,
                                                                       lse.shape[1], BLOCK=BLOCK)
    return out


def launch_combine(compressed: Tensor, selected: Tensor, near: Tensor, gates: Tensor, place: Tensor, kv_heads: int, stride: int) -> Tensor:
    total_q, heads, width = selected.shape
    out = selected.new_empty(total_q, heads, width)
    _launch(nsa_combine_kernel, (compressed, selected, near, gates, place, out),
            (*gates.stride(), total_q, kv_heads, heads // kv_heads, stride), total_q * heads, width)
    return out


def launch_combine_backward(dout: Tensor, compressed: Tensor, selected: Tensor, near: Tensor, gates: Tensor, place: Tensor, source: Tensor,
                            kv_heads: int, stride: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of compressed, selected, near and gates."""
    total_q, heads, width = selected.shape
    dselected, dnear = selected.new_empty(total_q, heads, width), near.new_empty(total_q, heads, width)
    dgates = gates.new_empty(total_q, heads, 3)
    _launch(nsa_combine_bwd_kernel, (dout, compressed, selected, near, gates, place, dselected, dnear, dgates),
            (*gates.stride(), total_q, kv_heads, heads // kv_heads, stride), total_q * heads, width)
    return launch_fold(dout, gates, source, kv_heads, stride), dselected, dnear, dgates
