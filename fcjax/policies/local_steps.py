"""Policies that decide how many local steps devices take between aggregations."""

from __future__ import annotations  # short types in help()

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fcjax.policies.parameters import available_of, block_for_each, checked, positive
from fcjax.theory import bounds
from fcjax.types import Cell, Decision, Policy, RoundContext
from fcjax.wireless.access import allocate
from fcjax.wireless.decisions import as_decided


def adaptive_steps(phi: ArrayLike = 0.05) -> Policy:
    """Schedules all available devices, with the number of local steps that a convergence bound favours.

    S. Wang, T. Tuor, T. Salonidis, K. K. Leung, C. Makaya, T. He, K. Chan, "Adaptive Federated Learning in Resource
    Constrained Edge Computing Systems", IEEE Journal on Selected Areas in Communications, 2019. The number of steps tau
    minimises

        G(tau) = a + sqrt(a^2 + rho h(tau)/(eta phi tau)) + rho h(tau),   a = (c tau + b)/(2 eta phi R' tau),

    over tau = 1, ..., `training.local_steps`, with h = `fcjax.theory.bounds.mean_drift`. The only resource is time: R'
    = `training.budget_s` - b - c, a local step takes c, and an aggregation b. As in the paper, c and b are measured
    anew in each round: c is the time of a step on the slowest available device, and b the round time if computation
    took no time. rho, beta and delta are means over all devices, weighted by their numbers of samples. The paper raises
    tau at most tenfold from one round to the next; here, `training.local_steps` is the only limit. phi has the same
    meaning as in `fast_converge`; the authors use 0.025 for an SVM and 5e-5 for CNNs.
    """
    weight = positive("phi", phi)

    def init(cell: Cell) -> Array:
        block_for_each("local-steps", cell)
        return weight

    return Policy(init, _select_adaptive_steps)


def _select_adaptive_steps(key: Array, phi: Array, context: RoundContext) -> tuple[Array, Decision]:
    context = checked(context)
    observation, cell, training = context.observation, context.cell, context.training
    scheduled = available_of(context)
    compute_s = jnp.asarray(observation.compute_s)
    step_s = jnp.max(jnp.where(scheduled, compute_s, 0)) / training.local_steps
    at_once = dataclasses.replace(observation, compute_s=jnp.zeros_like(compute_s))
    aggregation_s = allocate(scheduled, at_once, cell).round_s
    left_s = jnp.maximum(jnp.asarray(training.budget_s, float) - aggregation_s - step_s, 0)

    def bound(steps: Array) -> Array:
        """Returns G: the bound of all devices after R'/(c tau + b) rounds, which need not be whole."""
        round_s = step_s * steps + aggregation_s
        return bounds.convergence_bound(
            scheduled.size,
            jnp.where(round_s > 0, left_s / jnp.where(round_s > 0, round_s, 1), 0),
            rho=context.estimates.rho,
            beta=context.estimates.beta,
            delta=context.estimates.delta,
            num_samples=training.num_samples,
            learning_rate=training.learning_rate,
            local_steps=steps,
            phi=phi,
        )

    steps = jnp.arange(1, training.local_steps + 1)
    best = steps[jnp.argmin(jax.vmap(bound)(steps))]
    wanted = Decision(scheduled, jnp.zeros(scheduled.size), jnp.zeros(()), local_steps=best)
    decision = allocate(scheduled, *as_decided(wanted, observation, cell, training))
    return phi, dataclasses.replace(decision, local_steps=best)
