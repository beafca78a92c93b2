"""Data sets as arrays in memory: real ones through TFDS without TensorFlow, and synthetic ones.

`load` returns uint8 images and integer labels. It first looks for a data set that TFDS has prepared on this machine,
and reads it in TFDS's order. MNIST, Fashion-MNIST and CIFAR-10 can also come from the cache or from the original files,
in the publisher's order. The original files are supplied by hand, or fetched from the publisher or a verified mirror.
They are cached, and so is a decoded copy, so that the next load is fast. `prepare` also writes TFDS records.
"""

import difflib
import functools
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fcjax.data import known, partition, prepared, store, synthetic
from fcjax.data.dataset import LOADED, Dataset
from fcjax.data.fetch import AlteredError, SourceError, verify
from fcjax.runtime import files

__all__ = ["DataError", "Dataset", "load", "partition", "prepare", "synthetic"]


class DataError(RuntimeError):
    """No source delivered a data set; the message lists the sources and says what to do."""


def load(name: str, cache_dir: str | os.PathLike | None = None) -> Dataset:
    """Loads a data set and fetches it if it is not on this machine yet.

    Args:
      name: "mnist", "fashion_mnist", "cifar10", or the name of any image-classification data set that TFDS has prepared
        on this machine in the array_record format. A config follows a slash, as in "emnist/letters".
      cache_dir: the folder for fetched and decoded data; by default FCJAX_CACHE_DIR or the user's cache folder.

    Raises:
      ValueError: if the name is unknown.
      DataError: if no source delivers the data set.
    """
    if not isinstance(name, str) or not re.fullmatch(r"\w+(/\w[\w.-]*)?", name):  # it becomes a path
        raise ValueError(f"the name of a data set must be a word, such as {', '.join(known.NAMES)}, got {name!r}")
    cache = files.cache_folder(cache_dir)
    own = prepared.find(prepared.tfds_folder() / name)
    origin = prepared.fingerprint(own) if own else "fcjax"
    decoded = cache / "decoded" / name
    found = store.open_saved(decoded)
    if found is not None and found[1]["origin"] == origin:
        return _dataset(name, *found, cache_dir)
    splits, about = _obtain(name, own, cache)
    arrays = {
        f"{split}_{part}": array
        for split, (images, labels) in splits.items()
        for part, array in (("x", images), ("y", labels.astype(np.int32)))
    }
    dataset = _dataset(name, arrays, about, cache_dir)
    try:
        store.save(decoded, arrays, {**about, "origin": origin})
    except OSError as error:
        warnings.warn(f"{name} could not be kept in the cache {cache}: {error}", stacklevel=2)
    return dataset


@functools.lru_cache(maxsize=2)
def _load_once(name: str, cache_dir: str | None) -> Dataset:
    """Lets all runs of a worker share one copy."""
    return load(name, cache_dir)


def _dataset(name: str, arrays: dict[str, np.ndarray], about: dict, cache_dir: str | os.PathLike | None) -> Dataset:
    label_names = tuple(about["label_names"])
    made = Dataset(name=name, **arrays, label_names=label_names, source=about["source"], sha256=about["files"])
    LOADED[made] = _load_once, (name, None if cache_dir is None else os.fspath(cache_dir))
    return made


def prepare(name: str, cache_dir: str | os.PathLike | None = None) -> Path:
    """Writes a data set as TFDS records, which TFDS reads without TensorFlow; returns their folder.

    Args:
      name: "mnist", "fashion_mnist" or "cifar10".
      cache_dir: as in `load`.
    """
    if name not in known.NAMES:
        raise ValueError(f"fcjax can prepare {', '.join(known.NAMES)}, got {name!r}")
    records = files.cache_folder(cache_dir) / "tfds" / name
    if store.read_manifest(records) is None:
        loaded = load(name, cache_dir)
        splits = {"train": (loaded.train_x, loaded.train_y), "test": (loaded.test_x, loaded.test_y)}
        with store.replacing(records) as folder:
            prepared.prepare(name, splits, loaded.label_names, folder)
            store.write_manifest(folder, {"source": loaded.source, "files": dict(loaded.sha256)})
    found = prepared.find(records)
    assert found is not None
    return found


def _obtain(name: str, own: Path | None, cache: Path) -> tuple[known.Splits, dict]:
    """Reads a data set from TFDS's folder or from the original files, which it caches."""
    if own is None and name not in known.NAMES:
        close = difflib.get_close_matches(name, known.NAMES, n=1)
        question = f", did you mean {close[0]}?" if close else ":"
        raise ValueError(
            f"unknown data set {name!r}{question} fcjax can fetch {', '.join(known.NAMES)}; any other must have been "
            f"prepared by TFDS, in the array_record format, below {prepared.tfds_folder()}"
        )
    if own is not None:
        try:
            return _read(own)
        except ValueError:
            raise
        except Exception as error:  # TFDS, array_record and Pillow each raise their own kinds
            if name not in known.NAMES:
                raise DataError(f"{own} cannot be read: {error}") from error
            warnings.warn(f"{own} cannot be read: {error}; skipped", stacklevel=3)
    return _fetch(name, cache)


def _read(folder: Path) -> tuple[known.Splits, dict]:
    splits, label_names = prepared.read(folder)
    return splits, {"source": f"TFDS, {folder.parent.name} {folder.name}", "files": {}, "label_names": label_names}


def _fetch(name: str, cache: Path) -> tuple[known.Splits, dict]:
    """Reads the original files from the first source that delivers them intact, and keeps them in the cache."""
    dataset = known.known(name)
    originals = cache / "raw" / name
    failures = []

    def from_cache(folder: Path) -> None:
        missing = [file for file in dataset.files if not (originals / file).exists()]
        if missing:
            raise SourceError(f"{originals} has no {', '.join(missing)}")
        for file in dataset.files:
            os.symlink(originals / file, folder / file)

    for source, get in {"original files in the cache": from_cache, **dataset.sources}.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            try:
                get(folder)
                for file, checksum in dataset.files.items():
                    verify(folder / file, checksum)
                splits = dataset.read(folder)
            except AlteredError as error:
                warnings.warn(f"{source}: {error}; skipped", stacklevel=4)
                failures.append(f"  {source}: {error}")
                continue
            except Exception as error:  # a damaged archive or image raises many kinds
                failures.append(f"  {source}: {str(error) or type(error).__name__}")
                continue
            if get is not from_cache:
                _keep(folder, dataset.files, originals)
            return splits, {"source": source, "files": dataset.files, "label_names": dataset.label_names}
    raise DataError(
        "\n".join(
            [
                f"no source delivered the data set {name}:",
                *failures,
                f"To supply it by hand, put {', '.join(dataset.files)} into {originals}.",
            ]
        )
    )


def _keep(folder: Path, names: Iterable[str], originals: Path) -> None:
    """Copies original files into the cache."""
    try:
        originals.mkdir(parents=True, exist_ok=True)
        for name in names:
            files.write_whole(originals / name, functools.partial(shutil.copyfile, folder / name))
    except OSError as error:
        warnings.warn(f"{originals.name} could not be kept in the cache: {error}", stacklevel=5)
