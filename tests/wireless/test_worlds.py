import functools
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from observing import (
    CELL,
    KEY,
    NUM_DEVICES,
    NUM_ROUNDS,
    NUM_RUNS,
    TRAINING,
    cell_of,
    observe_in_turn,
    rows_of,
    run_keys,
)
from scipy import stats

from fcjax.types import World
from fcjax.wireless import latency, radio, worlds

FADING = {"scatter": 0.3, "shadowing_db": 8.0}


pytestmark = pytest.mark.usefixtures("quick_compilation")


MANY = cell_of(NUM_DEVICES, **FADING)


def observe_runs(world, cell=MANY):
    """Observes all rounds of all runs in one program; returns the observations and states, (run, round, device)."""
    init_keys, rounds_keys = run_keys()
    states = jax.vmap(lambda key: world.init(key, cell))(init_keys)
    after, observations = _observe_runs(world.observe, rounds_keys, states, cell)
    return jax.device_get(observations), jax.device_get(after)


@functools.partial(jax.jit, static_argnums=0)
def _observe_runs(observe, rounds_keys, states, cell):
    def step(state, round_key):
        state, observation = observe(round_key, state, cell, TRAINING)
        return state, (state, observation)

    return jax.vmap(lambda keys, first: lax.scan(step, first, keys)[1])(rounds_keys, states)


def error_of(memory, num=NUM_RUNS * NUM_ROUNDS * NUM_DEVICES):
    """Returns 6 standard errors of a correlation over rounds that are correlated themselves."""
    return 6 * math.sqrt((1 + memory) / max(1 - memory, 2 / NUM_ROUNDS) / num)


def correlation(x, y):
    return np.corrcoef(np.ravel(x), np.ravel(y))[0, 1]


# Contract


WORLDS = {
    "redrawn": lambda num: worlds.redrawn(),
    "static": lambda num: worlds.static(0.7),
    "mobile": lambda num: worlds.mobile(100.0, fading_memory=0.5),
    "trace": lambda num: worlds.trace(*(rows[:, :num] for rows in rows_of(7, NUM_DEVICES))),
    "trace once": lambda num: worlds.trace(*(rows[:, :num] for rows in rows_of(7, NUM_DEVICES)[:2]), at_end="error"),
    "intermittent": lambda num: worlds.intermittent(0.6, 0.5),
    "intermittent trace": lambda num: worlds.intermittent(0.6, 0.5, WORLDS["trace"](num)),
}
each_world = pytest.mark.parametrize("make", WORLDS.values(), ids=WORLDS)


@each_world
def test_types_are_the_same_in_all_rounds(make, dtype):
    cell = cell_of(4, **FADING)
    state = jax.eval_shape(lambda: make(4).init(KEY, cell))
    after, observation = jax.eval_shape(lambda state: make(4).observe(KEY, state, cell, TRAINING), state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert jax.tree.leaves(after) == jax.tree.leaves(state)
    for values in (observation.gain, observation.compute_s):
        assert (values.shape, values.dtype) == ((4,), dtype)
    if observation.available is not True:
        assert (observation.available.shape, observation.available.dtype) == ((4,), bool)


@each_world
def test_jit_vmap_scan_and_number_of_devices_change_nothing(make):
    together, _ = observe_runs(make(NUM_DEVICES))
    assert all(np.all(np.isfinite(leaf) & (leaf >= 0)) for leaf in jax.tree.leaves(together))
    for run in range(NUM_RUNS):
        in_turn = observe_in_turn(make(4), cell_of(4, **FADING), 3, run)
        same = jax.tree.map(lambda leaf, run=run: leaf[run, :3, :4], together)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4), same, in_turn)


@each_world
@pytest.mark.parametrize("fading", [{"scatter": 0.0, "shadowing_db": 0.0}, FADING], ids=["no fading", "fading"])
def test_limits_hold_in_all_rounds(make, fading):
    cell = cell_of(NUM_DEVICES, radius_m=3.0, **fading)  # many devices are closer than the smallest distance
    world = make(NUM_DEVICES)
    limits = world.limits(cell, TRAINING)
    observation, _ = observe_runs(world, cell)
    assert np.all(observation.gain <= np.asarray(limits.gain) * (1 + 1e-6))
    assert np.all(observation.compute_s >= np.asarray(limits.compute_s) * (1 - 1e-6))


