"""Experiments, and checks that their parts fit together."""

from __future__ import annotations  # short types in help()

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.learning import batches, compressors, updates
from fcjax.learning.batches import LocalData
from fcjax.learning.models import Model
from fcjax.learning.updates import DivergenceOf, DrawBatches, EstimateOn, OptimizerFactory
from fcjax.policies.contract import check_compressor, check_outages, check_world
from fcjax.types import (
    Cell,
    Compressor,
    Estimates,
    Limits,
    Observation,
    Outages,
    Training,
    World,
    pytree,
    static,
)
from fcjax.wireless import outages, radio, worlds
from fcjax.wireless.energy import computing_energy


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
      server_optimizer: an optax optimizer that takes w_{k-1} minus the mean of the received models as its gradient,
        such as optax.sgd(1.0, momentum=0.9) for FedAvgM or optax.adam(0.01) for FedAdam; None takes the mean, as in
        the paper.
      world: channels, computation times and availability of each round; see `fcjax.worlds`.
      outages: which uploads are lost; see `fcjax.outages`.
      compressor: how updates are compressed; see `fcjax.compressors`. It does not change `cell.upload_bits`.
      width: devices trained at a time; see `fcjax.learning.updates.train_round`.
      cores: cores that compute a run. Several are faster, and may change the last bits. JAX must see them: call
        `fcjax.hardware.use_cores` before JAX is used.
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
    server_optimizer: optax.GradientTransformation | None = static(None)
    world: World = static(worlds.redrawn())
    outages: Outages = static(outages.none())
    compressor: Compressor = static(compressors.none())
    width: int | Literal["auto"] | None = static("auto")
    cores: int = static(1)


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
    if training.proximal is not None:
        checks.not_negative("training.proximal", training.proximal, ())
    checks.not_negative("observation_error", experiment.observation_error, ())
    for name, kind in (("world", World), ("outages", Outages), ("compressor", Compressor)):
        if not isinstance(getattr(experiment, name), kind):
            raise ValueError(f"{name} must be a fcjax.{kind.__name__}, got {getattr(experiment, name)!r}")
    for name in ("rho", "beta", "delta"):
        checks.not_negative(f"estimates.{name}", getattr(experiment.estimates, name), (num_devices,))
    batches.check_finite("test_x", experiment.test_x)
    checks.whole("cores", experiment.cores, 1)
    if len(experiment.test_y) == 0:
        raise ValueError("test_x and test_y must hold at least one sample")
    budget_s = checks.positive("training.budget_s", training.budget_s, (), high=np.inf)
    names = ("cell", "training", "estimates", "observation_error")
    numbers = {name: jax.tree.map(_as_float, getattr(experiment, name)) for name in names}
    experiment = dataclasses.replace(experiment, **numbers)
    shortest_s = shortest_round_s(experiment)
    if not isinstance(budget_s, jax.core.Tracer) and shortest_s is not None and budget_s < shortest_s:
        raise ValueError(
            f"the budget of {float(budget_s):g} s is too short for any round: the shortest takes {shortest_s:.3g} s; "
            "use a larger budget"
        )
    _check_batteries(experiment)
    _check_parts(experiment)
    return experiment


def _check_batteries(experiment: Experiment) -> None:
    """Raises ValueError if no device can pay for the computation of a single round."""
    cell = experiment.cell
    if _is_traced(cell) or np.all(np.isinf(cell.battery_j)):
        return
    cost_j = np.asarray(computing_energy(cell, experiment.training))
    if np.all(np.asarray(cell.battery_j) < cost_j):
        raise ValueError(
            f"no battery can pay for a round: cell.battery_j is at most {np.max(cell.battery_j):.3g} J, and the "
            f"computation alone takes at least {np.min(cost_j):.3g} J"
        )


def _check_parts(experiment: Experiment) -> None:
    """Checks what the user has made: a world, outages or a compressor."""
    cell = experiment.cell
    if _is_traced(cell):
        return
    if not worlds.is_built_in(experiment.world.observe):
        check_world(experiment.world, cell, training_of(experiment))
    if not worlds.is_built_in(experiment.outages.lose):
        check_outages(experiment.outages, cell)
    if not worlds.is_built_in(experiment.compressor.apply):
        check_compressor(experiment.compressor)
    local, server = experiment.make_optimizer, experiment.server_optimizer
    if not (callable(local) or isinstance(local, optax.GradientTransformation)):
        raise ValueError(f"make_optimizer must be an optax optimizer, or a function that makes one, got {local!r}")
    if server is not None and not isinstance(server, optax.GradientTransformation):
        raise ValueError(f"server_optimizer must be an optax optimizer, such as optax.adam(0.01), got {server!r}")


