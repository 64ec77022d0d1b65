"""Triton's CPU interpreter, made faster for the tests: most of its time went to what it makes or checks anew for each operation."""

import dataclasses

import numpy as np
import torch
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def make_faster() -> None:
    """Results stay the same bit for bit; kernels take a quarter of the time."""
    patch_language_once()
    skip_unused_checks()
    remember_types()
    leave_equal_shapes()
    remember_operands()
    skip_wrappers()
    make_small_objects_quickly()
    make_room_for_calls()


def round_as_gpus_do() -> None:
    """float32 to e5m2, e4m3 and bfloat16. The interpreter loses what is carried into the exponent of 8 bits, and a bit of the smallest
    numbers; for bfloat16 it cuts off."""
    convert = interpreter._convert_float

    def rounded(data, source, target, mode):
        if (source, target) == (tl.float32, tl.float8e5):
            return torch.from_numpy(data).to(torch.float8_e5m2).view(torch.uint8).numpy()
        if (source, target) == (tl.float32, tl.float8e4nv):
            return torch.from_numpy(data).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if (source, target) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(data).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return convert(data, source, target, mode)

    interpreter._convert_float = rounded


def patch_language_once() -> None:
    """Lets a launch replace the functions of `triton.language` once, and not again in every jit function that its kernel calls."""
    patch, launch, replaced, found = interpreter._patch_lang, interpreter.GridExecutor.__call__, set(), {}

    def languages(names):
        if id(names) not in found:  # kept with its names, so that no other dict gets its id
            found[id(names)] = {module for module in (tl, core) if any(value is module for value in names.values())}, names
        return found[id(names)][0]

    def patch_what_is_new(fn):
        modules = languages(fn.__globals__)
        if modules and modules <= replaced:
            return None
        replaced.update(modules)
        return patch(fn)

    def launch_anew(self, *arguments, **options):
        replaced.clear()
        return launch(self, *arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_what_is_new, launch_anew


def skip_unused_checks() -> None:
    """Sums and products of integers are not computed again in 64 bits: without `debug` the interpreter drops what it learns by that."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def remember_types() -> None:
    """Tensors share what depends on their type alone: the parts of a block type, their own shape, and NumPy's dtype."""
    make_type, make_tensor, numpy_dtype = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    types, shapes, dtypes, elements = {}, {}, {}, {}

    def block_type(self, element_ty, shape):
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)  # constants or numbers
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        vars(self).update(types[key])

    def tensor(self, handle, type):
        if type.name not in shapes:
            make_tensor(self, handle, type)
            shapes[type.name] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[type.name]

    def np_dtype(tt_dtype):
        if tt_dtype.name not in dtypes:
            dtypes[tt_dtype.name] = numpy_dtype(tt_dtype)
        return dtypes[tt_dtype.name]

    def with_element_ty(self, scalar_ty):
        key = self.name, scalar_ty.name
        if key not in elements:
            elements[key] = core.block_type(scalar_ty, self.shape)
        return elements[key]

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block_type, tensor, np_dtype
    core.block_type.with_element_ty, core.block_type.to_ir = with_element_ty, lambda self, builder: self


def leave_equal_shapes() -> None:
    """Numbers, and blocks of one shape, are operands as they are, without a walk over their dimensions."""
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_unequal(self, lhs, rhs):
        left, right = lhs.type.is_block(), rhs.type.is_block()
        equal = lhs.type.shape.values == rhs.type.shape.values if left and right else left == right
        return (lhs, rhs) if equal else broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_unequal


def remember_operands() -> None:
    """What two operands become is found out once for their types; a number right of a tensor is made a constant of its type once."""
    check, tensor, numbers = TritonSemantic.binary_op_type_checking_impl, core.tensor, {bool, int, float}
    dtypes, constants = {}, {}

    def of_two_tensors(self, lhs, rhs, *flags):
        key = lhs.type.name, rhs.type.name, *flags
        if key not in dtypes:
            left, right = check(self, lhs, rhs, *flags)
            dtypes[key] = left.dtype if left.dtype.name == right.dtype.name and not left.dtype.is_ptr() else None
            return left, right
        if dtype := dtypes[key]:
            lhs, rhs = (x if x.dtype.name == dtype.name else self.cast(x, dtype) for x in (lhs, rhs))
        return self.broadcast_impl_value(lhs, rhs)

    def of_a_number(self, lhs, rhs, *flags):
        key = lhs.type.name, type(rhs), repr(rhs), *flags  # 0.0 and -0.0 are equal, and not the same
        if key not in constants:
            left, right = check(self, lhs, rhs, *flags)
            if left is not lhs:  # the number changed its type
                return left, right
            right.handle.data.flags.writeable = False
            constants[key] = right
        return lhs, constants[key]

    def checked(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        flags = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        if type(lhs) is tensor and type(rhs) is tensor:
            return of_two_tensors(self, lhs, rhs, *flags)
        if type(lhs) is tensor and type(rhs) in numbers:
            return of_a_number(self, lhs, rhs, *flags)
        return check(self, lhs, rhs, *flags)

    TritonSemantic.binary_op_type_checking_impl = checked


def skip_wrappers() -> None:
    """Functions of the language are called without what looks for an argument that the interpreter always gives."""

    def patch(obj, name, member, builder, scope):
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*arguments, **options):
            options["_semantic"] = semantic
            return function(*arguments, **options)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch


def make_small_objects_quickly() -> None:
    """What is no constant is not searched for constants, and an array's type is compared with a size that is known."""
    no_constants = {core.tensor, core.dtype, core.block_type, core.pointer_type, bool, int, float, type(None)}
    unwrap, sizes = core._unwrap_if_constexpr, {}

    def make_handle(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if dtype.name not in sizes:
            sizes[dtype.name] = float("inf") if dtype.is_ptr() else max(dtype.primitive_bitwidth, 8) // 8
        if data.itemsize > sizes[dtype.name]:
            self.__post_init__()  # which raises

    core._unwrap_if_constexpr = lambda value: value if type(value) in no_constants else unwrap(value)
    interpreter.TensorHandle.__init__ = make_handle


def make_room_for_calls() -> None:
    """A kernel's calls stay within one chunk of Python's stack: at its end each call would take memory from the system and give it back."""
    launch = interpreter.GridExecutor.__call__

    def launch_with_room(self, *arguments, **options):
        return launch(self, *arguments, **options)

    launch_with_room.__code__ = launch_with_room.__code__.replace(co_stacksize=1 << 15)  # a frame for which Python makes a large chunk
    interpreter.GridExecutor.__call__ = launch_with_room
