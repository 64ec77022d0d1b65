"""Compile the Gluon forward for Hopper without one: `python hopper_ahead_of_time.py 90` prints a JSON line per tile and mask.

A process of its own, as ahead_of_time.py, whose driver it takes.
"""

import contextlib
import io
import itertools
import json
import re

import torch
import triton
from ahead_of_time import Driver, listing, resources
from machine_code import unset_descriptors
from triton.backends.nvidia.compiler import CUDABackend

BOUNDS = ((-1, -1), (-1, 0), (-1, 3), (64, 0))  # full, causal, causal with the diagonal off the steps, window


def shared_with_barriers(ptx: str) -> list[str]:
    """Places of barriers that other loads and stores use too: what a dead barrier's place holds is lost when the GPU changes processes."""
    places = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    barriers = {places.get(register, "0") for register in re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", ptx)}
    assert barriers or "mbarrier.init" not in ptx
    accesses = re.findall(r"(?:st|ld)\.shared[^\[;]*\[\s*(?:global_smem)?\+?(%r\d+|\d*)", ptx)
    used = {places.get(access, "") if access.startswith("%") else access or "0" for access in accesses}
    return [f"{place} holds a barrier and something else" for place in sorted(barriers & used)]


def compile_only() -> None:
    """Takes the driver that compiles for a GPU that is not here; what the assembler says of a kernel is kept in its metadata."""
    triton.runtime.driver.set_active(Driver())
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True  # a kernel from the cache has no log
    assemble = CUDABackend.make_cubin

    def and_keep_the_log(self, src, metadata, *options):
        with contextlib.redirect_stdout(io.StringIO()) as log:
            cubin = assemble(self, src, metadata, *options)
        metadata["ptxas_log"] = log.getvalue()
        return cubin

    CUDABackend.make_cubin = and_keep_the_log


def report(kernel, **case) -> None:
    """Prints a JSON line of a compiled kernel. Its complaints are the matrix instructions that the assembler had to serialise, the barriers
    whose place is not theirs alone, and the descriptors that are made of registers which were not set for them.
    """
    registers, stack = resources(kernel.asm["cubin"])
    assert "Used" in kernel.metadata.ptxas_log
    serialised = [line for line in kernel.metadata.ptxas_log.splitlines() if re.search("C751[02345]", line)]
    unset = unset_descriptors(listing(kernel.asm["cubin"], "nvdisasm", "-c").splitlines())
    print(json.dumps({"kernel": kernel.metadata.name, **case, "registers": registers, "stack": stack, "shared": kernel.metadata.shared,
                      "complaints": serialised + shared_with_barriers(kernel.asm["ptx"]) + unset}), flush=True)


def main() -> None:
    compile_only()
    from attnzoo_kernels.flash import hopper
    from attnzoo_kernels.flash.options import Options

    plans = compiled_plans(hopper)
    shapes = ((64, 64, 512), (64, 64, 4096), (128, 128, 4096), (64, 128, 4096))
    calls = [(*shape, *bounds, (i + j) % 2 == 0, None)  # every shape and every mask is met packed and dense
             for (i, shape), (j, bounds) in itertools.product(enumerate(shapes), enumerate(BOUNDS))]
    calls += [(192, 128, seqlen, -1, right, packed, None) for seqlen, right, packed in (
        (512, -1, True), (4096, 0, False), (4096, 3, True), (4096, -1, False))]
    calls += [(64, 64, 4096, 127, 0, True, torch.zeros(2)), (128, 128, 4096, -1, 0, False, torch.zeros(2)),
              (128, 128, 4096, -1, -1, True, torch.zeros(2)), (64, 64, 512, -1, 0, False, torch.zeros(2)),
              (64, 64, 4096, -1, 0, False, torch.zeros(2))]
    for head_dim, value_dim, seqlen, left, right, packed, sinks in calls:
        rows = (seqlen,) if packed else (1, seqlen)
        q, k = torch.zeros(2, *rows, 2, head_dim, dtype=torch.bfloat16)
        v = torch.zeros(*rows, 2, value_dim, dtype=torch.bfloat16)
        bounds = torch.zeros(2, dtype=torch.int32) if packed else None
        options = Options(sequences=1 if packed else None, softmax_scale=head_dim**-0.5, window_left=left, window_right=right)
        residual = None if sinks is None else torch.zeros(*rows, 2, value_dim, dtype=torch.bfloat16)
        hopper.launch_forward(q, k, v, bounds, bounds, sinks, options, residual=residual)
        report(plans[-1].launch.compiled, head_dim=head_dim, value_dim=value_dim, packed=packed, window=(left, right),
               consumers=plans[-1].tile.consumers, sinks=sinks is not None)


class WarmUp:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **options: self.kernel.warmup(*args, grid=grid, **options)


def launches_of(plan) -> list:
    if hasattr(plan, "launch"):  # of a forward
        plan.launch.others = tuple
        return [plan.launch]
    tails = plan.tails if isinstance(plan.tails, tuple) else (plan.tails,)
    return [launch for launch in (plan.preprocess, *tails, plan.mainloop, plan.postprocess) if launch is not None]


def compiled_plans(planner) -> list:
    """`planner`, flash.hopper, hopper_backward or hopper_wide_backward, compiles what it would launch; returns its plans, as they are
    made."""
    planner.multiprocessors, planner.tile_counter = lambda device: 132, lambda device: torch.zeros(1, dtype=torch.int32)
    plans, plan_of = [], planner._plan

    def plan(*arguments):
        plan_of.cache_clear()  # a plan that was compiled would be launched
        plans.append(plan_of(*arguments))
        for launch in launches_of(plans[-1]):
            launch.kernel = WarmUp(launch.kernel)
        return plans[-1]

    planner._plan = plan
    return plans


if __name__ == "__main__":
    main()
