"""Tests forbid rank promotion and treat warnings as errors. Tests that take `dtype` run in both precisions."""

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
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=20)
hypothesis.settings.register_profile("search", deadline=None, max_examples=3500)
hypothesis.settings.load_profile("fixed")


@pytest.fixture(scope="session", autouse=True)
def separate_compilation_cache(pytestconfig):
    """Keeps compiled programs apart from the user's, for all processes of this and later test runs."""
    folder = pytestconfig.cache.mkdir("programs") / programs.processor()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)  # for the processes that tests start
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture(autouse=True)
def preserve_user_cache(monkeypatch):
    """Keeps scripts that run in this process from writing to the user's compilation cache."""
    keep = programs.keep_on_disk

    @functools.wraps(keep)
    def keep_in_given_folder(folder=None):
        return folder and keep(folder)

    monkeypatch.setattr(programs, "keep_on_disk", keep_in_given_folder)


@pytest.fixture(scope="session", autouse=True)
def single_process_sweeps():
    """Keeps sweeps in this process unless a test sets the number of workers."""
    executor.num_cores, before = (lambda: 1), executor.num_cores
    yield
    executor.num_cores = before


@pytest.fixture(scope="module", autouse=True)
def clear_jax_caches():
    """A compiled program takes about 1000 memory maps, and Linux allows 65,530 per process."""
    yield
    jax.clear_caches()


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    """A float type, with JAX in the mode where it is the default."""
    with jax.enable_x64(request.param == "float64"):
        yield jax.numpy.dtype(request.param)


@pytest.fixture
def quick_compilation():
    """Compiles without XLA's optimisations, for slow-compiling tests of logic that do not depend on rounding."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def sigint():
    """Enables Ctrl-C, which is ignored if the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def start():
    """Returns a function that runs Python code in a new process."""
    folder = Path(__file__).parents[1]
    folders = ("", "tests/support", "tests/paper", "tests/sweeps", "experiments/paper")
    paths = os.pathsep.join(str(folder / name) for name in folders)

    def start(code, *arguments, cores=1):
        environment = os.environ | {
            "PYTHONPATH": paths,
            "JAX_NUM_CPU_DEVICES": str(cores),
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
