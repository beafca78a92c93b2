"""What the page shows, as plain data: results aggregated by setting and policy, and the rounds of some runs.

A *cell* of the page is a combination of all settings except the seed. Lines are the policies, or the values of an axis
if there is only one policy. A panel holds the cells that agree in all other settings, so nothing is ever averaged over
different settings.
"""

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from fcjax.sweeps import metrics
from fcjax.sweeps.comparisons import labels_of
from fcjax.sweeps.results import checked, further_axes, summary
from fcjax.sweeps.timing import round_parts

LEAST_SEEDS = 3  # for an interval: of two runs, it is six times as wide as their distance
PUBLISHED = "published_percent"  # the column of a reference
_POINTS = 101  # of a curve
_RASTER_BYTES = 3_000_000  # for the rounds of single runs, so that the page stays below 10 MB
_MOST_LINES = 8  # that an axis other than policies can have
_AT_A_TIME = 64  # runs; keeps little of a lazy data set in memory
_SETTINGS = ("policy", "phi", "dataset", "distribution", "radius_m", "devices", "budget_s")
_NAMES = {"radius_m": "radius (m)", "budget_s": "budget (s)"}
_COLUMNS = {  # of runs and cells: label, unit, scale and digits
    "best_accuracy": ("best accuracy", "%", 100, 2),
    "final_accuracy": ("final accuracy", "%", 100, 2),
    "mean_scheduled": ("devices per round", "", 1, 2),
    "rounds": ("rounds", "", 1, 0),
    "mean_round_s": ("round time", "s", 1, 3),
    "computing_s": ("computing", "s", 1, 3),
    "sending_s": ("sending", "s", 1, 3),
    "together": ("finish together", "%", 100, 0),
    "energy_j": ("energy", "J", 1, 1),
    "lost": ("lost updates", "", 1, 1),
    "jain_index": ("Jain index", "", 1, 3),
}
_COMPARED = {  # label, unit, scale and digits
    "best_accuracy": ("best accuracy", "points", 100, 2),
    "final_accuracy": ("final accuracy", "points", 100, 2),
    "area_under_curve": ("mean accuracy over time", "points", 100, 2),
    "jain_index": ("Jain index", "", 1, 3),
    "energy_j": ("energy", "J", 1, 1),
}
_RASTERS = {"gain": ("channel gain", "dB"), "share": ("share", ""), "energy_j": ("energy", "J")}


