"""Checks of arguments. Errors name the argument, its value and what is allowed.

Each check returns its value as floats: JAX would wrap integers that do not fit in 32 bits, and half-precision floats
cannot represent gains and noise. Shapes are always checked, values only if they are concrete and not traced.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fcjax.types import Cell, Observation

Shape = tuple[int, ...]
Real = Array | float  # a float is weakly typed: it takes the precision of the arrays it is combined with


def real(name: str, value: Any, *shapes: Shape) -> Real:
    """Checks that a value is a real number or an array of them, with one of the given shapes if there are any."""
    checked: Real
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jnp.complexfloating):
            raise ValueError(f"{name} must be real, got {value.dtype}")
        checked = value if value.dtype in (jnp.float32, jnp.float64) else value.astype(float)
    elif isinstance(value, float) and not isinstance(value, np.generic):
        checked = value
    else:
        try:
            array = np.asarray(value)
        except ValueError:  # a ragged list
            array = np.asarray(None)
        if not (jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)):
            raise ValueError(f"{name} must be a real number or an array of them, got {value!r}")
        if array.dtype not in (np.float32, np.float64):
            array = array.astype(float)
        checked = float(array) if isinstance(value, int) else jnp.asarray(array)
    if shapes and jnp.shape(checked) not in shapes:
        expected = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{name} must have shape {expected}, got {jnp.shape(checked)}; use jax.vmap for batches")
    return checked


def within(name: str, value: Any, is_allowed: Callable[[np.ndarray], np.ndarray], allowed: str, *shapes: Shape) -> Real:
    """Checks that all elements of a concrete value are allowed; NaN never is."""
    checked = real(name, value, *shapes)
    if not isinstance(checked, jax.core.Tracer):
        array = np.asarray(checked, float)
        with np.errstate(invalid="ignore"):
            bad = ~(is_allowed(array) & ~np.isnan(array))
        if bad.any():
            index = tuple(int(i) for i in np.argwhere(bad)[0])
            where = f"{name}[{', '.join(map(str, index))}]" if index else name
            raise ValueError(f"{where} must be {allowed}, got {array[index]:g}")
    return checked


def whole(name: str, value: Any, low: int, high: int | None = None, *, why: str = "") -> int:
    """Checks that a value is a whole number from `low` to `high`; `why` explains the limit."""
    try:
        is_number = not isinstance(value, str | bytes | bool | np.bool_) and np.result_type(value).kind != "b"
        number = int(value) if is_number else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or number != value or number < low or (high is not None and number > high):
        allowed = f"a whole number of {low} or more" if high is None else f"a whole number from {low} to {high}"
        raise ValueError(f"{name} must be {allowed}{why}, got {value!r}")
    return number


def scalar(name: str, value: Any, check: Callable[..., Real] = real, **limits: float) -> float:
    """Checks that a value is one number and returns it as a Python float."""
    check(name, value, (), **limits)
    return float(value)


def positive(name: str, value: Any, *shapes: Shape, low: float = 1e-30, high: float = 1e30) -> Real:
    checked = within(name, value, lambda x: (x > 0) & np.isfinite(x), "positive and finite", *shapes)
    return _within_reach(name, checked, low, high)


def not_negative(name: str, value: Any, *shapes: Shape, low: float = 1e-30, high: float = 1e30) -> Real:
    checked = within(name, value, lambda x: (x >= 0) & np.isfinite(x), "zero or more, and finite", *shapes)
    return _within_reach(name, checked, low, high)


def fraction(name: str, value: Any, *shapes: Shape) -> Real:
    return within(name, value, lambda x: (x >= 0) & (x <= 1), "between 0 and 1", *shapes)


def not_negative_or_infinite(name: str, value: Any, *shapes: Shape) -> Real:
    return within(name, value, lambda x: x >= 0, "zero or more", *shapes)


def _within_reach(name: str, value: Real, low: float, high: float) -> Real:
    """Checks limits that real systems are far inside of; beyond them, results may exceed the range of float32."""
    return within(name, value, lambda x: (x == 0) | ((x >= low) & (x <= high)), f"between {low:g} and {high:g}")


def mask(name: str, value: Any, size: int) -> Array:
    """Checks that a value is one boolean per device."""
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
        array: Any = jnp.asarray(value)
    else:
        try:
            array = np.asarray(value)
        except ValueError:  # a ragged list
            array = np.asarray(None)
    if array.dtype != bool:
        raise ValueError(f"{name} must be a mask of booleans, one per device, got dtype {array.dtype}")
    if array.shape != (size,):
        raise ValueError(f"{name} must have shape ({size},), got {array.shape}; use jax.vmap for batches")
    return jnp.asarray(array)


def no_lists(name: str, fields: Any) -> None:
    """Checks that no field is a list, which JAX would treat as many leaves."""
    for field in dataclasses.fields(fields):
        value = getattr(fields, field.name)
        if isinstance(value, list | tuple):
            raise ValueError(f"{name}.{field.name} must be a number or an array, got a list: use numpy.array({value})")


def num_devices(cell: Cell) -> int:
    """Returns M, the length of `cell.power_w`."""
    shape = jnp.shape(real("cell.power_w", cell.power_w))
    if len(shape) != 1 or shape[0] == 0:
        raise ValueError(f"cell.power_w must have shape (M,) with M >= 1, one power per device, got {shape}")
    return shape[0]


def uplink(observation: Observation, cell: Cell, *, needs_upload: bool = True) -> tuple[Observation, Cell]:
    """Checks the values that the rate depends on; with `needs_upload`, there must be bits to upload.

    Devices that are not available get no gain, so that they never finish.
    """
    per_device = (num_devices(cell),)
    access(cell)
    cell = reals("cell", cell, (), per_device)
    names = ("bandwidth_hz", "noise_psd_w_hz", "power_w", "upload_bits")
    of_download = () if cell.download_bits is None else ("download_bits", "broadcast_w")
    fields: dict[str, Any] = {name: of_cell(name, cell) for name in (*names, *of_download)}
    if needs_upload:
        positive("cell.upload_bits", fields["upload_bits"])
    gain = not_negative("observation.gain", observation.gain, per_device, low=0)
    available = observation.available
    if available is not True:
        available = booleans_of("observation.available", available, per_device)
        gain = jnp.where(available, gain, 0)
    compute_s = not_negative_or_infinite("observation.compute_s", observation.compute_s, per_device)
    return Observation(gain, compute_s, available), dataclasses.replace(cell, **fields)


def booleans_of(name: str, value: Any, per_device: Shape) -> Array:
    """Checks that a value is a boolean, or one per device."""
    array: Any = value if isinstance(value, jax.Array) else np.asarray(value)
    if array.dtype != bool or array.shape not in ((), per_device):
        raise ValueError(f"{name} must be booleans of shape () or {per_device}, got {array.dtype} {array.shape}")
    return jnp.asarray(array)


def whole_cell(cell: Cell) -> Cell:
    """Checks all fields of a cell."""
    access(cell)
    fields: dict[str, Any] = {field.name: of_cell(field.name, cell) for field in _numbers(cell)}
    return dataclasses.replace(cell, **fields)


ACCESS = ("fdma", "ofdma", "tdma")


def access(cell: Cell) -> None:
    """Checks the access scheme of a cell."""
    if cell.access not in ACCESS:
        raise ValueError(f"cell.access must be {', '.join(ACCESS[:-1])} or {ACCESS[-1]}, got {cell.access!r}")
    whole("cell.num_blocks", cell.num_blocks, 1, 100_000)


def reals(name: str, fields: Any, *shapes: Shape) -> Any:
    """Checks that all numeric fields are real and returns them as floats, for programs that take all fields."""
    checked = {x.name: real(f"{name}.{x.name}", getattr(fields, x.name), *shapes) for x in _numbers(fields)}
    return dataclasses.replace(fields, **checked)


def _numbers(fields: Any) -> list[dataclasses.Field]:
    """Returns the numeric fields, without optional ones that are None."""
    dynamic = (field for field in dataclasses.fields(fields) if not field.metadata.get("static"))
    return [field for field in dynamic if field.default is not None or getattr(fields, field.name) is not None]


def of_cell(name: str, cell: Cell) -> Real:
    """Checks a field of a cell."""
    about = next(field.metadata for field in dataclasses.fields(cell) if field.name == name)
    shapes: list[Shape] = [(num_devices(cell),) if shape == "(M,)" else () for shape in about["shape"].split(" or ")]
    return _CHECKS[about["allowed"]](f"cell.{name}", getattr(cell, name), *shapes, **about["limits"])


_CHECKS: dict[str, Callable[..., Real]] = {
    "positive": positive,
    "not negative": not_negative,
    "not negative or infinite": not_negative_or_infinite,
    "fraction": fraction,
}
