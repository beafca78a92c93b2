"""Finished runs on disk, so that a stopped sweep can resume.

A run is stored under a fingerprint of everything it depends on: the numbers of its experiment and policy, its seed, its
program, JAX's settings, and how many runs are executed side by side, which affects the last bits. The program changes
with the model, the policy's code, fcjax's code and JAX's version. One folder can therefore hold runs of any settings
and versions: a run is repeated if anything it depends on has changed. Runs that call back into Python are not stored,
because the program's text does not show the Python code.
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from fcjax.learning.evaluation import Score
from fcjax.policies.contract import decided_by
from fcjax.runtime import files, settings
from fcjax.simulation.experiment import Experiment, most_rounds, training_of
from fcjax.simulation.records import Record, Stop
from fcjax.simulation.simulate import Run, Starts, advance, begin_from, starts
from fcjax.sweeps.jobs import Job
from fcjax.sweeps.leaves import as_numbers
from fcjax.types import Policy
from fcjax.wireless.decisions import DECIDED


class Archive:
    """A folder with one file per finished run."""

    def __init__(self, folder: str | os.PathLike, side_by_side: int = 1):
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):
                pass  # fail now, not after the first run
        except OSError as error:
            raise OSError(f"runs cannot be kept in {folder}: {error.strerror}") from error
        self._fingerprint = Fingerprints(side_by_side)
        self._paths: dict[Job, Path | None] = {}
        files.remove_abandoned(self._folder)

    def load(self, job: Job) -> Run | None:
        """Loads a stored run, or returns None."""
        path = self._path(job)
        if path is None or not path.is_file():
            return None
        try:
            _, run = _read(path)
        except Exception as error:  # a damaged file raises many kinds
            warnings.warn(f"{path} cannot be read, its run is repeated: {error}", stacklevel=2)
            return None
        if run.stop == Stop.MAX_ROUNDS and run.num_rounds < _most_rounds(job):
            return None  # the limits of the world have changed, and more rounds are allowed
        return run

    def save(self, job: Job, run: Run) -> bool:
        """Stores a run atomically; returns False if it cannot be fingerprinted."""
        path = self._path(job)
        if path is None:
            return False
        fields = {field.name: getattr(run.history, field.name) for field in dataclasses.fields(Record)}
        arrays: dict[str, Any] = {name: values for name, values in fields.items() if values is not None} | {
            "start": np.array([float(run.start.accuracy), float(run.start.loss)]),
            "stop": np.array(int(run.stop)),
            "fingerprint": np.array(path.stem),
            "labels": np.array(json.dumps(job.labels)),  # for people who inspect the file
        }
        try:
            files.write_whole(path, lambda part: np.savez(part, **arrays))
        except OSError as error:  # such as a full disk
            raise OSError(
                f"a run cannot be kept as {path}: {error.strerror}; earlier runs are kept: fix this, then rerun to "
                "resume"
            ) from error
        return True

    def _path(self, job: Job) -> Path | None:
        if job not in self._paths:
            self._paths[job] = self._new_path(job)
        return self._paths[job]

    def _new_path(self, job: Job) -> Path | None:
        fingerprint = self._fingerprint(job)
        if fingerprint is None:
            why = "they call back into Python, where changes cannot be detected"
            warnings.warn(f"runs of {job.labels['policy']} are not kept: {why}", stacklevel=4)
            return None
        return self._folder / f"{fingerprint}.npz"


def read_all(folder: str | os.PathLike) -> tuple[list[tuple[dict[str, Any], Run]], list[str]]:
    """Returns the labels and runs of a folder without knowing their jobs, and why other files cannot be read.

    If several runs have the same labels, because programs have changed, the newest counts.
    """
    found: dict[str, tuple[dict[str, Any], Run]] = {}
    faults = []
    for path in sorted(Path(folder).glob("[!.]*.npz"), key=lambda path: path.stat().st_mtime):
        try:
            labels, run = _read(path)
        except Exception as error:  # a damaged file raises many kinds
            faults.append(f"{path} cannot be read: {error}")
            continue
        found[json.dumps(labels)] = labels, run
    return list(found.values()), faults


def _read(path: Path) -> tuple[dict[str, Any], Run]:
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
        if str(arrays["fingerprint"]) != path.stem:
            raise ValueError("it holds another run")
        names = [field.name for field in dataclasses.fields(Record)]
        absent = [name for name in DECIDED if name not in arrays]  # the policy does not decide these
        fields: dict[str, Any] = {name: None if name in absent else arrays[name] for name in names}
        history = Record(**fields)
        if len({len(array) for array in jax.tree.leaves(history)}) > 1:
            raise ValueError("its histories differ in length")
        run = Run(history, len(history.round_s), Score(*arrays["start"]), None, None, Stop(int(arrays["stop"])))
        return json.loads(str(arrays["labels"])), run


class Fingerprints:
    """Computes fingerprints of jobs and reuses the digests of arrays that they share."""

    def __init__(self, side_by_side: int = 1) -> None:
        self._side_by_side = side_by_side
        # Digests of the last job's arrays by id; holding the arrays keeps their ids from being reused.
        self._known: dict[int, tuple[Any, bytes]] = {}

    def __call__(self, job: Job) -> str | None:
        """Returns the fingerprint, or None for a run that calls back into Python."""
        experiment = job.experiment
        state = starts(jax.random.key(job.labels["seed"]), job.policy.init(experiment.cell), experiment)
        program = _program(job.policy, experiment, state)
        if program is None:
            return None
        digest = hashlib.sha256(program)
        leaves = jax.tree.leaves((experiment, state, job.labels["seed"], self._side_by_side))
        self._known = {id(leaf): self._known.get(id(leaf)) or (leaf, _digest(leaf)) for leaf in leaves}
        for leaf in leaves:
            digest.update(self._known[id(leaf)][1])
        return digest.hexdigest()[:32]


def _most_rounds(job: Job) -> int:
    experiment = job.experiment
    decides = decided_by(job.policy, job.policy.init(experiment.cell), experiment.cell, training_of(experiment))
    return most_rounds(experiment, decides)


def _digest(leaf: Any) -> bytes:
    array = np.asarray(as_numbers(leaf))
    about = f"{array.shape} {array.dtype}".encode()
    return hashlib.sha256(about + np.ascontiguousarray(array).tobytes()).digest()


def _program(policy: Policy, experiment: Experiment, state: Starts) -> bytes | None:
    """Digests the versions and the program of a run, without its numbers; None if it calls back into Python."""
    # The padding of local data does not affect what is drawn.
    indices = np.broadcast_to(np.int32(0), (len(experiment.data.sizes), len(experiment.data.y)))
    cores = experiment.cores
    experiment = dataclasses.replace(experiment, data=experiment.data._replace(indices=indices), cores=1)
    leaves, structure = jax.tree.flatten((experiment, state))
    shapes = tuple(jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
    decides = decided_by(policy, state.policy, experiment.cell, training_of(experiment))
    given = *settings.current().items(), *((("cores", cores),) if cores > 1 else ())
    return _digest_of_program(policy, decides, structure, shapes, jax.default_backend(), given)


@functools.lru_cache(maxsize=256)
def _digest_of_program(
    policy: Policy, decides: tuple[str, ...], structure: Any, shapes: tuple, backend: str, given: tuple
) -> bytes | None:
    def run(key, leaves):
        experiment, state = jax.tree.unflatten(structure, leaves)
        first = begin_from(key, state, experiment)
        return advance(key, first, experiment, policy, max_rounds=1, decides=decides)

    lowered = jax.jit(run).lower(jax.random.key(0), shapes)
    text = lowered.as_text()
    if re.search(r"custom_call @xla\w*callback", text):
        return None
    return hashlib.sha256(f"{jax.__version__} {jaxlib.__version__} {backend} {given}\n{text}".encode()).digest()