def digest(results: xr.Dataset, notes: Sequence[str] = (), reference: pd.DataFrame | None = None) -> dict[str, Any]:
    """Returns what the page shows; see `fcjax.report.write`."""
    results, notes = checked(results), list(notes)
    runs = summary(results)
    varies = [name for name in (*_SETTINGS, *further_axes(results)) if runs[name].astype(str).nunique() > 1]
    axes = {name: _values(runs[name]) for name in varies}
    places = {name: runs[name].astype(str).map({str(value): i for i, value in enumerate(axes[name])}) for name in varies}
    parts = _parts(results, notes)
    runs = _measured(results, runs, parts, notes)
    columns = {name: how for name, how in _COLUMNS.items() if name in runs and (name != "lost" or runs.lost.any())}

    policies = labels_of(results).policy
    of_lines = next((name for name in varies if 1 < len(axes[name]) <= _MOST_LINES), "policy")
    of_lines = "policy" if policies.nunique() > 1 else of_lines
    lines = policies if of_lines == "policy" else runs[of_lines].map(_shown)
    of_panels = [name for name in varies if name not in (("policy", "phi") if of_lines == "policy" else (of_lines,))]
    panels = [tuple(setting) for setting in runs[of_panels].astype(str).to_numpy()]
    names_of_lines, names_of_panels = list(dict.fromkeys(lines)), list(dict.fromkeys(panels))
    cells = {key: np.array(members) for key, members in runs.groupby([lines, panels], sort=False).indices.items()}
    cell_of = {int(run): number for number, members in enumerate(cells.values()) for run in members}

    histories = _histories(results)
    published = None if reference is None else _published(runs, reference)
    found = []
    for (line, panel), members in cells.items():
        cell = {
            "line": names_of_lines.index(line),
            "panel": names_of_panels.index(panel),
            "at": [int(places[name].iloc[members[0]]) for name in varies],
            "seeds": len(members),
            "curves": _curves([histories[run] for run in members], float(runs.budget_s.iloc[members[0]])),
            "means": {name: _interval(runs[name].to_numpy(float)[members]) for name in columns},
        }
        if published is not None:
            cell["published"] = _rounded(published[members[0]])
        found.append(cell)
    first = [runs[name].iloc[0] for name in (*_SETTINGS, *further_axes(results))]
    constant = {
        _NAMES.get(name, name): _shown(value)
        for name, value in zip((*_SETTINGS, *further_axes(results)), first, strict=True)
        if name not in varies and str(value) not in ("nan", "")
    }
    raster_runs = _within_budget(results, cells.values(), notes)
    data = {
        "about": {name: _attribute(value) for name, value in results.attrs.items()},
        "constant": constant,
        "axes": [
            {"name": _NAMES.get(name, name), "values": [_shown(value) for value in axes[name]]} for name in varies
        ],
        "line_axis": _NAMES.get(of_lines, of_lines),
        "lines": names_of_lines,
        "panels": [_title(of_panels, runs.iloc[panels.index(panel)]) for panel in names_of_panels],
        "cells": found,
        "columns": columns,
        "compared": {},
        "pairs": {},
        "runs": [
            {
                "cell": cell_of[number],
                "seed": int(row.seed),
                "stop": row.stop,
                "values": [_rounded(getattr(row, name)) for name in columns],
            }
            for number, row in enumerate(runs.itertuples())
        ],
        "rasters": _rasters(results, parts, raster_runs),
        "quantities": {name: how for name, how in _RASTERS.items() if name in results},
        "least_seeds": LEAST_SEEDS,
        "notes": notes,
    }
    if of_lines == "policy" and len(names_of_lines) > 1:
        _compare(results, runs, of_panels, names_of_panels, data)
    return data


def _parts(results: xr.Dataset, notes: list[str]) -> xr.Dataset | None:
    needed = ("setup", "gain", "compute_s", "share")
    if missing := [name for name in needed if name not in results]:
        notes.append(f"The parts of the round time are missing, because these results have no {', '.join(missing)}.")
        return None
    return round_parts(results)


def _measured(results: xr.Dataset, runs: pd.DataFrame, parts: xr.Dataset | None, notes: list[str]) -> pd.DataFrame:
    """Adds further metrics to the summary, and drops those that older results lack."""
    runs = runs.assign(jain_index=metrics.jain_index(results).values)
    if "energy_j" not in results:
        notes.append("Energies are missing: an older version wrote these results, or they are damaged.")
        runs = runs.drop(columns="energy_j")
    names = () if parts is None else ("computing_s", "sending_s", "together")
    return runs.assign(**{name: parts[name].mean("round").values for name in names})


def _histories(results: xr.Dataset) -> list[dict[str, np.ndarray]]:
    """Returns the accuracies of each run, that of w_0 first, and the time, energy and rounds at which they change."""
    found = []
    for start in range(0, results.sizes["run"], _AT_A_TIME):
        part = results.isel(run=slice(start, start + _AT_A_TIME))
        spent_j = part.energy_j.astype(float).sum("device").values if "energy_j" in part else None
        accuracy, elapsed_s, first = part.accuracy.values, part.elapsed_s.values, part.start_accuracy.values
        for run, num_rounds in enumerate(part.rounds.values):
            current = np.concatenate([first[run : run + 1], accuracy[run, :num_rounds]]).astype(float)
            best = current.copy()
            best[1:] = np.maximum.accumulate(best[1:])  # the first model counts only where there is no other
            history = {"current": current, "best": best, "time": elapsed_s[run, :num_rounds].astype(float)}
            history["rounds"] = np.arange(1, num_rounds + 1)
            if spent_j is not None:
                history["energy"] = np.cumsum(spent_j[run, :num_rounds])
            found.append(history)
    return found


