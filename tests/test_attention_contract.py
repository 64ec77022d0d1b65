"""The layer contract, for every file in configs/attention in a GPT and a BERT, dense, padded and packed."""

from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
from hydra.utils import get_class
from omegaconf import OmegaConf
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from attnzoo.attention import Attention, AttentionSpec, Supports
from attnzoo.attention.base import POSITIONS
from attnzoo.attention.flash import FlashAttention
from attnzoo.attention.sdpa import SDPAttention
from attnzoo.attention.supports import check_path
from attnzoo.models import BERT, GPT, from_config
from attnzoo.signatures import check_options
from attnzoo_kernels.dispatch import IMPLEMENTATIONS

CONFIGS = Path(__file__).parent.parent / "configs" / "attention"
VARIANTS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
MODELS = {"gpt": GPT, "bert": BERT}
LENGTHS = [7, 1, 0, 12]
# the context of these tests holds several blocks
SMALL = {"moba": {"block_size": 3, "top_k": 2}, "msa": {"block_size": 3, "top_k": 2},
         "nsa": {"compress_size": 4, "compress_stride": 2, "block_size": 2, "block_count": 3, "window": 4}}
SIZES = {"vocab_size": 53, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "train_context": 16, "bias": False}


def config(variant):
    return OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{variant}.yaml")) | SMALL.get(variant, {})


def build(variant, kind="gpt", positions="rotary", **options):
    """A small float64 model with the same weights each time."""
    torch.manual_seed(0)
    model = {"_target_": f"attnzoo.models.{MODELS[kind].__name__}", "positions": positions, **SIZES, **options}
    return from_config(model, config(variant)).double().eval()


@cache
def supports(variant) -> Supports:
    return get_class(config(variant)["_target_"]).supports


def is_supported(variant, kind, positions="rotary"):
    can = supports(variant)
    return positions in can.positions and (can.causal if kind == "gpt" else can.bidirectional)


PAIRS = [(variant, kind, positions) for variant in VARIANTS for kind in MODELS for positions in POSITIONS]
SUPPORTED = [pair for pair in PAIRS if is_supported(*pair)]
COMPILED = [pair for pair in SUPPORTED if pair[1:] in (("gpt", "rotary"), ("bert", "alibi"))]
each_pair = pytest.mark.parametrize("variant, kind, positions", SUPPORTED, ids=lambda x: x)


@pytest.fixture
def tokens():
    """A packed batch: token ids and cu_seqlens, with an empty sequence inside and one repeated value at the end."""
    generator = torch.Generator().manual_seed(1)
    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist(), sum(LENGTHS)], dtype=torch.int32)
    return torch.randint(SIZES["vocab_size"], (sum(LENGTHS),), generator=generator), cu_seqlens


@pytest.mark.parametrize("variant, kind, positions", PAIRS, ids=lambda x: x)
def test_a_pairing_works_or_is_refused_with_a_way_out(variant, kind, positions):
    if is_supported(variant, kind, positions):
        build(variant, kind, positions)
    else:
        with pytest.raises(ValueError, match=r"use a |set model\."):
            build(variant, kind, positions)


def test_a_path_is_one_of_the_operators_or_refused():
    for variant in VARIANTS:
        options = config(variant)
        if "impl" not in options:
            continue
        for impl in (*IMPLEMENTATIONS, None):
            check_options("attention", get_class(options["_target_"]), options | {"impl": impl})
        with pytest.raises(ValueError, match="attention.impl='glon': must be .* or null"):
            from_config({"_target_": "attnzoo.models.GPT", **SIZES}, options | {"impl": "glon"})


@pytest.mark.parametrize("impl, device, capability, runs", [
    (None, "cpu", None, True), ("reference", "cpu", None, True), ("triton", "cpu", None, False), ("gluon", "cpu", None, False),
    ("cpu", "cpu", None, True), ("cpu", "cuda", (8, 0), False),
    ("triton", "cuda", (8, 0), True), ("gluon", "cuda", (8, 0), False), ("gluon", "cuda", (9, 0), True),
])
def test_a_path_that_takes_no_call_on_a_device_is_refused(monkeypatch, impl, device, capability, runs):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    with nullcontext() if runs else pytest.raises(ValueError, match=f"attention.impl={impl}: needs .* got (cpu|cuda|a card); null takes"):
        check_path(impl, torch.device(device))


