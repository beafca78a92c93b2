"""Power of choice and Oort against loops over their published rules."""

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

from fcjax import policies

pytestmark = pytest.mark.usefixtures("quick_compilation")
NUM_ROUNDS = 300


def rounds(seed, num_rounds=NUM_ROUNDS, num_devices=7, **cell):
    """Draws rounds, half of them with unavailable devices; NumPy arrays, which loops can read quickly."""
    rng = np.random.default_rng(seed)
    for index in range(num_rounds):
        yield rng, jax.device_get(contexts.draw(rng, num_devices, available=index % 2 == 0, **cell))


def test_power_of_choice():
    key = jax.random.key(1)
    draw_key, tie_key = jax.random.split(key)
    gumbel = contexts.gumbels(draw_key, 7)
    tie = [float(jax.random.uniform(jax.random.fold_in(tie_key, device))) for device in range(7)]
    drawn = []
    for rng, context in rounds(1):
        n = int(rng.integers(1, 8))
        drawn.append((context, n, int(rng.integers(n, 8))))

    def expect(context, n, candidates):
        weight = {k: math.log(context.training.num_samples[k]) + gumbel[k] for k in present(context)}
        reports = context.reports
        loss = [reports.loss[k] if reports.last_round[k] >= 0 else math.inf for k in range(7)]
        return best([(loss[k], tie[k]) for k in range(7)], best(weight, present(context), candidates), n)

    made = [policies.power_of_choice(n, candidates) for _, n, candidates in drawn]
    found = contexts.decide_all(made, [context for context, *_ in drawn], key)
    assert [contexts.chosen(decision) for decision in found] == [expect(*parameters) for parameters in drawn]
    by_default = contexts.decide_all([policies.power_of_choice(2)] * NUM_ROUNDS, [c for c, *_ in drawn], key)
    assert [contexts.chosen(decision) for decision in by_default] == [expect(c, 2, 4) for c, *_ in drawn]
    contexts.matched("power-of-choice", 2 * NUM_ROUNDS)


def test_power_of_choice_frequencies():
    """Candidates in proportion to data, without replacement: by enumeration of their orders."""
    _, context = next(rounds(2, num_devices=4))
    reports = dataclasses.replace(context.reports, last_round=np.zeros(4, int), loss=np.float32([1, 2, 3, 4]))
    context = dataclasses.replace(context, reports=reports)
    p = np.float64(context.training.num_samples) / context.training.num_samples.sum(dtype=np.float64)
    expected = np.zeros(4)
    for first, second in itertools.permutations(range(4), 2):
        expected[max(first, second)] += p[first] * p[second] / (1 - p[first])  # losses grow with the index
    policy, num = policies.power_of_choice(1, 2), 4000
    state = policy.init(context.cell)
    keys = jax.random.split(jax.random.key(3), num)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: policy.select(key, state, context)[1].scheduled))(keys))
    assert (np.abs(drawn.mean(0) - expected) < 4.5 * np.sqrt(expected * (1 - expected) / num) + 1e-9).all()


def durations(context, n):
    cell, times = context.cell, []
    for gain, power_w, compute_s in zip(
        np.float64(context.observation.gain), np.float64(cell.power_w), context.observation.compute_s, strict=True
    ):
        share = 1.0 if cell.access == "tdma" else 1 / n
        snr = power_w * gain / (share * cell.bandwidth_hz * cell.noise_psd_w_hz)
        send_s = cell.upload_bits / (share * cell.bandwidth_hz * math.log2(1 + snr))
        times.append(float(compute_s) + float(send_s) * (n if cell.access == "tdma" else 1))
    return times


def oort_choice(context, gumbel, *, n, preferred_s, penalty, cut_off):
    """One round of Alg. 1, after the pacer."""
    now = int(context.round_index) + 1
    here, times_s = present(context), durations(context, n)
    explored = [k for k in here if context.reports.last_round[k] >= 0]
    unexplored = [k for k in here if context.reports.last_round[k] < 0]
    raw = {k: float(context.training.num_samples[k]) * float(context.reports.loss[k]) for k in explored}
    utility = {}
    if explored:
        ascending = sorted(raw.values())
        clip = ascending[min(int(0.95 * len(ascending)), len(ascending) - 1)]
        low, high = ascending[0], ascending[-1]
        for k in explored:
            value = (min(raw[k], clip) - low) / (high - low) if high > low else 0.0
            value += math.sqrt(0.1 * math.log(now) / (int(context.reports.last_round[k]) + 1))
            if times_s[k] > preferred_s:
                value *= (preferred_s / times_s[k]) ** penalty
            utility[k] = value
    epsilon = 0.9
    for _ in range(now - 1):
        epsilon = max(epsilon * 0.98, 0.2)
    wanted = min(n, len(here))
    exploited = math.floor((1 - epsilon) * n + 1e-9)
    exploited = min(max(exploited, wanted - len(unexplored)), len(explored), wanted)
    picked = set()
    if exploited > 0:
        threshold = cut_off * sorted(utility.values(), reverse=True)[exploited - 1]
        admitted = [k for k in explored if utility[k] >= threshold]
        scores = {k: math.log(max(utility[k], 1e-300)) + gumbel[k] for k in admitted}
        picked = best(scores, admitted, exploited)
    speed = {k: -math.log(times_s[k]) + gumbel[k] for k in unexplored}
    return picked | best(speed, unexplored, wanted - exploited)


