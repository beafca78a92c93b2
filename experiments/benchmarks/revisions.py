"""Compares the run times of two revisions of fcjax, in turns, as ratios.

Each revision is a checkout with its own environment in .venv. The main command runs cold, with an empty folder for
compiled programs, then warm; a longer sweep runs warm. The data set must be in the cache. Each repetition gives a
separate ratio, because a disturbance affects both revisions.

    python experiments/benchmarks/revisions.py ../old .      # about 10 minutes
"""

import os
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import report

MAIN = ["--phi", "0.05"]
LONG = ["--policy", "fc", "rd", "--seeds", "20", "--budget", "20"]  # 40 runs
# The order matters: a job compiles programs for the next ones. The job without a name is not measured.
JOBS = (
    ("main command, cold", MAIN),
    ("main command, warm", MAIN),
    ("", [*LONG, "--seed", "20"]),
    ("40 runs of 20 s", LONG),
)


def main(argv: list[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument("old", type=Path, help="checkout of the reference revision")
    parser.add_argument("new", type=Path, help="checkout of the revision to compare")
    args = parser.parse_args(argv)
    args.old, args.new = args.old.resolve(), args.new.resolve()
    print(report.machine())
    seconds: dict[str, list[list[float]]] = {job: [] for job, _ in JOBS if job}
    for repetition in range(args.repetitions):
        with tempfile.TemporaryDirectory() as folder:
            for job, options in JOBS:
                pair = [measure(checkout, options, Path(folder, checkout.name)) for checkout in (args.old, args.new)]
                if job:
                    seconds[job].append(pair)
                    took = f"{pair[0]:.1f} s, {pair[1]:.1f} s"
                    print(f"{repetition + 1} of {args.repetitions}, {job}: {took}", flush=True)
    rows = []
    for job, pairs in seconds.items():
        ratios = np.array(pairs)[:, 1] / np.array(pairs)[:, 0]
        old, new = np.median(pairs, axis=0)
        rows.append({"job": job, "old (s)": old, "new (s)": new, "new / old": np.median(ratios)})
        rows[-1] |= {"least": ratios.min(), "most": ratios.max()}
    report.write("revisions", "Medians, and ratios of the same repetition", rows, args.out)


def measure(checkout: Path, options: list[str], programs: Path) -> float:
    """Returns how long a sweep takes from the command line."""
    with tempfile.TemporaryDirectory() as out:
        command = [checkout / ".venv/bin/python", checkout / "experiments/sweep.py", *options, "--out", out]
        before = time.monotonic()
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(programs)}
        subprocess.run(command, check=True, capture_output=True, env=environment, cwd=checkout)
        return time.monotonic() - before


if __name__ == "__main__":
    main()
