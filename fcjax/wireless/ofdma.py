"""OFDMA: the bandwidth is divided into N equal blocks, and each scheduled device gets a whole number of them.

With b blocks, device i finishes at T_i(b), its time under FDMA with share b/N. By time t it needs b_i(t) blocks, the
least b with T_i(b) <= t. These numbers fall as t grows. Therefore a set finishes by t iff its b_i(t) sum to at most N,
the fastest set of n devices has the n smallest b_i(t) at the least t at which they sum to at most N, and the best
device to add to a set is one that fits at the least t at which any fits. That t is one of the M N times T_i(b), so a
binary search over these finds it exactly.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.types import Decision
from fcjax.wireless.fdma import NEVER_S
from fcjax.wireless.radio import Upload
from fcjax.wireless.sets import smallest_mask, time_with_share


def _times(upload: Upload, num_blocks: int) -> Array:
    """Returns T_i(b), (M, N) s; NEVER_S if device i never finishes."""
    blocks = jnp.arange(1, num_blocks + 1, dtype=upload.unit_s.dtype)
    times = jax.vmap(lambda share: time_with_share(share, upload), out_axes=1)(blocks / num_blocks)
    times = jnp.where(jnp.isnan(times), NEVER_S, jnp.minimum(times, NEVER_S))
    return lax.cummin(times, axis=1)  # rounding may hide that more blocks are faster


def _blocks(time_s: Array, times: Array) -> Array:
    """Returns b_i(t), (M,); N + 1 for a device that cannot finish by t."""
    return 1 + jnp.sum((times > time_s) | (times >= NEVER_S), axis=1)


def _earliest(fits: Callable[[Array], Array], times: Array) -> Array:
    """Returns the least time whose blocks fit, () s; fits(b_i) must be monotone. inf if none does."""
    candidates = jnp.sort(times.ravel())

    def halve(_, bracket):
        low, high = bracket  # candidates before low do not fit, those from high on do
        middle = (low + high) // 2
        inside = fits(_blocks(candidates[middle], times)) | (low == high)
        return jnp.where(inside, low, middle + 1), jnp.where(inside, middle, high)

    bracket = jnp.array(0), jnp.array(times.size)
    first, _ = lax.fori_loop(0, times.size.bit_length(), halve, bracket)
    return jnp.append(candidates, jnp.inf)[first]


def is_whole(share: ArrayLike, num_blocks: int) -> Array:
    """Returns which shares are whole numbers of blocks, up to rounding."""
    blocks = jnp.asarray(checks.real("share", share)) * num_blocks
    return jnp.abs(blocks - jnp.round(blocks)) <= 1e-3 + 4 * jnp.finfo(blocks.dtype).eps * num_blocks


@partial(jax.jit, static_argnames="num_blocks")
def allocate(scheduled: Array, upload: Upload, *, num_blocks: int) -> Decision:
    """Gives each scheduled device the least number of blocks with which all finish as early as possible."""
    times = _times(lax.stop_gradient(upload), num_blocks)
    time_s = _earliest(lambda blocks: jnp.sum(jnp.where(scheduled, blocks, 0)) <= num_blocks, times)
    possible = jnp.any(scheduled) & (time_s < NEVER_S)
    blocks = jnp.where(possible, _blocks(time_s, times), 1)
    share = jnp.where(scheduled, blocks / jnp.asarray(num_blocks, times.dtype), 0)
    finish_s = jnp.where(scheduled & possible, time_with_share(jnp.where(scheduled, share, 1), upload), 0)
    # Too many devices for the blocks, or one that never finishes: equal shares, and no end.
    equal = scheduled / jnp.maximum(jnp.sum(scheduled, dtype=share.dtype), 1)
    never = jnp.any(scheduled) & ~possible
    return Decision(scheduled, jnp.where(never, equal, share), jnp.where(never, jnp.inf, jnp.max(finish_s)))


def required_share(deadline_s: ArrayLike, upload: Upload, *, num_blocks: int) -> Array:
    """Returns the least share, in whole blocks, with which each device finishes by the deadline, (M,), or inf."""
    times = _times(upload, num_blocks)
    late = times > jnp.expand_dims(jnp.broadcast_to(deadline_s, times.shape[:1]), 1)
    blocks = 1 + jnp.sum(late | (times >= NEVER_S), axis=1)
    return jnp.where(blocks <= num_blocks, blocks / jnp.asarray(num_blocks, times.dtype), jnp.inf)


def fastest_set(size: Array, upload: Upload, *, num_blocks: int) -> tuple[Array, Array]:
    """Returns the set of `size` devices that can finish earliest, (M,) bool, and its round time, () s."""
    times = _times(lax.stop_gradient(upload), num_blocks)
    return _fastest_set(size, times, num_blocks)


def _fastest_set(size: Array, times: Array, num_blocks: int) -> tuple[Array, Array]:
    def fits(blocks):
        smallest = jnp.sort(jnp.minimum(blocks, num_blocks + 1))
        return jnp.sum(jnp.where(jnp.arange(blocks.size) < size, smallest, 0)) <= num_blocks

    time_s = _earliest(fits, times)
    return smallest_mask(_blocks(jnp.minimum(time_s, NEVER_S), times), size), time_s


@partial(jax.jit, static_argnames="num_blocks")
def fastest_sets(upload: Upload, *, num_blocks: int) -> tuple[Array, Array]:
    """Returns the earliest finish of each number of devices, (M,) s, and the sets, (M, M) bool."""
    times = _times(lax.stop_gradient(upload), num_blocks)
    sizes = jnp.arange(1, upload.unit_s.size + 1)
    scheduled, _ = lax.map(lambda size: _fastest_set(size, times, num_blocks), sizes)
    round_s = lax.map(lambda mask: allocate(mask, upload, num_blocks=num_blocks).round_s, scheduled)
    return lax.cummax(round_s), scheduled


def fastest_addition(scheduled: Array, upload: Upload, *, num_blocks: int) -> tuple[Array, Array]:
    """Returns the device whose addition gives the shortest round, (), and that round time, () s.

    Ties go to the lowest index.
    """
    times = _times(lax.stop_gradient(upload), num_blocks)

    def free(blocks):
        return num_blocks - jnp.sum(jnp.where(scheduled, blocks, 0))

    time_s = _earliest(lambda blocks: jnp.any(~scheduled & (blocks <= free(blocks))), times)
    blocks = _blocks(jnp.minimum(time_s, NEVER_S), times)
    fitting = ~scheduled & (blocks <= free(blocks))
    return jnp.where(jnp.any(fitting), jnp.argmax(fitting), jnp.argmin(scheduled)), time_s


def cheapest_set(cost: Callable[[Array, Array], Array], upload: Upload, *, num_blocks: int) -> Array:
    """Returns the fastest set with the least cost(size, round_s), (M,) bool; ties go to the smaller."""
    round_s, scheduled = fastest_sets(upload, num_blocks=num_blocks)
    found = cost(jnp.arange(1, round_s.size + 1), round_s)
    return scheduled[jnp.argmin(jnp.where(jnp.isnan(found), jnp.inf, found))]
