"""Tests the ledger of the reproduction's runs."""

import dataclasses

import ledger
import numpy as np
import pandas as pd
import pytest
from reproduction import grid
from test_reproduction import clouds

import fcjax
from fcjax.sweeps.run import run_all

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def jobs():
    return grid(clouds("mnist"), ["fc", "rd"], 2, distribution="l1", budget_s=8.0)


def collect(jobs, out, traced=lambda job: False, fresh=True):
    return ledger.collect(jobs, out, "mnist", traced=traced, fresh=fresh)


@pytest.mark.slow
def test_brief_runs_match_full_runs(jobs, tmp_path):
    whole = run_all(jobs)
    rows = collect(jobs, tmp_path, traced=lambda job: job.labels["policy"] == "fc")
    columns = [name for name in fcjax.results.SUMMARY if name not in ("energy_j", "lost")]
    pd.testing.assert_frame_equal(ledger.summary(rows), fcjax.results.summary(whole)[columns])
    for name in ledger.CURVES:
        np.testing.assert_array_equal(rows[name], whole[name])
    for number, policy in enumerate(whole.policy.values):
        rounds = int(whole.rounds[number])
        scheduled = whole.scheduled.values[number, :rounds]
        gain = np.log10(whole.gain.values[number, :rounds][scheduled]).mean()
        assert rows.log10_gain_of_scheduled.values[number] == pytest.approx(gain, rel=1e-5)
        if policy == "rd":
            assert np.isnan(rows.rho.values[number]).all()
            continue
        np.testing.assert_array_equal(rows.scheduled.values[number, :rounds], scheduled.sum(1))
        np.testing.assert_allclose(rows.rho.values[number, :rounds], whole.rho.values[number, :rounds].mean(1), 1e-5)


@pytest.mark.slow
def test_runs_in_the_ledger_are_not_repeated(jobs, tmp_path, monkeypatch):
    first = collect(jobs[:3], tmp_path)
    assert first.kept == 0
    for path in (tmp_path / "runs").iterdir():
        path.unlink()
    ran = []

    def recorded(part, **settings):
        ran.extend(job.labels["policy"] + str(job.labels["seed"]) for job in part)
        return run_all(part, **settings)

    monkeypatch.setattr(ledger, "run_all", recorded)
    assert collect(jobs[:3], tmp_path).kept == 3
    assert ran == []
    every = collect(jobs[::-1], tmp_path)  # in the order of the jobs, not of the file
    assert (every.kept, ran) == (3, ["rd1"])
    assert list(every.policy.values) == ["rd", "rd", "fc", "fc"]
    np.testing.assert_array_equal(every.accuracy[::-1][:3], first.accuracy)
    collect(jobs, tmp_path, traced=lambda job: job.labels["seed"] == 0)  # traces are missing
    assert ran[1:] == ["fc0", "rd0"]
    assert sorted(ledger.load(tmp_path / "runs_mnist.nc").traced.values) == [False, False, True, True]


@pytest.mark.slow
def test_committed_ledger_is_used_unless_fresh(jobs, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "COMMITTED", tmp_path / "committed")
    collect(jobs[:2], tmp_path / "committed")
    assert collect(jobs[:2], tmp_path / "here", fresh=False).kept == 2
    renamed = [dataclasses.replace(job, labels=job.labels | {"preset": "another name"}) for job in jobs[:2]]
    assert set(collect(renamed, tmp_path / "here", fresh=False).preset.values) == {"another name"}
    assert collect(jobs[:2], tmp_path / "anew").kept == 0
