"""FlashAttention's Gluon path: what it takes, its numbers under the 2x rule, and what its launches promise."""

from dataclasses import replace

import pytest
import torch
from busy_gpu import busy_gpu
from compiled_kernels import compiled_kernels

from attnzoo_kernels import dispatch, flash_attention
from attnzoo_kernels.flash import why_not_gluon
from attnzoo_kernels.flash.cases import CORRECTNESS, SINGLE_ROWS, Case
from benchmarks.accuracy import assert_accurate

WINDOWS = ((-1, 0), (64, 0), (100, 30), (-1, 50), (200, -1))
EDGES = tuple(Case(batch=2, seqlen_q=m, seqlen_k=n, heads=4, kv_heads=2, head_dim=d, window_size=window)
              for d in (64, 128) for m, n in ((192, 384), (333, 777), (777, 333)) for window in WINDOWS)
MANY = tuple(Case(lengths_q=tuple(n * 37 % 90 for n in range(sequences)), head_dim=64, causal=True) for sequences in (33, 1100))
WIDTHS = tuple(Case(seqlen_q=777, heads=2, head_dim=d, value_dim=v, causal=True) for d, v in ((40, 88), (64, 128), (96, 96), (128, 64)))
LATENT = tuple(replace(case, head_dim=d, value_dim=v) for d, v, cases in (  # head dims that are read in parts
    (192, 128, (
        *(Case(seqlen_q=n, causal=causal, **SINGLE_ROWS if n == 1 else {}) for n in (1, 17, 64, 113, 1025) for causal in (False, True)),
        *(Case(batch=2, seqlen_q=m, seqlen_k=n, heads=4, kv_heads=2, window_size=window)
          for m, n in ((192, 384), (333, 777), (777, 333)) for window in ((-1, -1), (-1, 0), (-1, 50))),
        Case(batch=5, seqlen_q=1024, heads=8, causal=True),  # more tiles than multiprocessors
        Case(seqlen_q=2432, causal=True), Case(seqlen_q=1500, seqlen_k=2000), Case(lengths_q=(2100, 4000), causal=True),
        *(Case(lengths_q=(1, 0, 97, 17, 130, 0), causal=causal) for causal in (False, True)),
        Case(lengths_q=(17, 0, 113, 5), lengths_k=(97, 33, 17, 0), heads=4, kv_heads=2, causal=True),
        Case(batch=2, seqlen_q=113, heads=4, kv_heads=2, strided=True, causal=True), Case(seqlen_q=113, q_scale=50.0, causal=True),
        Case(seqlen_q=113, seqlen_k=17, sinks=True, causal=True), Case(seqlen_q=777, sinks=True, causal=True))),
    *((d, v, (Case(seqlen_q=777, causal=True), Case(lengths_q=(97, 300)))) for d, v in ((136, 40), (160, 96), (192, 64))),
) for case in cases)
COVERED = [replace(case, dtype=dtype) for dtype in (torch.bfloat16, torch.float16) for case in CORRECTNESS + EDGES + MANY + WIDTHS
           if 32 < case.head_dim <= 128 and 32 < (case.value_dim or case.head_dim) <= 128 and case.head_dim % 8 == 0
           and (case.value_dim or 8) % 8 == 0 and not (case.softcap or case.alibi)]
COVERED += LATENT + tuple(replace(case, dtype=torch.float16) for case in LATENT[::4])


