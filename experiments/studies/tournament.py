"""The tournament: policies on scenarios, compared pairwise over common seeds.

All policies meet the same channels, computation times, data and mini-batches under a seed. For every scenario and
distribution, prints a ranking by best accuracy, with 95% intervals, the range of the rank over resampled seeds, and
cost and fairness beside it. A paired difference is called significant if it is so after Holm's correction for all
pairs of the setting. The best fixed number of devices is a reference: it is chosen in hindsight, so it has no rank.
Runs are saved in KEEP as they finish: rerun a stopped command to resume. Writes to OUT, for every scenario:
  SCENARIO.csv         one row per distribution and policy
  SCENARIO_pairs.csv   one row per distribution and pair of policies
  SCENARIO.png         the ranking and the matrix of paired differences
  SCENARIO_runs.csv    one row per run, under its fingerprint; runs in this file are not repeated

    python experiments/studies/tournament.py --scenario shi2020 --distribution l1 --seeds 3 --policy fc rd pf oort
    python experiments/studies/tournament.py --seeds 10      # everything: hours on two cores
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import records
import xarray as xr
from scipy import stats

import fcjax
from fcjax import console, hardware, metrics, plots

mpl.use("Agg")
import matplotlib.pyplot as plt

SCENARIOS = ("shi2020", "heterogeneous", "energy", "mobile")
DISTRIBUTIONS = ("l1", "dir0.3")
PAPERS = ("fc", "exact", "rd", "pf", "cs-l", "cs-h", "as-l", "as-h")
NUMBER = 5  # devices per round of policies that take a number: about FC's in the paper's cell
OTHERS = (
    "rd",
    "pf",
    "round-robin",
    "age",
    "timely",
    "cs-ucb",
    "bn2",
    "bc-bn2",
    "bn2-c",
    "importance",
    "power-of-choice",
    "oort",
)
FIXED = (1, 3, 5, 8, 12)
RESAMPLES = 10_000
COLUMNS = {  # column of SCENARIO.csv: title, digits
    "best_percent": ("best (%)", 2),
    "area_percent": ("area (%)", 1),
    "time_to_target_s": ("to target (s)", 1),
    "reached_percent": ("reached (%)", 0),
    "energy_j": ("energy (J)", 1),
    "jain": ("Jain", 2),
    "mean_age": ("age", 1),
    "scheduled": ("devices", 1),
    "round_s": ("round (s)", 2),
    "gap": ("P4 gap", 2),
}

PAIR = ("a", "b", "difference", "low", "high", "probability", "seeds", "seeds_to_settle", "p_value")


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    console.end_on_sigterm()
    console.check_writable(args.keep)
    console.check_writable(args.out)
    hardware.use_one_thread()
    entries = args.policy or everyone()
    if args.seeds < 2 or len([name for name in entries if not is_fixed(name)]) < 2 or not 0 < args.target < 1:
        raise ValueError("a tournament needs 2 or more seeds and policies, and a target between 0 and 1")
    with console.warnings_as_lines():
        for scenario in args.scenario:
            parts = []
            for distribution in args.distribution:
                runs = play(scenario, distribution, entries, args)
                ranking, pairs = (rows.assign(distribution=distribution) for rows in evaluate(runs))
                print(f"\n{scenario}, {distribution}, {args.seeds} seeds\n\n{table(ranking, args.target)}", flush=True)
                parts.append((ranking, pairs))
            stem = stem_of(scenario)
            for name, rows in zip((stem, f"{stem}_pairs"), zip(*parts, strict=True), strict=True):
                records.save(pd.concat(rows), args.out / f"{name}.csv")
            figure = draw(scenario, parts)
            figure.savefig(args.out / f"{stem}.png", bbox_inches="tight")
            plt.close(figure)
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--scenario", nargs="+", default=list(SCENARIOS), help="presets (default: %(default)s)")
    p.add_argument("--distribution", nargs="+", default=list(DISTRIBUTIONS), help="default: %(default)s")
    p.add_argument("--policy", nargs="+", help="policies by name (default: all, and fixed numbers of devices)")
    p.add_argument("--dataset", default="mnist")
    p.add_argument("--budget", type=float, help="simulated time in s (default: the preset's)")
    p.add_argument("--seeds", type=int, default=10, help="seeds per policy (default: %(default)s)")
    p.add_argument("--target", type=float, default=0.8, help="accuracy to reach (default: %(default)s)")
    p.add_argument(
        "--keep", type=Path, default=Path("out/tournament/runs"), help="finished runs (default: %(default)s)"
    )
    p.add_argument("--out", type=Path, default=Path("out/tournament"), help="default: %(default)s")
    return p


def everyone() -> list[str]:
    """Returns the paper's policies with its settings, the others, and fixed numbers of devices."""
    others = [f"{name}(n={NUMBER})" for name in OTHERS]
    return [*PAPERS, *others, "ocean", "local-steps", *(f"fixed-{n}" for n in FIXED)]


