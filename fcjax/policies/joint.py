"""A policy that decides local steps and batch sizes together with the schedule."""

from __future__ import annotations  # short types in help()

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.policies.parameters import available_of, checked, positive, samples_of, uploads_of
from fcjax.theory import bounds
from fcjax.types import Cell, Decision, Policy, RoundContext
from fcjax.wireless.access import scheme_of
from fcjax.wireless.decisions import as_decided

_LEVELS = (np.inf, 1, 1 / 2, 1 / 4, 1 / 8, 1 / 16)  # of computation, as fractions of the median device's time
_LEAST_RATIO = 1 / 4  # batch of a slow device over that of the median one


class Joint(NamedTuple):
    """The state of `joint`."""

    omega: Array  # ()
    noise: Array  # () sigma^2
    local_steps: Array  # (M,) of the last round with the device, 0 before
    batch_size: Array  # (M,) of the last round with the device, 0 before


def joint(omega: ArrayLike = 5e-5, noise: ArrayLike = 100.0) -> Policy:
    """Decides the schedule, the local steps and the batch sizes of a round together, by the bound that FC uses.

    Solves min over Pi, tau and d of the objective of P4, with tau = 1, ..., `training.local_steps`, exactly for each
    pair (tau, d): the best set is the fastest one of some size, as in `exact`. W. Shi et al., whom `fast_converge`
    cites, name this problem as future work.

    Batches d_i follow from a time for computation: each device takes as many samples per step as it can process in u
    times the median device's time for a full batch, at least u/4 of a full batch and at most a full one. So slow
    devices get smaller batches. The levels u are 1, 1/2, 1/4, 1/8 and 1/16; another choice is a full batch for all.

    The published bound assumes full gradients, so the smallest batch would always be the best. Two changes make
    the choice meaningful:

    - The mean of tau gradients of d samples has the variance sigma^2/(tau d). A device's divergence is therefore
      delta_i^2(tau, d) = delta_i^2 + sigma^2/(tau d_i), where delta_i^2 is the estimate less the variance in the round
      in which it was made, and at least 0. So delta is not 0 for a device that was alone.
    - With momentum m, tau steps move a model as far as s = sum_{j=1}^tau (1 - m^j)/(1 - m) plain steps do. The bound is
      that of s steps, and delta, which Alg. 3 estimates as if they had been tau, is scaled by tau/s.

    P4 has phi = omega (1 - beta eta/2), with omega = min_k 1/|w_k - w*|^2. The last factor is at least 1/2 where the
    bound holds, and is taken as such elsewhere. The default is the value that S. Wang et al., whom `adaptive_steps`
    cites, use for neural networks; of six values it was among the best two on one seed of MNIST. FC's 0.05 makes the
    drift h(tau) so costly that tau is 1 nearly always.

    Args:
      omega: the speed of training.
      noise: sigma^2, the variance of the gradient of one sample; the default is about that of `shi2020` on MNIST.
    """
    speed, variance = positive("omega", omega), positive("noise", noise)

    def init(cell: Cell) -> Joint:
        never = jnp.zeros(checks.num_devices(cell), jnp.int32)
        return Joint(speed, variance, never, never)

    return Policy(init, _select_joint)


def _select_joint(key: Array, state: Joint, context: RoundContext) -> tuple[Joint, Decision]:
    context = checked(context)
    observation, cell, training = context.observation, context.cell, context.training
    available, scheme = available_of(context), scheme_of(cell)
    most, full = training.local_steps, training.batch_size
    momentum = jnp.asarray(checks.fraction("training.momentum", training.momentum, ()), float)
    moved = jnp.cumsum(jnp.cumsum(momentum ** jnp.arange(most)))  # s of 1, ..., tau steps

    beta, last_delta = (
        checks.real(f"estimates.{name}", getattr(context.estimates, name), (), available.shape)
        for name in ("beta", "delta")
    )
    eta = jnp.asarray(checks.positive("training.learning_rate", training.learning_rate, ()), float)
    samples = samples_of(context)
    mean_beta = jnp.sum(samples * beta) / jnp.sum(samples)
    phi = state.omega * jnp.maximum(1 - mean_beta * eta / 2, 0.5)

    last_steps = jnp.where(state.local_steps > 0, state.local_steps, most)
    last_batch = jnp.where(state.batch_size > 0, state.batch_size, full)
    squared = (last_delta * last_steps / moved[last_steps - 1]) ** 2
    squared = jnp.maximum(squared - state.noise / (last_steps * last_batch), 0)

    def best_with(steps: Array, batch: Array) -> tuple[Array, Decision]:
        """Returns the least objective with these steps and batches, and its decision."""
        delta = jnp.sqrt(squared + state.noise / (steps * batch))

        def cost(n: Array, round_s: Array) -> Array:
            return bounds.scheduling_objective(
                n,
                round_s,
                budget_s=training.budget_s,
                rho=context.estimates.rho,
                beta=beta,
                delta=delta,
                num_samples=training.num_samples,
                learning_rate=eta,
                local_steps=moved[steps - 1],
                phi=phi,
            )

        wanted = Decision(available, jnp.zeros(available.size), jnp.zeros(()), local_steps=steps, batch_size=batch)
        timed, _ = as_decided(wanted, observation, cell, training)
        upload = uploads_of(dataclasses.replace(context, observation=timed))
        scheduled = scheme.cheapest_set(cost, lax.stop_gradient(upload)) & available
        decision = scheme.allocate(scheduled, upload)
        value = cost(jnp.sum(scheduled), decision.round_s)
        value = jnp.where(jnp.isnan(value), jnp.inf, value)  # of the estimates of a diverged model
        return value, dataclasses.replace(decision, local_steps=steps, batch_size=batch)

    batches = _batches(jnp.asarray(observation.compute_s), available, full)
    steps, levels = jnp.meshgrid(jnp.arange(1, most + 1), jnp.arange(len(_LEVELS)), indexing="ij")
    values, decisions = jax.vmap(lambda tau, level: best_with(tau, batches[level]))(steps.ravel(), levels.ravel())
    best = jax.tree.map(lambda leaf: leaf[jnp.argmin(values)], decisions)
    used = state._replace(
        local_steps=jnp.where(best.scheduled, best.local_steps, state.local_steps),
        batch_size=jnp.where(best.scheduled, best.batch_size, state.batch_size),
    )
    return used, best


def _batches(compute_s: Array, available: Array, full: int) -> Array:
    """Returns the batch size of each device at each level, (levels, M)."""
    median_s = jnp.nanmedian(jnp.where(available, compute_s, jnp.nan))
    relative = jnp.where(compute_s > 0, median_s / jnp.where(compute_s > 0, compute_s, 1), jnp.inf)
    level = jnp.asarray(_LEVELS, compute_s.dtype)[:, None]
    part = jnp.minimum(level * jnp.maximum(relative, _LEAST_RATIO)[None], 1)
    return jnp.maximum(jnp.floor(part * full), 1).astype(jnp.int32)
