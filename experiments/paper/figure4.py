"""Fig. 4 of the paper: accuracy against a fixed number of scheduled devices, from 1 to 20.

Also shows FC, at its mean number of devices, and centralized training, the upper bound.
"""

import pandas as pd
import xarray as xr
from reproduction import PERCENT, Block, Study, colours, grid, main, mean_text, means, plt, summary

from fcjax import Job, console, data

NUMBERS = range(1, 21)


def plan(loaded: data.Dataset, seeds: int) -> list[Job]:
    return grid(loaded, [*(f"fixed-{n}" for n in NUMBERS), "fc", "exact", "centralized"], seeds)


def evaluate(results: xr.Dataset) -> pd.DataFrame:
    by = ("dataset", "distribution", "policy")
    return means(summary(results), by, (PERCENT, "mean_scheduled", "mean_round_s", "rounds"))


def fixed(points: pd.DataFrame) -> pd.DataFrame:
    """Returns the points with a fixed number of devices."""
    return points[points.policy.str.startswith("fixed-")]


def show(points: pd.DataFrame) -> list[Block]:
    lines = [["distribution", "policy", "best accuracy (%)", "scheduled", "round (s)", "rounds"]]
    for name, here in points.groupby("distribution", sort=False):
        best = fixed(here)[PERCENT].idxmax()
        for index, p in here.iterrows():
            policy = p.policy + (" (best)" if index == best else "")
            figures = (mean_text(p, PERCENT, 2), f"{p.mean_scheduled:.2f}", f"{p.mean_round_s:.3f}", f"{p.rounds:.1f}")
            lines.append([name, policy, *figures])
    return [lines]


def draw(results: xr.Dataset, points: pd.DataFrame) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, colour in colours(list(dict.fromkeys(points.distribution))).items():
        here = points[points.distribution == name]
        curve = fixed(here)
        x, mean, half = curve.mean_scheduled, curve[PERCENT], curve[f"{PERCENT}_half"]
        axes.plot(x, mean, ".-", color=colour, label=f"{name}, fixed number")
        axes.fill_between(x, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)
        fc = here[here.policy == "fc"]
        axes.errorbar(fc.mean_scheduled, fc[PERCENT], fc[f"{PERCENT}_half"], fmt="*", ms=11, color=colour, mec="k")
        axes.axhline(here[PERCENT][here.policy == "centralized"].item(), color=colour, ls="--", lw=1)
    axes.plot([], [], "*", color="w", mec="k", ms=11, label="FC")
    axes.plot([], [], "k--", lw=1, label="centralized")
    # Keeps the curves readable: a single device may fall far below them.
    low = points[PERCENT][points.mean_scheduled >= 2].min() if len(points) > 3 else None
    axes.set(xlabel="scheduled devices", ylabel="best accuracy (%)", xticks=[1, 5, 10, 15, 20])
    axes.set_ylim(bottom=None if low is None else low - 2)
    axes.set_title(f"{points.dataset[0]}, R = 600 m")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


STUDY = Study("figure4", __doc__, plan, evaluate, show, draw)

if __name__ == "__main__":
    console.leave(main(STUDY))
