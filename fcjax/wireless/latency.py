"""Computation time: the shifted exponential of the paper's eq. (4).

A device that works through `num_samples` samples needs at least a_i for each, and on top of that an exponential time
with mean num_samples/mu_i: P[t < x] = 1 - exp(-(mu_i/(tau d)) (x - a_i tau d)) with tau d the number of samples.
"""

import jax
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
    num_samples = checks.not_negative("num_samples", num_samples, (), (num_devices,))
    sample_floor_s, sample_rate_hz = (checks.of_cell(name, cell) for name in ("sample_floor_s", "sample_rate_hz"))
    extra = jax.vmap(jax.random.exponential)(keys.per_device(key, num_devices))
    return num_samples * (sample_floor_s + extra / sample_rate_hz)
