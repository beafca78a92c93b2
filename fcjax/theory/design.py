"""Design by gradient: what each parameter of a cell is worth, the best local training, and the split of a total power.

The objective is the relaxed bound: that of Theorem 3 after K = T/t rounds, where K need not be whole. A parameter has a
best value only if the bound has both a cost and a benefit of it:

- The number of scheduled devices: more devices take longer and lower the penalty B(Pi).
- local_steps: more steps make more progress per round, take longer and drift further apart.
- batch_size: larger batches take longer. The bound assumes full gradients, so it shows no benefit. The simplest
  model of noise has one: delta^2 + sigma^2/d instead of delta^2.
- phi: the bound falls as phi grows, without limit. But phi is not free: it is omega (1 - beta eta/2), and omega belongs
  to the task. What one can choose is the learning rate eta.
- upload_bits, the size of the model: larger models take longer, and the bound has no benefit of them, so the smallest
  would be best. The user must say which loss remains with a model of a given size.
"""

from __future__ import annotations  # short types in help()

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.theory.bounds import Constant, convergence_bound
from fcjax.theory.power import split_power
from fcjax.types import Cell, Estimates, Observation, Training
from fcjax.wireless.access import allocate, scheme_of
from fcjax.wireless.energy import round_energy
from fcjax.wireless.radio import uploads

__all__ = ["Design", "best_training", "sensitivities", "split_power"]

ModelLoss = Callable[[Array], Array]  # bits of the model -> the loss that remains

_QUANTITIES = ("round_s", "energy_j", "bound")
_UNITS = {
    "cell.bandwidth_hz": "Hz",
    "cell.noise_psd_w_hz": "W/Hz",
    "cell.power_w": "W",
    "cell.upload_bits": "bit",
    "cell.radius_m": "m",
    "cell.reference_gain": "1",
    "cell.sample_floor_s": "s",
    "cell.sample_rate_hz": "1/s",
    "cell.cpu_hz": "Hz",
    "cell.capacitance": "W/Hz^3",
    "cell.download_bits": "bit",
    "cell.broadcast_w": "W",
    "training.learning_rate": "1",
    "training.budget_s": "s",
    "training.local_steps": "1",
    "training.batch_size": "1",
    "estimates.rho": "1",
    "estimates.beta": "1",
    "estimates.delta": "1",
    "phi": "1",
}


