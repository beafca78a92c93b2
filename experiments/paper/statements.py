"""The statements in the paper's results section, each with the figure that it is judged by.

"Mostly", "close" and the like are given numbers here, which the column "needs" shows.
"""

from collections.abc import Iterable
from functools import partial

import figure2
import figure4
import figure5
import numpy as np
import pandas as pd
import xarray as xr
from reproduction import PERCENT, POLICIES, RADII_M, distributions, published, stated, summary
from verdicts import Figure, Range, as_published, at_least, at_most, mean_of, more_than, resampled, strongest, weakest

Statement = tuple[str, str, Figure]  # place in the paper, statement, figure that it is judged by

RANDOM_NUMBERS = range(1, 7)  # numbers of devices for RD
accuracy_as_published = partial(as_published, "best accuracy (%)", resolution=1.5, rounding=0.05)


class Evidence:
    """All runs of a data set."""

    def __init__(self, results: xr.Dataset):
        self.results = results
        self.dataset = str(results.dataset.values[0])
        self.distributions = distributions(self.dataset)
        self.rows = summary(results)

    def where(self, policy: str, distribution: str, *, radius_m=600.0, phi=0.05, alpha=0.0) -> np.ndarray:
        """Returns the mask of a setting's runs; phi is ignored for policies without it."""
        rows = self.rows
        same = (rows.policy == policy) & (rows.distribution == distribution) & (rows.radius_m == radius_m)
        return (same & ((rows.phi == phi) | rows.phi.isna()) & (rows.observation_error == alpha)).to_numpy()

    def runs(self, *setting: str, **further: float) -> pd.DataFrame:
        return self.rows[self.where(*setting, **further)].set_index("seed")

    def histories(self, *setting: str, **further: float) -> xr.Dataset:
        return self.results.isel(run=self.where(*setting, **further))


def difference(a: pd.DataFrame, b: pd.DataFrame, column: str = PERCENT) -> Range:
    """Returns a - b, seed by seed: runs with the same seed have the same channels, whose effect cancels."""
    return mean_of((a[column] - b[column]).dropna())


def of_figure2(e: Evidence) -> Iterable[Statement]:
    where = "Fig. 2"
    by_phi = {(d, phi): e.runs("fc", d, phi=phi) for d in e.distributions for phi in figure2.PHIS}
    if e.dataset == "mnist":
        for name, figure in stated("Fig. 2a text")[PERCENT].items():
            found = mean_of(by_phi[name, 0.05][PERCENT])
            yield (
                where,
                f"FC reaches {figure}% for {name}",
                accuracy_as_published(figure, found, len(by_phi[name, 0.05])),
            )
    for name in e.distributions:
        better = [(phi, difference(by_phi[name, phi], by_phi[name, 0.05])) for phi in figure2.PHIS if phi != 0.05]
        if e.dataset == "mnist":
            none = weakest(at_most(f"points of phi {phi:g} over 0.05", 0, found) for phi, found in better)
            yield where, f"phi = 0.05 is the best for {name}", none
        else:
            little = weakest(at_most(f"points of phi {phi:g} over 0.05", 1, found) for phi, found in better)
            yield where, f"phi = 0.05 achieves good performance for {name}", little
        pairs = [*zip(figure2.PHIS, figure2.PHIS[1:], strict=False)]
        steps = [
            at_least(
                f"devices, phi {b:g} minus {a:g}", 0, difference(by_phi[name, b], by_phi[name, a], "mean_scheduled")
            )
            for a, b in pairs
        ]
        least, most = figure2.PHIS[0], figure2.PHIS[-1]
        whole = difference(by_phi[name, most], by_phi[name, least], "mean_scheduled")
        steps.append(more_than(f"devices, phi {most:g} minus {least:g}", 0, whole))
        yield where, f"FC schedules more devices with larger phi for {name}", weakest(steps)
        middle = [phi for phi in figure2.PHIS if 0.02 <= phi <= 0.5]
        apart = [
            at_most(f"points of phi {a:g} over {b:g}", 1, difference(by_phi[name, a], by_phi[name, b]))
            for a in middle
            for b in middle
            if a != b
        ]
        yield where, f"accuracy is not sensitive to phi from 0.02 to 0.5 for {name}", weakest(apart)
    for alpha in figure2.ERRORS:
        errors = [
            (f"{name}, phi {phi:g}", e.runs("fc", name, phi=phi, alpha=alpha), by_phi[name, phi])
            for name in e.distributions
            for phi in figure2.PHIS_WITH_ERRORS
        ]
        same = [
            at_most(f"devices {sign}, {setting}", 0.5, difference(*order, "mean_scheduled"))
            for setting, with_error, exact in errors
            for sign, order in (("more", (with_error, exact)), ("fewer", (exact, with_error)))
        ]
        yield where, f"errors of alpha = {alpha:g} hardly change the number of scheduled devices", weakest(same)
        longer = [
            more_than(f"s longer, {setting}", 0, difference(with_error, exact, "mean_round_s"))
            for setting, with_error, exact in errors
        ]
        yield where, f"errors of alpha = {alpha:g} make rounds longer", weakest(longer)
        lost = [
            at_most(f"points lost, {setting}", 1, difference(exact, with_error))
            for setting, with_error, exact in errors
            if setting.endswith(" 0.05")
        ]
        yield where, f"FC is robust to errors of alpha = {alpha:g}", weakest(lost)
        settings = [(name, phi) for name in e.distributions for phi in figure2.PHIS_WITH_ERRORS]
        by_latency = np.mean([loss_by_latency(e, name, phi, alpha) for name, phi in settings], axis=0)
        words = f"the loss from errors of alpha = {alpha:g} is mostly caused by the round latency"
        yield where, words, more_than("points lost by latency minus otherwise, mean", 0, mean_of(by_latency))


