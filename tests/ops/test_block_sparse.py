"""block_sparse_attention's kernels against the reference in float64 under the 2x rule, layouts, and patterns against their definitions."""

import itertools
from dataclasses import replace

import pytest
import torch
from paths import PATHS

from attnzoo_kernels import BlockLayout, block_sparse_attention, flash_attention
from attnzoo_kernels.block_sparse import patterns, tiles
from attnzoo_kernels.block_sparse.cases import CORRECTNESS, Case
from attnzoo_kernels.block_sparse.layout import BLOCKS
from attnzoo_kernels.block_sparse.lists import Grid, tile_lists
from attnzoo_kernels.block_sparse.patterns import PATTERNS, Pattern
from benchmarks.accuracy import assert_accurate

GPU = torch.cuda.is_available()
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if GPU else (torch.float32, torch.float16)  # the interpreter gets bfloat16 wrong
CASES = [replace(case, dtype=dtype) for dtype in DTYPES for n, case in enumerate(CORRECTNESS)
         if GPU or (max(max(pair) for pair in case.lengths) <= 300 and (dtype == torch.float32 or n % 9 == 0))]


def run(inputs, impl: str, dtype: torch.dtype | None = None, deterministic: bool | None = None) -> dict[str, torch.Tensor]:
    """Output, LSE and all gradients, of a loss on output and LSE; rows without a key have their LSE replaced by a number."""
    q, k, v = tensors = [(x.to(dtype) if dtype else x.detach()).requires_grad_() for x in inputs[:3]]
    out, lse = block_sparse_attention(q, k, v, inputs.layout, **inputs.options, return_lse=True, impl=impl, deterministic=deterministic)
    dlse = torch.randn(lse.shape, generator=torch.Generator(lse.device).manual_seed(6), device=lse.device)
    grads = torch.autograd.grad([out, lse], tensors, [inputs.dout.to(out.dtype), dlse.to(lse.dtype)])
    out, lse = out.detach(), lse.detach()
    return {"out": out, "lse": lse.masked_fill(lse == -torch.inf, 7.0)} | dict(zip(("dq", "dk", "dv"), grads, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, device, poisoned):
    inputs = case.inputs(device)
    ours, eager, exact = run(inputs, "triton"), run(inputs, "reference"), run(inputs, "reference", torch.float64)
    assert_accurate(ours, eager, exact)


def test_dq_stays_exact_over_many_tiles(device, monkeypatch):
    """In float32 a row's delta is large beside what it is taken from where values are far from zero, and many tiles of keys make it."""
    from attnzoo_kernels.block_sparse import backward, forward
    from attnzoo_kernels.block_sparse.options import Options

    monkeypatch.setattr(tiles, "INTERPRETER", tiles.Tile(16, 16, 4, 1))
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, n, 1, width, generator=generator) for n, width in ((16, 16), (1024, 16), (1024, 32)))
    q, k, v = (x.to(device) for x in (q, k, v + 24))
    layout = BlockLayout.from_mask(torch.ones(1, 16, dtype=torch.bool, device=device), 16, 64)
    dout = torch.ones(1, 16, 1, 32, device=device)

    def eager(dtype):
        queries = q.to(dtype).requires_grad_()
        out = block_sparse_attention(queries, k.to(dtype), v.to(dtype), layout, impl="reference")
        return torch.autograd.grad(out, queries, dout.to(dtype))

    options = Options.of(layout.mask, 16, 64, None, 16**-0.5, -1, -1)
    out, _, stats = forward.launch_forward(q, k, v, layout.mask, None, None, options)
    dq, _ = backward.launch_dq(dout, None, q, k, v, out, stats, layout.mask, None, None, options)
    assert_accurate([dq], eager(torch.float32), eager(torch.float64))


