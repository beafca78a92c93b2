"""Alg. 3: simulates rounds until the time budget is spent."""

from __future__ import annotations  # short types in help()

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from fcjax import keys
from fcjax.learning import updates
from fcjax.learning.evaluation import Score, evaluate
from fcjax.learning.models import Model, Params
from fcjax.policies.contract import decided_by
from fcjax.runtime.cores import on_cores
from fcjax.runtime.plugins import of_user
from fcjax.simulation.experiment import Experiment, check, may_end_with_world, most_rounds, rounds_of_world, training_of
from fcjax.simulation.records import Record, State, Stop, as_float, no_record, no_reports
from fcjax.simulation.rounds import simulate_round
from fcjax.types import Policy, in_brief, pytree


@pytree
class Run:
    """A finished run.

    Attributes:
      history: (K,) records, with K the largest possible number of rounds.
      num_rounds: () rounds that took place.
      start: score of w_0.
      params: the last model; None in a sweep, which keeps no models.
      tilde_params: w~, the model with the lowest reported loss; None in a sweep.
      stop: () Stop.
    """

    history: Record
    num_rounds: Array | int
    start: Score
    params: Params | None
    tilde_params: Params | None
    stop: Array | Stop

    def __repr__(self) -> str:
        is_known = isinstance(self.stop, int | np.generic | np.ndarray | jax.Array)
        is_one = is_known and np.ndim(self.stop) == 0 and not isinstance(self.stop, jax.core.Tracer)
        if not is_one:
            return in_brief(self)
        return f"{in_brief(self, stop=Stop(int(self.stop)).name.lower())}\n  best_accuracy: {self.best_accuracy:.4f}"

    @property
    def best_accuracy(self) -> Array:
        """The paper's "highest achievable accuracy": the best over all rounds, or that of w_0 without a round."""
        best = jnp.max(self.history.accuracy, axis=-1, initial=-jnp.inf, where=~jnp.isnan(self.history.accuracy))
        return jnp.where(self.num_rounds > 0, best, self.start.accuracy)


def simulate(key: Array, policy: Policy, experiment: Experiment, *, max_rounds: int | None = None) -> Run:
    """Trains under a policy until the next round would end after the budget.

    The whole run is one compiled program that only computes the rounds that take place. `jax.vmap` maps it over keys,
    over any leaf of the experiment, and over the parameters of policies.

    Args:
      key: the random key of the run.
      policy: schedules the devices of every round.
      experiment: cell, data, model and settings.
      max_rounds: the length of the history. By default the most rounds that fit in the budget, given that devices need
        at least `sample_floor_s` per sample. Required if the budget or the cell is traced.
    """
    if not isinstance(policy, Policy):
        raise ValueError(f"policy must be a fcjax.Policy, such as fcjax.policies.by_name('fc'), got {policy!r}")
    if not hasattr(key, "dtype") or jnp.issubdtype(key.dtype, jnp.floating):
        raise ValueError(f"key must be a random key, such as jax.random.key(0), got {key!r}")
    experiment = check(experiment)
    state = of_user("policy: init", lambda: policy.init(experiment.cell))
    decides = decided_by(policy, state, experiment.cell, training_of(experiment))
    is_limited = max_rounds is not None or may_end_with_world(experiment)
    if max_rounds is None:
        max_rounds = most_rounds(experiment, decides)
    elif not isinstance(max_rounds, int) or max_rounds < 1:
        raise ValueError(f"max_rounds must be an integer of 1 or more, got {max_rounds}")
    elif (lasts := rounds_of_world(experiment)) is not None and lasts < max_rounds:
        raise ValueError(f"max_rounds must be at most {lasts}, the rounds of the world, got {max_rounds}")
    first = begin(key, state, experiment)
    run = _compiled(policy, decides, max_rounds, experiment.cores, jax.default_backend())(key, first, experiment)
    _warn_of_faults(run, policy, is_limited=is_limited)
    return run


def _warn_of_faults(run: Run, policy: Policy, *, is_limited: bool) -> None:
    """Warns of a run that ended early or had no round; the outcome of a traced run is not known yet."""
    if isinstance(run.stop, jax.core.Tracer):
        return
    stop, num_rounds = np.asarray(run.stop), np.asarray(run.num_rounds)
    if np.any(stop == Stop.BAD_DECISION):
        warnings.warn(
            f"the decision of {policy} after {num_rounds[stop == Stop.BAD_DECISION].min()} rounds is impossible "
            "(nobody or an unavailable device scheduled, shares that are missing or sum to more than 1, or powers, "
            "frequencies, steps or batches beyond their limits), and the run ends there: fcjax.check_policy, given "
            "cell, training and world of the experiment, says what is wrong",
            stacklevel=3,
        )
    elif not is_limited and np.any(stop == Stop.MAX_ROUNDS):
        warnings.warn(
            f"the run ends after {num_rounds.max()} rounds, before its budget is spent: its world exceeds the limits "
            "that it declares (fcjax.Limits); correct them, or give max_rounds",
            stacklevel=3,
        )
    elif np.any((stop == Stop.BUDGET) & (num_rounds == 0)):
        warnings.warn("no round ends within the budget", stacklevel=3)


CHUNK = 16  # rounds between two checks of whether a run has ended


def _jitted(function: Callable, backend: str) -> Callable:
    """Jits a function of a run. On a CPU, `jax.vmap` maps it sequentially.

    One run keeps a CPU busy. In parallel, every run would cost as many devices and rounds as the largest one, and its
    last bits would differ from those of a single run.
    """
    return jax.jit(jax.custom_batching.sequential_vmap(function) if backend == "cpu" else function)


