"""How runs are best laid out: over how many devices (or cores), and how many side by side on each.

Sweeps of FC on MNIST in all layouts, in turns. Side by side is one program for several runs at a time, by `jax.vmap`;
otherwise a device does them one after another. What `fcjax.sweep` chooses by itself is all devices, and on a CPU one
run at a time on each core. Its workers take runs from a queue. The rows "mesh" are what one would write without it: the
runs are cut into equal parts, and `jax.shard_map` over `jax.make_mesh` does a part on each device, as one program.

    python experiments/benchmarks/layouts.py      # about 6 minutes
"""

import os
import time
from functools import partial

import jax
import numpy as np
import report
from jax.sharding import PartitionSpec

import fcjax
from fcjax import devices

NUM_RUNS = 8
BUDGET_S = 20.0


def main(argv: list[str] | None = None) -> None:
    args = report.parser(__doc__).parse_args(argv)
    if not os.environ.get("JAX_NUM_CPU_DEVICES"):
        jax.config.update("jax_num_cpu_devices", devices.num_cores())  # no matter where there are accelerators
    print(report.machine())
    loaded = fcjax.data.load("mnist")
    numbers = sorted({1, len(devices.for_programs(NUM_RUNS))})
    layouts = [("queue", number, beside) for number in numbers for beside in (1, 2, 4) if number * beside <= NUM_RUNS]
    layouts += [("mesh", number, 1) for number in numbers]
    cases = {
        layout: Mesh(loaded, layout[1]) if layout[0] == "mesh" else partial(measure, loaded, *layout[1:])
        for layout in layouts
    }
    for measure_once in cases.values():  # compiles
        measure_once()
    seconds = report.in_turns({str(layout): case for layout, case in cases.items()}, args.repetitions)
    one = seconds[str(("queue", 1, 1))]
    rows = [
        {"runs from": how, "devices": number, "side by side": beside, "s": spent, "times one device": one / spent}
        for (how, number, beside), spent in zip(layouts, seconds.values(), strict=True)
    ]
    draw(
        report.tell("layouts", f"{NUM_RUNS} runs of FC on MNIST, {BUDGET_S:g} simulated s each", rows, args.out),
        args.out,
    )


def draw(table, out) -> None:
    figure, axes = report.plt.subplots(figsize=(5, 3))
    for (how, number), shown in table.groupby(["runs from", "devices"], sort=False):
        label = f"{how}, {number} device{'s'[: number > 1]}"
        axes.plot(shown["side by side"], shown["times one device"], "xo"[how == "queue"] + "-", label=label)
    axes.set(xlabel="runs side by side on a device", ylabel="speed (one after another on one = 1)", ylim=(0, None))
    axes.set_xticks(sorted(set(table["side by side"])))
    axes.legend()
    report.save(figure, "layouts", out)


def measure(loaded: fcjax.data.Dataset, workers: int, side_by_side: int) -> float:
    """Seconds that the runs take, without compilation."""
    results = fcjax.sweep(
        "fc", dataset=loaded, budget_s=BUDGET_S, seeds=NUM_RUNS, workers=workers, side_by_side=side_by_side
    )
    return float(results.run_s)


class Mesh:
    """The same runs as one program over a mesh of devices."""

    def __init__(self, loaded: fcjax.data.Dataset, num_devices: int):
        preset = partial(fcjax.presets.shi2020, loaded, budget_s=BUDGET_S)
        experiments = [preset(seed=seed) for seed in range(NUM_RUNS)]
        leaves, structure = jax.tree.flatten(experiments[0])
        columns = list(zip(*map(jax.tree.leaves, experiments), strict=True))
        is_shared = [all(leaf is column[0] for leaf in column) for column in columns]
        shared = [leaf for leaf, one in zip(leaves, is_shared, strict=True) if one]
        own = [np.stack(column) for column, one in zip(columns, is_shared, strict=True) if not one]
        policy = fcjax.policies.fast_converge(0.05)
        max_rounds = fcjax.experiment.most_rounds(experiments[0])

        def part(keys, own, shared):
            def run(of_run):
                key, own = of_run
                rest = iter(shared), iter(own)
                experiment = jax.tree.unflatten(structure, [next(rest[not one]) for one in is_shared])
                return fcjax.simulate(key, policy, experiment, max_rounds=max_rounds)

            return jax.lax.map(run, (keys, own))

        mesh = jax.make_mesh((num_devices,), ("runs",), devices=jax.devices()[:num_devices])
        by_run = PartitionSpec("runs")
        specs = {"in_specs": (by_run, by_run, PartitionSpec()), "out_specs": by_run}
        self._program = jax.jit(jax.shard_map(part, mesh=mesh, check_vma=False, **specs))
        keys = jax.vmap(jax.random.key)(np.arange(NUM_RUNS))
        place = partial(jax.sharding.NamedSharding, mesh)
        self._given = jax.device_put((keys, own, shared), (place(by_run), place(by_run), place(PartitionSpec())))

    def __call__(self) -> float:
        before = time.monotonic()
        jax.block_until_ready(self._program(*self._given))
        return time.monotonic() - before


if __name__ == "__main__":
    main()
