"""Compile the loss kernel for a GPU that is not here, `python linear_cross_entropy_ahead_of_time.py 90`: a JSON line for each form."""

import json

import torch
import triton
from ahead_of_time import Driver, resources
from triton.runtime.jit import JITFunction


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    run = JITFunction.run
    compiled = []

    def warm_up(self, *args, grid, warmup, **options):
        compiled.append((options["TILES"], run(self, *args, grid=grid, warmup=True, **options)))

    JITFunction.run = warm_up
    from attnzoo_kernels.linear_cross_entropy import chunks

    for vocab in (chunks.KEPT * chunks.BLOCK // 2 - 7, chunks.KEPT // 4 * chunks.BLOCK // 2, 128256):
        x, weight = torch.zeros(16, 16, dtype=torch.bfloat16), torch.zeros(vocab // 128 * 128 + 128, 16, dtype=torch.bfloat16)
        chunks.passed_over(x, weight, None, torch.zeros(16, dtype=torch.int64), None, -100, 0.0, 0.0, 0.0, vocab, False, True)
    for tiles, kernel in compiled:
        registers, stack = resources(kernel.asm["cubin"])
        print(json.dumps({"tiles": tiles, "registers": registers, "stack": stack}))


if __name__ == "__main__":
    main()
