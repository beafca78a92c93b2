"""What follows from the optional parts of a decision: powers, CPU frequencies, local steps and batch sizes."""

from __future__ import annotations  # short types in help()

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.types import Cell, Decision, Observation, Training

WHILE_COMPUTING = ("cpu_hz", "local_steps", "batch_size")
DECIDED = ("power_w", *WHILE_COMPUTING)


def as_decided(
    decision: Decision, observation: Observation, cell: Cell, training: Training
) -> tuple[Observation, Cell]:
    """Returns the observation and the cell with the computation times and powers that follow from a decision."""
    decision = checked(decision, cell)
    compute_s: Any = observation.compute_s
    if decision.cpu_hz is not None:
        compute_s = compute_s * (cell.cpu_hz / decision.cpu_hz)
    if decision.local_steps is not None or decision.batch_size is not None:
        compute_s = compute_s * (num_samples(decision, training) / (training.local_steps * training.batch_size))
    return dataclasses.replace(observation, compute_s=compute_s), with_power(decision, cell)


def checked(decision: Decision, cell: Cell) -> Decision:
    """Checks the optional parts of a decision: positive numbers, for the round or per device."""
    shapes = (), (checks.num_devices(cell),)
    found = {name: getattr(decision, name) for name in DECIDED}
    parts: dict[str, Any] = {
        name: jnp.asarray(checks.positive(f"decision.{name}", value, *shapes))
        for name, value in found.items()
        if value is not None
    }
    return dataclasses.replace(decision, **parts)


def with_power(decision: Decision, cell: Cell) -> Cell:
    """Returns the cell with the powers of a decision."""
    if decision.power_w is None:
        return cell
    return dataclasses.replace(cell, power_w=jnp.broadcast_to(decision.power_w, jnp.shape(cell.power_w)))


def num_samples(decision: Decision | None, training: Training) -> ArrayLike:
    """Returns how many samples each device processes, () or (M,)."""
    steps, size = (None, None) if decision is None else (decision.local_steps, decision.batch_size)
    return (training.local_steps if steps is None else steps) * (training.batch_size if size is None else size)


class Limited(NamedTuple):
    """An optional part of a decision, with the least and the largest value that are allowed, each () or (M,)."""

    values: Array
    low: Array
    high: Array


def decided_limits(decision: Decision, cell: Cell, training: Training) -> dict[str, Limited]:
    """Returns the optional parts of a decision by name."""
    tiny = jnp.finfo(float).tiny
    limits: dict[str, tuple[Any, Any]] = {
        "power_w": (tiny, cell.power_w),
        "cpu_hz": (tiny, cell.cpu_hz),
        "local_steps": (1, training.local_steps),
        "batch_size": (1, training.batch_size),
    }
    found = {name: getattr(decision, name) for name in DECIDED}
    return {name: Limited(values, *limits[name]) for name, values in found.items() if values is not None}
