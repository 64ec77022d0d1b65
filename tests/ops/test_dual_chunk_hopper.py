"""Dual Chunk attention's Gluon path: its numbers under the 2x rule, and what its launches promise."""

from dataclasses import replace

import pytest
import torch
from compiled_kernels import compiled_kernels

from attnzoo_kernels import dual_chunk_attention
from attnzoo_kernels.dual_chunk.cases import CORRECTNESS, LARGE, Case, rotary_tables
from benchmarks.accuracy import assert_accurate

SHARED_MEMORY = 232448
PARTIAL = 40  # bytes that the branch for tiles of less than 64 rows puts aside; nothing around the loop over the keys does
SPILLS = {64: 64, 128: 128}  # the scalars of a tile, outside the loop over its queries, as in flash's backward
# chunks of 192 (whole tiles of queries, half tiles of keys), of 200 and of 24 tokens (a tile of keys spans many)
LENGTHS = tuple(Case(seqlen_q=n, heads=2 if n > 1 else 32, head_dim=d, chunk_size=c, local_size=w)
                for c, w, lengths in ((256, 64, (1, 191, 192, 193, 384, 385, 1025)), (250, 50, (199, 401, 900)), (32, 8, (25, 333)))
                for n in lengths for d in (64, 128))
UNLIKE = tuple(Case(batch=2, seqlen_q=m, seqlen_k=n, heads=4, kv_heads=2, head_dim=d, chunk_size=256, local_size=64, multiplier=True)
               for d in (64, 128) for m, n in ((1, 777), (192, 384), (333, 777), (777, 333)))
# chunks of whole tiles of keys: these also take the Gluon backward
WHOLE = tuple(Case(seqlen_q=n, heads=2 if n > 1 else 32, kv_heads=1, head_dim=d, chunk_size=c, local_size=c // 4)
              for c, lengths in ((512, (1, 383, 384, 385, 768, 2000)), (2048, (3000,))) for n in lengths for d in (64, 128)) + tuple(
    Case(batch=2, seqlen_q=m, seqlen_k=n, heads=4, kv_heads=2, head_dim=d, chunk_size=300, local_size=44, multiplier=True, variant=of)
    for d, m, n, of in ((64, 192, 576, "paper"), (64, 704, 320, "paper"), (128, 100, 1060, "chunkllama"), (128, 704, 320, "paper"))) + (
    Case(seqlen_q=777, heads=2, head_dim=96, value_dim=40, rotary_dim=32, rope_interleaved=True, chunk_size=160, local_size=32),
    Case(seqlen_q=777, heads=2, head_dim=40, value_dim=128, strided=True, chunk_size=160, local_size=32),
    Case(batch=2, seqlen_q=600, heads=2, head_dim=64, value_dim=40, q_scale=30.0, chunk_size=160, local_size=32),
)
# three consumers, with seams between tiles and inside them
LONG = tuple(Case(seqlen_q=4100, heads=2, head_dim=64, chunk_size=c, local_size=w) for c, w in ((2048, 512), (1400, 77)))
OPTIONS = (
    Case(seqlen_q=777, heads=2, head_dim=96, value_dim=40, rotary_dim=32, rope_interleaved=True, chunk_size=256, local_size=64),
    Case(seqlen_q=777, heads=2, head_dim=64, value_dim=128, variant="chunkllama", chunk_size=256, local_size=128),
    Case(batch=2, seqlen_q=500, heads=2, kv_heads=1, head_dim=40, strided=True, chunk_size=160, local_size=32),
    Case(seqlen_q=500, heads=1, head_dim=128, q_scale=30.0, chunk_size=160, local_size=32),
)
PACKED = tuple(Case(lengths_q=lengths, lengths_k=keys, heads=4, kv_heads=2, head_dim=d, chunk_size=c, local_size=64, multiplier=d == 64)
               for d, c in ((64, 256), (128, 250), (64, 192), (128, 192)) for lengths, keys in (
                   ((1, 0, 700, 129, 1000, 0), None), ((17, 0, 600, 5, 90), (970, 33, 170, 0, 640)))) + (
    Case(lengths_q=(3000, 1, 1700), heads=2, kv_heads=1, head_dim=64, chunk_size=1400, local_size=77),
    Case(lengths_q=(1700, 3000), heads=2, head_dim=64, chunk_size=2048, local_size=512),
    Case(lengths_q=tuple(n * 37 % 90 for n in range(40)), head_dim=64, chunk_size=64, local_size=16))
COVERED = [replace(case, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)
           for case in LENGTHS + UNLIKE + WHOLE + LONG + OPTIONS + PACKED + CORRECTNESS + LARGE
           if 32 < case.head_dim <= 128 and (case.value_dim or 64) > 32 and case.head_dim % 8 == 0 and (case.value_dim or 64) % 8 == 0
           and case.causal]


def run(inputs, impl: str, dtype: torch.dtype | None = None, deterministic: bool = False) -> dict[str, torch.Tensor]:
    """Output, LSE and all gradients of a loss on both."""
    tensors = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs[:3]]
    out, lse = dual_chunk_attention(*tensors, **inputs.options, return_lse=True, impl=impl, deterministic=deterministic)
    dlse = torch.randn(lse.shape, generator=torch.Generator(lse.device).manual_seed(6), device=lse.device)
    grads = torch.autograd.grad([out, lse], tensors, [inputs.dout.to(out.dtype), dlse.to(lse.dtype)])
    lse = lse.detach().masked_fill(lse == -torch.inf, 7.0)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse, *grads), strict=True))


