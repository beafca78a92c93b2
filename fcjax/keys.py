"""Random keys. Every draw is a function of (seed, round, device, purpose) and of nothing else.

A caller folds the round into the key and splits it by purpose; here the device is folded in, so that device i draws the
same numbers however many devices there are beside it.
"""

import jax
import jax.numpy as jnp
from jax import Array


def per_device(key: Array, num_devices: int) -> Array:
    """One key a device, (M,)."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_devices))
