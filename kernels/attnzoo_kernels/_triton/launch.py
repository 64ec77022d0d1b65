"""Launching kernels from the host: what a device and its tensors allow, tensor descriptors for TMA, and `Launch`, which makes repeated
launches cheap."""

import contextlib
import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction, compute_cache_key
from triton.tools.tensor_descriptor import TensorDescriptor

# Bytes of L2 that a group of heads may fill. In a forward these are keys and values, in a backward queries, dO and dQ.
L2_GROUP = 16 << 20
SEQUENCE_END = 2**30  # the row coordinate where every sequence ends in a descriptor made with by_sequence
LONGEST = 2**31 - 2**16  # the size of a descriptor's dimension that must not cut anything off
WRONG_BY_POINTERS = 32  # values up to this width may be wrong if read through pointers, see tma_readable


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def block_width(width: int) -> int:
    """The power of two that a tile's width is padded to; at least 16, which matrix instructions need."""
    return max(16, next_power_of_2(width))


def value_block(head_dim: int, value_dim: int) -> int:
    """The padded width of values: their block_width, but at least the smaller of 64 and the keys' block_width.

    Rows of 32, of 64, and of 128 or more bytes have different swizzles; the minimum gives narrow values the swizzle of their keys. The last
    keys of a loop and their values take turns at one shared memory address. If that address is read with two swizzles, ptxas 12.8 computes
    the values' descriptors from a register that it has not set: results are wrong on Hopper, or an access is illegal.
    `tests/ops/ahead_of_time.py` finds this.
    """
    return max(block_width(value_dim), min(block_width(head_dim), 64))


@functools.cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def architecture(where: Tensor | torch.device) -> int:
    """Compute capability times ten of a device, or of a tensor's; 0 in the interpreter."""
    device = where.device if isinstance(where, Tensor) else where
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return 0
    return _capability(device.index)


def tma_takes(x: Tensor) -> bool:
    """Whether TMA can read x (..., rows, heads, width): its address and strides must be multiples of 16 bytes, without broadcasting."""
    return x.data_ptr() % 16 == 0 and tma_takes_layout(x.shape, x.stride(), x.element_size())


