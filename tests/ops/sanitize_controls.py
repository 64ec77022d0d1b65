"""What the sanitizers say of tiny Gluon kernels that are right by construction, and of the same kernels with a race built in:

    compute-sanitizer --tool racecheck --num-cuda-barriers 128 python tests/ops/sanitize_controls.py word right
    TRITON_INSTRUMENTATION_MODE=consan python tests/ops/sanitize_controls.py tile early_read

start: a partition that uses no shared memory; what is said of it is Triton's own. word: one warp tells the others a number, as the loading
warp names tiles. tile: it loads by TMA, they read by loads; product: they read by matrix instructions. early_read: they wait behind their
read; early_release: they give the place back before their read, or while it is in flight. Both keep all counts, so that nothing hangs.

racecheck of compute-sanitizer 2026.4 sees no TMA and no matrix instruction: of tile and product it reports nothing. It reports every word,
also the right one: 32 lanes store it, the first one arrives, and ptxas leaves out the warp's barrier between the two (what it names as the
writer is the last lane). 2025.3 also reports the word by which Triton starts partitions. ConSan of Triton 3.6 passes what is right and
names the race in all that is not; that a matrix instruction's operand is written again it sees only while that is in flight, and no arrival
in mbarrier.expect.
"""

import os
import sys

import torch
from sanitize import watch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnzoo_kernels._gluon.hopper import async_load, barriers, invalidate, mbarrier, ring, warpgroup_mma, warpgroup_mma_wait

STEPS = 16
ROWS = gl.constexpr(64)
SLOTS = gl.constexpr(2)
KINDS = ("start", "word", "tile", "product")
MODES = ("right", "early_read", "early_release")


@gluon.jit
def _mark(out, IS: gl.constexpr):
    if IS:
        gl.store(out + gl.program_id(0), 1.0)


@gluon.jit
def _write(desc, tiles, words, full, empty, steps, KIND: gl.constexpr):
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for step in range(steps):
        slot, phase = ring(step, SLOTS)
        mbarrier.wait(empty.index(slot), phase ^ 1)
        if KIND == "word":
            words.index(slot).store(gl.full([1], step, gl.int32, lane))
            mbarrier.arrive(full.index(slot), count=1)
        else:
            mbarrier.expect(full.index(slot), desc.block_type.nbytes)
            async_load(desc, [step * ROWS, 0], full.index(slot), tiles.index(slot))


@gluon.jit
def _read(out, tiles, words, full, empty, steps, KIND: gl.constexpr, MODE: gl.constexpr):
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    total = gl.zeros([ROWS, ROWS], gl.float32, product if KIND == "product" else blocked)
    for step in range(steps):
        slot, phase = ring(step, SLOTS)
        tile = tiles.index(slot)
        if MODE != "early_read":
            mbarrier.wait(full.index(slot), phase)
        if KIND == "product":
            pending = warpgroup_mma(tile, tile, total, is_async=True)
        if MODE == "early_release":
            mbarrier.arrive(empty.index(slot), count=1)
            if KIND == "product":  # in flight until the place was written again
                mbarrier.wait(full.index(slot), phase ^ 1, pred=step + SLOTS < steps)
        if KIND == "product":
            total = warpgroup_mma_wait(0, deps=(pending,))
        elif KIND == "tile":
            total += tile.load(blocked).to(gl.float32)
        else:
            total += gl.max(words.index(slot).load(lane), 0)
        if MODE == "early_read":
            mbarrier.wait(full.index(slot), phase)
        if MODE != "early_release":
            mbarrier.arrive(empty.index(slot), count=1)
    gl.store(out + gl.program_id(0), gl.sum(gl.sum(total, 1), 0))


@gluon.jit
def control_kernel(desc, out, steps, KIND: gl.constexpr, MODE: gl.constexpr):
    words = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tiles = gl.allocate_shared_memory(desc.dtype, [SLOTS, ROWS, ROWS], desc.layout)
    full, empty = barriers(SLOTS, 1), barriers(SLOTS, 1)
    if KIND == "start":
        gl.warp_specialize([(_mark, (out, False)), (_mark, (out, True))], [1], [24])
    else:
        gl.warp_specialize([(_read, (out, tiles, words, full, empty, steps, KIND, MODE)),
                            (_write, (desc, tiles, words, full, empty, steps, KIND))], [1], [24])
    invalidate((full, empty))


def main(kind: str, mode: str) -> None:
    if kind not in KINDS or mode not in MODES:
        raise SystemExit(f"usage: sanitize_controls.py {'|'.join(KINDS)} {'|'.join(MODES)}")
    if "consan" in os.environ.get("TRITON_INSTRUMENTATION_MODE", ""):
        watch()
    layout = gl.NVMMASharedLayout.get_default_for([ROWS.value, ROWS.value], gl.bfloat16)
    x = torch.ones(STEPS * ROWS.value, ROWS.value, dtype=torch.bfloat16, device="cuda")
    desc = TensorDescriptor(x, list(x.shape), [ROWS.value, 1], [ROWS.value, ROWS.value], layout)
    out = torch.zeros(4, device="cuda")
    control_kernel[(len(out),)](desc, out, STEPS, kind, mode, num_warps=4)
    expected = {"start": 1, "word": sum(range(STEPS)) * ROWS.value**2, "tile": x.numel(), "product": x.numel() * ROWS.value}[kind]
    print(kind, mode, out.tolist(), "must be", expected)


if __name__ == "__main__":
    main(*sys.argv[1:])
