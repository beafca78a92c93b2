"""Shared code of all peers: the workload's numbers, its data, PyTorch's models, the clock and the result line.

It imports only numpy and the standard library, so that it works in every peer's environment.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

PIXELS, CLASSES = 28, 10
INPUTS = PIXELS**2
HIDDEN = 64  # units of the MLP
CHANNELS, KERNEL, DENSE = (16, 32), 5, 128  # of the CNN
PARAMETERS = {"mlp": 50_890, "cnn": 215_370}
TEST_BLOCK = {"mlp": 10_000, "cnn": 1_000}  # test samples evaluated at a time
CLIENTS, SAMPLES = 20, 3000
STEPS, BATCH = 5, 128
LEARNING_RATE, MOMENTUM = 0.01, 0.9
CORES = len(os.sched_getaffinity(0))

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


def check_size(model: str, parameters: int) -> None:
    if parameters != PARAMETERS[model]:
        raise RuntimeError(f"expected {PARAMETERS[model]} parameters of the {model}, got {parameters}")


def torch_network(model: str) -> "torch.nn.Sequential":
    """Returns the MLP or the CNN, which take flat images."""
    from torch import nn

    if model == "mlp":
        network = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    else:
        layers: list[nn.Module] = [nn.Unflatten(1, (1, PIXELS, PIXELS))]
        for inputs, outputs in zip((1, *CHANNELS), CHANNELS, strict=False):
            layers += [nn.Conv2d(inputs, outputs, KERNEL, padding="same"), nn.ReLU(), nn.MaxPool2d(2)]
        flat = CHANNELS[-1] * (PIXELS // 2 ** len(CHANNELS)) ** 2
        network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, DENSE), nn.ReLU(), nn.Linear(DENSE, CLASSES))
    check_size(model, sum(parameter.numel() for parameter in network.parameters()))
    return network


def torch_evaluate(
    apply: "Callable[[torch.Tensor], torch.Tensor]", x: "torch.Tensor", y: "torch.Tensor", block: int
) -> tuple[float, float]:
    """Returns the loss and the accuracy on a test set, evaluated in blocks."""
    import torch

    loss, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    with torch.inference_mode():
        for block_x, block_y in zip(x.split(block), y.split(block), strict=True):
            logits = apply(block_x)
            loss += torch.nn.functional.cross_entropy(logits, block_y, reduction="sum")
            correct += (logits.argmax(1) == block_y).sum()
    return loss.item() / len(y), correct.item() / len(y)


class Stopwatch:
    """Counts rounds and notes when those after the warm-up end."""

    def __init__(self, warmup: int, rounds: int, start: Callable[[], None] = lambda: None) -> None:
        """`start` is called after the warm-up, before the clock starts."""
        self.warmup, self.rounds, self.start = warmup, rounds, start
        self.ends: list[float] = []
        self.accuracy = math.nan

    def tick(self, accuracy: float) -> None:
        self.accuracy = accuracy
        if len(self.ends) == self.warmup - 1:
            self.start()
        self.ends.append(time.monotonic())

    @property
    def timed(self) -> list[float]:
        """When the clock started and when each timed round ended, on the machine's clock."""
        if len(self.ends) != self.warmup + self.rounds:
            raise RuntimeError(f"expected {self.warmup + self.rounds} rounds, counted {len(self.ends)}")
        return self.ends[self.warmup - 1 :]


def choose_threads(
    args: argparse.Namespace, set_threads: Callable[[int], None], play: Callable[[int, Tick], None]
) -> None:
    """Sets one thread in a sweep. In a single run sets one or all, whichever is faster in alternating trials."""
    if args.sweep:
        set_threads(1)
        return
    turns, warmup, rounds = (3, 3, 12) if args.model == "mlp" else (1, 1, 2)
    times: dict[int, list[float]] = {1: [], CORES: []}
    for threads in (1, CORES) * turns:
        set_threads(threads)
        watch = Stopwatch(warmup, rounds)
        play(warmup + rounds, watch.tick)
        times[threads] += np.diff(watch.timed).tolist()
    medians = {threads: statistics.median(seconds) for threads, seconds in times.items()}
    best = min(medians, key=lambda threads: medians[threads])
    print(f"median seconds of a trial round by threads: {medians}; {best} chosen", file=sys.stderr)
    set_threads(best)


def main(packages: Sequence[str], measure: Callable[[argparse.Namespace, Data, Stopwatch], None], doc: str) -> None:
    """Parses the command line, lets `measure` run all rounds, and prints the result line.

    After the warm-up it prints "ready" and waits for a line on stdin, so that several processes start together.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="npz file: train_x, train_y, test_x, test_y, clients")
    parser.add_argument("--model", choices=PARAMETERS, required=True)
    parser.add_argument("--scheduled", type=int, required=True, help="clients that train in a round")
    parser.add_argument("--warmup", type=int, required=True, help="rounds before the clock starts, at least 1")
    parser.add_argument("--rounds", type=int, required=True, help="rounds to time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sweep", action="store_true", help="one of several processes: use one thread")
    args = parser.parse_args()
    if not 1 <= args.scheduled <= CLIENTS or args.warmup < 1 or args.rounds < 1:
        parser.error(f"--scheduled must be from 1 to {CLIENTS}, --warmup and --rounds at least 1")
    stdout = sys.stdout

    def start() -> None:
        print("ready", file=stdout, flush=True)
        sys.stdin.readline()

    watch = Stopwatch(args.warmup, args.rounds, start)
    try:
        # Some frameworks print their progress, but stdout is for the result only.
        with contextlib.redirect_stdout(sys.stderr):
            measure(args, load(args.data), watch)
        result = {
            "versions": {package: importlib.metadata.version(package) for package in packages},
            "scheduled": args.scheduled,
            "timed": watch.timed,
            "accuracy": watch.accuracy,
        }
        line = json.dumps(result, allow_nan=False)
    except Exception as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    print(line)