def test_limits_of_a_cell_are_tight():
    cell = cell_of(4, radius_m=0.5, sample_rate_hz=1e9)  # all devices are next to the base station
    observation = observe_in_turn(worlds.redrawn(), cell, 3)
    limits = worlds.limits_of_cell(cell, TRAINING)
    np.testing.assert_allclose(observation.gain, np.full((3, 4), limits.gain), rtol=1e-6)
    np.testing.assert_allclose(observation.compute_s, np.full((3, 4), limits.compute_s), rtol=1e-4)
    assert limits.num_rounds is None
    for fading in ({"scatter": 0.1}, {"shadowing_db": 1.0}):
        assert worlds.limits_of_cell(cell_of(3, **fading), TRAINING).gain == math.inf


@pytest.mark.parametrize("name", WORLDS)
def test_parameters_share_one_program(name):
    assert WORLDS[name](4) == WORLDS[name](5)
    assert hash(WORLDS[name](4)) == hash(WORLDS[name](5))


def test_programs_of_intermittent_worlds_depend_on_the_inner_world():
    world = worlds.intermittent(0.5)
    assert worlds.intermittent(0.9, 0.3) == world
    assert worlds.intermittent(0.5, world="static") != world
    assert pickle.loads(pickle.dumps(world.observe)) == world.observe  # as in a worker


def test_computation_times_are_the_same_in_all_worlds():
    expected = observe_runs(worlds.redrawn())[0].compute_s
    for world in (worlds.static(), worlds.mobile(10.0), worlds.intermittent(0.5)):
        np.testing.assert_allclose(observe_runs(world)[0].compute_s, expected, rtol=1e-5)


def test_gradients_are_finite():
    """At speed 0 and memory 1 some slopes are infinite; they count as 0."""

    def mean_db(parameters, cell):
        world = worlds.mobile(**parameters)
        return jnp.log(world.observe(jax.random.key(1), world.init(KEY, cell), cell, TRAINING)[1].gain).mean()

    cell = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), cell_of(4, **FADING))
    parameters = {
        "speed_m_s": jnp.array([0.0, 3.0, 1e4, 3.0]),
        "memory": jnp.array([0.5, 0.0, 0.5, 1.0]),
        "fading_memory": jnp.array([0.5, 0.0, 0.5, 1.0]),
    }
    gradient = jax.jit(jax.vmap(jax.grad(mean_db, argnums=(0, 1)), (0, None)))(parameters, cell)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    np.testing.assert_allclose(gradient[1].reference_gain * cell.reference_gain, np.ones(4), rtol=1e-5)
    assert np.all(gradient[0]["fading_memory"] != 0)


# Redrawn


def test_redrawn_draws_placement_fading_and_computation_of_the_round():
    cell = cell_of(4, **FADING)
    place, fade, compute, *_ = jax.random.split(KEY, 6)
    state, observation = worlds.redrawn().observe(KEY, (), cell, TRAINING)
    assert state == worlds.redrawn().init(KEY, cell) == ()
    np.testing.assert_array_equal(
        observation.gain, radio.path_gain(radio.place(place, cell), cell) * radio.fade(fade, cell)
    )
    np.testing.assert_array_equal(observation.compute_s, latency.compute_time(compute, 640, cell))
    assert observation.available is True


# Static


def test_static_devices_keep_their_channels_without_fading():
    cell = cell_of(NUM_DEVICES, scatter=0.0, shadowing_db=8.0)
    observation, states = observe_runs(worlds.static(), cell)
    np.testing.assert_array_equal(observation.gain, np.broadcast_to(observation.gain[:, :1], observation.gain.shape))
    distance_m = states.distance_m[:, 0].ravel()
    assert stats.kstest((distance_m / 600) ** 2, "uniform").pvalue > 1e-3
    shadow_db = 10 * np.log10(observation.gain[:, 0].ravel() / np.asarray(radio.path_gain(distance_m, cell)))
    assert stats.kstest(shadow_db / 8, "norm").pvalue > 1e-3


def test_static_fading_is_that_of_the_round():
    cell = cell_of(4, scatter=0.3, shadowing_db=0.0)
    world = worlds.static()
    state = world.init(KEY, cell)
    round_key = jax.random.key(5)
    factor = world.observe(round_key, state, cell, TRAINING)[1].gain / radio.path_gain(state.distance_m, cell)
    np.testing.assert_allclose(factor, radio.fade(jax.random.split(round_key, 6)[1], cell), rtol=1e-5)


