import math
import types

import numpy as np
import pytest
import tiny
import xarray as xr
from scipy import stats

import fcjax
from fcjax import metrics, results

BUDGET_S = 10.0


def random_run(rng, num_rounds, num_devices, **labels):
    """A run as plain lists of rounds and devices, with lost updates and, at times, rounds without devices."""
    scheduled = rng.random((num_rounds, num_devices)) < rng.uniform(0.1, 0.9)
    return types.SimpleNamespace(
        labels={"policy": "fc", "seed": 0, "distribution": "l1", "phi": 0.05, "budget_s": BUDGET_S} | labels,
        num_devices=num_devices,
        start=float(np.float32(rng.integers(5, 30) / 100)),
        accuracy=rng.integers(10, 95, num_rounds).astype(np.float32) / np.float32(100),
        elapsed_s=np.sort(rng.uniform(0.1, BUDGET_S, num_rounds)).astype(np.float32),
        scheduled=scheduled,
        received=scheduled & (rng.random(scheduled.shape) < 0.8),
        energy_j=scheduled * rng.uniform(0.1, 2.0, scheduled.shape).astype(np.float32),
    )


def as_results(runs):
    """Pads runs as `fcjax.sweep` does: NaN or False where a run has no such round or device."""
    num_rounds = max(1, *(len(run.accuracy) for run in runs))
    num_devices = max(run.num_devices for run in runs)

    def pad(values, *shape):
        filled = np.full(shape, False if values.dtype == bool else np.nan, values.dtype)
        filled[tuple(map(slice, values.shape))] = values
        return filled

    per_round = {name: [pad(getattr(run, name), num_rounds) for run in runs] for name in ("accuracy", "elapsed_s")}
    per_round["round_s"] = per_round["tilde_accuracy"] = per_round["elapsed_s"]
    for run in runs:
        run.rho = np.ones(run.scheduled.shape, np.float32)
    names = ("scheduled", "received", "energy_j", "rho")
    per_device = {name: [pad(getattr(run, name), num_rounds, num_devices) for run in runs] for name in names}
    per_run = {
        "rounds": np.array([len(run.accuracy) for run in runs], np.int32),
        "start_accuracy": np.array([run.start for run in runs], np.float32),
        "stop": ["budget"] * len(runs),
        "diverged_round": np.zeros(len(runs), int),
    }
    every = {"dataset": "clouds", "radius_m": 600.0}
    labels = [every | {"devices": run.num_devices} | run.labels for run in runs]
    coordinates = {name: ("run", [row[name] for row in labels]) for name in labels[0]}
    coordinates |= {"round": np.arange(1, num_rounds + 1), "device": np.arange(num_devices)}
    variables = {name: (("run", "round"), np.array(values)) for name, values in per_round.items()}
    variables |= {name: (("run", "round", "device"), np.array(values)) for name, values in per_device.items()}
    return xr.Dataset(variables | {name: ("run", values) for name, values in per_run.items()}, coordinates)


@pytest.fixture(scope="module")
def runs():
    rng = np.random.default_rng(0)
    sizes = [(0, 3), (1, 1), (1, 4), (9, 1), (7, 5), *((rng.integers(2, 12), rng.integers(2, 6)) for _ in range(70))]
    return [random_run(rng, *size, seed=seed) for seed, size in enumerate(sizes)]


@pytest.fixture(scope="module")
def padded(runs):
    return as_results(runs)


def loop_auc(run):
    total, at_s, current = 0.0, 0.0, run.start
    for end_s, accuracy in zip(run.elapsed_s, run.accuracy, strict=True):
        total += current * (float(end_s) - at_s)
        at_s, current = float(end_s), float(accuracy)
    return (total + current * (BUDGET_S - at_s)) / BUDGET_S


def loop_until(run, accuracy):
    """Returns the time and the energy until an accuracy, or None and all the energy."""
    if run.start >= np.float32(accuracy):
        return 0.0, 0.0
    spent_j = 0.0
    for end_s, reached, energy_j in zip(run.elapsed_s, run.accuracy, run.energy_j, strict=True):
        spent_j += float(sum(energy_j))
        if reached >= np.float32(accuracy):
            return float(end_s), spent_j
    return None, spent_j


def loop_ages(run):
    ages, age = [], [0] * run.num_devices
    for received in run.received:
        age = [0 if arrived else old + 1 for old, arrived in zip(age, received, strict=True)]
        ages += age
    return ages


