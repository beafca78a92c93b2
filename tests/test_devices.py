import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fcjax import devices


@pytest.fixture
def no_place_for_programs():
    before = jax.config.jax_compilation_cache_dir
    if before:
        pytest.skip("JAX has been told to keep programs, and goes on to do so")
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_each_core_is_a_device_of_its_own():
    cores = devices.for_programs(1000)
    assert len(cores) == len(set(cores)) == devices.num_cores()
    assert len({id(core.client) for core in cores}) == len(cores)
    assert all(core.platform == "cpu" for core in cores)
    assert devices.for_programs(1) == cores[:1]
    assert devices.for_programs(1000) == cores


def test_a_client_of_a_core_has_one_thread(monkeypatch):
    monkeypatch.setenv("NPROC", "7")
    devices._cores.__wrapped__(1)
    assert os.environ["NPROC"] == "7"
    monkeypatch.delenv("NPROC")
    devices._cores.__wrapped__(1)
    assert "NPROC" not in os.environ


def test_without_such_clients_cores_share_the_one_of_jax(monkeypatch):
    from jaxlib import xla_client

    monkeypatch.delattr(xla_client, "make_cpu_client")
    with pytest.warns(RuntimeWarning, match="runs share the threads of one client.*make_cpu_client"):
        assert devices._cores.__wrapped__(3) == (jax.devices()[0],) * 3


def test_one_compilation_serves_all_cores_also_after_it_has_run(no_place_for_programs):
    cores = devices.for_programs(1000)
    x = np.random.default_rng(0).standard_normal((50, 50)).astype(np.float32)
    function = jax.jit(lambda x: jnp.sort(jnp.tanh(x @ x), axis=0))  # XLA cannot copy a sort that has run
    num_lowered = []

    def lower(core):
        num_lowered.append(core)
        return function.lower(jax.device_put(x, core))

    for _ in range(2):
        programs = devices.compile_for(cores, lower)
        for core in cores:
            np.testing.assert_array_equal(programs[core](jax.device_put(x, core)), function(x))
    assert num_lowered == [cores[0]] * 2


def test_a_few_cores_first_and_more_later(no_place_for_programs):
    function = jax.jit(lambda x: jnp.sort(x) + 3)
    num_lowered = []

    def lower(core):
        num_lowered.append(core)
        return function.lower(jax.device_put(np.ones(3, np.float32), core))

    cores = devices.for_programs(1000)
    for core, program in devices.compile_for(cores[:1], lower).items():
        program(jax.device_put(np.ones(3, np.float32), core))
    assert set(devices.compile_for(cores, lower)) == set(cores)
    assert num_lowered == [cores[0]] * 2


def test_a_program_that_calls_back_to_python_is_compiled_for_each_core(no_place_for_programs):
    seen = []

    def function(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return x + 1

    x, cores = np.float32(3), devices.for_programs(1000)
    programs = devices.compile_for(cores, lambda core: jax.jit(function).lower(jax.device_put(x, core)))
    assert [float(programs[core](jax.device_put(x, core))) for core in cores] == [4] * len(cores)
    jax.effects_barrier()
    assert seen == [3] * len(cores)


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, sys
from fcjax import devices
devices.keep_programs(sys.argv[1])
x = np.random.default_rng(0).standard_normal((60, 60)).astype(np.float32)
function = jax.jit(lambda x: jnp.sort(jnp.tanh(x @ x), axis=0))
cores = devices.for_programs(1000)
lowered = []
def lower(core):
    lowered.append(core)
    return function.lower(jax.device_put(x, core))
programs = devices.compile_for(cores, lower)
print([float(np.sum(np.abs(programs[core](jax.device_put(x, core))))) for core in cores], len(lowered), sep="; ")
"""


def test_kept_programs_run_again_on_all_cores_of_a_new_process(tmp_path):
    environment = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    said = [
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.split("; ")
        for _ in range(2)
    ]
    assert said[0][0] == said[1][0]
    assert len(set(eval(said[0][0]))) == 1
    assert int(said[0][1]) == 1, "what is compiled just now is copied from core to core"
    assert int(said[1][1]) == devices.num_cores(), "what was read from disk cannot be"
    (folder,) = (tmp_path / "programs").iterdir()
    assert any("lambda" in path.name for path in folder.iterdir())


def test_a_place_that_jax_has_been_told_stays(tmp_path, no_place_for_programs):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    devices.keep_programs(tmp_path / "other")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    assert not (tmp_path / "other").exists()


def test_where_programs_cannot_be_kept_nothing_happens(tmp_path, no_place_for_programs):
    (tmp_path / "file").touch()
    devices.keep_programs(tmp_path / "file")
    assert jax.config.jax_compilation_cache_dir is None
