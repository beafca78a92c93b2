import numpy as np
import pytest
from scipy import stats
from verdicts import FAILS, HOLDS, UNDECIDED, as_published, at_least, at_most, weakest

NAN = float("nan")


@pytest.mark.parametrize(
    ("estimate", "half", "least", "most"),
    [
        (2.0, 0.5, HOLDS, FAILS),
        (0.0, 0.5, FAILS, HOLDS),
        (1.2, 0.5, UNDECIDED, UNDECIDED),
        (1.5, 0.5, HOLDS, UNDECIDED),
        (1.0, 0.0, HOLDS, HOLDS),
        (9.0, NAN, UNDECIDED, UNDECIDED),  # of a single seed
    ],
)
def test_a_bound_is_judged_by_the_whole_interval(estimate, half, least, most):
    assert at_least("", 1.0, estimate, half).verdict == least
    assert at_most("", 1.0, estimate, half).verdict == most


def test_as_published_is_a_test_of_two_means():
    """It says "does not hold" where Student's test of two samples with one spread does, for samples of five."""
    rng = np.random.default_rng(0)
    verdicts = set()
    for shift in np.linspace(0, 3, 40):
        ours = rng.normal(size=5)
        figure = as_published("", float(ours.mean() + shift), ours, resolution=np.inf)
        verdicts.add(figure.verdict)
        # Spread and degrees of freedom of ours alone, because the other trials are not published.
        error = ours.std(ddof=1) * np.sqrt(2 / 5)
        p = 2 * stats.t.sf(shift / error, df=4)
        assert figure.verdict == (HOLDS if p >= 0.05 else FAILS)
    assert verdicts == {HOLDS, FAILS}


def test_as_published_is_undecided_where_little_can_be_told():
    assert as_published("", 1.0, np.array([0.0, 2.0, 1.0]), resolution=0.1).verdict == UNDECIDED
    assert as_published("", 90.0, np.array([0.0, 2.0, 1.0]), resolution=0.1).verdict == FAILS
    assert as_published("", 1.0, np.array([1.0]), resolution=9).verdict == UNDECIDED


def test_the_weakest_is_told():
    fails, worse = at_least("", 0, -2, 1), at_most("", 0, 5, 1)
    open_, holds, barely = at_least("", 0, 1, 2), at_least("", 0, 9, 1), at_most("", 0, -1.5, 1)
    assert weakest([holds, open_, fails, worse]) is worse
    assert weakest([holds, open_]) is open_
    assert weakest([holds, barely]) is barely
    assert weakest([at_least("", 0, 1, NAN), holds]).verdict == UNDECIDED
