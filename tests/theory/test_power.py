import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import worlds
from derivatives import check_derivatives
from scipy import optimize

import fcjax
from fcjax import design

quick = pytest.mark.usefixtures("quick_compilation")
BAND = {name: worlds.RADIO[name] for name in ("bandwidth_hz", "noise_psd_w_hz")}
DEVICES = 6


def draw(seed):
    """A random world, some of its devices, a total power that is scarce, and a limit per device or none."""
    rng = np.random.default_rng(seed)
    world = worlds.draw(rng, DEVICES)
    scheduled = rng.permutation(np.arange(DEVICES) < rng.integers(2, DEVICES + 1))
    total_w = float(world["power_w"][scheduled].sum() * rng.uniform(0.05, 0.95))
    return world, scheduled, total_w, np.float64(world["power_w"]) if seed % 2 else np.inf


def by_scipy(world, scheduled, total_w, limit_w, starts=3):
    """Minimises the round time over the logarithms of upload time, shares and powers with SLSQP."""
    gain, compute_s = (np.float64(world[name])[scheduled] for name in ("gain", "compute_s"))
    n, best_s = len(gain), np.inf
    most_w = np.minimum(np.broadcast_to(limit_w, DEVICES)[scheduled], total_w)
    constraints = [
        lambda x: (
            np.log(oracles.rate(np.exp(x[1 : n + 1]), gain, power_w=np.exp(x[n + 1 :]), **BAND))
            + np.log((np.exp(x[0]) + compute_s.max() - compute_s) / worlds.RADIO["upload_bits"])
        ),
        lambda x: -np.log(np.sum(np.exp(x[1 : n + 1]))),
        lambda x: -np.log(np.sum(np.exp(x[n + 1 :])) / total_w),
    ]
    for start in range(starts):
        share = np.random.default_rng(start).dirichlet(np.full(n, 5.0))
        power_w = most_w * min(1, total_w / most_w.sum())
        found = optimize.minimize(
            lambda x: x[0],
            np.log([1.0, *share, *power_w]),
            constraints=[{"type": "ineq", "fun": constraint} for constraint in constraints],
            bounds=[(-20, 20)] + [(-25, 0)] * n + [(np.log(1e-9 * total_w), np.log(most)) for most in most_w],
            method="SLSQP",
            options={"ftol": 1e-15, "maxiter": 2000},
        )
        if min(np.min(constraint(found.x)) for constraint in constraints) > -1e-8:
            best_s = min(best_s, np.exp(found.x[0]) + compute_s.max())
    return best_s


def compare_with_scipy(seeds, dtype, rtol):
    for seed in seeds:
        world, scheduled, total_w, limit_w = draw(seed)
        observation, cell = worlds.build(world, dtype)
        decision = design.split_power(total_w, scheduled, observation, cell, limit_w=limit_w)
        expected_s = by_scipy(world, scheduled, total_w, limit_w)
        np.testing.assert_allclose(decision.round_s, expected_s, rtol=rtol, err_msg=f"seed {seed}")
        # The decision keeps its promise.
        power_w, share = np.asarray(decision.power_w, float), np.asarray(decision.share, float)
        np.testing.assert_allclose([power_w[scheduled].sum() / total_w, share.sum()], 1, rtol=10 * rtol)
        assert (power_w[scheduled] <= (np.broadcast_to(limit_w, DEVICES) * (1 + rtol))[scheduled]).all()
        upload_s = worlds.RADIO["upload_bits"] / oracles.rate(
            np.where(scheduled, share, 1), np.float64(world["gain"]), power_w=power_w, **BAND
        )
        end_s = (np.float64(world["compute_s"]) + upload_s)[scheduled]
        np.testing.assert_allclose(end_s, expected_s, rtol=100 * rtol)


@pytest.mark.slow
@quick
def test_round_time_matches_scipy(x64):
    compare_with_scipy(range(4), float, 1e-6)


@pytest.mark.slow
def test_round_time_matches_scipy_in_many_worlds(dtype):
    compare_with_scipy(range(4, 64), dtype, 1e-6 if dtype == np.float64 else 1e-5)