def loss_by_latency(e: Evidence, distribution: str, phi: float, alpha: float) -> np.ndarray:
    """Returns the accuracy lost through longer rounds minus that lost otherwise, in points, for each seed.

    Longer rounds mean fewer rounds. The latency's part is the loss of FC without errors when it stops after as many
    rounds as FC with errors has. The rest of the loss has other causes.
    """
    exact = e.histories("fc", distribution, phi=phi).sortby("seed")
    wrong = e.histories("fc", distribution, phi=phi, alpha=alpha).sortby("seed")
    in_all = exact.accuracy.max("round").values
    number = np.arange(exact.sizes["round"])
    as_many = np.where(number < wrong.rounds.values[:, None], exact.accuracy.values, np.nan)
    cut = np.nanmax(as_many, axis=1)
    return 100 * ((in_all - cut) - (cut - wrong.accuracy.max("round").values))


def rounds_to(target: float, runs: xr.Dataset) -> np.ndarray:
    """Returns the rounds that each run needs to reach an accuracy; if it never does, all its rounds, a lower bound."""
    reached = runs.sortby("seed").accuracy.values >= target
    return np.where(reached.any(1), reached.argmax(1) + 1, runs.sortby("seed").rounds.values).astype(float)


def of_figure3(e: Evidence) -> Iterable[Statement]:
    if e.dataset != "mnist":
        return
    where = "Fig. 3"
    traces = {name: e.histories("fc", name) for name in e.distributions}

    def part(runs: xr.Dataset, trace: str, begin: float, end: float) -> np.ndarray:
        """Returns each run's mean over a part of its rounds."""
        pairs = zip(runs[trace].values, runs.rounds.values, strict=True)
        return np.array([row[int(begin * n) : int(end * n)].mean() for row, n in pairs])

    words = {"scheduled": "the number of scheduled devices", "rho": "rho", "beta": "beta", "delta": "delta"}
    for trace, word in words.items():
        rising = []
        for more, less in zip(e.distributions, e.distributions[1:], strict=False):
            apart = part(traces[more], trace, 0, 1) - part(traces[less], trace, 0, 1)
            rising.append(more_than(f"{more} minus {less}", 0, mean_of(apart)))
        yield where, f"{word} is higher at a higher non-i.i.d. level", weakest(rising)
        falling = []
        for name, runs in traces.items():
            apart = part(runs, trace, 0, 1 / 3) - part(runs, trace, 2 / 3, 1)
            falling.append(more_than(f"first third minus last third, {name}", 0, mean_of(apart)))
        yield where, f"{word} falls during training", weakest(falling)
    for name, runs in traces.items():
        happened = runs.accuracy.notnull().values
        better = 100 * np.sum((runs.tilde_accuracy.values > runs.accuracy.values) & happened, 1) / happened.sum(1)
        yield where, f"w~ is mostly more accurate than w_k for {name}", more_than("% of rounds", 50, mean_of(better))


