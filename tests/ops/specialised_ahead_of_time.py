"""Compile the plain forward with specialised warps for Hopper without one: `python specialised_ahead_of_time.py 90` prints a JSON line per
kernel. A process of its own, as ahead_of_time.py, whose driver it takes.
"""

import json
import re
from collections import Counter

import torch
import triton
from ahead_of_time import ARCH, Driver, operands_clash, resources


def unused_barriers(ptx: str) -> list[int]:
    """Offsets in shared memory where more than one barrier is made: nobody waits for those, and other things lie there, too."""
    offsets = dict.fromkeys(re.findall(r"mov\.b32\s+(%r\d+), global_smem;", ptx), 0)
    for made, base, offset in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", ptx):
        if base in offsets:
            offsets[made] = offsets[base] + int(offset)
    made = Counter(offsets[register] for register in re.findall(r"mbarrier\.init\S+ \[(%r\d+)\]", ptx))
    return sorted(offset for offset, times in made.items() if times > 1)


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    from attnzoo_kernels.flash import forward, options

    for module in (forward, options):
        module.architecture = lambda device: ARCH
    for head_dim, value_dim, right, softcap in ((128, 96, -1, 0.0), (128, 128, -1, 0.0), (128, 96, 0, 0.0), (128, 128, 0, 0.0),
                                                (64, 40, 0, 0.0), (64, 64, 0, 0.0), (128, 128, -1, 30.0), (128, 128, 0, 30.0)):
        for sinks in (None, torch.zeros(4)):
            choice = options.Options(None, None, head_dim**-0.5, -1, right, softcap, 0.0)
            shapes = ((4, head_dim), (2, head_dim), (2, value_dim))
            q, k, v = (torch.zeros(1, 256, heads, dim, dtype=torch.bfloat16) for heads, dim in shapes)
            layouts = (options.layout(x) for x in (q, k, v))
            launch = forward._plan(q.device, q.dtype, True, sinks is not None, *layouts, choice)
            kernel = launch.compile(q, k, v, q, torch.zeros(4, 256), torch.zeros(2, 4, 256), sinks)
            ptx = kernel.asm["ptx"]
            invalidated = [int(offset or 0) for offset in re.findall(r"mbarrier\.inval\S+ \[global_smem\+?(\d*)\]", ptx)]
            print(json.dumps({"head_dim": head_dim, "value_dim": value_dim, "sinks": sinks is not None, "causal": right == 0,
                              "softcap": softcap, "shared": kernel.metadata.shared,
                              "specialised": "ttg.warp_specialize(" in kernel.asm["ttgir"], "stack": resources(kernel.asm["cubin"])[1],
                              "clash": operands_clash(kernel.asm["cubin"]), "unused_barriers": unused_barriers(ptx),
                              "invalidated": invalidated}))


if __name__ == "__main__":
    main()
