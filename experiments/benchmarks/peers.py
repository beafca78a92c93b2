"""Rounds per second of fcjax and other simulators of federated learning, like for like.

The workload: MNIST, n of 20 clients per round, drawn at random, 5 steps of 128 samples drawn without repetition, SGD
with momentum, the mean of their models, and all 10,000 test samples in every round. The model is the paper's MLP
784-64-10, or a CNN with two 5 x 5 convolutions of 16 and 32 channels, each with ReLU and 2 x 2 max pooling, and a dense
layer of 128. The files in peers/ describe how each simulator does this. fcjax does it too, and also all of Alg. 3 with
FC, which is more work: it adds scheduling and estimates.

Each simulator is measured in two ways:
  sweep    one single-threaded process per core, each with its own seed. Processes warm up, wait for each other, and
           start together. Rounds are counted while all of them are in their timed part, from the last start to the
           first end. fcjax's own sweep starts such processes itself; its time also includes the wait for the last one.
  one run  one process that may use all cores. PyTorch and fcjax use one or all, whichever is faster in trials.
Flower starts several processes itself, so there is only one run of it. Each process of a sweep may only use one core
(its CPU affinity), which PyTorch and XLA also take as their number of threads; OMP_NUM_THREADS=1 and NPROC=1 say so
again. The workers of fcjax are single-threaded by themselves and are not bound to a core.

Cases take turns, each alone on the machine, and medians are reported. Every measurement is appended to OUT/peers.jsonl,
and table and plot are made from this file. The same command therefore resumes an interrupted measurement, and several
commands may each measure a part. Delete the file to measure again, and --peers without names only makes the table. Each
peer has a virtual environment, which is created on first use from the requirements in its file. Cases that fail are
reported. Flower's Ray listens on all interfaces, so it runs where only loopback exists.

    python experiments/benchmarks/peers.py
    python experiments/benchmarks/peers.py --peers fcjax pytorch --models cnn --numbers 6
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pandas as pd
import report

from fcjax import data

HERE = Path(__file__).parent / "peers"
PEERS = {
    "flower": "Flower",
    "pfl": "pfl-research",
    "pytorch": "PyTorch loop",
    "torchfunc": "PyTorch torch.func",
    "fedjax": "FedJAX",
    "fcjax": "fcjax",
    "alg3": "fcjax, more work: all of Alg. 3",
}
WAYS = ("sweep", "one run")
NUMBERS = (6, 20)
WARMUP, ROUNDS = {"mlp": 5, "cnn": 2}, {"mlp": 40, "cnn": 4}
LOOPBACK_ONLY = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NPROC": "1"}


class Case(NamedTuple):
    """What is measured."""

    model: str
    n: int
    who: str
    way: str

    def __str__(self) -> str:
        return f"{self.model}, n = {self.n}, {self.who}, {self.way}"


def main(argv: list[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="all by default")
    parser.add_argument("--models", nargs="+", choices=ROUNDS, default=list(ROUNDS), help="both by default")
    parser.add_argument("--numbers", nargs="+", type=int, choices=NUMBERS, default=NUMBERS, help="n; both by default")
    parser.add_argument("--rounds", type=int, help=f"timed rounds of a process ({ROUNDS})")
    parser.add_argument("--environments", type=Path, default=Path("out/benchmarks/environments"))
    parser.add_argument("--timeout", type=float, default=1800, help="seconds per measurement (%(default)s)")
    args = parser.parse_args(argv)
    print(report.machine())
    args.out.mkdir(parents=True, exist_ok=True)
    measured = args.out / "peers.jsonl"
    if args.peers:
        measure_all(args, measured)
    write([json.loads(line) for line in measured.read_text().splitlines()], args.out)


def measure_all(args: argparse.Namespace, measured: Path) -> None:
    """Appends what has not been measured yet to a file."""
    before = [json.loads(line) for line in measured.read_text().splitlines()] if measured.exists() else []
    done = {(case_of(line), line["repetition"]) for line in before if "fault" not in line}
    workload = write_workload(args.environments / "mnist.npz")
    faults: dict[Case, str] = {}
    for repetition in range(args.repetitions):
        for peer, case in cases(args):
            if case in faults or (case, repetition) in done:
                continue
            start = time.monotonic()
            line: dict[str, Any] = {**case._asdict(), "repetition": repetition, "rounds": rounds_of(args, case)}
            try:
                line |= measure(peer, case, args, workload)
                outcome = f"{line['rounds_per_s']:.4g} rounds/s"
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                faults[case] = line["fault"] = reason(error)
                outcome = f"failed: {line['fault']}"
            with measured.open("a") as file:
                file.write(json.dumps(line) + "\n")
            seconds = time.monotonic() - start
            print(f"{repetition + 1} of {args.repetitions}: {case}: {outcome} ({seconds:.0f} s)", flush=True)


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    for model in args.models:
        for n in args.numbers:
            for peer in args.peers:
                for way in WAYS:
                    is_measured = not (peer == "flower" and way == "sweep") and not (peer == "alg3" and n != 6)
                    if is_measured:
                        yield peer, Case(model, n, PEERS[peer], way)


def rounds_of(args: argparse.Namespace, case: Case) -> int:
    return args.rounds or ROUNDS[case.model]


def case_of(line: dict[str, Any]) -> Case:
    return Case(*(line[name] for name in Case._fields))


def environment(peer: str, folder: Path) -> Path:
    """Returns the Python of a peer's virtual environment, which is created if needed and named after its package."""
    text = (HERE / f"{peer}_round.py").read_text()
    block = re.search(r"^# /// script\n(.*?)^# ///$", text, flags=re.MULTILINE | re.DOTALL)
    assert block is not None
    wanted = tomllib.loads(re.sub(r"^# ?", "", block[1], flags=re.MULTILINE))["dependencies"]
    home = (folder / re.split(r"\W", wanted[0])[0]).absolute()
    python, complete = home / "bin" / "python", home / "requirements"
    if not complete.exists() or complete.read_text() != "\n".join(wanted):
        print(f"installing {PEERS[peer]} in {home.name}", flush=True)
        run([sys.executable, "-m", "venv", "--clear", home])
        run([python, "-m", "pip", "install", "--quiet", *wanted])
        complete.write_text("\n".join(wanted))
    return python


