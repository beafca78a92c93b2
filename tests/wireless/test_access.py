"""TDMA and OFDMA against enumeration; test_fdma and test_sets test FDMA."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import worlds
from jax.test_util import check_grads

import fcjax
from fcjax import policies
from fcjax.wireless.access import scheme_of

pytestmark = pytest.mark.usefixtures("quick_compilation")
SCHEMES = ({"access": "tdma"}, {"access": "ofdma", "num_blocks": 12}, {"access": "ofdma", "num_blocks": 50})
IDS = ("tdma", "ofdma-12", "ofdma-50")


def oracle_time(radio):
    """The oracle of a scheme's round time, for arguments of `worlds.for_oracle`."""
    if radio["access"] == "tdma":
        return oracles.tdma_time
    return lambda *args, **kwargs: oracles.ofdma_time(*args, **kwargs, num_blocks=radio["num_blocks"])


def times_of_subsets(world, radio):
    """The round time of every subset, by the oracle."""
    numbers = worlds.for_oracle(world)
    arrays = {name: numbers[name] for name in ("gain", "compute_s", "power_w")}
    others = {name: value for name, value in numbers.items() if name not in arrays}
    num_devices = len(world["gain"])
    subsets = itertools.chain(*(itertools.combinations(range(num_devices), n) for n in range(1, num_devices + 1)))
    time = oracle_time(radio)
    return {s: time(**{name: value[list(s)] for name, value in arrays.items()}, **others) for s in subsets}


@pytest.mark.parametrize("radio", SCHEMES, ids=IDS)
@pytest.mark.parametrize("num_devices", [1, 4, pytest.param(6, marks=pytest.mark.slow)])
def test_every_subset_against_the_oracle(num_devices, radio, x64):
    rng = np.random.default_rng(num_devices)
    allocate = jax.jit(jax.vmap(fcjax.allocate, (0, None, None)))
    for _ in range(4):
        world = worlds.draw(rng, num_devices)
        observation, cell = worlds.build(world, np.float64, **radio)
        times = times_of_subsets(world, radio)
        masks = np.array([[device in subset for device in range(num_devices)] for subset in times])
        decision = allocate(masks, observation, cell)
        np.testing.assert_allclose(decision.round_s, list(times.values()), rtol=1e-12)
        assert np.all(np.sum(decision.share, 1) <= 1 + 1e-12)
        assert np.all((decision.share > 0) == masks)
        again = jax.vmap(fcjax.round_time, (0, 0, None, None))(masks, decision.share, observation, cell)
        np.testing.assert_allclose(again, decision.round_s, rtol=1e-12)
        if radio["access"] == "ofdma":
            blocks = np.asarray(decision.share) * radio["num_blocks"]
            np.testing.assert_allclose(blocks, np.round(blocks), atol=1e-9)
            # With one block less, a device would be late.
            fewer = np.where(masks & (blocks > 1.5), blocks - 1, blocks) / radio["num_blocks"]
            for row in np.flatnonzero(np.any(fewer != decision.share, 1)):
                for device in np.flatnonzero(fewer[row] != decision.share[row]):
                    share = np.where(np.arange(num_devices) == device, fewer[row], decision.share[row])
                    late_s = fcjax.round_time(masks[row], share, observation, cell)
                    assert late_s > decision.round_s[row] * (1 + 1e-12)


@pytest.mark.parametrize("radio", SCHEMES, ids=IDS)
@pytest.mark.parametrize("num_devices", [1, 5, pytest.param(7, marks=pytest.mark.slow)])
def test_fastest_sets_against_all_subsets(num_devices, radio, dtype):
    rng = np.random.default_rng(10 + num_devices)
    solve = jax.jit(fcjax.fastest_sets)
    for _ in range(4):
        world = worlds.draw(rng, num_devices)
        round_s, scheduled = solve(*worlds.build(world, dtype, **radio))
        np.testing.assert_array_equal(np.sum(scheduled, 1), np.arange(1, num_devices + 1))
        times = times_of_subsets(world, radio)
        for n in range(1, num_devices + 1):
            expected_s = min(time for s, time in times.items() if len(s) == n)
            np.testing.assert_allclose(round_s[n - 1], expected_s, rtol=1e-6 if dtype == np.float32 else 1e-12)
            found_s = times[tuple(map(int, np.flatnonzero(scheduled[n - 1])))]
            np.testing.assert_allclose(found_s, expected_s, rtol=1e-6 if dtype == np.float32 else 1e-12)


