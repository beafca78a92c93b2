"""Convergence bounds: g, h and A, the penalty B of Theorem 2, the bound of Theorem 3, and the objective of P4.

Theorems are numbered as in the paper. Theorem 1 is the bandwidth allocation. Theorem 2 bounds the cost of scheduling
only n of M devices in a round by B(Pi). Theorem 3 bounds the loss of the best model after K rounds by
eps0 + rho h(tau) + B(Pi).

All are plain functions of arrays, differentiable in every argument; n, K and tau may be floats. For eta far above
1/beta they may overflow to inf, and their derivatives are then meaningless. From `sampling_constant` on, `delta` is
(M,), and `num_samples` (D_i), `beta` and `rho` are scalars or (M,); beta and rho are averaged with weights D_i/D. The
paper's symbols are learning_rate = eta, local_steps = tau, phi = varphi, budget_s = T.
"""

from __future__ import annotations  # short types in help()

import math
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.wireless.lambertw import x_minus_log1p

Constant = Literal["published", "valid", "tight"]


def local_drift(*, delta: ArrayLike, beta: ArrayLike, learning_rate: ArrayLike, local_steps: ArrayLike) -> Array:
    """Returns g(tau) = delta/beta ((eta beta + 1)^tau - 1): the drift of tau local steps from tau centralised ones."""
    delta, beta = _drift_of(delta, beta)
    unit_excess, eta, tau = _unit_excess(beta, learning_rate, local_steps)
    return _times(delta, eta * tau + unit_excess)


def mean_drift(*, delta: ArrayLike, beta: ArrayLike, learning_rate: ArrayLike, local_steps: ArrayLike) -> Array:
    """Returns h(tau) = delta/beta ((eta beta + 1)^tau - 1) - eta delta tau: the drift of the mean of all models."""
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
            f"delta and beta must have shapes that broadcast, got {delta.shape} and {jnp.shape(beta)}"
        ) from error
    return delta, beta


def _times(factor: ArrayLike, bound: Array) -> Array:
    """Multiplies, with 0 times inf = 0."""
    factor = jnp.asarray(factor)
    return factor * jnp.where((factor == 0) & jnp.isinf(bound), 0, bound)


def _unit_excess(beta: ArrayLike, learning_rate: ArrayLike, local_steps: ArrayLike) -> tuple[Array, Array, Array]:
    """Returns h(tau)/delta, without cancellation at small eta beta, and eta and tau."""
    eta = jnp.asarray(checks.positive("learning_rate", learning_rate, (), low=1e-10, high=1e10))
    tau = jnp.asarray(checks.not_negative("local_steps", local_steps, (), high=1e9))
    x = eta * beta
    # (1 + x)^tau - 1 - tau x = (tau - 1) (x l - (x - l)) + (1 + x) (exp(b) - 1 - b), l = ln(1 + x), b = (tau - 1) l:
    # for tau >= 1 neither term is negative, and for tau = 1 both are 0.
    # Where x tau is below the rounding error, only the first term of the series counts, and x^2 may underflow.
    tiny = x * jnp.maximum(tau, 1) < jnp.finfo(x.dtype).eps / 4
    safe = jnp.where(tiny, 1, x)
    log = jnp.log1p(safe)
    excess = (tau - 1) * (safe * log - x_minus_log1p(safe)) + (1 + safe) * expm1_minus_x((tau - 1) * log)
    return eta * jnp.where(tiny, x * tau * (tau - 1) / 2, excess / safe), eta, tau


