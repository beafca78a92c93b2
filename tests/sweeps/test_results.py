import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from scipy import stats

import fcjax
from fcjax import plots, results
from fcjax.learning.evaluation import Score
from fcjax.runtime import files
from fcjax.runtime.progress import Progress
from fcjax.simulation.records import Record, Stop
from fcjax.sweeps import metrics


def finished(rng, num_rounds, num_devices, **labels):
    """Returns the settings of a random run and the run itself."""
    history = Record(
        **{
            field.name: rng.uniform(0.1, 0.9, (num_rounds, num_devices) if field.name in PER_DEVICE else num_rounds)
            for field in dataclasses.fields(Record)
            if field.default is dataclasses.MISSING
        }
    )
    scheduled = history.scheduled > 0.5
    flags = {"scheduled": scheduled, "received": scheduled & (history.received > 0.2), "available": scheduled | True}
    history = dataclasses.replace(history, elapsed_s=np.cumsum(history.round_s), **flags)
    labels = {
        "dataset": "clouds",
        "policy": "fc",
        "distribution": "l1",
        "radius_m": 600.0,
        "phi": 0.05,
        "seed": 0,
        "devices": num_devices,
        "budget_s": 20.0,
    } | labels
    return labels, fcjax.Run(history, num_rounds, Score(0.1, 2.3), None, None, Stop.BUDGET)


PER_DEVICE = ("scheduled", "received", "share", "available", "gain", "compute_s", "energy_j", "rho", "beta", "delta")


def test_runs_with_different_rounds_and_devices():
    rng = np.random.default_rng(0)
    runs = [finished(rng, 7, 4), finished(rng, 3, 6, seed=1), finished(rng, 0, 4, seed=2)]
    dataset = results.to_dataset(runs, {"note": "x"})
    assert dict(dataset.sizes) == {"run": 3, "round": 7, "device": 6}
    assert dataset.attrs["note"] == "x"
    np.testing.assert_array_equal(dataset.share.values[1, :3], runs[1][1].history.share)
    assert np.isnan(dataset.share.values[1, 3:]).all()
    assert np.isnan(dataset.share.values[0, :, 4:]).all()
    rows = results.summary(dataset)
    assert rows.rounds.tolist() == [7, 3, 0]
    assert rows.mean_scheduled[0] == pytest.approx(runs[0][1].history.scheduled.sum(1).mean())
    assert rows.best_accuracy[1] == runs[1][1].history.accuracy.max()
    # A run without rounds keeps its initial model.
    assert rows.best_accuracy[2] == rows.final_accuracy[2] == rows.tilde_accuracy[2] == pytest.approx(0.1)
    assert rows.elapsed_s[2] == 0


def test_summary_of_a_run_without_rounds():
    rows = results.summary(results.to_dataset([finished(np.random.default_rng(0), 0, 4)]))
    assert rows.best_accuracy.tolist() == pytest.approx([0.1])


def test_files_are_written_atomically(tmp_path):
    path = tmp_path / "a.txt"
    files.write_whole(path, lambda part: Path(part).write_text("first"))

    def fail(part):
        Path(part).write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_whole(path, fail)
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="no_folder"):
        files.write_whole(tmp_path / "no_folder" / "a.txt", fail)


def test_interval_against_scipy():
    rng = np.random.default_rng(1)
    values = rng.normal(size=(5, 3))
    mean, half = metrics.interval(values)
    low, high = stats.t.interval(0.95, 4, values.mean(0), stats.sem(values, axis=0))
    np.testing.assert_allclose(mean, values.mean(0))
    np.testing.assert_allclose([mean - half, mean + half], [low, high])
    values[1:, 0] = np.nan
    mean, half = metrics.interval(values)
    assert mean[0] == values[0, 0]
    assert np.isnan(half[0])
    assert np.isnan(metrics.interval(np.full((2, 1), np.nan))[0]).all()


