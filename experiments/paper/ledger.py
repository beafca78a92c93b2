"""The ledger: a short record of every run of the reproduction, committed with its tables and figures.

OUT/runs_DATASET.nc has one row per run, under the fingerprint of everything the run depends on (see
`fcjax.archive`): its settings, its summary, and the accuracy and simulated time of every round. It also has the
other traces of runs that a study plots. A study only executes runs that the ledger lacks. A clone can therefore rebuild
every table without training, and you can inspect single runs:

    runs = xarray.open_dataset("experiments/results/paper/runs_mnist.nc")
    runs.best_accuracy.where(runs.policy == "fc").groupby("radius_m").std()
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from fcjax import Job, archive, files, results, run_all

COMMITTED = Path(__file__).parents[1] / "results" / "paper"
CURVES = ("accuracy", "elapsed_s")  # (run, round)
TRACES = ("loss", "tilde_accuracy", "tilde_loss", "scheduled", "rho", "beta", "delta")  # (run, round), over devices
FIGURES = ("mean_scheduled", "mean_round_s", "best_accuracy", "final_accuracy", "final_tilde_accuracy")  # (run,)
OF_SCHEDULED = ("gain", "compute_s")  # mean log10 over scheduled devices and rounds, (run,)
ENDS = ("rounds", "start_accuracy", "start_loss", "stop", "diverged_round")  # (run,)
_AT_A_TIME = 1000  # runs whose whole histories are in memory at a time


def collect(jobs: Sequence[Job], out: Path, name: str, *, traced: Callable[[Job], bool], fresh: bool) -> xr.Dataset:
    """Returns the records of a study's runs, in order; executes runs that the ledger lacks and adds them to it.

    Args:
      jobs: the runs.
      out: the folder of the ledger, and of whole runs as they finish.
      name: the name of the data set.
      traced: which runs need all traces.
      fresh: whether to ignore the committed ledger.
    """
    path = out / f"runs_{name}.nc"
    sources = (path,) if fresh else (path, COMMITTED / path.name)
    known = merged([load(source) for source in dict.fromkeys(sources) if source.exists()])
    has = {} if known is None else dict(zip(known.fingerprint.values, known.traced.values, strict=True))
    fingerprint = archive.Fingerprints()
    jobs = [replace(job, labels=job.labels | {"fingerprint": fingerprint(job)}) for job in jobs]
    missing = [job for job in jobs if has.get(job.labels["fingerprint"], -1) < traced(job)]
    num_kept = len(jobs) - len(missing)
    for start in range(0, len(missing), _AT_A_TIME):
        part = missing[start : start + _AT_A_TIME]
        done = run_all(part, keep=out / "runs", progress=True)
        known = merged([brief(done, {job.labels["fingerprint"] for job in part if traced(job)}), known])
        num_kept += int(done.kept)
        save(known, path)
        if not done.complete:
            raise KeyboardInterrupt
    assert known is not None
    place = {word: number for number, word in enumerate(known.fingerprint.values)}
    rows = known.isel(run=[place[job.labels["fingerprint"]] for job in jobs])
    # A run may have different labels in other studies.
    labels = {label: ("run", np.array([job.labels[label] for job in jobs])) for label in jobs[0].labels}
    return rows.assign_coords(labels).assign_attrs(results.provenance(), kept=num_kept)


def brief(runs: xr.Dataset, traced: set[str] | None = None) -> xr.Dataset:
    """Returns the ledger's record of runs; traces only for the fingerprints in `traced`, or for all."""
    runs = runs.drop_vars(["round", "device"], errors="ignore")  # ledgers differ in length
    summary_ = results.summary(runs).rename(columns={"tilde_accuracy": "final_tilde_accuracy"})
    short = runs[[*CURVES, *ENDS]].assign({name: ("run", summary_[name].to_numpy()) for name in FIGURES})
    for name in OF_SCHEDULED:
        logarithm = np.log10(runs[name].where(runs.scheduled))
        short[f"log10_{name}_of_scheduled"] = logarithm.mean(("device", "round"))
    is_traced = np.ones(runs.sizes["run"], bool) if traced is None else np.isin(runs.fingerprint.values, list(traced))
    short = short.drop_attrs(deep=False).assign_coords(traced=("run", is_traced))
    happened = runs.round_s.notnull() & short.traced
    for name in TRACES:
        values = runs[name]
        if "device" in values.dims:
            values = values.sum("device") if name == "scheduled" else values.mean("device")
        short[name] = values.where(happened).astype(np.float32)
    return short


def merged(ledgers: Sequence[xr.Dataset | None]) -> xr.Dataset | None:
    """Merges ledgers; of several rows for a run, keeps the first that has traces, or else the first."""
    parts = [part for part in ledgers if part is not None]
    if not parts:
        return None
    num_rounds = max(part.sizes["round"] for part in parts)
    parts = [part.pad(round=(0, num_rounds - part.sizes["round"])) for part in parts]
    every = xr.concat(parts, "run", data_vars="all", coords="different", compat="equals", join="exact")
    every = every.isel(run=np.argsort(~every.traced.values, kind="stable"))
    _, first = np.unique(every.fingerprint.values, return_index=True)
    return every.isel(run=np.sort(first))


def summary(rows: xr.Dataset) -> pd.DataFrame:
    """Like `fcjax.results.summary`, without energies and lost updates."""
    last = (rows.rounds - 1).clip(min=0)
    columns = {
        "elapsed_s": xr.where(rows.rounds > 0, rows.elapsed_s.isel(round=last), 0.0),
        "tilde_accuracy": rows.final_tilde_accuracy,
    }
    columns = {name: rows[name] for name in results.SUMMARY if name in rows} | columns
    return pd.DataFrame({name: np.asarray(columns[name]) for name in results.SUMMARY if name in columns})


def load(path: Path) -> xr.Dataset:
    rows = xr.load_dataset(path, engine="netcdf4")
    return rows.assign_coords(traced=rows.traced.astype(bool))


def save(rows: xr.Dataset, path: Path) -> None:
    """Writes the ledger atomically, in an order that does not depend on when runs were executed."""
    rows = rows.sortby(["preset", "policy", "distribution", "radius_m", "phi", "observation_error", "seed"])
    packed = {name: {"zlib": True, "complevel": 6, "shuffle": True} for name in (*CURVES, *TRACES)}
    files.write_whole(path, lambda part: rows.to_netcdf(part, engine="netcdf4", encoding=packed))
