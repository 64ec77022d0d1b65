"""Block-sparse attention's Gluon path: its numbers under the 2x rule, and what its launches promise."""

from dataclasses import replace

import pytest
import torch
from compiled_kernels import compiled_kernels
from test_block_sparse import run

from attnzoo_kernels import BlockLayout, block_sparse_attention, dispatch
from attnzoo_kernels.block_sparse.cases import Case
from benchmarks.accuracy import assert_accurate

SHARED_MEMORY = 232448
LENGTHS = tuple(Case(seqlen_q=n, head_dim=d, block_q=128, causal=causal, masks="head", density=0.6)
                for n in (1, 97, 128, 129, 384, 1023, 1025) for causal in (False, True) for d in (64, 128))
SMALL = tuple(Case(seqlen_q=n, seqlen_k=n + more, head_dim=d, block_q=64, causal=True, masks="head", density=0.6)
              for n in (1, 64, 65, 1023, 4000) for more in (0, 70) for d in (64, 128))
SIZES = (128, 64), (128, 256), (256, 128), (256, 64), (64, 64), (64, 128), (64, 256)
BLOCKS = tuple(Case(seqlen_q=700, head_dim=d, block_q=m, block_k=n, causal=causal, masks="head")
               for m, n in SIZES for causal in (False, True) for d in (64, 128))
# the diagonal on the tiles, off them, before the first key
UNLIKE = tuple(Case(batch=2, seqlen_q=m, seqlen_k=n, heads=4, kv_heads=2, head_dim=d, block_q=128, causal=True, masks="sequence",
                    holes=True) for d in (64, 128) for m, n in ((384, 640), (333, 777), (777, 333), (1, 500)))
# the lists of the heads that share a key head are of unlike lengths, some empty
GROUPED = tuple(Case(seqlen_q=1200, heads=6, kv_heads=kv_heads, head_dim=d, block_q=128, causal=causal, masks="head", density=0.3)
                for kv_heads in (1, 2) for causal in (False, True) for d in (64, 128))
OPTIONS = (
    Case(seqlen_q=500, head_dim=128, block_q=128, density=0.0),
    Case(seqlen_q=500, head_dim=64, block_q=128, density=1.0, causal=True),
    Case(seqlen_q=900, head_dim=128, block_q=128, window_size=(200, 70), density=0.8),
    Case(seqlen_q=900, head_dim=64, block_q=128, block_k=64, window_size=(200, -1), density=0.8, causal=True),
    Case(seqlen_q=500, seqlen_k=613, heads=1, head_dim=128, block_q=128, causal=True, q_scale=30.0),
    Case(batch=2, seqlen_q=500, heads=4, kv_heads=1, head_dim=40, block_q=128, causal=True, strided=True, masks="head"),
    Case(seqlen_q=500, heads=1, head_dim=96, value_dim=40, block_q=128, causal=True),
    Case(seqlen_q=500, heads=1, head_dim=40, value_dim=128, block_q=256, causal=True),
    # more tiles than multiprocessors, with lists from one entry to all
    Case(batch=2, seqlen_q=4000, heads=4, kv_heads=2, head_dim=128, block_q=128, causal=True, masks="sequence", density=0.3, diagonal=True),
    Case(batch=2, seqlen_q=4000, heads=4, head_dim=64, block_q=128, causal=True, masks="head", density=0.3, diagonal=True),
)
COVERED = [replace(case, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)
           for case in LENGTHS + SMALL + BLOCKS + UNLIKE + GROUPED + OPTIONS]


@pytest.mark.hopper
@pytest.mark.parametrize("case", COVERED, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, poisoned):
    inputs = case.inputs("cuda")
    dispatch.forget()
    ours = run(inputs, "gluon", deterministic=False)
    backward = "gluon" if (case.block_k or case.block_q) % 128 == 0 else "triton"
    assert dispatch.implementations_taken() == {"block_sparse forward": ["gluon"], "block_sparse backward": [backward]}
    eager, exact = run(inputs, "reference"), run(inputs, "reference", torch.float64)
    assert_accurate(ours, eager, exact)


@pytest.mark.hopper
@pytest.mark.parametrize("block", (64, 128))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_repeats_are_bitwise_equal_but_for_dq(head_dim, block):
    inputs = Case(seqlen_q=4096, heads=8, kv_heads=4, head_dim=head_dim, block_q=block, causal=True, masks="head").inputs("cuda")
    first = run(inputs, "gluon")
    for _ in range(100):
        again = run(inputs, "gluon")
        assert all(torch.equal(first[name], again[name]) for name in ("out", "lse", "dk", "dv"))


