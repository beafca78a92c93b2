"""Does the runs of a sweep: in this process, or as tasks of Dask workers, here or on a cluster.

A run is a task. Workers are processes of one thread each, so that a run has the same bits on any of them: by default
one for each core of this machine, or those of a cluster that the user has started. A task holds the number of a run.
What the runs of a program have in common is sent to each worker once, and compiled there once. When a worker dies, Dask
gives its runs to others; a worker that joins late gets work. Workers return finished runs, and the caller keeps them.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle
import jax
import jaxlib

from fcjax import checks, programs, settings
from fcjax.engine import Program, is_accelerated
from fcjax.jobs import Finished, Group, Job, groups
from fcjax.progress import Progress

if TYPE_CHECKING:
    from distributed import Client, Future

TOPIC = "fcjax"  # of the events by which workers say which task they do, and how far they are
_REPORT_S = 0.5  # between two reports of a worker
_START_S = 60.0  # within which a worker has to be there
_LOST_S = 45.0  # after which a cluster without workers, or without its scheduler, is given up


@dataclasses.dataclass
class Clock:
    """Where the time went."""

    compile_s: float = 0.0
    run_s: float = 0.0
    num_programs: int = 0


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def workers_for(num_runs: int, workers: int | None, client: "Client | None" = None) -> Iterator["Client | None"]:
    """A client of workers for so many runs, which may still be starting; None if this process does them.

    Args:
      num_runs: or more than there are.
      workers: how many processes of this machine take part; by default one for each core.
      client: of a cluster of the user's, which takes their place.
    """
    number = min(num_runs, num_cores() if workers is None else checks.whole("workers", workers, 1))
    if client is not None or number == 1 or is_accelerated():
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
    """Does the runs, and yields each when it is finished, in any order.

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
    check_workers(client)
    begun = time.monotonic()
    tasks: dict[str, tuple[Group, Sequence[int], Future]] = {}
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    parts: dict[str, float] = {}
    num_finished = 0

    def hear(event: tuple[float, dict[str, Any]]) -> None:
        """A worker says how far its task is."""
        parts[event[1]["task"]] = event[1]["part"]

    client.subscribe_topic(TOPIC, hear)
    shown.begin("running", counts=True)
    try:
        for group in batches:
            blob = _pickled(group)
            token = hashlib.sha256(blob).hexdigest()[:16]
            # A task, whose input the scheduler keeps: if the workers that hold its result are gone, it is done again.
            shared = client.submit(bytes, blob, key=f"fcjax-program-{token}")
            for start in range(0, len(group.jobs), side_by_side):
                indices = range(start, min(start + side_by_side, len(group.jobs)))
                key = f"fcjax-run-{token}-{start}-{uuid.uuid4().hex[:8]}"
                call = (_do, token, shared, indices, side_by_side, settings.current(), _about())
                future = client.submit(*call, key=key)
                tasks[key] = group, indices, future
                future.add_done_callback(lambda future: done.put(future.key))
        watch = _Watch(client)
        while tasks:
            try:
                key = done.get(timeout=0.2)
            except queue.Empty:
                watch.check()
            else:
                group, task, future = tasks.pop(key)
                parts.pop(key, None)
                runs, compile_s = _result(future, watch)
                clock.compile_s = max(clock.compile_s, compile_s)
                for index, run in zip(task, runs, strict=True):
                    num_finished += 1
                    yield group.jobs[index], dataclasses.replace(run, labels=group.jobs[index].labels)
            under_way = sum(part * len(tasks[key][1]) for key, part in list(parts.items()) if key in tasks)
            shown.update(num_finished + under_way, num_finished)
    finally:
        clock.run_s += time.monotonic() - begun - clock.compile_s
        with contextlib.suppress(Exception):  # of a scheduler that is gone
            client.unsubscribe_topic(TOPIC)
            client.cancel([future for *_, future in tasks.values()])


class _Watch:
    """Notices that nobody is left to do the work."""

    def __init__(self, client: "Client"):
        self._client = client
        self._well_at = time.monotonic()

    def check(self) -> None:
        """Raises RuntimeError if the scheduler, or every worker, has been gone for a while."""
        client, now = self._client, time.monotonic()
        if client.status == "running" and client.scheduler_info()["workers"]:
            self._well_at = now
        elif client.status == "closed" or now - self._well_at > _LOST_S:
            raise self.lost()

    def lost(self) -> RuntimeError:
        """What has been lost, in words."""
        running = self._client.status == "running"
        who = "all workers are gone" if running else f"the scheduler at {_address(self._client)} is gone"
        return RuntimeError(f"{who}: start it again, then run the same command to resume")


def _address(client: "Client") -> str:
    return str(getattr(client.scheduler, "address", "an unknown address"))


def _result(future: "Future", watch: _Watch) -> tuple[list[Finished], float]:
    from distributed import CancelledError, KilledWorker

    try:
        return future.result(timeout=60)
    except KilledWorker as error:
        raise RuntimeError(
            f"a run ended {error.allowed_failures + 1} workers, one after another: each may have had too little memory"
        ) from error
    except (CancelledError, TimeoutError) as error:
        raise watch.lost() from error


_programs: dict[str, Program] = {}  # of this worker, by what they were sent as
_MOST_PROGRAMS = 8
_lock = threading.Lock()


