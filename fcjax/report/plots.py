"""Plots of a sweep: accuracy against simulated time or an axis of the sweep, and statistics of rounds; sensitivities.

Lines are means over seeds. Bands are their 95% intervals, for 3 seeds or more. There is one panel per setting of the
cell and the data, with one line per policy, and per phi if there are several. With a single policy, lines are the
values of the first further axis of the sweep.
"""

import contextlib
import textwrap
from collections.abc import Iterator
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fcjax.sweeps.comparisons import LEAST_SEEDS, interval
from fcjax.sweeps.results import checked, further_axes

# Okabe and Ito's palette, which colour-blind people can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_LINES = ("-", "--", ":", "-.")
STYLE: Any = {
    "font.size": 9,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "figure.dpi": 160,
}
_PANELS = {"distribution": "{}", "radius_m": "R = {:g} m", "devices": "M = {}", "budget_s": "T = {:g} s"}
_ALWAYS = ("distribution", "radius_m")  # in titles even if they do not vary
_ROUNDS = (
    ("scheduled", "scheduled devices"),
    ("round_s", "round time (s)"),
    ("energy_j", "energy of the round (J)"),
    ("rho", r"mean estimated $\rho$"),
    ("beta", r"mean estimated $\beta$"),
    ("delta", r"mean estimated $\delta$"),
)


@contextlib.contextmanager
def _styled(**changes: Any) -> Iterator[None]:
    """Applies `STYLE`, but preserves the interactive mode that the first figure in a notebook turns on."""
    style: Any = STYLE | changes
    with plt.rc_context(style):
        yield
        is_interactive = plt.isinteractive()
    matplotlib.interactive(is_interactive)


def accuracy(results: xr.Dataset) -> Figure:
    """Plots test accuracy of the global model against simulated time; thin lines are the best so far.

    A thin line ends at the mean of the runs' best accuracies, the figure in the printed table.
    """
    results = checked(results)
    panels = list(_panels(results))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    with _styled():
        size = (1.2 + 3.4 * columns, 0.9 + 2.6 * rows)
        figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, sharey=True, layout="constrained")
        for axes in grid.ravel()[len(panels) :]:
            axes.set_visible(False)
        for axes, (title, runs) in zip(grid.ravel(), panels, strict=False):
            axes.set_title(title)
            axes.set(xlabel="simulated time (s)")
            for style, line in _lines(results, runs):
                times = np.linspace(0, float(line.budget_s[0]), 201)
                _draw(axes, times, np.stack([held(run, times) for _, run in line.groupby("run")]), style)
                best = np.mean([held(run, times, best_so_far=True) for _, run in line.groupby("run")], axis=0)
                axes.plot(times, best, color=style["color"], linewidth=0.7, alpha=0.8, zorder=style["zorder"])
        for axes in grid[:, 0]:
            axes.set_ylabel("test accuracy")
        grid[0, 0].plot([], [], color="grey", linewidth=0.7, label="best so far")
        _within(grid[0, 0], 0, 1)
        _legend(figure, grid)
    return figure


def rounds(results: xr.Dataset) -> Figure:
    """Plots scheduled devices, round time, energy and estimates, averaged over spans of simulated time."""
    results = checked(results)
    panels = list(_panels(results))
    shape = (2, 3) if len(panels) == 1 else (len(_ROUNDS), len(panels))
    with _styled():
        size = (1.2 + 3.0 * shape[1], 0.9 + 1.9 * shape[0])
        share = {"sharex": True} if len(panels) == 1 else {"sharex": "col", "sharey": "row"}
        figure, grid = plt.subplots(*shape, figsize=size, squeeze=False, layout="constrained", **share)
        for axes in grid[-1]:
            axes.set_xlabel("simulated time (s)")
        if len(panels) == 1:
            grid = grid.reshape(-1, 1)
            figure.suptitle(panels[0][0])
        else:
            for axes, (title, _) in zip(grid[0], panels, strict=True):
                axes.set_title(title)
        for column, (_, runs) in zip(grid.T, panels, strict=True):
            for style, line in _lines(results, runs):
                edges = np.linspace(0, float(line.budget_s[0]), 31)
                for axes, (name, _) in zip(column, _ROUNDS, strict=True):
                    spans = [in_spans(run, name, edges) for _, run in line.groupby("run") if run.rounds > 0]
                    _draw(axes, (edges[1:] + edges[:-1]) / 2, np.reshape(spans, (-1, len(edges) - 1)), style)
        for axes, (_, label) in zip(grid[:, 0], _ROUNDS, strict=True):
            axes.set_ylabel(label)
        _legend(figure, grid)
    return figure


