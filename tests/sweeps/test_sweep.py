import _thread
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import tiny
import xarray as xr

import fcjax
from fcjax import models, policies, results
from fcjax.sweeps import archive, jobs
from fcjax.sweeps.grid import plan

POLICIES = ("fc", "rd", "pf", "cs-h", "as-h")
# A separate model, so that no test has compiled its programs without optimisations: the last bit matters here.
EXPERIMENT = functools.partial(tiny.experiment, model=models.mlp((8,), 4, hidden=(), mean=0.1))
SETTINGS = {"dataset": tiny.dataset(), "num_devices": tiny.NUM_DEVICES, "budget_s": 4.0, "preset": EXPERIMENT}
# Another model, for tests where the last bit does not matter.
ROUGH = functools.partial(tiny.experiment, model=models.mlp((8,), 4, hidden=(), mean=0.2))
DEFAULTS = {"distribution": "l1", "radius_m": 600.0, "phi": 0.05, "seeds": 1}


@pytest.fixture(scope="module")
def twenty():
    return fcjax.sweep(POLICIES, seeds=4, **SETTINGS)


def select(dataset, **labels):
    matches = np.logical_and.reduce([dataset[name] == value for name, value in labels.items()])
    return dataset.isel(run=int(np.flatnonzero(matches)[0]))


def assert_same_bits(one, history, num_rounds):
    assert one.rounds == num_rounds
    fields = {field.name: getattr(history, field.name) for field in dataclasses.fields(history)}
    for name, values in fields.items():
        if values is not None:  # what the policy decides
            np.testing.assert_array_equal(one[name].values[:num_rounds], np.asarray(values)[:num_rounds], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), [("fc", 3), ("cs-h", 1)])
def test_single_run_matches_a_sweep_of_twenty(name, seed, twenty):
    assert twenty.sizes["run"] == 20
    assert twenty.num_programs == 1
    experiment = EXPERIMENT(budget_s=4.0, seed=seed)
    alone = fcjax.simulate(jax.random.key(seed), policies.by_name(name), experiment)
    assert_same_bits(select(twenty, policy=name, seed=seed), alone.history, int(alone.num_rounds))
    assert select(twenty, policy=name, seed=seed).start_accuracy == alone.start.accuracy


@pytest.mark.slow
def test_from_run_matches_sweep(twenty):
    keys, experiment = jax.vmap(jax.random.key)(jnp.arange(2)), EXPERIMENT(budget_s=4.0)
    runs = jax.vmap(lambda key: fcjax.simulate(key, policies.by_name("pf"), experiment))(keys)
    settings = {"dataset": tiny.dataset().name, "policy": "pf", "distribution": "l1"}
    dataset = fcjax.results.from_run(runs, experiment, **settings, kind=["a", "b"])
    of_sweep = select(twenty, policy="pf", seed=0).isel(round=slice(dataset.sizes["round"]))
    of_sweep = of_sweep.drop_vars(["setup", "samples"])  # a run does not say what its policy asks for
    xr.testing.assert_equal(dataset.isel(run=0).drop_vars("kind"), of_sweep)
    assert dataset.kind.values.tolist() == ["a", "b"]
    assert dataset.rounds.values.tolist() == runs.num_rounds.tolist()
    rows = fcjax.results.summary(dataset)
    np.testing.assert_array_equal(rows.best_accuracy, runs.best_accuracy)
    one = fcjax.results.from_run(jax.tree.map(lambda leaf: leaf[1], runs), experiment, seed=1)
    np.testing.assert_array_equal(fcjax.results.summary(one).best_accuracy, rows.best_accuracy[1:])
    with pytest.raises(ValueError, match=r"seed must be one value, or one for each of 2 runs, got shape \(3,\)"):
        fcjax.results.from_run(runs, experiment, seed=[1, 2, 3])


