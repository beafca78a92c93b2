"""The cache: decoded arrays with their sha256, in folders that are replaced atomically.

Two processes may fill it at the same time: each writes its own folder, and the last rename wins.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from fcjax.data.fetch import AlteredError, sha256, verify

_ABANDONED_S = 24 * 3600.0


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yields a new folder that replaces the given one if the block succeeds, and is removed otherwise."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for abandoned in folder.parent.glob(f"{folder.name}.*.incomplete"):  # left by a killed process
        with suppress(FileNotFoundError):  # it has just been renamed
            if time.time() - abandoned.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(abandoned, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".incomplete", dir=folder.parent))
    umask = os.umask(0)
    os.umask(umask)
    temporary.chmod(0o777 & ~umask)  # mkdtemp's folders are private, but a cache may be shared
    try:
        yield temporary
        while True:
            try:
                temporary.rename(folder)
                return
            except OSError as error:  # it exists: move it aside, unless another process is doing so
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".old", dir=folder.parent))
                try:
                    folder.rename(aside / "old")
                except FileNotFoundError:
                    pass
                finally:
                    shutil.rmtree(aside, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save(folder: Path, arrays: dict[str, np.ndarray], about: dict) -> None:
    with replacing(folder) as temporary:
        for name, array in arrays.items():
            np.save(temporary / f"{name}.npy", array)
        write_manifest(temporary, about)


def open_saved(folder: Path) -> tuple[dict[str, np.ndarray], dict] | None:
    """Reads what `save` wrote; returns None if it is missing or, with a warning, damaged."""
    verified = _verified(folder)
    if verified is None:
        return None
    about, names = verified
    return {Path(name).stem: np.load(folder / name) for name in names}, about


MANIFEST = "about.json"


def write_manifest(folder: Path, about: dict) -> None:
    """Writes a manifest of a folder: `about`, the sha256 of each file, and a digest of the manifest itself."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    content = {"about": about, "sha256": {str(path.relative_to(folder)): sha256(path) for path in files}}
    (folder / MANIFEST).write_text(json.dumps({**content, "digest": _digest(content)}, indent=1))


def read_manifest(folder: Path) -> dict | None:
    """Returns the `about` of a manifest; None if there is no manifest or, with a warning, if anything is damaged."""
    verified = _verified(folder)
    return None if verified is None else verified[0]


def _verified(folder: Path) -> tuple[dict, list[str]] | None:
    """Returns the `about` of a manifest and the names of its files if all are intact, else None."""
    try:
        content = json.loads((folder / MANIFEST).read_text())
        if content.pop("digest", None) != _digest(content):
            raise AlteredError(f"{MANIFEST} is altered")
        for name, checksum in content["sha256"].items():
            if not (folder / name).exists():
                raise AlteredError(f"{name} is missing")
            verify(folder / name, checksum)
        return content["about"], list(content["sha256"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (AlteredError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(f"in the cache {folder}: {error}; rebuilding it", stacklevel=2)
        return None


def _digest(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
