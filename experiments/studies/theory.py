"""The bounds beside measurements: Theorems 2 and 3 on convex tasks.

Full-gradient local descent on M = 20 devices, in float64. Four tasks, all with w_0 = 0:
  means       estimates 10 quantities: linear regression on one-hot inputs, so that all Hessians are the identity
  regression  linear regression on 20 Gaussian features
  svm         squared SVM (lambda = 0.1) on two Gaussian clouds in 20 dimensions
  softmax     softmax regression (l2 term 0.01) on 1000 images of MNIST, averaged over 4 x 4 pixels

The non-iid level s is the part of the samples that is dealt sorted by label; for means and regression, the standard
deviation of the devices' own optima. Settings vary one at a time around n = 5, tau = 5, eta beta = 0.1, s = 1.

Theorem 2 is measured in the first round, over many random schedules in one vmapped call, and in all rounds of runs
with random schedules. F(w^Pi) - F(w) is measured less a control variate of mean 0 (see `gap`). Theorem 3 is measured
over the same runs; w* is found by Newton's method. beta is the largest eigenvalue of the Hessians of all F_i, or an
upper bound on it for svm and softmax. delta_i and rho are the largest ||grad F_i - grad F|| and ||grad F_i|| over the
iterates of v and, for rho, at w_k: all that the proofs need. omega is the least over all rounds and runs. Ratios are
measured/bound: a bound fails where its ratio is above 1.

Prints a summary and writes to OUT:
  summary.txt    what it prints
  theorem2.csv   Theorem 2 in the first round; one row per task, seed and setting
  rounds.csv     Theorem 2 in every round of the runs, and the excess losses of all sequences, at the central setting
  theorem3.csv   Theorem 3 after all rounds, and at the central setting after each
  unequal.csv    Theorem 2 for unequal D_i: 10 to 100 samples; "aligned" is the task means with 10 or 20 samples, w_0 on
                 the side of the small devices
  units.csv      Theorem 3 for the task regression with targets in other units, all devices and tau = 1
  ratios.png, unequal.png   measured over bound, with 95% intervals over seeds

    python experiments/studies/theory.py --quick                                      # a minute
    python experiments/studies/theory.py --out experiments/results/studies/theory     # six minutes on one core
"""

import argparse
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import convex
import jax
import matplotlib as mpl
import numpy as np
import pandas as pd
from convex import TASKS, Task
from jax import Array
from tqdm.auto import tqdm

import fcjax
from fcjax import bounds, console, metrics, plots

mpl.use("Agg")
import matplotlib.pyplot as plt

