"""The cache: decoded arrays beside the sha256 of each, filled by renaming, so that what is there is whole.

Two processes may fill it at once: each writes into a folder of its own, and the last rename stands.
"""

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fcjax.data.fetch import SourceError, sha256, verify


def cache_folder(cache_dir: str | os.PathLike | None) -> Path:
    """The given folder, or FCJAX_CACHE_DIR, or the user's cache folder."""
    if cache_dir is None:
        cache_dir = os.environ.get("FCJAX_CACHE_DIR")
    if cache_dir is None:
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fcjax"
    return Path(cache_dir).expanduser()


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new empty folder that takes the place of the given one when the block ends well, and vanishes otherwise."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".incomplete", dir=folder.parent))
    try:
        yield temporary
        while True:
            try:
                temporary.rename(folder)
                return
            except OSError:  # it exists: move it aside, unless somebody else is just doing so
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
        checksums = {name: sha256(temporary / f"{name}.npy") for name in arrays}
        (temporary / "about.json").write_text(json.dumps({"sha256": checksums, **about}, indent=1))


def open_saved(folder: Path) -> tuple[dict[str, np.ndarray], dict] | None:
    """What `save` has put there; None if it is not there, or, with a warning that names the file, not intact."""
    try:
        about = json.loads((folder / "about.json").read_text())
        for name, checksum in about["sha256"].items():
            verify(folder / f"{name}.npy", checksum)
        return {name: np.load(folder / f"{name}.npy") for name in about["sha256"]}, about
    except FileNotFoundError:
        return None
    except (SourceError, ValueError, KeyError) as error:
        warnings.warn(f"in the cache {folder}: {error}; made again", stacklevel=2)
        return None
