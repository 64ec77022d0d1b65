"""attention=msa: blocks shorter than a sequence, packed and with a cache; what the indexer learns from; counts, logs and refusals."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from attnzoo.attention import AttentionSpec, SequenceInfo
from attnzoo.attention.msa import MSAttention
from attnzoo.models import GPT
from attnzoo.training.module import summed_loss
from attnzoo_kernels import msa_attention

SPEC = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "layer": 0, "n_layers": 1, "causal": True, "positions": "rotary",
        "train_context": 64}
SIZES = {"vocab_size": 53, "dim": 32, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "head_dim": 16, "train_context": 64, "bias": False,
         "qk_norm": True}
LENGTHS = [70, 1, 0, 33, 16]


def build(n_layers=SIZES["n_layers"], **options):
    torch.manual_seed(0)
    return GPT(**SIZES | {"n_layers": n_layers},
               attention=lambda spec: MSAttention(spec, **{"block_size": 5, "top_k": 3, "index_dim": 8} | options))


def ids(*shape):
    return torch.randint(SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(1))


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def batch(tokens, **inputs):
    return {"input_ids": tokens, "labels": tokens.roll(-1, -1), **inputs}


@pytest.mark.parametrize("warmup", [False, True])
def test_packed_and_single_sequences_agree_and_so_does_reading_with_the_cache(warmup):
    model, tokens = build(warmup=warmup).double().eval(), ids(sum(LENGTHS))
    single = torch.cat([model(part[None])[0] for part in tokens.split(LENGTHS) if len(part)])
    assert_close(model(tokens, cu_seqlens=bounds(LENGTHS), max_seqlen=70), single)
    tokens = ids(2, 64)
    caches = model.new_cache(2, 64)
    steps = [model(part, cache=caches) for part in tokens.split([37, 1, 10, 1, 15], dim=1)]
    assert_close(torch.cat(steps, dim=1), model(tokens))
    assert len(caches[0].buffers) == 3 and caches[0].buffers[2].shape == (2, 64, 1, 8)


@pytest.mark.slow
def test_the_kernels_serve_the_layer(device):
    reference, model = build(block_size=8).double().eval(), build(block_size=8, impl="triton").to(device)
    tokens, lengths = ids(40), [27, 13]
    exact = reference(tokens, cu_seqlens=bounds(lengths), max_seqlen=27)
    inputs = {"cu_seqlens": bounds(lengths).to(device), "max_seqlen": 27}
    assert_close(model(tokens.to(device), **inputs).double().cpu(), exact, rtol=1e-3, atol=1e-4)
    summed_loss(model, batch(tokens.to(device), **inputs))[0].backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_the_layer_is_the_operator():
    torch.manual_seed(0)
    layer, x = MSAttention(AttentionSpec(**SPEC | {"positions": "none"}), block_size=4, top_k=2).eval(), torch.randn(1, 21, 32)
    q, k, v = layer.project(x)
    index = layer.index_q_proj(x).unflatten(-1, (2, 8)), layer.index_k_proj(x).unsqueeze(-2)
    out = msa_attention(q, k, v, *index, block_size=4, top_k=2)
    assert_close(layer(x, SequenceInfo(torch.arange(21)[None])), layer.o_proj(out.flatten(-2)))


def test_what_is_counted():
    layer = MSAttention(AttentionSpec(**SPEC), block_size=4, top_k=2, index_dim=6)
    assert layer.visible_pairs(10) == (1 + 2 + 3 + 4) + (5 + 6 + 7 + 8) + (5 + 6)
    weights = sum(p.weight.numel() for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)) + 32 * (12 + 6)
    # the indexer's products with all keys of earlier blocks have no backward, those with the keys that are read have one
    scored = 4 * 4 + 2 * 8
    assert layer.flops([10]) == 60.0 * weights + 6.0 * (64 + 12) * layer.visible_pairs(10) + 2.0 * 12 * scored
    dense = MSAttention(AttentionSpec(**SPEC), block_size=4, top_k=2, index_dim=6, warmup=True)
    assert dense.visible_pairs(10) == 55 and dense.flops([10]) == 60.0 * weights + 6.0 * (64 + 12) * 55


def gradients(model, extra=True, **inputs):
    model.zero_grad()
    if extra:
        loss, _ = summed_loss(model, batch(ids(2, 40), **inputs))
    else:
        loss = torch.nn.functional.cross_entropy(model(ids(2, 40)).flatten(0, 1), ids(2, 40).roll(-1, -1).flatten(), reduction="sum")
    loss.backward()
    return loss.detach(), {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def test_the_indexer_learns_from_its_own_loss_alone_and_nothing_else_does():
    """The value of the loss is the model's; so are all other gradients."""
    model = build().train()
    loss, both = gradients(model)
    assert model.extra_loss is None
    plain_loss, plain = gradients(model, extra=False)
    assert_close(loss, plain_loss)
    for name in both:
        if ".index_" in name:
            assert plain[name] is None and both[name].any(), name
        else:
            assert_close(both[name], plain[name])
    _, doubled = gradients(build(index_weight=2.0).train())
    name = "blocks.1.attention.index_k_proj.weight"
    assert_close(doubled[name], 2 * both[name])
    model.recompute_every = 1
    _, again = gradients(model)
    assert all(torch.equal(again[name], both[name]) for name in both)
    model.eval()
    model(ids(1, 9))
    assert model.extra_loss is None


