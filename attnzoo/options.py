"""What can be chosen: for `--help`, where Hydra's own list names every folder for every script, and for misspelt keys. No torch here."""

import contextlib
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError


def register(configs: Path) -> None:
    """Makes `${options:attention}` the names of the files in the folder configs/attention."""

    def options(group: str) -> str:
        return ", ".join(sorted(path.stem for path in (configs / group).glob("*.yaml")))

    OmegaConf.register_new_resolver("options", options, replace=True)


@contextlib.contextmanager
def near_keys() -> Iterator[None]:
    """Adds those like it to Hydra's message about a key that does not exist."""
    try:
        yield
    except SystemExit as leaving:  # Hydra leaves while it handles its error
        error = leaving.__context__.__cause__ if isinstance(leaving.__context__, HydraException) else None
        if isinstance(error, ConfigKeyError | ConfigAttributeError) and error.parent_node is not None:
            near = difflib.get_close_matches(str(error.key), map(str, error.parent_node))
            if not near and error.parent_node._get_parent() is None:
                near = [path for path in _paths(OmegaConf.to_container(error.parent_node)) if path.endswith(f".{error.key}")]
            if near:
                print(f"Keys like it: {', '.join(near)}; --help lists all.", file=sys.stderr)
        raise


def _paths(config: dict, before: str = "") -> Iterator[str]:
    """All keys, dotted, but for Hydra's own."""
    for key, value in config.items():
        yield f"{before}{key}"
        if isinstance(value, dict) and key != "hydra":
            yield from _paths(value, f"{before}{key}.")
