"""Patterns by layer: what each layer becomes, what is refused, caches, packing, exports, checkpoints, and transformers' own patterns."""

import json

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from test_configs import compose
from test_init_from import command, configured
from tiny_run import FLASH, RANDOM, column, compose_tiny, write_checkpoint
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

from attnzoo import checkpoint, hub, layers, runner
from attnzoo.errors import UserError
from attnzoo.evaluation.readings import compose_readings
from attnzoo.evaluation.seeds import name_settings
from attnzoo.hub import config_from_huggingface, from_huggingface
from attnzoo.hub.configs import GPTConfig
from attnzoo.models import from_config
from attnzoo.run import checks
from attnzoo.run.claiming import ClaimRunFolder
from attnzoo.run.config import choices

transformers = pytest.importorskip("transformers")

DIFFERENTIAL = {"_target_": "attnzoo.attention.differential.DifferentialAttention", "_partial_": True, "version": 2}
# every way in which layers can differ, and values of another width among them
MIXED = {
    "pattern": ["local", "full", "other"],
    "local": {"attention": {"window_size": [3, 0]}, "rope_base": 500.0, "attention_temperature": "log"},
    "full": {"positions": "none", "attention_gate": "head", "qk_norm": True},
    "other": {"attention": {**DIFFERENTIAL, "version": 1}},
}
SIZES = {"_target_": "attnzoo.models.GPT", "vocab_size": 53, "dim": 32, "n_layers": 4, "n_heads": 4, "train_context": 16}


def build(pattern=MIXED, **options):
    torch.manual_seed(0)
    return from_config({**SIZES, "layers": pattern, **options}, FLASH).double().eval()


def ids_of(*shape):
    return torch.randint(53, shape, generator=torch.Generator().manual_seed(1))


def test_layers_take_the_kinds_in_turn():
    model = build(rope_scaling="yarn", rope_factor=4.0)
    assert model.kinds == ["local", "full", "other", "local"]
    assert [block.attention.name for block in model.blocks] == ["flash", "flash", "differential", "flash"]
    assert [block.attention.spec.layer for block in model.blocks] == [0, 1, 2, 3]
    local, full, other, last = (block.attention for block in model.blocks)
    assert (local.window_size, local.spec.rope_base, local.spec.rope_scaling) == ((3, 0), 500.0, "yarn")
    # a kind without rotation leaves the model's scaling of it behind
    assert (full.window_size, full.spec.positions, full.spec.rope_scaling, full.spec.gate) == ((-1, -1), "none", "none", "head")
    assert (other.spec.positions, other.version, last.window_size) == ("rotary", 1, (3, 0))
    assert layers.attention_name({**SIZES, "layers": MIXED}, FLASH) == "flash+differential[local,full,other]"
    assert layers.attention_name(SIZES, FLASH) == "flash"


def test_each_layer_is_what_it_would_be_alone():
    """The pattern's model is put together of blocks of four models whose layers are alike."""
    mixed = build()
    alone = {"local": ({"rope_base": 500.0, "attention_temperature": "log"}, {**FLASH, "window_size": [3, 0]}),
             "full": ({"positions": "none", "attention_gate": "head", "qk_norm": True}, FLASH), "other": ({}, MIXED["other"]["attention"])}
    for layer, kind in enumerate(mixed.kinds):
        options, attention = alone[kind]
        whole = from_config({**SIZES, **options}, attention).double().eval()
        whole.blocks[layer].load_state_dict(mixed.blocks[layer].state_dict())
        x, seq = torch.randn(1, 30, 32, dtype=torch.float64), None

        def keep(module, inputs):
            nonlocal seq
            seq = inputs[1]

        hook = whole.blocks[layer].register_forward_pre_hook(keep)
        whole(ids_of(1, 30))
        hook.remove()
        assert_close(mixed.blocks[layer](x, seq), whole.blocks[layer](x, seq))
        assert mixed.blocks[layer].attention.flops([30]) == whole.blocks[layer].attention.flops([30])


