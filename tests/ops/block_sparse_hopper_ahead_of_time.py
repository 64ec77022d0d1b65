"""Compile block-sparse attention's Gluon kernels without a Hopper: with `90` as argument it prints a JSON line per tile and mask.

A process of its own, as ahead_of_time.py, whose driver it takes.
"""

import torch
from hopper_ahead_of_time import WarmUp, compile_only, compiled_plans, report

# full, causal, causal with the diagonal off the tiles and grouped heads, window; more keys
MASKS = ((-1, -1, 0), (-1, 0, 0), (-1, 0, 3), (64, 0, 0))


def main() -> None:
    compile_only()
    from attnzoo_kernels._triton.call import layout
    from attnzoo_kernels.block_sparse import hopper, hopper_backward
    from attnzoo_kernels.block_sparse.lists import TileLists
    from attnzoo_kernels.block_sparse.options import Options
    from attnzoo_kernels.flash import hopper_backward as flash

    lists = TileLists(*torch.zeros(2, 8, dtype=torch.int32), None, torch.zeros(8, dtype=torch.int32))
    Options.lists = lambda *_, **__: lists
    hopper.multiprocessors = lambda device: 132
    hopper.tile_counter = lambda device: torch.zeros(1, dtype=torch.int32)
    plans = compiled_plans(flash)
    for head_dim, value_dim, *block in ((64, 64, 128, 128), (128, 128, 128, 128), (64, 128, 128, 128), (64, 64, 128, 64),
                                        (128, 128, 128, 64), (64, 64, 64, 64), (128, 128, 64, 64)):
        for left, right, more in MASKS:
            kv_heads = 1 if more else 2
            q, k = (torch.zeros(1, n, heads, head_dim, dtype=torch.bfloat16) for n, heads in ((256, 2), (256 + more, kv_heads)))
            v = torch.zeros(1, 256 + more, kv_heads, value_dim, dtype=torch.bfloat16)
            options = Options(mask_shape=(1, 1, 4, 4), block_q=block[0], block_k=block[1], sequences=None, softmax_scale=head_dim**-0.5,
                              window_left=left, window_right=right)
            launch = hopper._plan(q.device, q.dtype, layout(q), layout(k), layout(v), options, None)[0].launch
            launch.kernel = WarmUp(launch.kernel)
            hopper.launch_forward(q, k, v, None, options)
            case = {"head_dim": head_dim, "value_dim": value_dim, "block": block, "mask": (left, right, more)}
            report(launch.compiled, **case)
            if block == [128, 128]:
                out, grad_out = torch.zeros(2, 1, 256, 2, value_dim, dtype=torch.bfloat16)
                hopper_backward.launch_backward(grad_out, None, q, k, v, out, torch.zeros(2, 1, 2, 256), None, options)
                for launch in (plans[-1].preprocess, plans[-1].mainloop, plans[-1].postprocess):
                    report(launch.compiled, **case)


if __name__ == "__main__":
    main()
