"""Compile forgetting attention's Gluon kernels for Hopper without one: `python forgetting_hopper_ahead_of_time.py 90` prints a JSON line
per kernel."""

import itertools

import torch
from hopper_ahead_of_time import compile_only, compiled_plans, report


def main() -> None:
    compile_only()
    from attnzoo_kernels.flash import hopper as flash_forward
    from attnzoo_kernels.flash import hopper_backward as flash_backward
    from attnzoo_kernels.flash.options import KeyBias, Options
    from attnzoo_kernels.forgetting import blocks, hopper, hopper_backward

    forward_plans, plans = compiled_plans(flash_forward), compiled_plans(flash_backward)
    bf16, fp16 = torch.bfloat16, torch.float16
    shapes = ((64, 64, 4096, False, -1, bf16), (128, 128, 4096, False, -1, bf16), (128, 128, 4096, True, 64, bf16),
              (64, 64, 512, True, -1, bf16), (64, 128, 1000, False, 64, bf16), (128, 128, 512, False, -1, fp16),
              (64, 64, 4096, True, -1, fp16))
    for pruned, (head_dim, value_dim, length, packed, left, dtype) in itertools.product((False, True), shapes):
        rows = (length,) if packed else (1, length)
        q, k = torch.zeros(2, *rows, 4, head_dim, dtype=dtype)
        v = torch.zeros(*rows, 4, value_dim, dtype=dtype)
        bounds = torch.zeros(2, dtype=torch.int32) if packed else None
        options = Options(sequences=1 if packed else None, softmax_scale=head_dim**-0.5, window_left=left, window_right=0, key_bias=True,
                          pruned=pruned)
        case = {"head_dim": head_dim, "value_dim": value_dim, "packed": packed, "window": left, "pruned": pruned}
        c, starts, ends = blocks.shapes(q, k, torch.zeros(*rows, 4), options)
        bias = KeyBias(torch.zeros(c), torch.zeros(starts), torch.zeros(ends, dtype=torch.int32))
        for residual in (None,) if dtype == fp16 else (None, torch.zeros_like(v)):
            hopper.launch_forward(q, k, v, bounds, bounds, options, bias, blocks.empty_parts(q, k, options), residual)
            report(forward_plans[-1].launch.compiled, **case, residual=residual is not None)
        if dtype == fp16:
            continue
        stats = torch.zeros(2, 4, length) if packed else torch.zeros(2, 1, 4, length)
        hopper_backward.launch_backward(v, None, q, k, v, v, stats, bounds, options, bias, residual)
        report(plans[-1].mainloop.compiled, **case)


if __name__ == "__main__":
    main()
