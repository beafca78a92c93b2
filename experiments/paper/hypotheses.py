"""Hypotheses on the remaining differences to Table III, each with a prediction made before its runs.

Each changes one thing that the paper leaves open and runs the same seeds as the preset, so that changes are paired. A
hypothesis would be adopted if it came closer to the published cells on both data sets, beyond noise. Hypotheses on
local training run at R = 600 m under all policies; those on one policy run that policy at all radii.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import xarray as xr
from open_questions import corrected
from reproduction import PERCENT, POLICIES, RADII_M, Block, Study, distributions, main, plt, summary, variants
from table3 import CELL, beside_published
from verdicts import Range, mean_of, resampled

import fcjax
from fcjax import Decision, Experiment, Job, Policy, console, data, models, policies, round_time

PRESET = "preset"


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A change to the preset, and its predicted effect."""

    word: str  # on the command line
    name: str
    prediction: str
    column: str  # the figure that the prediction is about
    sign: int  # of its predicted change; 0 for one within `slack`
    of: tuple[str, ...] = POLICIES  # policies in the prediction
    at: tuple[str, ...] | None = None  # distributions in the prediction; None for all
    slack: float = 0.1
    change: Callable[[Experiment], Experiment] = lambda e: e
    policies: Mapping[str, Policy] | None = None  # replace the policies of the same names


def _computing_longer(experiment: Experiment, factor: float) -> Experiment:
    cell = experiment.cell
    slower = dataclasses.replace(
        cell, sample_floor_s=cell.sample_floor_s * factor, sample_rate_hz=cell.sample_rate_hz / factor
    )
    return dataclasses.replace(experiment, cell=slower)


def with_replacement(key, size, training):
    """Draws the samples of mini-batches independently."""
    return jax.random.randint(key, (training.local_steps, training.batch_size), 0, size, jnp.int32)


def decayed_sgd(training):
    """SGD with momentum and the weight decay that is common in PyTorch code."""
    return optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(training.learning_rate, training.momentum))


@functools.cache  # one object for all runs, so that they share a program
def _with_glorot(model: models.Model) -> models.Model:
    return model._replace(init=lambda key: jax.tree.map(_as_glorot, model.init(key)))


def _as_glorot(leaf):
    """Scales PyTorch's uniform weights to Glorot's limits, as in Keras; biases become 0."""
    if leaf.ndim < 2:
        return jnp.zeros_like(leaf)
    inputs, outputs = leaf.shape
    return leaf * np.sqrt(inputs) * np.sqrt(6 / (inputs + outputs))


def ordered_client_selection(threshold_s: float) -> Policy:
    """CS that adds devices in the order of their times with the whole bandwidth, until one would be late.

    With n devices, each has the share 1/n. The policy stops at the first n that makes any device late.
    """

    def select(key, threshold_s, context):
        observation, cell = context.observation, context.cell
        num_devices = observation.gain.size

        def times_s(share):
            rate = fcjax.radio.rate(jnp.full(num_devices, share), observation, cell)
            return observation.compute_s + cell.upload_bits / rate

        rank = jnp.argsort(jnp.argsort(times_s(1.0)))

        def in_time(n):
            return jnp.all((rank >= n) | (times_s(1 / n) <= threshold_s))

        possible = jax.vmap(in_time)(jnp.arange(1, num_devices + 1))
        n = jnp.maximum(jnp.sum(jnp.cumprod(possible)), 1)
        scheduled = rank < n
        share = jnp.where(scheduled, 1 / n, 0)
        return threshold_s, Decision(scheduled, share, round_time(scheduled, share, observation, cell))

    return Policy(lambda cell: jnp.asarray(threshold_s), select)


def reallocated_client_selection(threshold_s: float) -> Policy:
    """CS that chooses its set with equal shares, but then allocates optimal ones (Alg. 1)."""
    usual = policies.client_selection(threshold_s)

    def select(key, state, context):
        state, decision = usual.select(key, state, context)
        return state, fcjax.allocate(decision.scheduled, context.observation, context.cell)

    return Policy(usual.init, select)