def _is_traced(cell: Cell) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(cell))


def _as_float(leaf: ArrayLike) -> ArrayLike:
    is_float = isinstance(leaf, float) or getattr(leaf, "dtype", None) in (np.float32, np.float64)
    return leaf if is_float else checks.real("a setting", leaf)


def shortest_round_s(experiment: Experiment) -> float | None:
    """Returns a lower bound on the round time, within the limits of the world; None if the cell is traced."""
    if _is_traced(experiment.cell):
        return None
    with jax.ensure_compile_time_eval():  # also inside the caller's `jax.jit`
        limits = _limits(experiment)
        upload_s = _shortest_upload_s(limits.gain, experiment.cell)
        return float(np.min(np.asarray(limits.compute_s) + np.asarray(upload_s)))


def _limits(experiment: Experiment) -> Limits:
    return (experiment.world.limits or worlds.limits_of_cell)(experiment.cell, experiment.training)


@jax.jit
def _shortest_upload_s(gain: ArrayLike, cell: Cell) -> Array:
    """Returns the shortest upload time of each device, (M,) s: alone, with the largest gain; 0 if it has no limit."""
    num_devices = checks.num_devices(cell)
    gain = jnp.broadcast_to(jnp.asarray(gain, float), num_devices)
    finite = jnp.where(jnp.isfinite(gain), gain, 1)
    bits_s = radio.rate(jnp.ones(num_devices), Observation(finite, jnp.zeros(num_devices)), cell)
    upload_s = jnp.where(bits_s > 0, cell.upload_bits / jnp.where(bits_s > 0, bits_s, 1), jnp.inf)
    return jnp.where(jnp.isfinite(gain), upload_s, 0)


_MOST_ROUNDS = 1_000_000


def most_rounds(experiment: Experiment, decides: Sequence[str] = ()) -> int:
    """Returns the largest number of rounds that fit in the budget.

    Args:
      experiment: the experiment.
      decides: what the policy decides. With fewer local steps or smaller batches, rounds are shorter.
    """
    budget_s = checks.positive("training.budget_s", experiment.training.budget_s, (), high=np.inf)
    shortest_s = shortest_round_s(experiment)
    if shortest_s is not None and not _is_always_as_usual(experiment, decides):
        shortest_s = _shortest_wait_s(experiment, decides)
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
    limits = _limits(experiment)
    if limits.num_rounds is None or int(number) <= limits.num_rounds:
        return int(number)
    if not limits.may_end:
        raise ValueError(
            f"the world has {limits.num_rounds} rounds, and the budget of {float(budget_s):g} s has room for up to "
            f'{int(number)}: use a longer trace, a smaller budget, at_end="repeat" or at_end="stop"'
        )
    return limits.num_rounds


def rounds_of_world(experiment: Experiment) -> int | None:
    """Returns how many rounds the world has, or None if it has any number."""
    return None if _is_traced(experiment.cell) else _limits(experiment).num_rounds


def may_end_with_world(experiment: Experiment) -> bool:
    """Returns whether a run may end with the last round of its world, before its budget is spent."""
    return not _is_traced(experiment.cell) and _limits(experiment).may_end


def _is_always_as_usual(experiment: Experiment, decides: Sequence[str]) -> bool:
    """Returns whether every round computes all samples and uploads something."""
    fewer = {"local_steps", "batch_size"}.intersection(decides)
    endless = bool(np.all(np.isinf(np.asarray(experiment.cell.battery_j))))
    return endless and not fewer and _limits(experiment).always_available


def _shortest_wait_s(experiment: Experiment, decides: Sequence[str]) -> float:
    """Returns the shortest computation time; a round in which nobody is available takes no longer."""
    training = experiment.training
    fraction = 1.0
    for name, number in (("local_steps", training.local_steps), ("batch_size", training.batch_size)):
        fraction /= number if name in decides else 1
    with jax.ensure_compile_time_eval():
        return fraction * float(np.min(np.asarray(_limits(experiment).compute_s)))
