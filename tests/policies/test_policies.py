import dataclasses
import functools
import re

import contexts
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import worlds

import fcjax
from fcjax import policies

pytestmark = pytest.mark.usefixtures("quick_compilation")
LOCAL_STEPS = 5


def draw_context(rng, num_devices):
    """Draws a world and estimates: rho, beta and delta scatter around the paper's values."""
    world = worlds.draw(rng, num_devices, radius_m=(100, 1500), power_w=(5e-3, 2e-2))
    scale = 10 ** rng.uniform(-1, 1)
    return (
        world
        | {
            name: np.float32(value * 10 ** rng.uniform(-0.5, 0.5, num_devices) * (scale if name == "delta" else 1))
            for name, value in (("rho", 1.5), ("beta", 12.0), ("delta", 4.0))
        }
        | {"num_samples": np.float32(rng.integers(500, 3000, num_devices)), "phi": np.float32(10 ** rng.uniform(-2, 0))}
    )


def build_context(drawn, dtype, budget_s=60.0):
    observation, cell = worlds.build(drawn, dtype)
    estimates = fcjax.Estimates(*(jnp.asarray(drawn[name], dtype) for name in ("rho", "beta", "delta")))
    training = fcjax.Training(budget_s=budget_s, num_samples=jnp.asarray(drawn["num_samples"], dtype))
    return fcjax.RoundContext(observation, estimates, cell, training, jnp.array(0.0), jnp.array(0))


def for_oracle(drawn, budget_s=60.0):
    """Keyword arguments of `oracles.round_time` and of `oracles.objective`."""
    world = worlds.for_oracle({name: drawn[name] for name in ("gain", "compute_s", "power_w")})
    settings = {name: np.float64(drawn[name]) for name in ("rho", "beta", "delta", "num_samples", "phi")}
    return world, settings | {"budget_s": budget_s, "learning_rate": 0.01, "local_steps": LOCAL_STEPS}


@functools.partial(jax.jit, static_argnums=0)
def select_by(select, state, context):
    return select(jax.random.key(0), state, context)[1]


def decide(policy, context):
    return select_by(policy.select, policy.init(context.cell), context)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 4))])
def test_fast_converge_matches_the_published_algorithm(part, x64):
    rng = np.random.default_rng([2, part])
    sizes = []
    num_worlds, num_devices = ((250, 2), (300, 4), (250, 7), (200, 10))[part]
    for _ in range(num_worlds):
        drawn = draw_context(rng, num_devices)
        decision = decide(policies.fast_converge(drawn["phi"]), build_context(drawn, np.float64))
        world, settings = for_oracle(drawn)
        expected = oracles.greedy_schedule(world, **settings)
        assert set(np.flatnonzero(decision.scheduled)) == expected
        sizes.append(len(expected))
    assert len(set(sizes)) > 1, "the stopping rule should give sets of different sizes"
    contexts.matched("fc", num_worlds)


@pytest.mark.parametrize("num_devices", [2, 4, pytest.param(10, marks=pytest.mark.slow)])
def test_exact_matches_enumeration_and_never_loses_to_greedy(num_devices, x64):
    rng = np.random.default_rng(3)
    for _ in range(4 if num_devices == 10 else 40):
        drawn = draw_context(rng, num_devices)
        context = build_context(drawn, np.float64)
        world, settings = for_oracle(drawn)
        least, subset = oracles.exact_schedule(world, **settings)
        exact, greedy = (decide(make(drawn["phi"]), context) for make in (policies.exact, policies.fast_converge))
        assert set(np.flatnonzero(exact.scheduled)) == subset
        reached = [oracles.objective(int(d.scheduled.sum()), float(d.round_s), **settings) for d in (exact, greedy)]
        np.testing.assert_allclose(reached[0], least, rtol=1e-9)
        assert reached[0] <= reached[1] * (1 + 1e-12)
    contexts.matched("exact", 4 if num_devices == 10 else 40)


