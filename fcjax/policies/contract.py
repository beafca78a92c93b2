"""The contract of policies and worlds: `check_policy` and `check_world` find faults before a long sweep does."""

from __future__ import annotations  # short types in help()

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fcjax import checks
from fcjax.runtime.plugins import of_user
from fcjax.types import (
    Cell,
    Compressor,
    Decision,
    Estimates,
    Observation,
    Outages,
    Policy,
    Reports,
    RoundContext,
    Training,
    World,
)
from fcjax.wireless import ofdma, worlds
from fcjax.wireless.access import round_time
from fcjax.wireless.decisions import DECIDED, WHILE_COMPUTING, as_decided, decided_limits


def check_policy(
    policy: Policy,
    cell: Cell,
    training: Training | None = None,
    *,
    world: World | None = None,
    name: str = "policy",
    num_rounds: int = 256,
    ignores_labels: bool = True,
    seed: int = 0,
) -> None:
    """Raises ValueError if a policy violates the contract.

    A policy must schedule at least one device in every round, and only available ones. Its shares must sum to 1 (at
    most 1 under OFDMA and TDMA) and be 0 for devices that are not scheduled, and its round time must be that of its
    shares. What it decides besides must be within the limits of cell and training. It must be a pure function with the
    same decisions under `jax.jit` and `jax.vmap`, and it must keep the structure of its state. All this is checked in
    random rounds, separately and in sequence.

    Args:
      policy: the policy.
      cell: the cell of the random rounds.
      training: the training settings that the policy sees.
      world: draws the random rounds; by default `fcjax.worlds.redrawn()`. Give the world of your experiment if devices
        are not always available. If the cell has finite batteries, devices drop out at random.
      name: the policy's name in error messages.
      num_rounds: the number of random rounds.
      ignores_labels: whether to also check that decisions do not depend on how devices are numbered. For policies that
        draw random numbers, frequencies are compared. Use False for a policy that takes turns by index.
      seed: the seed of the random rounds.
    """
    training = Training() if training is None else training
    num_rounds = checks.whole("num_rounds", num_rounds, 2)
    if not isinstance(cell, Cell):
        raise ValueError(f"cell must be a fcjax.Cell, such as experiment.cell, got {type(cell).__name__}")
    cell = checks.whole_cell(cell)
    if not isinstance(policy, Policy):
        raise ValueError(f"{name} must be a fcjax.Policy(init, select), got {type(policy).__name__}")
    # As in a run, where the data determine it.
    num_samples = np.asarray(np.broadcast_to(training.num_samples, checks.num_devices(cell)), np.int32)
    training = dataclasses.replace(training, num_samples=num_samples)
    draws = jax.random.split(jax.random.key(seed), (3, num_rounds))
    # NumPy arrays can be sliced without compiling.
    world = worlds.redrawn() if world is None else world
    world_state = world.init(jax.random.key(seed), cell)
    contexts = jax.device_get(_random_contexts(world.observe, draws[0], world_state, cell, training))
    contexts = jax.tree.map(lambda leaf: leaf[np.any(contexts.observation.available, axis=-1)], contexts)
    if not len(contexts.elapsed_s):
        raise ValueError(f"{name} cannot be checked: no device is available in {num_rounds} rounds of the world")
    num_rounds = len(contexts.elapsed_s)
    draws = draws[:, :num_rounds]
    state = of_user(f"{name}: init", lambda: policy.init(cell))
    check_traces(policy, state, cell, training, name=name, twice=True)
    together = _decide_all(policy.select, draws[1], state, contexts)
    _check_values(together, contexts, name)
    last_state, in_turn = _decide_in_turn(policy.select, draws[1], state, contexts)
    _check_values(in_turn, contexts, name)
    _check_same(together, in_turn, 1 if _differ(state, last_state) else num_rounds, name)
    if ignores_labels:
        _check_labels(policy, cell, contexts, draws[1], draws[2], together, name)


def random_context(key: Array, cell: Cell, training: Training) -> RoundContext:
    """Draws a round: a random observation, estimates within a factor of 10 of the paper's initial ones, and reports."""
    draw_key, estimate_key, time_key = jax.random.split(key, 3)
    _, observation = worlds.redrawn().observe(draw_key, (), cell, training)
    return _context(estimate_key, time_key, observation, cell, training)


