"""How label shards are dealt to devices: with distinct labels, as in the text, or shuffled, so that labels may repeat.

The shuffled rule was found on some cells of Table III: it was the best of six rules. This study tests it on cells that
were not used to find it: CIFAR-10, l5 at R = 600 and 1000 m for all policies and at R = 200 m for rd, cs-h and as-h;
l2 for all but cs-l, pf and fc at R = 200 m. For each seed, both rules have the same channels, shards, initial weights
and draws of mini-batches.

Predictions, written before any of these cells was run with shuffled shards:
  1. On l5, policies that schedule few devices (rd, pf, cs-l, as-l) lose 1 to 3 points in the mean.
  2. On l2, these policies lose less than 1 point in the mean.
  3. On l1 and iid nothing changes, because the draws are the same (a test checks it; no run is needed).
The rule is adopted if predictions 1 and 2 hold for the means over the cells, and if the mean absolute difference to the
published cells falls by an amount whose 95% interval (bootstrap over seeds) excludes 0.

The test, on seeds 0 to 4, narrowly failed to confirm the rule. It is not repeated.
"""

import numpy as np
import pandas as pd
import xarray as xr
from reproduction import PERCENT, POLICIES, RADII_M, Block, Study, grid, main, plt, summary
from table3 import CELL, beside_published
from verdicts import Range, mean_of, resampled

from fcjax import Job, console, data, plots

FEW = ("rd", "pf", "cs-l", "as-l")
# Cells at R = 200 m that were not used to find the rule; at the other radii none were used.
HELD_OUT_AT_200 = {"l2": ("rd", "cs-h", "as-l", "as-h"), "l5": ("rd", "cs-h", "as-h")}
DISTINCT, SHUFFLED = "distinct", "shuffled"


def plan(loaded: data.Dataset, seeds: int) -> list[Job]:
    if loaded.name != "cifar10":
        raise ValueError(f"the held-out cells are CIFAR-10's: use --dataset cifar10, got {loaded.name}")
    jobs = []
    for labels, at_200 in HELD_OUT_AT_200.items():
        for distribution in (labels, f"{labels}-shuffled"):
            jobs += grid(loaded, at_200, seeds, distribution=distribution, radius_m=RADII_M[0])
            jobs += grid(loaded, POLICIES, seeds, distribution=distribution, radius_m=RADII_M[1:])
    return jobs


def evaluate(results: xr.Dataset) -> pd.DataFrame:
    """Returns one row per cell, with the paired change from distinct to shuffled, then rows for means over cells."""
    runs = summary(results)
    runs["rule"] = np.where(runs.distribution.str.endswith("-shuffled"), SHUFFLED, DISTINCT)
    runs["distribution"] = runs.distribution.str.removesuffix("-shuffled")
    by_seed = runs.pivot(index=list(CELL), columns=["rule", "seed"], values=PERCENT)  # one row per cell
    old, new = by_seed[DISTINCT], by_seed[SHUFFLED]
    cells = beside_published(new.mean(axis=1).rename(PERCENT).reset_index())
    published = cells.published_percent.to_numpy()
    rows = [
        {
            "what": "cell",
            **cell[[*CELL, "published_percent"]].to_dict(),
            **_change(old.to_numpy()[number], new.to_numpy()[number]),
        }
        for number, cell in cells.iterrows()
    ]
    dataset = cells.dataset[0]
    for distribution in HELD_OUT_AT_200:
        for name, chosen in (("few devices", cells.policy.isin(FEW)), ("more devices", ~cells.policy.isin(FEW))):
            here = (chosen & (cells.distribution == distribution)).to_numpy()
            mean = _change(old.to_numpy()[here].mean(0), new.to_numpy()[here].mean(0))
            rows.append({"what": f"mean of {here.sum()} cells, {name}", "dataset": dataset} | mean)
            rows[-1]["distribution"] = distribution

    every = np.arange(old.shape[1])
    for names in (tuple(HELD_OUT_AT_200), *((name,) for name in HELD_OUT_AT_200)):
        here = cells.distribution.isin(names).to_numpy()

        def apart(seeds: np.ndarray, values: pd.DataFrame, here: np.ndarray = here) -> float:
            return float(np.abs(values.to_numpy()[here][:, seeds].mean(1) - published[here]).mean())

        change = resampled(lambda seeds, apart=apart: apart(seeds, new) - apart(seeds, old), old.shape[1])
        what = {"what": f"mean |apart| of {here.sum()} cells", "dataset": dataset, "distribution": ", ".join(names)}
        rows.append(what | _row(apart(every, old), apart(every, new), change, old.shape[1]))
    return pd.DataFrame(rows)


