import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fcjax import devices, programs


@pytest.fixture
def no_place_for_programs():
    before = jax.config.jax_compilation_cache_dir
    if before:
        pytest.skip("JAX has been told to keep programs, and goes on to do so")
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_one_compilation_serves_all_cores_also_after_it_has_run(no_place_for_programs):
    cores = devices.for_programs(1000)
    x = np.random.default_rng(0).standard_normal((50, 50)).astype(np.float32)
    function = jax.jit(lambda x: jnp.sort(jnp.tanh(x @ x), axis=0))  # XLA cannot copy a sort that has run
    num_lowered = []

    def lower(core):
        num_lowered.append(core)
        return function.lower(jax.device_put(x, core))

    for _ in range(2):
        compiled = programs.compile_for(cores, lower)
        for core in cores:
            np.testing.assert_array_equal(compiled[core](jax.device_put(x, core)), function(x))
    assert num_lowered == [cores[0]] * 2


def test_a_few_cores_first_and_more_later(no_place_for_programs):
    function = jax.jit(lambda x: jnp.sort(x) + 3)
    num_lowered = []

    def lower(core):
        num_lowered.append(core)
        return function.lower(jax.device_put(np.ones(3, np.float32), core))

    cores = devices.for_programs(1000)
    for core, program in programs.compile_for(cores[:1], lower).items():
        program(jax.device_put(np.ones(3, np.float32), core))
    assert set(programs.compile_for(cores, lower)) == set(cores)
    assert num_lowered == [cores[0]] * 2


def test_a_program_that_calls_back_to_python_is_compiled_for_each_core(no_place_for_programs):
    seen = []

    def function(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return x + 1

    x, cores = np.float32(3), devices.for_programs(1000)
    compiled = programs.compile_for(cores, lambda core: jax.jit(function).lower(jax.device_put(x, core)))
    assert [float(compiled[core](jax.device_put(x, core))) for core in cores] == [4] * len(cores)
    jax.effects_barrier()
    assert seen == [3] * len(cores)


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, sys
from fcjax import devices, programs
programs.keep_on_disk(sys.argv[1])
x = np.random.default_rng(0).standard_normal((60, 60)).astype(np.float32)
function = jax.jit(lambda x: jnp.sort(jnp.tanh(x @ x), axis=0))
cores = devices.for_programs(1000)
lowered = []
def lower(core):
    lowered.append(core)
    return function.lower(jax.device_put(x, core))
compiled = programs.compile_for(cores, lower)
print([float(np.sum(np.abs(compiled[core](jax.device_put(x, core))))) for core in cores], len(lowered), sep="; ")
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
    programs.keep_on_disk(tmp_path / "other")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    assert not (tmp_path / "other").exists()


def test_where_programs_cannot_be_kept_nothing_happens(tmp_path, no_place_for_programs):
    (tmp_path / "file").touch()
    programs.keep_on_disk(tmp_path / "file")
    assert jax.config.jax_compilation_cache_dir is None


@pytest.fixture
def few_maps(monkeypatch):
    """A process that may take so many maps of memory, of which a copy of a program takes ten."""
    free, taken = 25, []
    load = programs._load
    monkeypatch.setattr(programs, "_load", lambda *args: taken.append(10) or load(*args))
    monkeypatch.setattr(programs, "_free_maps", lambda: free - sum(taken))
    return taken


def test_cores_that_there_are_no_maps_of_memory_for_take_no_part(few_maps, no_place_for_programs):
    cores = devices._cores.__wrapped__(5)
    function = jax.jit(lambda x: jnp.sort(x) + 4)
    x = np.ones(3, np.float32)
    warning = r"3 of 5 cores take part: on each, a program takes 10 of the \d+ maps .* several processes together"
    with pytest.warns(RuntimeWarning, match=warning):
        compiled = programs.compile_for(cores, lambda core: function.lower(jax.device_put(x, core)))
    assert list(compiled) == list(cores[:3])
    assert len(few_maps) == 2
    for core in compiled:
        np.testing.assert_array_equal(compiled[core](jax.device_put(x, core)), x + 4)


def test_other_programs_make_room(few_maps, no_place_for_programs, monkeypatch):
    """They let go of their maps of memory."""
    (core,) = devices._cores.__wrapped__(1)
    lower = lambda number: jax.jit(lambda x: x * number).lower(jax.device_put(np.ones(2), core))  # noqa: E731
    programs.compile_for([core], lambda _: lower(2))
    assert programs._programs
    few_maps.append(30)
    monkeypatch.setattr(jax, "clear_caches", few_maps.clear)
    programs.compile_for([core], lambda _: lower(3))
    assert len(programs._programs) == 1
    few_maps.append(30)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    with pytest.raises(RuntimeError, match=r"nearly all of the \d+ maps of memory .* start a new process"):
        programs.compile_for([core], lambda _: lower(4))


def test_maps_of_memory_are_counted_and_given_back():
    free = programs._free_maps()
    assert 0 < free < programs._most_maps()
    (core,) = devices._cores.__wrapped__(1)
    x = jax.device_put(np.ones((9, 9), np.float32), core)
    programs.compile_for([core], lambda _: jax.jit(lambda x: jnp.sort(jnp.tanh(x @ x), axis=0)).lower(x))
    taken = programs._free_maps()
    assert taken < free
    programs._make_room(programs._most_maps())
    assert programs._free_maps() > taken
