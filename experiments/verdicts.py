"""Verdicts on statements: whether a figure, with its 95% interval over seeds, is what a statement needs it to be."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from fcjax.plots import interval

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
PUBLISHED_TRIALS = 5


@dataclasses.dataclass(frozen=True)
class Figure:
    """What a statement is judged by."""

    what: str
    estimate: float
    half: float  # half width of the 95% interval
    needs: str
    verdict: str


def at_least(what: str, bound: float, estimate: float, half: float) -> Figure:
    """Judges whether a figure is at least so much."""
    low, high = estimate - half, estimate + half
    verdict = HOLDS if low >= bound else FAILS if high < bound else UNDECIDED
    return Figure(what, estimate, half, f">= {bound:g}", verdict)


def at_most(what: str, bound: float, estimate: float, half: float) -> Figure:
    """Judges whether a figure is at most so much."""
    low, high = estimate - half, estimate + half
    verdict = HOLDS if high <= bound else FAILS if low > bound else UNDECIDED
    return Figure(what, estimate, half, f"<= {bound:g}", verdict)


def as_published(what: str, stated: float, values: np.ndarray, resolution: float) -> Figure:
    """Judges whether a mean is the stated one, as far as two means of trials can be told apart.

    The stated one is of `PUBLISHED_TRIALS` trials with the spread of ours. If means that are further apart than the
    resolution could not be told apart, it is undecided.
    """
    n = len(values)
    mean, half = (float(x) for x in interval(values))
    apart = half * np.sqrt(1 + n / PUBLISHED_TRIALS)
    verdict = UNDECIDED
    if apart == apart:
        verdict = FAILS if abs(mean - stated) > apart else HOLDS if apart <= resolution else UNDECIDED
    return Figure(what, mean, half, f"{stated:g} ± {apart:.2g}", verdict)


def weakest(figures: Iterable[Figure]) -> Figure:
    """Of the figures that all must hold, the one that is furthest from it."""
    order = [FAILS, UNDECIDED, HOLDS]

    def margin(figure: Figure) -> float:
        bound = float(figure.needs.split()[-1])
        return (figure.estimate - bound) * (1 if figure.needs.startswith(">=") else -1) - figure.half

    return min(figures, key=lambda figure: (order.index(figure.verdict), margin(figure)))
