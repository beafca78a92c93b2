import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import fcjax
from fcjax import keys, models, policies
from fcjax.learning import updates
from fcjax.simulation.experiment import most_rounds, shortest_round_s
from fcjax.simulation.records import Stop
from fcjax.simulation.rounds import misjudge

pytestmark = pytest.mark.usefixtures("quick_compilation")
MAX_ROUNDS = most_rounds(tiny.experiment())


def simulate_in_python(key, policy, experiment):
    """Runs Alg. 3 in plain Python. Returns a list of rounds with the fields of the history."""
    cell, training = experiment.cell, experiment.training
    training = dataclasses.replace(training, num_samples=jnp.asarray(experiment.data.sizes))
    init_key, rounds_key = jax.random.split(key)
    params, state = experiment.model.init(init_key), policy.init(cell)
    tilde, least, elapsed_s = params, np.inf, 0.0
    estimates = jax.tree.map(jnp.asarray, experiment.estimates)
    test = jnp.asarray(experiment.test_x), jnp.asarray(experiment.test_y)
    observe = jax.jit(lambda key: fcjax.worlds.redrawn().observe(key, (), cell, training)[1])
    select = jax.jit(policy.select)
    train = jax.jit(
        lambda keys, params, scheduled, estimates: updates.train_round(
            keys, params, scheduled, estimates, experiment.data, training, experiment.model
        )
    )
    score = jax.jit(lambda w: (experiment.model.correct(w, *test).mean(), experiment.model.loss(w, *test)))
    history = []
    while True:
        round_key = jax.random.fold_in(rounds_key, len(history))
        error_key, policy_key, batches_key = jax.random.split(round_key, 6)[3:]
        truth = observe(round_key)
        seen = misjudge(error_key, truth, experiment.observation_error)
        context = fcjax.RoundContext(seen, estimates, cell, training, elapsed_s, len(history))
        state, decision = select(policy_key, state, context)
        # The true finishing times, device by device.
        bits_s = np.asarray(fcjax.radio.rate(decision.share, truth, cell))
        finish_s = [
            float(truth.compute_s[i]) + cell.upload_bits / float(bits_s[i]) for i in np.flatnonzero(decision.scheduled)
        ]
        if elapsed_s + max(finish_s) > training.budget_s:
            return history
        elapsed_s += max(finish_s)
        device_keys = keys.per_device(batches_key, len(decision.scheduled))
        trained = train(device_keys, params, decision.scheduled, estimates)
        if trained.loss < least:
            tilde, least = params, trained.loss
        params, estimates = trained.params, trained.estimates
        history.append(
            {
                "elapsed_s": elapsed_s,
                "round_s": max(finish_s),
                "scheduled": decision.scheduled,
                "received": decision.scheduled,
                "share": decision.share,
                "available": np.ones(len(decision.scheduled), bool),
                "gain": truth.gain,
                "compute_s": truth.compute_s,
                "energy_j": [
                    (1e-28 * 5e-3 * 1e9 * 48 * 1e18 + 0.01 * cell.upload_bits / float(bits_s[i])) if on else 0.0
                    for i, on in enumerate(decision.scheduled)
                ],
                "accuracy": score(params)[0],
                "loss": score(params)[1],
                "tilde_accuracy": score(tilde)[0],
                "tilde_loss": score(tilde)[1],
                "reported_loss": trained.loss,
                "rho": estimates.rho,
                "beta": estimates.beta,
                "delta": estimates.delta,
            }
        )


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        (policies.fast_converge(0.5), {}),
        pytest.param(policies.random(2), {"observation_error": 0.2}, marks=pytest.mark.slow),
        pytest.param(tiny.round_robin(2), {}, marks=pytest.mark.slow),
    ],
    ids=["fc", "rd with errors", "stateful user policy"],
)
def test_run_matches_a_loop_over_rounds(policy, changes):
    experiment = tiny.experiment(**changes)
    run = fcjax.simulate(jax.random.key(3), policy, experiment)
    expected = simulate_in_python(jax.random.key(3), policy, experiment)
    assert run.num_rounds == len(expected) > 5
    assert run.stop == Stop.BUDGET
    for name in expected[0]:
        values = np.asarray(getattr(run.history, name))
        np.testing.assert_allclose(
            values[: len(expected)], [e[name] for e in expected], rtol=2e-4, atol=1e-5, err_msg=name
        )
        beyond = values[len(expected) :]
        assert not beyond.any() if beyond.dtype == bool else np.isnan(beyond).all()
    others = {field.name for field in dataclasses.fields(run.history)} - set(expected[0])
    assert others == {"power_w", "cpu_hz", "local_steps", "batch_size"}
    assert all(getattr(run.history, name) is None for name in others), "the policy does not decide these"
    assert run.best_accuracy == run.history.accuracy[: len(expected)].max()


