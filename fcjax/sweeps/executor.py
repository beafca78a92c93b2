"""Executes the runs of a sweep, in this process or on Dask workers, locally or on a cluster.

Each run is a Dask task. Workers are single-threaded processes, so a run has the same bits on any of them. By default
there is one per core of this machine; the user can also start a cluster. The data and code that runs share are sent to
each worker once and compiled there once; a task only holds the number of its run. When a worker dies, Dask reassigns
its runs. A worker that joins late gets work. Workers return finished runs, and the caller saves them.
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
from fcjax.simulation.simulate import Run
from fcjax.sweeps.engine import Program
from fcjax.sweeps.jobs import Group, Job, groups

if TYPE_CHECKING:
    from distributed import Client, Future

TOPIC = "fcjax"  # Dask topic of the workers' progress events
_REPORT_S = 0.5  # minimum time between two progress events of a worker
_LOST_S = 45.0  # local workers, or a scheduler, that stay silent longer count as lost
_FETCH_S = 60.0  # timeout for fetching a result: its worker may just have died
_MOST_TRIES = 3  # per run; a try may have cost several workers, because Dask also counts bystanders


@dataclasses.dataclass
class Clock:
    """Time spent compiling and running."""

    compile_s: float = 0.0
    run_s: float = 0.0
    num_programs: int = 0


@contextlib.contextmanager
def workers_for(
    num_runs: int, workers: int | None, client: "Client | None" = None, cores: int = 1
) -> Iterator["Client | None"]:
    """Yields a Dask client, or None if this process should execute the runs. Its workers may still be starting.

    Args:
      num_runs: an upper bound on the number of runs.
      workers: the number of local processes; by default as many as there are cores for.
      client: the client of the user's cluster, which replaces local processes.
      cores: how many cores compute a run. Several need a new process, because JAX may be in use in this one.
    """
    cores = checks.whole("cores", cores, 1, None if client else num_cores())
    number = min(num_runs, num_cores() // cores if workers is None else checks.whole("workers", workers, 1))
    if client is not None or not number or (number == 1 and cores == 1) or is_accelerated():
        yield client
        return
    with local_client(number, cores) as client:
        yield client


def execute(
    jobs: Sequence[Job],
    *,
    client: "Client | None" = None,
    clock: Clock | None = None,
    side_by_side: int = 1,
    progress: bool = False,
) -> Iterator[tuple[Job, Run]]:
    """Executes runs and yields each as it finishes, in any order.

    Args:
      jobs: the runs.
      client: the Dask client of the workers; None to use this process.
      clock: records the time spent.
      side_by_side: how many runs the CPU or each accelerator executes at a time.
      progress: whether to show a progress bar with the remaining time.
    """
    clock = Clock() if clock is None else clock
    if not jobs:
        return
    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(Progress(len(jobs), "run", enabled=progress))
        shown.begin(f"preparing {len(jobs)} runs")
        batches = shown.run(groups, jobs)
        clock.num_programs += len(batches)
        finished = (
            _here(batches, side_by_side, clock, shown)
            if client is None
            else _on_workers(client, batches, side_by_side, clock, shown)
        )
        yield from finished


def _here(batches: Sequence[Group], side_by_side: int, clock: Clock, shown: Progress) -> Iterator[tuple[Job, Run]]:
    number = 0
    for place, group in enumerate(batches, 1):
        before = time.monotonic()
        shown.begin(f"compiling program {place} of {len(batches)}")
        program = shown.run(Program, group, side_by_side)
        clock.compile_s += time.monotonic() - before
        before = time.monotonic()
        shown.begin()
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
        del program  # frees its memory before the next one is compiled


def _on_workers(
    client: "Client", batches: Sequence[Group], side_by_side: int, clock: Clock, shown: Progress
) -> Iterator[tuple[Job, Run]]:
    begun = time.monotonic()
    tasks: dict[str, _Task] = {}
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    parts: dict[str, float] = {}
    num_finished = 0
    watch = _Watch(client)

    def hear(event: tuple[float, dict[str, Any]]) -> None:
        """Records a worker's progress."""
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
            raise RuntimeError(f"a run failed {_MOST_TRIES} times: {error}") from error
        submit(task)

    try:
        check_workers(client)
        client.subscribe_topic(TOPIC, hear)
        shown.begin(f"compiling {len(batches)} program{'s' if len(batches) > 1 else ''}")
        is_running = False
        for group in batches:
            blob = _pickled(group, side_by_side)
            token = hashlib.sha256(blob).hexdigest()[:16]
            # The scheduler keeps a task's input, so it can recompute the result if the workers that hold it are gone.
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
                except TimeoutError:  # the worker that held the result is gone, and Dask repeats the run
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
                    yield task.group.jobs[index], run
            if not is_running and (parts or num_finished):
                shown.begin()
                is_running = True
            under_way = sum(part * len(tasks[key].indices) for key, part in list(parts.items()) if key in tasks)
            shown.update(num_finished + under_way, num_finished)
    except Exception as error:
        if client.status != "running" or isinstance(error, concurrent.futures.CancelledError):
            raise watch.lost() from error
        raise
    finally:
        clock.run_s += time.monotonic() - begun - clock.compile_s
        with contextlib.suppress(Exception):  # the scheduler may be gone
            client.unsubscribe_topic(TOPIC)
            client.cancel([task.future for task in tasks.values()])


