"""Checkpoint files: whole or absent, no code run, one clear line for every file that is not what it should be."""

import errno
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from tiny_run import compose_tiny

from attnzoo import checkpoint, runner
from attnzoo.errors import UserError
from attnzoo.run.command_line import one_line_errors


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    runner.train(compose_tiny(folder, "trainer.max_steps=2", "attention=sdpa"))
    return folder / "run" / "checkpoints" / "last.ckpt"


def test_load_rebuilds_the_model(trained):
    loaded = checkpoint.load(trained)
    assert (loaded.task, loaded.context, loaded.overrides) == ("lm", 32, {})
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("täglich")) == "täglich"
    assert loaded.record["attention"]["_target_"] == "attnzoo.attention.sdpa.SDPAttention"
    assert not loaded.model.training
    saved = torch.load(trained, weights_only=True)["state_dict"]
    assert {f"model.{name}" for name in loaded.model.state_dict()} == saved.keys()
    assert all(torch.equal(value, saved[f"model.{name}"]) for name, value in loaded.model.state_dict().items())


def test_overrides_are_merged_or_replace_and_are_reported(trained):
    flash = {"_target_": "attnzoo.attention.flash.FlashAttention", "window_size": [8, 0]}
    loaded = checkpoint.load(trained, attention=flash, model={"rope_scaling": "linear", "rope_factor": 2.0})
    assert type(loaded.model.blocks[0].attention).__name__ == "FlashAttention"
    assert loaded.model.blocks[0].attention.spec.rope_factor == 2.0
    assert loaded.overrides == {"attention": flash, "model": {"rope_scaling": "linear", "rope_factor": 2.0}}
    again = checkpoint.load(trained, model={"dim": 32})
    assert again.overrides == {}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": {"dim": 64}}, "do not fit the model"),
        ({"model": {"n_layers": 1}}, "unknown to the model"),
        ({"model": {"sizes": 3}}, "sizes"),
        ({"attention": {"windows": 3}}, "windows"),
        ({"attention": {"_target_": "attnzoo.attention.flash.FlashAttention", "sinks": True}}, "sinks is missing"),
        ({"attention": {"_target_": "subprocess.run"}}, "outside attnzoo"),
    ],
)
def test_overrides_that_do_not_fit(trained, options, says):
    with pytest.raises(UserError, match=says):
        checkpoint.load(trained, **options)


def test_a_strangers_target_is_not_called(trained, tmp_path):
    content = torch.load(trained, weights_only=True)
    content["attnzoo"]["attention"] = {"_target_": "os.system", "command": f"touch {tmp_path / 'ran'}"}
    torch.save(content, tmp_path / "stranger.ckpt")
    with pytest.raises(UserError, match="outside attnzoo"):
        checkpoint.load(tmp_path / "stranger.ckpt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("state_dict", [1, 2], "state_dict must hold tensors by name"),
        ("state_dict", {"model.token_embedding.weight": "abc"}, "state_dict must hold tensors by name"),
        ("tokenizer", None, "tokenizer=None must be the record of one"),
        ("context", -5, "context=-5 a positive number"),
        ("context", "long", "context='long' a positive number"),
        ("task", "dance", "task='dance' must be one of lm, mlm, classification"),
        ("dim", 2**24, "do not fit the model: token_embedding.weight has shape"),
        ("n_layers", 2**24, "n_layers=16777216 are more than its weights have"),
    ],
)
def test_contents_that_cannot_be_are_refused_by_name(trained, tmp_path, key, value, says):
    content = torch.load(trained, weights_only=True)
    place = content if key in content else content["attnzoo"]["model"] if key in content["attnzoo"]["model"] else content["attnzoo"]
    place[key] = value
    with pytest.raises(UserError, match=says) as error:
        checkpoint.load(write(tmp_path / "x.ckpt", content))
    assert "\n" not in str(error.value)


class Exploit:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def write(path, content):
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    return path


