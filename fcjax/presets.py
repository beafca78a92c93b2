"""Settings by name. `shi2020` is the paper's, with what its text leaves out as its figures imply it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fcjax import data
from fcjax.data import Dataset
from fcjax.learning import batches, models
from fcjax.simulation.experiment import Experiment
from fcjax.types import Cell, Estimates, Training
from fcjax.wireless import radio

# Per data set: learning rate, budget in s, and the mean and standard deviation by which inputs are normalised, those of
# PyTorch's examples. With CIFAR-10's true channel statistics instead, cells with two labels a device fall short.
_OF_DATASET = {"mnist": (0.01, 60.0, 0.1307, 0.3081), "cifar10": (0.02, 200.0, 0.5, 0.5)}


def shi2020(
    dataset: str | Dataset = "mnist",
    *,
    distribution: str = "l1",
    num_devices: int = 20,
    radius_m: ArrayLike = 600.0,
    budget_s: ArrayLike | None = None,
    seed: int = 0,
    momentum: ArrayLike = 0.9,
    observation_error: ArrayLike = 0.0,
    hidden: Sequence[int] = (64,),
) -> Experiment:
    """Sec. IV of Shi et al.: 20 devices in a cell of 600 m, placed anew in every round, and an MLP of 64 hidden units.

    Not in the text, and recovered from its figures: the 3GPP macro path loss 128.1 + 37.6 log10(d/km) dB without
    fading, inputs normalised as in PyTorch's examples, and local SGD with momentum 0.9, begun anew each round.

    Args:
      dataset: "mnist" or "cifar10" (or any other that `fcjax.data.load` knows, with MNIST's settings), or a data set.
      distribution: of the data among devices: "iid", "l1", "l2", ..., "dir0.1", ...
      num_devices: M.
      radius_m: R.
      budget_s: T; by default 60 s, on CIFAR-10 200 s.
      seed: of the partition.
      momentum: of local SGD.
      observation_error: alpha, the relative error with which the base station sees channels and computation times.
      hidden: sizes of the hidden layers.
    """
    loaded = data.load(dataset) if isinstance(dataset, str) else dataset
    learning_rate, default_budget_s, mean, std = _OF_DATASET.get(loaded.name, _OF_DATASET["mnist"])
    training = Training(
        learning_rate=learning_rate, momentum=momentum, budget_s=default_budget_s if budget_s is None else budget_s
    )
    parts = data.partition.by_name(distribution, loaded.train_y, num_devices, seed=seed, min_size=training.batch_size)
    model = models.mlp(loaded.train_x.shape[1:], loaded.num_labels, hidden=hidden, mean=mean, std=std)
    return Experiment(
        cell=Cell(
            bandwidth_hz=20e6,
            noise_psd_w_hz=float(radio.dbm_to_w(-114)) / 1e6,
            power_w=np.full(num_devices, float(radio.dbm_to_w(10)), np.float32),
            upload_bits=models.upload_bits(model),
            radius_m=radius_m,
        ),
        training=training,
        data=batches.LocalData(loaded.train_x, loaded.train_y, parts.indices, parts.sizes),
        test_x=loaded.test_x,
        test_y=loaded.test_y,
        estimates=Estimates(*(np.full(num_devices, value, np.float32) for value in (1.5, 12.0, 2.0))),
        observation_error=observation_error,
        model=model,
    )


def shi2020_as_written(dataset: str | Dataset = "mnist", **settings: Any) -> Experiment:
    """The same with plain SGD, as eq. (2) has it."""
    return shi2020(dataset, **{"momentum": 0.0, **settings})


def centralised(experiment: Experiment, speed: int = 20) -> Experiment:
    """All data on one trainer that computes `speed` times as fast as the first device and uploads nothing.

    In the time of a device's round it takes `speed` times as many steps; a round is that many steps here.
    """
    data_, cell, training = experiment.data, experiment.cell, experiment.training
    pooled = np.concatenate([row[:size] for row, size in zip(data_.indices, data_.sizes, strict=True)])
    pooled = np.random.default_rng(0).permutation(pooled)
    first = lambda x: np.ravel(np.asarray(x, np.float32))[0]  # noqa: E731
    return dataclasses.replace(
        experiment,
        cell=dataclasses.replace(
            cell,
            power_w=np.asarray(cell.power_w, np.float32)[:1],
            upload_bits=np.float32(0),
            sample_floor_s=first(cell.sample_floor_s) / speed,
            sample_rate_hz=first(cell.sample_rate_hz) * speed,
        ),
        training=dataclasses.replace(training, local_steps=speed * training.local_steps),
        data=data_._replace(indices=pooled[None], sizes=np.array([pooled.size], np.int32)),
        estimates=Estimates(*(jnp.asarray(x)[:1] for x in dataclasses.astuple(experiment.estimates))),
    )
