"""Planned runs, and groups of runs that share a program.

Runs share a program if their experiments have the same shapes and functions, and if their policies decide the same
things. The bits of a run therefore do not depend on which other policies are in the sweep.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fcjax.policies.contract import decided_by
from fcjax.simulation.experiment import Experiment, training_of
from fcjax.simulation.records import Record, State, Stop
from fcjax.simulation.simulate import Run, starts
from fcjax.sweeps import leaves
from fcjax.types import Policy


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """A planned run.

    Attributes:
      labels: its settings, which become coordinates of the results.
      policy: its policy.
      make: makes its experiment.
    """

    labels: dict[str, Any]
    policy: Policy
    make: Callable[[], Experiment]

    @property
    def experiment(self) -> Experiment:
        """The experiment, made on demand because thousands would not fit in memory."""
        return self.make()


def finish(chunks: Sequence[Record], state: State) -> Run:
    """Joins the records of a run whose state is final; its models are not kept."""
    num_rounds = int(state.round_index)
    history = jax.tree.map(lambda *parts: np.concatenate(parts)[:num_rounds], *chunks)
    return Run(history, num_rounds, state.start, None, None, Stop(int(state.stop)))


class Group:
    """Runs that share a program: their shapes are equal, except for the padding of local data."""

    def __init__(self, experiment: Experiment, decides: tuple[str, ...]):
        self.decides = decides  # optional parts of a decision that all policies decide
        self.jobs: list[Job] = []
        self._policy_states: list[Any] = []  # initial state of each run
        self._structure = jax.tree.structure(experiment)
        self._first = jax.tree.leaves(experiment)
        self._dtypes = [leaves.dtype(leaf) for leaf in self._first]
        # Leaves that are the same object in all runs, such as the images, are stored once.
        self._is_shared = [True] * len(self._first)
        self._room = 0

    def __getstate__(self) -> dict[str, Any]:
        """Omits the leaves of the first experiment, such as the images; the receiver makes them itself."""
        return {name: value for name, value in vars(self).items() if name not in ("_first", "_structure")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._first, self._structure = jax.tree.flatten(self.jobs[0].experiment)

    def add(self, job: Job, experiment: Experiment, policy_state: Any) -> None:
        row = jax.tree.leaves(experiment)
        self.jobs.append(job)
        self._policy_states.append(policy_state)
        self._room = max(self._room, experiment.data.indices.shape[1])
        self._is_shared = [
            was and leaf is one for was, leaf, one in zip(self._is_shared, row, self._first, strict=True)
        ]
        self._dtypes = [leaves.common(one, leaves.dtype(leaf)) for one, leaf in zip(self._dtypes, row, strict=True)]

    def policies(self) -> tuple[Policy, ...]:
        """Returns the distinct policies; one whose states differ in shape counts once per shape."""
        return tuple(policy for policy, *_ in dict.fromkeys(self._kinds()))

    def _kinds(self) -> list[tuple]:
        """Returns, for each run, its policy and the structure and shapes of the policy's state."""
        return [
            (job.policy, jax.tree.structure(state), *map(np.shape, jax.tree.leaves(state)))
            for job, state in zip(self.jobs, self._policy_states, strict=True)
        ]

    def policy_states(self) -> list[tuple[np.int32, tuple]]:
        """Returns, for each run, the index of its policy in `policies` and a state for every policy."""
        number_of: dict[tuple, int] = {}
        numbers = [number_of.setdefault(kind, len(number_of)) for kind in self._kinds()]
        of_any = [self._policy_states[numbers.index(number)] for number in range(len(number_of))]
        rows = [
            tuple(state if i == number else other for i, other in enumerate(of_any))
            for number, state in zip(numbers, self._policy_states, strict=True)
        ]
        return list(zip(map(np.int32, numbers), leaves.promoted(rows), strict=True))

    def template(self) -> "Template":
        return Template(self._structure, tuple(self._is_shared))

    def shared(self) -> list:
        """Returns the leaves that all experiments share."""
        return [leaf for leaf, shared in zip(self._first, self._is_shared, strict=True) if shared]

    def own(self, experiment: Experiment) -> list:
        """Returns the leaves of an experiment that are not shared, in the group's common shapes and dtypes."""
        row = jax.tree.leaves(_with_room(experiment, self._room))
        columns = zip(row, self._dtypes, self._is_shared, strict=True)
        return [leaves.as_type(dtype, leaf) for leaf, dtype, shared in columns if not shared]


@dataclasses.dataclass(frozen=True)
class Template:
    """Rebuilds an experiment of a group from its own leaves and the shared ones."""

    structure: Any
    is_shared: tuple[bool, ...]

    def experiment(self, own: list, shared: list) -> Experiment:
        own_leaves, shared_leaves = iter(own), iter(shared)
        return jax.tree.unflatten(self.structure, [next(shared_leaves if s else own_leaves) for s in self.is_shared])


def groups(jobs: Sequence[Job]) -> list[Group]:
    """Groups runs that share a program."""
    found: dict[Any, Group] = {}
    for job in jobs:
        experiment = job.experiment
        row, structure = jax.tree.flatten(experiment)
        # Estimates on local data sum over the padding too, so it affects the order of the sum and the last bits.
        any_room = experiment.estimate_on != "local"
        indices = experiment.data.indices
        shapes = tuple(np.shape(leaf)[:1] if any_room and leaf is indices else np.shape(leaf) for leaf in row)
        state = job.policy.init(experiment.cell)
        decides = decided_by(job.policy, state, experiment.cell, training_of(experiment))
        kind = structure, shapes, decides, job.policy.asks_norms, _shapes_of_starts(experiment)
        if kind not in found:
            found[kind] = Group(experiment, decides)
        found[kind].add(job, experiment, state)
    return list(found.values())


def _shapes_of_starts(experiment: Experiment) -> tuple:
    """Returns structure and shapes of the initial states of a world and the like."""
    made = jax.eval_shape(lambda: starts(jax.random.key(0), (), experiment))
    return jax.tree.structure(made), *((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(made))


def _with_room(experiment: Experiment, room: int) -> Experiment:
    """Pads the rows of indices to a given length; the padding is never drawn."""
    indices = np.asarray(experiment.data.indices)
    padded = np.pad(indices, ((0, 0), (0, room - indices.shape[1])), mode="edge")
    return dataclasses.replace(experiment, data=experiment.data._replace(indices=padded))
