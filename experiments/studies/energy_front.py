"""The time-energy front of the paper's cell: the least energy of a round against its deadline.

Draws random rounds. In each, takes the fastest set of every given size, and solves `fcjax.least_energy` for deadlines
from the earliest possible one, at which `allocate` at full power and frequency is the only choice, to several times
that. Prints a table, and writes to OUT:
  front.csv   deadline and energy, one row per size and deadline: median and 10% and 90% quantiles over the rounds
  front.png   the front, and the energy relative to that of `allocate`

    python experiments/studies/energy_front.py --out experiments/results/studies/energy_front
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pandas as pd

import fcjax
from fcjax import console, plots, presets, worlds

mpl.use("Agg")
import matplotlib.pyplot as plt

QUANTILES = {"": 0.5, "_low": 0.1, "_high": 0.9}
PRINTED = (1, 1.1, 1.5, 2, 4, 8)  # deadlines of the table, relative to the earliest
FACTORS = np.union1d(1 + np.geomspace(1e-3, max(PRINTED) - 1, 48), PRINTED)


def main(argv: list[str] | None = None) -> pd.DataFrame:
    args = parser().parse_args(argv)
    console.check_writable(args.out)
    fcjax.programs.keep_on_disk()
    experiment = presets.shi2020("mnist", radius_m=args.radius)
    keys = jax.random.split(jax.random.key(args.seed), args.rounds)
    with jax.enable_x64(True):
        rows = pd.concat(front(size, keys, experiment) for size in args.sizes)
    at_once = rows[rows.factor == 1].relative
    print(f"least energy at the earliest deadline over that of allocate: {at_once.min():.9f} to {at_once.max():.9f}")
    print(rows[rows.factor.isin(PRINTED)].to_string(index=False, float_format="{:.4g}".format))
    rows.to_csv(args.out / "front.csv", index=False, float_format="%.5g", lineterminator="\n")
    figure = draw(rows, f"median and 10% to 90% of {args.rounds} rounds, R = {args.radius:g} m")
    figure.savefig(args.out / "front.png", bbox_inches="tight")
    plt.close(figure)
    return rows


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sizes", type=int, nargs="+", default=[1, 3, 5, 10, 20], help="devices (default: %(default)s)")
    p.add_argument("--rounds", type=int, default=200, help="random rounds (default: %(default)s)")
    p.add_argument("--radius", type=float, default=600.0, help="in m (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, default=Path("out/energy_front"), help="default: %(default)s")
    return p


def front(size: int, keys: jax.Array, experiment: fcjax.Experiment) -> pd.DataFrame:
    """Returns the front of the fastest set of a size: one row per deadline, with quantiles over rounds."""
    solved = jax.vmap(solve, in_axes=(0, None, None, None))(keys, size, experiment.cell, experiment.training)
    columns = {}
    for name, values in zip(("deadline_s", "energy_j", "relative", "sending"), solved, strict=True):
        columns |= {f"{name}{end}": np.quantile(values, q, axis=0) for end, q in QUANTILES.items()}
    return pd.DataFrame({"devices": size, "factor": FACTORS, **columns})


@jax.jit
def solve(key, size, cell, training):
    """Returns the deadlines of a round, the least energies, relative to allocate, and the fraction of sending."""
    _, observation = worlds.redrawn().observe(key, (), cell, training)
    scheduled = fcjax.fastest_sets(observation, cell)[1][size - 1]
    fastest = fcjax.allocate(scheduled, observation, cell)
    without_computing = dataclasses.replace(cell, capacitance=0.0)

    def least(deadline_s):
        energy_j, decision = fcjax.least_energy(scheduled, deadline_s, observation, cell, training)
        return energy_j, jnp.sum(fcjax.round_energy(decision, observation, without_computing, training)) / energy_j

    deadlines_s = fastest.round_s * FACTORS
    energies_j, sending = jax.vmap(least)(deadlines_s)
    at_once_j = jnp.sum(fcjax.round_energy(fastest, observation, cell, training))
    return deadlines_s, energies_j, energies_j / at_once_j, sending


def draw(rows: pd.DataFrame, title: str) -> plt.Figure:
    with plt.rc_context(plots.STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.6), layout="constrained")
        figure.suptitle(title, fontsize=9)
        for colour, (size, of_size) in zip(plots.COLOURS, rows.groupby("devices"), strict=False):
            label = f"{size} device{'s' if size > 1 else ''}"
            for axes, x, y in ((left, "deadline_s", "energy_j"), (right, "factor", "relative")):
                axes.plot(of_size[x], of_size[y], color=colour, label=label)
                axes.fill_between(of_size[x], of_size[f"{y}_low"], of_size[f"{y}_high"], color=colour, alpha=0.15, lw=0)
            left.plot(*of_size.iloc[0][["deadline_s", "energy_j"]], "o", color=colour, markersize=5, zorder=3)
        right.plot(1, 1, "o", color="black", markersize=5, zorder=3)
        left.plot([], [], "o", color="black", markersize=5, label="allocate, at full power\nand frequency")
        left.set(xlabel="deadline of the round (s)", ylabel="least energy of the round (J)")
        right.set(xlabel="deadline / earliest deadline", ylabel="least energy / energy of allocate")
        for axes, xticks, yticks in (
            (left, (0.4, 0.6, 1, 2, 4, 8), (0.001, 0.01, 0.1, 1)),
            (right, (1, 1.5, 2, 3, 4, 6, 8), (0.02, 0.05, 0.1, 0.2, 0.5, 1)),
        ):
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(xticks, labels=[f"{tick:g}" for tick in xticks])
            axes.set_yticks(yticks, labels=[f"{tick:g}" for tick in yticks])
            axes.minorticks_off()
        figure.legend(*left.get_legend_handles_labels(), loc="outside right center")
    return figure


if __name__ == "__main__":
    main()