def of_figure4(e: Evidence) -> Iterable[Statement]:
    where = "Fig. 4"
    every = {name: {n: e.runs(f"fixed-{n}", name) for n in figure4.NUMBERS} for name in e.distributions}
    accuracy = {name: pd.DataFrame({n: runs[PERCENT] for n, runs in by.items()}) for name, by in every.items()}
    best = {name: int(values.mean().idxmax()) for name, values in accuracy.items()}
    for name, values in accuracy.items():
        n = best[name]
        if e.dataset != "mnist" or name != "iid":
            for what, end in (("too few", 1), ("too many", 20)):
                figure = more_than(f"points of n = {n} over n = {end}", 0, mean_of(values[n] - values[end]))
                yield where, f"scheduling {what} devices costs accuracy for {name}", figure
        short = mean_of((values[n] - e.runs("fc", name)[PERCENT]).dropna())
        figure = at_most(f"points of n = {n} over FC", 0.5, short)
        yield where, f"FC is close to the best fixed number for {name}", figure
        over = mean_of((e.runs("centralized", name)[PERCENT] - values[n]).dropna())
        yield where, f"centralized training is an upper bound for {name}", at_least(f"points over n = {n}", 0, over)
    longer = [
        more_than(f"s, n = {n + 1} minus {n}", 0, difference(by[n + 1], by[n], "mean_round_s"))
        for by in every.values()
        for n in figure4.NUMBERS[:-1]
    ]
    yield where, "scheduling more devices makes rounds longer", weakest(longer)
    target = {"mnist": 0.8, "cifar10": 0.35}[e.dataset]
    for name in e.distributions:
        rounds = {n: rounds_to(target, e.histories(f"fixed-{n}", name)) for n in (2, 5, 10, 20)}
        fewer = [
            more_than(f"rounds to {100 * target:g}%, n = {a} minus n = {b}", 0, mean_of(rounds[a] - rounds[b]))
            for a, b in zip(rounds, list(rounds)[1:], strict=False)
        ]
        yield where, f"with more devices, fewer rounds are needed for {name}", weakest(fewer)
    growing = []
    for more, less in zip(e.distributions, e.distributions[1:], strict=False):

        def apart(seeds: np.ndarray, more=more, less=less) -> float:
            """Returns the difference of the best numbers, for some seeds."""
            best_of = (accuracy[name].to_numpy()[seeds].mean(0).argmax() for name in (more, less))
            return float(np.subtract(*best_of))

        found = resampled(apart, len(accuracy[more]))
        growing.append(more_than(f"best n, {more} ({best[more]}) minus {less} ({best[less]})", 0, found))
    yield where, "the best fixed number grows with the non-i.i.d. level", weakest(growing)