@pytest.mark.gpu
def test_repeated_runs_are_bitwise_equal(device):
    inputs = Case(seqlen_q=113, heads=4, kv_heads=2, block_q=16, causal=True, masks="head", dtype=torch.float32).inputs(device)
    first = run(inputs, "triton")
    for _ in range(20):
        again = run(inputs, "triton")
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("impl", PATHS)
@pytest.mark.parametrize("block_q, block_k", ((16, 32), (64, 16)))
def test_a_row_of_no_block_is_zero_with_finite_gradients(device, impl, block_q, block_k):
    mask = torch.ones(-(-128 // block_q), 128 // block_k, dtype=torch.bool, device=device)
    mask[1] = False
    mask[:, 2] = False
    rows, columns = slice(block_q, 2 * block_q), slice(2 * block_k, 3 * block_k)
    q, k, v = (torch.randn(1, 128, 2, 16, device=device, requires_grad=True) for _ in range(3))
    out, lse = block_sparse_attention(q, k, v, BlockLayout.from_mask(mask, block_q, block_k), return_lse=True, impl=impl)
    assert (out[:, rows] == 0).all() and (lse[..., rows] == -torch.inf).all() and (lse.isfinite().sum() == lse.numel() - 2 * block_q)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert not q.grad[:, rows].any() and not k.grad[:, columns].any() and not v.grad[:, columns].any() and v.grad.any()


@pytest.mark.slow
@pytest.mark.parametrize("len_q, len_k", ((96, 96), (96, 128), (128, 80)))
def test_a_block_above_the_causal_diagonal_changes_nothing(device, len_q, len_k):
    inputs = Case(seqlen_q=len_q, seqlen_k=len_k, block_q=16, causal=True, dtype=torch.float32).inputs(device)
    i, j = torch.arange(len_q, device=device)[::16, None] + 15, torch.arange(len_k, device=device)[::16]
    dead = j > i + len_k - len_q
    assert dead.any()
    results = [run(inputs._replace(layout=BlockLayout.from_mask(mask, 16)), "triton")
               for mask in (inputs.layout.mask & ~dead, inputs.layout.mask | dead)]
    assert all(torch.equal(a, b) for a, b in zip(*(r.values() for r in results), strict=True))


def test_picture_of_the_docstring(device):
    mask = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]], device=device).bool()
    picture = "100000 110000 001000 001100 110010 110011"
    expected = torch.tensor([[int(x) for x in row] for row in picture.split()], device=device)
    expected = expected.repeat_interleave(8, 0).repeat_interleave(8, 1)
    expected &= torch.ones(48, 48, device=device).tril().bool()
    expected |= torch.block_diag(*[torch.ones(8, 8)] * 6).to(device).bool().tril()  # blocks of 2 drawn as blocks of 16
    q = k = torch.zeros(1, 48, 1, 16, device=device)
    v = torch.eye(48, device=device).view(1, 48, 1, 48)
    for impl in PATHS:
        seen = block_sparse_attention(q, k, v, BlockLayout.from_mask(mask, 16), causal=True, impl=impl)[0, :, 0] > 0
        assert torch.equal(seen, expected.bool())