def _context(
    estimate_key: Array, time_key: Array, observation: Observation, cell: Cell, training: Training
) -> RoundContext:
    num_devices = checks.num_devices(cell)
    available = jnp.broadcast_to(jnp.asarray(observation.available), num_devices)
    observation = dataclasses.replace(observation, available=available)
    factor = 10 ** jax.random.uniform(estimate_key, (3, num_devices), minval=-1.0, maxval=1.0)
    rho, beta, delta = (start * row for start, row in zip((1.5, 12.0, 2.0), factor, strict=True))
    elapsed_s = jax.random.uniform(time_key) * training.budget_s
    reports = _random_reports(jax.random.fold_in(estimate_key, 1), num_devices)
    return RoundContext(observation, Estimates(rho, beta, delta), cell, training, elapsed_s, jnp.array(1), reports)


def _random_reports(key: Array, num_devices: int) -> Reports:
    """Draws reports of devices, some of which have never been scheduled."""
    loss, norm, energy_j, seen = jax.random.uniform(key, (4, num_devices), minval=0.1, maxval=2.0)
    often = jnp.floor(seen * 2).astype(int)
    never = often == 0
    loss, norm, energy_j = (jnp.where(never, 0, values) for values in (loss, norm, energy_j))
    return Reports(loss, norm, jnp.where(never, -1, 0), often, energy_j)


# What is compiled here runs once: XLA need not optimise it.
_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.partial(jax.jit, static_argnums=0, compiler_options=_QUICKLY)
def _random_contexts(observe: Any, keys: Array, world_state: Any, cell: Cell, training: Training) -> RoundContext:
    """Draws the rounds of one run: its world's observations, random estimates, and increasing elapsed time."""

    def one(state, drawn):
        index, key = drawn
        draw_key, estimate_key, time_key = jax.random.split(key, 3)
        state, observation = worlds.observe(observe, draw_key, state, cell, training)
        context = _context(estimate_key, time_key, observation, cell, training)
        # Devices drop out at random where batteries may run out, but not all of them.
        present = jnp.asarray(context.observation.available)
        has_energy = jax.random.uniform(jax.random.fold_in(time_key, 1), present.shape) < 0.7
        stays = present & (has_energy | jnp.all(jnp.isinf(jnp.asarray(cell.battery_j))))
        available = jnp.where(jnp.any(stays), stays, present)
        observation = dataclasses.replace(context.observation, available=available)
        elapsed_s = jnp.asarray(training.budget_s, float) * index / len(keys)
        return state, dataclasses.replace(context, observation=observation, round_index=index, elapsed_s=elapsed_s)

    return lax.scan(one, jax.tree.map(jnp.asarray, world_state), (jnp.arange(len(keys)), keys))[1]


@functools.partial(jax.jit, static_argnums=0, compiler_options=_QUICKLY)
def _decide_all(select: Any, keys: Array, state: Any, contexts: RoundContext) -> Decision:
    return jax.vmap(lambda key, context: select(key, state, context)[1])(keys, contexts)


@functools.partial(jax.jit, static_argnums=0, compiler_options=_QUICKLY)
def _decide_in_turn(select: Any, keys: Array, state: Any, contexts: RoundContext) -> tuple[Any, Decision]:
    def step(state, drawn):
        state, decision = select(drawn[0], state, drawn[1])
        return state, decision

    return lax.scan(step, jax.tree.map(jnp.asarray, state), (keys, contexts))


@jax.jit
@jax.vmap
def _round_times(decision: Decision, share: Array, context: RoundContext) -> Array:
    decided = as_decided(decision, context.observation, context.cell, context.training)
    return round_time(decision.scheduled, share, *decided)


