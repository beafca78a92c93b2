"""One round of Alg. 3.

`simulate_round` observes, decides and checks the budget. If the round ends in time, it trains the scheduled devices,
aggregates, estimates and tests. Every draw depends only on (run, round, device, purpose), so a run meets the same
channels, computation times and mini-batches under any policy.
"""

import dataclasses
import enum
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax import checks, keys
from fcjax.learning import updates
from fcjax.learning.evaluation import Score, evaluate
from fcjax.learning.models import Params
from fcjax.simulation.experiment import Experiment
from fcjax.types import Decision, Estimates, Observation, RoundContext, pytree
from fcjax.wireless.access import round_time
from fcjax.wireless.world import RoundKeys, misjudge, observe


class Stop(enum.IntEnum):
    """Why a run ended."""

    NOT_YET = 0
    BUDGET = 1  # the next round would end after the budget
    MAX_ROUNDS = 2
    BAD_DECISION = 3  # no device scheduled, or shares that are NaN, negative, or sum to more than 1
    DIVERGED = 4  # the next round ended with a loss or an estimate that is not finite


@pytree
class Record:
    """The record of a round. A history stacks K records; those after the last round are NaN.

    Attributes:
      elapsed_s: () s, at the end of the round.
      round_s: () s.
      scheduled: (M,) bool.
      share: (M,) fraction of the bandwidth.
      gain: (M,) true power gain.
      compute_s: (M,) s, true computation time.
      accuracy: () of w_k on the test set.
      loss: ().
      tilde_accuracy: () of w~, the model with the least loss reported so far.
      tilde_loss: ().
      reported_loss: () F(w_{k-1}), as the scheduled devices report it.
      rho: (M,).
      beta: (M,).
      delta: (M,).
    """

    elapsed_s: Array
    round_s: Array
    scheduled: Array
    share: Array
    gain: Array
    compute_s: Array
    accuracy: Array
    loss: Array
    tilde_accuracy: Array
    tilde_loss: Array
    reported_loss: Array
    rho: Array
    beta: Array
    delta: Array


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
      tilde_reported_loss: () F(w~).
      policy: the policy's state.
      optimizers: (M, ...) states of the local optimizers if devices keep them, else None.
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
    policy: Any
    optimizers: Any
    stop: Array


class _Clock(NamedTuple):
    round_s: Array  # ()
    elapsed_s: Array  # () at the end of the round
    stop: Array  # () Stop


def simulate_round(key: Array, state: State, experiment: Experiment, select: Any) -> tuple[State, Record]:
    """Simulates one round, steps 4 to 25 of Alg. 3; a round that would end after the budget does not take place."""
    draw = RoundKeys(*jax.random.split(key, len(RoundKeys._fields)))
    cell, training = experiment.cell, experiment.training
    truth = observe(draw, cell, training)
    seen = misjudge(draw.error, truth, experiment.observation_error)
    context = RoundContext(seen, state.estimates, cell, training, state.elapsed_s, state.round_index)
    policy_state, decision = _decide(select, draw.policy, state, context)
    clock = _time(decision, truth, state, experiment)
    nothing = no_record(decision.scheduled.size)

    def happens(before):
        after, reported_loss = _learn(draw.batches, before, decision, experiment)
        after = dataclasses.replace(after, policy=policy_state, elapsed_s=clock.elapsed_s, stop=clock.stop)
        record = _record(after, reported_loss, decision, truth, clock)
        # A run that diverges ends with its last finite model.
        diverged = dataclasses.replace(before, stop=jnp.full_like(clock.stop, Stop.DIVERGED)), nothing
        finite = _all_finite((after.score.loss, reported_loss, after.estimates))
        return jax.tree.map(functools.partial(jnp.where, finite), (after, record), diverged)

    def does_not(before):
        return dataclasses.replace(before, stop=clock.stop), nothing

    return lax.cond(clock.stop == Stop.NOT_YET, happens, does_not, state)


def _time(decision: Decision, truth: Observation, state: State, experiment: Experiment) -> _Clock:
    """Times the round. The policy decides on the observed values; the round time follows from the true ones."""
    scheduled, share = decision.scheduled, decision.share
    round_s = as_float(round_time(scheduled, share, truth, experiment.cell))
    elapsed_s = state.elapsed_s + round_s
    stop = jnp.where(
        _is_possible(scheduled, share, round_s),
        jnp.where(elapsed_s <= experiment.training.budget_s, Stop.NOT_YET, Stop.BUDGET),
        Stop.BAD_DECISION,
    )
    return _Clock(round_s, elapsed_s, stop)


