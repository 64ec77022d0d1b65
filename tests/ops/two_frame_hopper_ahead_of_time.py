"""Compile the Gluon kernels of attention in two frames without a Hopper: with `90` as argument it prints a JSON line per kernel.

A process of its own, as ahead_of_time.py, whose driver it takes.
"""

from dataclasses import replace

import torch
from hopper_ahead_of_time import WarmUp, compile_only, compiled_plans, report

from attnzoo_kernels.checks import UNLIMITED
from attnzoo_kernels.two_frame.options import Options


def main() -> None:
    compile_only()
    from attnzoo_kernels._gluon import forward_launch
    from attnzoo_kernels.flash import hopper_backward as flash
    from attnzoo_kernels.two_frame import hopper, hopper_backward

    forward_launch.multiprocessors = lambda device: 132
    hopper.tile_counter = lambda device: torch.zeros(1, dtype=torch.int32)
    forward_plan, launches, plans = hopper._plan, [], compiled_plans(flash)

    def plan_forward(*arguments):
        plan = forward_plan(*arguments)
        plan.launch.kernel, plan.launch.others = WarmUp(plan.launch.kernel), tuple
        launches.append(plan.launch)
        return plan

    hopper._plan = plan_forward
    for head_dim, value_dim, packed, keys in ((64, 64, False, 4096), (128, 128, True, 4000)):

        def tensor(rows, heads, width, packed=packed):
            return torch.zeros(*(() if packed else (1,)), rows, heads, width, dtype=torch.bfloat16)

        q, k, v, out = (tensor(*of) for of in ((4096, 4, head_dim), (keys, 4, head_dim), (keys, 2, value_dim), (4096, 2, value_dim)))
        of_q = torch.zeros(2, dtype=torch.int32) if packed else None
        of_k = of_q if keys == 4096 or of_q is None else of_q.clone()
        options = Options.of(of_q, 0.125, 1024, UNLIMITED)
        launches.clear()
        plans.clear()
        for far in (UNLIMITED, 4):  # in two loops, and in one
            _, _, stats = hopper.launch_forward(q, k, v, of_q, of_k, replace(options, far_keys=far))
        hopper_backward.launch_backward(out, None, q, k, v, out, stats, of_q, of_k, options, keys == 4000)
        for launch in (*launches, *(plan.mainloop for plan in plans)):
            report(launch.compiled, head_dim=head_dim, value_dim=value_dim, packed=packed, keys=keys, left=launch.constants.get("HAS_LEFT"),
                   ordered=launch.constants.get("ORDERED"),
                   in_two_loops=launch.constants.get("MAINLOOP") is hopper.mainloop_in_two_loops)


if __name__ == "__main__":
    main()
