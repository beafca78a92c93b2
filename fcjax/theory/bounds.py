"""Convergence bounds: g, h and A, the penalty B of Theorem 2, the bound of Theorem 3, and the objective of P4.

Theorems are numbered as the paper prints them: 1 is the bandwidth allocation, 2 bounds by B(Pi) what scheduling only n
of M devices costs in a round, 3 bounds the loss of the best model after K rounds by eps0 + rho h(tau) + B(Pi).

All are plain functions of arrays and differentiable in every argument; n, K and tau may be floats. Where they
overflow, as they may for eta far above 1/beta, they are inf, and their derivatives mean nothing. From
`sampling_constant` on, `delta` is (M,), `num_samples` (D_i) a scalar or (M,), and `beta` and `rho` are scalars or (M,),
then averaged with the weights D_i/D. Further names map to the paper's symbols as learning_rate = eta,
local_steps = tau, phi = varphi, budget_s = T.
"""

import math
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.wireless.lambertw import x_minus_log1p

Constant = Literal["published", "valid"]


def local_drift(*, delta: ArrayLike, beta: ArrayLike, learning_rate: ArrayLike, local_steps: ArrayLike) -> Array:
    """g(tau) = delta/beta ((eta beta + 1)^tau - 1): how far tau local steps lead from tau centralised ones."""
    delta, beta = _drift_of(delta, beta)
    unit_excess, eta, tau = _unit_excess(beta, learning_rate, local_steps)
    return _times(delta, eta * tau + unit_excess)


def mean_drift(*, delta: ArrayLike, beta: ArrayLike, learning_rate: ArrayLike, local_steps: ArrayLike) -> Array:
    """h(tau) = delta/beta ((eta beta + 1)^tau - 1) - eta delta tau: the same for the mean of all devices' models."""
    delta, beta = _drift_of(delta, beta)
    unit_excess, _, _ = _unit_excess(beta, learning_rate, local_steps)
    return _times(delta, unit_excess)


def _drift_of(delta: ArrayLike, beta: ArrayLike) -> tuple[Array, ArrayLike]:
    delta = jnp.asarray(checks.not_negative("delta", delta))
    beta = checks.not_negative("beta", beta)
    try:
        np.broadcast_shapes(delta.shape, jnp.shape(beta))
    except ValueError as error:
        raise ValueError(
            f"delta and beta do not fit each other, of shapes {delta.shape} and {jnp.shape(beta)}"
        ) from error
    return delta, beta


def _times(factor: ArrayLike, bound: Array) -> Array:
    """Their product, also where the factor is 0 and the bound has overflown: 0."""
    factor = jnp.asarray(factor)
    return factor * jnp.where((factor == 0) & jnp.isinf(bound), 0, bound)


def _unit_excess(beta: ArrayLike, learning_rate: ArrayLike, local_steps: ArrayLike) -> tuple[Array, Array, Array]:
    """h(tau)/delta, without the cancellation of its terms at small eta beta; and eta and tau."""
    eta = jnp.asarray(checks.positive("learning_rate", learning_rate, (), low=1e-10, high=1e10))
    tau = jnp.asarray(checks.not_negative("local_steps", local_steps, (), high=1e9))
    x = eta * beta
    # (1 + x)^tau - 1 - tau x = (tau - 1) (x l - (x - l)) + (1 + x) (exp(b) - 1 - b), l = ln(1 + x), b = (tau - 1) l:
    # for tau >= 1 neither term is negative, and for tau = 1 both are 0.
    # Where x tau is below the rounding, only the first term of its series counts, and x^2 may be no number any more.
    tiny = x * jnp.maximum(tau, 1) < jnp.finfo(x.dtype).eps / 4
    safe = jnp.where(tiny, 1, x)
    log = jnp.log1p(safe)
    excess = (tau - 1) * (safe * log - x_minus_log1p(safe)) + (1 + safe) * _expm1_minus_x((tau - 1) * log)
    return eta * jnp.where(tiny, x * tau * (tau - 1) / 2, excess / safe), eta, tau


