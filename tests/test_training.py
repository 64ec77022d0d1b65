"""A run end to end: what it learns, what it writes, how it fails; and the parts it is made of."""

import json
import os
import shlex
import subprocess
import sys
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hydra.core.override_parser.overrides_parser import OverridesParser
from tiny_run import ROOT, TINY, column, compose_tiny
from torch.utils._python_dispatch import TorchDispatchMode

from attnzoo import runner
from attnzoo.attention import Supports
from attnzoo.attention.flash import FlashAttention
from attnzoo.errors import UserError
from attnzoo.models import from_config
from attnzoo.run.command_line import one_line_errors
from attnzoo.training import report, throughput
from attnzoo.training.loggers import MetricsCSV, has_wandb_key, read_metrics
from attnzoo.training.module import TokenPrediction, predict, summed_loss
from attnzoo_kernels.dispatch import implementations_taken


def test_a_variant_without_packed_sequences_is_told_so_before_data_are_prepared(tmp_path, monkeypatch):
    monkeypatch.setattr(FlashAttention, "supports", Supports(packed=False))
    for model, way_out in (("gpt_tiny", "set data.cross_documents=true"), ("bert_tiny", "use a gpt model")):
        with pytest.raises(ValueError, match=f"attention=flash takes no packed sequences; .*{way_out}"):
            runner.train(compose_tiny(tmp_path, f"model={model}"))
    assert not (tmp_path / "cache").exists()
    assert runner.train(compose_tiny(tmp_path, "data.cross_documents=true"))["val/loss"] > 0


def test_what_needs_no_data_is_told_before_data_are_prepared(tmp_path):
    for options, says in (
        (["model.vocab_size=100"], "model.vocab_size=100 is smaller than the tokenizer's 259"),
        (["batch_tokens=100"], "batch_tokens=100 is not a multiple of 128"),
        (["attention=mla", "model.qk_norm=true"], "model.qk_norm=true: attention=mla has norms of the latents"),
        (["attention=nsa", "attention.block_size=7"], "attention.block_size=7"),
        (["data=continuations", "data.paths=null", "layers=local_global"], "attention.window_size=.*in trees"),
    ):
        with pytest.raises((UserError, ValueError), match=says):
            runner.train(compose_tiny(tmp_path, *options))
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective", [[], ["model=bert_tiny", "data.packed=false"], ["data.cross_documents=true"]], ids=["lm", "mlm", "dense"]
)
def test_a_tiny_run_lowers_the_loss_and_leaves_a_whole_folder(tmp_path, objective):
    cfg = compose_tiny(
        tmp_path, *objective, "model.dim=32", "model.n_layers=2", "model.n_heads=2", "trainer.max_steps=40", "optimizer.lr=1e-2", plot=True
    )
    metrics = runner.train(cfg)

    losses = [float(loss) for loss in column(tmp_path, "train/loss")]
    assert len(losses) == 40 and losses[-1] < 0.8 * losses[0]
    assert metrics["val/loss"] < 0.8 * losses[0]
    assert {"val/ppl", "val/bpb", "perf/tokens_per_second", "train/lr", "train/grad_norm"} <= metrics.keys()
    assert metrics["val/ppl"] == pytest.approx(torch.tensor(metrics["val/loss"]).exp().item())
    run = tmp_path / "run"
    written = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert written == {
        "config.yaml",
        "record.json",
        "metrics.csv",
        "loss.png",
        "sample.txt",
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
    }
    record = json.loads((run / "record.json").read_text())
    assert record["kernels"] == implementations_taken()
    assert record["status"] == "finished" and record["steps"] == 40 and record["results"]["val/loss"] == metrics["val/loss"]
    assert record["versions"]["torch"] == torch.__version__.partition("+")[0] or record["versions"]["torch"] == torch.__version__
    assert len(record["data"]["sha256"]) == 64
    assert "${" not in (run / "config.yaml").read_text()


