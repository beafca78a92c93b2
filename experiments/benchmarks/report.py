"""Shared code of the benchmarks: measures cases in turns, and writes tables, csv files and plots."""

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd

from fcjax import hardware

mpl.use("Agg")
import matplotlib.pyplot as plt


def parser(doc: str | None) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for csv and png (%(default)s)")
    p.add_argument("--repetitions", type=int, default=3, help="repetitions; medians are reported (%(default)s)")
    return p


def machine() -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "numpy"))
    return f"Python {platform.python_version()}, {versions}; {platform.machine()}, {hardware.num_cores()} cores"


def in_turns(cases: Mapping[str, Callable[[], float]], repetitions: int) -> dict[str, float]:
    """Returns the median figure of each case; cases take turns, so that a disturbance affects all of them."""
    figures: dict[str, list[float]] = {name: [] for name in cases}
    for repetition in range(repetitions):
        for name, measure in cases.items():
            if sys.stderr.isatty():
                print(f"\r{repetition + 1} of {repetitions}: {name:40.40}", end="", file=sys.stderr, flush=True)
            figures[name].append(measure())
    if sys.stderr.isatty():
        print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    return {name: float(np.median(values)) for name, values in figures.items()}


def write(name: str, title: str, rows: Sequence[Mapping[str, object]], out: Path) -> pd.DataFrame:
    """Prints rows as a table and writes them to NAME.csv."""
    table = pd.DataFrame(rows)
    print(f"\n{title}\n{table.to_string(index=False, float_format=lambda x: f'{x:.4g}', na_rep='-')}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    table.to_csv(out / f"{name}.csv", index=False, float_format="%.6g")
    return table


def save(figure: plt.Figure, name: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / f"{name}.png", dpi=150, bbox_inches="tight")
    plt.close(figure)
