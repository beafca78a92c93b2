"""Tests the noise statistics on random tables."""

import functools

import noise
import numpy as np
import pytest
from scipy import stats


def draw_tables(repeats, *, cells=12, seeds=25, shift=0.0, shared=0.8):
    """Draws pairs of tables from one distribution. Cells of the same seed are correlated."""
    rng = np.random.default_rng(0)
    spread = rng.uniform(0.2, 3, cells)[:, None]

    def values(number):
        common = rng.normal(size=number)
        return 80 + spread * (np.sqrt(shared) * common + np.sqrt(1 - shared) * rng.normal(size=(cells, number)))

    for _ in range(repeats):
        yield values(seeds), np.round(values(noise.PUBLISHED_TRIALS).mean(1) + shift, 1)


@functools.cache
def null_tables():
    """Statistics of tables that differ by chance alone."""
    return [(noise.by_cell(*pair), noise.whole(*pair)) for pair in draw_tables(300)]


@pytest.mark.slow
def test_p_values_are_uniform_under_the_null():
    tables = null_tables()
    for name in ("p", "bias_p"):
        values = [getattr(whole, name) for _, whole in tables]
        # Residuals of 25 seeds only approximate the distribution.
        assert stats.kstest(values, "uniform").statistic < 0.12
    assert stats.kstest([cells.p[0] for cells, _ in tables], "uniform").pvalue > 0.01
    any_off = np.mean([cells.p_corrected.min() < 0.05 for cells, _ in tables])
    assert any_off < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 300)


@pytest.mark.slow
def test_floor_is_the_mean_difference_by_chance():
    tables = null_tables()
    found = [whole.found for _, whole in tables]
    error = np.std(found, ddof=1) / np.sqrt(len(found))
    for floor in (np.mean([whole.floor for _, whole in tables]), np.mean([c.expected.mean() for c, _ in tables])):
        assert abs(floor - np.mean(found)) < 4 * error


def test_shift_is_detected():
    assert all(noise.whole(*pair).bias_p < 0.05 for pair in draw_tables(5, shift=4.0))
    cells = noise.by_cell(*next(draw_tables(1, shift=4.0, shared=0.0)))
    assert np.all(cells.difference[cells.p_corrected < 0.05] < 0)
    assert np.any(cells.p_corrected < 0.05)


def test_holm_by_hand():
    np.testing.assert_allclose(noise.holm(np.array([0.04, 0.01, 0.03, 0.5])), [0.09, 0.04, 0.09, 0.5])


def test_one_seed_gives_no_p_values():
    cells, whole = noise.by_cell(np.ones((3, 1)), np.zeros(3)), noise.whole(np.ones((3, 1)), np.zeros(3))
    assert np.isnan(cells.p).all()
    assert np.isnan([whole.floor, whole.p, whole.bias_p]).all()
    assert whole.found == 1