def expm1_minus_x(x: Array) -> Array:
    """Computes exp(x) - 1 - x to full relative accuracy, also at small x."""
    num_terms = 9 if x.dtype == jnp.float32 else 17  # the remainder is below the rounding error for |x| <= 1
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
    rho: ArrayLike | None = None,
) -> Array:
    """Returns A of Theorem 2: the penalty of scheduling n of M devices is (M - n)/n A.

    `constant="published"` is the paper's, which Alg. 2 uses:

        A = beta sum_ij D_i^2 D_j^2 (g_i^2 + g_j^2) / (2 M (M - 1) D_min^2 D^2).

    Its proof uses ||sum_j (D_j/D) x_j||^2 <= sum_j (D_j/D)^2 ||x_j||^2 and ||a - b||^2 <= ||a||^2 + ||b||^2. Neither
    holds in general. `constant="valid"` instead bounds ||w_i - w|| by g_i + sum_j D_j g_j/D:

        A = beta sum_i D_i^2 (g_i + sum_j D_j g_j/D)^2 / (2 M (M - 1) D_min^2).

    This is a bound if all D_i are equal. Otherwise the mean of the scheduled models has a first-order bias.
    `constant="tight"` is a bound for any D_i; for equal ones it is up to 4 times smaller than "valid". It needs `rho`.
    With p_i = D_i/D and c^2 = M sum_i p_i^2 - 1, the squared coefficient of variation of the D_i,

        A = (beta V/2 + rho c sqrt(V)) / (M - 1),   V = sum_j p_j^2 sum_i (D_i/D_min)^2 g_i^2.

    The first term is M/2 times the published constant. The bound is attained for equal D_i, tau = 1 and Hessians that
    are beta times the identity, if each delta_i is the actual divergence.

    Proof. Let y_i = D_i (w_i - w), S = sum_{i in Pi} y_i, D_Pi = sum_{i in Pi} D_i and q = (M - n)/(n (M - 1)). Because
    sum_i y_i = 0, E[S] = 0 and E||S||^2 = n^2 q/M sum_i ||y_i||^2. Let x_i = D_i (w_i - v), so ||x_i|| <= D_i g_i. Then
    y_i = x_i - p_i sum_j x_j: the projection I - p 1^T applied to the x_i. Its norm is that of the projection p 1^T, so
    sum_i ||y_i||^2 <= M sum_j p_j^2 sum_i D_i^2 g_i^2. With w^Pi - w = S/D_Pi and D_Pi >= n D_min this gives
    R^2 = E||w^Pi - w||^2 <= q V. As E[D_Pi (w^Pi - w)] = E[S] = 0, E[w^Pi - w] = E[(1 - D_Pi/E[D_Pi]) (w^Pi - w)]. By
    Cauchy and Schwarz, its norm is at most sqrt(var(D_Pi)) R/E[D_Pi] = c sqrt(q) R. F is beta-smooth and
    ||grad F(w)|| <= rho, hence E[F(w^Pi) - F(w)] <= rho c sqrt(q) R + beta R^2/2 <= q (rho c sqrt(V) + beta V/2).
    """
    if constant not in get_args(Constant):
        raise ValueError(f"constant must be one of {', '.join(map(repr, get_args(Constant)))}, got {constant!r}")
    delta, weight = _per_device(delta, num_samples)
    beta = _mean("beta", beta, weight)
    g = local_drift(delta=delta, beta=beta, learning_rate=learning_rate, local_steps=local_steps)
    # Only D_i/D is used, because fourth powers of sample counts overflow float32.
    relative = weight / jnp.min(weight)
    others = max(weight.size - 1, 1)  # for M = 1 the penalty is 0 for any A
    pairs = weight.size * others
    if constant == "valid":
        return _times(beta, jnp.sum((relative * (g + jnp.sum(weight * g))) ** 2)) / (2 * pairs)
    square = jnp.sum(weight**2) * jnp.sum((relative * g) ** 2)
    if constant == "published":
        return _times(beta, square) / pairs
    if rho is None:
        raise ValueError("constant='tight' needs rho, the Lipschitz constant of the losses: pass rho")
    variation = _root(weight.size * jnp.sum((weight - 1 / weight.size) ** 2))
    bias = _times(_mean("rho", rho, weight) * variation, _root(square))
    return (_times(beta, square) / 2 + bias) / others


def _root(square: Array) -> Array:
    """Returns the square root, with derivative 0 at 0."""
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1)), 0)