def test_history_is_consistent():
    run = fcjax.simulate(jax.random.key(0), policies.fast_converge(), tiny.experiment())
    k = int(run.num_rounds)
    h = jax.tree.map(lambda x: np.asarray(x)[:k], run.history)
    np.testing.assert_allclose(h.elapsed_s, np.cumsum(h.round_s), rtol=1e-5)
    assert h.elapsed_s[-1] <= 6.0
    assert h.scheduled.any(1).all()
    np.testing.assert_allclose(h.share.sum(1), 1, rtol=1e-6)
    assert ((h.share > 0) == h.scheduled).all()
    changed = np.diff(h.rho, axis=0) != 0
    assert not (changed & ~h.scheduled[1:]).any()
    assert len(np.unique(h.gain)) == h.gain.size, "every round places the devices anew"
    # w~ is one of the earlier models, because losses are known one round late
    before = np.concatenate([[float(run.start.accuracy)], h.accuracy[:-1]])
    best = [before[np.argmin(h.reported_loss[: i + 1])] for i in range(k)]
    np.testing.assert_array_equal(h.tilde_accuracy, np.asarray(best, np.float32))


@pytest.mark.slow
def test_policies_see_the_same_channels_and_batches():
    runs = [
        fcjax.simulate(jax.random.key(5), policy, tiny.experiment())
        for policy in (policies.everybody(), policies.proportional_fair(6), policies.proportional_fair(3))
    ]
    k = min(int(run.num_rounds) for run in runs)
    for run in runs[1:]:
        np.testing.assert_array_equal(run.history.gain[:k], runs[0].history.gain[:k])
        np.testing.assert_array_equal(run.history.compute_s[:k], runs[0].history.compute_s[:k])
    # Both schedule everybody, so the same mini-batches train the same model.
    np.testing.assert_array_equal(runs[0].history.loss[:k], runs[1].history.loss[:k])
    other = fcjax.simulate(jax.random.key(6), policies.everybody(), tiny.experiment())
    assert not np.any(other.history.gain[0] == runs[0].history.gain[0])


def test_decisions_use_observations_and_rounds_use_the_truth():
    policy = policies.proportional_fair(3)
    exact, wrong = (
        fcjax.simulate(jax.random.key(1), policy, tiny.experiment(observation_error=error)).history
        for error in (0.0, 0.3)
    )
    np.testing.assert_array_equal(exact.gain[0], wrong.gain[0])
    for h in (exact, wrong):
        truth = fcjax.Observation(h.gain[0], h.compute_s[0])
        cell = tiny.experiment().cell
        finish_s = truth.compute_s + cell.upload_bits / fcjax.radio.rate(h.share[0], truth, cell)
        finish_s = np.asarray(finish_s)[np.asarray(h.scheduled[0])]
        assert h.round_s[0] == pytest.approx(finish_s.max(), rel=1e-5)
        together = np.ptp(finish_s) < 1e-4 * finish_s.max()
        assert together == (h is exact), "devices finish together only with perfect information"