def loop_jain(run):
    counts = [sum(column) for column in run.scheduled.T.astype(int)]
    return sum(counts) ** 2 / (run.num_devices * sum(x * x for x in counts)) if any(counts) else math.nan


LOOPS = {
    "best_accuracy": lambda run: max(run.accuracy, default=run.start),
    "final_accuracy": lambda run: [run.start, *run.accuracy][-1],
    "area_under_curve": loop_auc,
    "jain_index": loop_jain,
    "mean_age": lambda run: np.mean(loop_ages(run)) if loop_ages(run) else math.nan,
    "peak_age": lambda run: max(loop_ages(run), default=math.nan),
}


@pytest.mark.parametrize("name", LOOPS)
def test_metrics_of_runs(name, runs, padded):
    values = getattr(metrics, name)(padded)
    assert values.dims == ("run",)
    assert values.name == name
    for label in (*runs[0].labels, "devices", "radius_m"):
        np.testing.assert_array_equal(values[label], padded[label])
    np.testing.assert_allclose(values, [LOOPS[name](run) for run in runs], rtol=1e-6)
    # A selection, one run, and other orders of dimensions give the same values.
    np.testing.assert_array_equal(getattr(metrics, name)(padded.where(padded.seed > 60, drop=True)), values[61:])
    np.testing.assert_array_equal(getattr(metrics, name)(padded.isel(run=4)), values[4:5])
    np.testing.assert_array_equal(getattr(metrics, name)(padded.transpose("device", "round", "run")), values)


@pytest.mark.parametrize("accuracy", [0.0, 0.2, 0.5, 0.8, 0.9, np.float64(0.9), 1.0])
def test_time_and_energy_to_accuracy(accuracy, runs, padded):
    found = [loop_until(run, accuracy) for run in runs]
    times_s = [math.inf if time_s is None else time_s for time_s, _ in found]
    np.testing.assert_allclose(metrics.time_to_accuracy(padded, accuracy), times_s)
    restricted = metrics.time_to_accuracy(padded, accuracy, censored="budget")
    np.testing.assert_allclose(restricted, np.minimum(times_s, BUDGET_S))
    energy = [math.inf if time_s is None else energy_j for time_s, energy_j in found]
    np.testing.assert_allclose(metrics.energy_to_accuracy(padded, accuracy), energy, rtol=1e-5)
    restricted = metrics.energy_to_accuracy(padded, accuracy, censored="budget")
    np.testing.assert_allclose(restricted, [energy_j for _, energy_j in found], rtol=1e-5)


def test_metrics_of_devices(runs, padded):
    for name, field in (("participation", "scheduled"), ("energy", "energy_j")):
        values = getattr(metrics, name)(padded)
        assert values.dims == ("run", "device")
        for row, run in zip(values.values, runs, strict=True):
            np.testing.assert_allclose(row[: run.num_devices], getattr(run, field).sum(0), rtol=1e-5)
            assert np.isnan(row[run.num_devices :]).all()


def test_trainer_that_stands_for_many_devices():
    # In a sweep, "centralized" has one trainer, but the label of the devices whose data it holds.
    rng = np.random.default_rng(0)
    one = random_run(rng, 5, 1, devices=4)
    one.scheduled[:] = True
    found = as_results([one, random_run(rng, 5, 4, devices=4)])
    assert metrics.participation(found).count("device").values.tolist() == [1, 4]
    assert metrics.jain_index(found)[0] == 1


def test_hand_computed_run():
    rng = np.random.default_rng(0)
    run = random_run(rng, 3, 2)
    run.start, run.accuracy, run.elapsed_s = 0.1, np.array([0.5, 0.3, 0.9]), np.array([2.0, 4.0, 8.0])
    run.scheduled = np.array([[True, False], [True, False], [True, True]])
    run.received = np.array([[True, False], [False, False], [True, True]])
    run.energy_j = np.array([[1.0, 0.0], [2.0, 0.0], [4.0, 8.0]])
    one = as_results([run, run])
    assert metrics.area_under_curve(one)[0] == pytest.approx((0.1 * 2 + 0.5 * 2 + 0.3 * 4 + 0.9 * 2) / 10)
    assert metrics.participation(one)[0].values.tolist() == [3, 1]
    assert metrics.jain_index(one)[0] == pytest.approx(16 / 20)
    # The ages at the ends of the rounds are (0, 1), (1, 2) and (0, 0).
    assert metrics.mean_age(one)[0] == pytest.approx(4 / 6)
    assert metrics.peak_age(one)[0] == 2
    assert metrics.time_to_accuracy(one, 0.4)[0] == 2
    assert metrics.energy_to_accuracy(one, 0.6)[0] == 15