def check_traces(
    policy: Policy, state: Any, cell: Cell, training: Training, *, name: str = "policy", twice: bool = False
) -> tuple[str, ...]:
    """Checks that JAX can trace a policy, and that its results have the right shapes: `check_policy`, the cheap part.

    With `twice`, also that tracing it again gives the same. Returns which optional parts of a decision it decides.
    """
    key = jax.random.key(0)
    context = jax.eval_shape(random_context, key, cell, training)
    try:
        hash(policy.select)
    except TypeError as error:
        raise ValueError(
            f"{name}: select must be a function, got an unhashable {type(policy.select).__name__}"
        ) from error

    def trace() -> Any:
        # A new function each time, because JAX caches traces.
        return jax.make_jaxpr(lambda *args: policy.select(*args), return_shape=True)(key, state, context)

    jaxpr, shape = of_user(f"{name}: select", trace)
    if not (isinstance(shape, tuple) and len(shape) == 2 and isinstance(shape[1], Decision)):
        raise ValueError(f"{name} must return (state, fcjax.Decision), got {_type(shape)}")
    new_state, decision = shape
    per_device = (checks.num_devices(cell),)
    fields = ("scheduled", per_device, bool), ("share", per_device, float), ("round_s", (), float)
    for field, expected, kind in fields:
        found = getattr(decision, field)
        if not isinstance(found, jax.ShapeDtypeStruct):
            raise ValueError(f"{name}: {field} must be an array, got {type(found).__name__}")
        if found.shape != expected or (jnp.issubdtype(found.dtype, jnp.floating) != (kind is float)):
            got = f"{found.dtype} of shape {found.shape}"
            raise ValueError(f"{name}: {field} must be {kind.__name__} of shape {expected}, got {got}")
    decides = tuple(field for field in DECIDED if getattr(decision, field) is not None)
    for field in decides:
        found = getattr(decision, field)
        if found.shape not in ((), per_device):
            raise ValueError(f"{name}: {field} must have shape () or {per_device}, got {found.shape}")
        if policy.asks_norms and field in WHILE_COMPUTING:
            raise ValueError(f"{name} asks for norms, so it decides after devices have computed: {field} must be None")
    _check_state(name, state, new_state)
    if not twice:
        return decides
    again, _ = of_user(f"{name}: select", trace)
    same_constants = all(np.array_equal(a, b) for a, b in zip(jaxpr.consts, again.consts, strict=False))
    if str(jaxpr) != str(again) or not same_constants:
        raise ValueError(f"{name} is not a pure function: two calls with the same arguments differ")
    return decides


def decided_by(policy: Policy, state: Any, cell: Cell, training: Training) -> tuple[str, ...]:
    """Returns which optional parts of a decision a policy decides; checks the policy when it is first traced."""
    leaves, structure = jax.tree.flatten((state, cell, training))
    kind = policy, structure, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
    if kind not in _decided:
        if len(_decided) >= _MOST_KINDS:
            _decided.clear()
        _decided[kind] = check_traces(policy, state, cell, training)
    return _decided[kind]


_decided: dict[tuple, tuple[str, ...]] = {}
_MOST_KINDS = 1000  # so that policies made in a loop do not fill the memory


def check_world(world: World, cell: Cell, training: Training | None = None, *, num_rounds: int = 256) -> None:
    """Raises ValueError if a world violates the contract.

    A world must be a pair of pure functions that JAX can trace. It must keep the structure of its state, and draw gains
    and computation times that are finite and not negative.
    """
    training = Training() if training is None else training
    key = jax.random.key(0)
    state = of_user("world: init", lambda: jax.tree.map(jnp.asarray, world.init(key, cell)))
    shape = of_user("world: observe", lambda: jax.eval_shape(world.observe, key, state, cell, training))
    if not (isinstance(shape, tuple) and len(shape) == 2 and isinstance(shape[1], Observation)):
        raise ValueError(f"world: observe must return (state, fcjax.Observation), got {_type(shape)}")
    new_state, observation = shape
    per_device = (checks.num_devices(cell),)
    for field in ("gain", "compute_s"):
        found: Any = getattr(observation, field)
        if found.shape != per_device or not jnp.issubdtype(found.dtype, jnp.floating):
            raise ValueError(f"world: {field} must be float of shape {per_device}, got {found.dtype} {found.shape}")
    _check_state("world: observe", state, new_state)
    if num_rounds < 2:
        return
    keys = jax.random.split(key, num_rounds)
    seen = jax.device_get(_observe_all(world.observe, keys, state, cell, training))
    for field in ("gain", "compute_s"):
        values = np.asarray(getattr(seen, field))
        bad = ~np.isfinite(values) | (values < 0)
        if bad.any():
            round_, device = (int(i) for i in np.argwhere(bad)[0])
            raise ValueError(
                f"world: {field} must be zero or more, and finite; device {device} has {values[round_, device]:g} in "
                f"round {round_}"
            )


