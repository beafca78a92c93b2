"""joint, fc-online and fc+ against plain transcriptions of their rules."""

import dataclasses
import importlib
import math

import contexts
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from fcjax import policies

pytestmark = pytest.mark.usefixtures("quick_compilation")


def draw(rng, num_devices, index, **training):
    context = contexts.in_double(contexts.draw(rng, num_devices, available=index % 2 == 0))
    return dataclasses.replace(context, training=dataclasses.replace(context.training, **training))


def world_of(context, compute_s=None):
    """The arguments of `oracles.best_subsets` for the available devices, and their indices."""
    who = np.array(contexts.present(context))
    cell, compute_s = context.cell, context.observation.compute_s if compute_s is None else compute_s
    arrays = {"gain": context.observation.gain, "compute_s": compute_s, "power_w": cell.power_w}
    world = {name: np.asarray(values, np.float64)[who] for name, values in arrays.items()}
    numbers = ("bandwidth_hz", "noise_psd_w_hz", "upload_bits")
    return world | {name: float(getattr(cell, name)) for name in numbers}, who


def settings_of(context, phi, **changes):
    training = context.training
    settings = {name: [float(x) for x in getattr(context.estimates, name)] for name in ("rho", "beta", "delta")}
    settings |= {
        "num_samples": [float(x) for x in training.num_samples],
        "budget_s": float(training.budget_s),
        "learning_rate": float(training.learning_rate),
        "local_steps": training.local_steps,
        "phi": phi,
    }
    return settings | changes


def select(policy, state, context):
    return contexts.select_by(policy.select, jax.random.key(0), state, context)


def joint_batches(context, level):
    compute_s = [float(x) for x in context.observation.compute_s]
    present = sorted(compute_s[i] for i in contexts.present(context))
    middle = len(present) // 2
    median = present[middle] if len(present) % 2 else (present[middle - 1] + present[middle]) / 2
    full = context.training.batch_size
    return [max(math.floor(min(level * max(median / s, 1 / 4), 1) * full), 1) for s in compute_s]


def best_joint(context, omega, noise, last_steps, last_batch):
    """Tries all local steps, levels and subsets."""
    samples = [float(x) for x in context.training.num_samples]
    beta = sum(d * float(x) for d, x in zip(samples, context.estimates.beta, strict=True)) / sum(samples)
    phi = omega * max(1 - beta * float(context.training.learning_rate) / 2, 0.5)
    training, m = context.training, float(context.training.momentum)
    moved = {tau: sum(m**k for j in range(tau) for k in range(j + 1)) for tau in range(1, training.local_steps + 1)}
    true = []
    for delta, steps, batch in zip(context.estimates.delta, last_steps, last_batch, strict=True):
        steps, batch = steps or training.local_steps, batch or training.batch_size
        true.append(max((float(delta) * steps / moved[steps]) ** 2 - noise / (steps * batch), 0))
    best = (math.inf,)
    for tau in moved:
        for level in (math.inf, 1, 1 / 2, 1 / 4, 1 / 8, 1 / 16):
            batch = joint_batches(context, level)
            part = [tau * d / (training.local_steps * training.batch_size) for d in batch]
            world, who = world_of(context, np.asarray(context.observation.compute_s) * part)
            delta = [math.sqrt(x + noise / (tau * d)) for x, d in zip(true, batch, strict=True)]
            settings = settings_of(context, phi, delta=delta, local_steps=moved[tau])
            value, chosen = oracles.exact_schedule(world, **settings)
            if value < best[0]:
                best = value, {int(who[i]) for i in chosen}, tau, batch
    return best[1:]


def draw_joint(rng, index=0):
    """Draws a round for `joint`: always of the same shapes, because it takes long to compile."""
    arrays = {"momentum": jnp.asarray(rng.uniform(0, 0.95)), "budget_s": jnp.asarray(60.0)}
    return draw(rng, 3, index, local_steps=3, batch_size=40, **arrays)