def _both(make: Callable[[float], Policy]) -> dict[str, Policy]:
    return {"cs-l": make(0.4), "cs-h": make(1.5)}


ALL = (
    Hypothesis(
        "momentum",
        "momentum stays on a device between its rounds",
        "displacements and hence delta grow: FC schedules more devices",
        "mean_scheduled",
        +1,
        of=("fc",),
        change=lambda e: dataclasses.replace(e, keeps_optimizer=True),
    ),
    Hypothesis(
        "replacement",
        "mini-batches with replacement",
        "nothing changes: 640 of 3000 samples rarely repeat",
        PERCENT,
        0,
        at=("l2", "iid"),
        change=lambda e: dataclasses.replace(e, draw_batches=with_replacement),
    ),
    Hypothesis(
        "decay",
        "weight decay 5e-4",
        "too weak to matter within 150 rounds: nothing changes at iid",
        PERCENT,
        0,
        at=("iid",),
        change=lambda e: dataclasses.replace(e, make_optimizer=decayed_sgd),
    ),
    Hypothesis(
        "computation",
        "computation includes the pass for the estimates",
        "rounds take longer, and all accuracies fall",
        PERCENT,
        -1,
        change=lambda e: _computing_longer(e, 6 / 5),
    ),
    Hypothesis(
        "glorot",
        "Glorot's initial weights",
        "larger weights at the start learn faster: accuracy rises at iid",
        PERCENT,
        +1,
        at=("iid",),
        change=lambda e: dataclasses.replace(e, model=_with_glorot(e.model)),
    ),
    Hypothesis(
        "cs-order",
        "CS orders devices by time with the whole bandwidth",
        "nearly the order of the preset: cs-h changes little",
        PERCENT,
        0,
        of=("cs-h",),
        slack=0.2,
        policies=_both(ordered_client_selection),
    ),
    Hypothesis(
        "cs-shares",
        "CS chooses devices at equal shares, but they send with the best ones",
        "cs-h has rounds of about 1.2 s instead of 1.4 s at R = 600 m, and is more accurate by 0.2 to 0.6 points",
        PERCENT,
        +1,
        of=("cs-h",),
        policies=_both(reallocated_client_selection),
    ),
    Hypothesis(
        "delta",
        "delta beside the mean of all devices",
        "delta is larger: FC schedules more devices",
        "mean_scheduled",
        +1,
        of=("fc",),
        policies={"fc": corrected()},
    ),
)


def options(p: argparse.ArgumentParser) -> None:
    words = [hypothesis.word for hypothesis in ALL]
    p.add_argument("--only", nargs="+", choices=words, default=words, help="some of the hypotheses (default: all)")


def plan(loaded: data.Dataset, seeds: int, only: Sequence[str] | None = None) -> list[Job]:
    changed, unchanged = [], {}
    for hypothesis in ALL:
        if only is not None and hypothesis.word not in only:
            continue
        radii_m = 600.0 if hypothesis.policies is None else RADII_M
        ways = {hypothesis.name: hypothesis.change}
        changed += variants(loaded, ways, hypothesis.policies or POLICIES, seeds, radius_m=radii_m)
        usual = variants(loaded, {PRESET: lambda e: e}, tuple(hypothesis.policies or POLICIES), seeds, radius_m=radii_m)
        unchanged |= {str(job.labels): job for job in usual}
    return [*unchanged.values(), *changed]