def _do(
    token: str, blob: bytes, indices: Sequence[int], side_by_side: int, given: Mapping[str, Any], about: "_About"
) -> tuple[list[Finished], float]:
    """The task of a worker: does runs, and returns them with the time that compiling took."""
    from distributed import get_worker

    worker = get_worker()
    _check_versions(worker.address, _about(), about)  # also of a worker that has joined late
    use_one_thread()
    with _lock, settings.applied(given):
        begun = time.monotonic()
        if token not in _programs:
            if len(_programs) >= _MOST_PROGRAMS:
                del _programs[next(iter(_programs))]
            try:
                group = _unpickled(blob)
            except Exception as error:  # such as a data set that cannot be fetched there
                raise RuntimeError(f"worker {worker.address} cannot prepare its runs: {error}") from error
            _programs[token] = Program(group, side_by_side)
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


def _pickled(group: Group) -> bytes:
    """A group for other processes, with the code of what users have written in scripts, notebooks and files."""
    own = [module for name, module in list(sys.modules.items()) if _is_users(name, module)]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((sys.path, cloudpickle.dumps(group)))
    except Exception as error:  # of various kinds, by what could not be pickled
        names = ", ".join(sorted({str(job.labels["policy"]) for job in group.jobs}))
        raise ValueError(
            f"the runs of {names} cannot be sent to other processes: {error}; use workers=1, or change what the policy "
            "or the preset holds"
        ) from error
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _unpickled(blob: bytes) -> Group:
    """What `_pickled` gave; what could not be sent by value is looked for where the sender has it."""
    folders, group = cloudpickle.loads(blob)
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    return cloudpickle.loads(group)


def _is_users(name: str, module: Any) -> bool:
    """Whether a module is one that workers may not be able to import; cloudpickle knows what to do with __main__."""
    path = getattr(module, "__file__", None)
    if name == "__main__" or path is None or not isinstance(module, ModuleType) or module.__name__ != name:
        return False
    installed = any(part in ("site-packages", "dist-packages") for part in Path(path).parts)
    return not installed and name.partition(".")[0] not in (*sys.stdlib_module_names, "fcjax")


@dataclasses.dataclass(frozen=True)
class _About:
    """What has to be the same on all workers."""

    fcjax: str  # digest of its code
    jax: str
    jaxlib: str


@functools.cache
def _about() -> _About:
    folder = Path(__file__).parent
    files = sorted(folder.rglob("*.py"))
    code = hashlib.sha256(b"".join(str(file.relative_to(folder)).encode() + file.read_bytes() for file in files))
    return _About(code.hexdigest()[:12], jax.__version__, jaxlib.__version__)


def _introduce(dask_worker: Any) -> tuple[_About, int]:
    """A worker says what it has; Dask gives it to functions with an argument of this name."""
    use_one_thread()
    return _about(), dask_worker.state.nthreads


def _check_versions(address: str, found: _About, wanted: _About) -> None:
    apart = [
        f"{field.name} {getattr(found, field.name)} instead of {getattr(wanted, field.name)}"
        for field in dataclasses.fields(wanted)
        if getattr(found, field.name) != getattr(wanted, field.name)
    ]
    if apart:
        raise RuntimeError(
            f"worker {address} has {', '.join(apart)}: install the same versions there and here, and restart it"
        )


def check_workers(client: "Client") -> None:
    """Raises RuntimeError if the workers of a cluster cannot do the work, or do it with other results."""
    try:
        client.wait_for_workers(1, timeout=_START_S)
    except TimeoutError as error:
        raise RuntimeError(
            f"no worker has joined the scheduler at {_address(client)} within {_START_S:.0f} s: start some with "
            f"dask worker {_address(client)} --nworkers auto --nthreads 1"
        ) from error
    mine = _about()
    for address, found in client.run(_introduce, on_error="return").items():
        if isinstance(found, Exception):
            raise RuntimeError(f"worker {address} cannot be used: {type(found).__name__}: {found}")
        about, nthreads = found
        _check_versions(address, about, mine)
        if nthreads > 1 and not is_accelerated():
            raise RuntimeError(
                f"worker {address} has {nthreads} threads, and runs take one each: start workers with --nworkers auto "
                "--nthreads 1"
            )


@functools.cache
def use_one_thread() -> None:
    """Lets XLA compute with one thread in this process, but compile with all; before JAX is used.

    XLA sums in an order that depends on the number of its threads: with one, a run has the same bits on any worker. It
    reads NPROC when its client starts, and again when it compiles.
    """
    before = os.environ.get("NPROC")
    os.environ["NPROC"] = "1"
    try:
        jax.local_devices()
    finally:
        del os.environ["NPROC"]
        if before is not None:
            os.environ["NPROC"] = before
    programs.keep_on_disk()


# Of the workers of this machine. Dask looks at what they do 100 times a second, which costs runs up to a quarter.
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # so that files in the current folder do not take the place of libraries
    "DASK_LOGGING__DISTRIBUTED": "error",
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "10s",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__GIL__ENABLED": "False",
}


@contextlib.contextmanager
def local_client(number: int) -> Iterator["Client"]:
    """A cluster of so many workers on this machine, which listens on the loopback interface only."""
    import dask
    from distributed import Client, Scheduler
    from distributed.deploy.spec import SpecCluster
    from distributed.deploy.subprocess import SubprocessWorker

    options = {"nthreads": 1, "host": "127.0.0.1", "dashboard": False, "memory_limit": 0, "preload": ["fcjax"]}
    worker = {
        "cls": SubprocessWorker,
        "options": {"worker_class": "distributed.Worker", "worker_kwargs": options},
    }
    quiet = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "port": 0, **quiet}}
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        with dask.config.set({"distributed.worker.profile.enabled": False}):
            cluster = SpecCluster(
                workers=dict.fromkeys(range(number), worker), scheduler=scheduler, silence_logs=logging.ERROR
            )
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    with cluster, Client(cluster) as client:
        yield client
