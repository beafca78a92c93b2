"""Least energy: shares, powers and CPU frequencies with which a set of devices meets a deadline at the least energy.

A device that sends for time x at spectral efficiency e (nats/s/Hz) needs the share gamma = S ln2/(B x e) of the
bandwidth and spends E0 phi(e) on sending, with phi(e) = (exp(e) - 1)/e. E0 = N0 S ln2/h^2 is what sending costs over
infinite bandwidth, where it takes floor = E0/P at full power P. If computing takes c and costs A at full frequency, it
costs A c^2/y^2 in time y. So the problem is

    min over x, y, e of sum_i E0 phi(e) + A c^2/y^2,   x + y <= D,   y >= c,   floor phi(e) <= x,   sum_i gamma_i <= 1,

where D is the time between the download and the deadline. All terms are sums of powers with positive coefficients: in
the logarithms it is convex. The least energy of a device is a convex function of its share, so there is a price lambda
of bandwidth at which shares sum to 1 and each device minimises its own energy + lambda gamma. As lambda grows, a device
follows a path on which e and x grow:

    x = min(D - c, max(x_free, floor phi(e))),   x_free/(D - x_free)^3 = E0 psi(e)/(2 A c^2 e),
    lambda gamma = E0 psi(e)/e max(1, (1 + tau/P)/(1 + psi(e)/(e phi(e)))),   tau = 2 A c^2/y^3,

with psi(e) = e^2 phi'(e). x_free balances the prices of time of computing and sending; the other terms of x are the
limits of frequency and power. The path ends at the e with which the device just finishes at full power and frequency.
Newton's method finds e for a price, and the price at which shares sum to 1; brackets safeguard both.

Numerically, a = (phi - 1)/e and b = psi/e^2 = 1 + (e - 1) a stay accurate at small e.
"""

from __future__ import annotations  # short types in help()

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.types import Cell, Decision, Observation, Training
from fcjax.wireless.energy import computing_energy
from fcjax.wireless.fdma import allocate_uploads
from fcjax.wireless.radio import Upload, share_with_spare, spare_with_share, uploads


def least_energy(
    scheduled: Array, deadline_s: ArrayLike, observation: Observation, cell: Cell, training: Training | None = None
) -> tuple[Array, Decision]:
    """Returns the least energy with which the scheduled devices finish by a deadline, and the decision that needs it.

    Solves min over shares gamma, powers P <= cell.power_w and frequencies f <= cell.cpu_hz of sum(round_energy),
    subject to compute_s cell.cpu_hz/f + upload_bits / rate(gamma, P) <= deadline_s for each scheduled device and
    sum(gamma) <= 1. With a download, devices compute after it. It is a geometric program, solved exactly. Only FDMA.

    Args:
      scheduled: (M,) bool.
      deadline_s: () s since the round began; more than 1e9 s counts as 1e9 s.
      observation: gains and computation times.
      cell: the radio and the devices.
      training: local steps and batch size; by default `Training()`.

    Returns:
      The pair (energy_j, decision). energy_j, () J, is the sum of `fcjax.round_energy` of the decision. If no device is
      scheduled, it is 0. If the scheduled devices cannot finish by the deadline, it is inf. It is differentiable in the
      deadline and in every leaf of observation and cell, by the envelope theorem. The decision has shares, powers,
      frequencies and the deadline as round time. If the devices cannot finish by the deadline, it is the fastest
      decision, that of `fcjax.allocate`, at full power and frequency.
    """
    training = Training() if training is None else training
    observation, cell = checks.uplink(observation, cell)
    if cell.access != "fdma":
        raise ValueError(f"least_energy splits the bandwidth itself: cell.access must be 'fdma', got {cell.access!r}")
    scheduled = checks.mask("scheduled", scheduled, checks.num_devices(cell))
    deadline_s = checks.not_negative_or_infinite("deadline_s", deadline_s, ())
    return _decide(scheduled, deadline_s, observation, cell, computing_energy(cell, training))


_LONGEST_S = 1e9
_SLOWEST = 1e-12  # the shortest computation at full frequency, relative to sending: 0 would take no frequency at all
_CHEAPEST_J = 1e-30  # less energy of computing counts as none when times are balanced
_MOST_NATS = 80.0  # no signal-to-noise ratio reaches exp(80), which is within the range of float32


