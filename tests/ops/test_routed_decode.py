"""The newest queries of moba, msa and nsa, whose blocks decode's kernels read as pages of the cache: accuracy, bounds and what is taken."""

import importlib
import os
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from paths import GPU

from attnzoo_kernels import dispatch, moba_attention, moba_blocks, msa_attention, msa_blocks, nsa_attention, routed_attention
from attnzoo_kernels.nsa.cases import SMALL
from attnzoo_kernels.nsa.cases import Case as NSACase
from benchmarks.accuracy import assert_accurate

DEVICE = "cuda" if GPU else "cpu"
TRITON = GPU or os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(not TRITON, reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1")
DTYPES = (torch.float16, torch.bfloat16, torch.float32) if GPU else (torch.float16, torch.float32)  # the interpreter gets bfloat16 wrong
BLOCK, MAX_LEN = 16, 90  # the last block of a cache is not whole, and the last of all ends with the storage
LENGTHS = (33, 90, 1, 16, 90)  # an own block of one token, one up to the cache's end, a first token and a whole block
NSA = {"compress_size": 8, "compress_stride": 4, "window": 12}


def draw(*shape, dtype, seed):
    return torch.randn(shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)).to(dtype)


def caches(kv_heads, width, dtype, lengths=LENGTHS, max_len=MAX_LEN, count=2):
    """Rows of max_len tokens, packed one after the other; those after a row's length are NaN."""
    unused = torch.arange(max_len, device=DEVICE) >= torch.tensor(lengths, device=DEVICE)[:, None]
    rows = (draw(len(lengths), max_len, kv_heads, width, dtype=dtype, seed=seed) for seed in range(count))
    return [x.masked_fill(unused[..., None, None], torch.nan).flatten(0, 1) for x in rows]


def packed(lengths=LENGTHS, max_len=MAX_LEN):
    """As `Newest.packed` has them: one query for each row's keys, and none for what follows them."""
    queries = torch.arange(1, 2 * len(lengths) + 2, device=DEVICE, dtype=torch.int32) // 2
    keys = [bound for row, length in enumerate(lengths) for bound in (row * max_len, row * max_len + length)] + [len(lengths) * max_len]
    return {"cu_seqlens_q": queries, "cu_seqlens_k": torch.tensor(keys, device=DEVICE, dtype=torch.int32), "max_seqlen_q": 1,
            "max_seqlen_k": max_len}


def exact(x, dtype=torch.float64):
    return x.nan_to_num(0.0).to(dtype)


def taken(call):
    dispatch.forget()
    result = call()
    return result, "decode forward" in dispatch.implementations_taken()


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", (64, 128))
@pytest.mark.parametrize("group", (1, 4))
@pytest.mark.parametrize("operator", ("moba", "msa", "nsa"))
def test_error_is_at_most_twice_that_of_eager(operator, group, width, dtype, poisoned, monkeypatch):
    """Of the newest tokens, with the blocks that were chosen, which are those of the kernels for many queries."""
    k, v, index_k, k_window, v_window = caches(2, width, dtype, count=5)
    q, index_q = (draw(len(LENGTHS), heads, width, dtype=dtype, seed=seed) for heads, seed in ((2 * group, 7), (2, 8)))
    lengths, options = packed(), {"block_size": BLOCK, "impl": "triton"}
    if operator == "nsa":
        keys, values = (draw(k.shape[0] // 4, 2, width, dtype=dtype, seed=seed) for seed in (9, 10))
        gates = draw(*q.shape[:2], 3, dtype=dtype, seed=11).sigmoid()

        def attend():
            out, blocks = nsa_attention(q, k, v, keys, values, gates, k_window=k_window, v_window=v_window, block_count=4,
                                        return_blocks=True, **NSA, **options, **lengths)
            return (out,), blocks

        def reference(dtype):
            return nsa_attention(*(exact(x, dtype) for x in (q, k, v, keys, values, gates)), k_window=exact(k_window, dtype), blocks=blocks,
                                 v_window=exact(v_window, dtype), block_count=4, block_size=BLOCK, impl="reference", **NSA, **lengths),
    else:
        def attend():
            index = (index_q, index_k[:, :1]) if operator == "msa" else ()
            *results, blocks = {"moba": moba_attention, "msa": msa_attention}[operator](
                q, k, v, *index, top_k=4, return_lse=True, return_blocks=True, **options, **lengths)
            return results, blocks

        def reference(dtype):
            return routed_attention(*(exact(x, dtype) for x in (q, k, v)), blocks, block_size=BLOCK, return_lse=True, impl="reference",
                                    **lengths)

    (ours, blocks), by_pages = taken(attend)
    assert by_pages
    assert_accurate(ours, reference(dtype), reference(torch.float64))
    from attnzoo_kernels.routed import decode

    monkeypatch.setattr(decode, "takes", lambda *_: False)
    (before, chosen), by_pages = taken(attend)
    assert not by_pages and torch.equal(blocks.sort(-1).values, chosen.sort(-1).values)
    assert_accurate(before, reference(dtype), reference(torch.float64))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries, size, slots, shared", ((1, 32, 3, True), (5, 7, 6, False), (16, 16, 0, True), (2, 1000, 2, False)))
def test_a_few_queries_over_views_of_a_cache(queries, size, slots, shared, dtype, poisoned):
    """Dense rows that do not follow each other in memory, values of another width, query rows apart, and slots without a block."""
    length, q = 75, draw(3, queries, 8, 48, dtype=dtype, seed=0)[..., :40]
    k, v = (draw(3, 80, 2, width, dtype=dtype, seed=seed) for width, seed in ((40, 1), (24, 2)))
    for x in (k, v):
        x[:, length:] = torch.nan
    k, v = k[:, :length], v[:, :length]
    order = torch.rand(3, queries, 2 if shared else 8, 12, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3)).argsort(-1)
    options = {"block_size": size, "return_lse": True}
    blocks = (order[..., :slots] - 1).int()  # -1 is none, and the last blocks are not earlier ones
    ours, by_pages = taken(lambda: routed_attention(q, k, v, blocks, impl="triton", **options))
    eager, wanted = (routed_attention(*(x.to(to) for x in (q, k, v)), blocks, impl="reference", **options) for to in (dtype, torch.float64))
    assert by_pages
    assert_accurate(ours, eager, wanted)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", (
    NSACase(lengths_q=(7, 1, 0, 3), lengths_k=(41, 30, 5, 2), heads=3, kv_heads=1, head_dim=16, **SMALL),
    NSACase(batch=2, seqlen_q=9, seqlen_k=61, heads=6, kv_heads=2, head_dim=40, value_dim=24, **SMALL),
    NSACase(seqlen_q=7, head_dim=16, **SMALL)), ids=str)  # no compressed key