def _curves(histories: list[dict[str, np.ndarray]], budget_s: float) -> dict[str, Any]:
    """Returns means and half widths over seeds on a common grid; a run keeps its last model after its last round."""
    found = {}
    for name in ("time", "energy", "rounds"):
        if name not in histories[0]:
            continue
        end = budget_s if name == "time" else max((history[name][-1] for history in histories if history[name].size), default=0)
        grid = np.linspace(0, end, _POINTS)
        grid = np.unique(grid.round()) if name == "rounds" else grid
        found[name] = {"x": _rounded(grid)}
        for kind in ("current", "best"):
            values = [h[kind][np.searchsorted(h[name], grid, side="right")] for h in histories]
            found[name][kind] = _interval(np.stack(values))
    return found


def _interval(values: np.ndarray) -> list:
    """Returns the mean, and the half width of its interval or None."""
    mean, half = metrics.interval(values)
    return [_rounded(mean), _rounded(half) if len(values) >= LEAST_SEEDS else None]


def _compare(results: xr.Dataset, runs: pd.DataFrame, of_panels: list[str], panels: list, data: dict[str, Any]) -> None:
    """Adds the paired differences of each metric."""
    for name, how in _COMPARED.items():
        if name == "energy_j" and name not in runs:
            continue
        measure: Any = name if name != "energy_j" else lambda r: metrics.energy(r).sum("device")
        try:
            table = metrics.paired_table(results, measure)
        except ValueError as error:
            data["notes"].append(f"Policies are not compared by {how[0]}: {error}.")
            continue
        place = {policy: number for number, policy in enumerate(data["lines"])}
        settings = [tuple(setting) for setting in table[of_panels].astype(str).to_numpy()]
        data["compared"][name] = how
        data["pairs"][name] = [
            [panels.index(setting), place[row.a], place[row.b], *map(_rounded, (row.difference, row.low, row.high))]
            + [row.seeds, row.verdict, _rounded(row.p_holm)]
            for setting, row in zip(settings, table.itertuples(), strict=True)
        ]


def _within_budget(results: xr.Dataset, cells: Any, notes: list[str]) -> list[int]:
    """Returns the runs whose rounds the page shows: the first seed of each cell, then the second, and so on."""
    turns = [run for turn in range(max(map(len, cells))) for members in cells for run in members[turn : turn + 1]]
    size = 4 * results.rounds.values * (results.devices.values.astype(int) + 8)  # about what a run takes
    shown = [run for run, total in zip(turns, np.cumsum(size[turns]), strict=True) if total <= _RASTER_BYTES]
    if len(shown) < len(turns):
        notes.append(
            f"To keep the page small, it has the rounds of {len(shown)} of {len(turns)} runs: of the first seeds of each "
            "setting. All other figures include all runs."
        )
    return sorted(map(int, shown))