def test_bad_arguments_of_metrics(padded):
    with pytest.raises(ValueError, match="accuracy must be between 0 and 1, got 90"):
        metrics.time_to_accuracy(padded, 90)
    with pytest.raises(ValueError, match="censored must be 'inf' or 'budget', got 'nan'"):
        metrics.energy_to_accuracy(padded, 0.5, censored="nan")
    with pytest.raises(ValueError, match="these results have no energy_j"):
        metrics.energy(padded.drop_vars("energy_j"))
    with pytest.raises(ValueError, match="does not hold results"):
        metrics.best_accuracy(padded[["accuracy"]].drop_vars("policy"))


def test_results_of_older_versions(padded):
    old = padded.drop_vars(["received", "energy_j"])
    np.testing.assert_array_equal(metrics.mean_age(old), metrics.mean_age(padded.assign(received=padded.scheduled)))
    both = results.concat([old, padded])
    assert np.isnan(metrics.energy_to_accuracy(both, 0.5)[4])
    assert np.isnan(metrics.energy(both)[4, 0])


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_metrics_of_a_real_sweep(tmp_path):
    how = {"dataset": tiny.dataset(), "preset": tiny.experiment, "budget_s": 3.0, "seeds": 2}
    found = fcjax.sweep(("rd", "everybody"), num_devices=4, **how)
    rows = results.summary(found)
    np.testing.assert_array_equal(metrics.best_accuracy(found), rows.best_accuracy)
    np.testing.assert_array_equal(metrics.final_accuracy(found), rows.final_accuracy)
    np.testing.assert_allclose(metrics.energy(found).sum("device"), rows.energy_j, rtol=1e-5)
    np.testing.assert_allclose(metrics.participation(found).sum("device"), rows.mean_scheduled * rows.rounds, rtol=1e-5)
    assert (metrics.participation(found).count("device") == 4).all()
    everybody = (rows.policy == "everybody").to_numpy()
    assert (metrics.jain_index(found)[everybody] == 1).all()
    assert (metrics.peak_age(found)[everybody] == 0).all()
    assert (metrics.mean_age(found)[(rows.policy == "rd").to_numpy()] > 0).all()
    table = metrics.paired_table(found, "area_under_curve")
    assert table[["a", "b", "seeds"]].values.tolist() == [["rd", "everybody", 2]]
    # A file is read lazily and has the same metrics.
    results.save(found, tmp_path / "found.nc")
    with results.read(tmp_path / "found.nc") as lazy:
        xr.testing.assert_identical(metrics.mean_age(lazy), metrics.mean_age(found))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_optimality_gap_of_a_sweep():
    settings = {"dataset": tiny.dataset(), "preset": tiny.experiment, "num_devices": 6, "budget_s": 4, "seeds": 2}
    jobs = fcjax.plan(["exact", "rd"], **settings)
    found = fcjax.run_all(jobs, workers=1)
    gap = metrics.optimality_gap(found, jobs)
    assert gap.dims == ("run", "round")
    np.testing.assert_array_equal(gap.isnull(), found.round_s.isnull())
    np.testing.assert_allclose(gap[found.policy == "exact"].min(), 1, rtol=1e-5)
    np.testing.assert_allclose(gap[found.policy == "exact"].max(), 1, rtol=1e-5)
    assert gap[found.policy == "rd"].min() >= 1 - 1e-5
    assert gap[found.policy == "rd"].mean() > 1.05
    with pytest.raises(ValueError, match="jobs must be the runs of the results, 4 of them, got 3"):
        metrics.optimality_gap(found, jobs[:3])


def scored(scores, **labels):
    """Results without rounds, whose models start with given accuracies: {policy: {seed: accuracy}}."""
    rng = np.random.default_rng(0)
    runs = [random_run(rng, 0, 2, policy=name, seed=seed, **labels) for name in scores for seed in scores[name]]
    values = [value for row in scores.values() for value in row.values()]
    return as_results(runs).assign(start_accuracy=("run", values))


def paired_scores(num_seeds, seed=0, difference=0.02):
    """Scores of two policies with common noise."""
    rng = np.random.default_rng(seed)
    common = rng.normal(0.5, 0.1, num_seeds)
    return {
        name: dict(enumerate(common + rng.normal(mean, 0.03, num_seeds)))
        for name, mean in (("a", difference), ("b", 0))
    }