def test_a_few_queries_read_compressed_keys_in_place(case, dtype, poisoned):
    x = replace(case, dtype=dtype).inputs(DEVICE)

    def attend(dtype, impl, **changes):
        floats = {name: value.to(dtype) for name, value in x.options.items() if name in ("k_window", "v_window")}
        return nsa_attention(*(t.to(dtype) for t in x[:6]), return_blocks=True, impl=impl, **x.options | floats | changes)

    (ours, blocks), by_pages = taken(lambda: attend(dtype, "triton", max_seqlen_q=9 if case.packed else None))
    assert by_pages
    eager, wanted = (attend(to, "reference", blocks=blocks)[0] for to in (dtype, torch.float64))
    assert_accurate(ours, eager, wanted)


@needs_triton
@pytest.mark.parametrize("integers", (False, True))
@pytest.mark.parametrize("operator", ("moba", "msa", "nsa"))
def test_several_programs_choose_for_a_query(operator, integers, monkeypatch):
    """What the reference chooses; with whole numbers many scores are equal, and NaN lies behind the rows' ends."""
    from attnzoo_kernels.routed import best

    splits, launch_choice = [], best.launch_choice
    module = importlib.import_module(f"attnzoo_kernels.{operator}.choose")
    monkeypatch.setattr(best, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(module, "launch_choice", lambda *given: splits.append(given[-1]) or launch_choice(*given))
    rows, (size, max_len) = (900, 1, 1400), {"moba": (1, 1500), "msa": (2, 1500), "nsa": (4, 1500)}[operator]
    k, index_k = caches(1, 16, torch.float32, rows, max_len)
    q, cmp = (draw(n, 2, 16, dtype=torch.float32, seed=seed) for n, seed in ((len(rows), 5), (k.shape[0] // 4, 6)))
    if integers:
        k, index_k, q, cmp = (x.mul(2).round().clamp(-2, 2) for x in (k, index_k, q, cmp))
    lengths, results = packed(rows, max_len), []
    for impl in ("triton", "reference"):
        given = [x if impl == "triton" else exact(x, torch.float32) for x in (k, index_k)]
        if operator == "nsa":
            blocks = nsa_attention(q, given[0], given[0], *[cmp[:, :1]] * 2, torch.ones(len(rows), 2, 3, device=DEVICE), block_size=size,
                                   block_count=5, return_blocks=True, impl=impl, **NSA | {"compress_size": 4}, **lengths)[1]
        elif operator == "msa":
            blocks = msa_blocks(q[:, :1], given[1], block_size=size, top_k=5, impl=impl, **lengths)
        else:
            blocks = moba_blocks(q, given[0], block_size=size, top_k=5, impl=impl, **lengths)
        results.append(blocks.sort(-1).values)
    assert torch.equal(*results) and splits == [{"moba": 5, "msa": 46, "nsa": 23}[operator]]
    assert results[0][0].min() >= 0 and results[0][1].max() < 0


@needs_triton
def test_rows_without_a_key_and_tokens_of_no_sequence():
    k, v = (draw(50, 1, 16, dtype=torch.float32, seed=seed) for seed in (1, 2))
    bounds_q, bounds_k = (torch.tensor((0, *accumulate(n)), device=DEVICE, dtype=torch.int32) for n in ((1, 2, 0, 1), (33, 1, 9, 0)))
    q, blocks = draw(6, 2, 16, dtype=torch.float32, seed=0), torch.zeros(6, 1, 1, device=DEVICE, dtype=torch.int32)
    (out, lse), by_pages = taken(lambda: routed_attention(q, k, v, blocks, block_size=8, return_lse=True, cu_seqlens_q=bounds_q,
                                                          cu_seqlens_k=bounds_k, max_seqlen_q=2, max_seqlen_k=33, impl="triton"))
    assert by_pages and out[[1, 3, 4, 5]].eq(0).all() and lse[:, [1, 3, 4, 5]].eq(-torch.inf).all()
    assert out[[0, 2]].isfinite().all() and lse[:, [0, 2]].isfinite().all()


@needs_triton
def test_other_calls_keep_their_kernels():
    q, k, v = (draw(1, n, 2, 16, dtype=torch.float32, seed=seed) for seed, n in enumerate((1, 40, 40)))
    blocks = torch.zeros(1, 1, 2, 1, device=DEVICE, dtype=torch.int32)

    def takes(q=q, v=v, blocks=blocks, size=8):
        return taken(lambda: routed_attention(q, k, v, blocks, block_size=size, impl="triton"))[1]

    assert takes()
    assert not takes(q=q.clone().requires_grad_())
    with torch.no_grad():
        assert takes(q=q.clone().requires_grad_())
    assert not takes(q=q.expand(1, 17, 2, 16), blocks=blocks.expand(1, 17, 2, 1))  # many queries
    assert not takes(v=v.transpose(1, 2).contiguous().transpose(1, 2))  # values and keys are laid out otherwise
    assert not takes(size=2**30)  # numbers of 64 bits


@pytest.mark.gpu
@pytest.mark.parametrize("operator", ("moba", "msa", "nsa"))
def test_a_graph_follows_lengths_and_nothing_waits(operator):
    """At the sizes of a model, in bfloat16."""
    max_len, count = 4100, 3
    k, v = (x.nan_to_num() for x in caches(4, 128, torch.bfloat16, (max_len,) * count, max_len))
    q, index_q, gates = (draw(count, *shape, dtype=torch.bfloat16, seed=n) for n, shape in enumerate(((16, 128), (4, 128), (16, 3))))
    options = packed((1,) * count, max_len)
    bounds = options["cu_seqlens_k"]
    cmp = k[: k.shape[0] // 16], v[: k.shape[0] // 16]
    attend = {"moba": lambda: moba_attention(q, k, v, block_size=256, top_k=4, **options),
              "msa": lambda: msa_attention(q, k, v, index_q, k[:, :1], block_size=128, top_k=8, **options),
              "nsa": lambda: nsa_attention(q, k, v, *cmp, gates, **options)}[operator]
    attend()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attend()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for lengths in ((1, 4100, 257), (4096, 4097, 16), (2000, 1, 128)):
        bounds.copy_(packed(lengths, max_len)["cu_seqlens_k"])
        graph.replay()
        out, by_pages = taken(attend)
        assert by_pages and torch.equal(captured, out) and out.isfinite().all()


@pytest.mark.gpu
def test_no_compiling_for_a_longer_cache(compiled):
    """Of rows whose length the host knows; the cache's size is fixed."""
    caches = [draw(2, 5000, heads, 64, dtype=torch.bfloat16, seed=heads) for heads in (2, 2, 1)]
    q, index_q = (draw(2, 1, heads, 64, dtype=torch.bfloat16, seed=heads) for heads in (8, 2))
    for index, length in enumerate((4000, 4001, 4999, 4096)):
        k, v, index_k = (x[:, :length] for x in caches)
        moba_attention(q, k, v, block_size=64, top_k=4)
        msa_attention(q, k, v, index_q, index_k, block_size=64, top_k=4)
        if index == 0:
            before = len(compiled)
    assert len(compiled) == before, compiled[before:]