@pytest.mark.parametrize("radio", SCHEMES, ids=IDS)
def test_fastest_addition_and_cheapest_set_against_all_subsets(radio, x64):
    num_devices = 6
    world = worlds.draw(np.random.default_rng(3), num_devices)
    observation, cell = worlds.build(world, np.float64, **radio)
    scheme, upload = scheme_of(cell), fcjax.radio.uploads(observation, cell)
    times = times_of_subsets(world, radio)
    add = jax.jit(lambda mask: scheme.fastest_addition(mask, upload))
    for subset in times:
        if len(subset) == num_devices:
            continue
        device, round_s = add(np.isin(np.arange(num_devices), subset))
        others = [i for i in range(num_devices) if i not in subset]
        expected_s = {i: times[tuple(sorted((*subset, i)))] for i in others}
        assert int(device) in others
        np.testing.assert_allclose(round_s, min(expected_s.values()), rtol=1e-12)
        np.testing.assert_allclose(expected_s[int(device)], min(expected_s.values()), rtol=1e-12)
    cost = lambda n, round_s: round_s + 2 / n  # noqa: E731
    found = scheme.cheapest_set(cost, upload)
    least = min(cost(len(s), time) for s, time in times.items())
    chosen = tuple(map(int, np.flatnonzero(found)))
    np.testing.assert_allclose(cost(len(chosen), times[chosen]), least, rtol=1e-12)


@pytest.mark.parametrize("radio", SCHEMES, ids=IDS)
def test_required_share_meets_the_deadline(radio, x64):
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(4), 8), np.float64, **radio)
    alone_s = np.array([fcjax.allocate(np.arange(8) == i, observation, cell).round_s for i in range(8)])
    assert np.all(fcjax.required_share(alone_s * (1 + 1e-9), observation, cell) <= 1)
    assert np.all(np.isinf(fcjax.required_share(alone_s * (1 - 1e-9), observation, cell)))
    share = fcjax.required_share(2 * alone_s, observation, cell)
    if radio["access"] == "tdma":
        np.testing.assert_allclose(share, (alone_s - observation.compute_s) / (2 * alone_s), rtol=1e-12)
        return
    for i in range(8):
        mask = np.arange(8) == i
        assert fcjax.round_time(mask, np.where(mask, share, 0), observation, cell) <= 2 * alone_s[i]
        fewer = share[i] - 1 / radio["num_blocks"]
        if fewer > 1e-9:
            assert fcjax.round_time(mask, np.where(mask, fewer, 0), observation, cell) > 2 * alone_s[i]


@pytest.mark.parametrize("radio", SCHEMES, ids=IDS)
@pytest.mark.parametrize("change", [{"gain": 0.0}, {"compute_s": np.inf}])
def test_devices_that_never_finish(change, radio, dtype):
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(5), 5), dtype, **radio)
    name, value = next(iter(change.items()))
    values = np.where(np.arange(5) == 2, value, getattr(observation, name)).astype(dtype)
    observation = dataclasses.replace(observation, **{name: values})
    lost = fcjax.allocate(np.arange(5) >= 2, observation, cell)
    assert np.isinf(lost.round_s)
    assert not np.isnan(lost.share).any()
    without = fcjax.allocate(np.arange(5) != 2, observation, cell)
    assert np.isfinite(without.round_s)
    round_s, scheduled = fcjax.fastest_sets(observation, cell)
    np.testing.assert_array_equal(np.isinf(round_s), np.arange(5) == 4)
    np.testing.assert_array_equal(scheduled[3], np.arange(5) != 2)
    nobody = fcjax.allocate(np.zeros(5, bool), observation, cell)
    assert nobody.round_s == 0
    assert not np.any(nobody.share)


def test_more_devices_than_blocks(dtype):
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(6), 5), dtype, access="ofdma", num_blocks=3)
    round_s, _ = fcjax.fastest_sets(observation, cell)
    np.testing.assert_array_equal(np.isinf(round_s), np.arange(1, 6) > 3)
    assert np.isinf(fcjax.allocate(np.ones(5, bool), observation, cell).round_s)
    with pytest.raises(ValueError, match=r"everybody needs a block for each device: cell.num_blocks must be 5 or more"):
        policies.everybody().init(cell)


