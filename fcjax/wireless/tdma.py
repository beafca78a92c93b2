"""TDMA: devices send one after another, each with the whole bandwidth.

Device i sends for p_i = S/(B log2(1 + P h^2/(B N0))). It starts when its computation, of duration c_i, has ended and
the devices before it have sent. The best order is that of the computation times. In this order, with sums over
scheduled devices only,

    round_s = max over scheduled j of c_j + p_j + p_{j+1} + ...

Let t_j(n) be the earliest finish of n of the first j devices. The later the others finish, the later the last one does,
so the recursion t_j(n) = min(t_{j-1}(n), max(t_{j-1}(n - 1), c_j) + p_j) finds the fastest set of every size. A
device's share is the fraction of the round for which it sends.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax.types import Decision
from fcjax.wireless.fdma import NEVER_S
from fcjax.wireless.radio import Upload, spare_with_share


def send_time(upload: Upload) -> Array:
    """Returns how long each device sends, (M,) s."""
    return upload.floor_s + spare_with_share(1.0, upload)


@jax.jit
def allocate(scheduled: Array, upload: Upload) -> Decision:
    """Schedules the uploads one after another, so that the last ends as early as possible."""
    round_s, send_s = round_time(scheduled, upload), send_time(upload)
    lost = scheduled & ~(upload.compute_s + send_s < NEVER_S)
    possible = jnp.any(scheduled) & ~jnp.any(lost)
    share = jnp.where(scheduled & possible, send_s, 0) / jnp.where(possible, round_s, 1)
    of_lost = lost / jnp.maximum(jnp.sum(lost, dtype=share.dtype), 1)
    return Decision(scheduled, jnp.where(jnp.any(lost), of_lost, share), round_s)


def round_time(scheduled: Array, upload: Upload) -> Array:
    """Returns when the last upload ends, () s: 0 if no device is scheduled, inf if one never finishes."""
    order = jnp.argsort(upload.compute_s)
    member, compute_s = scheduled[order], upload.compute_s[order]
    from_here_s = lax.cumsum(jnp.where(member, send_time(upload)[order], 0), reverse=True)
    round_s = jnp.max(jnp.where(member, compute_s + from_here_s, 0))
    return jnp.where(round_s < NEVER_S, round_s, jnp.inf)


def required_share(deadline_s: ArrayLike, upload: Upload) -> Array:
    """Returns the fraction of the deadline for which each device sends, (M,); inf if it cannot finish alone."""
    send_s = send_time(upload)
    in_time = (upload.compute_s + send_s <= deadline_s) & (send_s < NEVER_S)
    return jnp.where(in_time, jnp.where(in_time, send_s, 0) / jnp.where(in_time, deadline_s, 1), jnp.inf)


@jax.jit
def fastest_sets(upload: Upload) -> tuple[Array, Array]:
    """Returns the earliest finish of each number of devices, (M,) s, and the sets, (M, M) bool."""
    num_devices = upload.unit_s.size
    frozen = lax.stop_gradient(upload)
    order = jnp.argsort(frozen.compute_s)
    compute_s, send_s = (jnp.minimum(x, NEVER_S)[order] for x in (frozen.compute_s, send_time(frozen)))

    def consider(earliest_s, device):
        its_compute_s, its_send_s = device
        with_it_s = jnp.maximum(earliest_s[:-1], its_compute_s) + its_send_s
        is_in = jnp.append(False, with_it_s < earliest_s[1:])
        return jnp.where(is_in, jnp.append(0, with_it_s), earliest_s), is_in

    start = jnp.full(num_devices + 1, jnp.inf, compute_s.dtype).at[0].set(0)
    _, is_in = lax.scan(consider, start, (compute_s, send_s))

    def trace_back(left, considered):
        """Follows the recursion from the last device to the first; `left` counts the devices still to find."""
        taken = considered[left]
        return left - taken, taken

    _, taken = lax.scan(trace_back, jnp.arange(1, num_devices + 1), is_in, reverse=True)
    scheduled = jnp.zeros((num_devices, num_devices), bool).at[:, order].set(taken.T)
    return lax.cummax(jax.vmap(lambda mask: round_time(mask, upload))(scheduled)), scheduled


def fastest_set(size: Array, upload: Upload) -> tuple[Array, Array]:
    """Returns the set of `size` devices that can finish earliest, (M,) bool, and its round time, () s."""
    round_s, scheduled = fastest_sets(upload)
    return scheduled[size - 1], round_s[size - 1]


def fastest_addition(scheduled: Array, upload: Upload) -> tuple[Array, Array]:
    """Returns the device whose addition gives the shortest round, (), and that round time, () s."""
    one_more = scheduled[None] | jnp.eye(scheduled.size, dtype=bool)
    round_s = jax.vmap(lambda mask: round_time(mask, upload))(one_more)
    device = jnp.argmin(jnp.where(scheduled, jnp.inf, jnp.minimum(round_s, NEVER_S)))
    return device, round_s[device]


def cheapest_set(cost: Callable[[Array, Array], Array], upload: Upload) -> Array:
    """Returns the fastest set with the least cost(size, round_s), (M,) bool; ties go to the smaller."""
    round_s, scheduled = fastest_sets(upload)
    found = cost(jnp.arange(1, round_s.size + 1), round_s)
    return scheduled[jnp.argmin(jnp.where(jnp.isnan(found), jnp.inf, found))]
