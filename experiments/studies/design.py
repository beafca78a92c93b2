"""What the parameters of the paper's cell are worth, by gradient, and which local training its bound favours.

Draws rounds of the preset shi2020 and schedules each by the policy `exact`. Writes to OUT:
  sensitivities.csv, .png   derivatives of round time, energy and bound by every parameter, means over rounds
  training.csv              the best devices, local steps and batch sizes, beside a search of the full grid
Prints both, what one more MHz and a common power budget buy, and how often the design and the grid agree.

    python experiments/studies/design.py --out experiments/results/studies/design
"""

import argparse
import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pandas as pd
from tqdm.auto import tqdm

import fcjax
from fcjax import bounds, console, design, plots, policies

mpl.use("Agg")

PHI = 0.05
STEPS, SIZES = np.arange(1, 31), np.arange(1, 201)  # the grid


def main(argv: list[str] | None = None) -> pd.DataFrame:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="rounds of the table (default: %(default)s)")
    parser.add_argument("--searches", type=int, default=10, help="rounds with a full grid (default: %(default)s)")
    parser.add_argument("--noise", type=float, nargs="+", default=[1.0, 5.0, 20.0], help="of gradients, sigma")
    parser.add_argument("--out", type=Path, default=Path("out/design"), help="default: %(default)s")
    args = parser.parse_args(argv)
    console.check_writable(args.out)
    fcjax.programs.keep_on_disk()
    with jax.enable_x64(True):
        experiment = fcjax.presets.shi2020("mnist")
        rounds = [draw(experiment, seed) for seed in tqdm(range(args.rounds), desc="rounds", leave=False)]
        table = average(experiment, rounds)
        write(table, args.out / "sensitivities.csv")
        plots.sensitivities(table).savefig(args.out / "sensitivities.png")
        wide = table.pivot(index="parameter", columns="quantity", values="percent_per_percent")
        wide = wide.loc[table.parameter.unique(), table.quantity.unique()]
        print(f"percent per percent, means over {len(rounds)} rounds\n{wide.to_string(float_format='%.3f')}\n")
        print(f"{one_more_megahertz(experiment, rounds, table)}\n\n{common_power(experiment, rounds)}\n")
        found = searches(experiment, rounds[: args.searches], args.noise)
        write(found, args.out / "training.csv")
        print(f"best training, means over {min(args.searches, len(rounds))} rounds")
        print(found.groupby("gradient_noise", sort=False).mean().drop(columns="round").to_string(float_format="%.4g"))
    return found


def draw(experiment: fcjax.Experiment, seed: int) -> tuple[fcjax.Observation, np.ndarray]:
    """Draws a round; returns it with the devices that `exact` schedules."""
    training = dataclasses.replace(experiment.training, num_samples=np.asarray(experiment.data.sizes, float))
    key = jax.random.key(seed)
    observation, scheduled = observe_and_select(key, experiment.cell, training, experiment.estimates, experiment.world)
    return observation, np.asarray(scheduled)


@partial(jax.jit, static_argnames="world")
def observe_and_select(key, cell, training, estimates, world):
    _, observation = world.observe(key, world.init(key, cell), cell, training)
    policy = policies.exact(PHI)
    context = fcjax.RoundContext(observation, estimates, cell, training, 0.0, 0)
    return observation, policy.select(key, policy.init(cell), context)[1].scheduled


def average(experiment: fcjax.Experiment, rounds: list) -> pd.DataFrame:
    """Returns the table of sensitivities with means over rounds."""
    cell, training, estimates = experiment.cell, experiment.training, experiment.estimates
    tables = [
        design.sensitivities(scheduled, observation, cell, training, estimates, PHI)
        for observation, scheduled in tqdm(rounds, desc="sensitivities", leave=False)
    ]
    keys = ["quantity", "parameter", "unit"]
    mean = pd.concat(tables).groupby(keys, sort=False).mean().reset_index()
    return mean[list(tables[0])]


def one_more_megahertz(experiment: fcjax.Experiment, rounds: list, table: pd.DataFrame) -> str:
    """Says what the gradient promises for one more MHz, and what solving again gives."""
    of_band = table[table.parameter == "cell.bandwidth_hz"].set_index("quantity")
    wider = dataclasses.replace(experiment.cell, bandwidth_hz=experiment.cell.bandwidth_hz + 1e6)
    gained_s = np.mean([time(o, s, wider) - time(o, s, experiment.cell) for o, s in rounds])
    return (
        f"One more MHz shortens the round of {of_band.quantity_value.round_s:.3f} s by "
        f"{-1e9 * of_band.per_unit.round_s:.3f} ms by the gradient, by {-1e3 * gained_s:.3f} ms if solved again. "
        f"It lowers the bound of {of_band.quantity_value.bound:.3f} by {-1e6 * of_band.per_unit.bound:.5f}."
    )


