"""Shared code of the scripts that reproduce the paper: its settings, and the way from runs to files.

A study plans runs, compares them with the paper, and plots them. `main` takes runs from the ledger (see `ledger.py`)
and executes those that it lacks. Each run is saved in OUT/runs as it finishes: rerun a stopped script to resume.
Studies share the folder, so each can use the runs of the others. Each writes to OUT:
  runs_DATASET.nc      the ledger
  NAME_DATASET.csv     the figures, with 95% intervals over seeds
  NAME_DATASET.png     the plot
  NAME_DATASET.json    command, seeds, versions, revision and date
"""

import argparse
import dataclasses
import datetime
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import ledger
import matplotlib as mpl
import pandas as pd
import xarray as xr

import fcjax
from fcjax import Experiment, Job, console, files, hardware, metrics, plan, plots, presets

mpl.use("Agg")
import matplotlib.pyplot as plt

Block = console.Block

# The paper's distributions, from the least even to the most even.
DISTRIBUTIONS = {"mnist": ("l1", "l2", "iid"), "cifar10": ("l2", "l5", "iid")}
RADII_M = (200.0, 600.0, 1000.0)
POLICIES = ("fc", "rd", "pf", "cs-l", "cs-h", "as-l", "as-h")
PERCENT = "best_accuracy_percent"


@cache
def published() -> dict[str, Any]:
    """Returns the published figures: `table3`, and `text`, those in the text of the results section."""
    return json.loads((Path(__file__).parent / "published.json").read_text())


def stated(where: str, policy: str = "fc") -> dict[str, Any]:
    """Returns the published text's figures for a place and a policy."""
    entries = (entry for entry in published()["text"] if entry["where"] == where)
    return next(entry for entry in entries if entry.get("policy", policy) == policy)


@dataclasses.dataclass(frozen=True)
class Study:
    """A table or a figure."""

    name: str
    about: str | None  # the description in --help
    plan: Callable[..., list[Job]]  # data set, number of seeds, options -> runs
    evaluate: Callable[[xr.Dataset], pd.DataFrame]  # results -> data frame with one row per point or cell
    show: Callable[[pd.DataFrame], list[Block]]  # that data frame -> printed output
    draw: Callable[[xr.Dataset, pd.DataFrame], plt.Figure] | None  # results, data frame -> figure, if there is one
    options: Callable[[argparse.ArgumentParser], None] = lambda p: None
    traced: Callable[[Job], bool] = lambda job: False  # which runs need all traces of the ledger


def grid(
    loaded: fcjax.data.Dataset,
    policy: str | Sequence[str],
    seeds: int,
    *,
    alpha: float = 0.0,
    as_written: bool = False,
    **settings: Any,
) -> list[Job]:
    """Plans runs in the paper's setting, for all its distributions; `settings` are arguments of `fcjax.sweep`."""
    preset = presets.shi2020_as_written if as_written else presets.shi2020
    jobs = plan(
        policy,
        **{
            "dataset": loaded,
            "distribution": distributions(loaded.name),
            "radius_m": 600.0,
            "phi": 0.05,
            "budget_s": None,
            "num_devices": 20,
            "seeds": seeds,
            "preset": partial(preset, observation_error=alpha),
            **settings,
        },
    )
    further = {"observation_error": float(alpha), "preset": preset.__name__}
    return [dataclasses.replace(job, labels=job.labels | further) for job in jobs]


def variants(
    loaded: fcjax.data.Dataset,
    ways: Mapping[str, Callable[[Experiment], Experiment]],
    policy: Any,
    seeds: int,
    **settings: Any,
) -> list[Job]:
    """Plans runs in the paper's setting with one change at a time; the label `preset` is the name of the change."""
    jobs = []
    for name, change in ways.items():

        def preset(*args: Any, change=change, **arguments: Any) -> Experiment:
            return change(presets.shi2020(*args, **arguments))

        changed = grid(loaded, policy, seeds, preset=preset, **settings)
        jobs += [dataclasses.replace(job, labels=job.labels | {"preset": name}) for job in changed]
    return jobs


def distributions(dataset: str) -> tuple[str, ...]:
    """Returns the paper's distributions for a data set, from the least even to the most even."""
    return DISTRIBUTIONS[dataset]


def summary(results: xr.Dataset) -> pd.DataFrame:
    """Returns one row per run, with accuracies also in percent."""
    rows = ledger.summary(results)
    for name in ("observation_error", "preset"):
        rows[name] = results[name].values
    return rows.assign(**{name + "_percent": 100 * rows[name] for name in ("best_accuracy", "tilde_accuracy")})


def means(rows: pd.DataFrame, by: Sequence[str], columns: Sequence[str]) -> pd.DataFrame:
    """Returns means over seeds and half widths of their 95% intervals, for every combination of `by`."""
    cells = []
    for setting, runs in rows.groupby(list(by), sort=False, dropna=False):
        cell = dict(zip(by, setting, strict=True)) | {"seeds": len(runs)}
        for column in columns:
            mean, half = metrics.interval(runs[column].to_numpy(float))
            cell |= {column: float(mean), f"{column}_half": float(half)}
        cells.append(cell)
    return pd.DataFrame(cells)


