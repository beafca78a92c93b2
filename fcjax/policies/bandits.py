"""Policies that learn from past rounds which devices are fast: a multi-armed bandit."""

from __future__ import annotations  # short types in help()

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.policies.parameters import available_of, checked, largest, number_of, positive, uniforms, upload_time
from fcjax.types import Cell, Decision, Policy, RoundContext
from fcjax.wireless.access import allocate
from fcjax.wireless.radio import ready_time


class Bandit(NamedTuple):
    """The state of `cs_ucb`."""

    n: Array  # () number of devices per round, N
    max_latency_s: Array  # () s, tau_max
    times: Array  # (M,) number of rounds with the device, z_k
    mean_reward: Array  # (M,) y_k


def cs_ucb(n: ArrayLike = 3, max_latency_s: ArrayLike = 2.0) -> Policy:
    """CS-UCB: schedules the n available devices whose past latencies give the largest upper confidence bounds.

    W. Xia, T. Q. S. Quek, K. Guo, W. Wen, H. H. Yang, H. Zhu, "Multi-Armed Bandit-Based Client Scheduling for Federated
    Learning", IEEE Transactions on Wireless Communications, 2020. The choice does not use the channels and computation
    times of the round. The bound of device k in round t = 1, 2, ... is

        y_k + sqrt((n + 1) ln(t)/z_k),

    where z_k is the number of its rounds, and y_k its mean reward 1 - tau_k/tau_max. Devices that were never scheduled
    come first, in random order. The paper gives each device one subchannel; here, the bandwidth is allocated optimally,
    so all devices may finish at the same time. The latency tau_k is therefore that of a subchannel: download,
    computation, and the upload over an equal share, 1/n. Latencies above `max_latency_s`, tau_max, count as tau_max.
    The paper's variant for devices that are not always available, CS-UCB-Q, guarantees a rate of participation; here,
    devices that are not available are left out.
    """
    longest_s = positive("max_latency_s", max_latency_s)

    def init(cell: Cell) -> Bandit:
        num_devices = checks.num_devices(cell)
        return Bandit(
            number_of(n, cell), longest_s, jnp.zeros(num_devices, jnp.int32), jnp.zeros(num_devices, longest_s.dtype)
        )

    return Policy(init, _select_cs_ucb)


def _select_cs_ucb(key: Array, state: Bandit, context: RoundContext) -> tuple[Bandit, Decision]:
    context = checked(context)
    times = state.times
    tried = times > 0
    explore = (state.n + 1) * jnp.log(jnp.asarray(context.round_index, float) + 1) / jnp.where(tried, times, 1)
    bound = jnp.where(tried, state.mean_reward + jnp.sqrt(explore), jnp.inf)
    scheduled = largest(bound, state.n, available_of(context), tie=-uniforms(key, context))
    decision = allocate(scheduled, context.observation, context.cell)

    # What follows is known when the round has ended.
    latency_s = ready_time(context.observation, context.cell) + upload_time(state.n, context)
    reward = 1 - jnp.minimum(latency_s / state.max_latency_s, 1)
    mean = state.mean_reward + (reward - state.mean_reward) / (times + 1)
    learnt = state._replace(
        times=jnp.where(scheduled, times + 1, times),
        mean_reward=jnp.where(scheduled, mean, state.mean_reward).astype(state.mean_reward.dtype),
    )
    return learnt, decision
