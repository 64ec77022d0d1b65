"""`init_from`: a new run with trained weights, from each kind of source, with the model that it was trained as or one that is named."""

import contextlib
import json

import pytest
import torch
from commands import Command
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from tiny_run import FLASH, RANDOM, ROOT, TINY, column, compose_tiny, write_checkpoint

from attnzoo import checkpoint, hub, runner, trained
from attnzoo.data.datamodule import TextDataModule
from attnzoo.errors import UserError
from attnzoo.models import from_config
from attnzoo.run import initial

transformers = pytest.importorskip("transformers")
STILL = ["optimizer.lr=1e-12", "optimizer.final_lr=0", "optimizer.weight_decay=0"]  # a step that changes nothing to speak of
QUICK = ["callbacks.sample=null", "callbacks.plot=null"]
SIZES = {key: RANDOM[key] for key in ("dim", "n_layers", "n_heads")}


@contextlib.contextmanager
def command(*overrides):
    """The config of `python train.py <overrides>`, while Hydra knows of the command."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", overrides=["run_dir=unused", *overrides], return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        OmegaConf.set_struct(cfg, False)
        del cfg["hydra"]
        OmegaConf.set_struct(cfg, True)
        try:
            yield cfg
        finally:
            HydraConfig.instance().cfg = None


def configured(source, *overrides):
    with command(f"init_from={source}", *overrides) as cfg:
        return OmegaConf.to_container(initial.configure(cfg, trained.read(str(source), key="init_from")), resolve=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with a run of a few steps."""
    folder = tmp_path_factory.mktemp("first")
    runner.train(compose_tiny(folder, *QUICK, "trainer.max_steps=3", "trainer.val_check_interval=3"))
    return folder / "run"


def test_a_run_begins_with_the_weights_and_nothing_else(run, tmp_path, caplog):
    caplog.set_level("INFO")
    runner.train(compose_tiny(tmp_path, *QUICK, *STILL, f"init_from={run}", "trainer.max_steps=1", "data.seq_len=48"))
    ours = checkpoint.read(tmp_path / "run" / "checkpoints" / "last.ckpt")
    theirs = checkpoint.read(run / "checkpoints" / "best.ckpt")
    for name, weight in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], weight, rtol=0, atol=1e-9)
    assert ours["global_step"] == 1 and theirs["global_step"] == 3
    assert len(column(tmp_path, "train/loss")) == 1
    begun = ours["attnzoo"]["init"]
    assert begun["from"] == str(run / "checkpoints" / "best.ckpt") and begun["new"] == begun["left_out"] == []
    assert begun["changed"] == {"model.train_context": [32, 48]}
    assert json.loads((tmp_path / "run" / "record.json").read_text())["init"] == begun
    assert f"weights of {run}/checkpoints/best.ckpt (step 3): {begun['loaded']} tensors loaded" in caplog.text
    assert "model.train_context=48 (was 32)" in caplog.text
    assert caplog.text.count("optimizer.lr is never reached") == 1


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_own_weights(run, tmp_path):
    source = tmp_path / "source.ckpt"
    source.write_bytes((run / "checkpoints" / "last.ckpt").read_bytes())
    length = [*QUICK, f"init_from={source}", "resume=auto", "optimizer.total_steps=4"]
    runner.train(compose_tiny(tmp_path / "whole", *length, "trainer.max_steps=4"))
    runner.train(compose_tiny(tmp_path, *length, "trainer.max_steps=2"))
    begun = checkpoint.read(tmp_path / "run" / "checkpoints" / "last.ckpt")["attnzoo"]["init"]
    source.unlink()  # it is not read again
    runner.train(compose_tiny(tmp_path, *length, "trainer.max_steps=4"))
    assert column(tmp_path, "train/loss") == column(tmp_path / "whole", "train/loss")
    assert checkpoint.read(tmp_path / "run" / "checkpoints" / "last.ckpt")["attnzoo"]["init"] == begun