def sensitivities(
    scheduled: Array,
    observation: Observation,
    cell: Cell,
    training: Training,
    estimates: Estimates,
    phi: ArrayLike = 0.05,
    *,
    constant: Constant = "published",
) -> pd.DataFrame:
    """Returns the derivatives of round time, energy and bound with respect to all parameters of a round, as a table.

    The quantities are `round_s` of `fcjax.allocate`, `energy_j`, the sum of `fcjax.round_energy`, and `bound`, the
    relaxed bound. The scheduled devices stay the same, as do their blocks under OFDMA and their order under TDMA. What
    is random in the observation stays too: gains are proportional to reference_gain radius_m^-path_loss_exponent, and
    computation times to local_steps batch_size (sample_floor_s + x_i/sample_rate_hz), where x_i follows from the
    observed time. A higher `cpu_hz` at the same `sample_floor_s` means more cycles per sample.

    A parameter that differs between devices is scaled for all together. These have no rows: path_loss_exponent,
    scatter, shadowing_db and min_distance_m, because an observation does not tell places from fading; num_samples,
    because only ratios matter; momentum, proximal and battery_j, because no quantity depends on them.

    Args:
      scheduled: (M,) bool, at least one device, all of which can finish.
      observation: gains and computation times.
      cell: the radio and the devices.
      training: learning rate, budget, local steps and batch size.
      estimates: of the loss.
      phi: () of the bound.
      constant: of the bound; see `fcjax.bounds.sampling_constant`.

    Returns:
      One row per quantity and parameter. The columns are `quantity`, its current `quantity_value`, `parameter`, its
      current `value`, a mean over devices, its `unit`, the derivative `per_unit`, and the elasticity
      `percent_per_percent`.
    """
    observation, cell = checks.uplink(observation, checks.whole_cell(cell))
    scheduled = checks.mask("scheduled", scheduled, checks.num_devices(cell))
    training, estimates = _checked_training(training, estimates, phi, constant)
    # A device that is not scheduled may have an infinite computation time, which would make the gradient NaN.
    compute_s = jnp.where(scheduled, jnp.asarray(observation.compute_s), 0)
    observation = dataclasses.replace(observation, compute_s=compute_s)
    parts: dict[str, Any] = {"cell": cell, "training": training, "estimates": estimates}
    given: dict[str, Any] = {"phi": phi}
    given |= {f"{part}.{name}": value for part in parts for name, value in vars(parts[part]).items()}
    if cell.download_bits is None:
        given["cell.broadcast_w"] = None
    values = {name: jnp.asarray(given[name], float) for name in _UNITS if given[name] is not None}
    slopes, found = jax.device_get(_slopes(values, scheduled, observation, **parts, constant=constant))
    if not (np.isfinite(found) & (found > 0)).all():
        raise ValueError(
            "scheduled must have one or more devices, all of which can finish and some of which spend energy, got a "
            f"round of {found[0]:g} s and {found[1]:g} J with a bound of {found[2]:g}"
        )
    rows = []
    for index, quantity in enumerate(_QUANTITIES):
        amount = float(found[index])
        for name, leaf in values.items():
            value = float(np.mean(leaf))
            relative = np.asarray(leaf) / value if value > 0 else np.ones(leaf.shape)
            per_unit = float(np.sum(relative * slopes[name][index]))
            rows.append((quantity, amount, name, value, _UNITS[name], per_unit, per_unit * value / amount))
    columns = ("quantity", "quantity_value", "parameter", "value", "unit", "per_unit", "percent_per_percent")
    return pd.DataFrame(rows, columns=columns)


def _checked_training(
    training: Training, estimates: Estimates, phi: ArrayLike, constant: Constant
) -> tuple[Training, Estimates]:
    training, estimates = checks.reals("training", training), checks.reals("estimates", estimates)
    for name in ("local_steps", "batch_size", "budget_s"):
        checks.positive(f"training.{name}", getattr(training, name), ())
    _relaxed_bound(jnp.array(1), jnp.array(1.0), training, estimates, phi, constant)  # checks the rest
    return training, estimates


def _quantities(
    scheduled: Array,
    observation: Observation,
    cell: Cell,
    training: Training,
    estimates: Estimates,
    phi: ArrayLike,
    constant: Constant,
) -> Array:
    """Returns round time, total energy and relaxed bound, (3,)."""
    decision = allocate(scheduled, observation, cell)
    energy_j = jnp.sum(round_energy(decision, observation, cell, training))
    bound = _relaxed_bound(jnp.sum(scheduled), decision.round_s, training, estimates, phi, constant)
    return jnp.stack([decision.round_s, energy_j, bound])


def _relaxed_bound(
    n: Array, round_s: Array, training: Training, estimates: Estimates, phi: ArrayLike, constant: Constant
) -> Array:
    """Returns the bound after K = T/t rounds; inf if no device is scheduled or the round never ends."""
    ends = (round_s > 0) & jnp.isfinite(round_s)
    return convergence_bound(
        n,
        jnp.where(ends, training.budget_s / jnp.where(ends, round_s, 1), 0),
        **vars(estimates),
        num_samples=training.num_samples,
        learning_rate=training.learning_rate,
        local_steps=training.local_steps,
        phi=phi,
        constant=constant,
    )


