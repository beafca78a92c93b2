"""Where a sweep has its finished runs, and finds those of other days and of other processes."""

import warnings
from collections.abc import Sequence

from fcjax import results
from fcjax.archive import Archive
from fcjax.jobs import Job
from fcjax.processes import Team
from fcjax.progress import Progress
from fcjax.rounds import Stop


class Shelf:
    """Finished runs: in memory, or, where there are too many for that, in the archive."""

    def __init__(self, archive: Archive | None, *, in_memory: bool):
        self._archive, self._in_memory = archive, in_memory
        self._runs: dict[Job, results.Finished | None] = {}
        self._stops: dict[Job, Stop] = {}
        self._num_rounds: dict[Job, int] = {}
        self.room = (1, 1)  # rounds and devices that the largest needs

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, job: Job) -> bool:
        return job in self._runs

    def find(self, job: Job) -> None:
        """Looks whether a run has been kept."""
        if self._archive is not None and job not in self and (run := self._archive.load(job)) is not None:
            self._note(job, run, kept=True)

    def put(self, job: Job, run: results.Finished) -> None:
        self._note(job, run, kept=self._archive is not None and self._archive.save(job, run))

    def get(self, job: Job) -> results.Finished:
        run = self._runs[job]
        if run is None:
            assert self._archive is not None
            run = self._archive.load(job)
        if run is None:
            raise RuntimeError(
                f"a finished run is not in its folder any more: {job.labels}; start again to do it again"
            )
        return run

    def wait_for(self, jobs: Sequence[Job], team: Team, progress: bool) -> None:
        """Waits for the runs of other processes."""
        with Progress(len(jobs), "runs", enabled=progress) as shown:
            shown.begin("waiting for other processes", counts=False)
            while missing := [job for job in jobs if job not in self]:
                shown.update(len(self), len(self))
                team.pause()
                for job in missing:
                    self.find(job)

    def warn_of_faults(self, jobs: Sequence[Job]) -> None:
        """Tells of runs that did not end as one expects, and of the first of each kind."""
        for stop, fault in (
            (Stop.BAD_DECISION, "were ended by an impossible decision of their policy"),
            (Stop.DIVERGED, "diverged: their loss became infinite or not a number"),
            (Stop.BUDGET, "had no round that ended within the budget"),
        ):
            found = [job for job in jobs if self._stops[job] == stop]
            if stop == Stop.BUDGET:
                found = [job for job in found if not self._num_rounds[job]]
            if found:
                where = f"the first after {self._num_rounds[found[0]]} rounds: {found[0].labels}"
                warnings.warn(f"{len(found)} of {len(jobs)} runs {fault}, {where}", stacklevel=3)

    def _note(self, job: Job, run: results.Finished, *, kept: bool) -> None:
        num_rounds, num_devices = run.history.share.shape
        self._runs[job] = None if kept and not self._in_memory else run
        self._stops[job], self._num_rounds[job] = run.stop, num_rounds
        self.room = max(self.room[0], num_rounds), max(self.room[1], num_devices)
