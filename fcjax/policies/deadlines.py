"""Policies that schedule as many devices as can finish by a deadline: client selection, asymptotic and frugal."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax.policies.parameters import uploads_of, with_parameter
from fcjax.theory.least_energy import least_energy
from fcjax.types import Decision, Policy, RoundContext
from fcjax.wireless import tdma
from fcjax.wireless.access import equal_share, required_share, round_time, scheme_of
from fcjax.wireless.sets import smallest_mask, time_with_share


def client_selection(threshold_s: ArrayLike) -> Policy:
    """CS: schedules the most devices, fastest first, that finish by a threshold with equal shares of the bandwidth.

    T. Nishio, R. Yonetani, "Client Selection for Federated Learning with Heterogeneous Resources in Mobile Edge", IEEE
    International Conference on Communications, 2019. Equal shares are Shi et al.'s interpretation. Under TDMA the
    devices send one after another, as in the original.
    """
    return with_parameter("threshold_s", threshold_s, _select_client_selection)


def _select_client_selection(key: Array, threshold_s: Array, context: RoundContext) -> tuple[Array, Decision]:
    upload, cell = uploads_of(context), context.cell
    num_devices = upload.unit_s.size
    if cell.access == "tdma":
        alone_s = time_with_share(1, upload)
        fastest = jax.vmap(lambda n: smallest_mask(alone_s, n))(jnp.arange(1, num_devices + 1))
        round_s = jax.vmap(lambda mask: tdma.round_time(mask, upload))(fastest)
        n = jnp.maximum(jnp.sum(round_s <= threshold_s), 1)
        return threshold_s, tdma.allocate(fastest[n - 1], upload)

    def share_of(n):
        return equal_share(n.astype(upload.unit_s.dtype), cell)

    def done(n):
        """Returns how many finish in time at equal shares; it falls with n, so bisection finds the largest n."""
        return jnp.sum(time_with_share(share_of(n), upload) <= threshold_s)

    def bisect(_, bracket):
        low, high = bracket  # n = low is feasible (or 1), n = high is not
        middle = (low + high) // 2
        possible = done(middle) >= middle
        return jnp.where(possible, middle, low), jnp.where(possible, high, middle)

    bracket = jnp.array(1), jnp.array(num_devices + 1)
    n, _ = lax.fori_loop(0, num_devices.bit_length(), bisect, bracket)
    scheduled = smallest_mask(time_with_share(share_of(n), upload), n)
    share = jnp.where(scheduled, share_of(n), 0)
    return threshold_s, Decision(scheduled, share, round_time(scheduled, share, context.observation, cell))


def asymptotic(threshold_s: ArrayLike) -> Policy:
    """AS: schedules the most devices that finish by a threshold when the bandwidth is split optimally.

    M. Chen, Z. Yang, W. Saad, C. Yin, H. V. Poor, S. Cui, "A Joint Learning and Communications Framework for Federated
    Learning over Wireless Networks", IEEE Transactions on Wireless Communications, 2021. In Shi et al.'s
    interpretation, scheduling as many devices as possible gives the best convergence after infinitely many rounds.
    """
    return with_parameter("threshold_s", threshold_s, _select_asymptotic)


def _select_asymptotic(key: Array, threshold_s: Array, context: RoundContext) -> tuple[Array, Decision]:
    upload, scheme = uploads_of(context), scheme_of(context.cell)
    if context.cell.access == "fdma":
        # A set finishes by the threshold iff the shares it requires sum to at most 1.
        share = jnp.sort(required_share(threshold_s, context.observation, context.cell))
        n = jnp.maximum(jnp.sum(jnp.cumsum(share) <= 1), 1)
    else:
        n = jnp.maximum(jnp.sum(scheme.fastest_sets(upload)[0] <= threshold_s), 1)
    return threshold_s, scheme.allocate(scheme.fastest_set(n, upload)[0], upload)


def frugal(deadline_s: ArrayLike) -> Policy:
    """Schedules the devices of AS and spends the least energy with which they finish by the deadline.

    See `fcjax.least_energy`: shares, powers and CPU frequencies are decided together. If not even one device can finish
    by the deadline, it decides as AS does. Only FDMA.
    """
    return with_parameter("deadline_s", deadline_s, _select_frugal)


def _select_frugal(key: Array, deadline_s: Array, context: RoundContext) -> tuple[Array, Decision]:
    scheduled = _select_asymptotic(key, deadline_s, context)[1].scheduled
    _, decision = least_energy(scheduled, deadline_s, context.observation, context.cell, context.training)
    return deadline_s, decision
