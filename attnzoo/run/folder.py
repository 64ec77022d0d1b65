"""The folder of one run. One process claims it, and only a resume opens it again. All its file names are defined here. No torch."""

import contextlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from attnzoo.errors import UserError

LOCK = ".lock"
_held: dict[Path, FileLock] = {}  # the folders that this process has locked


@dataclass(frozen=True)
class RunFolder:
    """The paths of the files in a run folder. Creating this object touches no file; `claim` locks the folder for this process."""

    path: Path

    CHECKPOINTS = "checkpoints"
    CONFIG = "config.yaml"

    @property
    def config(self) -> Path:
        """The complete config of the run, with interpolations resolved."""
        return self.path / self.CONFIG

    @property
    def record(self) -> Path:
        """What the run was and how it ended: versions, commit, command, data, results."""
        return self.path / "record.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def plot(self) -> Path:
        return self.path / "loss.png"

    @property
    def sample(self) -> Path:
        return self.path / "sample.txt"

    @property
    def checkpoints(self) -> Path:
        return self.path / self.CHECKPOINTS

    @property
    def best(self) -> Path:
        """The checkpoint of the lowest validation loss."""
        return self.checkpoints / "best.ckpt"

    @property
    def last(self) -> Path:
        """The checkpoint that a stopped run goes on from."""
        return self.checkpoints / "last.ckpt"

    @property
    def wandb(self) -> Path:
        """What Weights & Biases keeps."""
        return self.path / "wandb"

    @property
    def lock(self) -> Path:
        return self.path / LOCK

    def checkpoint(self, prefer: str = "best") -> Path | None:
        """The preferred one of best.ckpt and last.ckpt if it exists, else the other; None if neither exists."""
        both = (self.best, self.last) if prefer == "best" else (self.last, self.best)
        return next((path for path in both if path.is_file()), None)

    def holds_a_run(self) -> bool:
        return self.record.exists() or self.config.exists() or self.checkpoints.exists()

    def read_record(self) -> dict[str, Any]:
        """The content of record.json; empty where the file is missing, or where a crash left it empty or incomplete."""
        try:
            content = json.loads(self.record.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def claim(self, *, again: bool) -> None:
        """Makes the folder and locks it until `release` or the end of this process.

        again: whether the folder may already hold a run, as for a resume. Raises UserError if another process works in the folder, if it
        holds a run and `again` is False, and if it cannot be written.
        """
        path = self.path.absolute()
        if path not in _held:
            try:
                path.mkdir(parents=True, exist_ok=True)
                lock = FileLock(self.lock)
                lock.acquire(timeout=0)
            except Timeout as error:
                raise UserError(f"another run is at work in {self.path}; wait for its end, or set another hydra.run.dir") from error
            except OSError as error:
                raise UserError(f"the run folder {self.path} cannot be written: {error.strerror}; set another hydra.run.dir") from error
            _held[path] = lock
        if not again and self.holds_a_run():
            self.release()
            raise UserError(f"{self.path} holds a run already; add resume=auto to go on with it, or set another hydra.run.dir")

    def release(self) -> None:
        """Unlocks the folder."""
        if (lock := _held.pop(self.path.absolute(), None)) is not None:
            with contextlib.suppress(OSError):
                self.lock.unlink(missing_ok=True)
            lock.release()

    def remove_if_refused(self, *hydras: str) -> None:
        """Removes the folder if it holds only the files of Hydra (these names) and the lock of `claim`. Unlocks it in any case."""
        with contextlib.suppress(OSError):  # another rank removed it first
            if {path.name for path in self.path.iterdir()} <= {LOCK, *hydras}:
                shutil.rmtree(self.path)
        self.release()


def new_folder(path: Path) -> Path:
    """Creates this folder, or if it exists one with a number appended to the name. No two processes get the same folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, taken = 1, path
    while True:
        try:
            taken.mkdir()
            return taken
        except FileExistsError:
            number += 1
            taken = path.with_name(f"{path.name}_{number}")


def rank() -> int:
    """The rank that the launcher (Lightning, torchrun, SLURM) gives this process. 0 for the process that claims the run folder."""
    if os.environ.get("RANK", "").isdigit():
        return int(os.environ["RANK"])
    names = ("LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
    return max(int(os.environ[name]) if os.environ.get(name, "").isdigit() else 0 for name in names)
