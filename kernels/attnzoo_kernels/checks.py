"""Argument checks that every operator shares: an error names the argument, what it was and what it must be."""

import math
import numbers

import torch
from torch import Tensor

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUMBERS = (float, int, torch.SymFloat, torch.SymInt, numbers.Real)  # the common ones first
INTEGERS = (int, torch.SymInt, numbers.Integral)
UNLIMITED = 2**30  # larger windows are unlimited, because kernels add positions to them in 32 bits


def choice(name: str, value, choices: tuple) -> None:
    if value is not None and value not in choices:
        raise ValueError(f"{name}: must be None or one of {', '.join(map(repr, choices))}, got {value!r}")


def tensor(name: str, value, what: str = "a tensor", way_out: str = "") -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: must be {what}, got {type(value).__name__}{way_out}")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: must be a dense tensor, got {value.layout}; .to_dense() makes one")


def flag(name: str, value, way_out: str = "") -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: must be True or False{way_out}, got {_shown(value)}")


def number(name: str, value, must: str = "a number") -> None:
    if not isinstance(value, NUMBERS) or isinstance(value, bool):
        way_out = "; .item() makes one, and waits for the device" if isinstance(value, Tensor) else ""
        raise TypeError(f"{name}: must be {must}, got {_shown(value)}{way_out}")


def finite(name: str, value, must: str = "a finite number") -> None:
    number(name, value, must)
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name}: must be {must}, got {value}")


def integer(name: str, value, least: int | None = None) -> None:
    if not isinstance(value, INTEGERS) or isinstance(value, bool) or least is not None and value < least:
        if isinstance(value, Tensor):
            raise TypeError(f"{name}: must be a Python int, got a tensor (reading it would wait for the device)")
        at_least = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name}: must be an integer{at_least}, got {value!r}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:  # not for a symbolic one: torch.compile would make the comparison a guard
        raise ValueError(f"{name}: must be an integer of 64 bits, got {value}")


def _shown(value) -> str:
    return f"{type(value).__name__} of shape {tuple(value.shape)}" if getattr(value, "shape", ()) else repr(value)


def probability(name: str, value: float) -> None:
    number(name, value, "a number in [0, 1)")
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name}: must lie in [0, 1), got {value}")


def non_negative(name: str, value: float) -> None:
    number(name, value, "a number of at least 0 (0 is off)")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}: must be at least 0 (0 is off) and finite, got {value}")


def window(window_size, causal: bool) -> tuple[int, int]:
    """(left, right) with causality folded in; -1 is unlimited."""
    flag("causal", causal)
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2 or not (_side(window_size[0]) and _side(window_size[1])):
        raise ValueError(f"window_size: must be two ints (left, right), each at least -1 (unlimited), got {window_size!r}")
    left, right = window_size
    return -1 if left >= UNLIMITED else left, 0 if causal else -1 if right >= UNLIMITED else right


def _side(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= -1


def softmax_scale(value: float | None, head_dim: int) -> float:
    if value is None:
        return head_dim**-0.5
    finite("softmax_scale", value, "a finite number, or None for head_dim ** -0.5")
    return float(value)


def positive_scale(softmax_scale: float, *queries: Tensor) -> tuple:
    """(the scale, *the queries) as the kernels need them. Kernels scale a row's maximum, so that the scale must be positive: a negative one
    would make it the minimum. A negative sign is moved into the queries; a scale of 0 becomes 1, with queries of 0."""
    if softmax_scale > 0:
        return softmax_scale, *queries
    return abs(softmax_scale) or 1.0, *(q * -1.0 if softmax_scale < 0 else q * 0.0 for q in queries)


def deterministic(value: bool | None) -> bool:
    """`value`; None follows torch.are_deterministic_algorithms_enabled()."""
    if value is None:
        return torch.are_deterministic_algorithms_enabled()
    flag("deterministic", value, " or None")
    return value


def per_head(name: str, value: Tensor, q: Tensor, heads: int, batch: int | None = None) -> None:
    shapes = [(heads,)] if batch is None else [(heads,), (batch, heads)]
    tensor(name, value, "a float32 tensor")
    if tuple(value.shape) not in shapes:
        raise ValueError(f"{name}: must have shape {' or '.join(map(str, shapes))}, got {tuple(value.shape)}")
    if value.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name}: must be float32, got {value.dtype}")
    if value.device != q.device:
        raise ValueError(f"{name}: must be on q's device {q.device}, got {value.device}")
    if heads > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name}: last dimension must be contiguous, got stride {value.stride(-1)}; call .contiguous()")