def test_accuracy_is_held_until_the_next_round_ends():
    labels, run = finished(np.random.default_rng(2), 3, 4)
    dataset = results.to_dataset([(labels, run)])
    ends, accuracy = run.history.elapsed_s, run.history.accuracy
    times = np.array([0.0, ends[0], (ends[0] + ends[1]) / 2, ends[2], 100.0])
    np.testing.assert_allclose(
        plots.held(dataset, times), [0.1, accuracy[0], accuracy[0], accuracy[2], accuracy[2]], rtol=1e-6
    )
    best = np.maximum.accumulate(accuracy[:3])
    np.testing.assert_allclose(
        plots.held(dataset, times, best_so_far=True), [0.1, best[0], best[0], best[2], best[2]], rtol=1e-6
    )


@pytest.mark.parametrize("name", ["round_s", "scheduled", "energy_j", "delta"])
def test_spans_are_means_over_time(name):
    labels, run = finished(np.random.default_rng(2), 5, 4)
    dataset = results.to_dataset([(labels, run)])
    ends, values = np.asarray(run.history.elapsed_s, float), np.asarray(getattr(run.history, name), float)
    if values.ndim == 2:
        values = values.mean(1) if name == "delta" else values.sum(1)
    edges = np.linspace(0, 1.2 * ends[-1], 4)
    moments = np.linspace(0, edges[-1], 300_001)[1:]
    current = values[np.minimum(np.searchsorted(ends, moments), 4)]  # the last round counts until the end
    expected = [current[(moments > low) & (moments <= high)].mean() for low, high in itertools.pairwise(edges)]
    np.testing.assert_allclose(plots.in_spans(dataset, name, edges), expected, rtol=1e-3)


@pytest.mark.parametrize("draw", [plots.accuracy, plots.rounds])
def test_plots_have_one_panel_per_setting(draw, tmp_path):
    rng = np.random.default_rng(3)
    runs = [
        finished(rng, 12, 4, policy=policy, phi=phi, seed=seed, distribution=distribution)
        for policy, phi in (("fc", 0.05), ("fc", 0.5), ("rd", float("nan")))
        for distribution in ("l1", "iid")
        for seed in range(2)
    ]
    figure = draw(results.to_dataset(runs))
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["clouds, l1, R = 600 m", "clouds, iid, R = 600 m"]
    labels = [r"fc, $\varphi$ = 0.05", r"fc, $\varphi$ = 0.5", "rd"]
    assert [line.get_label() for line in panels[1].lines if line.get_label()[0] != "_"] == labels
    labels += ["best so far"] if draw is plots.accuracy else []
    assert [text.get_text() for text in figure.legends[0].get_texts()] == labels
    figure.savefig(tmp_path / "picture.png")
    one = draw(results.to_dataset(runs[:1]))
    assert any(axes.lines for axes in one.axes)
    plt.close("all")


def test_further_axes_are_never_pooled():
    rng = np.random.default_rng(4)
    runs = [
        finished(rng, 5, 4, policy=policy, seed=seed, **{"cell.bandwidth_hz": band, "kind": "a"})
        for policy in ("fc", "rd")
        for band in (5e6, 1e7, 4e7)
        for seed in range(3)
    ]
    dataset = results.to_dataset(runs)
    assert results.further_axes(dataset) == ["cell.bandwidth_hz", "kind"]
    rows = results.summary(dataset)
    assert tuple(rows) == (*results.SUMMARY, "cell.bandwidth_hz", "kind")
    assert len([axes for axes in plots.accuracy(dataset).axes if axes.get_title()]) == 3
    (axes,) = plots.against(dataset, "cell.bandwidth_hz").axes
    means = rows[rows.policy == "fc"].groupby("cell.bandwidth_hz").best_accuracy.mean()
    np.testing.assert_allclose(np.asarray(axes.lines[0].get_xdata(), float), means.index)
    np.testing.assert_allclose(np.asarray(axes.lines[0].get_ydata(), float), means, rtol=1e-6)
    with pytest.raises(ValueError, match="axis must have numbers as values, but kind has 'a'"):
        plots.against(dataset, "kind")
    # With a single policy, the values of the axis are lines of one panel.
    alone = dataset.isel(run=(dataset.policy == "fc").values)
    (axes,) = plots.accuracy(alone).axes
    labels = [line.get_label() for line in axes.lines if line.get_label()[0] != "_"]
    assert labels == [*(f"cell.bandwidth_hz = {x}" for x in ("5e+06", "1e+07", "4e+07")), "best so far"]
    (axes,) = plots.against(alone, "cell.bandwidth_hz").axes
    np.testing.assert_allclose(np.asarray(axes.lines[0].get_ydata(), float), means, rtol=1e-6)
    plt.close("all")


