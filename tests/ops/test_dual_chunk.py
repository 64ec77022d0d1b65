"""dual_chunk_attention: the closed form by brute force, and the kernels against the reference in float64 under the 2x rule."""

import math
from dataclasses import replace

import pytest
import torch
from paths import PATHS

from attnzoo_kernels import dual_chunk_attention, flash_attention
from attnzoo_kernels._triton import launch
from attnzoo_kernels.dual_chunk import backward, forward, parts
from attnzoo_kernels.dual_chunk.cases import CORRECTNESS, LARGE, Case, rotary_tables
from attnzoo_kernels.dual_chunk.geometry import geometry
from attnzoo_kernels.dual_chunk.options import Extras, Options
from attnzoo_kernels.dual_chunk.reference import rotate, stage_positions
from attnzoo_kernels.dual_chunk.rotation import rotated_copies
from attnzoo_kernels.dual_chunk.tiles import Tile
from benchmarks.accuracy import assert_accurate

GPU = torch.cuda.is_available()
if GPU:
    CASES = [replace(case, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16) for case in CORRECTNESS + LARGE]
else:  # the interpreter gets bfloat16 wrong
    CASES = [replace(case, dtype=torch.float16 if n % 5 == 4 else torch.float32) for n, case in enumerate(CORRECTNESS)]
PACKED = next(case for case in CORRECTNESS if case.packed)