def cu_seqlens(name: str, value: Tensor, q: Tensor) -> None:
    tensor(name, value, "an int32 tensor of shape (sequences + 1,)", "; torch.tensor(..., dtype=torch.int32, device=q.device) makes one")
    if value.dim() != 1 or value.shape[0] < 2:
        raise ValueError(f"{name}: must have shape (sequences + 1,), got {tuple(value.shape)}")
    if value.dtype != torch.int32:
        raise TypeError(f"{name}: must be int32, got {value.dtype}")
    if value.device != q.device:
        raise ValueError(f"{name}: must be on q's device {q.device}, got {value.device}")
    if value.stride(0) != 1:
        raise ValueError(f"{name}: must be contiguous, got stride {value.stride(0)}")


def whole_numbers(name: str, x: Tensor, other: Tensor, shape: tuple[int, ...], other_name: str = "q") -> None:
    tensor(name, x)
    whole = not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool
    if not whole or x.shape != shape or x.device != other.device:
        raise ValueError(f"{name}: must be whole numbers of shape {shape} on {other_name}'s device {other.device}, got {x.dtype} of shape "
                         f"{tuple(x.shape)} on {x.device}")
    if x.is_cpu and not torch.compiler.is_compiling() and (x < 0).any():
        raise ValueError(f"{name}: must be at least 0, got {x.tolist()}")


def rising(name: str, cu_seqlens: Tensor, total: int | None = None) -> list[int] | None:
    """The values of cu_seqlens as a list, if reading them does not wait for a device, that is, on a CPU."""
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or sorted(bounds) != bounds or total is not None and bounds[-1] > total:
        most = "" if total is None else f" to at most the {total} tokens"
        raise ValueError(f"{name}: must rise from 0{most}, got {bounds}")
    return bounds


def packed_lengths(suffix: str, cu_seqlens: Tensor, longest: int | None, total: int) -> None:
    bounds = rising(f"cu_seqlens_{suffix}", cu_seqlens, total)
    if bounds is None:
        return
    reached = max(end - start for start, end in zip(bounds, bounds[1:], strict=False))
    if longest is not None and reached > longest:
        raise ValueError(f"max_seqlen_{suffix}: must be at least the longest sequence's {reached}, got {longest}")


