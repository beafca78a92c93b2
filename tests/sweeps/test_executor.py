"""Sweeps on Dask workers match those of one process bit by bit, whatever happens to the workers."""

import dataclasses
import functools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import tiny
from distributed import Client

import fcjax
from fcjax import data, models
from fcjax.runtime import cluster
from fcjax.sweeps import executor
from fcjax.sweeps.grid import plan
from fcjax.sweeps.jobs import Job

pytestmark = pytest.mark.slow
MODEL = models.mlp((8,), 4, hidden=(), mean=0.3)
PRESET = functools.partial(tiny.experiment, model=MODEL)
SETTINGS = {"dataset": tiny.dataset(), "num_devices": tiny.NUM_DEVICES, "preset": PRESET, "seeds": 6}
POLICIES = {"fc": fcjax.policies.fast_converge(), "loud": tiny.loud(0.3)}


def assert_same(one, other):
    for name in one.data_vars:
        np.testing.assert_array_equal(one[name].values, other[name].values, err_msg=name)


@pytest.fixture(scope="module")
def alone():
    """The sweep in the current process."""
    return fcjax.sweep(POLICIES, **SETTINGS, workers=1)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of processes that share compiled programs only with each other."""
    shared = tmp_path_factory.mktemp("programs")
    return os.environ | {"JAX_COMPILATION_CACHE_DIR": str(shared), "PYTHONSAFEPATH": "1"}


@pytest.fixture
def scheduler(environment, tmp_path):
    """Starts a scheduler as a user does. Yields its process and its scheduler file."""
    file = tmp_path / "scheduler.json"
    command = ["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
    process = subprocess.Popen([sys.executable, "-m", "dask", *command], env=environment, stderr=subprocess.DEVNULL)
    wait_for(file.exists)
    yield process, file
    process.kill()
    process.wait()


@pytest.fixture
def start_worker(environment, scheduler):
    """Returns a function that starts a worker of the scheduler, as a user does."""
    started = []

    def start(*options):
        command = [
            "worker",
            "--scheduler-file",
            str(scheduler[1]),
            "--host",
            "127.0.0.1",
            "--no-dashboard",
            "--no-nanny",
        ]
        command += options or ("--nthreads", "1")
        process = subprocess.Popen([sys.executable, "-m", "dask", *command], env=environment, stderr=subprocess.DEVNULL)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def test_two_workers_match_one_process(alone):
    """Workers cannot import the policy or the preset, and the data set exists only in memory."""
    assert_same(fcjax.sweep(POLICIES, **SETTINGS, workers=2), alone)


def test_workers_use_the_callers_jax_settings(x64):
    found = fcjax.sweep("fc", **SETTINGS | {"seeds": 2}, workers=2)
    assert found.loss.dtype == np.float64
    assert_same(found, fcjax.sweep("fc", **SETTINGS | {"seeds": 2}, workers=1))


def test_user_cluster(alone, scheduler, start_worker):
    for _ in range(2):
        start_worker()
    with Client(scheduler_file=scheduler[1]) as client:
        assert_same(fcjax.sweep(POLICIES, **SETTINGS, client=client), alone)
        assert client.status == "running"  # the user's client stays open


def test_sweep_survives_a_dead_worker(scheduler, start_worker, tmp_path):
    """One of two workers is killed, and a third joins."""
    doomed, _ = start_worker(), start_worker()
    settings = SETTINGS | {"seeds": 30, "budget_s": 60.0}
    with Client(scheduler_file=scheduler[1]) as client:
        client.wait_for_workers(2, timeout=60)

        def change_workers():
            wait_for(lambda: len(list(tmp_path.glob("[!.]*.npz"))) > 3)
            doomed.kill()
            start_worker()

        thread = threading.Thread(target=change_workers)
        thread.start()
        swept = fcjax.sweep("fc", **settings, client=client, keep=tmp_path)
        thread.join()
    assert swept.sizes["run"] == 30
    assert_same(swept, fcjax.sweep("fc", **settings, workers=1))


def test_dead_scheduler_error_says_how_to_resume(scheduler, start_worker, tmp_path, monkeypatch):
    monkeypatch.setattr(executor, "_LOST_S", 5.0)
    start_worker()
    settings = SETTINGS | {"seeds": 200, "budget_s": 60.0}
    with Client(scheduler_file=scheduler[1]) as client:
        threading.Timer(8.0, scheduler[0].send_signal, [signal.SIGKILL]).start()
        with pytest.raises(RuntimeError, match=r"the connection to the scheduler at tcp://.* is lost: .* to resume"):
            fcjax.sweep("fc", **settings, client=client, keep=tmp_path / "runs")


def test_sweep_without_workers_warns_and_waits(alone, scheduler, start_worker, monkeypatch):
    monkeypatch.setattr(cluster, "_START_S", 0.5)
    with Client(scheduler_file=scheduler[1]) as client:
        late = threading.Timer(2.0, start_worker)
        late.start()
        with pytest.warns(UserWarning, match=r"no worker has joined the scheduler at .*: waiting.*dask worker"):
            assert_same(fcjax.sweep(POLICIES, **SETTINGS, client=client), alone)
        late.join()


def test_worker_caches_depend_on_jax_settings(scheduler, start_worker):
    """Two sweeps on the same worker differ only in a JAX setting."""
    start_worker()
    settings = SETTINGS | {"seeds": 2}
    with Client(scheduler_file=scheduler[1]) as client:
        first = fcjax.sweep("fc", **settings, client=client)
        with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
            second = fcjax.sweep("fc", **settings, client=client)
            assert_same(second, fcjax.sweep("fc", **settings, workers=1))
    assert not np.array_equal(first.gain, second.gain, equal_nan=True)


def test_incompatible_workers_are_refused(scheduler, start_worker, monkeypatch):
    start_worker("--nthreads", "2")
    with Client(scheduler_file=scheduler[1]) as client:
        with pytest.raises(RuntimeError, match="has 2 threads, but a run uses one: start workers with --nworkers auto"):
            cluster.check_workers(client)
        monkeypatch.setattr(cluster, "versions", lambda: cluster.Versions("0" * 12, jax.__version__, "0.1"))
        with pytest.raises(
            RuntimeError, match=r"has fcjax \w{12} instead of 0{12}, jaxlib .* instead of 0\.1: install"
        ):
            cluster.check_workers(client)


def test_local_cluster_listens_only_on_loopback():
    with cluster.local_client(2) as client:
        client.wait_for_workers(2, timeout=60)
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        listening = [c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == "LISTEN"]
        assert listening
        assert set(listening) == {"127.0.0.1"}


def test_worker_error_reaches_the_caller():
    here = os.getpid()

    def select(key, state, context):
        if os.getpid() != here:
            raise ZeroDivisionError("of a policy")
        return state, fcjax.allocate(context.observation.gain > 0, context.observation, context.cell)

    jobs = plan("fc", distribution="l1", radius_m=600.0, phi=0.05, budget_s=6.0, **SETTINGS | {"seeds": 2})
    broken = [Job(job.labels, fcjax.Policy(lambda cell: (), select), job.make) for job in jobs]
    with pytest.raises(ZeroDivisionError, match="of a policy"), cluster.local_client(2) as client:
        list(executor.execute(broken, client=client))


def _only_in(process, make):
    if os.getpid() != process:
        raise OSError("the data are not here")
    return make


class OnlyHere:
    """Makes an experiment only in the process that created it, as if other machines lacked the data set."""

    def __init__(self, make):
        self.make = make

    def __call__(self):
        return self.make()

    def __reduce__(self):
        return _only_in, (os.getpid(), self.make)


def test_outdated_late_worker_is_closed(alone, scheduler, start_worker, monkeypatch):
    def report_old_version():
        """Makes a worker report an old version."""
        from fcjax.runtime import cluster
        from fcjax.sweeps import executor

        now = executor.versions()
        executor.versions = lambda: cluster.Versions("old", now.jax, now.jaxlib)

    start_worker()
    with Client(scheduler_file=scheduler[1]) as client:
        client.wait_for_workers(1, timeout=60)
        bad = next(iter(client.scheduler_info()["workers"]))
        client.run(report_old_version, workers=[bad])
        monkeypatch.setattr(executor, "check_workers", lambda client: start_worker() and client.wait_for_workers(2))
        with pytest.warns(UserWarning, match=r"worker tcp://.* has fcjax old instead of .*; it was closed, and"):
            assert_same(fcjax.sweep(POLICIES, **SETTINGS, client=client), alone)
        assert bad not in client.scheduler_info()["workers"]


def test_error_names_worker_without_data():
    settings = SETTINGS | {"seeds": 2}
    jobs = plan("fc", distribution="l1", radius_m=600.0, phi=0.05, budget_s=6.0, **settings)
    stuck = [dataclasses.replace(job, make=OnlyHere(job.make)) for job in jobs]
    with (
        pytest.raises(RuntimeError, match=r"worker tcp://127.0.0.1:\d+ cannot prepare its runs: the data are not here"),
        cluster.local_client(1) as client,
    ):
        list(executor.execute(stuck, client=client))


def test_error_names_runs_that_cannot_be_sent():
    lock = threading.Lock()

    def select(key, state, context):
        with lock:
            return state, fcjax.allocate(context.observation.gain > 0, context.observation, context.cell)

    stuck = fcjax.Policy(lambda cell: jnp.zeros(()), select)
    with pytest.raises(ValueError, match=r"the runs of stuck cannot be sent to other processes.*use workers=1"):
        fcjax.sweep({"stuck": stuck}, **SETTINGS | {"seeds": 2}, workers=2)


def test_loaded_data_set_is_sent_by_name(tmp_path):
    loaded = data.Dataset("mnist", *[np.zeros((500, 2)), np.zeros(500, int)] * 2, ("a",), "here")
    data.dataset.LOADED[loaded] = data._load_once, ("mnist", str(tmp_path))
    assert len(cloudpickle.dumps(loaded)) < 200 + len(str(tmp_path))
    changed = dataclasses.replace(loaded, train_x=loaded.train_x + 1)  # no name identifies this data set
    np.testing.assert_array_equal(pickle.loads(cloudpickle.dumps(changed)).train_x, changed.train_x)
    made = tiny.dataset()
    again = pickle.loads(cloudpickle.dumps(made))
    np.testing.assert_array_equal(again.train_x, made.train_x)


SCRIPT = """
import sys
import jax.numpy as jnp
import fcjax, tiny
def select(key, state, context):
    return state, fcjax.allocate(context.observation.gain > 0, context.observation, context.cell)
everybody = fcjax.Policy(lambda cell: jnp.zeros(()), select)
settings = dict(dataset=tiny.dataset(), preset=tiny.experiment, num_devices=6, seeds=3, workers=2)
found = fcjax.sweep({"mine": everybody}, **settings)
print("runs", found.sizes["run"])
"""


def test_script_without_main_guard(tmp_path):
    """The script runs in a folder with files named like libraries."""
    for name in ("dask", "cloudpickle", "numexpr", "jax_plugins"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported unasked')")
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.path.dirname(tiny.__file__)}
    command = [sys.executable, folder / "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "runs 3\n"


def test_sweep_in_a_notebook():
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    code = f"import sys; sys.path.append({os.path.dirname(tiny.__file__)!r})\n{SCRIPT}"
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()
    assert any("runs 3" in output.get("text", "") for output in book.cells[0].outputs)