@pytest.mark.hopper
@pytest.mark.parametrize("case", COVERED, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, poisoned):
    inputs = case.inputs("cuda")
    ours, eager, exact = run(inputs, "gluon"), run(inputs, "reference"), run(inputs, "reference", torch.float64)
    assert_accurate(ours, eager, exact)


@pytest.mark.hopper
@pytest.mark.parametrize("case", [replace(PACKED[0], dtype=torch.bfloat16), *(
    Case(batch=2, seqlen_q=4096, heads=8, head_dim=d, chunk_size=2048, local_size=512, dtype=torch.bfloat16) for d in (64, 128))], ids=str)
def test_250_repeats_are_bitwise_equal(case):
    inputs = case.inputs("cuda")
    first = run(inputs, "gluon", deterministic=True)
    for n in range(250):
        again = run(inputs, "gluon", deterministic=True) if n < 50 else dict(zip(("out", "lse"), dual_chunk_attention(
            *inputs[:3], **inputs.options, return_lse=True, impl="gluon"), strict=True))
        different = [name for name, x in again.items() if not torch.equal(first[name], x.masked_fill(x == -torch.inf, 7.0))]
        assert not different, (n, different)


@pytest.mark.hopper
@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("chunk_size", (160, 208, 56))  # of 128 tokens, and such that tiles of other chunks' keys reach behind the end
def test_nothing_depends_on_what_lies_beyond_a_sequence(chunk_size, head_dim):
    """Packed sequences with NaN in their neighbours, and in the tokens behind the last one."""
    total, rows = 900, slice(111, 650)
    cu_seqlens = torch.tensor((0, 111, 650, 763, 763), dtype=torch.int32, device="cuda")
    tensors = [torch.randn(total, 2, head_dim, device="cuda", generator=torch.Generator("cuda").manual_seed(i)).half() for i in range(4)]
    poisoned = [x.clone() for x in tensors]
    for x in poisoned:
        x[: rows.start] = torch.nan
        x[rows.stop:] = torch.nan
    cos, sin = rotary_tables(chunk_size, head_dim, "cuda")
    results = []
    for q, k, v, dout in (tensors, poisoned):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = dual_chunk_attention(*leaves, cos=cos, sin=sin, chunk_size=chunk_size, local_size=32, causal=True,
                                        cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, return_lse=True, impl="gluon",
                                        deterministic=False)
        out.backward(dout)
        assert (out[763:] == 0).all() and (lse[:, 763:] == -torch.inf).all() and all((x.grad[763:] == 0).all() for x in leaves)
        results.append([out[rows], lse[:, rows], *(x.grad[rows] for x in leaves[1:]), leaves[0].grad[rows]])
    *exact, dq = zip(*results, strict=True)
    assert all(torch.equal(a, b) for a, b in exact)
    torch.testing.assert_close(*dq)  # its sums have no order


@pytest.mark.hopper
def test_none_takes_gluon_where_it_holds_and_a_named_path_is_refused_elsewhere():
    inputs = Case(seqlen_q=300, heads=2, head_dim=64, chunk_size=160, local_size=32, dtype=torch.bfloat16).inputs("cuda")
    by_name, by_itself = run(inputs, "gluon", deterministic=True), run(inputs, None, deterministic=True)
    assert all(torch.equal(by_name[name], by_itself[name]) for name in by_name)
    for case, message in ((Case(seqlen_q=40, head_dim=64, causal=False, dtype=torch.bfloat16), "causal must be True"),
                          (Case(seqlen_q=40, head_dim=192, dtype=torch.bfloat16), "head_dim and value_dim must be 33 to 128"),
                          (Case(seqlen_q=40, head_dim=64, dtype=torch.float32), "dtype must be float16 or bfloat16")):
        q, k, v, _, options = case.inputs("cuda")
        with pytest.raises(NotImplementedError, match=message):
            dual_chunk_attention(q, k, v, **options, impl="gluon")


@pytest.mark.hopper
@pytest.mark.parametrize("head_dim", (64, 128))
def test_no_synchronisation_and_linear_memory(head_dim):
    def step(n):
        q, k, v, dout, options = Case(seqlen_q=n, heads=2, head_dim=head_dim, chunk_size=1024, local_size=256,
                                      dtype=torch.bfloat16).inputs("cuda")
        tensors = [x.requires_grad_() for x in (q, k, v)]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            dual_chunk_attention(*tensors, **options, impl="gluon").backward(dout)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return torch.cuda.max_memory_allocated() - before

    step(4096)
    small, large = step(8192), step(16384)
    assert large < 2.2 * small


def test_a_cpu_tensor_is_refused():
    q, k, v, _, options = Case(seqlen_q=40, head_dim=64).inputs()
    with pytest.raises(NotImplementedError, match="q must be on a CUDA device, got cpu"):
        dual_chunk_attention(q, k, v, **options, impl="gluon")


@pytest.mark.tables
@pytest.mark.slow
def test_tiles_fit_and_do_not_spill():
    kernels = compiled_kernels("dual_chunk_hopper_ahead_of_time.py")
    assert len(kernels) == 6 * 2 + 2 * 2 * 2
    wrong = [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY or kernel["complaints"]
             or kernel["stack"] > (SPILLS[kernel["head_dim"]] if "ordered" in kernel else PARTIAL)]
    assert not wrong, "\n".join(map(str, wrong))
