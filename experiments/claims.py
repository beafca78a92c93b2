"""Checks what the results section of the paper states in words, on runs of the same settings.

Each statement comes down to a figure that must be at least, or at most, or the same as another. It holds if all of the
figure's 95% interval over seeds says so, does not hold if none of it does, and is undecided otherwise. Policies are
compared seed by seed: runs of one seed meet the same channels, data and mini-batches. What is the same as published
lies within the interval of two means of so many trials; the published ones are of 5, with a spread taken to be ours.
Where a statement names several figures, the least favourable one is told. "Mostly", "close" and the like are given a
number, which stands under "needs".
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import figure2
import figure3
import figure4
import figure5
import numpy as np
import pandas as pd
import xarray as xr
from console import leave
from reproduction import (
    PERCENT,
    POLICIES,
    RADII_M,
    Study,
    distributions,
    grid,
    main,
    published,
    summary,
    table,
)
from verdicts import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Figure,
    Range,
    as_published,
    at_least,
    at_most,
    mean_of,
    resampled,
    weakest,
)

from fcjax.data import Dataset
from fcjax.engine import Job


class Evidence:
    """All runs of a data set, and figures about them."""

    def __init__(self, results: xr.Dataset):
        self.results = results
        self.dataset = str(results.dataset.values[0])
        self.distributions = distributions(self.dataset)
        self.rows = summary(results)

    def where(self, policy: str, distribution: str, *, radius_m=600.0, phi=0.05, alpha=0.0) -> np.ndarray:
        """Which runs are of a setting."""
        rows = self.rows
        same_phi = (rows.phi == phi) | rows.phi.isna()
        same = (rows.policy == policy) & (rows.distribution == distribution) & (rows.radius_m == radius_m)
        return (same & same_phi & (rows.observation_error == alpha)).to_numpy()

    def runs(self, *setting: str, **further: float) -> pd.DataFrame:
        return self.rows[self.where(*setting, **further)]

    def histories(self, *setting: str, **further: float) -> xr.Dataset:
        return self.results.isel(run=self.where(*setting, **further))


def difference(a: pd.DataFrame, b: pd.DataFrame, column: str = PERCENT) -> Range:
    """A - b, seed by seed: runs of one seed meet the same channels, and what these add to both is not in it."""
    return mean_of((a.set_index("seed")[column] - b.set_index("seed")[column]).dropna())


Statement = tuple[str, str, Figure]  # where it stands, what it says, what it is judged by


def stated_of(where: str, policy: str = "fc") -> dict:
    """What the paper says in words."""
    entries = [entry for entry in published()["text"] if entry["where"] == where]
    return next(entry for entry in entries if entry.get("policy", policy) == policy)


def published_cells(dataset: str, radius_m: float, distribution: str) -> list[dict]:
    """A setting's cells of the published Table III."""
    setting = {"dataset": dataset, "radius_m": radius_m, "distribution": distribution}
    return [cell for cell in published()["table3"] if setting.items() <= cell.items()]


