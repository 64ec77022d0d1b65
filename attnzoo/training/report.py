"""What a run says on the screen, at its beginning and at its end."""

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

from attnzoo.batch import sharing
from attnzoo.run.folder import RunFolder

HARMLESS = (
    ".*exists and is not empty",  # a resumed run
    "The dirpath has changed from",  # a run that goes on in another folder
    "`broadcast_buffers` is deprecated",  # its successor is not in PyTorch 2.11
    ".*LeafSpec.*is deprecated",  # Lightning with a newer PyTorch
)


def quiet() -> None:
    """Leave out what is no news: Lightning's advertisements and remarks, and warnings that call for no action. A terminal that knows no
    Unicode is shown escapes instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).setLevel(logging.WARNING)
    # SLURM's requeueing, and a process that failed
    for name in ("lightning.pytorch.trainer.connectors.signal_connector", "lightning.fabric.strategies.launchers.subprocess_script"):
        logging.getLogger(name).setLevel(logging.INFO)
    for message in HARMLESS:
        warnings.filterwarnings("ignore", message=message)


def beginning(names: list[str], trainer: lightning.Trainer, module: Any, data: Any, run_dir: Path) -> str:
    """What is trained, where, and where its files go. names: what was chosen on the command line."""
    device = trainer.strategy.root_device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    step = data.batch_size * data.seq_len * trainer.world_size // sharing(trainer) * trainer.accumulate_grad_batches
    return (
        f"{' '.join(names)}: {module.n_parameters / 1e6:.2f} M parameters, {step} tokens a step, {trainer.world_size} x {where}, "
        f"{trainer.precision}\n{_in_8_bits(module.record.get('fp8'))}run folder: {_short(run_dir)}"
    )


def _in_8_bits(layers: dict[str, list[str]] | None) -> str:
    """Which linear layers compute so, of all blocks in one."""
    if layers is None:
        return ""
    others = ", ".join([*layers["bfloat16"], "attention itself"])
    return f"fp8 in training steps: {', '.join(layers['fp8'])}; bfloat16 there, and everything in validation and generation: {others}\n"


def end(run_dir: Path, metrics: dict[str, float], sweep: Path | None = None) -> str:
    """The result, a sample, where things lie, and what to do next. sweep: the folder of the runs that this is one of."""
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
    """With control characters, which a terminal would obey, in their escaped form."""
    return "".join(char if char.isprintable() or char == "\t" else char.encode("unicode_escape").decode() for char in text)


def unsent(run_dir: Path) -> list[str]:
    """How to upload what W&B kept in a run folder without a connection; no line where there is nothing."""
    kept = RunFolder(run_dir).wandb
    return [f"W&B:        offline; wandb sync {_short(kept)}/offline-run-* uploads it"] if any(kept.glob("offline-run-*")) else []


def validation(metrics: dict[str, float]) -> str:
    """The result in one line: bits per byte of text where there is some, else the share of right answers."""
    nats = f"{metrics['val/loss']:.4f} nats per token, perplexity {metrics['val/ppl']:.2f}" if "val/ppl" in metrics else None
    if "val/bpb" in metrics:
        return f"validation loss {metrics['val/bpb']:.3f} bits per byte ({nats})"
    return f"validation accuracy {100 * metrics['val/accuracy']:.2f} % (loss {nats or format(metrics['val/loss'], '.4f') + ' nats'})"


def override(key: str, path: str) -> str:
    """key=path as it is typed: quoted for Hydra and for the shell where the path has characters that they would read."""
    if re.fullmatch(r"[\w./+-]+", path):
        return f"{key}={path}"
    escaped = path.replace('"', '\\"')
    return shlex.quote(f'{key}="{escaped}"')


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
