"""Which kernels take a call: Gluon's on Hopper where they hold, else plain Triton's."""

import functools
import warnings

from torch import Tensor

from attnzoo_kernels import taken
from attnzoo_kernels.flash.options import Options


@functools.cache
def gluon_loads() -> bool:
    """Whether the Gluon kernels can be used with the Triton that is installed; says so once where they cannot."""
    try:
        from attnzoo_kernels._gluon.hopper import TRIED, version_is_tried
    except (ImportError, AttributeError) as error:
        reason = f"Gluon has changed ({error})"
    else:
        if version_is_tried():
            return True
        reason = f"they were tried with Triton {', '.join('.'.join(map(str, version)) for version in TRIED)} only"
    warnings.warn(f"attnzoo's Gluon kernels are not used: {reason}; the plain Triton kernels are", stacklevel=2)
    return False


def why_not_gluon(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: Options) -> str | None:
    if not gluon_loads():
        return "it does not work with the Triton that is installed"
    from attnzoo_kernels.flash import hopper

    return hopper.forward_reason(q, k, v, options, sinks=sinks is not None)


def forward_path(impl: str | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: Options) -> str:
    """"gluon" or "triton"; a path that was named is taken or refused."""
    if impl == "triton":
        return taken.note("flash forward", impl)
    reason = why_not_gluon(q, k, v, sinks, options)
    if impl == "gluon" and reason is not None:
        raise NotImplementedError(f'impl="gluon" does not take this call: {reason}; impl=None or "triton" does')
    return taken.note("flash forward", "triton" if reason else "gluon")


def backward_path(impl: str | None, q: Tensor, k: Tensor, v: Tensor, options: Options, exact_delta: bool) -> str:
    """"gluon" or "triton"; what Gluon's backward does not cover goes to plain Triton's, after either forward."""
    if impl == "triton" or not gluon_loads():
        return taken.note("flash backward", "triton")
    from attnzoo_kernels.flash import hopper_backward

    reason = hopper_backward.backward_reason(q, k, v, options, exact_delta)
    return taken.note("flash backward", "triton" if reason else "gluon")