@pytest.mark.hopper
def test_deterministic_calls_repeat_bit_by_bit():
    inputs = Case(seqlen_q=1024, heads=4, head_dim=128, block_q=128, causal=True, masks="head").inputs("cuda")
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    grads = [torch.autograd.grad(block_sparse_attention(q, k, v, inputs.layout, causal=True, deterministic=True), (q, k, v), inputs.dout)
             for _ in range(20)]
    assert all(torch.equal(a, b) for again in grads for a, b in zip(again, grads[0], strict=True))


@pytest.mark.hopper
def test_a_row_of_no_block_is_zero_with_finite_gradients():
    mask = torch.ones(4, 4, dtype=torch.bool, device="cuda")
    mask[1] = False
    mask[:, 2] = False
    rows, columns = slice(128, 256), slice(256, 384)
    q, k, v = (torch.randn(1, 512, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out, lse = block_sparse_attention(q, k, v, BlockLayout.from_mask(mask, 128), return_lse=True, impl="gluon")
    assert (out[:, rows] == 0).all() and (lse[..., rows] == -torch.inf).all() and (lse.isfinite().sum() == lse.numel() - 2 * 128)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert not q.grad[:, rows].any() and not k.grad[:, columns].any() and not v.grad[:, columns].any() and v.grad.any()


@pytest.mark.hopper
def test_a_graph_replays_it_and_the_making_of_a_layout():
    inputs = Case(batch=2, seqlen_q=600, kv_heads=1, block_q=128, causal=True, masks="head").inputs("cuda")
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    mask = inputs.layout.mask.clone()

    def step():
        out = block_sparse_attention(q, k, v, BlockLayout.from_mask(mask, 128), impl="gluon", **inputs.options)
        return out, *torch.autograd.grad(out, (k, v), inputs.dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        mask.copy_(mask.flip(1))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.hopper
def test_no_launch_waits_for_the_host_nor_does_a_new_layout():
    inputs = Case(batch=2, seqlen_q=600, kv_heads=1, block_q=128, causal=True, masks="head").inputs("cuda")
    run(inputs, "gluon")
    torch.cuda.set_sync_debug_mode("error")
    try:
        q, k, v = (x.requires_grad_() for x in inputs[:3])
        layout = BlockLayout.from_mask(inputs.layout.mask.mT, 128)
        block_sparse_attention(q, k, v, layout, impl="gluon", **inputs.options).backward(inputs.dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.hopper
def test_no_compiling_for_a_new_length_batch_or_layout(compiled):
    # whether the diagonal keeps to the tiles chooses the kernel
    for more in (0, 5):
        for index, (batch, seqlen) in enumerate([(1, 64), (1, 65), (2, 999), (3, 1024), (7, 128), (1, 1)]):
            for masks in ("one", "head", "sequence"):
                run(Case(batch=batch, seqlen_q=seqlen, seqlen_k=seqlen + more, heads=4, block_q=128, causal=True, masks=masks).inputs(
                    "cuda"), "gluon")
                if index == 0 and masks == "one":
                    before = len(compiled)
        assert len(compiled) == before, compiled[before:]


@pytest.mark.hopper
def test_none_takes_gluon_where_it_holds_and_a_named_path_is_refused_elsewhere():
    inputs = Case(seqlen_q=300, block_q=128, causal=True).inputs("cuda")
    by_name, by_itself, plain = (run(inputs, impl) for impl in ("gluon", None, "triton"))
    assert all(torch.equal(by_name[name], by_itself[name]) for name in ("out", "lse", "dk", "dv"))
    assert not torch.equal(by_name["out"], plain["out"])
    for case, message in ((Case(seqlen_q=40, block_q=64, block_k=32), "blocks must be multiples of 64 tokens, got 64 x 32"),
                          (Case(seqlen_q=40, head_dim=192, block_q=128), "head_dim and value_dim must be 33 to 128"),
                          (Case(seqlen_q=40, block_q=128, dtype=torch.float32), "dtype must be float16 or bfloat16"),
                          (Case(lengths_q=(40, 3), block_q=128), "it has no packed sequences")):
        x = case.inputs("cuda")
        with pytest.raises(NotImplementedError, match=message):
            block_sparse_attention(x.q, x.k, x.v, x.layout, **x.options, impl="gluon")
        run(x, None)


def test_a_cpu_tensor_is_refused():
    x = Case(seqlen_q=40, block_q=128).inputs()
    with pytest.raises(NotImplementedError, match="q must be on a CUDA device, got cpu"):
        block_sparse_attention(x.q, x.k, x.v, x.layout, impl="gluon")


@pytest.mark.tables
@pytest.mark.slow
def test_tiles_fit_and_compile_as_written():
    kernels = compiled_kernels("block_sparse_hopper_ahead_of_time.py")
    assert len(kernels) == 4 * (7 + 3 * 3)
    spilled = [kernel for kernel in kernels if kernel["stack"] and "_bwd_" not in kernel["kernel"]]
    wrong = spilled + [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY or kernel["complaints"]]
    assert not wrong, "\n".join(map(str, wrong))
