"""The runs of a sweep: policies x distributions x radii x phi x budgets x numbers of devices x seeds, checked."""

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from fcjax import checks, data, policies, presets
from fcjax.policies import contract
from fcjax.runtime.progress import Progress
from fcjax.simulation.experiment import Experiment, as_told, check, most_rounds
from fcjax.sweeps.jobs import Job
from fcjax.types import Policy

_MOST_SEEDS = 10**6
_AT_HAND = 64  # experiments that are kept in memory; others are made anew when their runs begin


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

    make = _Maker(preset, loaded)
    settings = list(itertools.product(*choices))
    with Progress(len(settings) * len(named) * len(seeds), "runs", enabled=progress) as shown:
        shown.begin("checking", counts=False)
        return _checked_jobs(settings, named, seeds, loaded.name, make, shown)


class _Maker:
    """Makes the experiments of a sweep, and keeps the last few. It can be sent to another process."""

    def __init__(self, preset: Callable[..., Experiment], loaded: data.Dataset):
        self._preset, self._loaded = preset, loaded
        self._made = functools.lru_cache(maxsize=_AT_HAND)(self._make)

    def __call__(self, *setting: Any) -> Experiment:
        return self._made(*setting)

    def __reduce__(self) -> tuple:
        return _Maker, (self._preset, self._loaded)

    def _make(self, of_distribution: str, radius: float, budget: float | None, number: int, seed: int) -> Experiment:
        budgets = {} if budget is None else {"budget_s": budget}
        settings = {"distribution": of_distribution, "num_devices": number, "radius_m": radius, "seed": seed}
        made = self._preset(self._loaded, **settings, **budgets)
        if not isinstance(made, Experiment):
            raise ValueError(f"preset must return a fcjax.Experiment, got {type(made).__name__}")
        return check(made)


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
                if policies.is_centralized(one):
                    made = functools.partial(_centralised, made)
                jobs.append(Job(labels, one, made))
            experiment = jobs[-1].experiment
            if policies.is_built_in(one):
                one.init(experiment.cell)  # raises for what the cell does not have
            elif (place := (name, phi_value, *setting[1:])) not in checked:
                label = f"policy {name!r}"
                contract.check_policy(one, experiment.cell, as_told(experiment), name=label, ignores_labels=False)
                checked.add(place)
    return jobs


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


def _centralised(make: Callable[[], Experiment]) -> Experiment:
    return presets.centralised(make())


def most_runs(policy: Any, **axes: Any) -> int:
    """How many runs there can be, for what `plan` takes: those of policies without phi are fewer."""
    seeds = axes.pop("seeds")
    num_seeds = seeds if isinstance(seeds, int) else len(seeds) if isinstance(seeds, Sized) else sys.maxsize
    several = [values for values in (policy, *axes.values()) if not isinstance(values, str)]
    return num_seeds * math.prod(len(values) for values in several if isinstance(values, Sized))


def _several(name: str, value: Any) -> list:
    if value is None or isinstance(value, str | int | float | np.generic):
        return [value]
    try:
        return list(value)
    except TypeError as error:
        raise ValueError(f"{name} must be a value or a sequence of them, got {value!r}") from error
