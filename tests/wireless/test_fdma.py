import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import worlds
from derivatives import check_derivatives
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

import fcjax
from fcjax import radio
from fcjax.wireless import fdma

NUM_WORLDS = 10_000
MAX_DEVICES = 64


@pytest.fixture(scope="module")
def many_worlds():
    """10,000 worlds of 1 to 64 devices with random schedules, and SciPy's round times.

    Each world is padded to 64 devices with unscheduled ones, so that one call solves all worlds.
    """
    rng = np.random.default_rng(2020)
    drawn = []
    for _ in range(NUM_WORLDS):
        num_devices = int(rng.integers(1, MAX_DEVICES + 1))
        world = worlds.draw(rng, num_devices)
        scheduled = rng.uniform(size=num_devices) < rng.uniform()
        scheduled[rng.integers(num_devices)] = True
        members = {name: value[scheduled] for name, value in world.items()}
        world["scheduled"], world["round_s"] = scheduled, oracles.round_time(**worlds.for_oracle(members))
        drawn.append(world)
    return {
        name: np.stack([np.resize(world[name], MAX_DEVICES) for world in drawn])
        for name in ("gain", "compute_s", "power_w")
    } | {
        "scheduled": np.stack([np.pad(w["scheduled"], (0, MAX_DEVICES - w["scheduled"].size)) for w in drawn]),
        "round_s": np.array([world["round_s"] for world in drawn]),
    }


def in_batches(function, dtype, batch):
    """Maps function(scheduled, observation, cell) over all worlds in one call."""
    arrays = (jnp.asarray(batch[name], dtype) for name in ("gain", "compute_s", "power_w"))

    def one(scheduled, gain, compute_s, power_w):
        return function(scheduled, fcjax.Observation(gain, compute_s), fcjax.Cell(power_w=power_w, **worlds.RADIO))

    return jax.jit(jax.vmap(one))(batch["scheduled"], *arrays)


def test_ten_thousand_worlds_against_brentq(many_worlds, dtype):
    decision = in_batches(fcjax.allocate, dtype, many_worlds)
    scheduled, expected_s = many_worlds["scheduled"], many_worlds["round_s"]
    share, round_s = np.asarray(decision.share, np.float64), np.asarray(decision.round_s, np.float64)
    assert not np.isnan(share).any()
    assert np.all(share[~scheduled] == 0)
    assert np.all(share[scheduled] > 0)
    single = dtype == np.float32
    np.testing.assert_allclose(share.sum(1), 1, rtol=0, atol=1e-6 if single else 1e-12)
    np.testing.assert_allclose(round_s, expected_s, rtol=1e-6 if single else 1e-11)
    band = {name: worlds.RADIO[name] for name in ("bandwidth_hz", "noise_psd_w_hz")}
    gain, compute_s, power_w = (np.asarray(many_worlds[x], np.float64) for x in ("gain", "compute_s", "power_w"))
    rate = oracles.rate(np.where(scheduled, share, 1), gain, power_w=power_w, **band)
    finish_s = np.where(scheduled, compute_s + worlds.RADIO["upload_bits"] / rate, round_s[:, None])
    np.testing.assert_allclose(
        finish_s, np.broadcast_to(round_s[:, None], finish_s.shape), rtol=1e-6 if single else 1e-11
    )


def test_allocate_needs_few_solves(many_worlds, dtype):
    """Counts the searches of Alg. 1 and the one that turns the round time into shares."""

    def count(scheduled, observation, cell):
        member, upload = fdma.solvable(scheduled, radio.uploads(observation, cell))
        return 1 + fdma._solve(member, upload)[2]

    full_worlds = {name: value[:, :20] for name, value in many_worlds.items() if name != "round_s"}
    full_worlds["scheduled"] = np.ones_like(full_worlds["scheduled"])
    everybody = np.asarray(in_batches(count, dtype, full_worlds))
    anybody = np.asarray(in_batches(count, dtype, many_worlds))
    assert max(everybody.mean(), anybody.mean()) <= 5
    assert max(everybody.max(), anybody.max()) <= 8