def test_optimality_gap_matches_enumeration(x64):
    rng = np.random.default_rng(18)
    gap_of = jax.jit(policies.optimality_gap)
    gaps = []
    for _ in range(30):
        drawn = draw_context(rng, 5)
        context = build_context(drawn, np.float64)
        world, settings = for_oracle(drawn)
        least, subset = oracles.exact_schedule(world, **settings)
        scheduled = rng.uniform(size=5) < 0.5
        scheduled[rng.integers(5)] = True
        round_s = fcjax.allocate(scheduled, context.observation, context.cell).round_s
        gap = gap_of(scheduled, round_s, context, drawn["phi"])
        expected = oracles.objective(int(scheduled.sum()), float(round_s), **settings) / least
        np.testing.assert_allclose(gap, expected, rtol=1e-8)
        gaps.append(float(gap))
        best = np.isin(np.arange(5), list(subset))
        best_s = fcjax.allocate(best, context.observation, context.cell).round_s
        np.testing.assert_allclose(gap_of(best, best_s, context, drawn["phi"]), 1, rtol=1e-9)
    assert min(gaps) >= 1 - 1e-9
    assert max(gaps) > 1.1


@pytest.mark.slow
def test_optimality_gap_without_a_schedule():
    context = build_context(draw_context(np.random.default_rng(19), 4), np.float32, budget_s=1e-3)
    nobody = np.zeros(4, bool)
    assert np.isnan(policies.optimality_gap(nobody, 0.0, context))
    assert policies.optimality_gap(~nobody, 1.0, context) == 1, "no schedule fits in the budget"


def test_fixed_follows_the_greedy_order(x64):
    rng = np.random.default_rng(4)
    for n in (1, 3, 7) * 20:
        drawn = draw_context(rng, 7)
        world, _ = for_oracle(drawn)
        decision = decide(policies.fixed(n), build_context(drawn, np.float64))
        assert set(np.flatnonzero(decision.scheduled)) == oracles.greedy_schedule(world, stop_at=n)
    contexts.matched("fixed", 60)


@pytest.mark.slow
def test_budget_too_short_for_any_round(x64):
    """The objective is infinite for every set. Alg. 2 continues as long as it does not grow."""
    drawn = draw_context(np.random.default_rng(5), 6)
    decision = decide(policies.fast_converge(), build_context(drawn, np.float64, budget_s=1e-3))
    world, settings = for_oracle(drawn, budget_s=1e-3)
    assert set(np.flatnonzero(decision.scheduled)) == oracles.greedy_schedule(world, **settings)
    assert decide(policies.exact(), build_context(drawn, np.float64, budget_s=1e-3)).scheduled.sum() == 1


@pytest.mark.slow
@pytest.mark.parametrize("phi", [1e-30, 1e-20, 1e-12])
def test_tiny_phi_does_not_overflow(phi):
    """If a round makes almost no progress, one device is best because it allows the most rounds."""
    context = build_context(draw_context(np.random.default_rng(16), 8), np.float32)
    for make in (policies.fast_converge, policies.exact):
        assert decide(make(phi), context).scheduled.sum() == 1


def test_nan_estimates_schedule_one_device():
    drawn = draw_context(np.random.default_rng(17), 8)
    context = build_context(drawn | {"delta": np.full(8, np.nan, np.float32)}, np.float32)
    assert decide(policies.fast_converge(), context).scheduled.sum() == 1


def test_devices_that_never_finish_are_left_out(dtype):
    drawn = draw_context(np.random.default_rng(6), 8)
    drawn["gain"][:7] = 0
    context = build_context(drawn, dtype)
    for policy in (policies.fast_converge(5.0), policies.client_selection(9.0)):
        decision = decide(policy, context)
        assert np.flatnonzero(decision.scheduled).tolist() == [7]
        assert np.isfinite(decision.round_s)


def test_ties_are_broken_by_device_index(dtype):
    drawn = draw_context(np.random.default_rng(7), 6)
    for name in ("gain", "compute_s", "power_w"):
        drawn[name][:] = drawn[name][0]
    assert np.flatnonzero(decide(policies.fixed(3), build_context(drawn, dtype)).scheduled).tolist() == [0, 1, 2]


