"""Experiments, and checks that their parts fit together."""

from __future__ import annotations  # short types in help()

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.learning import batches, updates
from fcjax.learning.batches import LocalData
from fcjax.learning.models import Model
from fcjax.learning.updates import DivergenceOf, DrawBatches, EstimateOn, OptimizerFactory
from fcjax.types import Cell, Estimates, Observation, Training, pytree, static
from fcjax.wireless import radio


@pytree
class Experiment:
    """Everything a run depends on besides its policy and key; see `fcjax.presets` for the paper's.

    Attributes:
      cell: the radio and the devices.
      training: the settings of local training; `num_samples` follows from the data.
      data: the training data and its partition among devices.
      test_x: (N, ...) inputs of the test set.
      test_y: (N,) targets of the test set.
      estimates: the initial estimates.
      model: the model to train.
      observation_error: () alpha, the relative standard deviation of the observed h and t^cp.
      make_optimizer: the local optax optimizer, or a function that makes one from the training settings.
      estimate_on: see `fcjax.learning.updates.train_round`.
      divergence_of: see `fcjax.learning.updates.train_round`.
      draw_batches: draws the mini-batches of a device.
      keeps_optimizer: whether devices keep their optimizer's state from round to round.
      width: devices trained at a time; see `fcjax.learning.updates.train_round`.
    """

    cell: Cell
    training: Training
    data: LocalData
    test_x: Array | np.ndarray
    test_y: Array | np.ndarray
    estimates: Estimates
    model: Model = static()
    observation_error: ArrayLike = 0.0
    make_optimizer: OptimizerFactory = static(updates.sgd)
    estimate_on: EstimateOn = static("batch")
    divergence_of: DivergenceOf = static("displacement")
    draw_batches: DrawBatches = static(batches.draw)
    keeps_optimizer: bool = static(False)
    width: int | Literal["auto"] | None = static("auto")


def training_of(experiment: Experiment) -> Training:
    """Returns the training settings as policies see them, with the number of samples per device."""
    return dataclasses.replace(experiment.training, num_samples=experiment.data.sizes)


def check(experiment: Experiment) -> Experiment:
    """Raises ValueError for settings that are invalid or do not fit together; traced values are not checked.

    Returns the experiment with integer settings as floats, because JAX would wrap integers beyond 32 bits.
    """
    cell, training = experiment.cell, experiment.training
    for name in ("cell", "training", "estimates"):
        checks.no_lists(name, getattr(experiment, name))
    num_devices = checks.num_devices(cell)
    if np.shape(experiment.data.sizes) != (num_devices,):
        raise ValueError(
            f"data.sizes must have shape ({num_devices},), one per device in cell.power_w, "
            f"got {np.shape(experiment.data.sizes)}"
        )
    batches.check(experiment.data, training, experiment.model)
    checks.whole_cell(cell)
    checks.positive("training.learning_rate", training.learning_rate, ())
    checks.fraction("training.momentum", training.momentum, ())
    checks.not_negative("observation_error", experiment.observation_error, ())
    for name in ("rho", "beta", "delta"):
        checks.not_negative(f"estimates.{name}", getattr(experiment.estimates, name), (num_devices,))
    batches.check_finite("test_x", experiment.test_x)
    if len(experiment.test_y) == 0:
        raise ValueError("test_x and test_y must hold at least one sample")
    budget_s = checks.positive("training.budget_s", training.budget_s, (), high=np.inf)
    names = ("cell", "training", "estimates", "observation_error")
    numbers = {name: jax.tree.map(_as_float, getattr(experiment, name)) for name in names}
    experiment = dataclasses.replace(experiment, **numbers)
    shortest_s = shortest_round_s(experiment)
    if not isinstance(budget_s, jax.core.Tracer) and shortest_s is not None and budget_s < shortest_s:
        raise ValueError(
            f"the budget of {float(budget_s):g} s is too short for any round: the shortest takes {shortest_s:.3g} s"
        )
    return experiment


def _as_float(leaf: ArrayLike) -> ArrayLike:
    is_float = isinstance(leaf, float) or getattr(leaf, "dtype", None) in (np.float32, np.float64)
    return leaf if is_float else checks.real("a setting", leaf)


def shortest_round_s(experiment: Experiment) -> float | None:
    """Returns a lower bound on the round time: one device next to the base station; None if the cell is traced."""
    cell, training = experiment.cell, experiment.training
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(cell)):
        return None
    num_devices = checks.num_devices(cell)
    compute_s = training.local_steps * training.batch_size * np.broadcast_to(cell.sample_floor_s, num_devices)
    # Fading is unbounded, so then only the computation time has a lower bound.
    upload_s = np.zeros(num_devices)
    if not radio.fades(cell):
        upload_s = np.asarray(cell.upload_bits) / np.asarray(_rate_at_the_base_station(cell))
    return float(np.min(compute_s + upload_s))


@jax.jit
def _rate_at_the_base_station(cell: Cell) -> Array:
    num_devices = checks.num_devices(cell)
    gain = radio.path_gain(jnp.full(num_devices, jnp.asarray(cell.min_distance_m, float)), cell)
    return radio.rate(jnp.ones(num_devices), Observation(gain, jnp.zeros(num_devices)), cell)


_MOST_ROUNDS = 1_000_000


def most_rounds(experiment: Experiment) -> int:
    """Returns the largest number of rounds that fit in the budget."""
    budget_s = checks.positive("training.budget_s", experiment.training.budget_s, (), high=np.inf)
    shortest_s = shortest_round_s(experiment)
    if isinstance(budget_s, jax.core.Tracer) or shortest_s is None:
        raise ValueError("give max_rounds: the number of rounds is unknown if the budget or the cell is traced")
    if not shortest_s > 0:
        raise ValueError("give max_rounds: with cell.sample_floor_s = 0 a round may take no time at all")
    number = float(budget_s) / shortest_s + 1
    if number > _MOST_ROUNDS:
        raise ValueError(
            f"the budget of {float(budget_s):g} s has room for {number:.3g} rounds of {shortest_s:.3g} s, more than "
            f"{_MOST_ROUNDS}: use a smaller budget"
        )
    return int(number)
