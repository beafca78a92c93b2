"""Calls every public function, and the sweep script, with arbitrary input: all give a right answer or a named error.

Input is physical, absurd, not finite, of wrong shapes and types, or no number at all. It is a fault if finite input
gives NaN, or an answer that breaks what is always true of it; if an error is not a ValueError or OSError of fcjax; or
if a call takes longer than a minute. Every call is a function of (seed, target, number): a fault is printed with what
repeats it.
"""

import argparse
import collections
import contextlib
import functools
import io
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from console import leave

import fcjax
from fcjax import bounds, contract, latency, models, policies, presets, radio
from fcjax.data import partition, synthetic
from fcjax.progress import Progress


class Rng(np.random.Generator):
    """Random numbers, and how often what is made of them is spoilt."""

    spoilt = 0.0


LONGEST_S = 60
NUM_DEVICES = (1, 2, 5, 20)
JUNK: tuple[Any, ...] = (
    "many",
    None,
    1j,
    [1.0, [2.0]],
    object(),
    True,
    b"7",
    {},
    (),
    np.array("x"),
    np.datetime64("2020"),
)


_SPOILT = np.array([0.35, 0.2, 0.1, 0.07, 0.07, 0.07, 0.07, 0.07])


def number(rng: Rng, low: float, high: float) -> Any:
    """A number, mostly physical: between two bounds in logarithm."""
    kind = rng.choice(np.arange(1, 9), p=_SPOILT) if rng.random() < rng.spoilt else 0
    plain = 10 ** rng.uniform(np.log10(low), np.log10(high))
    absurd = 10 ** rng.uniform(-44, 38)
    values = (plain, absurd, 0.0, -plain, np.nan, np.inf, -np.inf, int(min(plain, 2.0**62)), None)
    return values[kind] if kind < 8 else JUNK[rng.integers(len(JUNK))]


def array(rng: Rng, low: float, high: float, size: int) -> Any:
    """Numbers, one for each device; now and then of another shape or type."""
    values = 10 ** rng.uniform(np.log10(low), np.log10(high), size)
    kind = rng.choice(np.arange(1, 9), p=_SPOILT) if rng.random() < rng.spoilt else 0
    if kind == 1:
        values = 10 ** rng.uniform(-44, 38, size)
    elif kind == 2:
        values[rng.integers(size)] = rng.choice([0.0, -1.0, np.nan, np.inf, 1e38, 1e-38])
    elif kind == 3:
        values = values * rng.integers(0, 2, size)
    elif kind == 4:
        values = values[:-1] if rng.random() < 0.5 else np.stack([values, values])
    elif kind == 5:
        return list(values)
    elif kind == 6:
        return number(rng, low, high)
    elif kind == 7:
        return np.clip(values, 0, 1e9).astype(rng.choice([np.int32, np.int64, np.uint8, np.float16]))
    elif kind == 8:
        return JUNK[rng.integers(len(JUNK))]
    dtype = rng.choice([np.float32, np.float64])
    with np.errstate(all="ignore"):
        values = values.astype(dtype)
    return jnp.asarray(values) if rng.random() < 0.3 else values


def cell(rng: Rng, size: int) -> fcjax.Cell:
    return fcjax.Cell(
        bandwidth_hz=number(rng, 1e4, 1e9),
        noise_psd_w_hz=number(rng, 1e-22, 1e-18),
        power_w=array(rng, 1e-4, 10, size),
        upload_bits=number(rng, 1e3, 1e10) if rng.random() < 0.7 else array(rng, 1e3, 1e10, size),
        radius_m=number(rng, 10, 1e4),
        min_distance_m=number(rng, 0.1, 100),
        reference_gain=number(rng, 1e-16, 1e-8),
        path_loss_exponent=number(rng, 1, 6),
        scatter=number(rng, 1e-3, 1),
        shadowing_db=number(rng, 0.1, 12),
        sample_floor_s=number(rng, 1e-6, 1e-1),
        sample_rate_hz=number(rng, 10, 1e6),
    )


def observation(rng: Rng, size: int) -> fcjax.Observation:
    return fcjax.Observation(gain=array(rng, 1e-16, 1e-6, size), compute_s=array(rng, 1e-3, 1e2, size))


def scheduled(rng: Rng, size: int) -> Any:
    return rng.random(size) < 0.5 if rng.random() < 0.9 else array(rng, 1, 2, size)