NUM_DEVICES, NUM_SAMPLES = len(convex.EQUAL), convex.EQUAL[0]
DECADE = 10 * (1 + np.arange(NUM_DEVICES) // 2)
TWO_SIZES = np.repeat([10, 20], NUM_DEVICES // 2)
CENTRE: dict[str, Any] = {"n": 5, "tau": 5, "eta_beta": 0.1, "skew": 1.0, "devices": NUM_DEVICES}
AXES: dict[str, tuple[Any, ...]] = {
    "n": (1, 2, 3, 5, 10, 15, 19),
    "tau": (1, 2, 5, 10, 20),
    "eta_beta": (0.01, 0.03, 0.1, 0.3, 1.0),
    "skew": (0.0, 0.25, 0.5, 0.75, 1.0),
    "devices": (2, 5, 10, 20, 50),  # a quarter of them is scheduled
}
SMALL_STEPS = (1e-4, 1e-3, 0.01, 0.1, 1.0)
UNITS = (1.0, 10.0, 100.0)
SECOND = ("published", "valid", "tight", "convex")
THIRD = ("printed", "corrected")


def penalties(task: Task, n: Any, eta: float, tau: float, delta: Array, rho: Array) -> dict[str, np.ndarray]:
    """Returns Theorem 2's penalty under each constant.

    "convex" is "tight" with eta tau delta_i for g_i: for convex F_i and eta <= 2/beta a gradient step does not expand
    distances, so ||w_i - v|| grows by at most eta delta_i per step. That is g_i of one step and tau delta_i.
    """
    known = {"beta": task.beta, "num_samples": task.sizes, "learning_rate": eta, "rho": rho}

    def penalty(constant, delta, tau):
        return np.asarray(bounds.scheduling_penalty(n, delta=delta, local_steps=tau, constant=constant, **known))

    of_paper = {constant: penalty(constant, delta, tau) for constant in ("published", "valid", "tight")}
    return of_paper | {"convex": penalty("tight", tau * delta, 1)}


def second(task: Task, ranks: Array, *, n: Any, tau: int, eta_beta: float) -> pd.DataFrame:
    """Measures Theorem 2 in the first round; one row per number of devices."""
    n, eta = np.atleast_1d(n), eta_beta / float(task.beta)
    gaps, played = convex.measure(task, ranks, n, eta, tau)
    gaps = np.asarray(gaps)
    error = gaps.std(1, ddof=1) / np.sqrt(len(ranks))
    found = {"n": n, "tau": tau, "eta_beta": eta_beta, "measured": gaps.mean(1), "standard_error": error}
    return pd.DataFrame(found | penalties(task, n, eta, tau, played.delta, played.rho))


def third(
    task: Task, best: Array, keys: Array, *, n: int, tau: int, eta_beta: float, num_rounds: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measures Theorem 3 after each number of rounds, and Theorem 2 in each round; one row per round.

    "printed" is Theorem 3 as in the paper. "corrected" has the constant "tight", and omega = min 1/||w_k - w*||^2,
    which the descent lemma gives: with theta = F(v) - F(w*), a step raises 1/theta by at least
    eta (1 - beta eta/2) ||grad F||^2/theta^2, and theta <= ||grad F|| ||v - w*|| because F is convex.
    """
    eta, k = eta_beta / float(task.beta), np.arange(1, num_rounds + 1)
    history = jax.tree.map(np.asarray, convex.play(task, keys, best, n, eta, tau, num_rounds=num_rounds))
    delta, rho, distance = history.delta.max((0, 1)), history.rho.max(), history.distance.max()
    setting = {"n": n, "tau": tau, "eta_beta": eta_beta, "round": k}
    error = history.gap.std(0, ddof=1) / np.sqrt(len(keys))
    of_rounds = setting | {"measured": history.gap.mean(0), "standard_error": error}
    of_rounds |= {name: getattr(history, name).mean(0) for name in ("excess", "everybody", "central")}
    of_rounds |= penalties(task, n, eta, tau, delta, rho)
    lowest = np.minimum.accumulate(history.excess, axis=1)
    after = setting | {"mean_excess": lowest.mean(0), "measured": 1 / (1 / lowest).mean(0)}
    known = {"rho": rho, "beta": task.beta, "delta": delta, "num_samples": task.sizes}
    known |= {"learning_rate": eta, "local_steps": tau}
    for name, omega, constant in zip(THIRD, (1 / distance, 1 / distance**2), ("published", "tight"), strict=True):
        phi = omega * (1 - eta_beta / 2)
        after[name] = np.asarray(bounds.convergence_bound(n, k, phi=phi, constant=constant, **known))
    return pd.DataFrame(of_rounds), pd.DataFrame(after)


@functools.cache
def solved(name: str, seed: int, skew: float) -> tuple[Task, Array]:
    """Returns a task and its minimiser."""
    task = TASKS[name](seed, skew)
    return task, convex.minimiser(task)


def first_rounds(name: str, seed: int, schedules: int) -> Iterator[pd.DataFrame]:
    """Measures Theorem 2 along all axes."""
    for axis, values in AXES.items():
        for value in [values] if axis == "n" else values:
            chosen = CENTRE | {axis: value}
            num_devices, skew = chosen.pop("devices"), chosen.pop("skew")
            if axis == "devices":
                chosen["n"] = -(-num_devices // 4)
            ranks = convex.draw_ranks(jax.random.key(seed), schedules, num_devices)
            task = TASKS[name](seed, skew, np.full(num_devices, NUM_SAMPLES))
            yield second(task, ranks, **chosen).assign(axis=axis, skew=skew, devices=num_devices)


def all_rounds(name: str, seed: int, runs: int, num_rounds: int) -> Iterator[tuple[pd.DataFrame, pd.DataFrame]]:
    """Measures Theorem 3 along all axes but the number of devices, and both theorems after each central round."""
    keys = jax.random.split(jax.random.key(seed), runs)
    settings = [(axis, CENTRE | {axis: value}) for axis in list(AXES)[:-1] for value in AXES[axis]]
    for axis, chosen in [("round", CENTRE), *settings]:
        known = {key: chosen[key] for key in ("n", "tau", "eta_beta")}
        rounds, after = third(*solved(name, seed, chosen["skew"]), keys, **known, num_rounds=num_rounds)
        if axis != "round":
            rounds, after = rounds[:0], after[-1:]
        yield rounds, after.assign(axis=axis, skew=chosen["skew"])


def unequal(names: list[str], seed: int, schedules: int) -> Iterator[pd.DataFrame]:
    """Measures Theorem 2 for unequal D_i along the step size."""
    ranks = convex.draw_ranks(jax.random.key(seed), schedules, NUM_DEVICES)
    shuffled = np.random.default_rng([seed, 24]).permutation(DECADE)
    tasks = {name: TASKS[name](seed, 1.0, shuffled) for name in names}
    for name, task in (tasks | {"aligned": convex.means(seed, 1.0, TWO_SIZES, aligned=True)}).items():
        for eta_beta in SMALL_STEPS:
            found = second(task, ranks, n=CENTRE["n"], tau=CENTRE["tau"], eta_beta=eta_beta)
            yield found.assign(task=name)


def units(seed: int, num_rounds: int) -> Iterator[pd.DataFrame]:
    """Measures Theorem 3 for targets in other units: descent on F itself, so that only omega matters."""
    keys = jax.random.split(jax.random.key(seed), 2)  # of equal runs, because all devices are scheduled
    for unit in UNITS:
        task = convex.regression(seed, 1.0, unit=unit)
        chosen = {"n": NUM_DEVICES, "tau": 1, "eta_beta": CENTRE["eta_beta"], "num_rounds": num_rounds}
        yield third(task, convex.minimiser(task), keys, **chosen)[1][-1:].assign(unit=unit)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.quick:
        args.schedules, args.runs, args.rounds, args.seeds = 200, 10, 5, 2
    if min(args.schedules, args.runs, args.seeds) < 2 or args.rounds < 1:
        raise ValueError("--schedules, --runs and --seeds must be 2 or more, and --rounds 1 or more")
    console.check_writable(args.out)
    fcjax.programs.keep_on_disk()
    tables: dict[str, list[pd.DataFrame]] = {
        name: [] for name in ("theorem2", "rounds", "theorem3", "unequal", "units")
    }
    with jax.enable_x64(True):
        for seed in tqdm(range(args.seeds), desc="seeds"):
            for name in tqdm(args.task, desc="tasks", leave=False):
                known = {"task": name, "seed": seed}
                tables["theorem2"] += [rows.assign(**known) for rows in first_rounds(name, seed, args.schedules)]
                for rounds, after in all_rounds(name, seed, args.runs, args.rounds):
                    tables["rounds"].append(rounds.assign(**known))
                    tables["theorem3"].append(after.assign(**known))
            tables["unequal"] += [rows.assign(seed=seed) for rows in unequal(args.task, seed, args.schedules)]
            tables["units"] += [rows.assign(seed=seed) for rows in units(seed, args.rounds)]
    found = {name: pd.concat([part for part in parts if len(part)]) for name, parts in tables.items()}
    for name, rows in found.items():
        first = [column for column in ("task", "seed", "axis") if column in rows]
        rows = rows[[*first, *rows.columns.drop(first)]]
        (args.out / f"{name}.csv").write_text(rows.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    text = summary(found, args)
    print(text)
    (args.out / "summary.txt").write_text(text + "\n")
    for name, draw in (("ratios", draw_ratios), ("unequal", draw_unequal)):
        figure = draw(found)
        figure.savefig(args.out / f"{name}.png", bbox_inches="tight")
        plt.close(figure)
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--task", nargs="+", default=list(TASKS), choices=TASKS, help="default: %(default)s")
    p.add_argument("--schedules", type=int, default=4000, help="of the first round (default: %(default)s)")
    p.add_argument("--runs", type=int, default=50, help="of random schedules (default: %(default)s)")
    p.add_argument("--rounds", type=int, default=20, help="rounds of a run (default: %(default)s)")
    p.add_argument("--seeds", type=int, default=5, help="draws of data and schedules (default: %(default)s)")
    p.add_argument("--quick", action="store_true", help="200 schedules, 10 runs of 5 rounds, 2 seeds")
    p.add_argument("--out", type=Path, default=Path("out/theory"), help="default: %(default)s")
    return p


SETTING = {"n": "n", "tau": "tau", "eta_beta": "eta beta", "skew": "s", "devices": "M", "round": "k", "unit": "unit"}


def summary(found: dict[str, pd.DataFrame], args: argparse.Namespace) -> str:
    """Formats the ratios at the central setting and with other units, and the extremes over settings."""
    second_rows, third_rows = found["theorem2"], found["theorem3"]
    centre = second_rows[(second_rows.axis == "n") & (second_rows.n == CENTRE["n"])]
    last = third_rows[(third_rows.axis == "n") & (third_rows.n == CENTRE["n"])]
    single = second_rows[(second_rows.axis == "tau") & (second_rows.tau == 1)]
    about = (
        f"Measured over bound, {args.seeds} seeds, {args.schedules} schedules of the first round, {args.runs} runs of "
        f"{args.rounds} rounds. ±: half of the 95% interval over seeds. A case is one setting and seed. A bound fails "
        "if the measured mean less 3 standard errors is above it."
    )
    return console.as_text(
        [
            about,
            "Theorem 2, first round, at the central setting",
            by_group(centre, "task", SECOND),
            "Theorem 2, first round, tau = 1",
            by_group(single, "task", SECOND),
            "Theorem 2, first round, all settings",
            extremes(second_rows, SECOND),
            "Theorem 2, first round, 50 devices",
            by_group(second_rows[second_rows.devices == 50], "task", SECOND),
            "Theorem 2, all rounds at the central setting",
            extremes(found["rounds"], SECOND),
            "Theorem 2, unequal D_i, all step sizes",
            extremes(found["unequal"], SECOND),
            "Theorem 2, unequal D_i, eta beta = 0.1",
            by_group(found["unequal"].query("eta_beta == 0.1"), "task", SECOND),
            "Theorem 2, unequal D_i, task aligned",
            by_group(found["unequal"].query("task == 'aligned'"), "eta_beta", SECOND),
            "Theorem 3 at the central setting",
            by_group(last, "task", THIRD),
            "Theorem 3, all settings and, at the central one, after each round",
            extremes(third_rows, THIRD),
            "Theorem 3, all devices, tau = 1, targets of the task regression in other units",
            by_group(found["units"], "unit", THIRD),
        ]
    )


def by_group(rows: pd.DataFrame, group: str, names: tuple[str, ...]) -> list[list[str]]:
    """Tabulates the mean ratios of each group, with intervals over seeds."""
    table = [[SETTING.get(group, group), "measured", *names]]
    for value, of_value in rows.groupby(group, sort=False):
        line = [value if isinstance(value, str) else f"{value:g}", f"{of_value.measured.mean():.3g}"]
        for name in names:
            mean, half = metrics.interval((of_value.measured / of_value[name]).to_numpy())
            line.append(f"{mean:.3g} ± {half:.1g}")
        table.append(line)
    return table


def extremes(rows: pd.DataFrame, names: tuple[str, ...]) -> list[list[str]]:
    """Tabulates the smallest and largest ratio of each task, and how often each bound fails."""
    keys = [key for key in SETTING if key in rows]
    rows = rows.drop_duplicates(["task", "seed", *keys])  # the central setting is on all axes
    table = [["task", "bound", "cases", "fails", "smallest", "largest", "at"]]
    for task, of_task in rows.groupby("task", sort=False):
        error = of_task.get("standard_error", 0.0)
        for name in names:
            ratio = of_task.measured / of_task[name]
            failed = int((of_task.measured - 3 * error > of_task[name]).sum())
            worst = of_task.iloc[int(ratio.argmax())]
            where = ", ".join(f"{SETTING[key]} {worst[key]:g}" for key in keys)
            table.append([task, name, f"{len(ratio)}", f"{failed}", f"{ratio.min():.2g}", f"{ratio.max():.3g}", where])
    return table


LABELS = {
    "n": "scheduled devices n",
    "tau": r"local steps $\tau$",
    "eta_beta": r"$\eta\beta$",
    "skew": "non-iid level s",
    "devices": "devices M, a quarter scheduled",
    "round": "rounds K",
}
TICKS = AXES | {"n": (1, 2, 5, 10, 19), "round": (1, 2, 5, 10, 20)}


def draw_ratios(found: dict[str, pd.DataFrame]) -> plt.Figure:
    """Draws the mean ratios along all axes: a row for each bound, a colour for each task."""
    lines = [(f"Theorem 2, {name}", found["theorem2"], name) for name in SECOND[:3]]
    lines += [(f"Theorem 3, {name}", found["theorem3"], name) for name in THIRD]
    with plt.rc_context(plots.STYLE):
        figure, grid = plt.subplots(len(lines), len(AXES), figsize=(13, 11.5), layout="constrained", sharey="row")
        for row, (title, rows, name) in zip(grid, lines, strict=True):
            for axes, axis in zip(row, AXES, strict=True):
                column = "round" if axis == "devices" and name in THIRD else axis
                along = rows[(rows.axis == column) & rows[column].isin(AXES.get(column, TICKS[column]))]
                for task, of_task in along.groupby("task", sort=False):
                    ratio = of_task.assign(ratio=of_task.measured / of_task[name])
                    wide = ratio.pivot(index="seed", columns=column, values="ratio")
                    draw_line(axes, wide.columns, *metrics.interval(wide.to_numpy()), task)
                axes.set(xlabel=LABELS[column], yscale="log", xscale="linear" if column == "skew" else "log")
                axes.set_xticks(TICKS[column], labels=[f"{tick:g}" for tick in TICKS[column]])
                axes.minorticks_off()
            shade(row)
            row[0].set_ylabel(f"{title}\nmeasured/bound")
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(TASKS))
    return figure


def draw_unequal(found: dict[str, pd.DataFrame]) -> plt.Figure:
    """Draws the largest ratio over seeds for unequal D_i, with 95% intervals over schedules."""
    rows = found["unequal"]
    with plt.rc_context(plots.STYLE):
        figure, grid = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained", sharey=True)
        for axes, name in zip(grid, SECOND[:3], strict=True):
            ratio = rows.assign(ratio=rows.measured / rows[name], half=1.96 * rows.standard_error / rows[name])
            worst = ratio.sort_values("ratio").groupby(["task", "eta_beta"], sort=False).tail(1).sort_values("eta_beta")
            for task in rows.task.unique():
                line = worst[worst.task == task]
                draw_line(axes, line.eta_beta, line.ratio, line.half, task)
            axes.set(xlabel=LABELS["eta_beta"], xscale="log", yscale="log", title=f"Theorem 2, {name}")
        shade(grid)
        grid[0].set_ylabel("largest measured/bound")
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(TASKS) + 1)
    return figure


def draw_line(axes: plt.Axes, x: Any, mean: Any, half: Any, task: str) -> None:
    colour = plots.COLOURS[[*TASKS, "aligned"].index(task)]
    axes.errorbar(x, mean, half, color=colour, marker="o", markersize=3, capsize=2, label=task)


def shade(row: np.ndarray) -> None:
    """Shades where the bound fails, in panels that share their limits."""
    low, high = row[0].get_ylim()
    for axes in row:
        axes.axhline(1, color="black", linewidth=1)
        axes.axhspan(1, max(high, 3), color="black", alpha=0.06, linewidth=0)
    row[0].set_ylim(low, max(high, 3))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