@jax.jit
def time(observation: fcjax.Observation, scheduled: np.ndarray, cell: fcjax.Cell) -> jax.Array:
    return fcjax.allocate(scheduled, observation, cell).round_s


def common_power(experiment: fcjax.Experiment, rounds: list) -> str:
    """Says how much faster rounds are if the scheduled devices may share the sum of their powers."""
    cell = experiment.cell
    before_s = np.mean([time(o, s, cell) for o, s in rounds])
    splits = [
        design.split_power(float(np.sum(np.asarray(cell.power_w)[s])), s, o, cell, limit_w=np.inf) for o, s in rounds
    ]
    after_s = np.mean([split.round_s for split in splits])
    most = np.mean(
        [
            np.max(np.asarray(split.power_w)[s]) / np.mean(np.asarray(cell.power_w)[s])
            for split, (_, s) in zip(splits, rounds, strict=True)
        ]
    )
    return (
        f"If the scheduled devices shared the sum of their powers, rounds would take {after_s:.3f} s instead of "
        f"{before_s:.3f} s; the strongest would send with {most:.2f} times its power on average."
    )


def searches(experiment: fcjax.Experiment, rounds: list, noises: list[float]) -> pd.DataFrame:
    """Compares the best training with the best of the full grid, for each round and noise of gradients."""
    rows = []
    for index, (observation, _) in enumerate(tqdm(rounds, desc="grids", leave=False)):
        products = np.unique(np.outer(STEPS, SIZES))
        round_s = np.asarray(times(observation, experiment.cell, experiment.training, products.astype(float)))
        for noise in noises:
            costs = np.asarray(grid(experiment, round_s[np.searchsorted(products, np.outer(STEPS, SIZES))], noise))
            steps, size, n = (int(i) for i in np.unravel_index(np.argmin(costs), costs.shape))
            found = design.best_training(
                observation,
                experiment.cell,
                experiment.training,
                experiment.estimates,
                PHI,
                gradient_noise=noise,
                max_local_steps=int(STEPS[-1]),
                max_batch_size=int(SIZES[-1]),
            )
            paper = costs[experiment.training.local_steps - 1, experiment.training.batch_size - 1].min()
            rows.append(
                {
                    "round": index,
                    "gradient_noise": noise,
                    "devices": int(found.num_scheduled),
                    "local_steps": int(found.local_steps),
                    "batch_size": int(found.batch_size),
                    "bound": float(found.bound),
                    "grid_devices": n + 1,
                    "grid_local_steps": int(STEPS[steps]),
                    "grid_batch_size": int(SIZES[size]),
                    "grid_bound": float(costs.min()),
                    "same": bool(np.isclose(float(found.bound), costs.min(), rtol=1e-9)),
                    "bound_of_the_papers_training": float(paper),
                }
            )
    return pd.DataFrame(rows)


@jax.jit
def times(observation, cell, training, products):
    """Returns the round times of the fastest sets of all sizes, for each number of samples per round."""
    usual = training.local_steps * training.batch_size

    def one(product):
        changed = dataclasses.replace(observation, compute_s=observation.compute_s * (product / usual))
        return fcjax.fastest_sets(changed, cell)[0]

    return jax.lax.map(one, products)


def grid(experiment: fcjax.Experiment, round_s: np.ndarray, noise: float) -> jax.Array:
    """Returns the relaxed bound of all local steps, batch sizes and numbers of devices."""
    training, estimates = experiment.training, experiment.estimates
    numbers = jnp.arange(1, round_s.shape[-1] + 1)

    def one(local_steps, batch_size, round_s):
        return bounds.convergence_bound(
            numbers,
            training.budget_s / round_s,
            rho=estimates.rho,
            beta=estimates.beta,
            delta=jnp.sqrt(jnp.asarray(estimates.delta) ** 2 + noise**2 / batch_size),
            num_samples=training.num_samples,
            learning_rate=training.learning_rate,
            local_steps=local_steps,
            phi=PHI,
        )

    each = jax.vmap(jax.vmap(one, (None, 0, 0)), (0, None, 0))
    return jax.jit(each)(jnp.asarray(STEPS, float), jnp.asarray(SIZES, float), round_s)


def write(table: pd.DataFrame, path: Path) -> None:
    path.write_text(table.to_csv(index=False, float_format="%.7g", lineterminator="\n"))


if __name__ == "__main__":
    main()
