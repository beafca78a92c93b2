"""Does many runs in few programs, on all devices.

Runs that differ in numbers only share one compiled program, whatever their policies. Workers take runs from a queue,
advance them by some rounds at a time, and take the next ones when these have ended. Each core of a CPU has a worker,
with one run; each accelerator has one, with many runs side by side.

All workers run the same instructions, made for a single device, and on a CPU for a single thread, and always for the
same number of runs, empty places included: a run gives the same bits beside any other or none, and on any number of
devices or cores. (A program that XLA partitions over devices rounds
otherwise; so does one that sums over more than one thread, as `simulate` does by itself for models that are much larger
than the paper's.)
"""

import dataclasses
import functools
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Compiled

from fcjax import checks, devices, results
from fcjax.experiment import Experiment, most_rounds
from fcjax.progress import Progress, in_this_precision
from fcjax.rounds import Record, State, Stop, as_decision
from fcjax.simulate import advance, begin
from fcjax.types import Policy, pytree

T = TypeVar("T")

SIDE_BY_SIDE = 16  # runs on an accelerator at a time: of the paper's size, their matrix products keep a large one busy


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """A run that is to be done."""

    labels: dict[str, Any]  # what tells it from the others
    policy: Policy
    make: Callable[[], Experiment]

    @property
    def experiment(self) -> Experiment:
        """Made when it is asked for: of many thousand, few are in memory."""
        return self.make()


@dataclasses.dataclass
class Clock:
    """Where the time went."""

    compile_s: float = 0.0
    run_s: float = 0.0
    num_programs: int = 0


def execute(
    jobs: Sequence[Job],
    *,
    clock: Clock | None = None,
    workers: int | None = None,
    side_by_side: int = 1,
    may_reduce: bool = True,
    tick: Callable[[], None] = lambda: None,
    progress: bool = False,
) -> Iterator[tuple[Job, results.Finished]]:
    """Does the runs, and yields each when it is finished, in any order.

    Args:
      jobs: the runs.
      clock: is told where the time goes.
      workers: how many devices take part; by default all.
      side_by_side: how many runs a device does at a time.
      may_reduce: whether it may do fewer, and that with other last bits, where there is no memory for so many.
      tick: is called now and then; what it raises ends the work.
      progress: shows a bar with the remaining time.
    """
    clock = Clock() if clock is None else clock
    num_finished = 0
    with Progress(len(jobs), "runs", enabled=progress) as shown:
        for group in _groups(jobs):
            before = time.monotonic()
            shown.begin("compiling", counts=False)
            batch = shown.run(_Batch, group, workers, side_by_side, may_reduce)
            clock.num_programs += 1
            clock.compile_s += time.monotonic() - before
            before = time.monotonic()
            shown.begin("running", counts=True)
            try:
                for index, run in _work(batch, shown, tick, num_finished):
                    num_finished += 1
                    yield batch.jobs[index], run
            finally:
                clock.run_s += time.monotonic() - before


def layout(workers: int | None, side_by_side: int | None) -> tuple[int | None, int]:
    """How many devices take part, None for all, and how many runs each has side by side; as told, or what is best."""
    if side_by_side is None:
        side_by_side = SIDE_BY_SIDE if devices.is_accelerated() else 1
    workers = None if workers is None else checks.whole("workers", workers, 1)
    return workers, checks.whole("side_by_side", side_by_side, 1)


