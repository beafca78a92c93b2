import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import worlds
from derivatives import check_derivatives

import fcjax
from fcjax.wireless.decisions import as_decided

TRAINING = fcjax.Training(local_steps=5, batch_size=128)
GAIN, COMPUTE_S = (1e-11, 3e-12, 4e-13), (0.4, 0.9, 0.5)
POWER_W, CAPACITANCE = (0.01, 0.02, 0.005), (1e-28, 2e-28, 3e-28)


def setting(dtype=np.float32, **cell):
    observation = fcjax.Observation(np.asarray(GAIN, dtype), np.asarray(COMPUTE_S, dtype))
    fields = {
        "power_w": np.asarray([0.01, 0.02, 0.005], dtype),
        "capacitance": np.asarray([1e-28, 2e-28, 3e-28], dtype),
    }
    return observation, fcjax.Cell(**{**worlds.RADIO, **fields, **cell})


def by_hand(device, share, *, power_w=None, cpu_hz=1e9, samples=640):
    """The energy of a device under FDMA or OFDMA, in plain Python."""
    band_hz = share * 20e6
    power_w = POWER_W[device] if power_w is None else power_w
    bits_s = band_hz * math.log2(1 + power_w * GAIN[device] / (band_hz * worlds.RADIO["noise_psd_w_hz"]))
    cycles = 5e-4 * 1e9 * samples
    return CAPACITANCE[device] * cycles * cpu_hz**2 + power_w * worlds.RADIO["upload_bits"] / bits_s


def test_energy_of_three_devices(dtype):
    observation, cell = setting(dtype)
    scheduled = np.array([True, False, True])
    decision = fcjax.allocate(scheduled, observation, cell)
    energy_j = fcjax.round_energy(decision, observation, cell, TRAINING)
    expected = [by_hand(0, float(decision.share[0])), 0, by_hand(2, float(decision.share[2]))]
    np.testing.assert_allclose(energy_j, expected, rtol=1e-5 if dtype == np.float32 else 1e-12)
    assert energy_j.dtype == dtype


def test_under_tdma_devices_send_with_the_whole_bandwidth():
    observation, cell = setting(access="tdma")
    decision = fcjax.allocate(np.ones(3, bool), observation, cell)
    energy_j = fcjax.round_energy(decision, observation, cell, TRAINING)
    np.testing.assert_allclose(energy_j, [by_hand(device, 1.0) for device in range(3)], rtol=1e-5)


def test_decisions_change_energy_and_time():
    observation, cell = setting()
    usual = fcjax.allocate(np.ones(3, bool), observation, cell)
    power_w, cpu_hz = jnp.array([0.005, 0.02, 0.001]), jnp.array([5e8, 1e9, 2.5e8])
    steps, size = jnp.array([5, 2, 1]), jnp.array(64)
    decision = dataclasses.replace(usual, power_w=power_w, cpu_hz=cpu_hz, local_steps=steps, batch_size=size)
    energy_j = fcjax.round_energy(decision, observation, cell, TRAINING)
    expected = [
        by_hand(
            i, float(usual.share[i]), power_w=float(power_w[i]), cpu_hz=float(cpu_hz[i]), samples=64 * int(steps[i])
        )
        for i in range(3)
    ]
    np.testing.assert_allclose(energy_j, expected, rtol=1e-5)
    decided, changed = as_decided(decision, observation, cell, TRAINING)
    np.testing.assert_allclose(decided.compute_s, [0.4 * 2 / 2, 0.9 * 2 / 10, 0.5 * 4 / 10], rtol=1e-6)
    np.testing.assert_array_equal(changed.power_w, power_w)
    same, unchanged = as_decided(usual, observation, cell, TRAINING)
    assert same.compute_s is observation.compute_s
    assert unchanged is cell


@pytest.mark.parametrize("access", ["fdma", "tdma"])
def test_derivatives(access, x64):
    observation, cell = setting(np.float64, access=access)
    decision = fcjax.allocate(np.array([True, True, False]), observation, cell)

    def energy(exponents):
        scale = jnp.exp(exponents)
        changed = dataclasses.replace(
            cell, power_w=cell.power_w * scale[:3], cpu_hz=1e9 * scale[3], capacitance=cell.capacitance * scale[4]
        )
        louder = dataclasses.replace(observation, gain=observation.gain * scale[5])
        return fcjax.round_energy(decision, louder, changed, TRAINING)[:2]

    check_derivatives(energy, jnp.zeros(6), rtol=1e-4)


def test_gradients_with_respect_to_an_observation_are_finite():
    observation, cell = setting()
    scheduled = np.array([True, False, True])

    def total(observation, cell):
        return jnp.sum(fcjax.round_energy(fcjax.allocate(scheduled, observation, cell), observation, cell, TRAINING))

    gradients = jax.grad(total, argnums=(0, 1))(observation, cell)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    assert gradients[0].gain[1] == 0
    assert (np.asarray(gradients[0].gain)[scheduled] < 0).all(), "a better channel saves energy"