@pytest.mark.slow
def test_all_layers_learn_alike_when_parameters_are_sharded():
    """fully_shard hands layers copies of the lists and dictionaries among their arguments."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole, sharded = build(n_layers=3).train(), build(n_layers=3).train()
        for part in (*sharded.blocks, sharded):
            fully_shard(part, mesh=mesh)
        for model in (whole, sharded):
            summed_loss(model, batch(ids(2, 40)))[0].backward()
        for (name, a), (_, b) in zip(whole.named_parameters(), sharded.named_parameters(), strict=True):
            assert_close(b.grad.full_tensor(), a.grad, msg=name)
    finally:
        dist.destroy_process_group()


def test_it_trains_alike_when_compiled():
    model = build(block_size=8).train()
    loss, eager = gradients(model)
    model.zero_grad()
    compiled, _ = torch.compile(summed_loss, fullgraph=True, backend="aot_eager")(model, batch(ids(2, 40)))
    compiled.backward()
    assert_close(compiled.detach(), loss)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, eager[name])


@pytest.mark.parametrize("warmup", [False, True])
def test_the_indexer_comes_to_choose_what_the_attention_reads(warmup):
    """Keys of one block have what all queries look for; an indexer that is trained finds it."""
    torch.manual_seed(0)
    layer = MSAttention(AttentionSpec(**SPEC | {"positions": "none", "n_kv_heads": 1}), block_size=4, top_k=2, warmup=warmup).train()
    with torch.no_grad():
        layer.q_proj.weight.zero_()[::8, 0] = 20.0
        layer.k_proj.weight.zero_()[0, 1] = 1.0
    x = torch.randn(4, 32, 32)
    x[..., 0], x[..., 1] = 1.0, 0.0
    x[:, 12:16, 1] = 3.0
    optimizer = torch.optim.Adam([layer.index_q_proj.weight, layer.index_k_proj.weight], lr=3e-2)
    losses = []
    for _ in range(60):
        seq = SequenceInfo(torch.arange(32)[None])
        layer(x, seq)
        optimizer.zero_grad()
        losses.append(seq.losses.total)
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] and layer.q_proj.weight.grad is None
    layer.warmup = False
    layer(x, seq)
    assert (layer.block_use.blocks.view(4, 32)[:, 16:] == 3).float().mean() > 0.95


def test_what_is_logged():
    layer = MSAttention(AttentionSpec(**SPEC), block_size=4, top_k=3).train()
    assert all(torch.isnan(torch.tensor(value)) for value in layer.metrics().values())
    seq = SequenceInfo(torch.arange(40)[None])
    layer(torch.randn(1, 40, 32), seq)
    assert set(layer.metrics()) == {"index_loss", "block_entropy", "block_coverage"}
    assert layer.metrics()["index_loss"] == pytest.approx(seq.losses.total.item() / 40)
    behind = SequenceInfo(torch.arange(40), bounds([30, 0]), 30)  # ten positions behind the last sequence
    layer(torch.randn(40, 32), behind)
    assert layer.metrics()["index_loss"] == pytest.approx(behind.losses.total.item() / 30)
    assert all(0 < layer.metrics()[name] <= 1 for name in ("block_entropy", "block_coverage"))


def test_a_context_of_few_blocks_is_warned_about():
    with pytest.warns(UserWarning, match="attention.top_k=16, attention.block_size=128: queries read every block of the model's"):
        MSAttention(AttentionSpec(**SPEC))


@pytest.mark.parametrize("options, message", [
    ({"block_size": 0}, "attention.block_size=0: must be an integer of at least 1"),
    ({"top_k": 1.5}, "attention.top_k=1.5: must be an integer of at least 1"),
    ({"index_dim": 0}, "attention.index_dim=0: must be an integer of at least 1"),
    ({"index_weight": 0.0}, "attention.index_weight=0.0: must be a finite number above 0"),
])
def test_what_it_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        MSAttention(AttentionSpec(**SPEC), **{"block_size": 4} | options)
