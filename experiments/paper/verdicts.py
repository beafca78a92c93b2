"""Verdicts on statements: whether a figure, with its 95% interval over seeds, is what a statement needs it to be."""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
from noise import PUBLISHED_TRIALS

from fcjax.sweeps.metrics import interval

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Range:
    """An estimate and its 95% interval, NaN where there is too little to tell it."""

    estimate: float
    low: float
    high: float

    def __neg__(self) -> "Range":
        return Range(-self.estimate, -self.high, -self.low)


def mean_of(values: np.ndarray) -> Range:
    """The mean of values of independent seeds, by Student's t."""
    mean, half = (float(x) for x in interval(np.asarray(values, float)))
    return Range(mean, mean - half, mean + half)


def resampled(statistic: Callable[[np.ndarray], float], num_seeds: int) -> Range:
    """statistic(indices of seeds), by the bootstrap over seeds: for what is not a mean."""
    estimate = float(statistic(np.arange(num_seeds)))
    if num_seeds < 2:
        return Range(estimate, np.nan, np.nan)
    draws = np.random.default_rng(0).integers(0, num_seeds, (RESAMPLES, num_seeds))
    low, high = np.quantile([statistic(draw) for draw in draws], [0.025, 0.975])
    return Range(estimate, float(low), float(high))


@dataclasses.dataclass(frozen=True)
class Figure(Range):
    """What a statement is judged by."""

    what: str
    needs: str
    verdict: str
    margin: float  # how far the less favourable end of the interval is on the right side; negative if it is not


def at_least(what: str, bound: float, found: Range) -> Figure:
    """Judges whether a figure is at least so much."""
    verdict = HOLDS if found.low >= bound else FAILS if found.high < bound else UNDECIDED
    return Figure(*dataclasses.astuple(found), what, f">= {bound:g}", verdict, found.low - bound)


def more_than(what: str, bound: float, found: Range) -> Figure:
    """Judges whether a figure is more than so much: what is the same is not more."""
    verdict = HOLDS if found.low > bound else FAILS if found.high <= bound else UNDECIDED
    return Figure(*dataclasses.astuple(found), what, f"> {bound:g}", verdict, found.low - bound)


def at_most(what: str, bound: float, found: Range) -> Figure:
    """Judges whether a figure is at most so much."""
    verdict = HOLDS if found.high <= bound else FAILS if found.low > bound else UNDECIDED
    return Figure(*dataclasses.astuple(found), what, f"<= {bound:g}", verdict, bound - found.high)


def as_published(
    what: str, stated: float, found: Range, num_seeds: int, *, resolution: float, rounding: float
) -> Figure:
    """Judges whether a figure is the stated one, as far as the two can be told apart.

    The stated one is of `PUBLISHED_TRIALS` trials with the spread of ours, and rounded. If figures that are further
    apart than the resolution could not be told apart, it is undecided.
    """
    wider = np.sqrt(1 + num_seeds / PUBLISHED_TRIALS)
    below, above = (wider * part + rounding for part in (found.estimate - found.low, found.high - found.estimate))
    apart = found.estimate - stated
    verdict = UNDECIDED
    if apart > below or -apart > above:
        verdict = FAILS
    elif max(below, above) <= resolution:
        verdict = HOLDS
    needs = f"{stated:g}, told to {resolution:g}"
    return Figure(*dataclasses.astuple(found), what, needs, verdict, -abs(apart))


def weakest(figures: Iterable[Figure]) -> Figure:
    """Of figures that all must hold, the one that is furthest from it."""
    return min(figures, key=_order)


def strongest(figures: Iterable[Figure]) -> Figure:
    """Of figures of which one must hold, the one that is nearest to it."""
    return max(figures, key=_order)


def _order(figure: Figure) -> tuple[int, float]:
    return [FAILS, UNDECIDED, HOLDS].index(figure.verdict), float(np.nan_to_num(figure.margin, nan=-np.inf))
