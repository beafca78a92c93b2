"""Random rounds as a policy sees them, for tests of selection rules against their published formulas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import fcjax


def draw(rng, num_devices, *, available=True, **cell):
    """Draws a round in the middle of a run: unequal devices and data, and reports of different age.

    Args:
      rng: a NumPy generator.
      num_devices: M.
      available: whether all devices are available; otherwise each is with probability 0.7, and at least one.
      cell: further fields of `fcjax.Cell`.
    """
    round_index = int(rng.integers(1, 50))
    last_round = rng.integers(-1, round_index, num_devices)
    reported = last_round >= 0
    present = np.ones(num_devices, bool) if available else rng.uniform(size=num_devices) < 0.7
    present[rng.integers(num_devices)] = True
    spread = lambda middle, decades: np.float32(middle * 10 ** rng.uniform(-decades, decades, num_devices))  # noqa: E731
    return fcjax.RoundContext(
        fcjax.Observation(jnp.asarray(spread(1e-11, 1.5)), jnp.asarray(spread(0.5, 0.5)), jnp.asarray(present)),
        fcjax.Estimates(*(jnp.asarray(spread(middle, 0.5)) for middle in (1.5, 12.0, 2.0))),
        fcjax.Cell(20e6, 10**-20.4, spread(0.01, 0.5), np.float32(1.6e6), **cell),
        fcjax.Training(num_samples=jnp.asarray(np.float32(rng.integers(200, 5000, num_devices)))),
        elapsed_s=jnp.asarray(np.float32(rng.uniform(1, 50))),
        round_index=jnp.asarray(round_index),
        reports=fcjax.Reports(
            loss=jnp.asarray(np.where(reported, spread(1.0, 1.0), 0), jnp.float32),
            update_norm=jnp.asarray(np.where(reported, spread(1.0, 1.0), 0), jnp.float32),
            last_round=jnp.asarray(last_round),
            times_scheduled=jnp.asarray(np.where(reported, rng.integers(1, 50, num_devices), 0)),
            energy_j=jnp.asarray(np.where(reported, spread(1.0, 1.0), 0), jnp.float32),
        ),
    )


def decide_all(policies, rounds, key, states=None):
    """Returns the decisions, with NumPy arrays, of policies from one factory, each in its round, with the same key.

    The states are the initial ones unless they are given.
    """
    states = states or [policy.init(context.cell) for policy, context in zip(policies, rounds, strict=True)]
    together = (jax.tree.map(lambda *leaves: np.stack(leaves), *trees) for trees in (states, rounds))
    decided = jax.device_get(_select_all(policies[0].select, key, *together))
    return [jax.tree.map(lambda leaf, i=i: leaf[i], decided) for i in range(len(rounds))]


@functools.partial(jax.jit, static_argnums=0)
def _select_all(select, key, states, rounds):
    return jax.vmap(lambda state, context: select(key, state, context)[1])(states, rounds)


def chosen(decision):
    """Returns the set of scheduled devices."""
    return set(np.flatnonzero(decision.scheduled).tolist())


def present(context):
    """Returns the list of available devices."""
    return np.flatnonzero(context.observation.available).tolist()


def best(scores, devices, n):
    """Returns the n devices with the largest scores, or all, found one after another."""
    left, winners = list(devices), set()
    while left and len(winners) < n:
        winner = max(left, key=lambda device: scores[device])
        left.remove(winner)
        winners.add(winner)
    return winners


def gumbels(key, num_devices):
    """Returns the Gumbel variables with which a policy draws devices without replacement."""
    return [float(jax.random.gumbel(jax.random.fold_in(key, device))) for device in range(num_devices)]


@functools.partial(jax.jit, static_argnums=0)
def select_by(select, key, state, context):
    return select(key, state, context)


def decide(policy, context, key=None):
    """Returns the decision of a policy in its initial state."""
    key = jax.random.key(0) if key is None else key
    return select_by(policy.select, key, policy.init(context.cell), context)[1]


def in_double(context):
    """Returns the same numbers in float64."""
    is_single = lambda leaf: getattr(leaf, "dtype", None) == np.float32  # noqa: E731
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64) if is_single(leaf) else leaf, context)


@functools.partial(jax.jit, static_argnums=1)
def uniforms(key, num_devices):
    """Draws a number for each device from its own key."""
    return jnp.stack([jax.random.uniform(jax.random.fold_in(key, device)) for device in range(num_devices)])


def matched(policy, number):
    """Says that all decisions were those of the formula; `pytest -n 0 -s` shows it."""
    print(f"\n{policy}: {number} contexts, 0 mismatches")