def evaluate(results: xr.Dataset) -> pd.DataFrame:
    """Returns one row per hypothesis: the predicted figure, and the change of the differences to Table III."""
    runs = summary(results)
    dataset = runs.dataset[0]
    rows = []
    for hypothesis in ALL:
        new = runs[runs.preset == hypothesis.name].set_index([*CELL, "seed"])
        if new.empty:
            continue
        old = runs[runs.preset == PRESET].set_index([*CELL, "seed"]).loc[new.index]
        about = new.index.get_level_values("policy").isin(hypothesis.of)
        about &= new.index.get_level_values("distribution").isin(hypothesis.at or distributions(dataset))
        figures = {
            "hypothesis": hypothesis.name,
            "prediction": hypothesis.prediction,
            "figure": hypothesis.column,
            "seeds": new.index.get_level_values("seed").nunique(),
            "cells": len(new) // new.index.get_level_values("seed").nunique(),
            "before": old[hypothesis.column][about].mean(),
            "after": new[hypothesis.column][about].mean(),
        }
        change = _change(old[about], new[about], hypothesis.column)
        figures |= _as_columns("change", change) | {"holds": bool(_holds(hypothesis, change))}
        before, after, nearer = _nearer(old, new)
        figures |= {"apart_before": before, "apart_after": after} | _as_columns("apart_change", nearer)
        rows.append({"dataset": dataset} | figures)
    return pd.DataFrame(rows)


def _change(old: pd.DataFrame, new: pd.DataFrame, column: str) -> Range:
    """Returns the paired change, averaged over cells."""
    return mean_of((new[column] - old[column]).groupby("seed").mean())


def _holds(hypothesis: Hypothesis, change: Range) -> bool:
    if hypothesis.sign == 0:
        return -hypothesis.slack <= change.low and change.high <= hypothesis.slack
    return min(hypothesis.sign * change.low, hypothesis.sign * change.high) > 0


def _nearer(old: pd.DataFrame, new: pd.DataFrame) -> tuple[float, float, Range]:
    """Returns the mean absolute difference to the published cells before and after, and its bootstrapped change."""
    tables = [frame[PERCENT].unstack("seed").sort_index() for frame in (old, new)]
    printed = beside_published(tables[0].mean(axis=1).rename(PERCENT).reset_index()).published_percent.to_numpy()

    def apart(table: pd.DataFrame, seeds: np.ndarray) -> float:
        return float(np.abs(table.to_numpy()[:, seeds].mean(1) - printed).mean())

    every = np.arange(tables[0].shape[1])
    change = resampled(lambda seeds: apart(tables[1], seeds) - apart(tables[0], seeds), len(every))
    return apart(tables[0], every), apart(tables[1], every), change


def _as_columns(name: str, found: Range) -> dict[str, float]:
    return {name: found.estimate, f"{name}_low": found.low, f"{name}_high": found.high}


def show(rows: pd.DataFrame) -> list[Block]:
    head = ["hypothesis", "prediction", "figure", "before", "change (95%)", "prediction holds"]
    lines = [[*head, "mean |apart|, before", "its change (95%)"]]
    for _, r in rows.iterrows():
        change, nearer = (
            f"{r[name]:+.2f} ({r[name + '_low']:+.2f} to {r[name + '_high']:+.2f})"
            for name in ("change", "apart_change")
        )
        holds = "yes" if r.holds else "no"
        lines.append([r.hypothesis, r.prediction, r.figure.replace("_", " "), f"{r.before:.2f}", change, holds])
        lines[-1] += [f"{r.apart_before:.2f}", nearer]
    better = rows[rows.apart_change_high < 0].hypothesis
    text = f"{len(rows)} hypotheses at {rows.seeds[0]} seeds. Nearer to the published cells beyond noise: "
    return [lines, text + (", ".join(better) or "none") + "."]


def draw(results: xr.Dataset, rows: pd.DataFrame) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
    at = np.arange(len(rows))
    error = np.stack([rows.apart_change - rows.apart_change_low, rows.apart_change_high - rows.apart_change])
    axes.errorbar(rows.apart_change, at, xerr=error, fmt="o", ms=4, capsize=2, color="#0072B2")
    axes.axvline(0, color="k", lw=0.8)
    axes.set_yticks(at, rows.hypothesis)
    axes.invert_yaxis()
    axes.set_xscale("symlog", linthresh=0.2)
    axes.set_xlabel("further from the published cells on average (points, 95%)")
    axes.set_title(f"{rows.dataset[0]}, {rows.seeds[0]} seeds")
    return figure


STUDY = Study("hypotheses", __doc__, plan, evaluate, show, draw, options=options)

if __name__ == "__main__":
    console.leave(main(STUDY))
