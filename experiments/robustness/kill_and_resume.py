"""Kills a sweep at random moments, resumes it, and checks that nothing is lost, changed or repeated.

The sweep first runs undisturbed. Then it is repeatedly started in a new folder, killed by SIGKILL at a random moment of
its duration, and resumed to its end. Its results must be identical to the last byte, and runs that had finished before
the kill must not have been written again.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import xarray as xr

SCRIPT = Path(__file__).parents[1] / "sweep.py"
OPTIONS = ["--policy", "fc", "rd", "--distribution", "l1", "iid", "--seeds", "5", "--budget", "20"]


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  python experiments/robustness/kill_and_resume.py --kills 20",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--kills", type=int, default=20, metavar="N", help="number of kills (default: 20)")
    p.add_argument("--seed", type=int, default=0, help="seed of the random moments (default: 0)")
    args = p.parse_args()
    draw = random.Random(args.seed)
    faults = 0
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole")
        failed = sweep(whole)  # compiles for all later sweeps
        before = time.monotonic()
        if failed := failed or sweep(Path(folder, "timed")):
            print(f"undisturbed: {failed[0]}")
            return 1
        duration_s = time.monotonic() - before
        num_runs = len(runs(whole))
        print(f"{' '.join(OPTIONS)}: {num_runs} runs, {duration_s:.1f} s undisturbed", flush=True)
        for number in range(args.kills):
            out = Path(folder, f"killed-{number}")
            after_s = draw.uniform(0, duration_s)
            kept = killed(out, after_s)
            wrong = sweep(out) or compare(whole, out, kept)
            faults += bool(wrong)
            verdict = "; ".join(wrong) or "resumed, with identical results"
            print(f"killed after {after_s:.1f} s with {len(kept)} of {num_runs} runs finished: {verdict}", flush=True)
    print(f"{args.kills} kills with seed {args.seed}: {faults} faults")
    return 1 if faults else 0


def sweep(out: Path) -> list[str]:
    """Runs the sweep to its end and returns a list of faults."""
    done = subprocess.run([sys.executable, SCRIPT, *OPTIONS, "--out", out], capture_output=True, text=True)
    return [f"it ended with code {done.returncode}: {done.stderr[-500:]}"] if done.returncode else []


def killed(out: Path, after_s: float) -> dict[str, int]:
    """Kills a sweep and returns the runs that had finished, with the times they were written."""
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *OPTIONS, "--out", out], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        process.wait(after_s)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    return runs(out)


def runs(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (out / "runs").glob("[!.]*.npz")}


def compare(whole: Path, out: Path, kept: dict[str, int]) -> list[str]:
    wrong = [
        f"{path.relative_to(whole)} differs"
        for path in [
            whole / "summary.csv",
            whole / "accuracy.png",
            whole / "rounds.png",
            *(whole / "runs").glob("*.npz"),
        ]
        if not (out / path.relative_to(whole)).exists()
        or path.read_bytes() != (out / path.relative_to(whole)).read_bytes()
    ]
    one, other = (xr.open_dataset(folder / "histories.nc") for folder in (whole, out))
    if not one.equals(other):
        wrong.append("histories.nc differs")
    now = runs(out)
    wrong += [f"run {name} was done twice" for name, written in kept.items() if now.get(name) != written]
    return wrong + ([f"{len(now)} runs in all"] if len(now) != len(runs(whole)) else [])


if __name__ == "__main__":
    sys.exit(main())