def _expm1_minus_x(x: Array) -> Array:
    """The value of exp(x) - 1 - x, to the relative accuracy that the subtraction would lose at small x."""
    num_terms = 9 if x.dtype == jnp.float32 else 17  # what is left out is below the rounding for |x| <= 1
    series = np.asarray([1 / math.factorial(k + 2) for k in reversed(range(num_terms))], x.dtype)
    small = jnp.clip(x, -1, 1)
    return jnp.where(jnp.abs(x) < 1, small * small * jnp.polyval(series, small), jnp.expm1(x) - x)


def sampling_constant(
    *,
    beta: ArrayLike,
    delta: ArrayLike,
    num_samples: ArrayLike,
    learning_rate: ArrayLike,
    local_steps: ArrayLike,
    constant: Constant = "published",
) -> Array:
    """A of Theorem 2: the penalty of scheduling n of M devices is (M - n)/n A.

    `constant="published"` is the paper's, on which its Alg. 2 decides:

        A = beta sum_ij D_i^2 D_j^2 (g_i^2 + g_j^2) / (2 M (M - 1) D_min^2 D^2).

    Its proof uses ||sum_j (D_j/D) x_j||^2 <= sum_j (D_j/D)^2 ||x_j||^2 and ||a - b||^2 <= ||a||^2 + ||b||^2, neither of
    which holds in general. `constant="valid"` bounds ||w_i - w|| by g_i + sum_j D_j g_j/D instead:

        A = beta sum_i D_i^2 (g_i + sum_j D_j g_j/D)^2 / (2 M (M - 1) D_min^2),

    and is a bound if all D_i are equal; otherwise the mean of the scheduled models is biased, by a term of first order.
    """
    if constant not in get_args(Constant):
        raise ValueError(f"constant must be one of {', '.join(map(repr, get_args(Constant)))}, got {constant!r}")
    delta, weight = _per_device(delta, num_samples)
    beta = _mean("beta", beta, weight)
    g = local_drift(delta=delta, beta=beta, learning_rate=learning_rate, local_steps=local_steps)
    # D enters only through D_i/D: fourth powers of sample counts are beyond float32.
    relative = weight / jnp.min(weight)
    pairs = weight.size * max(weight.size - 1, 1)  # for M = 1 the penalty is 0 whatever A is
    if constant == "published":
        return _times(beta, jnp.sum(weight**2) * jnp.sum((relative * g) ** 2)) / pairs
    return _times(beta, jnp.sum((relative * (g + jnp.sum(weight * g))) ** 2)) / (2 * pairs)


def scheduling_penalty(
    num_scheduled: ArrayLike,
    *,
    beta: ArrayLike,
    delta: ArrayLike,
    num_samples: ArrayLike,
    learning_rate: ArrayLike,
    local_steps: ArrayLike,
    constant: Constant = "published",
) -> Array:
    """B(Pi) = (M - n)/n A of Theorem 2: what the loss may gain in a round by scheduling n random devices of M.

    0 for n = M, inf for n = 0. `num_scheduled` may have any shape. See `sampling_constant` for `constant`.
    """
    a = sampling_constant(
        beta=beta,
        delta=delta,
        num_samples=num_samples,
        learning_rate=learning_rate,
        local_steps=local_steps,
        constant=constant,
    )
    n, num_devices = _num_scheduled(num_scheduled, delta)
    return jnp.where(n > 0, _times((num_devices - n) / jnp.where(n > 0, n, 1), a), jnp.inf)


