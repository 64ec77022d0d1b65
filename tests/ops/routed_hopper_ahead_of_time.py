"""Compile the Gluon kernels of chosen blocks for Hopper without one: `python routed_hopper_ahead_of_time.py 90` prints a JSON line each."""

import torch
import triton
from hopper_ahead_of_time import compile_only, report
from triton.runtime.jit import JITFunction

# head_dim, value_dim, block_size, heads, key heads, dtype
CASES = ((64, 64, 64, 4, 4, torch.float16), (128, 128, 64, 64, 4, torch.bfloat16), (128, 64, 64, 6, 2, torch.bfloat16),
         (64, 128, 128, 4, 1, torch.bfloat16), (128, 128, 128, 16, 4, torch.bfloat16))


def main() -> None:
    compile_only()
    triton.compiler.CompiledKernel.__getitem__ = lambda self, grid: lambda *arguments: None  # a second launch of what is compiled
    compiled, run = [], JITFunction.run

    def warm_up(self, *args, grid, warmup, **options):
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))
        return compiled[-1]

    JITFunction.run = warm_up
    from attnzoo_kernels.routed import hopper, hopper_backward

    for head_dim, value_dim, block_size, heads, kv_heads, dtype in CASES:
        q = torch.zeros(256, heads, head_dim + 8, dtype=dtype)[..., :head_dim]  # rows at multiples of 16 bytes, and no more
        grad_out, out = torch.zeros(2, 256, heads, value_dim, dtype=dtype)
        k, v = (torch.zeros(256, kv_heads, width, dtype=dtype) for width in (head_dim, value_dim))
        place, pair = torch.zeros(256 * kv_heads, 3, dtype=torch.int32), torch.zeros(256 * kv_heads * 3, dtype=torch.int32)
        chosen = torch.zeros(kv_heads * 5 + 1, dtype=torch.int32)
        indices = place, pair, chosen, chosen, heads // kv_heads, block_size, 0.1
        case = {"head_dim": head_dim, "value_dim": value_dim, "block_size": block_size, "heads": heads}
        hopper.launch_forward(q, k, v, *indices)
        report(compiled[-1], **case)
        if block_size == 64:
            start = len(compiled)
            hopper_backward.launch_backward(grad_out, None, q, k, v, out, torch.zeros(2, heads, 256), *indices, torch.zeros_like(k),
                                            torch.zeros_like(v))
            report(next(kernel for kernel in compiled[start:] if "hopper" in kernel.metadata.name), **case)


if __name__ == "__main__":
    main()
