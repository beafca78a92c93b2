"""The command `fcjax`: `sweep` trains under scheduling policies and compares them, `report` rebuilds the page of their
results, `data` fetches data sets.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import inspect
import json
import shlex
import sys
import textwrap
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fcjax.runtime.console import check_writable, end_on_sigterm, leave, warnings_as_lines
from fcjax.runtime.registry import not_taken

SWEEP = """Trains under scheduling policies within a budget of simulated time, and compares their accuracy.

Options can take several values: all combinations are run, with all seeds, on the same random channels, data and
mini-batches. Writes to OUT:
  runs/            each run as it finishes; if the command is stopped, rerun it to resume
  summary.csv      one row per run
  report.html      all of it as one interactive page, to be opened in a browser
  histories.nc     every round of every run; xarray.open_dataset reads it
  accuracy.png     accuracy against simulated time, with 95% intervals over seeds (and .pdf)
  rounds.png       scheduled devices, round time and estimates (and .pdf)
  accuracy_by_X.png   best accuracy against X, for each numeric X of --axis (and .pdf)
"""

REPORT = """Writes OUT/report.html, an interactive page of the results of a sweep, and prints its path. While the
sweep is running, the page shows the runs that have finished."""

EXAMPLES = """examples:
  {program} --phi 0.05
  {program} --policy fc rd pf cs-l cs-h as-l as-h --distribution l1 l2 iid --out out/all
  {program} --phi 0.005 0.05 0.5 5 --radius 200 600 1000 --seeds 3 --out out/phi
  {program} --dataset cifar10 --policy fc fixed-5 fixed-10 --distribution l2 --out out/cifar10
  {program} --axis cell.bandwidth_hz 5e6 10e6 20e6 --policy fc rd --out out/bandwidth
  {program} --policy fc my_file:my_policy --out out/mine     # your own policy, from my_file.py
  {program} --seeds 1000 --out out/1000 --scheduler tcp://10.0.0.5:8786    # on a Dask cluster
