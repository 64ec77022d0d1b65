"""flash-attn's functions over caches, its rotary positions and its padding, against plain PyTorch, under the 2x rule."""

import functools
import inspect

import pytest
import torch
from test_compat_flash_attn import cumulative, plain

from attnzoo_kernels import decode_attention
from attnzoo_kernels.compat.flash_attn import bert_padding, flash_attn_varlen_func, flash_attn_with_kvcache, kvcache
from attnzoo_kernels.compat.flash_attn.layers.rotary import apply_rotary_emb
from benchmarks.accuracy import assert_accurate

MAX_LEN, HEADS, KV_HEADS, DIM = 48, 4, 2, 16


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def tables(positions=MAX_LEN, width=8):
    angles = torch.arange(positions)[:, None] * 10.0 ** -torch.arange(width // 2)
    return angles.cos(), angles.sin()


def turned(x, places, interleaved, width=8):
    """x (tokens, heads, dim) rotated at places (tokens,), as complex numbers in float64."""
    cos, sin = tables(width=width)
    pairs = x[..., :width].double().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    pairs = torch.view_as_complex((pairs if interleaved else pairs.mT).contiguous())
    pairs = torch.view_as_real(pairs * torch.complex(cos, sin)[places][:, None])
    return torch.cat([(pairs if interleaved else pairs.mT).flatten(-2), x[..., width:].double()], -1).to(x.dtype)


CASES = {
    "one token": {"new": 1, "causal": True},
    "some, at one place": {"new": 3, "rotary": True},
    "some, half style": {"new": 3, "rotary": True, "causal": True, "interleaved": False},
    "rows behind padding": {"new": 2, "rotary": True, "leftpad": int32(2, 0, 7), "rows": int32(3, 0, 4), "window_size": (9, 0)},
    "padding, heads first": {"new": 0, "queries": 2, "leftpad": int32(2, 0, 7), "heads_first": True, "alibi": True},
    "other rows": {"new": 1, "rows": int32(4, 1, 2), "softcap": 3.0},
    "pages": {"new": 3, "rotary": True, "page": 8, "causal": True, "alibi": True},
    "full": {"new": 0, "lengths": None, "queries": 2, "causal": True},
    "alike": {"new": 1, "lengths": 11, "page": 16},
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("impl", ("triton", "reference"))
@pytest.mark.parametrize("case", CASES)
def test_a_cache_takes_new_tokens_and_is_read(case, impl, dtype, device, monkeypatch):
    monkeypatch.setattr(kvcache, "decode_attention", functools.partial(decode_attention, impl=impl))
    torch.manual_seed(0)
    given = dict.fromkeys(("queries", "rotary", "leftpad", "rows", "page", "heads_first", "alibi"))
    given |= {"lengths": int32(20, 9, 41), "interleaved": True} | CASES[case]
    lengths, new, rows = given["lengths"], given["new"], given["rows"]
    starts = [MAX_LEN] * 3 if lengths is None else [lengths] * 3 if isinstance(lengths, int) else lengths.tolist()
    pads = [0] * 3 if given["leftpad"] is None else given["leftpad"].tolist()
    q = torch.randn(3, given["queries"] or new, HEADS, DIM, dtype=dtype)
    k, v = torch.randn(2, 3, new, KV_HEADS, DIM, dtype=dtype)
    own = torch.arange(3) if rows is None else rows.long()
    caches = []
    for _ in range(2):
        cache = torch.full((5, MAX_LEN, KV_HEADS, DIM), torch.nan, dtype=dtype)
        for row, start, pad in zip(own, starts, pads, strict=True):
            cache[row, pad:start] = torch.randn(start - pad, KV_HEADS, DIM)
        caches.append(cache)

    options = {name: given[name] for name in ("causal", "window_size", "softcap") if name in given}
    meaning = {name.removesuffix("_size"): value for name, value in options.items()}
    call = {"cache_seqlens": lengths, "cache_batch_idx": rows, "cache_leftpad": given["leftpad"], "num_splits": 3, **options}
    if given["alibi"]:
        meaning["slopes"] = call["alibi_slopes"] = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    if given["rotary"]:
        call |= dict(zip(("rotary_cos", "rotary_sin"), tables(), strict=True)) | {"rotary_interleaved": given["interleaved"]}
    if given["page"]:
        pages = MAX_LEN // given["page"]
        table = torch.randperm(5 * pages)[: 3 * pages].view(3, pages)
        paged = [torch.full((5 * pages, given["page"], KV_HEADS, DIM), torch.nan, dtype=dtype) for _ in caches]
        for to, cache in zip(paged, caches, strict=True):
            to[table] = cache[:3].unflatten(1, (pages, -1))
        call["block_table"] = table.int()
    elif given["heads_first"]:
        paged = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in caches]
    else:
        paged = [x.clone() for x in caches]
    on_device = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    paged = [x.to(device) for x in paged]
    appended = [x.to(device) for x in (k, v)] if new else [None, None]
    out, lse = flash_attn_with_kvcache(q.to(device), *paged, *appended, **on_device, return_softmax_lse=True)

    eager, exact = [], []
    for b, (row, start, pad) in enumerate(zip(own, starts, pads, strict=True)):
        queries, keys = q[b], k[b]
        if given["rotary"]:
            keys = turned(keys, start + torch.arange(new), given["interleaved"])
            one_place = not options
            queries = turned(queries, start + torch.arange(new) * (not one_place), given["interleaved"])
        caches[0][row, start : start + new], caches[1][row, start : start + new] = keys, v[b]
        seen = [x[None, row, pad : start + new] for x in caches]
        eager.append(plain(queries[None], *seen, **meaning))
        exact.append(plain(queries[None].double(), *(x.double() for x in seen), **meaning))
    ours = {"out": out.cpu(), "lse": lse.cpu()}
    assert_accurate(ours, *({"out": torch.cat([o for o, _ in many]), "lse": torch.cat([n for _, n in many])} for many in (eager, exact)))
    if given["page"]:
        paged, caches = [x.cpu()[table].flatten(1, 2) for x in paged], [x[:3] for x in caches]
    torch.testing.assert_close(paged[0].cpu(), caches[0], equal_nan=True)
    assert torch.equal(paged[1].cpu().nan_to_num(9.0), caches[1].nan_to_num(9.0))


@pytest.mark.parametrize(("words", "change"), [
    ("cache_leftpad: a cache in pages", {"cache_leftpad": int32(0), "block_table": int32([0])}),
    ("rotary_cos, rotary_sin: need k and v", {"k": None, "v": None, "rotary_cos": tables()[0]}),
    ("k, v: must be given both", {"v": None}),
    ("cache_seqlens: must say where", {"cache_seqlens": None}),
    ("cache_seqlens: must leave room for 1 new tokens among the cache's 4, got \\[4\\]", {"cache_seqlens": 4}),
    ("cache_batch_idx: must name rows of the cache, which has 2, got \\[2\\]", {"cache_batch_idx": int32(2)}),
    ("cache_batch_idx: must name rows of the cache, which has 2, got \\[2\\]", {"cache_batch_idx": int32(2), "k": None, "v": None}),
    ("cache_batch_idx: must name rows", {"cache_batch_idx": int32(7), "cache_leftpad": int32(0), "k": None, "v": None}),
    ("k_cache: must have a row for each of q's 3 sequences, got 2",
     {"q": torch.zeros(3, 1, 1, 4), "k": torch.zeros(3, 1, 1, 4), "v": torch.zeros(3, 1, 1, 4)}),
    ("cache_seqlens: must lie between 0 and the cache's 4 tokens, got \\[5\\]",
     {"cache_seqlens": int32(5), "cache_leftpad": int32(3), "k": None, "v": None}),
    ("cache_seqlens: must lie between 0 and the cache's 4 tokens, got \\[-1\\]",
     {"cache_seqlens": int32(-1), "cache_leftpad": int32(0), "k": None, "v": None}),
    ("block_table: must name one of the cache's 2 pages for each new token, got \\[\\[-1\\]\\]", {"block_table": int32([-1])}),
    ("rotary_cos: must have a row for each of the cache's 4 places, got \\(2, 2\\)",
     {"rotary_cos": torch.ones(2, 2), "rotary_sin": torch.ones(2, 2)}),
    ("rotary_cos, rotary_sin: must be given both", {"rotary_sin": torch.ones(4, 2)}),
    ("rotary_cos: must be a tensor, got list", {"rotary_cos": [], "rotary_sin": []}),
    ("cos: must be floating point of 16 to 64 bits on x's device cpu, got torch.float32 on meta",
     {"rotary_cos": torch.ones(4, 2, device="meta"), "rotary_sin": torch.ones(4, 2)}),
    ("cache_seqlens: must be an integer of at least 0, got 1.5", {"cache_seqlens": 1.5}),
    ("cache_batch_idx: must be a tensor, got list", {"cache_batch_idx": [0]}),
    ("cache_batch_idx: must be whole numbers of shape \\(1,\\) .* got torch.float32", {"cache_batch_idx": torch.zeros(1)}),
    ("cache_leftpad: must be at least 0, got \\[-1\\]", {"cache_leftpad": int32(-1)}),
    ("v: must be .* and device cpu, got .* on meta", {"v": torch.zeros(1, 1, 1, 4, device="meta")}),
    ("v_cache: must be on k_cache's device cpu and \\(2, 4, 1\\) first", {"v_cache": torch.zeros(1, 4, 1, 4)}),
    ("k_cache: must have q's dtype torch.float16", {"q": torch.zeros(1, 1, 1, 4, dtype=torch.float16)}),
    ("window_size: must be two ints", {"window_size": None}),
    ("softcap: must be a number, got None", {"softcap": None}),
    ("return_softmax_lse: must be True or False, got 1", {"return_softmax_lse": 1}),
    ("causal: must be True or False, got None", {"causal": None}),
    ("rotary_interleaved: must be True or False, got 2", {"rotary_interleaved": 2}),
    ("softmax_scale: must be", {"softmax_scale": float("nan")}),
    ("softcap: must be", {"softcap": float("nan")}),
    ("alibi_slopes: must have shape", {"alibi_slopes": torch.zeros(2)}),
    ("k_cache: ", {"q": torch.zeros(1, 1, 1, 8)}),
    ("k: must be \\(batch=1, new, kv_heads, head_dim\\)", {"k": torch.zeros(1, 1, 2, 4)}),
])
def test_what_a_cache_cannot_do_is_refused(words, change):
    x = torch.zeros(1, 1, 1, 4)
    caches = {"k_cache": torch.zeros(2, 4, 1, 4), "v_cache": torch.zeros(2, 4, 1, 4)}
    call = caches | {"q": x, "k": x + 1, "v": x + 1, "cache_seqlens": 1}
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=words):
        flash_attn_with_kvcache(**call | change)
    assert not any(cache.any() for cache in caches.values())  # nothing was written


