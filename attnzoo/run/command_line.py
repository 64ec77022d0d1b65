"""The base of all commands, such as train.py: Hydra, one-line error messages, Ctrl-C without a traceback. No torch here."""

import contextlib
import difflib
import functools
import io
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attnzoo.errors import UserError, like_it
from attnzoo.run.folder import RunFolder

# keys of earlier versions and their present names
RENAMED = {"variants": "readings", "again": "remeasure", "group_by_length": "batching", "balance_lengths": "batching"}
# this project's optional dependencies, by the Hydra option that needs them
EXTRAS = {"optuna": "optuna", "submitit_slurm": "slurm", "submitit_local": "slurm"}


def command(configs: Path, name: str, texts: Sequence[str] = ()) -> Callable[[Callable], Callable[[], None]]:
    """A decorator that turns a function of a config into a command that composes configs/<name>.yaml. In the config,
    `${options:attention}` stands for the names of the files in configs/attention. Errors of the function are printed in one line. The
    function must call `begins` when its work begins. Values of the keys in `texts` are taken literally."""

    def decorate(function: Callable) -> Callable[[], None]:
        @functools.wraps(function)
        def main() -> None:
            signal.signal(signal.SIGINT, _leave)
            let_threads_sleep()
            import hydra

            register_options(configs)
            sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))  # argparse needs them first
            sys.argv[1:] = [as_typed(argument, texts) for argument in sys.argv[1:]]
            try:
                with one_line_compositions():
                    hydra.main(version_base="1.3", config_path=str(configs), config_name=name)(with_one_line_errors)()
            except KeyboardInterrupt:  # raised by a job of a sweep, or between two jobs
                if os.environ.get("HYDRA_FULL_ERROR") == "1":
                    raise
                sys.exit(130)
            except BrokenPipeError:  # `--help | head`
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where Python flushes the rest
                sys.exit(1)

        @functools.wraps(function)
        def with_one_line_errors(cfg: Any) -> Any:
            _show_stderr()
            with one_line_errors():
                return function(cfg)

        return main

    return decorate


def as_typed(argument: str, texts: Sequence[str]) -> str:
    """Quotes the value of an override whose key is in `texts`, so that Hydra takes it literally: `prompt=f(x)` would be a syntax error."""
    key, equals, value = argument.partition("=")
    if key not in texts or not equals:
        return argument
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # no interpolation
    value = re.sub(r"(\\*)('|$)", lambda end: 2 * end[1] + ("\\'" if end[2] else ""), value)
    return f"{key}='{value}'"


def let_threads_sleep() -> None:
    """Makes PyTorch's CPU threads spin for microseconds instead of a millisecond before they sleep. If other programs use the cores too,
    training on a CPU is several times as fast; otherwise it is hardly slower. Must be called before torch is imported."""
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = "10000"


def begins() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, and Python's warnings go into the log, too."""
    logging.captureWarnings(True)
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: Any) -> None:
    """Exits at once and silently, because an interrupted import may hide the exception or raise another one."""
    try:
        remove_refused_run()
    finally:  # even if a module is only half imported
        os._exit(130)


def register_options(configs: Path) -> None:
    """Makes `${options:attention}` the names of the files in the folder configs/attention."""
    from omegaconf import OmegaConf

    def options(group: str) -> str:
        return ", ".join(sorted(path.stem for path in (configs / group).glob("*.yaml")))

    OmegaConf.register_new_resolver("options", options, replace=True)


