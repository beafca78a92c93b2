"""The uplink: positions of devices, channel gains, rates, and the bandwidth that an upload needs.

FDMA as in Sec. II-B of the paper: with share gamma_i of the bandwidth B, device i sends at the Shannon rate
gamma_i B log2(1 + P_i h_i^2/(gamma_i B N0)). Eq. (6) solves this for the gamma_i that sends S bits in time u. The paper
prints it with the opposite sign, without 1/B and without the branch of W. The correct form is

    gamma = S ln2 / (B u y),   y = -(W_{-1}(-G exp(-G)) + G) = ln(1 + P h^2/(gamma B N0)),   G = N0 S ln2/(u P h^2),

solvable iff G < 1. y is the spectral efficiency in nats, and G = floor/u, where floor = N0 S ln2/(P h^2) is the upload
time over infinite bandwidth. To avoid cancellation, neither W nor 1 - G is computed by subtraction: y solves
ln(1 + y/G) = y, and y = (1 - G) + v with v - ln(1 + v) = -(1 - G) - ln G, whose terms are all positive.

This is the only module that uses decibels.
"""

from __future__ import annotations  # short types in help()

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fcjax import checks, keys
from fcjax.types import Cell, Observation
from fcjax.wireless.lambertw import small_x_minus_log1p, small_x_minus_log1p_over_x, upper_root


def db_to_linear(value_db: ArrayLike) -> Array:
    """Converts a value in dB to a power ratio."""
    return jnp.exp(checks.real("a value in dB", value_db) * (math.log(10) / 10))


def dbm_to_w(value_dbm: ArrayLike) -> Array:
    """Converts a power in dBm to W; for a density in dBm/MHz, divide the result by 1e6 to get W/Hz."""
    return 1e-3 * db_to_linear(value_dbm)


def place(key: Array, cell: Cell) -> Array:
    """Draws distances to the base station, (M,) m, of devices placed uniformly in the cell's disc."""
    radius_m = checks.of_cell("radius_m", cell)
    uniform = jax.vmap(jax.random.uniform)(keys.per_device(key, checks.num_devices(cell)))
    return radius_m * jnp.sqrt(uniform)


def path_gain(distance_m: ArrayLike, cell: Cell) -> Array:
    """Returns the mean power gain at a distance: a power law with a reference at 1 km."""
    distance_m = checks.not_negative("distance_m", distance_m)
    min_distance_m, reference_gain = (checks.of_cell(name, cell) for name in ("min_distance_m", "reference_gain"))
    exponent = checks.of_cell("path_loss_exponent", cell)
    gain = reference_gain * (jnp.maximum(distance_m, min_distance_m) / 1e3) ** -exponent
    return jnp.minimum(gain, jnp.finfo(gain.dtype).max)  # finite, because fading may scale it back into range


def fade(key: Array, cell: Cell) -> Array:
    """Draws factors of the power gain, (M,): small-scale fading with mean 1 times shadowing with median 1.

    The amplitude is sqrt(1 - s) + sqrt(s) CN(0, 1), where s is the cell's `scatter`: constant for s = 0, Rayleigh for
    s = 1, and Rician with factor K = (1 - s)/s in between.
    """
    device_keys = keys.per_device(key, checks.num_devices(cell))
    return faded(jax.vmap(lambda k: jax.random.normal(k, (3,)))(device_keys).T, cell)


def faded(normals: Array, cell: Cell) -> Array:
    """Returns the factors of `fade` for standard normal variables, (3, M): in phase, quadrature and shadow."""
    in_phase, quadrature, shadow = normals
    scatter, shadowing_db = checks.of_cell("scatter", cell), checks.of_cell("shadowing_db", cell)
    scattered = scatter * (in_phase**2 + quadrature**2) / 2
    # The square root has infinite slope at both ends. There the gradient of the cross term is dropped; its mean is 0.
    mixed = jnp.asarray(scatter * (1 - scatter))
    cross = jnp.where(mixed > 0, jnp.sqrt(2 * jnp.where(mixed > 0, mixed, 1)), 0) * in_phase
    return ((1 - scatter) + scattered + cross) * db_to_linear(shadowing_db * shadow)


def fades(cell: Cell) -> bool:
    """Returns whether `fade` is random; the cell must not be traced."""
    return float(np.asarray(cell.scatter)) > 0 or float(np.asarray(cell.shadowing_db)) > 0


def rate(share: ArrayLike, observation: Observation, cell: Cell) -> Array:
    """Returns each device's rate over its share of the bandwidth, (M,) bit/s; 0 for share 0."""
    observation, cell = checks.uplink(observation, cell, needs_upload=False)
    share = jnp.asarray(checks.not_negative("share", share, jnp.shape(cell.power_w)))
    safe = jnp.where(share > 1e-18, share, 1)  # for less, the SNR may exceed the range of float32
    bits_s = safe * cell.bandwidth_hz * jnp.log1p(_full_band_snr(observation, cell) / safe) / math.log(2)
    return jnp.where(share > 1e-18, bits_s, 0)


