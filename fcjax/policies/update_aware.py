"""Policies that know this round's update norms: BN2, BC-BN2 and BN2-C, and importance and channel awareness.

All available devices compute before these policies decide, so the computation times they see are all the same.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.policies.parameters import (
    Choice,
    available_of,
    checked,
    draw,
    largest,
    number_of,
    positive,
    reports_of,
    samples_of,
    upload_time,
    with_candidates,
    with_number,
)
from fcjax.types import Decision, Policy, RoundContext
from fcjax.wireless.access import allocate


def best_norm(n: ArrayLike = 3) -> Policy:
    """BN2: schedules the n devices with the largest update norms.

    M. M. Amiri, D. Gunduz, S. R. Kulkarni, H. V. Poor, "Convergence of Update Aware Device Scheduling for Federated
    Learning at the Wireless Edge", IEEE Transactions on Wireless Communications, 2021. Here an upload always has
    `cell.upload_bits` and takes as long as it needs; there it has a fixed duration, and the channel determines how
    strongly the update is compressed. The paper's BC, the n best channels, is `proportional_fair`.
    """
    return with_number(n, _select_best_norm, asks_norms=True)


def _select_best_norm(key: Array, n: Array, context: RoundContext) -> tuple[Array, Decision]:
    context = checked(context)
    scheduled = _largest(_norms(context), n, available_of(context), context)
    return n, allocate(scheduled, context.observation, context.cell)


def _norms(context: RoundContext) -> Array:
    return jnp.asarray(reports_of(context).update_norm)


def _largest(norms: Array, n: Array, available: Array, context: RoundContext) -> Array:
    # Of equal norms, the best channel: the decision must not depend on how devices are numbered.
    return largest(norms, n, available, tie=jnp.asarray(context.observation.gain))


def best_channel_best_norm(n: ArrayLike = 3, candidates: ArrayLike | None = None) -> Policy:
    """BC-BN2: schedules, of the devices with the best channels, the n with the largest update norms.

    Amiri et al., as in `best_norm`.

    Args:
      n: the number of devices, K.
      candidates: the number of devices with the best channels, K_c, from n to M; by default 2n.
    """
    return with_candidates(n, candidates, _select_best_channel_best_norm, asks_norms=True)


def _select_best_channel_best_norm(key: Array, state: Choice, context: RoundContext) -> tuple[Choice, Decision]:
    context = checked(context)
    best = largest(jnp.asarray(context.observation.gain), state.candidates, available_of(context))
    scheduled = _largest(_norms(context), state.n, best, context)
    return state, allocate(scheduled, context.observation, context.cell)


def best_norm_after_channel(n: ArrayLike = 3, upload_s: ArrayLike = 0.1) -> Policy:
    """BN2-C: schedules the n devices whose updates keep the largest norms when compressed to what the channel carries.

    Amiri et al., as in `best_norm`. There, devices report the norm of the sparse update that they would send over 1/n
    of the channel within the fixed time of an upload. Policies here do not see the entries of an update. If the channel
    carries a fraction f of the upload's bits, the largest entries hold at least f of the squared norm, with equality if
    all entries are equally large. This bound, norm * sqrt(f), stands for the norm of the sparse update. The bits of the
    upload themselves remain `cell.upload_bits`.

    Args:
      n: the number of devices, K.
      upload_s: s, the time in which f is measured. If all devices can send all their bits in it, this is BN2.
    """
    seconds = positive("upload_s", upload_s)
    return Policy(lambda cell: _Timed(number_of(n, cell), seconds), _select_best_norm_after_channel, asks_norms=True)


class _Timed(NamedTuple):
    n: Array
    upload_s: Array


def _select_best_norm_after_channel(key: Array, state: _Timed, context: RoundContext) -> tuple[_Timed, Decision]:
    context = checked(context)
    carried = jnp.minimum(state.upload_s / upload_time(state.n, context), 1)
    scheduled = _largest(_norms(context) * jnp.sqrt(carried), state.n, available_of(context), context)
    return state, allocate(scheduled, context.observation, context.cell)


def importance(n: ArrayLike = 3, rho: ArrayLike = 0.5) -> Policy:
    """Draws n devices, more likely those with large updates, much data and fast uploads.

    J. Ren, Y. He, D. Wen, G. Yu, K. Huang, D. Guo, "Scheduling for Cellular Federated Edge Learning with Importance and
    Channel Awareness", IEEE Transactions on Wireless Communications, 2020. The first device is k with the probability
    p_k that minimises the mean of rho |g_k D_k/(D p_k) - g|^2 + (1 - rho) T_k, where g = sum_k g_k D_k/D, which is

        p_k = (D_k/D) |g_k| sqrt(rho/((1 - rho) T_k + lambda)),

    with lambda such that the probabilities sum to 1. Further devices are drawn in the same way from those left.

    Adapted: g_k is the update of local training, T_k the time of an upload over 1/n of the uplink, and D counts the
    available devices. The paper scales each gradient by 1/p_k, which makes the aggregate unbiased. Here the aggregate
    is the mean weighted by samples, so it is biased towards devices with large p_k.

    Args:
      n: the number of devices.
      rho: the weight of the update against the upload time, positive and at most 1. It trades squared norms against
        seconds, so a good value depends on the model; with 1 the channel does not matter.
    """
    is_allowed = lambda x: (x > 0) & (x <= 1)  # noqa: E731
    weight = jnp.asarray(checks.within("rho", rho, is_allowed, "positive and at most 1", ()), float)
    return Policy(lambda cell: _Weighted(number_of(n, cell), weight), _select_importance, asks_norms=True)


class _Weighted(NamedTuple):
    n: Array
    rho: Array


def _select_importance(key: Array, state: _Weighted, context: RoundContext) -> tuple[_Weighted, Decision]:
    context = checked(context)
    available = available_of(context)
    samples = jnp.where(available, samples_of(context), 0)
    size = samples / jnp.sum(samples) * _norms(context) * jnp.sqrt(state.rho)
    delay = jnp.where(state.rho < 1, (1 - state.rho) * upload_time(state.n, context), 0)
    scheduled = draw(key, _probabilities(size, delay), state.n, available)
    return state, allocate(scheduled, context.observation, context.cell)


def _probabilities(size: Array, delay: Array) -> Array:
    """Returns size/sqrt(delay + lambda), (M,), with lambda such that the sum is 1; 0 where size is 0 or delay inf.

    The unknown is mu = lambda + the least delay, which is positive. With sizes a_k, of which a_0 belongs to the least
    delay, a_0/sqrt(mu) <= sum_k p_k <= sum_k a_k/sqrt(mu), so mu is between a_0^2 and (sum_k a_k)^2.
    """
    possible = (size > 0) & jnp.isfinite(delay)
    size = jnp.where(possible, size, 0)
    first = jnp.argmin(jnp.where(possible, delay, jnp.inf))
    later = jnp.where(possible, delay - delay[first], 0)
    total = jnp.sum(size)

    def bisect(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = jnp.sqrt(low) * jnp.sqrt(high)
        too_low = jnp.sum(size / jnp.sqrt(later + middle)) > 1
        return jnp.where(too_low, middle, low), jnp.where(too_low, high, middle)

    # Without any update all probabilities are 0, and `draw` takes devices uniformly.
    bracket = tuple(jnp.where(total > 0, x * x, 1) for x in (size[first], total))
    _, mu = lax.fori_loop(0, _NUM_BISECTIONS, bisect, bracket)
    return size / jnp.sqrt(later + mu)


_NUM_BISECTIONS = 60  # of a ratio of at most 1e30 in float32, down to rounding
