"""The effect of settings that the paper does not state: Table III at R = 600 and 1000 m with other values.

Each line changes one setting of the preset and shows how far the table is then from the published one.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import pandas as pd
import table3
import xarray as xr
from reproduction import (
    PERCENT,
    POLICIES,
    Block,
    Study,
    distributions,
    main,
    means,
    plt,
    published,
    stated,
    summary,
    variants,
)

from fcjax import Experiment, Job, console, data, models


def _radio(experiment: Experiment, **changes: float) -> Experiment:
    return dataclasses.replace(experiment, cell=dataclasses.replace(experiment.cell, **changes))


def _inputs(experiment: Experiment, mean: float, std: float) -> Experiment:
    shape, num_labels = experiment.test_x.shape[1:], int(experiment.test_y.max()) + 1
    return dataclasses.replace(experiment, model=models.mlp(shape, num_labels, hidden=(64,), mean=mean, std=std))


def _momentum(experiment: Experiment, momentum: float) -> Experiment:
    return dataclasses.replace(experiment, training=dataclasses.replace(experiment.training, momentum=momentum))


def _labels(experiment: Experiment, step: Callable[[int, int], int]) -> Experiment:
    """Deals the same samples again: device i gets label i, modulo the number of labels, and others in steps from it."""
    local = experiment.data
    held = np.concatenate([row[:size] for row, size in zip(local.indices, local.sizes, strict=True)])
    labels = np.asarray(local.y)[held]
    num_labels = int(labels.max()) + 1
    per_device = np.unique(labels[: local.sizes[0]]).size
    if per_device in (1, num_labels):
        return experiment  # there is only one way
    shard_size = local.sizes[0] // per_device
    pools = [list(held[labels == label].reshape(-1, shard_size)) for label in range(num_labels)]
    strides = step(num_labels, per_device) * np.arange(per_device)
    rows = [
        np.concatenate([pools[(device + s) % num_labels].pop() for s in strides]) for device in range(len(local.sizes))
    ]
    shuffled = np.random.default_rng(0).permuted(np.stack(rows), axis=1)
    return dataclasses.replace(experiment, data=local._replace(indices=shuffled.astype(np.int32)))


WAYS = {
    "as the preset": lambda e: e,
    "path loss d^-3.76, d in m": lambda e: _radio(e, reference_gain=1e3**-3.76),
    "Rayleigh fading": lambda e: _radio(e, scatter=1.0),
    "pixels from 0 to 1": lambda e: _inputs(e, 0.0, 1.0),
    "pixels from -1 to 1": lambda e: _inputs(e, 0.5, 0.5),
    "momentum 0.5": lambda e: _momentum(e, 0.5),
    "no momentum": lambda e: _momentum(e, 0.0),
    "a device has labels that follow each other": lambda e: _labels(e, lambda num_labels, per_device: 1),
    "a device has labels far apart": lambda e: _labels(e, lambda num_labels, per_device: num_labels // per_device),
}
RADII_M = (600.0, 1000.0)


def plan(loaded: data.Dataset, seeds: int) -> list[Job]:
    # On CIFAR-10 this is what the preset does.
    ways = {way: change for way, change in WAYS.items() if (loaded.name, way) != ("cifar10", "pixels from -1 to 1")}
    return variants(loaded, ways, POLICIES, seeds, radius_m=RADII_M)


def evaluate(results: xr.Dataset) -> pd.DataFrame:
    """Returns one row per way: differences in points, overall and by distribution, and round times."""
    rows = []
    by_way = summary(results).groupby("preset", sort=False)
    for way, runs in by_way:
        cells = table3.beside_published(means(runs, table3.CELL, (PERCENT, "mean_round_s")))
        apart = cells.difference.abs()
        row = {"dataset": cells.dataset[0], "way": way, "seeds": int(cells.seeds[0]), "mean_difference": apart.mean()}
        row |= {f"mean_difference_{d}": apart[cells.distribution == d].mean() for d in cells.distribution.unique()}
        row |= {"mean_difference_with_sign": cells.difference.mean(), "largest_difference": apart.max()}
        at = cells.set_index(["policy", "radius_m", "distribution"])
        uneven = cells.distribution[0]
        row |= {"pf_round_s": at.mean_round_s["pf", 600, uneven], "rd_1000_percent": at[PERCENT]["rd", 1000, uneven]}
        rows.append(row)
    return pd.DataFrame(rows)


def show(rows: pd.DataFrame) -> list[Block]:
    numbers = [name for name in rows if name not in ("dataset", "way", "seeds")]
    lines = [["way", *(name.replace("_", " ") for name in numbers)]]
    lines += [[r.way, *(f"{r[name]:.2f}" for name in numbers)] for _, r in rows.iterrows()]
    dataset = rows.dataset[0]
    setting = {"dataset": dataset, "policy": "rd", "radius_m": 1000, "distribution": distributions(dataset)[0]}
    cell = next(c for c in published()["table3"] if setting.items() <= c.items())
    pf_round_s = stated("Fig. 5b text", "pf")["mean_round_s"] if dataset == "mnist" else ""
    lines.append(["published", *[""] * (len(numbers) - 2), str(pf_round_s), str(cell[PERCENT])])
    return [lines]


def draw(results: xr.Dataset, rows: pd.DataFrame) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    at = np.arange(len(rows))
    axes.barh(at, rows.mean_difference, color="#0072B2")
    for y, difference in zip(at, rows.mean_difference, strict=True):
        axes.text(difference, y, f" {difference:.2f}", va="center")
    axes.set_yticks(at, rows.way)
    axes.invert_yaxis()
    axes.set_xlabel("mean absolute difference to the published cells (points)")
    axes.set_title(f"{rows.dataset[0]}, R = 600 and 1000 m, {rows.seeds[0]} seeds")
    return figure


STUDY = Study("recovered_settings", __doc__, plan, evaluate, show, draw)

if __name__ == "__main__":
    console.leave(main(STUDY))
