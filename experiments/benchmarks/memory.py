"""Peak memory against the number of seeds and devices.

Each row is a separate process that executes one sweep (or one `jax.vmap` of `simulate`) of FC on MNIST over 5 simulated
seconds, and reports its peak memory and that of its largest worker. All seeds share one copy of the images. The rows
"file" run `experiments/sweep.py` over 20 simulated seconds, with all its files, tables and plots. The rows "cnn" train
a convolutional network on 10 devices at a time, in batches of 32, of which 1000 devices can fill one.

    python experiments/benchmarks/memory.py      # about 15 minutes
"""

import contextlib
import functools
import json
import resource
import subprocess
import sys
import tempfile
import time

import report

SWEEPS = ((1, 20), (10, 20), (100, 20), (1, 100), (1, 400))  # seeds, devices; with 400, each can fill a mini-batch
BUDGET_S = 5.0
BUDGET_OF_FILES_S = 20.0
BUDGET_OF_NETWORKS_S = 8.0
FILES = ((50, 20), (1000, 20))
NETWORKS = ((1, 20), (1, 1000))


def main(argv: list[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--case", nargs=3, metavar=("HOW", "SEEDS", "DEVICES"), help="measure this in this process")
    args = parser.parse_args(argv)
    if args.case:
        how, seeds, num_devices = args.case
        print(json.dumps(measure(how, int(seeds), int(num_devices))))
        return
    print(report.machine())
    rows = []
    cases = [*(("sweep", *sizes) for sizes in SWEEPS), ("vmap", 1, 20), ("vmap", 100, 20)]
    cases += [("cnn", *sizes) for sizes in NETWORKS]
    for how, seeds, num_devices in [*cases, *(("file", *sizes) for sizes in FILES)]:
        command = [sys.executable, __file__, "--case", how, str(seeds), str(num_devices)]
        row = {"how": how, "seeds": seeds, "M": num_devices}
        lines = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for _ in range(1 if how == "file" else args.repetitions)
        ]
        lines.sort(key=lambda line: line["peak GB"])
        rows.append(row | lines[len(lines) // 2])
        print(rows[-1], flush=True)
    for row in rows:
        fewest = next(first for first in rows if (first["how"], first["M"]) == (row["how"], row["M"]))
        row["GB above the fewest seeds"] = row["peak GB"] - fewest["peak GB"]
    draw(report.write("memory", "Peak memory, FC on MNIST", rows, args.out), args.out)


def draw(table, out) -> None:
    figure, (left, right) = report.plt.subplots(1, 2, figsize=(8, 3), sharey=True)
    for how, shown in table[table["M"] == 20].groupby("how"):
        left.semilogx(shown["seeds"], shown["peak GB"], "o-", label=how)
    by_devices = table[(table["seeds"] == 1) & (table["how"] == "sweep")]
    right.semilogx(by_devices["M"], by_devices["peak GB"], "o-")
    left.set(xlabel="seeds, 20 devices", ylabel="peak memory (GB)", ylim=(0, None))
    right.set(xlabel="devices, one seed")
    for axes, shown in ((left, table["seeds"]), (right, by_devices["M"])):
        axes.set_xticks(sorted(set(shown)), labels=sorted(set(shown)))
        axes.minorticks_off()
    left.legend()
    report.save(figure, "memory", out)


def measure(how: str, seeds: int, num_devices: int) -> dict[str, float]:
    import jax

    import fcjax

    start, further = time.monotonic(), {}
    if how == "file":
        with tempfile.TemporaryDirectory() as folder:
            from fcjax import cli

            with contextlib.redirect_stdout(sys.stderr):
                cli.sweep(
                    [*f"--seeds {seeds} --devices {num_devices} --budget {BUDGET_OF_FILES_S}".split(), "--out", folder]
                )
    elif how == "cnn":
        cell = {"num_devices": num_devices, "distribution": "iid", "budget_s": BUDGET_OF_NETWORKS_S}
        preset = functools.partial(fcjax.presets.cnn, batch_size=32)
        results = fcjax.sweep("fixed(n=10)", preset=preset, seeds=seeds, workers=1, **cell)
        further = {"s per round": results.run_s / float(results.rounds.sum())}
    elif how == "sweep":
        fcjax.sweep("fc", distribution="iid", seeds=seeds, num_devices=num_devices, budget_s=BUDGET_S)
    else:
        experiment = fcjax.presets.shi2020("mnist", distribution="iid", num_devices=num_devices, budget_s=BUDGET_S)
        policy = fcjax.policies.fast_converge(0.05)
        run = jax.vmap(lambda key: fcjax.simulate(key, policy, experiment))
        jax.block_until_ready(run(jax.random.split(jax.random.key(0), seeds)))
    unit = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss, in bytes
    here, worker = (
        resource.getrusage(who).ru_maxrss * unit / 1e9 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return {"peak GB": here, "largest worker GB": worker, "s": time.monotonic() - start} | further


if __name__ == "__main__":
    main()
