"""Rounds per second of fcjax and other simulators of federated learning, on one workload.

The workload: MNIST, an MLP 784-64-10, n of 20 clients per round, drawn at random, 5 steps of 128 samples drawn without
repetition, SGD with momentum, the mean of their models, and all 10,000 test samples in every round. The files in peers/
describe how each peer does this. Each peer has its own virtual environment, which is created on first use from the
requirements in its file. Peers that cannot be installed or fail are reported. All take turns, each alone on the
machine, and medians are reported. Flower's Ray listens on all interfaces, so it runs where only loopback exists.

fcjax runs the same workload, and also all of Alg. 3 with FC, which adds channels, scheduling, bandwidth and estimates.
Speed is in rounds per second of the machine: fcjax runs a sweep of 10 seeds, one run per core; the others do one run.

    python experiments/benchmarks/peers.py                         # about 25 minutes, the first time
    python experiments/benchmarks/peers.py --peers fedjax pytorch
"""

import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import report

from fcjax import data

HERE = Path(__file__).parent / "peers"
PEERS = {"flower": "Flower", "pfl": "pfl-research", "pytorch": "PyTorch loop", "fedjax": "FedJAX"}
NUMBERS = (6, 20)
WARMUP, ROUNDS = 5, 40
LOOPBACK_ONLY = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def main(argv: list[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="all by default")
    parser.add_argument("--environments", type=Path, default=Path("out/benchmarks/environments"))
    parser.add_argument("--timeout", type=float, default=600, help="seconds per measurement (%(default)s)")
    args = parser.parse_args(argv)
    print(report.machine())
    commands, faults = {}, {}
    for peer in args.peers:
        try:
            python = environment(peer, args.environments)
            commands[PEERS[peer]] = [*(LOOPBACK_ONLY if peer == "flower" else []), python, HERE / f"{peer}_round.py"]
        except (OSError, subprocess.CalledProcessError) as error:
            faults[PEERS[peer]] = f"not installed: {reason(error)}"
    workload = write_workload(args.environments / "mnist.npz")
    cases: dict[tuple[str, int], list] = {}
    for n in NUMBERS:
        for peer, command in commands.items():
            options = ["--data", workload, "--warmup", str(WARMUP), "--rounds", str(ROUNDS)]
            cases[peer, n] = [*command, *options, "--scheduled", str(n)]
        cases["fcjax", n] = [sys.executable, HERE / "fcjax_round.py", "--scheduled", str(n)]
    cases["fcjax, all of Alg. 3 with FC", 6] = [sys.executable, HERE / "fcjax_round.py", "--full"]
    found: dict[tuple[str, int], list[dict]] = {case: [] for case in cases}
    for repetition in range(args.repetitions):
        for (peer, n), command in cases.items():
            if peer in faults:
                continue
            start = time.monotonic()
            try:
                line = measure(command, args.timeout)
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                faults[peer] = f"failed: {reason(error)}"
                print(f"{peer} {faults[peer]}", flush=True)
                continue
            found[peer, n].append(line)
            print(
                f"{repetition + 1} of {args.repetitions}: {peer}, n = {line['scheduled']:.4g}: "
                f"{line['rounds_per_s']:.4g} rounds/s ({time.monotonic() - start:.0f} s)",
                flush=True,
            )
    write(found, faults, args.out)


def environment(peer: str, folder: Path) -> Path:
    """Returns the Python of the peer's virtual environment, which is created if needed."""
    text = (HERE / f"{peer}_round.py").read_text()
    block = re.search(r"^# /// script\n(.*?)^# ///$", text, flags=re.MULTILINE | re.DOTALL)
    assert block is not None
    metadata = tomllib.loads(re.sub(r"^# ?", "", block[1], flags=re.MULTILINE))
    home = (folder / peer).absolute()
    python, complete = home / "bin" / "python", home / "requirements"
    wanted = "\n".join(metadata["dependencies"])
    if not complete.exists() or complete.read_text() != wanted:
        print(f"installing {PEERS[peer]} in {folder / peer}", flush=True)
        run([sys.executable, "-m", "venv", "--clear", home])
        run([python, "-m", "pip", "install", "--quiet", *metadata["dependencies"]])
        complete.write_text(wanted)
    return python


def write_workload(path: Path) -> Path:
    """Writes MNIST and its partition to a file that every peer can read."""
    dataset = data.load("mnist")
    clients = data.partition.iid(dataset.train_y, 20, seed=0).indices
    images = {name: getattr(dataset, name).reshape(-1, 784) for name in ("train_x", "test_x")}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **images, train_y=dataset.train_y, test_y=dataset.test_y, clients=clients)
    return path.absolute()


def measure(command: list, timeout: float) -> dict:
    return json.loads(run(command, timeout).stdout.splitlines()[-1])


def run(command: list, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True, timeout=timeout)


def reason(error: Exception) -> str:
    """Returns the last line of a command's error output."""
    said = (getattr(error, "stderr", None) or "").strip().splitlines()
    return said[-1] if said else str(error)


def write(found: dict[tuple[str, int], list[dict]], faults: dict[str, str], out: Path) -> None:
    fastest = {n: median(found.get(("fcjax", n), [])) for n in NUMBERS}
    full = median(found["fcjax, all of Alg. 3 with FC", 6])
    rows = []
    for (peer, n), lines in found.items():
        if not lines:
            continue
        speed = median(lines)
        versions = " ".join(f"{name} {version}" for name, version in lines[0]["versions"].items())
        row = {"n": n, "who": peer, "rounds/s": speed, "fcjax is faster by": fastest[n] / speed}
        row["with all of Alg. 3"] = full / speed if n == 6 else np.nan
        row |= {"scheduled": median(lines, "scheduled"), "accuracy": median(lines, "accuracy")}
        rows.append(row | {"versions": versions})
    rows.sort(key=lambda row: (row["n"], row["rounds/s"]))
    table = report.write("peers", "Rounds per second, medians", rows, out)
    for peer, fault in faults.items():
        print(f"{peer} {fault}")
    (out / "peers_faults.txt").write_text("".join(f"{peer} {fault}\n" for peer, fault in faults.items()) or "none\n")

    figure, panels = report.plt.subplots(1, len(NUMBERS), figsize=(10, 2.8), sharex=True)
    for n, axes in zip(NUMBERS, panels, strict=True):
        shown = table[table["n"] == n]
        bars = axes.barh(
            shown["who"], shown["rounds/s"], color=["C1" if "fcjax" in who else "C0" for who in shown["who"]]
        )
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.set(title=f"{n} of 20 clients", xlabel="rounds/s", xlim=(0, 1.15 * table["rounds/s"].max()))
    figure.tight_layout()
    report.save(figure, "peers", out)


def median(lines: list[dict], what: str = "rounds_per_s") -> float:
    return float(np.median([line[what] for line in lines])) if lines else np.nan


if __name__ == "__main__":
    main()
