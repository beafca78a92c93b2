"""The grid of a sweep: all combinations of axes, policies and seeds, checked before the first run.

An axis is a name and its values. A name with a dot is a leaf of the experiment, such as "cell.bandwidth_hz" or
"training.learning_rate". Any other name is an argument of the preset, such as "distribution" or "num_devices". Runs
that differ only in numbers share one compiled program.
"""

from __future__ import annotations  # short types in help()

import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import jax
import numpy as np

from fcjax import checks, data, policies, presets
from fcjax.policies import contract
from fcjax.runtime.plugins import of_user
from fcjax.runtime.progress import Progress
from fcjax.runtime.registry import not_taken, takes
from fcjax.simulation.experiment import Experiment, check, most_rounds, training_of
from fcjax.sweeps.jobs import Job
from fcjax.types import Cell, Estimates, Policy, Training

_MOST_SEEDS = 10**6
_AT_HAND = 64  # experiments in memory; others are made again when their runs begin
_BUILT_IN = ("distribution", "radius_m", "budget_s", "num_devices")  # arguments of every preset
_OF_PRESET = ("budget_s", "num_devices")  # None stands for the preset's own
_SAME = {"cell.radius_m": "radius_m", "training.budget_s": "budget_s"}
LEAVES = tuple(
    f"{part}.{field.name}"
    for part, kind in (("cell", Cell), ("training", Training), ("estimates", Estimates))
    for field in dataclasses.fields(kind)
    if (part, field.name) != ("training", "num_samples")  # follows from the data
)


def _unchanged(make: Callable[..., Experiment], *setting: Any) -> Experiment:
    return make(*setting)


def _centralized(make: Callable[..., Experiment], *setting: Any) -> Experiment:
    return presets.centralized(make(*setting))


class _Entry(NamedTuple):
    """An entry on the axis of policies."""

    name: str
    phi: float  # NaN for policies without it
    policy: Policy
    make: Callable[..., Experiment] = _unchanged  # makes the experiment, given the sweep's own function


def plan(
    policy: str | Sequence[str] | Mapping[str, Policy] = "fc",
    *,
    dataset: str | data.Dataset = "mnist",
    distribution: str | Sequence[str] = "l1",
    radius_m: float | Sequence[float] = 600.0,
    phi: float | Sequence[float] = 0.05,
    budget_s: float | Sequence[float] | None = None,
    num_devices: int | Sequence[int] | None = None,
    seeds: int | Iterable[int] = 5,
    axes: Mapping[str, Any] | None = None,
    preset: Callable[..., Experiment] | str = "shi2020",
    progress: bool = False,
) -> list[Job]:
    """Plans and checks the runs of a sweep, for `fcjax.run_all`. The arguments are those of `fcjax.sweep`.

    Plan several grids and join the lists to run an irregular sweep as one.
    """
    built_in = {"distribution": distribution, "radius_m": radius_m, "budget_s": budget_s, "num_devices": num_devices}
    name_of_preset = preset if isinstance(preset, str) else None
    preset = presets.by_name(preset) if isinstance(preset, str) else preset
    if not callable(preset):
        raise ValueError(f"preset must be a name or a function that makes an Experiment, got {preset!r}")
    if twice := {"dataset", "distribution", "radius_m", "seed"}.intersection(getattr(preset, "keywords", {})):
        raise ValueError(f"the preset sets {min(twice)}, as the sweep does: pass it to the sweep instead")
    grid = {name: _checked(name, values) for name, values in (built_in | _further(axes, preset)).items()}
    if isinstance(seeds, np.ndarray | jax.Array) and seeds.ndim == 0:
        seeds = seeds.item()
    if isinstance(seeds, int | float | np.generic):
        seeds = range(checks.whole("the number of seeds", seeds, 1, _MOST_SEEDS))
    elif isinstance(seeds, Sized) and _count(seeds) > _MOST_SEEDS:
        raise ValueError(f"there can be up to {_MOST_SEEDS} seeds, got {_count(seeds)}")
    seeds = [checks.whole("seeds", seed, 0, 2**31 - 1) for seed in _several("seeds", seeds)]
    named = _policies(policy, [checks.scalar("phi", value) for value in _several("phi", phi)])
    for name, values in {"policy and phi": [entry[:2] for entry in named], **grid, "seeds": seeds}.items():
        if len(values) == 0:
            raise ValueError(f"{name} must have at least one value")
        # As text, because NaN does not equal itself.
        if len({str(value) for value in values}) < len(values):
            raise ValueError(f"{name} has a value twice: {', '.join(map(str, values))}")
    loaded = _loaded(dataset, progress) if isinstance(dataset, str) else dataset
    if not isinstance(loaded, data.Dataset):
        raise ValueError(f"dataset must be a name or a fcjax.data.Dataset, got {type(loaded).__name__}")

    make = _Maker(preset, loaded, tuple(grid))
    settings = list(itertools.product(*grid.values()))
    with Progress(len(settings) * len(named) * len(seeds), "run", enabled=progress) as shown:
        number = len(settings) * len(named)
        shown.begin(f"checking {number} setting{'s' if number > 1 else ''}")
        jobs = _checked_jobs(tuple(grid), settings, named, seeds, loaded.name, make, shown)
    if name_of_preset in (None, "shi2020"):
        return jobs
    return [dataclasses.replace(job, labels=job.labels | {"preset": name_of_preset}) for job in jobs]


