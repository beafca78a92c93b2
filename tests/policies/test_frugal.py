"""`frugal` against a loop over required shares, and SciPy's SLSQP."""

import dataclasses
import re

import contexts
import jax
import numpy as np
import oracles
import pytest

import fcjax
from fcjax import policies

pytestmark = pytest.mark.usefixtures("quick_compilation")
BAND = {"bandwidth_hz": 20e6, "noise_psd_w_hz": 10**-20.4}
COMPUTE_J = 1e-28 * 1e9**2 * (5e-4 * 1e9 * 5 * 128)  # at full frequency


def of_devices(context, devices):
    fields = context.observation.gain, context.observation.compute_s, context.cell.power_w
    gain, compute_s, power_w = (np.asarray(field, float)[list(devices)] for field in fields)
    return {"gain": gain, "compute_s": compute_s, "power_w": power_w, "upload_bits": 1.6e6, **BAND}


def most_devices(context, deadline_s):
    """The devices that need least bandwidth, as long as it suffices; nobody if not even one can finish."""
    here = contexts.present(context)
    world = of_devices(context, here)
    upload_s = deadline_s - world.pop("compute_s")
    with np.errstate(all="ignore"):  # devices that cannot finish
        share = oracles.required_share(upload_s, **world)
    chosen, used = set(), 0.0
    for index in np.argsort(share):
        used += share[index]
        if used <= 1:
            chosen.add(here[index])
    return chosen


@pytest.mark.slow
def test_frugal(x64):
    rng = np.random.default_rng(0)
    rounds = [contexts.in_double(contexts.draw(rng, 5, available=index % 2 == 0)) for index in range(200)]
    deadlines_s = 10 ** rng.uniform(-1, 1.5, len(rounds))
    found = contexts.decide_all([policies.frugal(s) for s in deadlines_s], rounds, jax.random.key(0))
    sizes = set()
    for index, (context, deadline_s, decision) in enumerate(zip(rounds, deadlines_s, found, strict=True)):
        expected = most_devices(context, deadline_s)
        sizes.add(len(expected))
        if not expected:
            as_before = contexts.decide(policies.asymptotic(deadline_s), context)
            assert decision.round_s > deadline_s
            np.testing.assert_array_equal(decision.scheduled, as_before.scheduled)
            np.testing.assert_allclose(decision.share, as_before.share, rtol=1e-9)
            np.testing.assert_array_equal(decision.power_w, context.cell.power_w)
            np.testing.assert_array_equal(decision.cpu_hz, 1e9)
            continue
        assert contexts.chosen(decision) == expected
        assert decision.round_s == deadline_s
        if index < 50:
            least_j = oracles.least_energy(deadline_s, **of_devices(context, sorted(expected)), compute_j=COMPUTE_J)
            decision = jax.tree.map(jax.numpy.asarray, decision)
            spent_j = fcjax.round_energy(decision, context.observation, context.cell, context.training)
            assert spent_j.sum() == pytest.approx(least_j, rel=1e-6)
    assert sizes == {0, 1, 2, 3, 4, 5}
    contexts.matched("frugal", len(rounds))


def test_errors():
    with pytest.raises(ValueError, match="deadline_s must be positive and finite, got 0"):
        policies.frugal(0.0)
    context = contexts.draw(np.random.default_rng(0), 3)
    tdma = dataclasses.replace(context, cell=dataclasses.replace(context.cell, access="tdma"))
    with pytest.raises(ValueError, match=re.escape("cell.access must be 'fdma', got 'tdma'")):
        contexts.decide(policies.frugal(1.0), tdma)