@pytest.mark.parametrize("threshold_s", [0.01, 0.4, 0.8, 1.5, 1000.0])
def test_client_selection_against_a_loop(threshold_s, x64):
    rng = np.random.default_rng(8)
    policy = policies.client_selection(threshold_s)
    for _ in range(20):
        drawn = draw_context(rng, 11)
        world, _ = for_oracle(drawn)
        band = {name: world[name] for name in ("bandwidth_hz", "noise_psd_w_hz", "power_w")}

        def finish_s(n, world=world, band=band):
            return world["compute_s"] + world["upload_bits"] / oracles.rate(1 / n, world["gain"], **band)

        possible = [n for n in range(1, 12) if np.sort(finish_s(n))[n - 1] <= threshold_s]
        n = max(possible, default=1)
        decision = decide(policy, build_context(drawn, np.float64))
        assert set(np.flatnonzero(decision.scheduled)) == set(np.argsort(finish_s(n))[:n])
        np.testing.assert_allclose(decision.share, np.where(decision.scheduled, 1 / n, 0), rtol=1e-12)
        np.testing.assert_allclose(decision.round_s, np.sort(finish_s(n))[n - 1], rtol=1e-9)
    contexts.matched("cs", 20)


@pytest.mark.parametrize("threshold_s", [0.01, 0.4, 0.8, 1.5, 1000.0])
def test_asymptotic_against_all_subsets(threshold_s, x64):
    rng = np.random.default_rng(9)
    for _ in range(20):
        drawn = draw_context(rng, 7)
        world, _ = for_oracle(drawn)
        fastest = list(oracles.best_subsets(**world))
        time_s, subset = max(
            ((time_s, subset) for time_s, subset in fastest if time_s <= threshold_s),
            key=lambda found: len(found[1]),
            default=fastest[0],
        )
        decision = decide(policies.asymptotic(threshold_s), build_context(drawn, np.float64))
        assert set(np.flatnonzero(decision.scheduled)) == set(subset)
        np.testing.assert_allclose(decision.round_s, time_s, rtol=1e-9)
    contexts.matched("as", 20)


def test_random_is_uniform_over_sets():
    drawn = draw_context(np.random.default_rng(11), 5)
    context = build_context(drawn, np.float32)
    policy = policies.random(2)
    keys = jax.random.split(jax.random.key(0), 5000)
    state = policy.init(context.cell)
    scheduled = np.asarray(jax.vmap(lambda key: policy.select(key, state, context)[1].scheduled)(keys))
    assert (scheduled.sum(1) == 2).all()
    counts = np.bincount(scheduled @ (1 << np.arange(5)), minlength=32)
    counts = counts[counts > 0]
    assert len(counts) == 10
    assert ((counts - 500) ** 2 / 500).sum() < 27.9  # chi-squared with 9 degrees of freedom, 1 in 1000


