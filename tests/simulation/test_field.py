"""Runs past the paper's cell: batteries, availability, lost uploads, compression, wider decisions, other worlds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

import fcjax
from fcjax import compressors, keys, outages, policies, worlds
from fcjax.simulation.records import Stop

pytestmark = pytest.mark.usefixtures("quick_compilation")
COMPUTING_J = 1e-28 * 5e-3 * 1e9 * 48 * 1e18  # of a round of `tiny.experiment`


def with_cell(**fields):
    made = tiny.experiment()
    return dataclasses.replace(made, cell=dataclasses.replace(made.cell, **fields))


def history_of(policy, experiment, seed=0, **settings):
    run = fcjax.simulate(jax.random.key(seed), policy, experiment, **settings)
    return run, jax.tree.map(lambda x: np.asarray(x)[: int(run.num_rounds)], run.history)


@pytest.mark.slow
def test_an_empty_battery_ends_participation():
    _, free = history_of(policies.everybody(), tiny.experiment())
    battery_j = np.full(6, np.inf, np.float32)
    battery_j[2] = free.energy_j[:3, 2].sum() * 1.0001  # enough for three rounds
    run, h = history_of(policies.everybody(), with_cell(battery_j=battery_j))
    np.testing.assert_array_equal(h.scheduled[:, 2], np.arange(len(h.scheduled)) < 3)
    np.testing.assert_array_equal(h.available, h.scheduled)
    np.testing.assert_array_equal(h.received, h.scheduled)
    np.testing.assert_allclose(h.energy_j[:3], free.energy_j[:3], rtol=1e-5)
    others = np.arange(6) != 2
    assert h.scheduled[:, others].all()
    np.testing.assert_allclose(h.share[3:, others], 0.2, rtol=1e-6)
    assert run.stop == Stop.BUDGET


def test_a_battery_that_runs_out_during_a_round_loses_the_upload():
    alone_j = 1.02 * COMPUTING_J  # pays for sending alone, but not with a share of the bandwidth
    experiment = with_cell(battery_j=np.full(6, alone_j, np.float32))
    _, h = history_of(policies.everybody(), experiment)
    first = fcjax.Observation(h.gain[0], h.compute_s[0])
    cost_j = COMPUTING_J + 0.01 * 1e5 / np.asarray(
        fcjax.radio.rate(np.maximum(h.share[0], 0.01), first, experiment.cell)
    )
    dies = h.scheduled[0] & (cost_j > alone_j)
    assert 0 < dies.sum() < h.scheduled[0].sum() < 6
    np.testing.assert_array_equal(h.received[0], h.scheduled[0] & ~dies)
    np.testing.assert_allclose(h.energy_j[0][dies], alone_j, rtol=1e-6)
    np.testing.assert_allclose(h.energy_j[0][h.received[0]], cost_j[h.received[0]], rtol=1e-5)
    assert h.energy_j.sum(0).max() <= alone_j * (1 + 1e-6)
    assert not h.scheduled[1:, h.scheduled[0]].any(), "no battery can pay for a second round"
    idle = ~h.available.any(1)
    assert idle[-1]
    assert np.isnan(h.reported_loss[idle]).all()
    assert h.loss[-1] == h.loss[-2], "the model stays as it is"
    np.testing.assert_allclose(h.round_s[idle], h.compute_s[idle].min(1), rtol=1e-6)


def test_batteries_that_allow_no_round_are_rejected():
    with pytest.raises(ValueError, match=r"no battery can pay for a round: cell.battery_j is at most 0.001 J"):
        fcjax.simulate(jax.random.key(0), policies.everybody(), with_cell(battery_j=1e-3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fixed-4", "everybody"])  # the contract covers all policies
def test_policies_schedule_available_devices_only(name):
    experiment = tiny.experiment(world=worlds.intermittent(0.4))
    run, h = history_of(policies.by_name(name), experiment)
    assert run.stop == Stop.BUDGET
    assert not (h.scheduled & ~h.available).any()
    np.testing.assert_array_equal(h.scheduled.any(1), h.available.any(1))
    assert (~h.available.any(1)).any(), "a round without anybody"
    if name == "fixed-4":
        np.testing.assert_array_equal(h.scheduled.sum(1), np.minimum(h.available.sum(1), 4))


@pytest.mark.slow
def test_a_policy_that_schedules_unavailable_devices_is_stopped():
    experiment = tiny.experiment(world=worlds.intermittent(0.6))
    with pytest.warns(UserWarning, match="nobody or an unavailable device scheduled"):
        run, _ = history_of(tiny.round_robin(), experiment)
    assert run.stop == Stop.BAD_DECISION
    with pytest.raises(ValueError, match=r"policy schedules a device that is not available, in .* random rounds"):
        fcjax.check_policy(
            tiny.round_robin(), experiment.cell, experiment.training, world=experiment.world, ignores_labels=False
        )


@pytest.mark.slow
def test_a_trace_of_a_run_reproduces_it(tmp_path):
    experiment = tiny.experiment(world=worlds.intermittent(0.7, world=worlds.mobile(speed_m_s=20.0)))
    policy = policies.fast_converge(0.5)
    run, h = history_of(policy, experiment, seed=2)
    replay = worlds.trace(h.gain, h.compute_s, h.available, at_end="stop")
    path = tmp_path / "trace.nc"
    fcjax.results.from_run(run, experiment).isel(run=[0])[["gain", "compute_s", "available"]].to_netcdf(path)
    for world in (replay, worlds.from_file(path, at_end="stop")):
        _, again = history_of(policy, dataclasses.replace(experiment, world=world), seed=2)
        jax.tree.map(np.testing.assert_array_equal, again, h)


@pytest.mark.slow
def test_a_sweep_over_the_trace_of_a_run_reproduces_it(tmp_path):
    settings = {"dataset": tiny.dataset(), "num_devices": 6, "budget_s": 4, "seeds": 1, "workers": 1}
    before = fcjax.sweep("fc", **settings, preset=tiny.experiment)
    before.isel(run=[0])[["gain", "compute_s", "available"]].to_netcdf(tmp_path / "trace.nc")
    world = worlds.from_file(tmp_path / "trace.nc", at_end="stop")
    after = fcjax.sweep("fc", **settings, preset=functools.partial(tiny.experiment, world=world))
    for name in ("round_s", "scheduled", "accuracy", "energy_j"):
        np.testing.assert_array_equal(after[name], before[name])


def test_a_trace_without_repetition_must_be_long_enough():
    short = worlds.trace(np.full((5, 6), 1e-10), np.full((5, 6), 0.3), at_end="error")
    with pytest.raises(ValueError, match=r"the world has 5 rounds, and the budget of 6 s has room for up to 2\d"):
        fcjax.simulate(jax.random.key(0), policies.everybody(), tiny.experiment(world=short))
    run, _ = history_of(policies.everybody(), tiny.experiment(world=short), max_rounds=5)
    assert run.num_rounds == 5
    with pytest.raises(ValueError, match="max_rounds must be at most 5, the rounds of the world, got 12"):
        fcjax.simulate(jax.random.key(0), policies.everybody(), tiny.experiment(world=short), max_rounds=12)


def test_a_trace_of_another_number_of_devices_is_rejected():
    other = worlds.trace(np.full((5, 4), 1e-10), np.full((5, 4), 0.3))
    with pytest.raises(ValueError, match=r"^the number of devices is 4 in the trace and 6 in the cell"):
        fcjax.simulate(jax.random.key(0), policies.everybody(), tiny.experiment(world=other))


@pytest.mark.slow
def test_measured_times_drive_a_run(tmp_path):
    lines = ["round,device,compute_s,upload_s"]
    lines += [f"{k},{i},{0.2 + 0.05 * i + 0.01 * k},{0.02 + 0.01 * i}" for k in range(4) for i in range(6)]
    (tmp_path / "measured.csv").write_text("\n".join(lines))
    _, h = history_of(policies.fixed(1), tiny.experiment(world=worlds.from_file(tmp_path / "measured.csv")))
    assert h.scheduled[:, 0].all(), "the fastest device"
    np.testing.assert_allclose(h.round_s, [0.22 + 0.01 * (k % 4) for k in range(len(h.round_s))], rtol=1e-4)


def test_a_users_world_is_checked_before_the_run():
    def observe(key, state, cell, training):
        gain = jnp.where(state == 3, jnp.nan, 1e-10) * jnp.ones(6)
        return state + 1, fcjax.Observation(gain, jnp.full(6, 0.3))

    bad = fcjax.World(lambda key, cell: jnp.array(0), observe)
    with pytest.raises(ValueError, match="world: gain must be zero or more, and finite; device 0 has nan in round 3"):
        fcjax.simulate(jax.random.key(0), policies.everybody(), tiny.experiment(world=bad))

    def wrong(key, state, cell, training):
        return state, fcjax.Observation(jnp.ones(5), jnp.ones(6))

    with pytest.raises(ValueError, match=r"world: gain must be float of shape \(6,\), got float32 \(5,\)"):
        fcjax.check_world(fcjax.World(lambda key, cell: (), wrong), tiny.experiment().cell)

    def typo(key, state, cell, training):
        return state, fcjax.Observation(gian, jnp.ones(6))  # noqa: F821

    with pytest.raises(ValueError, match=r"world: observe raised NameError: .*'gian'.*\(.*test_field.py, line \d+\)"):
        fcjax.check_world(fcjax.World(lambda key, cell: (), typo), tiny.experiment().cell)


@pytest.mark.slow
def test_lost_uploads_are_paid_for_and_not_aggregated():
    experiment = tiny.experiment(outages=outages.erasures(np.array([1.0, 0, 0, 0, 0, 1.0])))
    _, h = history_of(policies.everybody(), experiment)
    _, usual = history_of(policies.everybody(), tiny.experiment())
    np.testing.assert_array_equal(h.received, h.scheduled & [False, True, True, True, True, False])
    np.testing.assert_array_equal(h.energy_j, usual.energy_j)
    np.testing.assert_array_equal(h.elapsed_s, usual.elapsed_s)
    assert (h.rho[:, [0, 5]] == 1.5).all(), "no report arrives"
    _, none = history_of(policies.everybody(), tiny.experiment(outages=outages.erasures(1.0)))
    assert len(none.loss) == len(usual.loss)
    assert len(np.unique(none.loss)) == 1
    _, never = history_of(policies.everybody(), tiny.experiment(outages=outages.erasures(0.0)))
    np.testing.assert_array_equal(never.loss, usual.loss)


@pytest.mark.slow
def test_reports_of_devices():
    seen = []

    def select(key, state, context):
        jax.debug.callback(lambda *args: seen.append(args), context.round_index, context.reports, ordered=True)
        scheduled = jnp.arange(6) // 2 == context.round_index % 3
        return state, fcjax.allocate(scheduled, context.observation, context.cell)

    lossy = outages.erasures(np.array([0, 1.0, 0, 0, 0, 0]))
    _, h = history_of(fcjax.Policy(lambda cell: (), select), tiny.experiment(outages=lossy))
    jax.effects_barrier()
    assert len(seen) >= len(h.loss) >= 4
    for index, reports in seen[: len(h.loss)]:
        before = slice(0, int(index))
        np.testing.assert_array_equal(reports.times_scheduled, h.scheduled[before].sum(0))
        np.testing.assert_allclose(reports.energy_j, h.energy_j[before].sum(0), rtol=1e-5)
        last = [np.flatnonzero(h.received[before, i])[-1:] for i in range(6)]
        np.testing.assert_array_equal(reports.last_round, [rounds[0] if len(rounds) else -1 for rounds in last])
        assert ((reports.update_norm > 0) == (reports.last_round >= 0)).all()
        assert ((reports.loss > 0) == (reports.last_round >= 0)).all()


def decided(**fields):
    """Schedules everybody, with the given decisions."""

    def select(key, state, context):
        decision = fcjax.Decision(jnp.ones(6, bool), jnp.full(6, 1 / 6), jnp.zeros(()), **state)
        observation, cell = fcjax.as_decided(decision, context.observation, context.cell, context.training)
        round_s = fcjax.round_time(decision.scheduled, decision.share, observation, cell)
        return state, dataclasses.replace(decision, round_s=round_s)

    return fcjax.Policy(lambda cell: jax.tree.map(jnp.asarray, fields), select)


@pytest.mark.slow
def test_decided_settings_are_recorded_and_applied():
    fields = {"power_w": 0.005, "cpu_hz": np.full(6, 5e8), "local_steps": 1, "batch_size": np.arange(1, 7)}
    experiment = tiny.experiment()
    policy = decided(**fields)
    fcjax.check_policy(policy, experiment.cell, experiment.training, ignores_labels=False)
    run, h = history_of(policy, experiment)
    for name, value in fields.items():
        np.testing.assert_allclose(getattr(h, name), np.broadcast_to(value, h.share.shape), rtol=1e-6)
    samples = np.arange(1, 7)
    bits_s = np.stack(
        [
            fcjax.radio.rate(
                np.full(6, 1 / 6),
                fcjax.Observation(g, c),
                dataclasses.replace(experiment.cell, power_w=np.full(6, 0.005)),
            )
            for g, c in zip(h.gain, h.compute_s, strict=True)
        ]
    )
    round_s = (h.compute_s * 2 * samples / 48 + 1e5 / bits_s).max(1)
    np.testing.assert_allclose(h.round_s, round_s, rtol=1e-5)
    energy_j = 1e-28 * 5e-3 * 1e9 * samples * 0.25e18 + 0.005 * 1e5 / bits_s
    np.testing.assert_allclose(h.energy_j, energy_j, rtol=1e-5)
    assert run.stop == Stop.BUDGET
    assert run.num_rounds > 20, "more rounds than whole batches allow"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"power_w": 0.02}, r"gives device 0 a power_w of 0.02, in 256 of 256 random rounds; .* at most 0.01"),
        ({"cpu_hz": 2e9}, r"gives device 0 a cpu_hz of 2e\+09"),
        ({"local_steps": 0}, r"gives device 0 a local_steps of 0"),
        ({"batch_size": np.array([1, 2, 3, 4, 5, 17])}, r"gives device 5 a batch_size of 17"),
    ],
)
def test_decisions_beyond_the_limits(fields, message):
    experiment = tiny.experiment()
    with pytest.raises(ValueError, match=message):
        fcjax.check_policy(decided(**fields), experiment.cell, experiment.training, ignores_labels=False)
    with pytest.warns(UserWarning, match="is impossible"):
        assert fcjax.simulate(jax.random.key(0), decided(**fields), experiment).stop == Stop.BAD_DECISION


@pytest.mark.slow
def test_policies_that_ask_for_norms_wait_and_pay():
    def select(key, state, context):
        norms = jnp.where(context.observation.available, context.reports.update_norm, -1)
        scheduled = jnp.arange(6) == jnp.argmax(norms)
        return state, fcjax.allocate(scheduled, context.observation, context.cell)

    asking = fcjax.Policy(lambda cell: (), select, asks_norms=True)
    experiment = tiny.experiment(world=worlds.intermittent(0.8))
    run, h = history_of(asking, experiment)
    assert run.stop == Stop.BUDGET
    send_s = [
        1e5 / float(fcjax.radio.rate(share, fcjax.Observation(g, c), experiment.cell)[np.argmax(on)])
        for share, g, c, on in zip(h.share, h.gain, h.compute_s, h.scheduled, strict=True)
    ]
    slowest_s = np.where(h.available, h.compute_s, 0).max(1)
    np.testing.assert_allclose(h.round_s, slowest_s + send_s, rtol=1e-5)
    expected = np.where(h.available, COMPUTING_J, 0) + np.where(h.scheduled, 0.01 * np.array(send_s)[:, None], 0)
    np.testing.assert_allclose(h.energy_j, expected, rtol=1e-5)


@pytest.mark.slow
def test_waiting_for_norms():
    """Nobody's absence takes as long as under other policies, and the wait includes downloads."""

    def select(key, state, context):
        first = jnp.arange(6) == jnp.argmax(context.observation.available)
        return state, fcjax.allocate(first, context.observation, context.cell)

    asking = fcjax.Policy(lambda cell: (), select, asks_norms=True)
    experiment = tiny.experiment(world=worlds.intermittent(0.3), observation_error=0.2)
    cell = dataclasses.replace(experiment.cell, download_bits=1e6, broadcast_w=1.0)
    _, h = history_of(asking, dataclasses.replace(experiment, cell=cell))
    idle = ~h.available.any(1)
    assert idle.any()
    np.testing.assert_allclose(h.round_s[idle], h.compute_s[idle].min(1), rtol=1e-6)
    for k in np.flatnonzero(~idle):
        truth = fcjax.Observation(h.gain[k], h.compute_s[k])
        noise_w = cell.noise_psd_w_hz * cell.bandwidth_hz
        receive_s = 1e6 / (1e6 * np.log2(1 + 1.0 * h.gain[k] / noise_w))
        wait_s = (h.compute_s[k] + receive_s)[h.available[k]].max()
        send_s = 1e5 / float(fcjax.radio.rate(h.share[k], truth, cell)[np.argmax(h.scheduled[k])])
        assert h.round_s[k] == pytest.approx(wait_s + send_s, rel=1e-4)


