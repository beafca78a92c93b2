import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax.test_util import check_grads

import fcjax
from fcjax.wireless.lambertw import _AWAY, _NEAR_BRANCH_POINT, _UPPER_ROOT, _rational, upper_root, x_minus_log1p


def domain(branch, dtype, num=2600):
    """Points over the whole real domain: log-uniform, uniform, and near the branch point, down to one ulp."""
    rng = np.random.default_rng(branch + 2)
    info = np.finfo(dtype)
    branch_point = dtype.type(-np.exp(-1))
    exponents = np.log10(float(info.tiny)) + 1e-3, np.log10(float(info.max)) - 1e-3
    ulps = branch_point + np.arange(1, 201) * np.spacing(abs(branch_point))
    near = -np.exp(-1) + 10 ** rng.uniform(np.log10(info.eps) - 1, -0.5, num)
    small = -(10 ** rng.uniform(exponents[0], -0.44, num))
    uniform = rng.uniform(-np.exp(-1), 0, num)
    z = [ulps, near, small, uniform, [-info.tiny]]
    if branch == 0:
        z += [10 ** rng.uniform(*exponents, num), 10 ** rng.uniform(-3, 3, num), [info.tiny, info.max]]
    else:
        z += [-np.exp(-1) + 10 ** rng.uniform(-12, -9, num)]
    z = np.concatenate([np.asarray(x, np.float64) for x in z]).astype(dtype)
    return z[(z > branch_point) & (z <= (np.inf if branch == 0 else 0)) & (z != 0)]


@pytest.mark.slow
@pytest.mark.parametrize("branch", [0, -1])
def test_value_and_derivatives_against_mpmath(branch, dtype):
    z = domain(branch, dtype, num=3500)
    assert z.size >= 10_000

    def w(z):
        return fcjax.lambertw(z, branch)

    first = jax.grad(w)
    computed = [np.asarray(jax.jit(jax.vmap(f))(z)) for f in (w, first, jax.grad(first))]
    assert all(x.dtype == dtype for x in computed)
    info = np.finfo(dtype)
    for i, point in enumerate(z):
        values = oracles.lambertw(point, branch)
        for order in range(3):
            exact, got = values[order], computed[order][i]
            if abs(exact) > info.max:
                assert np.isinf(got)
            elif abs(exact) >= info.tiny:
                conditioning = abs(float(point) * values[order + 1] / exact) if exact else np.inf
                error = abs(float(got) - exact) / abs(exact)
                assert error <= 4 * float(info.eps) * max(1, conditioning), (point, order, got, exact)


def test_value_is_accurate_regardless_of_conditioning(dtype):
    # The float z counts as exact, even next to the branch point.
    for branch in (0, -1):
        z = domain(branch, dtype, num=300)
        w = np.asarray(fcjax.lambertw(z, branch), np.float64)
        exact = np.array([float(oracles.lambertw(x, branch)[0]) for x in z])
        np.testing.assert_allclose(w, exact, rtol=4 * float(np.finfo(dtype).eps))


@pytest.mark.parametrize(
    ("z", "branch", "expected"),
    [
        (0.0, 0, 0.0),
        (-0.0, 0, -0.0),
        (np.inf, 0, np.inf),
        (np.nan, 0, np.nan),
        (-0.37, 0, np.nan),
        (-np.inf, 0, np.nan),
        (-np.exp(-1), 0, -1.0),
        (0.0, -1, -np.inf),
        (-np.exp(-1), -1, -1.0),
        (-0.37, -1, np.nan),
        (1e-3, -1, np.nan),
        (np.inf, -1, np.nan),
        (np.nan, -1, np.nan),
    ],
)
def test_edge_cases(z, branch, expected, dtype):
    np.testing.assert_array_equal(fcjax.lambertw(np.asarray(z, dtype), branch), np.asarray(expected, dtype))


