"""Access schemes: how the scheduled devices share the uplink. `cell.access` names one.

- "fdma": devices send at the same time, each on its share of the bandwidth (the paper).
- "ofdma": the same, with shares in whole blocks of 1/num_blocks.
- "tdma": devices send one after another, each with the whole bandwidth.

The functions here are public and check their arguments. Policies use the scheme of a cell, `scheme_of`, directly.
"""

from __future__ import annotations  # short types in help()

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.types import Cell, Decision, Observation
from fcjax.wireless import fdma, ofdma, sets, tdma
from fcjax.wireless.radio import Upload, rate, ready_time, share_with_spare, uploads


def allocate(scheduled: Array, observation: Observation, cell: Cell) -> Decision:
    """Allocates the uplink so that the scheduled devices finish as early as possible.

    Under FDMA, solves min over t and gamma of t, subject to compute_s + upload_bits / rate(gamma) <= t for each
    scheduled device and sum(gamma) <= 1. Under OFDMA, each gamma is the least multiple of 1/num_blocks that suffices,
    so some blocks may stay unused. Under TDMA, finds the best order of uploads, and gamma is the fraction of the round
    for which a device sends.

    Args:
      scheduled: (M,) bool.
      observation: gains and computation times.
      cell: bandwidth, noise, powers, upload size and access scheme.

    Returns:
      The decision. If no device is scheduled, round_s and all shares are 0. If a scheduled device can never finish (no
      gain, no power, an infinite computation time, or more devices than blocks), round_s is inf. round_s is
      differentiable in every leaf of observation and cell, under FDMA by the implicit function theorem, and otherwise
      with the same blocks or order.
    """
    observation, cell = checks.uplink(observation, cell)
    scheduled = checks.mask("scheduled", scheduled, checks.num_devices(cell))
    return scheme_of(cell).allocate(scheduled, uploads(observation, cell))


def round_time(scheduled: Array, share: Array, observation: Observation, cell: Cell) -> Array:
    """Returns the round time, () s, of the scheduled devices with the given shares, optimal or not.

    It is 0 if no device is scheduled, and inf if a scheduled device has no share, has a share that is not a whole
    number of blocks under OFDMA, or never finishes. Under TDMA each device sends as long as it needs, so shares only
    matter by being positive.
    """
    observation, cell = checks.uplink(observation, cell, needs_upload=False)
    scheduled = checks.mask("scheduled", scheduled, checks.num_devices(cell))
    send_s = send_time(share, observation, cell)
    if cell.access == "tdma":
        round_s = tdma.round_time(scheduled, uploads(observation, cell))
        return jnp.where(jnp.any(scheduled & (send_s == jnp.inf)), jnp.inf, round_s)
    return jnp.max(jnp.where(scheduled, ready_time(observation, cell) + send_s, 0))


def send_time(share: Array, observation: Observation, cell: Cell) -> Array:
    """Returns for how long each device sends with its share, (M,) s; inf without a share, gain or power.

    It is also inf under OFDMA if the share is not a whole number of blocks. Under TDMA a device sends with the whole
    bandwidth, so shares only matter by being positive.
    """
    bits_s = rate(share, observation, cell)
    reached = bits_s > 0
    if cell.access == "ofdma":
        reached &= ofdma.is_whole(share, cell.num_blocks)
    if cell.access == "tdma":
        bits_s = rate(jnp.ones_like(bits_s), observation, cell)
    return jnp.where(reached, cell.upload_bits / jnp.where(reached, bits_s, 1), jnp.inf)


def required_share(deadline_s: ArrayLike, observation: Observation, cell: Cell) -> Array:
    """Returns the smallest share of the uplink with which each device finishes by the deadline.

    Solves, for each device, min gamma subject to compute_s + upload_bits / rate(gamma) <= deadline_s. Under TDMA, it is
    the fraction of the time until the deadline for which the device sends.

    Args:
      deadline_s: () or (M,) s since the round began.
      observation: gains and computation times.
      cell: bandwidth, noise, powers, upload size and access scheme.

    Returns:
      (M,) shares, which may exceed 1 under FDMA; inf if no share suffices.
    """
    observation, cell = checks.uplink(observation, cell)
    deadline_s = checks.not_negative_or_infinite("deadline_s", deadline_s, (), jnp.shape(cell.power_w))
    return scheme_of(cell).required_share(deadline_s, uploads(observation, cell))


def fastest_sets(observation: Observation, cell: Cell) -> tuple[Array, Array]:
    """Returns, for each number n of devices, the set of n devices that can finish earliest.

    Solves min over sets Pi with |Pi| = n of allocate(Pi).round_s, exactly, for n = 1..M.

    Args:
      observation: gains and computation times.
      cell: bandwidth, noise, powers, upload size and access scheme.

    Returns:
      The pair (round_s, scheduled). Entry n - 1 of round_s, (M,) s, is the round time of n devices. It does not fall as
      n grows, and is inf if fewer than n devices can finish. Row n - 1 of scheduled, (M, M) bool, is the set.
    """
    observation, cell = checks.uplink(observation, cell)
    return scheme_of(cell).fastest_sets(uploads(observation, cell))


def equal_share(n: Any, cell: Cell) -> Any:
    """Returns the share of each of n devices when all get the same under FDMA or OFDMA; 0 if blocks do not suffice."""
    return cell.num_blocks // n / cell.num_blocks if cell.access == "ofdma" else 1 / n


class Scheme(NamedTuple):
    """The solvers of an access scheme; the callers check the arguments."""

    allocate: Callable[[Array, Upload], Decision]
    required_share: Callable[[ArrayLike, Upload], Array]
    fastest_sets: Callable[[Upload], tuple[Array, Array]]
    fastest_set: Callable[[Array, Upload], tuple[Array, Array]]  # size, uploads -> set, round_s
    fastest_addition: Callable[[Array, Upload], tuple[Array, Array]]  # set, uploads -> device, round_s
    cheapest_set: Callable[[Callable[[Array, Array], Array], Upload], Array]  # cost(n, round_s), uploads -> set


def _fdma_share(deadline_s: ArrayLike, upload: Upload) -> Array:
    return share_with_spare(deadline_s - upload.compute_s - upload.floor_s, upload)


_FDMA = Scheme(
    fdma.allocate_uploads, _fdma_share, sets.fastest_sets, sets.fastest_set, sets.fastest_addition, sets.cheapest_set
)
_TDMA = Scheme(
    tdma.allocate, tdma.required_share, tdma.fastest_sets, tdma.fastest_set, tdma.fastest_addition, tdma.cheapest_set
)


def scheme_of(cell: Cell) -> Scheme:
    """Returns the solvers of a cell's access scheme."""
    if cell.access == "fdma":
        return _FDMA
    if cell.access == "tdma":
        return _TDMA
    solvers = (getattr(ofdma, name) for name in Scheme._fields)
    return Scheme(*(partial(solver, num_blocks=cell.num_blocks) for solver in solvers))