@functools.lru_cache(maxsize=64)
def _compiled(
    policy: Policy, decides: tuple[str, ...], max_rounds: int, cores: int, backend: str
) -> Callable[[Array, State, Experiment], Run]:
    run = functools.partial(_simulate, policy=policy, decides=decides, max_rounds=max_rounds)
    return _jitted(on_cores(run, cores), backend)


def _simulate(
    key: Array, first: State, experiment: Experiment, *, policy: Policy, decides: tuple[str, ...], max_rounds: int
) -> Run:
    num_chunks = -(-max_rounds // CHUNK)
    room = num_chunks * CHUNK
    nothing = no_record(jnp.shape(experiment.cell.power_w)[0], decides)
    empty = jax.tree.map(lambda x: jnp.broadcast_to(x, (room, *x.shape)), nothing)

    def chunk(carry):
        index, state, history = carry
        state, records = advance(key, state, experiment, policy, max_rounds, decides=decides)
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=index * CHUNK, axis=0)
        return index + 1, state, jax.tree.map(put, history, records)

    def unfinished(carry):
        return (carry[0] < num_chunks) & (carry[1].stop == Stop.NOT_YET)

    _, state, history = lax.while_loop(unfinished, chunk, (jnp.array(0), first, empty))
    return Run(
        history=jax.tree.map(lambda leaf: leaf[:max_rounds], history),
        num_rounds=state.round_index,
        start=first.start,
        params=state.params,
        tilde_params=state.tilde_params,
        stop=jnp.where(state.stop == Stop.NOT_YET, Stop.MAX_ROUNDS, state.stop),
    )


class Starts(NamedTuple):
    """The initial states of what varies; all parameters of policies, worlds and the like are in here."""

    policy: Any
    world: Any
    outages: Any
    compressor: Any


def starts(key: Array, policy_state: Any, experiment: Experiment) -> Starts:
    """Makes the initial states of a run."""
    world_key = jax.random.fold_in(key, keys.Purpose.WORLD)
    world = of_user("world: init", lambda: experiment.world.init(world_key, experiment.cell))
    outage = of_user("outages: init", lambda: experiment.outages.init(experiment.cell))
    return jax.tree.map(jnp.asarray, Starts(policy_state, world, outage, experiment.compressor.parameters))


def begin(key: Array, policy_state: Any, experiment: Experiment) -> State:
    """Initialises a run: steps 1 and 2 of Alg. 3."""
    return begin_from(key, starts(key, policy_state, experiment), experiment)


def begin_from(key: Array, first: Starts, experiment: Experiment) -> State:
    """Initialises a run with given states."""
    first_model = _first_model(experiment.model, jax.default_backend())
    params, score = first_model(key, jnp.asarray(experiment.test_x), jnp.asarray(experiment.test_y))
    optimizers = residuals = None
    num_devices = len(experiment.data.sizes)
    if experiment.keeps_optimizer:
        settings = params, experiment.training, experiment.make_optimizer, num_devices
        optimizers = updates.first_optimizer_states(*settings)
    if experiment.compressor.error_feedback:
        update = jax.eval_shape(lambda tree: ravel_pytree(tree)[0], params)
        residuals = jnp.zeros((num_devices, update.size), update.dtype)
    return State(
        round_index=jnp.array(0),
        elapsed_s=jnp.zeros(()),
        start=score,
        params=params,
        score=score,
        tilde_params=params,
        tilde_score=score,
        tilde_reported_loss=jnp.array(jnp.inf),
        estimates=jax.tree.map(as_float, experiment.estimates),
        reports=no_reports(num_devices),
        policy=first.policy,
        world=first.world,
        outages=first.outages,
        compressor=first.compressor,
        residuals=residuals,
        optimizers=optimizers,
        server=None if experiment.server_optimizer is None else experiment.server_optimizer.init(params),
        stop=jnp.array(Stop.NOT_YET),
    )


@functools.lru_cache(maxsize=64)
def _first_model(model: Model, backend: str) -> Callable[[Array, Array, Array], tuple[Params, Score]]:
    """Compiles the initial model and its test separately, once per model."""

    def first(key, test_x, test_y):
        params = model.init(jax.random.split(key)[0])
        return params, evaluate(params, model, test_x, test_y)

    return _jitted(first, backend)


def advance(
    key: Array,
    state: State,
    experiment: Experiment,
    policy: Policy,
    max_rounds: ArrayLike,
    num_rounds: int = CHUNK,
    *,
    decides: tuple[str, ...] = (),
) -> tuple[State, Record]:
    """Simulates up to `num_rounds` further rounds, at most `max_rounds` in total, and records them, (num_rounds,).

    `decides` names the optional parts of a decision that the policy decides; see `decided_by`.
    """
    experiment = dataclasses.replace(experiment, training=training_of(experiment))
    rounds_key = jax.random.split(key)[1]
    nothing = no_record(jnp.shape(experiment.cell.power_w)[0], decides)

    def another(state):
        round_key = jax.random.fold_in(rounds_key, state.round_index)
        return simulate_round(round_key, state, experiment, policy, decides)

    def step(state, _):
        going = (state.stop == Stop.NOT_YET) & (state.round_index < max_rounds)
        return lax.cond(going, another, lambda state: (state, nothing), state)

    return lax.scan(step, state, length=num_rounds)
