"""Synthetic data sets of any size, for tests and for studies with convex losses."""

import numpy as np

from fcjax import checks
from fcjax.data.dataset import Dataset


def classification(
    num_train: int,
    num_test: int = 0,
    *,
    num_features: int = 20,
    num_labels: int = 10,
    spread: float = 1.0,
    seed: int = 0,
) -> Dataset:
    """Makes one Gaussian cloud per label around standard normal centres; `spread` is its standard deviation."""
    num_train, num_test, num_features, seed = _checked(num_train, num_test, num_features, seed)
    num_labels = checks.whole("num_labels", num_labels, 1, _MOST_NUMBERS // num_features)
    spread = checks.scalar("spread", spread, checks.not_negative)
    rng = np.random.default_rng([seed, 10])
    centres = rng.normal(size=(num_labels, num_features))

    def draw(size):
        labels = rng.integers(0, num_labels, size)
        return (centres[labels] + spread * rng.normal(size=(size, num_features))).astype(np.float32), labels

    return _dataset("synthetic classification", draw(num_train), draw(num_test), num_labels, np.int32)


def regression(
    num_train: int, num_test: int = 0, *, num_features: int = 20, noise: float = 0.1, seed: int = 0
) -> Dataset:
    """Makes targets y = w x + noise for standard normal x and w, in float32."""
    num_train, num_test, num_features, seed = _checked(num_train, num_test, num_features, seed)
    noise = checks.scalar("noise", noise, checks.not_negative)
    rng = np.random.default_rng([seed, 11])
    weights = rng.normal(size=num_features)

    def draw(size):
        x = rng.normal(size=(size, num_features))
        return x.astype(np.float32), x @ weights + noise * rng.normal(size=size)

    return _dataset("synthetic regression", draw(num_train), draw(num_test), 0, np.float32)


_MOST_NUMBERS = 2**28  # in a set of samples: 1 GB


def _checked(num_train: int, num_test: int, num_features: int, seed: int) -> tuple[int, int, int, int]:
    num_features = checks.whole("num_features", num_features, 1, _MOST_NUMBERS)
    most = _MOST_NUMBERS // num_features
    num_train = checks.whole("num_train", num_train, 1, most)
    return num_train, checks.whole("num_test", num_test, 0, most), num_features, checks.whole("seed", seed, 0)


def _dataset(name: str, train: tuple, test: tuple, num_labels: int, dtype: type) -> Dataset:
    (train_x, train_y), (test_x, test_y) = train, test
    names = tuple(str(label) for label in range(num_labels))
    return Dataset(name, train_x, train_y.astype(dtype), test_x, test_y.astype(dtype), names, "a seed")
