"""`least_energy` against SciPy's SLSQP, closed forms, finite differences, and `allocate`."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import worlds
from derivatives import check_derivatives

import fcjax

TRAINING = fcjax.Training()
NUM_SAMPLES = 5 * 128  # of a round
NUM_DEVICES = 6
PER_DEVICE = ("power_w", "upload_bits", "cpu_hz", "capacitance", "sample_floor_s")
pytestmark = pytest.mark.usefixtures("quick_compilation")
in_both_precisions = pytest.mark.parametrize(
    "dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)], indirect=True
)
both = jax.jit(jax.value_and_grad(fcjax.least_energy, argnums=(1, 2, 3), has_aux=True, allow_int=True))


def solve(*arguments):
    """Returns energy and decision."""
    return both(*arguments)[0]


def slopes(*arguments):
    """Returns the gradient by deadline, observation and cell; it shares a program with `solve`."""
    deadline, observation, cell = both(*arguments)[1]
    return deadline, dataclasses.replace(observation, available=True), cell


def draw(rng, dtype=np.float64, num_devices=NUM_DEVICES):
    """Draws a set of unequal devices, some of which receive the model first. All numbers are float32."""
    spread = lambda middle, decades: np.float32(middle * 10 ** rng.uniform(-decades, decades, num_devices))  # noqa: E731
    world = worlds.draw(rng, num_devices)
    cell = {
        "upload_bits": spread(1.6e6, 0.3),
        "cpu_hz": spread(1e9, 0.5),
        "capacitance": spread(10 ** rng.uniform(-30, -27), 0.5),
        "sample_floor_s": spread(5e-4, 0.3),
        "download_bits": rng.choice([0, 1e6]),
    }
    observation, cell = worlds.build(world, dtype, **cell)
    cell = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), cell)
    scheduled = np.zeros(num_devices, bool)
    # Not all 6: with so many variables, SLSQP's linear algebra uses threads, which makes it a hundred times slower.
    scheduled[rng.permutation(num_devices)[: rng.integers(1, num_devices)]] = True
    return scheduled, dataclasses.replace(observation, available=np.ones(num_devices, bool)), cell


def fastest(scheduled, observation, cell):
    return fcjax.allocate(scheduled, observation, cell).round_s


def by_slsqp(scheduled, deadline_s, observation, cell):
    gain, compute_s = (np.asarray(x, float)[scheduled] for x in (observation.gain, observation.compute_s))
    of_devices = {name: np.asarray(getattr(cell, name), float)[scheduled] for name in PER_DEVICE}
    power_w, upload_bits, cpu_hz, capacitance, floor_s = of_devices.values()
    band = {name: worlds.RADIO[name] for name in ("bandwidth_hz", "noise_psd_w_hz")}
    return oracles.least_energy(
        float(deadline_s),
        gain,
        compute_s,
        **band,
        power_w=power_w,
        upload_bits=upload_bits,
        compute_j=capacitance * cpu_hz**2 * floor_s * cpu_hz * NUM_SAMPLES,
        wait_s=float(cell.download_bits) / oracles.rate(1.0, gain, **band, power_w=cell.broadcast_w),
    )


def check_decision(energy_j, decision, deadline_s, observation, cell, rtol=1e-10):
    """The decision spends the energy, meets the deadline and keeps the limits."""
    spent_j = np.asarray(fcjax.round_energy(decision, observation, cell, TRAINING))
    np.testing.assert_allclose(spent_j.sum(), energy_j, rtol=rtol)
    timed = fcjax.as_decided(decision, observation, cell, TRAINING)
    assert fcjax.round_time(decision.scheduled, decision.share, *timed) <= deadline_s * (1 + rtol)
    np.testing.assert_allclose(decision.round_s, deadline_s, rtol=1e-7)
    np.testing.assert_allclose(decision.share.sum(), 1, rtol=rtol)
    assert (np.asarray(decision.share > 0) == np.asarray(decision.scheduled)).all()
    assert ((decision.power_w <= cell.power_w) | ~decision.scheduled).all()
    assert (decision.cpu_hz <= cell.cpu_hz).all()


@pytest.mark.parametrize("num_worlds", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_against_slsqp(num_worlds, x64):
    rng = np.random.default_rng(0)
    differences, limits = [], set()
    for _ in range(num_worlds):
        scheduled, observation, cell = draw(rng)
        deadline_s = fastest(scheduled, observation, cell) * (1 + 10 ** rng.uniform(-3, 1))
        energy_j, decision = solve(scheduled, deadline_s, observation, cell)
        check_decision(energy_j, decision, deadline_s, observation, cell)
        expected_j = by_slsqp(scheduled, deadline_s, observation, cell)
        differences.append(abs(float(energy_j) / expected_j - 1))
        full = (np.asarray(decision.power_w >= cell.power_w), np.asarray(decision.cpu_hz >= cell.cpu_hz))
        limits |= set(zip(*(part[scheduled].tolist() for part in full), strict=True))
    print(f"\nleast_energy: {num_worlds} worlds, largest relative difference {max(differences):.1e}")
    assert all(difference < 1e-6 for difference in differences)
    assert len(limits) == 4 or num_worlds < 100, "every combination of limits occurs"


@pytest.mark.slow
def test_single_precision():
    """The error is that of the deadline, which is rounded too, or a few roundings."""
    rng = np.random.default_rng(1)
    for _ in range(30):
        seed, factor = int(rng.integers(1 << 30)), 1 + 10 ** rng.uniform(-4, 2)
        with jax.enable_x64(True):
            exact = draw(np.random.default_rng(seed))
            deadline_s = np.float32(fastest(*exact) * factor)
            expected_j = float(solve(exact[0], np.float64(deadline_s), *exact[1:])[0])
            slope_w = float(slopes(exact[0], np.float64(deadline_s), *exact[1:])[0])
        drawn = draw(np.random.default_rng(seed), np.float32)
        energy_j, decision = solve(drawn[0], deadline_s, *drawn[1:])
        assert energy_j.dtype == np.float32
        check_decision(energy_j, decision, deadline_s, *drawn[1:], rtol=5e-6)
        rounding_j = np.finfo(np.float32).eps * (abs(slope_w) * deadline_s + expected_j)
        assert abs(float(energy_j) - expected_j) < 8 * rounding_j


@pytest.mark.parametrize("factor", [1.0001, 1.03, 1.4, 8.0])
def test_gradients_match_finite_differences(factor, x64):
    scheduled, observation, cell = draw(np.random.default_rng(4))
    scheduled[:4], scheduled[4:] = True, False
    cell = dataclasses.replace(cell, download_bits=np.asarray(1e6))
    at = (fastest(scheduled, observation, cell) * factor, observation, cell)
    energy_j = float(solve(scheduled, *at)[0])
    leaves, structure = jax.tree.flatten(at)
    step = min(1e-3 * (factor - 1), 1e-5)
    for index, (leaf, slope) in enumerate(zip(leaves, jax.tree.leaves(both(scheduled, *at)[1]), strict=True)):
        for place in np.argwhere(np.isfinite(leaf) & (np.asarray(leaf).dtype == float)):

            def energy(log_scale, index=index, place=place):
                scaled = np.array(leaves[index], float)
                scaled[tuple(place)] *= math.exp(log_scale)
                changed = [*leaves[:index], jnp.asarray(scaled), *leaves[index + 1 :]]
                return float(solve(scheduled, *jax.tree.unflatten(structure, changed))[0])

            expected = (energy(step) - energy(-step)) / (2 * step)
            found = float(slope[tuple(place)] * leaf[tuple(place)])
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-11 * energy_j / step)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.01, 1.5])
def test_second_derivatives(factor, x64):
    _, observation, cell = draw(np.random.default_rng(3), num_devices=3)
    scheduled = np.array([True, True, False])
    deadline_s = fastest(scheduled, observation, cell) * factor

    def log_energy(exponents):
        by_log, _ = worlds.log_leaves(
            lambda *changed: fcjax.least_energy(scheduled, deadline_s * jnp.exp(exponents["deadline_s"]), *changed)[0],
            observation,
            cell,
        )
        return jnp.log(by_log(exponents))

    _, zeros = worlds.log_leaves(None, observation, cell)
    check_derivatives(log_energy, {**zeros, "deadline_s": jnp.zeros(())}, rtol=1e-4, step=1e-5)


@pytest.mark.slow
def test_decisions_have_derivatives(x64):
    """The share, power and frequency of a device move with the deadline, as the implicit function theorem says."""
    scheduled, observation, cell = draw(np.random.default_rng(5))
    scheduled[:] = True
    deadline_s = fastest(scheduled, observation, cell) * 1.2

    def decide(deadline_s):
        decision = fcjax.least_energy(scheduled, deadline_s, observation, cell)[1]
        return jnp.stack([decision.share, decision.power_w / cell.power_w, decision.cpu_hz / cell.cpu_hz])

    _, found = jax.jvp(decide, (deadline_s,), (deadline_s,))
    step = 1e-5
    expected = (decide(deadline_s * (1 + step)) - decide(deadline_s * (1 - step))) / (2 * step)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    assert np.abs(found).max() > 1e-2


def test_energy_falls_as_the_deadline_grows(x64):
    rng = np.random.default_rng(6)
    for _ in range(10):
        scheduled, observation, cell = draw(rng)
        deadlines_s = fastest(scheduled, observation, cell) * (1 + np.geomspace(1e-6, 1e4, 30))
        energies_j = [float(solve(scheduled, deadline_s, observation, cell)[0]) for deadline_s in deadlines_s]
        assert (np.diff(energies_j) < 0).all()


def test_limits_of_the_deadline(x64):
    """At the earliest deadline, the decision is that of `allocate`; with much time, only E0 = N0 S ln2/h^2 is left."""
    rng = np.random.default_rng(7)
    for _ in range(10):
        scheduled, observation, cell = draw(rng)
        decision = fcjax.allocate(scheduled, observation, cell)
        full_j = fcjax.round_energy(decision, observation, cell, TRAINING).sum()
        energy_j, least = solve(scheduled, decision.round_s, observation, cell)
        np.testing.assert_allclose(energy_j, full_j, rtol=1e-6)
        np.testing.assert_allclose(least.share, decision.share, atol=1e-7)
        np.testing.assert_allclose(least.power_w, cell.power_w, rtol=1e-6)
        np.testing.assert_allclose(least.cpu_hz, cell.cpu_hz, rtol=1e-6)
        too_early, fast = solve(scheduled, decision.round_s * (1 - 1e-9), observation, cell)
        assert too_early == np.inf
        np.testing.assert_allclose(fast.share, decision.share, rtol=1e-12)
        np.testing.assert_allclose(fast.round_s, decision.round_s, rtol=1e-12)
        least_j = np.float64(worlds.RADIO["noise_psd_w_hz"]) * cell.upload_bits * math.log(2) / observation.gain
        for deadline_s in np.array([1e7, np.inf]):
            energy_j, _ = solve(scheduled, deadline_s, observation, cell)
            np.testing.assert_allclose(energy_j, least_j[scheduled].sum(), rtol=1e-5)


@in_both_precisions
def test_allocation_spends_no_less(dtype):
    """Also in single precision, at the round time of `allocate`."""
    rng = np.random.default_rng(8)
    for _ in range(30):
        scheduled, observation, cell = draw(rng, dtype)
        decision = fcjax.allocate(scheduled, observation, cell)
        full_j = fcjax.round_energy(decision, observation, cell, TRAINING).sum()
        energy_j, _ = solve(scheduled, decision.round_s, observation, cell)
        assert energy_j <= full_j * (1 + 10 * np.finfo(dtype).eps)


@pytest.mark.parametrize("capacitance", [0.0, 1e-40])
def test_sending_alone_has_a_closed_form(capacitance, x64):
    """If computing costs nothing, a lone device sends for as long as it can, at the power that this takes."""
    _, observation, cell = draw(np.random.default_rng(9))
    lone = np.arange(NUM_DEVICES) == 2
    cell = dataclasses.replace(cell, capacitance=np.full(NUM_DEVICES, capacitance), download_bits=np.asarray(0.0))
    deadline_s = fastest(lone, observation, cell) * 1.3
    energy_j, decision = solve(lone, deadline_s, observation, cell)
    send_s, bits, band_hz = deadline_s - observation.compute_s[2], cell.upload_bits[2], worlds.RADIO["bandwidth_hz"]
    noise_w = band_hz * worlds.RADIO["noise_psd_w_hz"]
    power_w = noise_w / observation.gain[2] * (2 ** (bits / (band_hz * send_s)) - 1)
    np.testing.assert_allclose(energy_j, power_w * send_s, rtol=1e-9)
    np.testing.assert_allclose(decision.power_w[2], power_w, rtol=1e-9)
    assert decision.cpu_hz[2] == cell.cpu_hz[2]


def edge(dtype, **changes):
    """A case with enough time, and changes of single devices: {field: (device, value)}."""
    scheduled, observation, cell = draw(np.random.default_rng(10), dtype)
    scheduled[:], deadline_s = True, np.asarray(2 * fastest(np.ones_like(scheduled), observation, cell))
    parts = {"observation": observation, "cell": cell}
    for name, (device, value) in changes.items():
        owner = "cell" if hasattr(cell, name) else "observation"
        values = np.array(getattr(parts[owner], name))
        values[device] = value
        parts[owner] = dataclasses.replace(parts[owner], **{name: values})
    return scheduled, deadline_s.astype(dtype), parts["observation"], parts["cell"]


def no_nan(*trees):
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(trees))


@in_both_precisions
@pytest.mark.parametrize("changes", [{"gain": (1, 0.0)}, {"power_w": (1, 0.0)}, {"compute_s": (1, np.inf)}])
def test_a_device_that_never_finishes(changes, dtype):
    scheduled, deadline_s, observation, cell = edge(dtype, **changes)
    energy_j, decision = solve(scheduled, deadline_s, observation, cell)
    assert energy_j == np.inf
    assert decision.round_s == np.inf
    no_nan(decision, slopes(scheduled, deadline_s, observation, cell))
    assert (decision.power_w > 0).all()
    others = np.arange(NUM_DEVICES) != 1
    energy_j, decision = solve(others, deadline_s, observation, cell)
    check_decision(energy_j, decision, deadline_s, observation, cell, rtol=1e-5)
    gradients = slopes(others, deadline_s, observation, cell)
    no_nan(gradients)
    assert gradients[1].gain[1] == 0


@in_both_precisions
def test_nobody_and_no_time(dtype):
    scheduled, deadline_s, observation, cell = edge(dtype)
    energy_j, decision = solve(~scheduled, deadline_s, observation, cell)
    assert energy_j == 0
    assert decision.round_s == 0
    assert (decision.share == 0).all()
    zeros = slopes(~scheduled, deadline_s, observation, cell)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(zeros))
    no_time = np.zeros_like(deadline_s)
    energy_j, decision = solve(scheduled, no_time, observation, cell)
    assert energy_j == np.inf
    np.testing.assert_allclose(decision.round_s, fastest(scheduled, observation, cell), rtol=1e-6)
    no_nan(decision, slopes(scheduled, no_time, observation, cell))


@in_both_precisions
@pytest.mark.parametrize("changes", [{"compute_s": (1, 0.0)}, {"capacitance": (1, 0.0)}, {"sample_floor_s": (1, 0.0)}])
def test_computing_that_takes_no_time_or_energy(changes, dtype):
    scheduled, deadline_s, observation, cell = edge(dtype, **changes)
    energy_j, decision = solve(scheduled, deadline_s, observation, cell)
    check_decision(energy_j, decision, deadline_s, observation, cell, rtol=1e-5)
    no_nan(slopes(scheduled, deadline_s, observation, cell))
    usual_j, _ = solve(*edge(dtype))
    assert energy_j < usual_j


def test_an_unavailable_device_cannot_be_scheduled(x64):
    scheduled, deadline_s, observation, cell = edge(np.float64)
    away = dataclasses.replace(observation, available=np.arange(NUM_DEVICES) > 0)
    assert solve(scheduled, deadline_s, away, cell)[0] == np.inf
    assert solve(np.arange(NUM_DEVICES) > 0, deadline_s, away, cell)[0] < np.inf


@pytest.mark.slow
def test_vmap_equals_a_loop():
    scheduled, deadline_s, observation, cell = edge(np.float32)
    deadlines_s = deadline_s * np.float32([0.3, 0.51, 0.7, 1, 30])
    together = jax.vmap(fcjax.least_energy, in_axes=(None, 0, None, None))(scheduled, deadlines_s, observation, cell)
    for index, one_s in enumerate(deadlines_s):
        alone = solve(scheduled, one_s, observation, cell)
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a[index], b, rtol=1e-4, atol=1e-9)


@pytest.mark.slow
def test_steps_and_batches_of_the_training_count():
    scheduled, deadline_s, observation, cell = edge(np.float32)
    training = fcjax.Training(local_steps=2, batch_size=10)
    energy_j, decision = fcjax.least_energy(scheduled, deadline_s, observation, cell, training)
    spent_j = fcjax.round_energy(decision, observation, cell, training).sum()
    np.testing.assert_allclose(energy_j, spent_j, rtol=1e-5)
    assert energy_j < solve(scheduled, deadline_s, observation, cell)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"access": "tdma"}, "least_energy splits the bandwidth itself: cell.access must be 'fdma', got 'tdma'"),
        ({"access": "ofdma"}, "cell.access must be 'fdma', got 'ofdma'"),
        ({"deadline_s": -1.0}, "deadline_s must be zero or more, got -1"),
        ({"deadline_s": math.nan}, "deadline_s must be zero or more, got nan"),
        ({"deadline_s": np.ones(2)}, "deadline_s must have shape (), got (2,); use jax.vmap for batches"),
        ({"scheduled": np.ones(3, bool)}, "scheduled must have shape (6,), got (3,)"),
        ({"capacitance": -1.0}, "cell.capacitance must be zero or more, and finite, got -1"),
    ],
)
def test_errors(change, message):
    scheduled, deadline_s, observation, cell = edge(np.float32)
    ((name, value),) = change.items()
    arguments = {"scheduled": scheduled, "deadline_s": deadline_s}
    if name in arguments:
        arguments[name] = value
    else:
        cell = dataclasses.replace(cell, **change)
    with pytest.raises(ValueError, match=re.escape(message)):
        fcjax.least_energy(*arguments.values(), observation, cell)
