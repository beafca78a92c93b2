"""Runs on several cores equal runs on one, up to rounding."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

import fcjax
from fcjax.runtime.cores import check

COMPARE = """
import dataclasses, jax, numpy as np, optax, fcjax, tiny

EVERYTHING = {
    "compressor": fcjax.compressors.top_k(0.3),
    "make_optimizer": optax.sgd(0.05, momentum=0.9),
    "keeps_optimizer": True,
    "divergence_of": "gradient",
}
for changes in ({}, EVERYTHING):
    one, several = (dataclasses.replace(tiny.experiment(**changes), cores=cores) for cores in (1, 3))
    for number in (1, 4, 6):
        policy = fcjax.policies.fixed(number)
        expected, found = (fcjax.simulate(jax.random.key(1), policy, each, max_rounds=6) for each in (one, several))
        assert expected.num_rounds > 2
        np.testing.assert_array_equal(found.history.scheduled, expected.history.scheduled)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
print("same")
"""


@pytest.mark.slow
def test_cores_agree(start):
    """Three cores have devices and blocks of the test set left over."""
    process = start(COMPARE, cores=3)
    printed, errors = process.communicate(timeout=300)
    assert printed == "same\n", errors


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_sweep_with_several_cores_per_run(tmp_path):
    settings = {"dataset": tiny.dataset(), "num_devices": tiny.NUM_DEVICES, "preset": tiny.experiment, "seeds": 2}
    one = fcjax.sweep("fc", **settings, keep=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fcjax.sweeps.executor.num_cores", lambda: 2)
        two = fcjax.sweep("fc", **settings, cores=2, keep=tmp_path)
        again = fcjax.sweep("fc", **settings, cores=2, keep=tmp_path)
    assert (two.kept, again.kept) == (0, 2)  # their last bits differ, so they are other runs
    np.testing.assert_array_equal(two.scheduled, one.scheduled)
    np.testing.assert_allclose(two.loss, one.loss, rtol=1e-4)
    np.testing.assert_array_equal(two.loss, again.loss)


def test_cores_that_jax_does_not_see():
    with pytest.raises(ValueError, match=r"cores must be at most \d+, .* got 64: call fcjax.hardware.use_cores\(64\)"):
        check(64)
    with pytest.raises(ValueError, match="cores must be a whole number of 1 or more, got 0"):
        fcjax.simulate(jax.random.key(0), fcjax.policies.fixed(1), dataclasses.replace(tiny.experiment(), cores=0))
    with pytest.raises(ValueError, match="cores must be a whole number from 1 to"):
        fcjax.sweep("fc", dataset=tiny.dataset(), preset=tiny.experiment, seeds=1, cores=10_000)