@partial(jax.jit, static_argnames="constant")
def _slopes(
    values: dict[str, Array],
    scheduled: Array,
    observation: Observation,
    cell: Cell,
    training: Training,
    estimates: Estimates,
    constant: Constant,
) -> tuple[dict[str, Array], Array]:
    """Returns the derivatives of the quantities by each value, (3,) or (3, M), and the quantities, (3,)."""
    sample_s = observation.compute_s / jnp.asarray(training.local_steps * training.batch_size, float)
    random_s = jnp.maximum(sample_s - cell.sample_floor_s, 0)

    def quantities(values: dict[str, Array]) -> tuple[Array, Array]:
        parts: dict[str, Any] = {"cell": cell, "training": training, "estimates": estimates}
        for name, value in values.items():
            part, _, field = name.partition(".")
            if field:
                parts[part] = dataclasses.replace(parts[part], **{field: value})
        new, steps = parts["cell"], parts["training"].local_steps * parts["training"].batch_size
        nearer = (new.radius_m / cell.radius_m) ** -jnp.asarray(cell.path_loss_exponent)
        slower_s = new.sample_floor_s - cell.sample_floor_s + random_s * (cell.sample_rate_hz / new.sample_rate_hz - 1)
        changed = dataclasses.replace(
            observation,
            gain=observation.gain * (nearer * new.reference_gain / cell.reference_gain),
            compute_s=steps * (sample_s + slower_s),
        )
        found = _quantities(scheduled, changed, **parts, phi=values["phi"], constant=constant)
        return found, found

    return jax.jacrev(quantities, has_aux=True)(values)


class Design(NamedTuple):
    """The best local training for a cell; see `best_training`."""

    num_scheduled: Array  # () n
    local_steps: Array  # () tau
    batch_size: Array  # () d
    learning_rate: Array  # () eta
    phi: Array  # ()
    upload_bits: Array  # () or (M,) bit
    scheduled: Array  # (M,) bool: the fastest n devices
    round_s: Array  # () s
    bound: Array  # () relaxed, with the loss of the model if that is given


def best_training(
    observation: Observation,
    cell: Cell,
    training: Training,
    estimates: Estimates,
    phi: ArrayLike = 0.05,
    *,
    gradient_noise: ArrayLike | None = None,
    tune_learning_rate: bool = False,
    model_loss: ModelLoss | None = None,
    max_local_steps: int = 100,
    max_batch_size: int = 1000,
    constant: Constant = "published",
) -> Design:
    """Returns the devices and the local training that minimise the relaxed bound.

    Solves min over n, tau, d, eta and S of bound(n, K = T/t, tau, delta(d), eta, phi(eta)) + model_loss(S), where t is
    the round time of the fastest n devices and computation times are proportional to tau d. n and tau are always
    chosen, the others only if an argument says what they are good for; see `fcjax.design`.

    For every n, Adam minimises over real numbers from four starts. Then tau and d are rounded one after the other: the
    four nearest whole numbers are tried, and what is not rounded yet is optimised again. This is exact if a relaxed
    bound has a single minimum. There is no proof that it has; the tests compare with a full grid. A result at a limit,
    such as `max_local_steps`, means that the bound has no minimum inside.

    Args:
      observation: gains, and computation times with the steps and the batch size of `training`.
      cell: the radio and the devices.
      training: learning rate, budget, samples per device, and what is not chosen.
      estimates: of the loss; with `gradient_noise`, delta is the divergence of full gradients.
      phi: () of the bound, at the learning rate of `training`.
      gradient_noise: () sigma, the standard deviation of a sample's gradient. If it is given, the batch size is chosen,
        with delta_i^2 + sigma^2/d for delta_i^2. This model treats noise as a lasting divergence, which is pessimistic.
      tune_learning_rate: whether to choose eta, up to the 1/beta to which the theorem holds, and phi with it:
        phi = omega (1 - beta eta/2), where omega follows from `phi`.
      model_loss: the loss that remains with a model of S bits, which JAX can differentiate, positive and falling in S.
        If it is given, S is chosen, up to a factor of 1000 from `cell.upload_bits`, which must be one number;
        `cell.download_bits` is scaled along.
      max_local_steps: the largest tau.
      max_batch_size: the largest d.
      constant: of the bound; see `fcjax.bounds.sampling_constant`.

    Returns:
      The design. Its bound is inf if no device can finish.
    """
    observation, cell = checks.uplink(observation, cell)
    num_devices = checks.num_devices(cell)
    most = checks.whole("max_local_steps", max_local_steps, 1), checks.whole("max_batch_size", max_batch_size, 1)
    training, estimates = _checked_training(training, estimates, phi, constant)
    samples = jnp.broadcast_to(jnp.asarray(training.num_samples, float), (num_devices,))
    beta = jnp.sum(samples * jnp.asarray(estimates.beta, float)) / jnp.sum(samples)
    omega = None
    if tune_learning_rate:
        checks.positive("estimates.beta", beta, ())
        rest = checks.positive("1 - beta training.learning_rate/2", 1 - beta * training.learning_rate / 2, ())
        omega = jnp.asarray(phi / rest)
    if gradient_noise is not None:
        gradient_noise = checks.positive("gradient_noise", gradient_noise, ())
    if model_loss is not None:
        bits = checks.positive("cell.upload_bits", cell.upload_bits, ())
        checks.positive("model_loss(cell.upload_bits)", model_loss(jnp.asarray(bits, float)), ())
    given = (training.local_steps, training.batch_size, training.learning_rate, 1.0)  # the last is a factor of S
    values = jnp.stack([jnp.asarray(value, float) for value in given])
    is_free = (True, gradient_noise is not None, tune_learning_rate, model_loss is not None)
    unit = jnp.ones(4).at[2].set(1 / jnp.where(beta > 0, beta, 1))
    box = jnp.stack([unit * jnp.array([1, 1, 1e-4, 1e-3]), unit * jnp.array([*most, 1, 1e3])])
    problem = _Problem(observation, cell, training, estimates, phi, beta, omega, gradient_noise)
    n, values, bound = _search(problem, values, box, is_free=is_free, model_loss=model_loss, constant=constant)
    local_steps, batch_size, learning_rate, factor = values
    scheduled, round_s = _fastest(n, values, problem)
    return Design(
        num_scheduled=n,
        local_steps=local_steps.astype(int),
        batch_size=batch_size.astype(int),
        learning_rate=learning_rate,
        phi=_phi(learning_rate, problem),
        upload_bits=factor * cell.upload_bits,
        scheduled=scheduled,
        round_s=round_s,
        bound=bound,
    )