def test_observation_errors_have_the_papers_distribution():
    truth = fcjax.Observation(jnp.full(20000, 4.0), jnp.full(20000, 0.5))
    seen = misjudge(jax.random.key(0), truth, 0.1)
    amplitude, time_s = np.sqrt(seen.gain), np.asarray(seen.compute_s)
    assert amplitude.mean() == pytest.approx(2.0, abs=0.01)
    assert amplitude.std() == pytest.approx(0.2, rel=0.03)
    assert time_s.mean() == pytest.approx(0.5, abs=0.002)
    assert time_s.std() == pytest.approx(0.05, rel=0.03)
    assert abs(np.corrcoef(amplitude, time_s)[0, 1]) < 0.03
    assert (misjudge(jax.random.key(0), truth, 5.0).compute_s >= 0).all()


@pytest.mark.slow
def test_unequal_devices():
    """Devices differ in power, speed and data size. A weak, slow device makes rounds longer."""
    experiment = tiny.experiment(distribution="dir0.5", budget_s=20.0)
    assert len(np.unique(experiment.data.sizes)) > 1
    slow = dataclasses.replace(
        experiment.cell,
        power_w=np.array([1e-4, *[0.01] * 5], np.float32),
        sample_floor_s=np.array([0.02, *[0.005] * 5], np.float32),
        sample_rate_hz=np.array([50.0, *[200.0] * 5], np.float32),
    )
    everybody = policies.everybody()
    run = fcjax.simulate(jax.random.key(2), everybody, dataclasses.replace(experiment, cell=slow))
    equal = fcjax.simulate(jax.random.key(2), everybody, experiment)
    assert run.history.round_s[0] > equal.history.round_s[0]
    np.testing.assert_allclose(run.history.compute_s[0, 0], 4 * equal.history.compute_s[0, 0], rtol=1e-5)
    expected = simulate_in_python(jax.random.key(2), everybody, dataclasses.replace(experiment, cell=slow))
    assert len(expected) == run.num_rounds > 1
    np.testing.assert_allclose(run.history.loss[: len(expected)], [e["loss"] for e in expected], rtol=2e-4)


@pytest.mark.slow
def test_vmap_over_twenty_keys():
    experiment, policy = tiny.experiment(), policies.fast_converge()
    run_keys = jax.vmap(jax.random.key)(jnp.arange(20))
    together = jax.vmap(lambda key: fcjax.simulate(key, policy, experiment))(run_keys)
    assert together.num_rounds.shape == (20,)
    for seed in (0, 7, 19):
        alone = fcjax.simulate(jax.random.key(seed), policy, experiment)
        for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_array_equal(one[seed], other)


@pytest.mark.slow
def test_vmap_over_experiment_and_policy_parameters():
    experiment = tiny.experiment()

    def run(radius_m, budget_s, learning_rate, threshold_s):
        changed = dataclasses.replace(
            experiment,
            cell=dataclasses.replace(experiment.cell, radius_m=radius_m),
            training=dataclasses.replace(experiment.training, budget_s=budget_s, learning_rate=learning_rate),
        )
        return fcjax.simulate(jax.random.key(0), policies.client_selection(threshold_s), changed, max_rounds=30)

    arguments = [jnp.array(x) for x in ([100.0, 900.0], [3.0, 6.0], [0.01, 0.1], [0.6, 1.0])]
    together = jax.vmap(run)(*arguments)
    for index in range(2):
        alone = run(*(float(x[index]) for x in arguments))
        k = int(alone.num_rounds)
        assert together.num_rounds[index] == k
        np.testing.assert_allclose(together.history.loss[index, :k], alone.history.loss[:k], rtol=1e-4)
    with pytest.raises(ValueError, match="give max_rounds: the number of rounds is unknown"):
        jax.vmap(
            lambda budget_s: fcjax.simulate(
                jax.random.key(0),
                policies.random(1),
                dataclasses.replace(experiment, training=dataclasses.replace(experiment.training, budget_s=budget_s)),
            )
        )(jnp.array([1.0, 2.0]))


def test_policy_is_traced_twice_in_total():
    """It is traced once to check it and once to compile it."""
    traces = []

    def select(key, state, context):
        traces.append(1)
        return state, fcjax.allocate(context.observation.gain > 0, context.observation, context.cell)

    policy = fcjax.Policy(lambda cell: (), select)
    for seed, radius_m, budget_s in ((0, 600.0, 6.0), (1, 500.0, 5.9)):
        changed = tiny.experiment(radius_m=radius_m, budget_s=budget_s)
        fcjax.simulate(jax.random.key(seed), policy, changed, max_rounds=20)
    assert len(traces) == 2


