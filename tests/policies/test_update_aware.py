"""BN2, BC-BN2, BN2-C and importance against loops over their published formulas."""

import dataclasses
import itertools
import math
import re

import contexts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import best, present
from scipy import optimize

from fcjax import policies
from fcjax.policies.parameters import draw

pytestmark = pytest.mark.usefixtures("quick_compilation")
NUM_ROUNDS = 250


def rounds(seed, num_rounds=NUM_ROUNDS, num_devices=7, **cell):
    """Draws rounds, half of them with unavailable devices, with a number of devices that may exceed the available."""
    rng = np.random.default_rng(seed)
    for index in range(num_rounds):
        context = contexts.draw(rng, num_devices, available=index % 2 == 0, **cell)
        # With asks_norms every available device has a norm.
        norms = np.float32(10 ** rng.uniform(-1, 1, num_devices))
        reports = dataclasses.replace(context.reports, update_norm=jnp.asarray(norms))
        # NumPy arrays, which loops can read quickly.
        yield rng, jax.device_get(dataclasses.replace(context, reports=reports))


def send_s(context, n):
    """The time of each upload if n devices share the uplink equally."""
    cell, times = context.cell, []
    for gain, power_w in zip(np.float64(context.observation.gain), np.float64(cell.power_w), strict=True):
        share = {"fdma": 1 / n, "ofdma": cell.num_blocks // n / cell.num_blocks, "tdma": 1.0}[cell.access]
        snr = power_w * gain / (share * cell.bandwidth_hz * cell.noise_psd_w_hz)
        alone_s = cell.upload_bits / (share * cell.bandwidth_hz * math.log2(1 + snr))
        times.append(float(alone_s) * (n if cell.access == "tdma" else 1))
    return times


def compare(name, drawn, make, expect, key=None):
    """Compares decisions with expected sets; `drawn` holds a round and the parameters of the policy in it."""
    made = [make(*parameters) for _, *parameters in drawn]
    decisions = contexts.decide_all(made, [context for context, *_ in drawn], jax.random.key(0) if key is None else key)
    expected = [expect(context, *parameters) for context, *parameters in drawn]
    assert [contexts.chosen(decision) for decision in decisions] == expected
    contexts.matched(name, len(drawn))
    return expected


def test_best_norm():
    drawn = [(context, int(rng.integers(1, 8))) for rng, context in rounds(1)]
    compare("bn2", drawn, policies.best_norm, lambda c, n: best(c.reports.update_norm, present(c), n))


def test_best_channel_best_norm():
    drawn = []
    for rng, context in rounds(2):
        n = int(rng.integers(1, 8))
        drawn.append((context, n, int(rng.integers(n, 8))))

    def expect(context, n, candidates):
        first = best(context.observation.gain, present(context), candidates)
        return best(context.reports.update_norm, first, n)

    compare("bc-bn2", drawn, policies.best_channel_best_norm, expect)
    by_default = [(context, n) for context, n, _ in drawn]
    compare("bc-bn2", by_default, policies.best_channel_best_norm, lambda context, n: expect(context, n, 2 * n))


@pytest.mark.parametrize(
    "access", ["fdma", pytest.param("ofdma", marks=pytest.mark.slow), pytest.param("tdma", marks=pytest.mark.slow)]
)
def test_best_norm_after_channel(access):
    drawn = [
        (context, int(rng.integers(1, 8)), float(np.float32(10 ** rng.uniform(-2, 0))))
        for rng, context in rounds(3, access=access)
    ]

    def expect(context, n, upload_s):
        fractions = [min(1, upload_s / s) for s in send_s(context, n)]
        kept = [float(norm) * math.sqrt(f) for norm, f in zip(context.reports.update_norm, fractions, strict=True)]
        return best(kept, present(context), n)

    expected = compare("bn2-c", drawn, policies.best_norm_after_channel, expect)
    differs = [
        found != best(c.reports.update_norm, present(c), n) for found, (c, n, _) in zip(expected, drawn, strict=True)
    ]
    assert np.mean(differs) > 0.1, "the channel should matter"


def test_the_bound_of_best_norm_after_channel():
    """The largest entries hold at least their fraction of the squared norm."""
    rng = np.random.default_rng(4)
    for _ in range(100):
        update = rng.standard_t(2, 60)
        kept = np.cumsum(np.sort(update**2)[::-1])
        assert (kept >= np.arange(1, 61) / 60 * kept[-1] * (1 - 1e-12)).all()
    equal = np.cumsum(np.ones(60))
    np.testing.assert_allclose(equal, np.arange(1, 61) / 60 * equal[-1])


def importance_probabilities(context, n, rho):
    """The closed form, with lambda by Brent's method."""
    devices = present(context)
    total = sum(float(context.training.num_samples[k]) for k in devices)
    times_s = send_s(context, n)
    size = {k: float(context.training.num_samples[k]) / total * float(context.reports.update_norm[k]) for k in devices}
    least = min((1 - rho) * times_s[k] for k in devices)

    def p(k, mu):  # lambda = mu - least
        return size[k] * math.sqrt(rho / ((1 - rho) * times_s[k] - least + mu))

    def excess(log_mu):
        return math.log(sum(p(k, math.exp(log_mu)) for k in devices))

    mu = math.exp(optimize.brentq(excess, -60, 60, xtol=1e-14))
    return {k: p(k, mu) for k in devices}


@pytest.mark.parametrize("access", ["fdma", pytest.param("tdma", marks=pytest.mark.slow)])
def test_importance(access):
    key = jax.random.key(5)
    gumbel = contexts.gumbels(key, 7)
    drawn = [
        (context, int(rng.integers(1, 8)), float(np.float32(rng.choice([0.01, rng.uniform(0.01, 1), 1.0]))))
        for rng, context in rounds(5, access=access)
    ]

    def expect(context, n, rho):
        p = importance_probabilities(context, n, rho)
        assert sum(p.values()) == pytest.approx(1)
        # The largest log p + Gumbel is a draw with probability p, and the next ones are those of what is left.
        return best({k: math.log(p[k]) + gumbel[k] for k in p}, p, n)

    assert len({frozenset(found) for found in compare("importance", drawn, policies.importance, expect, key)}) > 20


def test_importance_minimises_its_objective():
    """The closed form against a numerical minimisation over the simplex."""
    for _, context in rounds(6, num_rounds=10, num_devices=4):
        rho, n = 0.4, 2
        p = importance_probabilities(context, n, rho)
        devices, times_s = sorted(p), send_s(context, n)
        samples = np.float64(context.training.num_samples)[devices]
        # Random directions: the minimum does not depend on them.
        gradients = np.random.default_rng(1).normal(size=(len(devices), 5))
        norms = np.float64(context.reports.update_norm)[devices]
        gradients *= (norms / np.linalg.norm(gradients, axis=1))[:, None]
        scaled = gradients * (samples / samples.sum())[:, None]
        delay = np.array(times_s)[devices]

        def objective(q, scaled=scaled, delay=delay, rho=rho):
            divergence = ((scaled / q[:, None] - scaled.sum(0)) ** 2).sum(1)
            return q @ (rho * divergence + (1 - rho) * delay)

        closed = np.array([p[k] for k in devices])
        rng = np.random.default_rng(0)
        for _ in range(200):
            step = rng.normal(size=closed.size) * rng.choice([1e-1, 1e-3])
            other = np.maximum(closed * np.exp(step), 1e-9)
            assert objective(other / other.sum()) >= objective(closed) * (1 - 1e-12)


def test_importance_frequencies():
    """The frequency of sets is that of successive draws without replacement, by enumeration."""
    _, context = next(rounds(7, num_devices=4))
    p = importance_probabilities(context, 2, 0.5)
    expected = dict.fromkeys(itertools.combinations(range(4), 2), 0.0)
    for first, second in itertools.permutations(range(4), 2):
        expected[tuple(sorted((first, second)))] += p[first] * p[second] / (1 - p[first])
    policy = policies.importance(2, 0.5)
    state, num = policy.init(context.cell), 4000
    keys = jax.random.split(jax.random.key(1), num)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: policy.select(key, state, context)[1].scheduled))(keys))
    for pair, probability in expected.items():
        frequency = drawn[:, pair].all(1).mean()
        assert abs(frequency - probability) < 4.5 * math.sqrt(probability * (1 - probability) / num) + 1e-9


