"""Fastest sets under FDMA: of every size, of the size with the least cost, and by adding a device to a given set.

All functions use the same iteration. Required shares fall as t grows, so a set finishes by t iff its shares at t sum to
at most 1. Start from any candidate set, and replace it by the set with the smallest shares at its round time; the new
set is not slower. Repeat until nothing changes. The result is the fastest set: at its round time, any other set has
shares that sum to at least 1, so it finishes no earlier. One or two repetitions usually suffice.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax.wireless.fdma import able, allocate_uploads, finish, solvable
from fcjax.wireless.radio import Upload, share_with_spare, spare_with_share

_BATCH = 4096


@jax.jit
def fastest_sets(upload: Upload) -> tuple[Array, Array]:
    """Returns the earliest finish of each number of devices, (M,) s, and the sets, (M, M) bool."""
    num_devices = upload.unit_s.size
    frozen = lax.stop_gradient(upload)
    # Sizes are solved in batches of about _BATCH devices in total: small problems in one batch, large ones in memory
    # that is linear in M. The last batch is padded, so that all have the same shape.
    batch = max(1, min(num_devices, _BATCH // num_devices))
    num_batches = -(-num_devices // batch)
    sizes = jnp.minimum(jnp.arange(1, num_batches * batch + 1), num_devices)

    def solve(size):
        scheduled, _ = fastest_set(size, frozen)
        return allocate_uploads(scheduled, upload).round_s, scheduled

    round_s, scheduled = lax.map(jax.vmap(solve), sizes.reshape(num_batches, batch))
    round_s, scheduled = (x.reshape(num_batches * batch, *x.shape[2:])[:num_devices] for x in (round_s, scheduled))
    # Larger sets take longer, but rounding may hide this if computation dwarfs the uploads.
    return lax.cummax(round_s), scheduled


def fastest_set(size: Array, upload: Upload) -> tuple[Array, Array]:
    """Returns the set of `size` devices that can finish earliest, (M,) bool, and its round time, () s."""
    can_finish = able(upload)

    def improve(state):
        scheduled, round_s, candidate, _ = state
        candidate_s, spare_s = _round_time(candidate, upload)
        better = candidate_s < round_s
        smallest = smallest_mask(jnp.where(can_finish, share_with_spare(spare_s, upload), jnp.inf), size)
        scheduled, round_s = jnp.where(better, candidate, scheduled), jnp.where(better, candidate_s, round_s)
        return scheduled, round_s, smallest, better & jnp.any(smallest != candidate)

    by_equal_split = smallest_mask(time_with_share(1 / size.astype(upload.unit_s.dtype), upload), size)
    start = by_equal_split, jnp.full((), jnp.inf, upload.unit_s.dtype), by_equal_split, jnp.array(True)
    scheduled, round_s, _, _ = lax.while_loop(lambda state: state[-1], improve, start)
    return scheduled, round_s


def cheapest_set(cost: Callable[[Array, Array], Array], upload: Upload) -> Array:
    """Returns the fastest set, over all sizes, with the least cost(size, round_s), (M,) bool; ties go to the smaller.

    The cost must not fall as round_s grows. Then only a few sizes are solved. Larger sets are not faster, so the round
    time of a set bounds the cost of every larger size from below. If the size with the least bound is solved, it is the
    cheapest. Otherwise it lies between two solved sizes, and their midpoint is solved next.
    """
    num_devices = upload.unit_s.size
    sizes = jnp.arange(1, num_devices + 1)

    def bounds(least_s):
        bound = cost(sizes, least_s)
        return jnp.where(jnp.isnan(bound), jnp.inf, bound)

    def solve(size, solved, least_s):
        _, round_s = fastest_set(size, upload)
        return solved | (sizes == size), jnp.where(sizes >= size, jnp.maximum(least_s, round_s), least_s)

    def narrow(state):
        solved, least_s, size = state
        below = jnp.max(jnp.where(solved & (sizes < size), sizes, 0))
        above = jnp.min(jnp.where(solved & (sizes > size), sizes, num_devices + 1))
        solved, least_s = solve((below + above) // 2, solved, least_s)
        return solved, least_s, sizes[jnp.argmin(bounds(least_s))]

    solved, least_s = solve(sizes[0], jnp.zeros(num_devices, bool), jnp.zeros_like(upload.unit_s))
    start = solved, least_s, sizes[jnp.argmin(bounds(least_s))]
    _, _, size = lax.while_loop(lambda state: ~state[0][state[2] - 1], narrow, start)
    return fastest_set(size, upload)[0]


def fastest_addition(scheduled: Array, upload: Upload) -> tuple[Array, Array]:
    """Returns the device whose addition to a set gives the shortest round, (), and that round time, () s.

    Ties go to the lowest index.
    """
    candidates = ~scheduled & able(upload)

    def improve(state):
        device, round_s, candidate, _ = state
        candidate_s, spare_s = _round_time(scheduled | _one_hot(candidate, upload), upload)
        better = (candidate_s < round_s) | ((candidate_s == round_s) & (candidate < device))
        smallest = jnp.argmin(jnp.where(candidates, share_with_spare(spare_s, upload), jnp.inf))
        device, round_s = jnp.where(better, candidate, device), jnp.where(better, candidate_s, round_s)
        return device, round_s, smallest, better & (smallest != candidate)

    equal_share = 1 / (1 + jnp.sum(scheduled, dtype=upload.unit_s.dtype))
    guess = jnp.argmin(jnp.where(candidates, time_with_share(equal_share, upload), jnp.inf))
    guess = jnp.where(jnp.any(candidates), guess, jnp.argmin(scheduled))  # only devices that never finish are left
    start = jnp.array(upload.unit_s.size), jnp.full((), jnp.inf, upload.unit_s.dtype), guess, jnp.array(True)
    device, round_s, _, _ = lax.while_loop(lambda state: state[-1], improve, start)
    return device, round_s


def smallest_mask(values: Array, size: Array) -> Array:
    """Returns the mask of the `size` smallest values; ties go to the lower index, and NaN counts as inf."""
    if values.size <= _FEW or not jnp.issubdtype(values.dtype, jnp.floating):
        return jnp.zeros(values.shape, bool).at[jnp.argsort(values)].set(jnp.arange(values.size) < size)
    # With thousands of devices, sorting would take most of the time. Bisection finds the largest value to include.
    ordered = _as_ordered_bits(values)
    width = ordered.dtype.itemsize * 8

    def halve(step, largest):
        lower = largest - (jnp.array(1, ordered.dtype) << (width - 1 - step).astype(ordered.dtype))
        return jnp.where(jnp.sum(ordered <= lower) >= size, lower, largest)

    largest = lax.fori_loop(0, width, halve, jnp.array(2**width - 1, ordered.dtype))
    below, equal = ordered < largest, ordered == largest
    return below | (equal & (jnp.cumsum(equal) <= size - jnp.sum(below)))


def _as_ordered_bits(values: Array) -> Array:
    """Returns unsigned integers in the same order as the floats."""
    values = jnp.where(values == 0, 0, jnp.where(jnp.isnan(values), jnp.inf, values))  # -0 equals 0
    width = values.dtype.itemsize * 8
    bits = lax.bitcast_convert_type(values, jnp.dtype(f"uint{width}"))
    sign = jnp.array(2 ** (width - 1), bits.dtype)
    return jnp.where(bits < sign, bits + sign, ~bits)


_FEW = 256  # devices that are sorted faster than bisected


def time_with_share(share: ArrayLike, upload: Upload) -> Array:
    """Returns when each device would finish, (M,) s, with the given share, ()."""
    return upload.compute_s + upload.floor_s + spare_with_share(share, upload)


def _round_time(scheduled: Array, upload: Upload) -> tuple[Array, Array]:
    """Returns when the set finishes, inf if one of its devices never does, and each device's spare time then."""
    can_finish = able(upload)
    round_s, spare_s = finish(*solvable(scheduled & can_finish, upload))
    return jnp.where(jnp.any(scheduled & ~can_finish), jnp.inf, round_s), spare_s


def _one_hot(device: Array, upload: Upload) -> Array:
    return jnp.arange(upload.unit_s.size) == device