def tma_takes_layout(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """tma_takes for a shape and its strides, without the address."""
    return 0 not in shape and all(n == 1 or (s > 0 and s * itemsize % 16 == 0) for n, s in zip(shape[:-1], strides[:-1], strict=True))


def padded(width: int, itemsize: int) -> int:
    """The next width that is a multiple of 16 bytes."""
    step = 16 // itemsize
    return -(-width // step) * step


def tma_readable(x: Tensor) -> Tensor:
    """x itself, or a copy for TMA if x has 16 bits and its address or strides are not multiples of 16 bytes.

    Without TMA, such tensors would be read through pointers. For some widths (33 with values of 17, 40 and more with values of 16) that was
    wrong, for the reason in value_block. It has not been tried with the widths that value_block gives now.
    """
    if x.element_size() == 4 or architecture(x) < 90 or 0 in x.shape or tma_takes(x) and (x.stride(-1) == 1 or x.shape[-1] == 1):
        return x
    return _widened(x)


def _widened(x: Tensor) -> Tensor:
    """A contiguous copy, padded with zeros to the next width that is a multiple of 16 bytes."""
    copy = x.new_zeros(*x.shape[:-1], padded(x.shape[-1], x.element_size()))
    copy[..., : x.shape[-1]] = x
    return copy


def tma_gradient(x: Tensor) -> Tensor:
    """x itself, or a contiguous copy where TMA cannot read it: autograd may hand over an expanded gradient."""
    return x if tma_takes(x) and x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def row_by_row(x: Tensor) -> Tensor:
    """x itself, or a contiguous copy if the elements of a row are not contiguous: autograd may hand over an expanded gradient."""
    return x.contiguous() if x.shape[-1] > 1 and x.stride(-1) != 1 else x


def readable(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, ...] | None:
    """The tensors, with copies in place of those that TMA cannot read.

    None if no copy is needed, or if values are wider than WRONG_BY_POINTERS and both widths are multiples of 8. Either all tensors are
    padded to a multiple of 16 bytes or none is, because a kernel assumes one width for queries and keys.
    """
    if q.shape[-1] % 8 == 0 and v.shape[-1] % 8 == 0 and v.shape[-1] > WRONG_BY_POINTERS:
        return None
    tensors = (q, k, v, *others)
    copies = tuple(map(tma_readable, tensors))
    if all(a is b for a, b in zip(copies, tensors, strict=True)):
        return None
    return tuple(x if x.shape[-1] == padded(x.shape[-1], x.element_size()) else _widened(x) for x in copies)


def narrowed(x: Tensor, like: Tensor) -> Tensor:
    """x itself, or its first columns, as many as `like` has."""
    return x if x.shape[-1] == like.shape[-1] else x[..., : like.shape[-1]].contiguous()


def descriptor(x: Tensor, rows: int, width: int, by_sequence: bool = False) -> TensorDescriptor:
    """Host descriptor of x, (batch, seqlen, heads, width) or (total, heads, width). Its boxes are [1, 1, rows, width] of (batch, heads,
    seqlen, width). by_sequence: x is (total, heads, width), and what `_triton.tiles.load_rows` reads past a sequence's end is zero."""
    return descriptor_like(_template(x.shape, x.stride(), 16 // x.element_size(), rows, width, by_sequence), x)


@functools.lru_cache(maxsize=1024)
def _template(shape: tuple[int, ...], strides: tuple[int, ...], aligned: int, rows: int, width: int, by_sequence: bool) -> TensorDescriptor:
    return TensorDescriptor(torch.empty(0), *descriptor_geometry(shape, strides, aligned, rows, width, by_sequence))


def descriptor_geometry(shape: tuple[int, ...], strides: tuple[int, ...], aligned: int, rows: int, width: int,
                        by_sequence: bool) -> tuple[list[int], list[int], list[int]]:
    """Shape, strides and box of a descriptor(). aligned: how many elements have 16 bytes; a dimension of size 1 gets this stride."""
    if len(shape) == 3:
        shape, strides = (1, *shape), (aligned, *strides)
    by_batch, by_row, by_head, _ = (strides[d] if shape[d] > 1 or d == 3 else aligned for d in range(4))
    batch, seqlen, heads, head_dim = shape
    if by_sequence:
        # load_rows gives the coordinates (SEQUENCE_END, first + length, head, SEQUENCE_END - length + row, 0), where first and length are
        # those of the sequence. They stand for element SEQUENCE_END * 2**34 + (first + row) * by_row + head * by_head. The first term is a
        # multiple of 2**64 bytes and so moves no address. A row past the sequence's end lies outside of the fourth dimension.
        return [LONGEST, LONGEST, heads, SEQUENCE_END, head_dim], [2**34 - by_row, by_row, by_head, by_row, 1], [1, 1, 1, rows, width]
    return [batch, heads, seqlen, head_dim], [by_batch, by_head, by_row, 1], [1, 1, rows, width]


def descriptor_like(template: TensorDescriptor, x: Tensor) -> TensorDescriptor:
    """A copy of the template that describes x. It skips the constructor's checks, which cost as much time as a launch."""
    made = object.__new__(type(template))
    made.__dict__.update(template.__dict__)
    made.base = x
    return made


def strides(x: Tensor) -> tuple[int, int, int]:
    """(batch, row, head) strides of (batch, seqlen, heads, width), or of (total, heads, width) with batch 0."""
    return (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]


def are_aligned(*tensors: Tensor) -> bool:
    """Whether all tensors begin at multiples of 16 bytes; Triton specialises kernels on this."""
    return not any(x.data_ptr() & 15 for x in tensors)


def on_device_of(x: Tensor):
    """A context in which the tensor's device is the current one, on which Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda and x.device.index != torch.cuda.current_device() else contextlib.nullcontext()


@dataclass
class Launch:
    """A kernel and all of its arguments that stay the same from call to call for one layout. The caller keeps a Launch for each layout and
    alignment.

    Triton's own launch checks every argument and encodes every tensor descriptor in each call. It is used for the first launch of a
    compiled kernel only. Later launches call that kernel directly, with addresses for tensors, and reuse the encoded descriptors of
    addresses that the Launch has seen. The first call looks the kernel up by Triton's own cache key, because a Launch for another layout
    may have compiled it.

    constants: in any order. blocks: the arguments of descriptor(), by argument position, for tensors that the caller passes as they are and
    the kernel takes as tensor descriptors. options: more options of the compiler, such as maxnreg. others: returns Launches for other
    lengths. They are compiled in the first call of a kernel, so that no later length waits for the compiler.
    """

    kernel: Any
    programs: int
    scalars: tuple
    constants: dict
    num_warps: int
    num_stages: int
    blocks: dict[int, tuple] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    others: Callable[[], Iterable["Launch"]] = tuple
    compiled: Any = None  # Triton's compiled kernel, after the first call
    direct: Any = None  # its DirectLaunch; None before the first call, and where _launcher gives none

    def compile(self, *tensors) -> None:
        """Compiles the kernel for such tensors without a launch."""
        self.kernel.warmup(*self._described(tensors), *self.scalars, **self._named(), grid=(self.programs,))

    def __call__(self, *tensors):
        if self.direct and not _hooks_are_set():
            self.direct(self.programs, tensors)
            return
        given = self._described(tensors)
        if self.compiled:
            self.compiled[(self.programs, 1, 1)](*given, *self.scalars, *self.constants.values())
            return
        found = self._find(given)
        compiled = found or self.kernel[(self.programs,)](*given, *self.scalars, **self._named())
        if compiled is None:  # the interpreter compiles nothing and always comes here
            return
        if compiled not in _LAUNCHERS:
            _LAUNCHERS[compiled] = _launcher(compiled, given)
            for other in self.others():
                other.compile(*tensors)
        if launcher := _LAUNCHERS[compiled]:
            self.direct = DirectLaunch(compiled, *launcher, self.blocks, (*self.scalars, *self.constants.values()))
        self.compiled = compiled
        if found:
            self(*tensors)

    def _find(self, given: list) -> Any:
        """The kernel that Triton has for these arguments, if a Launch has launched it directly; else None."""
        if not isinstance(self.kernel, JITFunction):  # it is the interpreter's
            return None
        named = self._named()
        named["debug"] = named.get("debug", self.kernel.debug) or knobs.runtime.debug  # as JITFunction.run does
        named["instrumentation_mode"] = knobs.compilation.instrumentation_mode
        kernels, keys, *_, bind = self.kernel.device_caches[driver.active.get_current_device()]
        bound, specialization, options = bind(*given, *self.scalars, **named)
        # a compiled kernel takes all constants by position, also those that have a default
        self.constants = dict(list(bound.items())[len(given) + len(self.scalars):])
        compiled = kernels.get(compute_cache_key(keys, specialization, options))
        return compiled if _LAUNCHERS.get(compiled) and knobs.runtime.add_stages_inspection_hook is None else None

    def _described(self, tensors: tuple) -> list:
        return [descriptor(x, *self.blocks[n]) if n in self.blocks else x for n, x in enumerate(tensors)]

    def _named(self) -> dict[str, Any]:
        return {**self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages, **self.options}


def _hooks_are_set() -> bool:
    """Whether a profiler has registered hooks for Triton's launches."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


class DirectLaunch:
    """Launches one compiled kernel through Triton's own launcher, but without the function that encodes descriptors in every call."""

    ENCODED = 4096  # encodings that are kept; a training step uses the same addresses again

    def __init__(self, compiled: Any, launcher: Any, metas: dict[int, dict], blocks: dict[int, tuple], others: tuple):
        self.launcher, self.function, self.packed = launcher, compiled.function, compiled.packed_metadata
        self.metas, self.blocks, self.others = metas, blocks, others
        self.encoded: dict[tuple[int, int], list] = {}

    def __call__(self, programs: int, tensors: tuple) -> None:
        arguments = []
        for n, x in enumerate(tensors):
            if n in self.metas:
                key = n, (x if n in self.blocks else x.base).data_ptr()
                arguments += self.encoded.get(key) or self.encode(key, x)
            else:
                arguments.append(x.data_ptr() if isinstance(x, Tensor) else x)
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        self.launcher(programs, 1, 1, stream, self.function, self.packed, None, None, None, *arguments, *self.others)

    def encode(self, key: tuple[int, int], x: Tensor | TensorDescriptor) -> list:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(self.encoded) == self.ENCODED:
            self.encoded.clear()
        n = key[0]
        self.encoded[key] = make_tensordesc_arg(descriptor(x, *self.blocks[n]) if n in self.blocks else x, self.metas[n])
        return self.encoded[key]


_LAUNCHERS: dict[Any, tuple[Any, dict[int, dict]] | None] = {}  # by compiled kernel; Launches of many layouts share one kernel


def _launcher(compiled: Any, given: list) -> tuple[Any, dict[int, dict]] | None:
    """(Triton's launcher of a kernel that was called with `given`, without the step that encodes descriptors; the metadata for encoding
    each descriptor, by argument position). None if the launcher is not NVIDIA's, or not built as in Triton 3.6 and 3.7. Triton's public
    call is used then."""
    if torch.version.cuda is None or getattr(driver.active, "launcher_cls", None) is not _cuda_launcher():
        return None
    positions = [n for n, x in enumerate(given) if hasattr(x, "block_shape")]
    metas = getattr(compiled.metadata, "tensordesc_meta", None) or []
    launcher = copy.copy(compiled.run)
    if positions:
        names = inspect.getclosurevars(launcher.launch).nonlocals if inspect.isfunction(launcher.launch) else {}
        if "launcher" not in names or len(metas) != len(positions) or not all(metas):
            return None
        launcher.launch = names["launcher"]
    return launcher, dict(zip(positions, metas, strict=False))


@functools.cache
def _cuda_launcher() -> type:
    from triton.backends.nvidia.driver import CudaLauncher

    return CudaLauncher