@pytest.mark.slow
@pytest.mark.parametrize("num_rounds", [100])
def test_joint_against_enumeration(num_rounds, x64):
    rng = np.random.default_rng(num_rounds)
    found = set()
    for index in range(num_rounds):
        omega, noise = 10 ** rng.uniform(-7, 0), 10 ** rng.uniform(0, 4)
        context = draw_joint(rng, index)
        policy = policies.joint(omega, noise)
        last_steps, last_batch = rng.integers(0, 4, 3), rng.integers(0, 41, 3)
        steps, batches = (jnp.asarray(values, jnp.int32) for values in (last_steps, last_batch))
        state = policy.init(context.cell)._replace(local_steps=steps, batch_size=batches)
        after, decision = select(policy, state, context)
        chosen, tau, batch = best_joint(context, omega, noise, last_steps.tolist(), last_batch.tolist())
        assert contexts.chosen(decision) == chosen
        assert int(decision.local_steps) == tau
        assert decision.batch_size.tolist() == batch
        for device in range(3):
            used = (tau, batch[device]) if device in chosen else (last_steps[device], last_batch[device])
            assert (int(after.local_steps[device]), int(after.batch_size[device])) == used
        found.add((tau, max(batch)))
    assert len(found) >= 3
    contexts.matched("joint", num_rounds)

    # A diverged model, and a budget that is too short for any round.
    estimates = dataclasses.replace(context.estimates, delta=jnp.full(3, jnp.nan))
    assert contexts.chosen(contexts.decide(policy, dataclasses.replace(context, estimates=estimates)))
    short = dataclasses.replace(context.training, budget_s=jnp.asarray(1e-5))
    assert len(contexts.chosen(contexts.decide(policy, dataclasses.replace(context, training=short)))) == 1


def test_slow_devices_get_smaller_batches():
    batches = importlib.import_module("fcjax.policies.joint")._batches
    levels = batches(jnp.array([0.5, 1.0, 5.0]), jnp.ones(3, bool), 40)
    assert levels[:3].tolist() == [[40, 40, 40], [40, 40, 10], [40, 20, 5]]


def online_phi(context, first, weight, start, start_round):
    """Returns phi by the formula of the docstring, and the start."""
    reports, training = context.reports, context.training
    known = [i for i, last in enumerate(reports.last_round.tolist()) if last >= 0]
    if not known:
        return first, start, start_round
    total = sum(float(training.num_samples[i]) for i in known)
    mean = lambda values: sum(float(training.num_samples[i]) * float(values[i]) for i in known) / total  # noqa: E731
    inverse, index = 1 / mean(reports.loss), mean(reports.last_round)
    if not start:
        start, start_round = inverse, index
    gained = max(inverse - start, 0) / (float(training.learning_rate) * training.local_steps)
    return (weight * first + gained) / (weight + max(index - start_round, 0)), start, start_round


def test_online_converge_against_the_formula(x64):
    rng = np.random.default_rng(3)
    num_devices, num_rounds, sizes = 5, 60, set()
    for index in range(num_rounds):
        first, weight = 10 ** rng.uniform(-3, 0), rng.uniform(0.5, 20)
        context = draw(rng, num_devices, index)
        start, start_round = ((0.0, 0.0), (rng.uniform(0.1, 1), rng.uniform(0, 3)))[index % 3 > 0]
        policy = policies.online_converge(first, weight)
        state = policy.init(context.cell)._replace(start=jnp.asarray(start), start_round=jnp.asarray(start_round))
        after, decision = select(policy, state, context)
        phi, start, start_round = online_phi(context, first, weight, start, start_round)
        np.testing.assert_allclose([after.start, after.start_round], [start, start_round], rtol=1e-9)
        world, who = world_of(context)
        expected = oracles.greedy_schedule(world, **settings_of(context, phi))
        assert contexts.chosen(decision) == {int(who[i]) for i in expected}
        sizes.add(len(expected))
    assert len(sizes) > 1
    contexts.matched("fc-online", num_rounds)


def test_online_converge_before_the_first_report(x64):
    context = draw(np.random.default_rng(8), 5, 0)
    never = jax.tree.map(jnp.zeros_like, context.reports)
    context = dataclasses.replace(context, reports=dataclasses.replace(never, last_round=never.last_round - 1))
    world, who = world_of(context)
    for phi in (0.01, 1.0):
        expected = oracles.greedy_schedule(world, **settings_of(context, phi))
        decision = contexts.decide(policies.online_converge(phi), context)
        assert contexts.chosen(decision) == {int(who[i]) for i in expected}


def test_online_converge_needs_reports():
    context = dataclasses.replace(contexts.draw(np.random.default_rng(9), 3), reports=None)
    with pytest.raises(ValueError, match=r"needs context\.reports"):
        contexts.decide(policies.online_converge(), context)


def plus_deltas(context, last):
    index, reported = int(context.round_index), context.reports.last_round.tolist()
    new = [i for i, when in enumerate(reported) if when == index - 1 and when >= 0]
    deltas = []
    for device, delta in enumerate(context.estimates.delta):
        if device in new and len(new) > 1:
            deltas.append(float(delta) * math.sqrt(len(new) / (len(new) - 1)))
        else:
            deltas.append(last[device] or float(delta))
    return deltas


