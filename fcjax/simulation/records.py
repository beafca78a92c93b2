"""What a run carries from round to round, and what it records of each."""

import enum
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fcjax.learning import updates
from fcjax.learning.evaluation import Score
from fcjax.learning.models import Params
from fcjax.types import Decision, Estimates, Observation, Reports, pytree
from fcjax.wireless.decisions import DECIDED


class Stop(enum.IntEnum):
    """Why a run ended."""

    NOT_YET = 0
    BUDGET = 1  # the next round would end after the budget
    MAX_ROUNDS = 2
    BAD_DECISION = 3  # no device or an unavailable one scheduled, or impossible shares, powers, frequencies or steps
    DIVERGED = 4  # the next round ended with a loss or an estimate that is not finite


@pytree
class Record:
    """The record of a round. A history stacks K records; those after the last round are NaN, or False for bool.

    Attributes:
      elapsed_s: () s, at the end of the round.
      round_s: () s.
      scheduled: (M,) bool.
      received: (M,) bool, whether the base station received the device's update.
      share: (M,) fraction of the bandwidth.
      available: (M,) bool, whether the device could be scheduled.
      gain: (M,) true power gain.
      compute_s: (M,) s, true computation time, at the cell's frequency and for all samples.
      energy_j: (M,) J, spent in the round.
      accuracy: () of w_k on the test set.
      loss: ().
      tilde_accuracy: () of w~, the model with the least loss reported so far.
      tilde_loss: ().
      reported_loss: () F(w_{k-1}), as the scheduled devices report it; NaN if no report is received.
      rho: (M,).
      beta: (M,).
      delta: (M,).
      power_w: (M,) W; None if the policy does not decide it, like the following.
      cpu_hz: (M,) Hz.
      local_steps: (M,).
      batch_size: (M,).
    """

    elapsed_s: Array
    round_s: Array
    scheduled: Array
    received: Array
    share: Array
    available: Array
    gain: Array
    compute_s: Array
    energy_j: Array
    accuracy: Array
    loss: Array
    tilde_accuracy: Array
    tilde_loss: Array
    reported_loss: Array
    rho: Array
    beta: Array
    delta: Array
    power_w: Array | None = None
    cpu_hz: Array | None = None
    local_steps: Array | None = None
    batch_size: Array | None = None


@pytree
class State:
    """The state that a run carries from round to round.

    Attributes:
      round_index: ().
      elapsed_s: () s.
      start: score of w_0.
      params: w_k.
      score: score of w_k.
      tilde_params: w~.
      tilde_score: score of w~.
      tilde_reported_loss: () F(w~).
      estimates: the current estimates.
      reports: what devices last reported.
      policy: the policy's state.
      world: the world's state.
      outages: the state of the outage model.
      compressor: the compressor's parameters.
      residuals: (M, P) with error feedback: what devices have not sent yet; else None.
      optimizers: (M, ...) states of the local optimizers if devices keep them, else None.
      server: the state of the server's optimizer if there is one, else None.
      stop: () Stop.
    """

    round_index: Array
    elapsed_s: Array
    start: Score
    params: Params
    score: Score
    tilde_params: Params
    tilde_score: Score
    tilde_reported_loss: Array
    estimates: Estimates
    reports: Reports
    policy: Any
    world: Any
    outages: Any
    compressor: Any
    residuals: Array | None
    optimizers: Any
    server: Any
    stop: Array


class Clock(NamedTuple):
    """The time of a round, and whether the run ends with it."""

    round_s: Array  # ()
    elapsed_s: Array  # () at the end of the round
    stop: Array  # () Stop


class Sent(NamedTuple):
    """What becomes of the uploads of a round."""

    received: Array  # (M,) bool
    energy_j: Array  # (M,) J, spent by each device
    outages: Any  # the new state of the outage model


def no_reports(num_devices: int) -> Reports:
    """Returns the reports before the first round."""
    # NumPy arrays need no compilation.
    zeros, never = np.zeros(num_devices, jnp.result_type(float)), np.full(num_devices, -1, jnp.result_type(int))
    return Reports(zeros, zeros, never, np.zeros_like(never), zeros)


def reported(state: State, decision: Decision, sent: Sent, trained: updates.Trained) -> Reports:
    """Returns the reports after a round, given the state before it."""
    old = state.reports
    return Reports(
        loss=jnp.where(sent.received, as_float(trained.losses), old.loss),
        update_norm=jnp.where(sent.received, as_float(trained.update_norms), old.update_norm),
        last_round=jnp.where(sent.received, state.round_index, old.last_round),
        times_scheduled=old.times_scheduled + decision.scheduled,
        energy_j=old.energy_j + sent.energy_j,
    )


def recorded(
    state: State, reported_loss: Array, decision: Decision, truth: Observation, clock: Clock, sent: Sent
) -> Record:
    """Returns the record of a round, given the state after it."""
    return Record(
        elapsed_s=clock.elapsed_s,
        round_s=clock.round_s,
        scheduled=decision.scheduled,
        received=sent.received,
        share=decision.share,
        available=jnp.asarray(truth.available),
        gain=as_float(truth.gain),
        compute_s=as_float(truth.compute_s),
        energy_j=sent.energy_j,
        accuracy=state.score.accuracy,
        loss=state.score.loss,
        tilde_accuracy=state.tilde_score.accuracy,
        tilde_loss=state.tilde_score.loss,
        reported_loss=jnp.where(jnp.any(sent.received), reported_loss, jnp.nan),
        rho=as_float(state.estimates.rho),
        beta=as_float(state.estimates.beta),
        delta=as_float(state.estimates.delta),
        **{name: _as_float_or_none(getattr(decision, name)) for name in DECIDED},
    )


def _as_float_or_none(value: ArrayLike | None) -> Array | None:
    return None if value is None else as_float(value)


def no_record(num_devices: int, decides: tuple[str, ...] = ()) -> Record:
    """Returns the record of a round that did not take place."""
    number, per_device, nobody = jnp.full((), jnp.nan), jnp.full(num_devices, jnp.nan), jnp.zeros(num_devices, bool)
    return Record(
        elapsed_s=number,
        round_s=number,
        scheduled=nobody,
        received=nobody,
        share=per_device,
        available=nobody,
        gain=per_device,
        compute_s=per_device,
        energy_j=per_device,
        accuracy=number,
        loss=number,
        tilde_accuracy=number,
        tilde_loss=number,
        reported_loss=number,
        rho=per_device,
        beta=per_device,
        delta=per_device,
        **{name: per_device if name in decides else None for name in DECIDED},
    )


def as_float(x: ArrayLike) -> Array:
    """Converts to the precision of the history."""
    return jnp.asarray(x, float)
