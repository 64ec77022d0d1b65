"""`trainer.context_parallel`: devices that share sequences train as one, and what does not go with it is refused."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import context_runs
import lightning
import pytest
import torch
from commands import Command, as_torchrun
from lightning.fabric.plugins.environments import LightningEnvironment
from tiny_run import ROOT, TINY, column, compose_tiny, write_checkpoint

from attnzoo import runner
from attnzoo.errors import UserError
from attnzoo.models import from_config
from attnzoo.run import checks, ranks

FLASH = "attnzoo.attention.flash.FlashAttention"


@pytest.mark.slow
def test_four_ranks_train_as_one(tmp_path):
    """Two groups of two and one of four; dense, packed, accumulated, with activations computed again; GPT and BERT."""
    for name, (sharing, options) in context_runs.RUNS.items():
        rows = [f"data.batch_size={4 // sharing}"]
        options = [option for option in options if not option.startswith("batch_tokens")]
        rows = ["data.batch_size=2"] if name == "accumulated" else rows
        runner.train(compose_tiny(tmp_path, *context_runs.COMMON, *options, *rows, f"run_dir={tmp_path}/one-{name}/run"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context_runs.run(4, tmp_path, port)
    for name in context_runs.RUNS:
        for metric in ("train/loss", "val/loss", "train/grad_norm"):
            found, wanted = ([float(value) for value in column(tmp_path / folder, metric)] for folder in (name, f"one-{name}"))
            assert len(found) == len(wanted) > 0
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


GPUS = torch.cuda.device_count()


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("options", (["trainer=ddp"], ["trainer=fsdp"], ["trainer=fsdp2"], ["trainer=ddp", "trainer.context_parallel={}"],
                                     ["trainer=fsdp2", "trainer.context_parallel={}"]), ids=" ".join)
def test_gpus_train_as_one(tmp_path, options):
    """40 steps in float32, without the shorter mantissas of tensor cores, on two GPUs and on all."""
    sharing = "trainer.context_parallel={}" in options
    common = ["data.seq_len=600", "trainer.max_steps=40", "trainer.val_check_interval=40", "optimizer.lr=1e-3", "model.dim=64",
              "batch_tokens=2400", "matmul_precision=highest"]

    def losses(devices: int, *options: str) -> torch.Tensor:
        folder = tmp_path / str(devices)
        run = arguments(folder, "trainer.accelerator=gpu", f"trainer.devices={devices}", *options, *common,
                        f"hydra.run.dir={folder / 'run'}")
        done = subprocess.run([sys.executable, "train.py", *run], cwd=ROOT, timeout=300, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return torch.tensor([[float(value) for value in column(folder, metric)] for metric in ("train/loss", "train/grad_norm")])

    wanted = losses(1, "trainer=gpu", "data.batch_size=4")
    for devices in dict.fromkeys((2, GPUS)):
        found = losses(devices, *(option.format(devices) for option in options), f"data.batch_size={4 if sharing else 4 // devices}")
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0, msg=lambda text, n=devices: f"{n} GPUs differ from one: {text}")


@pytest.mark.parametrize("options, reason", (
    (["compile=true"], "does not go with compile; set compile=false"),
    (["model=bert_tiny", "data.packed=false"], "does not go with data.packed=false; set data.packed=true"),
    (["data=continuations", "data.paths=null"], "does not go with data=continuations; set data=text"),
    (["trainer.context_parallel=0"], "trainer.context_parallel=0: must be a whole number of at least 1"),
))
def test_what_does_not_go_with_it_is_refused(tmp_path, options, reason):
    with pytest.raises((UserError, ValueError), match=reason):
        checks.check_training(compose_tiny(tmp_path, "trainer.context_parallel=2", *options))


class Die(lightning.Callback):
    """Kills a rank behind the first step, while the other one waits for nothing that would tell it so."""

    def __init__(self, rank: int):
        self.rank = rank

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)


def arguments(folder, *overrides: str) -> list[str]:
    """Of train.py, for a run of two processes in folder/run."""
    compose_tiny(folder)  # writes the corpus
    return [*TINY, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "callbacks.sample=null", "callbacks.plot=null",
            f"data.paths=[{folder / 'corpus'}]", f"data.cache_dir={folder / 'cache'}", f"hydra.run.dir={folder / 'run'}", *overrides]


@pytest.mark.slow
@pytest.mark.parametrize("rank, says", ((1, r"\[rank: 1\] Child process .* terminated with code -9"),
                                        (0, "error: the first process of the run has ended")))
def test_a_rank_that_dies_ends_all(tmp_path, rank, says):
    """Whatever the other one waits for. The pipes are closed when both have ended."""
    die = f"+callbacks.die={{_target_: test_several_gpus.Die, rank: {rank}}}"
    places = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "train.py", *arguments(tmp_path, "trainer.context_parallel=2", die)], cwd=ROOT, timeout=90,
                          capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": places})
    assert done.returncode == -signal.SIGKILL and re.search(says, done.stderr), done.stderr


def test_a_broken_connection_names_the_rank_that_failed():
    with subprocess.Popen(["sleep", "100"]) as process:
        connector = SimpleNamespace(cluster_environment=LightningEnvironment())
        strategy = SimpleNamespace(launcher=SimpleNamespace(procs=[process]))
        trainer = SimpleNamespace(world_size=2, local_rank=0, _accelerator_connector=connector, strategy=strategy)
        with pytest.raises(UserError, match="rank 1 was ended by SIGKILL, so that the run ends here"), ranks.end_together(trainer):
            process.kill()
            raise RuntimeError("Connection closed by peer")


@pytest.mark.slow
def test_ranks_that_were_told_different_things_are_refused(tmp_path):
    """Of a group and of plain data parallelism, where they would wait for one another without end."""
    for name, one, other in (("trainer.context_parallel", "1", "2"), ("data.batch_size", "4", "8")):
        started = [Command("train.py", *arguments(tmp_path / name, f"{name}={value}"), environment=environment)
                   for value, environment in zip((one, other), as_torchrun(2), strict=True)]
        for done in [rank.wait(60) for rank in started]:
            assert done.returncode == 1
            assert f"error: {name}: must be the same on all ranks, got {one} on rank 0, {other} on rank 1" in done.stderr


@pytest.mark.slow
def test_processes_that_evaluate_other_things_are_refused(tmp_path):
    write_checkpoint(tmp_path / "some.ckpt")
    started = [Command("eval.py", f"ckpt_path={tmp_path}/some.ckpt", f"evaluation.lengths=[{length}]", "accelerator=cpu",
                       f"hydra.run.dir={tmp_path}/eval", environment=environment)
               for length, environment in zip((600, 700), as_torchrun(2), strict=True)]
    for done in [rank.wait(60) for rank in started]:
        assert done.returncode == 1
        assert "error: evaluation.lengths: must be the same on all ranks, got [600] on rank 0, [700] on rank 1" in done.stderr


def test_devices_must_be_groups(tmp_path):
    with pytest.raises(UserError, match="context_parallel=2 must divide the 1 devices of the run"):
        runner.train(compose_tiny(tmp_path, "trainer.context_parallel=2"))


@pytest.mark.parametrize("kind, model, attention, packed, reason", (
    ("BERT", {}, {"_target_": "attnzoo.attention.sdpa.SDPAttention"}, True, "cannot read packed sequences by attention=sdpa; set trainer."),
    ("GPT", {}, {"_target_": "attnzoo.attention.sdpa.SDPAttention"}, True, "set data.cross_documents=true"),
    ("GPT", {"attention_dropout": 0.1}, {"_target_": "attnzoo.attention.mla.MLAttention"}, True,
     "attention=mla needs model.attention_dropout=0, got 0.1"),
    ("GPT", {"rope_scaling": "dynamic", "rope_factor": 2.0}, {"_target_": FLASH}, True, "rope_scaling=dynamic looks at the longest"),
    ("BERT", {"positions": "alibi"}, {"_target_": FLASH}, True, "does not go with model.positions=alibi in a bidirectional model"),
    ("BERT", {}, {"_target_": FLASH, "window_size": [4, 4]}, True, r"window_size=\[-1,-1\] in a bidirectional model, got \[4, 4\]"),
    ("BERT", {}, {"_target_": "attnzoo.attention.dual_chunk.DualChunkAttention"}, True, "dual_chunk goes with it in a causal model only"),
))
def test_layers_that_do_not_go_with_it_are_refused(kind, model, attention, packed, reason):
    built = from_config({"_target_": f"attnzoo.models.{kind}", "vocab_size": 19, "dim": 16, "n_layers": 1, "n_heads": 2,
                         "train_context": 512, **model}, attention)
    with pytest.raises(ValueError, match=f"trainer.context_parallel: .*{reason}"):
        built.blocks[0].attention.check_context_parallel(packed)
