"""Results of many runs: a labelled data set, a summary table with one row per run, and netCDF files.

The data set has the dimensions run, round and device. The settings of a run (policy, distribution, ...) are coordinates
of `run`. Histories are (run, round) or (run, round, device). Where a run has no such round or device, they are NaN, and
`scheduled`, `received` and `available` are False:

    results = fcjax.results.load("histories.nc")
    results.accuracy.max("round").groupby(["policy", "distribution"]).mean()
    results.accuracy.where(results.policy == "fc", drop=True)
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import netCDF4
import numpy as np
import pandas as pd
import xarray as xr

from fcjax.runtime.files import write_whole
from fcjax.simulation.experiment import Experiment
from fcjax.simulation.records import Record, Stop
from fcjax.simulation.simulate import Run
from fcjax.wireless.decisions import DECIDED

SETTINGS = ("dataset", "policy", "distribution", "radius_m", "phi", "seed", "devices", "budget_s")
SUMMARY = (
    "dataset",
    "policy",
    "distribution",
    "radius_m",
    "phi",
    "seed",
    "rounds",
    "elapsed_s",
    "mean_scheduled",
    "mean_round_s",
    "best_accuracy",
    "tilde_accuracy",
    "final_accuracy",
    "devices",
    "budget_s",
    "stop",
    "diverged_round",
    "energy_j",
    "lost",
)
_ABOUT = {  # unit and meaning
    "elapsed_s": ("s", "simulated time at the end of the round"),
    "round_s": ("s", "how long the round took"),
    "scheduled": ("1", "whether the device took part"),
    "received": ("1", "whether the base station received the device's update"),
    "share": ("1", "fraction of the bandwidth, or of the round under TDMA"),
    "available": ("1", "whether the device could be scheduled"),
    "gain": ("1", "true power gain of the channel"),
    "compute_s": ("s", "true computation time, at the cell's frequency and for all samples"),
    "energy_j": ("J", "energy that the device spent in the round"),
    "accuracy": ("1", "fraction of the test set that the global model classifies correctly after the round"),
    "loss": ("1", "loss of the global model on the test set"),
    "tilde_accuracy": ("1", "accuracy of the model with the least loss reported so far"),
    "tilde_loss": ("1", "loss of that model on the test set"),
    "reported_loss": ("1", "loss of the model before the round, on the data of the scheduled devices"),
    "rho": ("1", "estimated Lipschitz constant of the device's loss"),
    "beta": ("1", "estimated smoothness of the device's loss"),
    "delta": ("1", "estimated divergence of the device's gradient"),
    "decided_power_w": ("W", "transmit power, if the policy decides it"),
    "decided_cpu_hz": ("Hz", "CPU frequency, if the policy decides it"),
    "decided_local_steps": ("1", "local steps, if the policy decides them"),
    "decided_batch_size": ("1", "batch size, if the policy decides it"),
    "rounds": ("1", "rounds within the budget"),
    "start_accuracy": ("1", "accuracy before the first round"),
    "start_loss": ("1", "loss before the first round"),
    "stop": ("1", "why the run ended"),
    "diverged_round": ("1", "round that ended with a loss or an estimate that is not finite, 0 if none did"),
    "radius_m": ("m", "radius of the cell"),
    "budget_s": ("s", "time budget"),
    "phi": ("1", "parameter of the policy, NaN where it has none"),
    "devices": ("1", "number of devices"),
    "setup": ("1", "cell and training of the run, as JSON"),
    "samples": ("1", "training samples of a label on the device"),
}


NEEDED = (  # by `summary`
    "elapsed_s",
    "round_s",
    "scheduled",
    "accuracy",
    "tilde_accuracy",
    "rounds",
    "start_accuracy",
    "stop",
    "diverged_round",
)


def to_dataset(
    labelled: Sequence[tuple[Mapping[str, Any], Run]],
    about: Mapping[str, Any] | None = None,
    *,
    room: tuple[int, int] = (1, 1),
    decided: Iterable[str] = (),
) -> xr.Dataset:
    """Returns runs and their settings as one data set with units and provenance.

    Args:
      labelled: pairs of settings (`SETTINGS`, and any further axes) and run, whose history ends with its last round.
      about: further attributes.
      room: the least numbers of rounds and devices.
      decided: what policies of other runs decide, which becomes NaN here.
    """
    labels, runs = zip(*labelled, strict=True)
    num_rounds, num_devices = (
        max(sizes) for sizes in zip(room, *(run.history.share.shape for run in runs), strict=True)
    )
    variables: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(Record)):
        histories = [getattr(run.history, name) for run in runs]
        one = next((history for history in histories if history is not None), None)
        if one is None and name not in decided:
            continue  # no policy decides this
        one = runs[0].history.share if one is None else one
        shape = (len(runs), num_rounds, num_devices) if one.ndim == 2 else (len(runs), num_rounds)
        dtype = one.dtype if one.dtype.kind in "bf" else np.dtype(float)  # integers have no NaN
        filled = np.full(shape, False if dtype.kind == "b" else np.nan, dtype)
        for row, history in zip(filled, histories, strict=True):
            if history is not None:
                row[tuple(slice(size) for size in history.shape)] = history
        # The names of what a policy decides are also names of axes.
        shown = f"decided_{name}" if name in DECIDED else name
        variables[shown] = (("run", "round", "device")[: filled.ndim], filled)
    variables["rounds"] = ("run", np.array([run.history.round_s.size for run in runs], np.int32))
    variables["start_accuracy"] = ("run", np.array([run.start.accuracy for run in runs], np.float32))
    variables["start_loss"] = ("run", np.array([run.start.loss for run in runs], np.float32))
    variables["stop"] = ("run", np.array([Stop(run.stop).name.lower() for run in runs]))
    rounds = variables["rounds"][1]
    variables["diverged_round"] = ("run", np.where([run.stop == Stop.DIVERGED for run in runs], rounds + 1, 0))
    # Further axes of a sweep add labels.
    names = [*SETTINGS, *(name for name in labels[0] if name not in SETTINGS)]
    coordinates: dict[str, Any] = {name: ("run", np.array([row[name] for row in labels])) for name in names}
    coordinates |= {"round": np.arange(1, num_rounds + 1), "device": np.arange(num_devices)}
    return described(xr.Dataset(variables, coordinates, {**provenance(), **(about or {})}))


def described(dataset: xr.Dataset) -> xr.Dataset:
    """Gives variables their units and meanings."""
    for name, (unit, meaning) in _ABOUT.items():
        if name in dataset:
            dataset[name].attrs.update(units=unit, long_name=meaning)
    return dataset


def alike(labels: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns labels of runs with the same names; axes of other runs become NaN or an empty text."""
    labels = list(labels)
    usual = {name: "" if isinstance(value, str) else np.nan for row in labels for name, value in row.items()}
    return [usual | dict(row) for row in labels]