@pytest.mark.slow
def test_sweep_of_one_run_has_the_same_bits(twenty):
    one = fcjax.sweep("pf", seeds=[2], **SETTINGS).isel(run=0)
    other = select(twenty, policy="pf", seed=2)
    for name in one.data_vars:
        values = other[name].values
        np.testing.assert_array_equal(one[name].values, values[: len(one[name])] if values.ndim else values)


def test_equal_seeds_give_equal_channels_under_all_policies(twenty):
    for seed in range(4):
        runs = [select(twenty, policy=name, seed=seed) for name in POLICIES]
        k = int(min(run.rounds for run in runs))
        assert k > 1
        for run in runs[1:]:
            np.testing.assert_array_equal(run.gain[:k], runs[0].gain[:k])
            np.testing.assert_array_equal(run.compute_s[:k], runs[0].compute_s[:k])


def test_labelled_results_survive_save_and_load(twenty, tmp_path):
    assert twenty.policy.values.tolist() == [name for name in POLICIES for _ in range(4)]
    assert twenty.seed.values.tolist() == [0, 1, 2, 3] * 5
    assert np.isnan(twenty.phi.values[4:]).all()
    assert (twenty.phi.values[:4] == 0.05).all()
    assert (twenty.budget_s == 4.0).all()
    assert (twenty.stop == "budget").all()
    assert twenty.round_s.attrs["units"] == "s"
    for name in ("versions", "revision", "backend", "complete"):
        assert name in twenty.attrs
    results.save(twenty, tmp_path / "histories.nc")
    assert results.load(tmp_path / "histories.nc").identical(twenty)
    assert [path.name for path in tmp_path.iterdir()] == ["histories.nc"]


def test_summary_matches_the_histories(twenty):
    rows = results.summary(twenty)
    assert tuple(rows.columns) == results.SUMMARY
    for index in (0, 7, 19):
        run, row = twenty.isel(run=index), rows.iloc[index]
        k = int(run.rounds)
        assert row.rounds == k
        assert row.elapsed_s == run.elapsed_s.values[k - 1]
        assert row.mean_scheduled == pytest.approx(run.scheduled.values[:k].sum(1).mean())
        assert row.mean_round_s == pytest.approx(run.round_s.values[:k].mean())
        assert row.best_accuracy == run.accuracy.values[:k].max()
        assert row.tilde_accuracy == run.tilde_accuracy.values[k - 1]
        assert row.final_accuracy == run.accuracy.values[k - 1]


def test_ctrl_c_keeps_finished_runs(monkeypatch, twenty, sigint):
    finish, number = jobs.finish, itertools.count(1)

    def finish_and_interrupt(*args):
        if next(number) == 2:  # in any thread
            _thread.interrupt_main()
        return finish(*args)

    monkeypatch.setattr(jobs, "finish", finish_and_interrupt)
    with pytest.warns(UserWarning, match=r"interrupted: [1-9]\d* of 20 runs have finished"):
        kept = fcjax.sweep(POLICIES, seeds=4, **SETTINGS)
    assert 1 <= kept.sizes["run"] < 20
    assert kept.complete == 0
    for index in range(kept.sizes["run"]):
        run = kept.isel(run=index)
        np.testing.assert_array_equal(
            run.loss.values[: int(run.rounds)],
            select(twenty, policy=run.policy.item(), seed=run.seed.item()).loss.values[: int(run.rounds)],
        )


def test_worker_error_reaches_the_caller(monkeypatch):
    def fail(*args):
        raise OSError("no space left")

    monkeypatch.setattr(jobs, "finish", fail)
    with pytest.raises(OSError, match="no space left"):
        fcjax.sweep(POLICIES, seeds=4, **SETTINGS)


@pytest.mark.slow
def test_integers_and_floats_can_be_mixed():
    """Budgets and policy parameters keep their values, whatever the type of the first one."""
    together = fcjax.sweep(
        {"a": tiny.loud(1), "b": tiny.loud(0.05)}, **SETTINGS | {"budget_s": [2, 2.9], "seeds": np.int64(1)}
    )
    assert together.num_programs == 1
    assert together.budget_s.values.tolist() == [2.0, 2.0, 2.9, 2.9]
    run = fcjax.simulate(jax.random.key(0), tiny.loud(0.05), EXPERIMENT(budget_s=2.9))
    assert_same_bits(together.isel(run=3), run.history, int(run.num_rounds))
    assert together.rounds.values[2] > together.rounds.values[0]


