"""How long a user waits: `python experiments/sweep.py --phi 0.05`, the first time and again, and MNIST's Table III.

Each repetition begins with an empty folder for compiled programs; the data set is there already. Table III (7 policies,
3 radii, 3 distributions, 5 seeds) is estimated from all its cells with one seed: its runs would take five times as
long, the rest as long as here.

    python experiments/benchmarks/whole_job.py      # about 4 minutes
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import report

SWEEP = Path(__file__).parents[1] / "sweep.py"
POLICIES = ("fc", "rd", "pf", "cs-l", "cs-h", "as-l", "as-h")
TABLE_III = ["--policy", *POLICIES, "--radius", "200", "600", "1000", "--distribution", "l1", "l2", "iid"]


def main(argv: list[str] | None = None) -> None:
    parser = report.parser(__doc__)
    args = parser.parse_args(argv)
    print(report.machine())
    figures = []
    for repetition in range(args.repetitions):
        with tempfile.TemporaryDirectory() as programs:
            for when in ("first", "again"):
                figures.append({"job": "sweep.py --phi 0.05", "when": when} | measure(["--phi", "0.05"], programs))
                print(f"{repetition + 1} of {args.repetitions}: {figures[-1]}", flush=True)
    with tempfile.TemporaryDirectory() as programs:
        sample = measure([*TABLE_III, "--seeds", "1"], programs)
    figures.append({"job": "Table III, one seed", "when": "first"} | sample)
    estimate = sample | {"running (s)": 5 * sample["running (s)"]}
    estimate["in all (s)"] = sum(estimate[part] for part in ("compiling (s)", "running (s)", "the rest (s)"))
    figures.append({"job": "Table III, 5 seeds, estimated", "when": "first"} | estimate)

    rows = []
    for job, when in dict.fromkeys((row["job"], row["when"]) for row in figures):
        same = [row for row in figures if (row["job"], row["when"]) == (job, when)]
        parts = [name for name in same[0] if name not in ("job", "when")]
        rows.append(
            {"job": job, "when": when} | {part: float(np.median([row[part] for row in same])) for part in parts}
        )
    table = report.tell("whole_job", "What a user waits for, medians", rows, args.out)
    figure, axes = report.plt.subplots(figsize=(7, 2))
    names, left = [f"{row['job']}, {row['when']}" for row in rows[:2]], np.zeros(2)
    for part in ("compiling (s)", "running (s)", "the rest (s)"):
        values = table[part].to_numpy()[:2]
        axes.barh(names, values, left=left, label=part.removesuffix(" (s)"))
        left = left + values
    axes.invert_yaxis()
    axes.set_xlabel("s")
    axes.legend(fontsize="small")
    report.save(figure, "whole_job", args.out)


def measure(options: list[str], programs: str) -> dict[str, float]:
    """A sweep as a user starts it. The rest: importing, reading the data, writing and drawing the results."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(SWEEP), *options, "--out", out]
        start = time.monotonic()
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": programs}
        said = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        seconds = time.monotonic() - start
    found = re.search(r"compiling ([\d.]+) s, running ([\d.]+) s", said)
    assert found is not None, said
    compiling, running = float(found[1]), float(found[2])
    rest = seconds - compiling - running
    return {"in all (s)": seconds, "compiling (s)": compiling, "running (s)": running, "the rest (s)": rest}


if __name__ == "__main__":
    main()
