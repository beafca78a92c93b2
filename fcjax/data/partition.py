"""Partitions of a data set among devices, as indices into one shared array.

`by_name` makes a partition from its name: "iid"; "l2", the paper's non-iid case of two label shards per device;
"l2-shuffled", two shards that may have the same label; "dir0.1", Dirichlet proportions. The parts are disjoint, and
determined by the seed.
"""

import dataclasses
import re
from typing import Any

import numpy as np

from fcjax import checks


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """The first sizes[i] entries of row i are the samples of device i, in random order; the rest repeats them."""

    indices: np.ndarray  # (M, N) int32, into the training set; N is the largest size or more
    sizes: np.ndarray  # (M,) int32, D_i

    @property
    def num_devices(self) -> int:
        return len(self.sizes)

    def of_device(self, device: int) -> np.ndarray:
        return self.indices[device, : self.sizes[device]]

    def label_counts(self, labels: np.ndarray) -> np.ndarray:
        """Returns how many samples of each label each device has, (M, labels)."""
        num_labels = int(labels.max()) + 1
        return np.stack([np.bincount(labels[self.of_device(i)], minlength=num_labels) for i in range(self.num_devices)])


def by_name(
    name: str, labels: np.ndarray, num_devices: int, *, seed: int, equal: bool = True, min_size: int = 1
) -> Partition:
    """Makes a partition by name, such as "iid", "l2" or "dir0.1".

    Dirichlet sizes are unequal, and drawn again until all devices have `min_size` samples.
    """
    if not isinstance(name, str):
        raise ValueError(f"a distribution must be a name, such as iid, got {name!r}")
    if name == "iid":
        return iid(labels, num_devices, seed=seed, equal=equal)
    if match := re.fullmatch(r"l([0-9]+)(-shuffled)?", name):
        distinct = match[2] is None
        return label_shards(labels, num_devices, int(match[1]), seed=seed, equal=equal, distinct=distinct)
    if match := re.fullmatch(r"dir(\d*\.?\d+(?:e-?\d+)?)", name):
        return dirichlet(labels, num_devices, float(match[1]), seed=seed, min_size=min_size)
    raise ValueError(
        f"unknown distribution {name!r}: use iid, l1, l2, ... (labels per device), l2-shuffled, ... (shards per "
        "device, whose labels may repeat) or dir0.1, dir1, ... (alpha)"
    )


