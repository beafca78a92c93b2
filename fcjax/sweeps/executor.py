"""Carries out the runs of a sweep: in this process, or as tasks of Dask workers, here or on a cluster.

A run is a task. Workers are processes of one thread each, so that a run has the same bits on any of them: by default
one for each core of this machine, or those of a cluster that the user has started. A task holds the number of a run.
What the runs of a program have in common is sent to each worker once, and compiled there once. When a worker dies, Dask
gives its runs to others; a worker that joins late gets work. Workers return finished runs, and the caller keeps them.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import queue
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle

from fcjax import checks
from fcjax.runtime import settings
from fcjax.runtime.cluster import Versions, address_of, check_workers, differences, is_local, local_client, versions
from fcjax.runtime.hardware import is_accelerated, num_cores, use_one_thread
from fcjax.runtime.progress import Progress
from fcjax.sweeps.engine import Program
from fcjax.sweeps.jobs import Finished, Group, Job, groups

if TYPE_CHECKING:
    from distributed import Client, Future

TOPIC = "fcjax"  # of the events by which workers say which task they do, and how far they are
_REPORT_S = 0.5  # between two reports of a worker

_LOST_S = 45.0  # after which local workers, or any scheduler, that do not answer are given up
_FETCH_S = 60.0  # for a result whose worker may just have died
_MOST_TRIES = 3  # of a run, each of which may have cost several workers: Dask counts bystanders too


@dataclasses.dataclass
class Clock:
    """Where the time went."""

    compile_s: float = 0.0
    run_s: float = 0.0
    num_programs: int = 0


@contextlib.contextmanager
def workers_for(num_runs: int, workers: int | None, client: "Client | None" = None) -> Iterator["Client | None"]:
    """A client of workers for so many runs, which may still be starting; None if this process does them.

    Args:
      num_runs: an upper bound on the number of runs.
      workers: how many processes of this machine take part; by default one for each core.
      client: of a cluster of the user's, which takes their place.
    """
    number = min(num_runs, num_cores() if workers is None else checks.whole("workers", workers, 1))
    if client is not None or number <= 1 or is_accelerated():
        yield client
        return
    with local_client(number) as client:
        yield client


def execute(
    jobs: Sequence[Job],
    *,
    client: "Client | None" = None,
    clock: Clock | None = None,
    side_by_side: int = 1,
    progress: bool = False,
) -> Iterator[tuple[Job, Finished]]:
    """Carries out the runs, and yields each when it is finished, in any order.

    Args:
      jobs: the runs.
      client: of the workers that do them; None for this process.
      clock: records where the time goes.
      side_by_side: how many runs a device does at a time.
      progress: shows a bar with the remaining time.
    """
    clock = Clock() if clock is None else clock
    if not jobs:
        return
    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(Progress(len(jobs), "runs", enabled=progress))
        shown.begin("preparing", counts=False)
        batches = shown.run(groups, jobs)
        clock.num_programs += len(batches)
        finished = (
            _here(batches, side_by_side, clock, shown)
            if client is None
            else _on_workers(client, batches, side_by_side, clock, shown)
        )
        yield from finished


def _here(batches: Sequence[Group], side_by_side: int, clock: Clock, shown: Progress) -> Iterator[tuple[Job, Finished]]:
    number = 0
    for group in batches:
        before = time.monotonic()
        shown.begin("compiling", counts=False)
        program = shown.run(Program, group, side_by_side)
        clock.compile_s += time.monotonic() - before
        before = time.monotonic()
        shown.begin("running", counts=True)
        parts = [0.0] * len(group.jobs)

        def report(index: int, part: float, parts: list[float] = parts, number: int = number) -> None:
            parts[index] = part
            shown.update(number + sum(parts), number + sum(part == 1.0 for part in parts))

        try:
            with settings.applied(settings.current()):
                for index, run in program.run(range(len(group.jobs)), report):
                    report(index, 1.0)
                    yield group.jobs[index], run
        finally:
            clock.run_s += time.monotonic() - before
        number += len(group.jobs)
        del program  # before the memory that is free for the next is asked for


def _on_workers(
    client: "Client", batches: Sequence[Group], side_by_side: int, clock: Clock, shown: Progress
) -> Iterator[tuple[Job, Finished]]:
    begun = time.monotonic()
    tasks: dict[str, _Task] = {}
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    parts: dict[str, float] = {}
    num_finished = 0
    watch = _Watch(client)

    def hear(event: tuple[float, dict[str, Any]]) -> None:
        """A worker says how far its task is."""
        if event[1]["task"] in tasks:
            parts[event[1]["task"]] = event[1]["part"]

    def submit(task: _Task) -> None:
        key = f"fcjax-run-{task.token}-{task.indices[0]}-{uuid.uuid4().hex[:8]}"
        tasks[key] = task
        task.future = client.submit(_do, task.token, task.shared, task.indices, key=key)
        task.future.add_done_callback(lambda future: done.put(future.key))

    def again(task: _Task, error: Exception) -> None:
        task.tries += 1
        if task.tries == _MOST_TRIES:
            raise RuntimeError(f"a run was tried {_MOST_TRIES} times, in vain: {error}") from error
        submit(task)

    try:
        check_workers(client)
        client.subscribe_topic(TOPIC, hear)
        shown.begin("compiling", counts=False)
        is_running = False
        for group in batches:
            blob = _pickled(group, side_by_side)
            token = hashlib.sha256(blob).hexdigest()[:16]
            # A task, whose input the scheduler keeps: if the workers that hold its result are gone, it is done again.
            shared = client.submit(bytes, blob, key=f"fcjax-program-{token}")
            for start in range(0, len(group.jobs), side_by_side):
                submit(_Task(group, token, shared, range(start, min(start + side_by_side, len(group.jobs)))))
        while tasks:
            try:
                key = done.get(timeout=0.2)
            except queue.Empty:
                watch.check()
            else:
                task = tasks.pop(key)
                parts.pop(key, None)
                try:
                    runs, compile_s = task.future.result(timeout=_FETCH_S)
                except TimeoutError:  # the worker that had the result is gone, and Dask repeats the run
                    tasks[key] = task
                    task.future.add_done_callback(lambda future: done.put(future.key))
                    continue
                except _unfit() as error:
                    watch.part_with(error)
                    again(task, error)
                    continue
                watch.is_well()
                clock.compile_s = max(clock.compile_s, compile_s)
                for index, run in zip(task.indices, runs, strict=True):
                    num_finished += 1
                    yield task.group.jobs[index], dataclasses.replace(run, labels=task.group.jobs[index].labels)
            if not is_running and (parts or num_finished):
                shown.begin("running", counts=True)
                is_running = True
            under_way = sum(part * len(tasks[key].indices) for key, part in list(parts.items()) if key in tasks)
            shown.update(num_finished + under_way, num_finished)
    except Exception as error:
        if client.status != "running" or isinstance(error, concurrent.futures.CancelledError):
            raise watch.lost() from error
        raise
    finally:
        clock.run_s += time.monotonic() - begun - clock.compile_s
        with contextlib.suppress(Exception):  # of a scheduler that is gone
            client.unsubscribe_topic(TOPIC)
            client.cancel([task.future for task in tasks.values()])


@dataclasses.dataclass(eq=False)
class _Task:
    """Runs that one worker does together, on an accelerator side by side."""

    group: Group
    token: str  # of the program
    shared: "Future"  # what the runs of the program have in common
    indices: Sequence[int]
    tries: int = 0
    future: Any = None  # of the last try


class UnfitError(RuntimeError):
    """A worker cannot do the work: (what is wrong, its address)."""

    def __str__(self) -> str:
        return str(self.args[0])


def _unfit() -> tuple[type[Exception], ...]:
    """Errors of workers, not of runs."""
    from distributed import KilledWorker

    return UnfitError, KilledWorker


class _Watch:
    """Notices that nobody is left to do the work."""

    def __init__(self, client: "Client"):
        self._client = client
        self._looked_at = self._well_at = time.monotonic()
        self._is_local = is_local(client)
        self._warned = False

    def is_well(self) -> None:
        self._well_at = time.monotonic()
        self._warned = False

    def check(self) -> None:
        """Raises RuntimeError if the scheduler, or every local worker, has been gone for a while.

        Workers of a cluster may come and go: a warning says that there are none.
        """
        client, now = self._client, time.monotonic()
        if now - self._looked_at < 2.0:
            return
        self._looked_at = now
        if client.status == "running" and client.scheduler_info(n_workers=1)["workers"]:
            self.is_well()
        elif client.status == "closed" or now - self._well_at > _LOST_S:
            if self._is_local or client.status != "running":
                raise self.lost()
            if not self._warned:
                warnings.warn(f"no worker is left: waiting for some to join {address_of(client)}", stacklevel=2)
                self._warned = True

    def part_with(self, error: Exception) -> None:
        """Closes a worker that cannot do the work, while there are others; raises RuntimeError if there are none."""
        if isinstance(error, UnfitError):
            what, address = error.args
            others = set(self._client.scheduler_info(n_workers=-1)["workers"]) - {address}
            if not others:
                raise RuntimeError(what) from error
            self._client.retire_workers([address])
            warnings.warn(f"{what}; it was closed, and others do its runs", stacklevel=2)

    def lost(self) -> RuntimeError:
        """What has been lost, in words."""
        if self._is_local and self._client.status == "running":
            return RuntimeError("all worker processes have died, perhaps for lack of memory: run it again to resume")
        return RuntimeError(
            f"the connection to the scheduler at {address_of(self._client)} is lost: start it again if it has died, "
            "then run the same command to resume"
        )


_programs: dict[str, Program] = {}  # of this worker, by what they were sent as
_MOST_PROGRAMS = 2  # each has a copy of the data set
_lock = threading.Lock()


def _do(token: str, blob: bytes, indices: Sequence[int]) -> tuple[list[Finished], float]:
    """The task of a worker: does runs, and returns them with the time that compiling took."""
    from distributed import get_worker

    worker = get_worker()
    use_one_thread()
    sent: _Sent = cloudpickle.loads(blob)
    if apart := differences(versions(), sent.versions):  # of a worker that has joined late
        raise UnfitError(f"worker {worker.address} has {apart}", worker.address)
    with _lock, settings.applied(sent.settings):
        begun = time.monotonic()
        if token not in _programs:
            if len(_programs) >= _MOST_PROGRAMS:
                del _programs[next(iter(_programs))]
            try:
                group = sent.unpickled()
            except Exception as error:  # such as a data set that cannot be fetched there
                what = f"worker {worker.address} cannot prepare its runs: {error}"
                raise UnfitError(what, worker.address) from error
            _programs[token] = Program(group, sent.side_by_side)
        compile_s = time.monotonic() - begun
        task = {"task": worker.get_current_task(), "worker": worker.address}
        last = 0.0

        def report(index: int, part: float) -> None:
            nonlocal last
            if time.monotonic() - last > _REPORT_S:
                last = time.monotonic()
                worker.log_event(TOPIC, task | {"part": part})

        report(indices[0], 0.0)
        found = dict(_programs[token].run(indices, report))
        return [found[index] for index in indices], compile_s


@dataclasses.dataclass(frozen=True)
class _Sent:
    """All that a worker needs for the runs of a program."""

    versions: Versions
    settings: Mapping[str, Any]
    side_by_side: int
    folders: Sequence[str]  # where the sender imports from
    group: bytes

    def unpickled(self) -> Group:
        """The group; what could not be sent by value is looked for where the sender has it."""
        sys.path.extend(folder for folder in self.folders if folder not in sys.path)
        return cloudpickle.loads(self.group)


def _pickled(group: Group, side_by_side: int) -> bytes:
    """A group for other processes, with the code of what users have written in scripts, notebooks and files."""
    own = [module for name, module in list(sys.modules.items()) if _is_users(name, module)]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        sent = _Sent(versions(), settings.current(), side_by_side, sys.path, cloudpickle.dumps(group))
        return cloudpickle.dumps(sent)
    except Exception as error:  # of various kinds, by what could not be pickled
        names = ", ".join(sorted({str(job.labels["policy"]) for job in group.jobs}))
        raise ValueError(
            f"the runs of {names} cannot be sent to other processes: {error}; use workers=1, or change what the policy "
            "or the preset holds"
        ) from error
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _is_users(name: str, module: Any) -> bool:
    """Whether a module is one that workers may not be able to import; cloudpickle knows what to do with __main__."""
    path = getattr(module, "__file__", None)
    if name == "__main__" or path is None or not isinstance(module, ModuleType) or module.__name__ != name:
        return False
    installed = any(part in ("site-packages", "dist-packages") for part in Path(path).parts)
    return not installed and name.partition(".")[0] not in (*sys.stdlib_module_names, "fcjax")
