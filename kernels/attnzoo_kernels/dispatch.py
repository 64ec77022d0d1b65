"""Which implementation takes a call. It also records which ones took the calls of this process, for logs of runs and for benchmarks."""

import functools
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnzoo_kernels import checks

IMPLEMENTATIONS = ("gluon", "triton", "cpu", "reference")

_taken: dict[str, set[str]] = {}
_asked = threading.local()


class NotTaken(NotImplementedError):
    """The implementation that impl names does not support the call."""

    def __init__(self, impl: str, reason: str, way_out: str = ""):
        super().__init__(f'impl="{impl}" does not take this call: {reason}{way_out}')
        self.reason = reason


class _Taken(Exception):
    """Raised in place of computing, to answer that an implementation takes a call that was only asked about."""


def takes_cpu(impl: str | None, name: str, x: Tensor, reason: str | None = None) -> bool:
    """Whether the path for CPUs takes a call: if impl names it, or is None and x, the argument `name`, is on a CPU. `reason`: why the path
    does not support the call, or None; if the path is named, NotTaken gives this reason. float64, in which derivatives are checked, second
    ones too, goes to the reference."""
    if impl not in (None, "cpu"):
        return False
    if x.device.type != "cpu":
        reason = f"{name} must be on a CPU, got {x.device}"
    elif x.dtype == torch.float64:
        reason = f"{name} must be float16, bfloat16 or float32, got {x.dtype}"
    if impl == "cpu" and reason is not None:
        raise NotTaken(impl, reason, '; impl="reference" does')
    if asking() and reason is None:
        raise _Taken
    return reason is None


def takes_reference(operator: str, impl: str | None, name: str, x: Tensor, choices: tuple[str, ...] = IMPLEMENTATIONS,
                    dtypes: tuple[torch.dtype, ...] | None = checks.DTYPES[:3]) -> bool:
    """Whether plain PyTorch takes a call: if impl names it, or is None and x is not on a GPU. (The path for CPUs is asked before.)
    Otherwise the kernels take it, and this checks what they need of x, the argument `name`: its device, and one of `dtypes`. `choose`
    checks the rest."""
    checks.choice("impl", impl, choices)
    if impl == "reference" or impl is None and not x.is_cuda:
        if not torch.compiler.is_compiling():
            note(f"{operator} forward", "reference")
        return True
    if not x.is_cuda:
        if impl == "gluon":
            raise NotTaken(impl, f"{name} must be on a CUDA device, got {x.device}")
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(f'impl: "triton" needs CUDA tensors, got {x.device} (on a CPU it runs in the interpreter: TRITON_INTERPRET=1)')
    if dtypes is not None and x.dtype not in dtypes:
        raise NotImplementedError(f'{name}: impl="triton" takes {_listed(dtypes)}, got {x.dtype}; impl="reference" takes it')
    return False


def without_autocast(reference: Callable) -> Callable:
    """Wraps a reference, so that it computes in its inputs' dtype even under autocast, as the kernels do. Its first argument tells the
    device."""

    @functools.wraps(reference)
    def call(*inputs: Any, **options: Any) -> Any:
        x = inputs[0] if inputs else next(iter(options.values()))
        if x.device.type == "meta":  # the meta device has no autocast
            return reference(*inputs, **options)
        with torch.autocast(x.device.type, enabled=False):
            return reference(*inputs, **options)

    return call


def choose(call: str, impl: str | None, why_not_gluon: Callable[[], str | None] = lambda: "there is none",
           others: str = 'impl=None or "triton"') -> str:
    """The kernels that take a call such as "flash forward": "gluon" if `why_not_gluon` gives no reason against it, else "triton".

    If impl names kernels that do not support the call, NotTaken gives the reason, and says which `others` do.
    """
    reason = "" if impl == "triton" else why_not_gluon() if gluon_loads() else "it does not work with the Triton that is installed"
    if impl == "gluon" and reason is not None:
        raise NotTaken(impl, reason, f"; {others} does")
    if asking():
        raise _Taken
    return note(call, "gluon" if reason is None else "triton")


def choose_backward(call: str, impl: str | None, why_not_gluon: Callable[[], str | None]) -> str:
    """Like choose, but a call that Gluon's backward does not support goes to plain Triton's, whichever kernels took the forward."""
    return choose(call, "triton" if impl == "triton" else None, why_not_gluon)


def why_not_gluon(operator: Callable, *inputs: Any, **options: Any) -> str | None:
    """Why impl="gluon" does not take a call of `operator` with these arguments; None where it does. Nothing is computed."""
    with torch.no_grad():
        return why_not("gluon", operator, *inputs, **options)


def why_not(impl: str, operator: Callable, *inputs: Any, **options: Any) -> str | None:
    """Like why_not_gluon, for the kernels that `impl` names, and with gradients if these are enabled."""
    _asked.now = True
    try:
        operator(*inputs, **options, impl=impl)
    except NotImplementedError as error:
        return getattr(error, "reason", str(error))
    except _Taken:
        return None
    finally:
        _asked.now = False
    raise RuntimeError(f"{operator.__name__}: asked for no kernels")


def asking() -> bool:
    """Whether a call is only asked about."""
    return getattr(_asked, "now", False)


@functools.cache
def gluon_loads() -> bool:
    """Whether the Gluon kernels work with the Triton that is installed. If not, it warns once."""
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


def note(call: str, impl: str) -> str:
    """Records that a call such as "flash backward" took an implementation such as "gluon"; returns the implementation."""
    _taken.setdefault(call, set()).add(impl)
    return impl


def implementations_taken() -> dict[str, list[str]]:
    """The implementations of each call so far, such as {"flash forward": ["gluon"], "flash backward": ["gluon", "triton"]}. Graphs of
    torch.compile count where they call kernels; replays of a CUDA graph took what its capture took."""
    return {call: sorted(impls) for call, impls in sorted(_taken.items())}


def forget() -> None:
    _taken.clear()


def _listed(dtypes: tuple[torch.dtype, ...]) -> str:
    *first, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(first)} and {last}"