@pytest.mark.parametrize("radio", SCHEMES, ids=IDS)
def test_gradients_of_the_round_time(radio, x64):
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(7), 5, radius_m=(300, 900)), np.float64, **radio)
    scheduled = np.array([True, False, True, True, False])
    by_exponents, zeros = worlds.log_leaves(lambda o, c: fcjax.allocate(scheduled, o, c).round_s, observation, cell)
    check_grads(by_exponents, (zeros,), order=1, modes=("fwd", "rev"), rtol=1e-5)


def test_ofdma_approaches_fdma_and_tdma_is_slower_with_one_speed(x64):
    world = worlds.draw(np.random.default_rng(8), 10)
    mask = np.ones(10, bool)
    time = lambda **radio: float(fcjax.allocate(mask, *worlds.build(world, np.float64, **radio)).round_s)  # noqa: E731
    fine, coarse = time(access="ofdma", num_blocks=10_000), time(access="ofdma", num_blocks=20)
    assert time() <= fine <= coarse
    np.testing.assert_allclose(fine, time(), rtol=1e-2)


@pytest.mark.parametrize("radio", SCHEMES, ids=IDS)
def test_exact_is_never_worse_than_greedy(radio, x64):
    data = fcjax.data.synthetic.classification(6000, 10, num_features=8, num_labels=10)
    cell = fcjax.presets.shi2020(data, distribution="iid", num_devices=8, **radio).cell

    @jax.jit
    def gap(key):
        context = fcjax.random_context(key, cell, fcjax.Training(num_samples=np.full(8, 700.0)))
        costs = []
        for policy in (policies.fast_converge(), policies.exact()):
            _, decision = policy.select(key, policy.init(cell), context)
            costs.append(policies.objective(jnp.sum(decision.scheduled), decision.round_s, 0.05, context))
        return costs[0] / costs[1]

    ratio = np.array([gap(key) for key in jax.random.split(jax.random.key(0), 50)])
    assert np.all(ratio >= 1 - 1e-9)


def test_shares_must_be_whole_blocks():
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(9), 3), np.float32, access="ofdma", num_blocks=2)
    assert np.isinf(fcjax.round_time(np.ones(3, bool), np.full(3, 1 / 3, np.float32), observation, cell))
    with pytest.raises(ValueError, match="n must be a whole number from 1 to 2, the number of blocks, got 3"):
        policies.random(3).init(cell)
    fine = dataclasses.replace(cell, num_blocks=60_000)
    for n in (1, 2, 3):
        decision = fcjax.allocate(np.arange(3) < n, observation, fine)
        again = fcjax.round_time(decision.scheduled, decision.share, observation, fine)
        np.testing.assert_allclose(again, decision.round_s, rtol=1e-5)


def test_gradients_of_shares_with_a_device_out_of_reach(x64):
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(10), 4), np.float64, access="tdma")
    gain = np.where(np.arange(4) == 3, 0, observation.gain)
    share = lambda compute_s: fcjax.allocate(  # noqa: E731
        np.arange(4) < 3, fcjax.Observation(gain, compute_s), cell
    ).share[0]
    assert np.isfinite(jax.grad(share)(jnp.asarray(observation.compute_s))).all()


@pytest.mark.slow
@pytest.mark.parametrize("access", ["fdma", "ofdma", "tdma"])
def test_centralized_training_under_any_scheme(access):
    data = fcjax.data.synthetic.classification(6000, 100, num_features=8, num_labels=10)
    experiment = fcjax.presets.shi2020(data, distribution="iid", budget_s=3.0, hidden=(), access=access)
    run = fcjax.simulate(jax.random.key(0), policies.everybody(), fcjax.presets.centralized(experiment))
    assert run.num_rounds > 1


def test_errors_name_bad_schemes():
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(0), 3), np.float32)
    with pytest.raises(ValueError, match=r"cell.access must be fdma, ofdma or tdma, got 'cdma'"):
        fcjax.allocate(np.ones(3, bool), observation, dataclasses.replace(cell, access="cdma"))
    with pytest.raises(ValueError, match=r"cell.num_blocks must be a whole number from 1 to 100000, got 0"):
        fcjax.fastest_sets(observation, dataclasses.replace(cell, access="ofdma", num_blocks=0))