@pytest.fixture
def world(dtype):
    return worlds.build(worlds.draw(np.random.default_rng(1), 6), dtype)


def test_single_device_gets_the_whole_band(world):
    observation, cell = world
    for i in range(6):
        decision = fcjax.allocate(np.arange(6) == i, observation, cell)
        alone_s = observation.compute_s[i] + cell.upload_bits / radio.rate(np.ones(6), observation, cell)[i]
        np.testing.assert_array_equal(decision.share, np.arange(6) == i)
        np.testing.assert_allclose(decision.round_s, alone_s, rtol=1e-6)


def test_nobody_scheduled(world):
    decision = jax.jit(fcjax.allocate)(np.zeros(6, bool), *world)
    assert decision.round_s == 0
    np.testing.assert_array_equal(decision.share, np.zeros(6))


@pytest.mark.parametrize("change", [{"gain": 0.0}, {"compute_s": np.inf}])
def test_device_that_never_finishes(world, change):
    observation, cell = world
    (name, value), scheduled = *change.items(), np.arange(6) < 3
    never = dataclasses.replace(observation, **{name: np.where(np.arange(6) == 1, value, getattr(observation, name))})
    decision = fcjax.allocate(scheduled, never, cell)
    assert decision.round_s == np.inf
    np.testing.assert_array_equal(decision.share, np.arange(6) == 1)
    # If it is not scheduled, it affects nobody.
    np.testing.assert_array_equal(
        fcjax.allocate(np.arange(6) > 1, never, cell).share, fcjax.allocate(np.arange(6) > 1, observation, cell).share
    )
    gradient = jax.grad(lambda o: fcjax.allocate(np.arange(6) > 1, o, cell).round_s)(never)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_equal_devices_share_equally(dtype):
    cell = fcjax.Cell(power_w=np.full(8, 0.01, dtype), **worlds.RADIO)
    observation = fcjax.Observation(np.full(8, 1e-11, dtype), np.full(8, 0.5, dtype))
    share = fcjax.allocate(np.arange(8) < 5, observation, cell).share
    np.testing.assert_allclose(share, np.where(np.arange(8) < 5, 0.2, 0), rtol=4 * float(np.finfo(dtype).eps))


def test_very_short_uploads_keep_their_precision():
    """Uploads take 10 us after 500 s of computation, which float32 cannot resolve in the round time."""
    gain, compute_s = np.float32([1e-9, 2e-9, 5e-9]), np.float32([500.0, 500.0, 400.0])
    cell = fcjax.Cell(20e6, 10**-20.4, power_w=np.full(3, 0.01, np.float32), upload_bits=1e3)
    decision = fcjax.allocate(np.array([True, True, False]), fcjax.Observation(gain, compute_s), cell)
    upload_s = 1e3 / np.float64(radio.rate(decision.share, fcjax.Observation(gain, compute_s), cell)[:2])
    assert upload_s[0] < 1e-4
    np.testing.assert_allclose(upload_s[0], upload_s[1], rtol=1e-6)


def test_earliest_times_that_round_to_the_same_number(dtype):
    """Uploads take at least 7e-13 s and 4e-10 s after 500 s of computation. Only differences show which is last."""
    gain, cell = np.array([1e-10, 2e-13], dtype), fcjax.Cell(20e6, 10**-20.4, np.full(2, 0.01, dtype), 10.0)
    shares = [
        fcjax.allocate(np.ones(2, bool), fcjax.Observation(gain, np.full(2, compute_s, dtype)), cell).share
        for compute_s in (500.0, 0.0)
    ]
    np.testing.assert_allclose(shares[0], shares[1], rtol=1e-5)
    assert shares[0][1] > 0.99


