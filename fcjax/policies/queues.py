"""Policies with a virtual queue of energy per device: OCEAN."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.policies.parameters import available_of, positive, uploads_of
from fcjax.types import Cell, Decision, Policy, RoundContext
from fcjax.wireless.access import round_time
from fcjax.wireless.decisions import as_decided
from fcjax.wireless.energy import computing_energy, round_energy
from fcjax.wireless.radio import Upload, share_with_spare


def ocean(
    v: ArrayLike = 1e-3,
    upload_s: ArrayLike = 0.1,
    budget_j: ArrayLike = 1.0,
    num_rounds: ArrayLike = 100.0,
    slope: ArrayLike = 0.0,
) -> Policy:
    """OCEAN: schedules many devices, but rarely those that have spent more energy than their budget allows.

    J. Xu, H. Wang, "Client Selection and Bandwidth Allocation in Wireless Federated Learning Networks: A Long-Term
    Perspective", IEEE Transactions on Wireless Communications, 2021. Device k has a virtual queue q_k of the energy
    that it has overspent: it begins at 0, and becomes max(q_k + E_k - H_k/T, 0) after a round that costs E_k. Each
    round maximises V eta_t |S| - sum_{k in S} q_k E_k over sets S and shares b. Uploads have a fixed duration, and the
    power is what the share then needs; in this cell, E_k = upload_s (b B N0/h_k^2) (exp(c/b) - 1) with
    c = S ln2/(B upload_s). Only q_k/h_k^2 distinguishes devices, so the best set consists of the first devices in this
    order, and the shares of each such set follow from a convex problem.

    Adapted: E_k includes the energy of computing, which counts for batteries. The power is at most `cell.power_w`, so a
    device needs a least share; one that does not fit beside those before it is passed over. Both make the order a
    heuristic. At least one device is scheduled, if necessary for longer than `upload_s`. An empty queue counts as a
    millionth of the mean allowance where devices are sorted and shares are found, so that the first rounds save energy
    too. V is constant, and queues are never reset. eta_t is linear in t. Only FDMA.

    Args:
      v: J^2, V, the weight of a device against energy.
      upload_s: s, the duration of uploads.
      budget_j: J, H_k of devices whose `cell.battery_j` is infinite; for the others it is the battery.
      num_rounds: T, the rounds for which the budget is meant.
      slope: eta_t = 1 + slope (t/T - 1/2), at least 0: a positive slope schedules more devices in later rounds.
    """
    numbers = {"v": v, "upload_s": upload_s, "budget_j": budget_j, "num_rounds": num_rounds}
    checked = {name: positive(name, value) for name, value in numbers.items()}
    rise = jnp.asarray(checks.within("slope", slope, np.isfinite, "finite", ()), float)

    def init(cell: Cell) -> _Ocean:
        checks.access(cell)
        if cell.access != "fdma":
            raise ValueError(f"ocean splits the bandwidth itself: cell.access must be 'fdma', got {cell.access!r}")
        battery_j = jnp.broadcast_to(jnp.asarray(cell.battery_j, float), checks.num_devices(cell))
        budgets_j = jnp.where(jnp.isfinite(battery_j), battery_j, checked["budget_j"])
        return _Ocean(
            queue_j=jnp.zeros(battery_j.shape),
            allowance_j=budgets_j / checked["num_rounds"],
            v=checked["v"],
            upload_s=checked["upload_s"],
            num_rounds=checked["num_rounds"],
            slope=rise,
        )

    return Policy(init, _select_ocean)


class _Ocean(NamedTuple):
    queue_j: Array  # (M,) J, q_k
    allowance_j: Array  # (M,) J, H_k/T
    v: Array
    upload_s: Array
    num_rounds: Array
    slope: Array


def _select_ocean(key: Array, state: _Ocean, context: RoundContext) -> tuple[_Ocean, Decision]:
    observation, cell = checks.uplink(context.observation, context.cell)
    upload, available = uploads_of(context), available_of(context)
    least_share = share_with_spare(state.upload_s - upload.floor_s, upload)
    queue_j = jnp.maximum(state.queue_j, 1e-6 * jnp.mean(state.allowance_j))
    priority = queue_j / jnp.asarray(observation.gain)
    order = jnp.lexsort((priority, ~available))
    place = _places(order, jnp.where(available, least_share, jnp.inf))

    # What b (exp(c/b) - 1) is multiplied by: the energy of an upload and its price.
    scale_j = state.upload_s * jnp.asarray(cell.bandwidth_hz) * cell.noise_psd_w_hz / jnp.asarray(observation.gain)
    # exp(50) exceeds all signal-to-noise ratios: a device with a larger c cannot send in time, and gets all or nothing.
    c = jnp.minimum(upload.unit_s / state.upload_s, 50)
    problem = _Problem(c, queue_j * scale_j, jnp.minimum(least_share, 1))
    compute_j = jnp.broadcast_to(computing_energy(cell, context.training), priority.shape)
    worth = state.v * jnp.maximum(1 + state.slope * (context.round_index / state.num_rounds - 0.5), 0)

    def solve(size: Array) -> tuple[Array, Array, Array]:
        member = place < size
        share = _best_shares(member, problem)
        power_w = _power(share, state.upload_s, upload, cell)
        price = jnp.where(member, state.queue_j * (compute_j + power_w * state.upload_s) - worth, 0)
        return jnp.sum(price), share, power_w

    price, shares, powers_w = jax.vmap(solve)(jnp.arange(1, order.size + 1))
    best = jnp.argmin(price)
    scheduled, share, power_w = place <= best, shares[best], powers_w[best]
    decision = Decision(scheduled, share, jnp.zeros(()), power_w=power_w)
    timed = as_decided(decision, observation, cell, context.training)
    decision = Decision(scheduled, share, round_time(scheduled, share, *timed), power_w=power_w)
    spent_j = round_energy(decision, observation, cell, context.training)
    return state._replace(queue_j=jnp.maximum(state.queue_j + spent_j - state.allowance_j, 0)), decision


def _places(order: Array, least_share: Array) -> Array:
    """Returns the place of each device among those that fit, (M,), in this order; M for those that do not.

    The first device fits in any case.
    """

    def add(state: tuple[Array, Array], device: Array) -> tuple[tuple[Array, Array], Array]:
        used, number = state
        total = used + least_share[device]
        fits = (total <= 1) | ((number == 0) & ~jnp.any(least_share <= 1))
        place = jnp.where(fits, number, order.size)
        return (jnp.where(fits, total, used), number + fits), place

    _, places = lax.scan(add, (jnp.zeros((), least_share.dtype), jnp.array(0)), order)
    return jnp.zeros(order.shape, int).at[order].set(places)


class _Problem(NamedTuple):
    """min sum_k price_k b_k (exp(c_k/b_k) - 1) subject to sum_k b_k = 1 and b_k >= least_k; (M,) each."""

    c: Array
    price: Array
    least: Array


def _best_shares(member: Array, problem: _Problem) -> Array:
    """Solves the problem for some devices, (M,); the shares of the others are 0.

    The derivative of the price is -price g(x) with x = c/b and g(x) = 1 + (x - 1) exp(x), which grows with x. It is the
    same, -nu, for all shares that are not at a bound, and the shares fall as nu grows.
    """
    least_slope, most_slope = problem.price * _slope(problem.c), problem.price * _slope(problem.c / problem.least)

    def shares(log_nu: Array) -> Array:
        nu = jnp.clip(jnp.exp(log_nu), least_slope, most_slope)
        return jnp.where(member, problem.c / _inverse_slope(nu / problem.price), 0)

    def bisect(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = (low + high) / 2
        too_low = jnp.sum(shares(middle)) > 1
        return jnp.where(too_low, middle, low), jnp.where(too_low, high, middle)

    low = jnp.min(jnp.where(member, jnp.log(least_slope), jnp.inf))
    high = jnp.max(jnp.where(member, jnp.log(most_slope), -jnp.inf))
    _, log_nu = lax.fori_loop(0, _NUM_BISECTIONS, bisect, (low, high))
    share = shares(log_nu)
    return share / jnp.sum(share)


_NUM_BISECTIONS = 50  # of a difference of at most 200, down to rounding


def _slope(x: Array) -> Array:
    """Returns 1 + (x - 1) exp(x), for small x by its series, the sum of x^i (i - 1)/i!."""
    small = jnp.minimum(x, 0.5)
    series = jnp.polyval(jnp.array([(i - 1) / math.factorial(i) for i in range(15, 1, -1)]), small) * small**2
    return jnp.where(x < 0.5, series, 1 + (x - 1) * jnp.exp(x))


def _inverse_slope(slope: Array) -> Array:
    """Solves g(x) = 1 + (x - 1) exp(x) for x > 0.

    g(x) >= x^2/2 and g(1 + ln(1 + g)) >= g bound x from above. g is convex, so Newton's method descends from there.
    """

    def step(_: int, x: Array) -> Array:
        return x - (_slope(x) - slope) / (x * jnp.exp(x))

    return lax.fori_loop(0, 12, step, jnp.minimum(jnp.sqrt(2 * slope), 1 + jnp.log1p(slope)))


def _power(share: Array, upload_s: Array, upload: Upload, cell: Cell) -> Array:
    """Returns the power with which each device sends its bits in time, (M,) W, at most that of the cell.

    Devices without a share have the power of the cell.
    """
    most_w = jnp.asarray(cell.power_w)
    safe = jnp.where(share > 0, share, 1)
    # unit_s/floor_s is the signal-to-noise ratio over the whole bandwidth at the power of the cell.
    needed = safe * jnp.expm1(upload.unit_s / (upload_s * safe)) * (upload.floor_s / upload.unit_s)
    return jnp.where(share > 0, jnp.minimum(needed, 1), 1) * most_w