@pytest.mark.parametrize("impl", ("triton", "reference"))
@pytest.mark.parametrize("lengths_q", [(1, 0, 1), (3, 1, 2), (18, 0, 5)])
def test_varlen_over_pages_is_varlen_over_the_packed_keys(lengths_q, impl, device, monkeypatch):
    monkeypatch.setattr(kvcache, "decode_attention", functools.partial(decode_attention, impl=impl))
    torch.manual_seed(0)
    lengths_k, page = (19, 8, 7), 8
    table = int32([4, 0, 2], [6, -1, -1], [0, 5, -1])
    k, v = torch.full((2, 8, page, KV_HEADS, DIM), torch.nan, device=device)
    for x in (k, v):
        x[[0, 4, 6]] = torch.randn(3, page, KV_HEADS, DIM, device=device)
        x[2, :3] = torch.randn(3, KV_HEADS, DIM, device=device)
    q = torch.randn(sum(lengths_q) + 2, HEADS, DIM, device=device)  # two behind the last sequence
    packed = [torch.cat([x[row[row >= 0].long()].flatten(0, 1)[:n] for row, n in zip(table, lengths_k, strict=True)]) for x in (k, v)]
    bounds = cumulative(lengths_q).to(device), cumulative(lengths_k).to(device), max(lengths_q), 20
    options = {"causal": True, "window_size": (12, -1), "return_attn_probs": True}
    expected = flash_attn_varlen_func(q, *packed, *bounds, **options)
    found = flash_attn_varlen_func(q, k, v, *bounds, **options, block_table=table.to(device))
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, other)


