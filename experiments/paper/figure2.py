"""Fig. 2 of the paper: accuracy and mean number of scheduled devices of FC against phi, from 0.005 to 5.

Lines show FC with exact observations of channels and computation times. Markers show FC with errors of 10 and 20%. The
paper does not state the size of its errors or its values of phi.
"""

import pandas as pd
import xarray as xr
from reproduction import PERCENT, Block, Study, colours, grid, main, mean_text, means, plt, stated, summary

from fcjax import Job, console, data

PHIS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
ERRORS = {0.1: "o", 0.2: "^"}  # and their markers
PHIS_WITH_ERRORS = PHIS[::3]


def plan(loaded: data.Dataset, seeds: int) -> list[Job]:
    jobs = grid(loaded, "fc", seeds, phi=PHIS)
    for alpha in ERRORS:
        jobs += grid(loaded, "fc", seeds, phi=PHIS_WITH_ERRORS, alpha=alpha)
    return jobs


def evaluate(results: xr.Dataset) -> pd.DataFrame:
    by = ("dataset", "distribution", "observation_error", "phi")
    return means(summary(results), by, (PERCENT, "mean_scheduled", "mean_round_s", "rounds"))


def show(points: pd.DataFrame) -> list[Block]:
    lines = [["distribution", "alpha", "phi", "best accuracy (%)", "scheduled", "round (s)"]]
    for _, p in points.iterrows():
        figures = (mean_text(p, PERCENT, 2), mean_text(p, "mean_scheduled", 2), mean_text(p, "mean_round_s", 3))
        lines.append([p.distribution, f"{p.observation_error:g}", f"{p.phi:g}", *figures])
    return [lines]


def draw(results: xr.Dataset, points: pd.DataFrame) -> plt.Figure:
    figure, grid_ = plt.subplots(1, 2, figsize=(8.4, 3.6), layout="constrained")
    for column, label, axes in zip((PERCENT, "mean_scheduled"), ("best accuracy (%)", "scheduled"), grid_, strict=True):
        for name, colour in colours(list(dict.fromkeys(points.distribution))).items():
            here = points[points.distribution == name]
            exact = here[here.observation_error == 0]
            mean, half = exact[column], exact[f"{column}_half"]
            axes.plot(exact.phi, mean, color=colour, label=name)
            axes.fill_between(exact.phi, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)
            for alpha, marker in ERRORS.items():
                with_error = here[here.observation_error == alpha]
                axes.plot(with_error.phi, with_error[column], marker, color=colour, ms=5, mfc="none")
        axes.set(xscale="log", xlabel=r"$\varphi$", ylabel=label)
    grid_[0].set_title(f"{points.dataset[0]}, R = 600 m")
    text = stated("Fig. 2a text")
    if text["dataset"] == points.dataset[0]:
        figures = list(text[PERCENT].values())
        grid_[0].plot([text["phi"]] * len(figures), figures, "kx", label="published")
    for alpha, marker in ERRORS.items():
        grid_[0].plot([], [], marker, color="k", mfc="none", label=rf"errors, $\alpha$ = {alpha:g}")
    figure.legend(*grid_[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


STUDY = Study("figure2", __doc__, plan, evaluate, show, draw)

if __name__ == "__main__":
    console.leave(main(STUDY))
