"""Compile the Gluon forward for Hopper without one: `python hopper_ahead_of_time.py 90` prints a JSON line per tile and mask.

A process of its own, as ahead_of_time.py, whose driver it takes.
"""

import itertools
import json
import os
import re
import subprocess
import tempfile

import torch
import triton
from ahead_of_time import Driver, resources

BOUNDS = ((-1, -1), (-1, 0), (-1, 3), (64, 0))  # full, causal, causal with the diagonal off the steps, window


def shared_with_barriers(ptx: str) -> list[str]:
    """Places of barriers that other loads and stores use too: what a dead barrier's place holds is lost when the GPU changes processes."""
    places = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    barriers = {places.get(register, "0") for register in re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", ptx)}
    assert barriers or "mbarrier.init" not in ptx
    accesses = re.findall(r"(?:st|ld)\.shared[^\[;]*\[\s*(?:global_smem)?\+?(%r\d+|\d*)", ptx)
    used = {places.get(access, "") if access.startswith("%") else access or "0" for access in accesses}
    return [f"{place} holds a barrier and something else" for place in sorted(barriers & used)]


def complaints(ptx: str) -> list[str]:
    """What the assembler says of matrix instructions that it had to serialise, and barriers whose place is not theirs alone."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        said = subprocess.run([tool, "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull], capture_output=True, text=True, check=True)
    serialised = [line for line in said.stderr.splitlines() if any(code in line for code in ("C7510", "C7512", "C7513", "C7514"))]
    return serialised + shared_with_barriers(ptx)


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    from attnzoo_kernels.flash import hopper
    from attnzoo_kernels.flash.options import Options, layout

    hopper.multiprocessors, hopper.tile_counter = lambda device: 132, lambda device: torch.zeros(1, dtype=torch.int32)
    for head_dim, value_dim, seqlen in ((64, 64, 512), (64, 64, 4096), (128, 128, 4096), (64, 128, 4096)):
        for packed, (left, right) in itertools.product((False, True), BOUNDS):
            rows = (seqlen,) if packed else (1, seqlen)
            q, k = torch.zeros(2, *rows, 2, head_dim, dtype=torch.bfloat16)
            v = torch.zeros(*rows, 2, value_dim, dtype=torch.bfloat16)
            bounds = torch.zeros(2, dtype=torch.int32) if packed else None
            options = Options(sequences=1 if packed else None, softmax_scale=head_dim**-0.5, window_left=left, window_right=right)
            launch, tile, *_ = hopper._plan(q.device, q.dtype, packed, layout(q), layout(k), layout(v), options, None)
            launch.kernel, launch.other = WarmUp(launch.kernel), None
            hopper.launch_forward(q, k, v, bounds, bounds, options)
            kernel = launch.compiled
            registers, stack = resources(kernel.asm["cubin"])
            print(json.dumps({"head_dim": head_dim, "value_dim": value_dim, "packed": packed, "window": (left, right),
                              "consumers": tile.consumers, "registers": registers, "stack": stack, "shared": kernel.metadata.shared,
                              "complaints": complaints(kernel.asm["ptx"])}), flush=True)


class WarmUp:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **options: self.kernel.warmup(*args, grid=grid, **options)


if __name__ == "__main__":
    main()
