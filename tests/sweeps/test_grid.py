import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import fcjax
from fcjax import policies
from fcjax.sweeps.grid import plan
from fcjax.sweeps.jobs import groups

SETTINGS = {
    "dataset": tiny.dataset(),
    "num_devices": tiny.NUM_DEVICES,
    "budget_s": 4.0,
    "preset": tiny.experiment,
    "distribution": "l1",
    "radius_m": 600.0,
    "phi": 0.05,
    "seeds": 1,
}


def test_jobs_are_grouped_by_shape():
    jobs = plan(
        ["fc", "rd", "fixed-2", "centralized"],
        **SETTINGS
        | {"phi": [0.05, 0.5], "distribution": ["l1", "iid"], "radius_m": [200, 600], "seeds": 2}
        | {"budget_s": [4.0, 5.0], "num_devices": [4, 6]},
    )
    assert len(jobs) == (2 + 1 + 1 + 1) * 2 * 2 * 2 * 2 * 2
    found = groups(jobs)
    assert sorted({len(group.jobs[0].experiment.data.sizes) for group in found}) == [1, 4, 6]
    # 4 devices, 6 devices, and one central trainer that has the samples of all devices.
    assert len(found) == 3
    assert sum(len(group.jobs) for group in found) == len(jobs)


def mask_alone():
    return fcjax.Policy(
        lambda cell: cell.bandwidth_hz, lambda key, state, context: (state, context.observation.gain > 0)
    )


def nobody():
    return fcjax.Policy(
        lambda cell: (),
        lambda key, state, context: (
            state,
            fcjax.allocate(context.observation.gain < 0, context.observation, context.cell),
        ),
    )