class _Problem(NamedTuple):
    """The scheduled devices, (M,) each; numbers of the others are harmless."""

    unit_s: Array  # S ln2/B: the time of sending at 1 nat/s/Hz over the whole band
    floor_s: Array  # N0 S ln2/(P h^2): the time of sending over infinite bandwidth at full power
    spare_s: Array  # until the deadline, after computing and sending for floor_s at full frequency and power
    compute_s: Array  # c: at full frequency
    compute_j: Array  # A: at full frequency
    power_w: Array  # P: full power
    log_most: Array  # log of the efficiency with which a device finishes in time at full power and frequency

    @property
    def send_s(self) -> Array:
        """The longest time of sending, D - c."""
        return self.floor_s + self.spare_s


class _Plan(NamedTuple):
    """What devices do, (M,) each: shares, and powers and frequencies as fractions of the full ones."""

    share: Array
    power: Array
    speed: Array


@jax.jit
def _decide(
    scheduled: Array, deadline_s: ArrayLike, observation: Observation, cell: Cell, compute_j: Array
) -> tuple[Array, Decision]:
    upload = uploads(observation, cell)
    dtype = upload.unit_s.dtype
    deadline_s = jnp.minimum(jnp.asarray(deadline_s, dtype), _LONGEST_S)
    fastest = allocate_uploads(scheduled, upload)
    # Up to rounding, so that a set can finish by its own round time.
    in_time = fastest.round_s <= deadline_s * (1 + 8 * np.finfo(dtype).eps)
    solved = in_time & jnp.any(scheduled)

    member = scheduled & solved
    problem = _problem(member, deadline_s, fastest, upload, observation.compute_s, compute_j, cell.power_w)
    log_e, log_price = _solve(member, problem)
    point = _point(log_e, problem)
    plan = _plan(member, point, problem)
    energy_j = _energy(member, plan, _price_of_time(point, log_price, problem), problem)

    power_w, cpu_hz = (jnp.broadcast_to(jnp.asarray(x, dtype), member.shape) for x in (cell.power_w, cell.cpu_hz))
    power_w = jnp.where(power_w > 0, power_w, 1e-19)  # decided powers are positive
    return jnp.where(solved, energy_j, jnp.where(jnp.any(scheduled), jnp.inf, 0)), Decision(
        scheduled=scheduled,
        share=jnp.where(solved, plan.share, fastest.share),
        round_s=jnp.where(solved, deadline_s, fastest.round_s),
        power_w=power_w * jnp.where(member, plan.power, 1),
        cpu_hz=cpu_hz * jnp.where(member, plan.speed, 1),
    )


def _problem(
    member: Array,
    deadline_s: Array,
    fastest: Decision,
    upload: Upload,
    compute_s: ArrayLike,
    compute_j: Array,
    power_w: ArrayLike,
) -> _Problem:
    unit_s, floor_s, ready_s = (jnp.where(member, x, 1) for x in upload)
    floor_s = jnp.maximum(floor_s, np.finfo(floor_s.dtype).tiny)
    # Near the earliest possible deadline, spare_s is much smaller than the deadline. There the spare time of the
    # fastest decision is accurate, and the difference is not, but it has the right derivatives.
    difference_s = deadline_s - ready_s - floor_s
    share = jnp.where(member, fastest.share, 1)
    extra_s = jnp.maximum(deadline_s - fastest.round_s, 0)
    accurate_s = spare_with_share(share, Upload(unit_s, floor_s, ready_s)) + extra_s
    spare_s = jnp.where(member, difference_s + lax.stop_gradient(accurate_s - difference_s), 1)
    send_s = floor_s + spare_s
    compute_s, compute_j, power_w = (
        jnp.where(member, jnp.asarray(x, send_s.dtype), 1) for x in (compute_s, compute_j, power_w)
    )
    most = unit_s / (send_s * share_with_spare(spare_s, Upload(unit_s, floor_s, ready_s)))
    log_most = jnp.log(jnp.minimum(most, _MOST_NATS))
    return _Problem(unit_s, floor_s, spare_s, jnp.maximum(compute_s, _SLOWEST * send_s), compute_j, power_w, log_most)