@pytest.mark.slow
def test_parameters_do_not_recompile():
    """Policies from one factory share a program, and vmap can sweep their parameters."""
    drawn = draw_context(np.random.default_rng(12), 8)
    context = build_context(drawn | {"delta": np.full(8, 0.3, np.float32)}, np.float32)
    before = select_by._cache_size()
    counts = [int(decide(policies.fixed(n), context).scheduled.sum()) for n in range(1, 9)]
    assert counts == list(range(1, 9))
    assert select_by._cache_size() == before + 1

    @jax.jit
    def number(phi):
        policy = policies.fast_converge(phi)
        return policy.select(jax.random.key(0), policy.init(context.cell), context)[1].scheduled.sum()

    phis = jnp.array([1e-3, 0.05, 1.0, 20.0])
    numbers = jax.vmap(number)(phis)
    assert numbers.tolist() == [int(number(phi)) for phi in phis]
    assert (np.diff(numbers) >= 0).all()
    assert numbers[0] < numbers[-1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda cell: policies.fast_converge(0.0), "phi must be positive and finite, got 0"),
        (lambda cell: policies.exact(-1), "phi must be positive and finite, got -1"),
        (lambda cell: policies.asymptotic(float("nan")), "threshold_s must be positive and finite, got nan"),
        (
            lambda cell: policies.fixed(7).init(cell),
            "n must be a whole number from 1 to 6, the number of devices",
        ),
        (lambda cell: policies.random(0).init(cell), "n must be a whole number from 1 to 6"),
        (lambda cell: policies.proportional_fair(2.5).init(cell), "n must be a whole number from 1 to 6"),
        (
            lambda cell: policies.random(1).init(dataclasses.replace(cell, access="ofdma", num_blocks=None)),
            "cell.num_blocks must be a whole number from 1 to 100000, got None",
        ),
        (lambda cell: policies.by_name("best"), "unknown policy 'best': use fc, exact, fixed"),
        (lambda cell: policies.by_name("fixd(n=3)"), "unknown policy 'fixd(n=3)', did you mean fixed? use fc"),
        (lambda cell: policies.by_name("fixed"), "policy 'fixed' needs n: use 'fixed(n=...)'"),
        (lambda cell: policies.by_name("fixed(5)"), "give parameters by name, with numbers or quoted texts, as in f"),
        (lambda cell: policies.by_name("fixed(n=open('x'))"), "give parameters by name, with numbers or quoted texts"),
        (lambda cell: policies.by_name("rd(m=5)"), "policy 'rd(m=5)' has no parameter 'm': it has n"),
        (lambda cell: policies.by_name("fixed-x"), "unknown policy 'fixed-x'"),
        (lambda cell: policies.by_name("fixed-05"), "unknown policy 'fixed-05'"),
        (lambda cell: policies.by_name(None), "policy: the name must be a string, got None"),
        (lambda cell: policies.fast_converge(1e-300), "phi must be between 1e-30 and 1e+30, got 1e-300"),
        (lambda cell: policies.by_name("no_such_file:policy"), " and no module no_such_file"),
        (lambda cell: policies.by_name("fixed(n=5"), "policy 'fixed(n=5': a parenthesis is missing"),
        (
            lambda cell: policies.by_name(__file__),
            f"to use the file, name its function too, as in {__file__}:",
        ),
        (lambda cell: policies.by_name("math:sqrt"), "policy 'math:sqrt' needs x: use 'math:sqrt"),
        (lambda cell: policies.by_name("math:no"), "'math' has no policy or factory 'no'; it has"),
        (lambda cell: policies.by_name("builtins:dict"), "must return a fcjax.Policy"),
        (lambda cell: policies.by_name("builtins:exit"), "policy 'builtins:exit' raised SystemExit: "),
    ],
)
def test_errors_name_bad_parameters_and_names(make, message):
    cell = build_context(draw_context(np.random.default_rng(13), 6), np.float32).cell
    with pytest.raises(ValueError, match=re.escape(message)):
        make(cell)


def test_policies_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random.py").write_text(
        "from fcjax import policies\n"
        "def halved(phi=0.05):\n    return policies.fast_converge(phi / 2)\n"
        "ready = policies.fixed(2)\n"
    )
    cell = build_context(draw_context(np.random.default_rng(14), 6), np.float32).cell
    state = lambda name, **settings: float(policies.by_name(name, **settings).init(cell))  # noqa: E731
    assert state("fc", phi=0.2) == pytest.approx(0.2)
    assert state("random:halved", phi=0.2) == pytest.approx(0.1)
    assert state("random.py:halved") == pytest.approx(0.025)
    assert state(f"{tmp_path}/random.py:ready") == 2
    assert state("fixed-4") == state("fixed(n=4)") == 4
    assert state("cs(threshold_s=2)") == 2
    assert state("fc(phi=0.5)", phi=0.2) == 0.5, "the parameter in the name wins"
    assert state("random:halved(phi=1)") == 0.5
    assert state("cs-h") == pytest.approx(1.5)
    assert policies.is_built_in(policies.by_name("as-l"))
    (tmp_path / "wrong.py").write_text("x = 1\ny = 1 / 0\n")
    with pytest.raises(ValueError, match=r"ZeroDivisionError: division by zero \(.*wrong.py, line 2\)"):
        policies.by_name("wrong:y")


def test_scheduling_ignores_device_numbering(x64):
    rng = np.random.default_rng(15)
    for name in ("fc", "pf", "cs-h", "as-h"):
        policy = policies.by_name(name, phi=0.3)
        for _ in range(20):
            drawn, order = draw_context(rng, 8), rng.permutation(8)
            relabelled = {key: value[order] if np.ndim(value) else value for key, value in drawn.items()}
            before, after = (decide(policy, build_context(d, np.float64)) for d in (drawn, relabelled))
            np.testing.assert_array_equal(before.scheduled[order], after.scheduled)
            np.testing.assert_allclose(before.share[order], after.share, rtol=1e-9)


def test_missing_import_of_a_users_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "__init__.py").write_text("import pack\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"'packed' raised ModuleNotFoundError: No module named 'pack'"):
        policies.by_name("packed:policy")
