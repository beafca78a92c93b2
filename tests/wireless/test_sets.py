"""Tests `cheapest_set`. test_bandwidth tests `fastest_sets` and the fastest addition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import worlds
from jax import lax

import fcjax
from fcjax import radio
from fcjax.wireless import sets

pytestmark = pytest.mark.usefixtures("quick_compilation")
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
@pytest.mark.parametrize("num_devices", [1, 40])
def test_cheapest_set_is_cheapest_over_all_sizes(num_devices, x64):
    for which, cost in enumerate(COSTS.values()):
        world = worlds.draw(np.random.default_rng(which), num_devices, radius_m=(300, 900))
        observation, cell = worlds.build(world, np.float64)
        round_s, scheduled = fcjax.fastest_sets(observation, cell)
        costs = np.asarray(cost(jnp.arange(1, num_devices + 1), round_s))
        expected = scheduled[np.argmin(np.where(np.isnan(costs), np.inf, costs))]
        np.testing.assert_array_equal(cheapest_set(which, radio.uploads(observation, cell)), expected)


def test_cheapest_set_excludes_devices_that_never_finish(x64):
    world = worlds.draw(np.random.default_rng(3), 8, radius_m=(300, 900))
    world["gain"][[2, 5]] = 0
    upload = radio.uploads(*worlds.build(world, np.float64))
    found = np.asarray(cheapest_set(list(COSTS).index("as the bound"), upload))
    assert found.any()
    assert not found[[2, 5]].any()


def test_memory_is_linear():
    upload = radio.uploads(*worlds.build(worlds.draw(np.random.default_rng(0), 5000), np.float32))
    program = jax.jit(lambda upload: sets.cheapest_set(COSTS["as the bound"], upload))
    assert program.lower(upload).compile().memory_analysis().temp_size_in_bytes < 100 * 4 * 5000
