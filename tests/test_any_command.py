"""Any sequence of commands in a folder: results are right and complete, or one error says what to do.

For a long search: `pytest -m slow tests/test_any_command.py --hypothesis-profile search`.
"""

import contextlib
import io
import itertools
import shutil
import tempfile
import warnings
from pathlib import Path

import hypothesis
import numpy as np
import pandas as pd
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from fcjax import cli, data, results

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]
CLOUDS = data.synthetic.classification(4000, 300, num_features=8, num_labels=10, spread=0.5)
USUAL = ("--budget", "1.5", "--workers", "1")
SWEEPS = (
    ("--policy", "pf"),
    ("--policy", "pf", "rd(n=2)", "--radius", "800"),
    ("--policy", "fixed-2", "--axis", "cell.bandwidth_hz", "1e7", "2e7"),
)
NUMBERS = ["nan", "inf", "-1", "0", "1e300", "x", ""]
OPTIONS = {
    "--phi": ["0.05", "5", *NUMBERS],
    "--policy": ["pf", "fc", "fixed-3", "best", "fixed-0", "fixed(n=2)", "fixed(m=2)", "centralized", "a:b", ":"],
    "--distribution": ["l1", "iid", "dir0.5", "l0", "l99", "dir-1", "dirx", "l\u0663", ""],
    "--radius": ["600", "1500", *NUMBERS],
    "--devices": ["5", "-1", "1.5", "100000", "x"],
    "--budget": ["1.5", *NUMBERS],
    "--axis": ["cell.scatter 0.5", "cell.access fdma tdma", "cell.scatter", "nonsense 1", ""],
    "--seed": ["7", "2147483648", "x"],
    "--seeds": ["2", "0", "-1", "x"],
    "--observation-error": ["0.2", "-1", "nan", "x"],
    "--workers": ["1", "0", "x"],
    "--side-by-side": ["1", "0", "x"],
    "--scheduler-file": ["none.json"],
}
RESULTS = ("summary.csv", "histories.nc", "accuracy.png", "rounds.pdf", "report.html")


class Commands(stateful.RuleBasedStateMachine):
    """Commands in one folder, and accidents between them."""

    count = 0
    right: dict[tuple, dict[tuple, pd.DataFrame]] = {}  # noqa: RUF012 - rows of each sweep by seed, from earlier examples

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.out = self.folder / "out"
        self.sweep, self.seeds = None, 0  # what the folder holds

    def teardown(self):
        shutil.rmtree(self.folder)

    def run_command(self, *options, out):
        """Returns the exit code and the lines with errors."""
        type(self).count += 1
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            try:
                code = cli.sweep([*options, "--out", str(out)])
            except SystemExit as end:  # from argparse
                code = end.code
        return code, [line for line in errors.getvalue().splitlines() if "error:" in line]

    def files(self):
        return {path.name: path.read_bytes() for path in self.out.glob("[!.]*") if path.is_file()}

    @stateful.rule(sweep=st.sampled_from(SWEEPS), seeds=st.integers(1, 3))
    def run(self, sweep, seeds):
        before = self.files()
        code, errors = self.run_command(*sweep, *USUAL, "--seeds", str(seeds), out=self.out)
        if self.sweep is not None and (sweep != self.sweep or seeds < self.seeds):
            assert code == 2
            assert len(errors) == 1
            assert "holds another sweep" in errors[0]
            assert self.files() == before
            return
        assert (code, errors) == (0, [])
        self.sweep, self.seeds = sweep, seeds
        assert set(RESULTS) <= set(self.files())
        rows = pd.read_csv(self.out / "summary.csv")
        assert sorted(set(rows.seed)) == list(range(seeds))
        pd.testing.assert_frame_equal(
            rows,
            pd.read_csv(io.StringIO(results.summary(results.load(self.out / "histories.nc")).to_csv(index=False))),
            rtol=1e-6,
            check_dtype=False,
        )
        known = self.right.setdefault(sweep, {})
        for seed, of_seed in rows.groupby("seed"):
            expected = known.setdefault(seed, of_seed).reset_index(drop=True)
            pd.testing.assert_frame_equal(expected, of_seed.reset_index(drop=True), check_dtype=False)

    @stateful.rule(
        options=st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in OPTIONS.items()})
    )
    def run_any_options_elsewhere(self, options):
        further = itertools.chain(*((name, *value.split(" ")) for name, value in options.items()))
        line = [*SWEEPS[0], *USUAL, "--seeds", "1", *further]
        elsewhere = self.folder / "elsewhere"
        code, errors = self.run_command(*line, out=elsewhere)
        assert (code, len(errors)) in ((0, 0), (2, 1)), (code, errors)
        if code == 0:
            rows = pd.read_csv(elsewhere / "summary.csv")
            assert np.isfinite(rows[["best_accuracy", "final_accuracy", "elapsed_s"]]).all(axis=None)
        else:  # a command that failed must not claim its folder
            assert self.run_command(*SWEEPS[0], *USUAL, "--seeds", "1", out=elsewhere) == (0, [])
        shutil.rmtree(elsewhere, ignore_errors=True)

    @stateful.precondition(lambda self: self.sweep is not None)
    @stateful.rule(option=st.sampled_from([("--policy", "best"), ("--budget", "0.01"), ("--seeds", "0")]))
    def run_bad_options_here(self, option):
        before = self.files()
        code, errors = self.run_command(*self.sweep, *USUAL, "--seeds", str(self.seeds), *option, out=self.out)
        assert (code, len(errors)) == (2, 1)
        assert self.files() == before

    @stateful.precondition(lambda self: self.sweep is not None)
    @stateful.rule(which=st.floats(0, 1, exclude_max=True), end=st.floats(0, 1), whole=st.booleans())
    def damage_a_run(self, which, end, whole):
        kept = sorted((self.out / "runs").glob("*.npz"))
        if kept:
            path = kept[int(which * len(kept))]
            if whole:
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[: int(end * path.stat().st_size)])

    @stateful.precondition(lambda self: self.sweep is not None)
    @stateful.rule(name=st.sampled_from(RESULTS))
    def lose_a_result(self, name):
        (self.out / name).unlink(missing_ok=True)

    @stateful.precondition(lambda self: self.sweep is not None)
    @stateful.rule(text=st.sampled_from(["", "{", "[]", "{}", "null"]))
    def damage_the_settings(self, text):
        path = self.out / "sweep.json"
        path.write_text(text)
        code, errors = self.run_command(*self.sweep, *USUAL, "--seeds", str(self.seeds), out=self.out)
        assert (code, len(errors)) == (2, 1)
        assert "is damaged: delete this file" in errors[0]
        path.unlink()
        self.sweep, self.seeds = None, 0  # the folder takes any sweep again


def test_any_sequence_of_commands(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "load", lambda name: CLOUDS)
    monkeypatch.chdir(tmp_path)
    searching = hypothesis.settings().max_examples > 1000
    settings = hypothesis.settings(max_examples=50 if searching else 2, stateful_step_count=15 if searching else 10)
    stateful.run_state_machine_as_test(Commands, settings=settings)
    print(f"{Commands.count} commands")
