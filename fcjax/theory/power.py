"""The split of a total power: powers and shares of the bandwidth that together end a round as early as possible.

With share gamma of the bandwidth B and z = S ln2/(gamma B v), the nats/s/Hz that send S bits in time v, device i needs
the power P = (N0 B/h^2) gamma (exp(z) - 1). For a given end t of the round, v = t - compute_s, and P is convex in
gamma. Therefore the least total power has one price lambda of bandwidth,

    -dP/dgamma = (N0 B/h^2) ((z - 1) exp(z) + 1) = lambda,   or   z = 1 + W_0((lambda h^2/(N0 B) - 1)/e),

for all devices but those at their limit, which take the share that they need at full power. For a given lambda, shares
fall as t grows, so one search finds the t at which they sum to 1. It falls as lambda grows, and the total power grows,
so another search finds the lambda at which the powers sum to the total. Both are Newton's method within a bracket. The
searches are nested in this order because a device with a weak signal may take almost all of the bandwidth: the shares
of the others are accurate as functions of lambda, but not as what it leaves.
"""

from __future__ import annotations  # short types in help()

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.theory.bounds import expm1_minus_x
from fcjax.types import Cell, Decision, Observation
from fcjax.wireless import fdma
from fcjax.wireless.lambertw import lambertw, lower_root
from fcjax.wireless.radio import Upload, share_with_spare, uploads


def split_power(
    total_w: ArrayLike,
    scheduled: Array,
    observation: Observation,
    cell: Cell,
    *,
    limit_w: ArrayLike | None = None,
) -> Decision:
    """Splits a total power and the bandwidth so that the scheduled devices finish as early as possible.

    Under FDMA, solves exactly: min over t, P and gamma of t, subject to compute_s + upload_bits/rate(gamma, P) <= t for
    each scheduled device, sum(gamma) <= 1, sum(P) <= total_w and P <= limit_w.

    Args:
      total_w: () W, the most that the scheduled devices may send with together.
      scheduled: (M,) bool.
      observation: gains and computation times.
      cell: bandwidth, noise, powers and upload size; `access` must be "fdma".
      limit_w: () or (M,) W, the most that a device may send with; by default `cell.power_w`, inf for no limit.

    Returns:
      The decision with its powers. Those of the scheduled devices sum to `total_w`, or are all at their limits if these
      sum to less. Other devices have `total_w`, which they do not use. As for `fcjax.allocate`, round_s is 0 if no
      device is scheduled, and inf if a scheduled device can never finish. round_s, share and power_w are differentiable
      in `total_w`, `limit_w` and every leaf of observation and cell, by the implicit function theorem.
    """
    observation, cell = checks.uplink(observation, cell)
    if cell.access != "fdma":
        raise ValueError(
            f"split_power needs devices that send at the same time: cell.access must be fdma, got {cell.access}"
        )
    per_device = (checks.num_devices(cell),)
    scheduled = checks.mask("scheduled", scheduled, *per_device)
    total_w = jnp.asarray(checks.positive("total_w", total_w, (), low=1e-20, high=1e6))
    limit: Any = checks.not_negative_or_infinite(
        "limit_w", cell.power_w if limit_w is None else limit_w, (), per_device
    )
    at_one_watt = uploads(observation, dataclasses.replace(cell, power_w=jnp.ones(per_device)))
    return _split(scheduled, at_one_watt, jnp.minimum(limit, total_w), total_w)


@jax.jit
def _split(scheduled: Array, at_one_watt: Upload, limit_w: Array, total_w: Array) -> Decision:
    total_w = total_w.astype(at_one_watt.unit_s.dtype)
    limit_w = jnp.broadcast_to(limit_w, scheduled.shape).astype(total_w.dtype)
    has_power = limit_w > 0
    limit_w = jnp.where(has_power, limit_w, total_w)
    at_limit = at_one_watt._replace(floor_s=jnp.where(has_power, at_one_watt.floor_s / limit_w, jnp.inf))
    fastest = fdma.allocate_uploads(scheduled, at_limit)
    can_finish = fdma.able(at_limit)
    member, _ = fdma.solvable(scheduled & can_finish, at_limit)
    unit_s, energy_j, ready_s, most = (jnp.where(member & can_finish, x, 1) for x in (*at_one_watt, limit_w))
    most_w = jnp.sum(jnp.where(scheduled, limit_w, 0))
    is_scarce = (total_w < most_w) & (fastest.round_s > 0) & jnp.isfinite(fastest.round_s)
    # If power is not scarce, any problem that has a solution will do.
    problem = _Problem(unit_s, energy_j, ready_s, most, jnp.where(is_scarce, total_w, _sum(most, member) / 2))
    point = _equilibrium(member, problem)
    share, power_w = _shares_and_powers(point, member, problem)
    power_w = jnp.minimum(power_w * (total_w / jnp.sum(power_w)), limit_w)
    last, _ = _ahead(member, problem)
    earliest_s = problem.ready_s + _at_limit(problem).floor_s
    enough_w = limit_w * jnp.minimum(1, total_w / jnp.where(most_w > 0, most_w, 1))
    return Decision(
        scheduled=scheduled,
        share=jnp.where(is_scarce, jnp.where(scheduled, share / jnp.sum(share), 0), fastest.share),
        round_s=jnp.where(is_scarce, earliest_s[last] + jnp.exp(point[0]), fastest.round_s),
        power_w=jnp.where(scheduled, jnp.where(is_scarce, power_w, enough_w), total_w),
    )