def of_figure2(e: Evidence) -> Iterable[Statement]:
    where = "Fig. 2"
    middle = [phi for phi in figure2.PHIS if 0.02 <= phi <= 0.5]
    by_phi = {(d, phi): e.runs("fc", d, phi=phi) for d in e.distributions for phi in figure2.PHIS}
    if e.dataset == "mnist":
        for name, stated in stated_of("Fig. 2a text")[PERCENT].items():
            values = by_phi[name, 0.05][PERCENT]
            figure = as_published("best accuracy (%)", stated, mean_of(values), len(values), 1.5)
            yield where, f"FC reaches {stated}% for {name}", figure
        for name in e.distributions:
            others = [phi for phi in figure2.PHIS if phi != 0.05]
            figure = weakest(
                at_least(f"phi 0.05 over {phi:g}, points", 0, difference(by_phi[name, 0.05], by_phi[name, phi]))
                for phi in others
            )
            yield where, f"phi = 0.05 is the best for {name}", figure
    for name in e.distributions:
        steps = []
        for a, b in zip(figure2.PHIS, figure2.PHIS[1:], strict=False):
            more = difference(by_phi[name, b], by_phi[name, a], "mean_scheduled")
            steps.append(at_least(f"devices more at phi {b:g} than {a:g}", 0, more))
        yield where, f"FC schedules more devices with larger phi for {name}", weakest(steps)
        ranges = [
            at_most(f"phi {a:g} over {b:g}, points", 1, difference(by_phi[name, a], by_phi[name, b]))
            for a in middle
            for b in middle
            if a != b
        ]
        yield where, f"accuracy is not sensitive to phi from 0.02 to 0.5 for {name}", weakest(ranges)
    for alpha in figure2.ERRORS:
        pairs = [
            (name, phi, e.runs("fc", name, phi=phi, alpha=alpha), by_phi[name, phi])
            for name in e.distributions
            for phi in figure2.PHIS_WITH_ERRORS
        ]
        same = [
            at_most(f"devices {sign} at {name}, phi {phi:g}", 0.5, difference(*order, "mean_scheduled"))
            for name, phi, with_error, exact in pairs
            for sign, order in (("more", (with_error, exact)), ("fewer", (exact, with_error)))
        ]
        yield where, f"errors of alpha = {alpha:g} leave the number of scheduled devices almost the same", weakest(same)
        longer = [
            at_least(f"s longer at {name}, phi {phi:g}", 0, difference(with_error, exact, "mean_round_s"))
            for name, phi, with_error, exact in pairs
        ]
        yield where, f"errors of alpha = {alpha:g} make rounds longer", weakest(longer)
        lost = [
            at_most(f"points lost at {name}, phi 0.05", 1, difference(exact, with_error))
            for name, phi, with_error, exact in pairs
            if phi == 0.05
        ]
        yield where, f"FC is robust to errors of alpha = {alpha:g}", weakest(lost)


def of_figure3(e: Evidence) -> Iterable[Statement]:
    where = "Fig. 3"
    traces = {name: figure3.traces(e.histories("fc", name))[name] for name in e.distributions}

    def part(runs: xr.Dataset, trace: str, begin: float, end: float) -> np.ndarray:
        """Of each run the mean over a part of its rounds."""
        pairs = zip(runs[trace].values, runs.rounds.values, strict=True)
        return np.array([row[int(begin * n) : int(end * n)].mean() for row, n in pairs])

    words = {"scheduled": "the number of scheduled devices", "rho": "rho", "beta": "beta", "delta": "delta"}
    for trace, word in words.items():
        rising = []
        for more, less in zip(e.distributions, e.distributions[1:], strict=False):
            apart = part(traces[more], trace, 0, 1) - part(traces[less], trace, 0, 1)
            rising.append(at_least(f"{more} over {less}", 0, mean_of(apart)))
        yield where, f"{word} is higher at a higher non-i.i.d. level", weakest(rising)
        falling = []
        for name, runs in traces.items():
            apart = part(runs, trace, 0, 1 / 3) - part(runs, trace, 2 / 3, 1)
            falling.append(at_least(f"first third over last, {name}", 0, mean_of(apart)))
        yield where, f"{word} falls during training", weakest(falling)
    mostly = []
    for name, runs in traces.items():
        happened = runs.round_s.notnull().values
        better = 100 * np.sum((runs.tilde_accuracy.values > runs.accuracy.values) & happened, 1) / happened.sum(1)
        mostly.append(at_least(f"% of rounds, {name}", 50, mean_of(better)))
    yield where, "w~ is mostly more accurate than w_k", weakest(mostly)