def _a(e: Array) -> Array:
    """Computes (exp(e) - 1 - e)/e^2, for small e by its series."""
    num_terms = 10 if e.dtype == jnp.float32 else 18  # the remainder is below the rounding error for e <= 1
    series = np.asarray([1 / np.prod(np.arange(1.0, k + 3)) for k in reversed(range(num_terms))], e.dtype)
    large = jnp.maximum(e, 1)
    return jnp.where(e < 1, jnp.polyval(series, jnp.minimum(e, 1)), (jnp.expm1(large) - large) / large**2)


class _Point(NamedTuple):
    """A point on the path of each device, (M,) each."""

    e: Array
    phi: Array
    b: Array
    send_s: Array  # x
    compute_s: Array  # y
    log_price: Array  # log lambda, as if the power had no limit
    log_factor: Array  # what the limit adds to it
    at_the_end: Array  # whether the path ends here


def _point(log_e: Array, problem: _Problem) -> _Point:
    e = jnp.exp(log_e)
    a = _a(e)
    phi, b = 1 + e * a, 1 + (e - 1) * a
    total_s = problem.compute_s + problem.send_s
    log_e0 = jnp.log(problem.power_w) + jnp.log(problem.floor_s)
    log_b, log_2a = jnp.log(b), jnp.log(2 * jnp.maximum(problem.compute_j, _CHEAPEST_J))
    log_q = log_e0 - log_2a + log_e + log_b + 2 * jnp.log(total_s / problem.compute_s)
    v, w = _split(log_q)
    send_s = jnp.maximum(total_s * v, problem.floor_s * phi)
    # Not total_s - send_s, because y may be less than its rounding error.
    compute_s = jnp.minimum(total_s * w, problem.compute_s + (problem.spare_s - problem.floor_s * e * a))
    at_the_end = log_e >= problem.log_most
    at_full_speed = at_the_end | (compute_s <= problem.compute_s)
    send_s = jnp.where(at_full_speed, problem.send_s, jnp.minimum(send_s, problem.send_s))
    compute_s = jnp.where(at_full_speed, problem.compute_s, compute_s)
    log_price = log_e0 + jnp.log(send_s) + 2 * log_e + log_b - jnp.log(problem.unit_s)
    tau = _price_of_computing(compute_s, problem)
    factor = (1 + tau / problem.power_w) / (1 + e * b / phi)
    return _Point(e, phi, b, send_s, compute_s, log_price, jnp.log(jnp.maximum(factor, 1)), at_the_end)


@jax.custom_jvp
def _split(log_q: Array) -> tuple[Array, Array]:
    """Returns v = x/D and w = y/D with v + w = 1 and v/w^3 = q."""
    most = 0.9 * float(np.log(np.finfo(log_q.dtype).max))
    log_q = jnp.clip(log_q, -most, most)
    q = jnp.exp(log_q)
    w = jnp.exp(-jnp.maximum(log_q, 0) / 3)
    for _ in range(5):  # q w^3 + w - 1 is convex, so Newton's method descends to its root
        w = (1 + 2 * q * w * w * w) / (1 + 3 * q * w * w)
    return q * w * w * w, w


@_split.defjvp
def _split_jvp(primals, tangents):
    v, w = _split(*primals)
    d_v = v * w / (3 * v + w) * tangents[0]
    return (v, w), (d_v, -d_v)


def _price_of_computing(compute_s: Array, problem: _Problem) -> Array:
    """Returns tau = 2 A c^2/y^3, in W: what more time for computing saves."""
    speed = problem.compute_s / compute_s
    return 2 * problem.compute_j * speed * speed / compute_s


def _path(log_e: Array, problem: _Problem) -> tuple[Array, Array]:
    """Returns the logs of the price and of the share, (M,) each, that go with an efficiency."""
    point = _point(log_e, problem)
    return point.log_price + point.log_factor, jnp.log(problem.unit_s) - jnp.log(point.send_s) - log_e


