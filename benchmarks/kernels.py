"""Which kernels the device time of a call goes to."""

from collections.abc import Callable

import torch

KINDS = (  # the first that a kernel's name contains
    ("optimizer", ("multi_tensor", "FusedOptimizer")), ("norms and residuals", ("layer_norm", "add_norm")), ("GELU", ("gelu",)),
    ("attention", ("flash_", "fmha", "flash::", "softmax_bwd", "fwd_kernel", "fwd_hopper_kernel", "bwd_kernel", "bwd_hopper_kernel",
                   "bwd_dkdv_kernel", "bwd_dq_kernel", "bwd_preprocess", "bwd_postprocess", "tails_kernel", "key_range", "key_tile")),
    ("matrix products", ("nvjet", "gemm", "cublas", "splitKreduce", "cutlass")), ("loss", ("log_softmax", "nll_loss", "cross_entropy")),
    ("embedding", ("embedding", "index_put", "index_add")), ("rounding to 8 bits", ("amax", "_scaled_mm", "rounding_kernel")),
    ("copies", ("Memcpy", "Memset", "cat")),
    ("reductions of gradients", ("reduce_kernel", "triton_red", "sum")), ("casts", ("_to_copy",)),
)


def kind_of(kernel: str) -> str:
    return next((kind for kind, names in KINDS if any(name in kernel for name in names)), "other")


def by_kind(name: str, call: Callable[[], object], steps: int = 5) -> dict[str, float]:
    """Milliseconds of device time a call, by kind of kernel, the most first, of all, and what lies between them; prints the twenty longest
    kernels."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    kernels = [e for e in recorded.key_averages() if e.device_type == DeviceType.CUDA and not e.key.startswith("Command Buffer")
               and not e.is_user_annotation]  # "Optimizer.step" spans the kernels of the optimizer
    kernels.sort(key=lambda e: -e.self_device_time_total)
    of_kind: dict[str, float] = {}
    for e in kernels:
        of_kind[kind_of(e.key)] = of_kind.get(kind_of(e.key), 0.0) + e.self_device_time_total / steps / 1e3
    of_kind["all kernels"] = sum(of_kind.values())
    launches = sum(e.count for e in kernels) / steps
    print(f"\n{name}: {of_kind['all kernels']:.2f} ms of kernels a step, {launches:.1f} launches")
    names = {e.key for e in kernels}
    if spans := [e.time_range for e in recorded.events() if e.device_type == DeviceType.CUDA and e.name in names]:
        whole = max(span.end for span in spans) - min(span.start for span in spans)
        of_kind["between kernels"] = whole / steps / 1e3 - of_kind["all kernels"]
    for e in kernels[:20]:
        print(f"{e.self_device_time_total / steps / 1e3:8.3f} ms {e.count / steps:6.1f} x {e.key[:110]}")
    return dict(sorted(of_kind.items(), key=lambda item: -item[1]))
