"""Tests run with rank promotion forbidden and warnings as errors; those that take `dtype` run in both precisions."""

import hypothesis
import jax
import pytest

from fcjax import devices

jax.config.update("jax_numpy_rank_promotion", "raise")
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=100)
hypothesis.settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def no_programs_on_disk(monkeypatch):
    """Scripts keep programs on disk for the next process; for the next test, they would be there for good."""
    keep = devices.keep_programs
    monkeypatch.setattr(devices, "keep_programs", lambda folder=None: folder and keep(folder))


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
def x64():
    with jax.enable_x64(True):
        yield
