"""Schedulers beyond FC: paired differences of joint, fc-online, fc+ and exact to FC, over common seeds.

All policies meet the same channels, computation times, data and mini-batches under a seed. FC runs with a grid of phi
too: "fc (best phi)" is the one with the best mean in a setting, a reference that is chosen in hindsight. Seeds start at
100, because lower ones were used to design fc+. Runs are saved in KEEP as they finish: rerun a stopped command, or
one with more seeds, to resume. Prints the table and writes to OUT:
  DATASET.csv        one row per setting and policy: means, the difference to FC with its 95% interval, Holm's p-value
  DATASET.png        the differences
  DATASET_runs.csv   one row per run, under its fingerprint; runs in this file are not repeated

    python experiments/studies/schedulers.py --seeds 20                      # hours
    python experiments/studies/schedulers.py --dataset cifar10 --radius 600 --seeds 5
    python experiments/studies/schedulers.py --scenario shi2020 --distribution l1 --radius 600 --seeds 3 --policy fc+
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import records
import xarray as xr

import fcjax
from fcjax import console, hardware, metrics, plots

mpl.use("Agg")
import matplotlib.pyplot as plt

POLICIES = ("exact", "fc-online", "fc+", "joint")
PHIS = (0.01, 0.02, 0.1, 0.5)  # beside FC's 0.05
FIRST_SEED = 100
BEST = "fc (best phi)"
HETEROGENEOUS_RADIUS = 600.0
COMMITTED = records.COMMITTED / "schedulers"


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    console.end_on_sigterm()
    console.check_writable(args.keep)
    console.check_writable(args.out)
    hardware.use_one_thread()
    if args.seeds < 2:
        raise ValueError(f"paired differences need 2 or more seeds, got {args.seeds}")
    with console.warnings_as_lines():
        rows = []
        for scenario, distribution, radius_m in settings(args):
            label = {"scenario": scenario, "distribution": distribution, "radius_m": radius_m}
            rows.append(compare(play(args, **label)).assign(**label))
        table = pd.concat(rows, ignore_index=True)
        compared = table.p_value.notna()
        table.loc[compared, "p_holm"] = metrics.holm(table.p_value[compared].to_numpy())
        print(f"\n{as_text(table)}", flush=True)
        records.save(table, args.out / f"{args.dataset}.csv")
        figure = draw(table)
        figure.savefig(args.out / f"{args.dataset}.png", bbox_inches="tight")
        plt.close(figure)
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--scenario", nargs="+", default=["shi2020", "heterogeneous"], help="presets (default: %(default)s)")
    p.add_argument("--distribution", nargs="+", default=["l1", "l2", "iid"], help="default: %(default)s")
    p.add_argument("--radius", nargs="+", type=float, default=[200.0, 600.0, 1000.0], help="m; heterogeneous: 600")
    p.add_argument("--policy", nargs="+", default=list(POLICIES), help="besides fc (default: %(default)s)")
    p.add_argument("--phi", nargs="*", type=float, default=list(PHIS), help="grid of FC's phi, beside 0.05")
    p.add_argument("--dataset", default="mnist")
    p.add_argument("--seeds", type=int, default=20, help="seeds per policy (default: %(default)s)")
    p.add_argument("--first-seed", type=int, default=FIRST_SEED, help="default: %(default)s")
    p.add_argument("--workers", type=int, help="processes (default: one per core)")
    p.add_argument(
        "--keep", type=Path, default=Path("out/schedulers/runs"), help="finished runs (default: %(default)s)"
    )
    p.add_argument("--out", type=Path, default=Path("out/schedulers"), help="default: %(default)s")
    return p


def settings(args: argparse.Namespace) -> list[tuple[str, str, float]]:
    return [
        (scenario, distribution, radius_m)
        for scenario in args.scenario
        for radius_m in ([HETEROGENEOUS_RADIUS] if scenario == "heterogeneous" else args.radius)
        for distribution in args.distribution
    ]


def play(args: argparse.Namespace, *, scenario: str, distribution: str, radius_m: float) -> pd.DataFrame:
    """Returns the runs of FC, its grid of phi and the other policies in one setting; executes those not in the file."""
    jobs = fcjax.plan(
        ["fc", *args.policy, *(f"fc(phi={phi:g})" for phi in args.phi)],
        preset=scenario,
        dataset=args.dataset,
        distribution=distribution,
        radius_m=radius_m,
        seeds=range(args.first_seed, args.first_seed + args.seeds),
        progress=True,
    )
    name = f"{args.dataset}_runs.csv"
    labels = {"scenario": scenario, "radius_m": radius_m, "distribution": distribution}
    return records.collect(
        jobs, args.out / name, COMMITTED / name, figures, keep=args.keep, workers=args.workers, **labels
    )


def figures(results: xr.Dataset, jobs: Sequence[fcjax.Job]) -> pd.DataFrame:
    """Returns what the study compares, with one row per run."""
    happened = results.round_s.notnull()
    return pd.DataFrame(
        {
            "policy": results.policy.values.astype(str),
            "seed": results.seed.values,
            "best_percent": 100 * metrics.best_accuracy(results).values,
            "area_percent": 100 * metrics.area_under_curve(results).values,
            "scheduled": results.scheduled.sum("device").where(happened).mean("round").values,
            "rounds": happened.sum("round").values,
        }
    )


def compare(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per policy; of FC's grid of phi, only the best in hindsight, which may be FC itself."""
    means = runs.groupby("policy", sort=False)[["best_percent", "area_percent", "scheduled", "rounds"]].mean()
    grid = [name for name in means.index if name == "fc" or name.startswith("fc(phi=")]
    best = means.best_percent[grid].idxmax()
    rows = []
    for policy in [name for name in means.index if name == "fc" or name not in grid] + [best] * (len(grid) > 1):
        label = f"{BEST}: {best.removeprefix('fc(phi=').rstrip(')') if best != 'fc' else 0.05}"
        row = {"policy": label if rows and policy == best else policy, "seeds": int((runs.policy == policy).sum())}
        row |= means.loc[policy].to_dict()
        if policy != "fc":
            found = records.paired(runs, policy, "fc")
            row |= {name: getattr(found, name) for name in ("difference", "low", "high")}
            # A policy that is chosen by the same runs cannot be tested by them.
            row["p_value"] = np.nan if policy in grid else found.p_value
        rows.append(row)
    return pd.DataFrame(rows)