class _Group:
    """Runs that one program can do: of the same shapes, but for how many samples a device has room for."""

    def __init__(self, experiment: Experiment):
        self.jobs: list[Job] = []
        self.policy_states: list[Any] = []  # of each run, as it begins
        self.structure = jax.tree.structure(experiment)
        self.first = jax.tree.leaves(experiment)
        self.dtypes = [_dtype(leaf) for leaf in self.first]
        # What is one and the same object in all runs, such as the images, is there once.
        self.is_shared = [True] * len(self.first)
        self.room = 0

    def add(self, job: Job, experiment: Experiment) -> None:
        leaves = jax.tree.leaves(experiment)
        self.jobs.append(job)
        self.policy_states.append(job.policy.init(experiment.cell))
        self.room = max(self.room, experiment.data.indices.shape[1])
        self.is_shared = [
            was and leaf is one for was, leaf, one in zip(self.is_shared, leaves, self.first, strict=True)
        ]
        self.dtypes = [_common(one, _dtype(leaf)) for one, leaf in zip(self.dtypes, leaves, strict=True)]

    def own(self, experiment: Experiment) -> list:
        """The leaves of an experiment that are its own, in the shapes and types that all of the group have."""
        leaves = jax.tree.leaves(_with_room(experiment, self.room))
        columns = zip(leaves, self.dtypes, self.is_shared, strict=True)
        return [_as(dtype, leaf) for leaf, dtype, shared in columns if not shared]

    def shared(self) -> list:
        return [leaf for leaf, shared in zip(self.first, self.is_shared, strict=True) if shared]


def _groups(jobs: Sequence[Job]) -> list[_Group]:
    groups: dict[Any, _Group] = {}
    for job in jobs:
        experiment = job.experiment
        leaves, structure = jax.tree.flatten(experiment)
        # Where all local data are summed over, the room decides on the order of the sum, hence on the last bits.
        any_room = experiment.estimate_on != "local"
        indices = experiment.data.indices
        shapes = tuple(np.shape(leaf)[:1] if any_room and leaf is indices else np.shape(leaf) for leaf in leaves)
        group = groups.setdefault((structure, shapes), _Group(experiment))
        group.add(job, experiment)
    return list(groups.values())


