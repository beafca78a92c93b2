"""How a round spends its time: until the device that finishes last has computed, and until it has sent its update."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import Array

from fcjax.sweeps.setups import Setup, setup_of
from fcjax.types import Cell, Decision, Observation, Training
from fcjax.wireless.access import send_time
from fcjax.wireless.decisions import DECIDED, as_decided
from fcjax.wireless.radio import ready_time

_AT_A_TIME = 64  # runs; keeps little of a lazy data set in memory
_TOGETHER = 1e-3  # devices that finish within this fraction of the round finish together


def round_parts(results: xr.Dataset) -> xr.Dataset:
    """Splits the time of each round at the moment when the last device to finish begins to send.

    If several devices finish together, as they do under the optimal allocation, the last is the one of them that took
    longest to compute. Under TDMA, sending includes waiting for the devices that send before.

    Args:
      results: the results of a sweep, with the variable `setup`.

    Returns:
      (run, round) each, NaN where nobody took part: `computing_s`, which includes the download if there is one,
      `sending_s`, `last`, the device, and `together`, the fraction of the scheduled devices that finish last.
    """
    found = {name: np.full(results.round_s.shape, np.nan, np.float32) for name in ("computing_s", "last", "together")}
    setups = [setup_of(text, results.sizes["device"]) if text else None for text in results.setup.values]
    groups: dict[Any, list[int]] = {}
    for number, (setup, num_rounds) in enumerate(zip(setups, results.rounds.values, strict=True)):
        if setup is not None and num_rounds:
            groups.setdefault(_kind(setup, results.isel(run=number)), []).append(number)
    for numbers in groups.values():
        room = min(_AT_A_TIME, len(numbers))
        for start in range(0, len(numbers), room):
            some = numbers[start : start + room]
            padded = np.resize(some, room)  # one shape, one program
            values = _parts_of(results.isel(run=padded), [setups[number] for number in padded])
            for name, value in zip(found, values, strict=True):
                found[name][some] = value[: len(some)]
    anybody = results.scheduled.any("device")
    parts = xr.Dataset({name: (("run", "round"), values) for name, values in found.items()}).where(anybody)
    return parts.assign(sending_s=(results.round_s - parts.computing_s).clip(min=0))


def _kind(setup: Setup, run: xr.Dataset) -> Any:
    """Returns what runs must have in common to share a program."""
    decided = tuple(name for name in DECIDED if f"decided_{name}" in run and run[f"decided_{name}"].notnull().any())
    return jax.tree.structure((setup.cell, setup.training)), setup.asks_norms, decided


def _parts_of(runs: xr.Dataset, setups: list) -> tuple[np.ndarray, ...]:
    decided = _kind(setups[0], runs.isel(run=0))[-1]
    cells = [jax.tree.map(np.float32, setup.cell) for setup in setups]
    cell = jax.tree.map(lambda *values: np.stack(_same_shape(values)), *cells)
    available = runs.available if "available" in runs else runs.scheduled
    history = [runs.scheduled, runs.share, runs.gain, runs.compute_s, available]
    history += [runs[f"decided_{name}"] for name in decided]
    rows = [values.transpose("run", "round", "device").values for values in history]
    parts = _all_parts(cell, setups[0].training, setups[0].asks_norms, decided, *rows)
    return tuple(np.asarray(part) for part in parts)


def _same_shape(values: tuple) -> list:
    """Lets a quantity that all devices of one run share stand beside one per device of another run."""
    return list(np.broadcast_arrays(*values))


# Compiling takes longer than running, so it is not optimised.
@functools.partial(jax.jit, static_argnums=(2, 3), compiler_options={"xla_backend_optimization_level": 0})
def _all_parts(cell: Cell, training: Training, asks_norms: bool, decided: tuple[str, ...], *rows: Array) -> Any:
    of_round = functools.partial(_parts, training, asks_norms, decided)
    return jax.vmap(jax.vmap(of_round, (None, *[0] * len(rows))))(cell, *rows)


def _parts(training: Training, asks_norms: bool, decided: tuple[str, ...], cell: Cell, *row: Array) -> Any:
    scheduled, share, gain, compute_s, available, *values = row
    truth = Observation(gain, compute_s, available)
    if asks_norms:  # as in a simulated round: devices send once all have computed
        wait_s = jnp.max(jnp.where(available, ready_time(truth, cell), 0))
        truth, cell = dataclasses.replace(truth, compute_s=jnp.full_like(compute_s, wait_s)), _without_download(cell)
    decision = Decision(scheduled, share, jnp.zeros(()), **dict(zip(decided, values, strict=True)))
    truth, cell = as_decided(decision, truth, cell, training)
    ready_s = jnp.where(scheduled, ready_time(truth, cell), -jnp.inf)
    # Under TDMA devices send in the order of their computation times.
    finish_s = ready_s if cell.access == "tdma" else ready_s + send_time(share, truth, cell)
    finish_s = jnp.where(scheduled, finish_s, -jnp.inf)
    is_last = scheduled & (finish_s >= (1 - _TOGETHER) * jnp.max(finish_s))
    last = jnp.argmax(jnp.where(is_last, ready_s, -jnp.inf))
    return ready_s[last], last, jnp.sum(is_last) / jnp.sum(scheduled)


def _without_download(cell: Cell) -> Cell:
    return dataclasses.replace(cell, download_bits=None)