def as_text(table: pd.DataFrame) -> str:
    head = ["scenario", "radius", "data", "policy", "best (%)", "minus fc (points)", "p (Holm)", "devices", "rounds"]
    lines = [head]
    for row in table.to_dict("records"):
        difference = f"{row['difference']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f})"
        lines.append(
            [
                row["scenario"],
                f"{row['radius_m']:.0f}",
                row["distribution"],
                row["policy"],
                f"{row['best_percent']:.2f}",
                "-" if np.isnan(row["difference"]) else difference,
                "-" if np.isnan(row["p_holm"]) else f"{row['p_holm']:.2g}",
                f"{row['scheduled']:.1f}",
                f"{row['rounds']:.0f}",
            ]
        )
    seeds = f"{table.seeds.max()} seeds"
    about = f"Best accuracy over a run, {seeds}; intervals are 95% of one pair; p after Holm's correction for all."
    return console.as_text([lines, about])


def draw(table: pd.DataFrame) -> plt.Figure:
    """Draws the difference of each policy to FC, with one panel per distribution."""
    table = table[table.difference.notna()].assign(policy=table.policy.str.partition(":")[0])
    policies, distributions = list(dict.fromkeys(table.policy)), list(dict.fromkeys(table.distribution))
    places = list(dict.fromkeys(zip(table.scenario, table.radius_m, strict=True)))
    with plt.rc_context(plots.STYLE):
        figure, grid = plt.subplots(
            1,
            len(distributions),
            figsize=(4 * len(distributions), 1 + 0.22 * len(places) * (len(policies) + 1)),
            squeeze=False,
            sharey=True,
            layout="constrained",
        )
        for axes, distribution in zip(grid[0], distributions, strict=True):
            for number, policy in enumerate(policies):
                rows = table[(table.policy == policy) & (table.distribution == distribution)]
                where = [places.index(place) for place in zip(rows.scenario, rows.radius_m, strict=True)]
                height = np.array(where) + (number - (len(policies) - 1) / 2) / (len(policies) + 1)
                ends = [rows.difference - rows.low, rows.high - rows.difference]
                colour = plots.COLOURS[number % len(plots.COLOURS)]
                axes.errorbar(rows.difference, height, xerr=ends, fmt="o", color=colour, capsize=2, label=policy)
            axes.axvline(0, color="black", linewidth=0.8)
            axes.set(title=distribution, xlabel="best accuracy minus FC's (points)", ylim=(len(places) - 0.5, -0.5))
        grid[0, 0].set_yticks(range(len(places)), labels=[f"{scenario}, {radius:.0f} m" for scenario, radius in places])
        grid[0, -1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; finished runs are kept: rerun to resume")
