"""GPT and BERT: sizes, input layouts, positions, counts, generation, and building them from a stranger's description."""

import math
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch.testing import assert_close

from attnzoo.attention.flash import FlashAttention
from attnzoo.attention.positions import alibi_slopes, rotary_tables, rotate
from attnzoo.attention.sdpa import SDPAttention
from attnzoo.models import BERT, GPT, from_config
from attnzoo.models.blocks import Sum, make_norm

CONFIGS = Path(__file__).parent.parent / "configs" / "model"
SIZES = {"vocab_size": 53, "dim": 32, "n_layers": 2, "n_heads": 4, "train_context": 16}
FLASH = {"_target_": "attnzoo.attention.flash.FlashAttention", "_partial_": True}


def build(cls=GPT, **options):
    torch.manual_seed(0)
    return cls(**{"attention": FlashAttention, **SIZES, **options}).double().eval()


def ids(*shape, seed=0):
    return torch.randint(SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


# n_parameters of transformers' GPT2LMHeadModel and BertForMaskedLM with the published configs
PUBLISHED = {
    "gpt2_small": 124_439_808, "gpt2_medium": 354_823_168, "gpt2_large": 774_030_080, "gpt2_xl": 1_557_611_200,
    "bert_base": 109_514_298, "bert_large": 335_174_458,
}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_build_in_their_published_sizes(path):
    with initialize_config_dir(str(CONFIGS.parent), version_base="1.3"):  # a file may build on another one
        config = compose("train", overrides=[f"model={path.stem}"]).model
    config.update({"attention": None, "layers": None, "train_context": 512, "vocab_size": 50257 if path.stem.startswith("gpt") else 30522})
    with torch.device("meta"):
        model = from_config(OmegaConf.to_container(config), FLASH)
    assert model.n_parameters == PUBLISHED.get(path.stem, model.n_parameters)
    assert model.token_embedding.num_embeddings % 64 == 0
    assert not path.stem.endswith("_tiny") or model.blocks[0].attention.spec.positions == "rotary"
    assert (config.dropout, config.attention_dropout) == (0, 0)


@pytest.mark.parametrize("cls", [GPT, BERT])
@pytest.mark.parametrize(
    "options",
    [
        {"norm_position": "post"}, {"norm": "rmsnorm", "mlp": "swiglu", "bias": False}, {"mlp": "gelu_tanh", "tie_embeddings": False},
        {"head_dim": 20, "n_kv_heads": 1}, {"mlp_dim": 24, "positions": "learned"},
    ],
    ids=str,
)
def test_options_build_run_and_learn(cls, options):
    model = build(cls, **options).train()
    logits = model(ids(2, 16))
    assert logits.shape == (2, 16, SIZES["vocab_size"])
    logits.logsumexp(-1).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_initialisation_is_gpt2s():
    torch.manual_seed(0)
    model = GPT(**{**SIZES, "dim": 256, "n_layers": 8, "attention": FlashAttention})
    residual = 0.02 / math.sqrt(16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            expected = residual if "o_proj" in name or "down_proj" in name else 0.02
            # six standard errors of a sample standard deviation
            assert abs(parameter.std().item() / expected - 1) < 6 / math.sqrt(2 * parameter.numel()), name


@pytest.mark.parametrize("cls", [GPT, BERT])
@pytest.mark.parametrize("tied", [True, False])
def test_padding_the_vocabulary_changes_nothing(cls, tied):
    plain, padded = build(cls, tie_embeddings=tied), build(cls, tie_embeddings=tied, pad_vocab_multiple=64)
    state = plain.state_dict()
    for name, tensor in padded.state_dict().items():
        if tensor.shape != state[name].shape:
            # rows that would win every argmax if they were seen
            tensor.fill_(100.0)
        tensor[: len(state[name])] = state[name]
    assert padded.token_embedding.num_embeddings == 64
    assert padded.n_parameters == plain.n_parameters == sum(p.numel() for p in plain.parameters())
    tokens = ids(2, 16)
    assert_close(padded(tokens), plain(tokens))
    F.cross_entropy(padded(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert not padded.token_embedding.weight.grad[SIZES["vocab_size"] :].any()


@pytest.mark.parametrize("cls", [GPT, BERT])
@pytest.mark.parametrize("positions", ["learned", "rotary", "alibi"])
def test_padding_may_stand_anywhere(cls, positions):
    model = build(cls, positions=positions)
    tokens = ids(3, 8)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1, 0, 1], [1, 1, 1, 1, 1, 0, 0, 0]])
    logits = model(tokens, attention_mask=mask)
    for row, real, out in zip(tokens, mask.bool(), logits, strict=True):
        assert_close(out[real], model(row[real][None])[0])
        assert not out[~real].any()


@pytest.mark.parametrize("max_tokens", [None, 14, 17])
@pytest.mark.parametrize("cls", [GPT, BERT])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_padded_and_packed_give_the_same_loss_and_gradients(cls, positions, max_tokens):
    model = build(cls, positions=positions)
    lengths = torch.tensor([8, 1, 0, 5])
    mask = torch.arange(8) < lengths[:, None]
    tokens, labels = ids(4, 8), ids(4, 8)
    at = mask.flatten().nonzero().flatten()[::3]  # in rows; every third token when packed

    def loss_and_gradients(logits, targets):
        loss = F.cross_entropy(logits, targets)
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    packed = {"cu_seqlens": F.pad(lengths.cumsum(0), (1, 0)).int(), "max_seqlen": 8}
    expected = loss_and_gradients(model(tokens[mask], **packed), labels[mask])
    padded = model(tokens, attention_mask=mask, max_tokens=max_tokens)
    assert_close(loss_and_gradients(padded[mask], labels[mask]), expected)
    expected = loss_and_gradients(model(tokens[mask], **packed, logits_at=torch.arange(0, 14, 3)), labels[mask][::3])
    padded = model(tokens, attention_mask=mask, max_tokens=max_tokens, logits_at=at)
    assert_close(loss_and_gradients(padded, labels.flatten()[at]), expected)


@pytest.mark.gpu
def test_a_padded_step_in_a_cuda_graph():
    """With a bound on the tokens the host waits nowhere, and a replay reads whatever mask lies there."""
    model = build(BERT, positions="learned").float().cuda()
    tokens, mask = ids(4, 16).cuda(), torch.ones(4, 16, dtype=torch.bool, device="cuda")

    def step():
        logits = model(tokens, attention_mask=mask, max_tokens=60)
        return logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters()))

    mask[:, 12:] = False
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ([1, 0, 16, 5], [16, 16, 16, 12], [0, 0, 0, 1]):
        mask.copy_(torch.arange(16) < torch.tensor(lengths)[:, None])
        graph.replay()
        replayed = [x.clone() for x in captured]
        assert_close(replayed, list(step()))