def test_a_sequence_in_a_cache_of_one_row_may_begin_behind_padding():
    q, k, v = torch.randn(1, 2, 4, 8), *torch.randn(2, 1, 6, 2, 8)
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=5, cache_leftpad=int32(2), causal=True)
    torch.testing.assert_close(out, flash_attn_with_kvcache(q, k[:, 2:], v[:, 2:], cache_seqlens=3, causal=True))


def test_a_call_with_new_tokens_is_one_graph():
    cos, sin = tables()
    call = {"rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": int32(2, 3), "block_table": int32([0, 1], [2, 3]), "causal": True}
    tensors = torch.randn(2, 1, 2, 8), *torch.randn(2, 4, 4, 1, 8), *torch.randn(2, 2, 1, 1, 8)
    compiled = torch.compile(functools.partial(flash_attn_with_kvcache, **call), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*(x.clone() for x in tensors)), flash_attn_with_kvcache(*tensors, **call))


def test_varlen_over_pages_has_gradients_and_refuses_bad_tables():
    q, k = torch.randn(3, 2, 8, requires_grad=True), torch.randn(3, 4, 1, 8, requires_grad=True)
    bounds = cumulative([1, 2]), cumulative([6, 3]), 2, 6
    flash_attn_varlen_func(q, k, k, *bounds, block_table=int32([2, 0], [0, -1])).sum().backward()
    assert k.grad[0].abs().sum() > 0 and not k.grad[1].any() and not k.grad[0, 3].any() and k.grad[2].abs().sum() > 0
    with pytest.raises(ValueError, match="block_table: row 1 needs a page from 0 to 2 for its token 0, got -1"):
        flash_attn_varlen_func(q, k, k, *bounds, block_table=int32([2, 0], [-1, -1]))