def from_run(run: Run, experiment: Experiment, **labels: Any) -> xr.Dataset:
    """Returns a run of `fcjax.simulate` as the data set of a sweep, so that summary, tables and plots apply to it.

    Args:
      run: a run, or many that `jax.vmap` has stacked.
      experiment: the experiment of the run or runs.
      labels: the run's settings, such as policy="mine" or seed=3, as a value for all runs or one per run. Names that
        are not in `SETTINGS` become further axes.
    """
    check_names(labels)
    num_dims = np.ndim(run.stop)
    leaves = jax.tree.map(np.asarray, dataclasses.replace(run, params=None, tilde_params=None))
    stacked = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[num_dims:]), leaves)
    num_runs = len(stacked.stop)
    rows = [jax.tree.map(lambda leaf, number=number: leaf[number], stacked) for number in range(num_runs)]
    rows = [
        dataclasses.replace(row, history=jax.tree.map(lambda leaf, row=row: leaf[: row.num_rounds], row.history))
        for row in rows
    ]
    usual = {"dataset": "", "policy": "", "distribution": "", "phi": np.nan, "seed": np.arange(num_runs)}
    usual |= {"radius_m": np.asarray(experiment.cell.radius_m, float)}
    usual |= {"budget_s": np.asarray(experiment.training.budget_s, float)}
    columns = {}
    for name, values in (usual | labels | {"devices": stacked.history.share.shape[-1]}).items():
        values = np.asarray(values)
        if values.shape not in ((), (num_runs,), np.shape(run.stop)):
            raise ValueError(f"{name} must be one value, or one for each of {num_runs} runs, got shape {values.shape}")
        columns[name] = np.broadcast_to(values.ravel() if values.ndim else values, num_runs)
    labelled = [({name: values[number] for name, values in columns.items()}, row) for number, row in enumerate(rows)]
    return to_dataset(labelled)


