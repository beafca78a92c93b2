import errno
import functools
import itertools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import xarray as xr

import fcjax
from fcjax import data, models, policies
from fcjax.runtime import files
from fcjax.sweeps import archive, executor
from fcjax.sweeps.grid import plan
from fcjax.sweeps.run import run_all

SETTINGS = {
    "dataset": tiny.dataset(),
    "num_devices": tiny.NUM_DEVICES,
    "budget_s": 2.0,
    "preset": tiny.experiment,
    "distribution": "l1",
    "radius_m": 600.0,
    "phi": 0.05,
    "seeds": 3,
}


def jobs(policy=("fc", "pf"), **changes):
    return plan(policy, **{**SETTINGS, **changes})


def fingerprint(job):
    return archive.Fingerprints()(job)


def assert_equal(one, other):
    xr.testing.assert_equal(one, other)
    assert one.attrs["revision"] == other.attrs["revision"]


@pytest.mark.usefixtures("quick_compilation")
def test_a_sweep_that_was_stopped_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    whole = run_all(jobs())
    done = []

    def stops(jobs, **settings):
        done.append(len(jobs))
        yield from itertools.islice(execute(jobs, **settings), 2)
        raise OSError("the power went")

    execute = executor.execute
    monkeypatch.setattr(executor, "execute", stops)
    for _ in range(3):
        with pytest.raises(OSError, match="the power went"):
            run_all(jobs(), keep=tmp_path / "runs")
    assert done == [6, 4, 2]
    monkeypatch.undo()
    again = fcjax.sweep(("fc", "pf"), **SETTINGS, keep=tmp_path / "runs")
    assert again.num_programs == 0  # nothing had to be done
    assert again.complete == 1
    assert_equal(again, whole)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_what_was_kept_is_readable_by_anyone(tmp_path):
    (job,) = jobs("fc", seeds=1)
    run_all([job], keep=tmp_path)
    (path,) = tmp_path.iterdir()
    with np.load(path, allow_pickle=False) as kept:
        assert json.loads(str(kept["labels"])) == job.labels
        assert kept["accuracy"].shape == kept["elapsed_s"].shape


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[: len(b) // 2],
        lambda b: b"",
        lambda b: b[:900] + b"\7" * 9 + b[909:],
        lambda b: b[: (at := b.index(b"PK\1\2") + 10)] + b"\77" + b[at + 1 :],  # a compression that there is not
    ],
)
def test_a_damaged_file_is_done_again(damage, tmp_path):
    whole = run_all(jobs("fc", seeds=1), keep=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match="cannot be read, its run is repeated"):
        again = run_all(jobs("fc", seeds=1), keep=tmp_path)
    assert again.num_programs == 1
    assert_equal(again, whole)


@pytest.mark.usefixtures("quick_compilation")
def test_histories_of_two_lengths_are_done_again(tmp_path):
    run_all(jobs("fc", seeds=1), keep=tmp_path)
    (path,) = tmp_path.iterdir()
    with np.load(path) as kept:
        arrays = dict(kept)
    np.savez(path, **arrays | {"round_s": arrays["round_s"][1:]})
    with pytest.warns(UserWarning, match="its run is repeated: its histories differ in length"):
        assert run_all(jobs("fc", seeds=1), keep=tmp_path).num_programs == 1


def test_what_a_killed_process_left_is_removed_in_time(tmp_path):
    def is_killed(part):
        os.link(part, Path(part).with_name(Path(part).name.replace(".a-", ".left-")))

    files.write_whole(tmp_path / "a.npz", is_killed)
    (left,) = tmp_path.glob(".left-*")
    for path in (tmp_path / ".docker-registry.json", left):  # what others have there is theirs
        path.touch()
        os.utime(path, (0, 0))
    new = left.with_name(left.name.replace(".left-", ".new-"))
    new.touch()
    archive.Archive(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a.npz", ".docker-registry.json", new.name}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("number", [1, 3])
def test_runs_that_call_back_into_python_are_not_kept(number, tmp_path):
    """Their programs are the same, whatever they call."""

    def select(key, state, context):
        one = jax.pure_callback(lambda: np.int32(number), jax.ShapeDtypeStruct((), jnp.int32))
        scheduled = jnp.arange(tiny.NUM_DEVICES) < one
        return state, fcjax.allocate(scheduled, context.observation, context.cell)

    (job,) = jobs({"mine": fcjax.Policy(lambda cell: (), select)}, seeds=1)
    with pytest.warns(UserWarning, match="runs of mine are not kept: they call back into Python"):
        results = run_all([job], keep=tmp_path)
    assert results.scheduled.sum("device").max() == number
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_resuming_has_the_same_bits_where_local_data_are_summed_over(tmp_path):
    """Alone, a run has not the room that it had beside runs with more samples on a device."""
    # A model of its own, whose programs no test has compiled without optimisations: here the last bit counts.
    model = models.mlp((8,), 4, hidden=(), mean=0.2)
    preset = functools.partial(tiny.experiment, estimate_on="local", model=model)
    both = jobs("fc", seeds=1, distribution=["l1", "dir0.3"], preset=preset)
    assert both[0].experiment.data.indices.shape != both[1].experiment.data.indices.shape
    whole = run_all(both)
    run_all(both[1:], keep=tmp_path)
    assert_equal(run_all(both, keep=tmp_path), whole)


def _select_all(key, state, context):
    return state, fcjax.allocate(jnp.ones(tiny.NUM_DEVICES, bool), context.observation, context.cell)


def _select_two(key, state, context):
    return state, fcjax.allocate(jnp.arange(tiny.NUM_DEVICES) < 2, context.observation, context.cell)


@pytest.mark.slow
def test_whatever_changes_a_run_changes_its_fingerprint():
    other_images = data.synthetic.classification(900, 200, num_features=8, num_labels=4, spread=0.6, seed=2)
    variants = [
        jobs(),
        jobs("fc", phi=[0.06, 0.5]),
        jobs(["fixed-2", "fixed-3", "exact", "centralized"]),
        jobs(distribution="iid"),
        jobs(radius_m=601.0),
        jobs(budget_s=2.5),
        jobs(num_devices=5),
        jobs(dataset=other_images),
        jobs(preset=functools.partial(tiny.experiment, observation_error=0.1)),
        jobs(preset=functools.partial(tiny.experiment, estimate_on="local")),
        jobs(preset=functools.partial(tiny.experiment, model=models.mlp((8,), 4, hidden=(), mean=0.25))),
        jobs({"mine": fcjax.Policy(lambda cell: (), _select_all)}),
        jobs({"mine": fcjax.Policy(lambda cell: (), _select_two)}),
    ]
    found = [fingerprint(job) for variant in variants for job in variant]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),
        lambda: jax.default_prng_impl("rbg"),
        lambda: jax.default_matmul_precision("highest"),
    ],
)
def test_settings_of_jax_change_it(setting):
    (job,) = jobs("fc", seeds=1)
    usual = fingerprint(job)
    with setting():
        assert fingerprint(job) != usual
    assert fingerprint(job) == usual


