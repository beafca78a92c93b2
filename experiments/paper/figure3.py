"""Fig. 3 of the paper: FC round by round, for three distributions of the data.

Shows accuracy and loss of the global model w_k and of w~, the model with the lowest reported loss, the number of
scheduled devices, and the estimates of rho, beta and delta, averaged over devices.
"""

import numpy as np
import pandas as pd
import xarray as xr
from reproduction import Block, Study, colours, grid, main, plt

from fcjax import Job, console, data, metrics

TRACES = {
    "accuracy": "accuracy",
    "tilde_accuracy": r"accuracy of $\tilde w$",
    "loss": "loss",
    "tilde_loss": r"loss of $\tilde w$",
    "scheduled": "scheduled devices",
    "rho": r"estimated $\rho$",
    "beta": r"estimated $\beta$",
    "delta": r"estimated $\delta$",
}
PANELS = (("accuracy", "tilde_accuracy"), ("loss", "tilde_loss"), ("scheduled",), ("rho",), ("beta",), ("delta",))


def plan(loaded: data.Dataset, seeds: int) -> list[Job]:
    return grid(loaded, "fc", seeds)


def by_distribution(results: xr.Dataset) -> dict[str, xr.Dataset]:
    names = dict.fromkeys(results.distribution.values.tolist())
    return {name: results.isel(run=(results.distribution == name).values) for name in names}


def evaluate(results: xr.Dataset) -> pd.DataFrame:
    """Returns means over seeds, with one row per round that all seeds have."""
    frames = []
    for name, runs in by_distribution(results).items():
        num_rounds = int(runs.rounds.min())
        columns: dict[str, object] = {"dataset": results.dataset.values[0], "distribution": name}
        columns |= {"round": np.arange(1, num_rounds + 1), "seeds": runs.sizes["run"]}
        for trace in TRACES:
            columns[trace], columns[f"{trace}_half"] = metrics.interval(
                runs[trace].values[:, :num_rounds].astype(float)
            )
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def show(rows: pd.DataFrame) -> list[Block]:
    """Shows means over the first and the last third of the rounds."""
    lines = [["distribution", "rounds", *TRACES]]
    for name, here in rows.groupby("distribution", sort=False):
        third = len(here) // 3 or 1
        for label, part in (
            (f"1 to {third}", here[:third]),
            (f"{len(here) - third + 1} to {len(here)}", here[-third:]),
        ):
            lines.append([name, label, *(f"{part[trace].mean():.3g}" for trace in TRACES)])
    better = (rows.tilde_accuracy > rows.accuracy).groupby(rows.distribution, sort=False).mean()
    shown = ", ".join(f"{name} {100 * part:.0f}%" for name, part in better.items())
    return [lines, f"Rounds in which w~ is more accurate than w_k, in the mean over seeds: {shown}."]


def draw(results: xr.Dataset, rows: pd.DataFrame) -> plt.Figure:
    figure, grid_ = plt.subplots(2, 3, figsize=(10, 5.6), layout="constrained", sharex=True)
    for axes, panel in zip(grid_.ravel(), PANELS, strict=True):
        for name, colour in colours(list(dict.fromkeys(rows.distribution))).items():
            here = rows[rows.distribution == name]
            for trace in panel:
                # Only the mean of w~, to keep the plot readable.
                is_tilde = trace.startswith("tilde")
                label = rf"{name}, $\tilde w$" if is_tilde else name
                axes.plot(here["round"], here[trace], "--" if is_tilde else "-", color=colour, lw=1, label=label)
                if not is_tilde:
                    low, high = (here[trace] + sign * here[f"{trace}_half"] for sign in (-1, 1))
                    axes.fill_between(here["round"], low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_ylabel(TRACES[panel[0]])
    grid_[0, 0].set_ylim(0, None)
    grid_[0, 1].set_ylim(0, 1.05 * rows.loss[rows["round"] == 1].max())
    for axes in grid_[1]:
        axes.set_xlabel("round")
    grid_[0, 0].set_title(f"{rows.dataset[0]}, R = 600 m")
    figure.legend(*grid_[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


STUDY = Study("figure3", __doc__, plan, evaluate, show, draw, traced=lambda job: True)

if __name__ == "__main__":
    console.leave(main(STUDY))
