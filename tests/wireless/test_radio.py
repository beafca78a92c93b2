import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import worlds
from derivatives import check_derivatives
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import fcjax
from fcjax import radio

CELL = fcjax.Cell(bandwidth_hz=20e6, noise_psd_w_hz=10**-20.4, power_w=np.full(4, 0.01), upload_bits=1.6e6)


def cell_of(num, **fields):
    return dataclasses.replace(CELL, power_w=np.full(num, 0.01), **fields)


def test_decibels(dtype):
    np.testing.assert_allclose(radio.db_to_linear(np.array([0, 10, -30, 3], dtype)), [1, 10, 1e-3, 10**0.3], rtol=2e-6)
    np.testing.assert_allclose(radio.dbm_to_w(10.0), 0.01, rtol=2e-6)
    np.testing.assert_allclose(radio.dbm_to_w(-114.0) / 1e6, 10**-20.4, rtol=2e-5)


def test_placement_is_uniform_in_the_disc():
    distance_m = np.asarray(radio.place(jax.random.key(0), cell_of(20_000, radius_m=600.0)))
    assert stats.kstest((distance_m / 600) ** 2, "uniform").pvalue > 1e-3


def test_draws_do_not_depend_on_number_of_devices():
    key = jax.random.key(7)
    shadowed = {"scatter": 0.5, "shadowing_db": 8.0}
    for draw in (radio.place, radio.fade):
        np.testing.assert_array_equal(draw(key, cell_of(5, **shadowed)), draw(key, cell_of(50, **shadowed))[:5])


def test_path_gain_is_the_3gpp_macro_model():
    distance_m = np.array([35.0, 200.0, 1000.0, 5000.0])
    loss_db = 128.1 + 37.6 * np.log10(distance_m / 1000)
    np.testing.assert_allclose(radio.path_gain(distance_m, CELL), 10 ** (-loss_db / 10), rtol=1e-5)


def test_short_distances_are_clipped():
    gain = radio.path_gain(np.array([0.0, 0.5, 1.0]), CELL)
    assert np.all(np.isfinite(gain))
    assert np.all(gain == gain[2])
    assert gain[2] < 1


def test_fading_and_shadowing_follow_their_distributions():
    key = jax.random.key(3)
    np.testing.assert_array_equal(radio.fade(key, cell_of(100)), np.ones(100))
    rayleigh = np.asarray(radio.fade(key, cell_of(20_000, scatter=1.0)))
    assert stats.kstest(rayleigh, "expon").pvalue > 1e-3
    scatter = 0.2  # Rician: 2 power/s is chi-squared with 2 degrees of freedom and noncentrality 2 (1 - s)/s
    rician = np.asarray(radio.fade(key, cell_of(20_000, scatter=scatter)), np.float64)
    assert stats.kstest(2 * rician / scatter, stats.ncx2(2, 2 * (1 - scatter) / scatter).cdf).pvalue > 1e-3
    shadow_db = 10 * np.log10(radio.fade(key, cell_of(20_000, shadowing_db=8.0)))
    assert stats.kstest(shadow_db / 8, "norm").pvalue > 1e-3


def test_channel_gradients_are_finite():
    def total(cell):
        return jnp.sum(
            radio.path_gain(radio.place(jax.random.key(0), cell), cell) * radio.fade(jax.random.key(1), cell)
        )

    gradient = jax.grad(total)(
        jax.tree.map(jnp.asarray, dataclasses.replace(CELL, power_w=np.full(4, 0.01, np.float32)))
    )
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    assert gradient.radius_m < 0
    assert gradient.reference_gain > 0


@pytest.mark.slow
def test_efficiency_against_mpmath(dtype):
    rng = np.random.default_rng(0)
    gamma = np.concatenate([10 ** rng.uniform(-12, 0, 2000), 1 - 10 ** rng.uniform(-5, 0, 2000), [1e-12, 1 - 1e-5]])
    gamma = gamma.astype(dtype)
    gamma = gamma[(gamma >= 1e-12) & (gamma <= 1 - 1e-5)]
    exact = [oracles.efficiency(float(g)) for g in gamma]
    slope = [float((y / float(g)) / (1 - float(g) - y)) for g, y in zip(gamma, exact, strict=True)]
    rtol = 1e-6 if dtype == np.float32 else 2e-15
    np.testing.assert_allclose(radio.required_efficiency(gamma), [float(y) for y in exact], rtol=rtol)
    np.testing.assert_allclose(jax.vmap(jax.grad(radio.required_efficiency))(gamma), slope, rtol=rtol)


