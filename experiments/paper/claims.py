"""Checks what the results section of the paper states in words, on runs of the same settings.

Each statement is judged by a figure. It holds if the whole 95% interval of the figure over seeds meets it, does not
hold if no part does, and is undecided otherwise. Policies are compared seed by seed, because runs with the same seed
have the same channels, data and mini-batches. Means have Student's t intervals; other figures have bootstrap intervals
over seeds. Comparisons with published figures allow for noise in both: published figures are means of 5 trials, with an
assumed spread equal to ours. If a statement names several figures, the least favourable is reported, without a
correction for their number.
"""

import dataclasses

import figure2
import figure4
import pandas as pd
import statements
import xarray as xr
from reproduction import POLICIES, RADII_M, Block, Study, grid, main
from verdicts import FAILS, HOLDS, UNDECIDED

from fcjax import Job, console, data, policies


def plan(loaded: data.Dataset, seeds: int) -> list[Job]:
    jobs = grid(loaded, POLICIES, seeds, radius_m=RADII_M)
    jobs += figure2.plan(loaded, seeds) + figure4.plan(loaded, seeds)
    if loaded.name == "mnist":
        others = {f"rd-{n}": policies.random(n) for n in statements.RANDOM_NUMBERS if n != 3}
        jobs += grid(loaded, others, seeds, distribution="l2")
    return list({str(job.labels): job for job in jobs}.values())


def evaluate(results: xr.Dataset) -> pd.DataFrame:
    evidence = statements.Evidence(results)
    rows = [
        {"dataset": evidence.dataset, "where": where, "statement": statement, **dataclasses.asdict(figure)}
        for part in statements.ALL
        for where, statement, figure in part(evidence)
    ]
    return pd.DataFrame(rows).drop(columns="margin").assign(seeds=evidence.rows.seed.nunique())


def show(rows: pd.DataFrame) -> list[Block]:
    lines = [["where", "statement", "verdict", "judged by", "needs"]]
    for _, r in rows.iterrows():
        range_ = f" ({r.low:.3g} to {r.high:.3g})" if r.low == r.low else ""
        verdict = r.verdict.upper() if r.verdict != HOLDS else r.verdict
        lines.append([r["where"], r.statement, verdict, f"{r.estimate:.3g}{range_} {r.what}", r.needs])
    counts = rows.verdict.value_counts()
    shown = ", ".join(f"{counts.get(verdict, 0)} {verdict}" for verdict in (HOLDS, FAILS, UNDECIDED))
    return [lines, f"{len(rows)} statements at {rows.seeds[0]} seeds: {shown}."]


def traced(job: Job) -> bool:
    """Selects the runs of Fig. 3."""
    setting = {"policy": "fc", "radius_m": 600.0, "phi": 0.05, "observation_error": 0.0}
    return job.labels["dataset"] == "mnist" and setting.items() <= job.labels.items()


STUDY = Study("claims", __doc__, plan, evaluate, show, None, traced=traced)

if __name__ == "__main__":
    console.leave(main(STUDY))