@pytest.mark.parametrize(("num_seeds", "has_band"), [(1, False), (2, False), (3, True)])
def test_intervals_need_three_seeds(num_seeds, has_band):
    rng = np.random.default_rng(6)
    dataset = results.to_dataset([finished(rng, 5, 4, seed=seed) for seed in range(num_seeds)])
    (axes,) = plots.accuracy(dataset).axes
    band = np.concatenate([path.vertices for path in axes.collections[0].get_paths()] or [np.zeros((0, 2))])
    assert bool(np.isfinite(band).any()) == has_band
    plt.close("all")


def test_titles_break_between_settings():
    rng = np.random.default_rng(7)
    axes = [{"cell.bandwidth_hz": band, "training.local_steps": 2} for band in (5e6, 1e7)]
    runs = [finished(rng, 5, 4, policy=policy, **axis) for policy in "ab" for axis in axes]
    title = plots.rounds(results.to_dataset(runs)).axes[0].get_title()
    assert title == "clouds, l1, R = 600 m,\ncell.bandwidth_hz = 5e+06"
    plt.close("all")


def test_concat_of_sweeps_with_different_lengths(tmp_path):
    rng = np.random.default_rng(5)
    short = results.to_dataset([finished(rng, 3, 2, seed=0, budget_s=1.0)])
    long = results.to_dataset(
        [finished(rng, 7, 4, seed=seed, budget_s=2.0, **{"cell.scatter": 0.5}) for seed in (0, 1)]
    )
    both = results.concat([short, long])
    assert both.sizes == {"run": 3, "round": 7, "device": 4}
    assert both.scheduled.dtype == bool
    assert both.rounds.values.tolist() == [3, 7, 7]
    assert np.isnan(both.accuracy.values[0, 3:]).all()
    assert np.isnan(both["cell.scatter"].values[0])
    rows = results.summary(both)
    expected = [*results.summary(short).best_accuracy, *results.summary(long).best_accuracy]
    np.testing.assert_array_equal(rows.best_accuracy, expected)
    assert plots.accuracy(both).axes
    results.save(both, tmp_path / "histories.nc")
    assert results.load(tmp_path / "histories.nc").identical(both)
    assert results.load(tmp_path).identical(both)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist: give the folder of a sweep, or its"):
        results.load(tmp_path / "nowhere")
    plt.close("all")


def test_runs_without_an_axis_share_a_panel():
    rng = np.random.default_rng(8)
    without, with_axis = (
        results.to_dataset(
            [finished(rng, 4, 2, policy=policy, seed=seed, **axis) for policy in "ab" for seed in (0, 1)]
        )
        for axis in ({}, {"cell.scatter": 0.5})
    )
    both = results.concat([without, with_axis])
    titles = [axes.get_title().replace("\n", " ") for axes in plots.accuracy(both).axes]
    assert [title.rpartition(", ")[2] for title in titles] == ["cell.scatter not given", "cell.scatter = 0.5"]
    (axes,) = plots.against(both, "cell.scatter").axes
    assert {float(x) for line in axes.lines for x in line.get_xdata()} == {0.5}
    (axes,) = plots.accuracy(both.isel(run=(both.policy == "a").values)).axes
    labels = [line.get_label() for line in axes.lines if line.get_label()[0] != "_"]
    assert labels == ["cell.scatter not given", "cell.scatter = 0.5", "best so far"]
    plt.close("all")


