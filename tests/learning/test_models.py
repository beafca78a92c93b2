import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fcjax import models


def by_hand(params, x):
    """The paper's MLP, written out in NumPy."""
    params = jax.tree.map(np.asarray, params)
    hidden = np.maximum(x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"], 0)
    logits = hidden @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]
    return logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))


@pytest.mark.parametrize(("shape", "count"), [((28, 28, 1), 50_890), ((32, 32, 3), 197_322)])
def test_papers_networks(shape, count):
    model = models.mlp(shape, 10, mean=0.1307, std=0.3081)
    assert models.num_parameters(model) == count
    assert models.upload_bits(model) == 32 * count
    params = model.init(jax.random.key(0))
    limit = 1 / np.sqrt(np.prod(shape))
    for leaf in jax.tree.leaves(params["Dense_0"]):
        assert 0.8 * limit < np.max(np.abs(leaf)) <= limit
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (16, *shape), np.uint8), rng.integers(0, 10, 16)
    log_probability = by_hand(params, ((x / 255 - 0.1307) / 0.3081).reshape(16, -1))
    np.testing.assert_allclose(model.loss(params, x, y), -np.mean(log_probability[np.arange(16), y]), rtol=1e-5)
    np.testing.assert_array_equal(model.correct(params, x, y), np.argmax(log_probability, 1) == y)


@pytest.mark.parametrize(
    ("make", "shape", "count"),
    [
        (models.cnn, (28, 28, 1), 215_370),
        (models.cnn, (32, 32, 3), 277_610),
        (models.resnet, (28, 28, 1), 77_754),
        (models.resnet, (32, 32, 3), 78_042),
    ],
)
def test_convolutional_networks(make, shape, count):
    model = make(shape, 10, mean=0.5, std=0.5)
    assert model is make(list(shape), 10, mean=0.5, std=0.5)
    assert models.num_parameters(model) == count
    losses = jax.eval_shape(
        model.losses, jax.eval_shape(model.init, jax.random.key(0)), np.zeros((4, *shape)), np.zeros(4, int)
    )
    assert losses.shape == (4,)


def test_convex_losses_by_hand(x64):
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(7, 3)), rng.normal(size=3)
    y = rng.normal(size=7)
    squares = [(b - a @ w) ** 2 / 2 for a, b in zip(x, y, strict=True)]
    np.testing.assert_allclose(models.linear_regression(3).loss(w, x, y), np.mean(squares))
    sign = np.sign(y)
    hinge = [max(0, 1 - s * (a @ w)) ** 2 / 2 for a, s in zip(x, sign, strict=True)]
    np.testing.assert_allclose(
        models.squared_svm(3, regularisation=0.2).loss(w, x, sign), 0.1 * np.sum(w**2) + np.mean(hinge)
    )
    np.testing.assert_array_equal(models.squared_svm(3).correct(w, x, sign), np.sign(x @ w) == sign)


class Convolutional(nn.Module):
    labels: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3), strides=2)(x))
        return nn.Dense(self.labels)(x.reshape(x.shape[0], -1))


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.BatchNorm(use_running_average=False)(x.reshape(x.shape[0], -1)))


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.Dropout(0.5, deterministic=False)(x.reshape(x.shape[0], -1)))


class Nothing(nn.Module):
    def __call__(self, x):
        return x.reshape(x.shape[0], -1)[:, :10]


def test_custom_flax_module():
    model = models.from_flax(Convolutional(10), (8, 8, 1), 10)
    params = model.init(jax.random.key(0))
    x, y = jnp.ones((5, 8, 8, 1)), jnp.arange(5)
    assert model.loss(params, x, y) > 0
    assert model.correct(params, x, y).shape == (5,)
    assert models.num_parameters(model) == 4 * 9 + 4 + 64 * 10 + 10


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Convolutional(9), r"Convolutional must map a batch of 2 to real logits of shape \(2, 10\).*got \(2, 9\)"),
        (nn.Dense(10), r"Dense must map a batch of 2 to real logits of shape \(2, 10\).*got \(2, 8, 8, 10\)"),
        (Dropped(), r"Dropped cannot be applied to inputs and parameters alone: Dropout_0 needs PRNG"),
        (Nothing(), r"Nothing has no parameters to train"),
        (Normalised(), r"Normalised has state besides its parameters \(batch_stats\)"),
    ],
)
def test_errors_name_unsuitable_modules(module, message):
    with pytest.raises(ValueError, match=message):
        models.from_flax(module, (8, 8, 1), 10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.mlp((8,), 4, std=0.0), "std must be positive and finite, got 0"),
        (lambda: models.mlp((8,), 4, mean=np.nan), "mean must be between -1e6 and 1e6, got nan"),
        (lambda: models.mlp((8,), 4, hidden=(2.5,)), "hidden must be a whole number from 1 to .*, got 2.5"),
        (lambda: models.mlp((10**5,), 10, hidden=(10**5,)), r"MLP has 1000.* parameters, more than the 268435456"),
        (lambda: models.mlp(8, 4), r"input_shape must be a sequence of sizes, such as \(64,\), got 8"),
        (lambda: models.linear_regression("many"), "num_features must be a whole number from 1 to .*, got 'many'"),
        (lambda: models.squared_svm(3, regularisation=-1.0), "regularisation must be zero or more, and finite, got -1"),
    ],
)
def test_errors_name_impossible_sizes_and_scales(make, message):
    with pytest.raises(ValueError, match=message):
        make()
