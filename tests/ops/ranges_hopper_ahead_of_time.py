"""Compile the Gluon kernels over key ranges without a Hopper GPU: `python ranges_hopper_ahead_of_time.py 90` prints a JSON line each.

A process of its own, as ahead_of_time.py.
"""

import torch
from hopper_ahead_of_time import WarmUp, compile_only, compiled_plans, report


def main() -> None:
    compile_only()
    from attnzoo_kernels._gluon import forward_launch
    from attnzoo_kernels._triton.call import layout
    from attnzoo_kernels.flash import hopper_backward, hopper_ranges, hopper_ranges_backward
    from attnzoo_kernels.flash.options import Options

    hopper_ranges.tile_counter = lambda device: torch.zeros(1, dtype=torch.int32)
    forward_launch.multiprocessors = lambda device: 132
    table = torch.zeros(1, 8, dtype=torch.int32)
    for head_dim, value_dim, left, sinks in ((64, 64, 64, None), (64, 64, -1, None), (128, 128, -1, torch.zeros(2))):
        q, k = torch.zeros(2, 512, 2, head_dim, dtype=torch.bfloat16)
        v = torch.zeros(512, 2, value_dim, dtype=torch.bfloat16)
        options = Options(sequences=1, softmax_scale=head_dim**-0.5, window_left=left, ranges=True)
        launch, *_ = hopper_ranges._plan(q.device, q.dtype, sinks is not None, layout(q), layout(k), layout(v), options, None)
        launch.kernel = WarmUp(launch.kernel)
        hopper_ranges.launch_forward(q, k, v, table, sinks, options)
        report(launch.compiled, head_dim=head_dim, value_dim=value_dim, window=left, sinks=sinks is not None)
    plans = compiled_plans(hopper_backward)
    hopper_ranges_backward.multiprocessors = lambda device: 132
    hopper_ranges_backward.launch_order = lambda *_: torch.zeros(8, 8, dtype=torch.int32)
    for head_dim, kv_heads in ((64, 1), (128, 1), (128, 2)):
        q, out, grad_out = torch.zeros(3, 2048, 2, head_dim, dtype=torch.bfloat16)
        k, v = torch.zeros(2, 2048, kv_heads, head_dim, dtype=torch.bfloat16)
        options = Options(sequences=1, softmax_scale=head_dim**-0.5, ranges=True)
        hopper_ranges_backward.launch_backward(grad_out, None, q, k, v, out, torch.zeros(2, 2, 2048), table, options)
        report(plans[-1].mainloop.compiled, head_dim=head_dim, kv_heads=kv_heads)


if __name__ == "__main__":
    main()
