"""Compile differential attention's Gluon kernels for Hopper without one: `python differential_ahead_of_time.py 90` prints a JSON line per
kernel, width and mask."""

import json

import torch
import triton
from ahead_of_time import Driver, resources
from hopper_ahead_of_time import WarmUp, complaints

WIDTHS = ((64, 128, False), (64, 64, True), (128, 256, False), (128, 128, True))
BACKWARD_WIDTHS = WIDTHS[:2]  # above them the walks are FlashAttention's


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    triton.compiler.CompiledKernel.__getitem__ = lambda self, grid: lambda *arguments: None  # a second launch of what is compiled
    from attnzoo_kernels.differential import hopper, hopper_backward
    from attnzoo_kernels.differential.options import Options, lambda_strides
    from attnzoo_kernels.flash.options import layout

    hopper.multiprocessors = hopper_backward.multiprocessors = lambda device: 132
    for head_dim, value_dim, shared in WIDTHS:
        for packed, (left, right) in ((False, (-1, 0)), (True, (64, 0))):
            rows, stats = ((256,), (2, 256)) if packed else ((1, 256), (1, 2, 256))
            q1, q2, k1, k2 = torch.zeros(4, *rows, 2, head_dim, dtype=torch.bfloat16)
            v, out, grad_out = torch.zeros(3, *rows, 2, value_dim, dtype=torch.bfloat16)
            k2 = None if shared else k2
            lam, bounds = torch.zeros(()), torch.zeros(2, dtype=torch.int32) if packed else None
            options = Options(bounds, bounds, head_dim**-0.5, left, right)
            of_call = lambda_strides(lam, packed), options.softmax_scale, left, right
            forward = hopper._plan(q1.device, q1.dtype, 1 if packed else None, packed, True, *map(layout, (q1, k1, v)), *of_call)
            forward.kernel = WarmUp(forward.kernel)
            hopper.launch_forward(q1, q2, k1, k2, v, lam, True, options)
            launches = [forward]
            if (head_dim, value_dim, shared) in BACKWARD_WIDTHS:
                layouts = (None if x is None else layout(x) for x in (q1, q2, k1, k2, v, out, grad_out))
                plan = hopper_backward._plan(q1.device, q1.dtype, 1 if packed else None, *layouts, *of_call)
                backward = [plan.rows, *plan.tails, plan.walk, plan.dq_rows]
                for launch in backward:
                    launch.kernel = WarmUp(launch.kernel)
                hopper_backward.launch_backward(grad_out, q1, q2, k1, k2, v, lam, out, out, torch.zeros(4, *stats), True, options)
                launches += backward
            for launch in launches:
                registers, stack = resources(launch.compiled.asm["cubin"])
                print(json.dumps({"kernel": launch.kernel.kernel.__name__, "head_dim": head_dim, "value_dim": value_dim,
                                  "packed": packed, "window": (left, right), "registers": registers, "stack": stack,
                                  "shared": launch.compiled.metadata.shared,
                                  "complaints": complaints(launch.compiled.asm["ptx"])}), flush=True)


if __name__ == "__main__":
    main()