@pytest.mark.parametrize("weak", [1e-29, 1e-30, 1e-33, 1e-36])
def test_very_weak_signal_takes_the_whole_band(weak, dtype):
    gain = np.array([weak, 1e-11, 1e-11], dtype)
    cell = fcjax.Cell(20e6, 10**-20.4, np.full(3, 0.01, dtype), 1.6e6)
    decision = fcjax.allocate(np.ones(3, bool), fcjax.Observation(gain, np.full(3, 0.5, dtype)), cell)
    np.testing.assert_allclose(decision.share, [1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(decision.round_s, 10**-20.4 * 1.6e6 * np.log(2) / (0.01 * weak), rtol=1e-5)


def test_large_integers_are_accepted():
    observation = fcjax.Observation([1e-11] * 3, [0, 1, 0])
    for bits in (3_200_000_000, np.int64(3_200_000_000), np.full(3, 3_200_000_000)):
        cell = fcjax.Cell(5 * 10**9, 10**-20.4, [1, 2, 1], bits)
        same = fcjax.Cell(5e9, 10**-20.4, np.array([1.0, 2.0, 1.0]), 3.2e9)
        np.testing.assert_array_equal(
            fcjax.allocate([True, True, False], observation, cell).share,
            fcjax.allocate([True, True, False], observation, same).share,
        )


def test_vmap_matches_a_loop(dtype):
    rng = np.random.default_rng(9)
    cell = fcjax.Cell(power_w=np.full(12, 0.01, dtype), **worlds.RADIO)
    drawn = [worlds.draw(rng, 12) for _ in range(8)]
    stacked = fcjax.Observation(*(np.stack([w[x] for w in drawn]).astype(dtype) for x in ("gain", "compute_s")))
    scheduled = rng.uniform(size=(8, 12)) < 0.5
    batched = jax.vmap(fcjax.allocate, (0, 0, None))(scheduled, stacked, cell)
    for i in range(8):
        one = fcjax.allocate(scheduled[i], jax.tree.map(lambda x, i=i: x[i], stacked), cell)
        np.testing.assert_allclose(batched.share[i], one.share, rtol=1e-5 if dtype == np.float32 else 1e-13)
        np.testing.assert_allclose(batched.round_s[i], one.round_s, rtol=4 * float(np.finfo(dtype).eps))


def test_dtypes_follow_the_inputs(x64):
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(1), 6), np.float32)
    decision = fcjax.allocate(np.ones(6, bool), observation, cell)
    round_s, scheduled = fcjax.fastest_sets(observation, cell)
    assert decision.share.dtype == decision.round_s.dtype == round_s.dtype == np.float32
    assert decision.scheduled.dtype == scheduled.dtype == bool


def test_new_schedules_do_not_recompile(world):
    traces = []

    @jax.jit
    def allocate(scheduled, observation, cell):
        traces.append(1)
        return fcjax.allocate(scheduled, observation, cell)

    for n in range(7):
        allocate(np.arange(6) < n, *world)
    assert len(traces) == 1


