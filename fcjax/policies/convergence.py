"""Policies that trade round time against a convergence bound: FC (Alg. 2), the exact solution, a fixed number."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.policies.parameters import uploads_of, with_number, with_parameter
from fcjax.theory import bounds
from fcjax.types import Decision, Policy, RoundContext
from fcjax.wireless.access import scheme_of
from fcjax.wireless.sets import time_with_share


def fast_converge(phi: ArrayLike = 0.05) -> Policy:
    """FC, Alg. 2: adds the device that lengthens the round least, until the convergence bound would grow.

    W. Shi, S. Zhou, Z. Niu, M. Jiang, L. Geng, "Joint Device Scheduling and Resource Allocation for Latency Constrained
    Wireless Federated Learning", IEEE Transactions on Wireless Communications, 2021. The decisions equal those of the
    published algorithm, with one search per added device instead of one per candidate.
    """
    return with_parameter("phi", phi, _select_fast_converge)


def _select_fast_converge(key: Array, phi: Array, context: RoundContext) -> tuple[Array, Decision]:
    num_devices = checks.num_devices(context.cell)
    return phi, greedy(context, num_devices, lambda n, round_s: objective(n, round_s, phi, context))


def exact(phi: ArrayLike = 0.05) -> Policy:
    """Solves P4 exactly: its objective depends on the set only through its size and round time.

    The best set is therefore the fastest set of some size. The paper calls the problem combinatorial and solves it
    greedily.
    """
    return with_parameter("phi", phi, _select_exact)


def _select_exact(key: Array, phi: Array, context: RoundContext) -> tuple[Array, Decision]:
    upload, scheme = uploads_of(context), scheme_of(context.cell)
    scheduled = scheme.cheapest_set(lambda n, round_s: objective(n, round_s, phi, context), lax.stop_gradient(upload))
    return phi, scheme.allocate(scheduled & context.observation.available, upload)


def fixed(n: ArrayLike) -> Policy:
    """Schedules n devices in FC's greedy order: Alg. 2 without its stopping rule, as in the paper's Fig. 4."""
    return with_number(n, _select_fixed)


def _select_fixed(key: Array, n: Array, context: RoundContext) -> tuple[Array, Decision]:
    return n, greedy(context, n, lambda n, round_s: jnp.zeros_like(round_s))


def greedy(context: RoundContext, most: ArrayLike, cost: Callable[[Array, Array], Array]) -> Decision:
    """Alg. 2: starts with the fastest device and adds up to `most` devices while cost(n, round_s) does not grow."""
    upload, scheme = uploads_of(context), scheme_of(context.cell)
    alone_s = time_with_share(1, upload)
    first = jnp.argmin(alone_s)
    one = jnp.array(1)

    def add(state):
        scheduled, n, least, _ = state
        device, round_s = scheme.fastest_addition(scheduled, upload)
        new = cost(n + 1, round_s)
        worse = ~(new <= least)  # also true for NaN, from the estimates of a diverged model
        added = scheduled | (jnp.arange(scheduled.size) == device)
        return jnp.where(worse, scheduled, added), jnp.where(worse, n, n + 1), jnp.where(worse, least, new), worse

    start = jnp.arange(alone_s.size) == first, one, cost(one, alone_s[first]), jnp.array(False)
    scheduled, *_ = lax.while_loop(lambda state: ~state[3] & (state[1] < most), add, start)
    # A cost that is always the same, or inf, does not exclude devices that are not available.
    return scheme.allocate(scheduled & context.observation.available, upload)


def objective(n: ArrayLike, round_s: ArrayLike, phi: ArrayLike, context: RoundContext) -> Array:
    """Returns the objective of P4 for n devices and a round time, which `fast_converge` and `exact` minimise."""
    training, estimates = context.training, context.estimates
    return bounds.scheduling_objective(
        n,
        round_s,
        budget_s=training.budget_s,
        rho=estimates.rho,
        beta=estimates.beta,
        delta=estimates.delta,
        num_samples=training.num_samples,
        learning_rate=training.learning_rate,
        local_steps=training.local_steps,
        phi=phi,
    )


def optimality_gap(scheduled: ArrayLike, round_s: ArrayLike, context: RoundContext, phi: ArrayLike = 0.05) -> Array:
    """Returns the objective of P4 for a schedule over that of the best one, (): 1 is optimal.

    It is 1 too if no schedule fits in the budget, and NaN if nobody is scheduled or there is nothing to upload. A
    policy that decides powers, local steps or batches has other round times than the best schedule may have, so its gap
    may be below 1.

    Args:
      scheduled: (M,) bool, any set of devices.
      round_s: () s, its round time.
      context: what is known about the round.
      phi: the parameter of the objective.
    """
    scheduled = checks.mask("scheduled", scheduled, checks.num_devices(context.cell))
    phi, best = _select_exact(jax.random.key(0), jnp.asarray(phi, float), context)
    cost, least = (
        objective(jnp.sum(mask), seconds, phi, context)
        for mask, seconds in ((scheduled, jnp.asarray(round_s)), (best.scheduled, best.round_s))
    )
    gap = jnp.where(jnp.isinf(least), jnp.where(jnp.isinf(cost), 1, jnp.nan), cost / least)
    return jnp.where(jnp.any(scheduled), gap, jnp.nan)
