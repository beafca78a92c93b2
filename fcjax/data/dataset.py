"""The data set type."""

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test data in memory."""

    name: str
    train_x: np.ndarray  # (N, ...): images are (N, H, W, C) uint8
    train_y: np.ndarray  # (N,): labels are int32
    test_x: np.ndarray
    test_y: np.ndarray
    label_names: tuple[str, ...]  # empty for regression
    source: str  # origin
    sha256: Mapping[str, str] = dataclasses.field(default_factory=dict)  # checksums of the verified original files

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.train_x.shape[1:]))
        return (
            f"Dataset({self.name}: {len(self.train_y)} training and {len(self.test_y)} test samples of {shape}, "
            f"{self.num_labels} labels, from {self.source})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles a loaded data set by name."""
        return LOADED.get(self) or super().__reduce_ex__(protocol)

    def __post_init__(self):
        for split, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            if len(x) != len(y):
                raise ValueError(f"{split}_x and {split}_y must have the same length, got {len(x)} and {len(y)}")
            if self.label_names and len(y) and not (y.min() >= 0 and y.max() < self.num_labels):
                raise ValueError(
                    f"{split}_y must be labels from 0 to {self.num_labels - 1}, got {y.min()} to {y.max()}"
                )

    @property
    def num_labels(self) -> int:
        return len(self.label_names)


# For each loaded data set, the function and arguments that load it again.
LOADED: weakref.WeakKeyDictionary[Dataset, tuple[Callable[..., Dataset], tuple]] = weakref.WeakKeyDictionary()