class MustNotWait(lightning.Callback):
    """Between the fourth step and the ninth, whatever makes the host wait for the GPU raises."""

    n_steps = 0

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step in (3, 8):
            torch.cuda.set_sync_debug_mode("error" if trainer.global_step == 3 else "default")
        self.n_steps += torch.cuda.get_sync_debug_mode() > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "objective",
    [[], ["model=bert_tiny", "data.batching=balanced"], ["optimizer=muon"], ["data=continuations", "data.paths=null", "data.seq_len=64"],
     pytest.param(["trainer.precision=fp8"], marks=pytest.mark.hopper)],
    ids=["lm", "mlm", "muon", "trees", "fp8"]
)
def test_a_step_does_not_wait_for_the_gpu(tmp_path, objective, monkeypatch):
    overrides = ["trainer=gpu", "trainer.precision=bf16-mixed", "trainer.log_every_n_steps=100", "trainer.limit_val_batches=0"]
    cfg = compose_tiny(tmp_path, *overrides, *objective, "callbacks.last=null", "callbacks.best=null", "callbacks.sample=null")
    build, watch = runner.build_trainer, MustNotWait()

    def build_watched(*arguments):
        trainer = build(*arguments)
        trainer.callbacks.append(watch)
        return trainer

    monkeypatch.setattr(runner, "build_trainer", build_watched)
    try:
        runner.train(cfg)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watch.n_steps == 5


def test_validation_runs_after_the_last_step_and_not_twice(tmp_path):
    for steps in (8, 7):
        folder = tmp_path / str(steps)
        runner.train(compose_tiny(folder, f"trainer.max_steps={steps}", "trainer.val_check_interval=4"))
        assert [step for step, _ in read_metrics(folder / "run" / "metrics.csv")["val/loss"]] == [4, steps]


def double(*overrides: str) -> list[str]:
    """In float64 the order of a sum does not show."""
    return ["trainer.precision=64-true", "trainer.max_steps=6", *overrides]


def assert_same_losses(folder, other):
    for name in ("train/loss", "val/loss"):
        values = [torch.tensor([float(loss) for loss in column(f, name)], dtype=torch.float64) for f in (folder, other)]
        torch.testing.assert_close(*values)


def test_accumulation_changes_nothing(tmp_path):
    runner.train(compose_tiny(tmp_path / "one", *double("data.batch_size=8")))
    runner.train(compose_tiny(tmp_path / "four", *double("data.batch_size=2", "batch_tokens=256")))
    assert_same_losses(tmp_path / "four", tmp_path / "one")


@pytest.mark.gpu
def test_accumulation_changes_nothing_with_cuda_graphs(tmp_path):
    losses = []
    for name, *overrides in (("one", "data.batch_size=8", "compile=false"), ("four", "data.batch_size=2", "batch_tokens=256",
                                                                           "compile=reduce-overhead")):
        runner.train(compose_tiny(tmp_path / name, "trainer=gpu", "trainer.max_steps=6", *overrides))
        losses.append(torch.tensor([float(loss) for loss in column(tmp_path / name, "train/loss")]))
    torch.testing.assert_close(*losses, rtol=1e-2, atol=0)


@pytest.mark.parametrize(("mode", "kept"), (("reduce-overhead", False), ("default", True)))
def test_gradients_that_a_graph_would_overwrite_are_copied_before_the_next_micro_batch(tmp_path, monkeypatch, mode, kept):
    """After the first of two micro-batches the gradients lie elsewhere than the backward left them; after the second one they stay."""
    places = []

    def after(module):
        before = [p.grad.data_ptr() for p in module.parameters()]
        own(module)
        places.append([p.grad.data_ptr() == place for p, place in zip(module.parameters(), before, strict=True)])

    own = TokenPrediction.on_after_backward
    monkeypatch.setattr(TokenPrediction, "on_after_backward", after)
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    runner.train(compose_tiny(tmp_path, *double("data.batch_size=4", "batch_tokens=256", "trainer.max_steps=2", f"compile={mode}")))
    assert [set(same) for same in places] == [{kept}, {True}] * 2