def test_efficiency_at_the_edges(dtype):
    gamma = np.array([0, 1, 1.5, -0.1, np.nan], dtype)
    traced = jax.jit(radio.required_efficiency)(gamma)  # jit hides the values, so nothing is rejected
    np.testing.assert_array_equal(traced, np.array([np.inf, 0, 0, np.nan, np.nan], dtype))
    with pytest.raises(ValueError, match=r"gamma\[3\] must be zero or more, got -0.1"):
        radio.required_efficiency(gamma)
    tiny = float(np.finfo(dtype).tiny)
    assert 0 < radio._efficiency(np.asarray(1, dtype), np.asarray(1e-30, dtype)) < 3e-30
    assert -math.log(tiny) < radio.required_efficiency(np.asarray(tiny, dtype)) < -2 * math.log(tiny)


def test_required_share_against_mpmath(dtype):
    """The error is at most 8 eps times the relative condition number."""
    mpf = oracles.mpmath.mpf
    rng = np.random.default_rng(1)
    required_share = jax.jit(fcjax.required_share)
    for _ in range(60):
        world = worlds.draw(rng, 20)
        observation, cell = worlds.build(world, dtype)
        floor_s = 10**-20.4 * worlds.RADIO["upload_bits"] * math.log(2) / (world["power_w"] * world["gain"])
        deadline_s = np.asarray(world["compute_s"] + floor_s * (1 + 10 ** rng.uniform(-4, 4, 20)), dtype)
        share = np.asarray(required_share(deadline_s, observation, cell))
        bits, band, noise = (
            mpf(float(np.asarray(worlds.RADIO[x], dtype))) for x in ("upload_bits", "bandwidth_hz", "noise_psd_w_hz")
        )
        for i in range(20):
            power, gain, start, end = (
                mpf(float(x[i])) for x in (world["power_w"], world["gain"], world["compute_s"], deadline_s)
            )
            upload_s = end - start
            gamma = (
                noise * bits * oracles.mpmath.log(2) / (upload_s * power * gain) if upload_s > 0 else oracles.mpmath.inf
            )
            if gamma >= 1:  # because the deadline was rounded
                assert upload_s > 0 or np.isinf(share[i])
                continue
            y = oracles.efficiency(gamma)
            exact = bits * oracles.mpmath.log(2) / (band * upload_s * y)
            conditioning = (1 + 1 / (y - 1 + gamma)) * end / upload_s
            assert abs(float(share[i]) / exact - 1) <= 8 * float(np.finfo(dtype).eps) * conditioning


def test_required_share_meets_the_deadline_exactly(x64):
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(5), 30), np.float64)
    share = fcjax.required_share(40.0, observation, cell)
    enough = np.isfinite(share)
    finish_s = observation.compute_s + cell.upload_bits / radio.rate(np.where(enough, share, 1), observation, cell)
    assert enough.any()
    np.testing.assert_allclose(finish_s[enough], 40.0, rtol=1e-12)
    assert np.all(finish_s[~enough] > 40)


def test_required_share_is_inf_if_infeasible(dtype):
    gain = np.array([1e-11, 0.0, 1e-11, 1e-22], dtype)
    observation = fcjax.Observation(gain, np.array([0.5, 0.5, 1.0, 0.5], dtype))
    share = np.asarray(fcjax.required_share(1.0, observation, CELL))
    assert np.isfinite(share[0])
    assert np.all(np.isinf(share[1:]))
    np.testing.assert_array_equal(fcjax.required_share(np.inf, observation, CELL), [0, np.inf, 0, 0])
    np.testing.assert_array_equal(fcjax.required_share(0.0, observation, CELL), [np.inf] * 4)


@given(
    spare=st.floats(1e-6, 1e6),
    factor=st.floats(1.001, 1e3),
    gain=st.floats(1e-18, 1e-3),
    scale=st.floats(0.01, 100),
)
def test_required_share_physics(spare, factor, gain, scale):
    """More time or gain requires less bandwidth. Scaling bandwidth, power and payload together changes nothing."""
    cell = dataclasses.replace(CELL, power_w=np.full(1, 0.01))
    floor_s = 10**-20.4 * 1.6e6 * math.log(2) / (0.01 * gain)

    def share(deadline_s, gain=gain, cell=cell):
        with jax.enable_x64(True):
            return float(fcjax.required_share(deadline_s, fcjax.Observation(np.array([gain]), np.zeros(1)), cell)[0])

    base = share(floor_s * (1 + spare))
    assert 0 < base < np.inf
    assert share(floor_s * (1 + spare * factor)) < base
    assert share(floor_s * (1 + spare), gain=gain * factor) < base
    scaled = dataclasses.replace(
        cell, bandwidth_hz=20e6 * scale, power_w=np.full(1, 0.01 * scale), upload_bits=1.6e6 * scale
    )
    assert share(floor_s * (1 + spare), cell=scaled) == pytest.approx(base, rel=1e-8)


