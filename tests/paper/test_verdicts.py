import numpy as np
import pytest
from scipy import stats
from verdicts import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Range,
    as_published,
    at_least,
    at_most,
    mean_of,
    more_than,
    resampled,
    strongest,
    weakest,
)

NAN = float("nan")


def around(estimate, half):
    return Range(estimate, estimate - half, estimate + half)


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
    assert at_least("", 1.0, around(estimate, half)).verdict == least
    assert at_most("", 1.0, around(estimate, half)).verdict == most


def test_mean_of_is_students_interval():
    values = np.random.default_rng(0).normal(size=7)
    expected = stats.t.interval(0.95, 6, values.mean(), stats.sem(values))
    found = mean_of(values)
    np.testing.assert_allclose([found.estimate, found.low, found.high], [values.mean(), *expected])
    assert mean_of(np.ones(1)).estimate == 1
    assert np.isnan(mean_of(np.ones(1)).low)


def test_resampled_is_the_bootstrap():
    """Of a mean of many values it is the interval of the normal distribution."""
    values = np.random.default_rng(0).normal(size=400)
    found = resampled(lambda seeds: values[seeds].mean(), 400)
    assert found.estimate == values.mean()
    half = 1.96 * values.std() / 20
    np.testing.assert_allclose([found.low, found.high], [values.mean() - half, values.mean() + half], atol=0.1 * half)
    assert np.isnan(resampled(lambda seeds: 1.0, 1).low)


def test_as_published_is_a_test_of_two_means():
    """It says "does not hold" where Student's test of two samples with one spread does, for samples of five."""
    rng = np.random.default_rng(0)
    verdicts = set()
    for shift in np.linspace(-3, 3, 80):
        ours = rng.normal(size=5)
        figure = as_published("", float(ours.mean() + shift), mean_of(ours), 5, resolution=np.inf, rounding=0)
        verdicts.add(figure.verdict)
        # Spread and degrees of freedom of ours alone, because the other trials are not published.
        error = ours.std(ddof=1) * np.sqrt(2 / 5)
        p = 2 * stats.t.sf(abs(shift) / error, df=4)
        assert figure.verdict == (HOLDS if p >= 0.05 else FAILS)
    assert verdicts == {HOLDS, FAILS}


def test_as_published_minds_a_lopsided_interval():
    """Ours is 10, and by its interval might be as low as 9 or as high as 14; of as many trials, theirs is as far."""
    verdict = lambda stated: as_published("", stated, Range(10, 9, 14), 5, resolution=99, rounding=0).verdict  # noqa: E731
    assert [verdict(x) for x in (8, 9, 15, 16)] == [FAILS, HOLDS, HOLDS, FAILS]


def test_as_published_is_undecided_where_little_can_be_told():
    assert as_published("", 1.0, around(1.0, 2.0), 3, resolution=0.1, rounding=0).verdict == UNDECIDED
    assert as_published("", 90.0, around(1.0, 2.0), 3, resolution=0.1, rounding=0).verdict == FAILS
    assert as_published("", 1.0, around(1.0, NAN), 1, resolution=9, rounding=0).verdict == UNDECIDED


def test_what_is_published_is_rounded():
    verdict = lambda rounding: as_published("", 1.0, around(1.04, 0.001), 5, resolution=1, rounding=rounding).verdict  # noqa: E731
    assert (verdict(0.0), verdict(0.05)) == (FAILS, HOLDS)


def test_the_same_is_not_more():
    assert more_than("", 0, Range(0, 0, 0)).verdict == FAILS
    assert at_least("", 0, Range(0, 0, 0)).verdict == HOLDS
    assert more_than("", 0, around(1, 0.5)).verdict == HOLDS
    assert more_than("", 0, around(1, 2)).verdict == UNDECIDED


def test_the_strongest_is_told():
    unsure, no = more_than("", 1, around(2, 3)), more_than("", 1, around(0.5, 0.1))
    assert strongest([no, unsure]) is unsure
    assert strongest([no, unsure, (yes := more_than("", 1, around(3, 1)))]) is yes


def test_the_weakest_is_told():
    fails, worse = at_least("", 0, around(-2, 1)), at_most("", 0, around(5, 1))
    open_, holds, barely = at_least("", 0, around(1, 2)), at_least("", 0, around(9, 1)), at_most("", 0, around(-1.5, 1))
    assert weakest([holds, open_, fails, worse]) is worse
    assert weakest([holds, open_]) is open_
    assert weakest([holds, barely]) is barely
    assert weakest([at_least("", 0, around(1, NAN)), holds]).verdict == UNDECIDED
