"""What can be read of a folder of results, which may be unfinished, of an older version or partly damaged."""

import contextlib
from pathlib import Path

import netCDF4
import xarray as xr

from fcjax.sweeps import archive
from fcjax.sweeps.results import NEEDED, SETTINGS, alike, read, to_dataset


def load(out: Path) -> tuple[xr.Dataset, list[str]]:
    """Loads the results of `fcjax sweep --out OUT`, and says what could not be read.

    Finished runs stand in for a file of results that is missing, as while the sweep is running, or damaged. Raises
    ValueError if there are none.
    """
    path = out / "histories.nc"
    try:
        return _salvage(path)
    except (OSError, ValueError) as error:
        why = str(error) if path.exists() else f"there is no {path}"
    runs, faults = archive.read_all(out / "runs")
    if not runs:
        reasons = "; ".join([why, *faults[:1]])
        raise ValueError(f"{out} holds no results that can be shown: {reasons}; run fcjax sweep --out {out} first")
    labels, histories = zip(*runs, strict=True)
    results = to_dataset(list(zip(alike(labels), histories, strict=True)))
    return results, [f"{why}: the page shows the {len(runs)} finished runs in {out / 'runs'}", *faults]


def _salvage(path: Path) -> tuple[xr.Dataset, list[str]]:
    """Loads a results file without the variables that cannot be read."""
    damaged = []
    with contextlib.suppress(OSError), netCDF4.Dataset(path) as file:
        for name, variable in file.variables.items():
            try:
                variable[:]
            except (OSError, RuntimeError):
                damaged.append(name)
    if needed := [name for name in damaged if name in (*SETTINGS, *NEEDED)]:
        raise ValueError(f"{path} is damaged: {', '.join(needed)} cannot be read")
    with read(path, without=damaged) as dataset:
        return dataset.load(), [f"{path} is damaged: {name} cannot be read" for name in damaged]
