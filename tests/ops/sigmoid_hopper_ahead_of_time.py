"""Compile sigmoid attention's Gluon kernels for Hopper without one: `python sigmoid_hopper_ahead_of_time.py 90 [every]` prints a JSON line
per kernel; without `every`, of a few of them."""

import sys
from dataclasses import asdict

import torch
from hopper_ahead_of_time import compile_only, compiled_plans, report

FULL, CAUSAL, WINDOW = (-1, -1), (-1, 0), (64, 0)
# head_dim, value_dim, length, window, packed
FEW = ((64, 64, 4096, CAUSAL, True), (128, 128, 4096, FULL, False))
EVERY = FEW + tuple((width, value_width, length, window, packed) for width, value_width in ((64, 64), (128, 128), (64, 128))
                    for length in (512, 4160) for window in (FULL, CAUSAL, WINDOW) for packed in (False, True))


def main() -> None:
    compile_only()
    from attnzoo_kernels.flash import hopper as flash_forward
    from attnzoo_kernels.flash import hopper_backward as flash_backward
    from attnzoo_kernels.sigmoid import hopper, hopper_backward
    from attnzoo_kernels.sigmoid.options import Options

    forward_plans, compiled = compiled_plans(flash_forward), compiled_plans(flash_backward)
    for head_dim, value_dim, length, (left, right), packed in EVERY if "every" in sys.argv else FEW:
        rows = (length,) if packed else (1, length)
        q, k = torch.zeros(2, *rows, 2, head_dim, dtype=torch.bfloat16)
        v, grad_out = torch.zeros(2, *rows, 2, value_dim, dtype=torch.bfloat16)
        bounds = torch.zeros(2, dtype=torch.int32) if packed else None
        options = Options(sequences=1 if packed else None, softmax_scale=head_dim**-0.5, window_left=left, window_right=right)
        case = {"head_dim": head_dim, "value_dim": value_dim, "length": length, "packed": packed, "window": (left, right)}
        hopper.launch_forward(q, k, v, bounds, bounds, options)
        report(forward_plans[-1].launch.compiled, **case, consumers=forward_plans[-1].tile.consumers)
        for deterministic in (False, True) if "every" in sys.argv else (True,):
            hopper_backward.launch_backward(grad_out, q, k, v, bounds, bounds, options, deterministic)
            report(compiled[-1].mainloop.compiled, **case, deterministic=deterministic, tile=asdict(compiled[-1].tile))


if __name__ == "__main__":
    main()