def test_norms_and_steps_cannot_both_be_decided():
    asking = decided(local_steps=1)._replace(asks_norms=True)
    with pytest.raises(ValueError, match="asks for norms, so it decides after devices have computed: local_steps"):
        fcjax.simulate(jax.random.key(0), asking, tiny.experiment())


@pytest.mark.slow
def test_compression_reaches_the_model_and_keeps_draws():
    _, usual = history_of(policies.everybody(), tiny.experiment())
    coarse, fine = (
        history_of(policies.everybody(), tiny.experiment(compressor=compressors.quantise(bits)))[1] for bits in (2, 16)
    )
    np.testing.assert_array_equal(coarse.gain, usual.gain)
    np.testing.assert_allclose(fine.loss, usual.loss, rtol=1e-3)
    assert np.abs(coarse.loss - usual.loss).max() > 1e-2
    whole, sparse = (
        history_of(policies.everybody(), tiny.experiment(compressor=compressors.top_k(fraction)))[1]
        for fraction in (1.0, 0.1)
    )
    np.testing.assert_allclose(whole.loss, usual.loss, rtol=1e-4)
    assert sparse.accuracy.max() > 2 * sparse.accuracy[0], "it learns"


@pytest.mark.slow
def test_server_optimizers_and_the_proximal_term():
    _, usual = history_of(policies.everybody(), tiny.experiment())
    _, plain = history_of(policies.everybody(), tiny.experiment(server_optimizer=optax.sgd(1.0)))
    np.testing.assert_allclose(plain.loss, usual.loss, rtol=1e-4)
    _, adam = history_of(policies.everybody(), tiny.experiment(server_optimizer=optax.adam(0.05)))
    assert np.abs(adam.loss - usual.loss).max() > 1e-3
    training = tiny.experiment().training
    near, far = (
        history_of(policies.everybody(), tiny.experiment(training=dataclasses.replace(training, proximal=mu)))[1]
        for mu in (0.0, 10.0)
    )
    np.testing.assert_allclose(near.loss, usual.loss, rtol=1e-4)
    assert (far.delta.mean(1) < near.delta.mean(1)).mean() > 0.9, "devices stay closer together"


