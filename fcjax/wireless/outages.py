"""Uploads that are lost on the way to the base station.

Each factory returns an `Outages`. Its parameter is part of the state, so that models from one factory share one
compiled program. The draw of device i depends only on the key and on i. `by_name` looks outages up by name.
"""

from __future__ import annotations  # short types in help()

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fcjax import checks, keys
from fcjax.runtime.registry import Registry
from fcjax.types import Cell, Decision, Observation, Outages
from fcjax.wireless import radio


def none() -> Outages:
    """No upload is lost."""
    return Outages(lambda cell: (), _lose_none)


def _lose_none(
    key: Array, state: tuple, decision: Decision, observation: Observation, cell: Cell
) -> tuple[tuple, Array]:
    return state, jnp.zeros(checks.num_devices(cell), bool)


def erasures(probability: ArrayLike) -> Outages:
    """Each upload is lost independently of the others.

    Args:
      probability: () or (M,) in [0, 1].
    """
    checks.fraction("probability", probability)

    def init(cell: Cell) -> Array:
        return jnp.asarray(checks.fraction("probability", probability, (), (checks.num_devices(cell),)), float)

    return Outages(init, _lose_erasures)


def _lose_erasures(
    key: Array, probability: Array, decision: Decision, observation: Observation, cell: Cell
) -> tuple[Array, Array]:
    return probability, _draw(key, probability, cell)


def waterfall(threshold: ArrayLike | None = None) -> Outages:
    """Each upload is lost with the probability of a packet error over a fading channel: see `loss_probability`.

    M. Chen, Z. Yang, W. Saad, C. Yin, H. V. Poor, S. Cui, "A Joint Learning and Communications Framework for Federated
    Learning Over Wireless Networks", IEEE Transactions on Wireless Communications, vol. 20, no. 1, pp. 269-283, 2021.

    Args:
      threshold: () m, the waterfall threshold as a power ratio; None for their 0.023 dB.
    """
    if threshold is not None:
        checks.not_negative("threshold", threshold, ())

    def init(cell: Cell) -> Array:
        return jnp.asarray(radio.db_to_linear(0.023) if threshold is None else threshold, float)

    return Outages(init, _lose_waterfall)


def _lose_waterfall(
    key: Array, threshold: Array, decision: Decision, observation: Observation, cell: Cell
) -> tuple[Array, Array]:
    return threshold, _draw(key, loss_probability(threshold, decision, observation, cell), cell)


def loss_probability(threshold: ArrayLike, decision: Decision, observation: Observation, cell: Cell) -> Array:
    """Returns the packet error probability of each upload, (M,): q_i = 1 - exp(-m b_i N0/(P_i h_i^2)).

    This is the chance that the SNR of a Rayleigh fading channel is below m if its mean is P_i h_i^2/(b_i N0). The model
    of Chen et al. also has interference. b_i is the bandwidth that the device uses: its share of the band, or the whole
    band under TDMA. Without gain or power, q_i is 1.

    I. Chatzigeorgiou, I. J. Wassell, R. Carrasco, "On the Frame Error Rate of Transmission Schemes on Quasi-Static
    Fading Channels", Conference on Information Sciences and Systems, 2008.

    Args:
      threshold: () m, the waterfall threshold as a power ratio.
      decision: shares, and powers if it decides them.
      observation: the true gains.
      cell: bandwidth, noise, powers and access scheme.
    """
    observation, cell = checks.uplink(observation, cell, needs_upload=False)
    per_device = (checks.num_devices(cell),)
    threshold = checks.not_negative("threshold", threshold, ())
    share: ArrayLike = checks.not_negative("decision.share", decision.share, per_device)
    power_w: ArrayLike = cell.power_w
    if decision.power_w is not None:
        power_w = checks.not_negative("decision.power_w", decision.power_w, (), per_device, low=1e-20, high=1e6)
    if cell.access == "tdma":
        share = 1.0
    full_band_snr = power_w / (jnp.asarray(cell.noise_psd_w_hz) * cell.bandwidth_hz) * observation.gain
    heard = full_band_snr > 1e-18  # for less, derivatives may exceed the range of float32
    return jnp.where(heard, -jnp.expm1(-threshold * share / jnp.where(heard, full_band_snr, 1)), 1)


def _draw(key: Array, probability: Array, cell: Cell) -> Array:
    uniform = jax.vmap(jax.random.uniform)(keys.per_device(key, checks.num_devices(cell)))
    return uniform < probability


REGISTRY = Registry(Outages, {"none": none, "erasures": erasures, "waterfall": waterfall})


def by_name(name: str) -> Outages:
    """Returns a model of outages by name, such as "none", "erasures(probability=0.1)" or "waterfall"."""
    return REGISTRY.make(name)
