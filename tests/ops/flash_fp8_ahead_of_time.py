"""Compile the FP8 forward for Hopper without one: `python flash_fp8_ahead_of_time.py 90` prints a JSON line per tile.

A process of its own, as ahead_of_time.py, whose driver it takes.
"""

import itertools
import re

import torch
from ahead_of_time import listing, loops_with
from hopper_ahead_of_time import WarmUp, compile_only, report


def spilled_in_steps(sass: str) -> int:
    """Loads and stores of spilled registers in the loops over tiles of keys."""
    lines = sass.splitlines()
    loops = [lines[begin:end] for begin, end in loops_with("QGMMA", lines)]
    # what also stores the output is a loop over tiles, or a wait's way back
    steps = [loop for loop in loops if not any("STSM" in line for line in loop)]
    assert steps
    return sum(bool(re.search(r"\b(LDL|STL)\b", line)) for loop in steps for line in loop)


def main() -> None:
    compile_only()
    from attnzoo_kernels.flash_fp8 import forward
    from attnzoo_kernels.flash_fp8.layout import BLOCK, quantized_like

    forward.multiprocessors, forward.tile_counter = lambda device: 132, lambda device: torch.zeros(1, dtype=torch.int32)
    masks = ((False, 0), (True, 0), (True, 3))  # full, causal, causal with the diagonal off the steps
    for (i, head_dim), (j, (causal, shift)) in itertools.product(enumerate((64, 128)), enumerate(masks)):
        by_block = (i + j) % 2 == 1  # every width and every mask is met with scales of heads and of blocks
        q, k = torch.zeros(1, 4096, 2, head_dim), torch.zeros(1, 4096 + shift, 2, head_dim)
        scales = [torch.ones(1, 2, -(-x.shape[1] // BLOCK)) if by_block else torch.ones(1, 2) for x in (q, k, k)]
        q, k, v = quantized_like(q, False), quantized_like(k, False), quantized_like(k, True)
        blocks = tuple(x.shape[2] if by_block else 0 for x in scales[:2])
        launch, *_ = forward._plan(q.device, q.shape, k.shape, blocks, causal, 1.0, torch.bfloat16)
        launch.kernel = WarmUp(launch.kernel)
        forward.launch_forward(q, k, v, *scales, causal, 1.0, torch.bfloat16)
        kernel = launch.compiled
        sass = listing(kernel.asm["cubin"], "nvdisasm")
        report(kernel, head_dim=head_dim, causal=causal, shift=shift, by_block=by_block, spilled=spilled_in_steps(sass),
               shuffled=sass.count("PRMT"))


if __name__ == "__main__":
    main()
