"""Compile the plain dK/dV with specialised warps for Hopper without one: `python backward_specialised_ahead_of_time.py 90` prints a JSON
line per kernel. A process of its own, as ahead_of_time.py, whose driver it takes.
"""

import json
import re

import torch
import triton
from ahead_of_time import ARCH, Driver, listing, operands_clash
from specialised_ahead_of_time import unused_barriers


def spills(cubin: bytes) -> int:
    """Stores to the stack in innermost loops with products; to read a number or two from there costs them nothing.

    A loop ends with a branch on a condition; branches without one come back from where a wait takes longer.
    """
    lines = listing(cubin, "nvdisasm").splitlines()
    labels = {match[1]: n for n, line in enumerate(lines) if (match := re.match(r"(\.L_x?_?\w+):", line.strip()))}
    ends = ((labels.get(match[1], n), n) for n, line in enumerate(lines) if (match := re.search(r"@\S+ BRA\b.*?(\.L_x?_?\w+)", line)))
    loops = [(begin, end) for begin, end in ends if begin < end and any("HGMMA" in line for line in lines[begin:end])]
    innermost = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return sum(bool(re.search(r"\bSTL", line)) for begin, end in innermost for line in lines[begin:end])


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    from attnzoo_kernels.flash import backward, options

    for module in (backward, options):
        module.architecture = lambda device: ARCH
    for dtype in (torch.bfloat16, torch.float16):
        for kv_heads, right in ((2, -1), (4, -1), (4, 0)):
            q, k = torch.zeros(1, 8192, 4, 128, dtype=dtype), torch.zeros(1, 8192, kv_heads, 128, dtype=dtype)
            row_stats, of_queries, of_keys = torch.zeros(2, 32768), options.layout(q), options.layout(k)
            choice = options.Options(None, None, 128**-0.5, -1, right, 0.0, 0.0)
            launch = backward._dkdv_plan(q.device, dtype, True, of_queries, of_keys, of_keys, of_queries, of_keys, of_keys, 32768, choice)
            kernel = launch.compile(q, k, k, q, row_stats, k, k)
            ptx, cubin = kernel.asm["ptx"], kernel.asm["cubin"]
            invalidated = [int(offset or 0) for offset in re.findall(r"mbarrier\.inval\S+ \[global_smem\+?(\d*)\]", ptx)]
            print(json.dumps({"dtype": str(dtype), "kv_heads": kv_heads, "causal": right == 0, "shared": kernel.metadata.shared,
                              "spills": spills(cubin), "specialised": "ttg.warp_specialize(" in kernel.asm["ttgir"],
                              "clash": operands_clash(cubin), "unused_barriers": unused_barriers(ptx), "invalidated": invalidated}))


if __name__ == "__main__":
    main()
