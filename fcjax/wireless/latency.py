"""Computation time: the shifted exponential of the paper's eq. (4).

A device that processes `num_samples` samples takes at least a_i per sample, plus an exponential time with mean
num_samples/mu_i: P[t < x] = 1 - exp(-(mu_i/(tau d)) (x - a_i tau d)), where tau d is the number of samples.
"""

import jax
from jax import Array
from jax.typing import ArrayLike

from fcjax import checks, keys
from fcjax.types import Cell


def compute_time(key: Array, num_samples: ArrayLike, cell: Cell) -> Array:
    """Draws the computation time of each device, (M,) s.

    Args:
      key: the random key; the draw of device i depends only on it and on i.
      num_samples: () or (M,) samples processed in a round: local steps times batch size.
      cell: provides `sample_floor_s` and `sample_rate_hz`.
    """
    num_devices = checks.num_devices(cell)
    num_samples = checks.not_negative("num_samples", num_samples, (), (num_devices,))
    sample_floor_s, sample_rate_hz = (checks.of_cell(name, cell) for name in ("sample_floor_s", "sample_rate_hz"))
    extra = jax.vmap(jax.random.exponential)(keys.per_device(key, num_devices))
    return num_samples * (sample_floor_s + extra / sample_rate_hz)
