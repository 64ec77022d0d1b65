"""Every Gluon kernel on small shapes, for the tools that watch memory and order (NVIDIA's compute-sanitizer, Triton's ConSan):

    python tests/ops/sanitize.py flash            # or another operator of CASES; numbers behind it choose cases; compiles
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/ops/sanitize.py flash
    compute-sanitizer --tool racecheck --num-cuda-barriers 128 python tests/ops/sanitize.py flash
    TRITON_INSTRUMENTATION_MODE=consan python tests/ops/sanitize.py flash 8     # compiles for minutes, a backward for ten

compute-sanitizer from 2026.4 on (PyPI's nvidia-cuda-sanitizer-api): earlier ones know less of barriers in shared memory. Few programs, so
that each takes several tiles and every ring wraps. sanitize_controls.py shows what the tools say of kernels that are right and of kernels
that are not.
"""

import os
import re
import sys
import time

import torch
import triton
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental import gluon

import attnzoo_kernels
from attnzoo_kernels._gluon import hopper
from attnzoo_kernels._gluon.hopper import mbarrier
from attnzoo_kernels._triton import launch
from attnzoo_kernels.block_sparse.cases import Case as Sparse
from attnzoo_kernels.differential.cases import Case as Differential
from attnzoo_kernels.distance_bias.cases import Case as Distances
from attnzoo_kernels.dual_chunk.cases import Case as Chunks
from attnzoo_kernels.flash.cases import Case
from attnzoo_kernels.sigmoid.cases import Case as Sigmoid
from attnzoo_kernels.tree.cases import drawn, rollouts

PROGRAMS = 3
PACKED = (100, 0, 200)
CASES = {
    "flash": [
        Case(seqlen_q=200, seqlen_k=333, heads=2, kv_heads=1, causal=True),  # the diagonal off the steps
        Case(seqlen_q=600),  # three consumers
        Case(seqlen_q=1100, kv_heads=1, causal=True),
        Case(seqlen_q=300, window_size=(100, 0)),  # steps of 64 queries
        Case(seqlen_q=1030, seqlen_k=200, kv_heads=1),  # dQ a step late
        Case(seqlen_q=4500, seqlen_k=400, heads=1),
        Case(lengths_q=PACKED, causal=True),
        Case(lengths_q=(2100,), kv_heads=1, causal=True),
        Case(seqlen_q=300, head_dim=128),
        Case(seqlen_q=300, kv_heads=1, head_dim=128, causal=True),
        Case(seqlen_q=550, head_dim=128, causal=True),
        Case(seqlen_q=300, head_dim=128, window_size=(100, 0)),
        Case(lengths_q=PACKED, head_dim=128, causal=True),
        Case(seqlen_q=300, head_dim=64, value_dim=128),
        Case(seqlen_q=550, kv_heads=1, head_dim=192, value_dim=128, causal=True),
        Case(lengths_q=PACKED, head_dim=192, value_dim=128),
    ],
    "flash_fp8": [Case(seqlen_q=m, seqlen_k=n, kv_heads=1, head_dim=d, causal=causal)
                  for d in (64, 128) for m, n, causal in ((400, 300, False), (600, 600, True), (200, 333, True))],
    "differential": [Differential(seqlen_q=m, seqlen_k=n, lengths_q=lengths, kv_heads=1, head_dim=d, value_dim=dv, causal=True,
                                  shared_keys=shared)
                     for d, dv, shared in ((64, 128, False), (64, 64, True), (128, 256, False))
                     for m, n, lengths in ((200, 333, None), (1, None, PACKED))],
    "block_sparse": [Sparse(seqlen_q=333, kv_heads=1, head_dim=d, block_q=block, causal=True, masks="head")
                     for d in (64, 128) for block in (64, 128)],
    "dual_chunk": [Chunks(seqlen_q=600, lengths_q=lengths, kv_heads=1, head_dim=d, chunk_size=chunk + 32, local_size=32)
                   for d in (64, 128) for chunk, lengths in ((128, None), (128, (100, 0, 400)), (218, (100, 0, 400)))],
    "sigmoid": [Sigmoid(seqlen_q=333, lengths_q=lengths, kv_heads=1, head_dim=d, causal=True)
                for d in (64, 128) for lengths in (None, PACKED)],
    "distance_bias": [Distances(seqlen_q=333, lengths_q=lengths, kv_heads=1, head_dim=d, causal=True, distances=distances)
                      for d in (64, 128) for lengths in (None, PACKED) for distances in (40, 333)],
    "tree": [rollouts(200, 90, 3, kv_heads=1, head_dim=d) for d in (64, 128)] + [drawn(20, 40, 0, head_dim=d) for d in (64, 128)],
}


def flash_fp8(case: Case) -> None:
    q, k, v = case.inputs("cuda")[:3]
    for block in (None, attnzoo_kernels.flash_fp8.BLOCK):
        quantized = attnzoo_kernels.quantize_fp8(q, k, v, block=block)
        attnzoo_kernels.flash_attention_fp8(**quantized._asdict(), causal=case.causal, impl="gluon")


def gradients(operator: str, case: Case, deterministic: bool) -> None:
    inputs = case.inputs("cuda")._asdict()
    dout, options = inputs.pop("dout"), inputs.pop("options")
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    attend = getattr(attnzoo_kernels, f"{operator}_attention")
    out = attend(**inputs | leaves, impl="gluon", deterministic=deterministic, **options)
    torch.autograd.grad(out, list(leaves.values()), dout)


@gluon.jit
def _arrive(bar):
    mbarrier.arrive(bar, count=1)


def watch() -> None:
    """For ConSan. Its bookkeeping needs more registers than a warp that only loads gives itself: all keep what a kernel starts with. And it
    does not see an arrival in what `release` is."""
    make_ptx = CUDABackend.make_ptx
    CUDABackend.make_ptx = lambda *args: re.sub(r"setmaxnreg\.[^;]*;", "", make_ptx(*args))
    triton.set_allocator(lambda size, alignment, stream: torch.zeros(size, dtype=torch.int8, device="cuda"))
    hopper.release = _arrive


def main(operator: str, *chosen: str) -> None:
    kernels = set()
    knobs.runtime.launch_enter_hook.add(lambda metadata: kernels.add(metadata.get()["name"]))
    # before the operators' modules, which are loaded at first use, take from there what is put into other modules here
    launch.multiprocessors = lambda device: PROGRAMS
    if "consan" in os.environ.get("TRITON_INSTRUMENTATION_MODE", ""):
        watch()
    for n, case in enumerate(CASES[operator]):
        if chosen and str(n) not in chosen:
            continue
        start = time.perf_counter()
        if operator == "flash_fp8":
            flash_fp8(case)
        else:
            for deterministic in (False, True) if operator in ("flash", "dual_chunk", "sigmoid") else (False,):
                gradients(operator, case, deterministic)
        torch.cuda.synchronize()
        print(f"{n}: {case}, {time.perf_counter() - start:.1f} s", flush=True)
    print("ran", *sorted(kernels))


if __name__ == "__main__":
    main(*sys.argv[1:])