def check_outages(outages: Outages, cell: Cell) -> None:
    """Raises ValueError if a model of outages violates the contract: the shapes of its results."""
    key, num_devices = jax.random.key(0), checks.num_devices(cell)
    state = of_user("outages: init", lambda: jax.tree.map(jnp.asarray, outages.init(cell)))
    everyone = jnp.ones(num_devices, bool)
    decision = Decision(everyone, jnp.full(num_devices, 1 / num_devices), jnp.ones(()))
    observation = Observation(jnp.ones(num_devices), jnp.ones(num_devices))
    shape = of_user("outages: lose", lambda: jax.eval_shape(outages.lose, key, state, decision, observation, cell))
    lost: Any = shape[1] if isinstance(shape, tuple) and len(shape) == 2 else None
    if getattr(lost, "shape", None) != (num_devices,) or lost.dtype != bool:
        raise ValueError(f"outages: lose must return (state, booleans of shape ({num_devices},)), got {shape}")
    _check_state("outages: lose", state, shape[0])


def check_compressor(compressor: Compressor) -> None:
    """Raises ValueError if a compressor violates the contract on shapes and numbers of bits."""
    update = jax.ShapeDtypeStruct((7,), jnp.float32)
    decoded = of_user(
        "compressor: apply",
        lambda: jax.eval_shape(compressor.apply, jax.random.key(0), compressor.parameters, update),
    )
    if getattr(decoded, "shape", None) != (7,) or not jnp.issubdtype(decoded.dtype, jnp.floating):
        raise ValueError(f"compressor: apply must return floats of the shape of the update, (7,), got {decoded}")
    checks.scalar("compressor: bits", of_user("compressor: bits", lambda: compressor.bits(7)), checks.not_negative)


def _check_state(what: str, before: Any, after: Any) -> None:
    kind = lambda leaf: f"{jnp.result_type(leaf)} {jnp.shape(leaf)}"  # noqa: E731
    old, new = (jax.tree.map(kind, state) for state in (before, after))
    if old != new:
        raise ValueError(
            f"{what} must keep the structure, types and shapes of its state: it was {old}, but is {new} after a round"
        )


@functools.partial(jax.jit, static_argnums=0, compiler_options=_QUICKLY)
def _observe_all(observe: Any, keys: Array, state: Any, cell: Cell, training: Training) -> Observation:
    return lax.scan(lambda state, key: worlds.observe(observe, key, state, cell, training), state, keys)[1]


def _check_values(decision: Decision, contexts: RoundContext, name: str) -> None:
    scheduled, share, round_s = (np.asarray(x) for x in (decision.scheduled, decision.share, decision.round_s))
    total = share.sum(-1, dtype=np.float64)
    tolerance = 1e-5 if share.dtype == np.float32 else 1e-9
    usable = jnp.where(decision.share > 0, decision.share, 0)
    access, partly = contexts.cell.access, ~np.asarray(ofdma.is_whole(share, contexts.cell.num_blocks))
    true_s = np.asarray(_round_times(decision, usable, contexts))
    available = np.asarray(contexts.observation.available)
    with np.errstate(invalid="ignore"):
        faults = {
            "schedules nobody": ~scheduled.any(-1),
            "schedules a device that is not available": (scheduled & ~available).any(-1),
            "gives shares that are not numbers": ~np.isfinite(share).all(-1),
            "gives negative shares": (share < 0).any(-1),
            "gives a share to a device that is not scheduled": ((share != 0) & ~scheduled).any(-1),
            "schedules a device without a share": ((share == 0) & scheduled).any(-1),
            "gives shares that do not sum to 1": ~(np.abs(total - 1) <= tolerance) & (access == "fdma"),
            "gives shares that sum to more than 1": ~(total <= 1 + tolerance),
            "gives shares that are not whole blocks": partly.any(-1) & (access == "ofdma"),
            "gives a round time that does not match its shares": ~(np.abs(round_s - true_s) <= 1e-4 * true_s),
        }
    cell, training = jax.tree.map(lambda leaf: leaf[0], (contexts.cell, contexts.training))
    for field, (decided, low, high) in decided_limits(decision, cell, training).items():
        values = np.broadcast_to(np.reshape(decided, (len(scheduled), -1)), scheduled.shape)
        outside = scheduled & ~((values >= low) & (values <= np.asarray(high) * (1 + tolerance)))
        if outside.any():
            round_, device = np.argwhere(outside)[0]
            most = np.broadcast_to(high, scheduled.shape[1:])[device]
            raise ValueError(
                f"{name} gives device {device} a {field} of {values[round_, device]:g}, in {outside.any(-1).sum()} of "
                f"{len(scheduled)} random rounds; it must be positive and at most {most:g}"
            )
    for fault, where in faults.items():
        if where.any():
            first = int(np.argmax(where))
            raise ValueError(
                f"{name} {fault}, in {where.sum()} of {len(where)} random rounds; in the first such round "
                f"{_count(scheduled[first].sum())} scheduled, the shares sum to {total[first]:.6g}, and the round "
                f"takes {true_s[first]:.6g} s (the policy says {round_s[first]:.6g} s){_ADVICE.get(fault, '')}"
            )