@pytest.mark.parametrize(
    ("policy", "changes", "message"),
    [
        ("best", {}, "unknown policy 'best': use fc, exact"),
        ("fc", {"phi": 0.0}, "phi must be positive and finite, got 0"),
        ("fixed-7", {}, "n must be a whole number from 1 to 6"),
        ("fc", {"radius_m": [600.0, 0.0]}, "cell.radius_m must be positive and finite, got 0"),
        ("fc", {"distribution": "l5"}, "a device can have 1 to 4 distinct labels of this data set, got l = 5"),
        ("fc", {"distribution": "zipf"}, "unknown distribution 'zipf'"),
        ("fc", {"budget_s": 0.1}, "the budget of 0.1 s is too short for any round: the shortest takes 0.24"),
        ("fc", {"seeds": 0}, "the number of seeds must be a whole number from 1 to 1000000, got 0"),
        (["fc", "fc"], {}, "policy and phi has a value twice"),
        ("fc", {"radius_m": [600.0, 600.0]}, "radius_m has a value twice: 600.0, 600.0"),
        ("fc", {"seeds": range(10**9)}, "there can be up to 1000000 seeds, got 1000000000"),
        ("fc", {"seeds": []}, "seeds must have at least one value"),
        ("fc", {"seeds": 2.5}, "the number of seeds must be a whole number from 1 to 1000000, got 2.5"),
        ("fc", {"seeds": None}, "seeds must be a whole number from 0 to 2147483647, got None"),
        ("fc", {"radius_m": "far"}, "radius_m must be a real number or an array of them, got 'far'"),
        ("fc", {"budget_s": 1j}, "budget_s must be a value or a sequence of values, got 1j"),
        ("fc", {"seeds": [2**31]}, "seeds must be a whole number from 0 to 2147483647, got 2147483648"),
        ("fc", {"num_devices": 5.5}, "num_devices must be a whole number of 1 or more, got 5.5"),
        ("fc", {"budget_s": 1e300}, "the budget of 1e+300 s has room for"),
        (policies.fixed(2), {}, "policy must be names, or a mapping of names to policies, such as"),
        ([policies.fixed(2)], {}, "policy must be names, or a mapping of names to policies, such as"),
        ({"a": "fc"}, {}, "policy 'a' must be a fcjax.Policy"),
        ({"a": fcjax.Policy(lambda cell: (), None)}, {}, "policy 'a' must be a fcjax.Policy"),
        ({"a": fcjax.Policy(None, policies.fixed(2).select)}, {}, "policy 'a' must be a fcjax.Policy"),
        ({"a": fcjax.Policy(lambda cell: "two", policies.fixed(2).select)}, {}, "policy 'a'"),
        ("fc", {"dataset": None}, "dataset must be a name or a fcjax.data.Dataset, got NoneType"),
        ("fc", {"preset": 5}, "preset must be a name or a function that makes an Experiment, got 5"),
        ("fc", {"preset": lambda data, seed: None}, "the preset must take distribution, radius_m, budget_s"),
        ("fc", {"preset": lambda data, **settings: data.missing}, "preset raised AttributeError: "),
        ("fc", {"axes": {"seed": [1]}}, "seed cannot be in axes: use the argument seeds, or --seeds"),
        ({"a": policies.fast_converge}, {}, "policy 'a' must be a fcjax.Policy(init, select) of two functions, got <f"),
        ("fc", {"preset": lambda *_, **__: None}, "preset must return a fcjax.Experiment, got NoneType"),
        ("fc", {"axes": {"cell.bandwith_hz": 1e6}}, "unknown axis 'cell.bandwith_hz': did you mean cell.bandwidth_hz"),
        ("fc", {"axes": {"training.num_samples": 1}}, "unknown axis 'training.num_samples'"),
        ("fc", {"axes": {"cell.rician_k": 1}}, "unknown axis 'cell.rician_k': use distribution"),
        (policies.random, {}, "give what it returns: {'random': random()}"),
        ("fc", {"axes": {3: 1}}, "unknown axis 3: use distribution"),
        ("fc", {"axes": {"phi": 1}}, "phi cannot be in axes: use the argument phi, or --phi on the command line"),
        ("fc", {"axes": ["cell.power_w"]}, "axes must map names to values, such as"),
        ("fc", {"axes": {"cell.power_w": [0.1, -1]}}, "cell.power_w[0] must be zero or more, and finite, got -1"),
        (
            "fc",
            {"axes": {"cell.power_w": [[0.1, 0.2]]}},
            "the values of axis cell.power_w must be single",
        ),
        ("fc", {"axes": {"training.local_steps": 2.5}}, "training.local_steps must be a whole number of 1 or more"),
        ("fc", {"axes": {"cell.radius_m": 1.0, "radius_m": 2.0}}, "an axis is given twice: cell.radius_m, radius_m"),
        ("fc", {"axes": {"cell.scatter": []}}, "cell.scatter must have at least one value"),
        ({"mine": mask_alone()}, {}, "policy 'mine' must return (state, fcjax.Decision), got (array, array)"),
        ({"mine": nobody()}, {}, "policy 'mine' schedules nobody, in 256 of 256 random rounds"),
    ],
)
def test_errors_name_bad_settings_before_any_run(policy, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(policy, **SETTINGS | changes)


def test_leaves_and_preset_arguments_can_be_axes():
    axes = {
        "cell.power_w": [0.01, 0.1],  # applies to all devices
        "training.learning_rate": 0.2,
        "training.local_steps": [2, 3],
        "cell.radius_m": 300,  # radius_m by another name
        "observation_error": [0.5],  # an argument of the preset
    }
    jobs = plan("pf", **SETTINGS | {"axes": axes, "seeds": [4]})
    assert len(jobs) == 4
    for job, (power_w, local_steps) in zip(jobs, itertools.product([0.01, 0.1], [2, 3]), strict=True):
        labels = {"cell.power_w": power_w, "training.local_steps": local_steps, "observation_error": 0.5}
        assert labels.items() <= job.labels.items()
        assert job.labels["radius_m"] == 300
        expected = tiny.experiment(radius_m=300.0, seed=4, observation_error=0.5, budget_s=SETTINGS["budget_s"])
        cell = dataclasses.replace(expected.cell, power_w=np.full(tiny.NUM_DEVICES, power_w, np.float32))
        training = dataclasses.replace(expected.training, learning_rate=0.2, local_steps=local_steps)
        jax.tree.map(
            np.testing.assert_array_equal,
            job.experiment,
            dataclasses.replace(expected, cell=cell, training=training),
        )
    assert len(groups(jobs)) == 2, "only the number of steps needs another program"


def test_policies_sharing_a_function_are_checked_separately():
    with pytest.raises(ValueError, match="policy 'b' schedules nobody"):
        plan({"a": tiny.loud(0.5), "b": tiny.loud(1.5)}, **SETTINGS)


def test_numpy_numbers_keep_their_precision():
    jobs = plan("fc", **SETTINGS | {"phi": np.array([0.05, 0.1]), "radius_m": np.float64(600.1)})
    assert [job.labels["phi"] for job in jobs] == [0.05, 0.1]
    assert jobs[0].labels["radius_m"] == 600.1
    assert len(plan("fc", **SETTINGS | {"seeds": np.array(2)})) == 2, "a number of seeds, not a seed"


def test_access_schemes_are_an_axis():
    jobs = plan("fc", **SETTINGS, axes={"cell.access": ["fdma", "tdma"], "cell.bandwidth_hz": [1e7, 2e7]})
    assert [job.experiment.cell.access for job in jobs] == ["fdma", "fdma", "tdma", "tdma"]
    assert len(groups(jobs)) == 2, "a scheme has its own program"
    with pytest.raises(ValueError, match=r"cell.access must be fdma, ofdma or tdma, got 'cdma'"):
        plan("fc", **SETTINGS, axes={"cell.access": "cdma"})


def test_centralized_has_one_trainer():
    trainer, devices = (job.experiment for job in plan(["centralized", "everybody"], **SETTINGS))
    assert len(trainer.data.sizes) == 1
    assert len(devices.data.sizes) == tiny.NUM_DEVICES
    (mine,) = plan({"centralized": policies.random(1)}, **SETTINGS)
    assert len(mine.experiment.data.sizes) == tiny.NUM_DEVICES


def select_largest_data(key, state, context):
    largest = jnp.arange(tiny.NUM_DEVICES) == jnp.argmax(context.training.num_samples[: tiny.NUM_DEVICES])
    return state, fcjax.allocate(largest, context.observation, context.cell)


def select_and_grow(key, state, context):
    return state + context.training.num_samples, select_largest_data(key, state, context)[1]


@pytest.mark.usefixtures("quick_compilation")
def test_policy_checks_use_the_sample_counts():
    """The checks see the number of samples of each device."""
    (job,) = plan({"a": fcjax.Policy(lambda cell: (), select_largest_data)}, **SETTINGS)
    fcjax.check_policy(job.policy, job.experiment.cell, ignores_labels=False)
    with pytest.raises(ValueError, match="policy 'a' must keep the structure, types and shapes of its state"):
        plan({"a": fcjax.Policy(lambda cell: jnp.array(0), select_and_grow)}, **SETTINGS)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.slow
def test_joined_plans_keep_all_axes(tmp_path):
    plain = plan("pf", **SETTINGS)
    banded = plan("pf", **SETTINGS, axes={"cell.bandwidth_hz": [1e7], "observation_error": np.array([0.5], np.float32)})
    for jobs, out in ((plain + banded, None), (banded + plain, tmp_path / "all.nc")):
        keep = None if out is None else tmp_path / "runs"
        results = fcjax.run_all(jobs, keep=keep, out=out, workers=1)
        for name in ("cell.bandwidth_hz", "observation_error"):
            assert sorted(np.isnan(results[name].values)) == [False, True]
    with pytest.raises(ValueError, match="there are no runs: jobs is empty"):
        fcjax.run_all([])
