"""Errors for bad input, raised before anything is computed: they name the argument, its value and what is allowed.

Shapes are checked always; values only where they are concrete, since a traced value has none to look at.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fcjax.types import Cell, Observation


def check_values(name: str, value: ArrayLike, is_allowed: Callable[[np.ndarray], np.ndarray], allowed: str) -> None:
    """Raises ValueError unless all of a concrete value is allowed; NaN never is."""
    if isinstance(value, jax.core.Tracer):
        return
    array = np.asarray(value, float)
    with np.errstate(invalid="ignore"):
        bad = ~(is_allowed(array) & ~np.isnan(array))
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        where = f"{name}[{', '.join(map(str, index))}]" if index else name
        raise ValueError(f"{where} must be {allowed}, got {array[index]:g}")


def check_positive(name: str, value: ArrayLike) -> None:
    check_values(name, value, lambda x: (x > 0) & np.isfinite(x), "positive and finite")


def check_not_negative(name: str, value: ArrayLike, *, or_infinite: bool = False) -> None:
    if or_infinite:
        check_values(name, value, lambda x: x >= 0, "zero or more")
    else:
        check_values(name, value, lambda x: (x >= 0) & np.isfinite(x), "zero or more, and finite")


def check_shape(name: str, value: ArrayLike, *allowed: tuple[int, ...]) -> None:
    if jnp.shape(value) not in allowed:
        expected = " or ".join(str(shape) for shape in allowed)
        raise ValueError(f"{name} must have shape {expected}, got {jnp.shape(value)}; use jax.vmap for batches")


def num_devices(cell: Cell) -> int:
    """M, which `cell.power_w` tells."""
    shape = jnp.shape(cell.power_w)
    if len(shape) != 1 or shape[0] == 0:
        raise ValueError(f"cell.power_w must have shape (M,) with M >= 1, one power a device, got {shape}")
    return shape[0]


def check_uplink(observation: Observation, cell: Cell) -> None:
    """What the rate of an upload depends on."""
    per_device = (num_devices(cell),)
    check_shape("cell.bandwidth_hz", cell.bandwidth_hz, ())
    check_shape("cell.noise_psd_w_hz", cell.noise_psd_w_hz, ())
    check_shape("cell.upload_bits", cell.upload_bits, (), per_device)
    check_shape("observation.gain", observation.gain, per_device)
    check_shape("observation.compute_s", observation.compute_s, per_device)
    check_positive("cell.bandwidth_hz", cell.bandwidth_hz)
    check_positive("cell.noise_psd_w_hz", cell.noise_psd_w_hz)
    check_positive("cell.upload_bits", cell.upload_bits)
    check_not_negative("cell.power_w", cell.power_w)
    check_not_negative("observation.gain", observation.gain)
    check_not_negative("observation.compute_s", observation.compute_s, or_infinite=True)
