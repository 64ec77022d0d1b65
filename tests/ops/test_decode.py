"""decode_attention's kernels against the reference in float64, under the 2x rule; in the interpreter where there is no GPU."""

from dataclasses import replace

import pytest
import torch
from compiled_kernels import compiled_kernels
from torch._dynamo.testing import CompileCounterWithBackend

from attnzoo_kernels import decode_attention, flash_attention
from attnzoo_kernels.decode import forward
from attnzoo_kernels.decode.cases import CORRECTNESS, Case
from attnzoo_kernels.decode.tiles import Tile, decode_tile
from benchmarks.accuracy import assert_accurate

GPU = torch.cuda.is_available()
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if GPU else (torch.float32, torch.float16)  # the interpreter gets bfloat16 wrong
CASES = [replace(case, dtype=dtype) for dtype in DTYPES for case in CORRECTNESS
         if GPU or max(case.lengths, default=0) <= 300 and (dtype == torch.float32 or case.head_dim == 64)]


def run(inputs, impl: str, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Output and LSE; rows without a key have their LSE replaced by a number."""
    tensors = [x if x.dtype == torch.float8_e4m3fn else x.to(dtype or x.dtype) for x in inputs[:3]]
    tensors[0] = tensors[0].to(dtype or tensors[0].dtype)
    out, lse = decode_attention(*tensors, **inputs.options, return_lse=True, impl=impl)
    return {"out": out, "lse": lse.masked_fill(lse == -torch.inf, 7.0)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, device, poisoned):
    inputs = case.inputs(device)
    ours, eager, exact = run(inputs, "triton"), run(inputs, "reference"), run(inputs, "reference", torch.float64)
    assert_accurate(ours, eager, exact)


@pytest.fixture
def by_pairs(monkeypatch):
    """Values of 8 bits are read as pairs of columns, also in tiles that read single bytes."""
    monkeypatch.setattr(forward, "decode_tile", lambda *arguments, **more: replace(decode_tile(*arguments, **more), pairs=True))
    forward._plan.cache_clear()
    yield
    forward._plan.cache_clear()


@pytest.mark.parametrize("width", (32, 64, 128, 256))
@pytest.mark.parametrize("rows", (4, 32, 64))
def test_tiles_of_pairs_are_for_values_that_can_be_read_so(width, rows):
    shape = 90, width, width, rows, 2, 0.1
    assert decode_tile(*shape, paged=True, pairs=True).pairs == (width == 128 and rows <= 16)  # what was measured
    assert decode_tile(*shape, paged=True, shared=rows == 64, pairs=False) == decode_tile(*shape)
    assert not decode_tile(89, *shape[1:], pairs=True).pairs


@pytest.mark.parametrize("case", [case for case in CASES if case.fp8], ids=str)
def test_pairs_of_columns_have_at_most_twice_the_error_of_eager(case, by_pairs, device, poisoned):
    inputs = case.inputs(device)
    ours, eager, exact = run(inputs, "triton"), run(inputs, "reference"), run(inputs, "reference", torch.float64)
    assert_accurate(ours, eager, exact)


@pytest.mark.parametrize("case", [
    Case(lengths=(97, 0, 5), head_dim=40), Case(lengths=(97, 33), seqlen_q=5, window_size=(20, 0), alibi=True, sinks=True),
    Case(lengths=(97, 33), seqlen_q=5, causal=False, softcap=2.0)], ids=str)
def test_reference_is_flash_attentions_on_each_sequence(case):
    inputs = replace(case, dtype=torch.float64).inputs()
    options = {name: value for name, value in inputs.options.items() if name != "cache_seqlens"}
    out, lse = decode_attention(*inputs[:3], **inputs.options, return_lse=True)
    for b, length in enumerate(case.lengths):
        row = slice(b, b + 1)
        expected = flash_attention(inputs.q[row], inputs.k_cache[row, :length], inputs.v_cache[row, :length], **options, return_lse=True)
        torch.testing.assert_close((out[row], lse[row]), expected)


def test_segments_are_one_softmax_over_the_scores_of_their_queries():
    x = Case(lengths=(57, 0, 40), seqlen_q=3, kv_heads=8, segments=True, dtype=torch.float64).inputs()
    out, lse = decode_attention(*x[:3], **x.options, return_lse=True)
    for b, (row, length) in enumerate(zip(x.options["segments"].tolist(), (57, 0, 40), strict=True)):
        scores, values = [], []
        for q, (begin, end) in zip(x.q[b], row, strict=True):
            keys = slice(begin, min(end, length))
            scores.append(torch.einsum("hd,khd->hk", q, x.k_cache[b, keys]) * 64**-0.5)
            values.append(x.v_cache[b, keys])
        scores, values = torch.cat(scores, 1), torch.cat(values)
        torch.testing.assert_close((out[b, 0], lse[b, :, 0]), (torch.einsum("hk,khd->hd", scores.softmax(1), values), scores.logsumexp(1)))


def test_segments_that_are_not_right_are_refused():
    x = Case(lengths=(57, 40), seqlen_q=3, segments=True).inputs()
    segments = x.options.pop("segments")
    for options, message in (
            ({"segments": segments.long()}, "segments: must be int32"), ({"segments": segments[:, :2]}, "segments: must be int32"),
            ({"segments": segments.mT.contiguous().mT}, "and contiguous"),
            ({"segments": segments, "window_size": (5, 0)}, "must be None with block_table, window_size")):
        with pytest.raises(ValueError, match=message):
            decode_attention(*x[:3], **x.options | options)
    with pytest.raises(ValueError, match=r"segments: must have a range of keys for each row, got shape \(2, 0, 2\)"):
        decode_attention(x.q[:, :0], *x[1:3], **x.options, segments=segments[:, :0].contiguous())


@pytest.mark.parametrize("programs", (1, 2, 3, 7, 64))
@pytest.mark.parametrize("tma", (False, True))
@pytest.mark.parametrize("segments", (False, True))
def test_shares_of_any_number_of_programs_give_the_same(programs, tma, segments, device, monkeypatch, poisoned):
    window = (-1, -1) if segments else (150, 0)
    case = Case(lengths=(97, 0, 200, 3, 64), seqlen_q=2, window_size=window, sinks=True, dtype=torch.float32, segments=segments)
    inputs = case.inputs(device)
    tile = Tile(16, 32, 4, 1, programs, tma=tma)
    if GPU:
        monkeypatch.setattr(forward, "_multiprocessors", lambda index: 1)
    monkeypatch.setattr(forward, "decode_tile", lambda *_, **more: tile)
    forward._plan.cache_clear()
    ours = run(inputs, "triton")
    forward._plan.cache_clear()
    eager, exact = run(inputs, "reference"), run(inputs, "reference", torch.float64)
    assert_accurate(ours, eager, exact)


@pytest.mark.parametrize("impl", ("triton", "reference"))
def test_pages_may_be_shared_and_give_what_rows_give(impl, device):
    case = Case(lengths=(70, 90), max_len=96, seqlen_q=2, dtype=torch.float32)
    q, k, v, options = case.inputs(device)
    k, v = k.nan_to_num(3.0), v.nan_to_num(3.0)
    k[1, :64], v[1, :64] = k[0, :64], v[0, :64]
    pages = [torch.cat([x[0].unflatten(0, (3, 32)), x[1, 64:][None]]) for x in (k, v)]
    table = torch.tensor([[0, 1, 2], [0, 1, 3]], dtype=torch.int32, device=device)
    expected = decode_attention(q, k, v, **options, return_lse=True, impl=impl)
    found = decode_attention(q, *pages, **options, block_table=table, return_lse=True, check=True, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_wrong_pages_are_refused(device):
    q, k, v, options = Case(lengths=(40, 5), page=16, dtype=torch.float32).inputs(device)
    table = options.pop("block_table")
    for words, change in (("block_table: row 0 needs a page from 0 to 8 at 1 for its 40 tokens, got 9", (0, 1, 9)),
                          ("block_table: row 1 needs a page .* at 0 for its 5 tokens, got -1", (1, 0, -1))):
        wrong = table.clone()
        wrong[change[:2]] = change[2]
        with pytest.raises(ValueError, match=words):
            decode_attention(q, k, v, **options, block_table=wrong, check=True)
    for words, wrong in (("block_table: must be int32", table.long()), ("with batch 2, got", table[:1])):
        with pytest.raises(ValueError, match=words):
            decode_attention(q, k, v, **options, block_table=wrong)
    with pytest.raises(ValueError, match="cache_seqlens: must lie between 0 and the cache's 48"):
        decode_attention(q, k, v, cache_seqlens=options["cache_seqlens"] + 9, block_table=table, check=True)


@pytest.mark.gpu
def test_repeated_runs_are_bitwise_equal(device):
    inputs = Case(lengths=(257, 31, 150), dtype=torch.float32).inputs(device)
    first = run(inputs, "triton")
    for _ in range(20):
        again = run(inputs, "triton")
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("impl", ("triton", "reference"))
def test_rows_without_a_key(impl, device):
    case = Case(lengths=(0, 2, 40), max_len=50, seqlen_q=4, dtype=torch.float32)
    q, k, v, options = case.inputs(device)
    out, lse = decode_attention(q, k, v, **options, return_lse=True, impl=impl)
    empty = torch.tensor([[True] * 4, [True, True, False, False], [False] * 4], device=device)
    assert torch.equal((out == 0).all(-1).all(-1), empty) and torch.equal(lse == -torch.inf, empty[:, None].expand_as(lse))
    sinks = torch.randn(case.heads, device=device)
    out, lse = decode_attention(q, k, v, **options, sinks=sinks, return_lse=True, impl=impl)
    assert (out[empty] == 0).all() and torch.equal(lse.transpose(1, 2)[empty], sinks.expand(6, -1))


@pytest.mark.slow
def test_compiles_whole_and_at_most_twice_as_lengths_change(device):
    counter = CompileCounterWithBackend("aot_eager")
    dtype = torch.bfloat16 if GPU else torch.float32
    compiled = torch.compile(lambda q, *x, cache_seqlens: decode_attention(q * 1.0, *x, cache_seqlens=cache_seqlens, impl="triton"),
                             fullgraph=True, backend=counter)
    for max_len in (17, 40, 65):
        inputs = Case(lengths=(max_len, 5), dtype=dtype).inputs(device)
        cache_seqlens = inputs.options["cache_seqlens"]
        expected = decode_attention(*inputs[:3], cache_seqlens=cache_seqlens, impl="triton")
        assert torch.equal(compiled(*inputs[:3], cache_seqlens=cache_seqlens), expected)
    assert counter.frame_count <= 2


@pytest.mark.gpu
def test_a_graph_follows_lengths_and_nothing_waits():
    case = Case(lengths=(300, 7, 1000), max_len=1024)
    inputs = case.inputs("cuda")
    lengths = inputs.options["cache_seqlens"]
    full = [x.nan_to_num(0.5) for x in inputs[1:3]]
    decode_attention(inputs.q, *full, cache_seqlens=lengths)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = decode_attention(inputs.q, *full, cache_seqlens=lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for new in ((300, 7, 1000), (1, 1024, 0), (512, 513, 64)):
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        graph.replay()
        assert torch.equal(captured, decode_attention(inputs.q, *full, cache_seqlens=lengths))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", (1, 40, 160))  # fewer key heads than multiprocessors, more, and more than programs
def test_few_and_many_sequences(batch):
    inputs = Case(lengths=tuple(40 + 37 * b % 301 for b in range(batch)), max_len=400, heads=16, kv_heads=4, head_dim=128).inputs("cuda")
    ours, eager, exact = run(inputs, "triton"), run(inputs, "reference"), run(inputs, "reference", torch.float64)
    assert_accurate(ours, eager, exact)


@pytest.mark.gpu
def test_no_compiling_for_a_new_length_or_batch(compiled):
    for index, (batch, length) in enumerate([(1, 64), (1, 65), (2, 999), (3, 1024), (7, 128), (1, 1)]):
        inputs = Case(lengths=(length,) * batch).inputs("cuda")
        decode_attention(*inputs[:3], **inputs.options)
        if index == 0:
            before = len(compiled)
    assert len(compiled) == before, compiled[before:]


@pytest.mark.gpu
def test_beyond_two_to_the_31_elements():
    length = 2**20
    k = torch.randn(1, length, 17, 128, device="cuda", dtype=torch.bfloat16)
    assert k.numel() > 2**31
    q = torch.randn(1, 1, 17, 128, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((1,), length, dtype=torch.int32, device="cuda")
    out = decode_attention(q, k, k, cache_seqlens=lengths, window_size=(200, 0))
    options = {"cache_seqlens": torch.full_like(lengths, 201), "impl": "reference"}
    eager = decode_attention(q, k[:, -201:], k[:, -201:], **options)
    exact = decode_attention(q.double(), k[:, -201:].double(), k[:, -201:].double(), **options)
    assert_accurate(out, eager, exact)


@pytest.mark.slow
@pytest.mark.parametrize("arch, shared_memory", ((80, 101376), (90, 232448)))  # for sm_80 what sm_86, 89 and 120 have
def test_tiles_fit_and_those_of_16_bits_do_not_spill_and_read_whole_vectors(arch, shared_memory):
    kernels = compiled_kernels("decode_ahead_of_time.py", arch)
    assert len(kernels) == 2 * (3 * 3 + 3 + 1 + 4 + 6 + 1 + (2 if arch >= 89 else 0))
    # the ptxas of Triton 3.6 spills two registers of the narrowest kernel with segments
    wrong = [k for k in kernels if k["shared"] > shared_memory
             or ((k["stack"] > (8 if k.get("SEGMENTS") and k["VALUE_DIM"] == 64 else 0) or k["narrow"]) and k["PRECISION"] == "tf32")]
    assert not wrong, "\n".join(map(str, wrong))


INT32 = torch.tensor([3, 8], dtype=torch.int32)


@pytest.mark.parametrize("changes, error, message", [
    ({"cache_seqlens": 3}, TypeError, "cache_seqlens: must be a tensor, got int"),
    ({"cache_seqlens": INT32.long()}, TypeError, "cache_seqlens: must be int32, got torch.int64"),
    ({"cache_seqlens": INT32[:1]}, ValueError, r"cache_seqlens: must have shape \(batch,\) = \(2,\), got \(1,\)"),
    ({"cache_seqlens": INT32 + 1}, ValueError, r"cache_seqlens: must lie between 0 and the cache's 8 tokens, got \[4, 9\]"),
    ({"cache_seqlens": INT32 - 4}, ValueError, r"cache_seqlens: must lie between 0 and the cache's 8 tokens, got \[-1, 4\]"),
    ({"k_cache": torch.zeros(2, 8, 3, 16)}, ValueError, "k_cache: its 3 heads must divide q's 4|v_cache: must have k_cache's 3 heads"),
    ({"k_cache": torch.zeros(2, 8, 2, 8)}, ValueError, "k_cache: head_dim must be q's 16, got 8"),
    ({"v_cache": torch.zeros(2, 9, 2, 16)}, ValueError, "v_cache: must have k_cache's leading shape"),
    ({"v_cache": torch.zeros(2, 8, 2, 16).half()}, TypeError, "v_cache: must have q's dtype torch.float32, got torch.float16"),
    ({"v_cache": torch.zeros(2, 8, 2, 16).to(torch.float8_e4m3fn)}, TypeError,
     "v_cache: must be float16, .* or torch.float8_e4m3fn as both k_cache and v_cache, got torch.float8_e4m3fn$"),
    ({"k_cache": torch.zeros(2, 8, 2, 16).to(torch.float8_e4m3fn)}, TypeError, "v_cache: must have k_cache's dtype .*e4m3fn"),
    ({"k_cache": torch.zeros(2, 8, 2, 16).to(torch.float8_e5m2)}, TypeError,
     "k_cache: must be float16, .* or torch.float8_e4m3fn as both k_cache and v_cache, got torch.float8_e5m2$"),
    ({"v_scale": torch.tensor([1.0, 0.0])}, ValueError, r"v_scale: must be positive, got \[1.0, 0.0\]"),
    ({"k_scale": torch.ones(2).half()}, TypeError, "k_scale: must be float32, got torch.float16"),
    ({"k_scale": torch.ones(4)}, ValueError, r"k_scale: must have shape \(2,\), got \(4,\)"),
    ({"q": torch.zeros(2, 4, 16)}, ValueError,
     r"q: must be .batch, seqlen, heads, head_dim., got shape .*; it takes no packed input, and one token of each sequence is q.:, None."),
    ({"causal": "no"}, TypeError, "causal: must be True or False, got 'no'"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale: must be a finite number.* got nan"),
    ({"softcap": -1.0}, ValueError, "softcap: must be at least 0"),
    ({"sinks": torch.zeros(3)}, ValueError, r"sinks: must have shape \(4,\), got \(3,\)"),
    ({"window_size": (4,)}, ValueError, "window_size: must be two ints"),
    ({"impl": "cuda"}, ValueError, "impl: must be None or one of 'triton', 'reference', got 'cuda'"),
    ({"impl": "triton", "q": torch.zeros(2, 1, 4, 16, requires_grad=True)}, NotImplementedError, "q: requires a gradient"),
])
def test_errors_name_the_argument(changes, error, message, device):
    arguments = {"q": torch.zeros(2, 1, 4, 16), "k_cache": torch.zeros(2, 8, 2, 16), "v_cache": torch.zeros(2, 8, 2, 16),
                 "cache_seqlens": INT32} | changes
    if arguments.get("impl") == "triton":
        arguments = {name: x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
                     for name, x in arguments.items()}
    with pytest.raises(error, match=message):
        decode_attention(arguments.pop("q"), arguments.pop("k_cache"), arguments.pop("v_cache"), **arguments)
