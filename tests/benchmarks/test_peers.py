"""The comparison with other simulators: how rounds are counted, and the table."""

import subprocess
import sys

import pandas as pd
import peers
import pytest

WAITS = """
import json, sys, time
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps({"started": time.monotonic(), "seed": int(sys.argv[-1])}))
"""


def test_rounds_are_counted_while_all_processes_are_timed():
    steady = [[10.0 + i / 2 for i in range(21)], [11.0 + i / 4 for i in range(21)]]  # 2 and 4 rounds/s, 11 s to 16 s
    assert peers.speed(steady) == pytest.approx(6)
    slower_later = [[0.0, 1.0, 2.0, 6.0], [0.0, 4.0]]  # 2.5 and 1 rounds in 4 s
    assert peers.speed(slower_later) == pytest.approx(3.5 / 4)
    assert peers.speed([[5.0, 6.0, 9.0]]) == pytest.approx(2 / 4)


def test_processes_that_do_not_overlap_are_an_error():
    with pytest.raises(ValueError, match="do not overlap"):
        peers.speed([[0.0, 1.0], [2.0, 3.0]])


def test_processes_start_together_with_seeds_of_their_own():
    late = "import sys, time; time.sleep(int(sys.argv[-1]))" + WAITS
    lines = peers.together([sys.executable, "-c", late], [None, None], timeout=60)
    assert [line["seed"] for line in lines] == [0, 1]
    assert abs(lines[0]["started"] - lines[1]["started"]) < 0.5


def test_process_that_fails_is_reported():
    with pytest.raises(subprocess.CalledProcessError) as caught:
        peers.together([sys.executable, "-c", "raise SystemExit('no memory')"], [None], timeout=60)
    assert peers.reason(caught.value) == "no memory"


def test_process_that_takes_too_long_is_killed():
    with pytest.raises(TimeoutError, match="--timeout"):
        peers.together([sys.executable, "-c", "import time; time.sleep(60)"], [None], timeout=0.2)


def test_table_compares_the_better_way_and_names_failures(tmp_path, capsys):
    def line(who, way, rounds_per_s):
        case = {"model": "cnn", "n": 6, "who": who, "way": way, "repetition": 0}
        return case | {"rounds_per_s": rounds_per_s, "versions": {}, "scheduled": 6, "accuracy": 0.9}

    lines = [line("fcjax", "sweep", speed) for speed in (7.0, 8.0, 100.0)] + [line("fcjax", "one run", 5.0)]
    lines += [line("PyTorch loop", "sweep", 4.0), line("PyTorch loop", "one run", 16.0)]
    lines.append({"model": "cnn", "n": 6, "who": "Flower", "way": "one run", "repetition": 0, "fault": "no Ray"})
    peers.write(lines, tmp_path)
    table = pd.read_csv(tmp_path / "peers.csv").set_index("who")
    assert table.loc["fcjax", ["sweep, least", "sweep", "sweep, most", "best"]].tolist() == [7, 8, 100, 8]
    assert table.loc["PyTorch loop", ["best", "fcjax / best", "fcjax / sweep"]].tolist() == [16, 0.5, 2]
    assert (tmp_path / "peers_faults.txt").read_text() == "cnn, n = 6, Flower, one run: no Ray\n"
    assert "cnn, 6 of 20: fcjax's sweep does 2.00 times the rounds/s of PyTorch's" in capsys.readouterr().out
    assert (tmp_path / "peers.png").stat().st_size
