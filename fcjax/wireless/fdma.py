"""FDMA: devices send at the same time, each on its share of the bandwidth. The paper's P2, Theorem 1 and Alg. 1.

At the optimum all scheduled devices finish together, at the time t* at which their required shares sum to 1. Let b_k be
the latest compute_s + floor_s of a scheduled device, its finish time over infinite bandwidth. The sum s(t) falls
strictly from inf at b_k towards 0. The unknown is not t but the spare time e = t - b_k: as a function of e, shares keep
their relative accuracy even where a weak signal changes them by orders of magnitude within one rounding of t. 1/s(e) is
nearly linear, so Newton's method on 1/s(e) = 1 takes about three steps; a bracket safeguards it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fcjax.types import Decision
from fcjax.wireless.radio import Upload, share_with_spare, spare_with_share


@jax.jit
def allocate_uploads(scheduled: Array, upload: Upload) -> Decision:
    """Splits the bandwidth so that the scheduled devices finish together, as early as possible."""
    can_finish = able(upload)
    lost = scheduled & ~can_finish
    member, upload = solvable(scheduled & can_finish, upload)
    round_s, spare_s = finish(member, upload)
    share = jnp.where(member, share_with_spare(spare_s, upload), 0)
    share = share / jnp.sum(share)
    anybody_lost = jnp.any(lost)
    return Decision(
        scheduled=scheduled,
        share=jnp.where(
            anybody_lost, lost / jnp.maximum(jnp.sum(lost, dtype=share.dtype), 1), jnp.where(scheduled, share, 0)
        ),
        round_s=jnp.where(anybody_lost, jnp.inf, jnp.where(jnp.any(scheduled), round_s, 0)),
    )


NEVER_S = 1e30  # longer times count as infinite


def able(upload: Upload) -> Array:
    """Returns which devices can finish, given enough time and bandwidth."""
    return upload.compute_s + upload.floor_s < NEVER_S


def solvable(member: Array, upload: Upload) -> tuple[Array, Upload]:
    """Fills in harmless numbers for devices that never finish, and adds a member if there is none."""
    can_finish = able(upload)
    filled = Upload(*(jnp.where(can_finish, x, fill) for x, fill in zip(upload, (1, 1, 0), strict=True)))
    return jnp.where(jnp.any(member), member, jnp.arange(member.size) == 0), filled


@jax.custom_jvp
def finish(member: Array, upload: Upload) -> tuple[Array, Array]:
    """Returns the time at which the members' shares sum to 1, (), and each device's spare time then, (M,)."""
    round_s, spare_s, _ = _solve(member, upload)
    return round_s, spare_s


@finish.defjvp
def _finish_jvp(primals, tangents):
    """Follows from d[sum of shares] = 0, with spare_s = round_s - compute_s - floor_s."""
    (member, upload), (_, d_upload) = primals, tangents
    round_s, spare_s = finish(member, upload)

    def total_share(spare_s, upload):
        return jnp.sum(jnp.where(member, share_with_spare(jnp.where(member, spare_s, 1), upload), 0))

    _, d_by_upload = jax.jvp(total_share, (spare_s, upload), (-d_upload.compute_s - d_upload.floor_s, d_upload))
    _, d_by_time = jax.jvp(lambda spare_s: total_share(spare_s, upload), (spare_s,), (jnp.ones_like(spare_s),))
    d_round_s = -d_by_upload / d_by_time
    return (round_s, spare_s), (d_round_s, d_round_s - d_upload.compute_s - d_upload.floor_s)


class _Search(NamedTuple):
    low_s: Array
    high_s: Array
    spare_s: Array  # e: of the member that would be last with infinite bandwidth
    done: Array
    num_solves: Array


def _solve(member: Array, upload: Upload) -> tuple[Array, Array, Array]:
    """Returns round_s, each device's spare_s, and the number of solves."""
    earliest_s = upload.compute_s + upload.floor_s

    def ahead_of(last):
        return (upload.floor_s[last] - upload.floor_s) + (upload.compute_s[last] - upload.compute_s)

    # If several sums round to the same number, the differences decide which member is last.
    last = jnp.argmax(jnp.where(member, earliest_s, -jnp.inf))
    last = jnp.argmin(jnp.where(member, ahead_of(last), jnp.inf))
    ahead_s = ahead_of(last)
    ahead_s = jnp.where(member, jnp.maximum(ahead_s, 0), ahead_s)

    def total_share(spare_s):
        return jnp.sum(jnp.where(member, share_with_spare(jnp.where(member, spare_s + ahead_s, 1), upload), 0))

    def step(search: _Search) -> _Search:
        total, slope = jax.jvp(total_share, (search.spare_s,), (jnp.ones_like(search.spare_s),))
        low_s = jnp.where(total > 1, search.spare_s, search.low_s)
        high_s = jnp.where(total > 1, search.high_s, search.spare_s)
        newton_s = _newton(search.spare_s, total, slope)
        done = jnp.abs(total - 1) < tolerance
        bisect = ~done & ~((newton_s > low_s) & (newton_s < high_s))
        spare_s = jnp.where(bisect, low_s * jnp.sqrt(high_s / low_s), jnp.clip(newton_s, low_s, high_s))
        return _Search(low_s, high_s, spare_s, done, search.num_solves + 1)

    tolerance = float(np.finfo(ahead_s.dtype).eps) ** 0.5 / 4  # the last step squares the error
    search = lax.while_loop(
        lambda search: ~search.done & (search.num_solves < _MAX_SOLVES),
        step,
        _Search(*_bracket_and_start(member, ahead_s, upload), done=jnp.array(False), num_solves=jnp.array(0)),
    )
    return earliest_s[last] + search.spare_s, search.spare_s + ahead_s, search.num_solves


_MAX_SOLVES = 100  # more than bisection alone would need


def _bracket_and_start(member: Array, ahead_s: Array, upload: Upload) -> tuple[Array, Array, Array]:
    """Returns bounds of e and a guess between them, without a solve."""
    # No member is faster than with the whole band, and all finish with equal shares; both up to rounding.
    equal_share = 1 / jnp.sum(member, dtype=ahead_s.dtype)
    equal_spare_s = spare_with_share(equal_share, upload)
    low_s = 0.999 * jnp.max(jnp.where(member, spare_with_share(1, upload) - ahead_s, -jnp.inf))
    high_s = 1.001 * jnp.max(jnp.where(member, equal_spare_s - ahead_s, -jnp.inf))
    start_s = low_s
    for _ in range(3):  # assumes that a share falls like 1/spare_s from the equal one
        spare_s = jnp.where(member, start_s + ahead_s, 1)
        share = jnp.where(member, equal_share * equal_spare_s / spare_s, 0)
        start_s = jnp.clip(_newton(start_s, jnp.sum(share), -jnp.sum(share / spare_s)), low_s, high_s)
    return low_s, high_s, start_s


def _newton(spare_s: Array, total: Array, slope: Array) -> Array:
    """Takes a Newton step towards 1/total = 1, given the derivative of total with respect to spare_s."""
    return spare_s + total * (1 - total) / slope
