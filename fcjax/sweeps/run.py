"""Runs a sweep and returns one data set."""

from __future__ import annotations  # short types in help()

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from fcjax import checks, data
from fcjax.runtime.progress import Progress
from fcjax.simulation.experiment import Experiment, may_end_with_world
from fcjax.simulation.records import Stop
from fcjax.simulation.simulate import Run
from fcjax.sweeps import executor, results, setups
from fcjax.sweeps.archive import Archive
from fcjax.sweeps.engine import default_side_by_side
from fcjax.sweeps.grid import most_runs, plan
from fcjax.sweeps.jobs import Job
from fcjax.types import Policy
from fcjax.wireless.decisions import DECIDED

if TYPE_CHECKING:
    from distributed import Client

_AT_HAND = 64  # runs in memory at a time while the results file is written


def sweep(
    policy: str | Sequence[str] | Mapping[str, Policy] = "fc",
    *,
    dataset: str | data.Dataset = "mnist",
    distribution: str | Sequence[str] = "l1",
    radius_m: float | Sequence[float] = 600.0,
    phi: float | Sequence[float] = 0.05,
    budget_s: float | Sequence[float] | None = None,
    num_devices: int | Sequence[int] | None = None,
    seeds: int | Iterable[int] = 5,
    axes: Mapping[str, Any] | None = None,
    preset: Callable[..., Experiment] | str = "shi2020",
    client: Client | None = None,
    keep: str | os.PathLike | None = None,
    out: str | os.PathLike | None = None,
    workers: int | None = None,
    cores: int = 1,
    side_by_side: int | None = None,
    about: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> xr.Dataset:
    """Runs every combination of the arguments and returns all histories as one labelled data set.

    Args:
      policy: names that `fcjax.policies.by_name` accepts, or a mapping of names to policies.
      dataset: a name that `fcjax.data.load` accepts, or a data set.
      distribution: how the data are distributed among devices: "iid", "l1", "l2", ..., "dir0.1", ...
      radius_m: the radius of the cell.
      phi: the trade-off parameter; policies that do not take it run once.
      budget_s: the time budget; by default the preset's.
      num_devices: M; by default the preset's.
      seeds: the number of seeds, starting at 0, or the seeds themselves.
      axes: further axes, as a mapping of names to values. A name is a leaf of the experiment, such as
        {"cell.bandwidth_hz": [5e6, 20e6]}, or an argument of the preset. Axes become coordinates of `run`.
      preset: a name that `fcjax.presets.by_name` accepts, such as "heterogeneous", or a function that makes an
        experiment from dataset, distribution, radius_m, seed, and num_devices and budget_s if they are given.
        Use `functools.partial` to pass further settings. It may be called several times for a run, and must return the
        same experiment each time.
      client: the client of a Dask cluster that executes the runs; by default this machine does.
      keep: a folder where runs are saved as they finish. Runs of this sweep that it already holds are not repeated.
      out: a netCDF file for the results. The returned data set reads from it lazily, so memory does not grow with the
        number of runs. Requires `keep`.
      workers: the number of local processes; by default one per core. With 1, the current process executes all runs.
        Accelerators are always used by the current process alone.
      cores: how many cores compute a run; by default one, which is the fastest for many runs. With fewer runs than
        cores, use several per run. They may change the last bits of a result.
      side_by_side: how many runs each processor executes at a time; by default 1 on a CPU and 16 on an accelerator.
        Reduce it if an accelerator runs out of memory. It affects the last bits of a result, as the hardware does.
      about: further attributes of the results.
      progress: whether to show a progress bar with the remaining time.

    Returns:
      The histories, with dimensions run, round and device, and the settings as coordinates of run; see
      `fcjax.results`. After Ctrl-C, the runs that have finished, if any.
    """
    grid: dict[str, Any] = {"distribution": distribution, "radius_m": radius_m, "phi": phi, "budget_s": budget_s}
    grid |= {"num_devices": num_devices, "seeds": seeds, "axes": axes}
    number = most_runs(policy, **grid)
    with executor.workers_for(number, workers, client, cores) as client:  # they start during the plan
        jobs = plan(policy, **grid, dataset=dataset, preset=preset, progress=progress)
        how: dict[str, Any] = {"cores": cores, "side_by_side": side_by_side, "about": about, "progress": progress}
        return run_all(jobs, client=client, keep=keep, out=out, workers=workers, **how)


def run_all(
    jobs: Sequence[Job],
    *,
    client: Client | None = None,
    keep: str | os.PathLike | None = None,
    out: str | os.PathLike | None = None,
    workers: int | None = None,
    cores: int = 1,
    side_by_side: int | None = None,
    about: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> xr.Dataset:
    """Executes runs of `fcjax.plan` that `keep` does not hold yet and returns all runs in order; see `sweep`."""
    keep, out, about = _path("keep", keep), _path("out", out), _attributes(about)
    if out is not None and keep is None:
        raise ValueError("out needs keep, the folder of finished runs that it is written from")
    if out is not None and not out.parent.is_dir():
        raise OSError(f"results cannot be written to {out}: there is no folder {out.parent}")
    side_by_side = checks.whole("side_by_side", side_by_side or default_side_by_side(), 1)
    if not jobs:
        raise ValueError("there are no runs: jobs is empty")
    if cores != 1:
        jobs = [dataclasses.replace(job, make=functools.partial(_with_cores, job.make, cores)) for job in jobs]
    clock = executor.Clock()
    finished = _Finished(None if keep is None else Archive(keep, side_by_side), in_memory=out is None)
    if keep is not None and any(keep.glob("[!.]*.npz")):
        with Progress(len(jobs), "run", enabled=progress) as shown:
            shown.begin("looking for kept runs")
            for number, job in enumerate(jobs, 1):
                finished.find(job)
                shown.update(number, number)
    num_kept = len(finished)
    missing = [job for job in jobs if job not in finished]
    how: dict[str, Any] = {"clock": clock, "side_by_side": side_by_side, "progress": progress}
    interrupted = False
    try:
        with executor.workers_for(len(missing), workers, client, cores) as client:
            for job, run in executor.execute(missing, client=client, **how):
                finished.add(job, run)
    except KeyboardInterrupt:
        if not len(finished):
            raise
        interrupted = True
        where = "" if keep is None else f" and are kept in {keep}; run the same command to resume"
        warnings.warn(f"interrupted: {len(finished)} of {len(jobs)} runs have finished{where}", stacklevel=2)
    done = [job for job in jobs if job in finished]
    labels = dict(zip(done, results.alike(job.labels for job in done), strict=True))
    finished.warn_of_faults(done)
    about = {"complete": int(not interrupted), "kept": num_kept, **dataclasses.asdict(clock), **about}
    samples = setups.samples_of(done)

    def joined(block: Sequence[Job]) -> xr.Dataset:
        labelled = [(labels[job], finished.get(job)) for job in block]
        made = results.to_dataset(labelled, about, room=finished.room, decided=finished.decided)
        return setups.assign(made, block, samples)

    if out is None:
        return joined(done)
    blocks = (done[start : start + _AT_HAND] for start in range(0, len(done), _AT_HAND))
    try:
        results.save_parts(map(joined, blocks), out)
    except OSError as error:
        raise OSError(f"{error}; finished runs are kept in {keep}: run the same command to resume") from error
    return results.read(out)


def _with_cores(make: Callable[[], Experiment], cores: int) -> Experiment:
    return dataclasses.replace(make(), cores=cores)


class _Finished:
    """Finished runs, held in memory or, if they may not fit, in the archive."""

    def __init__(self, archive: Archive | None, *, in_memory: bool):
        self._archive, self._in_memory = archive, in_memory
        self._runs: dict[Job, Run | None] = {}
        self._stops: dict[Job, Stop] = {}
        self._num_rounds: dict[Job, int] = {}
        self.room = (1, 1)  # most rounds and most devices of any run
        self.decided: set[str] = set()  # what any policy decides

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, job: Job) -> bool:
        return job in self._runs

    def find(self, job: Job) -> None:
        """Loads a run if the archive holds it."""
        if self._archive is not None and (run := self._archive.load(job)) is not None:
            self._note(job, run, kept=True)

    def add(self, job: Job, run: Run) -> None:
        """Adds a run that has just finished."""
        self._note(job, run, kept=self._archive is not None and self._archive.save(job, run))

    def get(self, job: Job) -> Run:
        run = self._runs[job]
        if run is None:
            assert self._archive is not None
            run = self._archive.load(job)
        if run is None:
            raise RuntimeError(f"a finished run is missing from its folder: {job.labels}; rerun to repeat it")
        return run

    def warn_of_faults(self, jobs: Sequence[Job]) -> None:
        """Warns about runs that ended early or had no round."""
        for stop, fault in (
            (Stop.BAD_DECISION, "were ended by an invalid decision of their policy"),
            (Stop.DIVERGED, "diverged: their loss became infinite or not a number"),
            (Stop.BUDGET, "had no round that ended within the budget"),
            (Stop.MAX_ROUNDS, "ended before their budget was spent, because their world exceeds its fcjax.Limits"),
        ):
            found = [job for job in jobs if self._stops[job] == stop]
            if stop == Stop.BUDGET:
                found = [job for job in found if not self._num_rounds[job]]
            if stop == Stop.MAX_ROUNDS:
                found = [job for job in found if not may_end_with_world(job.experiment)]
            if found:
                where = f"the first after {self._num_rounds[found[0]]} rounds: {found[0].labels}"
                warnings.warn(f"{len(found)} of {len(jobs)} runs {fault}, {where}", stacklevel=3)

    def _note(self, job: Job, run: Run, *, kept: bool) -> None:
        num_rounds, num_devices = run.history.share.shape
        self.decided |= {name for name in DECIDED if getattr(run.history, name) is not None}
        self._runs[job] = None if kept and not self._in_memory else run
        self._stops[job], self._num_rounds[job] = Stop(int(run.stop)), num_rounds
        self.room = max(self.room[0], num_rounds), max(self.room[1], num_devices)


def _path(name: str, value: str | os.PathLike | None) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or str(value) in ("", ".") or "\0" in str(value):
        raise ValueError(f"{name} must be a path other than the current folder, got {value!r}")
    return Path(value).expanduser()


def _attributes(about: Mapping[str, Any] | None) -> dict[str, Any]:
    """Checks the attributes before the first run, because the file rejects bad ones only after the last."""
    if about is not None and not isinstance(about, Mapping):
        raise ValueError(f"about must be a mapping of names to strings or numbers, got {about!r}")
    for name, value in (about or {}).items():
        if (
            not isinstance(name, str)
            or not isinstance(value, str | int | float | np.number)
            or value is True
            or value is False
        ):
            raise ValueError(f"about must be a mapping of names to strings or numbers, got {name!r}: {value!r}")
    return dict(about or {})
