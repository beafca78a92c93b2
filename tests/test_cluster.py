"""Sweeps that several processes do together, and what is left of those that are ended from outside."""

import re
import signal
import socket
import time

import numpy as np
import pytest
import sweep as sweep_script

from fcjax import results

SWEEP = """
import os, sys
import jax
from fcjax import processes
keep, index, count, port, budget_s = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
if count > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index, cluster_detection_method="deactivate")
import fcjax, tiny
processes._BEAT_S, processes._SILENT_S = 0.2, 4.0
settings = dict(dataset=tiny.dataset(), preset=tiny.experiment, num_devices=6, seeds=7, budget_s=budget_s)
try:
    swept = fcjax.sweep(("fc", "pf"), **settings, keep=keep, workers=1 if count == 1 else None)
except RuntimeError as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(1)  # without JAX's own shutdown, which would wait for the others
fcjax.results.save(swept, f"{keep}/of-{index}.nc")
print("all", swept.sizes["run"])
"""

# The script on a data set that needs no download.
SCRIPT = """
import sys
import console
console.watch()
from fcjax import data
clouds = data.synthetic.classification(4000, 300, num_features=8, num_labels=10, spread=0.5)
data.load = lambda name: clouds
import sweep
console.leave(console.run(lambda: sweep.main(sys.argv[1:])))
"""


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def wait_for(condition, process):
    for _ in range(600):
        if condition() or process.poll() is not None:
            break
        time.sleep(0.1)
    assert condition(), process.communicate()


def test_two_processes_of_two_devices_give_the_bits_of_one_of_one(start, tmp_path):
    port = free_port()

    def succeed(*processes):
        for process in processes:
            printed = process.communicate(timeout=300)
            assert process.returncode == 0, printed
            assert printed[0] == "all 14\n"

    succeed(start(SWEEP, tmp_path / "one", 0, 1, port, 3.0))  # compiles, for all
    succeed(*[start(SWEEP, tmp_path / "two", index, 2, port, 3.0, devices=2) for index in range(2)])
    one = results.load(tmp_path / "one" / "of-0.nc")
    for index in range(2):
        two = results.load(tmp_path / "two" / f"of-{index}.nc")
        for name in one.variables:
            np.testing.assert_array_equal(one[name].values, two[name].values)
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").glob("*.npz")}
    assert len(files) == 14
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "two").glob("*.npz")}


def test_when_one_of_two_is_killed_the_other_ends_and_a_restart_completes(start, tmp_path):
    port = free_port()
    survivor, victim = (start(SWEEP, tmp_path, index, 2, port, 60.0) for index in range(2))
    wait_for(lambda: len(list(tmp_path.glob("[!.]*.npz"))) >= 2, victim)
    victim.kill()
    victim.communicate()
    killed_at = time.monotonic()
    _, errors = survivor.communicate(timeout=60)
    assert time.monotonic() - killed_at < 60
    assert survivor.returncode == 1
    message = r"process 1 of 2 gave no sign of life for \d+ s: it has ended. Finished runs are kept in "
    assert re.search(message + str(tmp_path), errors), errors
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("[!.]*.npz")}
    assert 2 <= len(kept) < 14
    port = free_port()
    for process in [start(SWEEP, tmp_path, index, 2, port, 60.0) for index in range(2)]:
        assert process.communicate(timeout=300)[0] == "all 14\n"
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("[!.]*.npz")}
    assert len(after) == 14
    assert kept.items() <= after.items(), "no run is done twice"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_script_that_is_ended_from_outside(start, number, tmp_path):
    arguments = ["--policy", "pf", "--seeds", 60, "--budget", 200, "--out", tmp_path]
    process = start(SCRIPT, *arguments)
    runs = tmp_path / "runs"
    wait_for(lambda: len(list(runs.glob("[!.]*.npz"))) >= 2, process)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=60)
    num_kept = len(list(runs.glob("[!.]*.npz")))
    assert 2 <= num_kept < 60
    assert "Traceback" not in errors
    assert f"kept in {runs}, and the same c" in errors
    if number == signal.SIGTERM:
        assert process.returncode == 130
        assert f"interrupted: {num_kept} of 60 runs had finished" in errors
        assert f"{num_kept} runs in" in printed
    else:
        assert process.returncode == -signal.SIGKILL
        assert "error: this process was killed" in errors


def test_the_script_in_two_processes(start, tmp_path):
    arguments = ["--policy", "pf", "--seeds", 5, "--budget", 4]
    alone = start(SCRIPT, *arguments, "--out", tmp_path / "one")
    alone.wait(300)  # it compiles, for all
    cluster = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", 2, "--workers", 1]
    both = [start(SCRIPT, *arguments, *cluster, "--process", i, "--out", tmp_path / "two") for i in range(2)]
    printed = []
    for process in (alone, *both):
        printed.append(process.communicate(timeout=300))
        assert process.returncode == 0, printed[-1]
    assert "5 runs in" in printed[1][0]
    assert printed[2][0] == "process 1: all 5 runs are there; process 0 tells the results\n"
    assert (tmp_path / "one" / "summary.csv").read_bytes() == (tmp_path / "two" / "summary.csv").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--coordinator", "here"], "--coordinator must be HOST:PORT, with a port from 1 to 65535, got 'here'"),
        (["--coordinator", "here:65536"], "--coordinator must be HOST:PORT, with a port from 1 to 65535, got 'here:65"),
        (["--coordinator", ":1"], "--coordinator must be HOST:PORT, with a port from 1 to 65535, got ':1'"),
        (["--processes", 0], "--processes must be 1 or more, got 0"),
        (["--processes", 2, "--process", -1], "--process must be 0 or more, got -1"),
        (["--processes", 2, "--process", 2], "--process must be less than --processes 2, got 2"),
    ],
)
def test_a_cluster_that_cannot_be(arguments, message, tmp_path, capsys):
    assert sweep_script.main([*map(str, arguments), "--out", str(tmp_path)]) == 2
    assert f"error: {message}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_cluster_that_is_not_there(start, tmp_path):
    process = start(SCRIPT, "--distributed", "--processes", 2, "--out", tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.startswith("error: no cluster was found")
    assert not list(tmp_path.iterdir())


def test_a_port_that_is_taken(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = ["--coordinator", address, "--processes", "2", "--process", "0", "--out", str(tmp_path)]
        assert sweep_script.main(arguments) == 2
    assert "of this machine cannot be had: Address already in use; choose another" in capsys.readouterr().err


def test_one_that_waits_for_others_can_be_ended(start, tmp_path):
    """JAX by itself would wait for five minutes, deaf to signals, and then crash."""
    process = start(
        SCRIPT, "--coordinator", f"127.0.0.1:{free_port()}", "--processes", 2, "--process", 1, "--out", tmp_path
    )
    told = process.stderr.readline()
    assert told == "waiting up to 300 s for the other processes\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "interrupted; no run had finished\n"


def test_others_that_do_not_come(start, tmp_path):
    code = SCRIPT.replace("import sweep", "import sweep, cluster; cluster._JOIN_S = 1")
    process = start(
        code, "--coordinator", f"127.0.0.1:{free_port()}", "--processes", 2, "--process", 0, "--out", tmp_path
    )
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.splitlines()[-1].startswith("error: not all processes have joined within 1 s: start all of them")