def iid(
    labels: np.ndarray, num_devices: int, *, seed: int, equal: bool = True, sizes: np.ndarray | None = None
) -> Partition:
    """Makes a random partition: of equal sizes, dropping the remainder, or of all samples, or of the given sizes."""
    labels, num_devices, seed = _checked(labels, num_devices, seed)
    rng = np.random.default_rng([seed, 0])
    order = rng.permutation(labels.size)
    if sizes is not None:
        sizes = np.asarray(sizes)
        if sizes.shape != (num_devices,) or not np.issubdtype(sizes.dtype, np.integer) or sizes.min() < 1:
            raise ValueError(f"sizes must be {num_devices} integers of 1 or more, one per device, got {sizes}")
        if sizes.sum() > labels.size:
            raise ValueError(f"sizes must sum to at most {labels.size}, the number of samples, got {sizes.sum()}")
        return _partition(np.split(order[: sizes.sum()], np.cumsum(sizes)[:-1]), rng)
    if equal:
        order = order[: labels.size // num_devices * num_devices]
    return _partition(np.array_split(order, num_devices), rng)


def label_shards(
    labels: np.ndarray,
    num_devices: int,
    labels_per_device: int,
    *,
    seed: int,
    equal: bool = True,
    distinct: bool = True,
) -> Partition:
    """Makes the paper's non-iid partition: each label is cut into shards, and each device gets l shards.

    The M l shards are spread over the labels as evenly as possible. If `equal`, all shards have the same size, as large
    as the scarcest label allows; otherwise all samples of the labels with a shard are used. If `distinct`, each device
    gets l different labels, as in the paper; otherwise the shards are shuffled and dealt, and a device may get several
    shards of one label. For l = 1 the two are the same.
    """
    labels, num_devices, seed = _checked(labels, num_devices, seed)
    present, counts = np.unique(labels, return_counts=True)
    labels_per_device = checks.whole("labels_per_device", labels_per_device, 0)
    if not 1 <= labels_per_device <= present.size:
        raise ValueError(
            f"a device can have 1 to {present.size} distinct labels of this data set, got l = {labels_per_device}"
        )
    rng = np.random.default_rng([seed, 1])
    remaining, left = np.zeros(present.size, int), num_devices * labels_per_device
    while left:
        # Adds a shard to each label that has a sample for it and, if labels are distinct, a device without it.
        eligible = np.flatnonzero(remaining < (np.minimum(counts, num_devices) if distinct else counts))
        if not eligible.size:
            raise ValueError(
                f"{num_devices} devices of {labels_per_device} labels need {num_devices * labels_per_device} shards, "
                f"but the data have samples for {remaining.sum()}: use fewer devices or fewer labels per device"
            )
        added = rng.permutation(eligible)[:left]
        remaining[added] += 1
        left -= added.size
    shard_size = int(np.min(counts[remaining > 0] // remaining[remaining > 0]))
    shards = []
    for label, num_shards in zip(present, remaining, strict=True):
        order = rng.permutation(np.flatnonzero(labels == label))
        shards.append(np.array_split(order[: shard_size * num_shards] if equal else order, max(num_shards, 1)))
    if not distinct and labels_per_device > 1:
        dealt = [shard for label, number in enumerate(remaining) for shard in shards[label][:number]]
        hands = rng.permutation(len(dealt)).reshape(num_devices, labels_per_device)
        return _partition([np.concatenate([dealt[shard] for shard in hand]) for hand in hands], rng)
    devices = []
    for _ in range(num_devices):
        # Takes the labels with the most shards left, so that enough distinct ones remain; ties are random.
        chosen = np.lexsort((rng.random(present.size), -remaining))[:labels_per_device]
        devices.append(np.concatenate([shards[label][remaining[label] - 1] for label in chosen]))
        remaining[chosen] -= 1
    return _partition(devices, rng)


def dirichlet(
    labels: np.ndarray, num_devices: int, alpha: float, *, seed: int, min_size: int = 1, max_tries: int = 1000
) -> Partition:
    """Divides each label's samples in proportions drawn from Dirichlet(alpha): all samples, in unequal sizes.

    Draws again until every device has `min_size` samples.
    """
    labels, num_devices, seed = _checked(labels, num_devices, seed)
    if not (alpha > 0 and np.isfinite(alpha)):
        raise ValueError(f"alpha must be positive and finite, got {alpha}")
    min_size = checks.whole("min_size", min_size, 0)
    if num_devices * min_size > labels.size:
        raise ValueError(
            f"{num_devices} devices with at least {min_size} samples each need more than the {labels.size} samples: "
            "use fewer devices or a smaller min_size"
        )
    rng = np.random.default_rng([seed, 2])
    by_label = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    for _ in range(max_tries):
        cuts = [
            np.round(np.cumsum(rng.dirichlet(np.full(num_devices, alpha)))[:-1] * order.size).astype(int)
            for order in by_label
        ]
        parts = [np.split(order, cut) for order, cut in zip(by_label, cuts, strict=True)]
        devices = [np.concatenate(part) for part in zip(*parts, strict=True)]
        if min(device.size for device in devices) >= min_size:
            return _partition(devices, rng)
    raise ValueError(
        f"alpha = {alpha} leaves some of {num_devices} devices with fewer than {min_size} samples in all of "
        f"{max_tries} draws: use a larger alpha, fewer devices, or a smaller min_size"
    )


def plot(partition: Partition, labels: np.ndarray, ax: Any = None) -> Any:
    """Plots how many samples of each label each device has; returns the axes."""
    import matplotlib.pyplot as plt

    counts = partition.label_counts(labels)
    if ax is None:
        _, ax = plt.subplots(figsize=(1.5 + 0.35 * counts.shape[1], 1.2 + 0.22 * counts.shape[0]), layout="constrained")
    image = ax.imshow(counts, aspect="auto", cmap="Blues", vmin=0)
    ax.set(xlabel="label", ylabel="device")
    for axis in (ax.xaxis, ax.yaxis):
        axis.get_major_locator().set_params(integer=True)
    ax.figure.colorbar(image, ax=ax, label="samples")
    return ax


def _checked(labels: np.ndarray, num_devices: int, seed: int) -> tuple[np.ndarray, int, int]:
    labels = np.asarray(labels)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels must be one integer per sample, got shape {labels.shape} of {labels.dtype}")
    if labels.size and labels.min() < 0:
        raise ValueError(f"labels must be 0 or more, got {labels.min()}")
    num_devices = checks.whole("num_devices", num_devices, 1, labels.size, why=", the number of samples")
    return labels, num_devices, checks.whole("seed", seed, 0)


def _partition(devices: list[np.ndarray], rng: np.random.Generator) -> Partition:
    sizes = np.array([device.size for device in devices], np.int32)
    # Programs depend on the length of the rows. With a power of 2, partitions of other seeds mostly share them.
    length = sizes.max() if sizes.min() == sizes.max() else 1 << int(sizes.max() - 1).bit_length()
    rows = [np.resize(rng.permutation(device), length) for device in devices]
    return Partition(np.stack(rows).astype(np.int32), sizes)
