"""Executes runs in one process: many side by side on accelerators, or one after another on a CPU.

Runs that differ only in numbers share one compiled program, whatever their policies. Each processor takes runs from a
queue, advances them by some rounds at a time, and takes the next run when one ends. The program always has the same
number of slots, some of which may be empty, and on a CPU each run is computed by itself. A run therefore has the same
bits whichever runs are next to it. `fcjax.sweeps.executor` adds several processes.
"""

import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding
from jax.stages import Compiled

from fcjax.runtime import programs, settings
from fcjax.runtime.cores import on_cores, place
from fcjax.runtime.hardware import is_accelerated
from fcjax.simulation.experiment import most_rounds
from fcjax.simulation.records import Record, State, Stop
from fcjax.simulation.rounds import as_decision
from fcjax.simulation.simulate import Run, advance, begin
from fcjax.sweeps import jobs, leaves
from fcjax.sweeps.jobs import Group, Template
from fcjax.types import Policy, pytree

SIDE_BY_SIDE = 16  # runs at a time on an accelerator: at the paper's size, enough to keep a large one busy


def default_side_by_side() -> int:
    return SIDE_BY_SIDE if is_accelerated() else 1


@pytree
class _Slot:
    """The arrays that distinguish a run."""

    key: Any
    own: Any  # leaves of the experiment that are not shared
    max_rounds: Any


class Program:
    """The program of a group of runs, compiled for the processors (the CPU, or each accelerator) of this process."""

    def __init__(self, group: Group, side_by_side: int = 1):
        self.group = group
        accelerators = [SingleDeviceSharding(one) for one in jax.local_devices()] if is_accelerated() else []
        self._processors: list[Sharding] = [*accelerators] or [place(group.jobs[0].experiment.cores)]
        self._num_slots = side_by_side
        self._policy_states = group.policy_states()
        shared = jax.device_put(group.shared())
        self._shared = {processor: jax.device_put(shared, processor) for processor in self._processors}
        self._compiled = self._compile()

    def run(
        self, indices: Sequence[int], report: Callable[[int, float], None] = lambda index, part: None
    ) -> Iterator[tuple[int, Run]]:
        """Executes runs of the group and yields each as it finishes, in any order.

        Args:
          indices: indices into the group's jobs.
          report: called with the index of a run and the fraction of its budget that is spent.
        """
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in indices:
            waiting.put(index)
        if len(self._processors) == 1:
            yield from self._work(self._processors[0], waiting, len(indices), report)
            return
        news: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stop = threading.Event()
        fair = -(-len(indices) // len(self._processors))  # so that no processor takes all runs

        def work(processor):
            try:
                for found in self._work(processor, waiting, fair, report):
                    news.put(found)
                    if stop.is_set():
                        return
            except BaseException as error:  # raised in the caller's thread
                news.put(error)

        threads = [
            threading.Thread(target=settings.carried(work), args=(processor,), daemon=True)
            for processor in self._processors
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in indices:
                found = news.get()
                if isinstance(found, BaseException):
                    raise found
                yield found
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def _compile(self) -> dict[Sharding, Compiled]:
        program, shapes = program_of(self.group, self._num_slots)

        def compiled(processor: Sharding) -> Compiled:
            placed = jax.tree.map(lambda leaf: leaf.update(sharding=processor), shapes)
            lowered = program.lower(*placed, self._shared[processor])
            return programs.compile_once(lowered, meanwhile=lambda: self._begin(0))

        return {processor: compiled(processor) for processor in self._processors}

    def _work(
        self, processor: Sharding, waiting: queue.SimpleQueue, most: int, report: Callable[[int, float], None]
    ) -> Iterator[tuple[int, Run]]:
        """Executes waiting runs in the slots of a processor."""
        inside = [_next(waiting) if slot < most else None for slot in range(self._num_slots)]
        records: dict[int | None, list] = {index: [] for index in inside}
        if inside[0] is None:
            return
        first = self._begin(inside[0])  # also fills the empty slots
        begun = [first, *(first if index is None else self._begin(index) for index in inside[1:])]
        slots, states = (jax.device_put(leaves.stack(part), processor) for part in zip(*begun, strict=True))
        while any(index is not None for index in inside):
            states, chunk = self._compiled[processor](slots, states, self._shared[processor])
            chunk = jax.tree.map(np.asarray, chunk)
            why, elapsed_s = np.asarray(states.stop), np.asarray(states.elapsed_s)
            for slot, index in enumerate(inside):
                if index is None:
                    continue
                records[index].append(jax.tree.map(lambda leaf, slot=slot: leaf[slot], chunk))
                if why[slot] == Stop.NOT_YET:
                    budget_s = self.group.jobs[index].labels["budget_s"]
                    report(index, min(float(elapsed_s[slot]) / budget_s, 1.0))
                    continue
                ended = jax.tree.map(lambda leaf, slot=slot: leaves.on_host(leaf)[slot], states)
                following = inside[slot] = _next(waiting)
                if following is not None:
                    records[following] = []
                    put = functools.partial(_with_slot, slot)
                    changed = jax.tree.map(put, (slots, states), self._begin(following))
                    slots, states = jax.device_put(changed, processor)
                yield index, jobs.finish(records.pop(index), ended)

    def _begin(self, index: int) -> tuple[_Slot, State]:
        """Returns a run before its first round, as host arrays."""
        slot, of_run = _slot(self.group, index, self._policy_states[index])
        return jax.tree.map(leaves.on_host, (slot, begin(*of_run)))


def program_of(group: Group, num_slots: int) -> tuple[Any, tuple[_Slot, State]]:
    """Returns the jitted program of a group, and the shapes of its arguments but for the last, `group.shared()`."""
    first = group.jobs[0].experiment
    program = _program(group.template(), group.policies(), group.decides, num_slots > 1, first.cores)
    slot, of_run = _slot(group, 0, group.policy_states()[0])
    one = slot, jax.eval_shape(begin, *of_run)
    return program, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_slots, *leaf.shape), leaf.dtype), one)


