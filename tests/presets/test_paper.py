import dataclasses

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import fcjax
from fcjax import data, models, presets

CLOUDS = data.synthetic.classification(4000, 100, num_features=8, num_labels=10, spread=0.5)


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(5)(x)))


def test_flax_module_replaces_the_mlp():
    made, again = (presets.shi2020(CLOUDS, model=Network(), seed=seed) for seed in (0, 1))
    assert made.model is again.model, "equal modules share a program"
    assert made.cell.upload_bits == 32 * (8 * 5 + 5 + 5 * 10 + 10)
    own = models.mlp((8,), 10, hidden=())
    assert presets.shi2020(CLOUDS, model=own).model is own
    assert presets.shi2020(CLOUDS, model="mlp").model is presets.shi2020(CLOUDS).model
    with pytest.raises(ValueError, match=r"model must be a name, a flax module or a fcjax.models.Model, got int"):
        presets.shi2020(CLOUDS, model=7)


def test_preset_sets_training_and_cell():
    made = presets.shi2020(CLOUDS, learning_rate=0.3, local_steps=2, batch_size=16, bandwidth_hz=1e6, power_w=0.2)
    assert (made.training.learning_rate, made.training.local_steps, made.training.batch_size) == (0.3, 2, 16)
    usual = presets.shi2020(CLOUDS)
    power_w = np.full(20, 0.2, np.float32)
    jax.tree.map(
        np.testing.assert_array_equal, made.cell, dataclasses.replace(usual.cell, bandwidth_hz=1e6, power_w=power_w)
    )
    each = np.linspace(0.1, 0.2, 20)
    np.testing.assert_array_equal(presets.shi2020(CLOUDS, power_w=each).cell.power_w, each)
    with pytest.raises(ValueError, match="shi2020 has no setting 'bandwith_hz': did you mean bandwidth_hz"):
        presets.shi2020(CLOUDS, bandwith_hz=1e6)


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_custom_data_are_normalised_by_their_own_statistics(kind):
    rng = np.random.default_rng(0)
    x = rng.integers(50, 90, (2560, 4)).astype(kind)
    own = data.Dataset("own", x, np.arange(2560) % 2, x[:9], np.arange(9) % 2, ("a", "b"), "a seed")
    seen = []

    class Look(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen.append(x)
            return nn.Dense(2)(x)

    made = presets.shi2020(own, model=Look(), num_devices=4, distribution="iid")
    made.model.losses(made.model.init(jax.random.key(0)), x, own.train_y)
    assert float(np.mean(seen[-1])) == pytest.approx(0, abs=1e-4)
    assert float(np.std(seen[-1])) == pytest.approx(1, abs=1e-4)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.slow
def test_optax_optimizer_is_used_unchanged():
    settings = {"distribution": "iid", "budget_s": 2.0, "num_devices": 5, "local_steps": 3}
    key, policy = jax.random.key(0), fcjax.policies.random(2)
    plain = fcjax.simulate(key, policy, presets.shi2020(CLOUDS, momentum=0.0, learning_rate=0.1, **settings))
    same = fcjax.simulate(key, policy, presets.shi2020(CLOUDS, make_optimizer=optax.sgd(0.1), **settings))
    assert plain.num_rounds > 0
    assert "stop: budget" in repr(plain)
    traced = []
    jax.eval_shape(lambda run: traced.append(repr(run)), plain)
    assert "num_rounds" in traced[0]
    np.testing.assert_allclose(plain.history.loss, same.history.loss, rtol=1e-5)


def test_reprs_are_short():
    made = presets.shi2020(CLOUDS)
    for shown, words in (
        (made, "model: Model(1226 parameters)"),
        (made, "world: World(redrawn)"),
        (made, "outages: Outages(none)"),
        (made, "compressor: Compressor(none)"),
        (made.cell, "power_w: float32 (20,), all 0.01"),
        (made.data, "LocalData(4000 samples (8,), on 20 devices)"),
        (CLOUDS, "Dataset(synthetic classification: 4000 training and 100 test samples of 8, 10 labels, from a seed)"),
        (fcjax.policies.by_name("cs-l"), "Policy(client_selection)"),
    ):
        assert words in repr(shown)
        assert len(repr(shown).splitlines()) < 25
    traced = []
    jax.eval_shape(lambda cell: traced.append(repr(cell)), made.cell)
    assert "radius_m" in traced[0]