def scheduling_penalty(
    num_scheduled: ArrayLike,
    *,
    beta: ArrayLike,
    delta: ArrayLike,
    num_samples: ArrayLike,
    learning_rate: ArrayLike,
    local_steps: ArrayLike,
    constant: Constant = "published",
    rho: ArrayLike | None = None,
) -> Array:
    """Returns B(Pi) = (M - n)/n A of Theorem 2: the possible rise of the loss when n random devices are scheduled.

    It is 0 for n = M and inf for n = 0. `num_scheduled` may have any shape. See `sampling_constant` for `constant`,
    and for `rho`, which only "tight" needs.
    """
    a = sampling_constant(
        beta=beta,
        delta=delta,
        num_samples=num_samples,
        learning_rate=learning_rate,
        local_steps=local_steps,
        constant=constant,
        rho=rho,
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
    """Returns eps0 + rho h(tau) + B(Pi) of Theorem 3: a bound on the best model's excess loss after K rounds.

        eps0 = (1 + sqrt(1 + 4 eta phi K^2 tau (rho h(tau) + B(Pi)))) / (2 eta phi K tau)

    It holds for eta <= 1/beta and tau >= 1, and is inf for K = 0 or n = 0. `num_scheduled` and `num_rounds` may have
    any shape, but must have the same shape unless one is a scalar.
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
        rho=rho,
    )
    delta, weight = _per_device(delta, num_samples)
    h = mean_drift(
        delta=jnp.sum(weight * delta), beta=_mean("beta", beta, weight), learning_rate=learning_rate, local_steps=tau
    )
    floor = _times(_mean("rho", rho, weight), h) + penalty
    progress = jnp.asarray(checks.real("learning_rate", learning_rate, ())) * phi * tau
    half = 1 / (2 * progress * jnp.where(possible, k, 1))
    # half + sqrt(half^2 + floor/progress), in units of max(half, 1), because half^2 overflows for small phi.
    unit = lax.stop_gradient(jnp.maximum(half, 1))
    eps0 = unit * (half / unit + jnp.sqrt((half / unit) ** 2 + floor / progress / unit / unit))
    return jnp.where(possible, eps0 + floor, jnp.inf)


def scheduling_objective(
    num_scheduled: ArrayLike, round_s: ArrayLike, *, budget_s: ArrayLike, **convergence: Any
) -> Array:
    """Returns the objective of P4: the convergence bound if all rounds were like this one, K = floor(T/t*).

    It is inf if no round fits. `convergence` are the keyword arguments of `convergence_bound`.
    """
    round_s = jnp.asarray(checks.not_negative_or_infinite("round_s", round_s))
    budget_s = checks.positive("budget_s", budget_s, ())
    # A round that takes no time schedules no device, and its bound is inf for any K.
    num_rounds = jnp.where(round_s > 0, jnp.floor(budget_s / jnp.where(round_s > 0, round_s, 1)), 0)
    return convergence_bound(num_scheduled, num_rounds, **convergence)


def _num_scheduled(num_scheduled: ArrayLike, delta: ArrayLike) -> tuple[Array, int]:
    """Checks n; returns n and M."""
    num_devices = _deltas(delta).size
    allowed = f"between 0 and M = {num_devices}"
    n = checks.within("num_scheduled", num_scheduled, lambda n: (n >= 0) & (n <= num_devices), allowed)
    return jnp.asarray(n), num_devices


def _deltas(delta: ArrayLike) -> Array:
    deltas = jnp.asarray(checks.not_negative("delta", delta))
    if deltas.ndim != 1 or deltas.size == 0:
        raise ValueError(f"delta must have shape (M,) with M >= 1, one value per device, got {deltas.shape}")
    return deltas


def _per_device(delta: ArrayLike, num_samples: ArrayLike) -> tuple[Array, Array]:
    """Returns the deltas and the weights D_i/D, both (M,)."""
    delta = _deltas(delta)
    num_samples = checks.positive("num_samples", num_samples, (), delta.shape, low=1e-9, high=1e9)
    samples = jnp.broadcast_to(jnp.asarray(num_samples, delta.dtype), delta.shape)
    return delta, samples / jnp.sum(samples)


def _mean(name: str, value: ArrayLike, weight: Array) -> Array:
    value = jnp.asarray(checks.not_negative(name, value, (), weight.shape), weight.dtype)
    return jnp.sum(weight * value) if value.ndim else value
