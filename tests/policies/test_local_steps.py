"""The number of local steps against a plain transcription of the paper's G."""

import dataclasses
import math

import contexts
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import fcjax
from fcjax import policies

pytestmark = pytest.mark.usefixtures("quick_compilation")


def with_training(context, **fields):
    return dataclasses.replace(context, training=dataclasses.replace(context.training, **fields))


def round_time(context, compute_s):
    """The round time if all available devices send."""
    who = np.flatnonzero(context.observation.available)
    cell = {name: float(getattr(context.cell, name)) for name in ("bandwidth_hz", "noise_psd_w_hz", "upload_bits")}
    gain, power_w = (np.asarray(x, np.float64)[who] for x in (context.observation.gain, context.cell.power_w))
    return oracles.round_time(gain, np.asarray(compute_s, np.float64)[who], power_w=power_w, **cell)


def bound(tau, c, b, budget_s, rho, beta, delta, eta, phi):
    """G: as in the paper, and in the form of the authors' program, in which T = R' tau/(c tau + b)."""
    h = delta / beta * ((eta * beta + 1) ** tau - 1) - eta * delta * tau
    left = budget_s - b - c
    half = (c * tau + b) / (2 * eta * phi * left * tau)
    paper = half + math.sqrt(half**2 + rho * h / (eta * phi * tau)) + rho * h
    steps = left * tau / (c * tau + b)
    program = (1 + math.sqrt(1 + 4 * steps**2 * phi * rho * eta * h / tau)) / (2 * steps * eta * phi) + rho * h
    assert math.isclose(paper, program, rel_tol=1e-9)
    return paper


def best_steps(context, phi):
    training, observation = context.training, context.observation
    samples = [float(x) for x in training.num_samples]
    mean = lambda values: sum(d * float(x) for d, x in zip(samples, values, strict=True)) / sum(samples)  # noqa: E731
    rho, beta, delta = (mean(getattr(context.estimates, name)) for name in ("rho", "beta", "delta"))
    c = max(float(observation.compute_s[k]) for k in np.flatnonzero(observation.available)) / training.local_steps
    b = round_time(context, np.zeros(len(samples)))
    best, least = None, math.inf
    for tau in range(1, training.local_steps + 1):
        value = bound(tau, c, b, float(training.budget_s), rho, beta, delta, float(training.learning_rate), phi)
        if value < least:
            best, least = tau, value
    return best


@pytest.mark.parametrize(("num_devices", "most"), [(1, 30), (4, 5), pytest.param(4, 60, marks=pytest.mark.slow)])
def test_steps_against_the_formula(num_devices, most, x64):
    rng = np.random.default_rng([num_devices, most])
    found = set()
    num_rounds = 20 if num_devices == 1 else 120
    for i in range(num_rounds):
        phi = 10 ** rng.uniform(-3, 2)
        context = contexts.in_double(contexts.draw(rng, num_devices, available=i % 2 == 0))
        context = with_training(context, local_steps=most, budget_s=jnp.asarray(rng.uniform(20, 500)))
        decision = contexts.decide(policies.adaptive_steps(phi), context)
        steps = int(decision.local_steps)
        assert steps == best_steps(context, phi)
        np.testing.assert_array_equal(decision.scheduled, context.observation.available)
        expected_s = round_time(context, np.asarray(context.observation.compute_s) * steps / most)
        np.testing.assert_allclose(decision.round_s, expected_s, rtol=1e-9)
        found.add(steps)
    assert len(found) >= 4
    contexts.matched("local-steps", num_rounds)


def test_budget_too_short_for_a_round():
    context = with_training(contexts.draw(np.random.default_rng(1), 3), budget_s=1e-3)
    assert contexts.decide(policies.adaptive_steps(), context).local_steps == 1


def test_estimates_of_a_diverged_model():
    context = contexts.draw(np.random.default_rng(2), 3)
    estimates = dataclasses.replace(context.estimates, delta=jnp.full(3, jnp.nan, jnp.float32))
    assert (
        contexts.decide(policies.adaptive_steps(), dataclasses.replace(context, estimates=estimates)).local_steps == 1
    )


def test_one_step_allowed():
    context = with_training(contexts.draw(np.random.default_rng(3), 3), local_steps=1)
    assert contexts.decide(policies.adaptive_steps(), context).local_steps == 1


@pytest.mark.parametrize("access", ["fdma", "ofdma", "tdma"])
def test_all_access_schemes(access):
    rng = np.random.default_rng(4)
    for phi in (0.05, 10.0, 1000.0):
        context = contexts.draw(rng, 5, available=False, access=access)
        decision = contexts.decide(policies.adaptive_steps(phi), context)
        np.testing.assert_array_equal(decision.scheduled, context.observation.available)
        scaled = context.observation.compute_s * decision.local_steps / context.training.local_steps
        observation = dataclasses.replace(context.observation, compute_s=scaled)
        round_s = fcjax.round_time(decision.scheduled, decision.share, observation, context.cell)
        np.testing.assert_allclose(decision.round_s, round_s, rtol=1e-4)


def test_errors():
    cell = contexts.draw(np.random.default_rng(5), 6, access="ofdma", num_blocks=4).cell
    with pytest.raises(ValueError, match=r"local-steps needs a block for each device: .*num_blocks must be 6 or"):
        policies.adaptive_steps().init(cell)
    with pytest.raises(ValueError, match="phi must be positive and finite, got 0"):
        policies.adaptive_steps(0.0)
