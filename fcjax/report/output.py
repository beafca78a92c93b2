"""The files and the printed table of a finished sweep."""

import io
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot
import pandas as pd
import xarray as xr

from fcjax.report import page, plots
from fcjax.runtime.console import as_text
from fcjax.runtime.files import write_whole
from fcjax.sweeps.comparisons import LEAST_SEEDS, interval
from fcjax.sweeps.results import SUMMARY, further_axes, summary


def write(results: xr.Dataset, out: Path) -> pd.DataFrame:
    """Writes all files of a sweep atomically and returns the summary."""
    matplotlib.use("Agg")
    rows = summary(results)
    text = rows.to_csv(index=False, float_format="%.7g", na_rep="nan")
    write_whole(out / "summary.csv", lambda part: Path(part).write_text(text))
    figures = {"accuracy": plots.accuracy, "rounds": plots.rounds}
    for name in further_axes(results):
        if results[name].dtype.kind in "if" and len(set(results[name].values)) > 1:
            figures[f"accuracy_by_{name}"] = partial(plots.against, axis=name)
    for name, draw in figures.items():
        figure = draw(results)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # the layout is found once, not for each format
        for kind, metadata in (("png", None), ("pdf", {"CreationDate": None})):
            image = io.BytesIO()  # in memory, because matplotlib crashes on a full disk
            figure.savefig(image, format=kind, metadata=metadata)
            content = image.getvalue()
            write_whole(out / f"{name}.{kind}", lambda part, content=content: Path(part).write_bytes(content))
        matplotlib.pyplot.close(figure)
    page.write(results, out / page.NAME)
    return rows


_SETTINGS = {"distribution": "distribution", "radius_m": "R (m)", "phi": "phi", "devices": "M", "budget_s": "T (s)"}
_SHOWN = {
    "best_accuracy": ("best (%)", 100, 2),
    "tilde_accuracy": ("w~ (%)", 100, 2),
    "final_accuracy": ("final (%)", 100, 2),
    "mean_scheduled": ("devices", 1, 2),
    "mean_round_s": ("round (s)", 1, 3),
    "rounds": ("rounds", 1, 0),
    "energy_j": ("energy (J)", 1, 1),
    "lost": ("lost", 1, 1),
}
_NOTE = (
    "best, w~, final: test accuracy of the best model, of the one with the lowest reported loss, and of the last one.\n"
    "Means over seeds; ± is the half width of the 95% interval (Student's t), for 3 seeds or more."
)


def table(rows: pd.DataFrame) -> str:
    """Formats means over seeds: one line per combination of varying settings, below a line of constant ones."""
    settings = _SETTINGS | {name: name for name in rows.columns if name not in SUMMARY}
    varies = [name for name in settings if rows[name].nunique(dropna=True) > 1]
    first = {name: rows[name].dropna().iloc[0] for name in settings if name not in varies and rows[name].notna().any()}
    constant = [str(rows["dataset"].iloc[0]), *(f"{settings[name]} {_plain(value)}" for name, value in first.items())]
    shown = {name: how for name, how in _SHOWN.items() if name != "lost" or rows.lost.any()}
    lines = [["policy", *(settings[name] for name in varies), "seeds", *(name for name, _, _ in shown.values())]]
    for setting, runs in rows.groupby(["policy", *varies], sort=False, dropna=False):
        diverged = int((runs["stop"] == "diverged").sum())
        line = [_plain(value) for value in setting]
        line.append(f"{len(runs)} ({diverged} diverged)" if diverged else str(len(runs)))
        for column, (_, scale, digits) in shown.items():
            mean, half = interval(scale * runs[column].to_numpy(float))
            known = half == half and len(runs) >= LEAST_SEEDS
            line.append(f"{mean:.{digits}f}" + (f" ± {half:.{digits}f}" if known else ""))
        lines.append(line)
    return as_text([", ".join(constant), lines, _NOTE])


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else "-" if value != value else f"{value:g}"
