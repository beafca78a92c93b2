import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import worlds
from jax import lax

import fcjax
from fcjax import radio
from fcjax.wireless import sets

COSTS = {
    "as the bound": lambda n, round_s: 3 * round_s + jnp.sqrt(round_s) + 20 / n,
    "steps": lambda n, round_s: jnp.ceil(4 * round_s) + jnp.ceil(30 / n),  # with many ties
    "time alone": lambda n, round_s: round_s,
    "number alone": lambda n, round_s: -n.astype(round_s.dtype),
    "up and down": lambda n, round_s: round_s + 2 * jnp.cos(n.astype(round_s.dtype)),
    "none possible": lambda n, round_s: jnp.full_like(round_s, jnp.inf),
    "small sets impossible": lambda n, round_s: jnp.where(n < 3, jnp.nan, round_s),
    "large sets impossible": lambda n, round_s: jnp.where(round_s > 1.5, jnp.inf, round_s + 9 / n),
}


@jax.jit
def cheapest_set(which, upload):
    """Uses one program for all costs."""
    return sets.cheapest_set(lambda n, round_s: lax.switch(which, list(COSTS.values()), n, round_s), upload)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("num_devices", [1, 40])
def test_cheapest_set_is_cheapest_over_all_sizes(num_devices, x64):
    for which, cost in enumerate(COSTS.values()):
        world = worlds.draw(np.random.default_rng(which), num_devices, radius_m=(300, 900))
        observation, cell = worlds.build(world, np.float64)
        round_s, scheduled = fcjax.fastest_sets(observation, cell)
        costs = np.asarray(cost(jnp.arange(1, num_devices + 1), round_s))
        expected = scheduled[np.argmin(np.where(np.isnan(costs), np.inf, costs))]
        np.testing.assert_array_equal(cheapest_set(which, radio.uploads(observation, cell)), expected)


@pytest.mark.usefixtures("quick_compilation")
def test_cheapest_set_excludes_devices_that_never_finish(x64):
    world = worlds.draw(np.random.default_rng(3), 8, radius_m=(300, 900))
    world["gain"][[2, 5]] = 0
    upload = radio.uploads(*worlds.build(world, np.float64))
    found = np.asarray(cheapest_set(list(COSTS).index("as the bound"), upload))
    assert found.any()
    assert not found[[2, 5]].any()


@pytest.mark.usefixtures("quick_compilation")
def test_cheapest_set_needs_little_memory():
    upload = radio.uploads(*worlds.build(worlds.draw(np.random.default_rng(0), 5000), np.float32))
    program = jax.jit(lambda upload: sets.cheapest_set(COSTS["as the bound"], upload))
    assert program.lower(upload).compile().memory_analysis().temp_size_in_bytes < 100 * 4 * 5000


@pytest.mark.parametrize("num_values", [1, 256, 257, 1000])
def test_smallest_mask_against_a_stable_sort(num_values, dtype):
    """Bisection, for many values, finds what sorting finds, with ties, both signs and infinities."""
    rng = np.random.default_rng(num_values)
    smallest_mask = jax.jit(sets.smallest_mask)
    for values in (
        rng.normal(size=num_values) * 10.0 ** rng.integers(-30, 30, num_values),
        rng.integers(-3, 3, num_values) * 0.5,
        rng.choice([-np.inf, -0.0, 0.0, np.finfo(dtype).tiny, np.inf], num_values),
    ):
        values = values.astype(dtype)
        for size in {0, 1, num_values // 3, num_values - 1, num_values}:
            expected = np.isin(np.arange(num_values), np.argsort(values, kind="stable")[:size])
            np.testing.assert_array_equal(smallest_mask(values, size), expected)


@pytest.mark.parametrize("num_devices", [1, 2, 6, pytest.param(10, marks=pytest.mark.slow)])
def test_fastest_sets_against_all_subsets(num_devices, dtype):
    rng = np.random.default_rng(num_devices)
    solve = jax.jit(fcjax.fastest_sets)
    for _ in range(8 if num_devices < 10 else 3):
        world = worlds.draw(rng, num_devices)
        round_s, scheduled = solve(*worlds.build(world, dtype))
        np.testing.assert_array_equal(np.sum(scheduled, 1), np.arange(1, num_devices + 1))
        assert np.all(np.diff(round_s) >= 0)
        for row, (expected_s, subset) in enumerate(oracles.best_subsets(**worlds.for_oracle(world))):
            np.testing.assert_allclose(round_s[row], expected_s, rtol=1e-6 if dtype == np.float32 else 1e-11)
            if dtype == np.float64:
                assert set(np.flatnonzero(scheduled[row])) == set(subset)


def test_fastest_sets_with_devices_that_never_finish(dtype):
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(0), 7), dtype)
    observation = dataclasses.replace(observation, gain=np.where(np.arange(7) % 3 == 0, 0, observation.gain))
    round_s, scheduled = fcjax.fastest_sets(observation, cell)
    np.testing.assert_array_equal(np.isinf(round_s), [False] * 4 + [True] * 3)
    np.testing.assert_array_equal(np.sum(scheduled, 1), np.arange(1, 8))
    np.testing.assert_array_equal(scheduled[3], np.arange(7) % 3 != 0)


@pytest.mark.slow
def test_fastest_sets_beat_random_swaps(dtype):
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(11), 150), dtype)
    round_s, scheduled = jax.jit(fcjax.fastest_sets)(observation, cell)
    assert np.all(np.diff(round_s) >= 0)
    allocate = jax.jit(jax.vmap(fcjax.allocate, (0, None, None)))
    np.testing.assert_allclose(allocate(np.asarray(scheduled), observation, cell).round_s, round_s, rtol=1e-6)
    rng = np.random.default_rng(0)
    swapped = np.array(scheduled)
    for row in range(149):
        swapped[row, rng.choice(np.flatnonzero(swapped[row]))] = False
        swapped[row, rng.choice(np.flatnonzero(~scheduled[row]))] = True
    assert np.all(allocate(swapped, observation, cell).round_s >= np.asarray(round_s) * (1 - 1e-6))


@pytest.mark.slow
def test_fastest_sets_gradients_match_allocate(x64):
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(6), 4), np.float64)
    _, scheduled = fcjax.fastest_sets(observation, cell)
    gradient = jax.jacrev(lambda o: fcjax.fastest_sets(o, cell)[0])(observation)
    expected = jax.vmap(jax.grad(lambda o, s: fcjax.allocate(s, o, cell).round_s), (None, 0))(observation, scheduled)
    np.testing.assert_allclose(gradient.gain, expected.gain, rtol=1e-9)
    np.testing.assert_allclose(gradient.compute_s, expected.compute_s, rtol=1e-9, atol=1e-15)


def test_fastest_sets_need_little_memory():
    """For 1000 devices, it needs less than one float per pair, besides the masks that it returns."""
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(0), 1000), np.float32)
    memory = jax.jit(fcjax.fastest_sets).lower(observation, cell).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 1000**2
