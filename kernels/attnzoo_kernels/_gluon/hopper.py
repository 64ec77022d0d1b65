"""Hopper's TMA, mbarriers and warp-group matrix instructions, as the kernels use them. It also hides names that differ between Gluon's
versions. "Fault N" in the kernels' comments is an entry of COMPILER_FAULTS.md."""

import functools

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate

from attnzoo_kernels._triton import launch
from attnzoo_kernels._triton.launch import architecture, are_aligned, descriptor_geometry, descriptor_like, tma_takes_layout

__all__ = ["TRIED", "async_add", "async_load", "async_store", "await_empty", "await_empty_stage", "await_full", "await_stage",
           "barrier", "barriers", "beside", "box", "constants", "descriptor", "fence_async_shared", "give_back", "invalidate", "load_box",
           "load_tile", "mbarrier", "place", "product_layout", "release", "ring", "shared_tiles", "stage_of", "store_tile", "tma",
           "version_is_tried", "warpgroup_mma", "warpgroup_mma_wait", "why_not_tma"]

SEQUENCE_END = gl.constexpr(launch.SEQUENCE_END)
TRIED = ((3, 6), (3, 7))  # Gluon is experimental: any other version is left to the plain kernels

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # a barrier for the warps of one partition
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


def constants(cls: type) -> type:
    """Makes a class a struct of constants: numbers, switches and hooks, which are jit functions.

    The constants are annotated as gl.constexpr in the class and given by name in a kernel. One that is not given is the hook assigned in
    the class, or None. Unlike a tuple of constants, the struct can be passed through gl.warp_specialize (fault 6).
    """
    hooks = {name: getattr(cls, name, None) for name in cls.__annotations__}
    if not all(hook is None or isinstance(hook, triton.JITFunction) for hook in hooks.values()):
        raise TypeError("only a hook can be a default: Triton's cache does not notice a change of any other value")

    @gluon.constexpr_function
    def __init__(self, _hooks=hooks, **values):
        for name, hook in _hooks.items():
            setattr(self, name, gl.constexpr(values.pop(name, hook)))
        if values:
            raise TypeError(f"unknown constants: {', '.join(values)}")

    cls.__init__ = __init__
    return _aggregate(cls)


@gluon.constexpr_function
def product_layout(columns):
    """The register layout of a warp group's product [64, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@builtin
def async_add(desc, coordinates, tile, _semantic=None):
    """Adds a shared tile to global memory by TMA. tma.store_wait waits until the tile has been read. Triton has this operation, but Gluon
    has no name for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coordinates, tile.handle)


def version_is_tried() -> bool:
    return tuple(int(n) for n in triton.__version__.split(".")[:2]) in TRIED


def why_not_tma(*tensors: Tensor) -> str | None:
    """Why the Hopper kernels cannot read these (..., heads, width) tensors of one dtype; None if they can."""
    x = tensors[0]
    if not x.is_cuda or architecture(x) != 90:
        return "it runs on compute capability 9.0 (Hopper) only"
    if not version_is_tried():
        return "it was not tried with this version of Triton"
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype must be float16 or bfloat16, got {x.dtype}"
    if not are_aligned(*tensors) or not all(tma_takes_layout(x.shape, x.stride(), 2) and x.shape[-1] % 8 == 0 for x in tensors):
        return "all must begin at and have strides of multiples of 16 bytes, widths of multiples of 8 and no empty dimension"
    return None


@gluon.jit
def box(buffer, desc):
    """A shared tile [rows, width] as the box of its descriptor [1, 1, rows, width]."""
    return buffer._reinterpret(desc.block_type.element_ty, desc.block_type.shape, desc.layout)


@gluon.jit
def shared_tiles(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """COUNT tiles [ROWS, COLUMNS] in shared memory as TMA and matrix instructions take them."""
    return gl.allocate_shared_memory(dtype, [COUNT, ROWS, COLUMNS], gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype))