def training(rng: Rng, size: int) -> fcjax.Training:
    return fcjax.Training(
        learning_rate=number(rng, 1e-4, 1),
        momentum=number(rng, 0.1, 0.99),
        budget_s=number(rng, 1, 1e4),
        num_samples=array(rng, 1, 1e5, size),
        local_steps=int(rng.integers(1, 20)),
        batch_size=int(rng.integers(1, 256)),
    )


def context(rng: Rng, size: int) -> fcjax.RoundContext:
    return fcjax.RoundContext(
        observation(rng, size),
        fcjax.Estimates(array(rng, 0.1, 10, size), array(rng, 0.1, 100, size), array(rng, 0.01, 10, size)),
        cell(rng, size),
        training(rng, size),
        elapsed_s=number(rng, 1e-2, 60),
        round_index=int(rng.integers(0, 1000)),
    )


def of_bounds(rng: Rng, size: int) -> dict[str, Any]:
    chosen = {
        "beta": number(rng, 0.1, 100) if rng.random() < 0.5 else array(rng, 0.1, 100, size),
        "delta": array(rng, 0.01, 10, size),
        "num_samples": array(rng, 1, 1e5, size),
        "learning_rate": number(rng, 1e-4, 1),
        "local_steps": number(rng, 1, 50),
    }
    return chosen | ({"constant": rng.choice(["valid", "published", "other"])} if rng.random() < 0.3 else {})


def key(rng: Rng) -> Any:
    return jax.random.key(int(rng.integers(2**31)))


# What is always true of an answer: a judge returns what is wrong with it, or "".
Call = tuple[Callable[..., Any], tuple, dict[str, Any]]


def no_nan(answer: Any, *_: Any) -> str:
    numbers = [leaf for leaf in jax.tree.leaves(answer) if _is_float(leaf)]
    return "NaN from finite input" if any(np.isnan(np.asarray(leaf, float)).any() for leaf in numbers) else ""


def right_w(answer: Any, z: Any, branch: int = 0) -> str:
    z, w = np.asarray(z, float), np.asarray(answer, float)
    inside = (z > -0.3678) & ((z < 0) if branch else True)
    return "NaN inside the domain" if np.isnan(w[inside]).any() else ""


def right_shares(answer: fcjax.Decision, *_: Any) -> str:
    total, who = float(jnp.sum(answer.share)), np.asarray(answer.scheduled)
    if not np.isfinite(answer.round_s) or not who.any():
        return no_nan(answer)
    if abs(total - 1) > 1e-5:
        return f"shares sum to {total}"
    return "a share without being scheduled" if np.any(np.asarray(answer.share)[~who] != 0) else no_nan(answer)


def right_sets(answer: Any, *_: Any) -> str:
    round_s, sets = map(np.asarray, answer)
    if np.any(np.diff(round_s[np.isfinite(round_s)]) < -1e-5 * round_s[np.isfinite(round_s)][1:]):
        return "a larger set is faster"
    sizes = np.arange(1, len(sets) + 1)
    return "a set of another size" if np.any(sets.sum(1)[np.isfinite(round_s)] != sizes[np.isfinite(round_s)]) else ""


def right_decision(answer: Any, *_: Any) -> str:
    decision = answer[1]
    if not np.any(decision.scheduled):
        return "nobody is scheduled"
    return "shares sum to more than 1" if float(jnp.sum(decision.share)) > 1 + 1e-5 else no_nan(decision)


def right_partition(answer: partition.Partition, *_: Any) -> str:
    held = np.concatenate([answer.of_device(i) for i in range(answer.num_devices)])
    return "a sample is on two devices" if len(np.unique(held)) < len(held) else ""


POLICY_NAMES = ("fc", "exact", "rd", "pf", "cs-l", "cs-h", "as-l", "as-h", "fixed-1", "fixed-3", "fixed-7")


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


def drift(rng: Rng, size: int) -> dict[str, Any]:
    return {
        "delta": array(rng, 0.01, 10, size),
        "beta": number(rng, 0.1, 100),
        "learning_rate": number(rng, 1e-4, 1),
        "local_steps": number(rng, 1, 50),
    }


