"""Finished runs on disk, so that a sweep that was stopped goes on with what is missing.

A run is kept under the fingerprint of all that it depends on: the numbers of its experiment and of its policy, its
seed, the program that does it, which changes with the model, the policy's code, fcjax's own, and JAX's version, JAX's
settings, and how many runs are done side by side, which decides on the last bits. So a folder may hold runs of any
settings and versions: those that something has changed for are not found, and are done again. What a program calls back
into Python for is not in its text: such runs are not kept.
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from fcjax.runtime import files, settings
from fcjax.simulation.experiment import Experiment
from fcjax.simulation.rounds import Record, Stop
from fcjax.simulation.simulate import advance, begin
from fcjax.sweeps.jobs import Finished, Job
from fcjax.sweeps.leaves import as_numbers


class Archive:
    """A folder of finished runs, a file for each."""

    def __init__(self, folder: str | os.PathLike, side_by_side: int = 1):
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):
                pass  # told now, and not when the first run has been done
        except OSError as error:
            raise OSError(f"runs cannot be kept in {folder}: {error.strerror}") from error
        self._fingerprint = Fingerprints(side_by_side)
        self._paths: dict[Job, Path | None] = {}
        files.remove_abandoned(self._folder)

    def load(self, job: Job) -> Finished | None:
        """The run that has been kept, if it has."""
        path = self._path(job)
        if path is None or not path.is_file():
            return None
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
                if str(arrays["fingerprint"]) != path.stem:
                    raise ValueError("it holds another run")
                history = Record(**{field.name: arrays[field.name] for field in dataclasses.fields(Record)})
                if len({len(array) for array in jax.tree.leaves(history)}) > 1:
                    raise ValueError("its histories are not of one length")
                start_accuracy, start_loss = arrays["start"].tolist()
                return Finished(job.labels, history, start_accuracy, start_loss, Stop(int(arrays["stop"])))
        except Exception as error:  # whatever damage makes of a file
            warnings.warn(f"{path} cannot be read, its run is done again: {error}", stacklevel=2)
            return None

    def save(self, job: Job, run: Finished) -> bool:
        """Keeps a run, whole or not at all; False if it is one that cannot be kept."""
        path = self._path(job)
        if path is None:
            return False
        arrays: dict[str, Any] = {
            field.name: getattr(run.history, field.name) for field in dataclasses.fields(Record)
        } | {
            "start": np.array([run.start_accuracy, run.start_loss]),
            "stop": np.array(int(run.stop)),
            "fingerprint": np.array(path.stem),
            "labels": np.array(json.dumps(job.labels)),  # for whoever looks into the file
        }
        try:
            files.write_whole(path, lambda part: np.savez(part, **arrays))
        except OSError as error:  # such as a full disk
            raise OSError(
                f"a run cannot be kept as {path}: {error.strerror}; those that are there stay, and when it can, the "
                "same call goes on from them"
            ) from error
        return True

    def _path(self, job: Job) -> Path | None:
        if job not in self._paths:
            self._paths[job] = self._new_path(job)
        return self._paths[job]

    def _new_path(self, job: Job) -> Path | None:
        fingerprint = self._fingerprint(job)
        if fingerprint is None:
            why = "they call back into Python, where a change would not be noticed"
            warnings.warn(f"runs of {job.labels['policy']} are not kept: {why}", stacklevel=4)
            return None
        return self._folder / f"{fingerprint}.npz"


class Fingerprints:
    """Fingerprints of jobs, which share most of their large arrays."""

    def __init__(self, side_by_side: int = 1) -> None:
        self._side_by_side = side_by_side
        # Of the last job's arrays, by identity; the arrays themselves too, so that no others take their place.
        self._known: dict[int, tuple[Any, bytes]] = {}

    def __call__(self, job: Job) -> str | None:
        """The fingerprint, or None of a run that calls back into Python."""
        experiment = job.experiment
        state = job.policy.init(experiment.cell)
        program = _program(job.policy.select, experiment, state)
        if program is None:
            return None
        digest = hashlib.sha256(program)
        leaves = jax.tree.leaves((experiment, state, job.labels["seed"], self._side_by_side))
        self._known = {id(leaf): self._known.get(id(leaf)) or (leaf, _digest(leaf)) for leaf in leaves}
        for leaf in leaves:
            digest.update(self._known[id(leaf)][1])
        return digest.hexdigest()[:32]


def _digest(leaf: Any) -> bytes:
    array = np.asarray(as_numbers(leaf))
    about = f"{array.shape} {array.dtype}".encode()
    return hashlib.sha256(about + np.ascontiguousarray(array).tobytes()).digest()


def _program(select: Callable, experiment: Experiment, state: Any) -> bytes | None:
    """A digest of the versions and of the program that does a run, without its numbers; None if it calls Python."""
    # How many samples a device has room for has no say in what is drawn.
    indices = np.broadcast_to(np.int32(0), (len(experiment.data.sizes), len(experiment.data.y)))
    experiment = dataclasses.replace(experiment, data=experiment.data._replace(indices=indices))
    leaves, structure = jax.tree.flatten((experiment, state))
    shapes = tuple(jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
    return _digest_of_program(select, structure, shapes, jax.default_backend(), tuple(settings.current().items()))


@functools.lru_cache(maxsize=256)
def _digest_of_program(select: Callable, structure: Any, shapes: tuple, backend: str, given: tuple) -> bytes | None:
    def run(key, leaves):
        experiment, state = jax.tree.unflatten(structure, leaves)
        return advance(key, begin(key, state, experiment), experiment, select, max_rounds=1)

    lowered = jax.jit(run).lower(jax.random.key(0), shapes)
    text = lowered.as_text()
    if re.search(r"custom_call @xla\w*callback", text):
        return None
    return hashlib.sha256(f"{jax.__version__} {jaxlib.__version__} {backend} {given}\n{text}".encode()).digest()
