"""Many runs: policies x distributions x radii x phi x budgets x numbers of devices x seeds, as one data set."""

import dataclasses
import itertools
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import xarray as xr

from fcjax import contract, data, policies, presets, results
from fcjax.archive import Archive
from fcjax.engine import Clock, Job, execute
from fcjax.experiment import Experiment, check, most_rounds
from fcjax.rounds import Stop
from fcjax.types import Policy


def sweep(
    policy: str | Sequence[str] | Mapping[str, Policy] = "fc",
    *,
    dataset: str | data.Dataset = "mnist",
    distribution: str | Sequence[str] = "l1",
    radius_m: float | Sequence[float] = 600.0,
    phi: float | Sequence[float] = 0.05,
    budget_s: float | Sequence[float] | None = None,
    num_devices: int | Sequence[int] = 20,
    seeds: int | Iterable[int] = 5,
    preset: Callable[..., Experiment] = presets.shi2020,
    keep: str | os.PathLike | None = None,
    progress: bool = False,
) -> xr.Dataset:
    """Runs every combination of what is given and returns all histories as one labelled data set.

    Args:
      policy: names as `fcjax.policies.by_name` reads them, or a mapping of names to policies.
      dataset: a name that `fcjax.data.load` reads, or a data set.
      distribution: of the data among devices: "iid", "l1", "l2", ..., "dir0.1", ...
      radius_m: of the cell.
      phi: for the policies that have it; the others run once.
      budget_s: by default what the preset has.
      num_devices: M.
      seeds: how many, counted from 0, or which.
      preset: makes an experiment of dataset, distribution, num_devices, radius_m, budget_s and seed. With
        `functools.partial` it takes further settings.
      keep: a folder where runs are kept as they finish. What it holds of this sweep already is not done again.
      progress: shows a bar with the remaining time.

    Returns:
      The histories, with dimensions run, round and device, and the settings as coordinates of run; see
      `fcjax.results`. After Ctrl-C the runs that were finished by then, if any.
    """
    jobs = plan(
        policy,
        dataset=dataset,
        distribution=distribution,
        radius_m=radius_m,
        phi=phi,
        budget_s=budget_s,
        num_devices=num_devices,
        seeds=seeds,
        preset=preset,
    )
    return run_all(jobs, keep=keep, progress=progress)


def plan(
    policy: str | Sequence[str] | Mapping[str, Policy],
    *,
    dataset: str | data.Dataset,
    distribution: str | Sequence[str],
    radius_m: float | Sequence[float],
    phi: float | Sequence[float],
    budget_s: float | Sequence[float] | None,
    num_devices: int | Sequence[int],
    seeds: int | Iterable[int],
    preset: Callable[..., Experiment],
) -> list[Job]:
    """All runs of a sweep, checked, before any of them begins."""
    chosen: Iterable[int] = range(int(seeds)) if isinstance(seeds, int | Integral) else seeds
    seeds = [operator.index(seed) for seed in chosen]
    for seed in seeds:
        if not 0 <= seed < 2**31:
            raise ValueError(f"seeds must be 0 or more and below 2^31, got {seed}")
    budgets = [budget if budget is None else float(budget) for budget in _several(budget_s)]
    choices = [
        _several(distribution),
        [float(radius) for radius in _several(radius_m)],
        budgets,
        [_whole("num_devices", number) for number in _several(num_devices)],
    ]
    named = _policies(policy, _several(phi))
    names = ("policy and phi", "distribution", "radius_m", "budget_s", "num_devices", "seeds")
    for name, values in zip(names, ([entry[:2] for entry in named], *choices, seeds), strict=True):
        if len(values) == 0:
            raise ValueError(f"{name} must have at least one value")
        # by text, because NaN does not equal itself
        if len({str(value) for value in values}) < len(values):
            raise ValueError(f"{name} has a value twice: {', '.join(map(str, values))}")
    loaded = data.load(dataset) if isinstance(dataset, str) else dataset
    jobs, checked = [], set()
    for of_distribution, radius, budget, number in itertools.product(*choices):
        experiments = [
            preset(
                loaded,
                distribution=of_distribution,
                num_devices=number,
                radius_m=radius,
                seed=seed,
                **({} if budget is None else {"budget_s": budget}),
            )
            for seed in seeds
        ]
        for experiment in experiments:
            check(experiment)
            most_rounds(experiment)
        for name, phi_value, one in named:
            for seed, experiment in zip(seeds, experiments, strict=True):
                labels = {
                    "dataset": loaded.name,
                    "policy": name,
                    "distribution": of_distribution,
                    "radius_m": radius,
                    "phi": phi_value,
                    "seed": seed,
                    "devices": number,
                    "budget_s": float(np.asarray(experiment.training.budget_s)),
                }
                if policies.is_centralized(one):
                    experiment = presets.centralised(experiment)
                jobs.append(Job(labels, one, experiment))
            if policies.is_built_in(one):
                one.init(experiment.cell)  # raises for what the cell does not have
            elif (setting := (name, phi_value, radius, budget, number)) not in checked:
                label = f"policy {name!r}"
                contract.check_policy(one, experiment.cell, experiment.training, name=label, ignores_labels=False)
                checked.add(setting)
    return jobs


