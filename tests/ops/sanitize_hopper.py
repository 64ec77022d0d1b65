"""The Gluon kernels of flash on small shapes, for the compute sanitizer, which needs no reference:

    python tests/ops/sanitize_hopper.py          # compiles
    compute-sanitizer --tool racecheck python tests/ops/sanitize_hopper.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/ops/sanitize_hopper.py
"""

import torch

from attnzoo_kernels import flash_attention
from attnzoo_kernels.flash.cases import Case
from attnzoo_kernels.taken import paths_taken

CASES = [Case(seqlen_q=200, seqlen_k=333, heads=2, kv_heads=1, head_dim=64, causal=True), Case(seqlen_q=300, heads=2, head_dim=128),
         Case(seqlen_q=300, heads=2, head_dim=128, window_size=(100, 0)), Case(lengths_q=(100, 0, 200), heads=2, head_dim=64, causal=True),
         Case(lengths_q=(100, 0, 200), heads=2, head_dim=128, causal=True),
         Case(seqlen_q=2100, heads=2, kv_heads=1, head_dim=64, causal=True),  # dQ a step late
         Case(seqlen_q=4160, seqlen_k=4200, heads=5, head_dim=64)]  # and the last tiles in shares


def main() -> None:
    for case in CASES:
        x = case.inputs("cuda")
        q, k, v = (y.detach().requires_grad_() for y in x[:3])
        for deterministic in (False, True):
            out = flash_attention(q, k, v, impl="gluon", deterministic=deterministic, **x.options)
            torch.autograd.grad(out, (q, k, v), x.dout)
    torch.cuda.synchronize()
    print(len(CASES), "cases,", paths_taken())


if __name__ == "__main__":
    main()
