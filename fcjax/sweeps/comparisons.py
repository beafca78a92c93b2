"""Statistics over seeds: the interval of a mean, comparisons of policies, Holm's correction; see `fcjax.metrics`."""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import xarray as xr
from scipy import special  # its stats would take half a second to import

from fcjax.sweeps.results import SETTINGS, checked, further_axes

_LEVEL = 0.95
_MOST_SEEDS = 10**12
LEAST_SEEDS = 3  # for showing an interval: for two runs, its half width is six times their difference
_COLUMNS = ("a", "b", "difference", "low", "high", "probability", "seeds", "seeds_to_settle", "p_value")
Measure = Callable[[xr.Dataset], xr.DataArray]


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean and the half width of its 95% interval (Student's t) along the first axis, ignoring NaN.

    The half width is NaN for fewer than two values.
    """
    count = np.sum(~np.isnan(values), axis=0)
    some = np.maximum(count, 1)
    mean = np.where(count > 0, np.nansum(values, axis=0) / some, np.nan)
    squares = np.nansum((values - mean) ** 2, axis=0)
    variance = squares / np.maximum(count - 1, 1)
    half = special.stdtrit(np.maximum(count - 1, 1), (1 + _LEVEL) / 2) * np.sqrt(variance / some)
    return mean, np.where(count > 1, half, np.nan)


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """How a metric differs between policies a and b over common seeds. Whether larger is better depends on the metric.

    Attributes:
      a: name of the first policy.
      b: name of the second policy.
      metric: name of the metric.
      difference: mean of a - b.
      deviation: standard deviation of a - b over seeds.
      seeds: number of common seeds.
    """

    a: str
    b: str
    metric: str
    difference: float
    deviation: float
    seeds: int

    @property
    def low(self) -> float:
        """The lower end of the 95% interval of the mean difference (Student's t)."""
        return self.difference - self._half(self.seeds)

    @property
    def high(self) -> float:
        """The upper end of the 95% interval of the mean difference (Student's t)."""
        return self.difference + self._half(self.seeds)

    @property
    def probability(self) -> float:
        """The posterior probability that a is higher than b in the mean.

        This is Student's distribution function, for normal differences and a prior that is flat in their mean and in
        the logarithm of their standard deviation.
        """
        return float(special.stdtr(self.seeds - 1, self._t))

    @property
    def p_value(self) -> float:
        """The two-sided p-value of the paired t-test."""
        return float(2 * special.stdtr(self.seeds - 1, -abs(self._t)))

    @property
    def verdict(self) -> str:
        """What is known of a: "higher" or "lower" if the interval excludes 0, else "undecided"."""
        return "higher" if self.low > 0 else "lower" if self.high < 0 else "undecided"

    @property
    def seeds_to_settle(self) -> float:
        """The least number of seeds whose 95% interval would exclude 0, with this mean and standard deviation.

        It includes the seeds that have already run, and is inf if the mean difference is 0. Mean and standard deviation
        are estimates, so with few seeds it is a rough guide.
        """
        if self.difference == 0:
            return math.inf
        counts = range(2, _MOST_SEEDS)  # the half width falls as seeds are added
        place = bisect.bisect_left(counts, True, key=lambda count: self._half(count) < abs(self.difference))
        return counts[place] if place < len(counts) else math.inf

    @property
    def _t(self) -> float:
        if self.deviation == 0:
            return math.copysign(math.inf, self.difference) if self.difference else 0.0
        return self.difference / self.deviation * math.sqrt(self.seeds)

    def _half(self, seeds: int) -> float:
        return float(special.stdtrit(seeds - 1, (1 + _LEVEL) / 2)) * self.deviation / math.sqrt(seeds)

    def __str__(self) -> str:
        ends = f"95% interval {self.low:+.4g} to {self.high:+.4g}, {self.seeds} seeds"
        known = f"{self.verdict}, probability of higher {self.probability:.3g}"
        number = f"{self.seeds_to_settle:.0f}" if math.isfinite(self.seeds_to_settle) else "no number of"
        more = f"; {number} seeds would settle it" if self.verdict == "undecided" else ""
        return f"{self.metric}, {self.a} - {self.b}: {self.difference:+.4g} ({ends}): {known}{more}"

    def __repr__(self) -> str:
        return f"<Comparison {self}>"


def holm(p_values: np.ndarray) -> np.ndarray:
    """Corrects p-values for their number.

    Those below 0.05 after the correction are significant; the chance of finding any where there is none is at most 5%,
    however the comparisons depend on each other. Holm, "A simple sequentially rejective multiple test procedure",
    Scandinavian Journal of Statistics, 1979.
    """
    p_values = np.asarray(p_values, float)
    order = np.argsort(p_values)
    corrected = np.empty_like(p_values)
    corrected[order] = np.maximum.accumulate(p_values[order] * np.arange(p_values.size, 0, -1)).clip(max=1)
    return corrected


def compare(results: xr.Dataset, a: str, b: str, measure: Measure, metric: str) -> Comparison:
    """Compares two policies in results with one setting; see `fcjax.metrics.paired`."""
    results = checked(results)
    labels = labels_of(results)
    for name in (a, b):
        if name not in set(labels.policy):
            raise ValueError(f"there is no policy {name!r} in these results: use {', '.join(labels.policy.unique())}")
    mine = labels.policy.isin((a, b)).to_numpy()
    if varies := _varying(labels[mine]):
        value = labels[mine][varies[0]].iloc[0]
        value = value.item() if isinstance(value, np.generic) else value
        select = f"results.isel(run=(results[{varies[0]!r}] == {value!r}).values)"
        raise ValueError(f"select one value of {', '.join(varies)} first, as in {select}, or use paired_table")
    by_seed = _by_seed(_measured(results.isel(run=mine), labels[mine], measure, metric))
    values = _common(by_seed[a], by_seed[b])
    if len(values) < 2:
        raise ValueError(f"{a} and {b} need at least 2 common seeds, got {len(values)}")
    return _compared(values, a, b, metric)


def compare_all(results: xr.Dataset, measure: Measure, metric: str) -> pd.DataFrame:
    """Compares all pairs of policies in each setting; see `fcjax.metrics.paired_table`."""
    results = checked(results)
    labels = labels_of(results)
    rows, varies = _measured(results, labels, measure, metric), _varying(labels)
    groups = rows.groupby(varies, sort=False, dropna=False) if varies else [((), rows)]
    lines = []
    for setting, runs in groups:
        for (a, of_a), (b, of_b) in itertools.combinations(_by_seed(runs).items(), 2):
            values = _common(of_a, of_b)
            if len(values) < 2:
                continue
            found = _compared(values, a, b, metric)
            lines.append(dict(zip(varies, setting, strict=True)) | {name: getattr(found, name) for name in _COLUMNS})
    if not lines:
        raise ValueError("no two policies have 2 common seeds in any setting of these results")
    table = pd.DataFrame(lines)
    table["p_holm"] = holm(table.p_value.to_numpy())
    direction = np.where(table.difference > 0, "higher", "lower")
    table["verdict"] = np.where(table.p_holm < 1 - _LEVEL, direction, "undecided")
    return table


def labels_of(results: xr.Dataset) -> pd.DataFrame:
    """Returns the settings of each run. A policy with several phi becomes several, such as "fc(phi=0.5)"."""
    rows = pd.DataFrame({name: results[name].values for name in (*SETTINGS, *further_axes(results))})
    several = rows.groupby("policy").phi.transform("nunique") > 1
    named = [f"{policy}(phi={phi})" for policy, phi in zip(rows.policy, rows.phi.tolist(), strict=True)]
    return rows.assign(policy=rows.policy.where(~several, named)).drop(columns="phi")


def _measured(results: xr.Dataset, labels: pd.DataFrame, measure: Measure, metric: str) -> pd.DataFrame:
    """Adds a metric to the settings of each run."""
    values = measure(results)
    if values.dims != ("run",) or values.size != len(labels):
        raise ValueError(
            f"{metric} must have one value per run, got dimensions {dict(values.sizes)}: give a function that reduces "
            "the others, such as lambda results: fcjax.metrics.energy(results).sum('device')"
        )
    return labels.assign(value_=values.values.astype(float))


def _varying(rows: pd.DataFrame) -> list[str]:
    settings = [name for name in rows if name not in ("policy", "seed")]
    return [name for name in settings if rows[name].nunique(dropna=False) > 1]


def _by_seed(rows: pd.DataFrame) -> dict[str, dict[int, float]]:
    """Returns the values of each policy by seed, for runs of one setting."""
    found: dict[str, dict[int, float]] = {}
    for policy, seed, value in zip(rows.policy, rows.seed, rows.value_, strict=True):
        of_policy = found.setdefault(policy, {})
        if seed in of_policy:
            raise ValueError(f"policy {policy} has several runs with seed {seed}: select one")
        of_policy[seed] = value
    return found


def _common(of_a: dict[int, float], of_b: dict[int, float]) -> np.ndarray:
    """Returns the values under common seeds; (seed, 2)."""
    return np.array([(value, of_b[seed]) for seed, value in of_a.items() if seed in of_b]).reshape(-1, 2)


def _compared(values: np.ndarray, a: str, b: str, metric: str) -> Comparison:
    if infinite := int(np.isinf(values).any(axis=1).sum()):
        what = f"{metric} is infinite for {infinite} of {len(values)} seeds"
        raise ValueError(f"{what}: pass censored='budget', which compares restricted means")
    if missing := int(np.isnan(values).any(axis=1).sum()):
        raise ValueError(f"{metric} is NaN for {missing} of {len(values)} seeds: select the runs that have it")
    difference = values[:, 0] - values[:, 1]
    return Comparison(a, b, metric, float(difference.mean()), float(difference.std(ddof=1)), len(difference))
