"""Compile the kernels of decoding over latents for a GPU that is not here: `python decode_latent_ahead_of_time.py 90` prints a JSON line
per kernel."""

import json

import torch
import triton
from ahead_of_time import ARCH, Driver, resources, wgmma_faults
from triton.runtime.jit import JITFunction


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    compiled = []
    run = JITFunction.run

    def warm_up(self, *args, grid, warmup, **options):
        compiled.append((self.fn.__name__, options, run(self, *args, grid=grid, warmup=True, **options)))
        return compiled[-1][-1]

    JITFunction.run = warm_up
    from attnzoo_kernels.decode import latent

    latent.architecture, latent.multiprocessors = lambda device: ARCH, lambda device: 108
    shapes = [(torch.bfloat16, 16, 1, False), (torch.bfloat16, 128, 4, False), (torch.bfloat16, 16, 2, True), (torch.float32, 16, 1, False)]
    for dtype, heads, queries, paged in shapes:
        q, cache = torch.zeros(2, queries, heads, 576, dtype=dtype), torch.zeros(2, 64, 576, dtype=dtype)
        latent.launch_forward(q, cache, torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32) if paged else None, 512,
                              192**-0.5, True)
    for name, constants, kernel in compiled:
        registers, stack = resources(kernel.asm["cubin"])
        shown = {key: constants.get(key) for key in ("PRECISION", "BLOCK_M", "BLOCK_N", "TMA", "PAGE")}
        print(json.dumps({"kernel": name, "registers": registers, "stack": stack, "shared": kernel.metadata.shared,
                          **wgmma_faults(kernel), **shown}))


if __name__ == "__main__":
    main()