@pytest.mark.parametrize(
    ("world", "memory"),
    [
        (worlds.static(), 0.0),
        (worlds.static(0.9), 0.9),
        (worlds.static(1.0), 1.0),
        (worlds.mobile(50.0, fading_memory=0.6), 0.6),
    ],
)
def test_fading_has_its_memory_and_distribution(world, memory):
    cell = cell_of(NUM_DEVICES, scatter=1.0, shadowing_db=0.0, path_loss_exponent=0.0, reference_gain=1.0)
    observation, states = observe_runs(world, cell)
    error = error_of(memory)
    for lag in (1, 3):
        scattered = states.scattered[:, lag:], states.scattered[:, :-lag]
        assert correlation(*scattered) == pytest.approx(memory**lag, abs=error)
        # The power of a complex Gaussian has the squared correlation.
        power = observation.gain[:, lag:], observation.gain[:, :-lag]
        assert correlation(*power) == pytest.approx(memory ** (2 * lag), abs=error)
    assert observation.gain.mean() == pytest.approx(1, abs=error)
    for k in (0, -1):
        assert stats.kstest(observation.gain[:, k].ravel(), "expon").pvalue > 1e-3


def test_correlated_fading_is_rician():
    scatter = 0.2  # 2 power/s is chi-squared with 2 degrees of freedom and noncentrality 2 (1 - s)/s
    cell = cell_of(NUM_DEVICES, scatter=scatter, shadowing_db=0.0, path_loss_exponent=0.0, reference_gain=1.0)
    gain = observe_runs(worlds.static(0.8), cell)[0].gain
    power = gain[:, -1].ravel().astype(float)
    assert stats.kstest(2 * power / scatter, stats.ncx2(2, 2 * (1 - scatter) / scatter).cdf).pvalue > 1e-3
    assert gain.mean() == pytest.approx(1, abs=error_of(0.8))


# Mobile


@pytest.mark.parametrize("memory", [0.0, 0.5, 0.9])
def test_velocity_is_gauss_markov(memory):
    """In a cell without an edge in reach, positions give the velocities."""
    speed_m_s, interval_s = 500.0, 2.0
    _, states = observe_runs(worlds.mobile(speed_m_s, memory, interval_s), cell_of(NUM_DEVICES, radius_m=1e7, **FADING))
    inside = np.abs(states.position_m).max(axis=1) < 9e6
    position_m = states.position_m.astype(complex).swapaxes(1, 2)[inside]  # (device, round)
    velocity = np.diff(position_m) / interval_s
    error = error_of(memory)
    assert len(velocity) > NUM_DEVICES
    assert np.mean(np.abs(velocity) ** 2) == pytest.approx(speed_m_s**2, rel=error)
    for parts in (velocity.real, velocity.imag):
        assert parts.mean() == pytest.approx(0, abs=speed_m_s * error)
        assert stats.kstest(parts[:, -1] / (speed_m_s / math.sqrt(2)), "norm").pvalue > 1e-3
        for lag in (1, 3):
            assert correlation(parts[:, lag:], parts[:, :-lag]) == pytest.approx(memory**lag, abs=error)


@pytest.mark.parametrize(("speed_m_s", "memory"), [(20.0, 0.9), (300.0, 0.5), (300.0, 1.0), (20_000.0, 0.9)])
def test_mobile_devices_stay_uniform_in_the_disc(speed_m_s, memory):
    _, states = observe_runs(worlds.mobile(speed_m_s, memory))
    position = states.position_m / 600
    assert np.abs(position).max() <= 1 + 1e-4
    for k in (0, 30, -1):
        assert stats.kstest(np.abs(position[:, k].ravel()) ** 2, "uniform").pvalue > 1e-3
        assert stats.kstest(np.angle(position[:, k].ravel()) / (2 * np.pi) + 0.5, "uniform").pvalue > 1e-3
    assert np.mean(np.abs(position) ** 2) == pytest.approx(0.5, abs=error_of(1.0) / math.sqrt(12))
    assert np.mean(np.abs(states.velocity) ** 2) == pytest.approx(1, abs=error_of(memory))


