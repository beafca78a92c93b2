"""Models: those of the paper's Table II, and any flax module.

A model is a set of pure functions of its parameters, a pytree. It takes inputs as stored: bytes are scaled to [0, 1],
then all inputs are normalised with the model's mean and standard deviation.
"""

from __future__ import annotations  # short types in help()

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fcjax import checks
from fcjax.learning import convolutions

Params = Any


class Model(NamedTuple):
    """Functions of inputs (B, ...) and targets (B,); `losses` include the regularisation, so F_i is their mean."""

    init: Callable[[Array], Params]  # key -> params
    losses: Callable[[Params, Array, Array], Array]  # params, x, y -> (B,)
    correct: Callable[[Params, Array, Array], Array]  # params, x, y -> (B,) bool
    check_targets: Callable[[np.ndarray], None]  # raises ValueError for targets that the model does not support

    def __repr__(self) -> str:
        return f"Model({num_parameters(self)} parameters)"

    def loss(self, params: Params, x: Array, y: Array) -> Array:
        """Returns the mean loss of a batch."""
        return jnp.mean(self.losses(params, x, y))


def num_parameters(model: Model) -> int:
    """Returns the number of a model's parameters."""
    return _count(jax.eval_shape(model.init, jax.random.key(0)))


def _count(shapes: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


_MOST_PARAMETERS = 2**28  # 1 GB


def upload_bits(model: Model, bits_per_parameter: int = 32) -> float:
    """Returns S, the size of an uploaded model."""
    return float(bits_per_parameter * num_parameters(model))


def mlp(
    input_shape: Sequence[int],
    num_labels: int,
    *,
    hidden: Sequence[int] = (64,),
    mean: float = 0.0,
    std: float = 1.0,
) -> Model:
    """Makes the paper's network: by default one hidden layer of 64 ReLU units, with cross-entropy.

    Equal arguments return the same object, so that programs are compiled once.
    """
    return _mlp(
        _sizes("input_shape", input_shape),
        checks.whole("num_labels", num_labels, 1, _MOST_PARAMETERS),
        _sizes("hidden", hidden),
        *_scale(mean, std),
    )


def _sizes(name: str, sizes: Any) -> tuple[int, ...]:
    try:
        several = list(sizes)
    except TypeError as error:
        raise ValueError(f"{name} must be a sequence of sizes, such as (64,), got {sizes!r}") from error
    return tuple(checks.whole(name, size, 1, _MOST_PARAMETERS) for size in several)


@functools.lru_cache(maxsize=64)
def _mlp(input_shape: tuple[int, ...], num_labels: int, hidden: tuple[int, ...], mean: float, std: float) -> Model:
    return from_flax(MLP((*hidden, num_labels)), input_shape, num_labels, mean=mean, std=std)


class MLP(nn.Module):
    """Linear layers with ReLU between them, initialised like PyTorch's Linear: uniform in +-1/sqrt(inputs)."""

    features: Sequence[int]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x.reshape(x.shape[0], -1)
        for index, size in enumerate(self.features):
            start = _uniform(1 / math.sqrt(x.shape[-1]))
            x = nn.Dense(size, kernel_init=start, bias_init=start)(nn.relu(x) if index else x)
        return x


def cnn(
    input_shape: Sequence[int],
    num_labels: int,
    *,
    channels: Sequence[int] = (16, 32),
    hidden: Sequence[int] = (128,),
    mean: float = 0.0,
    std: float = 1.0,
) -> Model:
    """Makes a convolutional network, by default with two layers of 5 x 5 convolutions and one dense layer of 128 units.

    It has 215,370 parameters on MNIST and 277,610 on CIFAR-10. Its layers are those of H. B. McMahan, E. Moore, D.
    Ramage, S. Hampson, B. Aguera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    International Conference on Artificial Intelligence and Statistics, 2017, whose network for MNIST is
    `channels=(32, 64), hidden=(512,)`. Equal arguments return the same object.
    """
    module = CNN(_sizes("channels", channels), (*_sizes("hidden", hidden), num_labels))
    return _on_images(module, _sizes("input_shape", input_shape), num_labels, *_scale(mean, std))


class CNN(nn.Module):
    """Layers of 5 x 5 convolutions, ReLU and 2 x 2 max pooling, then linear layers with ReLU between them."""

    channels: Sequence[int]
    features: Sequence[int]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for size in self.channels:
            x = nn.max_pool(nn.relu(nn.Conv(size, (5, 5))(x)), (2, 2), (2, 2))
        return MLP(self.features)(x)


def resnet(
    input_shape: Sequence[int],
    num_labels: int,
    *,
    channels: Sequence[int] = (16, 32, 64),
    mean: float = 0.0,
    std: float = 1.0,
) -> Model:
    """Makes a small residual network with group normalisation, which keeps no statistics that averaging would lose.

    Each number of channels is one residual block, and all but the first halve the image. The default has 8 layers with
    weights besides its shortcuts, and 78,042 parameters on CIFAR-10. K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual
    Learning for Image Recognition", Conference on Computer Vision and Pattern Recognition, 2016, Sec. 4.2, with one
    block per stage and shortcuts by 1 x 1 convolutions. K. Hsieh, A. Phanishayee, O. Mutlu, P. B. Gibbons, "The Non-IID
    Data Quagmire of Decentralized Machine Learning", International Conference on Machine Learning, 2020, show that
    group normalisation tolerates skewed labels where batch normalisation does not. Equal arguments return the same
    object.
    """
    module = ResNet(_sizes("channels", channels), num_labels)
    return _on_images(module, _sizes("input_shape", input_shape), num_labels, *_scale(mean, std))


class ResNet(nn.Module):
    """A 3 x 3 convolution, residual blocks of two more each, the mean over all places, and a linear layer."""

    channels: Sequence[int]
    num_labels: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        norm = lambda x: nn.GroupNorm(num_groups=math.gcd(8, x.shape[-1]))(x)  # noqa: E731
        x = nn.relu(norm(nn.Conv(self.channels[0], (3, 3), use_bias=False)(x)))
        for index, size in enumerate(self.channels):
            stride = 2 if index else 1
            y = nn.relu(norm(nn.Conv(size, (3, 3), stride, use_bias=False)(x)))
            y = norm(nn.Conv(size, (3, 3), use_bias=False)(y))
            if index:
                x = norm(nn.Conv(size, (1, 1), stride, use_bias=False)(x))
            x = nn.relu(x + y)
        return nn.Dense(self.num_labels)(jnp.mean(x, (1, 2)))


@functools.lru_cache(maxsize=64)
def _on_images(module: nn.Module, shape: tuple[int, ...], num_labels: int, mean: float, std: float) -> Model:
    if len(shape) != 3:
        raise ValueError(
            f"{type(module).__name__} needs images of shape (height, width, channels), got inputs of shape {shape}"
        )
    return from_flax(module, shape, num_labels, mean=mean, std=std)


def by_name(name: str, input_shape: Sequence[int], num_labels: int, *, mean: float = 0.0, std: float = 1.0) -> Model:
    """Returns the model "mlp", "cnn" or "resnet" for inputs of a shape."""
    known: dict[str, Callable[..., Model]] = {"mlp": mlp, "cnn": cnn, "resnet": resnet}
    if name not in known:
        raise ValueError(
            f"model must be a flax module, a fcjax.models.Model or one of {', '.join(known)}, got {name!r}"
        )
    return known[name](input_shape, num_labels, mean=mean, std=std)


def from_flax(
    module: nn.Module, input_shape: Sequence[int], num_labels: int, *, mean: float = 0.0, std: float = 1.0
) -> Model:
    """Makes a classifier with cross-entropy loss from a flax module that maps inputs to logits (B, num_labels).

    On a CPU, gradients of its convolutions and its max pooling are computed in a faster way; see
    `fcjax.learning.convolutions`.
    """
    name = type(module).__name__
    mean, std = _scale(mean, std)
    example = jax.ShapeDtypeStruct((2, *input_shape), jnp.float32)
    try:
        variables = jax.eval_shape(lambda x: module.init(jax.random.key(0), x), example)
    except (TypeError, ValueError, flax.errors.FlaxError) as error:
        raise ValueError(f"{name} cannot be set up for inputs of shape {example.shape} alone: {error}") from error
    if not variables.get("params"):
        raise ValueError(f"{name} has no parameters to train")
    if (number := _count(variables["params"])) > _MOST_PARAMETERS:
        raise ValueError(f"{name} has {number} parameters, more than the {_MOST_PARAMETERS} allowed")
    if others := sorted(set(variables) - {"params"}):
        raise ValueError(
            f"{name} has state besides its parameters ({', '.join(others)}), which averaging would lose: use a module "
            "without it"
        )
    try:
        logits = jax.eval_shape(module.apply, variables, example)
    except flax.errors.FlaxError as error:
        raise ValueError(f"{name} cannot be applied to inputs and parameters alone: {error}") from error
    shape, dtype = getattr(logits, "shape", None), getattr(logits, "dtype", jnp.bool_)
    if shape != (2, num_labels) or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{name} must map a batch of 2 to real logits of shape (2, {num_labels}), one per label, "
            f"got {shape or logits}"
        )

    plain = lambda params, x: module.apply({"params": params}, x)  # noqa: E731
    logits_of = convolutions.rewrite(plain, variables["params"], example)

    def apply(params, x):
        return logits_of(params, _normalised(x, mean, std))

    def losses(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y)

    def correct(params, x, y):
        return jnp.argmax(apply(params, x), axis=-1) == y

    def check_labels(y):
        if not np.issubdtype(y.dtype, np.integer) or y.min() < 0 or y.max() >= num_labels:
            raise ValueError(
                f"{name} needs integer labels from 0 to {num_labels - 1}, got {y.dtype} {y.min()} to {y.max()}"
            )

    return Model(
        lambda key: module.init(key, jnp.zeros(example.shape, example.dtype))["params"], losses, correct, check_labels
    )


