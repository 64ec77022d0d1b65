"""Which kernels take a call: Gluon's on Hopper where they hold, else plain Triton's."""

from torch import Tensor

from attnzoo_kernels.dual_chunk.options import Options
from attnzoo_kernels.flash.paths import gluon_loads


def why_not_gluon(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    if not gluon_loads():
        return "it does not work with the Triton that is installed"
    from attnzoo_kernels.dual_chunk import hopper

    return hopper.forward_reason(q, k, v, options)


def forward_path(impl: str | None, q: Tensor, k: Tensor, v: Tensor, options: Options) -> str:
    """"gluon" or "triton"; a path that was named is taken or refused."""
    if impl == "triton":
        return impl
    reason = why_not_gluon(q, k, v, options)
    if impl == "gluon" and reason is not None:
        raise NotImplementedError(f'impl="gluon" does not take this call: {reason}; impl=None or "triton" does')
    return "triton" if reason else "gluon"


def backward_path(impl: str | None, q: Tensor, k: Tensor, v: Tensor, options: Options) -> str:
    """"gluon" or "triton"; what Gluon's backward does not cover goes to plain Triton's, after either forward."""
    if impl == "triton" or not gluon_loads():
        return "triton"
    from attnzoo_kernels.dual_chunk import hopper_backward

    return "triton" if hopper_backward.backward_reason(q, k, v, options) else "gluon"
