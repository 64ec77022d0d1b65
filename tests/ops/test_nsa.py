"""nsa_attention: the reference against the formula, the kernels against the reference by the field's rule, and the contract."""

import os
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from functorch.compile import make_boxed_func
from paths import GPU, PATHS
from torch._dynamo.backends.common import aot_autograd
from torch.testing import assert_close

from attnzoo_kernels import moba_attention, nsa_attention
from attnzoo_kernels.nsa import compressed_bounds, ops
from attnzoo_kernels.nsa.cases import CORRECTNESS, LONG, SMALL, Case
from attnzoo_kernels.nsa.fold import Fold
from benchmarks.accuracy import assert_accurate

DEVICE = "cuda" if GPU else "cpu"
TRITON = GPU or os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(not TRITON, reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1")
DTYPES = (torch.float16, torch.bfloat16, torch.float32) if GPU else (torch.float16, torch.float32)  # the interpreter gets bfloat16 wrong
CASES = [replace(case, dtype=dtype) for n, case in enumerate(CORRECTNESS) for m, dtype in enumerate(DTYPES) if GPU or (n + m) % 2 == 0]
NAMES = ("out", "dq", "dk", "dv", "dk_cmp", "dv_cmp", "dgates", "dk_window", "dv_window")


def run(case, impl, dtype=None, blocks=None):
    """By NAMES in `dtype` for inputs that were drawn in the case's."""
    x = case.inputs(DEVICE)
    windows = [x.options.pop(name) for name in ("k_window", "v_window")]
    leaves = [t.to(dtype or t.dtype).detach().requires_grad_() for t in (*x[:6], *windows)]
    out = nsa_attention(*leaves[:6], k_window=leaves[6], v_window=leaves[7], blocks=blocks, impl=impl, **x.options)
    grads = torch.autograd.grad(out, leaves, x.dout.to(out.dtype))
    return dict(zip(NAMES, (out.detach(), *grads), strict=True))


def blocks_of(case):
    """What the reference chooses in float64, for all to read."""
    x = case.inputs(DEVICE)
    return nsa_attention(*(t.double() for t in x[:6]), return_blocks=True, impl="reference",
                         **x.options | {"k_window": None, "v_window": None})[1]


def check(case, impl="triton"):
    blocks = blocks_of(case)
    assert_accurate(run(case, impl, blocks=blocks), run(case, "reference", blocks=blocks),
                    run(case, "reference", torch.float64, blocks=blocks))


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, poisoned):
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LONG, ids=str)
@pytest.mark.parametrize("impl", ("triton", pytest.param("gluon", marks=pytest.mark.hopper)))
def test_error_is_at_most_twice_that_of_eager_at_length(case, dtype, impl):
    if impl == "gluon" and dtype == torch.float32:
        pytest.skip("the Hopper path takes 16 bits")
    check(replace(case, dtype=dtype), impl)


@needs_triton
@pytest.mark.parametrize("case", [replace(case, dtype=torch.float32) for case in CORRECTNESS], ids=str)
@pytest.mark.parametrize("path", [path for path in PATHS if path != "reference"])
def test_the_kernel_chooses_what_the_reference_does(case, path):
    x = case.inputs(DEVICE)
    ours, wanted = (nsa_attention(*x[:6], return_blocks=True, impl=impl, **x.options)[1].sort(-1).values
                    for impl in (path, "reference"))
    assert torch.equal(ours, wanted)


@needs_triton
@pytest.mark.parametrize("path", PATHS)
def test_ties_and_weights_that_are_no_number(path):
    """Blocks of 8, of which 4 are read: the own, the one before, the first, and of equal ones the earliest; none of NaN."""
    x = Case(seqlen_q=48, heads=2, kv_heads=1, head_dim=16, dtype=torch.float32, **SMALL).inputs(DEVICE)
    for seen_nan, wanted in ((False, [[0, 1, 2], [0, 1, 3], [0, 1, 4]]), (True, [[-1, 0, 2], [-1, 0, 3], [-1, 0, 4]])):
        k_cmp = torch.zeros_like(x.k_cmp)
        if seen_nan:
            k_cmp[:, 3] = torch.nan
        blocks = nsa_attention(x.q, x.k, x.v, k_cmp, *x[4:6], return_blocks=True, impl=path, **x.options)[1]
        assert blocks[0, 24::8, 0].sort(-1).values.tolist() == wanted