def _work(
    batch: "_Batch", shown: Progress, tick: Callable[[], None], finished_before: int
) -> Iterator[tuple[int, results.Finished]]:
    """Lets the workers of a batch do its runs, and shows how far they are."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(batch.jobs)):
        waiting.put(index)
    news: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stop = threading.Event()
    work = in_this_precision(batch.work)
    threads = [
        threading.Thread(target=work, args=(device, waiting, news, stop), daemon=True) for device in batch.workers
    ]
    for thread in threads:
        thread.start()
    part = np.zeros(len(batch.jobs))
    num_finished = 0
    try:
        while num_finished < len(batch.jobs):
            tick()
            try:
                index, value = news.get(timeout=0.2)
            except queue.Empty:
                shown.tick()
                continue
            if isinstance(value, BaseException):
                raise value
            num_finished += isinstance(value, results.Finished)
            part[index] = value if isinstance(value, float) else 1.0
            shown.update(finished_before + part.sum(), finished_before + num_finished)
            if isinstance(value, results.Finished):
                yield index, value
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytree
class _Slot:
    """What distinguishes a run, as arrays."""

    key: Any
    own: Any  # the leaves of the experiment that are not shared
    max_rounds: Any


class _Batch:
    """Runs that share a program, the program, and what its workers do."""

    def __init__(self, group: _Group, workers: int | None, side_by_side: int, may_reduce: bool):
        self.jobs, self._group = group.jobs, group
        self.workers = devices.for_programs(min(len(self.jobs), workers or len(self.jobs)))
        self._num_slots = side_by_side

        selects = tuple(dict.fromkeys(job.policy.select for job in self.jobs))
        self._policy_states = _numbered(selects, self.jobs, group.policy_states)
        # From an array of JAX the cores of a CPU read what is shared in one place; of NumPy's, each would have a copy.
        shared = jax.device_put(group.shared())
        self._shared = {device: jax.device_put(shared, device) for device in set(self.workers)}
        self._compiled = self._compile(selects)
        while (fitting := self._fitting()) < self._num_slots:
            found = f"there is memory for {fitting} instead of {self._num_slots} runs side by side"
            if not may_reduce:
                raise ValueError(f"{found}, and runs that are kept must not differ in that: use side_by_side={fitting}")
            warnings.warn(f"{found}, which decides on the last bits of results", stacklevel=2)
            self._num_slots = fitting
            self._compiled = self._compile(selects)

    def _compile(self, selects: tuple[Callable, ...]) -> dict[jax.Device, Compiled]:
        program = _program(self._group.structure, tuple(self._group.is_shared), selects, self._num_slots > 1)
        some = [_stack([value] * self._num_slots) for value in self._begin(0)]
        lower = lambda device: program.lower(*jax.device_put(some, device), self._shared[device])  # noqa: E731
        return devices.compile_for(self.workers, lower)

    def _fitting(self) -> int:
        """How many runs side by side a device has memory for; if it has not for one, fewer devices take part."""
        free = devices.free_bytes(self.workers[0])
        for_all = sum(leaf.nbytes for leaf in jax.tree.leaves(self._shared[self.workers[0]]))
        for_slots = devices.needed_bytes(self._compiled[self.workers[0]]) - for_all
        if free is None or for_slots <= 0:
            return self._num_slots
        # The shared arrays are there already. The cores of a CPU have one memory in common.
        per_run = for_slots / self._num_slots
        at_a_time = int(free / per_run) // (1 if devices.is_accelerated() else len(self.workers))
        if at_a_time < 1 and self._num_slots == 1:
            if not devices.is_accelerated():
                self.workers = self.workers[: max(1, int(free / per_run))]
            if devices.is_accelerated() or per_run > free:
                warnings.warn(
                    f"a run needs {per_run / 1e9:.2g} GB beside the data, and {free / 1e9:.2g} GB are free",
                    stacklevel=2,
                )
        return max(1, min(at_a_time, self._num_slots))

    def work(self, device: Any, waiting: queue.SimpleQueue, news: queue.SimpleQueue, stop: threading.Event) -> None:
        """Puts one run after another through the slots of a worker, and tells how far they are."""
        try:
            self._work(device, waiting, news, stop)
        except BaseException as error:  # to be raised where the caller is
            news.put((0, error))

    def _work(self, device: Any, waiting: queue.SimpleQueue, news: queue.SimpleQueue, stop: threading.Event) -> None:
        fair = -(-len(self.jobs) // len(self.workers))  # no worker takes all
        inside = [_next(waiting) if slot < fair else None for slot in range(self._num_slots)]
        records: dict[int | None, list] = {index: [] for index in inside}
        if inside[0] is None:
            return
        first = self._begin(inside[0])  # also in the places that stay empty
        begun = [first, *(first if index is None else self._begin(index) for index in inside[1:])]
        slots, states = (jax.device_put(_stack(part), device) for part in zip(*begun, strict=True))
        while any(index is not None for index in inside) and not stop.is_set():
            states, chunk = self._compiled[device](slots, states, self._shared[device])
            chunk = jax.tree.map(np.asarray, chunk)
            why, elapsed_s = np.asarray(states.stop), np.asarray(states.elapsed_s)
            for slot, index in enumerate(inside):
                if index is None:
                    continue
                records[index].append(jax.tree.map(lambda leaf, slot=slot: leaf[slot], chunk))
                if why[slot] == Stop.NOT_YET:
                    news.put((index, min(float(elapsed_s[slot]) / self.jobs[index].labels["budget_s"], 1.0)))
                    continue
                ended = jax.tree.map(lambda leaf, slot=slot: _on_host(leaf)[slot], states)
                news.put((index, results.finish(self.jobs[index].labels, records.pop(index), ended)))
                following = inside[slot] = _next(waiting)
                if following is not None:
                    records[following] = []
                    put = functools.partial(_with_slot, slot)
                    changed = jax.tree.map(put, (slots, states), self._begin(following))
                    slots, states = jax.device_put(changed, device)

    def _begin(self, index: int) -> tuple[_Slot, State]:
        """A run before its first round, as arrays of the host."""
        job = self.jobs[index]
        experiment = job.experiment
        # On the first worker's device, whichever worker asks: w_0 is tested as all that follow it.
        key = jax.device_put(jax.random.key(job.labels["seed"]), self.workers[0])
        state = begin(key, self._policy_states[index], experiment)
        slot = _Slot(jax.random.key_data(key), self._group.own(experiment), np.int32(most_rounds(experiment)))
        return jax.tree.map(_on_host, (slot, state))


def _numbered(
    selects: tuple[Callable, ...], jobs: Sequence[Job], states: Sequence[Any]
) -> list[tuple[np.int32, tuple]]:
    """For each run the number of its policy in the program, and states for all policies, of which that counts."""
    numbers = [selects.index(job.policy.select) for job in jobs]
    of_any = [states[numbers.index(number)] for number in range(len(selects))]
    rows = [
        tuple(state if i == number else other for i, other in enumerate(of_any))
        for number, state in zip(numbers, states, strict=True)
    ]
    return list(zip(map(np.int32, numbers), _promoted(rows), strict=True))


def _next(waiting: queue.SimpleQueue) -> int | None:
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return None


def _stack(trees: Sequence[T]) -> T:
    return jax.tree.map(lambda *leaves: (jnp if _is_key(leaves[0]) else np).stack(leaves), *trees)


def _promoted(trees: list[T]) -> list[T]:
    """The same trees, with leaves as arrays, and equal leaves of equal types: 2 beside 2.9 is 2.0."""
    leaves = [jax.tree.leaves(tree) for tree in trees]
    dtypes = [functools.reduce(_common, map(_dtype, column)) for column in zip(*leaves, strict=True)]
    rows = [[_as(dtype, leaf) for dtype, leaf in zip(dtypes, row, strict=True)] for row in leaves]
    return [jax.tree.unflatten(jax.tree.structure(tree), row) for tree, row in zip(trees, rows, strict=True)]


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _common(one: Any, other: Any) -> Any:
    return one if one == other else np.result_type(one, other)


def _as(dtype: Any, leaf: Any) -> Any:
    return leaf if _is_key(leaf) else np.asarray(leaf, dtype)


def _with_slot(slot: int, leaves: Any, new: Any) -> Any:
    # A single slot is put in place as it is: no program has to be compiled for that.
    return leaves.at[slot].set(new) if len(leaves) > 1 else new[None]


def _on_host(leaf: Any) -> Any:
    return leaf if _is_key(leaf) else np.asarray(leaf)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _with_room(experiment: Experiment, room: int) -> Experiment:
    """The same with rows of indices of a given length: what is appended is never drawn."""
    indices = np.asarray(experiment.data.indices)
    padded = np.pad(indices, ((0, 0), (0, room - indices.shape[1])), mode="edge")
    return dataclasses.replace(experiment, data=experiment.data._replace(indices=padded))


def _experiment(own: list, shared: list, structure: Any, is_shared: tuple[bool, ...]) -> Experiment:
    own_leaves, shared_leaves = iter(own), iter(shared)
    return jax.tree.unflatten(structure, [next(shared_leaves if s else own_leaves) for s in is_shared])


@functools.lru_cache(maxsize=64)
def _program(structure: Any, is_shared: tuple[bool, ...], selects: tuple, side_by_side: bool) -> Any:
    """A jitted function of slots, states and shared leaves: the states some rounds on, and the records of these."""
    select = any_of(selects)

    def one(slot: _Slot, state: State, shared: list) -> tuple[State, Record]:
        experiment = _experiment(slot.own, shared, structure, is_shared)
        state, records = advance(jax.random.wrap_key_data(slot.key), state, experiment, select, slot.max_rounds)
        full = (state.stop == Stop.NOT_YET) & (state.round_index >= slot.max_rounds)
        return dataclasses.replace(state, stop=jnp.where(full, Stop.MAX_ROUNDS, state.stop)), records

    def every(slots: _Slot, states: State, shared: list) -> tuple[State, Record]:
        each = lambda run: one(run[0], run[1], shared)  # noqa: E731
        return (jax.vmap(each) if side_by_side else functools.partial(lax.map, each))((slots, states))

    return jax.jit(every, donate_argnums=1)


def any_of(selects: Sequence[Callable]) -> Callable:
    """One `select` for several policies; its state holds the number of the one that decides, and all their states."""

    def select(key, state, context):
        which, states = state

        def branch(index):
            def decide(states):
                new, decision = selects[index](key, states[index], context)
                decision = as_decision(decision, checks.num_devices(context.cell))
                return (*states[:index], new, *states[index + 1 :]), decision

            return decide

        states, decision = lax.switch(which, [branch(index) for index in range(len(selects))], states)
        return (which, states), decision

    return select
