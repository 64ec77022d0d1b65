"""Compile Dual Chunk attention's Gluon kernels without a Hopper: with `90` as argument it prints a JSON line per tile.

A process of its own, as ahead_of_time.py, whose driver it takes.
"""

import itertools

import torch
from hopper_ahead_of_time import WarmUp, compile_only, report

from attnzoo_kernels._triton.call import layout
from attnzoo_kernels.dual_chunk.options import Options


def main() -> None:
    compile_only()
    from attnzoo_kernels.dual_chunk import hopper, hopper_backward

    hopper.multiprocessors = hopper_backward.multiprocessors = lambda device: 132
    for (head_dim, value_dim, seqlen, chunk), packed in itertools.product(
            ((64, 64, 512, 256), (64, 64, 4096, 3072), (64, 64, 4096, 2000), (64, 128, 4096, 3072), (128, 128, 4096, 3072),
             (128, 128, 4096, 2000)), (False, True)):
        launch, tile = forward(hopper, head_dim, value_dim, seqlen, chunk, packed)
        report(launch.compiled, head_dim=head_dim, value_dim=value_dim, chunk=chunk, packed=packed, consumers=tile.consumers)
    for width, packed, ordered in itertools.product((64, 128), (False, True), (False, True)):
        report(backward(hopper_backward, width, packed, ordered).compiled, head_dim=width, value_dim=width, packed=packed, ordered=ordered)


def forward(hopper, head_dim, value_dim, seqlen, chunk, packed):
    rows = (seqlen,) if packed else (1, seqlen)
    queries, keys = torch.zeros(3, seqlen, 2, head_dim, dtype=torch.bfloat16), torch.zeros(1, seqlen, 2, head_dim, dtype=torch.bfloat16)
    v, out = torch.zeros(2, *rows, 2, value_dim, dtype=torch.bfloat16)
    bounds = torch.zeros(2, dtype=torch.int32) if packed else None
    stats = torch.zeros(2, 2, seqlen)
    options = Options(sequences=1 if packed else None, softmax_scale=1.0, window_right=0, chunk=chunk, top=4 * chunk // 3,
                      far=4 * chunk // 3)
    plan = hopper._plan(v.device, v.dtype, *map(layout, (queries, keys, v, out)), stats.stride(0), options, None)
    plan.launch.kernel, plan.launch.others = WarmUp(plan.launch.kernel), tuple
    hopper.run(plan, queries, keys, v, out, stats[0], stats, bounds, bounds, torch.zeros(1, dtype=torch.int32))
    return plan.launch, plan.tile


def backward(hopper_backward, width, packed, ordered):
    queries, (keys, v) = torch.zeros(3, 4096, 2, width, dtype=torch.bfloat16), torch.zeros(2, 1, 4096, 2, width, dtype=torch.bfloat16)
    v = v[0] if packed else v
    tile = hopper_backward.pair_tile(width, ordered)
    launch = hopper_backward._mainloop(v.device, v.dtype, 1 if packed else None, ordered, 3072, 1023,
                                       *map(layout, (queries, keys, v, keys, v)), tile)
    launch.kernel = WarmUp(launch.kernel)
    ends = tuple(torch.zeros(2, 128, 2, width, dtype=torch.bfloat16) for _ in range(4)) if packed else (None,) * 4
    counter, turns, bounds = torch.zeros(3, 1, dtype=torch.int32)
    hopper_backward.run(launch, tile.rows, width, (queries, keys, v, v), torch.zeros(64, 1, 2 * tile.rows), ends, keys, v,
                        torch.zeros(1, 128, 1, 32), counter, turns, bounds if packed else None)
    return launch


if __name__ == "__main__":
    main()
