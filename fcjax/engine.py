"""Does many runs in few programs, on all devices.

Runs that differ in numbers only share one compiled program, whatever their policies. Workers take runs from a queue,
advance them by some rounds at a time, and take the next ones when these have ended. Each core of a CPU has a worker,
with one run; each accelerator has one, with many runs side by side.

All workers run the same instructions, made for a single device, and on a CPU for a single thread, and always for the
same number of runs, empty places included: a run gives the same bits beside any other or none, and on any number of
devices or cores. (A program that XLA partitions over devices rounds otherwise; so does one that sums over more than one
thread, as `simulate` does by itself for models that are much larger than the paper's.)
"""

import dataclasses
import functools
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Compiled, Lowered

from fcjax import checks, devices, leaves, programs, results, settings
from fcjax.experiment import most_rounds
from fcjax.jobs import Group, Job, Template, groups
from fcjax.progress import Progress
from fcjax.rounds import Record, State, Stop, as_decision
from fcjax.simulate import advance, begin
from fcjax.types import pytree

SIDE_BY_SIDE = 16  # runs on an accelerator at a time: of the paper's size, their matrix products keep a large one busy


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
        shown.begin("preparing", counts=False)
        for group in shown.run(groups, jobs):
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
            del batch  # before the memory that is free for the next is asked for


def layout(workers: int | None, side_by_side: int | None) -> tuple[int | None, int]:
    """How many devices take part, None for all, and how many runs each has side by side; as told, or what is best."""
    if side_by_side is None:
        side_by_side = SIDE_BY_SIDE if devices.is_accelerated() else 1
    workers = None if workers is None else checks.whole("workers", workers, 1)
    return workers, checks.whole("side_by_side", side_by_side, 1)


def _work(
    batch: "_Batch", shown: Progress, tick: Callable[[], None], finished_before: int
) -> Iterator[tuple[int, results.Finished]]:
    """Lets the workers of a batch do its runs, and shows how far they are."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(batch.jobs)):
        waiting.put(index)
    news: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stop = threading.Event()
    work = settings.carried(batch.work)
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

    def __init__(self, group: Group, workers: int | None, side_by_side: int, may_reduce: bool):
        self.jobs, self._group = group.jobs, group
        self.workers = devices.for_programs(min(len(self.jobs), workers or len(self.jobs)))
        self._num_slots = side_by_side

        self._policy_states = group.policy_states()
        # From an array of JAX the cores of a CPU read what is shared in one place; of NumPy's, each would have a copy.
        shared = jax.device_put(group.shared())
        self._shared = {device: jax.device_put(shared, device) for device in set(self.workers)}
        self._compiled = self._compile()
        while (fitting := self._fitting()) < self._num_slots:
            found = f"there is memory for {fitting} instead of {self._num_slots} runs side by side"
            if not may_reduce:
                raise ValueError(f"{found}, and runs that are kept must not differ in that: use side_by_side={fitting}")
            warnings.warn(f"{found}, which decides on the last bits of results", stacklevel=2)
            self._num_slots = fitting
            self._compiled = self._compile()

    def _compile(self) -> dict[jax.Device, Compiled]:
        program = _program(self._group.template(), self._group.selects(), self._num_slots > 1)
        one = self._begin(0)

        def lower(device: jax.Device) -> Lowered:
            place = jax.sharding.SingleDeviceSharding(device)
            shape = lambda leaf: jax.ShapeDtypeStruct((self._num_slots, *leaf.shape), leaf.dtype, sharding=place)  # noqa: E731
            return program.lower(*jax.tree.map(shape, one), self._shared[device])

        compiled = programs.compile_for(self.workers, lower)
        self.workers = [device for device in self.workers if device in compiled]
        return compiled

    def _fitting(self) -> int:
        """How many runs side by side a device has memory for; if it has not for one, fewer devices take part."""
        free = devices.free_bytes(self.workers[0])
        for_all = sum(leaf.nbytes for leaf in jax.tree.leaves(self._shared[self.workers[0]]))
        for_slots = programs.needed_bytes(self._compiled[self.workers[0]]) - for_all
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
        slots, states = (jax.device_put(leaves.stack(part), device) for part in zip(*begun, strict=True))
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
                ended = jax.tree.map(lambda leaf, slot=slot: leaves.on_host(leaf)[slot], states)
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
        return jax.tree.map(leaves.on_host, (slot, state))


def _next(waiting: queue.SimpleQueue) -> int | None:
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return None


def _with_slot(slot: int, old: Any, new: Any) -> Any:
    # A single slot is put in place as it is: no program has to be compiled for that.
    return old.at[slot].set(new) if len(old) > 1 else new[None]


@functools.lru_cache(maxsize=64)
def _program(template: Template, selects: tuple, side_by_side: bool) -> Any:
    """A jitted function of slots, states and shared leaves: the states some rounds on, and the records of these."""
    select = any_of(selects)

    def one(slot: _Slot, state: State, shared: list) -> tuple[State, Record]:
        experiment = template.experiment(slot.own, shared)
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
