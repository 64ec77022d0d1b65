"""Compile the Gluon kernels of attention with a bias by distance for Hopper without one: `python distance_bias_hopper_ahead_of_time.py 90`
prints a JSON line per kernel."""

import torch
from hopper_ahead_of_time import compile_only, compiled_plans, report

FULL, CAUSAL, WINDOW = (-1, -1), (-1, 0), (64, 0)
# head_dim, value_dim, length, window, packed
CALLS = ((64, 64, 4096, CAUSAL, True), (64, 64, 4096, FULL, False), (64, 64, 512, CAUSAL, False), (128, 128, 4096, CAUSAL, False),
         (128, 128, 4096, WINDOW, True), (64, 128, 1000, FULL, True))


def main() -> None:
    compile_only()
    from attnzoo_kernels.distance_bias import hopper, hopper_backward
    from attnzoo_kernels.flash import hopper as flash_forward
    from attnzoo_kernels.flash import hopper_backward as flash_backward
    from attnzoo_kernels.flash.options import Options

    forward_plans, plans = compiled_plans(flash_forward), compiled_plans(flash_backward)
    for head_dim, value_dim, length, (left, right), packed in CALLS:
        rows = (length,) if packed else (1, length)
        q, k = torch.zeros(2, *rows, 2, head_dim, dtype=torch.bfloat16)
        v = torch.zeros(*rows, 2, value_dim, dtype=torch.bfloat16)
        bounds = torch.zeros(2, dtype=torch.int32) if packed else None
        options = Options(sequences=1 if packed else None, softmax_scale=head_dim**-0.5, window_left=left, window_right=right,
                          distances=128)
        case = {"head_dim": head_dim, "value_dim": value_dim, "length": length, "packed": packed, "window": (left, right)}
        for residual in (None, torch.zeros_like(v)):
            hopper.launch_forward(q, k, v, bounds, bounds, options, torch.zeros(2, 128 + 512), residual)
            report(forward_plans[-1].launch.compiled, **case, residual=residual is not None, consumers=forward_plans[-1].tile.consumers)
        stats = torch.zeros(2, 2, length) if packed else torch.zeros(2, 1, 2, length)
        for sums in (False, True) if max(head_dim, value_dim) <= 64 else (False,):
            hopper_backward.launch_backward(v, None, q, k, v, v, stats, bounds, bounds, options, torch.zeros(2, 128 + 512), sums, False)
            report(plans[-1].mainloop.compiled, **case, sums=sums)


if __name__ == "__main__":
    main()
