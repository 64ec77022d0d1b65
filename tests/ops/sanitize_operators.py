"""The Gluon kernels of the other operators on small shapes, for the compute sanitizer, as sanitize_hopper.py those of flash:

    python tests/ops/sanitize_operators.py differential          # or block_sparse, or dual_chunk; compiles
    compute-sanitizer --tool racecheck python tests/ops/sanitize_operators.py differential
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/ops/sanitize_operators.py differential
"""

import sys

import torch

import attnzoo_kernels
from attnzoo_kernels.block_sparse.cases import Case as Sparse
from attnzoo_kernels.differential.cases import Case as Differential
from attnzoo_kernels.dual_chunk.cases import Case as Chunks
from attnzoo_kernels.taken import paths_taken

TYPE = torch.bfloat16
WIDTHS = ((64, 128, False), (64, 64, True), (128, 256, False))
CASES = {
    "differential": [Differential(seqlen_q=m, seqlen_k=n, lengths_q=lengths, heads=2, kv_heads=1, head_dim=d, value_dim=dv, causal=True,
                                  shared_keys=shared, dtype=TYPE)
                     for d, dv, shared in WIDTHS for m, n, lengths in ((200, 333, None), (1, None, (100, 0, 200)))],
    "block_sparse": [Sparse(seqlen_q=m, seqlen_k=n, heads=2, kv_heads=1, head_dim=d, block_q=block, causal=True, masks="head", dtype=TYPE)
                     for d in (64, 128) for block in (64, 128) for m, n in ((333, None), (200, 333))],
    "dual_chunk": [Chunks(seqlen_q=m, lengths_q=lengths, heads=2, kv_heads=1, head_dim=d, chunk_size=c, local_size=32, dtype=TYPE)
                   for d in (64, 128) for c in (160, 250) for m, lengths in ((600, None), (1, (100, 0, 400)))],
}


def main(operator: str) -> None:
    attend = getattr(attnzoo_kernels, f"{operator}_attention")
    for case in CASES[operator]:
        inputs = case.inputs("cuda")._asdict()
        dout, options = inputs.pop("dout"), inputs.pop("options")
        leaves = {name: x.requires_grad_() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        out = attend(**inputs | leaves, impl="gluon", deterministic=False, **options)
        torch.autograd.grad(out, list(leaves.values()), dout)
    torch.cuda.synchronize()
    print(len(CASES[operator]), "cases,", paths_taken())


if __name__ == "__main__":
    main(sys.argv[1])