@pytest.mark.slow
def test_max_rounds_limits_the_history():
    experiment = tiny.experiment()
    run = fcjax.simulate(jax.random.key(0), policies.everybody(), experiment, max_rounds=3)
    assert run.num_rounds == 3
    assert run.stop == Stop.MAX_ROUNDS
    assert run.history.accuracy.shape == (3,)
    full = fcjax.simulate(jax.random.key(0), policies.everybody(), experiment)
    np.testing.assert_array_equal(run.history.loss, full.history.loss[:3])
    assert most_rounds(experiment) == full.history.accuracy.size == int(6.0 / shortest_round_s(experiment)) + 1
    assert shortest_round_s(experiment) > 48 * 5e-3
    with pytest.raises(ValueError, match="max_rounds must be an integer of 1 or more, got 0"):
        fcjax.simulate(jax.random.key(0), policies.random(1), experiment, max_rounds=0)


def test_no_round_ends_in_time():
    experiment = tiny.experiment(budget_s=0.25)
    with pytest.warns(UserWarning, match="no round ends within the budget"):
        run = fcjax.simulate(jax.random.key(1), policies.everybody(), experiment, max_rounds=MAX_ROUNDS)
    assert run.num_rounds == 0
    assert run.best_accuracy == run.start.accuracy


@pytest.mark.slow
def test_impossible_decision_ends_the_run():
    def select(key, factor, context):
        good = fcjax.allocate(context.observation.gain > 0, context.observation, context.cell)
        share = good.share * jnp.where(context.round_index < 3, 1, factor)
        return factor, fcjax.Decision(good.scheduled, share, good.round_s)

    for factor in (jnp.nan, 1.001, -1.0, 0.0):
        policy = fcjax.Policy(lambda cell, factor=factor: jnp.array(factor), select)
        with pytest.warns(UserWarning, match=r"the decision of Policy\(.*\) after 3 rounds is impossible"):
            run = fcjax.simulate(jax.random.key(0), policy, tiny.experiment())
        assert run.stop == Stop.BAD_DECISION
        assert run.num_rounds == 3


def test_policy_error_shows_its_line():
    def select(key, state, context):
        return state, fcjax.allocate(context.observation.gains > 0, context.observation, context.cell)

    line = select.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match=rf"AttributeError: .* 'gains' \(.*test_simulate.py, line {line}\)"):
        fcjax.simulate(jax.random.key(0), fcjax.Policy(lambda cell: (), select), tiny.experiment())
    with pytest.raises(ValueError, match=r"policy must return \(state, fcjax.Decision\), got"):
        fcjax.simulate(jax.random.key(0), fcjax.Policy(lambda cell: (), lambda *args: None), tiny.experiment())


def steep():
    """A task whose loss grows by orders of magnitude per round."""
    loaded = tiny.dataset()
    sign = lambda labels: np.where(labels > 1, 1, -1).astype(np.float32)  # noqa: E731
    training = dataclasses.replace(tiny.experiment().training, learning_rate=100.0)
    experiment = tiny.experiment(training=training, model=models.squared_svm(8), test_y=sign(loaded.test_y))
    return dataclasses.replace(experiment, data=experiment.data._replace(y=sign(loaded.train_y)))


def wild():
    return tiny.experiment(training=dataclasses.replace(tiny.experiment().training, learning_rate=1e25))


