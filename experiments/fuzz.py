"""Calls every public function, and the sweep script, with arbitrary input: all give a right answer or a named error.

Input is physical, absurd, not finite, of wrong shapes and types, or no number at all. It is a fault if finite input
gives NaN, or an answer that breaks what is always true of it; if an error is not a ValueError or OSError of fcjax; or
if a call takes longer than a minute. Every call is a function of (seed, target, number): a fault is printed with what
repeats it.
"""

import argparse
import collections
import contextlib
import io
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from console import leave
from fuzz_calls import Call
from fuzz_inputs import NUM_DEVICES, Rng, is_finite
from fuzz_targets import TARGETS

import fcjax
from fcjax.progress import Progress

LONGEST_S = 60


class Hang(BaseException):
    pass


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


PACKAGE = Path(fcjax.__file__).parent


def attempt(call: Call, judge: Callable[..., str]) -> tuple[str, str]:
    """What came of a call, and what is wrong with that, if anything."""
    function, args, kwargs = call
    try:
        with limited(LONGEST_S):
            answer = jax.block_until_ready(function(*args, **kwargs))
    except (ValueError, OSError) as error:
        where = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        named = PACKAGE in where.parents and str(error)
        return "named error", "" if named else f"an error of {where.name}: {error}"
    except Hang:
        return "hang", "no answer within a minute"
    except Exception as error:
        return "other error", f"{type(error).__name__}: {error}"
    if not is_finite((args, kwargs)):
        return "answer to what is not finite", ""
    return "answer", judge(answer, *args, **kwargs)


def fuzz_functions(seed: int, num_calls: int, only: str | None, call: int | None) -> tuple[dict, dict]:
    """What came of the calls of each function, and how long they took."""
    names = [only] if only else list(TARGETS)
    weights = np.array([TARGETS[name][0] for name in names], float)
    numbers = np.ceil(num_calls * weights / weights.sum()).astype(int)
    outcomes = {name: collections.Counter() for name in names}
    seconds: dict[str, float] = {}
    done = 0
    with Progress(int(numbers.sum()), "calls") as shown:
        shown.begin("calling", counts=True)
        for name, count in zip(names, numbers, strict=True):
            _, make, judge = TARGETS[name]
            before = time.monotonic()
            for index in range(count) if call is None else [call]:
                rng = Rng(np.random.PCG64([seed, list(TARGETS).index(name), index]))
                rng.spoilt = float(rng.choice([0.0, 0.05, 0.3], p=[0.5, 0.3, 0.2]))
                made = make(rng, int(rng.choice(NUM_DEVICES)))
                outcome, fault = attempt(made, judge)
                outcomes[name][outcome] += 1
                if fault:
                    outcomes[name]["fault"] += 1
                    if outcomes[name]["fault"] <= 3:
                        again = f"--seed {seed} --only {name!r} --call {index}"
                        print(f"\n{again}: {fault}\n  {made[1:]}", file=sys.stderr)
                done += 1
                shown.update(done, done)
                if done % 5000 == 0:
                    jax.clear_caches()  # a process can hold so many programs, and no more
            seconds[name] = time.monotonic() - before
    return outcomes, seconds


def value(rng: Rng, good: list[str], bad: list[str]) -> str:
    return str(rng.choice(good if rng.random() < 0.93 else bad))


CLUSTERS = ["--scheduler 127.0.0.1:1", "--scheduler here", "--scheduler-file none.json", "--scheduler tcp://:x"]
NUMBERS = ["nan", "inf", "-1", "0", "1e300", "1e-300", "x", ""]


def command_line(rng: Rng) -> list[str]:
    """Options of the sweep script, in any combination."""
    options = {
        "--phi": (["0.05", "0.5", "5", "0.001"], NUMBERS),
        "--policy": (
            ["fc", "exact", "rd", "pf", "cs-l", "as-h", "fixed-3"],
            ["best", "fixed-0", "fixed-99", "a:b", ":"],
        ),
        "--distribution": (["l1", "l2", "iid", "dir0.5"], ["l0", "l99", "dir-1", "dirx", "dir1e-30", ""]),
        "--radius": (["600", "200", "1500"], NUMBERS),
        "--devices": (["20", "20", "20", "20", "5", "1"], ["0", "-1", "1.5", "100000", "x"]),
        "--budget": (["1", "2.5"], [*NUMBERS, "0.1"]),
        "--seeds": (["1", "2"], ["0", "-1", "x", "1.5"]),
        "--seed": (["0", "7"], ["-1", "2147483648", "x", "1e3"]),
        "--observation-error": (["0", "0.2"], ["-1", "nan", "inf", "x"]),
        "--workers": (["1", "2"], ["0", "-1", "x"]),
        "--side-by-side": (["1", "1", "1", "2"], ["0", "-3", "x"]),
        "--dataset": (["mnist"], ["no_such", "", "../mnist", "mnist:9.9.9"]),
    }
    # Few new programs: to compile one takes longer than all the rest of a command.
    several = {"--phi", "--distribution", "--radius"} | ({"--policy", "--devices"} if rng.random() < 0.1 else set())
    line = ["--budget", "1.5", "--seeds", "1"]
    for name, (good, bad) in options.items():
        if rng.random() < 0.3:
            count = int(rng.integers(1, 3)) if name in several else 1
            line += [name, *(value(rng, good, bad) for _ in range(count))]
    if rng.random() < 0.05:
        line += str(rng.choice(CLUSTERS)).split()
    return line + ([str(rng.choice(["--unknown", "stray", "--phi"]))] if rng.random() < 0.03 else [])


