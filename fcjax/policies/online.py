"""FC without a parameter to tune: phi is estimated from the losses that devices report."""

from __future__ import annotations  # short types in help()

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.policies.convergence import greedy, objective
from fcjax.policies.parameters import checked, positive, reports_of, samples_of
from fcjax.types import Cell, Decision, Policy, RoundContext

_HIGHEST = 1e6  # beyond it, phi no longer matters


class Online(NamedTuple):
    """The state of `online_converge`."""

    phi: Array  # () before the first report
    rounds: Array  # () number of rounds for which the first phi counts
    start: Array  # () 1/F when the first reports arrived, 0 before
    start_round: Array  # () their round


def online_converge(phi: ArrayLike = 0.05, rounds: ArrayLike = 5.0) -> Policy:
    """FC with phi = omega (1 - beta eta/2) estimated from the trajectory, where the paper tunes it by experiments.

    omega is the least 1/|w_k - w*|^2, so it depends on the unknown optimum w*. But phi is also the speed of training:
    without errors of scheduling and drift, Lemma 1 of the paper says

        1/(F(w_k) - F*) - 1/(F(w_0) - F*) >= eta phi tau k.

    The largest phi that the observed losses allow, with F* = 0, the least value of a loss that is not negative, is

        phi_k = (1/F_k - 1/F_0)/(eta tau (k - k_0)).

    F_k is the mean of the last reported losses, weighted by samples, and k the mean of the rounds in which they were
    reported; F_0 and k_0 are those of the first reports. As long as there are few rounds, phi_k is mixed with the given
    phi, which has the weight of `rounds` rounds. If the loss has risen, phi_k is 0.

    Args:
      phi: the value before the first report.
      rounds: the weight of this value.
    """
    first, weight = positive("phi", phi), positive("rounds", rounds)

    def init(cell: Cell) -> Online:
        return Online(first, weight, jnp.zeros_like(first), jnp.zeros_like(first))

    return Policy(init, _select_online_converge)


def _select_online_converge(key: Array, state: Online, context: RoundContext) -> tuple[Online, Decision]:
    context = checked(context)
    reports, training = reports_of(context), context.training
    weight = jnp.where(jnp.asarray(reports.last_round) >= 0, samples_of(context), 0)
    weight = weight / jnp.maximum(jnp.sum(weight), 1)
    loss, index = jnp.sum(weight * reports.loss), jnp.sum(weight * reports.last_round)
    inverse = jnp.where(loss > 0, 1 / jnp.where(loss > 0, loss, 1), 0)
    is_first = state.start == 0
    state = state._replace(
        start=jnp.where(is_first, inverse, state.start).astype(state.start.dtype),
        start_round=jnp.where(is_first, index, state.start_round).astype(state.start.dtype),
    )
    eta = jnp.asarray(checks.positive("training.learning_rate", training.learning_rate, ()), float)
    steps = eta * training.local_steps
    progress = jnp.where(inverse > 0, jnp.maximum(inverse - state.start, 0) / steps, 0)
    phi = (state.rounds * state.phi + progress) / (state.rounds + jnp.maximum(index - state.start_round, 0))
    phi = jnp.minimum(phi, _HIGHEST)
    return state, greedy(context, checks.num_devices(context.cell), lambda n, t: objective(n, t, phi, context))