def convergence_bound(
    num_scheduled: ArrayLike,
    num_rounds: ArrayLike,
    *,
    rho: ArrayLike,
    beta: ArrayLike,
    delta: ArrayLike,
    num_samples: ArrayLike,
    learning_rate: ArrayLike,
    local_steps: ArrayLike,
    phi: ArrayLike,
    constant: Constant = "published",
) -> Array:
    """eps0 + rho h(tau) + B(Pi) of Theorem 3: the loss of the best model after K rounds, less the least possible.

        eps0 = (1 + sqrt(1 + 4 eta phi K^2 tau (rho h(tau) + B(Pi)))) / (2 eta phi K tau)

    It holds for eta <= 1/beta and tau >= 1. inf for K = 0 or n = 0. `num_scheduled` and `num_rounds` may have any
    shape, the same or one of them a scalar.
    """
    phi = checks.positive("phi", phi, (), low=1e-15, high=1e15)
    tau = checks.within("local_steps", local_steps, lambda x: (x >= 1) & (x <= 1e9), "1 or more, and at most 1e9", ())
    k = jnp.asarray(checks.not_negative("num_rounds", num_rounds))
    n, _ = _num_scheduled(num_scheduled, delta)
    if n.ndim and k.ndim and n.shape != k.shape:
        raise ValueError(f"num_scheduled and num_rounds must have the same shape, got {n.shape} and {k.shape}")
    possible = (n > 0) & (k > 0)
    penalty = scheduling_penalty(
        jnp.where(possible, n, 1),
        beta=beta,
        delta=delta,
        num_samples=num_samples,
        learning_rate=learning_rate,
        local_steps=tau,
        constant=constant,
    )
    delta, weight = _per_device(delta, num_samples)
    h = mean_drift(
        delta=jnp.sum(weight * delta), beta=_mean("beta", beta, weight), learning_rate=learning_rate, local_steps=tau
    )
    floor = _times(_mean("rho", rho, weight), h) + penalty
    progress = jnp.asarray(learning_rate) * phi * tau
    half = 1 / (2 * progress * jnp.where(possible, k, 1))
    # half + sqrt(half^2 + floor/progress), in units of max(half, 1): a small phi makes the square of half overflow.
    unit = lax.stop_gradient(jnp.maximum(half, 1))
    eps0 = unit * (half / unit + jnp.sqrt((half / unit) ** 2 + floor / progress / unit / unit))
    return jnp.where(possible, eps0 + floor, jnp.inf)


def scheduling_objective(
    num_scheduled: ArrayLike, round_s: ArrayLike, *, budget_s: ArrayLike, **convergence: Any
) -> Array:
    """P4: the convergence bound if every round until the budget is spent were like this one, K = floor(T/t*).

    inf if not even one round fits. `convergence` are the keyword arguments of `convergence_bound`.
    """
    round_s = jnp.asarray(checks.not_negative_or_infinite("round_s", round_s))
    budget_s = checks.positive("budget_s", budget_s, ())
    # A round that takes no time schedules nobody, whose bound is inf whatever K is.
    num_rounds = jnp.where(round_s > 0, jnp.floor(budget_s / jnp.where(round_s > 0, round_s, 1)), 0)
    return convergence_bound(num_scheduled, num_rounds, **convergence)


def _num_scheduled(num_scheduled: ArrayLike, delta: ArrayLike) -> tuple[Array, int]:
    """n, checked, and M."""
    num_devices = _deltas(delta).size
    allowed = f"between 0 and M = {num_devices}"
    n = checks.within("num_scheduled", num_scheduled, lambda n: (n >= 0) & (n <= num_devices), allowed)
    return jnp.asarray(n), num_devices


def _deltas(delta: ArrayLike) -> Array:
    deltas = jnp.asarray(checks.not_negative("delta", delta))
    if deltas.ndim != 1 or deltas.size == 0:
        raise ValueError(f"delta must have shape (M,) with M >= 1, one value a device, got {deltas.shape}")
    return deltas


def _per_device(delta: ArrayLike, num_samples: ArrayLike) -> tuple[Array, Array]:
    """The deltas and the weights D_i/D, both (M,)."""
    delta = _deltas(delta)
    num_samples = checks.positive("num_samples", num_samples, (), delta.shape, low=1e-9, high=1e9)
    samples = jnp.broadcast_to(jnp.asarray(num_samples, delta.dtype), delta.shape)
    return delta, samples / jnp.sum(samples)


def _mean(name: str, value: ArrayLike, weight: Array) -> Array:
    value = jnp.asarray(checks.not_negative(name, value, (), weight.shape), weight.dtype)
    return jnp.sum(weight * value) if value.ndim else value
