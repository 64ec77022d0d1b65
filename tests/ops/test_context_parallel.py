"""Several ranks attend to one sequence: which tokens each has, and that they compute what one process computes."""

import importlib.util
import sys

import context_ranks
import pytest
import torch
from context_ranks import CASES, inputs
from paths import GPU

from attnzoo_kernels.context_parallel import Part, Zigzag
from benchmarks import ring
from benchmarks.harness import Unsupported


@pytest.mark.parametrize("total, ranks, chunk", ((40, 2, 16), (5, 3, 2), (300, 4, None), (3, 2, None)))
def test_every_token_has_one_owner(total, ranks, chunk):
    plans = [Zigzag(total, ranks, rank, chunk) for rank in range(ranks)]
    tokens = torch.arange(total)
    held = torch.cat([plan.shard(tokens, 0, fill=-1) for plan in plans])
    assert {len(plan.shard(tokens, 0)) for plan in plans} == {plans[0].local}
    assert held[held >= 0].sort().values.equal(tokens)
    assert plans[0].chunk == chunk or plans[0].chunk % 128 == 0


def test_ranks_have_equally_many_causal_pairs():
    plans = [Zigzag(4096, 4, rank) for rank in range(4)]
    pairs = [sum(sum(range(part.begin + 1, part.begin + part.queries + 1)) for part in plan.parts(causal=True)) for plan in plans]
    assert len(set(pairs)) == 1 and sum(pairs) == sum(range(1, 4097))


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

    plans = [Zigzag(expected.shape[dim], 2, rank, context_ranks.CHUNK) for rank in range(2)]
    padding = 2 * plans[0].local - plans[0].total
    whole_queries, whole_keys = ([torch.cat([x, torch.zeros_like(x.narrow(dim, 0, padding))], dim) for x in tensors]
                                 for tensors in (queries, keys))
    bounds = {"cu_seqlens": lengths["cu_seqlens_q"], "max_seqlen": lengths["max_seqlen_q"]} if lengths else {}
    outs = {}
    for plan in plans:
        for part in plan.parts(causal=case.causal, window=case.window, **bounds):
            own = [x.narrow(dim, part.begin, part.queries) for x in whole_queries]
            seen = [x.narrow(dim, part.keys[0], part.keys[1] - part.keys[0]) for x in whole_keys]
            outs[part.begin] = case.attention(own, seen, part.lengths | path, weight)
    out = torch.cat([outs[begin] for begin in sorted(outs)], dim).narrow(dim, 0, plans[0].total)
    found = torch.autograd.grad(out, (*queries, *keys), dout)
    torch.testing.assert_close((out, *found), (expected, *wanted), rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, sizes", ((2, (2,)), (4, (3, 4))))
def test_ranks_compute_what_one_process_computes(ranks, sizes):
    context_ranks.run(ranks, sizes)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_compute_what_one_computes():
    context_ranks.run(2, target=context_ranks.main_gpu)


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
        Zigzag(13, 2, 0, 3)
    with pytest.raises(ValueError, match="rank: must be below the 2 ranks, got 2"):
        Zigzag(13, 2, 2)
    with pytest.raises(ValueError, match="x: dimension 1 must be the 13 tokens of the global order, got shape \\(13, 2\\)"):
        Zigzag(13, 2, 0).shard(torch.zeros(13, 2), 1)
    with pytest.raises(ValueError, match="window: must be -1 without causal, got 3"):
        Zigzag(13, 2, 0).parts(causal=False, window=3)
    with pytest.raises(ValueError, match="x: dimension 0 must be divisible by the 2 groups of heads, got shape \\(3,\\)"):
        Part(0, 0, 1, (0, 1), {}, [], 1, 2).own_heads(torch.zeros(3))
    assert Part(0, 0, 1, (0, 1), {}, [], 1, 2).own_heads(torch.arange(4)).tolist() == [2, 3]