def of_figure5(e: Evidence) -> Iterable[Statement]:
    if e.dataset != "mnist":
        return
    uneven, *_, even = e.distributions
    at600 = {name: e.runs(name, uneven) for name in POLICIES}
    at200 = {name: e.runs(name, even, radius_m=200.0) for name in POLICIES}
    curves = {name: figure5.curves(e.histories(name, uneven)) for name in POLICIES}
    curves_at200 = {name: figure5.curves(e.histories(name, even, radius_m=200.0)) for name in POLICIES}
    num_seeds = len(at600["fc"])
    others = [name for name in POLICIES if name != "fc"]

    def reached(name: str, seeds: np.ndarray) -> float:
        """Returns when the mean over some seeds reaches 80%; if it never does, the budget, a lower bound."""
        times, values = curves[name]
        time = figure5.time_to(0.8, times, values[seeds].mean(0))
        return time if time == time else float(times[-1])

    def later(name: str, other: str) -> Range:
        return resampled(lambda seeds: reached(name, seeds) - reached(other, seeds), num_seeds)

    for name in ("fc", "pf"):
        figure = stated("Fig. 5a text", name)["time_to_80_percent_s"]
        found = resampled(partial(reached, name), num_seeds)
        verdict = as_published("s", figure, found, num_seeds, resolution=10, rounding=0.005)
        yield "Fig. 5a", f"{name} reaches 80% after {figure} s (l1, R = 600 m)", verdict
    yield "Fig. 5a", "FC reaches 80% before PF (l1, R = 600 m)", more_than("s of PF after FC", 0, later("pf", "fc"))
    slower = [more_than(f"s of {name} after PF", 0, later(name, "pf")) for name in others if name != "pf"]
    yield "Fig. 5a", "all other policies take longer than PF to reach 80% (l1, R = 600 m)", weakest(slower)
    for name, column, unit, resolution in (
        ("fc", "mean_scheduled", "devices", 0.5),
        ("fc", "mean_round_s", "s", 0.03),
        ("pf", "mean_round_s", "s", 0.1),
    ):
        figure = stated("Fig. 5b text", name)[column]
        found = mean_of(at600[name][column])
        verdict = as_published(unit, figure, found, num_seeds, resolution=resolution, rounding=0.005)
        yield "Fig. 5b", f"{name} has {figure} {unit} per round on average (l1, R = 600 m)", verdict
    for where, runs, radius_m, distribution, names in (
        ("Fig. 5a", at600, 600, uneven, ("rd", "pf", "cs-l", "as-l")),
        ("Fig. 5c", at200, 200, even, ("rd", "pf", "cs-h", "as-h")),
    ):
        setting = {"dataset": e.dataset, "radius_m": radius_m, "distribution": distribution}
        cells = {c["policy"]: c[PERCENT] for c in published()["table3"] if setting.items() <= c.items()}
        words = f"({distribution}, R = {radius_m} m)"
        found = mean_of(runs["fc"][PERCENT])
        yield where, f"FC attains {cells['fc']}% {words}", accuracy_as_published(cells["fc"], found, num_seeds)
        over = [more_than(f"points over {name}", 0, difference(runs["fc"], runs[name])) for name in names]
        yield where, f"FC is more accurate than {', '.join(names)} {words}", weakest(over)
        for name in names:
            margin = round(cells["fc"] - cells[name], 1)
            found = difference(runs["fc"], runs[name])
            # A resolution of half the margin, so that a margin of the other sign never agrees.
            verdict = as_published("points", margin, found, num_seeds, resolution=margin / 2, rounding=0.1)
            yield where, f"FC is {margin} points above {name} {words}", verdict

    def slower_by(of: dict, name: str) -> Range:
        """Returns how far below FC a policy is, averaged over time, in points."""
        return mean_of(100 * (of["fc"][1].mean(1) - of[name][1].mean(1)))

    for where, of, runs, names, words, sign, setting in (
        ("Fig. 5a, b", curves, at600, ("cs-l", "as-l"), "too few", 1, "l1, R = 600 m"),
        ("Fig. 5c, d", curves_at200, at200, ("cs-h", "as-h"), "too many", -1, "iid, R = 200 m"),
    ):
        number = [
            more_than(
                f"devices {'fewer' if sign > 0 else 'more'} than FC, {name}",
                0,
                difference(*(runs["fc"], runs[name])[::sign], "mean_scheduled"),
            )
            for name in names
        ]
        behind = [more_than(f"points below FC in the mean over time, {name}", 0, slower_by(of, name)) for name in names]
        yield where, f"{' and '.join(names)} schedule {words} devices ({setting})", weakest(number)
        yield where, f"{' and '.join(names)} converge slower than FC ({setting})", weakest(behind)
    shorter = [
        more_than(f"s of {name} longer", 0, difference(at600[name], at600["fc"], "mean_round_s"))
        for name in ("rd", "pf")
    ]
    yield "Fig. 5b", "FC has shorter rounds than RD and PF (l1, R = 600 m)", weakest(shorter)
    channel, compute = (
        {name: e.histories(name, uneven)[f"log10_{trace}_of_scheduled"].values for name in ("fc", "rd", "pf")}
        for trace in ("gain", "compute_s")
    )
    louder = more_than("dB over RD", 0, mean_of(10 * (channel["fc"] - channel["rd"])))
    yield "Fig. 5", "FC schedules devices with better channels (l1, R = 600 m)", louder
    faster = [
        more_than(f"times as long, {name}", 1, mean_of(10 ** (compute[name] - compute["fc"]))) for name in ("rd", "pf")
    ]
    yield "Fig. 5", "FC schedules devices that compute faster (l1, R = 600 m)", weakest(faster)
    three = e.runs("rd", "l2")
    best = [
        at_least(f"points of n = 3 over {n}", 0, difference(three, e.runs(f"rd-{n}", "l2")))
        for n in RANDOM_NUMBERS
        if n != 3
    ]
    yield "Sec. IV-C", "3 is the best number of devices for RD (l2, R = 600 m)", weakest(best)


