"""Compile the rounding to 8 bits for a GPU that is not here, `python fp8_rounding_ahead_of_time.py 90`: a JSON line for each form."""

import json

import torch
import triton
from ahead_of_time import Driver, pairs_used_twice, resources
from triton.runtime.jit import JITFunction


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    run = JITFunction.run
    compiled = []

    def warm_up(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if self.fn.__name__ == "rounding_kernel":
            compiled.append(kernel)

    JITFunction.run = warm_up
    from attnzoo_kernels.fp8.rounding import launch_rounding, transposed

    forms = [(width, dtype, kind) for width in (50, 64) for dtype in (torch.float32, torch.float16, torch.bfloat16)
             for kind in (torch.float8_e4m3fn, torch.float8_e5m2)]
    for width, dtype, kind in forms:
        launch_rounding(torch.zeros(33, width, dtype=dtype), kind)
    transposed(torch.zeros(33, 64, dtype=torch.uint8))
    for kernel, form in zip(compiled, [*forms, "bytes"], strict=True):
        registers, stack = resources(kernel.asm["cubin"])
        print(json.dumps({"form": str(form), "registers": registers, "stack": stack, "used_twice": pairs_used_twice(kernel.asm["ptx"])}))


if __name__ == "__main__":
    main()