def linear_regression(num_features: int, *, mean: float = 0.0, std: float = 1.0) -> Model:
    """Makes a model with the convex loss 1/2 (y - w x)^2; predictions within 1/2 count as correct."""
    num_features, (mean, std) = checks.whole("num_features", num_features, 1, _MOST_PARAMETERS), _scale(mean, std)

    def predict(params, x):
        return _normalised(x, mean, std).reshape(x.shape[0], -1) @ params

    def losses(params, x, y):
        return (y - predict(params, x)) ** 2 / 2

    def correct(params, x, y):
        return jnp.abs(predict(params, x) - y) < 0.5

    def check_finite(y):
        if not np.all(np.isfinite(y)):
            raise ValueError("linear regression needs finite targets")

    return Model(lambda _: jnp.zeros(num_features), losses, correct, check_finite)


def squared_svm(num_features: int, *, regularisation: float = 0.1, mean: float = 0.0, std: float = 1.0) -> Model:
    """Makes a model with the strongly convex loss lambda/2 |w|^2 + 1/2 max(0, 1 - y w x)^2, for targets -1 and 1.

    The paper's Table II omits the square, without which the loss is not smooth.
    """
    num_features, (mean, std) = checks.whole("num_features", num_features, 1, _MOST_PARAMETERS), _scale(mean, std)
    regularisation = checks.scalar("regularisation", regularisation, checks.not_negative)

    def margin(params, x, y):
        return y * (_normalised(x, mean, std).reshape(x.shape[0], -1) @ params)

    def losses(params, x, y):
        return regularisation / 2 * jnp.sum(params**2) + jnp.maximum(0, 1 - margin(params, x, y)) ** 2 / 2

    def correct(params, x, y):
        return margin(params, x, y) > 0

    def check_signs(y):
        if not np.all(np.abs(y) == 1):
            raise ValueError(f"a squared SVM needs targets of -1 and 1, got {np.unique(y)[:5]}")

    return Model(lambda _: jnp.zeros(num_features), losses, correct, check_signs)


def _scale(mean: float, std: float) -> tuple[float, float]:
    """Checks mean and std such that normalised inputs and their squares stay within the range of float32."""
    allowed = lambda x: np.abs(x) <= 1e6  # noqa: E731
    checks.within("mean", mean, allowed, "between -1e6 and 1e6", ())
    return float(mean), checks.scalar("std", std, checks.positive, low=1e-6, high=1e6)


def _normalised(x: Array, mean: float, std: float) -> Array:
    if x.dtype == jnp.uint8:
        # (x/255 - mean)/std as one multiplication and one addition
        return x.astype(jnp.float32) * (1 / (255 * std)) - mean / std
    return (x - mean) / std


def _uniform(limit: float) -> Callable[..., Array]:
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(key, shape, dtype, -limit, limit)
