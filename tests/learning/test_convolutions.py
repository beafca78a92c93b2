"""Rewritten functions equal the plain ones, and so do their derivatives."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

from fcjax import models
from fcjax.learning.convolutions import rewrite


def assert_equal(function, *args):
    """Compares values, derivatives in both modes and a vmapped gradient with those that XLA computes."""
    rewritten = rewrite(function, *args)
    assert rewritten is not function
    tolerance = 3e-5 if args[0].dtype == jnp.float32 else 1e-12
    tangents = tuple(jnp.cos(jnp.arange(arg.size, dtype=arg.dtype)).reshape(arg.shape) for arg in args)

    def everything(function):
        slope = jax.grad(lambda *args: jnp.sum(jnp.sin(function(*args))), tuple(range(len(args))))
        stacked = tuple(jnp.stack([arg, 2 * arg]) for arg in args)
        return function(*args), jax.jvp(function, args, tangents)[1], slope(*args), jax.vmap(slope)(*stacked)

    found, expected = jax.jit(lambda: (everything(rewritten), everything(function)))()
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * float(jnp.max(jnp.abs(other))))


def draw(seed, shape, dtype):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


SETTINGS = {
    "plain": {},
    "strides": {"window_strides": (2, 3)},
    "valid": {"padding": "VALID"},
    "uneven padding": {"padding": ((0, 3), (2, 1))},
    "cropped": {"padding": ((-1, 0), (2, -2))},
    "dilation": {"rhs_dilation": (2, 1), "window_strides": (1, 2)},
    "groups": {"feature_group_count": 2},
    "depthwise": {"feature_group_count": 4, "window_strides": (2, 1)},
}


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "layout",
    [("NHWC", "HWIO", "NHWC"), pytest.param(("NCHW", "OIHW", "NHWC"), marks=pytest.mark.slow)],
    ids=["channels last", "channels first"],
)
@pytest.mark.parametrize("name", SETTINGS)
def test_convolutions(name, layout, dtype):
    settings = {"window_strides": (1, 1), "padding": "SAME", **SETTINGS[name]}
    groups = settings.get("feature_group_count", 1)
    x, kernel = draw(0, (2, 9, 8, 4), dtype), draw(1, (3, 2, 4 // groups, 8), dtype)
    if layout[0] == "NCHW":
        x, kernel = x.transpose(0, 3, 1, 2), kernel.transpose(3, 2, 0, 1)
    assert_equal(lambda x, k: lax.conv_general_dilated(x, k, dimension_numbers=layout, **settings), x, kernel)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("shape", [(7,), (5, 4, 6)], ids=str)
def test_convolutions_in_other_dimensions(shape):
    x, kernel = draw(0, (2, *shape, 2), float), draw(1, (*(2 for _ in shape), 2, 3), float)
    letters = "XYZ"[: len(shape)]
    layout = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    strides = (1,) * len(shape)
    assert_equal(lambda x, k: lax.conv_general_dilated(x, k, strides, "SAME", dimension_numbers=layout), x, kernel)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("window", "strides", "padding"),
    [((2, 2), (2, 2), "VALID"), ((3, 2), (2, 1), "SAME"), ((2, 3), (3, 2), ((1, 0), (0, 2)))],
    ids=str,
)
def test_max_pooling_takes_the_first_maximum(window, strides, padding, ties, dtype):
    x = draw(0, (2, 7, 8, 3), dtype)
    assert_equal(lambda x: nn.max_pool(x, window, strides, padding), jnp.round(x) if ties else x)


@pytest.mark.usefixtures("x64")
def test_second_derivatives():
    x, kernel = draw(0, (1, 4, 4, 1), float), draw(1, (2, 2, 1, 2), float)
    layout = ("NHWC", "HWIO", "NHWC")
    function = rewrite(lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=layout), x, kernel)
    check_grads(jax.jit(lambda x, k: jnp.sum(function(x, k) ** 3)), (x, kernel), order=2)


class Network(nn.Module):
    """Convolutions behind `jit` and beside functions with derivatives of their own."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3), padding="CIRCULAR")(x))
        x = jax.jit(lambda x: nn.max_pool(nn.gelu(x), (2, 2), (2, 2)))(x)
        return nn.Dense(3)(nn.avg_pool(nn.Conv(2, (3, 3), 2)(x), (2, 2)).reshape(len(x), -1))


@pytest.mark.usefixtures("quick_compilation")
def test_flax_modules_need_no_change():
    module, x, y = Network(), draw(0, (5, 8, 8, 2), float), jnp.arange(5) % 3
    model = models.from_flax(module, (8, 8, 2), 3)
    params = jax.jit(model.init)(jax.random.key(0))

    def loss(params):
        logits = module.apply({"params": params}, x)
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(5), y])

    found, expected = jax.jit(jax.grad(model.loss))(params, x, y), jax.jit(jax.grad(loss))(params)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    operations = str(jax.make_jaxpr(jax.grad(model.loss))(params, x, y))
    assert "select_and_scatter_add" not in operations


def test_functions_without_convolutions_stay_as_they_are():
    function = lambda x: nn.relu(x) @ x  # noqa: E731
    assert rewrite(function, jnp.ones((3, 3))) is function


class Transposed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.mean(nn.ConvTranspose(3, (3, 3), (2, 2))(x), (1, 2))


class Remat(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.mean(nn.remat(nn.Conv)(3, (3, 3))(nn.Conv(3, (3, 3))(x)), (1, 2))


@pytest.mark.parametrize(
    ("module", "reason"), [(Transposed(), "transposed convolutions"), (Remat(), "convolutions inside remat")]
)
def test_what_cannot_be_replaced_is_named(module, reason):
    with pytest.warns(UserWarning, match=f"gradients may be slow on a CPU, because XLA computes {reason}"):
        model = models.from_flax(module, (6, 6, 1), 3)
    params, x = jax.jit(model.init)(jax.random.key(0)), draw(0, (2, 6, 6, 1), float)
    gradient = jax.jit(jax.grad(model.loss))(params, x, jnp.array([0, 1]))
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(gradient))
