"""Tests run with rank promotion forbidden and warnings as errors; those that take `dtype` run in both precisions."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import hypothesis
import jax
import pytest

from fcjax import programs
from fcjax.sweeps import executor

jax.config.update("jax_numpy_rank_promotion", "raise")
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=100)
hypothesis.settings.register_profile("search", deadline=None, max_examples=5000)
hypothesis.settings.load_profile("fixed")


@pytest.fixture(scope="session", autouse=True)
def own_programs(tmp_path_factory):
    """Compiled programs are kept apart from the user's, and shared by all processes of a test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "programs"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)  # for the processes that tests start
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True)
def no_programs_on_disk(monkeypatch):
    """Tests that call scripts in this process leave no programs in the user's cache."""
    keep = programs.keep_on_disk

    @functools.wraps(keep)
    def keep_elsewhere(folder=None):
        return folder and keep(folder)

    monkeypatch.setattr(programs, "keep_on_disk", keep_elsewhere)


@pytest.fixture(scope="session", autouse=True)
def in_this_process():
    """Sweeps start no other processes, unless a test says how many."""
    executor.num_cores, before = (lambda: 1), executor.num_cores
    yield
    executor.num_cores = before


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Each takes some 1000 maps of memory, of which a process of Linux may have 65,530."""
    yield
    jax.clear_caches()


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    """A float type, with JAX in the mode in which it is the default."""
    with jax.enable_x64(request.param == "float64"):
        yield jax.numpy.dtype(request.param)


@pytest.fixture
def quick_compilation():
    """Compiles without XLA's optimisations: for tests of logic, not of rounding, most of whose time is compilation."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def sigint():
    """Ctrl-C works, also where the tests run in the background, and it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """Starts code of Python in a process of its own; all that are started, by any test, share compiled programs."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "programs"
    folder = Path(__file__).parents[1]
    places = ("", "tests/support", "tests/paper", "tests/sweeps", "experiments/paper")
    paths = os.pathsep.join(str(folder / place) for place in places)

    def start(code, *arguments, devices=1):
        environment = os.environ | {
            "PYTHONPATH": paths,
            "JAX_COMPILATION_CACHE_DIR": str(shared),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start
