"""Metrics of runs, and comparisons of policies.

A metric takes the results of `fcjax.sweep` and returns an `xarray.DataArray` with one value per run, or per run and
device, that keeps the coordinates of `run`. Policies meet the same channels, data and mini-batches under the same seed,
so `paired` compares them seed by seed:

    fcjax.metrics.area_under_curve(results).groupby("policy").mean()
    fcjax.metrics.paired(results, "fc", "rd", "best_accuracy")
    fcjax.metrics.paired(results, "fc", "rd", "time_to_accuracy", accuracy=0.8, censored="budget")

A run that never reaches an accuracy is censored. Its time and its energy to that accuracy are infinite by default: this
suits medians and counts. Means need finite values: with censored="budget", such a run counts with the whole budget,
which makes the mean time the restricted mean of survival analysis. Its energy counts until the end of the run. A policy
that spends little and never reaches the accuracy then looks good: read that mean beside the fraction of runs that do.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec

import jax
import numpy as np
import pandas as pd
import xarray as xr
from jax import Array

from fcjax import checks, policies
from fcjax.simulation.experiment import Experiment, training_of
from fcjax.sweeps.comparisons import Comparison, Measure, compare, compare_all, holm, interval
from fcjax.sweeps.jobs import Job
from fcjax.sweeps.results import checked
from fcjax.types import Cell, Estimates, Observation, RoundContext, Training

__all__ = [
    "Comparison",
    "area_under_curve",
    "best_accuracy",
    "energy",
    "energy_to_accuracy",
    "final_accuracy",
    "holm",
    "interval",
    "jain_index",
    "mean_age",
    "optimality_gap",
    "paired",
    "paired_table",
    "participation",
    "peak_age",
    "time_to_accuracy",
]
_AT_A_TIME = 64  # runs; keeps little of a lazy data set in memory
_METRICS: dict[str, Callable[..., xr.DataArray]] = {}
_P = ParamSpec("_P")
_Metric = Callable[Concatenate[xr.Dataset, _P], xr.DataArray]
Censored = Literal["inf", "budget"]


def _metric(unit: str) -> Callable[[_Metric[_P]], _Metric[_P]]:
    """Lets a metric of a few runs take any results, gives its values a name and a unit, and lists it by name."""

    def decorate(function: _Metric[_P]) -> _Metric[_P]:
        @functools.wraps(function)
        def measure(results: xr.Dataset, *args: _P.args, **kwargs: _P.kwargs) -> xr.DataArray:
            results = checked(results)
            starts = range(0, results.sizes["run"], _AT_A_TIME)
            parts = (results.isel(run=slice(start, start + _AT_A_TIME)) for start in starts)
            values = xr.concat([function(part, *args, **kwargs).transpose("run", ...) for part in parts], "run")
            values.attrs = {"units": unit}
            return values.rename(function.__name__)

        _METRICS[function.__name__] = measure
        return measure

    return decorate


@_metric("1")
def best_accuracy(results: xr.Dataset) -> xr.DataArray:
    """The best test accuracy after a round, or that of w_0 if there is no round; (run,)."""
    return xr.where(results.rounds > 0, results.accuracy.max("round"), results.start_accuracy)


@_metric("1")
def final_accuracy(results: xr.Dataset) -> xr.DataArray:
    """The test accuracy after the last round, or that of w_0 if there is no round; (run,)."""
    last = results.accuracy.isel(round=(results.rounds - 1).clip(min=0)).drop_vars("round", errors="ignore")
    return xr.where(results.rounds > 0, last, results.start_accuracy)


@_metric("1")
def area_under_curve(results: xr.Dataset) -> xr.DataArray:
    """The mean over simulated time, from 0 to the budget, of the test accuracy of the current model; (run,).

    The model changes when a round ends. The last one stays until the budget is spent.
    """
    accuracy = results.accuracy.astype(float)
    gained = accuracy - accuracy.shift(round=1).fillna(results.start_accuracy)
    remaining = 1 - results.elapsed_s / results.budget_s  # the fraction of the budget after the round
    return results.start_accuracy + (gained * remaining).sum("round")


@_metric("s")
def time_to_accuracy(results: xr.Dataset, accuracy: float, *, censored: Censored = "inf") -> xr.DataArray:
    """The simulated time until a round first ends with at least this test accuracy, 0 if w_0 has it; (run,) s.

    Args:
      results: the results of a sweep.
      accuracy: a fraction between 0 and 1.
      censored: what counts for a run that never reaches it: "inf", or "budget" for the time budget.
    """
    time_s = _reached_s(results, accuracy)
    return time_s.where(np.isfinite(time_s), results.budget_s if _restricts(censored) else np.inf)


@_metric("J")
def energy_to_accuracy(results: xr.Dataset, accuracy: float, *, censored: Censored = "inf") -> xr.DataArray:
    """The energy that all devices spend until a round first ends with at least this accuracy; (run,) J.

    Args:
      results: the results of a sweep.
      accuracy: a fraction between 0 and 1.
      censored: what counts for a run that never reaches it: "inf", or "budget" for all that it spent in its budget.
    """
    time_s = _reached_s(results, accuracy)
    spent_j = _energy_j(results).sum("device", min_count=1)
    until_j = spent_j.where(results.elapsed_s <= time_s).sum("round", min_count=1)
    until_j = until_j.where((time_s > 0) & (results.rounds > 0), 0.0)
    return until_j if _restricts(censored) else until_j.where(np.isfinite(time_s), np.inf)


@_metric("1")
def participation(results: xr.Dataset) -> xr.DataArray:
    """The number of rounds in which a device was scheduled, NaN where a run has no such device; (run, device)."""
    return results.scheduled.sum("round").where(_has_device(results))


@_metric("1")
def jain_index(results: xr.Dataset) -> xr.DataArray:
    """Jain's index of fairness of the participation x of M devices: (sum x)^2 / (M sum x^2), from 1/M to 1; (run,).

    It is NaN if no device was ever scheduled. Jain, Chiu and Hawe, "A quantitative measure of fairness and
    discrimination for resource allocation in shared computer systems", DEC-TR-301, 1984.
    """
    times = participation(results)
    squares = (times**2).sum("device")
    return times.sum("device") ** 2 / (times.count("device") * squares.where(squares > 0))


@_metric("1")
def mean_age(results: xr.Dataset) -> xr.DataArray:
    """The mean over rounds and devices of the age of a device, NaN if there is no round; (run,).

    The age at the end of a round is the number of rounds since the base station last received the device's update: 0 if
    it did in this round. Before the first update, the age counts from the start of the run.
    """
    return _age(results).mean(("round", "device"))


@_metric("1")
def peak_age(results: xr.Dataset) -> xr.DataArray:
    """The largest age of any device in any round, NaN if there is no round; see `mean_age`; (run,)."""
    return _age(results).max(("round", "device"))


@_metric("J")
def energy(results: xr.Dataset) -> xr.DataArray:
    """The energy that a device spent in the run, NaN where a run has no such device; (run, device) J."""
    energy_j = _energy_j(results).sum("round", min_count=1)
    return energy_j.where(results.rounds > 0, 0.0).where(_has_device(results))


def optimality_gap(results: xr.Dataset, jobs: Sequence[Job], phi: float = 0.05) -> xr.DataArray:
    """The objective of P4 for the devices of each round over its least value, NaN if nobody took part; (run, round).

    See `fcjax.policies.optimality_gap`. It uses the true channels and computation times, and the estimates before the
    round.

    Args:
      results: the results of `fcjax.run_all`.
      jobs: its runs, from `fcjax.plan`, in the same order.
      phi: the parameter of the objective.
    """
    results = checked(results)
    if len(jobs) != results.sizes["run"]:
        raise ValueError(f"jobs must be the runs of the results, {results.sizes['run']} of them, got {len(jobs)}")
    for name in ("policy", "distribution", "seed"):
        if [job.labels[name] for job in jobs] != results[name].values.tolist():
            raise ValueError(f"jobs must be in the order of the results: their {name} differs")
    phi = checks.scalar("phi", phi, checks.positive)
    gaps = [_gaps(results.isel(run=number), job.experiment, phi) for number, job in enumerate(jobs)]
    coordinates = {name: label for name, label in results.coords.items() if "device" not in label.dims}
    return xr.DataArray(np.stack(gaps), coordinates, ("run", "round"), "optimality_gap", {"units": "1"})


def _gaps(run: xr.Dataset, experiment: Experiment, phi: float) -> np.ndarray:
    """Returns the gap of every round of a run, (round,)."""
    num_devices = checks.num_devices(experiment.cell)
    happened = run.round_s.notnull().values
    of = lambda name: run[name].values[:, :num_devices]  # noqa: E731
    first = experiment.estimates
    before = [np.vstack([np.asarray(getattr(first, name))[None], of(name)[:-1]]) for name in ("rho", "beta", "delta")]
    rows: Any = (of("scheduled"), run.round_s.values, of("gain"), of("compute_s"), of("available"), *before)
    # Rounds that did not take place are NaN: the first round stands in for them.
    rows = [np.where(happened.reshape(-1, *[1] * (row.ndim - 1)), row, row[:1]) for row in rows]
    found = _all_gaps(rows, experiment.cell, training_of(experiment), phi) if happened.any() else np.nan
    return np.where(happened, found, np.nan)


@jax.jit
def _all_gaps(rows: Any, cell: Cell, training: Training, phi: float) -> Array:
    def one(scheduled, round_s, gain, compute_s, available, *estimates):
        observation = Observation(gain, compute_s, available)
        context = RoundContext(observation, Estimates(*estimates), cell, training, 0.0, 0)
        return policies.optimality_gap(scheduled, round_s, context, phi)

    return jax.vmap(one)(*rows)


def _reached_s(results: xr.Dataset, accuracy: float) -> xr.DataArray:
    """Returns when each run first has an accuracy, inf if it never has."""
    accuracy = checks.scalar("accuracy", accuracy, checks.fraction)
    after, before = results.accuracy, results.start_accuracy
    # In the type of the results, where 0.9 is the accuracy of a model that is right in 90 of 100 cases.
    time_s = results.elapsed_s.where(after >= after.dtype.type(accuracy)).min("round").fillna(np.inf)
    return time_s.where(~(before >= before.dtype.type(accuracy)), 0.0)


def _restricts(censored: str) -> bool:
    if censored not in ("inf", "budget"):
        raise ValueError(f"censored must be 'inf' or 'budget', got {censored!r}")
    return censored == "budget"


def _energy_j(results: xr.Dataset) -> xr.DataArray:
    if "energy_j" not in results:
        raise ValueError("these results have no energy_j: an older version wrote them; run the sweep again")
    return results.energy_j


def _has_device(results: xr.Dataset) -> xr.DataArray:
    """Returns whether a run has a device; (run, device). Estimates are finite in all rounds of all devices."""
    return results.rho.notnull().any("round") | ((results.rounds == 0) & (results.device < results.devices))


def _age(results: xr.Dataset) -> xr.DataArray:
    """Returns the age at the end of each round; (run, round, device)."""
    number = xr.DataArray(np.arange(1, results.sizes["round"] + 1), dims="round")
    received = results.received if "received" in results else results.scheduled  # older versions lost no update
    last = xr.where(received, number, 0)
    last = last.copy(data=np.maximum.accumulate(last.values, axis=last.get_axis_num("round")))
    return (number - last).where(results.rho.notnull())


def paired(
    results: xr.Dataset, a: str, b: str, metric: str | Callable[..., xr.DataArray], **arguments: Any
) -> Comparison:
    """Compares two policies over their common seeds, in results with one setting; `paired_table` takes several.

    Args:
      results: the results of a sweep.
      a: a value of the coordinate `policy`, or a name such as "fc(phi=0.5)" if it has several phi.
      b: another one.
      metric: the name of a function of this module, or a function of results, with one value per run.
      arguments: further arguments of the metric, such as accuracy=0.8.

    Returns:
      The mean of a - b, its 95% interval, the probability that it is positive, and whether its sign is known.
    """
    return compare(results, a, b, *_named(metric, arguments))


def paired_table(results: xr.Dataset, metric: str | Callable[..., xr.DataArray], **arguments: Any) -> pd.DataFrame:
    """Compares all pairs of policies in each setting, with one row per setting and pair.

    The columns are the settings that vary, and those of `Comparison`. `p_holm` is the p-value that Holm's method
    corrects for the number of rows. Unlike that of a single comparison, `verdict` follows from it: the chance that the
    table finds any difference where there is none is at most 5%. Pairs with fewer than 2 common seeds are left out.

    Args:
      results: the results of a sweep.
      metric: the name of a function of this module, or a function of results, with one value per run.
      arguments: further arguments of the metric, such as accuracy=0.8.
    """
    return compare_all(results, *_named(metric, arguments))


def _named(metric: str | Callable[..., xr.DataArray], arguments: dict[str, Any]) -> tuple[Measure, str]:
    """Returns a function of results, and its name."""
    if isinstance(metric, str) and metric not in _METRICS:
        raise ValueError(f"there is no metric {metric!r}: use {', '.join(_METRICS)} or a function")
    function = _METRICS[metric] if isinstance(metric, str) else metric
    needed = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty][1:]
    if isinstance(metric, str) and (missing := [name for name in needed if name not in arguments]):
        raise ValueError(f"{metric} needs {missing[0]}: give it too, as in paired(..., {metric!r}, {missing[0]}=0.8)")
    return functools.partial(function, **arguments), getattr(function, "__name__", "metric")
