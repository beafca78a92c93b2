"""FC+: FC with a late phase of large sets, and estimates that a lone device does not spoil."""

from __future__ import annotations  # short types in help()

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.policies.parameters import checked, positive, reports_of, uploads_of
from fcjax.theory import bounds
from fcjax.types import Cell, Decision, Policy, RoundContext
from fcjax.wireless.access import scheme_of


class Plus(NamedTuple):
    """The state of `fast_converge_plus`."""

    phi: Array  # () of P4
    late_phi: Array  # () of P4 in the late phase
    late: Array  # () part of the budget
    delta: Array  # (M,) unbiased divergences, 0 before the first


def fast_converge_plus(phi: ArrayLike = 0.05, late_phi: ArrayLike = 5.0, late: ArrayLike = 0.1) -> Policy:
    """FC+: solves P4 with a larger phi in the last tenth of the budget, and with unbiased divergences.

    It differs from `fast_converge` in five ways:

    - P4 assumes that all rounds are alike. But later rounds correct the error of scheduling few devices, and only the
      last ones leave theirs in the final model. So few devices train in short rounds at first, and in the last part of
      the budget, `late`, a larger phi favours more devices, as larger batches do at the end of SGD. How many depends on
      delta: with iid data there are still few.
    - A round that would end after the budget is not chosen: it would not take place.
    - delta_i is the distance from the mean of the n scheduled updates, which contains the device's own, so its square
      is on average only (n - 1)/n of the true value. FC+ corrects this. If n = 1, delta is 0 by construction, whatever
      the data; FC then schedules one device again. FC+ keeps the last value instead.
    - P4 is solved exactly, as in `exact`.
    - The published constant divides by the least amount of data on a device, squared, so that it overrates B(Pi) where
      amounts differ. FC+ takes them as equal in P4.

    Args:
      phi: the parameter of P4.
      late_phi: the same in the late phase.
      late: the part of the budget that is the late phase, from 0 to 1.
    """
    early, later = positive("phi", phi), positive("late_phi", late_phi)
    part = jnp.asarray(checks.within("late", late, lambda x: (x >= 0) & (x <= 1), "from 0 to 1", ()), float)
    return Policy(lambda cell: _first(cell, early, later, part), _select_fast_converge_plus)


def _first(cell: Cell, phi: Array, late_phi: Array, late: Array) -> Plus:
    return Plus(phi, late_phi, late, jnp.zeros(checks.num_devices(cell), phi.dtype))


def _select_fast_converge_plus(key: Array, state: Plus, context: RoundContext) -> tuple[Plus, Decision]:
    context = checked(context)
    training, estimates = context.training, context.estimates
    delta = _unbiased(state.delta, context)
    budget_s = jnp.asarray(checks.real("training.budget_s", training.budget_s, ()), float)
    left_s = budget_s - checks.real("elapsed_s", context.elapsed_s, ())
    phi = jnp.where(left_s < state.late * budget_s, state.late_phi, state.phi)

    def cost(n: Array, round_s: Array) -> Array:
        value = bounds.scheduling_objective(
            n,
            round_s,
            budget_s=budget_s,
            rho=estimates.rho,
            beta=estimates.beta,
            delta=delta,
            num_samples=1,
            learning_rate=training.learning_rate,
            local_steps=training.local_steps,
            phi=phi,
        )
        return jnp.where(round_s <= left_s, value, jnp.inf)

    upload, scheme = uploads_of(context), scheme_of(context.cell)
    scheduled = scheme.cheapest_set(cost, lax.stop_gradient(upload))
    return state._replace(delta=delta), scheme.allocate(scheduled & context.observation.available, upload)


def _unbiased(last: Array, context: RoundContext) -> Array:
    """Returns delta without the bias of the mean; devices that were alone, or are not new, keep the last value."""
    estimate = jnp.asarray(checks.real("estimates.delta", context.estimates.delta, (), last.shape), last.dtype)
    reported = jnp.asarray(reports_of(context).last_round)
    new = (reported >= 0) & (reported == jnp.asarray(context.round_index) - 1)
    n = jnp.sum(new)
    kept = jnp.where(last > 0, last, estimate)
    return jnp.where(new & (n > 1), estimate * jnp.sqrt(n / jnp.maximum(n - 1, 1)), kept).astype(last.dtype)
