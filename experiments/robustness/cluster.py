"""Shared code of the scripts in this folder: starts a Dask scheduler, workers and a sweep."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

SWEEP = Path(__file__).parents[1] / "sweep.py"
ENVIRONMENT = os.environ | {"DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False", "DASK_LOGGING__DISTRIBUTED": "error"}


class Cluster:
    """Processes that end with the block; `prefix` precedes each command, for example to choose its host."""

    def __init__(self, address: str, port: int):
        self.url = f"tcp://{address}:{port}"
        self._address, self._port = address, port
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

    def start_scheduler(self, prefix: Sequence[str] = ()) -> subprocess.Popen:
        return self._start(prefix, "scheduler", "--host", self._address, "--port", str(self._port), "--no-dashboard")

    def start_worker(self, address: str = "127.0.0.1", prefix: Sequence[str] = ()) -> subprocess.Popen:
        options = ("--host", address, "--nthreads", "1", "--no-nanny", "--no-dashboard", "--death-timeout", "60")
        return self._start(prefix, "worker", self.url, *options)

    def _start(self, prefix: Sequence[str], *command: str) -> subprocess.Popen:
        whole = [*prefix, sys.executable, "-m", "dask", *command]
        process = subprocess.Popen(whole, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._processes.append(process)
        return process


def start_sweep(options: Sequence[str], out: Path, prefix: Sequence[str] = ()) -> subprocess.Popen:
    command = [*prefix, sys.executable, str(SWEEP), *options, "--out", str(out)]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(out: Path) -> int:
    """Returns how many runs of a sweep are on disk."""
    return len(list((out / "runs").glob("[!.]*.npz")))


def wait_until(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    while not condition() and process.poll() is None:
        time.sleep(0.05)


def differences(one: Path, other: Path) -> Iterator[str]:
    """Yields the differences between the results of two sweeps."""
    for path in [one / "summary.csv", *sorted((one / "runs").glob("[!.]*.npz"))]:
        twin = other / path.relative_to(one)
        if not twin.exists() or twin.read_bytes() != path.read_bytes():
            yield f"{path.relative_to(one)} differs"
    if finished(one) != finished(other):
        yield f"{finished(other)} runs instead of {finished(one)}"