@pytest.mark.parametrize("words, place, value", [
    ("q: must be a tensor, got NoneType", 0, None),
    ("q: must be \\(total_q, heads, head_dim\\), got shape", 0, torch.zeros(3, 8)),
    ("v: must have k's pages \\(3, 4\\), got \\(2, 4\\)", 2, torch.zeros(2, 4, 1, 8)),
    ("cu_seqlens_q: must rise from 0 to at most the 3 tokens, got \\[0, 1, 4\\]", 3, int32(0, 1, 4)),
    ("cu_seqlens_k: must have cu_seqlens_q's shape \\(3,\\), got \\(2,\\)", 4, int32(0, 6)),
    ("max_seqlen_q: must be an integer of at least 0, got None", 5, None),
    ("max_seqlen_q: must be at least the longest sequence's 2, got 1", 5, 1),
    ("max_seqlen_k: must be an integer of at least 0, got -1", 6, -1),
    ("block_table: must be int32 .batch, max_blocks. with batch 2, got torch.float32 of shape", 7, torch.zeros(2, 2)),
    ("k: must have q's dtype torch.float16, got torch.float32", 0, torch.zeros(3, 2, 8, dtype=torch.float16)),
    ("v: must have k's 1 heads, got 2", 2, torch.zeros(3, 4, 2, 8)),
])
@pytest.mark.parametrize("gradient", (False, True))
def test_varlen_over_pages_names_wrong_arguments(words, place, value, gradient):
    k = torch.zeros(3, 4, 1, 8, requires_grad=gradient)
    call = [torch.zeros(3, 2, 8), k, k, cumulative([1, 2]), cumulative([6, 3]), 2, 6, int32([2, 0], [0, -1])]
    call[place] = value
    with pytest.raises((TypeError, ValueError), match=words):
        flash_attn_varlen_func(*call[:7], block_table=call[7])


@pytest.mark.parametrize("max_seqlen_q", (2, 20))  # read in place, copied
def test_varlen_over_pages_takes_any_strides_and_refuses_sequences_longer_than_their_table(max_seqlen_q):
    q, k, table = torch.randn(3, 2, 8), torch.randn(3, 4, 1, 8), int32([2, 0], [0, 1])
    call = functools.partial(flash_attn_varlen_func, q, cu_seqlens_q=cumulative([1, 2]), max_seqlen_q=max_seqlen_q, max_seqlen_k=9,
                             block_table=table)
    other = k.mT.contiguous().mT
    assert torch.equal(*(call(k=x, v=x, cu_seqlens_k=cumulative([6, 8])) for x in (k, other)))
    with pytest.raises(ValueError, match="cu_seqlens_k: a sequence must have at most the 8 tokens .* got \\[0, 9, 10\\]"):
        call(k=k, v=k, cu_seqlens_k=cumulative([9, 1]))