@jax.custom_jvp
def _solve(member: Array, problem: _Problem) -> tuple[Array, Array]:
    """Returns the log of each device's efficiency, (M,), and of the price of bandwidth, (), when shares sum to 1."""
    log_most = problem.log_most
    log_least = jnp.minimum(jnp.log(problem.unit_s / problem.send_s), log_most)  # with the whole bandwidth
    number = jnp.maximum(jnp.sum(member, dtype=log_most.dtype), 1)
    equal = jnp.clip(log_least + jnp.log(number), log_least, log_most)  # with equal shares
    prices, log_shares = jax.vmap(lambda log_e: _path(log_e, problem))(jnp.stack([log_least, log_most, equal]))
    most_price = prices[1]
    # At the lowest price, one device would take the whole bandwidth; at the highest, all paths end.
    low, high = jnp.max(jnp.where(member, prices[:2], jnp.where(jnp.any(member), -jnp.inf, 0)), axis=1)
    no_choice = jnp.sum(jnp.where(member, jnp.exp(log_shares[1]), 0)) >= 1
    start = jnp.clip(jnp.sum(jnp.where(member, prices[2], 0)) / number, low, high)

    def follow(log_price, guess):
        """Returns log_e and log_share at a price, and the derivatives of both prices and shares by log_e."""
        free = member & (most_price > log_price)  # the paths of the others end below the price

        def step(state):
            low, high, log_e, size, _, _, _, num_steps = state
            (price, log_share), slopes = _along(log_e, problem)
            low, high = jnp.where(price < log_price, log_e, low), jnp.where(price < log_price, high, log_e)
            moved, close = _next(low, high, log_e, price - log_price, slopes[0], size)
            moved, done = jnp.where(free, moved, log_most), jnp.all(close | ~free)
            size = jnp.abs(moved - log_e)
            return low, high, moved, size, log_share + slopes[1] * (moved - log_e), slopes, done, num_steps + 1

        log_e = jnp.where(free, guess, log_most)
        size = jnp.full_like(log_e, jnp.inf)
        start = log_least, log_most, log_e, size, log_e, (log_e, log_e), jnp.array(False), jnp.array(0)
        _, _, log_e, _, log_share, slopes, _, _ = _while(step, start)
        return log_e, log_share, slopes

    def step(state):
        low, high, log_price, size, log_e, _, num_steps = state
        log_e, log_share, (price_by_e, share_by_e) = follow(log_price, log_e)
        share = jnp.where(member, jnp.exp(log_share), 0)
        total = jnp.sum(share)
        slope = jnp.sum(jnp.where(most_price > log_price, share * share_by_e / price_by_e, 0)) / total
        low, high = jnp.where(total > 1, log_price, low), jnp.where(total > 1, high, log_price)
        moved, close = _next(low, high, log_price, jnp.log(total), slope, size)
        # At some prices, the shares hardly change: then their sum does not determine the price to within rounding.
        exact = jnp.abs(total - 1) <= 4 * np.finfo(total.dtype).eps
        moved = jnp.where(exact, log_price, moved)
        log_e = jnp.clip(log_e + (moved - log_price) / price_by_e, log_least, log_most)
        log_e = jnp.where(most_price > moved, log_e, log_most)
        return low, high, moved, jnp.abs(moved - log_price), log_e, exact | close, num_steps + 1

    start, guess = jnp.where(no_choice, high, start), jnp.where(no_choice, log_most, equal)
    size = jnp.full_like(start, jnp.inf)
    _, _, log_price, _, log_e, _, _ = _while(step, (low, high, start, size, guess, no_choice, jnp.array(0)))
    return log_e, log_price


def _next(low: Array, high: Array, x: Array, value: Array, slope: Array, size: Array) -> tuple[Array, Array]:
    """Returns the next x in a search for value 0, and whether it is the last, given the size of the step to x.

    It is Newton's if that is in the bracket and its step is at most half as large; otherwise it halves the bracket.
    """
    eps = float(np.finfo(x.dtype).eps)
    newton = x - value / jnp.where(slope == 0, np.finfo(x.dtype).tiny, slope)
    small = jnp.abs(jnp.stack([newton - x, value])) < eps**0.5 / 4  # the last step squares the error
    close = jnp.all(small, axis=0) | (high - low <= 2 * eps * jnp.maximum(jnp.abs(x), 1))
    good = (newton > low) & (newton < high) & (jnp.abs(newton - x) < size / 2)
    return jnp.where(good | close, jnp.clip(newton, low, high), (low + high) / 2), close


