"""The experiment of Shi et al. Its figures imply what its text omits."""

from __future__ import annotations  # short types in help()

import dataclasses
import difflib
import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from fcjax import checks, data
from fcjax.data import Dataset
from fcjax.learning import batches, compressors, models, updates
from fcjax.learning.updates import OptimizerFactory
from fcjax.simulation.experiment import Experiment
from fcjax.types import Cell, Compressor, Estimates, Outages, Training, World
from fcjax.wireless import outages as known_outages
from fcjax.wireless import radio, worlds

# Per data set: learning rate, budget in s, and the mean and standard deviation that normalise inputs, as in PyTorch's
# examples. With CIFAR-10's true channel statistics, results with two labels per device fall short of the paper's.
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
    model: models.Model | nn.Module | str | None = None,
    learning_rate: ArrayLike | None = None,
    local_steps: int = 5,
    batch_size: int = 128,
    make_optimizer: OptimizerFactory | optax.GradientTransformation = updates.sgd,
    proximal: ArrayLike | None = None,
    server_optimizer: optax.GradientTransformation | None = None,
    world: str | World = "redrawn",
    outages: str | Outages = "none",
    compressor: str | Compressor = "none",
    data_seed: int | None = None,
    **of_cell: Any,
) -> Experiment:
    """Makes the experiment of Shi et al., Sec. IV: 20 devices at random places in a cell of 600 m, and an MLP.

    Some settings are not in the text and were recovered from its figures: the 3GPP macro path loss
    128.1 + 37.6 log10(d/km) dB without fading, inputs normalised as in PyTorch's examples, and local SGD with momentum
    0.9 that is reset each round.

    Args:
      dataset: "mnist", "cifar10", any other name that `fcjax.data.load` accepts, or a data set. Data sets other than
        these two use MNIST's settings, and their own mean and standard deviation to normalise inputs.
      distribution: how the data are distributed among devices: "iid", "l1", "l2", ..., "dir0.1", ...
      num_devices: M.
      radius_m: R.
      budget_s: T; by default 60 s, or 200 s for CIFAR-10.
      seed: the seed of the run, and of the partition.
      momentum: the momentum of local SGD.
      observation_error: alpha, the relative error of the observed channels and computation times.
      hidden: the sizes of the MLP's hidden layers.
      model: replaces the MLP: "cnn", "resnet", a flax module that maps images to logits, or a `fcjax.models.Model`.
      learning_rate: eta; by default 0.01, or 0.02 for CIFAR-10.
      local_steps: tau.
      batch_size: d.
      make_optimizer: replaces local SGD: an optax optimizer, or a function that makes one from `Training`.
      proximal: mu of FedProx; see `fcjax.Training`.
      server_optimizer: an optax optimizer of the server, such as optax.sgd(1.0, momentum=0.9) for FedAvgM. Make it once
        for all runs of a sweep, because each one has its own program.
      world: a name that `fcjax.worlds.by_name` accepts, such as "mobile(speed_m_s=3)", or a `fcjax.World`.
      outages: a name that `fcjax.outages.by_name` accepts, such as "erasures(probability=0.1)", or a `fcjax.Outages`.
      compressor: a name that `fcjax.compressors.by_name` accepts, such as "quantise(bits=4)", or a `fcjax.Compressor`.
      data_seed: the seed of the partition, where it differs from `seed`: runs with several seeds then have the same
        data on each device.
      of_cell: fields of `fcjax.Cell` that differ from the paper's, such as bandwidth_hz. A single `power_w` applies to
        all devices. `upload_bits` follows from model and compressor by default.
    """
    loaded = data.load(dataset) if isinstance(dataset, str) else dataset
    usual = loaded.name in _OF_DATASET
    usual_rate, usual_budget_s, mean, std = _OF_DATASET[loaded.name if usual else "mnist"]
    if not usual:
        mean, std = _statistics(loaded)
    training = Training(
        learning_rate=usual_rate if learning_rate is None else learning_rate,
        momentum=momentum,
        budget_s=usual_budget_s if budget_s is None else budget_s,
        local_steps=checks.whole("local_steps", local_steps, 1),
        batch_size=checks.whole("batch_size", batch_size, 1),
        proximal=proximal,
    )
    world = worlds.by_name(world) if isinstance(world, str) else world
    lossy = known_outages.by_name(outages) if isinstance(outages, str) else outages
    compressor = compressors.by_name(compressor) if isinstance(compressor, str) else compressor
    data_seed = seed if data_seed is None else checks.whole("data_seed", data_seed, 0)
    deal = functools.partial(data.partition.by_name, min_size=training.batch_size)
    parts = deal(distribution, loaded.train_y, num_devices, seed=data_seed)
    if model is None:
        model = models.mlp(loaded.train_x.shape[1:], loaded.num_labels, hidden=hidden, mean=mean, std=std)
    elif isinstance(model, str):
        model = models.by_name(model, loaded.train_x.shape[1:], loaded.num_labels, mean=mean, std=std)
    elif isinstance(model, nn.Module):
        model = _from_flax(model, loaded.train_x.shape[1:], loaded.num_labels, mean, std)
    elif not isinstance(model, models.Model):
        raise ValueError(f"model must be a name, a flax module or a fcjax.models.Model, got {type(model).__name__}")
    if unknown := set(of_cell) - {field.name for field in dataclasses.fields(Cell)}:
        close = difflib.get_close_matches(min(unknown), [field.name for field in dataclasses.fields(Cell)], n=1)
        instead = f"did you mean {close[0]}?" if close else "see help(fcjax.presets.shi2020) and help(fcjax.Cell)"
        raise ValueError(f"shi2020 has no setting {min(unknown)!r}: {instead}")
    fields: dict[str, Any] = {
        "bandwidth_hz": 20e6,
        "noise_psd_w_hz": float(radio.dbm_to_w(-114)) / 1e6,
        "power_w": float(radio.dbm_to_w(10)),
        "upload_bits": _upload_bits(compressor, model),
        "radius_m": radius_m,
        **of_cell,
    }
    if np.ndim(fields["power_w"]) == 0:
        fields["power_w"] = np.full(num_devices, fields["power_w"], np.float32)
    return Experiment(
        cell=Cell(**fields),
        training=training,
        data=batches.LocalData(loaded.train_x, loaded.train_y, parts.indices, parts.sizes),
        test_x=loaded.test_x,
        test_y=loaded.test_y,
        estimates=Estimates(*(np.full(num_devices, value, np.float32) for value in (1.5, 12.0, 2.0))),
        observation_error=observation_error,
        model=model,
        make_optimizer=make_optimizer,
        server_optimizer=server_optimizer,
        world=world,
        outages=lossy,
        compressor=compressor,
    )


