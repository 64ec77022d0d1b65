"""decode_attention starts while the kernel before it still runs: what that one writes late must be seen."""

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from attnzoo_kernels import decode_attention
from attnzoo_kernels.decode.cases import Case

pytestmark = pytest.mark.gpu


@triton.jit
def _now():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def late_kernel(target, source, n, BLOCK: tl.constexpr):
    """Copies 200 us after it has let the next kernel start."""
    gdc_launch_dependents()
    start = _now()
    while _now() - start < 200000:
        pass
    for begin in range(0, n, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < n), mask=at < n)


@pytest.mark.parametrize("batch", (1, 5, 40))
@pytest.mark.parametrize("before, after", [(4096, 4096), (4096, 100), (100, 4096), (0, 4000), (3000, 0), (64, 65)])
def test_lengths_and_keys_that_are_written_late(batch, before, after):
    lengths = tuple(after + (b % 3) * (4096 - after) // 4 for b in range(batch))
    inputs = Case(lengths=lengths, max_len=4096, heads=32, kv_heads=8, head_dim=128).inputs("cuda")
    q, k, v = (x.nan_to_num(0.5) for x in inputs[:3])
    lengths = inputs.options["cache_seqlens"]
    expected = decode_attention(q, k, v, cache_seqlens=lengths, return_lse=True)
    torch.cuda.synchronize()
    for target, source in ((lengths, lengths.clone()), (k[0, :32].view(-1), k[0, :32].reshape(-1).clone())):
        for _ in range(3):
            target.fill_(before if target is lengths else torch.nan)
            late_kernel[(1,)](target, source, target.numel(), BLOCK=1024)
            out = decode_attention(q, k, v, cache_seqlens=lengths, return_lse=True)
            assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
