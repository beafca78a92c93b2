"""Tests `fcjax sweep` from its arguments to its files, on a data set that needs no download."""

import csv
import errno
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fcjax import cli, data, policies, presets, results
from fcjax.report import output

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def script(monkeypatch, tmp_path):
    """The command's module, in an empty folder. Small clouds of points replace every data set."""
    clouds = data.synthetic.classification(4000, 300, num_features=8, num_labels=10, spread=0.5)
    monkeypatch.setattr(data, "load", lambda name: clouds)
    monkeypatch.chdir(tmp_path)
    return cli


def test_sweep_from_the_command_line(script, tmp_path, capsys):
    Path("my_file.py").write_text(
        "import fcjax\n"
        "def loudest(phi=0.5):\n"
        "    def select(key, phi, context):\n"
        "        loud = context.observation.gain >= context.observation.gain.max() * phi\n"
        "        return phi, fcjax.allocate(loud, context.observation, context.cell)\n"
        "    return fcjax.Policy(lambda cell: phi * 1.0, select)\n"
    )
    arguments = ["--policy", "pf", "my_file:loudest", "--phi", "0.1", "0.9", "--distribution", "iid"]
    assert script.sweep([*arguments, "--seeds", "2", "--seed", "5", "--budget", "9", "--out", "here/there"]) == 0
    out = tmp_path / "here" / "there"
    files = {"accuracy.pdf", "accuracy.png", "histories.nc", "rounds.pdf", "rounds.png", "summary.csv", "sweep.json"}
    assert {path.name for path in out.glob("[!.]*")} == files | {"report.html", "runs"}
    with open(out / "summary.csv") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == results.SUMMARY
    assert len(rows) == 3 * 2
    assert {row["seed"] for row in rows} == {"5", "6"}
    assert [row["phi"] for row in rows if row["policy"] == "pf"] == ["nan"] * 2
    assert {row["phi"] for row in rows if row["policy"] != "pf"} == {"0.1", "0.9"}
    assert all(0 < float(row["best_accuracy"]) <= 1 for row in rows)
    histories = results.load(out / "histories.nc")
    assert histories.command == "fcjax sweep " + " ".join(
        [*arguments, "--seeds", "2", "--seed", "5", "--budget", "9", "--out", "here/there"]
    )
    printed = capsys.readouterr()
    assert "best (%)" in printed.out
    assert printed.out.count("±") == 1, "two seeds have no interval, and one ± explains the notation"
    mean = 100 * np.mean([float(row["best_accuracy"]) for row in rows[:2]])
    assert f"{mean:.2f}" in printed.out
    assert "nan" not in printed.out
    assert "6 runs in" in printed.out
    assert printed.out.endswith("open here/there/report.html in a browser to see them\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--policy", "best"],
            "unknown policy 'best': use fc, exact, fixed(n=...), rd, pf, cs(threshold_s=...), as(threshold_s=...), ",
        ),
        (["--axis", "cell.bandwith_hz", "5e6"], "unknown axis 'cell.bandwith_hz': did you mean cell.bandwidth_hz"),
        (["--axis", "cell.power_w", "-1"], "cell.power_w[0] must be zero or more, and finite, got -1"),
        (["--axis", "seeds", "3"], "seeds cannot be in axes: use the argument seeds, or --seeds on the command line"),
        (["--policy", "FC"], "unknown policy 'FC', did you mean fc? use fc, exact, "),
        (["--axis", "xyz", "1"], "shi2020 has no setting 'xyz': see help(fcjax.presets.shi2020) and help(fcjax.Cell)"),
        (["--axis", "make_optimizer", "x"], "make_optimizer must be an optax optimizer, or a function that makes one"),
        (["--phi", "0"], "phi must be positive and finite, got 0"),
        (["--phi", "-1", "--policy", "exact"], "phi must be positive and finite, got -1"),
        (["--phi", "many"], "invalid float value: 'many'"),
        (["--budget", "0.2"], "the shortest takes 0.3"),
        (["--policy", "fixed-21"], "n must be a whole number from 1 to 20, the number of devices, got 21"),
        (["--radius", "0"], "cell.radius_m must be positive and finite, got 0"),
        (["--distribution", "l11"], "a device can have 1 to 10 distinct labels of this data set, got l = 11"),
        (["--devices", "0"], "num_devices must be a whole number of 1 or more, got 0"),
        (["--devices", "50"], "batch_size 128 is more than the"),
        (["--seeds", "0"], "--seeds must be 1 or more"),
        (["--seed", "-1"], "all seeds between 0 and 2^31, got --seeds 5 --seed -1"),
        (["--observation-error", "-1"], "observation_error must be zero or more"),
        (["--policy", "missing:policy"], " and no module missing"),
        (["--policy", "file:silent"], "policy 'file:silent' schedules nobody, in 256 of 256 random rounds"),
        (["--policy", "file:broken"], "gives shares that are not numbers"),
        (["--out", "file.py/folder"], "results cannot be written to file.py/folder: Not a directory"),
    ],
)
def test_bad_input_exits_with_code_2_and_one_error(arguments, message, script, capsys):
    Path("file.py").write_text(
        "import fcjax\n"
        "def spoilt(factor, none):\n"
        "    def select(key, state, context):\n"
        "        gain = context.observation.gain\n"
        "        good = fcjax.allocate((gain > 0) & (not none), context.observation, context.cell)\n"
        "        return state, fcjax.Decision(good.scheduled, good.share * factor, good.round_s)\n"
        "    return fcjax.Policy(lambda cell: (), select)\n"
        "silent = spoilt(1.0, True)\n"
        "broken = spoilt(float('nan'), False)\n"
    )
    try:
        code = script.sweep(arguments)
    except SystemExit as end:  # raised by argparse
        code = end.code
    printed = capsys.readouterr()
    assert code == 2
    assert message in printed.err
    assert "Traceback" not in printed.err
    errors = [line for line in printed.err.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert printed.out == ""
    out = Path("out/sweep")
    assert not out.exists() or not list(out.glob("[!.]*")), "no half-written results"


def test_ctrl_c_before_any_run_finishes(script, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # keeps the fixture's patches, such as the folder
        patch.setattr("fcjax.sweeps.run.run_all", interrupted)
        assert script.sweep([]) == 130
    assert "interrupted; no run had finished" in capsys.readouterr().err


@pytest.mark.slow
def test_repeated_command_reuses_finished_runs(script, tmp_path, capsys):
    arguments = ["--policy", "pf", "--seeds", "2", "--budget", "5"]
    assert script.sweep(arguments) == 0
    before = {path.name: path.read_bytes() for path in Path("out/sweep").glob("*.csv")}
    capsys.readouterr()
    assert script.sweep([*arguments, "--workers", "1"]) == 0
    assert "2 runs, of which 2 had been done before, in" in capsys.readouterr().out
    assert before == {path.name: path.read_bytes() for path in Path("out/sweep").glob("*.csv")}


@pytest.mark.slow
def test_folder_of_another_sweep_is_refused(script, capsys):
    arguments = ["--policy", "pf", "--seeds", "1", "--budget", "5"]
    assert script.sweep(arguments) == 0
    before = Path("out/sweep/summary.csv").read_bytes()
    assert script.sweep([*arguments, "--radius", "500"]) == 2
    message = "out/sweep holds another sweep (radius was [600.0], is [500.0]): choose another folder with --out"
    assert message in capsys.readouterr().err
    assert script.sweep([*arguments[:2], "--seeds", "2", "--budget", "5"]) == 0, "more seeds extend the same sweep"
    assert "2 runs, of which 1 had been done before" in capsys.readouterr().out
    before = Path("out/sweep/summary.csv").read_bytes()
    arguments[3] = "2"
    note = Path("out/sweep/sweep.json")
    for damage in ("[]", "{", "7"):
        note.write_text(damage)
        assert script.sweep(arguments) == 2
        printed = capsys.readouterr().err
        assert "sweep.json, which says what out/sweep holds, is damaged: delete this file if it holds this" in printed
    assert Path("out/sweep/summary.csv").read_bytes() == before
    note.unlink()
    assert script.sweep(arguments) == 0
    assert "2 runs, of which 2 had been done before" in capsys.readouterr().out
    assert Path("out/sweep/summary.csv").read_bytes() == before


def test_one_command_at_a_time(script, tmp_path, capsys):
    arguments = ["--policy", "pf", "--seeds", "1", "--budget", "5", "--out", str(tmp_path)]
    with script.claimed(script.parser().parse_args(arguments)):
        assert script.sweep(arguments) == 2
    assert f"another command is running in {tmp_path}: wait until it has ended" in capsys.readouterr().err
    assert script.sweep(arguments) == 0


@pytest.mark.slow
def test_full_disk_while_plotting(script, tmp_path, capsys, monkeypatch):
    write = output.write_whole

    def fail_on_pdf(path, *args):
        if path.suffix == ".pdf":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *args)

    monkeypatch.setattr(output, "write_whole", fail_on_pdf)
    assert script.sweep(["--policy", "pf", "--seeds", "1", "--budget", "5", "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "the results could not be written: [Errno 28] No space left on device; finished runs are kept in" in printed


def test_files_named_like_libraries_are_not_imported(script, tmp_path):
    for name in ("numexpr", "jax_plugins", "dask", "cloudpickle"):
        Path(f"{name}.py").write_text("raise SystemExit('imported unasked')")
    assert script.sweep(["--policy", "pf", "--seeds", "1", "--budget", "5", "--out", str(tmp_path / "out")]) == 0
    assert str(tmp_path) not in sys.path


def test_table_counts_diverged_runs(script):
    columns = ["dataset", "policy", "distribution", "radius_m", "phi", "devices", "budget_s", "stop", "rounds"]
    columns += [
        "best_accuracy",
        "tilde_accuracy",
        "final_accuracy",
        "mean_scheduled",
        "mean_round_s",
        "energy_j",
        "lost",
    ]
    rows = pd.DataFrame(
        [["d", "pf", "l1", 600.0, 0.1, 20, 60.0, stop, 5, *[0.5] * 6, 0] for stop in ("budget", "diverged")]
    )
    assert "2 (1 diverged)" in output.table(rows.set_axis(columns, axis=1))


def test_help_has_examples_and_all_policies(script, capsys):
    with pytest.raises(SystemExit) as end:
        script.sweep(["--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "fcjax sweep --phi 0.05" in printed
    assert all(name in printed for name in (*policies.REGISTRY.names(), *presets.REGISTRY.names()))


@pytest.mark.slow
def test_runs_of_a_changed_policy_are_repeated(script, tmp_path, capsys):
    code = "import fcjax\ndef mine():\n    return fcjax.policies.fixed(2)\n"
    Path("my_policies.py").write_text(code)
    arguments = ["--policy", "my_policies:mine", "--seeds", "1", "--budget", "5", "--out", str(tmp_path / "here")]
    assert script.sweep(arguments) == 0
    first = (tmp_path / "here" / "summary.csv").read_text()
    Path("my_policies.py").write_text(code.replace("2", "3"))
    assert script.sweep(arguments) == 0
    assert "1 run in" in capsys.readouterr().out.splitlines()[-2]
    assert (tmp_path / "here" / "summary.csv").read_text() != first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            ["--scheduler", "tcp://127.0.0.1:1"],
            "no scheduler answers at tcp://127.0.0.1:1: start one with dask scheduler",
        ),
        (["--scheduler", "tcp://here:x"], "no scheduler answers at tcp://here:x"),
        (["--scheduler-file", "none.json"], "--scheduler-file: there is no file none.json; the scheduler writes it"),
    ],
)
def test_errors_name_missing_cluster(option, message, script, tmp_path, capsys):
    assert script.sweep([*option, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