@pytest.mark.parametrize("cls", [GPT, BERT])
def test_logits_at_chosen_tokens(cls):
    model = build(cls)
    tokens, mask = ids(2, 8), torch.ones(2, 8, dtype=torch.bool)
    at = torch.tensor([3, 0, 9, 15, 9])
    everywhere = model(tokens).flatten(0, 1)[at]
    assert_close(model(tokens, logits_at=at), everywhere)
    assert_close(model(tokens.flatten(), cu_seqlens=torch.tensor([0, 8, 16], dtype=torch.int32), max_seqlen=8, logits_at=at), everywhere)
    mask[0, 5:7] = mask[1, 7:] = False
    at = torch.tensor([3, 0, 9, 6, 15, 9])  # two of them padding
    assert_close(model(tokens, attention_mask=mask, logits_at=at), model(tokens, attention_mask=mask).flatten(0, 1)[at])


@pytest.mark.parametrize("cls", [GPT, BERT])
@pytest.mark.parametrize("shape", [(0, 8), (2, 8), (2, 0)])
def test_a_batch_without_a_token(cls, shape):
    assert_close(build(cls)(ids(*shape), attention_mask=torch.zeros(shape)), torch.zeros(*shape, SIZES["vocab_size"], dtype=torch.float64))


def test_position_ids_are_used():
    model = build(positions="learned")
    tokens, positions = ids(2, 8), torch.arange(8).flip(0)[None]
    assert not torch.equal(model(tokens, position_ids=positions), model(tokens))
    assert_close(model(tokens, position_ids=torch.arange(8)[None]), model(tokens))
    mask = torch.ones_like(tokens)
    assert_close(model(tokens, position_ids=positions, attention_mask=mask), model(tokens, position_ids=positions))


