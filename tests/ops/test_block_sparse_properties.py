"""What block_sparse_attention's launches promise beyond numbers: no waiting, graphs, no compiling again; descriptors equal pointers."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attnzoo_kernels import BlockLayout, block_sparse_attention
from attnzoo_kernels.block_sparse import backward, forward, patterns
from attnzoo_kernels.block_sparse.cases import Case
from attnzoo_kernels.block_sparse.patterns import Pattern
from attnzoo_kernels.block_sparse.tiles import Tile
from benchmarks.accuracy import assert_accurate

GPU = torch.cuda.is_available()


def call(q, k, v, dout, layout, options):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = block_sparse_attention(q, k, v, layout, impl="triton", **options)
    return out, *torch.autograd.grad(out, (q, k, v), dout)


@pytest.mark.slow
@pytest.mark.parametrize("case", (
    Case(seqlen_q=70, seqlen_k=97, block_q=32, causal=True, dtype=torch.float32),
    Case(seqlen_q=70, block_q=16, window_size=(40, 9), dtype=torch.float32),
    Case(seqlen_q=70, head_dim=40, block_q=16, dtype=torch.float32),
    Case(lengths_q=(17, 0, 50), block_q=16, causal=True, dtype=torch.float32)), ids=str)
@pytest.mark.skipif(GPU, reason="Hopper's own tiles use descriptors already")
def test_descriptors_give_what_pointers_give(case, monkeypatch):
    inputs = case.inputs()
    expected = call(*inputs)
    for module, names in ((forward, ["forward_tile"]), (backward, ["dq_tile", "dkdv_tile"])):
        for name in names:
            monkeypatch.setattr(module, name, lambda *_, **__: Tile(32, 32, 4, 1, tma=True, q_registers=True))
    plans = (forward._plan, backward._dq_plan, backward._dkdv_plan)
    for plan in plans:
        plan.cache_clear()
    ours = call(*inputs)
    for plan in plans:
        plan.cache_clear()
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("pattern", "layout"))
def test_compiles_whole_and_at_most_twice_as_lengths_change(device, kind):
    """Static, then dynamic, the layout made outside or looked up inside; gradients through the compiled graph are the eager ones."""
    counter = CompileCounterWithBackend("aot_eager")
    dtype = torch.bfloat16 if GPU else torch.float32
    pattern = Pattern("bigbird", block=16, n_random=1, heads=2)

    def model(layout, q, k, v):
        return block_sparse_attention(q * 1.0, k, v, layout, causal=True, impl="triton").square().sum()

    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for seqlen in (17, 40, 65):
        layout = pattern if kind == "pattern" else BlockLayout.from_mask(pattern.layout(seqlen, device).mask, 16)
        tensors = [torch.randn(2, seqlen, 2, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
        ours, eager = (torch.autograd.grad(f(layout, *tensors), tensors) for f in (compiled, model))
        assert all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True))
    assert counter.frame_count <= 2


@pytest.mark.gpu
def test_no_launch_waits_for_the_host_nor_does_a_new_layout():
    for case in (Case(batch=2, seqlen_q=300, kv_heads=1, causal=True, masks="head"), Case(lengths_q=(1, 0, 300), block_q=32, causal=True)):
        inputs = case.inputs("cuda")
        call(*inputs)
        patterns.bigbird(300, heads=2, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            new = BlockLayout.from_mask(inputs.layout.mask, case.block_q) | BlockLayout.from_mask(inputs.layout.mask.mT, case.block_q)
            call(*inputs[:4], new, inputs.options)
            patterns.bigbird(300, heads=2, device="cuda")
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("new_layout", (False, True))
def test_a_graph_replays_it_and_the_making_of_a_layout(new_layout):
    inputs = Case(batch=2, seqlen_q=300, kv_heads=1, causal=True, masks="head").inputs("cuda")
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    mask = inputs.layout.mask.clone()

    def step():
        layout = BlockLayout.from_mask(mask, inputs.layout.block_q) if new_layout else inputs.layout
        return torch.autograd.grad(block_sparse_attention(q, k, v, layout, impl="triton", **inputs.options), (q, k, v), inputs.dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    first = [x.clone() for x in captured]
    assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))
    mask.copy_(mask.flip(1))
    graph.replay()
    assert torch.equal(first[0], captured[0]) != new_layout
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.gpu
def test_no_compiling_for_a_new_length_batch_packing_or_layout(compiled):
    for packed in (False, True):
        for index, (batch, seqlen) in enumerate([(1, 64), (1, 65), (2, 999), (3, 1024), (7, 128), (1, 1)]):
            lengths = {"lengths_q": (seqlen,) * batch + (0,) * index} if packed else {"batch": batch, "seqlen_q": seqlen}
            for masks in ("one", "head", "sequence"):
                call(*Case(heads=4, head_dim=64, causal=True, masks=masks, **lengths).inputs("cuda"))
                if index == 0 and masks == "one":
                    before = len(compiled)
        assert len(compiled) == before, compiled[before:]


@pytest.mark.gpu
def test_beyond_two_to_the_31_elements():
    q = torch.randn(1, 2**19, 34, 128, device="cuda", dtype=torch.bfloat16)
    assert q.numel() > 2**31
    layout = patterns.sliding_window(2**19, window=1, block=128, device="cuda")
    out = block_sparse_attention(q, q[:, :, :1], q[:, :, :1], layout, causal=True, impl="triton")
    tail = [x[:, -512:].float() for x in (q[:, :, -1:], q[:, :, :1])]
    short = patterns.sliding_window(512, window=1, block=128, device="cuda")
    exact, eager = (block_sparse_attention(*(x.to(dtype) for x in (tail[0], tail[1], tail[1])), short, causal=True, impl="reference")
                    for dtype in (torch.float64, torch.bfloat16))
    assert_accurate(out[:, -256:, -1:], eager[:, 256:], exact[:, 256:])


@pytest.mark.slow
def test_a_layout_s_replacement_is_another_layout(device):
    """Lists belong to a mask: what was derived from one never serves another of the same shape."""
    inputs = Case(seqlen_q=64, block_q=16, dtype=torch.float32).inputs(device)
    other = replace(inputs.layout, mask=~inputs.layout.mask)
    assert not torch.equal(call(*inputs)[0], call(*inputs[:4], other, inputs.options)[0])