def _along(log_e: Array, problem: _Problem) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Returns the path at log_e, and its derivatives by log_e."""
    return jax.jvp(lambda log_e: _path(log_e, problem), (log_e,), (jnp.ones_like(log_e),))


def _while(step: Callable, start: Any) -> Any:
    """Repeats a step until it is done; the last two entries of a state say so and count the steps."""
    return lax.while_loop(lambda state: ~state[-2] & (state[-1] < 100), step, start)


@_solve.defjvp
def _solve_jvp(primals, tangents):
    """Follows from d[sum of shares] = 0, with the same d[log price] for all devices before the end of their paths."""
    (member, problem), (_, d_problem) = primals, tangents
    log_e, log_price = _solve(member, problem)
    (_, log_share), (price_by_e, share_by_e) = _along(log_e, problem)
    _, (d_price, d_share) = jax.jvp(lambda problem: _path(log_e, problem), (problem,), (d_problem,))
    free = member & (log_e < problem.log_most)
    share = jnp.where(member, jnp.exp(log_share), 0)
    d_log_e = jnp.where(free, -d_price / price_by_e, d_problem.log_most)  # at the same price
    slope = jnp.sum(jnp.where(free, share * share_by_e / price_by_e, 0))
    d_total = jnp.sum(share * (d_share + share_by_e * d_log_e))
    d_log_price = jnp.where(slope < 0, -d_total / jnp.where(slope < 0, slope, 1), 0)
    return (log_e, log_price), (d_log_e + jnp.where(free, d_log_price / price_by_e, 0), d_log_price)


def _plan(member: Array, point: _Point, problem: _Problem) -> _Plan:
    share = jnp.where(member, problem.unit_s / (point.send_s * point.e), 0)
    share = share / jnp.where(jnp.any(member), jnp.sum(share), 1)
    safe = jnp.where(member, share, 1)
    # Rounding has changed the share, and thus the time of sending at full power. Less time is left for computing, but
    # at least half, because y may be less than the rounding error.
    least_s = problem.floor_s + spare_with_share(safe, Upload(problem.unit_s, problem.floor_s, problem.compute_s))
    send_s = jnp.clip(point.send_s, jnp.minimum(least_s, problem.send_s), problem.send_s)
    compute_s = jnp.maximum(point.compute_s + (point.send_s - send_s), point.compute_s / 2)
    e = problem.unit_s / (send_s * safe)
    power = problem.floor_s * (1 + e * _a(e)) / send_s
    return _Plan(share, jnp.minimum(power, 1), jnp.minimum(problem.compute_s / compute_s, 1))


def _price_of_time(point: _Point, log_price: Array, problem: _Problem) -> Array:
    """Returns how much energy each device would save per second of a later deadline, (M,) W."""
    # At full speed, only sending gains: (P + tau) dx/dgamma = -lambda at full power, and tau = lambda gamma/x below.
    excess = jnp.where(point.at_the_end, jnp.expm1(jnp.clip(log_price - point.log_price, 0, _MOST_NATS)), 0)
    power = problem.floor_s * point.phi / point.send_s
    sending = problem.power_w * (power * point.e * point.b + excess * (1 + point.e * point.phi)) / point.phi
    return jnp.where(point.compute_s > problem.compute_s, _price_of_computing(point.compute_s, problem), sending)


@jax.custom_jvp
def _energy(member: Array, plan: _Plan, price_of_time: Array, problem: _Problem) -> Array:
    """Returns the energy of an optimal plan, () J."""
    return jnp.sum(jnp.where(member, _spent(plan, problem)[0], 0))


@_energy.defjvp
def _energy_jvp(primals, tangents):
    """The envelope theorem: only the problem moves, in the energy and in the constraint x + y <= D, times its price.

    The other constraints (fractions of power and frequency up to 1, shares that sum to 1) do not depend on it.
    """
    (member, plan, price_of_time, problem), (*_, d_problem) = primals, tangents

    def lagrangian(problem):
        energy_j, late_s = _spent(plan, problem)
        return jnp.sum(jnp.where(member, energy_j + price_of_time * late_s, 0))

    return _energy(*primals), jax.jvp(lagrangian, (problem,), (d_problem,))[1]


def _spent(plan: _Plan, problem: _Problem) -> tuple[Array, Array]:
    """Returns the energy of each device, (M,) J, and by how much it misses the deadline, (M,) s."""
    share = jnp.where(plan.share > 0, plan.share, 1)
    send_s = problem.unit_s / (share * jnp.log1p(plan.power * problem.unit_s / (problem.floor_s * share)))
    energy_j = problem.power_w * plan.power * send_s + problem.compute_j * plan.speed * plan.speed
    return energy_j, problem.compute_s * (1 / plan.speed - 1) + send_s - problem.send_s