@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize(("kind", "chosen", "weighted"), (("GPT", False, False), ("GPT", False, True), ("BERT", True, False)))
def test_fused_loss_is_the_loss(kind, chosen, weighted, padded):
    """Of rows with and without padding, of all tokens and of chosen ones, with a padded vocabulary."""
    torch.manual_seed(0)
    model = from_config({"_target_": f"attnzoo.models.{kind}", "vocab_size": 53, "dim": 32, "n_layers": 1, "n_heads": 2,
                         "train_context": 16, "pad_vocab_multiple": 16}, {"_target_": "attnzoo.attention.flash.FlashAttention"})
    ids, labels = torch.randint(53, (2, 3, 16))
    mask = torch.arange(16) < torch.tensor([16, 5, 9])[:, None]
    batch = {"input_ids": ids, "labels": labels.masked_fill(~mask, -100) if padded else labels}
    batch |= {"attention_mask": mask, "max_tokens": 35} if padded else {}  # more than there are
    batch |= {"logits_at": torch.tensor([1, 18, 30, 47])} if chosen else {}
    batch |= {"weights": torch.rand(48)} if weighted else {}
    results = []
    for fused in (False, True):
        loss, count = summed_loss(model, batch, fused)
        results.append((loss, count, *torch.autograd.grad(loss, tuple(model.parameters()))))
    torch.testing.assert_close(*results)
    inputs = {name: value for name, value in batch.items() if name not in ("input_ids", "labels", "weights")}
    logits, targets = predict(model, batch)
    if padded and not chosen:
        with pytest.raises(ValueError, match="reduction='none': must be 'sum' for padded input without logits_at"):
            model(ids, **inputs, targets=targets, reduction="none")
    else:
        by_token = F.cross_entropy(logits, targets, reduction="none")
        torch.testing.assert_close(model(ids, **inputs, targets=targets, reduction="none"), by_token)


@pytest.mark.parametrize(("chosen", "compiled", "batch", "fused"), [
    (None, False, {}, True), (None, True, {}, True), (None, True, {"logits_at": 0}, False), (None, False, {"logits_at": 0}, True),
    (False, False, {}, False), (True, True, {"logits_at": 0}, True)])
