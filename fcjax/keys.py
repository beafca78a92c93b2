"""Random keys. Every draw depends only on (seed, round, device, purpose).

The caller folds the round into the key and splits it by purpose. This module folds in the device, so device i draws the
same numbers however many other devices there are.
"""

import jax
import jax.numpy as jnp
from jax import Array


def per_device(key: Array, num_devices: int) -> Array:
    """Returns one key per device, (M,)."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_devices))