def test_draws_with_weights_of_zero():
    key, everyone = jax.random.key(2), jnp.ones(5, bool)
    weights = jnp.array([0.0, 1.0, 0.0, 2.0, 0.0])
    for n, expected in ((1, 1), (2, 2), (4, 4), (5, 5)):
        mask = np.asarray(draw(key, weights, n, everyone))
        assert mask.sum() == expected
        assert mask[[1, 3]].sum() == min(n, 2), "devices with a weight come first"
    assert np.asarray(draw(key, jnp.zeros(5), 3, everyone)).sum() == 3
    assert np.flatnonzero(draw(key, weights, 3, everyone.at[3].set(False))).tolist().count(3) == 0


@pytest.mark.parametrize("name", ["bn2", "bc", "bc-bn2", "bn2-c", "importance"])
def test_single_device(name):
    _, context = next(rounds(8, num_devices=1))
    policy = policies.by_name(f"{name}(n=1)" if name != "bc" else "pf(n=1)")
    decision = contexts.decide(policy, context)
    assert decision.scheduled.tolist() == [True]
    assert decision.share.tolist() == [1.0]
    assert policy.asks_norms == (name != "bc")


def test_best_channel_is_proportional_fair():
    assert policies.by_name("bc") == policies.proportional_fair()


def test_equal_norms_go_by_channel():
    for _, context in rounds(13, num_rounds=10):
        reports = dataclasses.replace(context.reports, update_norm=np.ones(7, np.float32))
        decision = contexts.decide(policies.best_norm(3), dataclasses.replace(context, reports=reports))
        assert contexts.chosen(decision) == best(context.observation.gain, present(context), 3)