@pytest.mark.parametrize("access", ["fdma", pytest.param("tdma", marks=pytest.mark.slow)])
def test_oort(access):
    key = jax.random.key(4)
    gumbel = contexts.gumbels(key, 7)
    drawn = []
    for rng, context in rounds(4, access=access):
        penalty, cut_off = np.float32([rng.uniform(0.5, 3), rng.uniform(0.3, 1)]).tolist()
        step_s = float(np.float32(10 ** rng.uniform(-1, 0.5)))
        drawn.append((context, int(rng.integers(1, 8)), step_s, penalty, cut_off))
    found = contexts.decide_all(
        [policies.oort(n, step_s, penalty, cut_off) for _, n, step_s, penalty, cut_off in drawn],
        [context for context, *_ in drawn],
        key,
    )
    expected = [
        oort_choice(context, gumbel, n=n, preferred_s=step_s, penalty=penalty, cut_off=cut_off)
        for context, n, step_s, penalty, cut_off in drawn
    ]
    assert [contexts.chosen(decision) for decision in found] == expected
    contexts.matched("oort", len(drawn))


@pytest.mark.parametrize("window", [1, 3])
def test_oort_in_a_run(window):
    """The pacer over 60 rounds: losses fall at first, then grow again."""
    rng = np.random.default_rng(5)
    context = jax.device_get(contexts.draw(rng, 8))
    losses, last = np.zeros(8, np.float32), np.full(8, -1)
    policy = policies.oort(n=3, step_s=0.25, window=window)
    state = policy.init(context.cell)
    preferred_s, gained, seen = 0.25, [], set()
    for index in range(60):
        reports = dataclasses.replace(context.reports, loss=losses.copy(), last_round=last.copy())
        available = rng.uniform(size=8) < 0.8
        available[rng.integers(8)] = True
        observation = dataclasses.replace(contexts.draw(rng, 8).observation, available=jnp.asarray(available))
        this = dataclasses.replace(
            context, reports=reports, observation=jax.device_get(observation), round_index=np.asarray(index)
        )
        key = jax.random.fold_in(jax.random.key(6), index)
        state, decision = contexts.select_by(policy.select, key, state, this)
        if index > 0:
            took_part = [k for k in range(8) if last[k] == index - 1]
            gained.append(sum(float(this.training.num_samples[k]) * float(losses[k]) for k in took_part))
        if len(gained) >= 2 * window and sum(gained[-2 * window : -window]) > sum(gained[-window:]):
            preferred_s += 0.25
        gumbel = contexts.gumbels(key, 8)
        expected = oort_choice(this, gumbel, n=3, preferred_s=preferred_s, penalty=2.0, cut_off=0.95)
        assert contexts.chosen(decision) == expected
        assert float(state.preferred_s) == pytest.approx(preferred_s)
        for k in expected:
            if rng.uniform() < 0.9:  # some uploads are lost
                losses[k], last[k] = abs(2 - index / 15) + rng.uniform(0.1, 0.5), index
        seen.add(preferred_s)
    assert len(seen) > 3, "the pacer should act"


@pytest.mark.parametrize("name", ["power-of-choice(n=1)", "oort(n=1)"])
def test_single_device(name):
    for _, context in rounds(7, num_rounds=5, num_devices=1):
        policy = policies.by_name(name)
        _, decision = contexts.select_by(policy.select, jax.random.key(0), policy.init(context.cell), context)
        assert decision.scheduled.tolist() == [True]
        assert decision.share.tolist() == [1.0]


@pytest.mark.parametrize("name", ["power-of-choice(n=6)", "oort(n=6)"])
def test_more_devices_than_are_available(name):
    policy = policies.by_name(name)
    for _, context in itertools.islice(rounds(8), 1, 30, 2):
        _, decision = contexts.select_by(policy.select, jax.random.key(0), policy.init(context.cell), context)
        assert decision.scheduled.sum() == min(6, len(present(context)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda cell: policies.oort(cut_off=1.5), "cut_off must be between 0 and 1, got 1.5"),
        (lambda cell: policies.oort(step_s=-1), "step_s must be positive and finite, got -1"),
        (lambda cell: policies.oort(window=0), "window must be a whole number"),
        (lambda cell: policies.oort(9).init(cell), "n must be a whole number from 1 to 7"),
        (lambda cell: policies.power_of_choice(2, 0).init(cell), "candidates must be a whole number from 1 to 7"),
    ],
)
def test_errors(make, message):
    _, context = next(rounds(9))
    with pytest.raises(ValueError, match=re.escape(message)):
        make(context.cell)