def test_token_types():
    model = build(BERT, type_vocab_size=2)
    tokens = ids(2, 8)
    zeros = torch.zeros_like(tokens)
    assert_close(model(tokens, token_type_ids=zeros), model(tokens))
    assert not torch.equal(model(tokens, token_type_ids=zeros + 1), model(tokens))
    mask = torch.ones_like(tokens)
    assert_close(model(tokens, token_type_ids=zeros + 1, attention_mask=mask), model(tokens, token_type_ids=zeros + 1))
    with pytest.raises(ValueError, match="no token types"):
        build()(tokens, token_type_ids=zeros)


@pytest.mark.parametrize("options, dtype", [({"norm_position": "post"}, torch.bfloat16), ({}, torch.float32),
                                            ({"autocast_residual": True}, torch.bfloat16)])
def test_residual_stream_under_autocast(options, dtype):
    """In 16 bits where every sum is normalised at once; sums that grow over all layers stay in float32, unless told otherwise."""
    model = build(BERT, **{"norm_position": "pre"} | options).float()
    streams, normed = [], []
    model.blocks[1].mlp_norm.register_forward_pre_hook(lambda module, inputs: normed.append(inputs[0].dtype))
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: streams.extend([inputs[0].dtype, output.dtype]))
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(ids(2, 16)).flatten(0, 1), ids(2, 16).flatten())
    loss.backward()
    assert set(streams) == {dtype} and len(streams) == 4
    assert model.blocks[1].pre_norm is False or normed == [torch.float32]
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_split_residual_has_the_same_loss(norm):
    """To the bit, and gradients to their 16 bits; elsewhere nothing changes."""
    tokens, losses, gradients, kinds = ids(2, 16), [], [], []
    for split in (False, True):
        model = build(split_residual=split, norm=norm, positions="learned").float().train()
        model.blocks[1].register_forward_pre_hook(lambda module, inputs: kinds.append(type(inputs[0])))
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
            losses.append(F.cross_entropy(model(tokens, logits_at=torch.arange(3, 9)), tokens.flatten()[3:9]))
        (losses[-2] + losses[-1]).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        with torch.autocast("cpu", torch.bfloat16):
            model.eval()(tokens)
    assert kinds == [torch.Tensor] * 3 + [Sum, Sum, torch.Tensor]
    assert torch.equal(losses[0], losses[2]) and torch.equal(losses[1], losses[3])
    assert 0 < (gradients[1] - gradients[0]).norm() < 0.01 * gradients[0].norm()
    assert gradients[0].dtype == gradients[1].dtype == torch.float32


def test_weights_begin_with_the_standard_deviation_of_the_configuration():
    found = {std: build(init_std=std).token_embedding.weight.std().item() for std in (0.02, 0.1)}
    assert found == {std: pytest.approx(std, rel=0.1) for std in found}
    for std in (0.0, float("inf")):
        with pytest.raises(ValueError, match=f"model.init_std={std}: must be a positive number"):
            build(init_std=std)


@pytest.mark.parametrize("other", [{"autocast_residual": True}, {"norm_position": "post"}])
def test_a_split_residual_needs_one_in_float32(other):
    with pytest.raises(ValueError, match=f"split_residual=true: does not go with model.{next(iter(other))}"):
        build(split_residual=True, **other)


