"""Writes files that are either complete or absent, even if the program is stopped while it writes."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from attnzoo.errors import UserError


def write_whole(path: str | os.PathLike, content: str | bytes | Callable[[IO[bytes]], Any]) -> None:
    """Writes a temporary file in the same folder, syncs it to disk and renames it. An earlier file stays until the new one is complete.

    content: text (written as UTF-8 in any locale), bytes, or a function that is called with the open binary file.
    Raises UserError where the file cannot be written, as on a full disk; an earlier file is then unchanged.
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
        kept = "the earlier file is unchanged" if path.exists() else "no such file was there before"
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
    except OSError:  # some systems cannot open folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