@needs_triton
@pytest.mark.parametrize("path", [path for path in PATHS if path != "reference"])
def test_blocks_of_one_token(path):
    sizes = {"compress_size": 1, "compress_stride": 1, "block_size": 1, "block_count": 4, "window": 3}
    x = Case(seqlen_q=30, heads=3, kv_heads=1, head_dim=16, dtype=torch.float32, **sizes).inputs(DEVICE)
    (ours, blocks), (wanted, chosen) = (nsa_attention(*x[:6], return_blocks=True, impl=impl, **x.options) for impl in (path, "reference"))
    assert torch.equal(blocks.sort(-1).values, chosen.sort(-1).values)
    assert_close(ours, wanted)


def test_the_reference_is_the_paper_s_formula():
    x = Case(seqlen_q=30, heads=2, kv_heads=1, head_dim=8, compress_size=4, compress_stride=2, block_size=4, block_count=4, window=5,
             dtype=torch.float32).inputs()
    q, k, v, k_cmp, v_cmp, gates = (t[0].double() for t in x[:6])
    k_window, v_window = (x.options[name][0, :, 0].double() for name in ("k_window", "v_window"))
    out, blocks = nsa_attention(*(t.double() for t in x[:6]), return_blocks=True, impl="reference",
                                **x.options | {"k_window": k_window[None, :, None], "v_window": v_window[None, :, None]})

    def attend(query, keys, values):
        weights = (query @ keys.T / 8**0.5).softmax(-1)
        return weights @ values, weights

    for t in range(30):
        c = max(0, (t + 1 - 4) // 2 + 1)
        compressed, weights = attend(q[t], k_cmp[:c, 0], v_cmp[:c, 0])
        own = t // 4
        score = torch.zeros(8, dtype=torch.float64)
        for i in range(c):  # each holds two strides, and a block does
            for stride in (i, i + 1):
                score[stride // 2] += weights[:, i].sum()
        forced = {block for block in (0, own - 1) if 0 <= block < own}
        others = sorted((block for block in range(own) if block not in forced), key=lambda block: -score[block])
        read = sorted([*forced, *others[: 3 - len(forced)], own])
        assert sorted(block for block in blocks[0, t, 0].tolist() if block >= 0) == read[:-1]
        keys = [j for block in read for j in range(4 * block, min(4 * block + 4, t + 1))]
        selected, _ = attend(q[t], k[keys, 0], v[keys, 0])
        near, _ = attend(q[t], k_window[max(0, t - 4) : t + 1], v_window[max(0, t - 4) : t + 1])
        g = gates[t].T[..., None]
        assert_close(out[0, t], g[0] * compressed + g[1] * selected + g[2] * near)


@pytest.mark.slow
@needs_triton
def test_it_compiles_to_what_eager_mode_computes():
    x = Case(lengths_q=(9, 0, 24), head_dim=16, kv_heads=1, dtype=torch.float16, **SMALL).inputs(DEVICE)
    leaves = [t.detach().requires_grad_() for t in x[:6]]

    def attend(*leaves):
        return nsa_attention(*leaves, impl="triton", **x.options)

    expected, result = attend(*leaves), torch.compile(attend, fullgraph=True, backend="aot_eager")(*leaves)
    assert torch.equal(result, expected)
    wanted, grads = (torch.autograd.grad(y, leaves, x.dout) for y in (expected, result))
    assert all(map(torch.equal, grads, wanted))


@needs_triton
def test_a_call_is_few_operations():
    """Of PyTorch or of ours, views left out: each is a launch at least, and bounds the time of short inputs."""
    x = Case(lengths_q=(9, 0, 24), head_dim=16, kv_heads=1, dtype=torch.float16, **SMALL).inputs(DEVICE)
    leaves = [t.detach().requires_grad_() for t in x[:6]]
    graphs = []

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes
                       if isinstance(node.target, torch._ops.OpOverload) and not node.target.is_view])
        return make_boxed_func(graph)

    attend = torch.compile(lambda *leaves: nsa_attention(*leaves, impl="triton", **x.options), fullgraph=True,
                           backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    torch.autograd.grad(attend(*leaves), leaves, x.dout)
    forward, backward = graphs
    assert len(forward) <= 10 and len(backward) <= 7, graphs


@pytest.mark.parametrize("lengths_q, lengths_k", (((50,), (50,)), ((1, 0, 40, 9), (1, 0, 40, 9)), ((7, 1, 3, 0), (41, 30, 0, 8)),
                                                  ((30, 5), (4, 5))))
@pytest.mark.parametrize("size, stride", ((8, 4), (3, 1), (5, 5)))
@needs_triton
def test_queries_with_the_same_keys_are_heads_of_one(lengths_q, lengths_k, size, stride):
    bounds_q, bounds_k = (torch.tensor((0, *accumulate(lengths)), dtype=torch.int32, device=DEVICE) for lengths in (lengths_q, lengths_k))
    total_q = sum(lengths_q) + 3  # of which the last three are behind all sequences
    fold = Fold.of(bounds_q, bounds_k, total_q, size, stride)
    expected, first_unit = [], 0
    for m, n in zip(lengths_q, lengths_k, strict=True):
        tokens = range(n - m + 1, n + 1)  # of which each query has seen as many
        lowest = (n - m + 1) // stride
        expected += [(first_unit + t // stride - lowest) * stride + t % stride for t in tokens]
        first_unit += n // stride - lowest + 1
    expected += [first_unit * stride + i for i in range(3)]
    place, source = fold.place.long(), fold.source
    assert place.tolist() == expected and fold.cu_seqlens_q[-1] == first_unit
    assert torch.equal(fold.bounds, compressed_bounds(bounds_k, size, stride))
    from_place = torch.full_like(source, -1)
    from_place[place] = torch.arange(total_q, device=DEVICE).int()
    assert torch.equal(source, from_place)

    x = torch.randn(6, total_q, 16, device=DEVICE).transpose(0, 1)
    rows = x.new_zeros(len(source), 6, 16).index_copy(0, place, x).view(-1, stride, 2, 3, 16)
    folded = fold.fold(x, 2)
    assert torch.equal(folded, rows.transpose(1, 2).flatten(1, 3)) and torch.equal(ops._unfold(folded, fold.place, 2, stride), x)
    lse = torch.randn(len(source) // stride, 6 * stride, device=DEVICE).mT
    rows = lse.mT.unflatten(1, (2, stride, 3)).transpose(1, 2).flatten(0, 1)
    assert torch.equal(fold.unfold_lse(lse, 2), rows[place].flatten(1).mT)


@pytest.mark.parametrize("change, error, message", [
    ({"block_size": 6}, ValueError, "block_size: must be a multiple of compress_stride=4, got 6"),
    ({"window": 0}, ValueError, "window: must be an integer of at least 1, got 0"),
    ({"deterministic": 1}, TypeError, "deterministic: must be True or False or None, got 1"),
    ({"k_cmp": torch.zeros(1, 7, 2, 16)}, ValueError, r"k_cmp: must have shape \(1, 6, 2, 16\), got \(1, 7, 2, 16\)"),
    ({"gates": torch.zeros(1, 30, 2)}, ValueError, r"gates: must have shape \(1, 30, 2, 3\), got \(1, 30, 2\)"),
    ({"gates": torch.zeros(1, 30, 2, 3).double()}, TypeError, "gates: must have q's dtype torch.float32, got torch.float64"),
    ({"blocks": torch.zeros(1, 30, 2, 3)}, TypeError, "blocks: must be int32, got torch.float32"),
    ({"impl": "cuda"}, ValueError, "impl: must be None or one of 'gluon', 'triton', 'cpu', 'reference', got 'cuda'"),
])
def test_a_wrong_argument_is_named(change, error, message):
    arguments = {name: torch.zeros(1, 30, 2, 16) for name in ("q", "k", "v")}
    arguments |= {"k_cmp": torch.zeros(1, 6, 2, 16), "v_cmp": torch.zeros(1, 6, 2, 16), "gates": torch.zeros(1, 30, 2, 3)}
    with pytest.raises(error, match=message):
        nsa_attention(**arguments | SMALL | change)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", (None, (1, 0, 300)), ids=("dense", "packed"))
@pytest.mark.parametrize("operator", ("nsa", "moba"))
def test_no_launch_waits_for_the_host_and_a_graph_replays_it(operator, lengths):
    x = Case(batch=2, seqlen_q=300, kv_heads=1, lengths_q=lengths, **SMALL).inputs(DEVICE)
    leaves = [t.detach().requires_grad_() for t in (x[:6] if operator == "nsa" else x[:3])]
    packing = {name: value for name, value in x.options.items() if "seqlen" in name}
    options = x.options if operator == "nsa" else {"block_size": 16, "top_k": 3} | packing

    def step():
        out = {"nsa": nsa_attention, "moba": moba_attention}[operator](*leaves, deterministic=True, **options)
        return [out, *torch.autograd.grad(out, leaves, x.dout)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for result in results:
        result.detach().zero_()
    graph.replay()
    assert all(map(torch.equal, results, expected))