def test_derivatives_at_the_edges(dtype):
    def derivatives(branch, z):
        first = jax.grad(lambda z: fcjax.lambertw(z, branch))
        return [float(f(np.asarray(z, dtype))) for f in (first, jax.grad(first), jax.grad(jax.grad(first)))]

    assert derivatives(0, 0.0) == [1.0, -2.0, 9.0]  # the series z - z^2 + 3/2 z^3
    assert derivatives(0, -np.exp(-1))[:2] == [np.inf, -np.inf]
    assert derivatives(0, np.inf)[:2] == [0.0, 0.0]
    assert derivatives(-1, -np.exp(-1))[:2] == [-np.inf, np.inf]
    assert derivatives(-1, 0.0)[0] == -np.inf


def test_check_grads(x64):
    def both(upper, lower):
        return fcjax.lambertw(upper, 0), fcjax.lambertw(lower, -1)

    points = jnp.array([-0.36, -0.3, -0.1, 0.2, 3.0, 1e3]), jnp.array([-0.36, -0.2, -0.01])
    check_grads(jax.jit(both), points, order=2, eps=1e-5, rtol=1e-4)


def test_vmap_jit_and_shapes(dtype):
    z = jnp.linspace(-0.3, 5, 12, dtype=dtype).reshape(3, 4)
    w = fcjax.lambertw(z)
    assert w.shape == z.shape
    np.testing.assert_array_equal(jax.jit(jax.vmap(fcjax.lambertw))(z), jax.jit(fcjax.lambertw)(z))
    np.testing.assert_allclose(w * jnp.exp(w), z, rtol=20 * float(np.finfo(dtype).eps))


def test_dtypes(x64):
    assert fcjax.lambertw(1).dtype == jnp.float64
    assert fcjax.lambertw(np.float32(1)).dtype == jnp.float32
    half = fcjax.lambertw(jnp.asarray([1.0, 2.0], jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, fcjax.lambertw(np.float32([1, 2])).astype(jnp.bfloat16))
    assert fcjax.lambertw(np.int64(10**12)) == fcjax.lambertw(1e12)
    with pytest.raises(ValueError, match=r"z must be a real number.*1j"):
        fcjax.lambertw(1j)


@pytest.mark.parametrize("branch", [1, -2, 0.5, True, "0", None])
def test_errors_name_unknown_branch(branch):
    with pytest.raises(ValueError, match=f"branch must be the number 0 or -1.*{branch!r}"):
        fcjax.lambertw(1.0, branch)


def test_x_minus_log1p(dtype):
    rng = np.random.default_rng(0)
    x = np.concatenate([10 ** rng.uniform(-12, 3, 1000), -(10 ** rng.uniform(-12, -1e-3, 1000))]).astype(dtype)
    exact = [float(oracles.mpmath.mpf(float(v)) - oracles.mpmath.log1p(float(v))) for v in x]
    np.testing.assert_allclose(x_minus_log1p(x), exact, rtol=5 * float(np.finfo(dtype).eps))


def test_initial_guesses_are_accurate_enough(x64):
    """A Halley step cubes the error, so these guesses reach 1e-16 in one, one and two steps."""
    sigma = np.geomspace(1e-10, 760, 4000)
    t = np.sqrt(2 * sigma)
    np.testing.assert_allclose(sigma + t * _rational(t, _UPPER_ROOT), upper_root(sigma), rtol=3e-6)
    z = np.linspace(-np.exp(-1) + 1e-6, -0.33, 4000)
    s = np.sqrt(2 * (1 + np.e * z))
    np.testing.assert_allclose(s * _rational(s, _NEAR_BRANCH_POINT), 1 + fcjax.lambertw(z), rtol=1e-8)
    z = np.concatenate([np.linspace(-0.33, -1e-3, 999), np.exp(np.linspace(-7, 709.7, 4000))])
    u = np.log1p(z / (1 + np.sqrt(np.e) * np.sqrt(z + np.exp(-1))) * 1.7)
    np.testing.assert_allclose(u / 0.85 * _rational(u, _AWAY), fcjax.lambertw(z), rtol=1e-4)