@pytest.mark.slow
def test_double_precision_reaches_the_workers():
    with jax.enable_x64(True):
        results_ = fcjax.sweep({"a": policies.everybody()}, **SETTINGS | {"budget_s": 2.0, "seeds": 1})
    assert results_.elapsed_s.dtype == np.float64


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_callers_jax_settings_reach_the_workers():
    settings = {**SETTINGS, "preset": ROUGH, "seeds": 1}
    policy = {"a": policies.everybody()}
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        swept = fcjax.sweep(policy, **settings)
        alone = fcjax.simulate(jax.random.key(0), policy["a"], ROUGH(budget_s=4.0))
    np.testing.assert_allclose(swept.gain[0, 0], alone.history.gain[0], rtol=1e-5)
    assert not np.array_equal(swept.gain[0, 0], fcjax.sweep(policy, **settings).gain[0, 0])


def select_remembered(key, seen, context):
    """Schedules the devices that had the best channel in a remembered round."""
    gain = context.observation.gain
    seen = {name: jnp.roll(rows, 1, 0).at[0].set(gain == gain.max()) for name, rows in seen.items()}
    scheduled = jnp.any(jnp.concatenate(list(seen.values())), 0)
    return seen, fcjax.allocate(scheduled, context.observation, context.cell)


def remembering(*lengths):
    """A policy that remembers the given numbers of rounds."""
    room = {str(i): jnp.zeros((length, tiny.NUM_DEVICES), bool) for i, length in enumerate(lengths)}
    return fcjax.Policy(lambda cell: room, select_remembered)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_policies_sharing_a_function_can_differ_in_state_shape():
    named = {"one": remembering(1), "three": remembering(3), "twice": remembering(1, 2)}
    together = fcjax.sweep(named, **SETTINGS | {"preset": ROUGH, "seeds": 1})
    assert together.num_programs == 1
    alone = fcjax.simulate(jax.random.key(0), named["three"], ROUGH(budget_s=4.0))
    rounds = int(alone.num_rounds)
    np.testing.assert_array_equal(together.scheduled[1, :rounds], alone.history.scheduled[:rounds])
    assert (together.scheduled[0].sum("device") == 1)[: int(together.rounds[0])].all()
    assert together.scheduled[2, 1:].sum("device").max() == 2