def fuzz_commands(seed: int, num_commands: int, only: int | None) -> collections.Counter:
    import sweep

    jax.config.update("jax_disable_most_optimizations", True)  # most of a small sweep is compilation
    outcomes: collections.Counter = collections.Counter()
    with Progress(num_commands, "commands") as shown:
        shown.begin("running", counts=True)
        for index in range(num_commands) if only is None else [only]:
            line = command_line(Rng(np.random.PCG64([seed, 1000, index])))
            outcome, fault = attempt_command(sweep, line)
            outcomes[outcome] += 1
            if fault:
                outcomes["fault"] += 1
                print(f"\n--seed {seed} --command {index}: {fault}\n  {' '.join(line)}", file=sys.stderr)
            shown.update(index + 1, index + 1)
            if index % 20 == 19:
                jax.clear_caches()
    return outcomes


def attempt_command(sweep: Any, line: list[str]) -> tuple[str, str]:
    printed, errors = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as out:
        try:
            with limited(3 * LONGEST_S), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
                code = sweep.main([*line, "--out", out])
        except SystemExit as end:  # argparse's own
            code = end.code
        except Hang:
            return "hang", "no end within three minutes"
        except BaseException as error:
            return "other error", f"{type(error).__name__}: {error}"
        if code == 130:  # Ctrl-C, which was meant for all
            raise KeyboardInterrupt
        named = [text for text in errors.getvalue().splitlines() if "error:" in text]
        if code == 2:
            left = [path.name for path in Path(out).iterdir()]
            fault = "" if len(named) == 1 else f"{len(named)} lines with errors"
            return "named error", fault or (f"left behind: {left}" if left and "sweep.json" not in left else "")
        if code != 0 or named:
            return "other code", f"code {code}: {named}"
        rows = (Path(out) / "summary.csv").read_text()
        columns = rows.splitlines()[0].split(",")
        for row in rows.splitlines()[1:]:
            entries = dict(zip(columns, row.split(","), strict=True))
            for name in ("best_accuracy", "final_accuracy", "elapsed_s"):
                if not np.isfinite(float(entries[name])):
                    return "results", f"{name} is {entries[name]}"
    return "results", ""


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__,
        epilog="examples:\n  python experiments/fuzz.py --calls 100000 --commands 500\n"
        "  python experiments/fuzz.py --seed 0 --only allocate --call 17",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--calls", type=int, default=100_000, metavar="N", help="of functions (default: 100000)")
    p.add_argument("--commands", type=int, default=500, metavar="N", help="of the sweep script (default: 500)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--x64", action="store_true", help="with JAX in double precision")
    p.add_argument("--only", choices=list(TARGETS), help="one function")
    p.add_argument("--call", type=int, metavar="I", help="one call of it")
    p.add_argument("--command", type=int, metavar="I", help="one command")
    args = p.parse_args()
    warnings.simplefilter("ignore")
    jax.config.update("jax_enable_x64", args.x64)
    faults = 0
    if args.command is None and args.calls > 0:
        outcomes, seconds = fuzz_functions(args.seed, args.calls, args.only, args.call)
        for name, counted in outcomes.items():
            told = ", ".join(f"{number} {what}" for what, number in sorted(counted.items()))
            print(f"{name}: {told} ({seconds[name]:.0f} s)")
        calls = sum(number for counted in outcomes.values() for what, number in counted.items() if what != "fault")
        faults += sum(counted["fault"] for counted in outcomes.values())
        print(f"{calls} calls with seed {args.seed}{' in double precision' if args.x64 else ''}: {faults} faults")
    if args.only is None and (args.commands or args.command is not None):
        counted = fuzz_commands(args.seed, args.commands, args.command)
        commands = sum(number for what, number in counted.items() if what != "fault")
        print(f"commands: {', '.join(f'{number} {what}' for what, number in sorted(counted.items()))}")
        print(f"{commands} commands with seed {args.seed}: {counted['fault']} faults")
        faults += counted["fault"]
    return 1 if faults else 0


if __name__ == "__main__":
    leave(main())
