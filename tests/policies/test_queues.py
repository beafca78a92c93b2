"""OCEAN against loops, with SciPy's root finding and Lambert W, and against all subsets."""

import dataclasses
import itertools
import math
import re

import contexts
import jax
import numpy as np
import pytest
from contexts import present
from scipy import optimize, special

import fcjax
from fcjax import policies
from fcjax.policies import queues

pytestmark = pytest.mark.usefixtures("quick_compilation")
NUM_SAMPLES = 5 * 128  # of a round


def least_share(k, context, upload_s):
    """The share with which a device at full power sends its bits in time; inf if no share suffices."""
    cell = context.cell
    snr = float(cell.power_w[k]) * float(context.observation.gain[k]) / (cell.bandwidth_hz * cell.noise_psd_w_hz)

    def excess(log_share):
        share = math.exp(log_share)
        rate = share * cell.bandwidth_hz * math.log1p(snr / share) / math.log(2)
        return math.log(rate * upload_s / float(cell.upload_bits))

    return math.exp(optimize.brentq(excess, -40, 20, xtol=1e-13)) if excess(20) > 0 else math.inf


def sending_energy(k, share, context, upload_s):
    """What a device spends that sends for upload_s with as little power as this takes."""
    cell = context.cell
    nats = float(cell.upload_bits) * math.log(2) / (share * cell.bandwidth_hz * upload_s)
    noise_w = share * cell.bandwidth_hz * cell.noise_psd_w_hz
    return upload_s * noise_w / float(context.observation.gain[k]) * math.expm1(nats)


def computing_energy(context):
    cell = context.cell
    return cell.capacitance * cell.cpu_hz**2 * (cell.sample_floor_s * cell.cpu_hz * NUM_SAMPLES)


def best_shares(devices, queue, least, context, upload_s):
    """Minimises the sum of q_k E_k over shares that sum to 1: equal slopes, except where the power is at its limit."""
    cell = context.cell
    c = float(cell.upload_bits) * math.log(2) / (cell.bandwidth_hz * upload_s)
    price = {k: queue[k] / float(context.observation.gain[k]) for k in devices}
    largest = max(price.values())

    def shares(log_nu):
        found = {}
        for k in devices:
            # nu = price (1 + (x - 1) exp(x)) with x = c/share, solved by Lambert W.
            ratio = math.exp(min(log_nu - math.log(price[k] / largest), 300))
            x = 1 + float(special.lambertw(max((ratio - 1) / math.e, -1 / math.e + 1e-16)).real)
            found[k] = min(max(c / max(x, 1e-12), least[k]), 1.0)
        return found

    if sum(least[k] for k in devices) >= 1:
        return {k: least[k] for k in devices}
    log_nu = optimize.brentq(lambda log_nu: sum(shares(log_nu).values()) - 1 + 1e-12, -60, 250, xtol=1e-11)
    return shares(log_nu)


def ocean_choice(context, queue, *, v, upload_s, mean_allowance_j):
    """Returns the shares of one round by the published order, with the adaptations that the policy documents."""
    here = present(context)
    floored = {k: max(float(queue[k]), 1e-6 * mean_allowance_j) for k in here}
    order = sorted(here, key=lambda k: floored[k] / float(context.observation.gain[k]))
    least = {k: least_share(k, context, upload_s) for k in here}
    fitting, used = [], 0.0
    for k in order:
        if used + least[k] <= 1:
            fitting.append(k)
            used += least[k]
    if not fitting:
        return {order[0]: 1.0}
    value, chosen = math.inf, {}
    for number in range(1, len(fitting) + 1):
        shares = best_shares(fitting[:number], floored, least, context, upload_s)
        spent = {k: computing_energy(context) + sending_energy(k, b, context, upload_s) for k, b in shares.items()}
        cost = sum(float(queue[k]) * spent[k] for k in shares) - v * number
        if cost < value:
            value, chosen = cost, shares
    return chosen


def rounds(seed, num_rounds, num_devices=6, **cell):
    rng = np.random.default_rng(seed)
    for index in range(num_rounds):
        yield rng, jax.device_get(contexts.draw(rng, num_devices, available=index % 2 == 0, **cell))


