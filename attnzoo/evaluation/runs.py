"""Finds the checkpoints to evaluate: one file, or the runs below the folders of a sweep."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from attnzoo.checkpoint import read
from attnzoo.errors import UserError
from attnzoo.run.folder import RunFolder


@dataclass(frozen=True)
class Run:
    """A training run: its name in the table, its folder, and its checkpoint (None if training wrote none)."""

    name: str
    folder: Path
    checkpoint: Path | None

    @property
    def config_path(self) -> Path:
        return RunFolder(self.folder).config

    def config(self) -> dict[str, Any] | None:
        """The configuration that the run was started with, None if its file is missing, as for a checkpoint outside its run folder.

        Raises UserError for a file that cannot be read, or that is not the configuration of a run.
        """
        if not self.config_path.is_file():
            return None
        try:
            config = OmegaConf.to_container(OmegaConf.load(self.config_path), resolve=True)
        except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
            raise UserError(f"{self.config_path} cannot be read: {' '.join(str(error).split())}") from error
        if "seq_len" not in (config.get("data") or {}):
            raise UserError(f"{self.config_path} is not the config.yaml of a run of attnzoo: it has no data.seq_len")
        return config

    def context(self) -> int:
        """The training context in tokens, from the configuration, or from the checkpoint if there is no configuration.

        Raises UserError if the one that is used cannot be read.
        """
        if (config := self.config()) is not None:
            return config["data"]["seq_len"]
        return read(self.existing_checkpoint())["attnzoo"]["context"]

    def existing_checkpoint(self) -> Path:
        if self.checkpoint is None:
            raise UserError(f"no checkpoint in {self.folder / RunFolder.CHECKPOINTS}: training stopped before it wrote one")
        return self.checkpoint


def find(ckpt_path: str | None, runs: str | Sequence[str] | None, prefer: str = "best") -> list[Run]:
    """The runs to evaluate, without duplicates, named after their folders relative to the folder that all of them share.

    The runs below one given folder are in natural order (run 2 before run 10). If a run folder occurs with several checkpoints, their names
    are appended to its name.

    ckpt_path: a checkpoint file or a run folder. runs: folders of runs, run folders or checkpoint files, in any combination.
    prefer: best or last, for folders that have both. Raises UserError if a path has no run, or if the arguments are wrong.
    """
    if (ckpt_path is None) == (runs is None):
        raise UserError("say what to evaluate: ckpt_path=<file or run folder> for one run, runs=<folder> or runs=[a,b] for several")
    if prefer not in ("best", "last"):
        raise UserError(f"checkpoint={prefer!r} must be best or last")
    given = [ckpt_path] if ckpt_path is not None else [runs] if isinstance(runs, str) else list(runs)
    found = list(dict.fromkeys(pair for path in given for pair in _below(Path(path).expanduser().absolute(), prefer)))
    if not found:
        raise UserError("runs=[]: name at least one folder of runs or checkpoint file")
    folders = [folder for folder, _ in found]
    shared = os.path.commonpath([folder.parent for folder in folders])
    return [
        Run(os.path.relpath(folder, shared) + (f"/{checkpoint.stem}" if folders.count(folder) > 1 else ""), folder, checkpoint)
        for folder, checkpoint in found
    ]


def _below(path: Path, prefer: str) -> list[tuple[Path, Path | None]]:
    """The folder and the checkpoint of every run at or below a path."""
    if path.is_file():
        return [(path.parent.parent if path.parent.name == RunFolder.CHECKPOINTS else path.parent, path)]
    if not path.is_dir():
        raise UserError(f"{path} does not exist; it must be a checkpoint (*.ckpt), a run folder, or a folder of runs")
    folders = []
    for folder, below, files in os.walk(path):
        if RunFolder.CHECKPOINTS in below or RunFolder.CONFIG in files:
            folders.append(Path(folder))
            below.clear()  # folders inside a run folder (W&B's files) are not further runs
        else:
            below[:] = [name for name in below if not name.startswith(".")]
    if not folders:
        raise UserError(f"{path} holds no run: no folder at or below it has {RunFolder.CHECKPOINTS}/ or {RunFolder.CONFIG}")
    return [(folder, RunFolder(folder).checkpoint(prefer)) for folder in sorted(folders, key=_natural)]


def _natural(path: Path) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]