def _change(old: np.ndarray, new: np.ndarray) -> dict[str, float]:
    return _row(old.mean(), new.mean(), mean_of(new - old), len(old))


def _row(old: float, new: float, change: Range, seeds: int) -> dict[str, float]:
    figures = {"distinct_percent": old, "shuffled_percent": new, "change": change.estimate}
    return {"seeds": seeds} | figures | {"change_low": change.low, "change_high": change.high}


def show(rows: pd.DataFrame) -> list[Block]:
    """Shows one line per cell, the means over cells, and whether the predictions hold."""
    head = ["distribution", "R (m)", "policy", "published", "distinct: apart", "shuffled: apart", "change (95%)"]
    lines = [head]
    for _, r in rows[rows.what == "cell"].iterrows():
        apart = (f"{value - r.published_percent:+.2f}" for value in (r.distinct_percent, r.shuffled_percent))
        lines.append([r.distribution, f"{r.radius_m:g}", r.policy, f"{r.published_percent:.1f}", *apart, _text(r)])
    together = [["over the held-out cells", "distribution", "distinct", "shuffled", "change (95%)"]]
    for _, r in rows[rows.what != "cell"].iterrows():
        figures = f"{r.distinct_percent:.2f}", f"{r.shuffled_percent:.2f}"
        together.append([r.what, r.distribution, *figures, _text(r)])
    verdicts = [["prediction", "found", "verdict"]]
    verdicts += [[words, found, "holds" if holds else "does not hold"] for words, found, holds in predictions(rows)]
    return [f"On {rows.seeds.iloc[0]} seeds:", lines, together, verdicts]


def predictions(rows: pd.DataFrame) -> list[tuple[str, str, bool]]:
    """Returns each prediction of the module's docstring with the finding and whether it holds."""
    few = rows[rows.what.str.endswith("few devices")].set_index("distribution")
    whole = rows[rows.what.str.startswith("mean |apart|")].iloc[0]
    return [
        ("l5, few devices: the mean falls by 1 to 3 points", _text(few.loc["l5"]), -3 <= few.change["l5"] <= -1),
        ("l2, few devices: the mean falls by less than 1 point", _text(few.loc["l2"]), -1 < few.change["l2"] <= 0),
        ("the mean absolute difference falls, beyond noise", _text(whole), whole.change_high < 0),
    ]


def _text(row: pd.Series) -> str:
    return f"{row.change:+.2f} ({row.change_low:+.2f} to {row.change_high:+.2f})"


def draw(results: xr.Dataset, rows: pd.DataFrame) -> plt.Figure:
    cells = rows[rows.what == "cell"]
    figure, grid_ = plt.subplots(1, 2, figsize=(9.5, 4.2), sharex=True, layout="constrained")
    for axes, (distribution, here) in zip(grid_, cells.groupby("distribution"), strict=True):
        at = np.arange(len(here))
        error = np.stack([here.change - here.change_low, here.change_high - here.change])
        axes.errorbar(
            here.change, at, xerr=error, fmt="o", ms=4, capsize=2, color=plots.COLOURS[0], label="paired change, 95%"
        )
        off = here.published_percent - here.distinct_percent
        axes.plot(off, at, "x", color=plots.COLOURS[1], label="change that would meet the published value")
        axes.axvline(0, color="k", lw=0.8)
        axes.set_yticks(at, [f"{r.policy}, {r.radius_m:g} m" for _, r in here.iterrows()])
        axes.invert_yaxis()
        axes.set(title=f"{here.dataset.iloc[0]}, {distribution}, held-out cells", xlabel="points")
    figure.legend(*grid_[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


STUDY = Study("dealing", __doc__, plan, evaluate, show, draw)

if __name__ == "__main__":
    console.leave(main(STUDY))
