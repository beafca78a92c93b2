import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivatives import check_derivatives
from scipy import stats

import fcjax
from fcjax import radio
from fcjax.types import Outages
from fcjax.wireless import outages

CELL = fcjax.Cell(bandwidth_hz=20e6, noise_psd_w_hz=10**-20.4, power_w=np.array([0.01, 0.02, 0.005]), upload_bits=1.6e6)
GAIN = np.array([3e-13, 2e-12, 5e-11])
SHARE = np.array([0.2, 0.3, 0.5])


def decide(share=SHARE, **settings):
    return fcjax.Decision(np.asarray(share) > 0, np.asarray(share), np.asarray(1.0), **settings)


def observe(gain=GAIN):
    return fcjax.Observation(np.asarray(gain), np.full(np.shape(gain), 0.5))


def typed(tree, dtype):
    """The same values as arrays; None and booleans stay as they are."""
    return jax.tree.map(lambda x: x if np.asarray(x).dtype == bool else jnp.asarray(x, dtype), tree)


def cell_of(num):
    return dataclasses.replace(CELL, power_w=np.full(num, 0.01))


def lose(model, key, decision=None, observation=None, cell=CELL):
    """Draws once, from the initial state."""
    return jax.jit(model.lose)(key, model.init(cell), decision or decide(), observation or observe(), cell)


def frequencies(model, num_draws, **settings):
    keys = jax.random.split(jax.random.key(1), num_draws)
    return np.asarray(jax.jit(jax.vmap(lambda key: lose(model, key, **settings)[1]))(keys), np.float64).mean(0)


def assert_frequencies(found, probability, num_draws):
    limit = stats.norm.isf(1e-3 / len(found) / 2)  # a correct model fails once in 1000 seeds
    assert np.all(np.abs(found - probability) <= limit * np.sqrt(probability * (1 - probability) / num_draws))


def test_none_loses_nothing():
    state, lost = lose(outages.none(), jax.random.key(0))
    assert state == ()
    assert lost.dtype == bool
    np.testing.assert_array_equal(lost, np.zeros(3, bool))


@pytest.mark.parametrize("probability", [0.3, [0.02, 0.5, 0.9], [0, 1, 0.1]])
def test_erasures_have_the_given_frequencies(probability):
    model = outages.erasures(np.array(probability))
    assert_frequencies(frequencies(model, 20_000), np.broadcast_to(probability, 3), 20_000)


def test_erasures_are_independent():
    keys = jax.random.split(jax.random.key(2), 20_000)
    model = outages.erasures(0.4)
    lost = np.asarray(jax.vmap(lambda key: lose(model, key)[1])(keys), np.float64)
    of_pairs = np.corrcoef(lost.T)[np.triu_indices(3, 1)]
    assert np.all(np.abs(of_pairs) <= stats.norm.isf(1e-3 / 6) / math.sqrt(20_000))


def test_waterfall_has_the_frequencies_of_its_formula():
    probability = np.asarray(outages.loss_probability(0.5, decide(), observe(), CELL), np.float64)
    assert np.all((probability > 0.01) & (probability < 0.99))
    assert_frequencies(frequencies(outages.waterfall(0.5), 20_000), probability, 20_000)


@pytest.mark.parametrize("access", ["fdma", "ofdma", "tdma"])
@pytest.mark.parametrize("power_w", [None, 0.004, np.array([0.01, 0.003, 0.001])])
def test_loss_probability_against_plain_python(access, power_w, dtype):
    cell = typed(dataclasses.replace(CELL, access=access), dtype)
    decision, observation = typed((decide(power_w=power_w), observe()), dtype)
    found = outages.loss_probability(1.5, decision, observation, cell)
    for i in range(3):
        bandwidth_hz = 20e6 if access == "tdma" else SHARE[i] * 20e6
        power = np.broadcast_to(CELL.power_w if power_w is None else power_w, 3)[i]
        expected = 1 - math.exp(-1.5 * bandwidth_hz * 10**-20.4 / (power * GAIN[i]))
        assert float(found[i]) == pytest.approx(expected, rel=5e-6 if dtype == np.float32 else 1e-10)
    assert found.dtype == dtype


def test_tiny_probabilities_are_accurate(dtype):
    decision, observation, cell = typed((decide(), observe([1e-3, 1e-1, 1e2]), CELL), dtype)
    found = outages.loss_probability(1.0, decision, observation, cell)
    exponent = SHARE * 20e6 * 10**-20.4 / (CELL.power_w * [1e-3, 1e-1, 1e2])
    expected = [-math.expm1(-x) for x in exponent]
    assert max(expected) < 1e-7
    np.testing.assert_allclose(found, expected, rtol=2e-6 if dtype == np.float32 else 1e-13)


def test_default_threshold_is_that_of_chen_et_al():
    threshold = outages.waterfall().init(CELL)
    np.testing.assert_allclose(threshold, 10**0.0023, rtol=1e-6)
    np.testing.assert_allclose(threshold, radio.db_to_linear(0.023))


