import dataclasses

import jax
import numpy as np
import pytest
from scipy import stats

import fcjax
from fcjax import latency

CELL = fcjax.Cell(
    bandwidth_hz=20e6,
    noise_psd_w_hz=10**-20.4,
    power_w=np.full(20_000, 0.01),
    upload_bits=1.6e6,
    sample_floor_s=5e-4,
    sample_rate_hz=1000.0,
)


def test_compute_time_is_shifted_exponential():
    samples = 5 * 128
    compute_s = np.asarray(latency.compute_time(jax.random.key(0), samples, CELL))
    assert stats.kstest(compute_s, stats.expon(loc=samples * 5e-4, scale=samples / 1000.0).cdf).pvalue > 1e-3


def test_draws_do_not_depend_on_number_of_devices():
    key = jax.random.key(1)
    few = dataclasses.replace(
        CELL, power_w=np.ones(3), sample_floor_s=np.array([1e-3, 2e-3, 0.0]), sample_rate_hz=np.array([1e3, 1e9, 1e2])
    )
    drawn = latency.compute_time(key, np.array([100, 100, 0]), few)
    unit = (latency.compute_time(key, 1000, CELL)[:3] - 0.5) * 1.0  # the exponential part at rate 1 for 1000 samples
    np.testing.assert_allclose(drawn, [0.1 + 0.1 * unit[0], 0.2, 0.0], rtol=1e-5)


def test_gradient_wrt_floor_and_rate(x64):
    def mean(cell):
        return latency.compute_time(jax.random.key(0), 640, cell).mean()

    gradient = jax.grad(mean)(jax.tree.map(jax.numpy.asarray, CELL))
    excess_s = mean(CELL) - 640 * 5e-4
    np.testing.assert_allclose(gradient.sample_floor_s, 640, rtol=1e-12)
    np.testing.assert_allclose(gradient.sample_rate_hz, -excess_s / 1000, rtol=1e-12)


@pytest.mark.parametrize(
    ("fields", "samples", "message"),
    [
        ({"sample_floor_s": -1e-3}, 640, r"cell.sample_floor_s.*got -0.001"),
        ({"sample_rate_hz": 0.0}, 640, r"cell.sample_rate_hz must be positive.*got 0"),
        ({"sample_rate_hz": np.ones(7)}, 640, r"cell.sample_rate_hz must have shape \(\) or \(20000,\), got \(7,\)"),
        ({}, -1, r"num_samples.*got -1"),
    ],
)
def test_errors_name_bad_input(fields, samples, message):
    with pytest.raises(ValueError, match=message):
        latency.compute_time(jax.random.key(0), samples, dataclasses.replace(CELL, **fields))