def against(results: xr.Dataset, axis: str) -> Figure:
    """Plots the best accuracy of each run against a numeric axis of the sweep."""
    results = checked(results)
    if axis not in results.coords:
        axes_ = ", ".join((*_PANELS, "phi", *further_axes(results)))
        raise ValueError(f"these results have no axis {axis!r}: use {axes_}")
    values = results[axis].values
    if not np.issubdtype(values.dtype, np.number):
        raise ValueError(f"axis must have numbers as values, but {axis} has {values.tolist()[0]!r}")
    panels = list(_panels(results, without=axis))
    positions = np.unique(values[~np.isnan(values)])
    logarithmic = positions.min() > 0 and positions.max() > 5 * positions.min()
    with _styled():
        size = (1.2 + 3.4 * len(panels), 3.5)
        figure, grid = plt.subplots(1, len(panels), figsize=size, squeeze=False, sharey=True, layout="constrained")
        for axes, (title, runs) in zip(grid[0], panels, strict=True):
            axes.set(title=title, xlabel=axis, xscale="log" if logarithmic else "linear")
            axes.set_xticks(positions, labels=[f"{x:g}" for x in positions])
            axes.minorticks_off()
            for style, line in _lines(results, runs, without=axis):
                best = line.accuracy.max("round").where(line.rounds > 0, line.start_accuracy).values
                there = [x for x in positions if (line[axis].values == x).any()]
                if not there:  # runs of a sweep without this axis
                    continue
                means, halves = zip(*(_interval(best[line[axis].values == x]) for x in there), strict=True)
                axes.errorbar(there, means, halves, marker="o", markersize=3, capsize=2, **style)
        grid[0, 0].set_ylabel("best test accuracy")
        _within(grid[0, 0], 0, 1)
        _legend(figure, grid)
    return figure


def sensitivities(table: pd.DataFrame) -> Figure:
    """Plots the percent change of each quantity per percent of each parameter, from `fcjax.design.sensitivities`."""
    needed = {"quantity", "quantity_value", "parameter", "percent_per_percent"}
    if missing := sorted(needed - set(table)):
        raise ValueError(f"table must be one of fcjax.design.sensitivities, but has no column {missing[0]!r}")
    wide = table.pivot(index="parameter", columns="quantity", values="percent_per_percent").fillna(0)
    wide = wide.loc[wide.abs().max(axis=1).sort_values().index]
    wide = wide[(wide.abs() > 1e-9).any(axis=1)]
    quantities = dict(zip(table.quantity, table.quantity_value, strict=True))
    places = np.arange(len(wide))
    with _styled(**{"axes.grid.axis": "x"}):
        size = (2.4 + 2.6 * len(quantities), 1.0 + 0.24 * len(wide))
        figure, grid = plt.subplots(1, len(quantities), figsize=size, squeeze=False, sharey=True, layout="constrained")
        for axes, (quantity, value) in zip(grid[0], quantities.items(), strict=True):
            bars = wide[quantity].to_numpy()
            axes.barh(places, bars, color=np.where(bars > 0, COLOURS[1], COLOURS[0]))
            axes.bar_label(axes.containers[0], [f"{x:.2f}" if abs(x) >= 0.005 else "" for x in bars], padding=2)
            axes.axvline(0, color="black", linewidth=0.5)
            axes.set(title=f"{quantity} = {value:.3g}", xlabel="percent per percent")
            axes.margins(x=0.25, y=0.02)
        grid[0, 0].set_yticks(places, labels=wide.index)
    return figure


def _panels(results: xr.Dataset, without: str | None = None) -> Iterator[tuple[str, xr.Dataset]]:
    """Yields the runs of each setting of cell and data, with a title that says how it differs from the others."""
    names = [
        name for name in (*_PANELS, *further_axes(results)) if name not in (without, _axis_of_lines(results, without))
    ]
    settings = list(zip(*(_values(results, name) for name in names), strict=True))
    varies = [len({setting[i] for setting in settings}) > 1 for i in range(len(names))]
    for setting in dict.fromkeys(settings):
        title = [str(results.dataset.values[0])]
        for name, value, several in zip(names, setting, varies, strict=True):
            if several or name in _ALWAYS:
                title.append(_PANELS[name].format(value) if name in _PANELS else f"{name} {_shown(value)}")
        # Lines break between settings, not within one.
        words = ", ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in title if part)
        lines = textwrap.fill(words, 34, break_long_words=False).replace("\N{NO-BREAK SPACE}", " ")
        yield lines, results.isel(run=[s == setting for s in settings])


def _values(results: xr.Dataset, name: str) -> list:
    """Returns the values of a setting; of sweeps that do not have it, all the same NaN."""
    return [np.nan if value != value else value for value in results[name].values.tolist()]


def _shown(value: Any) -> str:
    if value is np.nan:
        return "not given"
    return f"= {value:g}" if isinstance(value, float) else f"= {value}"


