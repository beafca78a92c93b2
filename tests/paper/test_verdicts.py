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
        (9.0, NAN, UNDECIDED, UNDECIDED),  # a single seed
    ],
)
def test_bounds_are_judged_by_the_whole_interval(estimate, half, least, most):
    assert at_least("", 1.0, around(estimate, half)).verdict == least
    assert at_most("", 1.0, around(estimate, half)).verdict == most


def test_mean_of_matches_students_interval():
    values = np.random.default_rng(0).normal(size=7)
    expected = stats.t.interval(0.95, 6, values.mean(), stats.sem(values))
    found = mean_of(values)
    np.testing.assert_allclose([found.estimate, found.low, found.high], [values.mean(), *expected])
    assert mean_of(np.ones(1)).estimate == 1
    assert np.isnan(mean_of(np.ones(1)).low)


def test_resampled_mean_matches_the_normal_interval():
    """For the mean of many values, the bootstrap gives the normal interval."""
    values = np.random.default_rng(0).normal(size=400)
    found = resampled(lambda seeds: values[seeds].mean(), 400)
    assert found.estimate == values.mean()
    half = 1.96 * values.std() / 20
    np.testing.assert_allclose([found.low, found.high], [values.mean() - half, values.mean() + half], atol=0.1 * half)
    assert np.isnan(resampled(lambda seeds: 1.0, 1).low)


def test_as_published_matches_students_t_test():
    """Verdicts match Student's t-test of two samples of five with equal spread."""
    rng = np.random.default_rng(0)
    verdicts = set()
    for shift in np.linspace(-3, 3, 80):
        ours = rng.normal(size=5)
        figure = as_published("", float(ours.mean() + shift), mean_of(ours), 5, resolution=np.inf, rounding=0)
        verdicts.add(figure.verdict)
        # Only our spread and degrees of freedom count, because the paper does not publish its trials.
        error = ours.std(ddof=1) * np.sqrt(2 / 5)
        p = 2 * stats.t.sf(abs(shift) / error, df=4)
        assert figure.verdict == (HOLDS if p >= 0.05 else FAILS)
    assert verdicts == {HOLDS, FAILS}


def test_as_published_respects_asymmetric_intervals():
    """Our estimate is 10, with an interval from 9 to 14. The published mean is as uncertain as ours."""
    verdict = lambda stated: as_published("", stated, Range(10, 9, 14), 5, resolution=99, rounding=0).verdict  # noqa: E731
    assert [verdict(x) for x in (8, 9, 15, 16)] == [FAILS, HOLDS, HOLDS, FAILS]


def test_as_published_is_undecided_for_wide_intervals():
    assert as_published("", 1.0, around(1.0, 2.0), 3, resolution=0.1, rounding=0).verdict == UNDECIDED
    assert as_published("", 90.0, around(1.0, 2.0), 3, resolution=0.1, rounding=0).verdict == FAILS
    assert as_published("", 1.0, around(1.0, NAN), 1, resolution=9, rounding=0).verdict == UNDECIDED


def test_as_published_allows_for_rounding():
    verdict = lambda rounding: as_published("", 1.0, around(1.04, 0.001), 5, resolution=1, rounding=rounding).verdict  # noqa: E731
    assert (verdict(0.0), verdict(0.05)) == (FAILS, HOLDS)


def test_more_than_is_strict():
    assert more_than("", 0, Range(0, 0, 0)).verdict == FAILS
    assert at_least("", 0, Range(0, 0, 0)).verdict == HOLDS
    assert more_than("", 0, around(1, 0.5)).verdict == HOLDS
    assert more_than("", 0, around(1, 2)).verdict == UNDECIDED


def test_strongest_prefers_the_best_verdict():
    unsure, no = more_than("", 1, around(2, 3)), more_than("", 1, around(0.5, 0.1))
    assert strongest([no, unsure]) is unsure
    assert strongest([no, unsure, (yes := more_than("", 1, around(3, 1)))]) is yes


def test_weakest_prefers_the_worst_verdict():
    fails, worse = at_least("", 0, around(-2, 1)), at_most("", 0, around(5, 1))
    open_, holds, barely = at_least("", 0, around(1, 2)), at_least("", 0, around(9, 1)), at_most("", 0, around(-1.5, 1))
    assert weakest([holds, open_, fails, worse]) is worse
    assert weakest([holds, open_]) is open_
    assert weakest([holds, barely]) is barely
    assert weakest([at_least("", 0, around(1, NAN)), holds]).verdict == UNDECIDED