@pytest.mark.slow
def test_edges(dtype):
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(1), DEVICES), dtype)

    def split(total_w, scheduled, o=observation, c=cell, **limit):
        return design.split_power(total_w, scheduled, o, c, **limit)

    everyone, nobody = np.ones(DEVICES, bool), np.zeros(DEVICES, bool)
    idle = split(0.1, nobody)
    assert idle.round_s == 0
    assert (idle.share == 0).all()
    # With enough power, every device sends with its limit.
    rich, usual = split(1e3, everyone), fcjax.allocate(everyone, observation, cell)
    np.testing.assert_allclose(rich.round_s, usual.round_s, rtol=1e-6)
    np.testing.assert_allclose(rich.share, usual.share, rtol=1e-6)
    np.testing.assert_allclose(rich.power_w, cell.power_w, rtol=1e-6)
    # One device gets all of the power and the bandwidth.
    alone = split(0.1, np.arange(DEVICES) == 2, limit_w=np.inf)
    at_total = dataclasses.replace(cell, power_w=np.full(DEVICES, 0.1, dtype))
    np.testing.assert_allclose(alone.power_w[2], 0.1, rtol=1e-6)
    np.testing.assert_allclose(
        alone.round_s, fcjax.allocate(np.arange(DEVICES) == 2, observation, at_total).round_s, rtol=1e-6
    )
    # Devices without gain, power or end never finish. If they are not scheduled, they affect nobody.
    second = np.arange(DEVICES) == 1
    for lost in (
        {"o": dataclasses.replace(observation, gain=np.where(second, 0, observation.gain))},
        {"o": dataclasses.replace(observation, compute_s=np.where(second, np.inf, observation.compute_s))},
        {"c": dataclasses.replace(cell, power_w=np.where(second, 0, cell.power_w))},
    ):
        never = split(0.1, everyone, **lost)
        assert never.round_s == np.inf
        assert np.isfinite(never.power_w).all()
        expected = split(0.1, ~second)
        np.testing.assert_allclose(split(0.1, ~second, **lost).round_s, expected.round_s, rtol=1e-6)
        assert never.power_w.sum() <= 0.1 * (1 + 1e-5)
    same = fcjax.Observation(np.full(DEVICES, 1e-11, dtype), np.full(DEVICES, 0.5, dtype))
    equal = split(0.03, everyone, o=same, limit_w=np.inf)
    np.testing.assert_allclose(equal.power_w, 0.03 / DEVICES, rtol=1e-5)
    np.testing.assert_allclose(equal.share, 1 / DEVICES, rtol=1e-5)


@pytest.mark.slow
def test_weak_signals_keep_their_precision(dtype):
    """At an SNR of 1e-4, the least energy of an upload is all that counts: powers are proportional to it."""
    gain = np.array([1e-16, 3e-16, 2e-16], dtype)
    cell = fcjax.Cell(20e6, 10**-20.4, np.full(3, 1.0, dtype), 1.6e6)
    observation = fcjax.Observation(gain, np.zeros(3, dtype))
    decision = design.split_power(0.3, np.ones(3, bool), observation, cell, limit_w=np.inf)
    energy_j = 10**-20.4 * 1.6e6 * np.log(2) / np.float64(gain)
    np.testing.assert_allclose(decision.power_w, 0.3 * energy_j / energy_j.sum(), rtol=1e-3)
    np.testing.assert_allclose(decision.round_s, energy_j.sum() / 0.3, rtol=1e-3)


