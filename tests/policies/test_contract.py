"""`check_policy` accepts built-in policies and users' policies, and finds faults."""

import contexts
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import fcjax
from fcjax import policies

pytestmark = pytest.mark.usefixtures("quick_compilation")
CELL = fcjax.presets.shi2020(
    fcjax.data.synthetic.classification(6000, 10, num_features=8, num_labels=10), distribution="iid"
).cell


def best_half():
    """A user's policy without a state."""

    def select(key, state, context):
        gain = context.observation.gain
        return state, fcjax.allocate(gain >= jnp.median(gain), context.observation, context.cell)

    return fcjax.Policy(lambda cell: (), select)


VALUES = {"(n=...)": "(n=4)", "(threshold_s=...)": "(threshold_s=0.7)", "(deadline_s=...)": "(deadline_s=0.7)"}
BY_INDEX = ("round-robin",)  # policies that depend on how devices are numbered
FDMA_ONLY = ("frugal", "ocean")
QUICK = (("fc", "fdma"), ("rd", "tdma"))  # the others are slow tests


@pytest.mark.parametrize(
    ("name", "access"),
    [
        pytest.param(name, access, marks=() if (name, access) in QUICK else pytest.mark.slow)
        for name in policies.REGISTRY.names(short=False)
        for access in ("fdma", "ofdma", "tdma")
        if access == "fdma" or name.partition("(")[0] not in FDMA_ONLY
    ],
)
def test_built_in_policies(name, access):
    """Some devices are not available, because of their batteries."""
    for pattern, value in VALUES.items():
        name = name.replace(pattern, value)
    cell = contexts.draw(np.random.default_rng(13), 7, access=access, battery_j=1.0).cell
    fcjax.check_policy(policies.by_name(name), cell, name=name, ignores_labels=name not in BY_INDEX)


@pytest.mark.slow
def test_fast_converge_with_unequal_devices():
    spread = np.geomspace(0.5, 2, 20).astype(np.float32)
    cell = fcjax.Cell(20e6, 10**-20.4, 0.01 * spread, 1.6e6 * spread, sample_floor_s=5e-4 / spread)
    training = fcjax.Training(num_samples=3000 * spread)
    fcjax.check_policy(policies.fast_converge(), cell, training)


def test_user_policies():
    fcjax.check_policy(best_half(), CELL)
    in_turns = tiny.round_robin()
    fcjax.check_policy(in_turns, CELL, ignores_labels=False)
    with pytest.raises(ValueError, match="depends on how devices are numbered"):
        fcjax.check_policy(in_turns, CELL)


def faulty_policy(change):
    """A policy that spoils a good decision."""

    def select(key, state, context):
        good = fcjax.allocate(context.observation.gain > 0, context.observation, context.cell)
        return change(key, state, good, context)

    return fcjax.Policy(lambda cell: jnp.zeros(2), select)


def decision(good, **fields):
    return fcjax.Decision(**{"scheduled": good.scheduled, "share": good.share, "round_s": good.round_s} | fields)


FAULTS = {
    "schedules nobody, in 256 of 256": lambda k, s, good, c: (s, decision(good, scheduled=good.scheduled & False)),
    "shares that are not numbers": lambda k, s, good, c: (s, decision(good, share=good.share * jnp.nan)),
    "negative shares": lambda k, s, good, c: (s, decision(good, share=good.share - 0.5)),
    "a share to a device that is not": lambda k, s, good, c: (
        s,
        decision(good, scheduled=good.scheduled & (good.share < good.share.max())),
    ),
    "schedules a device without a share": lambda k, s, good, c: (
        s,
        decision(good, share=jnp.where(good.share < good.share.max(), good.share, 0)),
    ),
    "do not sum to 1": lambda k, s, good, c: (s, decision(good, share=good.share * 1.0001)),
    "a round time that does not match its shares": lambda k, s, good, c: (
        s,
        decision(good, round_s=good.round_s / 2),
    ),
    "must return": lambda k, s, good, c: good,
    "scheduled must be bool of shape": lambda k, s, good, c: (s, decision(good, scheduled=good.share)),
    "share must be float of shape": lambda k, s, good, c: (s, decision(good, share=good.share[:3])),
    "must keep the structure, types and shapes of its state": lambda k, s, good, c: (s[:1], good),
    "select raised TracerBool": lambda k, s, good, c: (s, good) if good.round_s > 1 else (s, None),
    "scheduled must be an array, got list": lambda k, s, good, c: (s, decision(good, scheduled=[True] * 20)),
    "schedules nobody, in 253 of 256": lambda k, s, good, c: (
        s,
        decision(good, scheduled=good.scheduled & (c.round_index < 3)),
    ),
    "schedules nobody, in 246 of 256": lambda k, s, good, c: (
        s + 1,
        decision(good, scheduled=good.scheduled & (s[0] < 10)),
    ),
    "select raised AttributeError: .*test_contract.py, line": lambda k, s, good, c: (s, good.shares),
    "is not a pure function": lambda k, s, good, c: (s + np.random.random(), good),  # noqa: NPY002
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults_are_found(message):
    with pytest.raises(ValueError, match=f"mine.*{message}"):
        fcjax.check_policy(faulty_policy(FAULTS[message]), CELL, name="mine")


def test_rare_faults_are_found():
    """The policy schedules nobody if all channels are bad."""

    def select(key, state, context):
        good = context.observation.gain > 3e-11
        return state, fcjax.allocate(good, context.observation, context.cell)

    with pytest.raises(ValueError, match=r"schedules nobody, in [0-9]+ of 256 random rounds"):
        fcjax.check_policy(fcjax.Policy(lambda cell: (), select), CELL)


def test_failing_functions_are_reported():
    good = best_half()
    with pytest.raises(ValueError, match=r"init raised ZeroDivisionError: .*test_contract.py, line"):
        fcjax.check_policy(good._replace(init=lambda cell: 1 / 0), CELL)
    with pytest.raises(ValueError, match=r"must be a fcjax.Policy"):
        fcjax.check_policy(good.select, CELL)

    class Unhashable:
        __hash__ = None

    with pytest.raises(ValueError, match="select must be a function, got an unhashable Unhashable"):
        fcjax.check_policy(good._replace(select=Unhashable()), CELL)


@pytest.mark.slow
def test_equal_numbers_of_rounds_and_devices():
    """Times of shape (num_rounds,) are not mistaken for values per device."""

    def select(key, state, context):
        gain = context.observation.gain
        early = context.elapsed_s < 30
        return state, fcjax.allocate(
            jnp.where(early, gain >= jnp.median(gain), gain == gain.max()), context.observation, context.cell
        )

    fcjax.check_policy(fcjax.Policy(lambda cell: (), select), CELL, num_rounds=20)


@pytest.mark.slow
def test_single_device():
    cell = tiny.experiment(num_devices=1, distribution="iid").cell
    for name in ("fc", "cs-l"):
        fcjax.check_policy(policies.by_name(name), cell, name=name)