LABELS = np.arange(600) % 10
CLOUDS = synthetic.classification(1200, 100, num_features=4, num_labels=4, spread=0.5)
MODEL = models.mlp((4,), 4, hidden=())


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
    "lambertw": (8, lambda r, m: (fcjax.lambertw, (array(r, 1e-9, 10, m), int(r.integers(-1, 1))), {}), right_w),
    "required_share": (
        10,
        lambda r, m: (fcjax.required_share, (number(r, 1e-3, 1e3), observation(r, m), cell(r, m)), {}),
        no_nan,
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


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def is_finite(value: Any) -> bool:
    """Whether all that is in a call are numbers, and finite."""
    for leaf in jax.tree.leaves(value, is_leaf=lambda x: x is None):
        if isinstance(leaf, str | bytes | bool) or (
            hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        ):
            continue
        try:
            if not np.isfinite(np.asarray(leaf, float)).all():
                return False
        except (TypeError, ValueError):
            return False
    return True


class Hang(BaseException):
    pass


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


PACKAGE = Path(fcjax.__file__).parent


def attempt(call: Call, judge: Callable[..., str]) -> tuple[str, str]:
    """What came of a call, and what is wrong with that, if anything."""
    function, args, kwargs = call
    try:
        with limited(LONGEST_S):
            answer = jax.block_until_ready(function(*args, **kwargs))
    except (ValueError, OSError) as error:
        where = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        named = PACKAGE in where.parents and str(error)
        return "named error", "" if named else f"an error of {where.name}: {error}"
    except Hang:
        return "hang", "no answer within a minute"
    except Exception as error:
        return "other error", f"{type(error).__name__}: {error}"
    if not is_finite((args, kwargs)):
        return "answer to what is not finite", ""
    return "answer", judge(answer, *args)


def fuzz_functions(seed: int, num_calls: int, only: str | None, call: int | None) -> dict[str, collections.Counter]:
    names = [only] if only else list(TARGETS)
    weights = np.array([TARGETS[name][0] for name in names], float)
    numbers = np.maximum(1, np.round(num_calls * weights / weights.sum())).astype(int)
    outcomes = {name: collections.Counter() for name in names}
    done = 0
    with Progress(int(numbers.sum()), "calls") as shown:
        shown.begin("calling", counts=True)
        for name, count in zip(names, numbers, strict=True):
            _, make, judge = TARGETS[name]
            for index in range(count) if call is None else [call]:
                rng = Rng(np.random.PCG64([seed, list(TARGETS).index(name), index]))
                rng.spoilt = float(rng.choice([0.0, 0.05, 0.3], p=[0.5, 0.3, 0.2]))
                made = make(rng, int(rng.choice(NUM_DEVICES)))
                outcome, fault = attempt(made, judge)
                outcomes[name][outcome] += 1
                if fault:
                    outcomes[name]["fault"] += 1
                    if outcomes[name]["fault"] <= 3:
                        again = f"--seed {seed} --only {name!r} --call {index}"
                        print(f"\n{again}: {fault}\n  {made[1:]}", file=sys.stderr)
                done += 1
                shown.update(done, done)
    return outcomes


def value(rng: Rng, good: list[str], bad: list[str]) -> str:
    return str(rng.choice(good if rng.random() < 0.93 else bad))


NUMBERS = ["nan", "inf", "-1", "0", "1e300", "1e-300", "x", ""]


def command_line(rng: Rng) -> list[str]:
    """Options of the sweep script, in any combination."""
    options = {
        "--phi": (["0.05", "0.5", "5", "0.001"], NUMBERS),
        "--policy": (
            ["fc", "exact", "rd", "pf", "cs-l", "as-h", "fixed-3"],
            ["best", "fixed-0", "fixed-99", "a:b", ":"],
        ),
        "--distribution": (["l1", "l2", "iid", "dir0.5"], ["l0", "l99", "dir-1", "dirx", "dir1e-30", ""]),
        "--radius": (["600", "200", "1500"], NUMBERS),
        "--devices": (["20", "5", "1"], ["0", "-1", "1.5", "100000", "x"]),
        "--budget": (["1", "2.5"], [*NUMBERS, "0.1"]),
        "--seeds": (["1", "2"], ["0", "-1", "x", "1.5"]),
        "--seed": (["0", "7"], ["-1", "2147483648", "x", "1e3"]),
        "--observation-error": (["0", "0.2"], ["-1", "nan", "inf", "x"]),
        "--workers": (["1", "2"], ["0", "-1", "x"]),
        "--side-by-side": (["1", "2"], ["0", "-3", "x"]),
        "--dataset": (["mnist"], ["no_such", "", "../mnist", "mnist:9.9.9"]),
    }
    several = {"--phi", "--policy", "--distribution", "--radius", "--devices"}
    line = ["--budget", "1.5", "--seeds", "1"]
    for name, (good, bad) in options.items():
        if rng.random() < 0.3:
            count = int(rng.integers(1, 3)) if name in several else 1
            line += [name, *(value(rng, good, bad) for _ in range(count))]
    return line + ([str(rng.choice(["--unknown", "stray", "--phi"]))] if rng.random() < 0.03 else [])


def fuzz_commands(seed: int, num_commands: int, only: int | None) -> collections.Counter:
    import sweep

    outcomes: collections.Counter = collections.Counter()
    with Progress(num_commands, "commands") as shown:
        shown.begin("running", counts=True)
        for index in range(num_commands) if only is None else [only]:
            line = command_line(Rng(np.random.PCG64([seed, 1000, index])))
            outcome, fault = attempt_command(sweep, line)
            outcomes[outcome] += 1
            if fault:
                outcomes["fault"] += 1
                print(f"\n--seed {seed} --command {index}: {fault}\n  {' '.join(line)}", file=sys.stderr)
            shown.update(index + 1, index + 1)
    return outcomes


def attempt_command(sweep: Any, line: list[str]) -> tuple[str, str]:
    printed, errors = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as out:
        try:
            with limited(3 * LONGEST_S), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
                code = sweep.main([*line, "--out", out])
        except SystemExit as end:  # argparse's own
            code = end.code
        except Hang:
            return "hang", "no end within three minutes"
        except BaseException as error:
            return "other error", f"{type(error).__name__}: {error}"
        named = [text for text in errors.getvalue().splitlines() if "error:" in text]
        if code == 2:
            left = [path.name for path in Path(out).iterdir()]
            fault = "" if len(named) == 1 else f"{len(named)} lines with errors"
            return "named error", fault or (f"left behind: {left}" if left and "sweep.json" not in left else "")
        if code != 0 or named:
            return "other code", f"code {code}: {named}"
        rows = (Path(out) / "summary.csv").read_text()
        columns = rows.splitlines()[0].split(",")
        for row in rows.splitlines()[1:]:
            entries = dict(zip(columns, row.split(","), strict=True))
            for name in ("best_accuracy", "final_accuracy", "elapsed_s"):
                if not np.isfinite(float(entries[name])):
                    return "results", f"{name} is {entries[name]}"
    return "results", ""


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__,
        epilog="examples:\n  python experiments/fuzz.py --calls 100000 --commands 500\n"
        "  python experiments/fuzz.py --seed 0 --only allocate --call 17",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--calls", type=int, default=100_000, metavar="N", help="of functions (default: 100000)")
    p.add_argument("--commands", type=int, default=500, metavar="N", help="of the sweep script (default: 500)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--x64", action="store_true", help="with JAX in double precision")
    p.add_argument("--only", choices=list(TARGETS), help="one function")
    p.add_argument("--call", type=int, metavar="I", help="one call of it")
    p.add_argument("--command", type=int, metavar="I", help="one command")
    args = p.parse_args()
    warnings.simplefilter("ignore")
    jax.config.update("jax_enable_x64", args.x64)
    faults = 0
    if args.command is None:
        outcomes = fuzz_functions(args.seed, args.calls, args.only, args.call)
        for name, counted in outcomes.items():
            print(f"{name}: {', '.join(f'{number} {what}' for what, number in sorted(counted.items()))}")
        calls = sum(number for counted in outcomes.values() for what, number in counted.items() if what != "fault")
        faults += sum(counted["fault"] for counted in outcomes.values())
        print(f"{calls} calls with seed {args.seed}{' in double precision' if args.x64 else ''}: {faults} faults")
    if args.only is None and (args.commands or args.command is not None):
        counted = fuzz_commands(args.seed, args.commands, args.command)
        commands = sum(number for what, number in counted.items() if what != "fault")
        print(f"commands: {', '.join(f'{number} {what}' for what, number in sorted(counted.items()))}")
        print(f"{commands} commands with seed {args.seed}: {counted['fault']} faults")
        faults += counted["fault"]
    return 1 if faults else 0


if __name__ == "__main__":
    leave(main())
