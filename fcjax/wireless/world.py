"""The true state of a round: channel gains and computation times.

Every draw has its own key, so a round is the same under any policy.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fcjax import keys
from fcjax.types import Cell, Observation, Training
from fcjax.wireless import latency, radio


class RoundKeys(NamedTuple):
    """The random keys of a round, one per purpose."""

    place: Array
    fade: Array
    compute: Array
    error: Array
    policy: Array
    batches: Array


def observe(draw: RoundKeys, cell: Cell, training: Training) -> Observation:
    """Draws the true channel gains and computation times of a round."""
    gain = radio.path_gain(radio.place(draw.place, cell), cell) * radio.fade(draw.fade, cell)
    num_samples = training.local_steps * training.batch_size
    return Observation(gain, latency.compute_time(draw.compute, num_samples, cell))


def misjudge(key: Array, truth: Observation, error: ArrayLike) -> Observation:
    """Returns what the base station observes: h and t^cp with Gaussian errors of relative size `error`."""
    device_keys = keys.per_device(key, jnp.shape(truth.gain)[0])
    of_amplitude, of_time = jax.vmap(lambda k: jax.random.normal(k, (2,)))(device_keys).T
    return Observation(
        truth.gain * (1 + error * of_amplitude) ** 2, truth.compute_s * jnp.maximum(1 + error * of_time, 0)
    )
