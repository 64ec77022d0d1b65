"""Files that are whole or absent, whatever stops the program that writes them."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from attnzoo.errors import UserError


def write_whole(path: str | os.PathLike, content: str | bytes | Callable[[IO[bytes]], Any]) -> None:
    """Writes the file beside its name, waits for the disk and renames it: the file that was there stays until the new one is whole.

    content: text, which becomes UTF-8 whatever the locale, bytes, or a function that is given the open binary file.
    Raises UserError where the file cannot be written, as on a full disk; the file that was there is then untouched.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # PyTorch's zip writer turns some OSErrors into RuntimeErrors
        _remove(part)
        kept = "the file that was there is whole" if path.exists() else "no such file was there before"
        raise UserError(f"could not save {path}: {_reason(error, path)}; {kept}. Make room or set another hydra.run.dir") from error
    except BaseException:
        _remove(part)
        raise


def _remove(part: Path) -> None:
    with contextlib.suppress(OSError):
        part.unlink(missing_ok=True)


def _reason(error: Exception, path: Path) -> str:
    cause = error if isinstance(error, OSError) else error.__context__
    if isinstance(cause, OSError):
        return cause.strerror or str(cause)
    try:
        free = f" ({shutil.disk_usage(path.parent).free / 1e9:.1f} GB free)"
    except OSError:
        free = ""
    return str(error).splitlines()[0] + free


def _sync_folder(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # not every system opens folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