@pytest.mark.slow
def test_a_classifier_begins_with_a_masked_language_model(tmp_path):
    write_checkpoint(tmp_path / "mlm.ckpt", "BERT", "mlm", tokenizer=None)
    for kind in ("good", "bad"):
        (tmp_path / "reviews" / kind).mkdir(parents=True)
        for number in range(6):
            (tmp_path / "reviews" / kind / f"{number}.txt").write_text(f"{kind} number {number}")
    options = [f"model.{key}={size}" for key, size in SIZES.items()] + [option for option in TINY if option.startswith("trainer")]
    options += ["data=text_classification", f"data.path={tmp_path / 'reviews'}", f"data.cache_dir={tmp_path}", "data.val_fraction=0.3"]
    options += [*QUICK, *STILL, f"init_from={tmp_path / 'mlm.ckpt'}", "trainer.max_steps=1", f"run_dir={tmp_path / 'run'}"]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        runner.train(compose("train", ["task=classification", "model=bert_tiny", *options]))
    saved = checkpoint.read(tmp_path / "run" / "checkpoints" / "last.ckpt")
    begun, theirs = saved["attnzoo"]["init"], trained.read(str(tmp_path / "mlm.ckpt"), key="init_from").weights
    assert {name.partition(".")[0] for name in begun["new"]} == {"pooler", "classifier"}
    assert {name.partition(".")[0].partition("_")[0] for name in begun["left_out"]} == {"head"}
    name = "blocks.1.mlp.up_proj.weight"
    torch.testing.assert_close(saved["state_dict"][f"model.{name}"], theirs[name], rtol=0, atol=1e-9)


def test_the_model_is_the_one_that_was_trained(tmp_path):
    window = {**FLASH, "window_size": [8, 0]}
    write_checkpoint(tmp_path / "a.ckpt", attention=window, rope_base=500.0)
    found = configured(tmp_path / "a.ckpt", "data.seq_len=64")
    assert {key: found["model"][key] for key in ("dim", "n_heads", "rope_base", "train_context")} == {
        "dim": 16, "n_heads": 2, "rope_base": 500.0, "train_context": 64}
    assert found["attention"] == window and found["task"]["objective"] == "lm"
    assert found["model"].get("original_context") is None  # positions as trained: the new context takes the old one's place


@pytest.mark.slow
def test_what_the_command_names_wins(tmp_path):
    write_checkpoint(tmp_path / "a.ckpt", rope_base=500.0)
    file = tmp_path / "a.ckpt"
    extended = ["data.seq_len=256", "model.rope_scaling=ntk", "model.rope_factor=8", "attention=dual_chunk"]
    found = configured(file, *extended)
    assert (found["model"]["rope_scaling"], found["model"]["dim"], found["model"]["rope_base"]) == ("ntk", 16, 500.0)
    assert found["attention"]["_target_"].endswith("DualChunkAttention")
    assert found["model"]["original_context"] == 32 and found["model"]["train_context"] == 256
    # an option of the group counts as a whole, if it is the default one
    assert configured(file, "model=gpt_tiny")["model"]["dim"] == 128
    # a default that is said counts too
    write_checkpoint(file, rope_scaling="ntk", rope_factor=4.0)
    assert configured(file, "model.rope_scaling=none", "model.rope_factor=1")["model"]["rope_scaling"] == "none"
    assert configured(file)["model"]["rope_scaling"] == "ntk"
    # of the attention a key alone
    assert configured(file, "attention.softcap=5")["attention"] == {**FLASH, "softcap": 5}


def test_what_an_experiment_says_counts_too(tmp_path):
    write_checkpoint(tmp_path / "a.ckpt", rope_base=500.0)
    found = configured(tmp_path / "a.ckpt", "experiment=drope")
    assert (found["model"]["positions"], found["model"]["dim"], found["model"]["rope_base"]) == ("none", 16, 500.0)


def test_the_task_is_the_one_that_was_trained(tmp_path):
    write_checkpoint(tmp_path / "a.ckpt", "BERT", "mlm")
    found = configured(tmp_path / "a.ckpt")
    assert found["task"]["objective"] == found["data"]["objective"] == "mlm"
    assert configured(tmp_path / "a.ckpt", "task=classification")["task"]["objective"] == "classification"


def test_an_extended_context_is_extended_again(tmp_path):
    write_checkpoint(tmp_path / "a.ckpt", context=64, original_context=32, rope_scaling="linear", rope_factor=2.0)
    assert configured(tmp_path / "a.ckpt", "data.seq_len=128")["model"]["original_context"] == 32


def test_dual_chunks_are_those_of_the_context_that_positions_know(tmp_path):
    layer = {"_target_": "attnzoo.attention.dual_chunk.DualChunkAttention", "_partial_": True, "temperature": "yarn"}
    model = from_config({"_target_": "attnzoo.models.GPT", **RANDOM, "train_context": 256, "original_context": 32}, layer)
    assert model.blocks[0].attention.chunk_size == 32


