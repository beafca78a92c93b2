"""Round robin, age of update and the earliest of a random group, against plain transcriptions."""

import dataclasses
import itertools
import math
import re

import contexts
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import fcjax
from fcjax import policies

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_round_robin_against_a_queue():
    rng = np.random.default_rng(1)
    num_rounds = 0
    for num_devices, n in [(1, 1), *((7, n) for n in range(1, 8))]:
        policy = policies.round_robin(n)
        state, following = None, 0
        for _ in range(30):
            context = contexts.draw(rng, num_devices, available=bool(rng.integers(2)))
            present = contexts.present(context)
            expected, device = [], following
            for _ in range(num_devices):
                if device in present and len(expected) < n:
                    expected.append(device)
                device = (device + 1) % num_devices
            following = (expected[-1] + 1) % num_devices
            state = policy.init(context.cell) if state is None else state
            state, decision = contexts.select_by(policy.select, jax.random.key(0), state, context)
            assert contexts.chosen(decision) == set(expected)
            num_rounds += 1
    contexts.matched("round-robin", num_rounds)


def test_round_robin_repeats_groups_if_all_are_available():
    context = contexts.draw(np.random.default_rng(2), 6)
    policy = policies.round_robin(2)
    state, seen = policy.init(context.cell), []
    for _ in range(6):
        state, decision = contexts.select_by(policy.select, jax.random.key(0), state, context)
        seen.append(contexts.chosen(decision))
    assert seen == [{0, 1}, {2, 3}, {4, 5}] * 2


def test_round_robin_waits_if_nobody_is_available():
    context = contexts.draw(np.random.default_rng(3), 4)
    nobody = dataclasses.replace(
        context, observation=dataclasses.replace(context.observation, available=jnp.zeros(4, bool))
    )
    policy = policies.round_robin(1)
    state, _ = contexts.select_by(policy.select, jax.random.key(0), policy.init(context.cell), context)
    waiting, decision = contexts.select_by(policy.select, jax.random.key(0), state, nobody)
    assert not decision.scheduled.any()
    assert waiting.following == state.following == 1


def alpha_fair(x, alpha):
    return math.log(x) if alpha == 1 else x ** (1 - alpha) / (1 - alpha)


def oldest(ages, gain, present, n):
    return set(sorted(present, key=lambda k: (-ages[k], -gain[k]))[:n])


def test_age_schedules_the_oldest():
    """The choice leaves the least sum of alpha-fair ages, for every alpha, of all sets of that size."""
    rng = np.random.default_rng(4)
    for i in range(240):
        num_devices = 1 if i % 12 == 0 else 6
        n = int(rng.integers(1, num_devices + 1))
        context = contexts.draw(rng, num_devices, available=i % 3 == 0)
        present = contexts.present(context)
        ages = [int(context.round_index) - 1 - int(last) for last in context.reports.last_round]
        scheduled = contexts.chosen(contexts.decide(policies.age(n), context))
        assert scheduled == oldest(ages, np.asarray(context.observation.gain), present, n)
        for alpha in (0, 0.5, 1, 2):
            left = lambda chosen: sum(alpha_fair(ages[k] + 1, alpha) for k in present if k not in chosen)  # noqa: B023, E731
            least = min(left(chosen) for chosen in itertools.combinations(present, min(n, len(present))))
            assert left(scheduled) <= least + 1e-12
    contexts.matched("age", 240)


def test_age_over_rounds_with_lost_updates():
    """The ages follow T(t + 1) = (T(t) + 1) (1 - S(t)), where S(t) says whether an update was received."""
    rng = np.random.default_rng(5)
    policy = policies.age(2)
    for _ in range(4):
        ages, last_round = [0] * 5, np.full(5, -1)
        for t in range(50):
            context = contexts.draw(rng, 5, available=bool(rng.integers(2)))
            reports = dataclasses.replace(context.reports, last_round=jnp.asarray(last_round))
            context = dataclasses.replace(context, round_index=jnp.asarray(t), reports=reports)
            scheduled = contexts.chosen(contexts.decide(policy, context))
            assert scheduled == oldest(ages, np.asarray(context.observation.gain), contexts.present(context), 2)
            received = [k in scheduled and rng.uniform() < 0.8 for k in range(5)]
            ages = [(age + 1) * (1 - got) for age, got in zip(ages, received, strict=True)]
            last_round = np.where(received, t, last_round)