@pytest.mark.parametrize("causal", (False, True))
def test_every_block_kept_is_flash_attention(device, causal):
    x = Case(seqlen_q=113, heads=4, kv_heads=2, block_q=32, density=1.0, causal=causal, dtype=torch.float32).inputs(device)
    ours = block_sparse_attention(x.q, x.k, x.v, x.layout, causal=causal, impl="reference")
    torch.testing.assert_close(ours, flash_attention(x.q, x.k, x.v, causal=causal, impl="reference"), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("causal", (False, True))
def test_nothing_depends_on_what_lies_beyond_a_sequence(device, causal):
    """Packed sequences with NaN in their neighbours, and in the tokens behind the last one."""
    cu_seqlens = torch.tensor((0, 33, 83, 102, 102), dtype=torch.int32, device=device)
    rows = slice(33, 83)
    tensors = [torch.randn(110, 2, 32, device=device, generator=torch.Generator(device).manual_seed(i)) for i in range(4)]
    poisoned = [x.clone() for x in tensors]
    for x in poisoned:
        x[: rows.start] = torch.nan
        x[rows.stop:] = torch.nan
    layout = patterns.sliding_window(64, window=1, block=16, causal=False, device=device)
    results = []
    for q, k, v, dout in (tensors, poisoned):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out, lse = block_sparse_attention(q, k, v, layout, causal=causal, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=50,
                                          max_seqlen_k=50, return_lse=True, impl="triton")
        out.backward(dout)
        assert (out[102:] == 0).all() and (lse[:, 102:] == -torch.inf).all()
        assert all((x.grad[102:] == 0).all() for x in (q, k, v))
        results.append([out[rows], lse[:, rows], *(x.grad[rows] for x in (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("impl", PATHS)
def test_scales_that_are_not_positive(device, impl):
    q, k, v = (torch.randn(1, 40, 1, 16, device=device) for _ in range(3))
    layout = patterns.dense(40, block=16, causal=False, device=device)
    for scale in (-0.5, 0.0):
        ours = block_sparse_attention(q, k, v, layout, softmax_scale=scale, impl=impl)
        exact = torch.softmax(q[0, :, 0].double() @ k[0, :, 0].double().T * scale, -1) @ v[0, :, 0].double()
        torch.testing.assert_close(ours[0, :, 0].double(), exact, rtol=1e-5, atol=1e-5)


def test_reference_gradients_by_gradcheck():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 2, dtype=torch.float64, requires_grad=True) for n, h in ((17, 2), (18, 1), (18, 1)))
    layout = BlockLayout.from_mask(torch.tensor([[True, False], [False, True]]), 16)

    def attend(q, k, v):
        out, lse = block_sparse_attention(q, k, v, layout, causal=True, return_lse=True)
        return out, lse

    assert torch.autograd.gradcheck(attend, (q, k, v)) and torch.autograd.gradgradcheck(lambda *x: attend(*x)[0], (q, k, v))


def test_custom_operators_pass_opcheck(device):
    from attnzoo_kernels.block_sparse import ops

    q, k, v = (torch.randn(1, 40, 2, 16, device=device, requires_grad=True) for _ in range(3))
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool, device=device)
    pattern = Pattern("sliding_window", block=16)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for chosen, key in ((mask, ""), (None, pattern.key)):
        arguments = (q, k, v, chosen, None, None, key, "triton", False, 3, 3, 16, 16, 0.25, -1, 0)
        torch.library.opcheck(torch.ops.attnzoo.block_sparse_forward, arguments, test_utils=checks)
    torch.library.opcheck(ops.pattern_mask, (pattern.key, 1, 3, 3, torch.device(device)), test_utils=checks)


# lists


@pytest.mark.parametrize("by_keys", (False, True))
@pytest.mark.parametrize("block_q, block_k, tile", ((16, 32, 32), (64, 16, 32), (128, 128, 64)))
def test_lists_hold_each_visible_tile_once_and_heavy_ones_come_first(device, by_keys, block_q, block_k, tile):
    len_q, len_k, heads, group = 200, 260, 4, 2
    mask = torch.rand(1, heads, -(-len_q // block_q), -(-len_k // block_k), device=device) < 0.4
    grid = Grid(block_q, block_k, tile, tile, len_q, len_k, -1, 0, False)
    lists = tile_lists(mask, grid, 2, heads, group, by_keys)
    i, j = torch.arange(len_q, device=device), torch.arange(len_k, device=device)
    seen = mask[0][:, i[:, None] // block_q, j // block_k] & (j <= i[:, None] + len_k - len_q)
    tiles = -(-len_q // tile), -(-len_k // tile)
    weights = torch.zeros(heads, *tiles, dtype=torch.int64)
    for head, m, n in itertools.product(range(heads), *map(range, tiles)):
        part = seen[head, m * tile : (m + 1) * tile, n * tile : (n + 1) * tile]
        own, other = (n, m) if by_keys else (m, n)
        clear, masked = lists.count[0, head, own].tolist()
        listed = lists.index[0, head, own].tolist()
        assert (other in listed[:clear]) == (bool(part.all()) and part.shape == (tile, tile))
        assert listed[:clear] == sorted(listed[:clear]) and listed[clear : clear + masked] == sorted(listed[clear : clear + masked])
        if part.any():
            assert listed[: clear + masked].count(other) == 1
        weights[head, m, n] = listed[: clear + masked].count(other)
    weights = weights.sum(1).unflatten(0, (-1, group)).sum(1) if by_keys else weights.sum(2)
    weights = weights.repeat(2, 1).flatten()
    order = lists.order.tolist()
    assert sorted(order) == list(range(weights.numel()))
    assert order == weights.argsort(descending=True, stable=True).tolist()
    assert tile_lists(mask, grid, 2, heads, group, by_keys) is lists


@pytest.mark.slow
def test_programs_run_by_bunches_of_heads_and_very_long_ones_before_all(device, monkeypatch):
    from attnzoo_kernels.block_sparse import lists

    monkeypatch.setattr(lists, "BUNCH_TOKENS", 2 * 32 * 16)
    head, row = torch.arange(6, device=device)[:, None, None], torch.arange(32, device=device)[:, None]
    mask = (torch.arange(32, device=device) <= (head + 7 * row) % 3)[None].clone()
    mask[0, 4, 7] = mask[0, 5, 2, 4:] = True
    order = tile_lists(mask, Grid(16, 16, 16, 16, 512, 512, -1, -1, False), 1, 6, 1, False).order.tolist()
    lengths = mask.sum(-1).flatten().tolist()
    long = [entry for entry in order if lengths[entry] > 4 * sum(lengths) / len(lengths)]
    assert long == order[: len(long)] == [4 * 32 + 7, 5 * 32 + 2]
    assert order[2:] == sorted(order[2:], key=lambda entry: (entry // 64, -lengths[entry], entry))


@pytest.mark.slow
def test_a_layout_is_prepared_once_and_a_few_geometries_are_kept(device):
    layout = patterns.longformer(160, block=16, device=device)
    q = torch.randn(1, 160, 2, 16, device=device)
    for length in range(145, 160, 2):
        block_sparse_attention(*(q[:, :length],) * 3, layout, causal=True, impl="triton")
    from attnzoo_kernels.block_sparse import lists

    kept = lists._kept[layout.mask]
    assert 8 <= len(kept.recent) <= lists.MAX_KEPT == kept.limit
    del layout


# layouts


def test_layouts_join_cut_compare_and_show_themselves():
    mask = torch.tensor([[True, False, False], [True, True, False]])
    a = BlockLayout.from_mask(mask, 32, 16)
    mask[:] = True
    assert a.blocks == (2, 3) and a.density == 0.5 and not a.mask.all()
    b = BlockLayout.from_mask(torch.eye(2, 3).bool().expand(4, 2, 3), 32, 16)
    assert (a | b).heads == 4 and torch.equal((a & b).mask, b.mask & a.mask)
    assert a[:1, :2] == BlockLayout.from_mask(torch.tensor([[True, False]]), 32, 16) and a != b and a != 3
    assert repr(b) == "BlockLayout(2 x 3 blocks of 32 x 16 tokens, 4 heads, density 0.333, cpu)"
    assert a.to("cpu") == a
    with pytest.raises(AttributeError):
        a.block_q = 16
    pytest.importorskip("matplotlib").use("Agg")
    axes = b.plot(head=2)
    assert axes.get_xlabel() == "key" and "0.333" in axes.get_title() and axes.images[0].get_array().shape == (2, 3)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("top_k", (1, 3, 9))
def test_a_layout_of_scores_keeps_the_best_blocks(top_k, dtype, device):
    """Of equal scores, 0 and -0 among them, the earlier one; no NaN and no -inf."""
    values = torch.tensor([-torch.inf, torch.nan, -1.0, -0.0, 0.0, 2.0, torch.inf], dtype=dtype)
    scores = values[torch.randint(len(values), (2, 3, 20, 7), generator=torch.Generator().manual_seed(0))]
    layout = BlockLayout.from_scores(scores.to(device).requires_grad_(), top_k, 64, 128)
    assert (layout.batch, layout.heads, layout.blocks, layout.block_q, layout.block_k) == (2, 3, (20, 7), 64, 128)
    for row, kept in zip(scores.flatten(0, 2).tolist(), layout.mask.flatten(0, 2).tolist(), strict=True):
        best = sorted((block for block, score in enumerate(row) if score > -torch.inf), key=lambda block: -row[block])[:top_k]
        assert [block for block, is_kept in enumerate(kept) if is_kept] == sorted(best)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: BlockLayout.from_scores(torch.ones(2, 2).bool(), 1, 16), TypeError, "scores: must be float16, .*, got torch.bool"),
        (lambda: BlockLayout.from_scores(torch.ones(2), 1, 16), ValueError, r"scores: must be \(q_blocks, k_blocks\).*got shape \(2,\)"),
        (lambda: BlockLayout.from_scores(torch.ones(2, 2), 0, 16), ValueError, "top_k: must be an integer of at least 1, got 0"),
        (lambda: BlockLayout.from_mask(torch.ones(2, 2), 16), TypeError, "mask: must be a bool tensor, got torch.float32"),
        (lambda: BlockLayout.from_mask(torch.ones(2).bool(), 16), ValueError, r"mask: must be \(q_blocks, k_blocks\)"),
        (lambda: BlockLayout.from_mask(torch.ones(2, 2).bool(), 48), ValueError, "block_q: must be one of 16, 32, 64, 128, 256"),
        (lambda: BlockLayout.from_mask(torch.ones(2, 2).bool(), 16, 8), ValueError, "block_k: must be one of"),
        (lambda: patterns.dense(64) | patterns.dense(128), ValueError, "blocks: joined layouts must agree"),
        (lambda: patterns.dense(64) & 3, TypeError, "joins a BlockLayout, got int"),
        (lambda: patterns.dense(64)[0, 0], TypeError, "two slices"),
        (lambda: patterns.bigbird(64, last_global=True), ValueError, "last_global: .* causal=False"),
        (lambda: patterns.sparse_transformer_fixed(64, stride=4, summary=3, n_summaries=2), ValueError, "summary, n_summaries"),
        (lambda: patterns.random(64, density=2), ValueError, r"density: must lie in \[0, 1\], got 2"),
        (lambda: patterns.sliding_window(64, window=-1), ValueError, "window: must be an integer of at least 0, got -1"),
        (lambda: patterns.sliding_window(64, window=True), ValueError, "window: must be an integer of at least 0, got True"),
        (lambda: patterns.document(64, cu_seqlens=[0, 64]), TypeError, "cu_seqlens: must be a tensor, got list"),
        (lambda: patterns.longformer(-64), ValueError, "seqlen: must be an integer of at least 0, got -64"),
        (lambda: patterns.longformer("64"), ValueError, "seqlen: must be an integer of at least 0, got '64'"),
        (lambda: patterns.global_tokens(64, last_global="no"), TypeError, "last_global: must be True or False, got 'no'"),
        (lambda: Pattern("vertical_slash", vertical=3), TypeError, r"vertical: must be a sequence of integers, such as \(0,\), got 3"),
        (lambda: Pattern("vertical_slash", slash=["1"]), ValueError, "slash: must be an integer, got '1'"),
        (lambda: Pattern("random", seed="a"), ValueError, "seed: must be an integer, got 'a'"),
        (lambda: Pattern("random", density="a"), TypeError, r"density: must be a number in \[0, 1\], got 'a'"),
        (lambda: Pattern("longformer", causal="a"), TypeError, "causal: must be True or False, got 'a'"),
        (lambda: Pattern("longformer", block="a"), ValueError, "block: must be one of 16, 32"),
        (lambda: Pattern("star"), ValueError, "pattern: must be one of dense, .*got 'star'"),
        (lambda: Pattern("dense", window=2), ValueError, "has no option 'window'; it takes block, causal"),
    ],
)
def test_wrong_layouts_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_wrong_calls_are_refused():
    q, k = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16)

    def call(layout, q=q, k=k, **options):
        return block_sparse_attention(q, k, k, layout, **options)

    good = patterns.dense(40, block=16)
    with pytest.raises(ValueError, match="40 queries and 40 keys take 3 x 3 blocks of 16 x 16 tokens, got 4 x 4"):
        call(patterns.dense(64, block=16))
    with pytest.raises(ValueError, match="1 or q's 4 heads, got 3"):
        call(patterns.random(40, block=16, heads=3))
    with pytest.raises(ValueError, match="heads must be 1 or q's 4, got 3"):
        call(Pattern("random", block=16, heads=3))
    with pytest.raises(ValueError, match="1 or q's 1 sequences, got 2"):
        call(BlockLayout.from_mask(torch.ones(2, 1, 3, 3).bool(), 16))
    with pytest.raises(TypeError, match="layout: must be a BlockLayout or a Pattern, got Tensor"):
        call(good.mask)
    with pytest.raises(ValueError, match="softmax_scale: must be a finite number.* got nan"):
        call(good, softmax_scale=float("nan"))
    with pytest.raises(TypeError, match="causal: must be True or False, got 'no'"):
        call(good, causal="no")
    with pytest.raises(TypeError, match="deterministic: must be True or False or None, got 'yes'"):
        call(good, deterministic="yes")
    with pytest.raises(ValueError, match="impl: must be None or one of"):
        call(good, impl="cuda")
    with pytest.raises(ValueError, match="the last of the 40 keys' tokens, got 41"):
        call(Pattern("dense", block=16), q=torch.randn(1, 41, 4, 16))
    fewer = torch.tensor([0, 9, 29], dtype=torch.int32)
    with pytest.raises(ValueError, match="the first one .* and no other; sequence 1 has 11 queries and 20 keys"):
        call(Pattern("dense", block=16), q[0, :20], k[0], cu_seqlens_q=torch.tensor([0, 9, 20]).int(), cu_seqlens_k=fewer,
             max_seqlen_q=40, max_seqlen_k=40)


# patterns

N, BLOCK = 13, 16
ON = {
    "dense": ({}, lambda h, r, c: True),
    "sliding_window": ({"window": 2}, lambda h, r, c: -2 <= r - c <= 2),
    "dilated": ({"window": 2, "dilation": 3}, lambda h, r, c: r - c in (-6, -3, 0, 3, 6)),
    "global_tokens": ({"n_global": 2}, lambda h, r, c: r in (0, 1) or c in (0, 1)),
    "longformer": ({"window": 1, "n_global": 1}, lambda h, r, c: r - c in (-1, 0, 1) or r == 0 or c == 0),
    "sparse_transformer_strided": (
        {"stride": 4, "heads": 2}, lambda h, r, c: abs(r - c) < 4 if h == 0 else (r - c) in (-12, -8, -4, 0, 4, 8, 12)),
    "sparse_transformer_fixed": (
        {"stride": 4, "n_summaries": 2, "heads": 3}, lambda h, r, c: r // 4 == c // 4 or c in ((3, 7, 11), (2, 6, 10))[h % 2]),
    "flat_butterfly": ({"n_factors": 3}, lambda h, r, c: c in (r, r ^ 1, r ^ 2, r ^ 4)),
    "vertical_slash": ({"vertical": [1, 5], "slash": [0, 3]}, lambda h, r, c: c in (1, 5) or c in (r, r - 3)),
    "streaming": ({"sinks": 2, "window": 1}, lambda h, r, c: c in (0, 1) or r - c in (-1, 0, 1)),
}
DRAWN = {"bigbird": {"n_random": 2, "heads": 3, "seed": 5}, "random": {"density": 0.3, "heads": 2, "seed": 7}}
OPTIONS = {name: options for name, (options, _) in ON.items()} | DRAWN


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("name", ON)
def test_a_pattern_is_its_definition(name, causal):
    options, kept = ON[name]
    layout = PATTERNS[name](N * BLOCK, block=BLOCK, causal=causal, **options)
    heads = options.get("heads", 1)
    expected = [[[kept(h, r, c) and (c <= r or not causal) for c in range(N)] for r in range(N)] for h in range(heads)]
    assert layout.mask[0].tolist() == expected


@pytest.mark.parametrize("causal", (True, False))
def test_bigbird_draws_its_blocks_before_the_window(causal):
    layout = patterns.bigbird(40 * BLOCK, window=2, n_global=2, n_random=3, heads=4, seed=1, block=BLOCK, causal=causal)
    fixed = patterns.longformer(40 * BLOCK, window=2, n_global=2, block=BLOCK, causal=causal)
    drawn = (layout.mask & ~fixed.mask)[0]
    if not causal:
        assert torch.equal(drawn, drawn.mT)
    below = drawn.tril()
    for r in range(40):
        assert (below[:, r].sum(-1) == (0 if r < 2 else min(3, max(0, r - 2 - 2)))).all()
    assert len({tuple(map(tuple, head.tolist())) for head in below}) == 4
    assert layout != patterns.bigbird(40 * BLOCK, window=2, n_global=2, n_random=3, heads=4, seed=2, block=BLOCK, causal=causal)
    ends = patterns.bigbird(5 * BLOCK, n_random=0, last_global=True, block=BLOCK, causal=False)
    assert ends.mask[0, 0].int().tolist() == [[1] * 5, [1, 1, 1, 0, 1], [1, 1, 1, 1, 1], [1, 0, 1, 1, 1], [1] * 5]


def test_bigbird_draws_columns_evenly():
    """Among 20 eligible columns, 2 drawn by each of 3000 heads: counts within five standard deviations."""
    row = patterns.bigbird(23 * BLOCK, window=1, n_global=1, n_random=2, heads=3000, block=BLOCK).mask[0, :, 22, 1:21].sum(0)
    assert row.sum() == 6000 and (row - 300).abs().max() < 5 * (3000 * 0.1 * 0.9) ** 0.5


def test_random_has_its_density_and_the_diagonal():
    layout = patterns.random(64 * BLOCK, density=0.2, heads=8, block=BLOCK, causal=False)
    off = ~torch.eye(64).bool()
    assert layout.mask.diagonal(dim1=-2, dim2=-1).all()
    drawn = layout.mask[0][:, off].double()
    assert abs(drawn.mean().item() - 0.2) < 5 * (0.16 / drawn.numel()) ** 0.5
    assert patterns.random(N * BLOCK, density=0.0, block=BLOCK).mask.sum() == N
    assert patterns.random(N * BLOCK, density=1.0, block=BLOCK) == patterns.dense(N * BLOCK, block=BLOCK)


@pytest.mark.parametrize("causal", (True, False))
def test_document_keeps_blocks_that_share_one(causal):
    cu_seqlens, seqlen = torch.tensor((0, 20, 33, 33, 90, 128), dtype=torch.int32), 150
    document = [sum(t >= int(end) for end in cu_seqlens[1:]) for t in range(seqlen)]
    layout = patterns.document(seqlen, cu_seqlens=cu_seqlens, block=16, causal=causal)
    blocks = [set(document[t : t + 16]) for t in range(0, seqlen, 16)]
    expected = [[bool(a & b) and (c <= r or not causal) for c, b in enumerate(blocks)] for r, a in enumerate(blocks)]
    assert layout.mask[0, 0].tolist() == expected
    assert layout[:5, :5] == patterns.document(80, cu_seqlens=cu_seqlens, block=16, causal=causal)


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("name", PATTERNS)
def test_a_layout_is_prefix_stable(name, causal):
    make = PATTERNS[name]
    long = make(37 * BLOCK, block=BLOCK, causal=causal, **OPTIONS[name])
    for m in (0, 1, 2, 5, 16, 31, 37):
        assert long[:m, :m] == make(m * BLOCK, block=BLOCK, causal=causal, **OPTIONS[name])
    assert make(36 * BLOCK + 1, block=BLOCK, causal=causal, **OPTIONS[name]) == long


@pytest.mark.slow
@pytest.mark.parametrize("impl", PATHS)
def test_a_pattern_stands_for_its_layout_and_for_the_last_queries_of_a_cache(device, impl):
    pattern = Pattern("bigbird", block=16, window=1, n_random=1, heads=2, seed=3)
    q, k, v = (torch.randn(1, 100, 2, 16, device=device) for _ in range(3))
    layout = patterns.bigbird(100, block=16, window=1, n_random=1, heads=2, seed=3, device=device)
    whole = block_sparse_attention(q, k, v, layout, causal=True, impl=impl)
    assert torch.equal(block_sparse_attention(q, k, v, pattern, causal=True, impl=impl), whole)
    for first, end in ((0, 33), (33, 34), (90, 97), (96, 100)):
        part, lse = block_sparse_attention(q[:, first:end], k[:, :end], v[:, :end], pattern, causal=True, return_lse=True, impl=impl)
        torch.testing.assert_close(part, whole[:, first:end])
        assert lse.shape == (1, 2, end - first)
    assert repr(pattern) == "Pattern('bigbird', block=16, window=1, n_random=1, heads=2, seed=3)"
    assert pattern.layout(97) == pattern.layout(100) and pattern.prefix_stable


@pytest.mark.slow
@pytest.mark.parametrize("impl", PATHS)
def test_a_packed_pattern_does_not_depend_on_how_far_the_bounds_of_lengths_lie(device, impl):
    q, k, v = (torch.randn(60, 2, 16, device=device) for _ in range(3))
    bounds = torch.tensor([0, 20, 60], dtype=torch.int32, device=device)
    first, *others = (
        block_sparse_attention(q, k, v, Pattern("sliding_window", block=16, window=1), cu_seqlens_q=bounds, cu_seqlens_k=bounds,
                               max_seqlen_q=longest_q, max_seqlen_k=longest_k, impl=impl)
        for longest_q, longest_k in ((40, 40), (40, 90), (90, 40)))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("impl", PATHS)
def test_a_pattern_takes_the_last_queries_of_a_part_of_a_packed_stream(device, impl):
    pattern = Pattern("longformer", block=16, window=1, n_global=1, causal=True)
    bounds = torch.tensor([0, 37, 37, 60, 61, 100, 100], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(103, heads, 16, device=device, requires_grad=True) for heads in (4, 2, 2))  # three tokens belong to none
    dout = torch.randn(103, 4, 16, device=device)

    def gradients(first, end, *lengths):
        out, lse = block_sparse_attention(q[first:end], k[:end], v[:end], pattern, causal=True, cu_seqlens_q=lengths[0],
                                          cu_seqlens_k=lengths[1], max_seqlen_q=39, max_seqlen_k=39, return_lse=True, impl=impl)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout[first:end])

    whole = gradients(0, 103, bounds, bounds)
    parts = [gradients(first, end, (bounds - first).clamp(0, end - first), bounds.clamp(0, end))
             for first, end in ((0, 20), (20, 58), (58, 60), (60, 103))]
    parts.append(gradients(103, 103, bounds * 0, bounds))
    empty = block_sparse_attention(q[:2], k[:0], v[:0], pattern, cu_seqlens_q=bounds * 0, cu_seqlens_k=bounds * 0, max_seqlen_q=5,
                                   max_seqlen_k=0, impl=impl)
    assert not empty.any()
    for n, found in enumerate(zip(*parts, strict=True)):
        torch.testing.assert_close(torch.cat(found, n) if n < 2 else sum(found), whole[n])


def test_every_tile_s_blocks_have_their_bits():
    from attnzoo_kernels.block_sparse import lists, tiles

    for table in (tiles.forward_tile, tiles.dq_tile, tiles.dkdv_tile):
        for arch, width, itemsize, block in itertools.product((0, 80, 90, 100, 120), (16, 32, 64, 128, 256), (2, 4), BLOCKS):
            tile = table(arch, width, width, itemsize, block)
            assert tile.block_m * tile.block_n <= lists.MAX_PARTS * 16 * 16


def test_break_even_lies_where_the_lines_cross():
    from benchmarks.block_sparse import break_even

    assert break_even([(0.2, 1.0, 3.0), (0.6, 3.0, 3.5), (1.0, 5.0, 3.0)]) == pytest.approx(0.6 + 0.4 * 0.5 / 2.5)
    assert break_even([(0.2, 1.0, 3.0), (1.0, 2.0, 3.0)]) is None and break_even([(0.2, 4.0, 3.0), (1.0, 5.0, 3.0)]) is None