def _loaded(name: str, progress: bool) -> data.Dataset:
    with Progress(1, "data set", enabled=progress) as shown:
        shown.begin(f"loading {name}")
        return data.load(name)


def _further(axes: Mapping[str, Any] | None, preset: Callable) -> dict[str, Any]:
    """Returns the axes besides the built-in ones; raises ValueError for an unknown name."""
    from fcjax.sweeps.results import check_names  # slow to import, and workers import this module without it

    if axes is not None and not isinstance(axes, Mapping):
        raise ValueError(f"axes must map names to values, such as {{'cell.bandwidth_hz': [5e6, 20e6]}}, got {axes!r}")
    found = {_SAME.get(name, name): values for name, values in (axes or {}).items()}
    if len(found) < len(axes or {}):
        raise ValueError(f"an axis is given twice: {', '.join(map(str, axes or {}))}")
    of_preset = inspect.signature(preset).parameters
    named = [one.name for one in of_preset.values() if one.kind is not one.VAR_KEYWORD]
    known = list(dict.fromkeys([*_BUILT_IN, *LEAVES, *(name for name in named if name not in ("dataset", "seed"))]))
    for name in found:
        if name in ("policy", "phi", "seeds", "seed", "dataset"):
            flag = "seeds" if name == "seed" else name
            raise ValueError(f"{name} cannot be in axes: use the argument {flag}, or --{flag} on the command line")
        check_names([name])
        of_any = isinstance(name, str) and name.isidentifier() and not not_taken(preset, [name])
        if name not in known and not of_any:
            close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.75)
            instead = f"did you mean {' or '.join(close)}?" if close else f"use {', '.join(known)}"
            raise ValueError(f"unknown axis {name!r}: {instead}")
    return found


def _checked(name: str, values: Any) -> list:
    """Checks the values of an axis and returns them as a list."""
    values = _several(name, values)
    if name in _OF_PRESET and any(value is None for value in values):
        return [value if value is None else _checked(name, value)[0] for value in values]
    if name in ("num_devices", "training.local_steps", "training.batch_size", "cell.num_blocks"):
        return [checks.whole(name, value, 1) for value in values]
    if bad := [value for value in values if np.ndim(value)]:
        raise ValueError(f"the values of axis {name} must be single numbers or strings, got shape {np.shape(bad[0])}")
    if name in ("radius_m", "budget_s") or (name in LEAVES and name != "cell.access"):
        return [checks.scalar(name, value) for value in values]
    if bad := [value for value in values if not isinstance(value, str | int | float | np.generic)]:
        raise ValueError(f"the values of axis {name} must be strings or numbers, got {bad[0]!r}")
    return [value.item() if isinstance(value, np.generic) else value for value in values]


class _Maker:
    """Makes the experiments of a sweep and caches the last few; it can be pickled."""

    def __init__(self, preset: Callable[..., Experiment], loaded: data.Dataset, names: tuple[str, ...]):
        self._preset, self._loaded, self._names = preset, loaded, names
        self._made = functools.lru_cache(maxsize=_AT_HAND)(self._make)

    def __call__(self, *setting: Any) -> Experiment:
        return self._made(*setting)

    def __reduce__(self) -> tuple:
        return _Maker, (self._preset, self._loaded, self._names)

    def _make(self, *setting: Any) -> Experiment:
        *values, seed = setting
        given = dict(zip(self._names, values, strict=True))
        given = {name: value for name, value in given.items() if value is not None}
        leaves = {name: given.pop(name) for name in list(given) if name in LEAVES}
        arguments = given | {"seed": seed}
        if left := not_taken(self._preset, arguments):
            raise ValueError(f"the preset must take {', '.join(left)}, or any settings as **settings")
        made = of_user("preset", lambda: self._preset(self._loaded, **arguments))
        if not isinstance(made, Experiment):
            raise ValueError(f"preset must return a fcjax.Experiment, got {type(made).__name__}")
        for name, value in leaves.items():
            made = _with_leaf(made, name, value)
        return check(made)