@given(seed=st.integers(0, 2**31), num_devices=st.integers(2, 12))
def test_physics(seed, num_devices):
    """Relabelling changes nothing. A stronger signal or one device fewer never slows down a round."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(seed)
        world = {k: np.float64(v) for k, v in worlds.draw(rng, 12).items()}
        scheduled = np.arange(12) < num_devices
        decision = _allocate(scheduled, world)
        order = rng.permutation(12)
        relabelled = _allocate(scheduled[order], {k: v[order] for k, v in world.items()})
        np.testing.assert_allclose(relabelled.round_s, decision.round_s, rtol=1e-13)
        np.testing.assert_allclose(relabelled.share, decision.share[order], rtol=1e-8)
        stronger = world | {"gain": world["gain"] * np.where(np.arange(12) == 0, 2, 1)}
        assert _allocate(scheduled, stronger).round_s <= decision.round_s * (1 + 1e-14)
        assert _allocate(scheduled & (np.arange(12) != 1), world).round_s <= decision.round_s * (1 + 1e-14)


@jax.jit
def _allocate(scheduled, world):
    observation = fcjax.Observation(world["gain"], world["compute_s"])
    return fcjax.allocate(scheduled, observation, fcjax.Cell(power_w=world["power_w"], **worlds.RADIO))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("radius_m", [300, 3000])
def test_derivatives_wrt_every_leaf(radius_m, x64):
    drawn = worlds.draw(np.random.default_rng(4), 5, radius_m=(radius_m, radius_m + 1))
    observation, cell = worlds.build(drawn, np.float64)
    scheduled = np.array([True, False, True, True, True])

    def logarithms(observation, cell):
        decision = fcjax.allocate(scheduled, observation, cell)
        return jnp.log(decision.round_s), jnp.log(decision.share[scheduled])

    check_derivatives(*worlds.log_leaves(logarithms, observation, cell), rtol=1e-5)
    # The round time depends on every leaf.
    function, at = worlds.log_leaves(lambda o, c: fcjax.allocate(scheduled, o, c).round_s, observation, cell)
    gradient = jax.grad(function)(at)
    assert all(np.all(gradient[name] != 0) for name in ("bandwidth_hz", "noise_psd_w_hz", "upload_bits"))
    assert all(np.array_equal(gradient[name] != 0, scheduled) for name in ("gain", "power_w", "compute_s"))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_check_grads_of_the_round_time(x64):
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(5), 4), np.float64)
    function, at = worlds.log_leaves(lambda o, c: fcjax.allocate(np.arange(4) < 3, o, c).round_s, observation, cell)
    check_grads(jax.jit(function), (at,), order=2, eps=1e-4, rtol=1e-4)


def test_gradients_are_finite_and_have_the_right_sign(world):
    observation, cell = world
    gradient = jax.grad(lambda o: fcjax.allocate(np.ones(6, bool), o, cell).round_s)(observation)
    assert np.all(np.isfinite(gradient.gain))
    np.testing.assert_array_less(gradient.gain, 0)
    np.testing.assert_array_less(0, gradient.compute_s)


@pytest.mark.parametrize(
    ("scheduled", "message"),
    [
        (np.ones(5, bool), r"scheduled must have shape \(6,\), got \(5,\)"),
        (np.ones((2, 6), bool), r"scheduled must have shape \(6,\), got \(2, 6\); use jax.vmap for batches"),
        (np.arange(6), r"scheduled must be a mask of booleans.*int"),
        ("many", r"scheduled must be a mask of booleans.*<U4"),
        (None, r"scheduled must be a mask of booleans.*object"),
    ],
)
def test_errors_name_bad_schedules(scheduled, message, world):
    with pytest.raises(ValueError, match=message):
        fcjax.allocate(scheduled, *world)
    with pytest.raises(ValueError, match=message):
        fcjax.round_time(scheduled, np.full(6, 1 / 6), *world)


def test_extreme_ratios_of_compute_times(dtype):
    """The ratios of the times overflow float32."""
    cell = fcjax.Cell(2e7, 4e-21, np.full(3, 0.01, dtype), 1e4)
    observation = fcjax.Observation(np.array([1e-7, 1e-7, 1e-10], dtype), np.array([1e-40, 1e28, 1.0], dtype))
    decision = fcjax.allocate(np.ones(3, bool), observation, cell)
    assert np.all(decision.share > 0)
    np.testing.assert_allclose(np.sum(decision.share), 1, rtol=1e-6)
    np.testing.assert_allclose(decision.round_s, 1e28, rtol=1e-6)
    assert np.all(np.isfinite(fcjax.required_share(1e35, observation, cell)))


def test_errors_name_bad_cells_even_under_jit(world):
    observation, cell = world
    with pytest.raises(ValueError, match=r"observation.gain must have shape \(6,\), got \(3,\)"):
        jax.jit(fcjax.allocate)(np.ones(6, bool), dataclasses.replace(observation, gain=np.ones(3)), cell)
    with pytest.raises(ValueError, match=r"cell.bandwidth_hz must be positive.*-1"):
        fcjax.fastest_sets(observation, dataclasses.replace(cell, bandwidth_hz=-1.0))