def test_which_steps_fuse_output_layer_and_loss_on_a_gpu(chosen, compiled, batch, fused):
    module = SimpleNamespace(fused_loss=chosen, compiled=compiled, device=torch.device("cuda"), dtype=torch.float32)
    assert TokenPrediction._fuses(module, batch) is fused


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path):
    """And with activation checkpointing as without."""
    one, two = tmp_path / "one", tmp_path / "two"
    runner.train(compose_tiny(one, *double("data.batch_size=8")))
    compose_tiny(two)  # writes the corpus
    command = [
        sys.executable,
        "train.py",
        *TINY,
        *double("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "data.batch_size=2", "batch_tokens=256"),
        "activation_checkpointing=1",
        f"data.paths=[{two / 'corpus'}]",
        f"data.cache_dir={two / 'cache'}",
        f"hydra.run.dir={two / 'run'}",
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert_same_losses(two, one)


@pytest.mark.slow
def test_split_parameters_train_as_whole_ones(tmp_path):
    """On two ranks in the middle of a run that begins and ends on one; a checkpoint does not tell which it is of."""
    one, moved = tmp_path / "one", tmp_path / "moved"
    single = ["data.batch_size=8", "trainer.val_check_interval=2"]
    runner.train(compose_tiny(one, *single, "trainer.max_steps=6"))
    schedule = "optimizer.total_steps=6"
    runner.train(compose_tiny(moved, *single, schedule, "trainer.max_steps=2"))
    options = ["trainer=fsdp2", "trainer.accelerator=cpu", "trainer.devices=2", "data.batch_size=4", schedule]
    command = [sys.executable, "train.py", *TINY, *options, "trainer.max_steps=4", "trainer.val_check_interval=2", "resume=auto",
               f"data.paths=[{moved / 'corpus'}]", f"data.cache_dir={moved / 'cache'}", f"hydra.run.dir={moved / 'run'}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    runner.train(compose_tiny(moved, *single, schedule, "trainer.max_steps=6", "resume=auto"))
    for name in ("train/loss", "val/loss"):
        values = [torch.tensor([float(loss) for loss in column(folder, name)]) for folder in (moved, one)]
        torch.testing.assert_close(*values)


class ScalarReads(TorchDispatchMode):
    """Counts reads of tensor values by the host, each of which waits for a GPU."""

    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_host_reads_no_tensor_between_logs(tmp_path):
    reads = []
    for steps, log_every in ((10, 1000), (30, 1000), (30, 4)):
        cfg = compose_tiny(
            tmp_path / f"{steps}_{log_every}",
            f"trainer.max_steps={steps}",
            "trainer.limit_val_batches=0",
            f"trainer.log_every_n_steps={log_every}",
            "data.cross_documents=true",
            "callbacks.best=null",
            "callbacks.last=null",
            "callbacks.sample=null",
            "callbacks.progress={_target_: attnzoo.training.progress.StepProgress}",
        )
        with ScalarReads() as mode:
            runner.train(cfg)
        reads.append(mode.reads)
    assert reads[0] == reads[1] < reads[2]


def test_a_prompt_of_ones_own_stays_whole_in_the_sample(tmp_path):
    runner.train(compose_tiny(tmp_path, "trainer.max_steps=1", "callbacks.sample.prompt=a prompt of 24 characters"))
    assert (tmp_path / "run" / "sample.txt").read_text().startswith("a prompt of 24 characters│")


def test_early_stopping(tmp_path):
    overrides = ["callbacks=early_stopping", "callbacks.early_stopping.patience=1", "callbacks.early_stopping.min_delta=100"]
    runner.train(compose_tiny(tmp_path, *overrides, "callbacks.progress=null", "trainer.val_check_interval=2"))
    assert len(column(tmp_path, "train/loss")) == 4


def test_a_compiled_step_trains_and_names_no_wrapper(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    runner.train(compose_tiny(tmp_path, "compile=true", "trainer.max_steps=2"))
    assert len(compiled) == 1
    names = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert all(name.startswith("model.") and "_orig_mod" not in name for name in names)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["batch_tokens=200"], "batch_tokens=200 is not a multiple of 128"),
        (["batch_tokens=64"], "take 128"),
        (["batch_tokens=256", "+trainer.accumulate_grad_batches=4"], "batch_tokens=256, trainer.accumulate_grad_batches=4: both say"),
        (["model.vocab_size=100"], "smaller than the tokenizer's 259"),
        (["resume=maybe"], "resume='maybe': must be auto or null"),
        (["seed=-1"], "seed=-1"),
        (["matmul_precision=best"], "matmul_precision='best': must be highest or high or medium"),
        (["batch_tokens=many"], "batch_tokens='many': must be a whole number of at least 1 or null"),
        (["ckpt_path=3"], "ckpt_path=3: must be a text or null"),
        (["compile=fast"], "compile=fast must be false, true, or a mode of torch.compile: default"),
        (["attention.window_size=5"], "attention.window_size=5: must be a list of whole numbers"),
        (["model.norm_eps=small"], "model.norm_eps='small': must be a number"),
        (["optimizer.lr=fast"], "optimizer.lr='fast': must be a number"),
        (["data.tokenizer=3"], "data.tokenizer=3: must be a text"),
        (["data.val_fraction=half"], "data.val_fraction='half': must be a number"),
        (["trainer.precision=17"], "trainer.precision=17: must be 64 or 32"),
        (["ckpt_path=nothing.ckpt"], "nothing.ckpt does not exist"),
        (["model.dim=33"], "not divisible by model.n_heads"),
        (["data.paths=[/does/not/exist]"], "/does/not/exist"),
        (["data.seq_len=1000000"], "data.seq_len=1000000"),
        (["optimizer.schedule=cosin"], "optimizer.schedule='cosin'"),
        (["trainer.max_steps=-1", "trainer.max_epochs=-1"], "trainer.max_steps"),
        pytest.param(["trainer=gpu"], "sees no GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
    ],
)
def test_bad_input_is_one_line_and_exit_code_one(tmp_path, capsys, overrides, says):
    with pytest.raises(SystemExit) as exit, one_line_errors():
        runner.train(compose_tiny(tmp_path, *overrides))
    assert exit.value.code == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and says in line


def test_an_empty_corpus_is_refused(tmp_path, capsys):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("")
    with pytest.raises(SystemExit), one_line_errors():
        runner.train(compose_tiny(tmp_path))
    assert "no text" in capsys.readouterr().err


def test_bugs_keep_their_traceback(monkeypatch):
    with pytest.raises(ValueError), one_line_errors():
        int("not one of our messages")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(UserError), one_line_errors():
        raise UserError("shown in full on demand")


def test_peak_flops_of_an_h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert throughput.peak_flops(torch.device("cuda"), "bf16-mixed") == 989.4e12
    assert throughput.peak_flops(torch.device("cpu"), "bf16-mixed") is None


def test_throughput_counts_real_tokens_and_targets():
    """Of two steps with padded slots, the flops are asked for the real tokens and for the logits that are needed."""
    logged, asked = {}, []
    model = SimpleNamespace(flops=lambda lengths, n_logits: asked.append((lengths, n_logits)) or 1.0)
    module = SimpleNamespace(model=model, device=torch.device("cpu"), is_sharded=True, log_dict=logged.update)
    trainer = SimpleNamespace(global_step=0, log_every_n_steps=2, world_size=2, precision="32", should_stop=False)
    callback = throughput.Throughput()
    callback.on_train_start(trainer, module)
    callback.peak = 1e12
    batch = {"input_ids": torch.zeros(16), "lengths": np.array([7, 5]), "logits_at": torch.zeros(8), "n_targets": 3}
    for step in (1, 2):
        trainer.global_step = step
        callback.on_train_batch_end(trainer, module, None, batch, step)
    assert asked == [([7, 5, 7, 5], 6)]
    assert logged["perf/packing_efficiency"] == 24 / 32
    assert logged["perf/mfu"] * 1e12 * 2 * 24 == pytest.approx(logged["perf/tokens_per_second"])


def test_a_run_may_validate_before_it_trains(tmp_path):
    metrics = runner.train(compose_tiny(tmp_path, "trainer.num_sanity_val_steps=2", "trainer.max_steps=2"))
    assert column(tmp_path, "val/loss") == [str(metrics["val/loss"])] and metrics["perf/tokens_per_second"] > 0


def test_the_learning_rate_in_the_log_is_that_of_the_step(tmp_path):
    rising = ["optimizer.lr=0.03", "schedule=constant", "optimizer.warmup_steps=5"]
    runner.train(compose_tiny(tmp_path, *rising, "trainer.max_steps=5", "trainer.log_every_n_steps=2"))
    assert [float(lr) for lr in column(tmp_path, "train/lr")] == pytest.approx([0.01, 0.02, 0.025])  # of steps 2, 4 and the last
    assert len(set(column(tmp_path, "perf/tokens_per_second"))) == 3
    last = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.03)


def test_a_callback_that_follows_no_metric_of_the_task_is_told_before_the_first_step(tmp_path):
    early = ["callbacks=early_stopping", "callbacks.early_stopping.monitor=val/perplexity"]
    for options, said in ((["callbacks.best.monitor=val/lss"], "callbacks.best.monitor=val/lss"),
                          (early, "callbacks.early_stopping.monitor=val/perplexity")):
        with pytest.raises(UserError, match=f"{said}: must be a metric of task=lm: val/loss, val/ppl, val/accuracy, val/bpb"):
            runner.train(compose_tiny(tmp_path, *options))
    assert not (tmp_path / "run" / "metrics.csv").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["trainer.limit_val_batches=0.01"], "increase the `limit_val_batches` argument"),
        (["trainer.check_val_every_n_epoch=1", "trainer.val_check_interval=100"], "`val_check_interval` (100) must be less than"),
        (["trainer.accelerator=tpu"], "trainer: Requirement 'torch_xla"),
    ],
)
def test_what_lightning_refuses_is_one_line(tmp_path, capsys, options, said):
    with pytest.raises(SystemExit), one_line_errors():
        runner.train(compose_tiny(tmp_path, *options))
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and said in line