"""


def main(argv: list[str] | None = None) -> int:
    commands = {"sweep": sweep, "report": report, "data": fetch}
    p = argparse.ArgumentParser(prog="fcjax", description=__doc__, epilog="See fcjax sweep --help for its options.")
    p.add_argument("--version", action="version", version=importlib.metadata.version("fcjax"))
    p.add_argument("command", choices=commands)
    p.add_argument("arguments", nargs=argparse.REMAINDER)
    args = p.parse_args(argv)
    return commands[args.command](args.arguments)


def run() -> None:
    """The installed command."""
    leave(main())


def fetch(argv: list[str]) -> int:
    from fcjax.data.__main__ import main

    return main(argv, program="fcjax data")


def report(argv: list[str]) -> int:
    """Runs `fcjax report` with the given arguments and returns the exit code."""
    p = argparse.ArgumentParser(prog="fcjax report", description=REPORT)
    p.add_argument("out", type=Path, metavar="OUT", help="folder that fcjax sweep has written, or is writing")
    p.add_argument(
        "--reference",
        type=Path,
        metavar="FILE",
        help="CSV file of accuracies to show beside the results: published_percent, and columns of settings, such as "
        "policy and distribution",
    )
    p.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    args = p.parse_args(argv)
    try:
        if not args.out.is_dir():
            raise ValueError(f"there is no folder {args.out}: give the --out of fcjax sweep")
        check_writable(args.out)
        import pandas as pd  # slow to import, like the following: after the cheapest checks

        reference = None if args.reference is None else pd.read_csv(args.reference)
        from fcjax.report import page

        path, faults = page.write_folder(args.out, reference)
    except (ValueError, OSError) as error:
        if args.traceback:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 2
    for fault in faults:
        print(f"warning: {fault}", file=sys.stderr)
    print(path)
    return 0


class _Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        """Adds the names of all policies and presets, which are slow to import."""
        from fcjax import policies, presets

        text = super().format_help()
        for word, registry in (("policies", policies.REGISTRY), ("presets", presets.REGISTRY)):
            names = [*registry.names(), "my_file:my_policy(x=2)" if word == "policies" else "my_file:my_preset"]
            text += f"\n{word}:\n{textwrap.fill(', '.join(names) + ' (yours)', 100, **_INDENT)}\n"
        return text


_INDENT: Any = {"initial_indent": "  ", "subsequent_indent": "  ", "break_on_hyphens": False}


def parser(program: str = "fcjax sweep") -> argparse.ArgumentParser:
    p = _Parser(
        prog=program,
        description=SWEEP,
        epilog=EXAMPLES.format(program=program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    several: Any = {"nargs": "+", "metavar": "X"}
    p.add_argument(
        "--phi",
        type=float,
        default=[0.05],
        **several,
        help="trade-off parameter of fc and others: larger values schedule more devices (default: 0.05)",
    )
    p.add_argument(
        "--policy",
        default=["fc"],
        **several,
        help="policies by name, as listed below (default: fc)",
    )
    p.add_argument(
        "--preset",
        default="shi2020",
        help="the cell and the training, by a name listed below (default: shi2020, the paper's)",
    )
    p.add_argument("--dataset", default="mnist", help="mnist, cifar10, fashion_mnist, ... (default: mnist)")
    p.add_argument(
        "--distribution",
        default=["l1"],
        **several,
        help="how data are split among devices: iid; l1, l2, ... labels each; dir0.1, ... Dirichlet (default: l1)",
    )
    p.add_argument("--radius", type=float, default=[600.0], **several, help="radius of the cell in m (default: 600)")
    p.add_argument("--devices", type=int, **several, help="number of devices (default: the preset's, mostly 20)")
    p.add_argument("--budget", type=float, **several, help="simulated time in s (default: 60, or 200 for CIFAR-10)")
    p.add_argument(
        "--axis",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="another axis: a field, such as cell.bandwidth_hz 5e6 20e6, or an argument of the preset",
    )
    p.add_argument("--seeds", type=int, default=5, metavar="N", help="number of seeds (default: 5)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="first seed (default: 0)")
    p.add_argument(
        "--observation-error",
        type=float,
        default=0.0,
        metavar="X",
        help="relative error of the observed channels and computation times (default: 0)",
    )
    p.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="number of local processes (default: one per core)",
    )
    p.add_argument(
        "--cores",
        type=int,
        default=1,
        metavar="N",
        help="cores per run, for fewer runs than cores; more than 1 may change the last bits (default: 1)",
    )
    p.add_argument(
        "--side-by-side",
        type=int,
        metavar="N",
        help="runs at a time on each accelerator (default: 16; 1 on a CPU)",
    )
    where = p.add_mutually_exclusive_group()
    where.add_argument("--scheduler", metavar="ADDRESS", help="scheduler address of a Dask cluster to run on")
    where.add_argument("--scheduler-file", metavar="FILE", help="file that the Dask scheduler has written")
    p.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    p.add_argument("--out", type=Path, default=Path("out/sweep"), help="folder for the results (default: %(default)s)")
    return p


def sweep(argv: list[str], program: str = "fcjax sweep") -> int:
    """Runs `fcjax sweep` with the given arguments and returns the exit code."""
    start = time.monotonic()
    args = parser(program).parse_args(argv)
    end_on_sigterm()
    again = f"finished runs are kept in {args.out / 'runs'}; run the same command to resume"
    try:
        if args.seeds < 1 or not 0 <= args.seed < 2**31 - args.seeds:
            given = f"--seeds {args.seeds} --seed {args.seed}"
            raise ValueError(f"--seeds must be 1 or more, and all seeds between 0 and 2^31, got {given}")
        check_writable(args.out)
        with contextlib.ExitStack() as stack:
            claim = stack.enter_context(claimed(args))
            import fcjax  # slow to import: after --help and the cheapest checks
            from fcjax.runtime.hardware import use_one_thread
            from fcjax.sweeps.executor import workers_for
            from fcjax.sweeps.grid import most_runs, plan

            use_one_thread()  # as workers do, so that a single run has the same bits
            axes = {
                "distribution": args.distribution,
                "radius_m": args.radius,
                "phi": args.phi,
                "budget_s": args.budget,
            }
            axes |= {"num_devices": args.devices, "seeds": range(args.seed, args.seed + args.seeds)}
            axes["axes"] = parse_axes(args.axis)
            client = stack.enter_context(connected(args))
            client = stack.enter_context(workers_for(most_runs(args.policy, **axes), args.workers, client, args.cores))

            from fcjax.runtime.files import remove_abandoned
            from fcjax.sweeps.run import run_all  # while workers start

            remove_abandoned(args.out)
            command = shlex.join([*program.split(), *argv])
            with warnings_as_lines():
                preset = fcjax.presets.by_name(args.preset)
                if args.observation_error:
                    check_takes(preset, "observation_error", args.preset)
                    preset = partial(preset, observation_error=args.observation_error)
                jobs = plan(args.policy, **axes, dataset=args.dataset, preset=preset, progress=True)
                claim()
                threading.Thread(target=_import_the_rest, daemon=True).start()  # while workers compile
                prepared_s = time.monotonic() - start
                results = run_all(
                    jobs,
                    client=client,
                    keep=args.out / "runs",
                    out=args.out / "histories.nc",
                    workers=args.workers,
                    cores=args.cores,
                    side_by_side=args.side_by_side,
                    about={"command": command},
                    progress=True,
                )
            return finish(results, args.out, start, prepared_s) or (0 if results.complete else 130)
    except (ValueError, OSError, RuntimeError) as error:
        if args.traceback:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        finished = any((args.out / "runs").glob("[!.]*.npz"))
        print(f"interrupted; {again if finished else 'no run had finished'}", file=sys.stderr)
        return 130


def _import_the_rest() -> None:
    """Imports what is needed once all runs have finished."""
    for name in ("fcjax.report.output", "dask.array"):  # xarray imports the latter when it reads results
        importlib.import_module(name)


def check_takes(preset: Callable, setting: str, name: str) -> None:
    """Raises ValueError if a preset has no such setting."""
    if not_taken(preset, [setting]):
        known = ", ".join(inspect.signature(preset).parameters)
        raise ValueError(f"preset {name!r} has no setting {setting}: it has {known}")


def parse_axes(given: list[list[str]]) -> dict[str, list]:
    """Parses the axes of the command line; values become numbers if possible."""
    names = [name for name, *_ in given]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--axis {twice.pop()} is given twice: give all its values at once")
    return {name: [_number(text) for text in texts] for name, *texts in given}


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


@contextlib.contextmanager
def connected(args: argparse.Namespace) -> Iterator[Any]:
    """Yields a client of the cluster on the command line, or None."""
    if args.scheduler is None and args.scheduler_file is None:
        yield None
        return
    from distributed import Client

    where = args.scheduler or args.scheduler_file
    if args.scheduler_file and not Path(args.scheduler_file).is_file():
        raise ValueError(f"--scheduler-file: there is no file {args.scheduler_file}; the scheduler writes it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Dask warns about version mismatches; fcjax checks those that matter
            client = Client(args.scheduler, scheduler_file=args.scheduler_file, timeout="10s", set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"no scheduler answers at {where}: start one with dask scheduler and give its address, such as "
            f"tcp://127.0.0.1:8786 ({error})"
        ) from error
    with client:
        yield client


def finish(results: Any, out: Path, start: float, prepared_s: float) -> int:
    """Writes and prints the results of a sweep and returns the exit code."""
    from fcjax.report import output, page

    try:
        summary = output.write(results, out)
    except OSError as error:
        raise OSError(f"the results could not be written: {error}; finished runs are kept in {out / 'runs'}") from error
    total_s = time.monotonic() - start
    spent = {"preparing": prepared_s, "compiling": results.compile_s, "running": results.run_s}
    spent["writing"] = total_s - sum(spent.values())
    shown = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in spent.items())
    number = f"{len(summary)} run{'s' if len(summary) > 1 else ''}"
    kept = f", of which {results.kept} had been done before," if results.kept else ""
    try:
        print(output.table(summary))
        print(f"\n{number}{kept} in {total_s:.1f} s ({shown}); written to {out}/")
        print(f"open {out / page.NAME} in a browser to see them", flush=True)
    except BrokenPipeError:
        pass  # the reader has closed the pipe
    except OSError as error:
        raise OSError(f"the results are written to {out}/, but cannot be printed: {error}") from error
    bad = summary[results.stop.values == "bad_decision"]
    if len(bad):
        print(f"error: invalid decisions ended these runs early:\n{bad.to_string(index=False)}", file=sys.stderr)
        return 2
    return 0


# Options that do not change results.
_HOW = ("out", "traceback", "workers", "cores", "side_by_side", "scheduler", "scheduler_file")


@contextlib.contextmanager
def claimed(args: argparse.Namespace) -> Iterator[Callable[[], None]]:
    """Locks OUT against other commands, and checks that it holds no other sweep: only the number of seeds may grow.

    Yields a function that writes the settings to sweep.json, to be called after the command has been checked.
    """
    import filelock

    path = args.out / "sweep.json"
    this = {name: value for name, value in vars(args).items() if name not in _HOW}
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(filelock.FileLock(args.out / ".lock", timeout=0))
        except filelock.Timeout:
            raise ValueError(
                f"another command is running in {args.out}: wait until it has ended, or choose another --out"
            ) from None
        if path.exists():
            try:
                other = json.loads(path.read_text())
                more_seeds = other["seeds"] < args.seeds
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"{path}, which says what {args.out} holds, is damaged: delete this file if it holds this sweep "
                    "(the runs will be found), or choose another folder with --out"
                ) from error
            changes = [
                f"{name} was {other.get(name)}, is {this.get(name)}"
                for name in this | other
                if other.get(name) != this.get(name) and not (name == "seeds" and more_seeds)
            ]
            if changes:
                raise ValueError(
                    f"{args.out} holds another sweep ({'; '.join(changes)}): choose another folder with --out, or "
                    "remove this one if you no longer need it"
                )

        def write() -> None:
            from fcjax.runtime.files import write_whole

            write_whole(path, lambda part: Path(part).write_text(json.dumps(this, indent=1) + "\n"))

        yield write
