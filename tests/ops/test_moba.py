"""moba_blocks: the kernel chooses what the reference does; moba_attention is routed_attention over them."""

import os

import pytest
import torch
from paths import GPU, PATHS
from torch.testing import assert_close

from attnzoo_kernels import moba_attention, moba_blocks, routed_attention

DEVICE = "cuda" if GPU else "cpu"
TRITON = GPU or os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(not TRITON, reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1")
DTYPES = (torch.float16, torch.bfloat16, torch.float32) if GPU else (torch.float16, torch.float32)


def tensors(queries, keys, heads=4, kv_heads=2, dtype=torch.float32, rows=(), width=24):
    generator = torch.Generator(DEVICE).manual_seed(0)
    return [torch.randn(*rows, n, h, width, device=DEVICE, generator=generator).to(dtype)
            for n, h in ((queries, heads), (keys, kv_heads), (keys, kv_heads))]


def packed(lengths, lengths_k=None):
    bounds = [torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32, device=DEVICE) for n in (lengths, lengths_k or lengths)]
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k"), bounds, strict=True))


CALLS = {
    "dense": (lambda dtype: tensors(70, 70, rows=(2,), dtype=dtype), {"block_size": 4, "top_k": 4}),
    "one slot of many blocks": (lambda dtype: tensors(97, 97, dtype=dtype, rows=(1,)), {"block_size": 1, "top_k": 2}),
    "cached": (lambda dtype: tensors(3, 90, dtype=dtype, rows=(1,)), {"block_size": 7, "top_k": 6}),
    "packed": (lambda dtype: tensors(75, 75, kv_heads=1, dtype=dtype), {"block_size": 8, "top_k": 3} | packed((1, 0, 60, 9))),
    "unlike": (lambda dtype: tensors(45, 79, dtype=dtype), {"block_size": 3, "top_k": 3} | packed((30, 0, 10), (60, 5, 4))),
}


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make, options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("impl", [path for path in PATHS if path != "reference"])
def test_the_kernel_chooses_what_the_reference_does(make, options, dtype, impl):
    q, k, _ = make(dtype)
    ours, wanted = (moba_blocks(q, k, impl=impl, **options) for impl in (impl, "reference"))
    assert torch.equal(ours.sort(-1).values, wanted.sort(-1).values)
    assert (wanted >= 0).any()


@needs_triton
@pytest.mark.parametrize("impl", PATHS)
def test_ties_scores_that_are_no_number_and_too_few_blocks(impl):
    """Blocks of 2: the scores are 5, NaN, 7, 7, 5, 5 and 9, by the first channel."""
    score = torch.tensor([5, torch.nan, 7, 7, 5, 5, 9.0], device=DEVICE)
    k = torch.zeros(1, 14, 1, 16, device=DEVICE)
    k[0, :, 0, 0] = score.repeat_interleave(2)
    q = torch.zeros(1, 14, 1, 16, device=DEVICE)
    q[..., 0] = 1
    blocks = moba_blocks(q, k, block_size=2, top_k=4, impl=impl)[0, :, 0].sort(-1).values
    assert blocks[::2].tolist() == [[-1, -1, -1], [-1, -1, 0], [-1, -1, 0], [-1, 0, 2], [0, 2, 3], [0, 2, 3], [0, 2, 3]]
    assert moba_blocks(q, k, block_size=64, top_k=4, impl=impl).eq(-1).all()
    assert moba_blocks(q, k, block_size=2, top_k=1, impl=impl).shape == (1, 14, 1, 0)


