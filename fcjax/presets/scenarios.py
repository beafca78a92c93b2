"""Scenarios beyond the paper's cell. Each changes `shi2020` in one respect and takes all its other settings.

What is drawn for a device (its speed, power, battery and amount of data) depends only on the seed of the data and on
the device, so all policies meet the same devices.
"""

from __future__ import annotations  # short types in help()

import dataclasses
from typing import Any

import numpy as np

from fcjax import checks
from fcjax.data import Dataset
from fcjax.presets.paper import shi2020
from fcjax.simulation.experiment import Experiment
from fcjax.wireless.energy import computing_energy


def heterogeneous(
    dataset: str | Dataset = "mnist", *, decades: float = 1.0, seed: int = 0, num_devices: int = 20, **settings: Any
) -> Experiment:
    """Makes `shi2020` with unequal devices: speed, power and the amount of data span a decade each.

    Speed and power are log-uniform and independent, with the paper's values in the middle. A slow device takes more
    cycles per sample, and so more energy. A device keeps a log-uniform part of the samples that the distribution gives
    it, and at least a batch. T. Nishio and R. Yonetani simulate clients
    that compute 10 to 100 samples per second and own 100 to 1000 samples ("Client Selection for Federated Learning with
    Heterogeneous Resources in Mobile Edge", IEEE International Conference on Communications, 2019).

    Args:
      dataset: as in `shi2020`.
      decades: the range of each quantity, from least to largest.
      seed: as in `shi2020`.
      num_devices: M.
      settings: further arguments of `shi2020`, such as `distribution`.
    """
    decades = checks.scalar("decades", decades, checks.not_negative)
    rng = _of_devices(settings.get("data_seed"), seed, 0)
    slowness, power, part = 10 ** (decades * rng.uniform(-0.5, 0.5, (3, checks.whole("num_devices", num_devices, 1))))
    made = shi2020(dataset, seed=seed, num_devices=num_devices, **settings)
    cell, data = made.cell, made.data
    sizes = np.asarray(data.sizes) * part * 10 ** (-0.5 * decades)
    return dataclasses.replace(
        made,
        cell=dataclasses.replace(
            cell,
            power_w=np.float32(cell.power_w * power),
            sample_floor_s=np.float32(cell.sample_floor_s * slowness),
            sample_rate_hz=np.float32(cell.sample_rate_hz / slowness),
        ),
        data=data._replace(sizes=np.maximum(sizes, made.training.batch_size).astype(np.int32)),
    )


def energy(
    dataset: str | Dataset = "mnist", *, rounds: float = 20.0, seed: int = 0, num_devices: int = 20, **settings: Any
) -> Experiment:
    """Makes `shi2020` with batteries that matter: a device can pay for the computation of about 20 rounds.

    Batteries are log-uniform over half a decade around that. The run has about 100 rounds in the paper's cell, so a
    policy that schedules a device in more than one round of five empties its battery. Computing a round takes 0.032 J
    (3.2e8 cycles at 1 GHz, kappa = 1e-28). Z. Yang, M. Chen, W. Saad, C. S. Hong, M. Shikh-Bahaei use the same kappa
    ("Energy Efficient Federated Learning Over Wireless Communication Networks", IEEE Transactions on Wireless
    Communications, 2021).

    Args:
      dataset: as in `shi2020`.
      rounds: the number of rounds that the middle battery pays for.
      seed: as in `shi2020`.
      num_devices: M.
      settings: further arguments of `shi2020`, such as `distribution`.
    """
    if "battery_j" in settings:
        raise ValueError("energy draws the batteries: use rounds, or battery_j with shi2020")
    rounds = checks.scalar("rounds", rounds, checks.positive)
    rng = _of_devices(settings.get("data_seed"), seed, 1)
    charge = 10 ** rng.uniform(-0.25, 0.25, checks.whole("num_devices", num_devices, 1))
    made = shi2020(dataset, seed=seed, num_devices=num_devices, **settings)
    battery_j = rounds * charge * np.asarray(computing_energy(made.cell, made.training))
    return dataclasses.replace(made, cell=dataclasses.replace(made.cell, battery_j=np.float32(battery_j)))


def mobile(
    dataset: str | Dataset = "mnist", *, speed_m_s: float = 8.3, shadowing_db: float = 8.0, **settings: Any
) -> Experiment:
    """Makes `shi2020` with moving devices and channels that are correlated in time.

    Devices drive at 30 km/h. Shadowing has a standard deviation of 8 dB and decorrelates over 50 m, as in the 3GPP
    macro cell whose path loss the paper uses (3GPP TR 36.814, Further Advancements for E-UTRA Physical Layer Aspects).
    A device with a bad channel keeps it for tens of rounds, so policies that prefer good channels train on few devices.

    Args:
      dataset: as in `shi2020`.
      speed_m_s: root-mean-square speed; see `fcjax.worlds.mobile`.
      shadowing_db: see `fcjax.Cell`.
      settings: further arguments of `shi2020`, such as `distribution`.
    """
    world = f"mobile(speed_m_s={checks.scalar('speed_m_s', speed_m_s, checks.not_negative)}, interval_s=0.6)"
    return shi2020(dataset, shadowing_db=shadowing_db, **{"world": world, **settings})


def crowd(dataset: str | Dataset = "mnist", *, num_devices: int = 200, **settings: Any) -> Experiment:
    """Makes `shi2020` with 200 devices that have little data each, and small batches.

    With MNIST, a device has 300 samples. H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas divide MNIST
    among 100 clients with 600 samples each, and train in batches of 10 ("Communication-Efficient Learning of Deep
    Networks from Decentralized Data", International Conference on Artificial Intelligence and Statistics, 2017).

    Args:
      dataset: as in `shi2020`.
      num_devices: M.
      settings: further arguments of `shi2020`, such as `distribution`.
    """
    return shi2020(dataset, num_devices=num_devices, **{"batch_size": 32, **settings})


def cnn(dataset: str | Dataset = "mnist", **settings: Any) -> Experiment:
    """Makes `shi2020` with the convolutional network `fcjax.models.cnn`, whose uploads are four times as large.

    Args:
      dataset: as in `shi2020`; a data set of images.
      settings: further arguments of `shi2020`, such as `distribution`.
    """
    return shi2020(dataset, **{"model": "cnn", **settings})


def resnet(dataset: str | Dataset = "mnist", **settings: Any) -> Experiment:
    """Makes `shi2020` with the small residual network `fcjax.models.resnet`.

    Args:
      dataset: as in `shi2020`; a data set of images.
      settings: further arguments of `shi2020`, such as `distribution`.
    """
    return shi2020(dataset, **{"model": "resnet", **settings})


def _of_devices(data_seed: int | None, seed: int, scenario: int) -> np.random.Generator:
    """Returns the generator of what is drawn once per device; partitions use other streams."""
    return np.random.default_rng([checks.whole("seed", seed if data_seed is None else data_seed, 0), 100, scenario])