def unstable(loaded, *, seed, **settings):
    """Every third run diverges."""
    experiment = ROUGH(loaded, seed=seed, **settings)
    learning_rate = 1e25 if seed % 3 == 1 else 0.05
    return dataclasses.replace(
        experiment, training=dataclasses.replace(experiment.training, learning_rate=np.float32(learning_rate))
    )


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("side_by_side", [1, 4])
def test_diverged_runs_are_marked_and_affect_no_others(side_by_side):
    settings = {**SETTINGS, "preset": unstable, "side_by_side": side_by_side}
    with pytest.warns(UserWarning, match="2 of 5 runs diverged: .* the first after 0 rounds"):
        swept = fcjax.sweep("pf", **settings | {"seeds": [0, 1, 2, 3, 4]})
    diverged = swept.seed.values % 3 == 1
    assert list(swept.stop.values) == ["diverged" if one else "budget" for one in diverged]
    np.testing.assert_array_equal(swept.diverged_round, np.where(diverged, swept.rounds + 1, 0))
    calm = fcjax.sweep("pf", **settings | {"seeds": [0, 2, 3]})
    np.testing.assert_array_equal(swept.loss[~diverged, : calm.sizes["round"]], calm.loss)
    rows = results.summary(swept)
    assert np.isfinite(rows.best_accuracy).all()
    assert list(rows.diverged_round) == list(swept.diverged_round.values)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_results_file_matches_results_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("fcjax.sweeps.run._AT_HAND", 2)  # runs per chunk of the file
    settings = {**SETTINGS, "preset": ROUGH, "seeds": 5, "distribution": ["l1", "dir0.5"], "num_devices": [4, 6]}
    held = fcjax.sweep(("rd", "pf"), **settings)
    read = fcjax.sweep(("rd", "pf"), **settings, keep=tmp_path / "runs", out=tmp_path / "histories.nc")
    xr.testing.assert_equal(held, read)
    xr.testing.assert_equal(held, results.load(tmp_path / "histories.nc"))
    assert {name: held[name].dtype.kind for name in held} == {name: read[name].dtype.kind for name in held}
    assert read.accuracy.attrs == held.accuracy.attrs
    pd.testing.assert_frame_equal(results.summary(held), results.summary(read))
    with pytest.raises(OSError, match=r"results cannot be written to .*nowhere.histories.nc: there is no folder"):
        fcjax.sweep("pf", **settings | {"seeds": 1}, keep=tmp_path / "runs", out=tmp_path / "nowhere" / "histories.nc")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=r"; finished runs are kept in .*runs: run the same command to resume"):
        fcjax.sweep("pf", **settings | {"seeds": 1}, keep=tmp_path / "runs", out=tmp_path / "folder")
    with pytest.raises(ValueError, match="out needs keep"):
        fcjax.sweep(**SETTINGS, out=tmp_path / "other.nc")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": 5}, "keep must be a path other than the current folder, got 5"),
        ({"keep": ""}, "keep must be a path other than the current folder, got ''"),
        ({"keep": "a\0b"}, "keep must be a path"),
        ({"keep": "runs", "out": b"file"}, "out must be a path other than the current folder, got b'file'"),
        ({"about": [1]}, r"about must be a mapping of names to strings or numbers, got \[1\]"),
        ({"about": {"a": None}}, "about must be a mapping of names to strings or numbers, got 'a': None"),
        ({"about": {"a": True}}, "about must be a mapping of names to strings or numbers, got 'a': True"),
    ],
)
def test_errors_name_bad_output_arguments(changes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        fcjax.sweep("pf", **SETTINGS, **changes)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_debug_nans_accepts_unused_rounds():
    """Rounds after the end of a run are filled with NaN."""
    with jax.debug_nans(True):
        swept = fcjax.sweep("pf", **SETTINGS | {"preset": ROUGH, "seeds": 1})
    assert swept.stop.values == ["budget"]


@pytest.mark.slow
def test_runs_side_by_side(tmp_path):
    """Results do not depend on the number of runs or workers. They match single runs up to rounding."""
    keep = {"side_by_side": 4, "keep": tmp_path}
    many = fcjax.sweep("pf", **SETTINGS | {"seeds": 7}, **keep)
    alone = fcjax.sweep("pf", **SETTINGS | {"seeds": 7})
    np.testing.assert_array_equal(many.scheduled, alone.scheduled)
    np.testing.assert_allclose(many.loss, alone.loss, rtol=1e-4)
    few = fcjax.sweep("pf", **SETTINGS | {"seeds": [3, 6]}, side_by_side=4, workers=1)
    for name in ("loss", "accuracy", "delta"):
        np.testing.assert_array_equal(many[name][[3, 6], : few.sizes["round"]], few[name])
    assert fcjax.sweep("pf", **SETTINGS | {"seeds": 7}, **keep).kept == 7
    (job,) = plan("pf", **SETTINGS | DEFAULTS)
    two, four = (archive.Fingerprints(number)(job) for number in (2, 4))
    assert two != four, "runs that differ in their last bits are not mixed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "workers must be a whole number of 1 or more, got 0"),
        ({"side_by_side": 1.5}, "side_by_side must be a whole number of 1 or more, got 1.5"),
    ],
)
def test_errors_name_bad_numbers_of_workers(changes, message):
    with pytest.raises(ValueError, match=message):
        fcjax.sweep(**SETTINGS, **changes)
