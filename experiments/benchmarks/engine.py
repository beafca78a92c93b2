"""The cost of a round, its parts, and how close it comes to the limit of the machine.

Measures in turns, on one core except for 4. (single rounds five times as often as sweeps):
  1. the speed of a large matrix product, which sets the limit: 4 x 50176 operations per training sample (the first
     layer needs no gradient of its input) and 2 x 50176 per test sample, with 10,000 test samples per round. Alg. 3
     also asks for the gradient of the trained model on the first mini-batch, for its estimates;
  2. the parts of a round of Alg. 3 under FC, in the middle of a run; bookkeeping is the remainder, and so small that
     noise may make it negative;
  3. rounds of n of 20 devices: training and testing alone, and all of Alg. 3;
  4. whole sweeps of 1, 5 and 20 seeds, on all cores, and of one seed whose run computes on all cores.

    python experiments/benchmarks/engine.py      # about 10 minutes
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
from jax import lax

import fcjax
from fcjax import keys
from fcjax.learning import evaluation, updates
from fcjax.runtime import cluster, hardware, programs
from fcjax.simulation.rounds import misjudge, round_keys
from fcjax.simulation.simulate import advance, begin

NUM_DEVICES = 20
NUMBERS = (1, 3, 6, 12, 20)
CORES = hardware.num_cores()
WAYS = ((1, 1), (1, CORES), (5, 1), (20, 1))  # seeds, cores per run
WEIGHTS = 784 * 64  # in the first layer; the second has about a hundredth
ROUNDS = 16  # per program


def main(argv: list[str] | None = None) -> None:
    parser = report.parser(__doc__)
    args = parser.parse_args(argv)
    hardware.use_one_thread()
    programs.keep_on_disk()
    print(report.machine())
    experiment = jax.tree.map(np.asarray, fcjax.presets.shi2020("mnist", distribution="l1"))
    samples = dataclasses.replace(experiment.training, num_samples=np.asarray(experiment.data.sizes, np.float32))
    experiment = dataclasses.replace(experiment, training=samples)
    later = Later(experiment)
    peak = {"peak": matrix_product()}

    parts = later.parts()
    figures = report.in_turns(peak | parts, 5 * args.repetitions)
    part_rows = [
        {"part": part, "ms": 1e3 * seconds, "% of the round": 100 * seconds / figures["whole round"]}
        for part, seconds in split(figures).items()
    ]
    scheduled = float(np.sum(later.records.scheduled)) / ROUNDS
    title = f"A round of FC, {scheduled:.1f} of {NUM_DEVICES} devices scheduled, on one core: ms per round"
    table = report.write("engine_parts", title, part_rows, args.out)

    cases = peak | {"testing": parts["testing"]}
    for n in NUMBERS:
        cases[f"training and testing, n = {n}"] = later.training(n, estimate_on=None, test=True)
        cases[f"Alg. 3, n = {n}"] = later.rounds_of(n)
    figures = report.in_turns(cases, 5 * args.repetitions)
    print(f"\npeak speed of matrix products on one core: {figures['peak']:.0f} GFLOP/s")
    round_rows = []
    for n in NUMBERS:
        limit, of_all = (1e9 * figures["peak"] / operations(n, estimation=estimation) for estimation in (False, True))
        alone, whole = (1 / figures[f"{what}, n = {n}"] for what in ("training and testing", "Alg. 3"))
        row = {"n": n, "limit (rounds/s)": limit, "training and testing": alone, "% of limit": 100 * alone / limit}
        row |= {"limit of Alg. 3": of_all, "all of Alg. 3": whole, "% of its limit": 100 * whole / of_all}
        row["ms but for testing"] = 1e3 * (1 / whole - figures["testing"])
        round_rows.append(row)
    report.write("engine_rounds", "Rounds of n devices, rounds/s", round_rows, args.out)
    one, all_ = round_rows[0]["ms but for testing"], round_rows[-1]["ms but for testing"]
    print(f"Without testing, a round of 1 device costs {one / all_:.3f} of a round of {NUM_DEVICES}.")

    with contextlib.ExitStack() as stack:
        clients = {cores: stack.enter_context(cluster.local_client(CORES // cores, cores)) for _, cores in WAYS[1:]}
        sweeps = sweep_cases(later, clients)
        figures = report.in_turns({"peak": peak["peak"]} | sweeps, args.repetitions)
    sweep_rows = []
    for n in NUMBERS:
        for seeds, cores in WAYS:
            speed, alone = (figures[f"n = {n}, {way}"] for way in ((seeds, cores), WAYS[0]))
            row = {"n": n, "seeds": seeds, "cores per run": cores, "rounds/s": speed, "times one run": speed / alone}
            limit = CORES * 1e9 * figures["peak"] / operations(n, estimation=True)
            sweep_rows.append(row | {"% of limit": 100 * speed / limit})
    report.write("engine_sweeps", "Sweeps with all of Alg. 3, rounds/s", sweep_rows, args.out)
    draw(table, round_rows, args.out)


def operations(n: int, *, estimation: bool) -> float:
    """Returns the number of operations in a round, for training n devices and testing."""
    return (n * (5 + estimation) * 128 * 4 + 10_000 * 2) * WEIGHTS


def on_one_core(step: Callable, carry: Any, shared: Any, num_rounds: int = ROUNDS) -> Callable[[], float]:
    """Returns a function that measures the time per round of step(carry, index, shared) -> (carry, output)."""
    program = jax.jit(lambda carry, shared: lax.scan(lambda c, i: step(c, i, shared), carry, jnp.arange(num_rounds)))
    carry, shared = jax.device_put((carry, shared))

    def measure() -> float:
        start = time.perf_counter()
        jax.block_until_ready(program(carry, shared))
        return (time.perf_counter() - start) / num_rounds

    measure()
    return measure


def matrix_product(size: int = 1024) -> Callable[[], float]:
    """Returns a function that measures GFLOP/s."""
    ones = np.full((size, size), 1e-3, np.float32)
    measure = on_one_core(lambda b, _, a: (a @ b, None), ones, ones)
    return lambda: 2 * size**3 / measure() / 1e9


class Later:
    """A run under FC, advanced to where the number of scheduled devices is typical."""

    def __init__(self, experiment: fcjax.Experiment, num_rounds: int = 48):
        self.experiment = experiment
        self.policy = fcjax.policies.fast_converge(0.05)
        self.key = jax.random.key(0)
        first = begin(self.key, self.policy.init(experiment.cell), experiment)
        go_on = jax.jit(lambda state, e, n: advance(self.key, state, e, self.policy, 10**6, n), static_argnums=2)
        state, _ = go_on(first, experiment, num_rounds)
        self.state = jax.tree.map(np.asarray, state)
        self.records = jax.tree.map(np.asarray, go_on(state, experiment, ROUNDS)[1])

    def parts(self) -> dict[str, Callable[[], float]]:
        seen = fcjax.Observation(self.records.gain, self.records.compute_s)

        def observe(carry, index, experiment):
            key = jax.random.fold_in(self.key, index)
            _, truth = experiment.world.observe(key, (), experiment.cell, experiment.training)
            return carry, misjudge(round_keys(key).error, truth, experiment.observation_error)

        def schedule(policy_state, index, shared):
            experiment, state, seen = shared
            observation = jax.tree.map(lambda x: x[index], seen)
            context = fcjax.RoundContext(
                observation, state.estimates, experiment.cell, experiment.training, state.elapsed_s, index
            )
            return self.policy.select(self.key, policy_state, context)

        def test(params, _, experiment):
            params = jax.tree.map(lambda x: 0.999 * x, params)  # keeps XLA from testing once for all rounds
            return params, evaluation.evaluate(params, experiment.model, experiment.test_x, experiment.test_y)

        def everything(state, _, experiment):
            state, record = advance(self.key, state, experiment, self.policy, 10**6, 1)
            return state, record

        return {
            "observation": on_one_core(observe, np.zeros(()), self.experiment),
            "scheduling and allocation": on_one_core(schedule, self.state.policy, (self.experiment, self.state, seen)),
            "training": self.training(None, estimate_on=None),
            "training with estimation": self.training(None, estimate_on="batch"),
            "testing": on_one_core(test, self.state.params, self.experiment),
            "whole round": on_one_core(everything, self.state, self.experiment),
        }

    def training(self, n: int | None, estimate_on: Any, test: bool = False) -> Callable[[], float]:
        """Measures training of the devices that FC has scheduled, or of n devices."""
        order = np.random.default_rng(0).permuted(np.tile(np.arange(NUM_DEVICES), (ROUNDS, 1)), axis=1)
        masks = self.records.scheduled if n is None else order < n

        def step(params, index, shared):
            experiment, masks = shared
            trained = updates.train_round(
                keys.per_device(jax.random.fold_in(self.key, index), NUM_DEVICES),
                params,
                masks[index],
                experiment.estimates,
                experiment.data,
                experiment.training,
                experiment.model,
                width=1,
                estimate_on=estimate_on,
            )
            score = (
                evaluation.evaluate(trained.params, experiment.model, experiment.test_x, experiment.test_y)
                if test
                else ()
            )
            return trained.params, (trained.loss, trained.estimates, score)

        return on_one_core(step, self.state.params, (self.experiment, masks))

    def rounds_of(self, n: int) -> Callable[[], float]:
        """Measures rounds of Alg. 3 with n scheduled devices."""
        policy = fcjax.policies.fixed(n)
        state = dataclasses.replace(self.state, policy=np.asarray(policy.init(self.experiment.cell)))
        step = lambda state, _, experiment: advance(self.key, state, experiment, policy, 10**6, 1)  # noqa: E731
        return on_one_core(step, state, endless(self.experiment))


def endless(experiment: fcjax.Experiment) -> fcjax.Experiment:
    return dataclasses.replace(experiment, training=dataclasses.replace(experiment.training, budget_s=np.float32(1e6)))


def split(figures: dict[str, float]) -> dict[str, float]:
    """Splits a round into its parts; bookkeeping is the remainder."""
    parts = {name: figures[name] for name in ("observation", "scheduling and allocation", "training")}
    parts["estimation"] = figures["training with estimation"] - figures["training"]
    parts["testing"] = figures["testing"]
    parts["bookkeeping"] = figures["whole round"] - sum(parts.values())
    return parts | {"whole round": figures["whole round"]}


def sweep_cases(later: Later, clients: dict[int, Any]) -> dict[str, Callable[[], float]]:
    """Returns cases that measure rounds/s of sweeps with about 100 rounds per run, once workers have compiled.

    A single run on one core is executed by this process, all others by the workers of the client for their cores.
    """
    cases = {}
    for n in NUMBERS:
        policy = fcjax.policies.fixed(n)
        run = fcjax.simulate(later.key, policy, endless(later.experiment), max_rounds=8)
        budget_s = 100 * float(np.mean(run.history.round_s))
        for way in WAYS:
            seeds, cores = way
            where = {"workers": 1} if way == WAYS[0] else {"client": clients[cores], "cores": cores}

            def measure(n=n, policy=policy, budget_s=budget_s, seeds=seeds, where=where):
                results = fcjax.sweep({f"fixed-{n}": policy}, seeds=seeds, budget_s=budget_s, **where)
                return int(np.sum(~np.isnan(results.accuracy))) / results.run_s

            measure()
            cases[f"n = {n}, {way}"] = measure
    return cases


def draw(parts, rows, out) -> None:
    figure, (left, right) = report.plt.subplots(1, 2, figsize=(10, 3.5))
    shown = parts[parts.part != "whole round"]
    left.barh(shown.part, shown.ms)
    left.invert_yaxis()
    left.set_xlabel("ms of a round, one core")
    numbers = [row["n"] for row in rows]
    for name, style in (("limit of Alg. 3", "k--"), ("training and testing", "o-"), ("all of Alg. 3", "s-")):
        right.plot(numbers, [row[name] for row in rows], style, label=name)
    right.set(xlabel="scheduled devices", ylabel="rounds/s", ylim=(0, None), xticks=numbers)
    right.legend()
    report.save(figure, "engine", out)


if __name__ == "__main__":
    main()