def _axis_of_lines(results: xr.Dataset, without: str | None) -> str | None:
    """Returns the axis whose values are the lines of a panel, or None if policies are."""
    if len(set(zip(results.policy.values.tolist(), map(str, results.phi.values), strict=True))) > 1:
        return None
    numbers = {name: len(set(_values(results, name))) for name in further_axes(results) if name != without}
    return next((name for name, number in numbers.items() if 1 < number <= len(COLOURS)), None)


def _lines(
    results: xr.Dataset, runs: xr.Dataset, without: str | None = None
) -> Iterator[tuple[dict[str, Any], xr.Dataset]]:
    """Yields the runs of each line in a panel, with a style that is the same in all panels."""
    if axis := _axis_of_lines(results, without):
        for number, value in enumerate(dict.fromkeys(_values(results, axis))):
            here = [value in (one,) for one in _values(runs, axis)]  # a NaN is in, but does not equal, itself
            title = value if isinstance(value, str) else f"{axis} {_shown(value)}"
            style = {"color": COLOURS[number], "zorder": 3 - number / 100, "label": title}
            if any(here):
                yield style, runs.isel(run=here)
        return
    names = list(dict.fromkeys(results.policy.values.tolist()))
    phis = list(dict.fromkeys(str(phi) for phi in results.phi.values.tolist() if not np.isnan(phi)))
    several = len(phis) > 1
    labels = list(zip(runs.policy.values.tolist(), map(str, runs.phi.values.tolist()), strict=True))
    for label in dict.fromkeys(labels):
        name, phi = label
        number = phis.index(phi) if phi in phis else 0
        # Colour distinguishes policies and the line style phi; with one policy, colour distinguishes phi.
        colour = names.index(name) if len(names) > 1 or not several else number
        style = {
            "color": COLOURS[colour % len(COLOURS)],
            "linestyle": _LINES[(number if len(names) > 1 and several else colour // len(COLOURS)) % len(_LINES)],
            "zorder": 3 - colour / 100,  # the first on top
            "label": rf"{name}, $\varphi$ = {float(phi):g}" if several and phi in phis else name,
        }
        yield style, runs.isel(run=[other == label for other in labels])


def _draw(axes: Axes, x: np.ndarray, values: np.ndarray, style: dict[str, Any]) -> None:
    mean, half = _interval(values)
    axes.plot(x, mean, **style)
    # None of the quantities is negative, but Student's interval over few seeds may be.
    axes.fill_between(x, np.maximum(mean - half, 0), mean + half, color=style["color"], alpha=0.15, linewidth=0)


def _interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean over the first axis and half of its interval, which is NaN for few seeds."""
    mean, half = interval(values)
    return mean, half if len(values) >= LEAST_SEEDS else np.full_like(half, np.nan)


def _within(axes: Axes, least: float, most: float) -> None:
    """Shortens the vertical axis to where values can be."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, least), min(high, most))


def _legend(figure: Figure, grid: np.ndarray) -> None:
    handles = {label: h for axes in grid.ravel() for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    inches = 0.75 + 0.075 * max(map(len, handles))  # of the longest entry
    columns = max(1, int(figure.get_figwidth() / inches))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(columns, len(handles)))


def held(run: xr.Dataset, times: np.ndarray, *, best_so_far: bool = False) -> np.ndarray:
    """Returns the accuracy at given times, or the best until then; that of a round holds until the next round ends."""
    run = run.squeeze("run")
    num_rounds = int(run.rounds)
    values = np.concatenate([[float(run.start_accuracy)], run.accuracy.values[:num_rounds]])
    if best_so_far and num_rounds > 0:
        values[1:] = np.maximum.accumulate(values[1:])  # the first model counts only where there is no other
    return values[np.searchsorted(run.elapsed_s.values[:num_rounds], times, side="right")]


def in_spans(run: xr.Dataset, name: str, edges: np.ndarray) -> np.ndarray:
    """Returns the mean over time within each span, where a round counts for as long as it takes.

    The last round counts until the budget is spent. Values per device are averaged, and devices and energies added up.
    """
    run = run.squeeze("run")
    num_rounds = int(run.rounds)
    values = run[name].values[:num_rounds].astype(float)
    if values.ndim == 2:
        values = np.nansum(values, axis=1) if name in ("scheduled", "energy_j") else np.nanmean(values, axis=1)
    ends = run.elapsed_s.values[:num_rounds].astype(float)
    ends[-1] = max(ends[-1], edges[-1])
    total = np.concatenate([[0], np.cumsum(values * np.diff(ends, prepend=0))])
    return np.diff(np.interp(edges, np.concatenate([[0], ends]), total)) / np.diff(edges)