def run(inputs, impl: str, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Output, LSE and all gradients, of a loss on output and LSE; rows without a key have their LSE replaced by a number."""
    tensors = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs[:3]]
    out, lse = call(tensors, inputs.options, impl)
    generator = torch.Generator(lse.device).manual_seed(6)
    dlse = torch.randn(lse.shape, generator=generator, device=lse.device)
    grads = torch.autograd.grad([out, lse], tensors, [inputs.dout.to(out.dtype), dlse.to(lse.dtype)])
    lse = lse.detach().masked_fill(lse == -torch.inf, 7.0)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse, *grads), strict=True))


def call(tensors, options, impl):
    return dual_chunk_attention(*tensors, **options, return_lse=True, impl=impl)


def check(case: Case, device: str) -> None:
    inputs = case.inputs(device)
    ours, eager, exact = run(inputs, "triton"), run(inputs, "reference"), run(inputs, "reference", torch.float64)
    assert_accurate(ours, eager, exact)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, device, poisoned):
    check(case, device)


@pytest.mark.skipif(GPU, reason="the tile tables choose TMA there")
@pytest.mark.parametrize("case", [
    Case(lengths_q=(17, 0, 30), heads=1, head_dim=16, causal=False, dtype=torch.float32),
    Case(seqlen_q=61, heads=1, head_dim=24, dtype=torch.float32),
], ids=str)
def test_tensor_descriptors_and_unlike_tiles(case, device, monkeypatch):
    monkeypatch.setattr(forward, "forward_tile", lambda *_: Tile(16, 32, 4, 1, tma=True))
    monkeypatch.setattr(backward, "dq_tile", lambda *_: Tile(32, 16, 4, 1, tma=True))
    monkeypatch.setattr(backward, "dkdv_tile", lambda *_: Tile(16, 32, 4, 1, tma=True))
    check(case, device)


@pytest.mark.skipif(GPU, reason="values are copied there in any case")
@pytest.mark.parametrize("case", [Case(batch=2, seqlen_q=43, heads=2, head_dim=34), Case(lengths_q=(17, 0, 30), heads=2, head_dim=34)],
                         ids=str)
def test_values_that_are_copied_to_wider_rows_for_tma(case, device, monkeypatch, poisoned):
    """The output is as wide as the values were: a wider row of it would reach into the next head's."""
    monkeypatch.setattr(forward, "tma_readable", launch._widened)
    monkeypatch.setattr(backward, "tma_readable", launch._widened)
    check(replace(case, dtype=torch.float16), device)


def scores(q, k, impl, **options):
    """The logits themselves, (queries, keys), from weights (values = identity) and LSE; -inf where a key is not seen."""
    keys = k.shape[1]
    v = torch.eye(keys, dtype=q.dtype, device=q.device).view(1, keys, 1, keys)
    out, lse = dual_chunk_attention(q, k, v, return_lse=True, impl=impl, softmax_scale=1.0, **options)
    return out[0, :, 0].log() + lse[0, 0][:, None]


def distance(i: int, j: int, chunk_size: int, local_size: int, variant: str) -> int:
    """The closed form of the rotary distance from query i to key j, written out."""
    if j > i:
        return -distance(j, i, chunk_size, local_size, variant)
    chunk, top = chunk_size - local_size, chunk_size - (variant == "paper")
    if i // chunk == j // chunk:
        return i - j
    if i // chunk == j // chunk + 1:
        return min(i % chunk + chunk, top) - j % chunk
    return (top if variant == "paper" else min(2 * chunk - 1, top)) - j % chunk


@pytest.mark.parametrize("case", [
    Case(batch=2, seqlen_q=1333, heads=1, head_dim=32, chunk_size=480, local_size=64, dtype=torch.float32),
    Case(seqlen_q=1333, seqlen_k=1397, heads=1, head_dim=32, chunk_size=480, local_size=64, variant="chunkllama", dtype=torch.float32),
    Case(seqlen_q=200, seqlen_k=170, heads=1, head_dim=32, chunk_size=64, local_size=0, dtype=torch.float32),
], ids=str)
def test_one_copy_of_queries_serves_all_chunks_that_they_have_one_position_to(case, device, poisoned):
    """From options.near of a chunk on the Gluon kernels read the last copy for the chunk before, too."""
    q, k, _, _, o = case.inputs(device)
    chunks = geometry(case.chunk_size, case.local_size, case.variant)
    extras = Extras(o["cos"], o["sin"])
    options = Options.of(extras, *chunks, 7, True, False, 1.0)
    near, chunk = options.near, chunks.chunk
    assert near < chunk
    position = torch.arange(q.shape[1], device=device) + k.shape[1] - q.shape[1]
    place = position % chunk
    intra, successive, inter = rotated_copies(q, extras, options, k.shape[1], 3, queries=True, near=near).unflatten(0, (3, q.shape[0]))
    for copy, read, stage in ((intra, position == position, 0), (successive, (position >= chunk) & (place < near), 1),
                              (inter, (position >= chunk) & (place >= near), 1), (inter, position >= 2 * chunk, 2)):
        places = stage_positions(position[read][None], chunks)[stage][0]
        # channels lie pair by pair
        expected = rotate(q[:, read], o["cos"][places], o["sin"][places], False).unflatten(-1, (2, -1)).mT.flatten(-2)
        torch.testing.assert_close(copy[:, read], expected)


@pytest.mark.slow
@pytest.mark.parametrize("impl", PATHS)
@pytest.mark.parametrize("variant", ("paper", "chunkllama"))
@pytest.mark.parametrize("chunk_size, local_size", [(10, 4), (12, 8), (7, 0)])
def test_scores_are_the_closed_form_s(device, impl, variant, chunk_size, local_size):
    """One pair of channels at 0.05 rad a token: the angle between query and key tells the distance."""
    n, angle = 33, 0.05
    positions = geometry(chunk_size, local_size, variant).positions
    turn = torch.arange(positions, device=device)[:, None] * angle
    expected = torch.tensor([[distance(i, j, chunk_size, local_size, variant) for j in range(n)] for i in range(n)], device=device)
    options = {"cos": turn.cos(), "sin": turn.sin(), "chunk_size": chunk_size, "local_size": local_size, "variant": variant}
    q, k = torch.zeros(2, 1, n, 1, 16, device=device)
    q[..., 0] = 1.0
    for channel, function in ((0, torch.cos), (1, torch.sin)):  # <R(distance) e0, e_channel>
        k[...] = 0.0
        k[..., channel] = 1.0
        found = scores(q, k, impl, **options, causal=False, rope_interleaved=True)
        torch.testing.assert_close(found, function(expected * angle).float())
        causal = scores(q, k, impl, **options, causal=True, rope_interleaved=True)
        torch.testing.assert_close(causal, found.masked_fill(torch.ones_like(found).triu(1).bool(), -torch.inf))


def test_figure_2_of_the_paper():
    assert [distance(11, j, 10, 4, "paper") for j in range(12)] == [9, 8, 7, 6, 5, 4, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("impl", PATHS)
def test_bidirectional_scores_are_transposed_when_query_and_key_change_places(device, impl):
    a, b = 0.5 * torch.randn(2, 1, 45, 1, 16, device=device, generator=torch.Generator(device).manual_seed(0))
    cos, sin = rotary_tables(16, 16, device)
    options = {"cos": cos, "sin": sin, "chunk_size": 16, "local_size": 4, "causal": False}
    torch.testing.assert_close(scores(a, b, impl, **options), scores(b, a, impl, **options).T)


@pytest.mark.parametrize("impl", PATHS)
@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("chunk_size, local_size, variant, edge", [
    (16, 4, "paper", 16), (16, 4, "chunkllama", 17), (16, 10, "paper", 12), (16, 10, "chunkllama", 12),
])
def test_equals_plain_rotary_attention_up_to_the_edge_and_not_beyond(device, impl, causal, chunk_size, local_size, variant, edge):
    assert edge == min(geometry(chunk_size, local_size, variant).top + 1, 2 * (chunk_size - local_size))
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, edge + 1, 2, 16, device=device, generator=generator) for _ in range(3))
    cos, sin = rotary_tables(chunk_size + 1, 16, device)

    def both(n):
        x = [t[:, :n] for t in (q, k, v)]
        chunked = dual_chunk_attention(
            *x, cos=cos, sin=sin, chunk_size=chunk_size, local_size=local_size, variant=variant, causal=causal, impl=impl)
        angles = [table[None, :n] for table in rotary_tables(n, 16, device)]
        plain = flash_attention(*(rotate(t, *angles, interleaved=False) for t in x[:2]), x[2], causal=causal, impl=impl)
        return chunked, plain

    torch.testing.assert_close(*both(edge))
    chunked, plain = both(edge + 1)
    difference = (chunked - plain).abs().amax((0, 2, 3))
    assert difference[edge] > 100 * (difference[:edge].max() if causal else torch.finfo(plain.dtype).eps)


