"""Verdicts on statements: whether a figure, with its 95% interval over seeds, meets what a statement needs."""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
from noise import PUBLISHED_TRIALS

from fcjax import metrics

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Range:
    """An estimate and its 95% interval, which is NaN if there are too few values."""

    estimate: float
    low: float
    high: float

    def __neg__(self) -> "Range":
        return Range(-self.estimate, -self.high, -self.low)


def mean_of(values: np.ndarray) -> Range:
    """Returns the mean of values of independent seeds, with Student's t interval."""
    mean, half = (float(x) for x in metrics.interval(np.asarray(values, float)))
    return Range(mean, mean - half, mean + half)


def resampled(statistic: Callable[[np.ndarray], float], num_seeds: int) -> Range:
    """Returns statistic(indices of seeds), with a bootstrap interval over seeds: for statistics other than means."""
    estimate = float(statistic(np.arange(num_seeds)))
    if num_seeds < 2:
        return Range(estimate, np.nan, np.nan)
    draws = np.random.default_rng(0).integers(0, num_seeds, (RESAMPLES, num_seeds))
    low, high = np.quantile([statistic(draw) for draw in draws], [0.025, 0.975])
    return Range(estimate, float(low), float(high))


@dataclasses.dataclass(frozen=True)
class Figure(Range):
    """The figure that a statement is judged by."""

    what: str
    needs: str
    verdict: str
    margin: float  # distance of the interval's less favourable end from the bound; negative on the wrong side


def at_least(what: str, bound: float, found: Range) -> Figure:
    """Judges whether a figure is at least `bound`."""
    verdict = HOLDS if found.low >= bound else FAILS if found.high < bound else UNDECIDED
    return Figure(*dataclasses.astuple(found), what, f">= {bound:g}", verdict, found.low - bound)


def more_than(what: str, bound: float, found: Range) -> Figure:
    """Judges whether a figure is more than `bound`."""
    verdict = HOLDS if found.low > bound else FAILS if found.high <= bound else UNDECIDED
    return Figure(*dataclasses.astuple(found), what, f"> {bound:g}", verdict, found.low - bound)


def at_most(what: str, bound: float, found: Range) -> Figure:
    """Judges whether a figure is at most `bound`."""
    verdict = HOLDS if found.high <= bound else FAILS if found.low > bound else UNDECIDED
    return Figure(*dataclasses.astuple(found), what, f"<= {bound:g}", verdict, bound - found.high)


def as_published(
    what: str, stated: float, found: Range, num_seeds: int, *, resolution: float, rounding: float
) -> Figure:
    """Judges whether a figure agrees with the stated one, within noise.

    The stated figure is taken as the rounded mean of `PUBLISHED_TRIALS` trials with the same spread as ours. The
    verdict is undecided if the noise is larger than the resolution.
    """
    wider = np.sqrt(1 + num_seeds / PUBLISHED_TRIALS)
    below, above = (wider * part + rounding for part in (found.estimate - found.low, found.high - found.estimate))
    apart = found.estimate - stated
    verdict = UNDECIDED
    if apart > below or -apart > above:
        verdict = FAILS
    elif max(below, above) <= resolution:
        verdict = HOLDS
    needs = f"{stated:g} to within {resolution:g}"
    return Figure(*dataclasses.astuple(found), what, needs, verdict, -abs(apart))


def weakest(figures: Iterable[Figure]) -> Figure:
    """Returns the least favourable of several figures that must all hold."""
    return min(figures, key=_order)


def strongest(figures: Iterable[Figure]) -> Figure:
    """Returns the most favourable of several figures, one of which must hold."""
    return max(figures, key=_order)


def _order(figure: Figure) -> tuple[int, float]:
    return [FAILS, UNDECIDED, HOLDS].index(figure.verdict), float(np.nan_to_num(figure.margin, nan=-np.inf))