def stem_of(scenario: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in scenario)


def play(scenario: str, distribution: str, entries: list[str], args: argparse.Namespace) -> pd.DataFrame:
    """Returns one row per run of all policies; executes runs that have none."""
    settings = {"distribution": distribution, "budget_s": args.budget, "seeds": args.seeds, "dataset": args.dataset}
    jobs = fcjax.plan(entries, preset=scenario, **settings, progress=True)
    name = f"{stem_of(scenario)}_runs.csv"
    labels = {"distribution": distribution, "target": args.target}
    committed = records.COMMITTED / "tournament" / name
    measured = functools.partial(figures, target=args.target)
    return records.collect(jobs, args.out / name, committed, measured, keep=args.keep, **labels)


def figures(results: xr.Dataset, jobs: Sequence[fcjax.Job], target: float) -> pd.DataFrame:
    """Returns what the tournament compares, with one row per run."""
    happened = results.round_s.notnull()
    columns = {
        "best_percent": 100 * metrics.best_accuracy(results),
        "area_percent": 100 * metrics.area_under_curve(results),
        "time_to_target_s": metrics.time_to_accuracy(results, target, censored="budget"),
        "reached_percent": 100 * np.isfinite(metrics.time_to_accuracy(results, target)),
        "energy_j": metrics.energy(results).sum("device"),
        "jain": metrics.jain_index(results),
        "mean_age": metrics.mean_age(results),
        "scheduled": results.scheduled.sum("device").where(happened).mean("round"),
        "round_s": results.round_s.mean("round"),
        "gap": metrics.optimality_gap(results, list(jobs)).mean("round"),
    }
    runs = pd.DataFrame({name: np.asarray(values, float) for name, values in columns.items()})
    return runs.assign(policy=results.policy.values.astype(str), seed=results.seed.values)


