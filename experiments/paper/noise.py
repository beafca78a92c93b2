"""How far apart two tables of accuracies would be by chance alone.

Each cell of ours is the mean of n seeds; each published cell is the mean of 5 trials, rounded to 0.1. The spread of the
published trials is unknown and assumed equal to ours. If both came from the same distribution, the difference of a cell
would have the standard error s sqrt(1/n + 1/5), plus rounding. Each cell is tested with Student's t. For a whole table,
the test counts how often two tables resampled from our seeds are further apart than ours and the published one. Seeds
are drawn jointly for all cells, because policies with the same seed have the same data and channels, which correlates
their errors. If every published cell had separate trials, chance would vary less, and p would be smaller.
"""

import dataclasses

import numpy as np
from scipy import stats

PUBLISHED_TRIALS = 5
ROUNDING = 0.1  # of the published figures, in points
RESAMPLES = 5000


@dataclasses.dataclass(frozen=True)
class Cells:
    """Each cell compared with chance, (cells,) each."""

    difference: np.ndarray  # ours minus published
    error: np.ndarray  # standard error of the difference, by chance
    expected: np.ndarray  # expected absolute difference, by chance
    p: np.ndarray  # of a difference as large as this, two-sided
    p_corrected: np.ndarray  # for the number of cells (Holm)

    @property
    def standardised(self) -> np.ndarray:
        return self.difference / self.error


@dataclasses.dataclass(frozen=True)
class Table:
    """A table, or part of it, compared with chance."""

    cells: int
    found: float  # mean absolute difference
    floor: float  # its expectation by chance
    p: float  # how often chance gives at least as much
    bias: float  # mean difference, with its sign
    bias_p: float  # how often chance gives at least as much, in either direction


def by_cell(values: np.ndarray, published: np.ndarray) -> Cells:
    """Tests each cell; values: (cells, seeds), published: (cells,). Statistics are NaN for a single seed."""
    seeds = values.shape[1]
    difference = values.mean(1) - published
    if seeds < 2:
        return Cells(difference, *np.full((4, len(published)), np.nan))
    variance = values.var(1, ddof=1) * (1 / seeds + 1 / PUBLISHED_TRIALS) + ROUNDING**2 / 12
    error = np.sqrt(variance)
    p = 2 * stats.t.sf(np.abs(difference) / error, seeds - 1)
    return Cells(difference, error, np.sqrt(2 / np.pi) * error, p, holm(p))


def holm(p: np.ndarray) -> np.ndarray:
    """Corrects p-values for their number (Holm 1979): the smallest times m, the next times m - 1, and so on."""
    order = np.argsort(p)
    corrected = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return np.minimum(corrected, 1)[np.argsort(order)]


def whole(values: np.ndarray, published: np.ndarray) -> Table:
    """Tests a whole table; values: (cells, seeds), published: (cells,)."""
    difference = values.mean(1) - published
    found, bias = float(np.abs(difference).mean()), float(difference.mean())
    seeds = values.shape[1]
    if seeds < 2:
        return Table(len(published), found, np.nan, np.nan, bias, np.nan)
    rng = np.random.default_rng(0)
    # Residuals are smaller than errors, because the mean is fitted to them.
    residual = (values - values.mean(1, keepdims=True)) * np.sqrt(seeds / (seeds - 1))

    def means(count: int) -> np.ndarray:
        """Returns means of `count` seeds drawn with replacement, the same for all cells, (cells, resamples)."""
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
    """Returns the frequency; counts the observed table too, so that it is never 0."""
    return float((1 + exceeds.sum()) / (1 + exceeds.size))