def random_queue(rng, num_devices):
    """Some queues are empty."""
    return np.float32(np.where(rng.uniform(size=num_devices) < 0.2, 0, 10 ** rng.uniform(-3, -1, num_devices)))


def check_decision(decision, context, expected, upload_s):
    """Compares shares, powers, energy and round time."""
    assert contexts.chosen(decision) == set(expected)
    energy_j = np.asarray(
        fcjax.round_energy(
            jax.tree.map(jax.numpy.asarray, decision), context.observation, context.cell, context.training
        )
    )
    ready_s = []
    for k, share in expected.items():
        assert decision.share[k] == pytest.approx(share, rel=2e-3, abs=1e-5)
        assert decision.power_w[k] <= context.cell.power_w[k] * (1 + 1e-6)
        spent_j = sending_energy(k, float(decision.share[k]), context, upload_s) + computing_energy(context)
        assert energy_j[k] == pytest.approx(spent_j, rel=1e-3)
        ready_s.append(float(context.observation.compute_s[k]))
    assert float(decision.round_s) == pytest.approx(max(ready_s) + upload_s, rel=1e-3)


def test_ocean():
    drawn = []
    for rng, context in rounds(1, 220):
        v, upload_s = np.float32([10 ** rng.uniform(-4, -2.5), 10 ** rng.uniform(-1, 0)]).tolist()
        drawn.append((context, random_queue(rng, 6), v, upload_s))
    made = [policies.ocean(v, upload_s) for _, _, v, upload_s in drawn]
    states = [p.init(c.cell)._replace(queue_j=queue) for p, (c, queue, *_) in zip(made, drawn, strict=True)]
    found = contexts.decide_all(made, [context for context, *_ in drawn], jax.random.key(0), states)
    sizes = set()
    for index, (decision, (context, queue, v, upload_s)) in enumerate(zip(found, drawn, strict=True)):
        expected = ocean_choice(context, queue, v=v, upload_s=upload_s, mean_allowance_j=0.01)
        assert contexts.chosen(decision) == set(expected)
        sizes.add(len(expected))
        if index < 40 and all(least_share(k, context, upload_s) <= 1 for k in expected):
            check_decision(decision, context, expected, upload_s)
    assert len(sizes) > 3
    contexts.matched("ocean", len(drawn))


def test_the_order_is_optimal_without_limits_of_power():
    """The published claim: of all sets, the best one consists of the first devices by q/h^2."""
    drawn = []
    for rng, context in rounds(2, 200, num_devices=4, capacitance=0.0):
        cell = dataclasses.replace(context.cell, power_w=np.full(4, 1e4, np.float32))
        v = float(np.float32(10 ** rng.uniform(-7, -4)))
        queue = np.float32(10 ** rng.uniform(-3, -1, 4))
        drawn.append((dataclasses.replace(context, cell=cell), queue, v))
    made = [policies.ocean(v, 0.3) for *_, v in drawn]
    states = [p.init(c.cell)._replace(queue_j=queue) for p, (c, queue, _) in zip(made, drawn, strict=True)]
    found = contexts.decide_all(made, [context for context, *_ in drawn], jax.random.key(0), states)
    sizes = set()
    for decision, (context, queue, v) in zip(found, drawn, strict=True):
        least = {k: least_share(k, context, 0.3) for k in range(4)}

        def cost(shares, context=context, queue=queue, v=v):
            return sum(float(queue[k]) * sending_energy(k, b, context, 0.3) - v for k, b in shares.items())

        best = min(
            cost(best_shares(devices, queue, least, context, 0.3))
            for number in range(1, len(present(context)) + 1)
            for devices in itertools.combinations(present(context), number)
        )
        reached = cost({k: float(decision.share[k]) for k in contexts.chosen(decision)})
        assert reached <= best + 1e-4 * abs(best)
        sizes.add(len(contexts.chosen(decision)))
    assert sizes == {1, 2, 3, 4}