@pytest.mark.parametrize("offset", (3, int32(2, 4)))
def test_a_leaf_that_is_turned_in_place_has_a_gradient(offset):
    cos, sin = tables()
    leaf = torch.randn(2, 5, 3, 16)
    other = leaf.clone().requires_grad_()
    leaf.requires_grad_()
    out, expected = (apply_rotary_emb(x, cos, sin, inplace=x is leaf, seqlen_offsets=offset) for x in (leaf, other))
    assert torch.equal(leaf, out) and torch.equal(out, expected) and out.data_ptr() == leaf.data_ptr()
    grad = torch.randn_like(out)
    assert torch.equal(*(torch.autograd.grad(y, x, grad)[0] for y, x in ((out, leaf), (expected, other))))


@pytest.mark.parametrize("change, words", [
    ({"seqlen_offsets": -1}, "seqlen_offsets: must be an integer of at least 0, got -1"),
    ({"seqlen_offsets": int32(0)}, "seqlen_offsets: must be whole numbers of shape .2,. on x's device cpu"),
    ({"seqlen_offsets": int32(0, -2)}, "seqlen_offsets: must be at least 0, got .0, -2."),
    ({"x": torch.zeros(2, 5, 3, 16, dtype=torch.int64)}, "x: must be floating point of 16 to 64 bits"),
    ({"x": torch.zeros(5, 3, 16), "cu_seqlens": int32(0, 6)}, "cu_seqlens: must rise from 0 to at most the 5 tokens, got .0, 6."),
])
def test_what_cannot_be_turned_is_named(change, words):
    cos, sin = tables()
    with pytest.raises((TypeError, ValueError), match=words):
        apply_rotary_emb(**{"x": torch.zeros(2, 5, 3, 16), "cos": cos, "sin": sin} | change)


@pytest.mark.parametrize("interleaved", (False, True))
def test_rotary_embedding(interleaved):
    torch.manual_seed(0)
    x, (cos, sin) = torch.randn(2, 5, 3, 16), tables()
    expected = torch.stack([turned(row, offset + torch.arange(5), interleaved) for row, offset in zip(x, (7, 40), strict=True)])
    torch.testing.assert_close(apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=int32(7, 40)), expected)
    torch.testing.assert_close(apply_rotary_emb(x, cos, sin, interleaved, False, 7)[0], expected[0])
    packed = torch.cat([x[0], x[1, :2]])
    found = apply_rotary_emb(packed, cos, sin, interleaved, seqlen_offsets=int32(7, 0, 40), cu_seqlens=int32(0, 5, 5, 7), max_seqlen=5)
    torch.testing.assert_close(found, torch.cat([expected[0], expected[1, :2]]))
    # places behind the tables: unchanged
    beyond = apply_rotary_emb(x, cos[:9], sin[:9], interleaved, seqlen_offsets=7)
    assert torch.equal(beyond[:, 2:], x[:, 2:]) and not torch.equal(beyond[:, :2], x[:, :2])
    # a rotation's gradient is the rotation back
    leaf = x.clone().requires_grad_()
    inner = leaf * 1
    assert apply_rotary_emb(inner, cos, sin, interleaved, True, int32(7, 40)) is inner
    inner.backward(expected)
    torch.testing.assert_close(leaf.grad, x)
    parameters = inspect.signature(apply_rotary_emb).parameters
    assert list(parameters) == ["x", "cos", "sin", "interleaved", "inplace", "seqlen_offsets", "cu_seqlens", "max_seqlen"]


def test_first_axis():
    x, indices = torch.randn(6, 2, 3, requires_grad=True), torch.tensor([4, 0, 5])
    rows = bert_padding.index_first_axis(x, indices)
    assert torch.equal(rows, x[indices])
    back = bert_padding.index_put_first_axis(rows, indices, 6)
    expected = torch.zeros_like(x)
    expected[indices] = x.detach()[indices]
    assert torch.equal(back, expected)
    back.backward(torch.ones_like(back))
    assert x.grad.flatten(1).sum(1).tolist() == [6, 0, 0, 0, 6, 6]
    assert bert_padding.unpad_input(x, torch.ones(6, 2))[0].shape == (12, 3)
