"""How far two tables of accuracies would be apart by chance alone.

Ours has the mean of n seeds in each cell, the published one the mean of 5 trials, rounded to 0.1. The spread of the
published trials is not known; it is taken to be ours. If both were drawn from the same distribution, a cell's
difference would have the standard error s sqrt(1/n + 1/5), with rounding added. Each cell is tested by Student's t. The
test of a whole table asks how often two tables that are resampled from our own seeds are further apart than the two.
Seeds are drawn for all cells together, because policies of one seed meet the same data and channels, so that their
errors are correlated. If every published cell had trials of its own, chance would vary less, and p would be smaller.
"""

import dataclasses

import numpy as np
from scipy import stats

PUBLISHED_TRIALS = 5
ROUNDING = 0.1  # of the published figures, in points
RESAMPLES = 5000


@dataclasses.dataclass(frozen=True)
class Cells:
    """What chance gives in each cell, (cells,) each."""

    difference: np.ndarray  # ours less published
    error: np.ndarray  # standard error of the difference, by chance
    expected: np.ndarray  # of the absolute difference, by chance
    p: np.ndarray  # of a difference as large as this, two-sided
    p_corrected: np.ndarray  # for there being so many cells (Holm)

    @property
    def standardised(self) -> np.ndarray:
        return self.difference / self.error


@dataclasses.dataclass(frozen=True)
class Table:
    """A table, or a part of it, beside chance."""

    cells: int
    found: float  # mean absolute difference
    floor: float  # its expectation by chance
    p: float  # how often chance gives as much
    bias: float  # mean difference, with its sign
    bias_p: float  # how often chance gives as much, in either direction


def by_cell(values: np.ndarray, published: np.ndarray) -> Cells:
    """values: (cells, seeds), published: (cells,); NaN throughout for one seed, of which nothing is known."""
    seeds = values.shape[1]
    difference = values.mean(1) - published
    if seeds < 2:
        return Cells(difference, *np.full((4, len(published)), np.nan))
    variance = values.var(1, ddof=1) * (1 / seeds + 1 / PUBLISHED_TRIALS) + ROUNDING**2 / 12
    error = np.sqrt(variance)
    p = 2 * stats.t.sf(np.abs(difference) / error, seeds - 1)
    return Cells(difference, error, np.sqrt(2 / np.pi) * error, p, holm(p))


def holm(p: np.ndarray) -> np.ndarray:
    """P-values corrected for their number (Holm 1979): the smallest times m, the next times m - 1, and so on."""
    order = np.argsort(p)
    corrected = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return np.minimum(corrected, 1)[np.argsort(order)]


def whole(values: np.ndarray, published: np.ndarray) -> Table:
    """values: (cells, seeds), published: (cells,)."""
    difference = values.mean(1) - published
    found, bias = float(np.abs(difference).mean()), float(difference.mean())
    seeds = values.shape[1]
    if seeds < 2:
        return Table(len(published), found, np.nan, np.nan, bias, np.nan)
    rng = np.random.default_rng(0)
    # Residuals are shorter than errors, because the mean follows them.
    residual = (values - values.mean(1, keepdims=True)) * np.sqrt(seeds / (seeds - 1))

    def means(count: int) -> np.ndarray:
        """Of so many seeds drawn with replacement, the same for all cells, (cells, resamples)."""
        times = rng.multinomial(count, np.full(seeds, 1 / seeds), RESAMPLES)
        return residual @ times.T / count

    rounding = rng.uniform(-ROUNDING / 2, ROUNDING / 2, (len(published), RESAMPLES))
    chance = means(seeds) - means(PUBLISHED_TRIALS) + rounding
    absolute = np.abs(chance).mean(0)
    return Table(
        cells=len(published),
        found=found,
        floor=float(absolute.mean()),
        p=_frequency(absolute >= found),
        bias=bias,
        bias_p=_frequency(np.abs(chance.mean(0)) >= abs(bias)),
    )


def _frequency(exceeds: np.ndarray) -> float:
    """Counting the table found itself, so that it is never 0."""
    return float((1 + exceeds.sum()) / (1 + exceeds.size))