def _learn(key: Array, state: State, decision: Decision, experiment: Experiment) -> tuple[State, Array]:
    """Trains the scheduled devices, aggregates, estimates and tests; also returns the reported loss."""
    trained = updates.train_round(
        keys.per_device(key, decision.scheduled.size),
        state.params,
        decision.scheduled,
        state.estimates,
        experiment.data,
        experiment.training,
        experiment.model,
        make_optimizer=experiment.make_optimizer,
        width=_width(experiment),
        estimate_on=experiment.estimate_on,
        divergence_of=experiment.divergence_of,
        draw_batches=experiment.draw_batches,
        optimizer_states=state.optimizers,
    )
    # Steps 23 to 25. Devices report the loss of the model they started from, so w~ is known one round late.
    reported_loss = as_float(trained.loss)
    better = reported_loss < state.tilde_reported_loss
    keep = lambda new, old: jax.tree.map(functools.partial(jnp.where, better), new, old)  # noqa: E731
    test_x, test_y = jnp.asarray(experiment.test_x), jnp.asarray(experiment.test_y)
    after = dataclasses.replace(
        state,
        round_index=state.round_index + 1,
        params=trained.params,
        score=evaluate(trained.params, experiment.model, test_x, test_y),
        tilde_params=keep(state.params, state.tilde_params),
        tilde_score=keep(state.score, state.tilde_score),
        tilde_reported_loss=keep(reported_loss, state.tilde_reported_loss),
        estimates=jax.tree.map(as_float, trained.estimates),
        optimizers=trained.optimizer_states,
    )
    return after, reported_loss


def _record(state: State, reported_loss: Array, decision: Decision, truth: Observation, clock: _Clock) -> Record:
    return Record(
        elapsed_s=clock.elapsed_s,
        round_s=clock.round_s,
        scheduled=decision.scheduled,
        share=decision.share,
        gain=as_float(truth.gain),
        compute_s=as_float(truth.compute_s),
        accuracy=state.score.accuracy,
        loss=state.score.loss,
        tilde_accuracy=state.tilde_score.accuracy,
        tilde_loss=state.tilde_score.loss,
        reported_loss=reported_loss,
        rho=as_float(state.estimates.rho),
        beta=as_float(state.estimates.beta),
        delta=as_float(state.estimates.delta),
    )


def no_record(num_devices: int) -> Record:
    """Returns the record of a round that did not take place."""
    number, per_device = jnp.full((), jnp.nan), jnp.full(num_devices, jnp.nan)
    return Record(
        elapsed_s=number,
        round_s=number,
        scheduled=jnp.zeros(num_devices, bool),
        share=per_device,
        gain=per_device,
        compute_s=per_device,
        accuracy=number,
        loss=number,
        tilde_accuracy=number,
        tilde_loss=number,
        reported_loss=number,
        rho=per_device,
        beta=per_device,
        delta=per_device,
    )


def _decide(select: Any, key: Array, state: State, context: RoundContext) -> tuple[Any, Decision]:
    """Returns the policy's new state and decision.

    The conditional makes XLA compile the policy separately, so that a run has the same bits alone and in a program with
    other policies. A run that has stopped never gets here.
    """
    num_devices = checks.num_devices(context.cell)
    nobody = Decision(jnp.zeros(num_devices, bool), jnp.zeros(num_devices), jnp.zeros(()))

    def decide():
        policy_state, decision = select(key, state.policy, context)
        return policy_state, as_decision(decision, num_devices)

    return lax.cond(state.stop == Stop.NOT_YET, decide, lambda: (state.policy, nobody))


def as_decision(decision: Decision, num_devices: int) -> Decision:
    """Checks the shapes of a policy's decision and converts it to the precision of the history."""
    scheduled, share = jnp.asarray(decision.scheduled), jnp.asarray(decision.share)
    per_device = (num_devices,)
    if scheduled.shape != per_device or scheduled.dtype != bool or share.shape != per_device:
        raise ValueError(
            f"a policy must return a Decision with booleans and shares of shape {per_device}, one per device, "
            f"got {scheduled.dtype} {scheduled.shape} and {share.dtype} {share.shape}"
        )
    return Decision(scheduled, as_float(share), as_float(decision.round_s))


def _is_possible(scheduled: Array, share: Array, round_s: Array) -> Array:
    tolerance = 1e-5  # for a float32 sum over many devices
    return (
        jnp.any(scheduled)
        & jnp.all(jnp.where(scheduled, share > 0, share == 0))
        & (jnp.sum(share) <= 1 + tolerance)
        & ~jnp.isnan(round_s)
    )


def _all_finite(tree: Any) -> Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def as_float(x: ArrayLike) -> Array:
    """Converts to the precision of the history."""
    return jnp.asarray(x, float)


def _width(experiment: Experiment) -> int | None:
    """Returns how many devices to train at a time: by default one on a CPU, all on an accelerator."""
    if experiment.width == "auto":
        return 1 if jax.default_backend() == "cpu" else None
    return experiment.width
