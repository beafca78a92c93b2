"""Shared code of all peers: the workload's numbers, its data, the clock and the result line.

It needs only numpy and the standard library, so that it imports in every peer's environment.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

INPUTS, HIDDEN, CLASSES = 784, 64, 10
CLIENTS, SAMPLES = 20, 3000
STEPS, BATCH = 5, 128
LEARNING_RATE, MOMENTUM = 0.01, 0.9

Tick = Callable[[float], None]
"""Called at the end of each round with the accuracy of the new global model."""


class Data(NamedTuple):
    """Scaled inputs and labels; the first axis of `client_x` and `client_y` is the client."""

    client_x: np.ndarray
    client_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


@functools.cache
def load(path: str) -> Data:
    """Loads the data; cached, because client processes load them in each round."""
    with np.load(path) as file:
        clients = file["clients"]
        if clients.shape != (CLIENTS, SAMPLES):
            raise ValueError(f"expected indices of shape {(CLIENTS, SAMPLES)}, got {clients.shape}")
        train_x, test_x = scale(file["train_x"]), scale(file["test_x"])
        train_y, test_y = file["train_y"].astype(np.int64), file["test_y"].astype(np.int64)
    return Data(train_x[clients], train_y[clients], test_x, test_y)


def scale(pixels: np.ndarray) -> np.ndarray:
    return (pixels.astype(np.float32) / 255 - 0.1307) / 0.3081


class Stopwatch:
    """Counts rounds and times those after the warm-up."""

    def __init__(self, warmup: int, rounds: int) -> None:
        self.warmup, self.rounds = warmup, rounds
        self.ends: list[float] = []
        self.accuracy = math.nan

    def tick(self, accuracy: float) -> None:
        self.ends.append(time.perf_counter())
        self.accuracy = accuracy

    @property
    def seconds(self) -> float:
        if len(self.ends) != self.warmup + self.rounds:
            raise RuntimeError(f"expected {self.warmup + self.rounds} rounds, counted {len(self.ends)}")
        return self.ends[-1] - self.ends[self.warmup - 1]


def choose_threads(set_threads: Callable[[int], None], play: Callable[[int, Tick], None]) -> None:
    """Sets 1 or 2 threads, whichever has the lower median round time in alternating trials."""
    times: dict[int, list[float]] = {1: [], 2: []}
    for threads in (1, 2) * 3:
        set_threads(threads)
        watch = Stopwatch(warmup=3, rounds=12)
        play(watch.warmup + watch.rounds, watch.tick)
        times[threads] += np.diff(watch.ends[watch.warmup - 1 :]).tolist()
    medians = {threads: statistics.median(seconds) for threads, seconds in times.items()}
    best = min(medians, key=lambda threads: medians[threads])
    print(f"median seconds of a trial round by threads: {medians}; {best} chosen", file=sys.stderr)
    set_threads(best)


def main(
    peer: str, packages: Sequence[str], measure: Callable[[argparse.Namespace, Data, Stopwatch], None], doc: str
) -> None:
    """Parses the command line, lets `measure` run all rounds, and prints the result line."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="npz file: train_x, train_y, test_x, test_y, clients")
    parser.add_argument("--scheduled", type=int, required=True, help="clients that train in a round")
    parser.add_argument("--warmup", type=int, required=True, help="rounds before the clock starts, at least 1")
    parser.add_argument("--rounds", type=int, required=True, help="rounds to time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not 1 <= args.scheduled <= CLIENTS or args.warmup < 1 or args.rounds < 1:
        parser.error(f"--scheduled must be from 1 to {CLIENTS}, --warmup and --rounds at least 1")
    watch = Stopwatch(args.warmup, args.rounds)
    try:
        # Some frameworks print their progress, but stdout is for the result only.
        with contextlib.redirect_stdout(sys.stderr):
            measure(args, load(args.data), watch)
        result = {
            "peer": peer,
            "versions": {package: importlib.metadata.version(package) for package in packages},
            "scheduled": args.scheduled,
            "rounds": args.rounds,
            "seconds": watch.seconds,
            "rounds_per_s": args.rounds / watch.seconds,
            "accuracy": watch.accuracy,
        }
        line = json.dumps(result, allow_nan=False)
    except Exception as error:
        raise SystemExit(f"{peer} failed: {type(error).__name__}: {error}") from error
    print(line)