class _Problem(NamedTuple):
    unit_s: Array  # (M,) S ln2/B
    energy_j: Array  # (M,) N0 S ln2/h^2: the least energy of an upload
    ready_s: Array  # (M,) when the upload can begin
    limit_w: Array  # (M,)
    total_w: Array  # ()


def _sum(values: Array, member: Array) -> Array:
    return jnp.sum(jnp.where(member, values, 0))


def _ahead(member: Array, problem: _Problem) -> tuple[Array, Array]:
    """Returns who would be last with infinite bandwidth at the limits, and how much earlier others would be, (M,) s."""
    at_limit = _at_limit(problem)

    def ahead_of(last: Array) -> Array:
        return (at_limit.floor_s[last] - at_limit.floor_s) + (at_limit.compute_s[last] - at_limit.compute_s)

    # As in `fdma`: if several sums round to the same number, the differences decide which member is last.
    last = jnp.argmax(jnp.where(member, at_limit.compute_s + at_limit.floor_s, -jnp.inf))
    last = jnp.argmin(jnp.where(member, ahead_of(last), jnp.inf))
    ahead_s = ahead_of(last)
    return last, jnp.where(member & (ahead_s >= 0), ahead_s, 0)


def _at_limit(problem: _Problem) -> Upload:
    return Upload(problem.unit_s, problem.energy_j / problem.limit_w, problem.ready_s)


def _shares_and_powers(point: Array, member: Array, problem: _Problem) -> tuple[Array, Array]:
    """Returns the shares and powers with the least total power, for the logarithms of two numbers, (2,).

    The first is the spare time of the last member, by which the round is longer than at its limit over infinite
    bandwidth: as in `fdma`, shares are more accurate as functions of it than of the round time. The second is the price
    of bandwidth in units of the total power.
    """
    unit_s, energy_j, _, limit_w, total_w = problem
    at_limit = _at_limit(problem)
    spare_s = jnp.exp(point[0]) + _ahead(member, problem)[1]
    upload_s = at_limit.floor_s + spare_s
    full_share = share_with_spare(spare_s, at_limit)
    nats = _nats(jnp.exp(point[1]) * (total_w * unit_s / energy_j))
    share = unit_s / (upload_s * nats)
    is_full = full_share >= share
    power_w = energy_j * jnp.expm1(nats) / (upload_s * nats)
    return (
        jnp.where(member, jnp.where(is_full, full_share, share), 0),
        jnp.where(member, jnp.where(is_full, limit_w, power_w), 0),
    )


@jax.custom_jvp
def _nats(ratio: Array) -> Array:
    """Returns the root z > 0 of (z - 1) exp(z) + 1 = ratio, to full relative accuracy."""
    ratio = jnp.minimum(ratio, np.finfo(ratio.dtype).max / 1e3)
    return jnp.where(ratio < 0.1, -lower_root(jnp.minimum(ratio, 0.1)), 1 + lambertw((ratio - 1) / math.e))


@_nats.defjvp
def _nats_jvp(primals, tangents):
    (ratio,), (d_ratio,) = primals, tangents
    nats = _nats(ratio)
    return nats, d_ratio / (nats * jnp.exp(nats))


def _residual(point: Array, member: Array, problem: _Problem) -> Array:
    """Returns what both are 0 at the optimum, (2,): the logarithms of the total share and of the total power used."""
    share, power_w = _shares_and_powers(point, member, problem)
    return jnp.log(jnp.stack([jnp.sum(share), jnp.sum(power_w) / problem.total_w]))


