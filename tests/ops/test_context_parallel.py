"""Several ranks attend to one sequence: which tokens each has, and that they compute what one process computes."""

import importlib.util
import random
import sys
import time
from itertools import product

import context_ranks
import pytest
import torch
from context_ranks import CASES, inputs
from paths import GPU

from attnzoo_kernels import flash_attention
from attnzoo_kernels.context_placement import Part, Placement, deal, visible_pairs, zigzag
from benchmarks import ring
from benchmarks.context_parallel import documents
from benchmarks.harness import Unsupported


@pytest.mark.parametrize("total, ranks, chunk, owned", (
    (40, 2, 16, None), (5, 3, 2, None), (300, 4, None, None), (3, 2, None, None), (40, 2, 6, ((0, 1, 4, 7), (2, 3, 5, 6))),
    (300, 3, None, ((2,), (0,), (1,))),
))
def test_every_token_has_one_owner(total, ranks, chunk, owned):
    plans = [Placement(total, ranks, rank, chunk, owned) for rank in range(ranks)]
    tokens = torch.arange(total)
    held = torch.cat([plan.shard(tokens, 0, fill=-1) for plan in plans])
    assert {len(plan.shard(tokens, 0)) for plan in plans} == {plans[0].local}
    assert held[held >= 0].sort().values.equal(tokens)
    assert plans[0].chunk == chunk or plans[0].chunk % 128 == 0


def test_ranks_have_equally_many_causal_pairs():
    plans = [Placement(4096, 4, rank) for rank in range(4)]
    pairs = [sum(sum(range(part.begin + 1, part.begin + part.queries + 1)) for part in plan.parts(causal=True)) for plan in plans]
    assert len(set(pairs)) == 1 and sum(pairs) == sum(range(1, 4097))