@pytest.mark.parametrize("num_seeds", [2, 3, 10, 40])
def test_paired_against_scipy(num_seeds):
    scores = paired_scores(num_seeds, num_seeds)
    found = metrics.paired(scored(scores), "a", "b", "best_accuracy")
    a, b = (np.array([*scores[name].values()]) for name in "ab")
    expected = stats.ttest_rel(a, b)
    assert found.difference == pytest.approx(expected.statistic * stats.sem(a - b))
    assert found.p_value == pytest.approx(expected.pvalue)
    ends = expected.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((ends.low, ends.high))
    assert found.probability == pytest.approx(1 - stats.ttest_rel(a, b, alternative="greater").pvalue)
    assert found.seeds == num_seeds
    assert found.verdict == ("undecided" if expected.pvalue > 0.05 else "higher" if a.mean() > b.mean() else "lower")
    other = metrics.paired(scored(scores), "b", "a", "best_accuracy")
    assert (other.difference, other.low) == pytest.approx((-found.difference, -found.high))
    assert other.probability == pytest.approx(1 - found.probability)


def test_pairs_are_common_seeds_in_any_order():
    one = scored({"a": {5: 0.5, 1: 0.7, 2: 0.9, 3: 0.1}, "b": {1: 0.6, 2: 0.6, 5: 0.6, 9: 0.0}})
    found = metrics.paired(one, "a", "b", metrics.final_accuracy)
    assert found.seeds == 3
    assert found.difference == pytest.approx((-0.1 + 0.1 + 0.3) / 3)
    assert found.metric == "final_accuracy"
    found = metrics.paired(one, "a", "b", lambda runs: 2 * runs.start_accuracy)
    assert found.difference == pytest.approx(0.2)


def test_coverage_of_the_interval():
    rng = np.random.default_rng(0)
    num_repetitions, num_seeds, difference = 1000, 5, 0.02
    common = rng.normal(0.5, 0.1, (num_repetitions, 1, num_seeds))
    values = common + rng.normal(np.array([[difference], [0.0]]), 0.03, (num_repetitions, 2, num_seeds))
    once = scored(paired_scores(num_seeds))  # a's seeds, then b's
    repeated = once.isel(run=np.tile(np.arange(2 * num_seeds), num_repetitions))
    repeated = repeated.assign_coords(repetition=("run", np.repeat(np.arange(num_repetitions), 2 * num_seeds)))
    table = metrics.paired_table(repeated.assign(start_accuracy=("run", values.ravel())), "best_accuracy")
    assert len(table) == num_repetitions
    coverage = ((table.low <= difference) & (difference <= table.high)).mean()
    print(f"coverage of the 95% interval: {coverage:.1%} of {num_repetitions} repetitions")
    assert abs(coverage - 0.95) < 3 * math.sqrt(0.95 * 0.05 / num_repetitions)


@pytest.mark.parametrize("ratio", [20.0, 9.0, 8.9, 3.0, 1.0, 0.5, 0.2, -0.1, -0.07])
def test_number_of_seeds_that_settle(ratio):
    found = metrics.Comparison("a", "b", "x", ratio * 0.3, 0.3, 4)
    n = 2
    while stats.t.ppf(0.975, n - 1) * 0.3 / math.sqrt(n) >= abs(ratio * 0.3):
        n += 1
    assert found.seeds_to_settle == n
    assert (found.verdict == "undecided") == (n > 4)


def test_equal_differences():
    same = metrics.Comparison("a", "b", "x", 0.0, 0.0, 4)
    assert (same.low, same.high, same.probability, same.p_value) == (0, 0, 0.5, 1)
    assert (same.seeds_to_settle, same.verdict) == (math.inf, "undecided")
    lower = metrics.Comparison("a", "b", "x", -0.1, 0.0, 4)
    assert (lower.low, lower.high, lower.probability, lower.p_value) == (-0.1, -0.1, 0, 0)
    assert (lower.seeds_to_settle, lower.verdict) == (2, "lower")
    assert metrics.Comparison("a", "b", "x", 1e-300, 1.0, 4).seeds_to_settle == math.inf


def test_comparisons_are_readable():
    found = metrics.Comparison("fc", "rd", "best_accuracy", 0.0125, 0.03, 10)
    assert str(found) == (
        "best_accuracy, fc - rd: +0.0125 (95% interval -0.008961 to +0.03396, 10 seeds): "
        "undecided, probability of higher 0.89; 25 seeds would settle it"
    )
    assert repr(found) == f"<Comparison {found}>"


