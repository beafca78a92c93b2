"""Many runs, planned and done, as one data set."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from fcjax import data, presets, results
from fcjax.archive import Archive
from fcjax.engine import Clock, execute, layout
from fcjax.experiment import Experiment
from fcjax.jobs import Job
from fcjax.planning import plan
from fcjax.processes import Does, Team
from fcjax.progress import Progress
from fcjax.shelf import Shelf
from fcjax.types import Policy

_AT_HAND = 64  # runs that are in memory while the file of all is written


def sweep(
    policy: str | Sequence[str] | Mapping[str, Policy] = "fc",
    *,
    dataset: str | data.Dataset = "mnist",
    distribution: str | Sequence[str] = "l1",
    radius_m: float | Sequence[float] = 600.0,
    phi: float | Sequence[float] = 0.05,
    budget_s: float | Sequence[float] | None = None,
    num_devices: int | Sequence[int] = 20,
    seeds: int | Iterable[int] = 5,
    preset: Callable[..., Experiment] = presets.shi2020,
    keep: str | os.PathLike | None = None,
    out: str | os.PathLike | None = None,
    workers: int | None = None,
    side_by_side: int | None = None,
    about: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> xr.Dataset:
    """Runs every combination of what is given and returns all histories as one labelled data set.

    Args:
      policy: names as `fcjax.policies.by_name` reads them, or a mapping of names to policies.
      dataset: a name that `fcjax.data.load` reads, or a data set.
      distribution: of the data among devices: "iid", "l1", "l2", ..., "dir0.1", ...
      radius_m: of the cell.
      phi: for the policies that have it; the others run once.
      budget_s: by default what the preset has.
      num_devices: M.
      seeds: how many, counted from 0, or which.
      preset: makes an experiment of dataset, distribution, num_devices, radius_m, budget_s and seed. With
        `functools.partial` it takes further settings. It is called again for each run that begins, and must then give
        the same.
      keep: a folder where runs are kept as they finish. What it holds of this sweep already is not done again.
      out: a netCDF file for the results, which are then read from it when they are looked at: memory does not grow with
        the number of runs. Needs `keep`.
      workers: how many devices of this process take part; by default all, or all cores of a CPU.
      side_by_side: how many runs a device does at the same time; by default one on a CPU, 16 on an accelerator. Where
        there are fewer runs, places stay empty; where there is less memory, there are fewer places, or, with `keep`, an
        error that says how many there may be. The last bits of a result depend on it, as they do on the kind of device.
      about: further attributes of the results.
      progress: shows a bar with the remaining time.

    Returns:
      The histories, with dimensions run, round and device, and the settings as coordinates of run; see
      `fcjax.results`. After Ctrl-C the runs that were finished by then, if any. Where `jax.distributed` has joined
      several processes, each does a part of the runs, and all return all of them.
    """
    jobs = plan(
        policy,
        dataset=dataset,
        distribution=distribution,
        radius_m=radius_m,
        phi=phi,
        budget_s=budget_s,
        num_devices=num_devices,
        seeds=seeds,
        preset=preset,
        progress=progress,
    )
    return run_all(jobs, keep=keep, out=out, workers=workers, side_by_side=side_by_side, about=about, progress=progress)


def run_all(
    jobs: Sequence[Job],
    *,
    keep: str | os.PathLike | None = None,
    out: str | os.PathLike | None = None,
    workers: int | None = None,
    side_by_side: int | None = None,
    about: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> xr.Dataset:
    """Does runs, but for those that have been kept, and returns all in their order; see `sweep`."""
    keep, out, about = _path("keep", keep), _path("out", out), _attributes(about)
    if out is not None and keep is None:
        raise ValueError("out needs keep, a folder of finished runs that it is put together from")
    if out is not None and not out.parent.is_dir():
        raise OSError(f"results cannot be written to {out}: there is no folder {out.parent}")
    workers, side_by_side = layout(workers, side_by_side)
    archive = None if keep is None else Archive(keep, side_by_side)
    clock = Clock()
    shelf = Shelf(archive, in_memory=out is None)
    with Team(keep) as team:
        if archive is not None and team.size > 1:
            team.begin(archive.digest(jobs))
        with Progress(len(jobs), "runs", enabled=progress) as shown:
            shown.begin("looking for kept", counts=False)
            for number, job in enumerate(jobs, 1):
                shelf.find(job)
                shown.update(number, number)
        num_kept = len(shelf)
        interrupted, together = False, None
        try:
            missing = [job for job in team.part(jobs) if job not in shelf]
            for job, run in execute(
                missing,
                clock=clock,
                workers=workers,
                side_by_side=side_by_side,
                may_reduce=archive is None,
                tick=team.check,
                progress=progress,
            ):
                shelf.put(job, run)
            team.tell(Does.WAIT)
            shelf.wait_for(jobs, team, progress)
        except KeyboardInterrupt:
            for job in jobs if team.size > 1 else []:
                shelf.find(job)
            if not len(shelf):
                raise
            interrupted = True
            where = "" if keep is None else f" in {keep}, and the same call goes on from there"
            warnings.warn(
                f"interrupted: {len(shelf)} of {len(jobs)} runs had finished and are kept{where}", stacklevel=2
            )
        done = [job for job in jobs if job in shelf]
        shelf.warn_of_faults(done)
        about = {"complete": int(not interrupted), "kept": num_kept, **dataclasses.asdict(clock), **about}
        if out is None or (interrupted and team.index > 0):
            together = results.to_dataset([shelf.get(job) for job in done], about)
        elif team.index == 0:
            blocks = (done[start : start + _AT_HAND] for start in range(0, len(done), _AT_HAND))
            parts = (results.to_dataset([shelf.get(job) for job in block], about, room=shelf.room) for block in blocks)
            try:
                results.save_parts(parts, out)
            except OSError as error:
                raise OSError(f"{error}; kept runs stay in {keep}, and the same call goes on from there") from error
        else:
            while not team.have_rested(0):  # the first writes the file for all
                team.pause()
        if not interrupted:
            team.rest()
    if together is None:
        assert out is not None
        return results.read(out)
    return together


def _path(name: str, value: str | os.PathLike | None) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or str(value) in ("", ".") or "\0" in str(value):
        raise ValueError(f"{name} must be the path of a folder or file of its own, got {value!r}")
    return Path(value).expanduser()


def _attributes(about: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those that a file can hold; ValueError for others, which would be told of when all runs have been done."""
    if about is not None and not isinstance(about, Mapping):
        raise ValueError(f"about must be a mapping of names to texts or numbers, got {about!r}")
    for name, value in (about or {}).items():
        if (
            not isinstance(name, str)
            or not isinstance(value, str | int | float | np.number)
            or value is True
            or value is False
        ):
            raise ValueError(f"about must be a mapping of names to texts or numbers, got {name!r}: {value!r}")
    return dict(about or {})
