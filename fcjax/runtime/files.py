"""The cache folder and atomic writes."""

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import platformdirs


def cache_folder(cache_dir: str | os.PathLike | None) -> Path:
    """Returns the given folder, or FCJAX_CACHE_DIR, or the user's cache folder."""
    folder = cache_dir or os.environ.get("FCJAX_CACHE_DIR")
    try:
        return Path(folder or platformdirs.user_cache_dir("fcjax")).expanduser()
    except RuntimeError as error:
        what = folder or "the cache folder"
        raise OSError(f"{what} cannot be found: this user has no home folder; set FCJAX_CACHE_DIR") from error


def write_whole(path: str | os.PathLike, write: Any) -> None:
    """Writes a file atomically: write(part) makes a temporary file next to the path, which then replaces it."""
    path = Path(path)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=_PART + path.suffix)
    os.close(handle)
    try:
        write(part)
        os.chmod(part, 0o666 & ~_UMASK)
        with open(part, "rb") as file:
            os.fsync(file.fileno())  # before renaming, or a power cut may leave an empty file
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


os.umask(_UMASK := os.umask(0))  # the only way to read the umask is to set it

_PART = ".fcjax-part"  # marks temporary files
_ABANDONED_S = 3600.0  # age at which a temporary file counts as abandoned


def remove_abandoned(folder: Path) -> None:
    """Removes temporary files of `write_whole` that killed processes have left."""
    for part in folder.glob(f".*{_PART}*"):
        with contextlib.suppress(OSError):  # such as when it has just been renamed
            if time.time() - part.stat().st_mtime > _ABANDONED_S:
                part.unlink()