@pytest.mark.parametrize("battery_j", [math.inf, 0.7])
def test_queues_in_a_run(battery_j):
    """The virtual queues over 40 rounds, and weights that grow with the rounds."""
    policy = policies.ocean(v=1e-3, upload_s=0.4, budget_j=0.5, num_rounds=50, slope=1.5)
    state, queue = None, [0.0] * 5
    allowance_j = (0.5 if math.isinf(battery_j) else battery_j) / 50
    sizes = []
    for index, (_, context) in enumerate(rounds(3, 40, num_devices=5, battery_j=battery_j)):
        this = dataclasses.replace(context, round_index=np.asarray(index))
        state = policy.init(this.cell) if state is None else state
        weight = 1 + 1.5 * (index / 50 - 0.5)
        expected = ocean_choice(this, queue, v=1e-3 * weight, upload_s=0.4, mean_allowance_j=allowance_j)
        state, decision = contexts.select_by(policy.select, jax.random.key(0), state, this)
        assert contexts.chosen(decision) == set(expected)
        for k in range(5):
            spent_j = 0.0
            if k in expected:
                power_w = min(sending_energy(k, expected[k], this, 0.4) / 0.4, float(this.cell.power_w[k]))
                snr = power_w * float(this.observation.gain[k]) / (expected[k] * 20e6 * 10**-20.4)
                spent_j = computing_energy(this) + power_w * 1.6e6 / (expected[k] * 20e6 * math.log2(1 + snr))
            queue[k] = max(queue[k] + spent_j - allowance_j, 0)
        np.testing.assert_allclose(state.queue_j, queue, rtol=1e-3, atol=1e-6)
        sizes.append(len(expected))
    assert len(set(sizes)) > 2


def test_one_device_is_scheduled_if_none_can_send_in_time():
    policy = policies.ocean(upload_s=1e-4)
    for _, context in rounds(4, 20):
        state, decision = contexts.select_by(policy.select, jax.random.key(0), policy.init(context.cell), context)
        (device,) = contexts.chosen(decision)
        assert device == max(present(context), key=lambda k: context.observation.gain[k]), "all queues are empty"
        assert decision.share[device] == 1
        assert decision.power_w[device] == context.cell.power_w[device]
        assert decision.round_s > context.observation.compute_s[device] + 1e-4
        assert state.queue_j[device] > 0


def test_single_device():
    for _, context in rounds(5, 4, num_devices=1):
        policy = policies.ocean()
        _, decision = contexts.select_by(policy.select, jax.random.key(0), policy.init(context.cell), context)
        assert decision.scheduled.tolist() == [True]
        assert decision.share.tolist() == [1.0]


def test_inverse_slope(dtype):
    x = np.geomspace(1e-4, 40, 500).astype(dtype)
    found = queues._inverse_slope(queues._slope(x))
    np.testing.assert_allclose(found, x, rtol=2e-5 if dtype == np.float32 else 1e-10)
    x = np.float64(x)
    exact = np.where(x < 1e-3, x**2 / 2 + x**3 / 3, 1 + (x - 1) * np.exp(x))
    np.testing.assert_allclose(queues._slope(x.astype(dtype)), exact, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda cell: policies.ocean(v=0), "v must be positive and finite, got 0"),
        (lambda cell: policies.ocean(budget_j=-1), "budget_j must be positive and finite, got -1"),
        (
            lambda cell: policies.ocean().init(dataclasses.replace(cell, access="tdma")),
            "ocean splits the bandwidth itself: cell.access must be 'fdma', got 'tdma'",
        ),
    ],
)
def test_errors(make, message):
    _, context = next(rounds(6, 1))
    with pytest.raises(ValueError, match=re.escape(message)):
        make(context.cell)


@pytest.mark.slow
def test_contract_with_batteries():
    spread = np.geomspace(0.5, 2, 8).astype(np.float32)
    cell = fcjax.Cell(20e6, 10**-20.4, 0.01 * spread, 1.6e6 * spread, battery_j=5 * spread)
    fcjax.check_policy(policies.ocean(), cell)
