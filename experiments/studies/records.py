"""Records of runs: one csv row per run, committed with a study's tables, so that a clone need not train again.

A row has the labels and figures of a run, and its fingerprint, which changes with everything the run depends on (see
`fcjax.archive`). A study only executes runs that have no row, such as those of a new policy or of changed code.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr

import fcjax
from fcjax import archive, files, metrics

COMMITTED = Path(__file__).parents[1] / "results" / "studies"


def collect(
    jobs: Sequence[fcjax.Job],
    path: Path,
    committed: Path,
    figures: Callable[[xr.Dataset, Sequence[fcjax.Job]], pd.DataFrame],
    *,
    keep: Path,
    workers: int | None = None,
    **labels: Any,
) -> pd.DataFrame:
    """Returns one row per job, in order; executes the jobs that the file lacks and adds them to it.

    Args:
      jobs: runs of one setting.
      path: the csv file.
      committed: the file in the repository, whose rows count too; it may be the same one.
      figures: returns the policy, the seed and the figures of each run.
      keep: the folder of whole runs, as they finish.
      workers: the number of processes; default: one per core.
      labels: the setting; a row with other labels does not count.
    """
    sources = [pd.read_csv(source) for source in (path, committed) if source.exists()]
    every = pd.concat(sources or [pd.DataFrame(columns=["fingerprint", *labels])])
    every = every.drop_duplicates(["fingerprint", *labels])
    known = every[(every[list(labels)] == pd.Series(labels)).all(axis=1)].set_index("fingerprint")
    fingerprints = list(map(archive.Fingerprints(), jobs))  # None for a run that calls back into Python
    missing = [number for number, word in enumerate(fingerprints) if word not in known.index]
    kept = [number for number in range(len(jobs)) if number not in set(missing)]
    rows = known.loc[[fingerprints[number] for number in kept]].reset_index().set_axis(kept)
    if missing:
        todo = [jobs[number] for number in missing]
        results = fcjax.run_all(todo, keep=keep, workers=workers, progress=True)
        if not results.complete:
            raise KeyboardInterrupt
        words = [fingerprints[number] for number in missing]
        new = figures(results, todo).assign(fingerprint=words, **labels).set_axis(missing)
        recorded = new.dropna(subset="fingerprint")
        every = pd.concat([every, recorded]) if len(every) else recorded
        rows = pd.concat([rows, new]).sort_index() if kept else new
    # In an order that does not depend on when runs were executed.
    first = [*labels, "policy", "seed", "fingerprint"]
    save(every[[*first, *every.columns.drop(first)]].sort_values(first), path, digits=9)
    return rows


def paired(rows: pd.DataFrame, a: str, b: str) -> metrics.Comparison:
    """Compares the best accuracies of two policies over common seeds, in points."""
    best = rows.pivot(index="seed", columns="policy", values="best_percent")
    apart = best[a] - best[b]
    return metrics.Comparison(a, b, "best accuracy", apart.mean(), apart.std(), len(apart))


def save(rows: pd.DataFrame, path: Path, digits: int = 5) -> None:
    """Writes a csv file, with so many significant digits."""
    how = {"index": False, "float_format": f"%.{digits}g", "lineterminator": "\n"}
    files.write_whole(path, lambda part: rows.to_csv(part, **how))
