"""Compile differential attention's Gluon kernels for Hopper without one: `python differential_ahead_of_time.py 90` prints a JSON line per
kernel, width and mask."""

import torch
import triton
from hopper_ahead_of_time import WarmUp, compile_only, report

WIDTHS = ((64, 128, False), (64, 64, True), (64, 128, True), (128, 256, False), (128, 128, True))


def main() -> None:
    compile_only()
    triton.compiler.CompiledKernel.__getitem__ = lambda self, grid: lambda *arguments: None  # a second launch of what is compiled
    from attnzoo_kernels._triton.launch import Launch
    from attnzoo_kernels.differential import hopper, hopper_backward, hopper_backward_by_branch
    from attnzoo_kernels.differential.options import Options

    for module in (hopper, hopper_backward, hopper_backward_by_branch):
        module.multiprocessors = lambda device: 132
    hopper.tile_counter = lambda device: torch.zeros(1, dtype=torch.int32)
    launches = []
    launch = Launch.__call__

    def warm_up(self, *tensors):
        if not isinstance(self.kernel, WarmUp):
            self.kernel = WarmUp(self.kernel)
            launches.append(self)
        launch(self, *tensors)

    Launch.__call__ = warm_up
    for head_dim, value_dim, shared in WIDTHS:
        for packed, (left, right) in ((False, (-1, 0)), (True, (64, 0))):
            rows, stats = ((256,), (2, 256)) if packed else ((1, 256), (1, 2, 256))
            q1, q2, k1, k2 = torch.zeros(4, *rows, 2, head_dim, dtype=torch.bfloat16)
            v, out, grad_out = torch.zeros(3, *rows, 2, value_dim, dtype=torch.bfloat16)
            k2 = None if shared else k2
            lam, bounds = torch.zeros(()), torch.zeros(2, dtype=torch.int32) if packed else None
            options = Options.of(bounds, head_dim**-0.5, left, right)
            launches.clear()
            hopper.launch_forward(q1, q2, k1, k2, v, lam, bounds, bounds, True, options)
            hopper_backward.launch_backward(grad_out, q1, q2, k1, k2, v, lam, out, out, torch.zeros(4, *stats), bounds, bounds, True,
                                            options)
            for of_call in launches:
                report(of_call.compiled, head_dim=head_dim, value_dim=value_dim, packed=packed, window=(left, right))


if __name__ == "__main__":
    main()
