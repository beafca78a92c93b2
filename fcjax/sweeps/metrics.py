"""Statistics of results."""

import numpy as np
from scipy import stats


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean and the half width of its 95% interval (Student's t) along the first axis, ignoring NaN.

    The half width is NaN for fewer than two values.
    """
    count = np.sum(~np.isnan(values), axis=0)
    some = np.maximum(count, 1)
    mean = np.where(count > 0, np.nansum(values, axis=0) / some, np.nan)
    squares = np.nansum((values - mean) ** 2, axis=0)
    variance = squares / np.maximum(count - 1, 1)
    half = stats.t.ppf(0.975, np.maximum(count - 1, 1)) * np.sqrt(variance / some)
    return mean, np.where(count > 1, half, np.nan)
