"""Many runs: policies x distributions x radii x phi x budgets x numbers of devices x seeds, as one data set."""

import dataclasses
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from fcjax import checks, contract, data, policies, presets, results
from fcjax.archive import Archive
from fcjax.engine import Clock, execute, layout
from fcjax.experiment import Experiment, as_told, check, most_rounds
from fcjax.jobs import Job
from fcjax.processes import Does, Team
from fcjax.progress import Progress
from fcjax.shelf import Shelf
from fcjax.types import Policy

_MOST_SEEDS = 10**6
_AT_HAND = 64  # experiments that are kept in memory; others are made anew when their runs begin


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
    out: str | os.PathLike | None = None,
    workers: int | None = None,
    side_by_side: int | None = None,
    about: Mapping[str, Any] | None = None,
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
        `functools.partial` it takes further settings. It is called again for each run that begins, and must then give
        the same.
      keep: a folder where runs are kept as they finish. What it holds of this sweep already is not done again.
      out: a netCDF file for the results, which are then read from it when they are looked at: memory does not grow with
        the number of runs. Needs `keep`.
      workers: how many devices of this process take part; by default all, or all cores of a CPU.
      side_by_side: how many runs a device does at the same time; by default one on a CPU, 16 on an accelerator. Where
        there are fewer runs, places stay empty; where there is less memory, there are fewer places, or, with `keep`, an
        error that says how many there may be. The last bits of a result depend on it, as they do on the kind of device.
      about: further attributes of the results.
      progress: shows a bar with the remaining time.

    Returns:
      The histories, with dimensions run, round and device, and the settings as coordinates of run; see
      `fcjax.results`. After Ctrl-C the runs that were finished by then, if any. Where `jax.distributed` has joined
      several processes, each does a part of the runs, and all return all of them.
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
        progress=progress,
    )
    return run_all(jobs, keep=keep, out=out, workers=workers, side_by_side=side_by_side, about=about, progress=progress)


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
    progress: bool = False,
) -> list[Job]:
    """All runs of a sweep, checked, before any of them begins."""
    if isinstance(seeds, int | float | np.generic):
        seeds = range(checks.whole("the number of seeds", seeds, 1, _MOST_SEEDS))
    elif isinstance(seeds, Sized) and len(seeds) > _MOST_SEEDS:
        raise ValueError(f"there can be up to {_MOST_SEEDS} seeds, got {len(seeds)}")
    seeds = [checks.whole("seeds", seed, 0, 2**31 - 1) for seed in _several("seeds", seeds)]
    choices = [
        _several("distribution", distribution),
        [checks.scalar("radius_m", radius) for radius in _several("radius_m", radius_m)],
        [budget if budget is None else checks.scalar("budget_s", budget) for budget in _several("budget_s", budget_s)],
        [checks.whole("num_devices", number, 1) for number in _several("num_devices", num_devices)],
    ]
    named = _policies(policy, [checks.scalar("phi", value) for value in _several("phi", phi)])
    names = ("policy and phi", "distribution", "radius_m", "budget_s", "num_devices", "seeds")
    for name, values in zip(names, ([entry[:2] for entry in named], *choices, seeds), strict=True):
        if len(values) == 0:
            raise ValueError(f"{name} must have at least one value")
        # by text, because NaN does not equal itself
        if len({str(value) for value in values}) < len(values):
            raise ValueError(f"{name} has a value twice: {', '.join(map(str, values))}")
    loaded = data.load(dataset) if isinstance(dataset, str) else dataset
    if not isinstance(loaded, data.Dataset):
        raise ValueError(f"dataset must be a name or a fcjax.data.Dataset, got {type(loaded).__name__}")
    if not callable(preset):
        raise ValueError(f"preset must be a function that makes an Experiment, got {preset!r}")

    @functools.lru_cache(maxsize=_AT_HAND)
    def make(of_distribution: str, radius: float, budget: float | None, number: int, seed: int) -> Experiment:
        budgets = {} if budget is None else {"budget_s": budget}
        made = preset(loaded, distribution=of_distribution, num_devices=number, radius_m=radius, seed=seed, **budgets)
        if not isinstance(made, Experiment):
            raise ValueError(f"preset must return a fcjax.Experiment, got {type(made).__name__}")
        return check(made)

    settings = list(itertools.product(*choices))
    with Progress(len(settings) * len(named) * len(seeds), "runs", enabled=progress) as shown:
        shown.begin("checking", counts=False)
        return _checked_jobs(settings, named, seeds, loaded.name, make, shown)


def _checked_jobs(
    settings: Sequence[tuple],
    named: Sequence[tuple[str, float, Policy]],
    seeds: Sequence[int],
    dataset: str,
    make: Callable[..., Experiment],
    shown: Progress,
) -> list[Job]:
    jobs: list[Job] = []
    checked = set()
    for setting in settings:
        budgets_s = []
        for seed in seeds:
            experiment = make(*setting, seed)
            most_rounds(experiment)
            budgets_s.append(float(np.asarray(experiment.training.budget_s)))
            shown.update(len(jobs) + len(budgets_s), len(jobs) + len(budgets_s))
        of_distribution, radius, _, number = setting
        for name, phi_value, one in named:
            for seed, of_seed_s in zip(seeds, budgets_s, strict=True):
                labels = {
                    "dataset": dataset,
                    "policy": name,
                    "distribution": of_distribution,
                    "radius_m": radius,
                    "phi": phi_value,
                    "seed": seed,
                    "devices": number,
                    "budget_s": of_seed_s,
                }
                made = functools.partial(make, *setting, seed)
                jobs.append(Job(labels, one, _centralised(made) if policies.is_centralized(one) else made))
            experiment = jobs[-1].experiment
            if policies.is_built_in(one):
                one.init(experiment.cell)  # raises for what the cell does not have
            elif (place := (name, phi_value, *setting[1:])) not in checked:
                label = f"policy {name!r}"
                contract.check_policy(one, experiment.cell, as_told(experiment), name=label, ignores_labels=False)
                checked.add(place)
    return jobs


