"""What the paper leaves open about FC: how estimates are taken, and how w~ is chosen.

The paper states 6.26 scheduled devices in rounds of 0.62 s for MNIST with l = 1, and that w~ is mostly more accurate
than w_k. With Alg. 3 as published, FC schedules fewer devices, and w~ is better in at most half of the rounds. This
study runs FC with estimates taken in other ways. It also chooses w~ by three losses: the one that the scheduled devices
report, as published; the one on the test set, which has all labels; and the latter without the delay of one round.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pandas as pd
import xarray as xr
from reproduction import (
    PERCENT,
    Block,
    Study,
    colours,
    distributions,
    main,
    mean_text,
    means,
    plt,
    stated,
    summary,
    variants,
)

from fcjax import Estimates, Experiment, Job, Policy, console, data, policies


def _starting_at(experiment: Experiment, *values: float) -> Experiment:
    num_devices = len(experiment.data.sizes)
    start = Estimates(*(np.full(num_devices, value, np.float32) for value in values))
    return dataclasses.replace(experiment, estimates=start)


def corrected() -> Policy:
    """FC with delta corrected to distances from the mean of all M devices instead of the n scheduled ones.

    The mean of n gradients depends on each of them: squared distances from it are 1 - 1/n of the gradients' variance,
    but 1 - 1/M from the mean of all. A device's delta dates from its last schedule, so the state holds n for each.
    """
    fc = policies.fast_converge(0.05)

    def init(cell):
        return fc.init(cell), jnp.full(len(cell.power_w), float(len(cell.power_w)))  # initial values are not corrected

    def select(key, state, context):
        phi, n = state
        # For a single device, delta is 0 and stays 0.
        factor = jnp.where(n > 1, jnp.sqrt((1 - 1 / n.size) / (1 - 1 / jnp.maximum(n, 2))), 1)
        estimates = dataclasses.replace(context.estimates, delta=context.estimates.delta * factor)
        phi, decision = fc.select(key, phi, dataclasses.replace(context, estimates=estimates))
        return (phi, jnp.where(decision.scheduled, jnp.sum(decision.scheduled), n)), decision

    return Policy(init, select)


# The change that each makes to the experiment.
WAYS = {
    "as the preset": lambda e: e,
    "estimates on all local data": lambda e: dataclasses.replace(e, estimate_on="local"),
    "delta of mini-batch gradients": lambda e: dataclasses.replace(e, divergence_of="gradient"),
    "delta of local gradients": lambda e: dataclasses.replace(e, divergence_of="gradient", estimate_on="local"),
    "delta starts at 10": lambda e: _starting_at(e, 1.5, 12.0, 10.0),
    "delta beside the mean of all": lambda e: e,
    "the same, starting at 10": lambda e: _starting_at(e, 1.5, 12.0, 10.0),
    "plain SGD": lambda e: dataclasses.replace(e, training=dataclasses.replace(e.training, momentum=0.0)),
}
WITH_ALL = ("delta beside the mean of all", "the same, starting at 10")  # these use `corrected`
CHOICES = ("reported", "test set", "test set, at once")


def plan(loaded: data.Dataset, seeds: int) -> list[Job]:
    usual = variants(loaded, {way: WAYS[way] for way in WAYS if way not in WITH_ALL}, "fc", seeds)
    return usual + variants(loaded, {way: WAYS[way] for way in WITH_ALL}, {"fc": corrected()}, seeds)


def tilde_accuracy(results: xr.Dataset, choice: str) -> np.ndarray:
    """Returns the accuracy of w~ after every round of every run, (run, round), for a way of choosing it."""
    if choice == "reported":
        return results.tilde_accuracy.values
    loss = np.concatenate([results.start_loss.values[:, None], results.loss.values], axis=1)
    accuracy = np.concatenate([results.start_accuracy.values[:, None], results.accuracy.values], axis=1)
    filled = np.where(np.isnan(loss), np.inf, loss)
    least = np.minimum.accumulate(filled, axis=1)
    best = np.maximum.accumulate(np.where(filled == least, np.arange(loss.shape[1]), 0), axis=1)
    chosen = np.take_along_axis(accuracy, best, axis=1)
    chosen = chosen[:, 1:] if choice.endswith("at once") else chosen[:, :-1]
    return np.where(np.isnan(results.accuracy.values), np.nan, chosen)


def evaluate(results: xr.Dataset) -> pd.DataFrame:
    runs = summary(results).rename(columns={"preset": "way"})
    happened = results.accuracy.notnull().values
    for name in ("rho", "beta", "delta"):
        runs[name] = results[name].mean("round").values
    accuracy = results.accuracy.values
    last = results.rounds.values - 1
    for choice in CHOICES:
        tilde = tilde_accuracy(results, choice)
        better, worse = tilde > accuracy, tilde < accuracy
        runs[f"better ({choice})"] = 100 * np.sum(better & happened, 1) / happened.sum(1)
        runs[f"worse ({choice})"] = 100 * np.sum(worse & happened, 1) / happened.sum(1)
        runs[f"final ({choice})"] = 100 * np.take_along_axis(tilde, last[:, None], axis=1)[:, 0]
    columns = (PERCENT, "mean_scheduled", "mean_round_s", "rho", "beta", "delta")
    further = tuple(f"{what} ({choice})" for choice in CHOICES for what in ("better", "worse", "final"))
    return means(runs, ("dataset", "distribution", "way"), columns + further)


def show(rows: pd.DataFrame) -> list[Block]:
    lines = [["distribution", "way", "scheduled", "round (s)", "best accuracy (%)", "rho", "beta", "delta"]]
    for _, r in rows.iterrows():
        figures = (mean_text(r, "mean_scheduled", 2), mean_text(r, "mean_round_s", 3), mean_text(r, PERCENT, 2))
        lines.append([r.distribution, r.way, *figures, *(f"{r[name]:.3g}" for name in ("rho", "beta", "delta"))])
    chosen = [["distribution", "w~ by which loss", "rounds better (%)", "worse (%)", "at the end (%)"]]
    for _, r in rows[rows.way == "as the preset"].iterrows():
        for choice in CHOICES:
            figures = (mean_text(r, f"{what} ({choice})") for what in ("better", "worse", "final"))
            chosen.append([r.distribution, choice, *figures])
    return [lines, "The accuracy of w~ beside that of w_k, as the preset has it:", chosen]


def draw(results: xr.Dataset, rows: pd.DataFrame) -> plt.Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    ways = list(WAYS)
    names = distributions(rows.dataset[0])
    for shift, (name, colour) in enumerate(colours(names).items()):
        here = rows[rows.distribution == name].set_index("way").loc[ways]
        at = np.arange(len(ways)) + 0.25 * (shift - 1)
        left.barh(at, here.mean_scheduled, 0.22, xerr=here.mean_scheduled_half, color=colour, label=name, capsize=2)
        first = here.loc["as the preset"]
        at = np.arange(len(CHOICES)) + 0.25 * (shift - 1)
        right.barh(at, [first[f"better ({c})"] for c in CHOICES], 0.22, color=colour)
    left.set_yticks(range(len(ways)), ways)
    left.invert_yaxis()
    text = stated("Fig. 5b text")
    if text["dataset"] == rows.dataset[0]:
        left.axvline(text["mean_scheduled"], color="k", ls="--", lw=1, label=f"published, {text['distribution']}")
    left.set_xlabel("mean number of scheduled devices")
    right.set_yticks(range(len(CHOICES)), CHOICES)
    right.invert_yaxis()
    right.axvline(50, color="k", ls=":", lw=1)
    right.set(xlabel=r"rounds in which $\tilde w$ beats $w_k$ (%)", xlim=(0, 100), title=r"$\tilde w$ by which loss")
    left.set_title(f"{rows.dataset[0]}, R = 600 m")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


STUDY = Study("open_questions", __doc__, plan, evaluate, show, draw, traced=lambda job: True)

if __name__ == "__main__":
    console.leave(main(STUDY))
