"""Tests the scripts that reproduce the paper, on small data that need no download."""

import dataclasses
import functools
import json
import signal
import time

import claims
import dealing
import figure2
import figure3
import figure4
import figure5
import hypotheses
import jax
import ledger
import matplotlib.pyplot as plt
import numpy as np
import open_questions
import pandas as pd
import pytest
import recovered_settings
import reproduction
import results_page
import statements
import table3
from reproduction import PERCENT

import fcjax
from fcjax import data
from fcjax.learning.evaluation import Score
from fcjax.policies import contract
from fcjax.simulation.records import Record, Stop

SCRIPT = """
import sys
from fcjax import data
from test_reproduction import clouds
data.load = clouds
import figure3
from reproduction import main
sys.exit(main(figure3.STUDY, ["--seeds", "3", "--out", sys.argv[1]]))
"""


def clouds(name):
    """Clouds of points that replace a data set of the paper."""
    made = data.synthetic.classification(4000, 300, num_features=8, num_labels=10, spread=0.5)
    return dataclasses.replace(made, name=name)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_study_from_the_command_line(monkeypatch, tmp_path, capsys):
    study = figure3.STUDY
    monkeypatch.setattr(data, "load", clouds)
    arguments = ["--seeds", "2", "--out", str(tmp_path / "here")]
    assert reproduction.main(study, arguments) == 0
    first = capsys.readouterr().out
    files = {path.name: path.read_bytes() for path in (tmp_path / "here").glob(f"{study.name}_*")}
    assert set(files) == {f"{study.name}_mnist.{kind}" for kind in ("csv", "png", "json")}
    about = json.loads(files[f"{study.name}_mnist.json"])
    assert about["command"] == f"python experiments/paper/{study.name}.py --seeds 2 --out {tmp_path}/here"
    assert about["seeds"] == [0, 1]
    assert {"versions", "date", "revision", "runs"} <= set(about)
    assert reproduction.main(study, arguments) == 0  # all runs are in the ledger
    again = capsys.readouterr().out
    assert f"{about['runs']} runs, of which {about['runs']} had been done before" in again
    assert again.splitlines()[:-1] == first.splitlines()[:-1]
    assert {path.name: path.read_bytes() for path in (tmp_path / "here").glob(f"{study.name}_*")} == files
    plt.close("all")