def test_flags_of_xla_change_it(monkeypatch):
    (job,) = jobs("fc", seeds=1)
    usual = fingerprint(job)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    assert fingerprint(job) == usual
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true --xla_force_host_platform_device_count=2")
    assert fingerprint(job) != usual


def test_a_name_does_not_change_it():
    assert [fingerprint(job) for job in jobs({"mine": policies.fast_converge(0.05)})] == [
        fingerprint(job) for job in jobs("fc")
    ]


def test_precision_changes_it(x64):
    (job,) = jobs("fc", seeds=1)
    double = fingerprint(job)
    with jax.enable_x64(False):
        assert fingerprint(job) != double


@pytest.mark.slow
def test_another_process_has_the_same():
    script = "import test_archive as t; print(*(t.fingerprint(job) for job in t.jobs(['fc', 'as-l'], seeds=1)))"
    places = os.pathsep.join(map(os.path.dirname, (__file__, tiny.__file__)))
    printed = subprocess.check_output(  # with hashes of its own
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": places}, text=True
    )
    assert printed.split() == [fingerprint(job) for job in jobs(["fc", "as-l"], seeds=1)]


@pytest.mark.usefixtures("quick_compilation")
def test_a_disk_that_is_full(tmp_path, monkeypatch):
    """The first two runs find room."""
    calls = itertools.count()
    savez = np.savez

    def full(part, **arrays):
        if next(calls) > 1:
            Path(part).write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        savez(part, **arrays)

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(
        OSError, match=f"a run cannot be kept as {tmp_path}/.*npz: No space left on device; earlier runs are kept"
    ):
        run_all(jobs(), keep=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.undo()
    assert run_all(jobs(), keep=tmp_path).kept == 2


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"runs cannot be kept in .*file/runs: Not a directory"):
        run_all(jobs(), keep=tmp_path / "file" / "runs")


@pytest.mark.usefixtures("quick_compilation")
def test_whatever_bit_is_flipped_is_noticed_or_does_not_matter(tmp_path):
    (job,) = jobs("fc", seeds=1)
    run_all([job], keep=tmp_path)
    kept = archive.Archive(tmp_path)
    whole = kept.load(job)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    noticed = 0
    for position in rng.choice(len(content), 400, replace=False):
        damaged = bytearray(content)
        damaged[position] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read = kept.load(job)
        noticed += read is None
        if read is not None:
            pairs = zip(jax.tree.leaves(read.history), jax.tree.leaves(whole.history), strict=True)
            assert all(np.array_equal(one, other, equal_nan=one.dtype.kind == "f") for one, other in pairs)
            assert (read.start.loss, read.stop) == (whole.start.loss, whole.stop)
    assert noticed > 100


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_a_file_in_the_place_of_another_is_noticed(tmp_path):
    whole = run_all(jobs("pf"), keep=tmp_path)
    first, second, third = sorted(tmp_path.iterdir())
    first.write_bytes(second.read_bytes())
    third.unlink()
    os.mkfifo(third)
    with pytest.warns(UserWarning, match=f"{first.name} cannot be read, its run is repeated: it holds another run"):
        again = run_all(jobs("pf"), keep=tmp_path)
    assert again.kept == 1
    assert_equal(again, whole)
    assert third.is_file()
    third.unlink()
    third.mkdir()
    with pytest.raises(OSError, match=f"a run cannot be kept as .*{third.name}: Is a directory; earlier runs are kept"):
        run_all(jobs("pf"), keep=tmp_path)
