"""What flash_attention's launches promise beyond numbers: no waiting, graphs, no compiling again; descriptors give what pointers give."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attnzoo_kernels import flash_attention
from attnzoo_kernels.flash import backward, forward
from attnzoo_kernels.flash.cases import Case
from attnzoo_kernels.flash.tiles import Tile
from benchmarks.accuracy import assert_accurate

GPU = torch.cuda.is_available()


def call(q, k, v, dout, **options):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = flash_attention(q, k, v, impl="triton", **options)
    out.backward(dout)
    return out, q.grad, k.grad, v.grad


@pytest.mark.slow
@pytest.mark.parametrize("case", (
    Case(seqlen_q=70, seqlen_k=97, causal=True, dtype=torch.float32), Case(seqlen_q=70, window_size=(20, 9), dtype=torch.float32),
    Case(seqlen_q=70, head_dim=40, dtype=torch.float32), Case(lengths_q=(17, 0, 50), causal=True, dtype=torch.float32)), ids=str)
@pytest.mark.parametrize("one_loop", (False, True))
@pytest.mark.skipif(GPU, reason="Hopper's own tiles use descriptors already")
def test_descriptors_and_either_loop_give_what_pointers_give(case, one_loop, monkeypatch):
    inputs = case.inputs()
    expected = call(*inputs[:4], **inputs.options)
    for module, names in ((forward, ["forward_tile"]), (backward, ["dq_tile", "dkdv_tile"])):
        for name in names:
            monkeypatch.setattr(module, name, lambda *_, **__: Tile(32, 32, 4, 1, tma=True, q_registers=True, one_loop=one_loop))
    plans = (forward._plan, backward._dq_plan, backward._dkdv_plan)
    for plan in plans:
        plan.cache_clear()
    ours = call(*inputs[:4], **inputs.options)
    for plan in plans:
        plan.cache_clear()
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.slow
def test_compiles_whole_and_at_most_twice_as_lengths_change(device):
    """Static, then dynamic; gradients through the compiled graph are the eager ones."""
    counter = CompileCounterWithBackend("aot_eager")
    dtype = torch.bfloat16 if GPU else torch.float32

    def model(q, k, v, sinks):
        return flash_attention(q * 1.0, k, v, causal=True, sinks=sinks, impl="triton").square().sum()

    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for seqlen in (17, 40, 65):
        tensors = [torch.randn(2, seqlen, 2, 32, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
        tensors.append(torch.randn(2, device=device, requires_grad=True))
        ours, eager = (torch.autograd.grad(f(*tensors), tensors) for f in (compiled, model))
        assert all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True))
    assert counter.frame_count <= 2


@pytest.mark.gpu
def test_no_launch_waits_for_the_host():
    for case in (Case(batch=2, seqlen_q=300, causal=True, alibi=True, sinks=True), Case(lengths_q=(1, 0, 300), causal=True, dropout_p=0.1)):
        inputs = case.inputs("cuda")
        call(*inputs[:4], **inputs.options)
        torch.cuda.set_sync_debug_mode("error")
        try:
            call(*inputs[:4], **inputs.options)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dropout_p", (0.0, 0.2))
def test_a_graph_replays_it(dropout_p):
    inputs = Case(batch=2, seqlen_q=300, causal=True, dropout_p=dropout_p).inputs("cuda")
    q, k, v = (x.requires_grad_() for x in inputs[:3])

    def step():
        return torch.autograd.grad(flash_attention(q, k, v, impl="triton", **inputs.options), (q, k, v), inputs.dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    first = [x.clone() for x in captured]
    graph.replay()
    if dropout_p:  # another mask at every replay, drawn from torch's generator
        assert not torch.equal(first[0], captured[0])
    else:
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, captured, step(), strict=True))


@pytest.mark.gpu
def test_no_compiling_for_a_new_length_batch_or_packing(compiled):
    for packed in (False, True):
        shapes = [(1, 64), (1, 65), (2, 999), (3, 1024), (7, 128), (1, 1)]
        for index, (batch, seqlen) in enumerate(shapes):
            lengths = {"lengths_q": (seqlen,) * batch + (0,) * index} if packed else {"batch": batch, "seqlen_q": seqlen}
            inputs = Case(heads=4, head_dim=64, causal=True, **lengths).inputs("cuda")
            call(*inputs[:4], **inputs.options)
            if index == 0:
                before = len(compiled)
        assert len(compiled) == before, compiled[before:]


@pytest.mark.gpu
def test_beyond_two_to_the_31_elements():
    q = torch.randn(1, 2**19, 34, 128, device="cuda", dtype=torch.bfloat16)
    assert q.numel() > 2**31
    out = flash_attention(q, q[:, :, :1], q[:, :, :1], window_size=(128, 0), impl="triton")
    tail = [x[:, -400:].float() for x in (q[:, :, -1:], q[:, :, :1])]
    exact = flash_attention(tail[0].double(), tail[1].double(), tail[1].double(), window_size=(128, 0), impl="reference")[:, 200:]
    eager = flash_attention(tail[0].bfloat16(), tail[1].bfloat16(), tail[1].bfloat16(), window_size=(128, 0), impl="reference")[:, 200:]
    assert_accurate(out[:, -200:, -1:], eager, exact)