def write_workload(path: Path) -> Path:
    """Writes MNIST and its partition to a file that every peer can read."""
    dataset = data.load("mnist")
    clients = data.partition.iid(dataset.train_y, 20, seed=0).indices
    images = {name: getattr(dataset, name).reshape(-1, 784) for name in ("train_x", "test_x")}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **images, train_y=dataset.train_y, test_y=dataset.test_y, clients=clients)
    return path.absolute()


def measure(peer: str, case: Case, args: argparse.Namespace, workload: Path) -> dict[str, Any]:
    """Returns the rounds per second of a case, with its accuracy and versions."""
    options: list[Any] = ["--model", case.model, "--scheduled", case.n, "--warmup", WARMUP[case.model]]
    options += ["--rounds", rounds_of(args, case), *(["--sweep"] if case.way == "sweep" else [])]
    if peer in ("fcjax", "alg3"):
        full = ["--full"] if peer == "alg3" else []
        return json.loads(
            run([sys.executable, HERE / "fcjax_round.py", *options, *full], args.timeout).splitlines()[-1]
        )
    command = [environment(peer, args.environments), HERE / f"{peer}_round.py", *options, "--data", workload]
    if peer == "flower":
        command = [*LOOPBACK_ONLY, *command]
    lines = together(command, sorted(os.sched_getaffinity(0)) if case.way == "sweep" else [None], args.timeout)
    rounds_per_s = speed([line.pop("timed") for line in lines])
    return lines[0] | {"rounds_per_s": rounds_per_s, "accuracy": np.mean([line["accuracy"] for line in lines])}


def speed(timed: list[list[float]]) -> float:
    """Returns the rounds per second of several processes while all of them are in their timed part.

    `timed` has when the clock of each process started and when each of its rounds ended; parts of rounds count.
    """
    start, end = max(ends[0] for ends in timed), min(ends[-1] for ends in timed)
    if start >= end:
        raise ValueError(f"the timed parts of the processes do not overlap: {timed}")
    counted = sum(np.ptp(np.interp([start, end], ends, range(len(ends)))) for ends in timed)
    return float(counted / (end - start))