@pytest.mark.slow
def test_gpt2s_kind_compiles_whole():
    torch._dynamo.reset()
    model = build(attention=SDPAttention, positions="learned", mlp="gelu_tanh", pad_vocab_multiple=64)
    tokens = ids(2, 16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
    assert_close(loss, F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
    loss.backward()
    assert model.token_embedding.weight.grad.any()


@pytest.mark.parametrize("rotary_dim", [2, 8, 64])
@pytest.mark.parametrize("scaling, factor", [("none", 1.0), ("linear", 4.0), ("ntk", 4.0)])
def test_rotary_is_a_complex_product(rotary_dim, scaling, factor):
    if scaling == "ntk" and rotary_dim == 2:
        pytest.skip("one pair has no slowest and fastest")
    positions = torch.tensor([0, 1, 7, 1000, 1_000_000])
    x = torch.randn(5, 3, rotary_dim, dtype=torch.float64)
    base = 10000.0
    if scaling == "ntk":
        base *= factor ** (rotary_dim / (rotary_dim - 2))
    frequency = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = positions[:, None].double() * frequency / (factor if scaling == "linear" else 1.0)
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)[:, None]
    cos, sin = rotary_tables(positions, rotary_dim, 10000.0, scaling, factor)
    assert cos.dtype == torch.float32 and cos.shape == (5, rotary_dim // 2)
    # the tables' rounding to float32 is all the error there is
    assert_close(rotate(x, cos, sin).float(), torch.cat([turned.real, turned.imag], -1).float())
    assert rotate(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_ntk_leaves_the_fastest_pair_and_slows_the_slowest_by_the_factor():
    one = torch.tensor([1])
    plain, ntk = (torch.atan2(*reversed(rotary_tables(one, 16, 10000.0, scaling, 8.0))) for scaling in ("none", "ntk"))
    assert_close(ntk[0, 0], plain[0, 0])
    assert_close(ntk[0, -1], plain[0, -1] / 8)


def test_rope_scaling_reaches_the_model():
    tokens = ids(1, 16)
    scalings = (("none", 1.0), ("linear", 2.0), ("ntk", 2.0))
    outputs = [build(rope_scaling=scaling, rope_factor=factor)(tokens) for scaling, factor in scalings]
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    assert_close(build(rope_scaling="linear", rope_factor=2.0)(tokens, position_ids=torch.arange(16)[None] * 2), outputs[0])


def test_alibi_slopes_are_those_of_the_paper():
    def of_power(n):
        return [2 ** (-8 * (k + 1) / n) for k in range(n)]

    for n in (1, 2, 8, 16):
        assert_close(alibi_slopes(n, torch.device("cpu")), torch.tensor(of_power(n)))
    assert_close(alibi_slopes(12, torch.device("cpu")), torch.tensor(of_power(8) + of_power(16)[0::2][:4]))
    assert_close(alibi_slopes(25, torch.device("cpu")), torch.tensor(of_power(16) + of_power(32)[0::2][:9]))


@pytest.mark.parametrize("cls", [GPT, BERT])
def test_flops_are_those_of_the_matrix_products(cls):
    from torch.utils.flop_counter import FlopCounterMode

    model = build(cls, mlp="swiglu", attention=partial(FlashAttention, impl="reference"))
    lengths = [5, 16, 1]
    counted = 0
    for length in lengths:
        with FlopCounterMode(display=False) as counter:
            model(ids(1, length)).sum().backward()
        counted += counter.get_total_flops()
    # the reference computes the whole square, and no score twice; the count takes the pairs that a causal model sees
    unseen = sum(n * n - n * (n + 1) // 2 for n in lengths) if cls is GPT else 0
    assert model.flops(lengths) == counted - 6 * SIZES["n_layers"] * unseen * 2 * SIZES["dim"]
    with FlopCounterMode(display=False) as counter:
        model(ids(1, 16), logits_at=torch.tensor([3, 5])).sum().backward()
    unseen = 16 * 15 // 2 if cls is GPT else 0
    assert model.flops([16], n_logits=2) == counter.get_total_flops() - 6 * SIZES["n_layers"] * unseen * 2 * SIZES["dim"]


@pytest.mark.parametrize("positions", ["learned", "rotary", "alibi"])
def test_generation_equals_reading_again(positions):
    model = build(positions=positions).train()
    prompt = ids(2, 4)
    expected = prompt
    for _ in range(12):
        expected = torch.cat([expected, model(expected)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(prompt, 12, temperature=0), expected)
    assert torch.equal(model.generate(prompt, 12, top_k=1), expected)
    assert model.training
    assert torch.equal(model.generate(prompt, 0), prompt)


def test_generation_samples_by_generator_and_top_k():
    model = build()
    draw = [model.generate(ids(4, 4), 12, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draw[0], draw[1]) and not torch.equal(draw[0], draw[2])
    likeliest = model(ids(1, 4))[0, -1].topk(3).indices
    drawn = model.generate(ids(1, 4).expand(200, 4), 1, top_k=3, generator=torch.Generator().manual_seed(0))[:, -1]
    assert set(drawn.tolist()) == set(likeliest.tolist())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"input_ids": torch.arange(4), "max_new_tokens": 1}, "input_ids"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64), "max_new_tokens": 1}, "at least one token"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 1, "temperature": -1.0}, "temperature"),
        ({"max_new_tokens": 1, "top_k": 0}, "top_k"),
        ({"max_new_tokens": 14}, "model.max_positions=16"),
    ],
)
def test_generation_refuses_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(positions="learned").generate(**{"input_ids": ids(1, 4), **arguments})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dim": 30}, r"model.dim=30 is not divisible by model.n_heads=4; .* model.head_dim"),
        ({"n_kv_heads": 3}, "n_kv_heads=3: must divide n_heads=4"),
        ({"head_dim": 7}, "even one"),
        ({"vocab_size": None}, "model.vocab_size: must be a positive integer, got None"),
        ({"n_layers": 0}, "model.n_layers"),
        ({"positions": "absolute"}, "learned, rotary, alibi"),
        ({"norm": "batchnorm"}, "layernorm, rmsnorm"),
        ({"norm_position": "sandwich"}, "pre or post"),
        ({"mlp": "relu"}, "gelu, gelu_tanh, swiglu"),
        ({"dropout": 1.5}, "model.dropout=1.5"),
        ({"positions": "learned", "max_positions": 8}, "model.max_positions=8; set model.max_positions=16, or model.positions=rotary"),
        *(({name: 0}, f"{name}: must be a positive integer, got 0") for name in ("n_kv_heads", "head_dim", "mlp_dim", "max_positions")),
    ],
)
def test_wrong_options_say_what_they_must_be(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.parametrize("options", [{"no_such_key": 1}, {"attention": None}, {"attention": "flash"}], ids=str)
@pytest.mark.parametrize("cls", [GPT, BERT])
def test_unknown_options_and_no_attention_are_errors(cls, options):
    with pytest.raises(TypeError, match="no_such_key|model.attention"):
        build(cls, **options)


CU = torch.tensor([0, 3, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"input_ids": ids(1, 17)}, "17 tokens is longer than model.max_positions=16"),
        ({"input_ids": ids(1, 1, 4)}, r"got shape \(1, 1, 4\)"),
        ({"input_ids": ids(8)}, "packed input_ids .* need both"),
        ({"input_ids": ids(8), "cu_seqlens": CU, "max_seqlen": torch.tensor(5)}, "max_seqlen as an int"),
        ({"input_ids": ids(8), "cu_seqlens": CU, "max_seqlen": 17}, "17 tokens is longer"),
        ({"input_ids": ids(8), "cu_seqlens": CU, "max_seqlen": 5, "attention_mask": torch.ones(8)}, "attention_mask, cache"),
        ({"input_ids": ids(1, 8), "cu_seqlens": CU, "max_seqlen": 5}, "flatten input_ids"),
        ({"input_ids": ids(1, 8), "max_seqlen": 8}, "cu_seqlens, max_seqlen, parents: are for packed"),
        ({"input_ids": ids(1, 8), "attention_mask": torch.ones(1, 7)}, r"must have input_ids' shape \(1, 8\), got \(1, 7\)"),
    ],
)
def test_wrong_inputs_say_what_they_must_be(inputs, message):
    with pytest.raises(ValueError, match=message):
        build(positions="learned")(**inputs)