@pytest.mark.parametrize(("attention", "message"), [
    ({"_target_": "os.system", "command": "true"}, "os.system.* is outside attnzoo"),
    ({"_target_": "attnzoo.checkpoint.shutil.rmtree", "path": "x"}, "attnzoo.checkpoint.shutil.rmtree.*"),
    ({**FLASH, "softcap": {"_target_": "attnzoo.checkpoint.os.system"}}, "attnzoo.checkpoint.os.system.*"),
    ({**FLASH, "impl": "${oc.env:HOME}"}, "attention must have a `_target_` and plain values"),
])
def test_a_strangers_description_is_not_taken(tmp_path, attention, message):
    write_checkpoint(tmp_path / "a.ckpt")
    content = checkpoint.read(tmp_path / "a.ckpt")
    content["attnzoo"]["attention"] = attention
    checkpoint.save(content, tmp_path / "a.ckpt")
    with pytest.raises(UserError, match=f"init_from=.*{message}.*attention=..."):
        configured(tmp_path / "a.ckpt")


@pytest.mark.parametrize(("overrides", "message"), [
    (["data.seq_len=64"], "has 32 learned positions, data.seq_len=64 needs more; set init_positions=interpolate"),
    (["model.max_positions=64"], r"position_embedding.weight has shape \(32, 16\), the run's model \(64, 16\).*init_positions=interpolate"),
    (["attention=mla"], r"proj.weight has shape .* without model=..., model.\* and attention=..., or"),
    (["model.dim=32"], r"has shape \(.*leave the model's sizes to the weights.*init_new=\["),
    (["model.positions=rotary", "model.vocab_size=200"], "model.vocab_size=200 is smaller"),
])
def test_weights_that_do_not_fit_are_refused(tmp_path, overrides, message, monkeypatch):
    write_checkpoint(tmp_path / "a.ckpt", positions="learned")
    if "vocab_size" not in message:  # the others are told before the data are prepared
        monkeypatch.setattr(TextDataModule, "prepare_data", lambda self: pytest.fail("the data were prepared"))
    sizes = [f"model.{key}={size}" for key, size in SIZES.items()]
    options = [*sizes, "model.positions=learned", "model.pad_vocab_multiple=1", f"init_from={tmp_path / 'a.ckpt'}"]
    with pytest.raises(UserError, match=message):
        runner.train(compose_tiny(tmp_path, *options, *overrides))


def built(**options):
    torch.manual_seed(1)
    return from_config({"_target_": "attnzoo.models.GPT", **RANDOM, "train_context": 32, **options}, FLASH)


@pytest.mark.parametrize("how", ["interpolate", "repeat", "new"])
def test_a_longer_table_of_learned_positions(tmp_path, how):
    theirs = write_checkpoint(tmp_path / "a.ckpt", positions="learned").position_embedding.weight
    model = built(positions="learned", max_positions=95)
    before = model.position_embedding.weight.clone()
    options = {"new": ["positions"]} if how == "new" else {"positions": how}
    done = initial.load(model, trained.read(str(tmp_path / "a.ckpt"), key="init_from"), **options)
    ours = model.position_embedding.weight
    if how == "new":
        assert torch.equal(ours, before) and done["new"] == ["position_embedding.weight"]
    elif how == "repeat":
        assert torch.equal(ours, torch.cat([theirs, theirs, theirs[:31]]))
    else:  # 32 rows over 95: every third but the ends between
        torch.testing.assert_close(ours[[0, 94]], theirs[[0, 31]])
        torch.testing.assert_close(ours[47], theirs[15:17].mean(0))
    assert done["loaded"] == len(model.state_dict()) - (how == "new")


def test_positions_of_pixels_are_interpolated_along_rows_and_columns(tmp_path):
    theirs = write_checkpoint(tmp_path / "a.ckpt", context=16, positions="learned", max_positions=1 + 4 * 4).position_embedding.weight
    model = built(positions="learned", max_positions=1 + 12 * 12)
    initial.load(model, trained.read(str(tmp_path / "a.ckpt"), key="init_from"), positions="interpolate_image")
    ours = model.position_embedding.weight
    torch.testing.assert_close(ours[0], theirs[0])
    before, after = theirs[1:].view(4, 4, -1), ours[1:].view(12, 12, -1)
    torch.testing.assert_close(after[1::3, 1::3], before)  # the centres of the old pixels
    torch.testing.assert_close(after[4, 2], (2 * before[1, 0] + before[1, 1]) / 3)
    torch.testing.assert_close(after[2, 4], (2 * before[0, 1] + before[1, 1]) / 3)