def test_a_device_that_cannot_send_spends_everything():
    observation, cell = setting()
    decision = fcjax.Decision(jnp.ones(3, bool), jnp.array([0.5, 0.5, 0.0]), jnp.array(1.0))
    energy_j = fcjax.round_energy(decision, observation, cell, TRAINING)
    assert np.isfinite(energy_j[:2]).all()
    assert energy_j[2] == np.inf


@pytest.mark.parametrize("access", ["fdma", pytest.param("ofdma", marks=pytest.mark.slow), "tdma"])
def test_an_unavailable_device_never_finishes(access):
    observation, cell = setting(access=access)
    away = dataclasses.replace(observation, available=np.array([True, False, True]))
    round_s, sets = fcjax.fastest_sets(away, cell)
    expected_s, expected = fcjax.fastest_sets(
        fcjax.Observation(observation.gain[[0, 2]], observation.compute_s[[0, 2]]),
        dataclasses.replace(cell, power_w=cell.power_w[[0, 2]], capacitance=1e-28),
    )
    np.testing.assert_allclose(round_s[:2], expected_s, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(sets)[:2, [0, 2]], expected)
    assert round_s[2] == np.inf
    assert np.isinf(fcjax.required_share(10.0, away, cell)[1])
    assert fcjax.allocate(np.ones(3, bool), away, cell).round_s == np.inf


def test_availability_must_be_booleans_per_device():
    observation, cell = setting()
    for bad in (np.array([1, 0, 1]), np.ones(2, bool), "yes"):
        with pytest.raises(ValueError, match=r"observation.available must be booleans of shape \(\) or \(3,\)"):
            fcjax.fastest_sets(dataclasses.replace(observation, available=bad), cell)


def test_the_download_precedes_the_computation(dtype):
    observation, cell = setting(dtype, download_bits=1.6e6, broadcast_w=20.0)
    noise_w = worlds.RADIO["noise_psd_w_hz"] * 20e6
    receive_s = [1.6e6 / (20e6 * math.log2(1 + 20.0 * gain / noise_w)) for gain in GAIN]
    later = dataclasses.replace(observation, compute_s=np.asarray(COMPUTE_S + np.asarray(receive_s), dtype))
    plain = dataclasses.replace(cell, download_bits=None)
    for scheduled in ([True, True, True], [False, True, True]):
        decision = fcjax.allocate(np.array(scheduled), observation, cell)
        expected = fcjax.allocate(np.array(scheduled), later, plain)
        np.testing.assert_allclose(decision.round_s, expected.round_s, rtol=1e-6)
        np.testing.assert_allclose(decision.share, expected.share, rtol=1e-4)
        time_s = fcjax.round_time(decision.scheduled, decision.share, observation, cell)
        np.testing.assert_allclose(time_s, decision.round_s, rtol=1e-5)


def test_decisions_are_checked():
    observation, cell = setting()
    usual = fcjax.allocate(np.ones(3, bool), observation, cell)
    for name, bad, message in (
        ("power_w", -1.0, "decision.power_w must be positive and finite, got -1"),
        ("cpu_hz", "fast", "decision.cpu_hz must be a real number or an array of them, got 'fast'"),
        ("local_steps", np.ones(2), r"decision.local_steps must have shape \(\) or \(3,\), got \(2,\)"),
        ("batch_size", {}, "decision.batch_size must be a real number"),
    ):
        decision = dataclasses.replace(usual, **{name: bad})
        with pytest.raises(ValueError, match=message):
            fcjax.round_energy(decision, observation, cell, TRAINING)
        with pytest.raises(ValueError, match=message):
            as_decided(decision, observation, cell, TRAINING)


@pytest.mark.parametrize(
    ("field", "bad", "message"),
    [
        ("capacitance", None, "cell.capacitance must be"),
        ("cpu_hz", 0.0, "cell.cpu_hz must be positive"),
        ("sample_floor_s", -1.0, "cell.sample_floor_s must be zero or more"),
        ("download_bits", -144.0, "cell.download_bits must be zero or more"),
    ],
)
def test_bad_fields_of_the_cell_are_named(field, bad, message):
    observation, cell = setting(**{field: bad})
    decision = fcjax.Decision(np.ones(3, bool), np.full(3, 1 / 3), 1.0)
    with pytest.raises(ValueError, match=message):
        fcjax.round_energy(decision, observation, cell, TRAINING)


def test_a_negative_download_is_named_before_the_allocation():
    observation, cell = setting(download_bits=-144.0)
    with pytest.raises(ValueError, match=r"cell\.download_bits must be zero or more, and finite, got -144"):
        fcjax.allocate(np.ones(3, bool), observation, cell)