def test_age_needs_reports():
    context = dataclasses.replace(contexts.draw(np.random.default_rng(6), 3), reports=None)
    with pytest.raises(ValueError, match=r"needs context\.reports"):
        contexts.decide(policies.age(1), context)


def earliest(context, group, n):
    """The n devices of a group with the shortest round, by enumeration."""
    if len(group) <= n:
        return set(group)
    gain, compute_s, power_w = (
        np.asarray(x, np.float64)
        for x in (context.observation.gain, context.observation.compute_s, context.cell.power_w)
    )
    cell = {name: float(getattr(context.cell, name)) for name in ("bandwidth_hz", "noise_psd_w_hz", "upload_bits")}
    time_s = lambda s: oracles.round_time(gain[s], compute_s[s], power_w=power_w[s], **cell)  # noqa: E731
    return set(min((list(s) for s in itertools.combinations(group, n)), key=time_s))


@pytest.mark.parametrize("num_rounds", [40, pytest.param(220, marks=pytest.mark.slow)])
def test_timely_against_enumeration(num_rounds, x64):
    rng = np.random.default_rng([7, num_rounds])
    for i in range(num_rounds):
        num_devices = 1 if i % 20 == 0 else 6
        n = int(rng.integers(1, min(num_devices, 3) + 1))
        m = int(rng.integers(n, 8))
        context = contexts.in_double(contexts.draw(rng, num_devices, available=i % 3 == 0))
        key = jax.random.key(i)
        draws = contexts.uniforms(key, num_devices).tolist()
        group = sorted(contexts.present(context), key=lambda k: draws[k])[:m]
        decision = contexts.decide(policies.timely(n, m), context, key)
        assert contexts.chosen(decision) == earliest(context, group, n)
    contexts.matched("timely", num_rounds)


def test_timely_draws_groups_uniformly():
    """Of 4 devices, 2 are drawn and the earlier one is scheduled: the fastest in 3 of 6 groups, the next in 2 of 6."""
    context = contexts.draw(np.random.default_rng(8), 4)
    policy = policies.timely(1)
    state = policy.init(context.cell)
    keys = jax.random.split(jax.random.key(0), 3000)
    often = jax.jit(jax.vmap(lambda key: policy.select(key, state, context)[1].scheduled))(keys).mean(0)
    np.testing.assert_allclose(np.sort(often), [0, 1 / 6, 2 / 6, 3 / 6], atol=5 * np.sqrt(0.25 / 3000))


def test_timely_default_group_and_errors():
    cell = contexts.draw(np.random.default_rng(9), 4).cell
    assert policies.timely(3).init(cell).m == 6
    for m, message in [(1, "m - n must be zero or more"), (2.5, "m must be a whole number of 1 or more, got 2.5")]:
        with pytest.raises(ValueError, match=re.escape(message)):
            policies.timely(2, m).init(cell)


@pytest.mark.parametrize("access", ["fdma", "ofdma", "tdma"])
def test_all_access_schemes(access):
    rng = np.random.default_rng(10)
    for name in ("round-robin", "age", "timely"):
        for _ in range(3):
            context = contexts.draw(rng, 6, available=False, access=access)
            decision = contexts.decide(policies.by_name(name), context)
            assert contexts.chosen(decision) <= set(contexts.present(context))
            assert decision.scheduled.sum() == min(3, len(contexts.present(context)))
            round_s = fcjax.round_time(decision.scheduled, decision.share, context.observation, context.cell)
            np.testing.assert_allclose(decision.round_s, round_s, rtol=1e-4)