@pytest.mark.slow
def test_killed_study_resumes_to_the_same_files(start, tmp_path):
    """The study gets SIGKILL, which it cannot catch."""

    def succeed(process):
        printed = process.communicate(timeout=300)
        assert process.returncode == 0, printed

    succeed(start(SCRIPT, tmp_path / "whole"))
    out = tmp_path / "killed"
    process = start(SCRIPT, out)
    deadline = time.monotonic() + 120
    while len(list((out / "runs").glob("[!.]*.npz"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not list(out.glob("*.csv"))
    succeed(start(SCRIPT, out))
    for name in ("figure3_mnist.csv", "figure3_mnist.png"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    kept = {path.name: path.read_bytes() for path in (out / "runs").glob("[!.]*")}
    assert kept == {path.name: path.read_bytes() for path in (tmp_path / "whole" / "runs").iterdir()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--seeds", "0"], "--seeds must be 1 or more, got 0"), (["--out", "/dev/null/x"], "cannot be written to")],
)
def test_bad_input_exits_with_code_2(arguments, message, capsys):
    assert reproduction.main(figure3.STUDY, arguments) == 2
    assert message in capsys.readouterr().err


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        reproduction.main(table3.STUDY, ["--help"])
    assert "python experiments/paper/table3.py --dataset mnist cifar10 --seeds 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("study", "options", "number"),
    [
        (table3.STUDY, {"extra": ()}, 7 * 9),
        (table3.STUDY, {}, 7 * 9 + 9 + 20 * 9 + 7 * 9),
        (figure2.STUDY, {}, 3 * (10 + 2 * 4)),
        (figure3.STUDY, {}, 3),
        (figure4.STUDY, {}, 3 * 23),
        (figure5.STUDY, {}, 2 * 7),
        (claims.STUDY, {}, 7 * 9 + 3 * (9 + 8) + 3 * 22 + 5),
        (recovered_settings.STUDY, {}, 9 * 7 * 3 * 2),
    ],
)
def test_number_of_planned_jobs(study, options, number):
    jobs = study.plan(clouds("mnist"), 2, **options)
    assert len(jobs) == 2 * number
    assert len({str(job.labels) for job in jobs}) == 2 * number


def test_published_figures():
    """Spot-checks some cells against the paper."""
    cells = {tuple(cell.values()) for cell in reproduction.published()["table3"]}
    assert len(cells) == 2 * 7 * 9
    for cell in (
        ("mnist", "fc", 600, "l1", 89.0),
        ("mnist", "rd", 1000, "l1", 65.2),
        ("cifar10", "as-h", 1000, "iid", 46.8),
        ("cifar10", "cs-l", 200, "l5", 43.6),
    ):
        assert cell in cells


def made_up(labels, accuracy, scheduled=3, rounds=1):
    """A run with an invented history."""
    per_device = np.full((rounds, 20), 0.5)
    number = np.linspace(1, 0, rounds) + 1
    history = dict.fromkeys(("share", "gain", "compute_s", "energy_j"), per_device)
    history |= dict.fromkeys(("rho", "beta", "delta"), per_device * number[:, None])
    history |= dict.fromkeys(("loss", "tilde_loss", "reported_loss", "round_s"), np.ones(rounds))
    history |= {
        "accuracy": np.linspace(accuracy, accuracy / 2, rounds)[::-1],
        "tilde_accuracy": np.full(rounds, accuracy),
    }
    history |= {"elapsed_s": np.arange(1.0, rounds + 1), "scheduled": np.tile(np.arange(20) < scheduled, (rounds, 1))}
    history |= {"received": history["scheduled"], "available": history["scheduled"] | True}
    return labels, fcjax.Run(Record(**history), rounds, Score(0.1, 2.3), None, None, Stop.BUDGET)


def results_of(accuracies):
    """Runs of one round with the given accuracies: {(policy, preset): accuracy by seed}."""
    setting = {"dataset": "mnist", "distribution": "l1", "radius_m": 600.0, "phi": np.nan, "devices": 20}
    setting |= {"budget_s": 60.0, "observation_error": 0.0}
    runs = []
    for (policy, preset), values in accuracies.items():
        number = int(policy[6:]) if policy.startswith("fixed-") else 3
        for seed, accuracy in enumerate(values):
            labels = setting | {"policy": policy, "preset": preset, "seed": seed}
            runs.append(made_up(labels, accuracy, number))
    return ledger.brief(fcjax.results.to_dataset(runs))


def test_cells_are_compared_with_published_ones():
    results = results_of(
        {
            ("fc", "shi2020"): [0.89, 0.90],
            ("pf", "shi2020"): [0.80, 0.84],
            ("exact", "shi2020"): [0.9, 0.9],
            ("fixed-4", "shi2020"): [0.88, 0.90],
            ("fixed-5", "shi2020"): [0.86, 0.91],
            ("pf", "shi2020_as_written"): [0.7, 0.72],
        }
    )
    cells = table3.evaluate(results).set_index("policy")
    assert list(cells.index) == ["fc", "pf", "exact", "fixed-best"]
    np.testing.assert_allclose(cells[PERCENT], [89.5, 82, 90, 89])
    assert cells.mean_scheduled["fixed-best"] == 4
    np.testing.assert_allclose(cells.published_percent[["fc", "pf"]], [89.0, 82.6])
    np.testing.assert_allclose(cells.difference[["fc", "pf"]], [0.5, -0.6])
    assert cells.published_percent[["exact", "fixed-best"]].isna().all()
    np.testing.assert_allclose(cells.as_written_percent[["fc", "pf"]], [np.nan, 71])
    half = 12.706204736 * np.std([80, 84], ddof=1) / np.sqrt(2)  # Student's t for one degree of freedom
    np.testing.assert_allclose(cells[f"{PERCENT}_half"]["pf"], half)
    apart = table3.beside_chance(cells.reset_index())["all"]
    np.testing.assert_allclose([apart.cells, apart.found, apart.bias], [2, 0.55, -0.05])
    shown = fcjax.console.as_text(table3.show(cells.reset_index()))
    assert "Mean absolute difference to the 2 published cells: 0.55 points" in shown


def test_wins_are_counted_with_a_margin():
    cells = pd.DataFrame(
        {
            "policy": ["fc", "rd", "exact"] * 3,
            "radius_m": np.repeat([200, 600, 1000], 3),
            "distribution": "l1",
            "published_percent": [89.9, 90.2, 99, 80, 80.4, 99, 70, 60, 99],
        }
    )
    assert table3.wins(cells, "published_percent") == (2, 3)  # exact is not one of the paper's policies


def test_misses_are_listed():
    results = results_of({("fc", "shi2020"): [0.89, 0.891] * 3, ("pf", "shi2020"): [0.79, 0.80] * 3})
    assert [line[0] for line in table3.misses(table3.evaluate(results))[1:]] == ["pf, l1, R = 600 m"]
    results = results_of({("fc", "shi2020"): [0.88, 0.89], ("as-h", "shi2020"): [0.88, 0.90]})
    assert [line[0] for line in table3.misses(table3.evaluate(results))[1:]] == ["FC as the best, l1, R = 600 m"]


def verdicts_on(dataset, seeds, accuracy_of, number_of):
    """Verdicts on runs whose labels give their accuracies and numbers of devices, with a little noise."""
    rng = np.random.default_rng(0)
    runs = []
    for job in claims.plan(clouds(dataset), seeds):
        accuracy = accuracy_of(job.labels) + rng.uniform(0, 1e-4)
        runs.append(made_up(job.labels, accuracy, number_of(job.labels), rounds=6))
    rows = claims.evaluate(ledger.brief(fcjax.results.to_dataset(runs)))
    assert f"{len(rows)} statements at {seeds} seeds" in fcjax.console.as_text(claims.show(rows))
    return dict(zip(rows.statement, rows.verdict, strict=True))


def number_of(labels, best=6):
    policy = labels["policy"]
    return int(policy[6:]) if policy.startswith("fixed-") else {"fc": best, "cs-h": 9}.get(policy, 3)


def accuracy_of(labels, best=6):
    """FC is the best policy, and `best` is the best fixed number of devices."""
    policy = labels["policy"]
    if policy.startswith("fixed-"):
        return 0.9 - 0.01 * abs(number_of(labels) - best)
    return {"fc": 0.9, "centralized": 0.95}.get(policy, 0.8)


@pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
def test_claims_on_runs_with_known_truth(dataset):
    verdicts = verdicts_on(dataset, 4, accuracy_of, number_of)
    uneven = reproduction.distributions(dataset)[0]
    for statement in (
        "FC has the highest accuracy under most settings",
        "another policy is at most 0.2 points more accurate than FC",
        "cs-l loses notably under some settings",
        f"scheduling too few devices costs accuracy for {uneven}",
        f"scheduling too many devices costs accuracy for {uneven}",
        f"FC is close to the best fixed number for {uneven}",
        f"centralized training is an upper bound for {uneven}",
        f"accuracy is not sensitive to phi from 0.02 to 0.5 for {uneven}",
        "errors of alpha = 0.1 hardly change the number of scheduled devices",
        "FC is robust to errors of alpha = 0.2",
    ):
        assert verdicts[statement] == "holds", statement
    for statement in (  # equal values are not "more"
        f"FC schedules more devices with larger phi for {uneven}",
        "errors of alpha = 0.1 make rounds longer",
        "scheduling more devices makes rounds longer",
        "the best fixed number grows with the non-i.i.d. level",
    ):
        assert verdicts[statement] == "does not hold", statement
    if dataset == "cifar10":
        assert not any("w~" in statement for statement in verdicts)  # Fig. 3 shows MNIST
        return
    assert verdicts["rho falls during training"] == "holds"
    assert verdicts["rho is higher at a higher non-i.i.d. level"] == "does not hold"
    assert verdicts["w~ is mostly more accurate than w_k for l1"] == "holds"
    assert verdicts["FC is more accurate than rd, pf, cs-l, as-l (l1, R = 600 m)"] == "holds"
    assert verdicts["cs-l and as-l schedule too few devices (l1, R = 600 m)"] == "holds"
    assert verdicts["cs-l and as-l converge slower than FC (l1, R = 600 m)"] == "holds"
    assert verdicts["FC is 9.0 points above rd (l1, R = 600 m)"] == "does not hold"  # it is 10
    assert verdicts["fc has 6.26 devices per round on average (l1, R = 600 m)"] == "does not hold"  # it is 6
    assert verdicts["FC reaches 89.0% for l1"] == "does not hold"
    assert verdicts["fc reaches 80% after 17.35 s (l1, R = 600 m)"] == "does not hold"
    assert verdicts["FC schedules devices with better channels (l1, R = 600 m)"] == "does not hold"


def test_too_few_devices_cost_nothing_if_one_is_best():
    verdicts = verdicts_on("cifar10", 3, functools.partial(accuracy_of, best=1), number_of)
    assert verdicts["scheduling too few devices costs accuracy for iid"] == "does not hold"
    assert verdicts["scheduling too many devices costs accuracy for iid"] == "holds"


def histories(accuracies, alpha=0.0):
    """Runs of FC with the given accuracies by round, one run per seed. Lengths may differ."""
    setting = {"dataset": "mnist", "distribution": "l1", "radius_m": 600.0, "phi": 0.05, "devices": 20}
    setting |= {"budget_s": 60.0, "observation_error": alpha, "preset": "shi2020", "policy": "fc"}
    runs = []
    for seed, values in enumerate(accuracies):
        labels, run = made_up(setting | {"seed": seed}, 0.5, rounds=len(values))
        history = dataclasses.replace(run.history, accuracy=np.array(values))
        runs.append((labels, dataclasses.replace(run, history=history)))
    return runs


def test_loss_by_latency():
    """Without errors, FC reaches 0.7 after 2 rounds and 0.9 after 4. With errors, it reaches 0.6 in 2 rounds."""
    runs = histories([[0.5, 0.7, 0.8, 0.9]]) + histories([[0.4, 0.6]], alpha=0.1)
    evidence = statements.Evidence(ledger.brief(fcjax.results.to_dataset(runs)))
    np.testing.assert_allclose(statements.loss_by_latency(evidence, "l1", 0.05, 0.1), [20 - 10], rtol=1e-5)


def test_rounds_to_reach_an_accuracy():
    runs = ledger.brief(fcjax.results.to_dataset(histories([[0.5, 0.8, 0.7, 0.9], [0.5, 0.6], [0.9, 0.1, 0.1]])))
    np.testing.assert_array_equal(statements.rounds_to(0.8, runs), [2, 2, 1])


def made_up_runs(jobs, accuracy_of):
    """Made-up runs for the jobs of a study."""
    runs = [made_up(job.labels, accuracy_of(job.labels), 6, rounds=2) for job in jobs]
    return ledger.brief(fcjax.results.to_dataset(runs))


@pytest.mark.parametrize(("few", "verdicts"), [(0.02, [True, False, True]), (0.0, [False, True, False])])
def test_predictions_on_dealing(few, verdicts):
    """Shuffled shards cost policies with few devices 2 points, or nothing."""
    printed = {
        (c["policy"], c["radius_m"], c["distribution"]): c[PERCENT] / 100
        for c in reproduction.published()["table3"]
        if c["dataset"] == "cifar10"
    }

    def accuracy(labels):
        distribution = labels["distribution"].removesuffix("-shuffled")
        value = printed[labels["policy"], labels["radius_m"], distribution] + 1e-4 * labels["seed"]
        distinct = not labels["distribution"].endswith("-shuffled")
        return value + (few if distinct and labels["policy"] in dealing.FEW else 0)

    rows = dealing.evaluate(made_up_runs(dealing.plan(clouds("cifar10"), 3), accuracy))
    assert (rows.what == "cell").sum() == 7 * 4 + 3 + 4
    assert [holds for *_, holds in dealing.predictions(rows)] == verdicts
    assert ("-2.00" in fcjax.console.as_text(dealing.show(rows))) == (few > 0)


def test_dealing_requires_cifar10():
    with pytest.raises(ValueError, match="use --dataset cifar10, got mnist"):
        dealing.plan(clouds("mnist"), 2)


@pytest.fixture
def skip_policy_checks(monkeypatch):
    """Skips policy checks, which take longer than everything else if nothing is run."""
    monkeypatch.setattr(contract, "check_policy", lambda *args, **settings: None)


@pytest.mark.usefixtures("skip_policy_checks")
def test_hypotheses_are_judged_by_their_predictions():
    """One hypothesis brings the cells half a point closer. The others change nothing."""
    better = hypotheses.ALL[4]

    def accuracy(labels):
        cells = reproduction.published()["table3"]
        setting = {name: labels[name] for name in ("dataset", "policy", "radius_m", "distribution")}
        value = next(c[PERCENT] for c in cells if setting.items() <= c.items()) / 100
        return value - 0.01 + 0.005 * (labels["preset"] == better.name) + 1e-4 * labels["seed"]

    rows = hypotheses.evaluate(made_up_runs(hypotheses.plan(clouds("mnist"), 3), accuracy)).set_index("hypothesis")
    assert rows.holds[better.name]
    np.testing.assert_allclose(rows.apart_before, 1 - 0.01, rtol=1e-3)
    np.testing.assert_allclose(rows.apart_change[better.name], -0.5, rtol=1e-3)
    others = rows.drop(better.name)
    assert list(others.holds) == [h.sign == 0 for h in hypotheses.ALL if h is not better]
    np.testing.assert_allclose(others.apart_change, 0, atol=1e-5)
    shown = fcjax.console.as_text(hypotheses.show(rows.reset_index()))
    assert f"8 hypotheses at 3 seeds. Nearer to the published cells beyond noise: {better.name}." in shown


@pytest.mark.slow
def test_client_selection_variants_against_loops():
    """Checks the scheduled devices and the shares of both variants of CS."""
    cell = fcjax.presets.shi2020(clouds("mnist")).cell
    cell = dataclasses.replace(cell, upload_bits=1.6e6)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        distance_km = 0.6 * np.sqrt(rng.uniform(0.001, 1, 20))
        gain = 10 ** (-(128.1 + 37.6 * np.log10(distance_km)) / 10)
        observation = fcjax.Observation(jax.numpy.asarray(gain), jax.numpy.asarray(0.32 + rng.exponential(0.32, 20)))
        context = fcjax.RoundContext(observation, None, cell, None, 0.0, 0)

        def decide(policy, context=context):
            return policy.select(jax.random.key(0), policy.init(context.cell), context)[1]

        gain, compute_s = (np.asarray(x, float) for x in (observation.gain, observation.compute_s))

        def time_s(share, i, gain=gain, compute_s=compute_s):
            band_hz = share * cell.bandwidth_hz
            rate = band_hz * np.log2(1 + cell.power_w[i] * gain[i] / (band_hz * cell.noise_psd_w_hz))
            return compute_s[i] + cell.upload_bits / rate

        order = sorted(range(20), key=lambda i: time_s(1, i))
        n = 1
        while n < 20 and all(time_s(1 / (n + 1), i) <= 1.5 for i in order[: n + 1]):
            n += 1
        decision = decide(hypotheses.ordered_client_selection(1.5))
        assert set(np.flatnonzero(decision.scheduled)) == set(order[:n])
        np.testing.assert_allclose(decision.share[decision.scheduled], 1 / n, rtol=1e-6)
        usual = decide(fcjax.policies.client_selection(1.5))
        best = decide(hypotheses.reallocated_client_selection(1.5))
        np.testing.assert_array_equal(best.scheduled, usual.scheduled)
        assert best.round_s < usual.round_s


def test_one_seed_decides_nothing():
    verdicts = verdicts_on("mnist", 1, accuracy_of, number_of)
    assert set(verdicts.values()) == {"undecided"}


def test_losing_under_one_setting_is_enough():
    def accuracy(labels):
        loses = labels["policy"] == "cs-l" and labels["radius_m"] == 1000 and labels["distribution"] == "l2"
        return 0.7 if loses else 0.9

    verdicts = verdicts_on("mnist", 3, accuracy, number_of)
    assert verdicts["cs-l loses notably under some settings"] == "holds"
    assert verdicts["as-l loses notably under some settings"] == "does not hold"


def dataset_of(study):
    return "cifar10" if study is dealing.STUDY else "mnist"


@pytest.mark.slow
@pytest.mark.usefixtures("skip_policy_checks")
def test_results_page_shows_all_studies(tmp_path, capsys):
    """Plots and tabulates all studies from made-up runs."""
    studies = [study for study, _ in results_page.STUDIES]
    for study in studies:
        dataset = dataset_of(study)
        runs = [made_up(job.labels, accuracy_of(job.labels), 6, rounds=6) for job in study.plan(clouds(dataset), 2)]
        results = ledger.brief(fcjax.results.to_dataset(runs)).assign_attrs(fcjax.results.provenance())
        reproduction.write(study, results, tmp_path, dataset, f"python experiments/paper/{study.name}.py")
    assert results_page.main(["--folder", str(tmp_path)]) == 0
    page = (tmp_path / "README.md").read_text()
    assert "{{" not in page
    for study in studies:
        assert f"`python experiments/paper/{study.name}.py`" in page
        assert (f"({study.name}_{dataset_of(study)}.png)" in page) == (study.draw is not None)
    assert "| fc | 600 | 90.0 ± 0.0 / 89.0 / +1.0 |" in page
    assert "(not run)" not in page
    plt.close("all")


def test_results_page_without_results(tmp_path, capsys):
    assert results_page.main(["--folder", str(tmp_path)]) == 2
    assert "holds no results of a study" in capsys.readouterr().err


def test_tables_as_text_and_as_markdown():
    blocks = [[["policy", "n"], ["fc", "5"], ["centralized", "12"]], "Of w~."]
    assert fcjax.console.as_text(blocks) == "policy        n\nfc            5\ncentralized  12\n\nOf w~."
    assert reproduction.as_markdown(blocks).splitlines() == [
        "| policy | n |",
        "| --- | --- |",
        "| fc | 5 |",
        "| centralized | 12 |",
        "",
        "Of w\\~.",
    ]


def test_time_to_reach_a_level():
    times, curve = np.arange(5.0), np.array([0.1, 0.5, 0.8, 0.7, 0.9])
    assert figure5.time_to(0.8, times, curve) == 2.0
    assert np.isnan(figure5.time_to(0.95, times, curve))


def test_tilde_accuracy_against_a_loop():
    """Compares both versions of w~ with a loop over rounds."""
    rng = np.random.default_rng(0)
    loss, accuracy = rng.random((2, 3, 9)).astype(np.float32)
    loss[1, 6:] = accuracy[1, 6:] = np.nan  # a shorter run
    results = fcjax.results.xr.Dataset(
        {
            "loss": (("run", "round"), loss),
            "accuracy": (("run", "round"), accuracy),
            "start_loss": ("run", np.array([0.5, 9.0, 9.0])),
            "start_accuracy": ("run", np.array([0.3, 0.1, 0.1])),
        }
    )
    at_once = open_questions.tilde_accuracy(results, "test set, at once")
    late = open_questions.tilde_accuracy(results, "test set")
    for run in range(3):
        best, best_accuracy = results.start_loss.values[run], results.start_accuracy.values[run]
        for k in range(9):
            if np.isnan(loss[run, k]):
                assert np.isnan(at_once[run, k])
                continue
            assert late[run, k] == pytest.approx(best_accuracy)
            if loss[run, k] < best:
                best, best_accuracy = loss[run, k], accuracy[run, k]
            assert at_once[run, k] == pytest.approx(best_accuracy)


def test_labels_dealt_by_a_rule_keep_the_samples():
    loaded = clouds("mnist")
    experiment = fcjax.presets.shi2020(loaded, distribution="l2", num_devices=20)
    for name, step in (("a device has labels that follow each other", 1), ("a device has labels far apart", 5)):
        dealt = recovered_settings.WAYS[name](experiment).data
        np.testing.assert_array_equal(np.sort(dealt.indices, axis=None), np.sort(experiment.data.indices, axis=None))
        for device, row in enumerate(dealt.indices):
            assert set(loaded.train_y[row]) == {device % 10, (device + step) % 10}
