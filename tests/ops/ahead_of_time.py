"""Compile FlashAttention's kernels for a GPU that is not here: `python ahead_of_time.py 90` prints a JSON line per kernel.

A process of its own: it needs another driver than the interpreter, and none that is there.
"""

import gc
import json
import os
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

gc.disable()  # the search for garbage, of which compiling leaves little, takes a fifth of the time

ARCH = int(sys.argv[1])
WIDTHS = ((64, 64), (128, 128), (256, 256), (64, 128))
NARROW_VALUES = ((64, 32), (128, 16))  # in 16 bits on Hopper, where descriptors are
UPPER_HALVES = ("0x40000040", "-0x7fffffe0", "-0x3ffffff0")  # of a descriptor: rows of 128, 64 and 32 bytes


class Driver:
    """What the compiler asks a driver; the device number must differ by architecture, or the first one's kernel comes back."""

    def get_current_target(self):
        return GPUTarget("cuda", ARCH, 32)

    def get_current_device(self):
        return ARCH

    def get_current_stream(self, device=None):
        return 0


def listing(cubin: bytes, tool: str, *options: str) -> str:
    """What one of Triton's own tools prints about a binary."""
    path = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin", tool)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of stack: what was spilled)."""
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", listing(cubin, "cuobjdump", "--dump-resource-usage")).groups()
    return int(registers), int(stack)


def loads(ptx: str) -> dict[str, int]:
    """How many loads read one number of 16 bits (`narrow`), and how many several numbers at once (`wide`). Without a wide one the compiler
    does not know how rows are aligned: a stride is 1, or is not specialised."""
    return {"narrow": len(re.findall(r"ld\.global[.\w]*\.b16", ptx)),
            "wide": len(re.findall(r"ld\.global[.\w]*\.v[24]|cp\.async", ptx))}


def loops_with(instruction: str, lines: list[str]) -> list[tuple[int, int]]:
    """Where in a disassembly the loops that hold an instruction begin and end."""
    labels = {match[1]: n for n, line in enumerate(lines) if (match := re.match(r"(\.L_x?_?\w+):", line.strip()))}
    ends = ((labels.get(match[1], n), n) for n, line in enumerate(lines) if (match := re.search(r"BRA\b.*?(\.L_x?_?\w+)", line)))
    return [(begin, end) for begin, end in ends if begin < end and any(instruction in line for line in lines[begin:end])]


def wgmma_faults(kernel) -> dict[str, bool]:
    """What ptxas 12.8 was seen to do wrong in loops of Hopper's matrix instructions; a kernel without them is not disassembled."""
    lines = listing(kernel.asm["cubin"], "nvdisasm", "-c").splitlines() if "wgmma" in kernel.asm["ptx"] else []
    return {"clash": operands_clash(lines), "stale": stale_descriptor(lines)}


def operands_clash(lines: list[str]) -> bool:
    """Whether two products of one loop have their first operands in the same registers on Hopper: ptxas 12.8 was seen to do that to queries
    that stay in registers and to weights, which then overwrite them.
    """
    loops = loops_with("HGMMA", lines)
    for begin, end in loops:
        if any((begin, end) != (b, e) and begin <= b and e <= end for b, e in loops):
            continue
        products = [set()]
        for line in lines[begin:end]:
            if "WARPGROUP" in line:
                products.append(set())
            elif match := re.search(r"HGMMA\S*\s+R\d+, R(\d+)", line):
                products[-1] |= set(range(int(match[1]), int(match[1]) + 4))
        if any(a & b for n, a in enumerate(products) for b in products[:n]):
            return True
    return False


def stale_descriptor(lines: list[str]) -> bool:
    """Whether a descriptor's upper half is added to a uniform register that was not cleared before: ptxas 12.8 was seen to do that where
    one address is read with two swizzles, and the products then read somewhere else.
    """
    cleared = {}
    for line in lines:
        match = re.search(r"\b(U[A-Z0-9.]+) (UR\d+), (.*?) ;", line)
        if not match:
            continue
        name, to, operands = match[1], match[2], match[3].split(", ")
        if name.startswith("UIADD3.X") and any(half in operands for half in UPPER_HALVES):
            if not all(cleared.get(operand, False) for operand in operands if re.fullmatch(r"UR\d+", operand)):
                return True
        cleared[to] = name.startswith("UMOV") and operands == ["URZ"]
        if ".64" in name or "WIDE" in name:
            cleared[f"UR{int(to[2:]) + 1}"] = False
    return False


def pairs_used_twice(ptx: str) -> list[str]:
    """Pairs of 8-bit floats that are joined to a word and also used alone, which ptxas 12.8 gets wrong: COMPILER_FAULTS.md, fault 20."""
    pairs = re.findall(r"cvt\.rn\.satfinite\.e\dm\dx2\.f\d+(?:x2)?\s+(%rs\d+),", ptx)
    uses = {pair: [line for line in ptx.splitlines() if re.search(rf"{pair}\b", line) and "cvt.rn.satfinite" not in line] for pair in pairs}
    return [pair for pair in pairs if len({"mov.b32" in line for line in uses[pair]}) > 1]


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    compiled = []
    run = JITFunction.run

    def warm_up(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.fn.__name__, options, kernel))
        return kernel

    JITFunction.run = warm_up
    from attnzoo_kernels.flash import backward, forward, options

    for module in (forward, backward, options):
        module.architecture = lambda device: ARCH
    for dtype in (torch.bfloat16, torch.float32)[: 1 + (ARCH == 80)]:  # float32 has one tile table for all
        for head_dim, value_dim in WIDTHS + NARROW_VALUES * (ARCH == 90 and dtype == torch.bfloat16):
            for right in (-1, 0)[ARCH == 80 :]:  # elsewhere than on Hopper tiles are those of every mask
                q, k = torch.zeros(2, 1, 256, 2, head_dim, dtype=dtype)
                v, dout, out = torch.zeros(3, 1, 256, 2, value_dim, dtype=dtype)
                choice = options.Options(sequences=None, softmax_scale=head_dim**-0.5, window_right=right)
                nothing = (None,) * 4
                _, _, stats = forward.launch_forward(q, k, v, *nothing, None, choice)
                backward.launch_backward(dout, None, q, k, v, out, stats, *nothing, False, choice)
    for name, constants, kernel in compiled:
        registers, stack = resources(kernel.asm["cubin"])
        shown = {key: constants[key] for key in ("HEAD_DIM", "VALUE_DIM", "HAS_RIGHT", "PRECISION", "BLOCK_M", "BLOCK_N", "TMA")}
        print(json.dumps({"kernel": name, "registers": registers, "stack": stack, "shared": kernel.metadata.shared,
                          **wgmma_faults(kernel), **shown}))


if __name__ == "__main__":
    main()