@pytest.mark.slow
@pytest.mark.parametrize(("experiment", "num_rounds"), [(steep(), 3), (wild(), 0)])
def test_diverged_run_returns_the_last_finite_model(experiment, num_rounds):
    run = fcjax.simulate(jax.random.key(0), policies.everybody(), experiment)
    assert run.stop == Stop.DIVERGED
    assert run.num_rounds == num_rounds
    for leaf in jax.tree.leaves((run.params, run.tilde_params, run.best_accuracy)):
        assert np.all(np.isfinite(leaf))
    happened = jax.tree.map(lambda leaf: leaf[:num_rounds], run.history)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(happened))
    assert np.all(np.isnan(run.history.loss[num_rounds:]))
    # The earlier rounds match those of a run that stops in time.
    if num_rounds:
        stopped = fcjax.simulate(jax.random.key(0), policies.everybody(), experiment, max_rounds=num_rounds)
        assert stopped.stop == Stop.MAX_ROUNDS
        jax.tree.map(np.testing.assert_array_equal, (happened, run.params), (stopped.history, stopped.params))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget_s": 0.1}, r"the budget of 0.1 s is too short for any round: the shortest takes 0.24\d* s"),
        ({"budget_s": -1.0}, "training.budget_s must be positive and finite, got -1"),
        ({"budget_s": 1e300}, "the budget of 1e[+]300 s has room for .* rounds of 0.24"),
        ({"radius_m": 0.0}, "cell.radius_m must be positive and finite, got 0"),
        ({"observation_error": -0.1}, "observation_error must be zero or more"),
        ({"test_x": np.zeros((0, 8)), "test_y": np.zeros(0)}, "test_x and test_y must hold at least one sample"),
        (
            {"cell": dataclasses.replace(tiny.experiment().cell, power_w=[0.01] * 6)},
            "cell.power_w must be .* got a list",
        ),
        (
            {"cell": dataclasses.replace(tiny.experiment().cell, scatter=1.5)},
            "cell.scatter must be between 0 and 1, got",
        ),
        (
            {"training": dataclasses.replace(tiny.experiment().training, momentum=-0.1)},
            "training.momentum must be between 0 and 1, got -0.1",
        ),
        ({"estimates": fcjax.Estimates(1.0, 2.0, 3.0)}, r"estimates.rho must have shape \(6,\)"),
        ({"data": tiny.experiment(num_devices=4).data}, r"data.sizes must have shape \(6,\)"),
    ],
)
def test_errors_name_bad_experiments(changes, message):
    with pytest.raises(ValueError, match=message):
        fcjax.simulate(jax.random.key(0), policies.random(1), tiny.experiment(**changes))


@pytest.mark.parametrize(
    ("key", "policy", "settings", "message"),
    [
        (0, policies.random(1), {}, "key must be a random key, such as"),
        (jax.random.key(0), "fc", {}, "policy must be a fcjax.Policy, such as"),
        (jax.random.key(0), policies.random(1), {"max_rounds": 2.5}, "max_rounds must be an integer of 1 or more"),
    ],
)
def test_errors_name_bad_arguments(key, policy, settings, message):
    with pytest.raises(ValueError, match=message):
        fcjax.simulate(key, policy, tiny.experiment(), **settings)


@pytest.mark.slow
def test_centralized_training_has_all_data_and_no_uploads():
    experiment = fcjax.presets.centralized(tiny.experiment(), speed=4)
    run = fcjax.simulate(jax.random.key(0), policies.everybody(), experiment)
    k = int(run.num_rounds)
    np.testing.assert_array_equal(run.history.round_s[:k], run.history.compute_s[:k, 0])
    assert experiment.data.sizes.tolist() == [int(tiny.experiment().data.sizes.sum())]
    assert run.best_accuracy > 0.9
    assert float(shortest_round_s(experiment)) == pytest.approx(48 * 5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [np.int64(2**32 + 100_000), 2**32 + 100_000])
def test_large_integers_do_not_overflow(bits):
    """An upload takes thousands of seconds, not just one."""
    experiment = tiny.experiment(budget_s=1e5)
    experiment = dataclasses.replace(experiment, cell=dataclasses.replace(experiment.cell, upload_bits=bits))
    run = fcjax.simulate(jax.random.key(0), policies.everybody(), experiment, max_rounds=2)
    assert run.history.round_s[0] > 1000
    swept = fcjax.sweep(
        {"all": policies.everybody()}, dataset=tiny.dataset(), preset=lambda *_, **__: experiment, seeds=1
    )
    assert swept.round_s[0, 0] > 1000
