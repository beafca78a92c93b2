"""Policies that use at most the gains, against loops, in rounds in which some devices are not available."""

import contexts
import jax
import numpy as np
import pytest

from fcjax import policies

NUM_CONTEXTS, NUM_DEVICES = 250, 9


def rounds(seed, **cell):
    rng = np.random.default_rng(seed)
    drawn = [contexts.draw(rng, NUM_DEVICES, available=i % 2 == 0, **cell) for i in range(NUM_CONTEXTS)]
    return rng.integers(1, NUM_DEVICES + 1, NUM_CONTEXTS).tolist(), drawn


def test_random():
    numbers, drawn = rounds(0)
    key = jax.random.key(7)
    draws = contexts.uniforms(key, NUM_DEVICES).tolist()
    decisions = contexts.decide_all([policies.random(n) for n in numbers], drawn, key)
    for n, context, decision in zip(numbers, drawn, decisions, strict=True):
        lowest_first = [-draw for draw in draws]
        assert contexts.chosen(decision) == contexts.best(lowest_first, contexts.present(context), n)
    contexts.matched("rd", NUM_CONTEXTS)


def test_proportional_fair():
    numbers, drawn = rounds(1)
    decisions = contexts.decide_all([policies.proportional_fair(n) for n in numbers], drawn, jax.random.key(0))
    for n, context, decision in zip(numbers, drawn, decisions, strict=True):
        gains = [float(gain) for gain in context.observation.gain]
        assert contexts.chosen(decision) == contexts.best(gains, contexts.present(context), n)
    contexts.matched("pf", NUM_CONTEXTS)


@pytest.mark.parametrize("access", ["fdma", "ofdma"])
def test_everybody(access):
    _, drawn = rounds(2, access=access, num_blocks=20)
    decisions = contexts.decide_all([policies.everybody()] * NUM_CONTEXTS, drawn, jax.random.key(0))
    for context, decision in zip(drawn, decisions, strict=True):
        present = contexts.present(context)
        assert contexts.chosen(decision) == set(present)
        equal = 1 / len(present) if access == "fdma" else 20 // len(present) / 20
        expected = [equal if device in present else 0 for device in range(NUM_DEVICES)]
        np.testing.assert_allclose(decision.share, expected, rtol=1e-6)
    contexts.matched("everybody", NUM_CONTEXTS)