@pytest.mark.slow
def test_without_updates_the_server_stands_still():
    mostly_away = np.arange(6)[:, None] % 6 == np.zeros(6, int)[None]
    world = worlds.trace(np.full((6, 6), 1e-10), np.full((6, 6), 0.3), mostly_away)
    experiment = tiny.experiment(world=world, server_optimizer=optax.sgd(1.0, momentum=0.9))
    _, h = history_of(policies.everybody(), experiment)
    changes = np.diff(h.loss) != 0
    np.testing.assert_array_equal(changes, h.scheduled.any(1)[1:])


@pytest.mark.slow
def test_runs_are_not_cut_short():
    """The number of rounds is limited by what the world and the policy make possible."""
    slow = worlds.trace(np.full((3, 6), 1e-10), np.full((3, 6), 0.6))
    run, h = history_of(decided(local_steps=1), tiny.experiment(world=slow))
    assert run.stop == Stop.BUDGET
    assert h.elapsed_s[-1] > 5.5

    def observe(key, state, cell, training):
        return state, fcjax.Observation(jnp.full(6, 1e-8), jnp.full(6, 0.02))

    fast = fcjax.World(lambda key, cell: (), observe)
    with pytest.warns(UserWarning, match="before its budget is spent: its world exceeds the limits"):
        history_of(policies.everybody(), tiny.experiment(world=fast))
    honest = fast._replace(limits=lambda cell, training: fcjax.Limits(1e-8, 0.02, always_available=True))
    run, _ = history_of(policies.everybody(), tiny.experiment(world=honest))
    assert run.stop == Stop.BUDGET


