"""Launches of attention with a bias by distance, behind autograd. Those of plain Triton are flash's. Triton is imported in them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo_kernels import autograd, dispatch
from attnzoo_kernels.flash.ops import empty_residual, hopper_wants_residual
from attnzoo_kernels.packing import behind_last

LARGEST = 2.0**60  # sums of dS stay below it as integers
FEWEST = 128  # distances for which Gluon's sums of 16-bit numbers are taken: with one, each weight is 1, and dS is rounded whole


def is_covered(longest_q: int, longest_k: int, distances: int, origin: int, window_left: int, window_right: int,
               fewest: int = FEWEST) -> bool:
    """Whether the table has an entry of its own for each distance of sequences of up to these lengths, of which there are at least
    `fewest`."""
    nearest = 1 - longest_q if window_right < 0 else max(1 - longest_q, -window_right)
    farthest = longest_k - 1 if window_left < 0 else min(longest_k - 1, window_left)
    return origin + nearest >= 0 and origin + farthest < distances and farthest - nearest >= fewest - 1


def wants_residual(q: Tensor, v: Tensor, bias: Tensor, impl: str | None, deterministic: bool, covered: bool) -> bool:
    """Like flash's: for the gradient of the table."""
    return not deterministic and (covered or impl == "gluon") and hopper_wants_residual(q, v, (bias,), impl, 64)


def _call(bias: Tensor, cu_seqlens_q: Tensor | None, exact: bool, origin: int, softmax_scale: float, window_left: int, window_right: int):
    """flash's options, and the table as its kernels take it."""
    from attnzoo_kernels._triton.call import packed_sequences
    from attnzoo_kernels.flash.options import DISTANCE_PAD, DistanceBias, Options

    options = Options(sequences=packed_sequences(cu_seqlens_q), softmax_scale=softmax_scale, window_left=window_left,
                      window_right=window_right, distances=bias.shape[1], origin=origin)
    table = bias if exact else bias * math.log2(math.e)
    return options, DistanceBias(F.pad(table, (DISTANCE_PAD, DISTANCE_PAD), mode="replicate"))


@autograd.readable(0, 1, 2, like=(2, None, None, 2))
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, residual_wanted: bool,
    impl: str | None, deterministic: bool, covered: bool, origin: int, softmax_scale: float, window_left: int, window_right: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options, table = _call(bias, cu_seqlens_q, q.dtype == torch.float32, origin, softmax_scale, window_left, window_right)
    residual = empty_residual(q, v, residual_wanted)
    kept = residual if residual.numel() else None

    def why_not_gluon() -> str | None:
        from attnzoo_kernels.distance_bias import hopper

        return hopper.forward_reason(q, k, v, options)

    if dispatch.choose("distance_bias forward", impl, why_not_gluon) == "gluon":
        from attnzoo_kernels.distance_bias import hopper

        out, lse, stats = hopper.launch_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, options, table.table, kept)
    else:
        from attnzoo_kernels.flash.forward import launch_forward

        out, lse, stats = launch_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, None, None, None, options, distance_bias=table, residual=kept)
    return out, lse, stats, residual


def _fake_forward(q, k, v, bias, cu_seqlens_q, cu_seqlens_k, residual_wanted, *_):
    return *autograd.fake_softmax(q, k, v), empty_residual(q, v, residual_wanted)


@autograd.readable(2, 3, 4, 5, 10, 0, like=(2, 3, 4))
def _gradients(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, bias: Tensor,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, residual: Tensor, needs_dbias: bool, residual_wanted: bool, impl: str | None,
    deterministic: bool, covered: bool, origin: int, softmax_scale: float, window_left: int, window_right: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options, table = _call(bias, cu_seqlens_q, q.dtype == torch.float32, origin, softmax_scale, window_left, window_right)
    kept = residual if residual.numel() else None

    def why_not_gluon() -> str | None:
        from attnzoo_kernels.distance_bias import hopper_backward

        if needs_dbias and not covered and impl is None:
            return "its sums of 16-bit numbers are less exact where distances are few or share an entry of the table"
        return hopper_backward.backward_reason(q, k, v, options, needs_dbias, deterministic)

    if dispatch.choose_backward("distance_bias backward", impl, why_not_gluon) == "gluon":
        from attnzoo_kernels.distance_bias import hopper_backward

        *grads, dbias = hopper_backward.launch_backward(grad_out, grad_lse, q, k, v, out, stats, cu_seqlens_q, cu_seqlens_k, options,
                                                        table.table, needs_dbias, deterministic, kept)
        return *grads, dbias if needs_dbias else bias.new_empty(0)
    from attnzoo_kernels.flash.backward import launch_backward

    if needs_dbias:
        sums = torch.zeros(bias.shape, dtype=torch.int64, device=bias.device)
        table = table._replace(sums=sums, unit=_unit(grad_out, grad_lse, v, cu_seqlens_q, cu_seqlens_k))
    dq, dk, dv, _ = launch_backward(grad_out, grad_lse, q, k, v, out, stats, cu_seqlens_q, cu_seqlens_k, None, None,
                                    "residual" if needs_dbias else False, options, distance_bias=table)
    return dq, dk, dv, (sums.double() / table.unit).float() if needs_dbias else bias.new_empty(0)


def _unit(grad_out: Tensor, grad_lse: Tensor | None, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> Tensor:
    """Of one, a power of two in float64, with which the sum of |dS| of a head stays below LARGEST. Weights of a row add up to one; what
    reaches them from dO is a product with a value.

    What lies behind the last packed sequence is not looked at.
    """
    def largest(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        if cu_seqlens is not None:
            x = x.masked_fill(behind_last(cu_seqlens, x.shape[-1]), 0)
        return x.double().amax() if x.numel() else x.new_zeros((), dtype=torch.float64)

    norms = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).mT for x in (grad_out, v))
    of_out, of_values = (largest(x, bounds) for x, bounds in zip(norms, (cu_seqlens_q, cu_seqlens_k), strict=True))
    bound = 2 * of_out * of_values
    if grad_lse is not None:
        bound += largest(grad_lse.abs(), cu_seqlens_q)
    return torch.exp2((LARGEST / (bound * (1.01 * math.prod(grad_out.shape[:-2]))).clamp(min=1e-200)).log2().floor())


def _fake_gradients(grad_out, grad_lse, q, k, v, out, stats, bias, cu_seqlens_q, cu_seqlens_k, residual, needs_dbias, *_):
    return *(x.new_empty(x.shape) for x in (q, k, v)), bias.new_empty(bias.shape if needs_dbias else 0)


forward = autograd.differentiable_softmax("distance_bias", _forward, _gradients, 3, learned=True, fake=_fake_forward,
                                          fake_backward=_fake_gradients)