def _slot(group: Group, index: int, policy_state: Any) -> tuple[_Slot, tuple]:
    """Returns the slot of a run and its arguments of `begin`."""
    job = group.jobs[index]
    experiment = job.experiment
    # On the first processor, whichever takes the run: w_0 is tested on the same hardware as later models.
    key = jax.device_put(jax.random.key(job.labels["seed"]), jax.local_devices()[0])
    max_rounds = np.int32(most_rounds(experiment, group.decides))
    return _Slot(jax.random.key_data(key), group.own(experiment), max_rounds), (key, policy_state, experiment)


def _next(waiting: queue.SimpleQueue) -> int | None:
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return None


def _with_slot(slot: int, old: Any, new: Any) -> Any:
    # Replacing a single slot outright saves compiling a program for the update.
    return old.at[slot].set(new) if len(old) > 1 else new[None]


@functools.lru_cache(maxsize=64)
def _program(
    template: Template, policies: tuple[Policy, ...], decides: tuple[str, ...], side_by_side: bool, cores: int
) -> Any:
    """Returns a jitted function that advances all slots by some rounds and returns their states and records."""
    policy = any_of(policies)

    def one(slot: _Slot, state: State, shared: list) -> tuple[State, Record]:
        experiment = template.experiment(slot.own, shared)
        key = jax.random.wrap_key_data(slot.key)
        state, records = advance(key, state, experiment, policy, slot.max_rounds, decides=decides)
        full = (state.stop == Stop.NOT_YET) & (state.round_index >= slot.max_rounds)
        return dataclasses.replace(state, stop=jnp.where(full, Stop.MAX_ROUNDS, state.stop)), records

    def every(slots: _Slot, states: State, shared: list) -> tuple[State, Record]:
        each = lambda run: one(run[0], run[1], shared)  # noqa: E731
        return (jax.vmap(each) if side_by_side else functools.partial(lax.map, each))((slots, states))

    return jax.jit(on_cores(every, cores), donate_argnums=1)


def any_of(policies: Sequence[Policy]) -> Policy:
    """Combines several policies; the state holds the number of the deciding one and all their states."""
    asks_norms = policies[0].asks_norms

    def select(key, state, context):
        which, states = state

        def branch(index):
            def decide(states):
                new, decision = policies[index].select(key, states[index], context)
                decision = as_decision(decision, context.cell, asks_norms)
                return (*states[:index], new, *states[index + 1 :]), decision

            return decide

        states, decision = lax.switch(which, [branch(index) for index in range(len(policies))], states)
        return (which, states), decision

    return Policy(policies[0].init, select, asks_norms)
