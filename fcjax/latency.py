"""Computation time: the shifted exponential of the paper's eq. (4).

A device that works through `num_samples` samples needs at least a_i for each, and on top of that an exponential time
with mean num_samples/mu_i: P[t < x] = 1 - exp(-(mu_i/(tau d)) (x - a_i tau d)) with tau d the number of samples.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fcjax import checks, keys
from fcjax.types import Cell


def compute_time(key: Array, num_samples: ArrayLike, cell: Cell) -> Array:
    """Draws the time each device computes, (M,) s.

    Args:
      key: the purpose's key; device i's draw depends on it and on i only.
      num_samples: () or (M,), samples worked through in a round: local steps times batch size.
      cell: for `sample_floor_s` and `sample_rate_hz`.
    """
    num_devices = checks.num_devices(cell)
    for name, value in (
        ("num_samples", num_samples),
        ("cell.sample_floor_s", cell.sample_floor_s),
        ("cell.sample_rate_hz", cell.sample_rate_hz),
    ):
        checks.check_shape(name, value, (), (num_devices,))
    checks.check_not_negative("num_samples", num_samples)
    checks.check_not_negative("cell.sample_floor_s", cell.sample_floor_s)
    checks.check_positive("cell.sample_rate_hz", cell.sample_rate_hz)
    extra = jax.vmap(jax.random.exponential)(keys.per_device(key, num_devices))
    return jnp.asarray(num_samples) * (cell.sample_floor_s + extra / jnp.asarray(cell.sample_rate_hz))
