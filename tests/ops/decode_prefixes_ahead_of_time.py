"""Compile the kernels of shared prefixes for a GPU that is not here, `python decode_prefixes_ahead_of_time.py 90`: a JSON line each."""

import json

import torch
import triton
from ahead_of_time import ARCH, Driver, resources
from triton.runtime.jit import JITFunction


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    compiled = []
    run = JITFunction.run

    def warm_up(self, *args, grid, warmup, **options):
        compiled.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **options)))

    JITFunction.run = warm_up
    from attnzoo_kernels.decode import forward, prefixes

    forward.architecture, forward._multiprocessors = lambda device: ARCH, lambda index: 108
    for width in (64, 128):
        q, cache = torch.zeros(4, 1, 8, width, dtype=torch.bfloat16), torch.zeros(9, 16, 2, width, dtype=torch.bfloat16)
        prefixes.launch_forward(q, cache, cache, torch.zeros(4, dtype=torch.int32), torch.zeros(4, 4, dtype=torch.int32), None, 0.1, 0, 0.0)
    for name, kernel in compiled:
        registers, stack = resources(kernel.asm["cubin"])
        print(json.dumps({"kernel": name, "registers": registers, "stack": stack, "shared": kernel.metadata.shared}))


if __name__ == "__main__":
    main()