class _Problem(NamedTuple):
    observation: Observation
    cell: Cell
    training: Training
    estimates: Estimates
    phi: ArrayLike
    beta: Array  # () the mean
    omega: Array | None  # () to choose the learning rate
    gradient_noise: ArrayLike | None  # () to choose the batch size


def _phi(learning_rate: Array, problem: _Problem) -> Array:
    if problem.omega is None:
        return jnp.asarray(problem.phi)
    return problem.omega * (1 - problem.beta * learning_rate / 2)


@jax.jit
def _fastest(n: Array, values: Array, problem: _Problem) -> tuple[Array, Array]:
    """Returns the fastest set of n devices, (M,) bool, and its round time, () s, for tau, d, eta and a factor of S."""
    observation, cell, training = problem[:3]
    local_steps, batch_size, _, factor = values
    more = local_steps * batch_size / (training.local_steps * training.batch_size)
    observation = dataclasses.replace(observation, compute_s=more * observation.compute_s)
    bits = {name: getattr(cell, name) for name in ("upload_bits", "download_bits")}
    bits = {name: factor * value for name, value in bits.items() if value is not None}
    upload, scheme = uploads(observation, dataclasses.replace(cell, **bits)), scheme_of(cell)
    scheduled, _ = scheme.fastest_set(n, lax.stop_gradient(upload))
    return scheduled, scheme.allocate(scheduled, upload).round_s