@pytest.mark.slow
def test_a_users_world_does_not_share_keys_with_the_policy():
    def observe(key, state, cell, training):
        draw = jax.vmap(jax.random.uniform)(keys.per_device(jax.random.split(key, 6)[4], 6))
        return state, fcjax.Observation(1e-10 * (1.1 - draw), jnp.full(6, 0.3))

    mine = fcjax.World(lambda key, cell: (), observe)
    for world in (mine, worlds.intermittent(1.0, world=mine)):
        _, h = history_of(policies.random(1), tiny.experiment(world=world), max_rounds=20)
        best = (h.scheduled & (h.gain == h.gain.max(1, keepdims=True))).any(1)
        assert best.mean() < 0.8


def test_users_outages_and_compressors_are_checked():
    def lose(key, state, decision, observation, cell):
        return state, jnp.full(6, 0.5)

    with pytest.raises(ValueError, match=r"outages: lose must return \(state, booleans of shape \(6,\)\)"):
        fcjax.simulate(
            jax.random.key(0), policies.everybody(), tiny.experiment(outages=fcjax.Outages(lambda cell: (), lose))
        )
    short = fcjax.Compressor(lambda size: 8.0 * size, lambda key, parameters, update: update[:3])
    with pytest.raises(ValueError, match="compressor: apply must return floats"):
        fcjax.simulate(jax.random.key(0), policies.everybody(), tiny.experiment(compressor=short))
    with pytest.raises(ValueError, match="server_optimizer must be an optax optimizer"):
        fcjax.simulate(jax.random.key(0), policies.everybody(), tiny.experiment(server_optimizer=optax.adam))