@contextlib.contextmanager
def one_line_compositions() -> Iterator[None]:
    """Shows Hydra's errors about the command in one line, with similar keys or options. Output to stderr is held back until the work
    begins, because Hydra prints its own error message there."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    sys.stderr = held = io.StringIO()
    try:
        yield
    except SystemExit as leaving:  # Hydra exits while it handles its error
        error = leaving.__context__
        if sys.stderr is held and isinstance(error, HydraException | OmegaConfBaseException | ValueError):
            held.seek(0)
            held.truncate()
            held.write(f"error: {composition_message(error)}\n")
        raise
    finally:
        _show_stderr()


def _show_stderr() -> None:
    if isinstance(held := sys.stderr, io.StringIO):
        sys.stderr = sys.__stderr__
        sys.stderr.write(held.getvalue())


def composition_message(error: Exception) -> str:
    """What is wrong with a command, in one line, with similar names."""
    from hydra.errors import MissingConfigException
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError

    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        extra = f"; pip install -e '.[{EXTRAS[option]}]' brings it" if option in EXTRAS else ""
        like = like_it(difflib.get_close_matches(option, error.options))
        return f"{group}={option}: there is no such option; {like}it must be one of {', '.join(error.options)}{extra}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.parent_node is not None:
        if (name := RENAMED.get(str(cause.key), "")) in cause.parent_node:
            return f"{cause.full_key}: there is no such key; it is called {name} now"
        near = difflib.get_close_matches(str(cause.key), map(str, cause.parent_node))
        if not near and cause.parent_node._get_parent() is None:
            near = [path for path in _paths(OmegaConf.to_container(cause.parent_node)) if path.endswith(f".{cause.key}")]
        # Hydra composes a sweep once without the options that the sweep takes in turn
        is_sweep = not near and not {"-m", "--multirun"}.isdisjoint(sys.argv)
        in_sweep = f"in a sweep over options that have it, write ++{cause.full_key}; " if is_sweep else ""
        return f"{cause.full_key}: there is no such key; {in_sweep}{like_it(near)}--help lists all"
    if str(error).startswith("Config group override must be"):  # Hydra does not say which one
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        override = frame.f_locals["override"]
        group = override.key_or_group
        none = f"; ~{group} takes none" if override.value() is None else ""
        return f"{override.input_line}: must be the name of an option of configs/{group}, or a list of names{none}"
    said = getattr(error, "override", None)  # the override that cannot be parsed
    return (f"{said}: " if said else "") + " ".join(str(error).split())


def _paths(config: dict, before: str = "") -> Iterator[str]:
    """All keys in dotted form, without those inside `hydra`."""
    for key, value in config.items():
        yield f"{before}{key}"
        if isinstance(value, dict) and key != "hydra":
            yield from _paths(value, f"{before}{key}.")


def is_sweep() -> bool:
    """Whether this run is a job of a sweep."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Errors that the user can fix become one line and exit code 1; HYDRA_FULL_ERROR=1 shows the whole traceback."""
    try:
        yield
    except KeyboardInterrupt as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or is_sweep():
            raise
        raise SystemExit(130) from error
    except Exception as error:
        message = user_message(error)
        if message is None or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        if is_sweep():  # the other jobs still run
            from hydra.errors import CompactHydraException

            raise CompactHydraException(message) from error
        remove_refused_run()
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(1) from error


def remove_refused_run() -> None:
    """Removes the run folder of a command that was refused, if it holds only what Hydra writes."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return
    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    if folder != Path.cwd():  # generate.py has no folder of its own
        RunFolder(folder).remove_if_refused(job.output_subdir, f"{job.job.name}.log")


def user_message(error: BaseException) -> str | None:
    """The message of an error that was raised on purpose; None for what looks like a bug."""
    from hydra.errors import InstantiationException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        cause = error.__cause__
        return str(cause) if isinstance(cause, UserError | ValueError | TypeError | NotImplementedError | OSError) else None
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} must be set: add {error.full_key}=... to the command"
    if isinstance(error, OmegaConfBaseException) and error.full_key:  # an interpolation
        return f"{error.full_key}: {str(error).splitlines()[0]}"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which may not be imported yet
        return (
            f"out of GPU memory ({str(error).splitlines()[0]}); lower data.batch_size (batch_tokens keeps the global batch), data.seq_len "
            "or the model's size"
        )
    said = str(error)
    if type(error).__name__ == "MisconfigurationException":  # Lightning's, of its own options
        return " ".join(said.split())
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in said:  # torch has no class for it
        asked = said[max(said.find("you tried"), 0) :].partition(".")[0]
        return f"out of memory ({asked}); lower data.batch_size (batch_tokens keeps the global batch), data.seq_len or the model's size"
    # our own code raises ValueError with a message for the user, and so does Lightning for its options; other ValueErrors are bugs
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    if package == "lightning" and isinstance(error, ValueError):
        return " ".join(said.split())
    ours = package in ("attnzoo", "attnzoo_kernels")
    return said if ours and isinstance(error, ValueError | NotImplementedError | OSError) else None