def _upload_bits(compressor: Compressor, model: models.Model) -> float:
    if not isinstance(compressor, Compressor):
        raise ValueError(f"compressor must be a name or a fcjax.Compressor, got {type(compressor).__name__}")
    return float(compressor.bits(models.num_parameters(model)))


@functools.lru_cache(maxsize=8)
def _statistics(loaded: Dataset) -> tuple[float, float]:
    """Returns mean and standard deviation of all inputs; bytes count as fractions of 255."""
    scale = 255 if loaded.train_x.dtype == np.uint8 else 1
    mean, std = float(loaded.train_x.mean(dtype=np.float64)), float(loaded.train_x.std(dtype=np.float64))
    return mean / scale, std / scale if std > 0 else 1.0


@functools.lru_cache(maxsize=8)
def _from_flax(module: nn.Module, shape: tuple[int, ...], num_labels: int, mean: float, std: float) -> models.Model:
    """Returns the same model for all runs, so that they share a program."""
    return models.from_flax(module, shape, num_labels, mean=mean, std=std)


def shi2020_as_written(dataset: str | Dataset = "mnist", **settings: Any) -> Experiment:
    """Makes `shi2020` with plain SGD, as in eq. (2)."""
    return shi2020(dataset, **{"momentum": 0.0, **settings})


def centralized(experiment: Experiment, speed: int = 20) -> Experiment:
    """Puts all data on one trainer, the upper bound in the paper's Fig. 4.

    The trainer computes `speed` times as fast as the first device and uploads nothing. In the time of a device's round
    it takes `speed` times as many steps, which count as one round. Use it with the policy `everybody`; in a sweep, the
    name "centralized" stands for both.
    """
    data_, cell, training = experiment.data, experiment.cell, experiment.training
    pooled = np.concatenate([row[:size] for row, size in zip(data_.indices, data_.sizes, strict=True)])
    pooled = np.random.default_rng(0).permutation(pooled)
    first = lambda x: np.ravel(np.asarray(x, np.float32))[0]  # noqa: E731
    per_device = {name: first(getattr(cell, name)) for name in ("cpu_hz", "capacitance")}
    return dataclasses.replace(
        experiment,
        cell=dataclasses.replace(
            cell,
            power_w=np.asarray(cell.power_w, np.float32)[:1],
            upload_bits=np.float32(0),
            access="fdma",
            sample_floor_s=first(cell.sample_floor_s) / speed,
            sample_rate_hz=first(cell.sample_rate_hz) * speed,
            battery_j=np.float32(np.inf),
            download_bits=None,
            **per_device,
        ),
        training=dataclasses.replace(training, local_steps=speed * training.local_steps, proximal=None),
        data=data_._replace(indices=pooled[None], sizes=np.array([pooled.size], np.int32)),
        estimates=Estimates(*(jnp.asarray(x)[:1] for x in dataclasses.astuple(experiment.estimates))),
        server_optimizer=None,
        world=worlds.redrawn(),
        outages=known_outages.none(),
        compressor=compressors.none(),
    )
