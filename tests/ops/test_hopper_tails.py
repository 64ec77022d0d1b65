"""The copies of the ends of packed sequences that precede a Hopper backward's mainloop, which plain Triton makes."""

import os

import pytest
import torch

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not (GPU or os.environ.get("TRITON_INTERPRET") == "1"), reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1")
DEVICE = "cuda" if GPU else "cpu"


def ends(x: torch.Tensor, cu_seqlens: list[int], block: int, width: int) -> torch.Tensor:
    """(sequences + 1, block, heads, width), what stands behind the last sequence as one more."""
    copies = x.new_zeros(len(cu_seqlens), block, x.shape[1], width)
    for n, (first, end) in enumerate(zip(cu_seqlens, [*cu_seqlens[1:], x.shape[0]], strict=True)):
        tail = x[first + (end - first) // block * block : end]
        copies[n, : len(tail), :, : x.shape[2]] = tail
    return copies


@pytest.mark.parametrize(("head_dim", "value_dim", "kv_heads"), [(64, 64, 2), (48, 40, 1), (64, 128, 2)])
def test_one_launch_copies_all_ends(head_dim, value_dim, kv_heads):
    from attnzoo_kernels._gluon import backward_plan
    from attnzoo_kernels._triton.call import layout

    queries, keys, width = [0, 70, 70, 198, 203], [0, 5, 133, 140, 268], backward_plan.mainloop_width(head_dim, value_dim)
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k, v, grad_out = (  # with room behind each row of heads
        torch.randn(tokens, heads + 1, dim, generator=generator, device=DEVICE).half()[:, :heads]
        for tokens, heads, dim in ((210, 2, head_dim), (268, kv_heads, head_dim), (268, kv_heads, value_dim), (210, 2, value_dim)))
    launch = backward_plan.all_tails(*map(layout, (q, k, v, grad_out)), len(queries) - 1, 64, 128, width)
    bounds = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (queries, keys))
    copies = backward_plan.copy_all_tails(launch, q, k, v, grad_out, *bounds)
    expected = [ends(x, of, block, width) for x, of, block in ((q, queries, 64), (k, keys, 128), (v, keys, 128), (grad_out, queries, 64))]
    for name, ours, right in zip("qkvo", copies, expected, strict=True):
        assert torch.equal(ours, right), name