def test_validation_may_come_after_a_time(tmp_path):
    metrics = runner.train(compose_tiny(tmp_path, "trainer.val_check_interval=00:00:10:00", "trainer.max_steps=2"))
    assert column(tmp_path, "val/loss") == [str(metrics["val/loss"])]


def test_balanced_masked_batches_train(tmp_path):
    data = ["data.batching=balanced", "data.min_seq_len=8"]
    model = ["model=bert_tiny", "model.dim=32", "model.n_layers=2", "model.n_heads=2"]
    metrics = runner.train(compose_tiny(tmp_path, *model, *data, "trainer.max_steps=20", "optimizer.lr=1e-2"))
    assert metrics["perf/packing_efficiency"] < 1
    losses = [float(loss) for loss in column(tmp_path, "train/loss")]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("batching", "warnings"), [("random", 1), ("balanced", 0)])
def test_many_sizes_of_batches_that_need_a_cuda_graph_each_are_told_once(tmp_path, caplog, monkeypatch, batching, warnings):
    own = TokenPrediction.__init__

    def with_graphs(self, *args, **options):
        own(self, *args, **options)
        self.uses_graphs = True

    monkeypatch.setattr(TokenPrediction, "__init__", with_graphs)
    tiny = ["model=bert_tiny", "model.dim=32", "model.n_layers=1", "model.n_heads=2", "data.min_seq_len=8", "trainer.max_steps=14"]
    runner.train(compose_tiny(tmp_path, *tiny, f"data.batching={batching}"))
    assert caplog.text.count("compile records a CUDA graph for each size of a batch, and 10 sizes were seen") == warnings