def test_required_share_derivatives(x64):
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(2), 5, radius_m=(300, 600)), np.float64)

    def log_share(observation, cell):
        return jnp.log(fcjax.required_share(3.0, observation, cell))

    check_derivatives(*worlds.log_leaves(log_share, observation, cell), rtol=1e-5)


def test_rate(dtype):
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(3), 6), dtype)
    share = np.array([0, 1e-6, 0.1, 0.2, 0.5, 1], dtype)
    band = {name: worlds.RADIO[name] for name in ("bandwidth_hz", "noise_psd_w_hz")}
    expected = oracles.rate(np.maximum(share, 1e-30).astype(float), observation.gain, power_w=cell.power_w, **band)
    np.testing.assert_allclose(radio.rate(share, observation, cell), np.where(share > 0, expected, 0), rtol=2e-6)


def test_dtype_follows_the_inputs(x64):
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(3), 6), np.float32)
    assert fcjax.required_share(3.0, observation, cell).dtype == jnp.float32
    assert fcjax.required_share(np.float64(3.0), observation, cell).dtype == jnp.float64
    mixed = dataclasses.replace(observation, compute_s=np.float64(observation.compute_s))
    assert fcjax.required_share(3.0, mixed, cell).dtype == jnp.float64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bandwidth_hz": -20e6}, r"cell.bandwidth_hz must be positive.*-2e\+07"),
        ({"noise_psd_w_hz": 0.0}, r"cell.noise_psd_w_hz.*got 0"),
        ({"upload_bits": 0}, r"cell.upload_bits.*got 0"),
        ({"sample_rate_hz": None}, r"cell.sample_rate_hz must be a real number.*None"),
        ({"upload_bits": None}, r"cell.upload_bits must be a real number.*None"),
        ({"bandwidth_hz": "20e6"}, r"cell.bandwidth_hz must be a real number.*'20e6'"),
        ({"bandwidth_hz": 1j}, r"cell.bandwidth_hz must be a real number.*1j"),
        ({"gain": [[1.0], [1.0, 2.0]]}, r"observation.gain must be a real number"),
        ({"power_w": np.array([1, 1, -2.0, 1])}, r"cell.power_w\[2\].*got -2"),
        ({"power_w": 0.1}, r"cell.power_w must have shape \(M,\).*\(\)"),
        ({"power_w": np.ones(5)}, r"observation.gain must have shape \(5,\), got \(4,\)"),
        ({"power_w": np.ones(0)}, r"cell.power_w.*M >= 1"),
        ({"gain": np.array([1, -1, 1, 1])}, r"observation.gain\[1\].*got -1"),
        ({"gain": np.array([1, 1, 1, np.nan])}, r"observation.gain\[3\].*got nan"),
        ({"compute_s": np.array([1, 1, 1, -3])}, r"observation.compute_s\[3\].*got -3"),
        ({"deadline_s": -1.0}, r"deadline_s must be zero or more, got -1"),
        ({"deadline_s": np.nan}, r"deadline_s.*got nan"),
        ({"deadline_s": np.ones(3)}, r"deadline_s must have shape \(\) or \(4,\), got \(3,\)"),
    ],
)
def test_errors_name_bad_uplinks(change, message):
    values = {"gain": np.full(4, 1e-11), "compute_s": np.full(4, 0.5), "deadline_s": 1.0} | change
    observation = fcjax.Observation(values.pop("gain"), values.pop("compute_s"))
    with pytest.raises(ValueError, match=message):
        fcjax.required_share(values.pop("deadline_s"), observation, dataclasses.replace(CELL, **values))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: radio.place(jax.random.key(0), cell_of(3, radius_m=0.0)), r"cell.radius_m must be positive.*got 0"),
        (
            lambda: radio.place(jax.random.key(0), cell_of(3, radius_m=np.ones(3))),
            r"cell.radius_m must have shape \(\)",
        ),
        (lambda: radio.path_gain(-5.0, CELL), r"distance_m.*got -5"),
        (
            lambda: radio.path_gain(5.0, cell_of(3, reference_gain=-1.0)),
            r"cell.reference_gain must be positive.*got -1",
        ),
        (lambda: radio.path_gain(5.0, cell_of(3, path_loss_exponent=np.nan)), r"cell.path_loss_exponent.*got nan"),
        (
            lambda: radio.fade(jax.random.key(0), cell_of(3, scatter=1.5)),
            r"cell.scatter must be between 0 and 1, got 1.5",
        ),
        (lambda: radio.fade(jax.random.key(0), cell_of(3, shadowing_db=-1.0)), r"cell.shadowing_db.*got -1"),
    ],
)
def test_errors_name_bad_channels(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_errors_name_bad_shares():
    with pytest.raises(ValueError, match=r"share\[0\].*got -0.1"):
        radio.rate(np.array([-0.1, 0, 0, 0]), fcjax.Observation(np.full(4, 1e-11), np.full(4, 0.5)), CELL)