@each_pair
def test_packed_padded_and_single_sequences_agree(variant, kind, positions, tokens):
    model = build(variant, kind, positions)
    ids, cu_seqlens = tokens
    single = torch.cat([model(part[None])[0] for part in ids.split(LENGTHS) if len(part)])
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    rows = torch.zeros(mask.shape, dtype=torch.int64).masked_scatter(mask, ids)
    if not supports(variant).packed:
        with pytest.raises(ValueError, match=f"attention={variant} takes no packed sequences"):
            model(rows, attention_mask=mask)
        return
    padded = model(rows, attention_mask=mask)
    assert padded.shape == (*mask.shape, SIZES["vocab_size"])
    assert_close(padded[mask], single)
    assert not padded[~mask].any()
    packed = model(ids, cu_seqlens=cu_seqlens, max_seqlen=max(LENGTHS))
    assert_close(packed, single)
    # a bound above the longest sequence changes nothing
    assert_close(model(ids, cu_seqlens=cu_seqlens, max_seqlen=16), single)


@each_pair
def test_a_later_token_changes_no_earlier_output_of_a_causal_model(variant, kind, positions):
    model = build(variant, kind, positions)
    ids = torch.arange(16)[None]
    changed = ids.clone()
    changed[0, 11] = 40
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :11], after[:, :11]) == (kind == "gpt")
    assert not torch.equal(before[:, 11:], after[:, 11:])


