"""The field's rule for a kernel's error: at most twice that of the same maths in eager PyTorch at the same dtype, plus a rounding floor."""

import math
from collections.abc import Mapping

from torch import Tensor


def error_ratio(value: Tensor, eager: Tensor, exact: Tensor) -> float:
    """Error of `value` as a share of what the rule allows, the worse of maximum and mean; above 1 breaks it, NaN gives inf.

    `eager` is the same maths in `value`'s dtype, `exact` in float64 (float32 where that is too large).
    """
    if value.shape != exact.shape:
        raise ValueError(f"value: must have the exact result's shape {tuple(exact.shape)}, got {tuple(value.shape)}")
    if not value.isfinite().all():
        return math.inf
    if value.numel() == 0:
        return 0.0
    rounded = exact.to(value.dtype)
    floor = (rounded + 0.3 - 0.3 - rounded).abs().to(exact.dtype)
    error, eager_error = (value.to(exact.dtype) - exact).abs(), (eager.to(exact.dtype) - exact).abs()
    return max(_share(getattr(error, s)().item(), 2 * (getattr(eager_error, s)() + getattr(floor, s)()).item()) for s in ("max", "mean"))


def _share(error: float, allowed: float) -> float:
    if allowed > 0:
        return error / allowed
    return 0.0 if error == 0 else math.inf


def assert_accurate(ours, eager, exact) -> None:
    """Refuses results that break the rule: tensors, sequences of them, or mappings, whose names the message has."""
    if isinstance(ours, Tensor):
        ours, eager, exact = [ours], [eager], [exact]
    if not isinstance(ours, Mapping):
        ours, eager, exact = (dict(enumerate(results)) for results in (ours, eager, exact))
    ratios = {name: error_ratio(*(results[name].detach() for results in (ours, eager, exact))) for name in exact}
    wrong = {name: round(ratio, 2) for name, ratio in ratios.items() if ratio > 1}
    assert ratios and not wrong, f"errors as shares of what twice eager's allow: {wrong}"
