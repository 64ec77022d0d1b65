"""Claims run folders before Hydra writes in them, because Hydra would open an existing folder as if it were new. Imports no torch."""

import atexit
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from attnzoo.errors import UserError
from attnzoo.run.config import choices
from attnzoo.run.folder import RunFolder, new_folder, rank


class ClaimRunFolder(Callback):
    """Claims the run folder before Hydra writes its log and `.hydra` in it.

    A folder that is named after the time gets a number if another command took the name in the same second. A folder that the user names
    is refused if it holds a run, except for a resume; eval.py may reuse its folder. In names, `${chosen:model,attention}` stands for the
    options chosen for these config groups, joined by underscores.
    """

    def __init__(self):
        OmegaConf.register_new_resolver("chosen", lambda *groups: "_".join(choices(*groups)), replace=True)

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        if "run_dir" not in config:  # generate.py writes nothing
            return
        HydraConfig.instance().set_config(config)  # Hydra itself does so later, but the folder's name refers to it
        folder, stamped = Path(config.hydra.run.dir), _is_stamped(config.hydra.run)
        if (number := rank()) > 0:
            # with an outer launcher (srun, torchrun) every rank names the folder after its own clock
            folder = Path(own_folder()) if stamped else folder
            name = config.hydra.job.name if config.hydra.job.name.startswith("train_ddp") else f"{config.hydra.job.name}_rank_{number}"
            _change(config, {"run.dir": str(folder), "job.name": name, "output_subdir": None})
            return
        try:
            _check_resume(config, stamped)
            folder = _new(folder) if stamped else folder
            RunFolder(folder).claim(again=opens_again(config, folder))
        except UserError as error:
            _leave(error)
        _change(config, {"run.dir": str(folder)})

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        HydraConfig.instance().set_config(config)
        if not _is_stamped(config.hydra.sweep):
            return
        try:
            _check_resume(config, stamped=True)
            folder = str(_new(Path(config.hydra.sweep.dir)))
        except UserError as error:
            _leave(error)
        # each job composes its configuration again, from these overrides
        _change(config, {"sweep.dir": folder, "overrides.hydra": [*config.hydra.overrides.hydra, f"hydra.sweep.dir='{folder}'"]})


def opens_again(config: DictConfig, folder: Path) -> bool:
    """Whether this command may open a folder that holds a run: eval.py, and train.py when it goes on with that run."""
    if "resume" not in config:
        return True
    checkpoint = config.get("ckpt_path")
    inside = isinstance(checkpoint, str) and Path(checkpoint).expanduser().absolute().is_relative_to(folder.absolute())
    return config.resume == "auto" or inside


def _is_stamped(node: DictConfig) -> bool:
    """Whether `hydra.run` or `hydra.sweep` names its folder after the time, so that a later command cannot find it by this name."""
    return "${now:" in str(OmegaConf.to_container(node, resolve=False)["dir"])


def _check_resume(config: DictConfig, stamped: bool) -> None:
    if stamped and config.get("resume") == "auto" and OmegaConf.is_interpolation(config, "run_dir"):
        raise UserError(
            "resume=auto needs a run folder that stays the same, and this one is named after the time; set hydra.run.dir=<folder> "
            "(in a sweep hydra.sweep.dir=<folder>) to the same folder in every start"
        )


def _new(folder: Path) -> Path:
    try:
        return new_folder(folder)
    except OSError as error:
        raise UserError(f"the run folder {folder} cannot be made: {error.strerror}; set another hydra.run.dir") from error


def _change(config: DictConfig, values: dict[str, Any]) -> None:
    with read_write(config.hydra), open_dict(config.hydra):
        for key, value in values.items():
            OmegaConf.update(config.hydra, key, value)


def own_folder() -> str:
    """A temporary folder for what a rank other than the first writes. It is deleted when the process ends."""
    folder = tempfile.mkdtemp(prefix="attnzoo_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _leave(error: UserError) -> None:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(1) from error  # Hydra turns any other exception into a warning