def attention_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, names=("q", "k", "v"),
                     unpacked="; packed input needs cu_seqlens_q and cu_seqlens_k", by_ranges=False, narrow=None) -> bool:
    """Shapes, dtypes, devices and strides of q, k, v, which the operator calls `names`; returns whether they are packed.

    unpacked: what to advise for packed tensors without cu_seqlens. by_ranges: they are packed, with key ranges in place of cu_seqlens.
    narrow: a dtype that k and v may have in place of q's.
    """
    q_name, k_name, v_name = names
    packed = by_ranges or cu_seqlens_q is not None or cu_seqlens_k is not None
    layout = "(total, heads, head_dim)" if packed else "(batch, seqlen, heads, head_dim)"
    for name, x in zip(names, (q, k, v), strict=True):
        tensor(name, x)
        if x.dim() != (3 if packed else 4):
            hint = "" if packed or x.dim() != 3 else unpacked
            raise ValueError(f"{name}: must be {layout}, got shape {tuple(x.shape)}{hint}")
        if name != q_name and x.dtype == k.dtype == narrow:
            pass
        elif x.dtype not in DTYPES:
            also = f", or {narrow} as both {k_name} and {v_name}" if narrow and name != q_name else ""
            hint = "; flash_attention_fp8 takes float8_e4m3fn" if x.is_floating_point() and not also else ""
            raise TypeError(f"{name}: must be float16, bfloat16, float32 or (by the reference) float64{also}, got {x.dtype}{hint}")
        elif x.dtype != q.dtype:
            raise TypeError(f"{name}: must have {q_name}'s dtype {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: must be on {q_name}'s device {q.device}, got {x.device}")
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"{name}: last dimension must be contiguous, got stride {x.stride(-1)}; call .contiguous()")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{k_name}: head_dim must be {q_name}'s {q.shape[-1]}, got {k.shape[-1]}")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"{v_name}: must have {k_name}'s {k.shape[-2]} heads, got {v.shape[-2]}")
    if v.shape[:-2] != k.shape[:-2]:
        raise ValueError(f"{v_name}: must have {k_name}'s leading shape {tuple(k.shape[:-2])}, got {tuple(v.shape[:-2])}")
    for name, width in ((q_name, q.shape[-1]), (v_name, v.shape[-1])):
        if not 1 <= width <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: width must be 1 to {MAX_HEAD_DIM}, got {width}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{k_name}: its {k.shape[-2]} heads must divide {q_name}'s {q.shape[-2]}")
    if by_ranges:
        lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        for name in (name for name, value in lengths.items() if value is not None):
            raise ValueError(f"{name}: must be None with ranges, which say what packed queries see")
        return packed
    if packed:
        for name, value in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if value is None:
                raise ValueError(f"{name}: packed input needs cu_seqlens_q and cu_seqlens_k both, got None")
            cu_seqlens(name, value, q)
        if cu_seqlens_q.shape != cu_seqlens_k.shape:
            raise ValueError(f"cu_seqlens_k: must have cu_seqlens_q's shape {tuple(cu_seqlens_q.shape)}, got {tuple(cu_seqlens_k.shape)}")
        for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if value is not None:
                integer(name, value, 0)
        packed_lengths("q", cu_seqlens_q, max_seqlen_q, q.shape[0])
        packed_lengths("k", cu_seqlens_k, max_seqlen_k, k.shape[0])
        return packed
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if value is not None:
            raise ValueError(f"{name}: goes with cu_seqlens_q and cu_seqlens_k, got {value} without them; leave it out, or give them and "
                             "packed tensors")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"{k_name}: batch must be {q_name}'s {q.shape[0]}, got {k.shape[0]}")
    return packed


def alike(name: str, x: Tensor, other_name: str, other: Tensor, shape: tuple[int, ...] | None = None, contiguous: bool = True) -> None:
    """x must be a tensor like `other`: of its shape, or of `shape`, its dtype and device, last dimension contiguous."""
    tensor(name, x)
    if x.shape != (other.shape if shape is None else shape):
        wanted = f"{other_name}'s shape {tuple(other.shape)}" if shape is None else f"shape {shape}"
        raise ValueError(f"{name}: must have {wanted}, got {tuple(x.shape)}")
    if x.dtype != other.dtype:
        raise TypeError(f"{name}: must have {other_name}'s dtype {other.dtype}, got {x.dtype}")
    if x.device != other.device:
        raise ValueError(f"{name}: must be on {other_name}'s device {other.device}, got {x.device}")
    if contiguous and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name}: last dimension must be contiguous, got stride {x.stride(-1)}; call .contiguous()")


def no_gradient(**tensors: Tensor | None) -> None:
    """Refuses gradients for tensors for which only the reference has one."""
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if x is not None and x.requires_grad:
            raise NotImplementedError(f'{name}: only impl="reference" has a gradient for it; detach it or use that')