def run_all(jobs: Sequence[Job], *, keep: str | os.PathLike | None = None, progress: bool = False) -> xr.Dataset:
    """Does runs, but for those that have been kept, and returns all in their order; see `sweep`."""
    by_labels = {id(job.labels): job for job in jobs}
    archive = None if keep is None else Archive(keep)
    finished: list[results.Finished] = []
    if archive is not None:
        finished += [run for job in jobs if (run := archive.load(job)) is not None]
    known = {id(run.labels) for run in finished}
    clock = Clock()
    interrupted = False
    try:
        missing = [job for job in jobs if id(job.labels) not in known]
        for run in execute(missing, clock=clock, progress=progress):
            finished.append(run)
            if archive is not None:
                archive.save(by_labels[id(run.labels)], run)
    except KeyboardInterrupt:
        if not finished:
            raise
        interrupted = True
        warnings.warn(f"interrupted: {len(finished)} of {len(jobs)} runs had finished and are kept", stacklevel=2)
    order = {labels: index for index, labels in enumerate(by_labels)}
    finished.sort(key=lambda run: order[id(run.labels)])
    for fault, found in (
        ("were ended by an impossible decision of their policy", [r for r in finished if r.stop == Stop.BAD_DECISION]),
        ("had no round that ended within the budget", [r for r in finished if not r.history.round_s.size]),
    ):
        if found:
            warnings.warn(f"{len(found)} of {len(finished)} runs {fault}, the first: {found[0].labels}", stacklevel=2)
    about = {"complete": int(not interrupted), "kept": len(known), **dataclasses.asdict(clock)}
    return results.to_dataset(finished, about)


def _policies(
    policy: str | Sequence[str] | Mapping[str, Policy], phis: Sequence[float]
) -> list[tuple[str, float, Policy]]:
    """Names, phi (NaN where the policy has none) and policies."""
    if isinstance(policy, Mapping):
        for name, one in policy.items():
            if not isinstance(one, Policy):
                raise ValueError(f"policy {name!r} must be a fcjax.Policy(init, select), got {one!r}")
        return [(str(name), float("nan"), one) for name, one in policy.items()]
    if isinstance(policy, Policy) or any(isinstance(one, Policy) for one in _several(policy)):
        raise ValueError("policy must be names, or policies by name, such as {'mine': policy}")
    named = []
    for name in _several(policy):
        factory = policies.factory_by_name(name)
        if policies.takes_phi(factory):
            named += [(name, float(phi), policies.by_name(name, phi=phi)) for phi in phis]
        else:
            named.append((name, float("nan"), policies.by_name(name)))
    return named


def _whole(name: str, value: Any) -> int:
    if int(value) != value:
        raise ValueError(f"{name} must be a whole number, got {value}")
    return int(value)


def _several(value: Any) -> list:
    return [value] if value is None or isinstance(value, str | int | float | np.generic) else list(value)
