"""One round of Alg. 3.

`simulate_round` observes, decides and checks the budget. If the round ends in time, it trains the scheduled devices,
aggregates, estimates and tests. Every draw depends only on (run, round, device, purpose), so a run meets the same
channels, computation times and mini-batches under any policy.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax import checks, keys
from fcjax.learning import compressors, updates
from fcjax.learning.evaluation import evaluate
from fcjax.simulation.experiment import Experiment
from fcjax.simulation.records import Clock, Record, Sent, State, Stop, as_float, no_record, recorded, reported
from fcjax.types import Cell, Decision, Observation, Policy, Reports, RoundContext, Training
from fcjax.wireless import outages, worlds
from fcjax.wireless.access import round_time
from fcjax.wireless.decisions import DECIDED, WHILE_COMPUTING, as_decided, decided_limits
from fcjax.wireless.energy import computing_energy, least_energy_at_full_speed, round_energy
from fcjax.wireless.radio import ready_time


class RoundKeys(NamedTuple):
    """The random keys of a round, one per purpose."""

    # The world splits the round's key too, and uses its first three parts: see `fcjax.worlds.redrawn`.
    error: Array
    policy: Array
    batches: Array
    outages: Array
    compression: Array


def round_keys(key: Array) -> RoundKeys:
    """Derives the keys of a round, besides those of its world."""
    folded = (jax.random.fold_in(key, purpose) for purpose in (keys.Purpose.OUTAGES, keys.Purpose.COMPRESSION))
    return RoundKeys(*jax.random.split(key, 6)[3:], *folded)


def simulate_round(
    key: Array, state: State, experiment: Experiment, policy: Policy, decides: tuple[str, ...] = ()
) -> tuple[State, Record]:
    """Simulates one round, steps 4 to 25 of Alg. 3; a round that would end after the budget does not take place."""
    draw = round_keys(key)
    cell, training = experiment.cell, experiment.training
    world_state, truth = _observe(key, state, experiment)
    seen, timed, reports = misjudge(draw.error, truth, experiment.observation_error), truth, state.reports
    if policy.asks_norms:
        # What is asked takes time: the policy decides once the slowest device has received the model and computed.
        reports, wait_s = _ask(draw.batches, truth, state, experiment)
        seen, timed = (dataclasses.replace(o, compute_s=jnp.full_like(o.compute_s, wait_s)) for o in (seen, truth))
        cell = dataclasses.replace(cell, download_bits=None)
    context = RoundContext(seen, state.estimates, cell, training, state.elapsed_s, state.round_index, reports)
    policy_state, decision = _decide(policy, decides, draw.policy, state, context)
    idle_s = jnp.min(truth.compute_s)
    clock = _time(decision, timed, idle_s, state, dataclasses.replace(experiment, cell=cell))
    sent = _send(draw.outages, decision, truth, state, experiment, policy)
    nothing = no_record(decision.scheduled.size, decides)

    def happens(before):
        after, reported_loss = _learn(draw, before, decision, sent, experiment)
        after = dataclasses.replace(
            after,
            policy=policy_state,
            world=world_state,
            outages=sent.outages,
            elapsed_s=clock.elapsed_s,
            stop=clock.stop,
        )
        record = recorded(after, reported_loss, decision, truth, clock, sent)
        # A run that diverges ends with its last finite model.
        diverged = dataclasses.replace(before, stop=jnp.full_like(clock.stop, Stop.DIVERGED)), nothing
        finite = _all_finite((after.score.loss, jnp.where(jnp.any(sent.received), reported_loss, 0), after.estimates))
        return jax.tree.map(functools.partial(jnp.where, finite), (after, record), diverged)

    def does_not(before):
        return dataclasses.replace(before, stop=clock.stop), nothing

    return lax.cond(clock.stop == Stop.NOT_YET, happens, does_not, state)


def _observe(key: Array, state: State, experiment: Experiment) -> tuple[Any, Observation]:
    """Returns the new state of the world, and the true observation. Devices with an empty battery are unavailable."""
    cell, training = experiment.cell, experiment.training
    world_state, truth = worlds.observe(experiment.world.observe, key, state.world, cell, training)
    least_j = least_energy_at_full_speed(truth, cell, training)  # inf without a channel
    can_pay = (least_j <= _left_j(state, cell)) & (least_j < jnp.inf)
    return world_state, dataclasses.replace(truth, available=jnp.asarray(truth.available) & can_pay)


def _left_j(state: State, cell: Cell) -> Array:
    """Returns the energy that is left in each battery, (M,) J."""
    return jnp.asarray(cell.battery_j) - jnp.asarray(state.reports.energy_j)


def misjudge(key: Array, truth: Observation, error: ArrayLike) -> Observation:
    """Returns what the base station observes: h and t^cp with Gaussian errors of relative size `error`."""
    device_keys = keys.per_device(key, jnp.shape(truth.gain)[0])
    of_amplitude, of_time = jax.vmap(lambda k: jax.random.normal(k, (2,)))(device_keys).T
    gain = truth.gain * (1 + error * of_amplitude) ** 2
    return Observation(gain, truth.compute_s * jnp.maximum(1 + error * of_time, 0), truth.available)


def _ask(key: Array, truth: Observation, state: State, experiment: Experiment) -> tuple[Reports, Array]:
    """Returns reports with the update norms of all available devices, and when the last of them has computed, () s."""
    asked = jnp.asarray(truth.available)
    norms = updates.update_norms(
        keys.per_device(key, asked.size),
        state.params,
        asked,
        experiment.data,
        experiment.training,
        experiment.model,
        **_training_settings(state, experiment),
    )
    norms = jnp.where(asked, as_float(norms), state.reports.update_norm)
    wait_s = jnp.max(jnp.where(asked, ready_time(truth, experiment.cell), 0))
    return dataclasses.replace(state.reports, update_norm=norms), wait_s


def _time(decision: Decision, truth: Observation, idle_s: Array, state: State, experiment: Experiment) -> Clock:
    """Times the round. The policy decides on the observed values; the round time follows from the true ones."""
    cell, training = experiment.cell, experiment.training
    decided = as_decided(decision, truth, cell, training)
    idle = ~jnp.any(truth.available)
    # If nobody is available, the base station waits as long as the shortest computation would take.
    round_s = jnp.where(idle, idle_s, round_time(decision.scheduled, decision.share, *decided))
    elapsed_s = state.elapsed_s + as_float(round_s)
    stop = jnp.where(
        idle | _is_possible(decision, truth, as_float(round_s), cell, training),
        jnp.where(elapsed_s <= training.budget_s, Stop.NOT_YET, Stop.BUDGET),
        Stop.BAD_DECISION,
    )
    return Clock(as_float(round_s), elapsed_s, stop)


def _send(
    key: Array, decision: Decision, truth: Observation, state: State, experiment: Experiment, policy: Policy
) -> Sent:
    """Determines which uploads arrive, and what they cost. A device whose battery runs out loses its upload."""
    cell, training = experiment.cell, experiment.training
    cost_j = round_energy(decision, truth, cell, training)
    if policy.asks_norms:
        asked = jnp.asarray(truth.available) & ~decision.scheduled
        cost_j = jnp.where(asked, computing_energy(cell, training, decision), cost_j)
    left_j = _left_j(state, cell)
    received, outage_state = decision.scheduled & (cost_j <= left_j), state.outages
    if experiment.outages != outages.none():
        outage_state, lost = experiment.outages.lose(key, state.outages, decision, truth, cell)
        received &= ~lost
    # Rounding may have spent slightly more than the battery held.
    return Sent(received, as_float(jnp.clip(cost_j, 0, jnp.maximum(left_j, 0))), outage_state)


def _training_settings(state: State, experiment: Experiment) -> dict[str, Any]:
    return {
        "make_optimizer": experiment.make_optimizer,
        "width": _width(experiment),
        "cores": experiment.cores,
        "estimate_on": experiment.estimate_on,
        "divergence_of": experiment.divergence_of,
        "draw_batches": experiment.draw_batches,
        "optimizer_states": state.optimizers,
    }


def _learn(
    draw: RoundKeys, state: State, decision: Decision, sent: Sent, experiment: Experiment
) -> tuple[State, Array]:
    """Trains the scheduled devices, aggregates, estimates and tests; also returns the reported loss."""
    num_devices = decision.scheduled.size
    compression = None
    if experiment.compressor != compressors.none():
        device_keys = keys.per_device(draw.compression, num_devices)
        compression = updates.Compression(experiment.compressor, state.compressor, device_keys, state.residuals)
    trained = updates.train_round(
        keys.per_device(draw.batches, num_devices),
        state.params,
        decision.scheduled,
        state.estimates,
        experiment.data,
        experiment.training,
        experiment.model,
        received=sent.received,
        local_steps=decision.local_steps,
        batch_size=decision.batch_size,
        compression=compression,
        **_training_settings(state, experiment),
    )
    params, server = trained.params, state.server
    if experiment.server_optimizer is not None:
        moved = updates.server_step(state.params, params, experiment.server_optimizer, server)
        arrived = functools.partial(jnp.where, jnp.any(sent.received))
        params, server = jax.tree.map(arrived, moved, (state.params, server))
    # Steps 23 to 25. Devices report the loss of the model they started from, so w~ is known one round late.
    reported_loss = as_float(trained.loss)
    better = reported_loss < state.tilde_reported_loss
    keep = lambda new, old: jax.tree.map(functools.partial(jnp.where, better), new, old)  # noqa: E731
    test_x, test_y = jnp.asarray(experiment.test_x), jnp.asarray(experiment.test_y)
    after = dataclasses.replace(
        state,
        round_index=state.round_index + 1,
        params=params,
        score=evaluate(params, experiment.model, test_x, test_y, experiment.cores),
        tilde_params=keep(state.params, state.tilde_params),
        tilde_score=keep(state.score, state.tilde_score),
        tilde_reported_loss=keep(reported_loss, state.tilde_reported_loss),
        estimates=jax.tree.map(as_float, trained.estimates),
        reports=reported(state, decision, sent, trained),
        residuals=trained.residuals,
        optimizers=trained.optimizer_states,
        server=server,
    )
    return after, reported_loss


def _decide(
    policy: Policy, decides: tuple[str, ...], key: Array, state: State, context: RoundContext
) -> tuple[Any, Decision]:
    """Returns the policy's new state and decision.

    The conditional makes XLA compile the policy separately, so that a run has the same bits alone and in a program with
    other policies. A run that has stopped never gets here. A policy is not asked if nobody is available.
    """
    cell = context.cell

    def decide():
        policy_state, decision = policy.select(key, state.policy, context)
        return policy_state, as_decision(decision, cell, policy.asks_norms)

    zeros = jnp.zeros(checks.num_devices(cell))
    nothing = as_decision(Decision(zeros > 0, zeros, jnp.zeros(()), **dict.fromkeys(decides, zeros)), cell)
    anybody = jnp.any(context.observation.available)
    return lax.cond((state.stop == Stop.NOT_YET) & anybody, decide, lambda: (state.policy, nothing))


def as_decision(decision: Decision, cell: Cell, asks_norms: bool = False) -> Decision:
    """Checks the shapes of a policy's decision and converts it to the precision of the history."""
    scheduled, share = jnp.asarray(decision.scheduled), jnp.asarray(decision.share)
    per_device = (checks.num_devices(cell),)
    if scheduled.shape != per_device or scheduled.dtype != bool or share.shape != per_device:
        raise ValueError(
            f"a policy must return a Decision with booleans and shares of shape {per_device}, one per device, "
            f"got {scheduled.dtype} {scheduled.shape} and {share.dtype} {share.shape}"
        )
    decided: dict[str, Any] = {name: getattr(decision, name) for name in DECIDED}
    for name, value in decided.items():
        if value is None:
            continue
        if jnp.shape(value) not in ((), per_device):
            raise ValueError(f"a policy's {name} must have shape () or {per_device}, got {jnp.shape(value)}")
        if asks_norms and name in WHILE_COMPUTING:
            raise ValueError(f"a policy with asks_norms decides after devices have computed: it cannot decide {name}")
        kind: Any = jnp.int32 if name in ("local_steps", "batch_size") else float
        decided[name] = jnp.broadcast_to(jnp.asarray(value, kind), per_device)
    return Decision(scheduled, as_float(share), as_float(decision.round_s), **decided)


def _is_possible(decision: Decision, truth: Observation, round_s: Array, cell: Cell, training: Training) -> Array:
    scheduled, share = decision.scheduled, decision.share
    tolerance = 1e-5  # for a float32 sum over many devices
    possible = (
        jnp.any(scheduled)
        & jnp.all(jnp.where(scheduled, (share > 0) & truth.available, share == 0))
        & (jnp.sum(share) <= 1 + tolerance)
        & ~jnp.isnan(round_s)
    )
    for values, low, high in decided_limits(decision, cell, training).values():
        possible &= jnp.all(~scheduled | ((values >= low) & (values <= high * (1 + tolerance))))
    return possible


def _all_finite(tree: Any) -> Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _width(experiment: Experiment) -> int | None:
    """Returns how many devices to train at a time.

    By default, this is one on a CPU. An accelerator trains all under a mask if they are few, and else those scheduled.
    """
    if experiment.width != "auto":
        return experiment.width
    if jax.default_backend() == "cpu":
        return 1
    return None if checks.num_devices(experiment.cell) <= _MOST_UNDER_A_MASK else _SIDE_BY_SIDE


_MOST_UNDER_A_MASK = 64
_SIDE_BY_SIDE = 16  # devices that train at a time on an accelerator, beside those of other runs
