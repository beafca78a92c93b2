"""Data sets as arrays in memory: real ones through TFDS without TensorFlow, and synthetic ones.

`load` gives uint8 images and integer labels, in the publisher's order. It takes, in this order, the decoded copy in the
cache; a data set that TFDS has prepared on this machine; and for MNIST, Fashion-MNIST and CIFAR-10 the original files,
from the publisher or from a verified mirror, which it keeps as TFDS would have prepared them.
"""

import os
import tarfile
import tempfile
import warnings
import zipfile
from pathlib import Path

import numpy as np

from fcjax.data import known, partition, prepared, store, synthetic
from fcjax.data.dataset import Dataset
from fcjax.data.fetch import SourceError, verify

__all__ = ["DataError", "Dataset", "load", "partition", "synthetic"]


class DataError(RuntimeError):
    """No source of a data set delivered it; the message says which were tried and what to do."""


def load(name: str, cache_dir: str | os.PathLike | None = None) -> Dataset:
    """Loads a data set, fetching it if it is not on this machine yet.

    Args:
      name: "mnist", "fashion_mnist", "cifar10", or the name of any image-classification data set that TFDS has prepared
        on this machine in the array_record format; a config follows a slash, as in "emnist/letters".
      cache_dir: where fetched and decoded data are kept; by default FCJAX_CACHE_DIR or the user's cache folder.

    Raises:
      ValueError: if there is no data set of that name.
      DataError: if no source delivered it.
    """
    cache = store.cache_folder(cache_dir)
    decoded = cache / "decoded" / name
    found = store.open_saved(decoded)
    if found is None:
        splits, about = _obtain(name, cache)
        arrays = {
            f"{split}_{part}": array
            for split, (images, labels) in splits.items()
            for part, array in (("x", images), ("y", labels.astype(np.int32)))
        }
        store.save(decoded, arrays, about)
        found = arrays, about
    arrays, about = found
    return Dataset(name=name, **arrays, label_names=tuple(about["label_names"]), source=about["source"])


def _obtain(name: str, cache: Path) -> tuple[known.Splits, dict]:
    folder = prepared.find(name, prepared.data_dirs(cache))
    if folder is None and name not in known.NAMES:
        searched = " or ".join(str(path) for path in prepared.data_dirs(cache))
        raise ValueError(
            f"unknown data set {name!r}: fcjax can fetch {', '.join(known.NAMES)}; "
            f"any other must have been prepared by TFDS, in the array_record format, below {searched}"
        )
    if folder is not None:
        try:
            splits, label_names = prepared.read(folder)
            return splits, {"source": f"TFDS, {folder.parent.name} {folder.name}", "label_names": label_names}
        except (OSError, RuntimeError) as error:
            if cache not in folder.parents or name not in known.NAMES:
                raise
            warnings.warn(f"{folder} cannot be read: {error}; made again", stacklevel=2)
    splits, source = _fetch(name, cache)
    with store.replacing(cache / "tfds" / name) as folder:
        prepared.prepare(name, splits, folder)
    return splits, {"source": source, "label_names": [str(label) for label in range(10)]}


def _fetch(name: str, cache: Path) -> tuple[known.Splits, str]:
    """The splits from original files: supplied by hand, or from the first source that delivers them intact."""
    dataset = known.known(name)
    by_hand = cache / "raw" / name
    failures = []

    def supplied(folder: Path) -> None:
        missing = [file for file in dataset.files if not (by_hand / file).exists()]
        if missing:
            raise SourceError(f"{by_hand} has no {', '.join(missing)}")
        for file in dataset.files:
            os.symlink(by_hand / file, folder / file)

    for source, get in {"files supplied by hand": supplied, **dataset.sources}.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            try:
                get(folder)
                for file, checksum in dataset.files.items():
                    verify(folder / file, checksum)
                return dataset.read(folder), source
            except (SourceError, OSError, KeyError, ValueError, zipfile.BadZipFile, tarfile.TarError) as error:
                failures.append(f"  {source}: {error}")
    raise DataError(
        "\n".join(
            [
                f"no source delivered the data set {name}:",
                *failures,
                f"To supply it by hand, put {', '.join(dataset.files)} into {by_hand}.",
            ]
        )
    )