def test_plus_against_enumeration(x64):
    rng = np.random.default_rng(4)
    num_devices, num_rounds, sizes = 5, 40, []
    for index in range(num_rounds):
        phi, late_phi, late = 10 ** rng.uniform(-3, 0), 10 ** rng.uniform(0, 3), rng.uniform(0, 0.5)
        context = draw(rng, num_devices, index)
        recent = np.where(rng.uniform(size=num_devices) < 0.5, int(context.round_index) - 1, -1)
        reports = dataclasses.replace(context.reports, last_round=jnp.asarray(recent))
        context = dataclasses.replace(
            context, reports=reports, elapsed_s=jnp.asarray(60 - 10 ** rng.uniform(-0.5, 1.7))
        )
        last = np.where(rng.uniform(size=num_devices) < 0.5, rng.uniform(0.1, 5, num_devices), 0)
        policy = policies.fast_converge_plus(phi, late_phi, late)
        state = policy.init(context.cell)._replace(delta=jnp.asarray(last))
        after, decision = select(policy, state, context)
        deltas = plus_deltas(context, last.tolist())
        np.testing.assert_allclose(after.delta, deltas, rtol=1e-12)
        left_s = 60 - float(context.elapsed_s)
        settings = settings_of(
            context, late_phi if left_s < late * 60 else phi, delta=deltas, num_samples=[1.0] * num_devices
        )
        world, who = world_of(context)
        options = []
        for time_s, subset in oracles.best_subsets(**world):
            value = oracles.objective(len(subset), time_s, **settings) if time_s <= left_s else math.inf
            options.append((value, len(subset), {int(who[i]) for i in subset}))
        assert contexts.chosen(decision) == min(options)[2]
        sizes.append(len(min(options)[2]))
    assert len(set(sizes)) > 1
    contexts.matched("fc+", num_rounds)


def test_plus_keeps_delta_of_a_lone_device(x64):
    context = draw(np.random.default_rng(10), 5, 0)
    policy = policies.fast_converge_plus()
    last_round = jnp.full(5, -1).at[0].set(context.round_index - 1)
    alone = dataclasses.replace(context.reports, last_round=last_round)
    lost = dataclasses.replace(context.estimates, delta=jnp.asarray([0.0, 2.0, 3.0, 4.0, 5.0]))
    state = policy.init(context.cell)._replace(delta=jnp.asarray([1.0, 0.0, 4.0, 0.0, 9.0]))
    after, _ = select(policy, state, dataclasses.replace(context, reports=alone, estimates=lost))
    np.testing.assert_array_equal(after.delta, [1.0, 2.0, 4.0, 4.0, 9.0])


MAKERS = policies.online_converge, policies.fast_converge_plus, policies.joint


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS[:2])
def test_estimates_of_a_diverged_model_and_a_short_budget(make, x64):
    context = draw(np.random.default_rng(11), 5, 0)
    estimates = dataclasses.replace(context.estimates, delta=jnp.full(5, jnp.nan))
    assert contexts.chosen(contexts.decide(make(), dataclasses.replace(context, estimates=estimates)))
    short = dataclasses.replace(context, training=dataclasses.replace(context.training, budget_s=1e-5))
    assert contexts.chosen(contexts.decide(make(), short))


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
def test_one_device(make):
    assert contexts.chosen(contexts.decide(make(), contexts.draw(np.random.default_rng(12), 1))) == {0}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("junk", [None, [1.0, [2.0]], "fast"])
def test_junk_in_a_context_is_named(make, junk):
    context, policy = contexts.draw(np.random.default_rng(14), 4), make()
    for part, field in (("training", "learning_rate"), ("estimates", "delta")):
        bad = dataclasses.replace(getattr(context, part), **{field: junk})
        with pytest.raises(ValueError, match=f"{field} must be"):
            policy.select(jax.random.key(0), policy.init(context.cell), dataclasses.replace(context, **{part: bad}))


def test_errors():
    for make in MAKERS:
        with pytest.raises(ValueError, match=r"(phi|omega) must be positive and finite, got 0"):
            make(0.0)
    with pytest.raises(ValueError, match="noise must be positive"):
        policies.joint(noise=-1.0)
    with pytest.raises(ValueError, match="late must be from 0 to 1, got 2"):
        policies.fast_converge_plus(late=2.0)