def _with_leaf(experiment: Experiment, name: str, value: Any) -> Experiment:
    """Replaces a leaf of an experiment; a leaf with one value per device is filled with the new value."""
    part, field = name.split(".")
    old = getattr(getattr(experiment, part), field)
    new = np.full(np.shape(old), value, np.asarray(old).dtype) if np.ndim(old) else value
    return dataclasses.replace(experiment, **{part: dataclasses.replace(getattr(experiment, part), **{field: new})})


def _checked_jobs(
    names: Sequence[str],
    settings: Sequence[tuple],
    named: Sequence[_Entry],
    seeds: Sequence[int],
    dataset: str,
    make: Callable[..., Experiment],
    shown: Progress,
) -> list[Job]:
    jobs: list[Job] = []
    checked = set()
    for setting in settings:
        of_seeds = []
        for seed in seeds:
            experiment = make(*setting, seed)
            most_rounds(experiment)
            of_seeds.append((float(np.asarray(experiment.training.budget_s)), checks.num_devices(experiment.cell)))
            shown.update(len(jobs) + len(of_seeds), len(jobs) + len(of_seeds))
        of_setting = dict(zip(names, setting, strict=True))
        further = {name: value for name, value in of_setting.items() if name not in _BUILT_IN}
        for name, phi_value, one, change in named:
            for seed, (of_seed_s, devices) in zip(seeds, of_seeds, strict=True):
                labels = {
                    "dataset": dataset,
                    "policy": name,
                    "distribution": of_setting["distribution"],
                    "radius_m": of_setting["radius_m"],
                    "phi": phi_value,
                    "seed": seed,
                    "devices": devices,
                    "budget_s": of_seed_s,
                    **further,
                }
                jobs.append(Job(labels, one, functools.partial(change, make, *setting, seed)))
            experiment = jobs[-1].experiment
            if policies.is_built_in(one):
                one.init(experiment.cell)  # raises if the parameters do not fit the cell
            elif (place := (name, phi_value, *setting[1:])) not in checked:
                label = f"policy {name!r}"
                how: dict[str, Any] = {"world": experiment.world, "name": label, "ignores_labels": False}
                contract.check_policy(one, experiment.cell, training_of(experiment), **how)
                checked.add(place)
    return jobs


def _policies(policy: str | Sequence[str] | Mapping[str, Policy], phis: Sequence[float]) -> list[_Entry]:
    """Returns the entries of a sweep for given names or policies."""
    if isinstance(policy, Mapping):
        one: Any
        for name, one in policy.items():
            if not isinstance(one, Policy) or not (callable(one.init) and callable(one.select)):
                hint = "; call it, if it makes a policy" if callable(one) else ""
                raise ValueError(
                    f"policy {name!r} must be a fcjax.Policy(init, select) of two functions, got {one!r}{hint}"
                )
        return [_Entry(str(name), float("nan"), one) for name, one in policy.items()]
    if isinstance(policy, Policy) or any(isinstance(one, Policy) for one in _several("policy", policy)):
        raise ValueError("policy must be names, or a mapping of names to policies, such as {'mine': policy}")
    named = []
    for name in _several("policy", policy):
        if name == "centralized":
            named.append(_Entry(name, float("nan"), policies.everybody(), _centralized))
            continue
        factory = policies.REGISTRY.factory(name, "phi")
        if takes(factory, "phi"):
            named += [_Entry(name, phi, policies.by_name(name, phi=phi)) for phi in phis]
        else:
            given = getattr(factory, "keywords", {}).get("phi", float("nan"))  # such as fc(phi=0.5)
            named.append(_Entry(name, given, policies.by_name(name)))
    return named


def most_runs(policy: Any, **axes: Any) -> int:
    """Returns an upper bound on the number of runs: policies without phi have fewer."""
    seeds, further = axes.pop("seeds"), axes.pop("axes", None)
    axes |= further if isinstance(further, Mapping) else {}
    num_seeds = seeds if isinstance(seeds, int) else _count(seeds) if isinstance(seeds, Sized) else sys.maxsize
    return num_seeds * math.prod(map(_count, (policy, *axes.values())))


def _count(values: Any) -> int:
    if isinstance(values, np.ndarray | jax.Array):
        return values.size
    return len(values) if isinstance(values, Sized) and not isinstance(values, str) else 1


def _several(name: str, value: Any) -> list:
    if value is None or isinstance(value, str | int | float | np.generic):
        return [value]
    if isinstance(value, np.ndarray | jax.Array):
        return list(np.atleast_1d(np.asarray(value)))
    try:
        return list(value)
    except TypeError as error:
        called = getattr(value, "__name__", "mine")
        hint = f"; give what it returns: {{{called!r}: {called}()}}" if callable(value) else ""
        raise ValueError(f"{name} must be a value or a sequence of values, got {value!r}{hint}") from error
