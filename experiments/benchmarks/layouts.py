"""How runs are best laid out: over how many devices (or cores), and how many side by side on each.

Sweeps of FC on MNIST in all layouts, in turns. Side by side is one program for several runs at a time, by `jax.vmap`;
otherwise a device does them one after another. What `fcjax.sweep` chooses by itself is all devices, and on a CPU one
run at a time on each core.

    python experiments/benchmarks/layouts.py      # about 5 minutes
"""

from functools import partial

import report

import fcjax
from fcjax import devices

NUM_RUNS = 8
BUDGET_S = 20.0


def main(argv: list[str] | None = None) -> None:
    args = report.parser(__doc__).parse_args(argv)
    print(report.machine())
    loaded = fcjax.data.load("mnist")
    workers = sorted({1, len(devices.for_programs(NUM_RUNS))})
    layouts = [(number, beside) for number in workers for beside in (1, 2, 4) if number * beside <= NUM_RUNS]
    cases = {layout: partial(measure, loaded, *layout) for layout in layouts}
    for measure_once in cases.values():  # compiles
        measure_once()
    seconds = report.in_turns({str(layout): case for layout, case in cases.items()}, args.repetitions)
    one = seconds[str((1, 1))]
    rows = [
        {"devices": number, "side by side": beside, "s": spent, "times one device": one / spent}
        for (number, beside), spent in zip(layouts, seconds.values(), strict=True)
    ]
    table = report.tell("layouts", f"{NUM_RUNS} runs of FC on MNIST, {BUDGET_S:g} simulated s each", rows, args.out)
    figure, axes = report.plt.subplots(figsize=(5, 3))
    for number, shown in table.groupby("devices"):
        axes.plot(shown["side by side"], shown["times one device"], "o-", label=f"{number} devices")
    axes.set(xlabel="runs side by side on a device", ylabel="speed, one run on one device = 1", ylim=(0, None))
    axes.legend()
    report.save(figure, "layouts", args.out)


def measure(loaded: fcjax.data.Dataset, workers: int, side_by_side: int) -> float:
    """Seconds that the runs take, without compilation."""
    results = fcjax.sweep(
        "fc", dataset=loaded, budget_s=BUDGET_S, seeds=NUM_RUNS, workers=workers, side_by_side=side_by_side
    )
    return float(results.run_s)


if __name__ == "__main__":
    main()
