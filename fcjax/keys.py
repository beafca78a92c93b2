"""Random keys. Every draw depends only on (seed, round, device, purpose).

The caller folds the round into the key and splits it by purpose. This module folds in the device, so device i draws the
same numbers however many other devices there are.
"""

import enum

import jax
import jax.numpy as jnp
from jax import Array


class Purpose(enum.IntEnum):
    """What a key is folded with where it is not split; the numbers are far from those of rounds and devices."""

    WORLD = 2**31 - 1  # of a run's key
    OUTAGES = 2**31 - 2  # of a round's key, like the following
    COMPRESSION = 2**31 - 3
    AVAILABILITY = 2**31 - 4  # and smaller numbers where worlds are nested


def per_device(key: Array, num_devices: int) -> Array:
    """Returns one key per device, (M,)."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_devices))