def test_positions_of_pixels_need_square_images(tmp_path):
    write_checkpoint(tmp_path / "a.ckpt", context=16, positions="learned", max_positions=17)
    with pytest.raises(UserError, match=r"init_positions=interpolate_image: both tables .* n \* n \+ 1, got 17 and 95"):
        initial.load(built(positions="learned", max_positions=95), trained.read(str(tmp_path / "a.ckpt"), key="init_from"),
                     positions="interpolate_image")


def test_a_name_that_nothing_has_is_refused(tmp_path):
    write_checkpoint(tmp_path / "a.ckpt")
    names = r"token_embedding.weight, blocks.\*.attention.q_proj.weight"
    with pytest.raises(UserError, match=rf"init_new=\['vocabluary'\]: no parameter .*{names}"):
        initial.load(built(), trained.read(str(tmp_path / "a.ckpt"), key="init_from"), new=["vocabluary", "*mlp*"])


@pytest.mark.parametrize("wrong", [{"task": "dance"}, {"context": -5}, {"model": [1]}, {"model": {}}, {"attention": None}], ids=str)
def test_a_record_that_cannot_be_is_refused_in_one_line(tmp_path, wrong):
    write_checkpoint(tmp_path / "a.ckpt")
    content = checkpoint.read(tmp_path / "a.ckpt")
    content["attnzoo"] |= wrong
    with pytest.raises(UserError, match=f"init_from=a: {next(iter(wrong))}") as error, command("init_from=a") as cfg:
        initial.configure(cfg, trained.Trained("a", "checkpoint", content))
    assert "\n" not in str(error.value)


def test_another_tokenizer_is_refused_or_begins_the_vocabulary_anew(tmp_path):
    write_checkpoint(tmp_path / "a.ckpt", vocab_size=300, tokenizer={"kind": "numbers", "vocab_size": 300})
    sizes = [f"model.{key}={size}" for key, size in SIZES.items()]
    options = [*QUICK, *STILL, *sizes, f"init_from={tmp_path / 'a.ckpt'}", "trainer.max_steps=1"]
    with pytest.raises(UserError, match=r"the tokenizer 'numbers' \(300 tokens\), the data have 'bytes' \(259\).*init_new=\[vocabulary\]"):
        runner.train(compose_tiny(tmp_path, *options))
    runner.train(compose_tiny(tmp_path, *options, "init_new=[vocabulary]"))
    saved = checkpoint.read(tmp_path / "run" / "checkpoints" / "last.ckpt")["attnzoo"]
    assert saved["init"]["new"] == ["token_embedding.weight"] and saved["model"]["vocab_size"] == 259


def test_the_data_take_the_tokenizer_of_the_weights(tmp_path):
    from attnzoo.data.classification import listops_tokenizer

    theirs = listops_tokenizer()
    write_checkpoint(tmp_path / "a.ckpt", vocab_size=theirs.vocab_size, tokenizer=theirs.record())
    read = trained.read(str(tmp_path / "a.ckpt"), key="init_from")
    with command(f"init_from={tmp_path / 'a.ckpt'}") as cfg:
        assert initial.data_tokenizer(cfg, read)["tokenizer"].record() == theirs.record()
    for named in ("data.tokenizer=bytes", "init_new=[vocabulary]"):
        with command(f"init_from={tmp_path / 'a.ckpt'}", named) as cfg:
            assert initial.data_tokenizer(cfg, read) == {}