def test_progress_returns_results_and_shows_remaining_time(monkeypatch, capsys):
    monkeypatch.setattr("fcjax.runtime.progress._LINE_EVERY_S", 0.0)
    with Progress(4, "run") as shown:
        shown.begin("compiling program 1 of 2")
        shown.begin()
        assert shown.run(lambda a, b: a + b, 1, 2) == 3
        with pytest.raises(ZeroDivisionError):
            shown.run(lambda: 1 / 0)
        monkeypatch.setattr("fcjax.runtime.progress.time.monotonic", lambda start=shown._resumed_at: start + 100)
        shown.update(1.0, 1)
    lines = capsys.readouterr().err
    assert lines.startswith("  0%  compiling program 1 of 2\n")
    assert " 25%  run 2 of 4, 5:00 left\n" in lines


def test_selected_runs_are_still_results():
    rng = np.random.default_rng(6)
    dataset = results.to_dataset([finished(rng, 5, 3, policy=policy, seed=seed) for policy in "ab" for seed in (0, 1)])
    rows = results.summary(dataset)
    pd.testing.assert_frame_equal(
        results.summary(dataset.where(dataset.policy == "b", drop=True)),
        rows[rows.policy == "b"].reset_index(drop=True),
        check_dtype=False,
    )
    pd.testing.assert_frame_equal(
        results.summary(dataset.where(dataset.policy == "b")), rows[rows.policy == "b"].reset_index(drop=True)
    )
    with pytest.raises(ValueError, match="this data set holds no runs"):
        results.summary(dataset.isel(run=[]))
    one = dataset.isel(run=3)
    pd.testing.assert_frame_equal(results.summary(one), rows.iloc[[3]].reset_index(drop=True), check_dtype=False)
    assert plots.accuracy(one).axes
    plt.close("all")
    with pytest.raises(ValueError, match="does not hold results: it has no dataset, policy"):
        results.summary(dataset[["gain"]].drop_vars(results.SETTINGS))
    with pytest.raises(ValueError, match=r"these results have no axis 'cell.scatter': use distribution"):
        plots.against(dataset, "cell.scatter")


def test_integers_in_a_history_are_padded_with_nan():
    labels, run = finished(np.random.default_rng(7), 3, 2)
    whole = dataclasses.replace(run, history=dataclasses.replace(run.history, gain=np.ones((3, 2), np.int32)))
    dataset = results.to_dataset([(labels, whole)], room=(4, 2))
    assert np.isnan(dataset.gain.values[0, 3]).all()
    assert not dataset.scheduled.values[0, 3].any()


def test_runs_of_older_versions_have_no_energy_and_lost_nothing():
    rng = np.random.default_rng(8)
    new = results.to_dataset([finished(rng, 5, 4)])
    old = results.to_dataset([finished(rng, 7, 4, seed=1)]).drop_vars(["energy_j", "received", "available"])
    for parts in ([old, new], [new, old]):
        both = results.concat(parts)
        assert both.received.dtype == bool
        rows = results.summary(both).set_index("seed")
        assert np.isnan(rows.energy_j[1])
        assert rows.energy_j[0] > 0
        assert rows.lost[1] == 0


def test_blocks_with_and_without_decisions(tmp_path):
    rng = np.random.default_rng(9)
    (labels, plain), (others, deciding) = finished(rng, 5, 4), finished(rng, 5, 4, seed=1)
    history = dataclasses.replace(deciding.history, power_w=np.full((5, 4), 0.1))
    deciding = dataclasses.replace(deciding, history=history)
    blocks = [[(labels, plain)], [(others, deciding)]]
    parts = [results.to_dataset(block, room=(5, 4), decided={"power_w"}) for block in blocks]
    results.save_parts(parts, tmp_path / "both.nc")
    both = results.load(tmp_path / "both.nc")
    assert np.isnan(both.decided_power_w[0]).all()
    assert (both.decided_power_w[1] == 0.1).all()