@needs_triton
@pytest.mark.parametrize("seqlen", [90, pytest.param(3000, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", [path for path in PATHS if path != "reference"])
def test_many_equal_scores_are_broken_alike(impl, dtype, seqlen):
    """Small whole numbers and blocks of 4, whose means and products are exact in every dtype."""
    q, k = (x.mul(2).round().clamp(-2, 2) for x in tensors(seqlen, seqlen, dtype=dtype, width=8)[:2])
    options = {"block_size": 4, "top_k": 5} | packed((seqlen // 3, seqlen - seqlen // 3))
    ours, wanted = (moba_blocks(q, k, impl=impl, **options).sort(-1).values for impl in (impl, "reference"))
    assert torch.equal(ours, wanted)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make, options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("impl", PATHS)
def test_means_that_are_known_are_taken(make, options, dtype, impl):
    q, k, v = make(dtype)
    size, bounds = options["block_size"], options.get("cu_seqlens_k")
    sequences = list(k) if bounds is None else [k[first:end] for first, end in zip(bounds, bounds[1:], strict=False)]
    means = [x[: len(x) // size * size].float().unflatten(0, (-1, size)).mean(1) for x in sequences]
    if bounds is None:
        known = {"block_means": torch.stack(means)}
    else:  # in another order, with blocks of no sequence between them
        known = {"block_means": torch.cat([means[0].new_full((2, *k.shape[1:]), torch.nan), *means[::-1]])}
        behind = torch.tensor([0, *(len(x) for x in means[::-1])]).cumsum(0)[:-1] + 2
        known["block_starts"] = behind.flip(0).int().to(DEVICE)
    wanted = moba_blocks(q, k, impl=impl, **options).sort(-1).values
    assert torch.equal(moba_blocks(q, k, impl=impl, **known, **options).sort(-1).values, wanted)
    other = moba_blocks(q, k, impl=impl, **known | {"block_means": -known["block_means"]}, **options)
    assert not torch.equal(other.sort(-1).values, wanted)
    out, blocks = moba_attention(q, k, v, return_blocks=True, impl=impl, **known, **options)
    assert torch.equal(out, moba_attention(q, k, v, impl=impl, **options)) and torch.equal(blocks.sort(-1).values, wanted)


@needs_triton
@pytest.mark.parametrize("impl", PATHS)
def test_attention_is_over_the_chosen_blocks(impl):
    leaves = [x.requires_grad_() for x in tensors(19, 19, heads=2, kv_heads=1, rows=(1,), width=16)]
    options = {"block_size": 4, "top_k": 2}
    blocks = moba_blocks(*leaves[:2], impl=impl, **options)
    results = [torch.autograd.grad((out * out.detach().cos()).sum(), leaves, retain_graph=True) for out in (
        moba_attention(*leaves, impl=impl, **options), routed_attention(*leaves, blocks, block_size=4, impl=impl))]
    assert all(map(torch.equal, *results))
    wide = moba_attention(*leaves, block_size=8, top_k=9, impl=impl)
    assert_close(wide, torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in leaves), is_causal=True, enable_gqa=True).transpose(1, 2))


@pytest.mark.parametrize("change, error, message", [
    ({"top_k": 0}, ValueError, "top_k: must be an integer of at least 1, got 0"),
    ({"top_k": 2**63}, ValueError, "top_k: must be an integer of 64 bits, got 9223372036854775808"),
    ({"block_size": 2.5}, ValueError, "block_size: must be an integer of at least 1, got 2.5"),
    ({"impl": "cuda"}, ValueError, "impl: must be None or one of 'gluon', 'triton', 'cpu', 'reference', got 'cuda'"),
])
def test_a_wrong_argument_is_named(change, error, message):
    with pytest.raises(error, match=message):
        moba_attention(*tensors(4, 4, rows=(1,)), **{"block_size": 2, "top_k": 2} | change)


MEANS = torch.zeros(1, 2, 2, 24, device=DEVICE)


@pytest.mark.parametrize("change, error, message", [
    ({"block_means": MEANS.half()}, TypeError, "block_means: must be torch.float32 on .*, got torch.float16"),
    ({"block_means": MEANS[..., :3]}, ValueError, r"block_means: must be as k, \(1, 4, 2, 24\), but with blocks .*, got \(1, 2, 2, 3\)"),
    ({"block_means": MEANS[0]}, ValueError, "block_means: must be as k"),
    ({"block_means": 3}, TypeError, "block_means: must be a tensor, got int"),
    ({"block_means": MEANS, "block_starts": MEANS[0, :, 0, 0].int()}, ValueError, "block_starts: must be None for dense sequences"),
    ({"block_starts": MEANS[0, :, 0, 0].int()}, ValueError, "block_starts: must be None without block_means"),
])
def test_wrong_means_are_named(change, error, message):
    with pytest.raises(error, match=message):
        moba_blocks(*tensors(4, 4, rows=(1,))[:2], block_size=2, top_k=2, **change)


def test_packed_means_say_where_sequences_begin():
    q, k, _ = tensors(4, 4)
    with pytest.raises(ValueError, match="block_starts: must be a tensor for packed sequences with block_means, got None"):
        moba_blocks(q, k, block_size=2, top_k=2, block_means=MEANS[0], **packed((4,)))
    with pytest.raises(ValueError, match=r"block_starts: must be whole numbers of shape \(1,\)"):
        moba_blocks(q, k, block_size=2, top_k=2, block_means=MEANS[0], block_starts=torch.zeros(2, device=DEVICE).int(), **packed((4,)))
