"""Decoding with caches of a fixed size, whose lengths only the device knows: the tokens are those of reading each row by itself."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import get_class
from omegaconf import OmegaConf
from test_generation import CONFIGS, SIZES, VARIANTS, build, read_again
from torch import nn

from attnzoo.attention import cache as cache_module
from attnzoo.attention.base import POSITIONS, Attention, AttentionSpec, SequenceInfo
from attnzoo.attention.block_sparse import BlockSparseAttention
from attnzoo.attention.cache import KVCache, Newest
from attnzoo.attention.differential import DifferentialAttention
from attnzoo.attention.distance_bias import DistanceBiasAttention
from attnzoo.attention.dual_chunk import DualChunkAttention
from attnzoo.attention.flash import FlashAttention
from attnzoo.attention.forgetting import ForgettingAttention
from attnzoo.attention.mla import MLAttention
from attnzoo.attention.moba import MoBAAttention
from attnzoo.attention.msa import MSAttention
from attnzoo.attention.nsa import NSAttention, Pool
from attnzoo.attention.positions import rotate
from attnzoo.attention.sdpa import SDPAttention, masked_attention
from attnzoo.models import GPT, blocks, decoding
from attnzoo.models.blocks import MLPS
from attnzoo.models.decoding import GRAPHED, _prepared, why_no_graph
from attnzoo_kernels import dispatch
from attnzoo_kernels.add_norm import add_norm
from attnzoo_kernels.decode.append import append_rotated
from benchmarks.accuracy import assert_accurate

LENGTHS = (40, 1, 17)
OPTIONS = {
    "windows and sinks": lambda spec: FlashAttention(spec, window_size=[5, 0], sinks=True, softcap=5.0),
    "patterns by head": lambda spec: BlockSparseAttention(spec, pattern={"name": "bigbird", "n_random": 1, "heads": 4}, block=16),
    "differential V2": lambda spec: DifferentialAttention(spec, version=2),
    "blocks that are chosen": lambda spec: MoBAAttention(spec, block_size=4, top_k=3),
    "blocks of an indexer": lambda spec: MSAttention(spec, block_size=4, top_k=3, index_dim=8),
    "compressed keys": lambda spec: NSAttention(
        spec, compress_size=4, compress_stride=2, block_size=4, block_count=3, window=5),
    "forgetting, shifted": lambda spec: ForgettingAttention(spec, shift_keys=True, shift_values=True, output_norm=True),
    "dual chunk, yarn": lambda spec: DualChunkAttention(spec, chunk_size=12, temperature="yarn"),
    "dual chunk, longer chunks": lambda spec: DualChunkAttention(spec, chunk_size=24, local_size=8, temperature="yarn"),
    "dual chunk, two stages": lambda spec: DualChunkAttention(spec, chunk_size=24, local_size=8, stages=["intra", "inter"]),
    "blocks in pages": lambda spec: BlockSparseAttention(spec, pattern={"name": "longformer", "window": 1}, block=16),
    "a bias by distance and position": lambda spec: DistanceBiasAttention(spec, kind="fire", threshold=9),
    "differential": lambda spec: DifferentialAttention(spec),
    "latents, wide": lambda spec: MLAttention(spec, q_lora_rank=24, kv_lora_rank=256),  # wider than decode_attention's caches
}
OWN_MODEL = ("dual chunk, yarn", "dual chunk, longer chunks", "latents, wide")  # without a norm of queries and keys
MODEL = {"qk_norm": True, "attention_temperature": "ssmax", "attention_gate": "head"}


def prompts(device):
    ids = torch.randint(53, (3, 40), generator=torch.Generator().manual_seed(1)).to(device)
    return ids, torch.tensor(LENGTHS, device=device)


def check_rows_of_unlike_lengths(model, device, count=30):
    ids, lengths = prompts(device)
    together = model.generate(ids, count, lengths=lengths, temperature=0)[:, ids.shape[1] :]
    for row, length in enumerate(LENGTHS):
        alone = model.generate(ids[row : row + 1, :length], count, temperature=0)[:, length:]
        assert torch.equal(together[row : row + 1], alone)
    return together


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_row_is_what_it_is_alone(variant, positions, device):
    if not get_class(OmegaConf.load(CONFIGS / f"{variant}.yaml")["_target_"]).decodes_on_device:
        pytest.skip("its caches' lengths are the host's")
    check_rows_of_unlike_lengths(build(variant, positions, device), device)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_too(name, device):
    torch.manual_seed(0)
    model = GPT(**SIZES, **({} if name in OWN_MODEL else MODEL), attention=OPTIONS[name]).double().eval()
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    check_rows_of_unlike_lengths(model.to(device).float() if device == "cuda" else model, device)


@pytest.mark.parametrize("name", ("differential", "differential V2", "dual chunk, yarn", "dual chunk, longer chunks",
                                  "dual chunk, two stages", "blocks in pages", "blocks that are chosen", "compressed keys"))
def test_decode_attention_gives_what_the_variants_own_kernels_give(name):
    """Of the first token, of tokens beside borders of blocks and chunks, and of the last one there is room for."""
    torch.manual_seed(0)
    spec = AttentionSpec(dim=32, n_heads=4, n_kv_heads=2, head_dim=8, layer=1, n_layers=2, causal=True, positions="rotary",
                         train_context=24)
    layer = OPTIONS[name](spec).double().eval()
    at = torch.tensor([0, 15, 16, 17, 31, 32, 40, 48, 63])
    x, results = torch.randn(len(at), 64, 32, dtype=torch.float64), []
    usual = Attention.attend_newest
    if name == "blocks in pages":
        usual = lambda layer, q, cache, seq: masked_attention(q, *cache.buffers, layer._newest_mask(cache))  # noqa: E731
    for append_newest, attend_newest in ((Attention._append_newest, usual), (type(layer)._append_newest, type(layer).attend_newest)):
        cache = layer.new_cache(len(at), 64)
        with torch.no_grad():
            layer(x, SequenceInfo(torch.arange(64)[None]), cache)
            for step in (at, (at + 1).clamp(max=63)):  # the first changes the cache
                cache.newest, seq = Newest(step, 64), SequenceInfo(step[:, None])
                q, k, v, *rest = layer.project(x[torch.arange(len(at)), step][:, None])
                q = append_newest(layer, q, k, v, cache, seq, *rest)
                results.append(attend_newest(layer, q, cache, seq, *rest))
    for expected, found in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("on_device", (False, True))
def test_a_new_token_pools_the_window_that_it_ends(monkeypatch, on_device):
    windows, own = [], Pool.forward

    def forward(pool, chunks, rows):
        pooled = own(pool, chunks, rows)
        windows.append(pooled.shape[-3])
        return pooled

    monkeypatch.setattr(Pool, "forward", forward)
    model = GPT(**SIZES, attention=OPTIONS["compressed keys"]).eval()
    model.generate(torch.randint(53, (1, 21)), 6, lengths=torch.tensor([21]) if on_device else None, temperature=0)
    calls = 2 * len(model.blocks)  # of keys and of values
    assert windows[:calls] == [9] * calls  # windows of 4, begun every second token
    # the last of 6 tokens is not read; where the host knows the length, it pools for every second token only
    assert windows[calls:] == [1] * calls * (5 if on_device else 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("blocks that are chosen", "blocks of an indexer", "compressed keys"))
def test_blocks_of_the_newest_tokens_are_read_as_pages(name, device):
    """By the kernels, over caches of a fixed size; the tokens are those of reading the whole text again, in float64 and without a cache."""
    torch.manual_seed(0)
    model = GPT(**SIZES, attention=OPTIONS[name]).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    exact = copy.deepcopy(model).double()
    for block in model.blocks:
        block.attention.impl = "triton"
    ids, lengths = prompts(device)
    dispatch.forget()
    together = model.to(device).generate(ids, 6, lengths=lengths, temperature=0)[:, ids.shape[1] :].cpu()
    assert dispatch.implementations_taken()["decode forward"] == ["triton"]
    for row, length in enumerate(LENGTHS):
        assert torch.equal(together[row], read_again(exact, ids[row : row + 1, :length].cpu(), 6, None, {"temperature": 0})[0, length:])


@pytest.mark.gpu
def test_latents_by_their_kernel():
    torch.manual_seed(0)
    model = GPT(**SIZES, attention=lambda spec: MLAttention(spec, kv_lora_rank=256)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    dispatch.forget()
    check_rows_of_unlike_lengths(model.to("cuda"), "cuda")
    assert dispatch.implementations_taken()["latent_decode forward"] == ["triton"]


def test_draws_are_those_of_caches_whose_lengths_the_host_knows(device):
    model = build("flash", "rotary", device)
    ids, _ = prompts(device)
    whole = torch.full((3,), 40, device=device)
    texts = [model.generate(ids, 20, lengths=lengths, generator=torch.Generator(device).manual_seed(3)) for lengths in (None, whole)]
    assert torch.equal(*texts)


@pytest.mark.parametrize("unlike", (False, True))
@pytest.mark.parametrize("variant", VARIANTS)
def test_samples_are_what_as_many_equal_rows_draw(variant, unlike, device, monkeypatch):
    model = build(variant, "rotary", device)
    if unlike and not all(block.attention.decodes_on_device for block in model.blocks):
        pytest.skip("its caches' lengths are the host's")
    ids, lengths = prompts(device)
    read = []
    forward = GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, ids, **options: (read.append(ids.shape), forward(self, ids, **options))[1])
    texts = [model.generate(x, 12, lengths=n if unlike else None, generator=torch.Generator(device).manual_seed(3), **samples)
             for x, n, samples in ((ids, lengths, {"samples": 4}), (ids.repeat_interleave(4, 0), lengths.repeat_interleave(4), {}))]
    assert torch.equal(*texts) and read[0] == (3, 40) and read[1][0] == 12
    assert len({tuple(row) for row in texts[0].tolist()}) > 3


@pytest.mark.parametrize("kind", ("samples", "beginning"))
@pytest.mark.parametrize(("attention", "positions"), ((FlashAttention, "rotary"), (OPTIONS["windows and sinks"], "rotary"),
                                                     (FlashAttention, "alibi")))
def test_beginnings_that_are_alike_are_read_in_the_pages_of_one_text(attention, positions, kind, device, monkeypatch):
    """The other texts' own copies of them are NaN."""
    monkeypatch.setattr(decoding, "PAGE", 8)
    monkeypatch.setattr(cache_module, "PAGE", 8)
    model = GPT(**SIZES | {"positions": positions}, attention=attention).eval().to(device)
    ids, lengths = prompts(device)
    ids[:, :17] = ids[0, :17]
    lengths = lengths.clamp(min=20)
    how = {"samples": 3} if kind == "samples" else {"shared": 17}
    expected = model.generate(ids, 12, lengths=lengths, generator=torch.Generator(device).manual_seed(3), **how)
    found = model.decoding(ids, 12, lengths=lengths, generator=torch.Generator(device).manual_seed(3), pages=True, **how)
    drawn = [found.step().clone()]
    for cache in found.caches:
        for buffer in cache.buffers:
            for row in range(1, buffer.shape[0]):
                own = row % 3 == 0 if kind == "samples" else False
                alike = int(lengths[row // 3]) if kind == "samples" else 17
                buffer[row, : 0 if own else alike // 8 * 8] = torch.nan
    drawn += [found.step().clone() for _ in range(11)]
    assert torch.equal(torch.cat(drawn, 1), expected[:, ids.shape[1] :])


@pytest.mark.gpu
@pytest.mark.parametrize("variant, samples, pages", [("flash", 2, False), ("flash", 4, True), ("sigmoid", 4, False)])
def test_many_long_copies_take_pages_of_themselves(variant, samples, pages, monkeypatch):
    monkeypatch.setattr(decoding, "PAGES_FROM", 160)
    assert build(variant, "rotary", "cuda").decoding(prompts("cuda")[0], 8, samples=samples, graph=True).pages == pages


def test_a_cpu_takes_no_pages_of_itself(monkeypatch):
    monkeypatch.setattr(decoding, "PAGES_FROM", 1)
    assert not build("flash", "rotary", "cpu").decoding(prompts("cpu")[0], 8, samples=4).pages


def test_pages_need_a_variant_that_reads_them():
    with pytest.raises(ValueError, match="pages=True: no layer of this model reads pages"):
        build("sdpa", "rotary", "cpu").generate(prompts("cpu")[0], 1, pages=True)


def test_samples_are_one_at_least():
    with pytest.raises(ValueError, match="samples=0: must be at least 1"):
        build("sdpa", "rotary", "cpu").generate(prompts("cpu")[0], 1, samples=0)


@pytest.mark.parametrize("lengths", (None, LENGTHS))
def test_rows_repeat_the_token_that_stops_them_until_all_have_one(lengths):
    model = build("sdpa", "rotary", "cpu")
    ids, _ = prompts("cpu")
    options = {"temperature": 0, "lengths": None if lengths is None else torch.tensor(lengths)}
    free = model.generate(ids, 25, **options)[:, 40:]
    stop = [int(free[0, 3]), int(free[1, 6]), int(free[2, 12])]
    ends = [min(i for i, token in enumerate(row) if token in stop) for row in free.tolist()]
    stopped = model.generate(ids, 25, stop=stop, **options)[:, 40:]
    assert stopped.shape[1] == max(ends) + 1 and len(set(ends)) > 1
    for row, end in enumerate(ends):
        assert torch.equal(stopped[row, : end + 1], free[row, : end + 1])
        assert (stopped[row, end:] == stopped[row, end]).all()


@pytest.mark.parametrize("attention", (DifferentialAttention, OPTIONS["a bias by distance and position"]), ids=("differential", "fire"))
def test_the_weights_of_decoding_are_the_model_s_own(attention):
    """Cast and joined ahead, they give what autocast gives, bit by bit."""
    torch.manual_seed(0)
    model = GPT(**SIZES, attention=attention).eval()
    ids, _ = prompts("cpu")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        fast = _prepared(model)
        assert torch.equal(fast.forward(ids), model(ids))
    before = {id(parameter) for parameter in model.parameters()}
    assert fast.blocks[0].attention.q_proj.weight.dtype == torch.bfloat16
    assert {id(p) for name, p in fast.named_parameters() if "norm" in name or "embedding" in name} <= before
    assert all(block.attention.joined is None for block in model.blocks) and all(p.requires_grad for p in model.parameters())
    if attention is DifferentialAttention:
        for ours, own in zip(fast.blocks, model.blocks, strict=True):
            assert torch.equal(ours.attention.fixed_lambda, own.attention.lambda_of_layer()) and own.attention.fixed_lambda is None


@pytest.mark.parametrize("options", (
    {}, {"norm": "rmsnorm", "bias": False, "mlp": "swiglu"}, {"positions": "learned", "mlp": "gelu_tanh"}, {"norm_position": "post"},
    {"autocast_residual": True}))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_sums_and_norms_in_one_are_what_they_are_apart(dtype, options, monkeypatch):
    """Bit by bit, because the stream keeps all bits of its float32. Where there is no such stream nothing is joined."""
    torch.manual_seed(0)
    model = GPT(**SIZES, **options, attention=FlashAttention).eval()
    ids, lengths = prompts("cpu")
    calls, found = [], []
    monkeypatch.setattr(blocks, "add_norm", lambda *x, **how: (calls.append(how), add_norm(*x, **how))[1])
    for joins in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            decoding = model.decoding(ids, 6, lengths=lengths, temperature=0, samples=2)
        decoding.step()
        decoding.fast.joins_norms = joins
        logits = []
        monkeypatch.setattr(decoding, "_drawn_from", lambda x, logits=logits: (logits.append(x), x.argmax(-1, keepdim=True))[1])
        for _ in range(5):
            decoding.step()
        found.append(torch.stack(logits))
    assert torch.equal(*found)
    there = dtype == torch.bfloat16 and not model.autocast_residual
    assert len(calls) == there * 5 * (2 * SIZES["n_layers"] + 1)


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("mlp", MLPS)
def test_a_product_that_applies_the_tanh_gelu_gives_what_both_give(mlp, bias, device, monkeypatch):
    """In 16 bits on a GPU it is cuBLAS's; elsewhere nothing takes it, and here plain PyTorch stands in for it."""
    torch.manual_seed(0)
    model = GPT(**SIZES, mlp=mlp, bias=bias, attention=FlashAttention).eval().to(device)
    ids, _ = prompts(device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        fast, eager = _prepared(model), model(ids)
        joins = mlp == "gelu_tanh" and bias
        assert [block.mlp.joins_gelu for block in fast.blocks] == [joins and device == "cuda"] * SIZES["n_layers"]
        if device == "cpu":
            monkeypatch.setattr(torch, "_addmm_activation", lambda bias, x, weight, use_gelu: F.gelu(x @ weight + bias, approximate="tanh"))
            for block in fast.blocks:
                block.mlp.joins_gelu = joins
        found = fast.forward(ids)
    with torch.no_grad():
        assert_accurate(found, eager, model.double()(ids) if device == "cpu" else model(ids))


@pytest.mark.parametrize("lengths", (None, torch.tensor(LENGTHS)))
def test_steps_are_computed_under_the_autocast_in_which_they_began(lengths):
    model = build("sdpa", "rotary", "cpu").float()
    with torch.autocast("cpu", torch.bfloat16):
        decoding = model.decoding(prompts("cpu")[0], 3, lengths=lengths)
    drawn = [decoding.step() for _ in range(3)]
    assert drawn[0].dtype == torch.int64 and decoding.caches[0].keys.dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_what_cannot_be_a_graph_says_why():
    ids, _ = prompts("cpu")
    model = build("flash", "rotary", "cpu")
    with pytest.raises(ValueError, match="graph=true: it needs a GPU, got cpu; null takes"):
        model.generate(ids, 1, graph=True)
    assert not model.decoding(ids, 1, graph=None).graphed

    class HostsOwn(SDPAttention):
        decodes_on_device = False

    gpu = torch.device("cuda")
    assert why_no_graph(model, gpu) is None
    assert why_no_graph(GPT(**SIZES, attention=HostsOwn), gpu) == "attention=test_decoding asks the host how long a cache is"
    with pytest.raises(ValueError, match="lengths: attention=test_decoding takes no rows of unlike lengths"):
        GPT(**SIZES, attention=HostsOwn).generate(ids, 1, lengths=torch.tensor(LENGTHS))


@pytest.mark.parametrize("wrong", ([0, 1, 2], [1, 2, 41], [1, 2]))
def test_lengths_lie_within_the_rows(wrong):
    with pytest.raises(ValueError, match="lengths: must"):
        build("flash", "rotary", "cpu").generate(prompts("cpu")[0], 1, lengths=torch.tensor(wrong))


@pytest.mark.parametrize("lengths", (None, torch.tensor(LENGTHS)))
def test_nothing_is_drawn_from_nan(lengths):
    model = build("sdpa", "rotary", "cpu")
    model.final_norm.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="logits are NaN"):
        model.generate(prompts("cpu")[0], 3, lengths=lengths)


@pytest.mark.parametrize(("rotated", "turns"), ((16, 1), (12, 1), (0, 1), (16, 3), (12, 3)))
def test_one_launch_rotates_and_keeps_as_plain_pytorch_does(rotated, turns, device):
    """Bit by bit, of views into one product, with values of another width. The last of `turns` rotations of the queries is the keys'."""
    product = torch.randn(3, 1, 4 * 16 + 2 * 16 + 1 * 24, device=device).half()
    q, k, v = (x.unflatten(-1, (-1, width)) for x, width in zip(product.split((64, 32, 24), -1), (16, 16, 24), strict=True))
    angles = torch.randn(3, turns, rotated // 2, device=device)
    caches = [KVCache(3, 5) for _ in range(2)]
    for cache in caches:
        cache.append(torch.ones_like(k), torch.ones_like(v))
        cache.newest = Newest(torch.tensor([1, 4, 2], device=device), 5)
    tables = (angles.cos(), angles.sin()) if rotated else (None, None)
    expected, k_rotated = q, k
    if rotated:
        expected = torch.cat([rotate(q, *(table[:, n : n + 1] for table in tables)) for n in range(turns)], dim=1)
        k_rotated = rotate(k, *(table[:, -1:] for table in tables))
    caches[0].append(k_rotated, v)
    out = append_rotated(q, k, v, *tables, *caches[1].buffers, caches[1].newest.places)
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(*(cache.buffers for cache in caches), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("how", ({"temperature": 0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}), ids=("greedy", "drawn"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_graph_draws_what_the_step_draws(variant, how):
    """In bfloat16 as autocast computes it: from the same caches the same kernels read, so that all tokens are equal; nothing waits."""
    model = build(variant, "rotary", "cuda")
    ids, lengths = prompts("cuda")
    texts = []
    for graph in (True, False):
        with torch.autocast("cuda", torch.bfloat16):
            decoding = model.decoding(ids, 40, lengths=lengths, graph=graph, generator=torch.Generator("cuda").manual_seed(3), **how)
        drawn = [decoding.step().clone() for _ in range(GRAPHED)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            drawn += [decoding.step().clone() for _ in range(40 - GRAPHED)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        texts.append(torch.cat(drawn, dim=1))
    assert torch.equal(*texts)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_graph_draws_what_caches_give_whose_lengths_the_host_knows(variant):
    model = build(variant, "rotary", "cuda")  # float32, and logits far apart
    ids, _ = prompts("cuda")
    texts = [model.generate(ids, 30, graph=graph, stop=[7], temperature=0) for graph in (True, False)]
    assert torch.equal(*texts)


@pytest.mark.gpu
def test_a_graph_draws_again_from_where_it_began():
    model: nn.Module = build("flash", "rotary", "cuda")
    decoding = model.decoding(prompts("cuda")[0], 30, temperature=0, graph=True)
    first = [decoding.step().clone() for _ in range(30)][1:]
    decoding.rewind()
    assert torch.equal(torch.cat(first), torch.cat([decoding.step().clone() for _ in range(29)]))
