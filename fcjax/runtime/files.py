"""Files and folders: the cache, and files that are written whole or not at all."""

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any


def cache_folder(cache_dir: str | os.PathLike | None) -> Path:
    """The given folder, or FCJAX_CACHE_DIR, or the user's cache folder."""
    if cache_dir is None:
        cache_dir = os.environ.get("FCJAX_CACHE_DIR") or None
    if cache_dir is None:
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fcjax"
    try:
        return Path(cache_dir).expanduser()
    except RuntimeError as error:
        raise OSError(f"{cache_dir} cannot be found, since this user has no home: set FCJAX_CACHE_DIR") from error


def write_whole(path: str | os.PathLike, write: Any) -> None:
    """Lets write(path) make a file beside the path that then takes its place, so that there is never half a file."""
    path = Path(path)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=_PART + path.suffix)
    os.close(handle)
    try:
        write(part)
        os.chmod(part, 0o666 & ~_UMASK)
        with open(part, "rb") as file:
            os.fsync(file.fileno())  # before its name: after a power cut there would be a file without its content
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


os.umask(_UMASK := os.umask(0))  # there is no other way to ask

_PART = ".fcjax-part"  # in the names of files that are being written
_ABANDONED_S = 3600.0  # after which a file that is being written is nobody's any more


def remove_abandoned(folder: Path) -> None:
    """Removes what a process that was killed has left of `write_whole`."""
    for part in folder.glob(f".*{_PART}*"):
        with contextlib.suppress(OSError):  # such as when it has just become what it was to be
            if time.time() - part.stat().st_mtime > _ABANDONED_S:
                part.unlink()