def test_our_exported_folder_is_read(tmp_path):
    ours = write_checkpoint(tmp_path / "a.ckpt", attention={**FLASH, "window_size": [8, 0]})
    hub.from_checkpoint(tmp_path / "a.ckpt").save_pretrained(tmp_path / "saved")
    found = trained.read(str(tmp_path / "saved"), key="init_from")
    assert found.kind == "exported" and found.record["attention"]["window_size"] == [8, 0]
    assert found.record["model"]["dim"] == 16 and (found.record["task"], found.record["context"]) == ("lm", 32)
    model = built()
    assert initial.load(model, found)["loaded"] == len(model.state_dict())
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama", "qwen3"])
def test_weights_of_hugging_face_are_read(kind, tmp_path):
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"vocab_size": 259, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
        theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()
    elif kind in ("llama", "qwen3"):
        sizes = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        rope = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 2.0, "original_max_position_embeddings": 8}
        sizes |= {"intermediate_size": 48, "head_dim": 8, "max_position_embeddings": 16, "rope_parameters": rope}
        config, model = {"llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
                         "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)}[kind]
        theirs = model(config(**sizes)).eval()
    else:
        sizes = {"vocab_size": 259, "max_position_embeddings": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        theirs = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=48)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    found = configured(tmp_path / "theirs", "data.seq_len=12", "model.dropout=0")
    assert found["task"]["objective"] == ("mlm" if kind == "bert" else "lm")
    assert (found["model"]["dim"], found["model"]["train_context"]) == (32, 12)
    if kind in ("gpt2", "bert"):
        assert found["model"]["max_positions"] == 16
    else:
        assert (found["model"]["rope_scaling"], found["model"]["original_context"]) == ("yarn", 8)
    ours = from_config({k: v for k, v in found["model"].items() if k != "attention"}, found["attention"]).eval()
    done = initial.load(ours, trained.read(str(tmp_path / "theirs"), key="init_from"))
    assert done["new"] == done["left_out"] == []
    ids = torch.randint(259, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("given", "message"), [
    ("missing.ckpt", "init_from=.*missing.ckpt does not exist; it must be a run folder"),
    ("there/nothing", "init_from=.*there/nothing does not exist"),
    ("there", "there holds no run"),
    ("mamba", "init_from=.*mamba: .*'mamba': must be"),
    ("broken", "init_from=.*broken cannot be read as a model of transformers"),
])
def test_what_is_no_model_is_refused_in_one_line(tmp_path, given, message):
    (tmp_path / "there").mkdir()
    transformers.MambaConfig().save_pretrained(tmp_path / "mamba")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with pytest.raises(UserError, match=message) as error:
        trained.read(str(tmp_path / given), key="init_from")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("overrides", "message"), [
    (["init_from=a", "ckpt_path=b"], "set one of them"),
    (["init_new=[positions]"], "set init_from, or leave them out"),
    (["init_from=a", "init_new=positions"], "init_new='positions': must be a list"),
    (["init_from=a", "init_positions=stretch"], "init_positions='stretch': must be interpolate or interpolate_image or repeat or null"),
    (["init_from=[a]"], "init_from=.*: must be a text or null"),
])
def test_contradictions_are_refused(tmp_path, overrides, message):
    with pytest.raises((UserError, ValueError), match=message):
        runner.train(compose_tiny(tmp_path, *overrides))


@pytest.mark.slow
def test_the_command_extends_a_run(run, tmp_path):
    """As typed: sizes from the run, positions and attention from the line."""
    options = [option for option in TINY if not option.startswith(("model.", "data.seq_len"))]
    corpus, cache = run.parent / "corpus", run.parent / "cache"
    done = Command(
        "train.py", *options, f"data.paths=[{corpus}]", f"data.cache_dir={cache}", f"hydra.run.dir={tmp_path / 'longer'}",
        f"init_from={run}", "data.seq_len=128", "model.rope_scaling=ntk", "model.rope_factor=4", "attention=dual_chunk",
        "trainer.max_steps=2", *QUICK).wait()
    assert done.returncode == 0, done.stderr
    saved = checkpoint.read(tmp_path / "longer" / "checkpoints" / "last.ckpt")["attnzoo"]
    assert (saved["model"]["dim"], saved["model"]["original_context"], saved["context"]) == (32, 32, 128)
    assert "attention._target_=attnzoo.attention.dual_chunk.DualChunkAttention (was attnzoo.attention.flash.FlashAttention)" in done.stdout
    assert "model.rope_scaling=ntk (was none)" in done.stdout


@pytest.fixture
def one_thread():
    """Steps this small only wait for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_extending_the_context_by_training_beats_the_model_as_it_was(tmp_path, one_thread):
    """Trained on 32 bytes at once, then a little on 128 with interpolated positions: better at 128 than as it was, and than what was
    trained on as many more bytes, 32 at once."""
    base = [*QUICK, "trainer.val_check_interval=1000", "callbacks.throughput=null"]

    def loss_of(name, source, *options):
        options = [*base, *options] if source is None else [*base, f"init_from={tmp_path / source / 'run'}", *options]
        return runner.train(compose_tiny(tmp_path / name, *options))["val/loss"]

    more, longer = "trainer.max_steps=80", "data.seq_len=128"
    at_32 = loss_of("trained", None, "data.batch_size=16", "trainer.max_steps=500")
    extended = loss_of("extended", "trained", longer, more, "model.rope_scaling=linear", "model.rope_factor=4")
    loss_of("trained more", "trained", "data.batch_size=16", more)
    others = [loss_of(f"{name} at 128", name, longer, "trainer.max_steps=1", *STILL) for name in ("trained", "trained more")]
    assert extended < min(others) - 0.2 and min(others) > at_32 + 0.2, (at_32, extended, others)
