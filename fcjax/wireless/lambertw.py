"""The Lambert W function on its two real branches, and the equation behind both of them.

W(z) solves W exp(W) = z. Branch 0 is real for z >= -1/e, branch -1 for -1/e <= z < 0.

With x = -(1 + W) and sigma = -ln(-e z), W exp(W) = z reads

    x - ln(1 + x) = sigma,

which has one root x >= 0, giving branch -1, and one root -1 < x <= 0, giving branch 0 for z < 0. This form does not
overflow and keeps all digits at the branch point. Bandwidth allocation needs the same equation (see `fcjax.radio`), so
branch -1 and the allocation share one solver. Away from the branch point, branch 0 solves W + ln(W/z) = 0, which keeps
the relative accuracy as z goes to 0 and does not overflow as z grows.

Each solver takes a rational initial guess and a fixed number of Halley steps. Derivatives are closed forms, so nothing
differentiates through an iteration. The coefficients of the guesses come from `experiments/studies/fit_lambertw.py`.
"""

from __future__ import annotations  # short types in help()

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax import checks

# Numerator and denominator of each guess, highest power first. The error of a guess, stated where it is used,
# determines the number of Halley steps: each step cubes the error.
_UPPER_ROOT = (
    (4.21007136e-05, 0.0209972562, 0.348248613, 1),
    (0.00246366285, 0.0791708416, 0.514879767, 1),
)
_NEAR_BRANCH_POINT = (
    (0.0145949878, 0.470048641, 1),
    (0.129623939, 0.803381429, 1),
)
_AWAY = (
    (0.0017388356, 0.130994252, 0.659608064, 1),
    (0.0010235987, 0.0804863035, 0.53638595, 1),
)

# Branch 0 solves the equation in x for smaller z, where |x| <= 0.4, and W + ln(W/z) = 0 for larger z.
_SWITCH = -0.33

_NEAR = 0.25  # largest |r| at which ln((1 + r)/(1 - r)) is summed as a series

_E_BEYOND_FLOAT64 = 1.4456468917292502e-16  # Euler's e minus its nearest float64


