"""latent_decode_attention's kernels against the reference in float64, under the 2x rule; in the interpreter where there is no GPU."""

from dataclasses import replace

import pytest
import torch
from compiled_kernels import compiled_kernels
from torch._dynamo.testing import CompileCounterWithBackend

from attnzoo_kernels import decode_attention, latent_decode_attention
from attnzoo_kernels.decode import latent
from attnzoo_kernels.decode.cases import LATENT_CORRECTNESS, LatentCase
from attnzoo_kernels.decode.tiles import Tile
from benchmarks.accuracy import assert_accurate

GPU = torch.cuda.is_available()
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if GPU else (torch.float32, torch.float16)  # the interpreter gets bfloat16 wrong
CASES = [replace(case, dtype=dtype) for dtype in DTYPES for case in LATENT_CORRECTNESS
         if GPU or max(case.lengths, default=0) <= 300 and (dtype == torch.float32 or case.head_dim in (80, 576))]


def run(inputs, impl: str, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Output and LSE; rows without a key have their LSE replaced by a number."""
    q, cache = (x.to(dtype or x.dtype) for x in inputs[:2])
    out, lse = latent_decode_attention(q, cache, **inputs.options, return_lse=True, impl=impl)
    return {"out": out, "lse": lse.masked_fill(lse == -torch.inf, 7.0)}


def check(inputs):
    ours, eager, exact = run(inputs, "triton"), run(inputs, "reference"), run(inputs, "reference", torch.float64)
    assert_accurate(ours, eager, exact)


@pytest.fixture
def tiles(monkeypatch):
    """Launches take the tile that the test appends."""
    chosen = []
    monkeypatch.setattr(latent, "latent_tile", lambda arch, block_dv, rows, itemsize, tma: replace(chosen[-1], tma=chosen[-1].tma and tma))
    if GPU:
        monkeypatch.setattr(latent, "multiprocessors", lambda device: 1)
    latent._plan.cache_clear()
    yield chosen
    latent._plan.cache_clear()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, device, poisoned):
    check(case.inputs(device))


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == torch.float16 and not case.page], ids=str)
@pytest.mark.parametrize("tile", ((16, 64, 4, 3, 5), (32, 64, 8, 3, 5), (64, 64, 8, 2, 5)) if GPU else ((32, 32, 4, 1, 5),), ids=str)
def test_tiles_that_tma_reads_have_at_most_twice_the_error_of_eager(case, tile, tiles, device, poisoned):
    """A Hopper GPU takes them for values of more than 256 columns."""
    tiles.append(Tile(*tile, tma=True))
    check(case.inputs(device))


@pytest.mark.parametrize("programs", (1, 3, 7, 64))
@pytest.mark.parametrize("heads", (6, 33))
def test_shares_of_any_number_of_programs_give_the_same(programs, heads, tiles, device, poisoned):
    tiles.append(Tile(16, 16, 4, 1, programs))
    check(LatentCase(lengths=(97, 0, 130, 3, 64), heads=heads, seqlen_q=2, head_dim=48, value_dim=32, dtype=torch.float32).inputs(device))


def test_it_is_decode_attention_whose_values_are_the_first_columns(device):
    q, cache, options = LatentCase(lengths=(97, 0, 5), heads=4, seqlen_q=3, head_dim=40, value_dim=24, dtype=torch.float64).inputs(device)
    assert options.pop("value_dim") == 24
    expected = decode_attention(q, cache[:, :, None], cache[:, :, None, :24], **options, return_lse=True, impl="reference")
    found = latent_decode_attention(q, cache, value_dim=24, **options, return_lse=True, impl="reference")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("impl", ("triton", "reference"))
def test_rows_without_a_key_and_queries_that_are_not_contiguous(impl, device):
    case = LatentCase(lengths=(0, 2, 40), max_len=50, seqlen_q=4, head_dim=48, value_dim=32, dtype=torch.float32)
    q, cache, options = case.inputs(device)
    apart = q.transpose(1, 2).contiguous().transpose(1, 2)
    (out, lse), again = (latent_decode_attention(x, cache, **options, return_lse=True, impl=impl) for x in (q, apart))
    empty = torch.tensor([[True] * 4, [True, True, False, False], [False] * 4], device=device)
    assert torch.equal((out == 0).all(-1).all(-1), empty) and torch.equal(lse == -torch.inf, empty[:, None].expand_as(lse))
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("impl", ("triton", "reference"))
@pytest.mark.parametrize("scale", (-0.3, 0.0))
def test_scales_that_are_not_positive(impl, scale, device):
    q, cache, options = LatentCase(lengths=(40, 17), heads=4, head_dim=48, value_dim=32, dtype=torch.float32).inputs(device)
    out, eager, exact = (latent_decode_attention(q.to(dtype), cache.to(dtype), **options, softmax_scale=scale, impl=by)
                         for dtype, by in ((torch.float32, impl), (torch.float32, "reference"), (torch.float64, "reference")))
    assert_accurate(out, eager, exact)


@pytest.mark.slow
def test_compiles_whole_and_at_most_twice_as_lengths_change(device):
    counter = CompileCounterWithBackend("aot_eager")
    dtype = torch.bfloat16 if GPU else torch.float32
    compiled = torch.compile(lambda q, cache, **options: latent_decode_attention(q * 1.0, cache, **options, impl="triton"), fullgraph=True,
                             backend=counter)
    for max_len in (17, 40, 65):
        q, cache, options = LatentCase(lengths=(max_len, 5), head_dim=48, value_dim=32, dtype=dtype).inputs(device)
        assert torch.equal(compiled(q, cache, **options), latent_decode_attention(q, cache, **options, impl="triton"))
    assert counter.frame_count <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("heads", (16, 128))
@pytest.mark.parametrize("batch, longest", ((1, 400), (40, 400), (300, 60)))  # one sequence for all programs, some a program, and many
def test_few_and_many_sequences(batch, longest, heads):
    lengths = tuple(longest - 37 * b % (longest - 20) for b in range(batch))
    check(LatentCase(lengths=lengths, max_len=longest, heads=heads).inputs("cuda"))


@pytest.mark.gpu
def test_repeated_runs_are_bitwise_equal():
    inputs = LatentCase(lengths=(2570, 31, 1500), heads=40).inputs("cuda")
    first = run(inputs, "triton")
    for _ in range(20):
        again = run(inputs, "triton")
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
def test_a_graph_follows_lengths_and_nothing_waits():
    q, cache, options = LatentCase(lengths=(300, 7, 1000), max_len=1024).inputs("cuda")
    lengths, cache = options["cache_seqlens"], cache.nan_to_num(0.5)
    latent_decode_attention(q, cache, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = latent_decode_attention(q, cache, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for new in ((300, 7, 1000), (1, 1024, 0), (512, 513, 64)):
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        graph.replay()
        assert torch.equal(captured, latent_decode_attention(q, cache, **options))


@pytest.mark.gpu
def test_no_compiling_for_a_new_length_or_batch(compiled):
    for index, (batch, length) in enumerate([(1, 64), (1, 65), (2, 999), (3, 1024), (7, 128), (1, 1)]):
        q, cache, options = LatentCase(lengths=(length,) * batch).inputs("cuda")
        latent_decode_attention(q, cache, **options)
        if index == 0:
            before = len(compiled)
    assert len(compiled) == before, compiled[before:]


@pytest.mark.gpu
def test_beyond_two_to_the_31_elements():
    cache = torch.randn(4, 2**20, 576, device="cuda", dtype=torch.bfloat16)
    assert cache.numel() > 2**31
    q = torch.randn(4, 1, 16, 576, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([0, 0, 0, 2**20], dtype=torch.int32, device="cuda")
    cache[3, :-200] = 0
    q[3, :, :, :512] *= 8  # the last keys count
    out = latent_decode_attention(q, cache, value_dim=512, cache_seqlens=lengths)[3:]
    options = {"value_dim": 512, "cache_seqlens": torch.full((1,), 2**20, dtype=torch.int32, device="cuda"), "impl": "reference"}
    head = slice(0, 1)  # of all heads' scores the reference makes copies of keys
    eager = latent_decode_attention(q[3:, :, head], cache[3:], **options)
    exact = latent_decode_attention(q[3:, :, head].double(), cache[3:].double(), **options)
    assert_accurate(out[:, :, head], eager, exact)


@pytest.mark.slow
@pytest.mark.parametrize("arch, shared_memory", ((80, 166912), (90, 232448)))
def test_tiles_fit_and_hardly_spill(arch, shared_memory):
    """Triton 3.6 spills 16 bytes of tiles that were the fastest nevertheless."""
    kernels = compiled_kernels("decode_latent_ahead_of_time.py", arch)
    splits = [k for k in kernels if k["kernel"] == "latent_split_kernel"]
    assert sorted((k["BLOCK_M"], k["TMA"]) for k in splits) == [(16, 0), (16, 0), (16, 2), (64, 2)] if arch == 90 else len(splits) == 4
    wrong = [k for k in kernels if k["shared"] > shared_memory or k["clash"] or k["stale"] or k["stack"] > (16 if k["TMA"] else 0)]
    assert not wrong, "\n".join(map(str, wrong))


INT32 = torch.tensor([3, 8], dtype=torch.int32)


@pytest.mark.parametrize("changes, error, message", [
    ({"q": torch.zeros(2, 4, 20)}, ValueError, r"q: must be \(batch, seqlen_q, heads, head_dim\), got shape \(2, 4, 20\)"),
    ({"q": torch.zeros(2, 1, 0, 20)}, ValueError, "q: must have a head, got shape"),
    ({"q": torch.zeros(2, 1, 20, 4).mT}, ValueError, "q: last dimension must be contiguous, got stride 4"),
    ({"q": torch.zeros(2, 1, 4, 20).long()}, TypeError, "q: must be float16, .* got torch.int64"),
    ({"cache": torch.zeros(2, 8, 1, 20)}, ValueError, r"cache: must be \(batch, max_len, head_dim\), got shape \(2, 8, 1, 20\)"),
    ({"cache": torch.zeros(2, 8, 24)}, ValueError, r"cache: must have shape \(2, 8, 20\), got \(2, 8, 24\)"),
    ({"cache": torch.zeros(3, 8, 20)}, ValueError, "cache: batch must be q's 2, got 3"),
    ({"cache": torch.zeros(2, 8, 20).half()}, TypeError, "cache: must have q's dtype torch.float32, got torch.float16"),
    ({"cache": torch.zeros(2, 20, 8).mT}, ValueError, "cache: last dimension must be contiguous, got stride 8"),
    ({"cache": "rows"}, TypeError, "cache: must be a tensor, got str"),
    ({"value_dim": 21}, ValueError, "value_dim: must be at most 512, and at most 64 less than q's width 20, got 21"),
    ({"value_dim": 2.0}, ValueError, "value_dim: must be an integer of at least 1, got 2.0"),
    ({"q": torch.zeros(2, 1, 4, 80), "cache": torch.zeros(2, 8, 80)}, ValueError, "value_dim: .* less than q's width 80, got 12"),
    ({"cache_seqlens": INT32 + 1}, ValueError, r"cache_seqlens: must lie between 0 and the cache's 8 tokens, got \[4, 9\]"),
    ({"block_table": torch.zeros(2, 1)}, ValueError, r"block_table: must be int32 \(batch, max_blocks\)"),
    ({"block_table": torch.tensor([[0], [2]]).int()}, ValueError, "block_table: row 1 needs a page from 0 to 1 .* got 2"),
    ({"cache": torch.zeros(0, 8, 20), "block_table": torch.zeros(2, 1).int()}, ValueError, "cache: must have a page, and rows in it"),
    ({"causal": "no"}, TypeError, "causal: must be True or False, got 'no'"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale: must be a finite number.* got nan"),
    ({"impl": "cuda"}, ValueError, "impl: must be None or one of 'triton', 'reference', got 'cuda'"),
    ({"impl": "triton", "q": torch.zeros(2, 1, 4, 20, requires_grad=True)}, NotImplementedError, "q: requires a gradient"),
])
def test_errors_name_the_argument(changes, error, message, device):
    arguments = {"q": torch.zeros(2, 1, 4, 20), "cache": torch.zeros(2, 8, 20), "value_dim": 12, "cache_seqlens": INT32} | changes
    if arguments.get("impl") == "triton":
        arguments = {name: x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
                     for name, x in arguments.items()}
    with pytest.raises(error, match=message):
        latent_decode_attention(arguments.pop("q"), arguments.pop("cache"), **arguments)