def reflect_step_by_step(position, heading, length):
    """Follows a path in the unit disc from wall to wall."""
    while True:
        along = (position * heading.conjugate()).real
        to_wall = -along + math.sqrt(along**2 + 1 - abs(position) ** 2)
        if length <= to_wall:
            return position + length * heading, heading
        position += to_wall * heading
        position /= abs(position)
        heading -= 2 * (heading * position.conjugate()).real * position
        heading /= abs(heading)
        length -= to_wall


def test_paths_are_reflected_like_light(x64):
    rng = np.random.default_rng(0)
    num = 500
    position = np.sqrt(rng.uniform(size=num)) * np.exp(2j * np.pi * rng.uniform(size=num))
    heading = np.exp(2j * np.pi * rng.uniform(size=num))
    length = rng.exponential(5, num)
    expected = [reflect_step_by_step(*path) for path in zip(position, heading, length, strict=True)]
    paths = jax.jit(worlds._travel)(position, heading, length, 1.0)
    np.testing.assert_allclose(np.stack(paths, axis=1), expected, atol=1e-6)


def test_paths_along_the_edge_and_through_the_centre(dtype):
    position = np.array([1, 1, 0, 0.5, 0.5])
    heading = np.array([1j, 1, 1j, 1, 0])
    length = np.array([math.pi / 2, 0.5, 4, 0, 0])
    end, direction = jax.jit(worlds._travel)(position + 0j, heading, length, 1.0)
    np.testing.assert_allclose(end, [1j, 0.5, 0, 0.5, 0.5], atol=2e-3)
    np.testing.assert_allclose(direction, [-1, -1, 1j, 1, 0], atol=2e-3)


def test_devices_without_speed_are_static():
    cell = cell_of(NUM_DEVICES, scatter=0.0, shadowing_db=8.0)
    (static, before), (mobile, after) = (
        observe_runs(world, cell) for world in (worlds.static(0.4), worlds.mobile(0.0, fading_memory=0.4))
    )
    np.testing.assert_allclose(mobile.gain, static.gain, rtol=1e-4)
    np.testing.assert_allclose(after.scattered, before.scattered, atol=1e-5)


def test_shadowing_is_correlated_by_distance():
    """On a straight path with steps of d, the correlation at lag n is exp(-n d/decorrelation_m)."""
    cell = cell_of(NUM_DEVICES, scatter=0.0, shadowing_db=8.0, radius_m=1e6, path_loss_exponent=0.0, reference_gain=1.0)
    observation, states = observe_runs(worlds.mobile(10.0, memory=1.0, decorrelation_m=50.0), cell)
    shadow = 10 * np.log10(observation.gain) / 8
    step_m = 10 * np.abs(states.velocity[:, 0])
    for k in (0, -1):
        assert stats.kstest(shadow[:, k].ravel(), "norm").pvalue > 1e-3
    for lag in (1, 5):
        expected = np.mean(np.exp(-lag * step_m / 50))
        assert np.mean(shadow[:, lag:] * shadow[:, :-lag]) == pytest.approx(expected, abs=error_of(0.9))


# Intermittent


@pytest.mark.parametrize(("probability", "memory"), [(0.3, 0.0), (0.5, 0.8), (0.9, 0.4), (1.0, 0.5), (0.0, 0.5)])
def test_availability_is_a_markov_chain(probability, memory):
    is_on = observe_runs(worlds.intermittent(probability, memory))[0].available

    def assert_frequency(drawn, expected):
        if drawn.size:
            error = 5 * math.sqrt(expected * (1 - expected) / drawn.size)
            assert drawn.mean() == pytest.approx(expected, abs=error)

    assert_frequency(is_on[:, 0], probability)
    assert_frequency(is_on[:, -1], probability)
    assert_frequency(is_on[:, 1:][is_on[:, :-1]], probability + memory * (1 - probability))
    assert_frequency(is_on[:, 1:][~is_on[:, :-1]], probability * (1 - memory))
    if 0 < probability < 1:  # devices are independent
        assert correlation(is_on[..., 1:], is_on[..., :-1]) == pytest.approx(0, abs=error_of(memory))


def test_availability_with_full_memory_does_not_change():
    is_on = observe_runs(worlds.intermittent(0.5, 1.0))[0].available
    np.testing.assert_array_equal(is_on, np.broadcast_to(is_on[:, :1], is_on.shape))
    assert 0.4 < is_on.mean() < 0.6


