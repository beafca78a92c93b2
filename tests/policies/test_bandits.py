"""CS-UCB against a plain transcription, over runs of many rounds."""

import dataclasses
import math

import contexts
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import fcjax
from fcjax import policies

pytestmark = pytest.mark.usefixtures("quick_compilation")


class Arms:
    """CS-UCB with loops: sums of rewards and numbers of rounds; ties go to the smaller random number."""

    def __init__(self, num_devices, n, longest_s):
        self.n, self.longest_s = n, longest_s
        self.total, self.times = [0.0] * num_devices, [0] * num_devices

    def choose(self, t, present, draws):
        bounds = {}
        for k in present:
            if self.times[k] == 0:
                bounds[k] = math.inf
            else:
                width = math.sqrt((self.n + 1) * math.log(t) / self.times[k])
                bounds[k] = self.total[k] / self.times[k] + width
        return sorted(present, key=lambda k: (-bounds[k], draws[k]))[: self.n]

    def learn(self, chosen, context):
        cell, observation = context.cell, context.observation
        for k in chosen:
            band = {"bandwidth_hz": cell.bandwidth_hz, "noise_psd_w_hz": cell.noise_psd_w_hz}
            bits_s = oracles.rate(1 / self.n, float(observation.gain[k]), power_w=float(cell.power_w[k]), **band)
            latency_s = float(observation.compute_s[k]) + float(cell.upload_bits) / bits_s
            self.total[k] += 1 - min(latency_s, self.longest_s) / self.longest_s
            self.times[k] += 1


@pytest.mark.parametrize("length", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_cs_ucb_against_loops(length, x64):
    rng = np.random.default_rng([1, length])
    for run, (num_devices, n) in enumerate([(1, 1), (6, 1), (6, 2), (6, 3), (6, 5), (6, 6)]):
        policy, arms, state = policies.cs_ucb(n, 1.5), Arms(num_devices, n, 1.5), None
        for t in range(1, length + 1):
            context = contexts.in_double(contexts.draw(rng, num_devices, available=run % 2 == 0))
            context = dataclasses.replace(context, round_index=jnp.asarray(t - 1))
            key = jax.random.fold_in(jax.random.key(run), t)
            draws = contexts.uniforms(key, num_devices).tolist()
            expected = arms.choose(t, contexts.present(context), draws)
            arms.learn(expected, context)
            state = policy.init(context.cell) if state is None else state
            state, decision = contexts.select_by(policy.select, key, state, context)
            assert contexts.chosen(decision) == set(expected)
        assert state.times.tolist() == arms.times
        means = [total / max(times, 1) for total, times in zip(arms.total, arms.times, strict=True)]
        np.testing.assert_allclose(state.mean_reward, means, rtol=1e-9, atol=1e-12)
    contexts.matched("cs-ucb", 6 * length)


def test_choice_ignores_the_channels_of_the_round():
    rng = np.random.default_rng(2)
    policy = policies.cs_ucb(2)
    state = policy.init(contexts.draw(rng, 6).cell)
    for t in range(20):
        one, other = contexts.draw(rng, 6), contexts.draw(rng, 6)
        other = dataclasses.replace(one, observation=other.observation)
        key = jax.random.key(t)
        learnt, decision = contexts.select_by(policy.select, key, state, one)
        differently, same = contexts.select_by(policy.select, key, state, other)
        np.testing.assert_array_equal(decision.scheduled, same.scheduled)
        assert (learnt.mean_reward != differently.mean_reward).any()
        state = learnt


def test_fast_devices_are_scheduled_more_often():
    context = contexts.draw(np.random.default_rng(3), 4)
    compute_s = jnp.array([0.1, 0.5, 1.0, 1.9], jnp.float32)
    gain = jnp.full(4, 1e-9, jnp.float32)
    context = dataclasses.replace(context, observation=fcjax.Observation(gain, compute_s))
    policy = policies.cs_ucb(1)
    state = policy.init(context.cell)
    for t in range(400):
        context = dataclasses.replace(context, round_index=jnp.asarray(t))
        state, _ = contexts.select_by(policy.select, jax.random.key(t), state, context)
    assert (np.diff(state.times) < 0).all()


@pytest.mark.parametrize("access", ["fdma", "ofdma", "tdma"])
def test_all_access_schemes(access):
    rng = np.random.default_rng(4)
    policy = policies.cs_ucb()
    state = policy.init(contexts.draw(rng, 6, access=access).cell)
    for t in range(5):
        context = contexts.draw(rng, 6, available=False, access=access)
        state, decision = contexts.select_by(policy.select, jax.random.key(t), state, context)
        present = np.asarray(context.observation.available)
        assert not (decision.scheduled & ~present).any()
        assert decision.scheduled.sum() == min(3, present.sum())
        round_s = fcjax.round_time(decision.scheduled, decision.share, context.observation, context.cell)
        np.testing.assert_allclose(decision.round_s, round_s, rtol=1e-4)
    assert ((state.mean_reward >= 0) & (state.mean_reward <= 1)).all()


def test_latency_must_be_positive():
    with pytest.raises(ValueError, match="max_latency_s must be positive and finite, got 0"):
        policies.cs_ucb(max_latency_s=0.0)