def _rasters(results: xr.Dataset, parts: xr.Dataset | None, numbers: list[int]) -> dict[str, Any]:
    """Returns the rounds of some runs, their partitions and their settings."""
    names = [name for name in _RASTERS if name in results]
    rasters: dict[int, dict[str, Any]] = {}
    partitions: dict[bytes, tuple[int, list]] = {}
    setups: dict[str, int] = {}
    for start in range(0, len(numbers), _AT_A_TIME):
        some = numbers[start : start + _AT_A_TIME]
        here = results[["scheduled", *names, *({"received"} & set(results))]].isel(run=some).load()
        for row, number in enumerate(some):
            num_rounds, num_devices = int(results.rounds.values[number]), int(results.devices.values[number])
            run = here.isel(run=row, round=slice(num_rounds), device=slice(num_devices))
            scheduled = run.scheduled.values
            rasters[number] = {"rounds": num_rounds, "devices": num_devices, "scheduled": _bytes(scheduled)}
            for name in names:
                values = run[name].values.astype(float)
                with np.errstate(divide="ignore"):
                    values = 10 * np.log10(values) if name == "gain" else values
                rasters[number][name] = _quantised(values, scheduled)
            if "received" in run and (scheduled & ~run.received.values).any():
                rasters[number]["lost"] = np.argwhere(scheduled & ~run.received.values).tolist()
            if parts is not None:
                of_run = parts.isel(run=number, round=slice(num_rounds))
                for name in ("computing_s", "sending_s", "last"):
                    rasters[number][name] = _rounded(of_run[name].values)
            if "setup" in results and (text := str(results.setup.values[number])):
                rasters[number]["setup"] = setups.setdefault(text, len(setups))
            if "samples" in results:
                counts = results.samples.values[number, :num_devices]
                place, _ = partitions.setdefault(counts.tobytes(), (len(partitions), counts.astype(int).tolist()))
                rasters[number]["partition"] = place
    return {
        "runs": rasters,
        "partitions": [counts for _, counts in partitions.values()],
        "setups": [json.loads(text, parse_constant=str) for text in setups],
    }


def _quantised(values: np.ndarray, scheduled: np.ndarray) -> dict[str, Any]:
    """Returns values of scheduled devices as bytes from 0, for `low`, to 255, for `high`; 0 where not scheduled."""
    known = scheduled & np.isfinite(values)
    low, high = (float(end(values[known], initial=0.0)) if not known.any() else float(end(values[known])) for end in (np.min, np.max))
    levels = np.zeros(values.shape)
    levels[known] = np.round(255 * (values[known] - low) / max(high - low, 1e-300))
    return {"low": _rounded(low), "high": _rounded(high), "levels": _bytes(levels)}


def _bytes(levels: np.ndarray) -> str:
    return base64.b64encode(levels.astype(np.uint8).tobytes()).decode()


def _published(runs: pd.DataFrame, reference: pd.DataFrame) -> np.ndarray:
    """Returns the published accuracy of each run's setting, NaN where there is none."""
    by = [name for name in reference if name in (*_SETTINGS, "seed") or (name in runs and name not in _COLUMNS)]
    by = [name for name in by if name != "seeds"]
    if PUBLISHED not in reference or not by:
        raise ValueError(
            f"a reference must have the column {PUBLISHED} and columns of settings, such as policy and distribution; "
            f"it has {', '.join(map(str, reference))}"
        )
    if reference[by].duplicated().any():
        raise ValueError(f"a reference must have one row per combination of {', '.join(by)}: some have several")
    keys = reference[by].astype(runs[by].dtypes.to_dict())
    joined = runs[by].merge(keys.assign(value_=reference[PUBLISHED] / 100), "left", by)
    return joined.value_.to_numpy(float)


def _values(column: pd.Series) -> list:
    """Returns the values of an axis: numbers in order, then NaN; texts as they come."""
    values = list({str(value): value for value in column.tolist()}.values())
    if any(isinstance(value, str) for value in values):
        return values
    return sorted(values, key=lambda value: (value != value, value))


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value or "none"
    return "none" if value != value else f"{value:g}"


def _title(names: Sequence[str], run: pd.Series) -> str:
    return ", ".join(f"{_NAMES.get(name, name)} {_shown(run[name])}" for name in names)


def _attribute(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _rounded(values: Any) -> Any:
    """Returns numbers for JSON, to 6 digits; None where they are not finite."""
    if np.ndim(values):
        return [_rounded(value) for value in np.asarray(values).tolist()]
    return float(f"{values:.6g}") if np.isfinite(values) else None