def check_names(names: Iterable[str]) -> None:
    """Raises ValueError for labels of runs that are also variables of the results."""
    taken = {"run", "round", "device", "devices", *_ABOUT} - {"radius_m", "budget_s", "phi"}
    if clash := taken.intersection(names):
        raise ValueError(f"{min(clash)} cannot be a label: the results have a variable of this name")


def concat(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """Concatenates sweeps; rounds, devices and axes that one lacks are filled with NaN, False or an empty text.

    `xarray.concat` works too, but turns `scheduled` into floats if the numbers of rounds differ.
    """
    if not parts:
        raise ValueError("concat needs at least one data set")
    parts = [_with_received(checked(part)) for part in parts]
    axes = {name: np.nan if part[name].dtype.kind in "bif" else "" for part in parts for name in further_axes(part)}
    alike = []
    for part in parts:
        flags = [name for name in axes if name in part.coords and part[name].dtype == bool]
        part = part.assign_coords({name: part[name].astype(float) for name in flags})
        lacking = {name: ("run", np.full(part.sizes["run"], axes[name])) for name in axes if name not in part.coords}
        alike.append(part.assign_coords(lacking))
    variables = [item for part in parts for item in part.data_vars.items()]
    fill = {str(name): _NOTHING.get(variable.dtype.kind, np.nan) for name, variable in variables}
    return xr.concat(alike, "run", join="outer", fill_value=fill, combine_attrs="drop_conflicts")


_NOTHING = {"b": False, "O": "", "U": ""}  # by kind of values; NaN for numbers


def _with_received(dataset: xr.Dataset) -> xr.Dataset:
    """Adds what results of older versions lack: all updates were received."""
    return dataset if "received" in dataset else dataset.assign(received=dataset.scheduled)


def summary(dataset: xr.Dataset) -> pd.DataFrame:
    """Returns one row per run, with the columns `SUMMARY` and the sweep's further axes; accuracies are fractions."""
    dataset = checked(dataset)
    starts = range(0, dataset.sizes["run"], _AT_A_TIME)  # keeps little of a lazy data set in memory
    parts = [_summary(dataset.isel(run=slice(start, start + _AT_A_TIME))) for start in starts]
    return pd.concat(parts, ignore_index=True)


_AT_A_TIME = 64


def _summary(dataset: xr.Dataset) -> pd.DataFrame:
    happened = dataset.round_s.notnull()
    any_round = dataset.rounds > 0
    last = (dataset.rounds - 1).clip(min=0)

    def at_the_end(name: str, before: Any) -> xr.DataArray:
        return xr.where(any_round, dataset[name].isel(round=last), before)

    further = further_axes(dataset)
    dataset = _with_received(dataset)
    known = "energy_j" in dataset  # not in files of older versions
    energy_j = dataset.energy_j.sum(("round", "device"), min_count=1) if known else np.nan
    columns = {name: dataset[name] for name in (*SETTINGS, *further)} | {
        "rounds": dataset.rounds,
        "elapsed_s": at_the_end("elapsed_s", 0.0),
        "mean_scheduled": dataset.scheduled.sum("device").where(happened).mean("round"),
        "mean_round_s": dataset.round_s.mean("round"),
        "best_accuracy": xr.where(any_round, dataset.accuracy.max("round"), dataset.start_accuracy),
        "tilde_accuracy": at_the_end("tilde_accuracy", dataset.start_accuracy),
        "final_accuracy": at_the_end("accuracy", dataset.start_accuracy),
        "stop": dataset.stop,
        "diverged_round": dataset.diverged_round,
        "energy_j": xr.where(any_round, energy_j, 0.0),
        "lost": (dataset.scheduled & ~dataset.received).sum(("round", "device")),
    }
    return pd.DataFrame({name: np.asarray(columns[name]) for name in (*SUMMARY, *further)})


def checked(dataset: xr.Dataset) -> xr.Dataset:
    """Returns results with the dimension `run` and the types that selections such as `where` may have changed."""
    if missing := [name for name in (*SETTINGS, *NEEDED) if name not in dataset.variables]:
        raise ValueError(f"this data set does not hold results: it has no {', '.join(missing)}")
    if "run" not in dataset.dims:
        labels = {name: ("run", [label.item()]) for name, label in dataset.coords.items() if label.dims == ()}
        dataset = dataset.drop_vars(labels).expand_dims("run").assign_coords(labels)
    if dataset.rounds.dtype.kind != "i":  # `where` has made them floats, and NaN for other runs
        dataset = dataset.isel(run=dataset.rounds.notnull().values)
        whole = {name: dataset[name].astype(np.int32) for name in ("rounds", "diverged_round")}
        dataset = dataset.assign(whole)
    if not dataset.sizes["run"]:
        raise ValueError("this data set holds no runs")
    flags = [name for name in ("scheduled", "received", "available") if name in dataset]
    floats = [name for name in flags if dataset[name].dtype != bool]
    return dataset.assign({name: dataset[name].fillna(False).astype(bool) for name in floats})


def further_axes(dataset: xr.Dataset) -> list[str]:
    """Returns the run labels besides `SETTINGS`: the further axes of a sweep."""
    return [
        str(name) for name, label in dataset.coords.items() if label.dims == ("run",) and name not in (*SETTINGS, "run")
    ]


def provenance() -> dict[str, str]:
    """Returns versions, backend and git revision, as attributes of a result."""
    packages = ("fcjax", "jax", "jaxlib", "numpy", "flax", "optax")
    versions = {package: importlib.metadata.version(package) for package in packages}
    return {
        "versions": json.dumps(versions | {"python": platform.python_version()}),
        "backend": f"{jax.default_backend()}, {jax.device_count()} processor(s)",
        "revision": _revision(),
    }


@functools.cache
def _revision() -> str:
    """Returns the git revision of the package's folder, with "+" if there are uncommitted changes."""
    folder = Path(__file__).parents[1]
    try:
        head, changes = (
            subprocess.run(["git", "-C", folder, *command], capture_output=True, text=True, check=True).stdout.strip()
            for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--", "."))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changes else "")


def save(dataset: xr.Dataset, path: str | os.PathLike) -> None:
    """Writes a data set as netCDF, atomically."""
    save_parts([dataset], path)


def save_parts(parts: Iterable[xr.Dataset], path: str | os.PathLike) -> None:
    """Writes data sets with the same rounds and devices into one file, holding one in memory at a time."""

    def write(where: str) -> None:
        first, num_runs = True, 0
        for part in parts:
            with _free_space_in_errors(path):
                if first:
                    part.to_netcdf(where, engine="netcdf4", unlimited_dims=["run"] if "run" in part.dims else None)
                else:
                    with netCDF4.Dataset(where, "a") as file:
                        for name, variable in part.variables.items():
                            if "run" not in variable.dims:
                                continue  # the same in all parts
                            values = variable.values.astype("i1") if variable.dtype == bool else variable.values
                            file[str(name)][num_runs : num_runs + part.sizes["run"]] = values
            first, num_runs = False, num_runs + part.sizes["run"]

    write_whole(path, write)


@contextlib.contextmanager
def _free_space_in_errors(path: str | os.PathLike) -> Iterator[None]:
    """Adds the free space to netCDF's errors, which misreport a full disk as "permission denied" and the like."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        free = ""
        with contextlib.suppress(OSError):
            free = f", with {shutil.disk_usage(Path(path).parent).free / 1e6:.2g} MB free there"
        raise OSError(f"results cannot be written to {path}{free}: {error}") from error


def load(path: str | os.PathLike) -> xr.Dataset:
    """Loads the results in a file, or in the folder of a sweep, into memory.

    Raises ValueError if the file is damaged or not a results file.
    """
    try:
        with read(path) as dataset:
            return dataset.load()
    except (OSError, RuntimeError) as error:
        raise _unreadable(path, error) from error


def read(path: str | os.PathLike, *, without: Sequence[str] = ()) -> xr.Dataset:
    """Opens a results file lazily, without some variables; files of older versions may lack others."""
    path = Path(path) / "histories.nc" if Path(path).is_dir() else path
    try:
        dataset = xr.open_dataset(path, engine="netcdf4", drop_variables=without)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} does not exist: give the folder of a sweep, or its histories.nc") from error
    except Exception as error:  # a damaged file raises many kinds
        raise _unreadable(path, error) from error
    missing = [name for name in (*SETTINGS, *NEEDED) if name not in dataset.variables]
    if missing:
        raise ValueError(f"{path} is not a results file: it has no {', '.join(missing)}")
    return dataset


def _unreadable(path: str | os.PathLike, error: Exception) -> Exception:
    return error if isinstance(error, FileNotFoundError) else ValueError(f"{path} cannot be read as results: {error}")