def together(command: list[Any], cores: list[int | None], timeout: float) -> list[dict[str, Any]]:
    """Starts a process per core with its own seed, or one process on all; returns the result line of each.

    The timed rounds of all processes start when the last one has warmed up.
    """
    with contextlib.ExitStack() as stack:
        processes = []
        for seed, core in enumerate(cores):
            where = [] if core is None else ["taskset", "--cpu-list", core]
            error = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(
                [str(part) for part in [*where, *command, "--seed", seed]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=error,
                text=True,
                env=os.environ | ({} if core is None else ONE_THREAD),
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            timer = threading.Timer(timeout, process.kill)
            timer.start()
            stack.callback(timer.cancel)
            processes.append((process, error))
        for process, error in processes:
            if not any(line == "ready\n" for line in iter(process.stdout.readline, "")):
                raise failure(process, error)
        for process, _ in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        lines = []
        for process, error in processes:
            said = process.stdout.read()
            if process.wait():
                raise failure(process, error)
            lines.append(json.loads(said.splitlines()[-1]))
        return lines


def failure(process: subprocess.Popen[str], error: IO[str]) -> Exception:
    if process.wait() == -signal.SIGKILL:
        return TimeoutError("killed, because it took longer than --timeout or for lack of memory")
    error.seek(0)
    return subprocess.CalledProcessError(process.returncode, process.args, stderr=error.read())


def run(command: list[Any], timeout: float | None = None) -> str:
    """Returns what a command prints."""
    arguments = [str(part) for part in command]
    return subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=timeout).stdout


def reason(error: Exception) -> str:
    """Returns the last line of a command's error output."""
    said = (getattr(error, "stderr", None) or "").strip().splitlines()
    return said[-1] if said else str(error)


def write(lines: list[dict[str, Any]], out: Path) -> None:
    """Writes the table, the plot, and the cases that have failed."""
    found: dict[Case, list[float]] = {}
    for line in lines:
        found.setdefault(case_of(line), []).extend([line["rounds_per_s"]] if "fault" not in line else [])
    latest = {case_of(line): line for line in lines}
    faults = [f"{case}: {latest[case]['fault']}\n" for case, speeds in found.items() if not speeds]
    (out / "peers_faults.txt").write_text("".join(faults) or "none\n")
    print("".join(faults), end="")

    rows = []
    for model, n, who in dict.fromkeys(case[:3] for case, speeds in found.items() if speeds):
        speeds = {way: found[case] for way in WAYS if found.get(case := Case(model, n, who, way))}
        row: dict[str, Any] = {"model": model, "n": n, "who": who}
        for way in WAYS:
            of_way = speeds.get(way, [np.nan])
            row |= {way: np.median(of_way), f"{way}, least": min(of_way), f"{way}, most": max(of_way)}
        row["best"] = max(float(np.median(of_way)) for of_way in speeds.values())
        row["repetitions"] = min(len(of_way) for of_way in speeds.values())
        of_case = [line for line in lines if case_of(line)[:3] == (model, n, who) and "fault" not in line]
        row |= {name: np.mean([line[name] for line in of_case]) for name in ("scheduled", "accuracy")}
        row["versions"] = " ".join(f"{name} {version}" for name, version in of_case[-1]["versions"].items())
        rows.append(row)
    rows.sort(key=lambda row: (list(ROUNDS).index(row["model"]), row["n"], row["best"]))
    ours = {(row["model"], row["n"]): row for row in rows if row["who"] == "fcjax"}
    for row in rows:
        of_ours = ours.get((row["model"], row["n"]), {})
        for name in ("best", "sweep"):
            row[f"fcjax / {name}"] = of_ours.get(name, np.nan) / row[name]
    table = report.write("peers", "Rounds per second, medians", rows, out)
    for _, row in table[(table["who"] == "PyTorch loop") & table["fcjax / sweep"].notna()].iterrows():
        ratio = f"{row['fcjax / sweep']:.2f} times the rounds/s of PyTorch's"
        print(f"{row['model']}, {row['n']} of 20: fcjax's sweep does {ratio}.")
    draw(table, out)


def draw(table: pd.DataFrame, out: Path) -> None:
    panels = list(table.groupby(["model", "n"], sort=False))
    figure, all_axes = report.plt.subplots(
        len(panels), figsize=(8, 1 + 2.4 * len(panels)), squeeze=False, layout="constrained"
    )
    for (of_panel, shown), axes in zip(panels, all_axes.flat, strict=True):
        model, n = of_panel
        for place, (way, colour) in enumerate(zip(WAYS, ("C0", "C1"), strict=True)):
            rows = np.arange(len(shown)) + 0.2 - 0.4 * place
            spread = [shown[way] - shown[f"{way}, least"], shown[f"{way}, most"] - shown[way]]
            axes.barh(rows, shown[way], 0.4, color=colour, label=way, xerr=spread, error_kw={"lw": 0.8})
            for y, speed, most in zip(rows, shown[way], shown[f"{way}, most"], strict=True):
                if np.isfinite(speed):
                    axes.annotate(f"{speed:.3g}", (most, y), (4, 0), textcoords="offset points", va="center", size=8)
        axes.set_yticks(range(len(shown)), shown["who"])
        axes.set(
            title=f"{model.upper()}, {n} of 20 clients",
            xlim=(0, 1.12 * shown[[f"{way}, most" for way in WAYS]].max().max()),
        )
    all_axes[-1, 0].set_xlabel("rounds/s of the machine; lines show least and most")
    all_axes[0, 0].legend(loc="lower right")
    report.save(figure, "peers", out)


if __name__ == "__main__":
    main()