def run(case: Case, inputs, impl: str, dtype: torch.dtype | None = None, **options) -> dict[str, torch.Tensor]:
    q, k, v = (x.to(dtype).requires_grad_() if dtype else x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out, lse = flash_attention(q, k, v, **inputs.options, return_lse=True, impl=impl, **options)
    dlse = torch.randn(lse.shape, generator=torch.Generator(lse.device).manual_seed(6), device=lse.device)
    torch.autograd.backward([out, lse], [inputs.dout.to(out.dtype), dlse.to(lse.dtype)])
    return {"out": out, "lse": lse.masked_fill(lse == -torch.inf, 7.0), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def obeys_the_rule(case: Case, inputs) -> None:
    ours, eager, exact = run(case, inputs, "gluon"), run(case, inputs, "reference"), run(case, inputs, "reference", torch.float64)
    assert_accurate(ours, eager, exact)


@pytest.mark.hopper
@pytest.mark.parametrize("case", COVERED, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, poisoned):
    obeys_the_rule(case, case.inputs("cuda"))


# 32 heads: a sink's gradient is one number for each head, and chance decides on the errors of a few numbers
WITH_SINKS = [
    (Case(seqlen_q=500, lengths_q=lengths, heads=32, kv_heads=8, head_dim=64, causal=True, window_size=(127, 0), sinks=True), above)
    for above in (-200.0, 0.0, 200.0) for lengths in (None, (700, 0, 130))] + [
    (replace(case, sinks=True), 0.0) for d in (64, 128) for case in (
        Case(batch=2, seqlen_q=1500, heads=32, head_dim=d, causal=True),
        Case(seqlen_q=700, seqlen_k=1100, heads=32, kv_heads=8, head_dim=d),
        Case(seqlen_q=777, seqlen_k=333, heads=32, head_dim=d, causal=True),  # many queries see the sink only
        Case(lengths_q=(300, 0, 64, 129, 1000, 7), lengths_k=(200, 5, 128, 700, 900, 0), heads=32, kv_heads=16, head_dim=d, causal=True),
        Case(lengths_q=(400, 700, 130), heads=32, head_dim=d, window_size=(300, 0), causal=True))]


@pytest.mark.hopper
@pytest.mark.parametrize("case, above", WITH_SINKS, ids=str)
@pytest.mark.parametrize("with_lse", (False, True))
def test_sinks_and_their_gradient(case, above, with_lse, poisoned):
    """A sink may hide all keys or be hidden by them."""
    x = case.inputs("cuda")
    sinks = x.options["sinks"] + above

    def results(impl, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in x[:3]] + [sinks.detach().clone().requires_grad_()]
        out, lse = flash_attention(*leaves[:3], **x.options | {"sinks": leaves[3]}, return_lse=True, impl=impl, deterministic=False)
        dlse = torch.randn(lse.shape, generator=torch.Generator("cuda").manual_seed(6), device="cuda")
        grads = torch.autograd.grad((out, lse)[: 1 + with_lse], leaves, (x.dout.to(dtype), dlse.to(lse.dtype))[: 1 + with_lse])
        return {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv", "dsinks"), grads, strict=True))

    dispatch.forget()
    ours = results("gluon", torch.bfloat16)
    assert dispatch.implementations_taken() == {"flash forward": ["gluon"], "flash backward": ["gluon"]}
    eager, exact = results("reference", torch.bfloat16), results("reference", torch.float64)
    torch.testing.assert_close(ours.pop("lse"), exact.pop("lse").float())  # where it is the sink, eager has no error at all
    assert_accurate(ours, {name: eager[name] for name in ours}, exact)


@pytest.mark.hopper
@pytest.mark.parametrize("case", (
    Case(batch=2, seqlen_q=2048, heads=16, head_dim=128, causal=True), Case(batch=2, seqlen_q=2048, heads=16, head_dim=64, causal=True),
    Case(lengths_q=(1000, 0, 3000, 77), heads=8, head_dim=64, causal=True),
    Case(lengths_q=(1000, 0, 3000, 77), heads=8, head_dim=192, value_dim=128, causal=True)), ids=str)
def test_250_repeats_are_bitwise_equal(case):
    inputs = case.inputs("cuda")
    first = run(case, inputs, "gluon", deterministic=True)
    for _ in range(250):
        again = run(case, inputs, "gluon", deterministic=True)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.hopper
@pytest.mark.parametrize("below", (30, 100, 4000))
@pytest.mark.parametrize("rows", (slice(None), slice(None, None, 3)), ids=("all", "a third"))
@pytest.mark.parametrize("case", (
    Case(seqlen_q=2432, heads=16, head_dim=128, causal=True),
    Case(seqlen_q=1500, seqlen_k=2000, heads=16, head_dim=128, dtype=torch.float16),
    Case(lengths_q=(2100, 4000), heads=16, head_dim=128, causal=True),
    Case(seqlen_q=2432, heads=16, head_dim=192, value_dim=128, causal=True)), ids=str)
def test_scores_below_zero(case, rows, below):
    """Maxima below zero compare as integers do only once they were raised to zero, which those far below are not.

    16 heads: keys whose mean is not zero let the rounding of the output count in dQ, most in the first rows, and of two heads' first rows
    chance decides on the largest error, in eager attention as well."""
    x = case.inputs("cuda")
    x.q[..., rows, :, 0] += below**0.5
    x.k[..., 0] -= below**0.5
    obeys_the_rule(case, x)


@pytest.mark.hopper
@pytest.mark.parametrize("head_dim", (128, 192))
def test_queries_stay_while_the_next_tile_is_loaded(head_dim):
    """TMA writes the zeros behind a sequence's end without waiting for memory: here half of most last tiles lies there."""
    lengths = tuple(1 + 128 * (n % 4) + 7 * n % 60 for n in range(100))
    x = Case(lengths_q=lengths, heads=16, head_dim=head_dim, value_dim=128, causal=True).inputs("cuda")
    options = x.options | {"cu_seqlens_k": x.options["cu_seqlens_q"]}
    first, plain, exact = (flash_attention(*(t.to(dtype) for t in x[:3]), **options, impl=impl) for impl, dtype in (
        ("gluon", x.q.dtype), ("triton", x.q.dtype), ("reference", torch.float64)))
    assert_accurate(first, plain, exact)
    different = torch.zeros((), dtype=torch.int32, device="cuda")
    for _ in range(200):
        different += (flash_attention(*x[:3], **options, impl="gluon") != first).any()
    assert different == 0


@pytest.mark.hopper
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", (64, 128))
def test_no_tile_is_lost_where_another_process_shares_the_gpu(head_dim):
    """A program that is stopped and resumed finds its shared memory as it left it, also what lies in place of barriers."""
    x = Case(batch=16, seqlen_q=8192, heads=8, head_dim=head_dim, causal=True).inputs("cuda")
    first = flash_attention(x.q, x.k, x.v, **x.options, impl="gluon")
    with busy_gpu():
        for _ in range(300):
            torch.full_like(first, torch.nan)  # the next output lies where this was
            again = flash_attention(x.q, x.k, x.v, **x.options, impl="gluon")
            assert torch.equal(again, first)


@pytest.mark.hopper
@pytest.mark.parametrize("head_dim", (64, 128, 192))
@pytest.mark.parametrize("causal", (False, True))
def test_nothing_depends_on_what_lies_beyond_a_sequence(head_dim, causal):
    cu_seqlens = torch.tensor([0, 100, 433, 500, 500], device="cuda", dtype=torch.int32)
    value_dim = min(head_dim, 128)
    tensors = [torch.randn(520, 2, dim, device="cuda", dtype=torch.bfloat16) for dim in (head_dim, head_dim, value_dim, value_dim)]
    rows = slice(100, 433)
    poisoned = [x.clone() for x in tensors]
    for x in poisoned:
        x[: rows.start] = torch.nan
        x[rows.stop:] = torch.nan
    results = []
    for q, k, v, dout in (tensors, poisoned):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out, lse = flash_attention(q, k, v, causal=causal, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=333,
                                   max_seqlen_k=333, return_lse=True, deterministic=True, impl="gluon")
        out.backward(dout)
        assert (out[500:] == 0).all() and (lse[:, 500:] == -torch.inf).all()
        assert all((x.grad[500:] == 0).all() for x in (q, k, v))
        results.append([out[rows], lse[:, rows], *(x.grad[rows] for x in (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.hopper
def test_no_launch_waits_for_the_host_and_a_graph_replays_it():
    for case in (Case(batch=2, seqlen_q=300, causal=True), Case(lengths_q=(1, 0, 300), causal=True)):
        inputs = case.inputs("cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            expected = run(case, inputs, "gluon", deterministic=True)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(case, inputs, "gluon", deterministic=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flash_attention(q, k, v, impl="gluon", **inputs.options)
        for _ in range(2):
            out.detach().zero_()
            graph.replay()
            assert torch.equal(out, expected["out"])


@pytest.mark.hopper
def test_streams_and_graphs_count_their_own_tiles():
    q, k, v = torch.randn(3, 2, 2000, 12, 64, device="cuda", dtype=torch.bfloat16)
    expected = flash_attention(q, k, v, causal=True, impl="gluon")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_attention(q, k, v, causal=True, impl="gluon")
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outs = []
    for _ in range(30):  # more tiles than fit at once, so that kernels of the streams overlap
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(flash_attention(q, k, v, causal=True, impl="gluon"))
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in (captured, *outs))


@pytest.mark.hopper
def test_a_compiled_graph_keeps_its_memory_to_itself():
    q, k, v = torch.randn(3, 2, 2000, 12, 64, device="cuda", dtype=torch.bfloat16)

    def twice(q, k, v):
        return flash_attention(flash_attention(q, k, v, causal=True, impl="gluon"), k, v, impl="gluon")

    compiled, expected = torch.compile(twice, mode="reduce-overhead"), twice(q, k, v)
    assert all(torch.equal(compiled(q, k, v), expected) for _ in range(5))


@pytest.mark.hopper
def test_the_path_is_taken_by_itself_where_it_holds():
    x = Case(seqlen_q=300, head_dim=64).inputs("cuda")
    assert why_not_gluon(x.q, x.k, x.v) is None
    assert torch.equal(flash_attention(x.q, x.k, x.v), flash_attention(x.q, x.k, x.v, impl="gluon"))
    assert "softcap" in why_not_gluon(x.q, x.k, x.v, softcap=5.0)
    x = Case(seqlen_q=300, head_dim=192, value_dim=128).inputs("cuda")
    assert why_not_gluon(x.q, x.k, x.v, causal=True) is None
    assert torch.equal(flash_attention(x.q, x.k, x.v), flash_attention(x.q, x.k, x.v, impl="gluon"))
    assert "33 to 128 with a window" in why_not_gluon(x.q, x.k, x.v, window_size=(64, 0))
    assert "float32" in why_not_gluon(x.q.float(), x.k.float(), x.v.float())


def test_a_path_named_runs_or_raises():
    x = torch.zeros(1, 8, 1, 64, dtype=torch.float16)
    assert "CUDA" in why_not_gluon(x, x, x)
    with pytest.raises(NotImplementedError, match='impl="gluon" does not take this call: q must be on a CUDA device, got cpu'):
        flash_attention(x, x, x, impl="gluon")


def test_sums_are_in_order_where_that_costs_little(monkeypatch):
    from attnzoo_kernels.flash import hopper_backward
    from attnzoo_kernels.flash.options import Options

    monkeypatch.setattr(hopper_backward, "multiprocessors", lambda device: 132)

    def ordered(head_dim, seqlen, left, right, sequences=None, group=1, batch=1):
        x = torch.empty(batch, seqlen, 2, head_dim, device="meta") if sequences is None else torch.empty(seqlen, 2, head_dim, device="meta")
        options = Options(sequences=sequences, softmax_scale=1.0, window_left=left, window_right=right)
        return hopper_backward.in_order_anyway(x.repeat_interleave(group, -2), x, x, options)

    assert ordered(40, 512, -1, 0) and ordered(64, 2048, -1, 0, batch=64) and ordered(64, 512, -1, -1, batch=256)
    assert ordered(64, 16384, -1, -1, batch=16) and ordered(128, 2048, -1, -1, batch=64) and ordered(96, 512, -1, 0, batch=256)
    assert not any((ordered(64, 2048, -1, 0), ordered(64, 8192, -1, 0, batch=16), ordered(64, 8192, -1, -1, batch=8),
                    ordered(128, 512, -1, 0), ordered(128, 2048, -1, 0, batch=64), ordered(128, 8192, -1, -1, batch=64),
                    ordered(64, 512, 64, 0), ordered(64, 512, -1, 9), ordered(64, 512, -1, 0, sequences=3),
                    ordered(64, 512, -1, 0, group=2)))


def test_heads_are_joined_where_one_does_not_fill_the_gpu():
    from attnzoo_kernels._gluon.tiles import L2_GROUP, heads_together

    def joined(heads, tiles, ordered=False, in_l2=1):
        return heads_together(heads, L2_GROUP // in_l2, tiles, 132, ordered)

    assert joined(16, 64) == 4 and joined(9, 64) == 5 and joined(3, 16) == 3  # groups alike in size, of 1.5 tiles a program
    assert joined(16, 128) == 1 and joined(64, 16, in_l2=8) == 8  # what L2 holds is enough
    assert joined(16, 64, ordered=True) == 1


@pytest.mark.slow
def test_every_tile_compiles_fits_and_keeps_its_products_in_flight():
    kernels = compiled_kernels("hopper_ahead_of_time.py")
    assert len(kernels) == 4 * 4 + 4 + 5
    wrong = [kernel for kernel in kernels if kernel["shared"] > 232448 or kernel["complaints"] or kernel["stack"]]
    assert not wrong, "\n".join(map(str, wrong))
