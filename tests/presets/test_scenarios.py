"""The scenarios change what they say, and nothing else."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import fcjax
from fcjax import data, presets

CLOUDS = data.synthetic.classification(40000, 50, num_features=4, num_labels=5, spread=0.5)
IMAGES = dataclasses.replace(
    CLOUDS,
    **{
        f"{part}_x": getattr(CLOUDS, f"{part}_x").reshape(-1, 2, 2, 1).repeat(4, 1).repeat(4, 2)
        for part in ("train", "test")
    },
)
pytestmark = pytest.mark.usefixtures("quick_compilation")
SMALL = {"distribution": "iid", "budget_s": 3, "batch_size": 16}


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", presets.REGISTRY.names())
def test_every_preset_makes_an_experiment_that_runs(name):
    loaded = IMAGES if name in ("cnn", "resnet") else CLOUDS
    experiment = presets.by_name(name)(loaded, **SMALL)
    run = functools.partial(fcjax.simulate, policy=fcjax.policies.everybody(), experiment=experiment)
    if name == "resnet":  # is slow to compile
        assert jax.eval_shape(run, jax.random.key(0)).num_rounds.shape == ()
    else:
        assert run(jax.random.key(0)).num_rounds > 0


def test_heterogeneous_devices_span_a_decade_around_the_papers():
    usual = presets.shi2020(CLOUDS, num_devices=200, distribution="iid", batch_size=4)
    made = presets.heterogeneous(CLOUDS, num_devices=200, distribution="iid", batch_size=4)
    for name in ("power_w", "sample_floor_s", "sample_rate_hz"):
        factor = np.log10(getattr(made.cell, name) / getattr(usual.cell, name))
        assert factor.shape == (200,)
        assert -0.5 <= factor.min() < -0.45
        assert 0.45 < factor.max() <= 0.5
    np.testing.assert_allclose(made.cell.sample_floor_s * made.cell.sample_rate_hz, 1, rtol=1e-5)
    kept = made.data.sizes / usual.data.sizes
    assert 0.095 <= kept.min() < 0.12
    assert 0.9 < kept.max() <= 1
    np.testing.assert_array_equal(made.data.indices, usual.data.indices)
    correlation = np.corrcoef([made.cell.power_w, made.cell.sample_floor_s, made.data.sizes])
    assert np.abs(correlation - np.eye(3)).max() < 0.3


def test_heterogeneous_devices_keep_a_batch():
    made = presets.heterogeneous(CLOUDS, distribution="iid", batch_size=900)
    assert made.data.sizes.min() == 900


def test_no_decades_make_the_papers_cell():
    made, usual = presets.heterogeneous(CLOUDS, decades=0, **SMALL), presets.shi2020(CLOUDS, **SMALL)
    assert equal(made.data, usual.data)
    for name in ("power_w", "sample_floor_s", "sample_rate_hz"):
        np.testing.assert_allclose(getattr(made.cell, name), getattr(usual.cell, name), rtol=1e-6)


def test_batteries_pay_for_the_stated_number_of_rounds():
    made = presets.energy(CLOUDS, rounds=7, num_devices=100, distribution="iid", batch_size=16)
    round_j = 1e-28 * 1e9**2 * (5e-4 * 1e9 * made.training.local_steps * 16)
    rounds = made.cell.battery_j / round_j
    assert 7 * 10**-0.25 <= rounds.min() < 7 * 10**-0.2
    assert 7 * 10**0.2 < rounds.max() <= 7 * 10**0.25 * 1.0001
    unlimited = dataclasses.replace(made, cell=dataclasses.replace(made.cell, battery_j=float("inf")))
    usual = presets.shi2020(CLOUDS, num_devices=100, distribution="iid", batch_size=16)
    assert equal(unlimited.cell, usual.cell)


@pytest.mark.parametrize(
    ("preset", "field"), [(presets.heterogeneous, "power_w"), (presets.energy, "battery_j")], ids=["speed", "battery"]
)
def test_devices_depend_on_the_seed_of_the_data(preset, field):
    def devices(**seeds):
        return getattr(preset(CLOUDS, **SMALL, **seeds).cell, field)

    assert not np.array_equal(devices(seed=0), devices(seed=1))
    np.testing.assert_array_equal(devices(seed=0, data_seed=1), devices(seed=1))


def test_moving_devices_keep_their_channels_for_a_while():
    made = presets.mobile(CLOUDS, **SMALL)
    state = made.world.init(jax.random.key(0), made.cell)
    gains = []
    for index in range(40):
        state, seen = made.world.observe(jax.random.key(index), state, made.cell, made.training)
        gains.append(np.log10(seen.gain))
    gains = np.array(gains)
    assert np.abs(np.diff(gains, axis=0)).mean() < 0.4 * gains.std()
    assert made.cell.shadowing_db == 8


def test_a_crowd_has_little_data_each():
    made = presets.crowd(CLOUDS, distribution="iid")
    assert len(made.data.sizes) == 200
    assert made.training.batch_size == 32
    assert made.data.sizes.max() == 200


def test_sweeps_take_presets_by_name_and_their_number_of_devices():
    jobs = fcjax.plan("rd", preset="crowd", dataset=CLOUDS, distribution="iid", seeds=1)
    assert jobs[0].labels["devices"] == 200
    assert fcjax.plan("rd", dataset=CLOUDS, distribution="iid", seeds=1)[0].labels["devices"] == 20
    with pytest.raises(ValueError, match=r"^unknown preset 'crowds', did you mean crowd\?"):
        fcjax.plan("rd", preset="crowds", dataset=CLOUDS)
    with pytest.raises(ValueError, match="decades must be zero or more"):
        fcjax.plan("rd", preset="heterogeneous(decades=-1)", dataset=CLOUDS)
    with pytest.raises(ValueError, match="the preset sets radius_m, as the sweep does: pass it to the sweep instead"):
        fcjax.plan("rd", preset="mobile(radius_m=300)", dataset=CLOUDS)
    with pytest.raises(ValueError, match="energy draws the batteries"):
        fcjax.plan("rd", preset="energy(battery_j=3.0)", dataset=CLOUDS, distribution="iid")


def test_results_name_their_preset(tmp_path, monkeypatch):
    settings = {"dataset": CLOUDS, "distribution": "iid", "seeds": 1}
    assert fcjax.plan("rd", preset="mobile", **settings)[0].labels["preset"] == "mobile"
    assert "preset" not in fcjax.plan("rd", **settings)[0].labels
    (tmp_path / "mine.py").write_text(
        "import fcjax\n\n\ndef small(dataset, **settings):\n"
        "    return fcjax.presets.shi2020(dataset, batch_size=8, **settings)\n"
    )
    monkeypatch.chdir(tmp_path)
    (job,) = fcjax.plan("rd", preset="mine:small", **settings)
    assert job.experiment.training.batch_size == 8


def test_networks_need_images():
    with pytest.raises(ValueError, match=r"CNN needs images of shape \(height, width, channels\), got .* \(4,\)"):
        presets.cnn(CLOUDS, **SMALL)
    with pytest.raises(ValueError, match="one of mlp, cnn, resnet, got 'vgg'"):
        presets.shi2020(CLOUDS, model="vgg", **SMALL)
    usual = presets.shi2020(IMAGES, **SMALL)
    for made in (presets.cnn(IMAGES, **SMALL), presets.resnet(IMAGES, **SMALL)):
        assert made.cell.upload_bits == fcjax.models.upload_bits(made.model)
        changed = dataclasses.replace(made, model=usual.model, cell=usual.cell)
        assert equal(changed, usual)