def of_figure4(e: Evidence) -> Iterable[Statement]:
    where = "Fig. 4"
    fixed = {
        name: pd.DataFrame({n: e.runs(f"fixed-{n}", name).set_index("seed")[PERCENT] for n in figure4.NUMBERS})
        for name in e.distributions
    }
    best = {name: int(runs.mean().idxmax()) for name, runs in fixed.items()}
    for name, runs in fixed.items():
        n = best[name]
        if e.dataset != "mnist" or name != "iid":
            for what, end in (("too few", 1), ("too many", 20)):
                lost = mean_of(runs[n] - runs[end])
                figure = at_least(f"points of n = {n} over n = {end}", 0, lost)
                yield where, f"scheduling {what} devices costs accuracy for {name}", figure
        fc = e.runs("fc", name).set_index("seed")[PERCENT]
        short = mean_of(runs[n] - fc)
        yield (
            where,
            f"FC is close to the best fixed number for {name}",
            at_most(f"points of n = {n} over FC", 0.5, short),
        )
        central = e.runs("centralized", name).set_index("seed")[PERCENT]
        over = mean_of(central - runs[n])
        yield where, f"centralized training is an upper bound for {name}", at_least(f"points over n = {n}", 0, over)

    growing = []
    for more, less in zip(e.distributions, e.distributions[1:], strict=False):

        def apart(seeds: np.ndarray, more=more, less=less) -> float:
            """By how much the best number differs, for some seeds."""
            best_of = (fixed[name].to_numpy()[seeds].mean(0).argmax() for name in (more, less))
            return float(np.subtract(*best_of))

        found = resampled(apart, len(fixed[more]))
        growing.append(at_least(f"best n, {more} ({best[more]}) less {less} ({best[less]})", 0, found))
    yield where, "the best fixed number grows with the non-i.i.d. level", weakest(growing)


def of_figure5(e: Evidence) -> Iterable[Statement]:
    uneven, *_, even = e.distributions
    if e.dataset != "mnist":
        return
    at600 = {name: e.runs(name, uneven) for name in POLICIES}
    at200 = {name: e.runs(name, even, radius_m=200.0) for name in POLICIES}
    curves = {name: figure5.curves(e.histories(name, uneven)) for name in POLICIES}
    num_seeds = len(at600["fc"])

    def reached(name: str, seeds: np.ndarray) -> float:
        """When the mean over some seeds reaches 80%; if it never does, the budget, which is too early."""
        times, values = curves[name]
        time = figure5.time_to(0.8, times, values[seeds].mean(0))
        return time if time == time else float(times[-1])

    for name in ("fc", "pf"):
        stated = stated_of("Fig. 5a text", name)["time_to_80_percent_s"]
        found = resampled(partial(reached, name), num_seeds)
        figure = as_published("s", stated, found, num_seeds, 10)
        yield "Fig. 5a", f"{name} reaches 80% after {stated} s (l1, R = 600 m)", figure
    slower = []
    for name in POLICIES:
        if name not in ("fc", "pf"):
            found = resampled(lambda seeds, name=name: reached(name, seeds) - reached("pf", seeds), num_seeds)
            slower.append(at_least(f"s of {name} after PF", 0, found))
    yield "Fig. 5a", "all other policies need longer than PF to 80%", weakest(slower)
    for name, column, resolution in (
        ("fc", "mean_scheduled", 0.5),
        ("fc", "mean_round_s", 0.03),
        ("pf", "mean_round_s", 0.1),
    ):
        stated = stated_of("Fig. 5b text", name)[column]
        figure = as_published(column, stated, mean_of(at600[name][column]), num_seeds, resolution)
        yield "Fig. 5b", f"{name}: {column} is {stated} (l1, R = 600 m)", figure
    for where, runs, radius_m, distribution, names in (
        ("Fig. 5a", at600, 600, uneven, ("rd", "pf", "cs-l", "as-l")),
        ("Fig. 5c", at200, 200, even, ("rd", "pf", "cs-h", "as-h")),
    ):
        setting = f"{distribution}, R = {radius_m} m"
        cells = {c["policy"]: c[PERCENT] for c in published_cells(e.dataset, radius_m, distribution)}
        margins = {name: round(cells["fc"] - cells[name], 1) for name in names}
        over = [at_least(f"points over {name}", 0, difference(runs["fc"], runs[name])) for name in margins]
        yield where, f"FC is more accurate than {', '.join(margins)} ({setting})", weakest(over)
        for name, stated in margins.items():
            apart = runs["fc"].set_index("seed")[PERCENT] - runs[name].set_index("seed")[PERCENT]
            figure = as_published("points", stated, mean_of(apart), num_seeds, 3)
            yield where, f"FC is {stated} points above {name} ({setting})", figure
    shorter = [
        at_least(f"s of {name} longer", 0, difference(at600[name], at600["fc"], "mean_round_s"))
        for name in ("rd", "pf")
    ]
    yield "Fig. 5b", "FC has shorter rounds than RD and PF (l1, R = 600 m)", weakest(shorter)
    few = [
        at_least(f"devices fewer than FC, {name}", 0, difference(at600["fc"], at600[name], "mean_scheduled"))
        for name in ("cs-l", "as-l")
    ]
    yield "Fig. 5b", "CS-l and AS-l schedule too few devices (l1, R = 600 m)", weakest(few)
    many = [
        at_least(f"devices more than FC, {name}", 0, difference(at200[name], at200["fc"], "mean_scheduled"))
        for name in ("cs-h", "as-h")
    ]
    yield "Fig. 5d", "CS-h and AS-h schedule too many devices (iid, R = 200 m)", weakest(many)