@pytest.mark.parametrize("access", ["fdma", "tdma"])
def test_no_signal_is_always_lost_and_nothing_is_nan(access, dtype):
    cell = dataclasses.replace(CELL, access=access, power_w=np.array([0.01, 0.0, 0.01, 0.01]))
    decision, observation, cell = typed((decide([0.5, 0.5, 0, 0]), observe([0, 1e-12, 1e-12, 0]), cell), dtype)
    found = np.asarray(outages.loss_probability(1.0, decision, observation, cell))
    np.testing.assert_array_equal(found[[0, 1]], 1)
    assert np.all((found >= 0) & (found <= 1))
    # A decision of no power is as good as no gain.
    silent = outages.loss_probability(1.0, dataclasses.replace(decision, power_w=0.0), observation, cell)
    np.testing.assert_array_equal(silent, np.ones(4))
    assert np.all(lose(outages.waterfall(), jax.random.key(0), decision, observation, cell)[1][:2])

    def total(decision, observation, cell):
        return jnp.sum(outages.loss_probability(1.0, decision, observation, cell))

    gradient = jax.jit(jax.grad(total, (0, 1, 2), allow_int=True))(decision, observation, cell)
    numbers = [leaf for leaf in jax.tree.leaves(gradient) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert all(np.all(np.isfinite(leaf)) for leaf in numbers)


def test_derivatives(x64):
    """With respect to the logarithms of all six numbers that matter."""

    def log_probability(exponents):
        factor = {name: jnp.exp(exponent) for name, exponent in exponents.items()}
        decision = dataclasses.replace(decide(), share=SHARE * factor["share"], power_w=0.01 * factor["power"])
        observation = dataclasses.replace(observe(), gain=GAIN * factor["gain"])
        cell = dataclasses.replace(
            CELL, bandwidth_hz=20e6 * factor["bandwidth"], noise_psd_w_hz=10**-20.4 * factor["noise"]
        )
        return jnp.log(outages.loss_probability(factor["threshold"], decision, observation, cell))

    zeros = {name: jnp.zeros(3) for name in ("share", "power", "gain")}
    zeros |= {name: jnp.zeros(()) for name in ("bandwidth", "noise", "threshold")}
    check_derivatives(log_probability, zeros, rtol=1e-6)


@pytest.mark.parametrize("model", [outages.erasures(0.5), outages.waterfall(5.0)], ids=["erasures", "waterfall"])
def test_draws_do_not_depend_on_number_of_devices(model):
    for seed in range(5):
        few, many = (
            lose(model, jax.random.key(seed), decide(np.full(num, 0.2)), observe(np.full(num, 3e-12)), cell_of(num))[1]
            for num in (5, 50)
        )
        np.testing.assert_array_equal(few, many[:5])


@pytest.mark.parametrize(
    "model", [outages.none(), outages.erasures(0.5), outages.waterfall(2.0)], ids=["none", "erasures", "waterfall"]
)
def test_jit_and_vmap_change_nothing(model, dtype):
    cell = typed(CELL, dtype)
    decision, observation = typed((decide(), observe()), dtype)
    keys = jax.random.split(jax.random.key(3), 5)
    state = model.init(cell)
    one_by_one = [model.lose(key, state, decision, observation, cell) for key in keys]
    draw = jax.jit(jax.vmap(model.lose, (0, None, None, None, None)))
    after, lost = draw(keys, state, decision, observation, cell)
    np.testing.assert_array_equal(lost, [lost for _, lost in one_by_one])
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new, jnp.broadcast_to(old, new.shape)), after, state)


@pytest.mark.parametrize(("factory", "values"), [(outages.erasures, [0.1, 0.9]), (outages.waterfall, [0.5, 2, None])])
def test_one_program_serves_all_parameters(factory, values):
    made = [factory(value) for value in values]
    assert all(model == made[0] for model in made)
    num_traces = 0

    @jax.jit
    def draw(key, state):
        nonlocal num_traces
        num_traces += 1
        return made[0].lose(key, state, decide(), observe(), CELL)[1]

    for model in made:
        np.testing.assert_array_equal(draw(jax.random.key(0), model.init(CELL)), lose(model, jax.random.key(0))[1])
    assert num_traces == 1


def test_by_name():
    assert outages.by_name("none") == outages.none()
    assert outages.by_name("erasures(probability=0.25)").init(CELL) == 0.25
    assert outages.by_name("waterfall(threshold=2)").init(CELL) == 2
    assert isinstance(outages.by_name("waterfall"), Outages)
    assert outages.REGISTRY.names() == ["none", "erasures(probability=...)", "waterfall"]
    with pytest.raises(ValueError, match=r"unknown outages 'erasure', did you mean erasures\?"):
        outages.by_name("erasure")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: outages.erasures(1.5), r"probability must be between 0 and 1, got 1.5"),
        (lambda: outages.erasures([0.1, -0.2]), r"probability\[1\] must be between 0 and 1, got -0.2"),
        (lambda: outages.erasures(np.nan), r"probability must be between 0 and 1, got nan"),
        (lambda: outages.erasures("0.1"), r"probability must be a real number.*'0.1'"),
        (
            lambda: outages.erasures(np.full(4, 0.1)).init(CELL),
            r"probability must have shape \(\) or \(3,\), got \(4,\)",
        ),
        (lambda: outages.waterfall(-1.0), r"threshold must be zero or more, and finite, got -1"),
        (lambda: outages.waterfall(np.inf), r"threshold must be zero or more, and finite, got inf"),
        (lambda: outages.waterfall(np.ones(3)), r"threshold must have shape \(\), got \(3,\)"),
        (
            lambda: outages.loss_probability(1.0, decide([0.5, -0.5, 1]), observe(), CELL),
            r"decision.share\[1\].*got -0.5",
        ),
        (
            lambda: outages.loss_probability(1.0, decide(power_w=np.ones(2)), observe(), CELL),
            r"decision.power_w must have shape \(\) or \(3,\), got \(2,\)",
        ),
        (
            lambda: outages.loss_probability(1.0, decide(), observe([1e-12, np.nan, 1e-12]), CELL),
            r"observation.gain\[1\].*got nan",
        ),
    ],
)
def test_errors_name_bad_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()
