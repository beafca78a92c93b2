"""Trains under scheduling policies within a budget of simulated time, and compares what accuracy they reach.

Every option with several values is swept: all combinations are run, with all seeds, on the same random channels, data
and mini-batches. Writes to OUT
  runs/            each run, as it finishes: a command that was stopped, by whatever, goes on where it was
  summary.csv      a row for each run
  histories.nc     every round of every run; xarray.open_dataset reads it
  accuracy.png     accuracy against simulated time, with 95% intervals over seeds (and .pdf)
  rounds.png       scheduled devices, round time and estimates (and .pdf)
"""

import argparse
import contextlib
import json
import os
import shlex
import sys
import time
from functools import partial
from pathlib import Path

import cluster
from console import (
    FolderLock,
    as_text,
    check_writable,
    end_in_order,
    last_words,
    leave,
    not_now,
    run,
    warnings_as_lines,
    watch,
)

EXAMPLES = """examples:
  python experiments/sweep.py --phi 0.05
  python experiments/sweep.py --policy fc rd pf cs-l cs-h as-l as-h --distribution l1 l2 iid --out out/all
  python experiments/sweep.py --phi 0.005 0.05 0.5 5 --radius 200 600 1000 --seeds 3 --out out/phi
  python experiments/sweep.py --dataset cifar10 --policy fc fixed-5 fixed-10 --distribution l2 --out out/cifar10
  python experiments/sweep.py --policy fc my_file:my_policy --out out/mine     # your own, from my_file.py
  srun python experiments/sweep.py --seeds 1000 --out out/1000 --distributed   # on all nodes of a Slurm job
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several = {"nargs": "+", "metavar": "X"}
    p.add_argument("--phi", type=float, default=[0.05], **several, help="of the policies that have it (default: 0.05)")
    p.add_argument(
        "--policy",
        default=["fc"],
        **several,
        help="fc, exact, fixed-N, rd, pf, cs-l, cs-h, as-l, as-h, centralized, my_file:my_policy (default: fc)",
    )
    p.add_argument("--dataset", default="mnist", help="mnist, cifar10, fashion_mnist, ... (default: mnist)")
    p.add_argument("--distribution", default=["l1"], **several, help="iid, l1, l2, ..., dir0.1, ... (default: l1)")
    p.add_argument("--radius", type=float, default=[600.0], **several, help="of the cell, in m (default: 600)")
    p.add_argument("--devices", type=int, default=[20], **several, help="in the cell (default: 20)")
    p.add_argument("--budget", type=float, **several, help="simulated s (default: 60, on CIFAR-10 200)")
    p.add_argument("--seeds", type=int, default=5, metavar="N", help="number of seeds (default: 5)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="the first of them (default: 0)")
    p.add_argument(
        "--observation-error",
        type=float,
        default=0.0,
        metavar="X",
        help="relative error of what the base station sees of channels and computation times (default: 0)",
    )
    p.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="devices, or cores of a CPU, that take part (default: all of this machine)",
    )
    p.add_argument(
        "--side-by-side",
        type=int,
        metavar="N",
        help="runs that a device does at the same time (default: 1 on a CPU, 16 on an accelerator)",
    )
    cluster.add_options(p)
    p.add_argument("--out", type=Path, default=Path("out/sweep"), help="folder for the results (default: %(default)s)")
    return p


def main(argv: list[str] | None = None) -> int:
    start = time.monotonic()
    args = parser().parse_args(argv)
    sys.path.append(os.getcwd())  # where a user's policy is
    end_in_order()
    at_end = contextlib.ExitStack()
    again = f"finished runs are kept in {args.out / 'runs'}, and the same command goes on from there"
    try:
        if args.seeds < 1 or not 0 <= args.seed < 2**31 - args.seeds:
            raise ValueError(f"--seeds must be 1 or more and --seed 0 to 2^31, got {args.seeds} and {args.seed}")
        check_writable(args.out)
        last_words(f"this process was killed, or ended by JAX because another one of the sweep is gone: {again}")
        with not_now():
            import fcjax  # after --help and the cheapest errors: it takes seconds
            from fcjax.planning import plan
            from fcjax.results import remove_abandoned
            from fcjax.sweep import run_all

        process = cluster.join(args)
        claim = Claim(args)
        at_end.callback(claim.release)
        claim.check()
        remove_abandoned(args.out)
        fcjax.programs.keep_on_disk()
        command = shlex.join(["python", "experiments/sweep.py", *(sys.argv[1:] if argv is None else argv)])
        with warnings_as_lines():
            jobs = plan(
                args.policy,
                dataset=args.dataset,
                distribution=args.distribution,
                radius_m=args.radius,
                phi=args.phi,
                budget_s=args.budget,
                num_devices=args.devices,
                seeds=range(args.seed, args.seed + args.seeds),
                preset=partial(fcjax.presets.shi2020, observation_error=args.observation_error),
                progress=True,
            )
            claim.write()
            results = run_all(
                jobs,
                keep=args.out / "runs",
                out=args.out / "histories.nc",
                workers=args.workers,
                side_by_side=args.side_by_side,
                about={"command": command},
                progress=True,
            )
        code = 0 if results.complete else 130
        if results.complete:
            cluster.part()
        if process == 0:
            code = tell(results, args.out, start) or code
        elif results.complete:
            print(f"process {process}: all {results.sizes['run']} runs are there; process 0 tells the results")
        return code
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        finished = any((args.out / "runs").glob("[!.]*.npz"))
        print(f"interrupted; {again if finished else 'no run had finished'}", file=sys.stderr)
        return 130
    finally:
        at_end.close()


def tell(results, out: Path, start: float) -> int:
    """Writes and prints what came of a sweep, and returns the exit code."""
    try:
        summary = write(results, out)
    except OSError as error:
        raise OSError(f"the results could not be written: {error}; finished runs are kept in {out / 'runs'}") from error
    spent = f"compiling {results.compile_s:.1f} s, running {results.run_s:.1f} s"
    kept = f", of which {results.kept} had been kept," if results.kept else ""
    try:
        print(table(summary))
        print(
            f"\n{len(summary)} runs{kept} in {time.monotonic() - start:.1f} s ({spent}); written to {out}/", flush=True
        )
    except BrokenPipeError:
        pass  # nobody reads on
    except OSError as error:
        raise OSError(f"the results are written to {out}/, but cannot be printed: {error}") from error
    bad = summary[results.stop.values == "bad_decision"]
    if len(bad):
        print(f"error: impossible decisions ended these runs early:\n{bad.to_string(index=False)}", file=sys.stderr)
        return 2
    return 0


# What has no say in the results, or not in what they are results of.
_HOW = ("out", "workers", "distributed", "coordinator", "processes", "process")


class Claim:
    """A note in OUT of which sweep it holds, so that none takes the place of another, or is mixed with it."""

    def __init__(self, args: argparse.Namespace):
        from fcjax.data.fetch import sha256
        from fcjax.engine import layout
        from fcjax.foreign import file_of
        from fcjax.results import provenance
        from fcjax.settings import current

        versions = json.loads(provenance()["versions"])
        settings = {name: value for name, value in vars(args).items() if name not in _HOW}
        settings["side_by_side"] = layout(args.workers, args.side_by_side)[1]
        own = {name: file_of(name.rpartition(":")[0]) for name in args.policy if ":" in name}
        self._this = {
            "settings": settings,
            "versions": {name: versions[name] for name in ("fcjax", "jax", "jaxlib")},
            "settings of JAX": current(),
            "policies": {f"the code of {name}": sha256(path)[:12] for name, path in own.items() if path is not None},
        }
        self._out, self._path = args.out, args.out / "sweep.json"
        self._lock = FolderLock(args.out)

    def check(self) -> None:
        """Raises ValueError if OUT holds another sweep; this one with fewer seeds is not another."""
        held = any((self._out / "runs").glob("[!.]*.npz")) or (self._out / "summary.csv").exists()
        if not (held or (self._lock.is_shared() and self._path.exists())):
            return
        try:
            other = json.loads(self._path.read_text())
            changes = [
                f"{name} was {other[part].get(name)}, is {this.get(name)}"
                for part, this in self._this.items()
                for name in this | other[part]
                if other[part].get(name) != this.get(name) and not (name == "seeds" and other[part][name] < this[name])
            ]
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            changes = [f"{self._path} is not there, or cannot be read"]
        if changes:
            raise ValueError(
                f"{self._out} holds another sweep ({'; '.join(changes)}): choose another folder with --out, or delete "
                "this one"
            )

    def write(self) -> None:
        """Puts it there, unless another sweep has done so since it was checked."""
        from fcjax.results import write_whole

        self.check()
        text = json.dumps(self._this, indent=1) + "\n"
        try:
            if not self._path.exists() or self._path.read_text() != text:
                write_whole(self._path, lambda part: Path(part).write_text(text))
        except OSError as error:
            raise OSError(
                f"{self._path} cannot be written: {error.strerror}; choose another folder with --out"
            ) from error

    def release(self) -> None:
        self._lock.release()


def write(results, out: Path):
    """Writes all files of a sweep, each of them whole, and returns the summary."""
    import matplotlib

    matplotlib.use("Agg")
    from fcjax import plots
    from fcjax.results import summary, write_whole

    rows = summary(results)
    text = rows.to_csv(index=False, float_format="%.7g", na_rep="nan")
    write_whole(out / "summary.csv", lambda part: Path(part).write_text(text))
    for draw in (plots.accuracy, plots.rounds):
        figure = draw(results)
        write_whole(out / f"{draw.__name__}.png", figure.savefig)
        write_whole(out / f"{draw.__name__}.pdf", partial(figure.savefig, metadata={"CreationDate": None}))
    return rows


def table(rows) -> str:
    """Means over seeds with 95% intervals, a line for each combination of settings."""
    from fcjax.plots import interval

    cell = ["dataset", "policy", "distribution", "radius_m", "phi", "devices", "budget_s"]
    shown = {
        "best_accuracy": ("best accuracy (%)", 100, 2),
        "tilde_accuracy": ("w~ accuracy (%)", 100, 2),
        "final_accuracy": ("final accuracy (%)", 100, 2),
        "mean_scheduled": ("scheduled", 1, 2),
        "mean_round_s": ("round (s)", 1, 3),
        "rounds": ("rounds", 1, 1),
    }
    lines = [
        ["policy", "distribution", "R (m)", "phi", "M", "T (s)", "seeds", *(name for name, _, _ in shown.values())]
    ]
    for (_, policy, distribution, radius_m, phi, devices, budget_s), runs in rows.groupby(
        cell, sort=False, dropna=False
    ):
        line = [policy, distribution, f"{radius_m:g}", "-" if phi != phi else f"{phi:g}", devices, f"{budget_s:g}"]
        diverged = int((runs["stop"] == "diverged").sum())
        line.append(f"{len(runs)} ({diverged} diverged)" if diverged else len(runs))
        for column, (_, scale, digits) in shown.items():
            mean, half = interval(scale * runs[column].to_numpy(float))
            line.append(f"{mean:.{digits}f}" + ("" if half != half else f" ± {half:.{digits}f}"))
        lines.append([str(entry) for entry in line])
    return as_text([lines])


if __name__ == "__main__":
    watch()
    leave(run(main))