def test_metrics_csv_forgets_what_is_done_again(tmp_path):
    for first, last in ((0, 5), (3, 6)):
        log = MetricsCSV(str(tmp_path))
        log.forget_from(first)
        for step in range(first, last):
            log.log_metrics({"train/loss": float(10 * first + step)}, step)
        log.log_metrics({"val/loss": 1.5}, last - 1)
        log.save()
    assert read_metrics(log.path) == {"train/loss": [(1, 0.0), (2, 1.0), (3, 2.0), (4, 33.0), (5, 34.0), (6, 35.0)], "val/loss": [(6, 1.5)]}


def test_wandb_key(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not has_wandb_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret")
    (tmp_path / "netrc").chmod(0o600)
    assert has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_wandb_key()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert has_wandb_key()


@pytest.mark.slow
def test_each_run_is_its_own_wandb_run_and_is_closed(tmp_path, monkeypatch, caplog):
    import wandb

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    caplog.set_level("INFO")
    ids = []
    for name in ("a", "b"):
        runner.train(compose_tiny(tmp_path / name, "logger=wandb", "logger.wandb.group=sweep", "tags=[x]", "trainer.max_steps=2"))
        assert wandb.run is None
        (folder,) = (tmp_path / name / "run" / "wandb").glob("offline-run-*")
        assert f"wandb sync {folder.parent}/offline-run-* uploads it" in caplog.text
        ids.append(json.loads((tmp_path / name / "run" / "record.json").read_text())["wandb"])
        assert folder.name.endswith(ids[-1])
    assert ids[0] != ids[1]


@pytest.mark.parametrize("name", ["a", "my runs/a=b,c[1] 'x' \"y\" (é)"])
def test_the_next_command_can_be_copied_whatever_the_folder_is_called(tmp_path, name):
    checkpoint = tmp_path / name / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    typed = report.end(tmp_path / name, {}).splitlines()[-1].partition("eval.py ")[2]
    (argument,) = shlex.split(typed)
    (override,) = OverridesParser.create().parse_overrides([argument])
    assert (override.get_key_element(), override.value()) == ("ckpt_path", str(checkpoint))
    assert ('"' in argument) == (name != "a")


def test_a_run_of_a_sweep_says_how_all_are_evaluated(tmp_path):
    run = tmp_path / "0_gpt_tiny_flash"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "last.ckpt").touch()
    alone, of_sweep = report.end(run, {}).splitlines(), report.end(run, {}, tmp_path).splitlines()
    assert of_sweep[:-1] == alone and of_sweep[-1].endswith(f"python eval.py runs={tmp_path}")