def as_markdown(blocks: Sequence[Block]) -> str:
    parts = []
    for block in blocks:
        if isinstance(block, str):
            parts.append(block.replace("~", "\\~"))
            continue
        head, *lines = block
        rows = [head, ["---"] * len(head), *lines]
        parts.append("\n".join(f"| {' | '.join(row)} |".replace("~", "\\~") for row in rows))
    return "\n\n".join(parts)


def mean_text(cell: Any, column: str, digits: int = 1) -> str:
    """Formats a mean with the half width of its interval, if there is one."""
    half = cell[f"{column}_half"]
    return f"{cell[column]:.{digits}f}" + (f" ± {half:.{digits}f}" if half == half else "")


def colours(names: Sequence[str]) -> dict[str, str]:
    """Assigns colours that colour-blind people can distinguish."""
    return {name: plots.COLOURS[number % len(plots.COLOURS)] for number, name in enumerate(names)}


def parser(study: Study) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=study.about,
        epilog=f"""examples:
  python experiments/paper/{study.name}.py
  python experiments/paper/{study.name}.py --dataset {" ".join(DISTRIBUTIONS)} --seeds 2 --out out/quick

Runs in the committed ledger are not repeated, unless you use --fresh. Each run is saved as it finishes: rerun a stopped
command to resume.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds for each point (default: 5, the paper's)")
    p.add_argument(
        "--dataset",
        nargs="+",
        default=["mnist"],
        choices=DISTRIBUTIONS,
        help=f"one or more of {', '.join(DISTRIBUTIONS)} (default: mnist)",
    )
    p.add_argument(
        "--out",
        type=Path,
        default=Path("out/paper"),
        help="folder for results and finished runs (default: %(default)s)",
    )
    p.add_argument("--fresh", action="store_true", help="do not take runs from the committed ledger")
    study.options(p)
    return p


def main(study: Study, argv: Sequence[str] | None = None) -> int:
    """Runs a study from the command line and returns the exit code."""
    args = parser(study).parse_args(argv)
    console.end_on_sigterm()
    options = {k: v for k, v in vars(args).items() if k not in ("seeds", "dataset", "out", "fresh")}
    command = shlex.join(["python", f"experiments/paper/{study.name}.py", *(sys.argv[1:] if argv is None else argv)])
    with console.warnings_as_lines():
        try:
            if args.seeds < 1:
                raise ValueError(f"--seeds must be 1 or more, got {args.seeds}")
            console.check_writable(args.out)
            console.check_writable(args.out / "runs")
            for dataset in args.dataset:
                start = time.monotonic()
                results = collect(study, dataset, args.seeds, args.out, fresh=args.fresh, **options)
                rows = write(study, results, args.out, dataset, command)
                print(f"\n{console.as_text(study.show(rows))}\n")
                runs = f"{results.sizes['run']} runs, of which {results.kept} had been done before"
                seconds = time.monotonic() - start
                where = f"{args.out}/{study.name}_{dataset}.*"
                print(f"{runs}, in {seconds:.1f} s; written to {where}", flush=True)
        except (ValueError, OSError, RuntimeError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"interrupted; finished runs are kept in {args.out}/runs: rerun to resume", file=sys.stderr)
            return 130
    return 0


def collect(study: Study, dataset: str, seeds: int, out: Path, *, fresh: bool = False, **options: Any) -> xr.Dataset:
    """Returns the records of a study's runs; executes those that the ledger lacks."""
    hardware.use_one_thread()
    jobs = study.plan(fcjax.data.load(dataset), seeds, **options)
    return ledger.collect(jobs, out, dataset, traced=study.traced, fresh=fresh)


def write(study: Study, results: xr.Dataset, out: Path, dataset: str, command: str) -> pd.DataFrame:
    """Writes the files of a study atomically and returns the rows."""
    rows = study.evaluate(results)
    stem = f"{study.name}_{dataset}"
    text = rows.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    files.write_whole(out / f"{stem}.csv", lambda part: Path(part).write_text(text))
    if study.draw is not None:
        with plt.rc_context(plots.STYLE):
            figure = study.draw(results, rows)
            files.write_whole(out / f"{stem}.png", figure.savefig)
        plt.close(figure)
    about = provenance(results, command)
    files.write_whole(out / f"{stem}.json", lambda part: Path(part).write_text(json.dumps(about, indent=1) + "\n"))
    return rows


def provenance(results: xr.Dataset, command: str) -> dict[str, Any]:
    """Returns the command, seeds, versions and date of a result."""
    return {
        "command": command,
        "seeds": sorted({int(seed) for seed in results.seed.values}),
        "runs": results.sizes["run"],
        "versions": json.loads(results.attrs["versions"]),
        "backend": results.attrs["backend"],
        "revision": results.attrs["revision"],
        "date": datetime.date.today().isoformat(),
    }
