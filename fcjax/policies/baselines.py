"""Baselines that use at most the channel gains: random, proportional fair, everybody."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fcjax import checks, keys
from fcjax.policies.parameters import available_of, block_for_each, with_number
from fcjax.types import Cell, Decision, Policy, RoundContext
from fcjax.wireless.access import allocate, equal_share, round_time
from fcjax.wireless.sets import smallest_mask


def random(n: ArrayLike = 3) -> Policy:
    """RD: schedules n available devices uniformly at random, or all if there are fewer; the paper uses 3."""
    return with_number(n, _select_random)


def _select_random(key: Array, n: Array, context: RoundContext) -> tuple[Array, Decision]:
    draw = jax.vmap(jax.random.uniform)(keys.per_device(key, checks.num_devices(context.cell)))
    available = available_of(context)
    scheduled = smallest_mask(jnp.where(available, draw, jnp.inf), n) & available
    return n, allocate(scheduled, context.observation, context.cell)


def proportional_fair(n: ArrayLike = 3) -> Policy:
    """PF: schedules the n devices with the best channels; the paper uses 3.

    H. H. Yang, Z. Liu, T. Q. S. Quek, H. V. Poor, "Scheduling Policies for Federated Learning in Wireless Networks",
    IEEE Transactions on Communications, 2020.
    """
    return with_number(n, _select_proportional_fair)


def _select_proportional_fair(key: Array, n: Array, context: RoundContext) -> tuple[Array, Decision]:
    observation, cell = checks.uplink(context.observation, context.cell)
    scheduled = smallest_mask(-jnp.asarray(observation.gain), n) & observation.available
    return n, allocate(scheduled, observation, cell)


def everybody() -> Policy:
    """Schedules all available devices in every round, with equal shares: plain federated averaging.

    Under TDMA they send in the best order.
    """

    def init(cell: Cell) -> tuple:
        block_for_each("everybody", cell)
        return ()

    return Policy(init, _select_everybody)


def _select_everybody(key: Array, state: tuple, context: RoundContext) -> tuple[tuple, Decision]:
    scheduled = available_of(context)
    if context.cell.access == "tdma":
        return state, allocate(scheduled, context.observation, context.cell)
    number = jnp.maximum(jnp.sum(scheduled), 1).astype(float)
    share = jnp.where(scheduled, equal_share(number, context.cell), 0)
    return state, Decision(scheduled, share, round_time(scheduled, share, context.observation, context.cell))