@pytest.mark.parametrize("variant", VARIANTS)
def test_query_heads_read_the_key_head_of_their_group(variant):
    """Query head h reads key head h // (heads // key heads)."""
    model = build(variant, positions=supports(variant).positions[0])
    layer = model.blocks[0].attention
    if layer.head_shapes()["v"][0] != SIZES["n_kv_heads"]:
        pytest.skip("its values are no heads of their own")
    outputs = []
    layer.o_proj.register_forward_pre_hook(lambda module, inputs: outputs.append(inputs[0].detach().unflatten(-1, (SIZES["n_heads"], -1))))
    model(torch.arange(16)[None])
    with torch.no_grad():
        layer.v_proj.weight[len(layer.v_proj.weight) // 2 :] *= 2  # of the second key head
    model(torch.arange(16)[None])
    assert [not torch.equal(*(x[..., head, :] for x in outputs)) for head in range(SIZES["n_heads"])] == [False, False, True, True]


@pytest.mark.parametrize("variant, kind", [pair[:2] for pair in SUPPORTED if pair[2] == "alibi"])
def test_alibi_acts_where_it_is_supported(variant, kind):
    biased, plain = (build(variant, kind, positions)(torch.arange(16)[None]) for positions in ("alibi", "none"))
    assert not torch.allclose(biased, plain, atol=1e-3)


@each_pair
def test_gradients_reach_every_parameter(variant, kind, positions, tokens):
    model = build(variant, kind, positions).train()
    ids, cu_seqlens = tokens
    inputs = {"cu_seqlens": cu_seqlens, "max_seqlen": max(LENGTHS)} if supports(variant).packed else {}
    logits = model(ids if inputs else ids[None, : SIZES["train_context"]], **inputs)
    extra = model.take_extra_loss()
    (logits.logsumexp(-1).sum() + (0 if extra is None else extra)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


@each_pair
def test_gradients_of_packed_equal_those_of_single_sequences(variant, kind, positions, tokens):
    if not supports(variant).packed:
        pytest.skip(f"{variant} takes no packed sequences")
    ids, cu_seqlens = tokens
    packed, single = build(variant, kind, positions), build(variant, kind, positions)
    packed(ids, cu_seqlens=cu_seqlens, max_seqlen=max(LENGTHS)).logsumexp(-1).sum().backward()
    sum(single(part[None]).logsumexp(-1).sum() for part in ids.split(LENGTHS) if len(part)).backward()
    for (name, a), b in zip(packed.named_parameters(), single.parameters(), strict=True):
        assert_close(a.grad, b.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("variant, kind, positions", COMPILED, ids=lambda x: x)
def test_compiles_without_a_graph_break_and_twice_at_most_as_lengths_change(variant, kind, positions, layout):
    if layout == "packed" and not supports(variant).packed:
        pytest.skip(f"{variant} takes no packed sequences")
    torch._dynamo.reset()
    model = build(variant, kind, positions, n_layers=1)
    counter = CompileCounterWithBackend("aot_eager" if layout == "packed" else "eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in (9, 10, 16):
        ids, inputs = torch.arange(2 * length), {}
        if layout == "packed":
            inputs = {"cu_seqlens": torch.tensor([0, length, length + 5, 2 * length, 2 * length], dtype=torch.int32), "max_seqlen": length}
        else:
            ids = ids.view(2, length)
        assert_close(compiled(ids, **inputs), model(ids, **inputs))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_reading_with_the_cache_equals_reading_at_once(variant, positions):
    if not is_supported(variant, "gpt", positions):
        pytest.skip("refused pairing")
    model = build(variant, positions=positions)
    if not supports(variant).cache:
        with pytest.raises(ValueError, match="no KV cache"):
            model.new_cache(2, 16)
        return
    # no token twice: without positions the first layer gives equal tokens equal scores, of which rounding takes one or another block
    ids = torch.randperm(SIZES["vocab_size"], generator=torch.Generator().manual_seed(2))[:32].view(2, 16)
    caches = model.new_cache(2, 16)
    steps = [model(part, cache=caches) for part in ids.split([6, 1, 1, 5, 3], dim=1)]
    assert_close(torch.cat(steps, dim=1), model(ids))
    with pytest.raises(ValueError, match="max_len=16"):
        build(variant)(ids, cache=caches)


@pytest.mark.parametrize("variant, kind", [(variant, kind) for variant in VARIANTS for kind in MODELS if is_supported(variant, kind)])
def test_a_gate_and_a_temperature_go_with_every_variant(variant, kind, tokens):
    """Packed, single and cached reading agree, gradients reach what is learned, and the gate is counted."""
    options = {"attention_gate": "elementwise" if kind == "gpt" else "head", "attention_temperature": "ssmax"}
    model, plain = build(variant, kind, **options).train(), build(variant, kind)
    ids, cu_seqlens = tokens
    single = torch.cat([model(part[None])[0] for part in ids.split(LENGTHS) if len(part)])
    if supports(variant).packed:
        assert_close(model(ids, cu_seqlens=cu_seqlens, max_seqlen=max(LENGTHS)), single)
    if kind == "gpt" and supports(variant).cache:
        caches = model.new_cache(1, 12)
        steps = [model(part, cache=caches) for part in ids[None, -12:].split([6, 1, 5], dim=1)]
        assert_close(torch.cat(steps, dim=1)[0], single[-12:])
    single.logsumexp(-1).sum().backward()
    gated = model.blocks[1].attention
    for parameter in (gated.g_proj.weight, gated.ssmax_scale):
        assert parameter.grad.isfinite().all() and parameter.grad.any()
    assert model.flops([9]) - plain.flops([9]) == 6 * 9 * sum(block.attention.g_proj.weight.numel() for block in model.blocks)


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_dicts_go_round_and_between_variants_of_the_same_parameters(variant):
    ids = torch.arange(10)[None]
    for other in VARIANTS:
        state = build(other).state_dict()
        target = build(variant)
        if target.state_dict().keys() != state.keys():
            assert other != variant
            continue
        for parameter in target.parameters():
            torch.nn.init.zeros_(parameter)
        target.load_state_dict(state)
        again = build(variant)
        again.load_state_dict(target.state_dict())
        assert torch.equal(again(ids), target(ids)) and target(ids).any()
    names = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}
    assert names <= build(variant).blocks[0].attention.state_dict().keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_dropout_acts_in_training_only(variant):
    ids = torch.arange(10)[None]
    if not supports(variant).dropout:
        with pytest.raises(ValueError, match=r"model\.attention_dropout=0"):
            build(variant, attention_dropout=0.5)
        return
    model = build(variant, attention_dropout=0.5)
    assert torch.equal(model(ids), build(variant)(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_option_that_the_variant_lacks_is_an_error(variant):
    with pytest.raises(ValueError, match="attention.no_such_option: .* has no such option"):
        from_config({"_target_": "attnzoo.models.GPT", **SIZES}, config(variant) | {"no_such_option": 1})


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_flash_equals_sdpa(kind, positions, tokens):
    ids, cu_seqlens = tokens
    flash, sdpa = build("flash", kind, positions), build("sdpa", kind, positions)
    assert_close(flash(ids[None, :16]), sdpa(ids[None, :16]))
    inputs = {"cu_seqlens": cu_seqlens, "max_seqlen": max(LENGTHS)}
    assert_close(flash(ids, **inputs), sdpa(ids, **inputs))


class Picky(Attention):
    """A variant that refuses all that the contract lets it refuse."""

    supports = Supports(bidirectional=False, positions=("rotary",), packed=False, dropout=False, cache=False)


def test_what_a_variant_does_not_support_is_refused_with_a_way_out():
    options = {**SIZES, "attention": Picky}
    with pytest.raises(ValueError, match="causal only; use a gpt model or attention=flash"):
        BERT(**options)
    for positions in ("learned", "alibi"):
        with pytest.raises(ValueError, match=f"does not support positions={positions}; set model.positions=rotary, or attention=flash"):
            GPT(**options, positions=positions)
    with pytest.raises(ValueError, match="model.attention_dropout=0"):
        GPT(**options, attention_dropout=0.1)
    model = GPT(**options)
    with pytest.raises(ValueError, match="data.cross_documents=true, or attention=flash"):
        model(torch.arange(4), cu_seqlens=torch.tensor([0, 4], dtype=torch.int32), max_seqlen=4)
    with pytest.raises(ValueError, match="no KV cache"):
        model.new_cache(1, 4)


class PairedHeads(Attention):
    """Uses every hook: half the value heads at twice the width, un-rotated queries, and an input of its own beside q, k and v."""

    def __init__(self, spec):
        super().__init__(spec)
        self.gate = torch.nn.Linear(spec.dim, spec.n_heads // 2)

    def head_shapes(self):
        shapes = super().head_shapes()
        heads, width = shapes["v"]
        return shapes | {"v": (heads // 2, 2 * width), "out": (shapes["q"][0] // 2, 2 * width)}

    def project(self, x):
        return *super().project(x), self.gate(x).sigmoid()

    def apply_positions(self, q, k, seq):
        return q, super().apply_positions(q, k, seq)[1]

    def attend(self, q, k, v, seq, gate):
        q, k, v = (x.transpose(1, 2).repeat_interleave(self.spec.n_heads // x.shape[-2], dim=1) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] == k.shape[2])
        return out[:, ::2].transpose(1, 2) * gate[..., None]

    def mlp_dim(self, baseline):
        return baseline - 8

    def metrics(self):
        return {"lambda": float(self.spec.layer)}


def test_the_hooks_serve_a_variant_of_other_shapes():
    model = GPT(**SIZES, attention=PairedHeads).double().eval()
    ids = torch.arange(9)[None]
    caches = model.new_cache(1, 9)
    assert_close(torch.cat([model(part, cache=caches) for part in ids.split([6, 1, 1, 1], dim=1)], dim=1), model(ids))
    assert caches[0].values.shape == (1, 9, 1, 16)
    assert model.blocks[0].mlp.up_proj.out_features == 4 * SIZES["dim"] - 8
    assert model.metrics() == {"attention/lambda/0": 0.0, "attention/lambda/1": 1.0}


SPEC = {
    "dim": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "layer": 0, "n_layers": 1, "causal": True, "positions": "rotary",
    "train_context": 8,
}


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"n_kv_heads": 3}, "n_kv_heads=3: must divide n_heads=4"),
        ({"head_dim": 7}, "even one; set model.head_dim"),
        ({"head_dim": 2, "rope_scaling": "ntk", "rope_factor": 2.0}, "at least 4"),
        ({"positions": "sinusoid"}, "learned, rotary, alibi"),
        ({"rope_scaling": "spiral"}, "none, linear, ntk, dynamic, yarn, llama3, longrope"),
        ({"rope_scaling": "yarn"}, "no effect with rope_factor=1"),
        ({"rope_scaling": "yarn", "rope_factor": 2.0, "rope_options": {"beta": 1}}, "rope_options: beta must be beta_fast, beta_slow"),
        ({"rope_options": {"beta_fast": 1}}, "rope_options: beta_fast must be left out with rope_scaling=none"),
        ({"rope_scaling": "longrope", "rope_options": {"short_factor": [1.0]}}, "short_factor=.*must be a list of 4 numbers"),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor=0.4: must lie in"),
        ({"original_context": 0}, "original_context=0: must be a positive integer"),
        ({"rope_factor": 4.0}, "no effect with rope_scaling=none"),
        ({"rope_scaling": "linear", "rope_factor": 0.0}, "must be positive"),
        ({"rope_scaling": "linear"}, "no effect with rope_factor=1"),
        ({"positions": "alibi", "rope_scaling": "ntk", "rope_factor": 2.0}, "no effect with positions=alibi"),
        ({"dropout": 1.0}, "attention_dropout=1.0"),
        ({"rope_proportion": 0.2}, "rope_proportion=0.2: must lie in .* one pair of channels turn"),
        ({"gate": "token"}, "attention_gate='token': must be one of none, elementwise, head"),
        ({"temperature": "hot"}, "attention_temperature='hot': must be none, ssmax, log, yarn, llama4"),
        ({"temperature": {"name": "log", "floor_scale": 8}}, "attention_temperature: floor_scale must be left out with name=log"),
        ({"temperature": {"name": "llama4", "floor_scale": 0}}, "attention_temperature.floor_scale=0: must be a number above 0"),
        ({"temperature": {"name": "llama4", "first": 2}}, "attention_temperature.first=2: must be 0 or 1"),
        ({"temperature": "log", "train_context": 1}, "attention_temperature=log: needs a context of at least 2"),
        ({"train_context": None}, "train_context: must be a positive integer, got None"),
    ],
)
def test_a_wrong_spec_says_what_it_must_be(wrong, message):
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**SPEC | wrong)


@pytest.mark.parametrize("options", [{"window_size": [-2, 0]}, {"window_size": [1]}, {"window_size": [0.5, 1]}, {"softcap": -1.0}])
def test_wrong_options_of_flash_are_refused_at_construction(options):
    with pytest.raises(ValueError, match=f"attention.{next(iter(options))}"):
        FlashAttention(AttentionSpec(**SPEC), **options)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_size", [(-1, -1), (3, -1), (0, 0), (2, 5), (40, 1)])
def test_flash_options_act_and_its_pairs_are_those_of_the_mask(causal, window_size):
    spec = AttentionSpec(**SPEC | {"causal": causal, "positions": "learned"})
    layer = FlashAttention(spec, window_size=window_size)
    for length in (0, 1, 2, 5, 11):
        distance = torch.arange(length)[:, None] - torch.arange(length)
        left, right = window_size[0], 0 if causal else window_size[1]
        seen = ((left < 0) | (distance <= left)) & ((right < 0) | (-distance <= right))
        assert layer.visible_pairs(length) == int(seen.sum())
    assert layer.plain == (window_size == (-1, -1))


def test_sinks_and_softcap_change_the_output_and_sinks_learn():
    ids = torch.arange(10)[None]

    def output(**options):
        torch.manual_seed(0)
        model = GPT(**SIZES, attention=lambda spec: FlashAttention(spec, **options))
        return model, model(ids)

    plain = output()[1]
    model, with_sinks = output(sinks=True)
    assert not torch.equal(plain, with_sinks) and not torch.equal(plain, output(softcap=0.01)[1])
    with_sinks.logsumexp(-1).sum().backward()
    assert model.blocks[0].attention.sinks.grad.any() and not model.blocks[0].attention.plain
    assert SDPAttention(AttentionSpec(**SPEC)).plain
