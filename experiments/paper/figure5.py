"""Fig. 5 of the paper: accuracy of seven policies against simulated time, scheduled devices and round times.

Its two settings are a cell of 600 m with the least even data, and one of 200 m with the most even data.
"""

import dataclasses

import numpy as np
import pandas as pd
import xarray as xr
from reproduction import (
    POLICIES,
    Block,
    Study,
    colours,
    distributions,
    grid,
    main,
    mean_text,
    means,
    plt,
    summary,
)
from verdicts import resampled

from fcjax import Job, console, data, metrics, plots

LEVEL = {"mnist": 0.8, "cifar10": 0.4}  # accuracy whose time is reported; the paper's on MNIST
SETTING = ("radius_m", "distribution")


def plan(loaded: data.Dataset, seeds: int) -> list[Job]:
    uneven, *_, even = distributions(loaded.name)
    return grid(loaded, POLICIES, seeds, radius_m=600.0, distribution=uneven) + grid(
        loaded, POLICIES, seeds, radius_m=200.0, distribution=even
    )


def curves(runs: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Returns times, and the accuracy of each run at these times, (run, time)."""
    times = np.linspace(0, float(runs.budget_s[0]), 1201)
    return times, np.stack([plots.held(run, times) for _, run in runs.groupby("run")])


def time_to(level: float, times: np.ndarray, curve: np.ndarray) -> float:
    """Returns when a curve first reaches a level; NaN if it never does."""
    return float(times[np.argmax(curve >= level)]) if (curve >= level).any() else float("nan")


def times_to(level: float, runs: xr.Dataset) -> tuple[float, float, float]:
    """Returns when the mean accuracy over seeds first reaches a level, with the 95% interval of a bootstrap over seeds.

    It is NaN if the level is not reached, and so is the interval if some resample does not reach it.
    """
    times, values = curves(runs)
    return dataclasses.astuple(resampled(lambda seeds: time_to(level, times, values[seeds].mean(0)), len(values)))


def evaluate(results: xr.Dataset) -> pd.DataFrame:
    cells = means(summary(results), ("dataset", "policy", *SETTING), ("mean_scheduled", "mean_round_s", "rounds"))
    level = LEVEL[results.dataset.values[0]]
    reached = []
    for _, cell in cells.iterrows():
        same = (results.policy == cell.policy) & (results.radius_m == cell.radius_m)
        reached.append(times_to(level, results.isel(run=same.values)))
    name = f"time_to_{100 * level:.0f}_percent_s"
    cells[name], cells[f"{name}_low"], cells[f"{name}_high"] = np.array(reached).T
    return cells


def show(cells: pd.DataFrame) -> list[Block]:
    time = next(name for name in cells if name.startswith("time_to_"))
    lines = [["R (m)", "distribution", "policy", "scheduled", "round (s)", "rounds", time.replace("_", " ")]]
    for _, c in cells.iterrows():
        figures = mean_text(c, "mean_scheduled", 2), mean_text(c, "mean_round_s", 3), f"{c.rounds:.1f}"
        reached = f"{c[time]:.1f}" if c[time] == c[time] else "never"
        if c[f"{time}_low"] == c[f"{time}_low"]:
            reached += f" ({c[f'{time}_low']:.1f} to {c[f'{time}_high']:.1f})"
        lines.append([f"{c.radius_m:g}", c.distribution, c.policy, *figures, reached])
    return [lines]


def draw(results: xr.Dataset, cells: pd.DataFrame) -> plt.Figure:
    figure, grid_ = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    policies = colours(list(dict.fromkeys(cells.policy)))
    for (lines, bars), ((radius_m, distribution), here) in zip(
        grid_, cells.groupby([*SETTING], sort=False), strict=True
    ):
        for name, colour in policies.items():
            runs = results.isel(run=((results.policy == name) & (results.radius_m == radius_m)).values)
            times, values = curves(runs)
            mean, half = metrics.interval(values)
            lines.plot(times, mean, color=colour, lw=1.1, label=name, zorder=4 if name == "fc" else 3)
            lines.fill_between(times, mean - half, mean + half, color=colour, alpha=0.12, linewidth=0)
        lines.set(xlabel="simulated time (s)", ylabel="test accuracy", ylim=(0, None))
        lines.set_title(f"{here.dataset.iloc[0]}, {distribution}, R = {radius_m:g} m")
        x = np.arange(len(here))
        other = bars.twinx()
        bars.bar(x - 0.2, here.mean_scheduled, 0.38, yerr=here.mean_scheduled_half, color="#0072B2", capsize=2)
        other.bar(x + 0.2, here.mean_round_s, 0.38, yerr=here.mean_round_s_half, color="#E69F00", capsize=2)
        other.grid(visible=False)
        bars.set_xticks(x, here.policy)
        bars.set_ylabel("scheduled devices", color="#0072B2")
        other.set_ylabel("round time (s)", color="#E69F00")
        other.spines["right"].set_visible(True)
    figure.legend(*grid_[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(policies))
    return figure


STUDY = Study("figure5", __doc__, plan, evaluate, show, draw)

if __name__ == "__main__":
    console.leave(main(STUDY))
