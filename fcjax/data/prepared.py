"""Reads and writes prepared TFDS data sets without TensorFlow.

A stock TFDS builder needs TensorFlow to unpack downloads and encode images. The builder here takes verified arrays and
passes the images to TFDS as PNG files, so it only needs Pillow and array_record.
"""

import contextlib
import io
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from fcjax.data.fetch import sha256
from fcjax.data.known import Splits


def tfds_folder() -> Path:
    """Returns the folder of TFDS's prepared data sets."""
    return Path(os.environ.get("TFDS_DATA_DIR") or os.path.expanduser("~/tensorflow_datasets"))


def find(folder: Path) -> Path | None:
    """Returns the newest array_record version in a data set's folder, or None."""
    versions = [path.parent for path in folder.glob("*/dataset_info.json")]
    versions = [path for path in versions if any(path.glob("*.array_record*"))]
    return max(versions, key=lambda path: [int(n) if n.isdigit() else 0 for n in path.name.split(".")], default=None)


def fingerprint(folder: Path) -> str:
    """Returns an identifier of a prepared data set."""
    return f"{folder} {sha256(folder / 'dataset_info.json')}"


def read(folder: Path) -> tuple[Splits, list[str]]:
    """Returns all images and labels of a prepared data set, in its order, and the names of the labels."""
    import tensorflow_datasets as tfds
    from PIL import Image

    builder = tfds.builder_from_directory(folder)
    features = builder.info.features
    if not {"image", "label"} <= set(features) or not isinstance(features["label"], tfds.features.ClassLabel):
        raise ValueError(f"{folder} is not an image-classification data set: its features are {', '.join(features)}")
    test = next((split for split in ("test", "validation") if split in builder.info.splits), None)
    if "train" not in builder.info.splits or test is None:
        raise ValueError(f"{folder} needs a train and a test split, but has {', '.join(builder.info.splits)}")
    decoders = {"image": tfds.decode.SkipDecoding()}
    splits: Splits = {}
    for split, stored in (("train", "train"), ("test", test)):
        source = builder.as_data_source(split=stored, decoders=decoders)
        images, labels = [], []
        for example in tqdm(source, desc=f"reading {folder.parent.name} {stored}", unit=" images", leave=False):
            with Image.open(io.BytesIO(example["image"])) as image:
                pixels = image.convert("L" if features["image"].shape[-1] == 1 else "RGB")
                images.append(np.asarray(pixels).reshape(image.height, image.width, -1))
            labels.append(example["label"])
        if len({image.shape for image in images}) != 1:
            raise ValueError(f"{folder}: the images of {stored} must all have the same shape")
        splits[split] = np.stack(images), np.asarray(labels)
    return splits, list(features["label"].names)


def prepare(name: str, splits: Splits, label_names: Sequence[str], folder: Path) -> None:
    """Writes arrays as a prepared TFDS data set of that name, in the publisher's order.

    The data set's version becomes a subfolder of `folder`.
    """
    import tensorflow_datasets as tfds
    from PIL import Image
    from tensorflow_datasets.core import registered

    stock = tfds.builder_cls(name)

    with registered.skip_registration():

        class Prepared(stock):  # type: ignore[misc, valid-type]
            def _info(self):
                info = super()._info()
                return tfds.core.DatasetInfo(
                    builder=self,
                    description=info.description,
                    features=info.features,
                    supervised_keys=info.supervised_keys,
                    homepage=info.homepage,
                    citation=info.citation,
                    disable_shuffling=True,
                )

            def _split_generators(self, dl_manager):
                if self.info.features["label"].names != list(label_names):
                    self.info.features["label"].names = label_names
                return {split: self._generate_examples(split, *arrays) for split, arrays in splits.items()}

            def _generate_examples(self, split, images, labels):
                for index, (image, label) in enumerate(zip(images, labels, strict=True)):
                    buffer = io.BytesIO()
                    Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(buffer, "PNG")
                    buffer.seek(0)
                    example = {"image": buffer, "label": int(label)}
                    if "id" in self.info.features:
                        example["id"] = f"{split}_{index:05d}"
                    yield index, example

    Prepared.name = name
    with tempfile.TemporaryDirectory(dir=folder) as temporary, contextlib.redirect_stdout(io.StringIO()):
        builder = Prepared(data_dir=temporary, file_format="array_record")
        builder.download_and_prepare()  # prints that it downloads, which it does not
        written = Path(builder.data_dir)
        written.rename(folder / written.name)