def test_a_cache_needs_a_causal_model_and_no_mask():
    with pytest.raises(ValueError, match="bidirectional"):
        build(BERT).new_cache(1, 8)
    model = build()
    with pytest.raises(ValueError, match="does not go with a cache"):
        model(ids(1, 4), attention_mask=torch.ones(1, 4), cache=model.new_cache(1, 8))


GPT_CONFIG = {"_target_": "attnzoo.models.GPT", **SIZES}


def test_from_config_builds_what_the_constructors_build():
    torch.manual_seed(0)
    model = from_config({**GPT_CONFIG, "attention": None}, FLASH | {"window_size": [4, 0]}).double()
    assert model.blocks[0].attention.window_size == (4, 0)
    assert_close(model(ids(1, 16)), build(attention=lambda spec: FlashAttention(spec, window_size=[4, 0]))(ids(1, 16)))


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A module that tells when it is imported."""
    (tmp_path / "stranger.py").write_text(
        "from attnzoo.attention.flash import FlashAttention\n"
        "class Layer(FlashAttention):\n"
        "    def __init__(self, spec, *, inner=None):\n"
        "        super().__init__(spec)\n"
        "        self.inner = inner\n"
        "class Inner:\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "stranger"
    sys.modules.pop("stranger", None)


@pytest.mark.parametrize(
    "attention",
    [
        {"_target_": "stranger.Layer"},
        FLASH | {"impl": {"_target_": "stranger.Inner"}},
        FLASH | {"impl": [{"deep": {"_target_": "stranger.Inner"}}]},
        {"_target_": "attnzooevil.Layer"},
        {"_target_": "Layer"},
        {"_target_": ["stranger.Layer"]},
        {"_target_": ""},
    ],
    ids=str,
)
def test_a_strangers_target_is_refused_before_anything_is_imported(attention, stranger):
    with pytest.raises(ValueError, match="outside attnzoo and the trusted modules.*`trust`"):
        from_config(GPT_CONFIG, attention)
    with pytest.raises(ValueError, match=r"model\.mlp\._target_='os\.system'"):
        from_config({**GPT_CONFIG, "mlp": {"_target_": "os.system", "command": "true"}}, attention)
    assert stranger not in sys.modules


def test_a_trusted_module_is_used(stranger):
    attention = {"_target_": "stranger.Layer", "inner": {"_target_": "stranger.Inner"}}
    layer = from_config(GPT_CONFIG, attention, trust=[stranger]).blocks[0].attention
    assert (type(layer).__name__, type(layer.inner).__name__) == ("Layer", "Inner")


@pytest.mark.parametrize(
    "target",
    [
        "attnzoo.models.gpt.torch.hub.load", "attnzoo.attention.flash.nn.Linear", "attnzoo.attention.flash.torch",
        "attnzoo.hub.from_huggingface", "attnzoo.attention.flash.flash_attention", "attnzoo.attention.base.AttentionSpec",
        "attnzoo.models.GPT", "attnzoo.no_such.Layer", "attnzoo.attention.flash.NoSuch",
    ],
)
def test_only_attention_classes_of_attnzoo_itself_are_layers(target):
    with pytest.raises(ValueError, match="cannot be imported|must be a subclass of Attention"):
        from_config(GPT_CONFIG, {"_target_": target})
    with pytest.raises(ValueError, match="cannot be imported|must be a subclass of object"):
        pattern = {"_target_": "attnzoo.hub.from_huggingface", "source": "someone/model"}
        from_config(GPT_CONFIG, {"_target_": "attnzoo.attention.block_sparse.BlockSparseAttention", "pattern": pattern})


def test_a_config_without_target_is_refused():
    with pytest.raises(ValueError, match="model: needs a `_target_` such as attnzoo.models.GPT"):
        from_config(SIZES, FLASH)
    with pytest.raises(ValueError, match="attention: needs a `_target_`"):
        from_config(GPT_CONFIG, {"impl": None})


def test_rmsnorm_under_autocast_is_pytorchs_fused_one():
    """Which takes input and weight of one dtype only, and else warns at the first call of a process."""
    always, norm = torch.is_warn_always_enabled(), make_norm("rmsnorm", 8, 1e-6, False)
    torch.set_warn_always(True)
    try:
        with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings(action="error"):
            out = norm(torch.randn(3, 8, dtype=torch.bfloat16))
    finally:
        torch.set_warn_always(always)
    assert out.dtype == torch.bfloat16