def lambertw(z: ArrayLike, branch: int = 0) -> Array:
    """Returns the real solution W of W exp(W) = z, elementwise.

    Args:
      z: a real array of any shape. Integers are promoted to the default float type; half-precision floats are computed
        in float32.
      branch: 0 for the principal branch (W >= -1), -1 for the lower branch (W <= -1).

    Returns:
      W, with z's shape and float type. It is NaN outside the real domain of the branch, -1 at the float32 or float64
      nearest to -1/e on both branches, 0 at z = 0 on branch 0, and -inf at z = 0 on branch -1. Subnormal z counts as
      zero, as everywhere in XLA. W is differentiable to any order, in forward and reverse mode.
    """
    if not isinstance(branch, int | np.integer) or isinstance(branch, bool) or branch not in (0, -1):
        raise ValueError(f"branch must be the number 0 or -1, the real branches of W, got {branch!r}")
    number = jnp.asarray(checks.real("z", z))
    given = getattr(z, "dtype", None)
    return _compiled(number, int(branch)).astype(given if given in (jnp.float16, jnp.bfloat16) else number.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _lambertw(z: Array, branch: int) -> Array:
    branch_point = np.asarray(-np.exp(-1.0), z.dtype)
    if branch == 0:
        w = jnp.where(z < _SWITCH, _branch_0_near(z), _branch_0_away(z))
        w = jnp.where((jnp.abs(z) < _tiny(z)) | (z == jnp.inf), z, w)
    else:
        w = jnp.where(z == 0, -jnp.inf, -1 - upper_root(_sigma(z)))
    # The float nearest to -1/e is outside the domain by less than its rounding error: it counts as the branch point.
    w = jnp.where(z == branch_point, -1, w)
    outside = (z < branch_point) if branch == 0 else (z < branch_point) | (z > 0)
    return jnp.where(outside | jnp.isnan(z), jnp.nan, w)


_compiled = jax.jit(_lambertw, static_argnums=1)


@_lambertw.defjvp
def _lambertw_jvp(branch, primals, tangents):
    (z,), (dz,) = primals, tangents
    w = _lambertw(z, branch)
    return w, (dz / _inverse_slope_0(z, w) if branch == 0 else dz * _slope_minus_1(z, w))


# The first derivative W' = W/(z (1 + W)) has a custom rule on each branch. Since w = W(z), the rule only uses the
# tangent of z: differentiating the quotient term by term would cancel terms of size 1/z near z = 0. Branch 0 uses 1/W',
# because z (1 + W) overflows at large z; branch -1 uses W', because z/W and the square of 1/W' underflow at small z.


@jax.custom_jvp
def _inverse_slope_0(z: Array, w: Array) -> Array:
    return jnp.where(z == 0, 1, jnp.where(z == jnp.inf, z, z + z / w))


@_inverse_slope_0.defjvp
def _inverse_slope_0_jvp(primals, tangents):
    (z, w), (dz, _) = primals, tangents
    return _inverse_slope_0(z, w), (1 + 1 / (1 + w)) * dz


@jax.custom_jvp
def _slope_minus_1(z: Array, w: Array) -> Array:
    return jnp.where((z == 0) | (w == -1), -jnp.inf, w / (z * (1 + w)))


@_slope_minus_1.defjvp
def _slope_minus_1_jvp(primals, tangents):
    (z, w), (dz, _) = primals, tangents
    slope = _slope_minus_1(z, w)
    return slope, -(slope * (1 - 1 / (-1 - w))) * slope * dz  # -1 - w: +0 at the branch point


def upper_root(sigma: Array) -> Array:
    """Returns the root x >= 0 of x - ln(1 + x) = sigma, for sigma >= 0."""
    positive = sigma > 0
    safe = jnp.where(positive, sigma, 1)
    t = jnp.sqrt(2 * safe)
    guess = safe + t * _rational(t, _UPPER_ROOT)  # relative error below 3e-6 for sigma up to 760
    return jnp.where(positive, _halley_x(guess, x_minus_log1p(guess) - safe), jnp.where(sigma == 0, 0, jnp.nan))


@jax.custom_jvp
def x_minus_log1p(x: Array) -> Array:
    """Computes x - ln(1 + x) for x > -1 to full relative accuracy, also at small x."""
    return jnp.where((x > -0.4) & (x < 0.6), small_x_minus_log1p(x), x - jnp.log(1 + x))


@x_minus_log1p.defjvp
def _x_minus_log1p_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return x_minus_log1p(x), x / (1 + x) * dx


def small_x_minus_log1p(x: Array) -> Array:
    """Computes `x_minus_log1p` for -0.4 <= x <= 0.6 without a logarithm."""
    r = x / (2 + x)  # ln(1 + x) = ln((1 + r)/(1 - r)) = 2 r + tail, and x - 2 r = x r
    return x * r - _log_tail(r)


def small_x_minus_log1p_over_x(x: Array) -> Array:
    """Computes (x - ln(1 + x))/x for 0 < x <= 0.6 without underflow."""
    r = x / (2 + x)
    return r - _log_tail(r) / x


def _log_ratio(a: Array, b: Array) -> Array:
    """Computes ln(a/b) to full relative accuracy, also where a is close to b."""
    r = (a - b) / (a + b)
    return jnp.where(jnp.abs(r) < _NEAR, 2 * r + _log_tail(r), jnp.log(a / b))


def _log_tail(r: Array) -> Array:
    """Sums the series ln((1 + r)/(1 - r)) - 2 r = 2 r^3 (1/3 + r^2/5 + r^4/7 + ...), for |r| < _NEAR."""
    num_terms = 6 if r.dtype == jnp.float32 else 12  # the remainder is below the rounding error of 2 r
    series = np.asarray([2 / (2 * k + 3) for k in reversed(range(num_terms))], r.dtype)
    return r * r * r * jnp.polyval(series, r * r)


def _sigma(z: Array) -> Array:
    """Computes -ln(-e z): from q = 1 + e z near the branch point, to keep all digits, and from ln(-z) elsewhere."""
    q = _one_plus_e_times(z)
    return jnp.where(q < 0.4, _small_sigma(q), -1 - jnp.log(-z))


def _small_sigma(q: Array) -> Array:
    """Computes -ln(1 - q) for q <= 0.4."""
    r = q / (2 - q)
    return 2 * r + _log_tail(r)


def _one_plus_e_times(z: Array) -> Array:
    """Computes 1 + e z, accurate to the last digit where the sum cancels, at z near -1/e."""
    exponent_bits, half_bits = (8, 11) if z.dtype == jnp.float32 else (11, 25)
    e_high = round(np.e * 2 ** (half_bits - 1)) / 2 ** (half_bits - 1)
    e_low = np.asarray((np.e - e_high) + _E_BEYOND_FLOAT64, z.dtype)
    z_high = lax.reduce_precision(z, exponent_bits, half_bits)
    # e_high * z_high is exact, so fusing it with the addition changes nothing.
    return (1 + e_high * z_high) + (e_high * (z - z_high) + e_low * z)


def _branch_0_near(z: Array) -> Array:
    return -1 - lower_root(jnp.clip(_one_plus_e_times(z), 0, 0.4))


def lower_root(q: Array) -> Array:
    """Returns the root x <= 0 of x - ln(1 + x) = -ln(1 - q), for 0 <= q <= 0.4."""
    positive = q > 0
    q = jnp.where(positive, q, 0.1)
    s = jnp.sqrt(2 * q)
    guess = -s * _rational(s, _NEAR_BRANCH_POINT)  # relative error below 1e-8
    x = _halley_x(guess, small_x_minus_log1p(guess) - _small_sigma(q))
    return jnp.where(positive, x, 0)


def _branch_0_away(z: Array) -> Array:
    def halley(w, log_ratio):
        f = w + log_ratio  # f' = (1 + w)/w and f'' = -1/w^2
        return w - 2 * f * w * (1 + w) / (2 * (1 + w) ** 2 + f)

    z = jnp.where((z < _SWITCH) | (jnp.abs(z) < _tiny(z)) | (z == jnp.inf), 1, z)
    # u is 0.85 W at small z, about W/2 at large z, and like W analytic in sqrt(1 + e z), so W/u varies little.
    u = jnp.log1p(z / (1 + math.exp(0.5) * jnp.sqrt(z + math.exp(-1))) * 1.7)
    w = u / 0.85 * _rational(u, _AWAY)  # relative error below 1e-4
    if z.dtype == jnp.float64:
        w = halley(w, jnp.log(w / z))
    return halley(w, _log_ratio(w, z))


def _tiny(z: Array) -> float:
    """Returns the |z| below which branch 0 is z (1 - z + ...) = z to the last digit."""
    return float(np.finfo(z.dtype).eps) / 4


def _halley_x(x: Array, f: Array) -> Array:
    """Takes a Halley step for f = x - ln(1 + x) - sigma = 0; f' = x/(1 + x) and f'' = 1/(1 + x)^2."""
    return x - 2 * f * x * (1 + x) / (2 * x * x - f)


def _rational(t: Array, coefficients: tuple[tuple[float, ...], tuple[float, ...]]) -> Array:
    numerator, denominator = (np.asarray(c, t.dtype) for c in coefficients)
    return jnp.polyval(numerator, t) / jnp.polyval(denominator, t)