def test_no_pickle_runs_code(tmp_path):
    ran = tmp_path / "ran"
    for name, content in {"zip": {"attnzoo": Exploit(ran)}, "legacy": pickle.dumps(Exploit(ran))}.items():
        with pytest.raises(UserError):
            checkpoint.read(write(tmp_path / f"{name}.ckpt", content))
    assert not ran.exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "damaged or no checkpoint"),
        (b"hello\n", "damaged or no checkpoint|not loaded"),
        (b"PK\x03\x04 not really a zip file", "damaged or no checkpoint"),
        ({"state_dict": {}, "epoch": 3}, "not a checkpoint of attnzoo"),
        ([1, 2], "not a checkpoint of attnzoo"),
        ({"attnzoo": {"format": 99}, "state_dict": {}}, "format 99"),
        ({"attnzoo": {"format": 1, "model": {}, "attention": {}}, "state_dict": {}}, "cannot build the model"),
        ({"attnzoo": {"format": 1}, "state_dict": {}}, "cannot build the model"),
    ],
)
def test_foreign_files_get_one_line(tmp_path, content, says):
    with pytest.raises(UserError, match=says) as error:
        checkpoint.load(write(tmp_path / "x.ckpt", content))
    assert "\n" not in str(error.value) and "x.ckpt" in str(error.value)


def test_half_a_file_is_refused(trained, tmp_path):
    half = tmp_path / "half.ckpt"
    half.write_bytes(trained.read_bytes()[: trained.stat().st_size // 2])
    with pytest.raises(UserError, match="damaged") as error:
        checkpoint.load(half)
    assert "\n" not in str(error.value)


def test_wrong_paths_say_what_is_there(trained, tmp_path):
    with pytest.raises(UserError, match="last.ckpt"):
        checkpoint.load(trained.with_name("first.ckpt"))
    with pytest.raises(UserError, match="is a folder; set ckpt_path=.*checkpoints/best.ckpt"):
        checkpoint.load(trained.parent.parent)
    with pytest.raises(UserError, match="no such folder"):
        checkpoint.load(tmp_path / "a" / "b.ckpt")


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("PytorchStreamWriter failed: file write failed")]
)
def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, error):
    path = tmp_path / "run" / "last.ckpt"
    checkpoint.save({"step": torch.tensor(1)}, path)

    def half_written(content, file):
        file.write(b"half")
        raise error

    monkeypatch.setattr(torch, "save", half_written)
    with pytest.raises(UserError, match="could not save .*last.ckpt: .*(No space left|write failed).*earlier file is unchanged") as caught:
        checkpoint.save({"step": torch.tensor(2)}, path)
    assert "\n" not in str(caught.value)
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]
    assert torch.load(path, weights_only=True) == {"step": torch.tensor(1)}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="limits of file sizes are POSIX")
def test_a_file_that_the_disk_does_not_hold(tmp_path):
    script = f"""
import resource, signal, torch
from attnzoo import checkpoint
checkpoint.save({{"step": torch.tensor(1)}}, {str(tmp_path / "last.ckpt")!r})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
checkpoint.save({{"step": torch.ones(1_000_000)}}, {str(tmp_path / "last.ckpt")!r})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "UserError: could not save" in done.stderr and "the earlier file is unchanged" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True) == {"step": torch.tensor(1)}


def test_a_full_disk_ends_training_with_one_line(tmp_path, monkeypatch, capsys):
    save, calls = torch.save, []

    def full_the_second_time(content, file):
        calls.append(file)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(content, file)

    monkeypatch.setattr(torch, "save", full_the_second_time)
    overrides = ["callbacks.best=null", "callbacks.last.every_n_steps=1", "trainer.max_steps=3"]
    with pytest.raises(SystemExit), one_line_errors():
        runner.train(compose_tiny(tmp_path, *overrides))
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "No space left on device" in line
    assert checkpoint.read(tmp_path / "run" / "checkpoints" / "last.ckpt")["global_step"] == 1


def test_a_moved_checkpoint_needs_nothing_beside_it(trained, tmp_path):
    shutil.copy(trained, tmp_path / "elsewhere.ckpt")
    assert checkpoint.load(tmp_path / "elsewhere.ckpt").context == 32