@pytest.mark.parametrize("name", ["redrawn", "trace"])
def test_intermittent_world_leaves_channels_as_they_are(name):
    inner = WORLDS[name](NUM_DEVICES)
    alone, _ = observe_runs(inner)
    observation, states = observe_runs(worlds.intermittent(0.5, 0.3, inner))
    np.testing.assert_allclose(observation.gain, alone.gain, rtol=1e-4, atol=1e-18)  # deep fades lose digits
    np.testing.assert_allclose(observation.compute_s, alone.compute_s, rtol=1e-5)
    np.testing.assert_array_equal(observation.available, states.is_on & alone.available)


def test_chains_are_independent_of_channels_and_of_each_other():
    observation, states = observe_runs(worlds.intermittent(0.5, world=worlds.intermittent(0.5)))
    error = error_of(0.0)
    assert np.mean(observation.available) == pytest.approx(0.25, abs=error)
    assert correlation(states.is_on, states.inner.is_on) == pytest.approx(0, abs=error)
    for values in (np.log(observation.gain), observation.compute_s):
        assert correlation(states.is_on, values) == pytest.approx(0, abs=error)


# Names and parameters


def test_worlds_by_name(tmp_path):
    path = tmp_path / "measured.csv"
    path.write_text("round,device,compute_s,gain\n0,0,1,1\n")
    assert worlds.by_name("redrawn") == worlds.redrawn()
    assert worlds.by_name("static(fading_memory=0.9)") == worlds.static()
    assert worlds.by_name("mobile(speed_m_s=3)") == worlds.mobile(1.0)
    assert worlds.by_name(f"from-file(path={str(path)!r}, at_end='error')") == worlds.trace(
        np.ones((4, 2)), np.ones((4, 2))
    )
    nested = worlds.by_name("intermittent(probability=0.5, world='mobile(speed_m_s=3)')")
    assert nested == worlds.intermittent(1.0, world=worlds.mobile(1.0))
    assert float(nested.init(KEY, CELL).inner.speed_m_s) == 3
    assert worlds.REGISTRY.names() == [
        "redrawn",
        "static",
        "mobile(speed_m_s=...)",
        "intermittent(probability=...)",
        "from-file(path=...)",
    ]
    with pytest.raises(ValueError, match=r"unknown world 'moving'"):
        worlds.by_name("moving")


def test_inner_world_may_lack_limits():
    inner = World(lambda key, cell: (), worlds.redrawn().observe)
    found = worlds.intermittent(0.5, world=inner).limits(CELL, TRAINING)
    expected = worlds.limits_of_cell(CELL, TRAINING)
    assert found == expected._replace(always_available=False)
    assert expected.always_available


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: worlds.static(1.1), r"fading_memory must be between 0 and 1, got 1.1"),
        (lambda: worlds.static(np.ones(3)), r"fading_memory must have shape \(\), got \(3,\)"),
        (lambda: worlds.mobile(-1.0), r"speed_m_s must be zero or more, and finite, got -1"),
        (lambda: worlds.mobile(np.inf), r"speed_m_s must be zero or more, and finite, got inf"),
        (lambda: worlds.mobile(1e9), r"speed_m_s must be between 1e-30 and 3e\+08, got 1e\+09"),
        (lambda: worlds.mobile(1.0, memory=-0.1), r"memory must be between 0 and 1, got -0.1"),
        (lambda: worlds.mobile(1.0, memory=np.nan), r"memory must be between 0 and 1, got nan"),
        (lambda: worlds.mobile(1.0, interval_s=0.0), r"interval_s must be positive and finite, got 0"),
        (lambda: worlds.mobile(1.0, fading_memory=2), r"fading_memory must be between 0 and 1, got 2"),
        (lambda: worlds.mobile(1.0, decorrelation_m=-5.0), r"decorrelation_m must be positive and finite, got -5"),
        (lambda: worlds.mobile("fast"), r"speed_m_s must be a real number.*'fast'"),
        (lambda: worlds.intermittent(1.5), r"probability must be between 0 and 1, got 1.5"),
        (lambda: worlds.intermittent(0.5, -1), r"memory must be between 0 and 1, got -1"),
        (lambda: worlds.intermittent(0.5, world=None), r"world must be a fcjax.World or the name of one, got None"),
        (lambda: worlds.intermittent(0.5, world="nowhere"), r"unknown world 'nowhere'"),
    ],
)
def test_errors_name_bad_parameters(make, message):
    with pytest.raises(ValueError, match=message):
        make()