@pytest.mark.slow
def test_the_split_is_never_slower_than_others(x64):
    """10,000 random worlds in one call: slower for no scaled or random split, and valid to rounding."""
    rng = np.random.default_rng(5)
    drawn = [worlds.draw(rng, DEVICES) for _ in range(10_000)]
    gain, compute_s, limit_w = (np.stack([np.float64(w[x]) for w in drawn]) for x in ("gain", "compute_s", "power_w"))
    scheduled = rng.uniform(size=gain.shape) < 0.7
    total_w = 10 ** rng.uniform(-4, 1, len(gain))
    weight = rng.dirichlet(np.ones(DEVICES), len(gain))

    @jax.jit
    @jax.vmap
    def solve(scheduled, gain, compute_s, limit_w, total_w, weight):
        observation, cell = fcjax.Observation(gain, compute_s), fcjax.Cell(power_w=limit_w, **worlds.RADIO)
        decision = design.split_power(total_w, scheduled, observation, cell)
        true_s = fcjax.round_time(
            scheduled, decision.share, observation, dataclasses.replace(cell, power_w=decision.power_w)
        )
        most_w = jnp.sum(jnp.where(scheduled, limit_w, 0))
        scaled = limit_w * jnp.minimum(1, total_w / jnp.where(most_w > 0, most_w, 1))
        random = jnp.minimum(limit_w, total_w * weight)
        others = [
            fcjax.allocate(scheduled, observation, dataclasses.replace(cell, power_w=p)) for p in (scaled, random)
        ]
        return decision, true_s, jnp.stack([other.round_s for other in others])

    decision, true_s, others_s = solve(scheduled, gain, compute_s, limit_w, total_w, weight)
    np.testing.assert_allclose(decision.round_s, true_s, rtol=1e-9)
    assert (decision.round_s[:, None] <= others_s * (1 + 1e-12)).all()
    used_w = np.sum(np.where(scheduled, decision.power_w, 0), axis=1)
    assert (used_w <= total_w * (1 + 1e-12)).all()
    assert (np.where(scheduled, decision.power_w, 0) <= limit_w).all()
    np.testing.assert_allclose(np.sum(decision.share, axis=1), scheduled.any(1), atol=1e-12)
    for i in range(3):
        observation, cell = fcjax.Observation(gain[i], compute_s[i]), fcjax.Cell(power_w=limit_w[i], **worlds.RADIO)
        one = design.split_power(total_w[i], scheduled[i], observation, cell)
        np.testing.assert_allclose(one.power_w, decision.power_w[i], rtol=1e-9)


@quick
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 9])
def test_derivatives_with_respect_to_every_leaf(seed, x64):
    world, scheduled, total_w, _ = draw(seed)
    observation, cell = worlds.build(world, float)
    limit = {} if seed % 2 else {"limit_w": np.inf}

    members = np.flatnonzero(scheduled)

    def logarithms(exponents):
        total = total_w * jnp.exp(exponents["total_w"])
        by_log, _ = worlds.log_leaves(
            lambda *changed: design.split_power(total, scheduled, *changed, **limit), observation, cell
        )
        decision = by_log(exponents)
        return jnp.log(decision.round_s), jnp.log(decision.share[members]), jnp.log(decision.power_w[members])

    _, zeros = worlds.log_leaves(None, observation, cell)
    check_derivatives(logarithms, {**zeros, "total_w": jnp.zeros(())}, rtol=1e-5, order=1 if limit else 2)
    slope = jax.jvp(lambda total: logarithms({**zeros, "total_w": total})[0], (0.0,), (1.0,))[1]
    assert slope < 0, "more power shortens the round"


@pytest.mark.slow
def test_gradients_are_finite_where_power_is_not_scarce():
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(1), DEVICES), np.float32)
    for total_w, scheduled in ((1e3, np.ones(DEVICES, bool)), (0.1, np.zeros(DEVICES, bool)), (0.1, np.arange(6) < 2)):
        gradient = jax.grad(lambda o, c, p, s=scheduled: design.split_power(p, s, o, c).round_s, argnums=(0, 1, 2))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient(observation, cell, total_w)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total_w": 0.0}, "total_w must be positive and finite, got 0"),
        ({"total_w": np.ones(6)}, r"total_w must have shape \(\), got \(6,\)"),
        ({"limit_w": -1.0}, "limit_w must be zero or more, got -1"),
        ({"limit_w": np.ones(3)}, r"limit_w must have shape \(\) or \(6,\), got \(3,\)"),
        ({"scheduled": np.arange(6)}, "scheduled must be a mask of booleans"),
    ],
)
def test_errors_name_bad_input(change, message):
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(1), DEVICES), np.float32)
    arguments = {"total_w": 0.1, "scheduled": np.ones(6, bool), "observation": observation, "cell": cell}
    with pytest.raises(ValueError, match=message):
        design.split_power(**{**arguments, **change})
    with pytest.raises(ValueError, match=r"cell.access must be fdma, got tdma"):
        design.split_power(**{**arguments, "cell": dataclasses.replace(cell, access="tdma")})
