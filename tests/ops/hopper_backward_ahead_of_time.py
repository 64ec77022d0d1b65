"""Compile the Gluon backward for Hopper without one: `python hopper_backward_ahead_of_time.py 90` prints a JSON line per tile and mask."""

import itertools
from dataclasses import asdict

import torch
from hopper_ahead_of_time import WarmUp, compile_only, compiled_plans, report


def main() -> None:
    compile_only()
    from attnzoo_kernels._triton.call import layout
    from attnzoo_kernels.flash import hopper_backward
    from attnzoo_kernels.flash.options import Options

    hopper_backward.multiprocessors = lambda device: 132
    for number, (left, right) in enumerate(((-1, -1), (-1, 0), (64, 0))):
        for wide, long in itertools.product((False, True), repeat=2):  # long: dQ a step late
            # every mask is met with every width and length, and packed and deterministic in every pair with another
            packed, deterministic = ((wide ^ long, wide), (not long, wide ^ long), (wide, long))[number]
            head_dim, length = 128 if wide else 64, 4160 if long else 256
            rows = (length,) if packed else (1, length)
            q, k, v, out, grad_out = torch.zeros(5, *rows, 5, head_dim, dtype=torch.bfloat16)
            bounds = torch.zeros(2, dtype=torch.int32) if packed else None
            options = Options(sequences=1 if packed else None, softmax_scale=head_dim**-0.5, window_left=left, window_right=right)
            layouts = map(layout, (q, k, v, out, grad_out, q, k, v))
            plan = hopper_backward._plan(q.device, q.dtype, False, deterministic, *layouts, False, False, options, None,
                                         hopper_backward.SOFTMAX)
            launches = [x for x in (plan.preprocess, plan.tails, plan.mainloop, plan.postprocess) if x is not None]
            for launch in launches:
                launch.kernel = WarmUp(launch.kernel)
            stats = torch.zeros(2, *rows[:-1], 5, length)
            hopper_backward.launch_backward(grad_out, None, q, k, v, out, stats, bounds, bounds, options, deterministic)
            for launch in launches:
                report(launch.compiled, head_dim=head_dim, length=length, packed=packed, window=(left, right),
                       deterministic=deterministic, tile=asdict(plan.tile))

    plans = compiled_plans(hopper_backward)
    for widths, length, packed, left in (((64, 64), 4096, False, -1), ((128, 128), 512, True, 127), ((64, 128), 1000, True, -1)):
        rows = (length,) if packed else (1, length)
        q, (k, v) = torch.zeros(*rows, 8, widths[0], dtype=torch.bfloat16), (torch.zeros(*rows, 2, w, dtype=torch.bfloat16) for w in widths)
        out, stats = torch.zeros(*rows, 8, widths[1], dtype=torch.bfloat16), torch.zeros(2, *rows[:-1], 8, length)
        bounds = torch.zeros(2, dtype=torch.int32) if packed else None
        options = Options(sequences=1 if packed else None, softmax_scale=1.0, window_left=left, window_right=0)
        residual = torch.zeros_like(out)
        hopper_backward.launch_backward(out, None, q, k, v, out, stats, bounds, bounds, options, False, residual=residual,
                                        sinks=torch.zeros(8))
        report(plans[-1].mainloop.compiled, head_dim=widths[0], value_dim=widths[1], length=length, packed=packed, window=(left, 0),
               sinks=True)
    three_parts()


def three_parts() -> None:
    """Of head dim 192."""
    from attnzoo_kernels.flash import hopper_wide_backward
    from attnzoo_kernels.flash.options import Options

    plans = compiled_plans(hopper_wide_backward)
    for packed, right in ((False, 0), (True, -1)):
        rows = (4096,) if packed else (1, 4096)
        q, k = torch.zeros(2, *rows, 5, 192, dtype=torch.bfloat16)
        v, out, grad_out = torch.zeros(3, *rows, 5, 128, dtype=torch.bfloat16)
        bounds = torch.zeros(2, dtype=torch.int32) if packed else None
        options = Options(sequences=1 if packed else None, softmax_scale=192**-0.5, window_right=right)
        stats = torch.zeros(2, 5, 4096)
        dq, dk, dv = hopper_wide_backward.launch_backward(grad_out, None, q, k, v, out, stats, bounds, bounds, options)
        assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
        for launch in (plans[-1].preprocess, plans[-1].mainloop, plans[-1].postprocess):
            report(launch.compiled, head_dim=192, packed=packed, window=(-1, right))


if __name__ == "__main__":
    main()
