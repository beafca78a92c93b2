"""How runs are best laid out: over how many workers, and how many side by side on each.

Sweeps of FC on MNIST in all layouts, in turns. Side by side means one program for several runs at a time, by
`jax.vmap`; otherwise a worker does them one after another. By default `fcjax.sweep` has a worker for each core, with
one run at a time; on accelerators, many runs side by side.

    python experiments/benchmarks/layouts.py      # about 6 minutes
"""

from functools import partial

import report

import fcjax
from fcjax.executor import num_cores

NUM_RUNS = 8
BUDGET_S = 20.0


def main(argv: list[str] | None = None) -> None:
    args = report.parser(__doc__).parse_args(argv)
    print(report.machine())
    loaded = fcjax.data.load("mnist")
    layouts = [(number, beside) for number in sorted({1, num_cores()}) for beside in (1, 2, 4)]
    cases = {str(layout): partial(measure, loaded, *layout) for layout in layouts}
    for measure_once in cases.values():  # compiles
        measure_once()
    seconds = report.in_turns(cases, args.repetitions)
    one = seconds[str((1, 1))]
    rows = [
        {"workers": number, "side by side": beside, "s": spent, "times one worker": one / spent}
        for (number, beside), spent in zip(layouts, seconds.values(), strict=True)
    ]
    title = f"{NUM_RUNS} runs of FC on MNIST, {BUDGET_S:g} simulated s each"
    draw(report.tell("layouts", title, rows, args.out), args.out)


def draw(table, out) -> None:
    figure, axes = report.plt.subplots(figsize=(5, 3))
    for number, shown in table.groupby("workers", sort=False):
        label = f"{number} worker{'s'[: number > 1]}"
        axes.plot(shown["side by side"], shown["times one worker"], "o-", label=label)
    axes.set(xlabel="runs side by side on a worker", ylabel="speed (one after another on one = 1)", ylim=(0, None))
    axes.set_xticks(sorted(set(table["side by side"])))
    axes.legend()
    report.save(figure, "layouts", out)


def measure(loaded: fcjax.data.Dataset, workers: int, side_by_side: int) -> float:
    """Seconds that the runs take, without compilation."""
    how = {"workers": workers, "side_by_side": side_by_side}
    return float(fcjax.sweep("fc", dataset=loaded, budget_s=BUDGET_S, seeds=NUM_RUNS, **how).run_s)


if __name__ == "__main__":
    main()