def evaluate(runs: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns the ranking, best first, and all pairs; of the fixed numbers of devices, only the best in hindsight."""
    runs = with_best_fixed(runs)
    ranked = runs[~runs.policy.map(is_fixed)]
    rows = []
    for policy, of_policy in runs.groupby("policy", sort=False):
        row = {"policy": policy, "seeds": len(of_policy)}
        for name in COLUMNS:
            mean, half = metrics.interval(of_policy[name].to_numpy())
            row |= {name: float(mean), f"{name}_half": float(half)}
        rows.append(row)
    pairs = compare(ranked)
    ranking = pd.DataFrame(rows).merge(ranks(ranked), "left", "policy").merge(settled(pairs), "left", "policy")
    return ranking.sort_values("best_percent", ascending=False, ignore_index=True), pairs


def is_fixed(name: str) -> bool:
    return name.startswith("fixed-")


def with_best_fixed(runs: pd.DataFrame) -> pd.DataFrame:
    """Keeps the fixed number of devices with the best mean, as "fixed-best (n)"."""
    means = runs[runs.policy.map(is_fixed)].groupby("policy", sort=False).best_percent.mean()
    if means.empty:
        return runs
    best = means.idxmax()
    runs = runs[~runs.policy.isin(means.index.drop(best))]
    return runs.assign(policy=runs.policy.replace(best, f"fixed-best ({best.removeprefix('fixed-')})"))


def compare(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns one row per pair of policies, with Holm's correction for their number."""
    pairs = [records.paired(runs, a, b) for a, b in itertools.combinations(runs.policy.unique(), 2)]
    table = pd.DataFrame([{name: getattr(pair, name) for name in PAIR} for pair in pairs])
    table["p_holm"] = metrics.holm(table.p_value.to_numpy())
    direction = np.where(table.difference > 0, "higher", "lower")
    return table.assign(verdict=np.where(table.p_holm < 0.05, direction, "undecided"))


def ranks(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the 95% range of each policy's rank, and how often it is first, over resampled seeds."""
    wide = runs.pivot(index="seed", columns="policy", values="best_percent")
    rng = np.random.default_rng(0)
    means = wide.to_numpy()[rng.integers(len(wide), size=(RESAMPLES, len(wide)))].mean(axis=1)
    places = stats.rankdata(-means, axis=1, method="min")
    low, high = np.percentile(places, [2.5, 97.5], axis=0, method="nearest")
    first = 100 * (places == 1).mean(axis=0)
    return pd.DataFrame({"policy": wide.columns, "rank_low": low, "rank_high": high, "first_percent": first})


def settled(pairs: pd.DataFrame) -> pd.DataFrame:
    """Returns how many others each policy is significantly better and worse than."""
    mirrored = pairs.assign(a=pairs.b, b=pairs.a, verdict=pairs.verdict.map(MIRROR))
    both = pd.concat([pairs, mirrored])
    counts = both.groupby("a").verdict.agg(beats=lambda v: (v == "higher").sum(), loses=lambda v: (v == "lower").sum())
    return counts.rename_axis("policy").reset_index()


MIRROR = {"higher": "lower", "lower": "higher", "undecided": "undecided"}


def table(ranking: pd.DataFrame, target: float) -> str:
    head = ["rank", "policy", "beats", "loses to", "first (%)", *(title for title, _ in COLUMNS.values())]
    lines = [head]
    for row in ranking.to_dict("records"):
        line = ["-", row["policy"], "-", "-", "-"]
        if not is_fixed(row["policy"]):
            line = [f"{row['rank_low']:.0f} to {row['rank_high']:.0f}", row["policy"]]
            line += [f"{row[name]:.0f}" for name in ("beats", "loses", "first_percent")]
        for name, (_, digits) in COLUMNS.items():
            half = f" ± {row[f'{name}_half']:.{digits}f}" if name == "best_percent" else ""
            line.append(f"{row[name]:.{digits}f}{half}")
        lines.append(line)
    about = (
        f"Means over seeds, ± 95% intervals. rank: 95% range over resampled seeds; to target: until {target:.0%}, with "
        "the budget for runs that do not reach it; age: rounds since a device's last update; P4 gap: the objective of "
        "P4 over its least value."
    )
    return console.as_text([lines, about])


def draw(scenario: str, parts: list[tuple[pd.DataFrame, pd.DataFrame]]) -> plt.Figure:
    """Draws the ranking and the matrix of paired differences, for each distribution of a scenario."""
    height = 1.2 + 0.22 * max(8, *(len(ranking) for ranking, _ in parts))
    with plt.rc_context(plots.STYLE | {"axes.grid": False}):
        figure, grid = plt.subplots(
            len(parts), 2, figsize=(12, height * len(parts)), squeeze=False, layout="constrained", width_ratios=(1, 1.3)
        )
        for (left, right), (ranking, found) in zip(grid, parts, strict=True):
            draw_ranking(left, ranking, f"{scenario}, {ranking.distribution[0]}, {ranking.seeds[0]} seeds")
            image = draw_matrix(right, [name for name in ranking.policy if not is_fixed(name)], found)
            figure.colorbar(image, ax=right, label="row minus column (points)")
    return figure


def draw_ranking(axes: plt.Axes, ranking: pd.DataFrame, title: str) -> None:
    places = np.arange(len(ranking))
    axes.errorbar(
        ranking.best_percent, places, xerr=ranking.best_percent_half, fmt="o", color=plots.COLOURS[0], capsize=2
    )
    axes.set(title=title, xlabel="best accuracy (%), with 95% intervals", ylim=(len(ranking) - 0.5, -0.5))
    axes.set_yticks(places, labels=ranking.policy)
    axes.grid(axis="x", alpha=0.25)


def draw_matrix(axes: plt.Axes, order: list[str], pairs: pd.DataFrame) -> mpl.image.AxesImage:
    matrix, open_ = np.zeros((len(order), len(order))), []
    for row in pairs.itertuples():
        i, j = order.index(row.a), order.index(row.b)
        matrix[i, j], matrix[j, i] = row.difference, -row.difference
        if row.verdict == "undecided":
            open_ += [(i, j), (j, i)]
    limit = max(1.0, float(np.percentile(np.abs(matrix), 90)))
    image = axes.imshow(matrix, cmap="RdBu", vmin=-limit, vmax=limit)
    if open_:
        rows, columns = zip(*open_, strict=True)
        axes.plot(columns, rows, ".", color="black", markersize=2.5)
    axes.set_title("paired differences; dots: not significant")
    axes.set_xticks(range(len(order)), labels=order, rotation=90)
    axes.set_yticks(range(len(order)), labels=order)
    return image


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; finished runs are kept: rerun to resume")
