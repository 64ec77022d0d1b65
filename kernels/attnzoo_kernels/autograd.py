"""How all operators are made for autograd. Eager mode uses a plain `autograd.Function`, because the dispatcher and its binding of
signatures take longer than a launch. torch.compile sees custom operators. Triton is imported only in the functions behind both."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad


def compiling() -> bool:
    return torch.compiler.is_compiling()


def lse_shape(q: Tensor, packed: bool) -> tuple[int, ...]:
    """(batch, heads, seqlen) of (batch, seqlen, heads, width), or (heads, total) of (total, heads, width)."""
    return (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])


def custom_op(name: str, function: Callable, fake: Callable) -> Any:
    """`attnzoo::name`, whose schema is the annotations of `function`; `fake` gives results of the right shapes and strides."""
    op = torch.library.custom_op(f"attnzoo::{name}", function, mutates_args=())
    op.register_fake(fake)
    return op


def readable(*tensors: int, like: tuple[int | None, ...]) -> Callable:
    """Wraps a launch: copies are made of those of its arguments (q, k, v and others, by position) that TMA cannot read, as in
    `launch.readable`. The launch's first results are cut to the widths of the arguments `like`; None: a result stays as it is."""
    def wrap(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*inputs):
            from attnzoo_kernels._triton import launch

            copies = launch.readable(*(inputs[n] for n in tensors))
            if copies is None:
                return function(*inputs)
            given = list(inputs)
            for n, x in zip(tensors, copies, strict=True):
                given[n] = x
            results = function(*given)
            if isinstance(results, Tensor):
                return launch.narrowed(results, inputs[like[0]])
            narrowed = (x if n is None else launch.narrowed(x, inputs[n]) for x, n in zip(results, like, strict=False))
            return *narrowed, *results[len(like):]

        return call

    return wrap


def forward_only(name: str, function: Callable, fake: Callable) -> Callable:
    """An operator without a derivative: `function` in eager mode, `attnzoo::name` under torch.compile."""
    op = custom_op(name, function, fake)

    def call(*inputs):
        if compiling():
            return op(*inputs)
        refuse_wrapped(name, *inputs)
        return function(*inputs)

    return call


def refuse_wrapped(name: str, *inputs: Any) -> None:
    """Raises for tensors of torch.func's transforms, for an operator whose parts have no derivative."""
    if not compiling() and torch._C._are_functorch_transforms_active() and any(
            is_functorch_wrapped_tensor(x) for x in inputs if isinstance(x, Tensor)):
        raise NotImplementedError(f'{name}: the kernel takes no tensors of torch.func.grad, jvp or vmap; impl="reference" does')


def differentiable(name: str, operator: str, function: Callable, fake: Callable, setup_context: Callable, backward: Callable,
                   gradients: Callable, compiled_gradients: Callable, eager: Callable | None = None, once: bool = True) -> Callable:
    """An operator with a derivative: a function that takes `function`'s arguments. eager: the function that eager mode calls instead.

    backward(gradients, ctx, *grads) returns the gradients of all arguments. It is called with `gradients` in eager mode, and with the
    custom operator `compiled_gradients` under torch.compile. operator: the public name, for messages. once: there is no second derivative.
    """
    op = custom_op(name, function, fake)
    op.register_autograd(functools.partial(backward, compiled_gradients), setup_context=setup_context)

    def eager_backward(ctx, *grads):
        if once:
            refuse_second_derivative(operator)
        return backward(gradients, ctx, *grads)

    in_eager = eager_function(operator, eager or function, setup_context, eager_backward)

    def call(*inputs):
        return op(*inputs) if compiling() else in_eager(*inputs)

    return call