def run_all(
    jobs: Sequence[Job],
    *,
    keep: str | os.PathLike | None = None,
    out: str | os.PathLike | None = None,
    workers: int | None = None,
    side_by_side: int | None = None,
    about: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> xr.Dataset:
    """Does runs, but for those that have been kept, and returns all in their order; see `sweep`."""
    keep, out, about = _path("keep", keep), _path("out", out), _attributes(about)
    if out is not None and keep is None:
        raise ValueError("out needs keep, a folder of finished runs that it is put together from")
    if out is not None and not out.parent.is_dir():
        raise OSError(f"results cannot be written to {out}: there is no folder {out.parent}")
    workers, side_by_side = layout(workers, side_by_side)
    archive = None if keep is None else Archive(keep, side_by_side)
    clock = Clock()
    shelf = Shelf(archive, in_memory=out is None)
    with Team(keep) as team:
        if archive is not None and team.size > 1:
            team.begin(archive.digest(jobs))
        with Progress(len(jobs), "runs", enabled=progress) as shown:
            shown.begin("looking for kept", counts=False)
            for number, job in enumerate(jobs, 1):
                shelf.find(job)
                shown.update(number, number)
        num_kept = len(shelf)
        interrupted, together = False, None
        try:
            missing = [job for job in team.part(jobs) if job not in shelf]
            for job, run in execute(
                missing,
                clock=clock,
                workers=workers,
                side_by_side=side_by_side,
                may_reduce=archive is None,
                tick=team.check,
                progress=progress,
            ):
                shelf.put(job, run)
            team.tell(Does.WAIT)
            shelf.wait_for(jobs, team, progress)
        except KeyboardInterrupt:
            for job in jobs if team.size > 1 else []:
                shelf.find(job)
            if not len(shelf):
                raise
            interrupted = True
            where = "" if keep is None else f" in {keep}, and the same call goes on from there"
            warnings.warn(
                f"interrupted: {len(shelf)} of {len(jobs)} runs had finished and are kept{where}", stacklevel=2
            )
        done = [job for job in jobs if job in shelf]
        shelf.warn_of_faults(done)
        about = {"complete": int(not interrupted), "kept": num_kept, **dataclasses.asdict(clock), **about}
        if out is None or (interrupted and team.index > 0):
            together = results.to_dataset([shelf.get(job) for job in done], about)
        elif team.index == 0:
            blocks = (done[start : start + _AT_HAND] for start in range(0, len(done), _AT_HAND))
            parts = (results.to_dataset([shelf.get(job) for job in block], about, room=shelf.room) for block in blocks)
            try:
                results.save_parts(parts, out)
            except OSError as error:
                raise OSError(f"{error}; kept runs stay in {keep}, and the same call goes on from there") from error
        else:
            while not team.have_rested(0):  # the first writes the file for all
                team.pause()
        if not interrupted:
            team.rest()
    if together is None:
        assert out is not None
        return results.read(out)
    return together


def _policies(
    policy: str | Sequence[str] | Mapping[str, Policy], phis: Sequence[float]
) -> list[tuple[str, float, Policy]]:
    """Names, phi (NaN where the policy has none) and policies."""
    if isinstance(policy, Mapping):
        for name, one in policy.items():
            if not isinstance(one, Policy) or not all(map(callable, one)):
                raise ValueError(f"policy {name!r} must be a fcjax.Policy(init, select) of two functions, got {one!r}")
        return [(str(name), float("nan"), one) for name, one in policy.items()]
    if isinstance(policy, Policy) or any(isinstance(one, Policy) for one in _several("policy", policy)):
        raise ValueError("policy must be names, or policies by name, such as {'mine': policy}")
    named = []
    for name in _several("policy", policy):
        factory = policies.factory_by_name(name)
        if policies.takes_phi(factory):
            named += [(name, phi, policies.by_name(name, phi=phi)) for phi in phis]
        else:
            named.append((name, float("nan"), policies.by_name(name)))
    return named


def _path(name: str, value: str | os.PathLike | None) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or str(value) in ("", ".") or "\0" in str(value):
        raise ValueError(f"{name} must be the path of a folder or file of its own, got {value!r}")
    return Path(value).expanduser()


def _attributes(about: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those that a file can hold; ValueError for others, which would be told of when all runs have been done."""
    if about is not None and not isinstance(about, Mapping):
        raise ValueError(f"about must be a mapping of names to texts or numbers, got {about!r}")
    for name, value in (about or {}).items():
        if (
            not isinstance(name, str)
            or not isinstance(value, str | int | float | np.number)
            or value is True
            or value is False
        ):
            raise ValueError(f"about must be a mapping of names to texts or numbers, got {name!r}: {value!r}")
    return dict(about or {})


def _centralised(make: Callable[[], Experiment]) -> Callable[[], Experiment]:
    return lambda: presets.centralised(make())


def _several(name: str, value: Any) -> list:
    if value is None or isinstance(value, str | int | float | np.generic):
        return [value]
    try:
        return list(value)
    except TypeError as error:
        raise ValueError(f"{name} must be a value or a sequence of them, got {value!r}") from error