def of_table3(e: Evidence) -> Iterable[Statement]:
    where = "Table III"
    others = [name for name in POLICIES if name != "fc"]
    ahead = {}  # lead of FC over each policy, by setting
    for radius_m in RADII_M:
        for name in e.distributions:
            fc = e.runs("fc", name, radius_m=radius_m)
            ahead[radius_m, name] = {p: difference(fc, e.runs(p, name, radius_m=radius_m)) for p in others}
    # Not "high >= 0": with one seed the interval is NaN, and FC may be the best.
    perhaps = sum(not any(over.high < 0 for over in cell.values()) for cell in ahead.values())
    surely = sum(all(over.low > 0 for over in cell.values()) for cell in ahead.values())
    best = sum(all(over.estimate >= 0 for over in cell.values()) for cell in ahead.values())
    most = at_least(f"settings of {len(ahead)}", len(ahead) // 2 + 1, Range(best, surely, perhaps))
    yield where, "FC has the highest accuracy under most settings", most
    little = [
        at_most(f"points of {p} over FC, {name}, R = {radius_m:g} m", 0.2, -over)
        for (radius_m, name), cell in ahead.items()
        for p, over in cell.items()
    ]
    yield where, "another policy is at most 0.2 points more accurate than FC", weakest(little)
    named = {
        "mnist": {(200.0, "l2"): ("cs-l", "as-l"), (1000.0, "l1"): ("cs-h", "as-h")},
        "cifar10": {(1000.0, "l5"): ("cs-h",)},
    }[e.dataset]
    for (radius_m, name), policies in named.items():
        similar = [at_most(f"points of FC over {p}", 0.5, ahead[radius_m, name][p]) for p in policies]
        words = f"{' and '.join(policies)} are similar to FC or better ({name}, R = {radius_m:g} m)"
        yield where, words, weakest(similar)
    for p in ("cs-l", "cs-h", "as-l", "as-h"):
        somewhere = [
            more_than(f"points below FC, {name}, R = {radius_m:g} m", 1, cell[p])
            for (radius_m, name), cell in ahead.items()
        ]
        yield where, f"{p} loses notably under some settings", strongest(somewhere)


ALL = (of_figure2, of_figure3, of_figure4, of_figure5, of_table3)