def ready_time(observation: Observation, cell: Cell) -> ArrayLike:
    """Returns when each device can begin its upload, (M,) s: after the download, if there is one, and computation.

    The base station broadcasts with a rateless code: each device receives at the rate of its own channel.
    """
    if cell.download_bits is None:
        return observation.compute_s
    as_sender = dataclasses.replace(cell, power_w=jnp.full(jnp.shape(cell.power_w), jnp.asarray(cell.broadcast_w)))
    bits_s = jnp.asarray(cell.bandwidth_hz) * jnp.log1p(_full_band_snr(observation, as_sender)) / math.log(2)
    heard = bits_s > 0
    return observation.compute_s + jnp.where(heard, cell.download_bits / jnp.where(heard, bits_s, 1), jnp.inf)


class Upload(NamedTuple):
    """The times, (M,) each, that bandwidth allocation depends on."""

    unit_s: Array  # S ln2/B: the time at 1 nat/s/Hz over the whole band
    floor_s: Array  # N0 S ln2/(P h^2): the time over infinite bandwidth; inf without gain or power
    compute_s: Array  # when the upload can begin


@jax.jit
def uploads(observation: Observation, cell: Cell) -> Upload:
    """Returns the uploads of all devices; the caller checks the arguments."""
    snr = _full_band_snr(observation, cell)
    unit_s = jnp.broadcast_to(math.log(2) * jnp.asarray(cell.upload_bits) / cell.bandwidth_hz, snr.shape)
    floor_s = jnp.where(snr > 0, unit_s / jnp.where(snr > 0, snr, 1), jnp.inf)
    ready_s = ready_time(observation, cell)
    dtype = jnp.result_type(unit_s, floor_s, ready_s)
    return Upload(unit_s.astype(dtype), floor_s.astype(dtype), jnp.asarray(ready_s, dtype))


@jax.jit
def share_with_spare(spare_s: Array, upload: Upload) -> Array:
    """Returns the share with which uploads take `spare_s` longer than over infinite bandwidth; inf for spare_s <= 0."""
    feasible = (spare_s > 0) & jnp.isfinite(upload.floor_s)
    hurried = feasible & jnp.isfinite(spare_s)
    spare_s, floor_s = jnp.where(hurried, spare_s, 1), jnp.where(hurried, upload.floor_s, 1)
    upload_s = floor_s + spare_s
    # The ratio underflows only for shares that `rate` treats as 0.
    ratio = jnp.maximum(floor_s / upload_s, jnp.finfo(upload_s.dtype).tiny)
    share = upload.unit_s / (upload_s * _efficiency(ratio, spare_s / upload_s))
    return jnp.where(hurried, share, jnp.where(feasible, 0, jnp.inf))


def spare_with_share(share: ArrayLike, upload: Upload) -> Array:
    """The inverse of `share_with_spare`, for share > 0."""
    # floor_s (snr - ln(1 + snr))/ln(1 + snr), with floor_s = unit_s/(share snr) so that a small snr is not squared.
    snr = upload.unit_s / (share * upload.floor_s)
    safe = jnp.where(snr > 0, snr, 1)
    ratio = jnp.where(safe < 0.6, small_x_minus_log1p_over_x(safe), 1 - jnp.log(1 + safe) / safe) / jnp.log1p(safe)
    return upload.unit_s / share * jnp.where(snr > 0, ratio, 0.5)


def required_efficiency(gamma: ArrayLike) -> Array:
    """Solves ln(1 + y/gamma) = y for y > 0: -(W_{-1}(-gamma exp(-gamma)) + gamma), without cancellation.

    y is in nats/s/Hz. gamma is the upload time over infinite bandwidth divided by the allowed upload time. Returns inf
    for gamma = 0, and 0 for gamma >= 1, where there is no positive root.
    """
    gamma = jnp.asarray(checks.not_negative_or_infinite("gamma", gamma))
    inside = (gamma > 0) & (gamma < 1)
    safe = jnp.where(inside, gamma, 0.5)
    edge = jnp.where(gamma == 0, jnp.inf, jnp.where(gamma >= 1, 0, jnp.nan))
    return jnp.where(inside, _efficiency(safe, 1 - safe), edge)


@jax.custom_jvp
def _efficiency(gamma: Array, rest: Array) -> Array:
    """Computes `required_efficiency` inside (0, 1) from gamma and rest = 1 - gamma, both to full relative accuracy."""
    sigma = jnp.where(rest < 0.4, small_x_minus_log1p(-rest), -rest - jnp.log(gamma))
    # v = rest + 2/3 rest^2 + O(rest^3). Where two terms are exact, sigma may underflow.
    tiny = rest < np.sqrt(np.finfo(rest.dtype).eps) / 4
    return rest + jnp.where(tiny, rest * (1 + rest * (2 / 3)), upper_root(jnp.where(tiny, 1, sigma)))


@_efficiency.defjvp
def _efficiency_jvp(primals, tangents):
    (gamma, rest), (dgamma, _) = primals, tangents
    y = _efficiency(gamma, rest)
    return y, y / (gamma * (rest - y)) * dgamma


def _full_band_snr(observation: Observation, cell: Cell) -> Array:
    """Returns P h^2/(B N0), (M,), clipped so that ratios formed from it stay finite."""
    power_over_noise = jnp.asarray(cell.power_w) / (jnp.asarray(cell.noise_psd_w_hz) * cell.bandwidth_hz)
    snr = power_over_noise * observation.gain
    return jnp.minimum(snr, np.sqrt(np.finfo(snr.dtype).max) / 2)
