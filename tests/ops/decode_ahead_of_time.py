"""Compile decoding's kernels for a GPU that is not here: `python decode_ahead_of_time.py 90` prints a JSON line per kernel."""

import itertools
import json

import torch
import triton
from ahead_of_time import ARCH, Driver, loads, resources
from triton.runtime.jit import JITFunction

WIDTHS = (64, 128, 256)
QUERIES = (1, 8, 16)  # of a group of 4: tiles of 16, 32 and 64 rows


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    compiled = []
    run = JITFunction.run

    def warm_up(self, *args, grid, warmup, **options):
        compiled.append((self.fn.__name__, options, run(self, *args, grid=grid, warmup=True, **options)))

    JITFunction.run = warm_up
    from attnzoo_kernels.decode import forward

    forward.architecture, forward._multiprocessors = lambda device: ARCH, lambda index: 108
    shapes = [(2, *shape) for shape in itertools.product((torch.bfloat16,), WIDTHS, QUERIES)]
    shapes += [(2, torch.float32, width, 1) for width in WIDTHS]
    shapes.append((108, torch.bfloat16, 128, 1))  # two key heads a multiprocessor: another tile
    shapes = [(*shape, False, False) for shape in shapes]
    shapes += [(batch, torch.bfloat16, 128, 1, page, False) for batch, page in itertools.product((2, 108), (16, 128))]
    if ARCH >= 89:
        shapes += [(2, torch.bfloat16, 128, 1, page, True) for page in (False, 16)]
    for batch, dtype, width, queries, page, fp8 in shapes:
        q, cache = torch.zeros(batch, queries, 8, width, dtype=dtype), torch.zeros(batch, page or 16, 2, width, dtype=dtype)
        scales = (torch.ones(2), torch.ones(2)) if fp8 else (None, None)
        cache = cache.to(torch.float8_e4m3fn) if fp8 else cache
        forward.launch_forward(q, cache, cache, torch.zeros(batch, dtype=torch.int32),
                               torch.zeros(batch, 4, dtype=torch.int32) if page else None, None, None, width**-0.5, -1, 0, 0.0, *scales)
    for batch, width in itertools.product((2, 108), WIDTHS):
        q, cache = torch.zeros(batch, 3, 8, width, dtype=torch.bfloat16), torch.zeros(batch, 16, 2, width, dtype=torch.bfloat16)
        forward.launch_forward(q, cache, cache, torch.zeros(batch, dtype=torch.int32), None, None, None, width**-0.5, -1, 0, 0.0,
                               segments=torch.zeros(batch, 3, 2, dtype=torch.int32))
    from attnzoo_kernels.routed import decode as routed

    q, cache, bounds = torch.zeros(1, 16, 128, dtype=torch.bfloat16), torch.zeros(4096, 4, 128, dtype=torch.bfloat16), torch.tensor([0, 1])
    blocks = torch.zeros(1, 4, 15, dtype=torch.int32)
    routed.attend(q, cache, cache, blocks, bounds.int(), bounds.int() * 4096, 64, 0.1)
    compiled = [entry for entry in compiled if "PRECISION" in entry[1]]
    for name, constants, kernel in compiled:
        registers, stack = resources(kernel.asm["cubin"])
        shown = {key: constants[key] for key in ("VALUE_DIM", "PRECISION", "BLOCK_M", "SEGMENTS") if key in constants}
        print(json.dumps({"kernel": name, "registers": registers, "stack": stack, "shared": kernel.metadata.shared,
                          **loads(kernel.asm["ptx"]), **shown}))


if __name__ == "__main__":
    main()