@dataclasses.dataclass(eq=False)
class _Task:
    """Runs that one worker executes together: side by side on an accelerator."""

    group: Group
    token: str  # identifies the program
    shared: "Future"  # the data and code that the program's runs share
    indices: Sequence[int]
    tries: int = 0
    future: Any = None  # the future of the latest try


class UnfitError(RuntimeError):
    """A worker cannot execute its runs; the arguments are the reason and the worker's address."""

    def __str__(self) -> str:
        return str(self.args[0])


def _unfit() -> tuple[type[Exception], ...]:
    """Returns the errors that a worker causes, not a run."""
    from distributed import KilledWorker

    return UnfitError, KilledWorker


class _Watch:
    """Detects that no worker or no scheduler is left."""

    def __init__(self, client: "Client"):
        self._client = client
        self._looked_at = self._well_at = time.monotonic()
        self._is_local = is_local(client)
        self._warned = False

    def is_well(self) -> None:
        self._well_at = time.monotonic()
        self._warned = False

    def check(self) -> None:
        """Raises RuntimeError if the scheduler or all local workers have been gone for a while.

        Workers of a cluster may come and go, so this only warns if none is left.
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
        """Closes an unfit worker, or raises RuntimeError if it is the only one."""
        if isinstance(error, UnfitError):
            what, address = error.args
            others = set(self._client.scheduler_info(n_workers=-1)["workers"]) - {address}
            if not others:
                raise RuntimeError(what) from error
            self._client.retire_workers([address])
            warnings.warn(f"{what}; it was closed, and other workers take over its runs", stacklevel=2)

    def lost(self) -> RuntimeError:
        """Returns an error that says what has been lost."""
        if self._is_local and self._client.status == "running":
            return RuntimeError("all worker processes died, perhaps for lack of memory: rerun to resume")
        return RuntimeError(
            f"the connection to the scheduler at {address_of(self._client)} is lost: restart the scheduler if it has "
            "died, then run the same command to resume"
        )


_programs: dict[str, Program] = {}  # this worker's compiled programs, by token
_MOST_PROGRAMS = 2  # each holds a copy of the data set
_lock = threading.Lock()


def _do(token: str, blob: bytes, indices: Sequence[int]) -> tuple[list[Run], float]:
    """Executes runs on a worker and returns them with the compile time."""
    from distributed import get_worker

    worker = get_worker()
    use_one_thread()
    sent: _Sent = cloudpickle.loads(blob)
    if apart := differences(versions(), sent.versions):  # a late worker was not checked at the start
        raise UnfitError(f"worker {worker.address} has {apart}", worker.address)
    with _lock, settings.applied(sent.settings):
        begun = time.monotonic()
        if token not in _programs:
            if len(_programs) >= _MOST_PROGRAMS:
                del _programs[next(iter(_programs))]
            try:
                group = sent.unpickled()
            except Exception as error:  # such as a data set that this worker cannot fetch
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
    """Everything a worker needs to execute the runs of a program."""

    versions: Versions
    settings: Mapping[str, Any]
    side_by_side: int
    folders: Sequence[str]  # the sender's import path
    group: bytes

    def unpickled(self) -> Group:
        """Returns the group; modules that were not sent by value are imported from the sender's path."""
        sys.path.extend(folder for folder in self.folders if folder not in sys.path)
        return cloudpickle.loads(self.group)


def _pickled(group: Group, side_by_side: int) -> bytes:
    """Pickles a group for other processes, with the user's own code from scripts, notebooks and files."""
    own = [module for name, module in list(sys.modules.items()) if _is_users(name, module)]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        sent = _Sent(versions(), settings.current(), side_by_side, sys.path, cloudpickle.dumps(group))
        return cloudpickle.dumps(sent)
    except Exception as error:  # pickling raises many kinds
        names = ", ".join(sorted({str(job.labels["policy"]) for job in group.jobs}))
        raise ValueError(
            f"the runs of {names} cannot be sent to other processes: {error}; use workers=1, or remove the object that "
            "cannot be pickled from the policy or preset"
        ) from error
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _is_users(name: str, module: Any) -> bool:
    """Returns whether workers may be unable to import a module; cloudpickle handles __main__ itself."""
    path = getattr(module, "__file__", None)
    if name == "__main__" or path is None or not isinstance(module, ModuleType) or module.__name__ != name:
        return False
    installed = any(part in ("site-packages", "dist-packages") for part in Path(path).parts)
    return not installed and name.partition(".")[0] not in (*sys.stdlib_module_names, "fcjax")
