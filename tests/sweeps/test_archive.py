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


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_resumed_sweep_runs_only_missing_jobs(tmp_path, monkeypatch):
    whole = run_all(jobs())
    done = []

    def stop_after_two(jobs, **settings):
        done.append(len(jobs))
        yield from itertools.islice(execute(jobs, **settings), 2)
        raise OSError("the power went")

    execute = executor.execute
    monkeypatch.setattr(executor, "execute", stop_after_two)
    for _ in range(3):
        with pytest.raises(OSError, match="the power went"):
            run_all(jobs(), keep=tmp_path / "runs")
    assert done == [6, 4, 2]
    monkeypatch.undo()
    again = fcjax.sweep(("fc", "pf"), **SETTINGS, keep=tmp_path / "runs")
    assert again.num_programs == 0  # nothing was left to run
    assert again.complete == 1
    assert_equal(again, whole)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_kept_runs_are_plain_npz_files(tmp_path):
    (job,) = jobs("fc", seeds=1)
    run_all([job], keep=tmp_path)
    (path,) = tmp_path.iterdir()
    with np.load(path, allow_pickle=False) as kept:
        assert json.loads(str(kept["labels"])) == job.labels
        assert kept["accuracy"].shape == kept["elapsed_s"].shape


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[: len(b) // 2],
        lambda b: b"",
        lambda b: b[:900] + b"\7" * 9 + b[909:],
        lambda b: b[: (at := b.index(b"PK\1\2") + 10)] + b"\77" + b[at + 1 :],  # an unknown compression method
    ],
)
def test_run_with_damaged_file_is_repeated(damage, tmp_path):
    whole = run_all(jobs("fc", seeds=1), keep=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match="cannot be read, its run is repeated"):
        again = run_all(jobs("fc", seeds=1), keep=tmp_path)
    assert again.num_programs == 1
    assert_equal(again, whole)


@pytest.mark.usefixtures("quick_compilation")
def test_run_with_inconsistent_histories_is_repeated(tmp_path):
    run_all(jobs("fc", seeds=1), keep=tmp_path)
    (path,) = tmp_path.iterdir()
    with np.load(path) as kept:
        arrays = dict(kept)
    np.savez(path, **arrays | {"round_s": arrays["round_s"][1:]})
    with pytest.warns(UserWarning, match="its run is repeated: its histories differ in length"):
        assert run_all(jobs("fc", seeds=1), keep=tmp_path).num_programs == 1


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    def leave_part_behind(part):
        os.link(part, Path(part).with_name(Path(part).name.replace(".a-", ".left-")))

    files.write_whole(tmp_path / "a.npz", leave_part_behind)
    (left,) = tmp_path.glob(".left-*")
    for path in (tmp_path / ".docker-registry.json", left):  # files of other programs stay
        path.touch()
        os.utime(path, (0, 0))
    new = left.with_name(left.name.replace(".left-", ".new-"))
    new.touch()
    archive.Archive(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a.npz", ".docker-registry.json", new.name}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("number", [1, 3])
def test_runs_with_python_callbacks_are_not_kept(number, tmp_path):
    """Compiled programs do not show what a callback does."""

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
def test_resuming_with_local_estimates_keeps_the_bits(tmp_path):
    """A run alone is padded less than a run beside others with more samples per device."""
    # A separate model, so that no test has compiled its programs without optimisations: the last bit matters here.
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
def test_fingerprint_covers_everything_that_changes_a_run():
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
def test_fingerprint_depends_on_jax_settings(setting):
    (job,) = jobs("fc", seeds=1)
    usual = fingerprint(job)
    with setting():
        assert fingerprint(job) != usual
    assert fingerprint(job) == usual


def test_fingerprint_depends_on_xla_flags(monkeypatch):
    (job,) = jobs("fc", seeds=1)
    usual = fingerprint(job)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    assert fingerprint(job) == usual
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true --xla_force_host_platform_device_count=2")
    assert fingerprint(job) != usual


def test_fingerprint_ignores_policy_names():
    assert [fingerprint(job) for job in jobs({"mine": policies.fast_converge(0.05)})] == [
        fingerprint(job) for job in jobs("fc")
    ]


def test_fingerprint_depends_on_precision(x64):
    (job,) = jobs("fc", seeds=1)
    double = fingerprint(job)
    with jax.enable_x64(False):
        assert fingerprint(job) != double


@pytest.mark.slow
def test_fingerprints_match_across_processes():
    script = "import test_archive as t; print(*(t.fingerprint(job) for job in t.jobs(['fc', 'as-l'], seeds=1)))"
    folders = os.pathsep.join(map(os.path.dirname, (__file__, tiny.__file__)))
    printed = subprocess.check_output(  # with another hash seed
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": folders}, text=True
    )
    assert printed.split() == [fingerprint(job) for job in jobs(["fc", "as-l"], seeds=1)]


@pytest.mark.usefixtures("quick_compilation")
def test_full_disk(tmp_path, monkeypatch):
    """Only the first two runs fit."""
    calls = itertools.count()
    savez = np.savez

    def save_until_full(part, **arrays):
        if next(calls) > 1:
            Path(part).write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        savez(part, **arrays)

    monkeypatch.setattr(np, "savez", save_until_full)
    with pytest.raises(
        OSError, match=f"a run cannot be kept as {tmp_path}/.*npz: No space left on device; earlier runs are kept"
    ):
        run_all(jobs(), keep=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.undo()
    assert run_all(jobs(), keep=tmp_path).kept == 2


def test_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"runs cannot be kept in .*file/runs: Not a directory"):
        run_all(jobs(), keep=tmp_path / "file" / "runs")


@pytest.mark.usefixtures("quick_compilation")
def test_flipped_bits_are_detected_or_harmless(tmp_path):
    (job,) = jobs("fc", seeds=1)
    run_all([job], keep=tmp_path)
    kept = archive.Archive(tmp_path)
    whole = kept.load(job)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    detected = 0
    for position in rng.choice(len(content), 400, replace=False):
        damaged = bytearray(content)
        damaged[position] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read = kept.load(job)
        detected += read is None
        if read is not None:
            pairs = zip(jax.tree.leaves(read.history), jax.tree.leaves(whole.history), strict=True)
            assert all(np.array_equal(one, other, equal_nan=one.dtype.kind == "f") for one, other in pairs)
            assert (read.start.loss, read.stop) == (whole.start.loss, whole.stop)
    assert detected > 100


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_misplaced_files_are_detected(tmp_path):
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
