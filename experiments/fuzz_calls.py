"""How `fuzz.py` makes the calls that take more than a line: of policies, sweeps, simulations, files and gradients."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fuzz_inputs import JUNK, Rng, array, cell, context, is_finite, key, number, whole

import fcjax
from fcjax import bounds, models, policies, presets
from fcjax.data import synthetic

Call = tuple[Callable[..., Any], tuple, dict[str, Any]]


def with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """The value, and its derivatives by all that are numbers; after a call by itself, which looks at what is given."""

    def both(*args: Any, **kwargs: Any) -> Any:
        function(*args, **kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=lambda x: isinstance(x, list))
        real = [_is_real(leaf) for leaf in leaves]

        def of(numbers: list[Any]) -> Any:
            rest = iter(numbers)
            merged = [next(rest) if one else leaf for leaf, one in zip(leaves, real, strict=True)]
            args, kwargs = jax.tree.unflatten(structure, merged)
            return function(*args, **kwargs)

        return jax.value_and_grad(of)([jnp.asarray(leaf, float) for leaf, one in zip(leaves, real, strict=True) if one])

    return both


def _is_real(leaf: Any) -> bool:
    return not isinstance(leaf, str | bool) and np.asarray(leaf).dtype.kind in "fiu"


def round_s(who: Any, seen: fcjax.Observation, cell: fcjax.Cell) -> Any:
    return fcjax.allocate(who, seen, cell).round_s


POLICY_NAMES = ("fc", "exact", "rd", "pf", "cs-l", "cs-h", "as-l", "as-h", "fixed-1", "fixed-3", "fixed-7")


def of_lambertw(rng: Rng, size: int) -> Call:
    """On both branches, mostly inside their domains."""
    branch = int(rng.integers(-1, 1))
    if rng.random() < rng.spoilt / 4:
        return fcjax.lambertw, (0.5, rng.choice([1, -2, 0.5, np.nan, "0", None])), {}
    z = array(rng, 1e-9, 0.3678, size) if branch else array(rng, 1e-9, 1e9, size)
    below = branch or rng.random() < 0.3
    return fcjax.lambertw, (-z if below and getattr(z, "dtype", None) in (np.float32, np.float64) else z, branch), {}


def decide(policy: fcjax.Policy, seen: fcjax.RoundContext, key: Any) -> Any:
    """A decision: compiled, if all are numbers that single functions take, else step by step, which takes longer."""
    state = policy.init(seen.cell)
    if not is_finite(seen):
        return policy.select(key, state, seen)
    fcjax.required_share(1.0, seen.observation, seen.cell)
    names = ("num_samples", "learning_rate", "local_steps", "budget_s")
    estimates = {name: getattr(seen.estimates, name) for name in ("rho", "beta", "delta")}
    settings = {name: getattr(seen.training, name) for name in names}
    bounds.scheduling_objective(1.0, 1.0, phi=1.0, **estimates, **settings)
    seen = jax.tree.map(np.asarray, seen, is_leaf=lambda leaf: isinstance(leaf, list))
    return jax.jit(policy.select)(key, state, seen)


def select(rng: Rng, size: int) -> Call:
    name = rng.choice([*POLICY_NAMES, "fixed-0", "fixed-x", "best", "os:getcwd", "json:loads", "", "no_module:x"])
    phi = number(rng, 1e-3, 10)
    seen = context(rng, size)

    def by_name(name: str, phi: Any, seen: fcjax.RoundContext, key: Any) -> Any:
        return decide(policies.by_name(name, phi=phi), seen, key)

    return by_name, (str(name), phi, seen, key(rng)), {}


FACTORIES = (policies.fixed, policies.random, policies.proportional_fair)
TIMED = (policies.client_selection, policies.asymptotic)


def by_factory(rng: Rng, size: int) -> Call:
    seen = context(rng, size)
    if rng.random() < 0.5:
        factory, parameter = FACTORIES[rng.integers(len(FACTORIES))], number(rng, 1, size)
        parameter = round(parameter) if isinstance(parameter, float) and 0 < parameter < 1e6 else parameter
    else:
        factory, parameter = TIMED[rng.integers(len(TIMED))], number(rng, 1e-2, 1e2)

    def by_parameter(parameter: Any, seen: fcjax.RoundContext, key: Any) -> Any:
        return decide(factory(parameter), seen, key)

    return by_parameter, (parameter, seen, key(rng)), {}


def results_file(rng: Rng, _: int) -> Call:
    """A file of results, as it is, or with something done to it."""
    content = bytearray(results_bytes())
    if rng.random() < 0.8:
        for _ in range(rng.integers(1, 20)):
            content[rng.integers(len(content))] = rng.integers(256)
        content = content[: rng.integers(len(content))] if rng.random() < 0.3 else content

    def load(content: bytes) -> Any:
        with tempfile.NamedTemporaryFile(suffix=".nc") as file:
            file.write(content)
            file.flush()
            return fcjax.results.summary(fcjax.results.load(file.name))

    return load, (bytes(content),), {}


@functools.cache
def results_bytes() -> bytes:
    preset = functools.partial(presets.shi2020, hidden=())
    swept = fcjax.sweep("fixed-1", dataset=CLOUDS, preset=preset, num_devices=2, seeds=2, budget_s=3.0)
    with tempfile.TemporaryDirectory() as folder:
        fcjax.results.save(swept, f"{folder}/results.nc")
        return Path(folder, "results.nc").read_bytes()


def name_of_data(rng: Rng, _: int) -> Call:
    name = "".join(rng.choice(list("mnist/.._-0:~ \\\n\0é"), rng.integers(0, 12)))
    return fcjax.data.load, (name if rng.random() < 0.9 else JUNK[rng.integers(1, len(JUNK))],), {}


def sweep(rng: Rng, size: int) -> Call:
    """A small sweep from Python, whatever is passed to it."""
    size = min(size, 5)
    settings: dict[str, Any] = {
        "distribution": "l1" if rng.random() < 0.7 else str(rng.choice(["iid", "dir0.5", "l7", "dir0", "x", ""])),
        "radius_m": number(rng, 10, 2000),
        "phi": number(rng, 1e-3, 10),
        "budget_s": number(rng, 1, 3),
        "num_devices": size if rng.random() > rng.spoilt / 2 else number(rng, 1, 20),
        "seeds": whole(rng, 1, 3),
        "workers": 1 if rng.random() > rng.spoilt / 2 else number(rng, 1, 3),
    }
    for name in settings:
        if rng.random() < rng.spoilt / 8:
            settings[name] = [settings[name], settings[name]] if rng.random() < 0.5 else JUNK[rng.integers(len(JUNK))]
    policy = "pf" if rng.random() > rng.spoilt else rng.choice(["fc", "", "fixed-0", "a:b"])

    def run(policy: str, settings: dict[str, Any]) -> Any:
        preset = functools.partial(presets.shi2020, hidden=(), momentum=0.5)
        swept = fcjax.sweep(policy, dataset=CLOUDS, preset=preset, **settings)
        rows = fcjax.results.summary(swept)
        return {name: rows[name].to_numpy(float) for name in ("best_accuracy", "tilde_accuracy", "elapsed_s", "rounds")}

    return run, (str(policy), settings), {}


def model(rng: Rng, size: int) -> Call:
    """A model, and its loss on a batch of zeros and ones."""
    kind = rng.integers(3)
    scale = {"mean": number(rng, 1e-2, 1), "std": number(rng, 1e-2, 10)}
    if kind == 0:
        made = (models.mlp, ((whole(rng, 1, 5), 3), whole(rng, 1, 9)), {"hidden": (whole(rng, 1, 9),), **scale})
    elif kind == 1:
        made = (models.linear_regression, (whole(rng, 1, 9),), scale)
    else:
        made = (models.squared_svm, (whole(rng, 1, 9),), {"regularisation": number(rng, 1e-3, 1), **scale})

    def loss(args: tuple, kwargs: dict[str, Any]) -> Any:
        model = made[0](*args, **kwargs)
        params = model.init(jax.random.key(0))
        features = (args[0],) if kind else args[0]
        return models.upload_bits(model), model.losses(params, jnp.ones((2, *features)), jnp.array([1, 1]) * (kind > 0))

    return loss, made[1:], {}


def task(rng: Rng, size: int) -> Call:
    if rng.random() < 0.5:
        kwargs = {"num_features": whole(rng, 1, 9), "noise": number(rng, 1e-3, 10), "seed": whole(rng, 1, 99)}
        return synthetic.regression, (whole(rng, 1, 50), whole(rng, 1, 50)), kwargs
    kwargs = {
        "num_features": whole(rng, 1, 9),
        "num_labels": whole(rng, 1, 9),
        "spread": number(rng, 1e-3, 10),
        "seed": whole(rng, 1, 99),
    }
    return synthetic.classification, (whole(rng, 1, 50), whole(rng, 1, 50)), kwargs


CLOUDS = synthetic.classification(1200, 100, num_features=4, num_labels=4, spread=0.5)


def simulate(rng: Rng, size: int) -> Call:
    size = min(size, 5)  # devices that the data have mini-batches for
    settings = {
        "distribution": str(rng.choice(["iid", "l1", "l2", "l5", "dir0.1", "dir-1", "dirx", "l0", ""])),
        "num_devices": size,
        "radius_m": number(rng, 10, 2000),
        "budget_s": number(rng, 0.5, 10),
        "momentum": number(rng, 0.1, 0.99),
        "observation_error": number(rng, 1e-3, 1),
        "hidden": (),
    }
    name = str(rng.choice(POLICY_NAMES))
    other = cell(rng, size) if rng.random() < 0.3 else None

    def run(name: str, seed: int, settings: dict[str, Any], other: list[fcjax.Cell]) -> Any:
        experiment = presets.shi2020(CLOUDS, **settings)
        for one in other:
            experiment = dataclasses.replace(experiment, cell=one)
        swept = fcjax.simulate(jax.random.key(seed), policies.by_name(name), experiment, max_rounds=4)
        history = jax.tree.map(lambda leaf: leaf[: swept.num_rounds], swept.history)
        return swept.params, swept.tilde_params, swept.best_accuracy, history

    return run, (name, int(rng.integers(100)), settings, [] if other is None else [other]), {}