def test_packed_cached_and_single_sequences_agree():
    model, ids, lengths = build(), ids_of(30), [7, 1, 22]
    single = torch.cat([model(part[None])[0] for part in ids.split(lengths)])
    cu_seqlens = torch.tensor([0, 7, 8, 30], dtype=torch.int32)
    assert_close(model(ids, cu_seqlens=cu_seqlens, max_seqlen=22), single)
    caches = model.new_cache(1, 22)
    steps = [model(part, cache=caches) for part in ids[None, 8:].split([9, 1, 12], dim=1)]
    assert_close(torch.cat(steps, dim=1)[0], single[8:])
    # differential's values are twice as wide, so each layer has a cache of its own shape
    assert [cache.values.shape[-1] for cache in caches] == [8, 8, 16, 8]


@pytest.mark.slow
def test_mixed_layers_compile_without_a_graph_break_and_twice_at_most():
    torch._dynamo.reset()
    model, counter = build({**MIXED, "pattern": ["local", "full"]}, n_layers=2), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in (9, 10, 16):
        assert_close(compiled(ids_of(2, length)), model(ids_of(2, length)))
    assert counter.frame_count <= 2


def test_generation_equals_reading_everything_again():
    model, prompt = build(), ids_of(2, 5)
    for _ in range(12):
        prompt = torch.cat([prompt, model(prompt)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(prompt[:, :5], 12, temperature=0), prompt)


def test_the_model_can_do_what_all_its_layers_can():
    assert build().supports.cache and not build().supports.dropout
    sparse = {"pattern": ["a", "b"], "a": {}, "b": {"attention": {"_target_": "attnzoo.attention.block_sparse.BlockSparseAttention"}}}
    assert build(sparse).supports.positions == ("learned", "rotary")
    assert set(build().metrics()) == {"attention/lambda/2"}


@pytest.mark.parametrize(("wrong", "message"), [
    ({"pattern": ["local", "fulll"], "local": {}, "full": {}}, "'fulll' is no kind of layer here; each must be one of local, full"),
    ({"pattern": [], "local": {}}, r"layers.pattern=\[\]: must be a list of kinds of layers \(local\)"),
    ({"pattern": 5 * ["local"], "local": {}}, "names 5 layers, and the model has 4; shorten it, or set model.n_layers=5"),
    ({"pattern": ["local"], "local": {"window_size": [3, 0]}}, "layers.local.window_size: cannot differ by layer"),
    ({"pattern": ["local"], "local": {"n_heads": 2}}, "layers.local.n_heads: cannot differ by layer"),
    ({"pattern": ["local"], "local": 3}, "layers.local=3: must be a mapping"),
    ({"pattern": ["local"], "local": {"attention": {"windows": 3}}}, "layers.local.attention.windows: FlashAttention has no such option"),
    ({"pattern": ["local"], "local": {"attention": {"window_size": [-2, 0]}}}, r"layers.local: attention.window_size=\[-2, 0\]: must be"),
    ({"pattern": ["local"], "local": {"attention": "flash"}}, "layers.local.attention='flash': must be a mapping"),
    ({"pattern": ["local"], "local": {"positions": "learned"}}, "layers.local.positions=learned: does not go with model.positions=rotary"),
    ({"pattern": ["local"], "local": {"positions": "none", "rope_scaling": "yarn"}}, "layers.local: rope_scaling=yarn: has no effect"),
    ({"pattern": ["local"], "local": {"attention": {"_target_": "os.system"}}}, "layers.local.attention._target_='os.system': is outside"),
    ({"pattern": ["local"], "local": {"attention": {"_target_": "attnzoo.attention.dual_chunk.DualChunkAttention"}, "positions": "none"}},
     "layers.local: attention=dual_chunk does not support positions=none"),
])
def test_a_wrong_pattern_is_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        build(wrong)


@pytest.mark.parametrize(("overrides", "message"), [
    (["layers=gemma3"], "names 6 layers, and the model has 4; shorten it, or set model.n_layers=6"),
    (["layers=local_global", "attention=sdpa"], "layers.local.attention.window_size: SDPAttention has no such option"),
    (["layers=nope", "attention=dual_chunk"], "layers.nope: attention=dual_chunk does not support positions=none"),
    (["layers=nope", "model=gpt2_small"], "layers.nope.positions=none: does not go with model.positions=learned"),
    (["layers=nope", "+layers.nope.position=none"], "layers.nope.position: cannot differ by layer; like it: positions"),
    (["layers=differential_last", "layers.differential.attention._partial_=false"], "layers.differential.attention: its file must have"),
    (["layers=nope_windows", "layers.full.attention_temperature={name: log, floor: 8}"], "layers.full: attention_temperature: floor must"),
    (["attention=differential", "model.attention_dropout=0.1"], "attention=differential has no attention dropout"),
])
def test_a_command_is_refused_before_there_are_data(overrides, message):
    with pytest.raises((ValueError, UserError), match=message):
        checks.check_training(compose(*overrides))


@pytest.mark.slow
def test_a_command_chooses_and_changes_a_pattern():
    def kinds(*overrides):
        cfg = compose(*overrides)
        checks.check_training(cfg)
        with torch.device("meta"):
            model = instantiate(cfg.model, vocab_size=259, _convert_="all")
        return [(block.attention.name, getattr(block.attention, "window_size", None)) for block in model.blocks]

    full, local = ("flash", (-1, -1)), ("flash", (31, 0))
    assert kinds() == 4 * [full]
    assert kinds("layers=local_global") == [local, full, local, full]
    assert kinds("layers=local_global", "layers.pattern=[full,local,local]", "layers.local.attention.window_size=[7,0]") == [
        full, ("flash", (7, 0)), ("flash", (7, 0)), full]
    assert kinds("layers=local_global", "layers.pattern=null") == 4 * [full]
    assert kinds("layers=differential_last", "attention=sdpa") == 3 * [("sdpa", None)] + [("differential", None)]
    assert kinds("layers=differential_last", "attention@layers.differential.attention=dual_chunk")[3] == ("dual_chunk", None)


def test_runs_of_unlike_patterns_are_told_apart_once():
    named = name_settings({
        window: {"attention": FLASH, "layers": chosen, "model": {"dim": 8, "layers": chosen}}
        for window in (3, 7) for chosen in [{"pattern": ["local"], "local": {"attention": {"window_size": [window, 0]}}}]})
    assert named == {window: f"flash model.layers.local.attention.window_size=[{window}, 0]" for window in (3, 7)}


@pytest.mark.parametrize(("overrides", "name"), [([], "gpt_tiny_flash"), (["layers=nope", "attention=sdpa"], "gpt_tiny_sdpa_nope")])
def test_a_run_is_named_after_its_pattern(overrides, name):
    ClaimRunFolder()
    with command(*overrides):
        assert HydraConfig.get().run.dir.endswith(f"_{name}")
        assert choices("attention", "layers") == name.removeprefix("gpt_tiny_").split("_")


@pytest.mark.parametrize(("preset", "config"), [("local_global", "GptOssConfig"), ("gemma3", "Gemma3TextConfig")])
def test_presets_are_the_published_patterns(preset, config):
    theirs = getattr(transformers, config)(num_hidden_layers=12)
    kinds = layers.kinds(compose(f"layers={preset}").layers, 12)
    assert [{"local": "sliding_attention", "full": "full_attention"}[kind] for kind in kinds] == theirs.layer_types


def test_the_nope_preset_is_smollm3s():
    kinds = layers.kinds(compose("layers=nope").layers, 36)
    assert [int(kind == "rotary") for kind in kinds] == transformers.SmolLM3Config().no_rope_layers


WINDOW = {"use_sliding_window": True, "sliding_window": 8}
CASES = [
    ("SmolLM3", {}), ("SmolLM3", WINDOW), ("SmolLM3", {"no_rope_layers": [0, 1, 1, 0]}), ("Qwen3", {**WINDOW, "max_window_layers": 2}),
    ("Qwen3", {**WINDOW, "layer_types": 2 * ["sliding_attention", "full_attention"]}), ("Phi3", {"sliding_window": 8}),
    ("Mistral", {"sliding_window": 8}),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_mixed_layers_of_transformers_are_read(kind, options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=53, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options,
        **({"head_dim": 8} if kind == "Qwen3" else {}))
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = from_huggingface(theirs).eval()
    tokens = ids_of(2, 40)
    with torch.no_grad():
        assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
    windows = [(7, 0) if kind.startswith("local") else (-1, -1) for kind in ours.kinds]
    assert [block.attention.window_size for block in ours.blocks] == windows
    assert json.loads(json.dumps(config_from_huggingface(config)))["layers"]["pattern"]


def test_a_window_needs_a_variant_that_has_one():
    config = transformers.Phi3Config(vocab_size=53, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                                     max_position_embeddings=64, pad_token_id=0, sliding_window=8)
    from attnzoo.attention.sdpa import SDPAttention

    with pytest.raises(ValueError, match="layers.local: attention.window_size: SDPAttention has no such option"):
        from_huggingface(transformers.Phi3ForCausalLM(config), attention=SDPAttention)


def test_an_export_comes_back(tmp_path):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(GPTConfig(model={**SIZES, "layers": MIXED}, attention=FLASH)).eval()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = ids_of(2, 12)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert again.model.kinds == ["local", "full", "other", "local"]
    settings = {"max_new_tokens": 20, "do_sample": False}
    cached, again_read = (again.generate(tokens, use_cache=use, **settings) for use in (True, False))
    assert torch.equal(cached, again_read)
    with pytest.raises(ValueError, match="GPT-2 cannot hold this model; .*without window.*qk_norm=false; model.attention_gate=none"):
        hub.save_huggingface(again.model, tmp_path / "gpt2")


def test_a_checkpoint_is_read_with_other_kinds_and_says_so(tmp_path):
    trained = write_checkpoint(tmp_path / "a.ckpt", layers=MIXED, n_layers=3)
    as_trained = checkpoint.load(tmp_path / "a.ckpt")
    tokens = ids_of(1, 20)
    assert torch.equal(as_trained.model(tokens), trained(tokens)) and as_trained.overrides == {}
    # kinds are merged over the checkpoint's
    wider = checkpoint.load(tmp_path / "a.ckpt", model={"layers": {"local": {"attention": {"window_size": [7, 0]}}}})
    assert wider.overrides == {"model": {"layers.local.attention.window_size": [7, 0]}}
    other = checkpoint.load(tmp_path / "a.ckpt", model={"layers": {"full": {"attention": {"softcap": 5.0}}}})
    assert other.overrides == {"model": {"layers.full.attention.softcap": 5.0}}
    dual = {"_target_": "attnzoo.attention.dual_chunk.DualChunkAttention", "_partial_": True, "chunk_size": 8}
    swapped = checkpoint.load(tmp_path / "a.ckpt", model={"layers": {"local": {"attention": dual, "attention_temperature": "none"}}})
    assert swapped.overrides == {"model": {"layers.local.attention_temperature": "none"}, "layers.local.attention": dual}
    assert swapped.attention == "dual_chunk+flash+differential[local,full,other]"
    assert as_trained.attention == other.attention == "flash+differential[local,full,other]"
    assert wider.model.blocks[0].attention.window_size == (7, 0) and wider.model.blocks[0].attention.spec.rope_base == 500.0
    assert wider.model.blocks[2].attention.name == "differential"
    # a pattern alone is one of the checkpoint's kinds; null: all layers are alike, which these weights are not
    again = checkpoint.load(tmp_path / "a.ckpt", model={"layers": {"pattern": MIXED["pattern"]}})
    assert again.overrides == {} and torch.equal(again.model(tokens), trained(tokens))
    # a pattern with its kinds replaces the checkpoint's
    same = {**MIXED, "local": {}}
    replaced = checkpoint.load(tmp_path / "a.ckpt", model={"layers": same})
    assert replaced.model.blocks[0].attention.window_size == (-1, -1)
    with pytest.raises(UserError, match="do not fit the model"):
        checkpoint.load(tmp_path / "a.ckpt", model={"layers": {"pattern": None}})
    with pytest.raises(UserError, match="'far' is no kind of layer here"):
        checkpoint.load(tmp_path / "a.ckpt", model={"layers": {"pattern": ["far"]}})


def test_a_run_without_a_pattern_is_read_with_one(tmp_path):
    trained = write_checkpoint(tmp_path / "a.ckpt", n_layers=4)
    cfg = compose("layers=nope_windows", "layers.full.attention_temperature=llama4", f"ckpt_path={tmp_path}", name="eval")
    checks.check_evaluation(cfg)
    (reading,) = compose_readings(cfg)
    loaded = checkpoint.load(tmp_path / "a.ckpt", attention=reading.attention, model=reading.model)
    assert [block.attention.spec.positions for block in loaded.model.blocks] == ["rotary", "rotary", "rotary", "none"]
    assert loaded.model.blocks[3].attention.temperature.floor_scale == 8192
    assert not torch.equal(loaded.model(ids_of(1, 40)), trained(ids_of(1, 40)))
    (plain,) = compose_readings(compose(f"ckpt_path={tmp_path}", name="eval"))
    assert plain.model == {}
    (some,) = compose_readings(compose(f"ckpt_path={tmp_path}", "+layers.local.attention.window_size=[7,0]", name="eval"))
    assert some.model == {"layers": {"local": {"attention": {"window_size": [7, 0]}}}}


def test_a_temperature_by_the_trained_context_keeps_it(tmp_path):
    write_checkpoint(tmp_path / "a.ckpt", layers={"pattern": ["full"], "full": {"attention_temperature": "log"}})
    assert configured(tmp_path / "a.ckpt", "data.seq_len=64")["model"]["original_context"] == 32
    assert configured(tmp_path / "a.ckpt", "data.seq_len=64", "+layers.full.attention_temperature=llama4")["model"].get(
        "original_context") is None


@pytest.mark.slow
def test_a_run_that_begins_with_weights_keeps_their_pattern_or_takes_the_commands(tmp_path):
    sizes = {key: RANDOM[key] for key in ("mlp", "norm", "bias")}
    write_checkpoint(tmp_path / "a.ckpt", layers=MIXED, n_layers=4, **sizes)
    assert configured(tmp_path / "a.ckpt")["model"]["layers"] == MIXED
    merged = configured(tmp_path / "a.ckpt", "+layers.local.attention.window_size=[7,0]")["model"]["layers"]
    assert merged == {**MIXED, "local": {**MIXED["local"], "attention": {"window_size": [7, 0]}}}
    found = configured(tmp_path / "a.ckpt", "layers=nope")["model"]["layers"]
    assert found["pattern"] == ["rotary", "rotary", "rotary", "nope"]
    with pytest.raises((UserError, ValueError), match="layers.local.attention.window_size: SDPAttention has no such option"):
        configured(tmp_path / "a.ckpt", "attention=sdpa")


@pytest.mark.slow
def test_a_run_trains_and_resumes_with_its_pattern(tmp_path):
    quick = ["callbacks.sample=null", "callbacks.plot=null", "trainer.val_check_interval=2", "optimizer.total_steps=4"]
    chosen = ["layers=nope_windows", "layers.pattern=[local,full]", "layers.full.attention_temperature=ssmax", "model.attention_gate=head"]
    runner.train(compose_tiny(tmp_path, *quick, *chosen, "trainer.max_steps=2"))
    runner.train(compose_tiny(tmp_path, *quick, *chosen, "trainer.max_steps=4", "resume=auto"))
    saved = checkpoint.read(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert saved["global_step"] == 4 and saved["attnzoo"]["model"]["layers"]["pattern"] == ["local", "full"]
    assert {name.split(".")[2] for name in saved["state_dict"] if name.endswith("ssmax_scale")} == {"1"}
    assert len(column(tmp_path, "attention/ssmax_scale/1")) == 4
    with pytest.raises(UserError, match=r"does not fit this run: .*model.layers="):
        runner.train(compose_tiny(tmp_path, *quick, "trainer.max_steps=5", "resume=auto"))