def of_table3(e: Evidence) -> Iterable[Statement]:
    where = "Table III"
    others = [name for name in POLICIES if name != "fc"]
    behind = {}  # how far FC is ahead of each policy, by setting
    for radius_m in RADII_M:
        for name in e.distributions:
            fc = e.runs("fc", name, radius_m=radius_m)
            behind[radius_m, name] = {p: difference(fc, e.runs(p, name, radius_m=radius_m)) for p in others}
    surely = sum(all(ahead.low > 0 for ahead in cell.values()) for cell in behind.values())
    perhaps = sum(all(ahead.high >= 0 for ahead in cell.values()) for cell in behind.values())
    best = sum(all(ahead.estimate >= 0 for ahead in cell.values()) for cell in behind.values())
    figure = at_least(f"settings of {len(behind)}", len(behind) // 2 + 1, Range(best, surely, perhaps))
    yield where, "FC has the highest accuracy under most settings", figure
    ahead_of_fc = [
        at_most(f"points of {p} over FC, {name}, R = {radius_m:g} m", 0.2, -ahead)
        for (radius_m, name), cell in behind.items()
        for p, ahead in cell.items()
    ]
    yield where, "where another policy is more accurate than FC, it is by 0.2 points at most", weakest(ahead_of_fc)
    for p in ("cs-l", "cs-h", "as-l", "as-h"):
        (radius_m, name), ahead = max(((setting, cell[p]) for setting, cell in behind.items()), key=lambda x: x[1].low)
        figure = at_least(f"points below FC, {name}, R = {radius_m:g} m", 1, ahead)
        yield where, f"{p} loses notably under some settings", figure


def plan(loaded: Dataset, seeds: int) -> list[Job]:
    jobs = grid(loaded, POLICIES, seeds, radius_m=RADII_M)
    jobs += figure2.plan(loaded, seeds) + figure4.plan(loaded, seeds)
    return list({str(job.labels): job for job in jobs}.values())


def tell(results: xr.Dataset) -> pd.DataFrame:
    evidence = Evidence(results)
    parts: Sequence[Callable] = (of_figure2, of_figure3, of_figure4, of_figure5, of_table3)
    rows = [
        {"dataset": evidence.dataset, "where": where, "statement": statement, **dataclasses.asdict(figure)}
        for part in parts
        for where, statement, figure in part(evidence)
    ]
    return pd.DataFrame(rows).drop(columns="margin").assign(seeds=evidence.rows.seed.nunique())


def judged_by(row: pd.Series) -> str:
    """The figure of a statement, with its interval."""
    range_ = f" ({row.low:.3g} to {row.high:.3g})" if row.low == row.low else ""
    return f"{row.estimate:.3g}{range_} {row.what}"


def show(rows: pd.DataFrame) -> str:
    lines = [["where", "statement", "verdict", "judged by", "needs"]]
    lines += [[r["where"], r.statement, r.verdict.upper(), judged_by(r), r.needs] for _, r in rows.iterrows()]
    counts = rows.verdict.value_counts()
    told = ", ".join(f"{counts.get(verdict, 0)} {verdict}" for verdict in (HOLDS, FAILS, UNDECIDED))
    return f"{table(lines, left=True)}\n\n{len(rows)} statements: {told}"


STUDY = Study("claims", __doc__, plan, tell, show, None)

if __name__ == "__main__":
    leave(main(STUDY))