def _cost(problem: _Problem, model_loss: ModelLoss | None, constant: Constant, n: Array, values: Array) -> Array:
    """Returns the relaxed bound of the fastest n devices, and the loss of the model."""
    local_steps, batch_size, learning_rate, factor = values
    training = dataclasses.replace(problem.training, local_steps=local_steps, learning_rate=learning_rate)
    estimates = problem.estimates
    if problem.gradient_noise is not None:
        variance = jnp.asarray(estimates.delta) ** 2 + problem.gradient_noise**2 / batch_size
        estimates = dataclasses.replace(estimates, delta=jnp.sqrt(variance))
    _, round_s = _fastest(n, values, problem)
    bound = _relaxed_bound(n, round_s, training, estimates, _phi(learning_rate, problem), constant)
    return bound if model_loss is None else bound + model_loss(factor * problem.cell.upload_bits)


_STARTS = 1.5 * np.array([[-1, -1, -1, -1], [-1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, 1]])  # one row per start
_NEAREST = np.arange(-1, 3)  # whole numbers to try, relative to the one below
_STEPS = 200  # of Adam


def _search(problem: _Problem, values: Array, box: Array, *, is_free: tuple[bool, ...], **static: Any) -> Any:
    """Returns the best n, the best values, (4,), and the bound."""
    each = (checks.num_devices(problem.cell), len(_STARTS), values.size)  # problems: numbers of devices, candidates
    _, has_batch, *others = is_free
    u, values = jnp.broadcast_to(_STARTS, each), jnp.broadcast_to(values, each)
    u, values, cost = _minimise(u, values, jnp.array(is_free), box, problem, **static)
    best = jnp.argmin(cost, axis=1)[:, None, None]
    u, values = (jnp.broadcast_to(jnp.take_along_axis(x, best, axis=1), each) for x in (u, values))

    def rounded(index: int, offset: ArrayLike) -> Array:
        near = jnp.floor(values[..., index]) + jnp.broadcast_to(offset, each[:2])
        return values.at[..., index].set(jnp.clip(near, *box[:, index]))

    left = jnp.array([False, has_batch, *others])
    u, values, cost = _minimise(u, rounded(0, _NEAREST), left, box, problem, **static)
    if has_batch:
        left = jnp.array([False, False, *others])
        parts = [_minimise(u, rounded(1, offset), left, box, problem, **static) for offset in _NEAREST]
        _, values, cost = (jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    best = jnp.argmin(cost)
    return best // cost.shape[1] + 1, values.reshape(-1, values.shape[-1])[best], cost.ravel()[best]


@partial(jax.jit, static_argnames=("model_loss", "constant"))
def _minimise(
    u: Array,
    values: Array,
    is_free: Array,
    box: Array,
    problem: _Problem,
    *,
    model_loss: ModelLoss | None,
    constant: Constant,
) -> tuple[Array, Array, Array]:
    """Minimises over the free values, for each number of devices and candidate, (M, C, 4), at the same time.

    The logarithm of a free value is a sigmoid function of u, between the limits of the box, (2, 4). Returns u, values
    and costs.
    """
    low, high, is_free = (jnp.broadcast_to(x, u.shape) for x in (*jnp.log(box), is_free))
    sizes = jnp.arange(1, len(u) + 1)

    def at(u: Array) -> Array:
        inside = jnp.exp(low + (high - low) * jax.nn.sigmoid(u))
        return jnp.where(is_free, inside, values)

    def log_costs(u: Array) -> tuple[Array, Array]:
        cost = jax.vmap(jax.vmap(partial(_cost, problem, model_loss, constant), (None, 0)))(sizes, at(u))
        return jnp.sum(jnp.log(cost)), jnp.where(jnp.isnan(cost), jnp.inf, cost)

    def step(number: Array, state: Any) -> Any:
        u, memory, _ = state
        slope, cost = jax.grad(log_costs, has_aux=True)(u)
        update, memory = optimizer.update(jnp.where(jnp.isfinite(slope), slope, 0), memory)
        return (
            jnp.where(number < num_steps, optax.apply_updates(u, update), u),
            memory,
            cost,
        )  # the last step only costs

    num_steps = jnp.where(jnp.any(is_free), _STEPS, 0)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.3, _STEPS))
    start = u, optimizer.init(u), jnp.zeros(u.shape[:-1], u.dtype)
    u, _, cost = lax.fori_loop(0, num_steps + 1, step, start)
    return u, at(u), cost