def test_no_updates():
    _, context = next(rounds(9))
    still = dataclasses.replace(context.reports, update_norm=jnp.zeros(7))
    decision = contexts.decide(policies.importance(3), dataclasses.replace(context, reports=still))
    assert decision.scheduled.sum() == 3
    assert np.isfinite(decision.round_s)


def test_numbers_share_a_program():
    _, context = next(rounds(10))
    made = policies.importance(2, 0.1), policies.importance(4, 0.7), policies.by_name("importance(rho=1)")
    contexts.decide(made[0], context)
    before = contexts.select_by._cache_size()
    assert [int(contexts.decide(policy, context).scheduled.sum()) for policy in made] == [2, 4, 3]
    assert contexts.select_by._cache_size() == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda cell: policies.importance(rho=0), "rho must be positive and at most 1, got 0"),
        (lambda cell: policies.best_norm_after_channel(upload_s=0), "upload_s must be positive and finite, got 0"),
        (lambda cell: policies.best_norm(8).init(cell), "n must be a whole number from 1 to 7"),
        (
            lambda cell: policies.best_channel_best_norm(2, 9).init(cell),
            "candidates must be a whole number from 1 to 7, the number of devices",
        ),
    ],
)
def test_errors(make, message):
    _, context = next(rounds(11))
    with pytest.raises(ValueError, match=re.escape(message)):
        make(context.cell)


def test_needs_reports():
    _, context = next(rounds(12))
    policy = policies.best_norm()
    with pytest.raises(ValueError, match=r"needs context.reports"):
        policy.select(jax.random.key(0), policy.init(context.cell), dataclasses.replace(context, reports=None))
