"""Decision time of policies against the number of devices, compared with Alg. 2 as published.

For each number of devices, FC and exact use the phi with which FC schedules the given number, so that only the cell
grows; the other policies use the paper's thresholds. Alg. 2 as published allocates bandwidth for every candidate device
with SciPy's brentq and Lambert W (tests/support/oracles.py); it must make the same decision.

    python experiments/benchmarks/scheduler.py      # about a minute
"""

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import report
from jax import lax

import fcjax

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
import oracles

POLICIES = ("fc", "exact", "as-l", "as-h", "cs-l", "cs-h")
DECISIONS = 8  # per program, all for the same round


def main(argv: list[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[20, 100, 200, 1000, 10_000])
    parser.add_argument("--literal", type=int, nargs="+", default=[20, 100, 200], help="devices for published Alg. 2")
    parser.add_argument("--scheduled", type=int, default=6, help="devices that FC schedules (%(default)s)")
    args = parser.parse_args(argv)
    print(report.machine())
    found = {m: world_with(args.scheduled, m) for m in sorted({*args.devices, *args.literal})}
    worlds, phis = ({m: pair[i] for m, pair in found.items()} for i in (0, 1))
    decide = {(name, m): Decide(name, phis[m], worlds[m]) for name in POLICIES for m in worlds}
    cases: dict[str, Callable[[], float]] = {f"{name}, M = {m}": case.measure for (name, m), case in decide.items()}
    literal = {f"as printed, M = {m}": Literal(phis[m], worlds[m]) for m in args.literal}
    figures = report.in_turns(cases | {name: case.measure for name, case in literal.items()}, args.repetitions)

    rows, smallest = [], {}
    for name in POLICIES:
        before = None
        for m in worlds:
            seconds = figures[f"{name}, M = {m}"]
            smallest[name] = seconds if m == 100 else smallest.get(name)
            row = {"policy": name, "M": m, "scheduled": decide[name, m].number, "us a decision": 1e6 * seconds}
            row["times M = 100"] = seconds / smallest[name] if m >= 100 and smallest[name] else math.nan
            row["growth exponent"] = math.log(seconds / before[1]) / math.log(m / before[0]) if before else math.nan
            row["temporary MB"] = decide[name, m].memory_mb
            rows.append(row)
            before = m, seconds
    table = report.write("scheduler", "Time of a decision", rows, args.out)
    beside = []
    for m in args.literal:
        case, seconds, ours = literal[f"as printed, M = {m}"], figures[f"as printed, M = {m}"], figures[f"fc, M = {m}"]
        row = {"M": m, "as printed (s)": seconds, "fcjax (s)": ours, "times faster": seconds / ours}
        beside.append(row | {"same decision": case.chosen == decide["fc", m].chosen})
    report.write("scheduler_literal", "FC beside Alg. 2 as printed", beside, args.out)
    draw(table, beside, args.out)


def world_with(number: int, num_devices: int) -> tuple[fcjax.RoundContext, float]:
    """Returns a round in which FC can schedule `number` devices, and the phi with which it does."""
    for seed in range(20):
        context = world(num_devices, seed)
        if (phi := phi_for(number, context)) is not None:
            return context, phi
    raise SystemExit(f"found no phi with which FC schedules {number} of {num_devices} devices: try another --scheduled")


def world(num_devices: int, seed: int) -> fcjax.RoundContext:
    """Draws a round in the paper's cell, with estimates like those in the middle of a run on MNIST."""
    key = jax.random.key(seed)
    cell = fcjax.Cell(20e6, 10**-20.4, np.full(num_devices, 0.01), 32.0 * 50890)
    gain = fcjax.radio.path_gain(fcjax.radio.place(jax.random.fold_in(key, 0), cell), cell)
    compute_s = fcjax.latency.compute_time(jax.random.fold_in(key, 1), 640, cell)
    spread = jnp.exp(0.3 * jax.random.normal(jax.random.fold_in(key, 2), (3, num_devices)))
    estimates = fcjax.Estimates(1.5 * spread[0], 12 * spread[1], 2 * spread[2])
    training = fcjax.Training(num_samples=np.full(num_devices, 3000.0))
    context = fcjax.RoundContext(fcjax.Observation(gain, compute_s), estimates, cell, training, 0.0, 0)
    return jax.tree.map(lambda x: jnp.asarray(x, float), context)


def phi_for(number: int, context: fcjax.RoundContext) -> float | None:
    """Returns a phi with which FC schedules `number` devices, or None: the number rises with phi, but can jump."""
    low, high = math.log(1e-4), math.log(1e5)
    for _ in range(30):
        phi = math.exp((low + high) / 2)
        found = int(count(jnp.asarray(phi, float), context))
        if found == number:
            return phi
        low, high = (math.log(phi), high) if found < number else (low, math.log(phi))
    return None


@jax.jit
def count(phi: jax.Array, context: fcjax.RoundContext) -> jax.Array:
    return jnp.sum(fcjax.policies.fast_converge().select(jax.random.key(0), phi, context)[1].scheduled)


class Decide:
    """A policy's decision in a round."""

    def __init__(self, name: str, phi: float, context: fcjax.RoundContext):
        policy = fcjax.policies.by_name(name, phi=phi)
        state, key = policy.init(context.cell), jax.random.key(0)
        # Copies as data, so that XLA cannot see that they are equal.
        contexts = jax.tree.map(lambda x: jnp.broadcast_to(x, (DECISIONS, *x.shape)) + 0, context)
        self._contexts = contexts
        each = lambda context: policy.select(key, state, context)[1].scheduled  # noqa: E731
        self._program = jax.jit(lambda contexts: lax.map(each, contexts)).lower(contexts).compile()
        self.memory_mb = self._program.memory_analysis().temp_size_in_bytes / 1e6
        self.chosen = set(np.flatnonzero(self._program(contexts)[0]).tolist())
        self.number = len(self.chosen)

    def measure(self) -> float:
        start = time.perf_counter()
        jax.block_until_ready(self._program(self._contexts))
        return (time.perf_counter() - start) / DECISIONS


class Literal:
    """Alg. 2 as published."""

    def __init__(self, phi: float, context: fcjax.RoundContext):
        arrays = jax.tree.map(lambda x: np.asarray(x, np.float64), context)
        cell, training = arrays.cell, arrays.training
        self._world = {"gain": arrays.observation.gain, "compute_s": arrays.observation.compute_s}
        self._world |= {"power_w": cell.power_w, "upload_bits": float(cell.upload_bits)}
        self._world |= {name: float(getattr(cell, name)) for name in ("bandwidth_hz", "noise_psd_w_hz")}
        self._settings = {name: getattr(arrays.estimates, name) for name in ("rho", "beta", "delta")}
        self._settings |= {"num_samples": training.num_samples, "learning_rate": float(training.learning_rate)}
        self._settings |= {"local_steps": training.local_steps, "budget_s": float(training.budget_s), "phi": phi}
        self.chosen: set[int] = set()

    def measure(self) -> float:
        start = time.perf_counter()
        self.chosen = oracles.greedy_schedule(self._world, **self._settings)
        return time.perf_counter() - start


def draw(table, beside, out) -> None:
    figure, axes = report.plt.subplots(figsize=(6, 4))
    for name, rows in table.groupby("policy", sort=False):
        axes.loglog(rows["M"], rows["us a decision"] / 1e6, "o-", label=name)
    axes.loglog([row["M"] for row in beside], [row["as printed (s)"] for row in beside], "k^--", label="FC as printed")
    axes.set(xlabel="devices in the cell", ylabel="s a decision")
    axes.legend(fontsize="small")
    report.save(figure, "scheduler", out)


if __name__ == "__main__":
    main()