@pytest.mark.slow
@pytest.mark.parametrize("impl", PATHS)
def test_reading_in_parts_equals_reading_at_once(device, impl):
    """Each part's queries against all keys so far, with the multiplier of their own positions; one token at a time at the end."""
    case = Case(seqlen_q=60, heads=2, kv_heads=1, head_dim=16, chunk_size=16, local_size=4, multiplier=True, dtype=torch.float32)
    q, k, v, _, options = case.inputs(device)
    multiplier = options.pop("logit_multiplier")
    whole = dual_chunk_attention(q, k, v, logit_multiplier=multiplier, impl=impl, **options)
    for begin, end in ((0, 7), (7, 31), (31, 57), (57, 58), (58, 59), (59, 60)):
        parts = q[:, begin:end], k[:, :end], v[:, :end]
        part = dual_chunk_attention(*parts, logit_multiplier=multiplier[:, begin:end], impl=impl, **options)
        torch.testing.assert_close(part, whole[:, begin:end])


BATCHED = Case(batch=3, seqlen_q=9, heads=2, kv_heads=2, head_dim=16, chunk_size=8, local_size=2, multiplier=True, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("case, scratch, launches", [
    (BATCHED, 1, 6),  # single key heads
    (BATCHED, 2 * (3 * 2 + 2) * 9 * 16 * 4, 2),  # two batch rows
    (Case(lengths_q=(5, 0, 8), heads=4, kv_heads=2, head_dim=16, chunk_size=8, local_size=2, causal=False, dtype=torch.float32), 1, 2),
], ids=str)
def test_a_call_that_is_cut_to_bound_its_scratch_gives_the_same(case, scratch, launches, device, monkeypatch):
    inputs = case.inputs(device)
    whole = run(inputs, "triton")
    launch, calls = forward._launch, []
    monkeypatch.setattr(forward, "_launch", lambda *arguments: calls.append(launch(*arguments)))
    monkeypatch.setattr(parts, "SCRATCH", scratch)
    cut = run(inputs, "triton")
    assert len(calls) == launches
    for name in whole:  # other strides may be compiled to other orders of sums
        torch.testing.assert_close(cut[name], whole[name])


@pytest.mark.gpu
@pytest.mark.parametrize("case", [
    replace(PACKED, dtype=torch.float32),
    Case(seqlen_q=61, heads=2, head_dim=32, causal=False, dtype=torch.float32),
], ids=str)
def test_repeated_runs_are_bitwise_equal(case, device):
    inputs = case.inputs(device)
    first = run(inputs, "triton")
    for _ in range(20):
        again = run(inputs, "triton")
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("causal", (False, True))
def test_nothing_depends_on_what_lies_beyond_a_sequence(device, causal):
    """Packed sequences with NaN in their neighbours, and in the tokens behind the last one."""
    total, rows = 70, slice(11, 50)
    cu_seqlens = torch.tensor((0, 11, 50, 63, 63), dtype=torch.int32, device=device)
    tensors = [torch.randn(total, 1, 16, device=device, generator=torch.Generator(device).manual_seed(i)) for i in range(4)]
    poisoned = [x.clone() for x in tensors]
    for x in poisoned:
        x[: rows.start] = torch.nan
        x[rows.stop:] = torch.nan
    cos, sin = rotary_tables(20, 16, device)
    results = []
    for q, k, v, dout in (tensors, poisoned):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out, lse = dual_chunk_attention(q, k, v, cos=cos, sin=sin, chunk_size=20, local_size=4, causal=causal, cu_seqlens_q=cu_seqlens,
                                        cu_seqlens_k=cu_seqlens, max_seqlen_q=39, max_seqlen_k=39, return_lse=True, impl="triton")
        out.backward(dout)
        assert (out[63:] == 0).all() and (lse[:, 63:] == -torch.inf).all()
        assert all((x.grad[63:] == 0).all() for x in (q, k, v))
        results.append([out[rows], lse[:, rows], *(x.grad[rows] for x in (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("impl", PATHS)
def test_rows_without_a_key_are_zero_with_finite_gradients(device, impl):
    """More queries than keys, and the first chunk where only far keys are attended to."""
    for case, empty in ((Case(seqlen_q=40, seqlen_k=9), 31), (Case(seqlen_q=60, chunk_size=16, local_size=4, stages=("inter",)), 24)):
        q, k, v, _, options = replace(case, head_dim=16, dtype=torch.float32).inputs(device)
        tensors = [x.requires_grad_() for x in (q, k, v)]
        out, lse = call(tensors, options, impl)
        assert (out[:, :empty] == 0).all() and (lse[..., :empty] == -torch.inf).all() and lse[..., empty:].isfinite().all()
        out.sum().backward()
        assert (q.grad[:, :empty] == 0).all() and all(x.grad.isfinite().all() for x in tensors)


@pytest.mark.slow
def test_reference_gradients_by_gradcheck():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 4, dtype=torch.float64, requires_grad=True) for n, h in ((6, 2), (9, 1), (9, 1)))
    multiplier = torch.rand(6)
    cos, sin = rotary_tables(4, 2)
    for causal in (True, False):
        def attend(q, k, v, causal=causal):
            return dual_chunk_attention(q, k, v, cos=cos, sin=sin, chunk_size=4, local_size=1, causal=causal, logit_multiplier=multiplier,
                                        return_lse=True)

        assert torch.autograd.gradcheck(attend, (q, k, v))
        assert torch.autograd.gradgradcheck(lambda *x, attend=attend: attend(*x)[0], (q, k, v))


@pytest.mark.slow
def test_compiles_as_one_graph(device):
    q, k, v, dout, options = Case(seqlen_q=40, head_dim=16, chunk_size=16, local_size=4, dtype=torch.float32).inputs(device)
    results = []
    for attend in (dual_chunk_attention, torch.compile(dual_chunk_attention, fullgraph=True, backend="aot_eager")):
        tensors = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*tensors, **options, impl="triton")
        results.append([out, *torch.autograd.grad(out, tensors, dout)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_no_synchronisation_linear_memory_and_no_compilation_by_length(device):
    def step(n):
        q, k, v, dout, options = Case(seqlen_q=n, heads=2, head_dim=64, chunk_size=1024, local_size=256).inputs(device)
        tensors = [x.requires_grad_() for x in (q, k, v)]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            dual_chunk_attention(*tensors, **options, impl="triton").backward(dout)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return torch.cuda.max_memory_allocated() - before

    step(4096)
    kernel = forward.dual_chunk_fwd_kernel
    compiled = {id(x) for cache in kernel.device_caches.values() for x in cache[0].values()}
    small, large = step(8192), step(16384)
    assert large < 2.2 * small
    for n in (1, 17, 1000, 5555):
        step(n)
    assert {id(x) for cache in kernel.device_caches.values() for x in cache[0].values()} == compiled


TABLE = torch.ones(32, 8)
SOUND = {"cos": TABLE, "sin": TABLE, "chunk_size": 16, "local_size": 4}


@pytest.mark.parametrize("changes, error, message", [
    ({"chunk_size": 0}, ValueError, "chunk_size: must be an int of at least 1, got 0"),
    ({"chunk_size": 16.0}, ValueError, "chunk_size: must be an int of at least 1, got 16.0"),
    ({"local_size": 16}, ValueError, "local_size: must be less than chunk_size=16, got 16"),
    ({"local_size": -1}, ValueError, "local_size: must be an int of at least 0, got -1"),
    ({"variant": "qwen"}, ValueError, "variant: must be one of 'paper', 'chunkllama', got 'qwen'"),
    ({"stages": ("intra", "far")}, ValueError, "stages: must name one or more of 'intra', 'successive', 'inter'"),
    ({"stages": ()}, ValueError, "stages: must name one or more"),
    ({"stages": "intra"}, ValueError, "stages: must name one or more"),
    ({"cos": TABLE[:15], "sin": TABLE[:15]}, ValueError, "cos: must have a row for each of the 16 positions of these chunks, got 15"),
    ({"sin": TABLE[:, :4].contiguous()}, ValueError, "sin: must have cos's 8 columns, got 4"),
    ({"cos": torch.ones(32, 9)}, ValueError, "cos: must be .positions, rotary_dim / 2. with rotary_dim up to q's 16"),
    ({"cos": TABLE.double()}, TypeError, "cos: must be float32, got torch.float64"),
    ({"sin": [1.0]}, TypeError, "sin: must be a tensor, got list"),
    ({"sin": torch.ones(8, 32).T}, ValueError, "sin: must be contiguous"),
    ({"causal": "no"}, TypeError, "causal: must be True or False, got 'no'"),
    ({"rope_interleaved": "no"}, TypeError, "rope_interleaved: must be True or False, got 'no'"),
    ({"deterministic": "yes"}, TypeError, "deterministic: must be True or False or None, got 'yes'"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale: must be a finite number.* got nan"),
    ({"logit_multiplier": 2.0}, TypeError, "logit_multiplier: must be a float32 tensor, got float"),
    ({"logit_multiplier": torch.ones(9)}, ValueError, r"logit_multiplier: must have shape \(8,\) or \(2, 8\), got \(9,\)"),
    ({"logit_multiplier": torch.ones(8).double()}, TypeError, "logit_multiplier: must be float32"),
    ({"impl": "cuda"}, ValueError, "impl: must be None or one of 'gluon', 'triton', 'cpu', 'reference', got 'cuda'"),
    ({"impl": "triton", "logit_multiplier": torch.ones(8, requires_grad=True)}, NotImplementedError,
     "logit_multiplier: only impl=\"reference\" has a gradient"),
])
def test_errors_name_the_argument(changes, error, message, device):
    arguments = {name: x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
                 for name, x in (SOUND | changes).items()}
    x = torch.zeros(2, 8, 4, 16, device=device)
    with pytest.raises(error, match=message):
        dual_chunk_attention(x, x, x, **arguments)


def test_pairs_of_the_stages_are_counted_right():
    for case in (Case(seqlen_q=100), Case(seqlen_q=50, seqlen_k=100), Case(seqlen_q=90, causal=False)):
        stages = [replace(case, stages=(stage,)).pairs() for stage in ("intra", "successive", "inter")]
        (m, n), = case.lengths
        expected = m * n if not case.causal else sum(min(max(i + n - m + 1, 0), n) for i in range(m))
        assert sum(stages) == expected and not math.isclose(stages[0], expected)