@gluon.jit
def ring(step, SLOTS: gl.constexpr):
    """(slot, phase) of a step in a ring of buffers. The phase of an mbarrier is the parity of how often its slot has been used before."""
    return step % SLOTS, (step // SLOTS) & 1


@gluon.jit
def stage_of(step, STAGES: gl.constexpr):
    """Like ring, but for 2 or 4 stages by bit masks (fault 12)."""
    if STAGES == 2 or STAGES == 4:
        slot = step & (STAGES - 1)
        phase = (step >> (STAGES // 2)) & 1
    else:
        slot, phase = ring(step, STAGES)
    return slot, phase


@gluon.jit
def await_full(full, step, SLOTS: gl.constexpr):
    """Waits until a step's slot in a ring is full; returns the slot."""
    slot, phase = ring(step, SLOTS)
    mbarrier.wait(full.index(slot), phase)
    return slot


@gluon.jit
def await_empty(empty, step, SLOTS: gl.constexpr):
    """Waits until a step's slot in a ring may be filled: what was in it has been read. At first, all slots are empty. Returns the slot."""
    slot, phase = ring(step, SLOTS)
    mbarrier.wait(empty.index(slot), phase ^ 1)
    return slot


@gluon.jit
def await_empty_stage(empty, step, STAGES: gl.constexpr):
    """Like await_empty, with stage_of."""
    slot, phase = stage_of(step, STAGES)
    mbarrier.wait(empty.index(slot), phase ^ 1)
    return slot


@gluon.jit
def await_stage(full, step, STAGES: gl.constexpr, end=None):
    """Like await_full, with stage_of. It does not wait for the step `end` or later ones."""
    slot, phase = stage_of(step, STAGES)
    mbarrier.wait(full.index(slot), phase, pred=True if end is None else step < end)
    return slot


@gluon.jit
def barriers(SLOTS: gl.constexpr, COUNT: gl.constexpr):
    """A ring of mbarriers, each for COUNT arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(made.index(slot), count=COUNT)
    return made


@gluon.jit
def read_word(place):
    """The int32 in shared memory [1], read by all threads."""
    return gl.max(place.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def write_word(place, number):
    """Writes an int32 to shared memory [1]; for a single warp."""
    place.store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def load_box(desc, tiles, full, slot, at):
    """Loads the box at the coordinates `at` into a slot of a ring and makes the slot's barrier in `full` expect its bytes."""
    bar = full.index(slot)
    mbarrier.expect(bar, desc.block_type.nbytes)
    async_load(desc, at, bar, box(tiles.index(slot), desc))


@gluon.jit
def load_tile(desc, tiles, full, slot, batch, head, row):
    """load_box at [batch, head, row]."""
    load_box(desc, tiles, full, slot, [batch, head, row, 0])


@gluon.jit
def release(bar):
    """Arrives at an mbarrier with one thread, without the barriers of the warp group that mbarrier.arrive adds (fault 13).

    It is only for tiles that no thread loads: after the wait for the matrix instructions that read them, or after a barrier of the caller.
    """
    mbarrier.expect(bar, 0)


@gluon.jit
def give_back(empty, step, STAGES: gl.constexpr):
    """Releases the stage of a step, which a consumer has read."""
    slot, _ = stage_of(step, STAGES)
    mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def _invalidate_ring(made):
    SLOTS: gl.constexpr = made.shape[0]
    if len(made.shape) == 1:
        mbarrier.invalidate(made)
    else:
        for slot in gl.static_range(SLOTS):
            mbarrier.invalidate(made.index(slot))


@gluon.jit
def invalidate(rings):
    """Invalidates all mbarriers in a tuple, and in the tuples in it, after their last use. Without that, Triton would reuse the memory of a
    barrier that is never waited for (fault 1)."""
    RINGS: gl.constexpr = len(rings)
    for n in gl.static_range(RINGS):
        if isinstance(rings[n], gl.tuple):
            invalidate(rings[n])
        else:
            _invalidate_ring(rings[n])


def descriptor(x: Tensor, rows: int, width: int, by_sequence: bool = False) -> TensorDescriptor:
    """Host descriptor of x, (batch, seqlen, heads, width) or (total, heads, width), in boxes [1, 1, rows, width] of (batch, heads, seqlen,
    width). What lies outside of x is read as zero and not written. by_sequence: x is (total, heads, width), and boxes end where a sequence
    ends. `place` makes the coordinates for both kinds."""
    return descriptor_like(_template(x.dtype, x.shape, x.stride(), rows, width, by_sequence), x)


@functools.lru_cache(maxsize=1024)
def _template(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int, width: int,
              by_sequence: bool) -> TensorDescriptor:
    shape, strides, tile = descriptor_geometry(shape, strides, 16 // dtype.itemsize, rows, width, by_sequence)
    return TensorDescriptor(torch.empty(0, dtype=dtype), shape, strides, tile, _layout(dtype, *tile))


@functools.cache
def _layout(dtype: torch.dtype, *tile: int) -> gl.NVMMASharedLayout:
    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(tile), element)


@gluon.jit
def place(batch, head, first, row, length, BY_SEQUENCE: gl.constexpr):
    """Coordinates of the box of a `descriptor` that begins at `row` of a sequence. BY_SEQUENCE: the descriptor was made by_sequence."""
    at = (batch, head, first + row, 0)
    if BY_SEQUENCE:  # so that the sequence's last row is the descriptor's last row, see launch.descriptor_geometry
        at = (SEQUENCE_END, first + length, head, SEQUENCE_END - length + row, 0)
    return at


@gluon.jit
def beside(at, columns: gl.constexpr):
    """Coordinates of the box that lies `columns` columns to the right of the one at `at`."""
    moved = ()
    for n in gl.static_range(len(at) - 1):
        moved = moved + (at[n],)
    return moved + (at[len(at) - 1] + columns,)


@gluon.jit
def store_tile(desc, buffer, x, at, READ: gl.constexpr):
    """Stores x [rows, columns] by TMA at the box coordinates `at`, through a shared tile that is as wide as x, or half as wide. READ: the
    caller knows that TMA has read what was in the shared tile before; otherwise this waits for it."""
    WIDTH: gl.constexpr = buffer.shape[1]
    if x.shape[1] > WIDTH:
        left, right = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, WIDTH]), (0, 2, 1)))
        store_tile(desc, buffer, left, at, READ)
        store_tile(desc, buffer, right, beside(at, WIDTH), False)
    else:
        if not READ:
            tma.store_wait(0)
        buffer.store(x.to(buffer.dtype))
        fence_async_shared()
        async_store(desc, at, box(buffer, desc))