def test_errors_of_paired(padded):
    one = scored(paired_scores(4))
    with pytest.raises(ValueError, match="there is no policy 'c' in these results: use a, b"):
        metrics.paired(one, "a", "c", "best_accuracy")
    with pytest.raises(ValueError, match="there is no metric 'speed': use best_accuracy, final_accuracy"):
        metrics.paired(one, "a", "b", "speed")
    with pytest.raises(ValueError, match="time_to_accuracy needs accuracy: give it too, as in"):
        metrics.paired(one, "a", "b", "time_to_accuracy")
    with pytest.raises(
        ValueError, match=r"energy must have one value per run, got dimensions \{'run': 8, 'device': 2\}"
    ):
        metrics.paired(one, "a", "b", "energy")
    with pytest.raises(ValueError, match="a and b need at least 2 common seeds, got 1"):
        metrics.paired(scored({"a": {0: 0.1, 1: 0.2}, "b": {1: 0.3, 2: 0.4}}), "a", "b", "best_accuracy")
    with pytest.raises(ValueError, match="policy a has several runs with seed 0"):
        metrics.paired(results.concat([one, one]), "a", "b", "best_accuracy")
    with pytest.raises(ValueError, match=r"infinite for 4 of 4 seeds: pass censored='budget'"):
        metrics.paired(one, "a", "b", "time_to_accuracy", accuracy=1.0)
    assert metrics.paired(one, "a", "b", "time_to_accuracy", accuracy=1.0, censored="budget").difference == 0
    with pytest.raises(ValueError, match="jain_index is NaN for 4 of 4 seeds"):
        metrics.paired(one, "a", "b", "jain_index")
    with pytest.raises(ValueError, match="no two policies have 2 common seeds"):
        metrics.paired_table(padded, "best_accuracy")


def test_settings_are_never_pooled():
    parts = [
        scored(paired_scores(5, seed=number, difference=number / 10), distribution=name, **{"cell.scatter": scatter})
        for number, (name, scatter) in enumerate([("l1", 0.5), ("l1", math.nan), ("iid", 0.5)])
    ]
    several = results.concat(parts)
    with pytest.raises(ValueError, match=r"select one value of distribution, cell.scatter first.* == 'l1'\).values"):
        metrics.paired(several, "a", "b", "best_accuracy")
    table = metrics.paired_table(several, "best_accuracy")
    assert table.distribution.tolist() == ["l1", "l1", "iid"]
    p_values = []
    for line, part in zip(table.itertuples(), parts, strict=True):
        found = metrics.paired(part, "a", "b", "best_accuracy")
        assert (line.difference, line.low, line.high) == pytest.approx((found.difference, found.low, found.high))
        assert line.seeds_to_settle == found.seeds_to_settle
        p_values.append(found.p_value)
    np.testing.assert_allclose(table.p_holm, metrics.holm(p_values))
    assert table.verdict.tolist() == ["undecided", "higher", "higher"]


def test_values_of_phi_are_policies():
    parts = [scored({"fc": {0: x, 1: x + 0.1}}, phi=phi) for x, phi in ((0.3, 0.05), (0.4, 0.5))]
    parts.append(scored({"rd": {0: 0.2, 1: 0.2}}, phi=math.nan))
    one = results.concat(parts[1:])
    assert metrics.paired(one, "fc", "rd", "best_accuracy").difference == pytest.approx(0.25)
    several = results.concat(parts)
    assert metrics.paired(several, "fc(phi=0.5)", "fc(phi=0.05)", "best_accuracy").difference == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"no policy 'fc' in these results: use fc\(phi=0.05\), fc\(phi=0.5\), rd"):
        metrics.paired(several, "fc", "rd", "best_accuracy")


def test_holm_against_its_steps():
    rng = np.random.default_rng(0)
    for _ in range(100):
        p_values = rng.uniform(0, rng.choice([0.02, 0.2, 1.0]), rng.integers(1, 8))
        rejected = set()
        for rank, number in enumerate(np.argsort(p_values)):
            if p_values[number] >= 0.05 / (p_values.size - rank):
                break
            rejected.add(number)
        corrected = metrics.holm(p_values)
        assert set(np.flatnonzero(corrected < 0.05)) == rejected
        assert (corrected >= p_values).all()
        assert (corrected <= 1).all()