@jax.custom_jvp
def _equilibrium(member: Array, problem: _Problem) -> Array:
    """Returns the point, (2,), at which the shares sum to 1 and the powers to the total."""
    fast, slow = times = _times(member, problem)

    def time(price: Array) -> Array:
        def total_share(time: Array) -> Array:
            return _residual(jnp.stack([time, price]), member, problem)[0]

        return _root(lambda time: jax.jvp(total_share, (time,), (jnp.ones_like(time),)), *times)

    def shortage(price: Array) -> tuple[Array, Array]:
        point = jnp.stack([time(price), price])
        (a, b), (c, d) = jax.jacfwd(_residual)(point, member, problem)
        return -_residual(point, member, problem)[1], c * b / a - d

    low, high = _prices(slow, member, problem)[0], _prices(fast, member, problem)[1]
    price = _root(shortage, low, high)
    return jnp.stack([time(price), price])


@_equilibrium.defjvp
def _equilibrium_jvp(primals, tangents):
    """Follows from d[residual] = 0."""
    (member, problem), (_, d_problem) = primals, tangents
    point = _equilibrium(member, problem)
    _, d_residual = jax.jvp(partial(_residual, point, member), (problem,), (d_problem,))
    (a, b), (c, d) = jax.jacfwd(_residual)(point, member, problem)
    inverse = jnp.stack([jnp.stack([d, -b]), jnp.stack([-c, a])]) / (a * d - b * c)
    return point, -inverse @ d_residual


def _times(member: Array, problem: _Problem) -> tuple[Array, Array]:
    """Returns bounds of the logarithm of the spare time: with all members at their limits, or at a fraction of them."""
    fraction = problem.total_w / _sum(problem.limit_w, member)
    last, _ = _ahead(member, problem)
    floor_s = _at_limit(problem).floor_s[last]

    def spare(fraction: Array) -> Array:
        upload = _at_limit(problem._replace(limit_w=fraction * problem.limit_w))
        return jnp.log(fdma.finish(member, upload)[1][last] + floor_s * (1 / fraction - 1))

    return spare(jnp.ones_like(fraction)), spare(fraction)


def _prices(time: Array, member: Array, problem: _Problem) -> tuple[Array, Array]:
    """Returns bounds of the logarithm of the price: the least and the largest of the members' prices at some shares.

    These are the shares at the limits, plus equal parts of the rest.
    """
    spare_s, at_limit = jnp.exp(time) + _ahead(member, problem)[1], _at_limit(problem)
    share = jnp.minimum(share_with_spare(spare_s, at_limit), 1)
    rest = jnp.maximum(1 - _sum(share, member), 0)
    share = share + rest / jnp.sum(member, dtype=share.dtype)
    nats = problem.unit_s / ((at_limit.floor_s + spare_s) * share)
    unit_w = problem.energy_j / problem.unit_s
    price = jnp.log(unit_w / problem.total_w) + nats + jnp.log(expm1_minus_x(-nats))
    return jnp.min(jnp.where(member, price, jnp.inf)), jnp.max(jnp.where(member, price, -jnp.inf))


class _Search(NamedTuple):
    low: Array
    high: Array
    x: Array
    step: Array  # size of the last one
    done: Array
    num_steps: Array


def _root(decreasing: Callable[[Array], tuple[Array, Array]], low: Array, high: Array) -> Array:
    """Returns the root of a decreasing function, given as its value and slope, between two bounds."""

    def advance(search: _Search) -> _Search:
        value, slope = decreasing(search.x)
        low = jnp.where(value > 0, search.x, search.low)
        high = jnp.where(value > 0, search.high, search.x)
        newton = search.x - value / slope
        # Steps that do not shrink are those of a wrong slope, near a kink or a bound.
        accept = (newton >= low) & (newton <= high) & (jnp.abs(newton - search.x) <= search.step / 2)
        x = jnp.where(accept, newton, (low + high) / 2)
        step = jnp.abs(x - search.x)
        return _Search(low, high, x, step, accept & (step < tolerance), search.num_steps + 1)

    tolerance = float(np.finfo(low.dtype).eps) ** 0.5 / 4  # the last step squares the error
    margin = 1e-3  # the bounds are subject to rounding
    start = _Search(
        low - margin, high + margin, (low + high) / 2, jnp.full_like(low, jnp.inf), jnp.array(False), jnp.array(0)
    )
    return lax.while_loop(lambda search: ~search.done & (search.num_steps < _MAX_STEPS), advance, start).x


_MAX_STEPS = 100  # more than bisection alone would need
