"""The rounds of single runs, as the page draws them: who took part, with what, and who finished last.

Values per round and device are quantised to a byte each.
"""

import base64
import json
from collections.abc import Collection
from typing import Any

import numpy as np
import xarray as xr

QUANTITIES = {"gain": ("channel gain", "dB"), "share": ("share", ""), "energy_j": ("energy", "J")}  # label and unit
_MOST_BYTES = 3_000_000  # so that the page stays below 10 MB
_AT_A_TIME = 64  # runs; keeps little of a lazy data set in memory


def chosen(results: xr.Dataset, cells: Collection[list[int]]) -> list[int]:
    """Returns as many runs as fit on the page: the first seed of each cell, then the second, and so on."""
    turns = [run for turn in range(max(map(len, cells))) for members in cells for run in members[turn : turn + 1]]
    size = results.rounds.values * (6 * results.devices.values.astype(int) + 30)  # about what a run takes
    total = np.cumsum(size[turns])
    return sorted(run for run, until in zip(turns, total, strict=True) if until <= _MOST_BYTES)


def rasters(results: xr.Dataset, parts: xr.Dataset | None, numbers: list[int]) -> dict[str, Any]:
    """Returns the rounds of some runs by number, their partitions and their settings.

    Args:
      results: the results of a sweep.
      parts: of `round_parts`, if they are known.
      numbers: of the runs.
    """
    names = [name for name in ("scheduled", "received", *QUANTITIES) if name in results]
    sizes = list(zip(results.rounds.values, results.devices.values.astype(int), strict=True))
    texts, samples = (results[name].values if name in results else None for name in ("setup", "samples"))
    rows: dict[int, dict[str, Any]] = {}
    partitions: dict[str, int] = {}
    setups: dict[str, int] = {}
    for start in range(0, len(numbers), _AT_A_TIME):
        some = numbers[start : start + _AT_A_TIME]
        part = {name: results[name].isel(run=some).values for name in names}
        for place, number in enumerate(some):
            num_rounds, num_devices = map(int, sizes[number])
            run = {name: values[place, :num_rounds, :num_devices] for name, values in part.items()}
            rows[number] = row = {"rounds": num_rounds, "devices": num_devices, **_of_run(run)}
            if parts is not None:
                row |= {name: rounded(parts[name].values[number, :num_rounds]) for name in _PARTS}
            if texts is not None and texts[number]:
                row["setup"] = setups.setdefault(texts[number], len(setups))
            if samples is not None and np.isfinite(samples[number]).all():
                counts = json.dumps(samples[number, :num_devices].astype(int).tolist())
                row["partition"] = partitions.setdefault(counts, len(partitions))
    return {
        "runs": rows,
        "partitions": [json.loads(counts) for counts in partitions],
        "setups": [json.loads(text, parse_constant=str) for text in setups],  # infinity is not valid JSON
    }


_PARTS = ("computing_s", "sending_s", "last")


def _of_run(run: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns the rounds of a run; its values are (round, device)."""
    scheduled = run["scheduled"]
    row: dict[str, Any] = {"scheduled": _bytes(scheduled)}
    for name in QUANTITIES:
        if name in run:
            values = run[name].astype(float)
            known = scheduled & np.isfinite(values) & (values > 0)
            row[name] = _quantised(10 * np.log10(np.where(known, values, 1)) if name == "gain" else values, known)
    lost = np.argwhere(scheduled & ~run.get("received", scheduled))
    return row | ({"lost": lost.tolist()} if lost.size else {})


def _quantised(values: np.ndarray, known: np.ndarray) -> dict[str, Any]:
    """Returns known values as bytes from 0, for `low`, to 255, for `high`."""
    low, high = (float(values[known].min()), float(values[known].max())) if known.any() else (0.0, 0.0)
    levels = np.zeros(values.shape)
    levels[known] = np.round(255 * (values[known] - low) / (high - low or 1))
    return {"low": rounded(low), "high": rounded(high), "levels": _bytes(levels)}


def _bytes(levels: np.ndarray) -> str:
    return base64.b64encode(levels.astype(np.uint8).tobytes()).decode()


def rounded(values: Any) -> Any:
    """Returns numbers for JSON, to 6 digits; None where they are not finite."""
    if np.ndim(values):
        return [rounded(value) for value in np.asarray(values).tolist()]
    return float(f"{values:.6g}") if np.isfinite(values) else None