@pytest.mark.parametrize("causal, window", ((True, -1), (True, 0), (True, 9), (False, -1)))
def test_pairs_are_counted_by_chunk(causal, window):
    lengths, chunk = (3, 0, 17, 1, 30), 7
    wanted = [0] * 8
    places = [(place, length) for length in lengths for place in range(length)]
    for token, (place, length) in enumerate(places):
        wanted[token // chunk] += min(place, window if window >= 0 else length) + 1 if causal else length
    assert visible_pairs(lengths, chunk, 8, causal=causal, window=window) == wanted


def balance(owned, pairs):
    """The mean of the ranks' pairs over the most."""
    loads = [sum(pairs[chunk] for chunk in own) for own in owned]
    return sum(loads) / len(loads) / max(loads)


def of_chunks(owned, total, lengths, **options):
    """Its `balance`, by chunks that need no padding."""
    n = sum(map(len, owned))
    return balance(owned, visible_pairs(lengths, total // n, n, **options))


def test_dealt_chunks_have_about_equally_many_pairs():
    total, ranks = 65536, 4
    lengths = documents(total)  # of up to a quarter
    assert of_chunks(zigzag(ranks), total, lengths) < 0.79
    for owned in (deal(total, lengths, ranks, chunks=4), deal(total, lengths, ranks)):
        assert len(owned[0]) == 4 and of_chunks(owned, total, lengths) >= 0.97


@pytest.mark.parametrize("options", ({}, {"window": 500}, {"causal": False}))
def test_dealt_chunks_are_never_divided_worse_than_the_zigzag(options):
    windows = {"windows": (options["window"],)} if "window" in options else {}
    draw, total = random.Random(0), 8192
    for ranks, longest, _ in product((2, 4, 8), (total, total // 4, total // 32), range(6)):
        lengths = []
        while sum(lengths) < total:
            lengths.append(min(draw.randint(1, longest), total - sum(lengths)))
        owned = deal(total, lengths, ranks, causal=options.get("causal", True), **windows)
        found, of_zigzag = (of_chunks(placed, total, lengths, **options) for placed in (owned, zigzag(ranks)))
        assert found >= of_zigzag


def test_one_sequence_is_placed_by_the_zigzag():
    assert deal(8192, (8192,), 4) == zigzag(4)


def test_windows_of_all_layers_count():
    """A layer that sees all earlier tokens outweighs one that sees itself, by whose pairs any placement is as good."""
    assert deal(16, (16,), 2, windows=(0, -1), chunks=2, chunk=4) == zigzag(2)
    assert deal(16, (16,), 2, windows=(0,), chunks=2, chunk=4) == ((0, 2), (1, 3))


def test_few_tokens_are_not_padded_more_to_be_dealt():
    lengths = (200, 100)
    assert len(deal(300, lengths, 2)[0]) == 2
    assert Placement(300, 2, 0, owned=deal(300, lengths, 2), documents=lengths).local == Placement(300, 2, 0).local


def test_only_keys_of_its_documents_come_to_a_chunk():
    """From a multiple of 128 on. The documents are [0, 500), [500, 1400) and [1400, 1500); the tokens behind them belong to none."""
    owned = ((0, 3, 5, 6), (1, 2, 4, 7))
    plan = Placement(1700, 2, 0, owned=owned, documents=(500, 0, 900, 100))

    def keys(**options):
        return [part.keys for part in plan.parts(**options)]

    assert keys(causal=True) == [(0, 256), (384, 1024), (384, 1536), (1536, 1792)]
    assert keys(causal=True, window=100) == [(0, 256), (640, 1024), (1152, 1536), (1536, 1792)]
    assert keys(causal=False) == [(0, 500), (384, 1400), (384, 1536), (1536, 1792)]
    assert [part.keys for part in Placement(1700, 2, 0, owned=owned).parts(causal=True)] == [(0, 256), (0, 1024), (0, 1536), (0, 1792)]


@pytest.mark.parametrize("causal, window", ((True, -1), (True, 20), (False, -1)))
def test_merged_chunks_give_what_each_gives(causal, window, device):
    """Bit by bit, with documents that end in a chunk before the rank's last one."""
    draw, total, ranks = random.Random(0), 640, 4
    lengths = [0]
    while sum(lengths) < 400:
        lengths.append(draw.randint(0, 30))
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = torch.randn(3, total, 2, 16, generator=generator, device=device)
    dout = torch.randn(q.shape, generator=generator, device=device)
    bounds = {"cu_seqlens": torch.tensor([0, *lengths, 0], device=device).cumsum(0, dtype=torch.int32), "max_seqlen": 30}
    dealt = deal(total, lengths, ranks, causal=causal, windows=(window,), chunks=5, chunk=32)
    for owned in (dealt, [range(5 * rank, 5 * rank + 5) for rank in range(ranks)]):
        for rank in range(ranks):
            plan = Placement(total, ranks, rank, 32, owned, lengths)
            parts = plan.parts(causal=causal, window=window, **bounds)
            (merged,) = plan.parts(causal=causal, window=window, merge=True, **bounds)
            assert merged.queries == plan.local
            options = {"causal": causal, "window_size": (window, 0 if causal else -1)}
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            own_q, own_dout = (plan.shard(x, 0) for x in (leaves[0], dout))
            real = plan.shard(torch.arange(total, device=device), 0) < sum(lengths)
            found = []
            for chosen, ranges in ((parts, [[part.keys] for part in parts]), ((merged,), [merged.of_ranks[rank]])):
                outs = []
                for part, of_part, own in zip(chosen, ranges, own_q.split(chosen[0].queries), strict=True):
                    seen = (torch.cat([x[first:end] for first, end in of_part]) for x in leaves[1:])
                    outs.append(flash_attention(own, *seen, **options, **part.lengths))
                out = torch.cat(outs)
                found.append((out, *torch.autograd.grad(out, leaves, own_dout, retain_graph=True)))
            assert found[0][0][real].equal(found[1][0][real])
            torch.testing.assert_close(found[0][1:], found[1][1:])


def test_chunks_are_merged_where_that_fetches_less_than_all():
    def parts(documents, bounds=(0, 256, 356, 512)):
        plan = Placement(512, 2, 0, owned=((0, 3), (1, 2)), documents=documents)
        return plan.parts(causal=True, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), max_seqlen=300, merge=True)

    (merged,) = parts((256, 100, 156))
    assert merged.of_ranks == (((0, 128), (256, 512)), ((0, 384),))  # chunks 1 and 2 are neighbours
    assert {name: value if isinstance(value, int) else value.tolist() for name, value in merged.lengths.items()} == {
        "cu_seqlens_q": [0, 0, 128, 128, 256], "cu_seqlens_k": [0, 0, 128, 228, 384], "max_seqlen_q": 128, "max_seqlen_k": 256}
    assert len(parts((512,), (0, 512))) == len(parts(None)) == len(Placement(512, 2, 0).parts(causal=True, merge=True)) == 2
    with pytest.raises(ValueError, match=r"cu_seqlens: must begin with the bounds \[0, 256, 356, 512\] of the documents, got \[0, 512\]"):
        parts((256, 100, 156), (0, 512))


def paths():
    """All cases by plain PyTorch, and packed ones by Triton's kernels where its interpreter is quick."""
    for name, case in CASES.items():
        for packed in (True, False)[not case.packed :]:
            yield name, packed, "reference" if GPU or name in ("sigmoid", "forgetting") else "cpu"
            if GPU or packed and name in ("causal", "differential", "sigmoid", "forgetting"):
                yield name, packed, "triton"


@pytest.mark.parametrize("name, packed, impl", list(paths()))
def test_parts_are_those_of_the_whole(name, packed, impl, device):
    """By the same kernels as the ranks', in one process."""
    case = CASES[name]
    queries, keys, weight, lengths = inputs(case, packed, torch.float32, device=device)
    dim, path = (0 if packed else 1), {"impl": impl}
    expected = case.attention(queries, keys, lengths | path, weight)
    dout = torch.randn(expected.shape, generator=torch.Generator(device).manual_seed(2), device=device)
    wanted = torch.autograd.grad(expected, (*queries, *keys), dout)

    total, bounds = expected.shape[dim], {}
    placements = [{"chunk": context_ranks.CHUNK}]
    if packed:
        bounds = {"cu_seqlens": lengths["cu_seqlens_q"], "max_seqlen": lengths["max_seqlen_q"]}
        placements.append(context_ranks.dealt(packed, total, 1, 2, 2, case, chunk=17))
    for placed in placements:
        plans = [Placement(total, 2, rank, **placed) for rank in range(2)]
        padding = 2 * plans[0].local - total
        whole_queries, whole_keys = ([torch.cat([x, torch.zeros_like(x.narrow(dim, 0, padding))], dim) for x in tensors]
                                     for tensors in (queries, keys))
        outs = {}
        for plan in plans:
            for part in plan.parts(causal=case.causal, window=case.window, **bounds):
                own = [x.narrow(dim, part.begin, part.queries) for x in whole_queries]
                seen = [x.narrow(dim, part.keys[0], part.keys[1] - part.keys[0]) for x in whole_keys]
                outs[part.begin] = case.attention(own, seen, part.lengths | path, weight)
        out = torch.cat([outs[begin] for begin in sorted(outs)], dim).narrow(dim, 0, total)
        found = torch.autograd.grad(out, (*queries, *keys), dout, retain_graph=True)
        torch.testing.assert_close((out, *found), (expected, *wanted), rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, sizes", ((2, (2,)), (4, (3, 4))))
def test_ranks_compute_what_one_process_computes(ranks, sizes):
    context_ranks.run(ranks, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("hangs, message", ((False, "Rank 2:\n(?s:.*)RuntimeError: of rank 2"),
                                            (True, "Rank 2:\nTimeout(?s:.*)context_ranks.py\", line \\d+ in main_failing")),
                         ids=("fails", "hangs"))
def test_a_rank_that_fails_or_hangs_ends_all(hangs, message):
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=message):
        context_ranks.run(3, hangs, target=context_ranks.main_failing, seconds=10 if hangs else 100)
    assert time.monotonic() - begin < 60


@pytest.mark.gpu
@pytest.mark.parametrize("packed", (True, False), ids=("packed", "dense"))
@pytest.mark.parametrize("name", ("causal", "both directions", "window, sinks", "differential", "sigmoid"))
@pytest.mark.parametrize("ranks", (2, 4))
def test_gpus_compute_what_one_computes(ranks, name, packed):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    context_ranks.run(ranks, name, packed, target=context_ranks.main_gpu, start_method="spawn", seconds=150)


def test_pytorch_stands_in_for_flash_attn():
    """Its signatures and shapes, on no device; whether it computes the same is checked where it is measured."""
    q, out = torch.empty(2, 2, 32, 4, 16, dtype=torch.bfloat16, device="meta")
    k, v = torch.empty(2, 2, 16, 4, 16, dtype=torch.bfloat16, device="meta")
    options = {"dropout_p": 0, "softmax_scale": 0.25, "causal": False, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0,
               "alibi_slopes": None}
    found, lse, _, _ = ring._flash_attn_forward(q=q, k=k, v=v, return_softmax=False, **options)
    assert found.shape == q.shape and lse.shape == (2, 4, 32) and lse.dtype == torch.float32
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    ring._flash_attn_backward(dout=out, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=gradients[0], dk=gradients[1], dv=gradients[2],
                              deterministic=False, **options)
    with pytest.raises(Unsupported, match="cannot do: dropout, window"):
        ring._flash_attn_forward(q, k, v, return_softmax=False, **options | {"window_size_left": 3})


@pytest.mark.skipif(importlib.util.find_spec("ring_flash_attn") is None, reason="needs ring-flash-attn")
def test_ring_flash_attn_takes_the_stand_in():
    assert ring.zigzag().__name__ == "zigzag_ring_flash_attn_func"
    assert ring.zigzag.__wrapped__().__globals__["_flash_attn_forward"] is ring._flash_attn_forward
    assert "flash_attn" not in sys.modules and "ring_flash_attn" not in sys.modules


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="chunk: 2 x 2 ranks of 3 tokens must hold the 13 tokens"):
        Placement(13, 2, 0, 3)
    with pytest.raises(ValueError, match="rank: must be below the 2 ranks, got 2"):
        Placement(13, 2, 2)
    with pytest.raises(ValueError, match="x: dimension 1 must be the 13 tokens of the global order, got shape \\(13, 2\\)"):
        Placement(13, 2, 0).shard(torch.zeros(13, 2), 1)
    with pytest.raises(ValueError, match="owned: must name equally many chunks for each of 2 ranks, increasing, and each chunk once, got"):
        Placement(13, 2, 0, owned=((0, 1), (3, 2)))
    with pytest.raises(ValueError, match="documents: must be lengths of at least 0 that add up to at most the 13 tokens, got 14 in 2"):
        Placement(13, 2, 0, documents=(9, 5))
    with pytest.raises(TypeError, match="documents: must be integers on the host, got a tensor"):
        deal(13, torch.tensor([13]), 2)
    with pytest.raises(ValueError, match="windows: must be -1 without causal, got 3"):
        deal(13, (13,), 2, causal=False, windows=(3,))
    with pytest.raises(ValueError, match="window: must be -1 without causal, got 3"):
        Placement(13, 2, 0).parts(causal=False, window=3)
    with pytest.raises(ValueError, match="x: dimension 0 must be divisible by the 2 groups of heads, got shape \\(3,\\)"):
        Part(0, 0, 1, (0, 1), {}, [], 1, 2).own_heads(torch.zeros(3))
    assert Part(0, 0, 1, (0, 1), {}, [], 1, 2).own_heads(torch.arange(4)).tolist() == [2, 3]
