"""What `fuzz.py` calls, and what is always true of the answers."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fuzz_inputs import JUNK, Rng, array, cell, context, drift, key, number, observation, of_bounds, scheduled

import fcjax
from fcjax import bounds, contract, latency, policies, presets, radio
from fcjax.data import partition, synthetic

# A judge returns what is wrong with an answer, or "". It is given the answer and what was asked.
Call = tuple[Callable[..., Any], tuple, dict[str, Any]]
_TOLERANCE = 1e-4  # in time: single precision, with room for what is summed


def no_nan(answer: Any, *_: Any) -> str:
    numbers = [leaf for leaf in jax.tree.leaves(answer) if _is_float(leaf)]
    return "NaN from finite input" if any(np.isnan(np.asarray(leaf, float)).any() for leaf in numbers) else ""


def right_w(answer: Any, z: Any, branch: int = 0) -> str:
    """Holds if w exp(w) = z, in double precision, as far as the precision of w goes."""
    tolerance = max(1e-5, 4 * float(jnp.finfo(answer.dtype).eps))
    z, w = np.asarray(z, float), np.asarray(answer, float)
    inside = (z > -0.3678) & ((z < 0) if branch else True) & (np.abs(z) > 1e-37) & (np.abs(z) < 1e37)
    z, w = z[inside], w[inside]
    if np.isnan(w).any():
        return "NaN inside the domain"
    wrong = ~(np.abs(w * np.exp(w) - z) <= tolerance * (1 + np.abs(w)) * np.abs(z)) | ((w > -1) == bool(branch))
    return f"w = {w[wrong]} for z = {z[wrong]}" if wrong.any() else ""


def right_required(answer: Any, round_s: Any, seen: fcjax.Observation, cell: fcjax.Cell) -> str:
    """Holds if devices with these shares are done at the given time, and if others could not be with any."""
    share, world = np.asarray(answer, float), World(seen, cell)
    if not world.is_plain or np.isnan(share).any():
        return no_nan(answer)
    round_s = float(round_s)
    early = np.isinf(share) & (world.earliest_s < round_s * (1 - _TOLERANCE))
    done_s = world.done_s(np.where(np.isinf(share) | (share == 0), 1, share))
    wrong = np.isfinite(share) & (share > 0) & (np.abs(done_s - round_s) > _TOLERANCE * round_s)
    return (
        f"not done at {round_s}: {done_s[wrong]}, could be: {world.earliest_s[early]}" if np.any(early | wrong) else ""
    )


def right_shares(answer: fcjax.Decision, who: Any, seen: fcjax.Observation, cell: fcjax.Cell) -> str:
    """Holds if shares sum to 1, and if all who have one are done at the same time, that of the round."""
    share, who, world = np.asarray(answer.share, float), np.asarray(answer.scheduled), World(seen, cell)
    round_s = float(answer.round_s)
    if np.isnan(share).any() or np.isnan(round_s):
        return "NaN from finite input"
    if np.any(share[~who] != 0):
        return "a share without being scheduled"
    if not who.any() or not np.isfinite(round_s):
        return ""
    if abs(share.sum() - 1) > 1e-5:
        return f"shares sum to {share.sum()}"
    if not world.is_plain:
        return ""
    done_s = world.done_s(np.where(share > 0, share, 1))
    late = (share > 0) & (np.abs(done_s - round_s) > _TOLERANCE * round_s)
    return f"done at {done_s[late]} in a round of {round_s}" if late.any() else ""


def right_sets(answer: Any, seen: fcjax.Observation, cell: fcjax.Cell) -> str:
    """Holds if no set is faster: n devices can be done by t if the n smallest shares they need sum to at most 1."""
    round_s, sets = np.asarray(answer[0], float), np.asarray(answer[1])
    world, finite = World(seen, cell), np.isfinite(round_s)
    sizes = np.arange(1, len(sets) + 1)
    if np.isnan(round_s).any():
        return "NaN from finite input"
    if np.any(np.diff(round_s[finite]) < 0):
        return "a larger set is faster"
    if np.any(sets.sum(1)[finite] != sizes[finite]):
        return "a set of another size"
    if not world.is_plain:
        return ""
    for factor, enough in ((1 + _TOLERANCE, True), (1 - _TOLERANCE, False)):
        needed = np.sort(world.needed(round_s[finite][:, None] * factor), axis=1)
        total = np.cumsum(needed, axis=1)[np.arange(finite.sum()), sizes[finite] - 1]
        wrong = (total <= 1) != enough
        if wrong.any():
            return (
                f"sets of {sizes[finite][wrong]} are {'slower' if enough else 'faster'} than {round_s[finite][wrong]} s"
            )
    return ""


class World:
    """The physics of an upload once more, in double precision and without fcjax."""

    def __init__(self, seen: fcjax.Observation, cell: fcjax.Cell):
        numbers = (cell.bandwidth_hz, cell.noise_psd_w_hz, cell.power_w, cell.upload_bits, seen.gain, seen.compute_s)
        self._band, noise, power, self._bits, gain, self._compute_s = (np.asarray(x, float) for x in numbers)
        self._snr = power * gain / (self._band * noise)
        with np.errstate(all="ignore"):
            self.earliest_s = self._compute_s + self._bits * np.log(2) / (self._band * self._snr)
        # Beyond these, single precision has no numbers for what comes in between.
        between = (self._snr, self._band * noise, self._bits / self._band, self.earliest_s)
        self.is_plain = all(np.all((x > 1e-18) & (x < 1e18)) for x in between)

    def done_s(self, share: np.ndarray) -> np.ndarray:
        """When devices are done that have these shares."""
        return self._compute_s + self._bits * np.log(2) / (share * self._band * np.log1p(self._snr / share))

    def needed(self, round_s: np.ndarray) -> np.ndarray:
        """With which shares devices are done by then, inf where with none: by bisection."""
        low, high = (np.full(np.broadcast_shapes(round_s.shape, self._snr.shape), x) for x in (1e-30, 1e30))
        for _ in range(60):
            middle = np.sqrt(low * high)
            late = self.done_s(middle) > round_s
            low, high = np.where(late, middle, low), np.where(late, high, middle)
        return np.where(self.earliest_s < round_s, high, np.inf)


def right_decision(answer: Any, *_: Any) -> str:
    decision = answer[1]
    if not np.any(decision.scheduled):
        return "nobody is scheduled"
    return "shares sum to more than 1" if float(jnp.sum(decision.share)) > 1 + 1e-5 else no_nan(decision)


def right_partition(answer: partition.Partition, *_: Any) -> str:
    held = np.concatenate([answer.of_device(i) for i in range(answer.num_devices)])
    return "a sample is on two devices" if len(np.unique(held)) < len(held) else ""


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


POLICY_NAMES = ("fc", "exact", "rd", "pf", "cs-l", "cs-h", "as-l", "as-h", "fixed-1", "fixed-3", "fixed-7")


def of_lambertw(rng: Rng, size: int) -> Call:
    """On both branches, mostly inside their domains."""
    branch = int(rng.integers(-1, 1))
    z = array(rng, 1e-9, 0.3678, size) if branch else array(rng, 1e-9, 1e9, size)
    below = branch or rng.random() < 0.3
    return fcjax.lambertw, (-z if below and isinstance(z, np.ndarray | jax.Array) else z, branch), {}


def select(rng: Rng, size: int) -> Call:
    name = rng.choice([*POLICY_NAMES, "fixed-0", "fixed-x", "best", "os:getcwd", "json:loads", "", "no_module:x"])
    phi = number(rng, 1e-3, 10)
    seen = context(rng, size)

    def decide(name: str, phi: Any, seen: fcjax.RoundContext, key: Any) -> Any:
        policy = policies.by_name(name, phi=phi)
        return policy.select(key, policy.init(seen.cell), seen)

    return decide, (str(name), phi, seen, key(rng)), {}


FACTORIES = (policies.fixed, policies.random, policies.proportional_fair)
TIMED = (policies.client_selection, policies.asymptotic)


def by_factory(rng: Rng, size: int) -> Call:
    seen = context(rng, size)
    if rng.random() < 0.5:
        factory, parameter = FACTORIES[rng.integers(len(FACTORIES))], number(rng, 1, size)
        parameter = round(parameter) if isinstance(parameter, float) and 0 < parameter < 1e6 else parameter
    else:
        factory, parameter = TIMED[rng.integers(len(TIMED))], number(rng, 1e-2, 1e2)

    def decide(parameter: Any, seen: fcjax.RoundContext, key: Any) -> Any:
        policy = factory(parameter)
        return policy.select(key, policy.init(seen.cell), seen)

    return decide, (parameter, seen, key(rng)), {}


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


LABELS = np.arange(600) % 10
CLOUDS = synthetic.classification(1200, 100, num_features=4, num_labels=4, spread=0.5)


def simulate(rng: Rng, size: int) -> Call:
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

    def run(name: str, seed: int, settings: dict[str, Any]) -> Any:
        experiment = presets.shi2020(CLOUDS, **settings)
        swept = fcjax.simulate(jax.random.key(seed), policies.by_name(name), experiment, max_rounds=4)
        history = jax.tree.map(lambda leaf: leaf[: swept.num_rounds], swept.history)
        return swept.params, swept.tilde_params, swept.best_accuracy, history

    return run, (name, int(rng.integers(100)), settings), {}


# name: how often, how a call is made, what is true of the answer
Target = tuple[int, Callable[[Rng, int], Call], Callable[..., str]]
TARGETS: dict[str, Target] = {
    "lambertw": (8, of_lambertw, right_w),
    "required_share": (
        10,
        lambda r, m: (fcjax.required_share, (number(r, 1e-3, 1e3), observation(r, m), cell(r, m)), {}),
        right_required,
    ),
    "allocate": (10, lambda r, m: (fcjax.allocate, (scheduled(r, m), observation(r, m), cell(r, m)), {}), right_shares),
    "fastest_sets": (10, lambda r, m: (fcjax.fastest_sets, (observation(r, m), cell(r, m)), {}), right_sets),
    "radio.rate": (8, lambda r, m: (radio.rate, (array(r, 1e-6, 1, m), observation(r, m), cell(r, m)), {}), no_nan),
    "radio.path_gain": (5, lambda r, m: (radio.path_gain, (array(r, 1, 1e4, m), cell(r, m)), {}), no_nan),
    "radio.place": (3, lambda r, m: (radio.place, (key(r), cell(r, m)), {}), no_nan),
    "radio.fade": (3, lambda r, m: (radio.fade, (key(r), cell(r, m)), {}), no_nan),
    "radio.dbm_to_w": (3, lambda r, m: (radio.dbm_to_w, (array(r, 1e-3, 200, m),), {}), no_nan),
    "latency.compute_time": (
        4,
        lambda r, m: (latency.compute_time, (key(r), number(r, 1, 1e6), cell(r, m)), {}),
        no_nan,
    ),
    "bounds.scheduling_penalty": (
        8,
        lambda r, m: (bounds.scheduling_penalty, (number(r, 1, m),), of_bounds(r, m)),
        no_nan,
    ),
    "bounds.convergence_bound": (
        8,
        lambda r, m: (
            bounds.convergence_bound,
            (number(r, 1, m), number(r, 1, 1e4)),
            of_bounds(r, m) | {"rho": number(r, 0.1, 10), "phi": number(r, 1e-3, 10)},
        ),
        no_nan,
    ),
    "bounds.mean_drift": (2, lambda r, m: (bounds.mean_drift, (), drift(r, m)), no_nan),
    "bounds.local_drift": (2, lambda r, m: (bounds.local_drift, (), drift(r, m)), no_nan),
    "bounds.sampling_constant": (2, lambda r, m: (bounds.sampling_constant, (), of_bounds(r, m)), no_nan),
    "bounds.scheduling_objective": (
        4,
        lambda r, m: (
            bounds.scheduling_objective,
            (number(r, 1, m), number(r, 1e-2, 1e3)),
            of_bounds(r, m) | {"rho": number(r, 0.1, 10), "phi": number(r, 1e-3, 10), "budget_s": number(r, 1, 1e4)},
        ),
        no_nan,
    ),
    "policies.select": (10, select, right_decision),
    "policies by factory": (4, by_factory, right_decision),
    "partition": (
        4,
        lambda r, m: (
            partition.by_name,
            (str(r.choice(["iid", "l1", "l3", "l10", "l11", "dir0.3", "dir1e-9", "dir0", "x"])), LABELS, m),
            {"seed": int(r.integers(1000)), "min_size": int(r.integers(0, 40))},
        ),
        right_partition,
    ),
    "data.load": (2, name_of_data, lambda *_: ""),
    "results.load": (1, results_file, lambda *_: ""),
    "presets and simulate": (1, simulate, no_nan),
    "check_policy": (
        1,
        lambda r, m: (contract.check_policy, (policies.by_name(str(r.choice(POLICY_NAMES[:8]))), cell(r, m)), {}),
        no_nan,
    ),
}
