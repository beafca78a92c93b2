"""The energy of a round.

Computing n cycles at frequency f takes kappa n f^2; a sample takes sample_floor_s cpu_hz cycles. Sending takes the
transmit power times the time of sending.
"""

from __future__ import annotations  # short types in help()

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from fcjax import checks
from fcjax.types import Cell, Decision, Observation, Training
from fcjax.wireless.access import send_time
from fcjax.wireless.decisions import checked, num_samples, with_power


def round_energy(decision: Decision, observation: Observation, cell: Cell, training: Training) -> Array:
    """Returns the energy that each device spends in a round, (M,) J; 0 for devices that are not scheduled.

    It is differentiable in every leaf. A device that never finishes sending spends inf.

    Args:
      decision: the scheduled devices, their shares and, if decided, powers, frequencies, steps and batch sizes.
      observation: gains and computation times.
      cell: the radio and the devices.
      training: local steps and batch size, where the decision has none.
    """
    observation, cell = checks.uplink(observation, cell, needs_upload=False)
    scheduled = checks.mask("decision.scheduled", decision.scheduled, checks.num_devices(cell))
    share: Any = checks.not_negative("decision.share", decision.share, jnp.shape(scheduled))
    decision = dataclasses.replace(checked(decision, cell), scheduled=scheduled, share=jnp.asarray(share))
    spent_j = computing_energy(cell, training, decision) + _sending_energy(decision, observation, cell)
    return jnp.where(scheduled, spent_j, 0)


def computing_energy(cell: Cell, training: Training, decision: Decision | None = None) -> Array:
    """Returns the energy of computing, () or (M,) J, for every device; without a decision, at the cell's frequency."""
    names = ("capacitance", "cpu_hz", "sample_floor_s")
    capacitance, most_hz, floor_s = (jnp.asarray(checks.of_cell(name, cell)) for name in names)
    cpu_hz = most_hz if decision is None or decision.cpu_hz is None else jnp.asarray(decision.cpu_hz)
    cycles = floor_s * most_hz * num_samples(decision, training)
    return capacitance * cpu_hz * cpu_hz * cycles


def _sending_energy(decision: Decision, observation: Observation, cell: Cell) -> Array:
    power_w = cell.power_w if decision.power_w is None else decision.power_w
    scheduled = decision.scheduled & (decision.share > 0)
    # A device that is not scheduled has no share: its time of sending would be inf, and the gradient NaN.
    share = jnp.where(scheduled, decision.share, 1)
    send_s = send_time(share, observation, with_power(decision, cell))
    return jnp.where(scheduled, power_w * send_s, jnp.where(decision.scheduled, jnp.inf, 0))


def least_energy_at_full_speed(observation: Observation, cell: Cell, training: Training) -> Array:
    """Returns the energy of a round, (M,) J, for a device that sends with the whole bandwidth.

    This is the least that a round costs at the power and the frequency of the cell.
    """
    everyone = jnp.ones(checks.num_devices(cell), bool)
    alone = Decision(everyone, jnp.ones(everyone.shape), jnp.zeros(()))
    return round_energy(alone, observation, cell, training)
