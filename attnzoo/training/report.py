"""The messages that a run prints at its beginning and at its end."""

import logging
import os
import re
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, Timer

from attnzoo.batch import sharing
from attnzoo.run.folder import RunFolder

HARMLESS = (
    ".*exists and is not empty",  # a resumed run
    "The dirpath has changed from",  # a run that goes on in another folder
    "`broadcast_buffers` is deprecated",  # its successor is not in PyTorch 2.11
    ".*LeafSpec.*is deprecated",  # Lightning with a newer PyTorch
)


def quiet() -> None:
    """Silences Lightning's advertisements and remarks, and warnings that need no action. On a terminal without Unicode, characters are
    escaped instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).setLevel(logging.WARNING)
    # these two report SLURM's requeueing and processes that failed
    for name in ("lightning.pytorch.trainer.connectors.signal_connector", "lightning.fabric.strategies.launchers.subprocess_script"):
        logging.getLogger(name).setLevel(logging.INFO)
    for message in HARMLESS:
        warnings.filterwarnings("ignore", message=message)


def beginning(names: list[str], trainer: lightning.Trainer, module: Any, data: Any, run_dir: Path) -> str:
    """What is trained, on which device, and where its files go. names: the options chosen for the config groups."""
    device = trainer.strategy.root_device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    step = data.batch_size * data.seq_len * trainer.world_size // sharing(trainer) * trainer.accumulate_grad_batches
    return (
        f"{' '.join(names)}: {module.n_parameters / 1e6:.2f} M parameters, {step} tokens a step, {trainer.world_size} x {where}, "
        f"{trainer.precision}\n{_in_8_bits(module.record.get('fp8'))}run folder: {_short(run_dir)}"
    )


def _in_8_bits(layers: dict[str, list[str]] | None) -> str:
    """A line that lists the linear layers that compute in 8 bits, once for all blocks."""
    if layers is None:
        return ""
    others = ", ".join([*layers["bfloat16"], "attention itself"])
    return f"fp8 in training steps: {', '.join(layers['fp8'])}; bfloat16 there, and everything in validation and generation: {others}\n"


def nothing_trained(trainer: lightning.Trainer, ckpt_path: Path | None) -> str:
    """Why a run took no step, and what to change. ckpt_path: what it went on from."""
    if 0 < trainer.max_steps <= trainer.global_step:
        limit = "trainer.max_steps"
    elif 0 < (trainer.max_epochs or 0) <= trainer.current_epoch:
        limit = "trainer.max_epochs"
    elif trainer.should_stop and any(isinstance(callback, EarlyStopping) for callback in trainer.callbacks):
        limit = "callbacks.early_stopping.patience"
    elif any(isinstance(callback, Timer) for callback in trainer.callbacks):
        limit = "trainer.max_time"
    else:
        limit = "trainer.limit_train_batches"
    what = "nothing was trained" if ckpt_path is None else f"nothing left to train: {ckpt_path} is at the last step, {trainer.global_step}"
    return f"{what}; raise {limit}"


def end(run_dir: Path, metrics: dict[str, float], sweep: Path | None = None) -> str:
    """The result, a sample, the paths of the files, and the next command. sweep: the folder of the sweep that the run belongs to."""
    lines = []
    if "val/loss" in metrics:
        lines.append(validation(metrics))
    folder = RunFolder(run_dir)
    if (sample := folder.sample).exists():
        lines.append("sample (the model goes on after │, or filled in what is between ‹ and ›):")
        lines += ["    " + visible(line) for line in sample.read_text(encoding="utf-8").splitlines()]
    checkpoint = folder.checkpoint()
    for name, path in (("checkpoint", checkpoint), ("log", folder.metrics), ("plot", folder.plot)):
        if path is not None and path.exists():
            lines.append(f"{name + ':':<12}{_short(path)}")
    lines += unsent(run_dir)
    if checkpoint is not None:
        lines.append(f"next:       python eval.py {override('ckpt_path', _short(checkpoint))}")
        if sweep:
            lines.append(f"the sweep:  python eval.py {override('runs', _short(sweep))}")
    return "\n".join(lines)


def visible(text: str) -> str:
    """The text with control characters, which a terminal would interpret, escaped."""
    return "".join(char if char.isprintable() or char == "\t" else char.encode("unicode_escape").decode() for char in text)


def unsent(run_dir: Path) -> list[str]:
    """A line on how to upload the W&B data of an offline run; no line where there is none."""
    kept = RunFolder(run_dir).wandb
    return [f"W&B:        offline; wandb sync {_short(kept)}/offline-run-* uploads it"] if any(kept.glob("offline-run-*")) else []


def validation(metrics: dict[str, float]) -> str:
    """The result in one line: bits per byte of text where there is some, else the share of right answers."""
    nats = f"{metrics['val/loss']:.4f} nats per token, perplexity {metrics['val/ppl']:.2f}" if "val/ppl" in metrics else None
    if "val/bpb" in metrics:
        return f"validation loss {metrics['val/bpb']:.3f} bits per byte ({nats})"
    return f"validation accuracy {100 * metrics['val/accuracy']:.2f} % (loss {nats or format(metrics['val/loss'], '.4f') + ' nats'})"


def override(key: str, path: str) -> str:
    """key=path as it is typed, quoted where the path has characters that Hydra or the shell would interpret."""
    if re.fullmatch(r"[\w./+-]+", path):
        return f"{key}={path}"
    escaped = path.replace('"', '\\"')
    return shlex.quote(f'{key}="{escaped}"')


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
