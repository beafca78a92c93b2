"""What is true of a round: where the devices are, what arrives of their signals, and how long they compute.

Every draw has a key of its own, so that a round is the same whatever a policy does.
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
    """What a round draws, each with a key of its own."""

    place: Array
    fade: Array
    compute: Array
    error: Array
    policy: Array
    batches: Array


def observe(draw: RoundKeys, cell: Cell, training: Training) -> Observation:
    """Where the devices are in this round, what arrives of their signal, and how long they compute."""
    gain = radio.path_gain(radio.place(draw.place, cell), cell) * radio.fade(draw.fade, cell)
    num_samples = training.local_steps * training.batch_size
    return Observation(gain, latency.compute_time(draw.compute, num_samples, cell))


def misjudge(key: Array, truth: Observation, error: ArrayLike) -> Observation:
    """What the base station sees: h and t^cp with Gaussian errors of a relative standard deviation."""
    device_keys = keys.per_device(key, jnp.shape(truth.gain)[0])
    of_amplitude, of_time = jax.vmap(lambda k: jax.random.normal(k, (2,)))(device_keys).T
    return Observation(
        truth.gain * (1 + error * of_amplitude) ** 2, truth.compute_s * jnp.maximum(1 + error * of_time, 0)
    )