_ADVICE = {"schedules nobody": "; schedule at least one available device in every round"}


def _count(number: int) -> str:
    return "1 device is" if number == 1 else f"{number} devices are"


def _differ(before: Any, after: Any) -> bool:
    leaves = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return not all(bool(jnp.all(jnp.asarray(a) == jnp.asarray(b))) for a, b in leaves)


def _check_same(together: Decision, in_turn: Decision, count: int, name: str) -> None:
    """Checks that the first `count` decisions are the same under vmap and alone."""
    differs = np.any(together.scheduled != in_turn.scheduled, axis=-1)[:count]
    if np.mean(differs) > _TURNED:
        raise ValueError(f"{name} decides differently under jax.vmap, in {differs.sum()} of {count} rounds")


_TURNED = 0.02  # fraction of decisions that rounding may change, where two choices are equally good


def _check_labels(
    policy: Policy, cell: Cell, contexts: RoundContext, keys: Array, other_keys: Array, decision: Decision, name: str
) -> None:
    num_devices = checks.num_devices(cell)
    order = np.random.default_rng(0).permutation(num_devices)

    def relabelled(tree, shape):
        return jax.tree.map(lambda x: np.asarray(x)[..., order] if np.shape(x) == shape else x, tree)

    per_device = (num_devices,)
    state, relabelled_state = policy.init(cell), policy.init(relabelled(cell, per_device))
    in_all = (len(keys), num_devices)
    if np.array_equal(_decide_all(policy.select, other_keys, state, contexts).scheduled, decision.scheduled):
        other = _decide_all(policy.select, keys, relabelled_state, relabelled(contexts, in_all))
        differs = np.any(other.scheduled != decision.scheduled[:, order], axis=-1)
        if differs.mean() > _TURNED:
            raise ValueError(
                f"{name} depends on how devices are numbered, in {differs.sum()} of {len(differs)} rounds; if that is "
                "meant, as in a policy that takes turns, use check_policy(..., ignores_labels=False)"
            )
        return
    one = jax.tree.map(lambda x: np.broadcast_to(x[0], np.shape(x)), contexts)
    before = _decide_all(policy.select, keys, state, one)
    after = _decide_all(policy.select, keys, relabelled_state, relabelled(one, in_all))
    often, relabelled_often = (np.asarray(d.scheduled).mean(0) for d in (before, after))
    deviation = np.sqrt(0.5 / len(keys))  # upper bound for the difference of two frequencies
    if np.max(np.abs(often[order] - relabelled_often)) > 5 * deviation:
        raise ValueError(
            f"{name} depends on how devices are numbered: it schedules them in {often[order]} of all rounds, and in "
            f"{relabelled_often} once they are renumbered; if that is meant, as in a policy that takes turns, use "
            "check_policy(..., ignores_labels=False)"
        )


def _type(shape: Any) -> str:
    """Returns the type of a result, or the types of the parts of a tuple."""
    if type(shape) is tuple:
        return f"({', '.join(map(_type, shape))})"
    return "array" if isinstance(shape, jax.ShapeDtypeStruct) else type(shape).__name__
