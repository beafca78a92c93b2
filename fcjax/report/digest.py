"""What the page shows, as plain data: results aggregated by setting and policy, and the rounds of some runs.

A *cell* of the page is a combination of all settings except the seed. Its line is its policy, or the value of an axis
if there is only one policy. Its panel holds the cells that agree in all other settings. Nothing is averaged over
different settings.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from fcjax.report import rasters
from fcjax.report.rasters import rounded
from fcjax.sweeps import metrics
from fcjax.sweeps.comparisons import LEAST_SEEDS, labels_of
from fcjax.sweeps.results import checked, further_axes, summary
from fcjax.sweeps.timing import round_parts

PUBLISHED = "published_percent"  # the column of a reference
_POINTS = 101  # of a curve
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
_COMPARED = {
    "best_accuracy": ("best accuracy", "points", 100, 2),
    "final_accuracy": ("final accuracy", "points", 100, 2),
    "area_under_curve": ("mean accuracy over time", "points", 100, 2),
    "jain_index": ("Jain index", "", 1, 3),
    "energy_j": ("energy", "J", 1, 1),
}


def digest(results: xr.Dataset, notes: Sequence[str] = (), reference: pd.DataFrame | None = None) -> dict[str, Any]:
    """Returns what the page shows; see `fcjax.report.write`."""
    results, notes = checked(results), list(notes)
    runs, parts = _measured(results, notes)
    grid = _arrange(results, runs)
    columns = {name: how for name, how in _COLUMNS.items() if name in runs and (name != "lost" or runs.lost.any())}
    histories = _histories(results)
    cells = [
        {
            "line": grid.lines.index(line),
            "panel": grid.panels.index(panel),
            "at": [list(map(_shown, axis)).index(_shown(runs[name][members[0]])) for name, axis in grid.axes.items()],
            "seeds": len(members),
            "curves": _curves([histories[run] for run in members], float(runs.budget_s[members[0]])),
            "means": {name: _interval(runs[name].to_numpy(float)[members]) for name in columns},
        }
        for (line, panel), members in grid.cells.items()
    ]
    if reference is not None:
        published = _published(runs, reference)
        for cell, members in zip(cells, grid.cells.values(), strict=True):
            cell["published"] = rounded(published[members[0]])
    pairs = _pairs(results, runs, grid, notes)
    shown = rasters.chosen(results, grid.cells.values())
    if len(shown) < len(runs):
        notes.append(
            f"To keep the page small, it has the rounds of {len(shown)} of {len(runs)} runs: those of the first seeds "
            "of each setting. All other figures include all runs."
        )
    cell_of = {run: number for number, members in enumerate(grid.cells.values()) for run in members}
    return {
        "about": {name: np.asarray(value).item() for name, value in results.attrs.items()},
        "constant": {_named(name): _shown(value) for name, value in grid.constant.items()},
        "axes": [{"name": _named(name), "values": list(map(_shown, values))} for name, values in grid.axes.items()],
        "lines": grid.lines,
        "panels": [", ".join(f"{_named(name)} {value}" for name, value in panel) for panel in grid.panels],
        "cells": cells,
        "columns": columns,
        "compared": {name: _COMPARED[name] for name in pairs},
        "pairs": pairs,
        "runs": [
            {
                "cell": cell_of[number],
                "seed": int(row.seed),
                "stop": row.stop,
                "values": [rounded(getattr(row, name)) for name in columns],
            }
            for number, row in enumerate(runs.itertuples())
        ],
        "rasters": rasters.rasters(results, parts, shown),
        "quantities": {name: how for name, how in rasters.QUANTITIES.items() if name in results},
        "least_seeds": LEAST_SEEDS,
        "notes": notes,
    }


def _measured(results: xr.Dataset, notes: list[str]) -> tuple[pd.DataFrame, xr.Dataset | None]:
    """Returns the summary with further metrics, without those that these results lack, and the parts of rounds."""
    runs = summary(results).assign(jain_index=metrics.jain_index(results).values)
    if "energy_j" not in results:
        notes.append("Energies are missing, because these results have no energy_j: an older version wrote them.")
        runs = runs.drop(columns="energy_j")
    if missing := [name for name in ("setup", "gain", "compute_s", "share") if name not in results]:
        notes.append(f"The parts of round times are missing, because these results have no {', '.join(missing)}.")
        return runs, None
    parts = round_parts(results)
    means = {name: parts[name].mean("round").values for name in ("computing_s", "sending_s", "together")}
    return runs.assign(**means), parts


@dataclasses.dataclass(frozen=True)
class _Grid:
    """How runs are arranged on the page; panels are tuples of (setting, value)."""

    axes: dict[str, list]  # the values of each setting that varies
    constant: dict[str, Any]  # the other settings
    lines: list[str]
    panels: list[tuple]
    cells: dict[tuple[str, tuple], list[int]]  # the runs of each line and panel


def _arrange(results: xr.Dataset, runs: pd.DataFrame) -> _Grid:
    settings = [*_SETTINGS, *further_axes(results)]
    # A policy without phi is not another value of phi, but a run without an axis differs from those with it.
    axes = {name: _values(runs[name]) for name in settings if runs[name].nunique(dropna=name == "phi") > 1}
    policies = labels_of(results).policy
    if policies.nunique() > 1:
        lines, of_lines = policies, ["policy", "phi"]
    else:
        of_lines = [name for name, values in axes.items() if len(values) <= _MOST_LINES][:1]
        lines = runs[of_lines[0]].map(_shown) if of_lines else policies
    panels = _keys(runs, [name for name in axes if name not in of_lines])
    cells: dict[tuple[str, tuple], list[int]] = {}
    for number, cell in enumerate(zip(lines, panels, strict=True)):
        cells.setdefault(cell, []).append(number)
    constant = {name: runs[name].dropna().iloc[0] for name in settings if name not in axes and runs[name].notna().any()}
    return _Grid(axes, constant, list(dict.fromkeys(lines)), list(dict.fromkeys(panels)), cells)


def _keys(rows: pd.DataFrame, names: list[str]) -> list[tuple]:
    """Returns the names and values of settings in each row, as texts because NaN does not equal itself."""
    columns = [[(name, _shown(value)) for value in rows[name]] for name in names]
    return list(zip(*columns, strict=True)) if columns else [()] * len(rows)


def _values(column: pd.Series) -> list:
    """Returns the values of an axis: numbers in order, then NaN; texts as they come."""
    values = list({str(value): value for value in column.tolist()}.values())
    if any(isinstance(value, str) for value in values):
        return values
    return sorted(values, key=lambda value: (value != value, value))


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
            if spent_j is not None:
                history["energy"] = np.cumsum(spent_j[run, :num_rounds])
            found.append(history | {"rounds": np.arange(1.0, num_rounds + 1)})
    return found


def _curves(histories: list[dict[str, np.ndarray]], budget_s: float) -> dict[str, Any]:
    """Returns means and half widths over seeds on a common grid; a run keeps its last model after its last round."""
    found: dict[str, Any] = {}
    for name in ("time", "energy", "rounds"):
        if name not in histories[0]:
            continue
        ends = [history[name][-1] for history in histories if history[name].size]
        grid = np.linspace(0, budget_s if name == "time" else max(ends, default=0), _POINTS)
        grid = np.unique(grid.round()) if name == "rounds" else grid
        found[name] = {"x": rounded(grid)}
        for kind in ("current", "best"):
            values = [history[kind][np.searchsorted(history[name], grid, side="right")] for history in histories]
            found[name][kind] = _interval(np.stack(values))
    return found


def _interval(values: np.ndarray) -> list:
    """Returns the mean, and the half width of its interval or None."""
    mean, half = metrics.interval(values)
    return [rounded(mean), rounded(half) if len(values) >= LEAST_SEEDS else None]


def _pairs(results: xr.Dataset, runs: pd.DataFrame, grid: _Grid, notes: list[str]) -> dict[str, list]:
    """Returns the paired differences of each metric, between lines that are policies."""
    found: dict[str, list] = {}
    if labels_of(results).policy.nunique() < 2:
        return found
    for name, (label, *_) in _COMPARED.items():
        if name == "energy_j" and name not in runs:
            continue
        measure: Any = name if name != "energy_j" else lambda some: metrics.energy(some).sum("device")
        try:
            table = metrics.paired_table(results, measure)
        except ValueError as error:
            notes.append(f"Policies are not compared by {label}: {error}.")
            continue
        of_panels = [name for name, _ in grid.panels[0]]
        found[name] = [
            {
                "panel": grid.panels.index(panel),
                "a": grid.lines.index(row.a),
                "b": grid.lines.index(row.b),
                "seeds": int(row.seeds),
                "verdict": row.verdict,
                **{column: rounded(getattr(row, column)) for column in ("difference", "low", "high", "p_holm")},
            }
            for panel, row in zip(_keys(table, of_panels), table.itertuples(), strict=True)
        ]
    return found


def _published(runs: pd.DataFrame, reference: pd.DataFrame) -> np.ndarray:
    """Returns the published accuracy for each run's setting, NaN where there is none."""
    by = [name for name in map(str, reference) if name in runs and name not in (*_COLUMNS, "tilde_accuracy")]
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


def _named(name: str) -> str:
    return _NAMES.get(name, name)


def _shown(value: Hashable) -> str:
    if isinstance(value, str):
        return value or "none"
    return "none" if value != value else f"{value:.12g}"
