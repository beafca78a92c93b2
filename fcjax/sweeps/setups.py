"""What the results keep of experiments: the cell and the training of each run, and the labels on each device.

`setup` is a JSON text per run, and `samples` counts the training samples by run, device and label. They let a report
derive when each device finished its upload, and show how the data were distributed.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import xarray as xr

from fcjax.data.partition import Partition
from fcjax.simulation.experiment import Experiment
from fcjax.sweeps.jobs import Job
from fcjax.sweeps.results import described
from fcjax.types import Cell, Training


class Setup(NamedTuple):
    """What the physics of a run depend on, besides its history."""

    cell: Cell
    training: Training  # without the numbers of samples
    asks_norms: bool  # whether the policy decides once all devices have computed


def setup_of(text: str, num_devices: int) -> Setup:
    """Reads the variable `setup` of a run."""
    found = json.loads(text)
    fields = found["cell"]
    arrays = {name: np.asarray(value, np.float32) for name, value in fields.items() if isinstance(value, list)}
    power_w = arrays.get("power_w", np.full(num_devices, fields["power_w"], np.float32))
    return Setup(Cell(**fields | arrays | {"power_w": power_w}), Training(**found["training"]), found["asks_norms"])


def assign(dataset: xr.Dataset, jobs: Sequence[Job], samples: Mapping[Job, np.ndarray]) -> xr.Dataset:
    """Adds `setup` and `samples` to the results of jobs."""
    shape = len(jobs), dataset.sizes["device"], max(counts.shape[1] for counts in samples.values())
    filled = np.zeros(shape, np.int32)
    for row, job in zip(filled, jobs, strict=True):
        counts = samples[job]
        row[: counts.shape[0], : counts.shape[1]] = counts
    texts = [_text(job.experiment, job.policy.asks_norms) for job in jobs]
    added = {"setup": ("run", np.array(texts)), "samples": (("run", "device", "label"), filled)}
    return described(dataset.assign(added))


def samples_of(jobs: Sequence[Job]) -> dict[Job, np.ndarray]:
    """Counts the training samples of each device and label, (M, labels)."""
    return {job: _counts(job.experiment) for job in jobs}


def _counts(experiment: Experiment) -> np.ndarray:
    data = experiment.data
    if np.asarray(data.y).dtype.kind not in "iu":  # a regression has no labels
        return np.asarray(data.sizes)[:, None]
    return Partition(np.asarray(data.indices), np.asarray(data.sizes)).label_counts(np.asarray(data.y))


def _text(experiment: Experiment, asks_norms: bool) -> str:
    training = dataclasses.replace(experiment.training, num_samples=1.0)
    parts = {"cell": vars(experiment.cell), "training": vars(training)}
    return json.dumps(jax.tree.map(_plain, parts) | {"asks_norms": asks_norms})


def _plain(value: Any) -> Any:
    """Returns a number to 7 digits, and an array as a list, or as a number if all devices have the same."""
    if isinstance(value, str | int):
        return value
    numbers = [float(f"{number:.7g}") for number in np.ravel(np.asarray(value, float))]
    return numbers if len(set(numbers)) > 1 else numbers[0]
