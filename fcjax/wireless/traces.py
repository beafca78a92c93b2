"""Traces of rounds: arrays, or files with measurements."""

from __future__ import annotations  # short types in help()

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fcjax import checks


def checked(gain: Any, compute_s: Any, available: Any, file: str = "") -> dict[str, Any]:
    """Checks a trace and returns its arrays by name; `file` opens the messages."""
    arrays: dict[str, Any] = {
        "gain": checks.not_negative(f"{file}gain", gain, low=0),
        "compute_s": checks.not_negative(f"{file}compute_s", compute_s, low=0),
    }
    if available is not None:
        arrays["available"] = available if isinstance(available, jax.Array) else np.asarray(available)
        if arrays["available"].dtype != bool:
            raise ValueError(f"{file}available must be booleans, got dtype {arrays['available'].dtype}")
    shape = jnp.shape(arrays["gain"])
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"{file}gain must have shape (K, M), for K >= 1 rounds of M >= 1 devices, got {shape}")
    for name, array in arrays.items():
        if jnp.shape(array) != shape:
            raise ValueError(f"{file}{name} must have the shape of gain, {shape}, got {jnp.shape(array)}")
    return arrays


def read(path: Path) -> dict[str, Any]:
    """Reads a netCDF or CSV file and returns its arrays, (K, M), by name; see `fcjax.worlds.from_file`."""
    readers = {".nc": _read_netcdf, ".csv": _read_csv}
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path} must end in .nc or .csv, the formats of traces")
    if not path.exists():
        raise FileNotFoundError(f"there is no trace {path.absolute()}")
    return readers[path.suffix.lower()](path)


def _read_netcdf(path: Path) -> dict[str, Any]:
    import xarray as xr  # takes long to import

    try:
        with xr.open_dataset(path, engine="netcdf4", decode_times=False) as file:
            dataset = file.load()
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged file raises many kinds
        raise ValueError(f"{path} cannot be read as netCDF: {error}") from error
    missing = [name for name in ("gain", "compute_s") if name not in dataset]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}: it has {', '.join(map(str, dataset)) or 'no variables'}")
    names = [name for name in ("gain", "compute_s", "available") if name in dataset]
    arrays = {name: _per_round(path, dataset[name]) for name in names}
    took_place = ~np.all(np.isnan(arrays["gain"]) & np.isnan(arrays["compute_s"]), axis=-1)
    num_rounds = np.max(np.flatnonzero(took_place), initial=-1) + 1
    arrays = {name: array[:num_rounds] for name, array in arrays.items()}
    available = arrays.get("available")
    if available is not None:  # netCDF has no booleans
        checks.within(f"{path}: available", available, lambda x: (x == 0) | (x == 1), "0 or 1")
        available = available.astype(bool)
    return checked(arrays["gain"], arrays["compute_s"], available, f"{path}: ")


def _per_round(path: Path, variable: Any) -> np.ndarray:
    """Returns a variable of a netCDF file as numbers, (K, M)."""
    if variable.dtype.kind not in "biuf":
        raise ValueError(f"{path}: {variable.name} must be numbers, got dtype {variable.dtype}")
    if not {"round", "device"}.issubset(variable.dims):
        dims = ", ".join(map(str, variable.dims)) or "none"
        raise ValueError(f"{path}: {variable.name} must have the dimensions round and device, got {dims}")
    others = {dim: size for dim, size in variable.sizes.items() if dim not in ("round", "device")}
    for dim, size in others.items():
        if size != 1:
            raise ValueError(
                f"{path}: {variable.name} must have length 1 along {dim}, got {size}: "
                f"choose one, as in dataset.isel({dim}=[0]).to_netcdf(...)"
            )
    return variable.squeeze(list(others)).transpose("round", "device").values.astype(float)


_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {  # columns of a CSV file, with what is allowed
    "round": (math.isfinite, "a number"),
    "device": (lambda x: x >= 0 and x.is_integer(), "a whole number of 0 or more"),
    "compute_s": (lambda x: 0 <= x <= 1e30, "between 0 and 1e+30"),
    "gain": (lambda x: 0 <= x <= 1e30, "between 0 and 1e+30"),
    "upload_s": (lambda x: 0 < x <= 1e30, "positive and at most 1e+30"),
}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def _read_csv(path: Path) -> dict[str, Any]:
    rows: dict[tuple[float, float], dict[str, float]] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # Excel writes a byte order mark
            reader = csv.DictReader(file, skipinitialspace=True)
            channel = _channel(path, reader.fieldnames or [])
            for fields in reader:
                where = f"{path}, line {reader.line_num}"
                row = {name: _number(where, name, fields[name]) for name in ("round", "device", "compute_s", channel)}
                if "available" in fields:
                    row["available"] = _boolean(where, fields["available"])
                pair = row["round"], row["device"]
                if pair in rows:
                    raise ValueError(f"{where}: round {pair[0]:g} already has a row for device {pair[1]:g}")
                rows[pair] = row
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as CSV: {error}") from error
    return _arrays(path, channel, rows)


def _channel(path: Path, names: Sequence[str]) -> str:
    """Returns which of its two columns describes the channel."""
    channels = [name for name in ("gain", "upload_s") if name in names]
    missing = [name for name in ("round", "device", "compute_s") if name not in names]
    missing += [] if channels else ["gain or upload_s"]
    if missing:
        raise ValueError(f"{path} has no column {', '.join(missing)}: it has {', '.join(names) or 'none'}")
    if len(channels) == 2:
        raise ValueError(f"{path} must have one of the columns gain and upload_s, and has both")
    return channels[0]


def _number(where: str, name: str, text: str | None) -> float:
    is_allowed, allowed = _NUMBERS[name]
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not is_allowed(number):
        raise ValueError(f"{where}: {name} must be {allowed}, got {text!r}")
    return number


def _boolean(where: str, text: str | None) -> bool:
    value = _BOOLEANS.get((text or "").strip().lower())
    if value is None:
        raise ValueError(f"{where}: available must be true or false, got {text!r}")
    return value


def _arrays(path: Path, channel: str, rows: dict[tuple[float, float], dict[str, float]]) -> dict[str, Any]:
    """Returns the rows of a CSV file as arrays, (K, M)."""
    if not rows:
        raise ValueError(f"{path} has no rows")
    rounds, devices = (sorted(set(numbers)) for numbers in zip(*rows, strict=True))
    missing = set(range(len(devices))).difference(devices)
    if missing:
        raise ValueError(
            f"{path}: devices must be numbered from 0 without gaps, got device {devices[-1]:g} "
            f"but no device {min(missing)}"
        )
    shape = len(rounds), len(devices)
    row_of = {number: index for index, number in enumerate(rounds)}
    index = tuple(np.array([(row_of[number], int(device)) for number, device in rows]).T)
    arrays = {"compute_s": np.full(shape, np.nan), "available": np.zeros(shape, bool)}
    # A device without a row would never finish its upload. Its computation time is within the limits of the trace.
    arrays[channel] = np.full(shape, 0.0 if channel == "gain" else np.inf)
    for name, array in arrays.items():
        array[index] = [row.get(name, True) for row in rows.values()]
    longest_s = np.broadcast_to(np.nanmax(arrays["compute_s"], axis=0), shape)
    arrays["compute_s"] = np.where(np.isnan(arrays["compute_s"]), longest_s, arrays["compute_s"])
    return arrays