def fake_softmax(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The fake of an operator that returns output, LSE and statistics of a softmax, shaped as in `_triton.call.outputs`."""
    lse = q.new_empty(lse_shape(q, q.dim() == 3), dtype=torch.float32)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse, lse.new_empty(2, *lse.shape)


def fake_gradients(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """The fake of the gradients of q, k and v."""
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def differentiable_softmax(name: str, forward: Callable, gradients: Callable, tensors: int, *, learned: bool = False,
                           fake: Callable = fake_softmax, fake_backward: Callable = fake_gradients, forward_op: Callable | None = None,
                           backward_op: Callable | None = None) -> Callable:
    """`differentiable` for forward(q, k, v, *others, *options) -> (output, LSE, statistics, *kept), where `tensors` is the number of
    others, and gradients(grad_out, grad_lse, q, k, v, output, statistics, *others, *kept, *options) -> (dq, dk, dv).

    learned: the first of the other tensors has a gradient, too, which is the fourth one; a flag before the options says whether it is
    wanted. The others have none. forward_op, backward_op: what torch.compile sees in place of `forward` and `gradients`.
    """
    def setup_context(ctx, inputs, output):
        ctx.options = inputs[3 + tensors:]
        ctx.save_for_backward(*inputs[:3], output[0], output[2], *inputs[3 : 3 + tensors], *output[3:])
        ctx.set_materialize_grads(False)

    def backward(gradients, ctx, grad_out, grad_lse, *_):
        grad_out = torch.zeros_like(ctx.saved_tensors[3]) if grad_out is None else grad_out
        wanted = ctx.needs_input_grad[3:4] if learned else ()
        grads = gradients(grad_out, grad_lse, *ctx.saved_tensors, *wanted, *ctx.options)
        return *(grads if all(wanted) else grads[:3]), *(None,) * (tensors + len(ctx.options) - len(wanted) * all(wanted))

    return differentiable(f"{name}_forward", f"{name}_attention", forward_op or forward, fake, setup_context, backward, gradients,
                          custom_op(f"{name}_backward", backward_op or gradients, fake_backward), eager=forward)


def eager_function(operator: str, function: Callable, prepare: Callable, derive: Callable) -> Callable:
    """`function` as an autograd.Function with setup_context `prepare` and backward `derive`; called without it if no gradient is wanted."""
    def launch(*inputs):
        return function(*inputs)

    # autograd binds the arguments to the signature in every call; without this it would compute it anew, which takes as long as a launch
    launch.__signature__ = inspect.signature(launch)

    class Eager(torch.autograd.Function):
        forward = staticmethod(launch)
        setup_context = staticmethod(prepare)
        backward = staticmethod(derive)

        @staticmethod
        def jvp(ctx, *tangents):
            raise NotImplementedError(f'{operator}: the kernels have no forward-mode derivative; impl="reference" has')

        @staticmethod
        def vmap(info, in_dims, *inputs):
            raise NotImplementedError(f'{operator}: the kernels have no rule for torch.func.vmap; impl="reference" has')

    def call(*inputs):
        first, *others = inputs
        wanted = torch.is_grad_enabled() and (first.requires_grad or any(isinstance(x, Tensor) and x.requires_grad for x in others))
        if wanted or torch._C._are_functorch_transforms_active() or getattr(forward_ad, "_current_level", 0) >= 0:
            return Eager.apply(*inputs)
        return function(*inputs)  # autograd would take a third of the call

    return call


def refuse_second_derivative(operator: str) -> None:
    """To be called in a backward. Gradients are enabled there only if a graph of the gradients was asked for, which kernels cannot give."""
    if torch.is_grad_enabled():
        raise NotImplementedError(f'{operator}: the kernels have no second derivative, which create_graph=True asks for (so does '
                                  'torch.func.grad); impl="reference" has')


def refuse_derivatives(operator: str, way_out: str, **tensors: Tensor | None) -> None:
    """For operators without a derivative: raises for tensors that require a gradient or have a forward-mode tangent, and names them."""
    for name, x in tensors.items() if torch.is_grad_enabled() else ():
        if x is not None and x.requires_grad:
            raise NotImplementedError(f"{name}: requires a gradient, which {operator} does not have; call it under torch.no_grad(), "
                                      f"or {way_out}")
    refuse_tangents(operator, way_out, **tensors)


def refuse_tangents(operator: str, way_out: str, **tensors: Tensor | None) -> None:
    if getattr(forward_ad, "_current_level", 0) < 0 or compiling():  # saves a microsecond for each tensor
        return
    for name, x in tensors.items():
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{name}: has a forward-mode tangent, which {operator} would drop; {way_out}")
