"""Records of runs: complete, in order, and never computed twice."""

import functools

import numpy as np
import pandas as pd
import pytest
import records

import fcjax
from fcjax import data, metrics, presets

pytestmark = pytest.mark.usefixtures("quick_compilation")
CLOUDS = data.synthetic.classification(1200, 100, num_features=4, num_labels=4, spread=0.5)


def plan(*policies, seeds=2, budget_s=3.0):
    preset = functools.partial(presets.shi2020, hidden=(), num_devices=3)
    return fcjax.plan(list(policies), preset=preset, dataset=CLOUDS, budget_s=budget_s, seeds=seeds)


def figures(results, jobs):
    assert len(jobs) == results.sizes["run"]
    best = 100 * metrics.best_accuracy(results).values
    return pd.DataFrame({"policy": results.policy.values, "seed": results.seed.values, "best_percent": best})


@pytest.fixture
def collect(tmp_path):
    def collect(jobs, out="a.csv", committed="none.csv", keep="runs", **labels):
        """Returns the rows, and how many runs were executed."""
        before = set((tmp_path / keep).glob("*.npz"))
        rows = records.collect(
            jobs, tmp_path / out, tmp_path / committed, figures, keep=tmp_path / keep, workers=1, **labels
        )
        return rows, len(set((tmp_path / keep).glob("*.npz")) - before)

    return collect


def test_only_new_runs_are_executed(collect, tmp_path):
    first, executed = collect(plan("pf", seeds=1), scenario="a")
    assert executed == 1
    rows, executed = collect(plan("rd(n=1)", "pf"), scenario="a", keep="others")
    assert executed == 3
    assert list(zip(rows.policy, rows.seed, strict=True)) == [("rd(n=1)", 0), ("rd(n=1)", 1), ("pf", 0), ("pf", 1)]
    assert rows.best_percent[2] == pytest.approx(first.best_percent[0], rel=1e-8)
    content = (tmp_path / "a.csv").read_bytes()
    assert content.startswith(b"scenario,policy,seed,fingerprint,best_percent\n")
    again, executed = collect(plan("rd(n=1)", "pf"), scenario="a", keep="none")
    assert executed == 0
    np.testing.assert_allclose(again.best_percent, rows.best_percent, rtol=1e-8)
    assert (tmp_path / "a.csv").read_bytes() == content


def test_changed_settings_and_other_labels_are_executed(collect):
    collect(plan("pf"), target=0.8)
    assert collect(plan("pf", budget_s=4.0), target=0.8, keep="b")[1] == 2
    assert collect(plan("pf"), target=0.9, keep="c")[1] == 2
    assert collect(plan("pf"), target=0.8, keep="d")[1] == 0


def test_committed_rows_count(collect, tmp_path):
    collect(plan("pf"), scenario="a")
    rows, executed = collect(plan("pf", "rd(n=1)"), out="b.csv", committed="a.csv", keep="b", scenario="a")
    assert executed == 2
    assert len(rows) == len(pd.read_csv(tmp_path / "b.csv")) == 4
    assert len(pd.read_csv(tmp_path / "a.csv")) == 2


def test_paired_is_in_points_over_common_seeds():
    rows = pd.DataFrame({"policy": ["a"] * 3 + ["b"] * 3, "seed": [0, 1, 2, 2, 1, 0]})
    found = records.paired(rows.assign(best_percent=[90.0, 80.0, 70.0, 69.0, 78.0, 87.0]), "a", "b")
    assert (found.difference, found.seeds) == (pytest.approx(2.0), 3)
    assert found.deviation == pytest.approx(1.0)
