"""msa_blocks: the kernel chooses what the reference does; msa_attention is routed_attention over them; the indexer's loss."""

import os

import pytest
import torch
import torch.nn.functional as F
from paths import GPU, PATHS
from torch.testing import assert_close

from attnzoo_kernels import flash_attention, msa, msa_attention, msa_blocks, routed_attention
from benchmarks.accuracy import assert_accurate

DEVICE = "cuda" if GPU else "cpu"
TRITON = GPU or os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(not TRITON, reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1")
DTYPES = (torch.float16, torch.bfloat16, torch.float32) if GPU else (torch.float16, torch.float32)


def tensors(queries, keys, heads=6, kv_heads=2, dtype=torch.float32, rows=(), width=24, index_width=16):
    """q, k, v, index_q and index_k."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = ((queries, heads, width), (keys, kv_heads, width), (keys, kv_heads, width), (queries, kv_heads, index_width),
              (keys, 1, index_width))
    return [torch.randn(*rows, *shape, device=DEVICE, generator=generator).to(dtype) for shape in shapes]


def packed(lengths, lengths_k=None):
    bounds = [torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32, device=DEVICE) for n in (lengths, lengths_k or lengths)]
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k"), bounds, strict=True))


CALLS = {
    "dense": (lambda dtype: tensors(70, 70, rows=(2,), dtype=dtype), {"block_size": 4, "top_k": 4}),
    "blocks of one token": (lambda dtype: tensors(97, 97, dtype=dtype, rows=(1,)), {"block_size": 1, "top_k": 2}),
    "cached": (lambda dtype: tensors(3, 90, dtype=dtype, rows=(1,), heads=5, kv_heads=1), {"block_size": 7, "top_k": 6}),
    "cached, long blocks": (lambda dtype: tensors(2, 330, dtype=dtype, rows=(1,), heads=3, kv_heads=1), {"block_size": 50, "top_k": 3}),
    "packed": (lambda dtype: tensors(75, 75, kv_heads=3, dtype=dtype), {"block_size": 8, "top_k": 3} | packed((1, 0, 60, 9))),
    "unlike": (lambda dtype: tensors(45, 79, dtype=dtype), {"block_size": 3, "top_k": 3} | packed((30, 0, 10), (60, 5, 4))),
}


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make, options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("impl", [path for path in PATHS if path != "reference"])
def test_the_kernel_chooses_what_the_reference_does(make, options, dtype, impl):
    *_, q, k = make(dtype)
    ours, wanted = (msa_blocks(q, k, impl=impl, **options) for impl in (impl, "reference"))
    assert torch.equal(ours.sort(-1).values, wanted.sort(-1).values)
    assert (wanted >= 0).any()


@needs_triton
@pytest.mark.parametrize("impl", PATHS)
def test_ties_scores_that_are_no_number_and_too_few_blocks(impl):
    """Blocks of 2: the scores are 5, NaN, 7, 7, 5, 5 and 9, by the first channel of one of their keys."""
    score = torch.tensor([5, torch.nan, 7, 7, 5, 5, 9.0], device=DEVICE)
    k = torch.full((1, 14, 1, 16), -1.0, device=DEVICE)
    k[0, torch.arange(7) * 2 + torch.arange(7) % 2, 0, 0] = score
    q = torch.zeros(1, 14, 1, 16, device=DEVICE)
    q[..., 0] = 1
    blocks = msa_blocks(q, k, block_size=2, top_k=4, impl=impl)[0, :, 0].sort(-1).values
    assert blocks[::2].tolist() == [[-1, -1, -1], [-1, -1, 0], [-1, -1, 0], [-1, 0, 2], [0, 2, 3], [0, 2, 3], [0, 2, 3]]
    assert msa_blocks(q, k, block_size=64, top_k=4, impl=impl).eq(-1).all()
    assert msa_blocks(q, k, block_size=2, top_k=1, impl=impl).shape == (1, 14, 1, 0)


@needs_triton
@pytest.mark.parametrize("seqlen", [90, pytest.param(3000, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", [path for path in PATHS if path != "reference"])
def test_many_equal_scores_are_broken_alike(impl, dtype, seqlen):
    """Small whole numbers, whose products are exact in every dtype."""
    q, k = (x.mul(2).round().clamp(-2, 2) for x in tensors(seqlen, seqlen, dtype=dtype, index_width=8)[3:])
    options = {"block_size": 5, "top_k": 5} | packed((seqlen // 3, seqlen - seqlen // 3))
    ours, wanted = (msa_blocks(q, k, impl=impl, **options).sort(-1).values for impl in (impl, "reference"))
    assert torch.equal(ours, wanted)


@needs_triton
@pytest.mark.parametrize("impl", PATHS)
def test_attention_is_over_the_chosen_blocks(impl):
    leaves = [x.requires_grad_() for x in tensors(19, 19, heads=2, kv_heads=1, rows=(1,), width=16)]
    options = {"block_size": 4, "top_k": 2}
    out, loss = msa_attention(*leaves, impl=impl, return_loss=True, **options)
    blocks = msa_blocks(*leaves[3:], impl=impl, **options)
    results = [torch.autograd.grad((y * y.detach().cos()).sum(), leaves[:3], retain_graph=True) for y in (
        out, routed_attention(*leaves[:3], blocks, block_size=4, impl=impl))]
    assert all(map(torch.equal, *results))
    assert all(x is None for x in torch.autograd.grad(out.sum(), leaves[3:], retain_graph=True, allow_unused=True))
    assert all(x is None for x in torch.autograd.grad(loss.sum(), leaves[:3], allow_unused=True))
    dense = flash_attention(*leaves[:3], causal=True, impl=impl)
    for options in ({"block_size": 8, "top_k": 9}, {"block_size": 4, "top_k": None}):
        assert_close(msa_attention(*leaves, impl=impl, **options), dense)


def formula(q, k, index_q, index_k, blocks, block_size):
    """The divergence KL(P || S) and the entropy of P, summed, query by query: (total, kv_heads) of one sequence."""
    (queries, _, width), (keys, kv_heads, _) = q.shape, k.shape
    losses = torch.zeros(queries, kv_heads, dtype=q.dtype)
    for i in range(queries):
        t = i + keys - queries
        for g in range(kv_heads):
            read = [j for j in range(t + 1) if blocks is None or j // block_size in (t // block_size, *blocks[i, g].tolist())]
            if read:
                group = q[i].unflatten(0, (kv_heads, -1))[g]
                p = (group @ k[read, g].mT / width**0.5).softmax(-1).mean(0)
                s = (index_k[read, 0] @ index_q[i, g] / index_q.shape[-1] ** 0.5).log_softmax(-1)
                losses[i, g] = F.kl_div(s, p, reduction="sum") + torch.special.entr(p).sum()
    return losses


@pytest.mark.parametrize("top_k", [3, None])
def test_the_reference_of_the_loss_is_the_divergence_and_an_entropy(top_k):
    q, k, v, index_q, index_k = (x.double().cpu() for x in tensors(13, 20))
    index_q, index_k = index_q.requires_grad_(), index_k.requires_grad_()
    _, blocks, loss = msa_attention(q, k, v, index_q, index_k, block_size=4, top_k=top_k, return_blocks=True, return_loss=True,
                                    impl="reference", **{name: x.cpu() for name, x in packed((8, 3), (12, 1)).items()})
    parts = [(0, 8, 0, 12), (8, 11, 12, 13)]
    wanted = torch.cat([formula(q[a:b], k[c:d], index_q[a:b], index_k[c:d], None if top_k is None else blocks[a:b], 4)
                        for a, b, c, d in parts] + [torch.zeros(2, 2, dtype=q.dtype)])
    assert_close(loss, wanted)
    weight = torch.rand(loss.shape, dtype=q.dtype)
    for ours, exact in zip(*(torch.autograd.grad((x * weight).sum(), (index_q, index_k)) for x in (loss, wanted)), strict=True):
        assert_close(ours, exact)


LOSSES = {**CALLS, "all keys": (lambda dtype: tensors(75, 75, kv_heads=3, dtype=dtype),
                                {"block_size": 8, "top_k": None} | packed((1, 0, 60, 9))),
          "few": (lambda dtype: tensors(25, 30, dtype=dtype), {"block_size": 4, "top_k": 3} | packed((13, 0, 10), (17, 2, 9)))}
QUICK = ("cached", "few")  # in the interpreter; the paths of a GPU and of a CPU take all


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl, name", [pytest.param(impl, name, marks=[pytest.mark.slow] * (impl == "triton"))
                                        for impl in PATHS if impl != "reference" for name in LOSSES
                                        if GPU or impl == "cpu" or name in QUICK])
def test_error_of_the_loss_is_at_most_twice_that_of_eager(name, dtype, impl):
    make, options = LOSSES[name]

    def run(impl, wide=None):
        leaves = [x.to(wide or dtype) for x in make(dtype)]
        index = [x.requires_grad_() for x in leaves[3:]]
        *_, loss = msa_attention(*leaves, impl=impl, return_loss=True, **options)
        grads = torch.autograd.grad(loss.sin().sum(), index)
        return dict(zip(("loss", "dindex_q", "dindex_k"), (loss.detach(), *grads), strict=True))

    assert_accurate(run(impl), run("reference"), run("reference", torch.float64))


def test_gluon_kernels_are_asked_for_the_output_alone(monkeypatch):
    """The loss has values of one column and of the index's width, which Hopper's kernels need not take."""
    taken, attend = [], msa.flash_attention

    def record(*inputs, impl, **options):
        taken.append(impl)
        return attend(*inputs, **options)

    monkeypatch.setattr(msa, "flash_attention", record)
    leaves = [x.cpu() for x in tensors(9, 9, rows=(1,))]
    results = [msa_attention(*leaves, block_size=2, top_k=None, impl=impl, return_loss=True) for impl in ("gluon", None)]
    assert taken[:3] == ["gluon", None, None]
    assert all(map(torch.equal, *results))


@pytest.mark.hopper
@pytest.mark.parametrize("top_k", [3, None])
def test_the_loss_beside_gluon_kernels(top_k):
    leaves = tensors(300, 300, rows=(1,), heads=4, kv_heads=2, width=64, index_width=16, dtype=torch.bfloat16)
    loss, wanted = (msa_attention(*leaves, block_size=64, top_k=top_k, impl=impl, return_loss=True)[1] for impl in ("gluon", None))
    assert torch.equal(loss, wanted)


@pytest.mark.slow
@needs_triton
def test_it_compiles_to_what_eager_mode_computes():
    leaves = [x.requires_grad_() for x in tensors(12, 12, heads=2, kv_heads=1, width=16, dtype=torch.float16)]

    def attend(*leaves):
        return msa_attention(*leaves, block_size=2, top_k=2, impl="triton", return_loss=True, **packed((5, 0, 7)))

    expected, results = attend(*leaves), torch.compile(attend, fullgraph=True, backend="aot_eager")(*leaves)
    assert all(map(torch.equal, results, expected))
    wanted, grads = (torch.autograd.grad(out.float().sum() + loss.sum(), leaves) for out, loss in (expected, results))
    assert all(map(torch.equal, grads, wanted))


@pytest.mark.parametrize("impl", [pytest.param(path, marks=[needs_triton] * (path == "triton")) for path in PATHS])
def test_empty_inputs(impl):
    for batch, queries, keys in ((0, 5, 5), (2, 0, 0), (2, 5, 0)):
        leaves = [x.requires_grad_() for x in tensors(queries, keys, rows=(batch,))]
        out, loss = msa_attention(*leaves, block_size=2, top_k=2, impl=impl, return_loss=True)
        grads = torch.autograd.grad(out.sum() + loss.sum(), leaves, allow_unused=True)
        assert loss.shape == (batch, queries, 2) and not out.any() and not loss.any()
        assert not any(x.any() for x in grads if x is not None)


@pytest.mark.parametrize("change, error, message", [
    ({"top_k": 0}, ValueError, "top_k: must be an integer of at least 1, got 0"),
    ({"block_size": 2.5}, ValueError, "block_size: must be an integer of at least 1, got 2.5"),
    ({"index_q": torch.zeros(1, 4, 3, 16)}, ValueError, r"index_q: must have shape \(1, 4, 2, 16\), got \(1, 4, 3, 16\)"),
    ({"index_k": torch.zeros(1, 4, 2, 16)}, ValueError, "index_k: must have one head, got 2"),
    ({"index_k": torch.zeros(1, 5, 1, 16)}, ValueError, r"index_k: must have shape \(1, 4, 1, 16\), got"),
    ({"return_loss": 1}, TypeError, "return_loss: must be True or False"),
    ({"impl": "cuda"}, ValueError, "impl: must be None or one of 'gluon', 'triton', 'cpu', 'reference', got 'cuda'"),
])
def test_a_wrong_argument_is_named(change, error, message):
    arguments = dict(zip(("q", "k", "v", "index_q", "index_k"), (x.cpu() for x in tensors(4, 4, rows=(1,))), strict=True))
    with pytest.raises(error, match=message):
        msa_attention(**arguments | {"block_size": 2, "top_k": 2} | change)