@pytest.mark.slow
def test_top_k_in_double_precision(x64):
    run, _ = history_of(policies.everybody(), tiny.experiment(compressor=compressors.top_k(0.5)), max_rounds=2)
    assert run.num_rounds == 2


@pytest.mark.slow
def test_programs_are_shared_by_parameters():
    """Worlds, outages and compressors of one kind differ in data only."""
    experiments = [
        tiny.experiment(
            world=worlds.mobile(speed_m_s=speed), outages=outages.erasures(p), compressor=compressors.quantise(bits)
        )
        for speed, p, bits in ((1.0, 0.1, 4), (2.0, 0.2, 8))
    ]
    traces = []

    def select(key, state, context):
        traces.append(1)
        return state, fcjax.allocate(jnp.ones(6, bool), context.observation, context.cell)

    policy = fcjax.Policy(lambda cell: (), select)
    runs = [fcjax.simulate(jax.random.key(0), policy, one, max_rounds=8) for one in experiments]
    assert len(traces) == 2, "one to check it, one to compile it"
    assert not np.array_equal(runs[0].history.gain, runs[1].history.gain)
    assert not np.array_equal(runs[0].history.loss, runs[1].history.loss)


@pytest.mark.slow
def test_sweeps_over_worlds_outages_and_compressors(tmp_path):
    axes = {"speed": [1.0, 5.0], "erased": [0.0, 0.5]}

    def preset(loaded, *, speed, erased, **settings):
        return tiny.experiment(loaded, world=worlds.mobile(speed), outages=outages.erasures(erased), **settings)

    both = {"pf": policies.proportional_fair(2), "slow": decided(local_steps=1)}
    settings = {"dataset": tiny.dataset(), "num_devices": 6, "budget_s": 4.0, "seeds": 2, "keep": tmp_path}
    swept = fcjax.sweep(both, axes=axes, preset=preset, **settings)
    assert swept.num_programs == 2, "policies that decide other things have their own program"
    assert np.isnan(swept.decided_local_steps.where(swept.policy == "pf", drop=True)).all()
    rows = fcjax.results.summary(swept)
    assert (rows.lost[rows.erased == 0] == 0).all()
    assert (rows.lost[rows.erased == 0.5] > 0).all()
    np.testing.assert_allclose(rows.energy_j, swept.energy_j.sum(("round", "device")), rtol=1e-5)
    first = swept.isel(run=(swept.speed == 5.0) & (swept.erased == 0.5) & (swept.policy == "pf"))
    alone = tiny.experiment(world=worlds.mobile(5.0), outages=outages.erasures(0.5), budget_s=4.0, seed=1)
    _, h = history_of(policies.proportional_fair(2), alone, seed=1)
    got = first.isel(run=1)
    np.testing.assert_array_equal(got.received[: len(h.loss)], h.received)
    np.testing.assert_allclose(got.gain[: len(h.loss)], h.gain, rtol=1e-6)
    again = fcjax.sweep(both, axes=axes, preset=preset, **settings)
    assert again.kept == swept.sizes["run"]
    np.testing.assert_array_equal(again.decided_local_steps, swept.decided_local_steps)
