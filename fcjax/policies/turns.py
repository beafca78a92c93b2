"""Policies in which all devices get their turn: round robin, by age of update, and the earliest of a random group."""

from __future__ import annotations  # short types in help()

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.policies.parameters import (
    available_of,
    checked,
    largest,
    number_of,
    reports_of,
    uniforms,
    uploads_of,
    with_number,
)
from fcjax.types import Cell, Decision, Policy, RoundContext
from fcjax.wireless.access import allocate, scheme_of
from fcjax.wireless.sets import smallest_mask


class Turn(NamedTuple):
    """The state of `round_robin`."""

    n: Array  # () number of devices per round
    following: Array  # () the device whose turn is next


def round_robin(n: ArrayLike = 3) -> Policy:
    """Schedules n available devices in turns, by index, or all if there are fewer.

    H. H. Yang, Z. Liu, T. Q. S. Quek, H. V. Poor, "Scheduling Policies for Federated Learning in Wireless Networks",
    IEEE Transactions on Communications, 2020. There, fixed groups take turns; here, a round begins after the last
    device of the round before and skips devices that are not available. Without such devices, and if n divides M, the
    groups are the same.
    """
    return Policy(lambda cell: Turn(number_of(n, cell), jnp.zeros((), jnp.int32)), _select_round_robin)


def _select_round_robin(key: Array, state: Turn, context: RoundContext) -> tuple[Turn, Decision]:
    num_devices = checks.num_devices(context.cell)
    place = (jnp.arange(num_devices, dtype=jnp.int32) - state.following) % num_devices  # in the queue
    available = available_of(context)
    scheduled = smallest_mask(jnp.where(available, place, num_devices), state.n) & available
    passed = jnp.max(jnp.where(scheduled, place + 1, 0))  # 0 if nobody is available
    following = (state.following + passed) % num_devices
    return state._replace(following=following), allocate(scheduled, context.observation, context.cell)


def age(n: ArrayLike = 3) -> Policy:
    """Schedules the n available devices whose last update is oldest; of equally old ones, those with the best channels.

    H. H. Yang, A. Arafa, T. Q. S. Quek, H. V. Poor, "Age-Based Scheduling Policy for Federated Learning in Mobile Edge
    Networks", IEEE International Conference on Acoustics, Speech and Signal Processing, 2020. The age of update of a
    device is 0 after a round in which the base station received its update, and grows by 1 in any other round. The
    paper keeps alpha-fair functions of the ages small, x^(1 - alpha)/(1 - alpha), with a limited number of subchannels.
    Here, the limit is the number of devices, because shares of the bandwidth are continuous and a round lasts as long
    as it has to. The functions increase, so scheduling the n oldest devices minimises their sum for every alpha, and
    alpha is not a parameter. The assignment of subchannels is left out: channels only decide between equal ages.
    """
    return with_number(n, _select_age)


def _select_age(key: Array, n: Array, context: RoundContext) -> tuple[Array, Decision]:
    context = checked(context)
    available = available_of(context)
    # The age is round_index - 1 - last_round, so the oldest have the least last_round: -1 if never received.
    last_round = jnp.asarray(reports_of(context).last_round)
    scheduled = largest(-last_round, n, available, tie=jnp.asarray(context.observation.gain))
    return n, allocate(scheduled, context.observation, context.cell)


class Group(NamedTuple):
    """The state of `timely`."""

    n: Array  # () number of devices per round, the paper's k
    m: Array  # () size of the group


def timely(n: ArrayLike = 3, m: ArrayLike | None = None) -> Policy:
    """Schedules, of m available devices drawn at random, the n that can finish earliest; by default m is 2n.

    B. Buyukates, S. Ulukus, "Timely Communication in Federated Learning", IEEE Conference on Computer Communications
    Workshops, 2021. There, the server waits until m devices are available, and uses the earliest n of their updates.
    Here, the world says who is available when a round begins, and waiting takes no time. In the paper, devices become
    available after independent, equally distributed times, so the first m are a random subset. The base station knows
    the channels and computation times, so it schedules the n devices that will be earliest, and the other m - n devices
    do not compute in vain.
    """

    def init(cell: Cell) -> Group:
        earliest = number_of(n, cell)
        if m is None:
            return Group(earliest, 2 * earliest)
        is_allowed = lambda x: (x >= 1) & (x < 2**31) & (x == x.round())  # noqa: E731
        group = checks.within("m", m, is_allowed, "a whole number of 1 or more", ())
        checks.not_negative("m - n", jnp.asarray(group) - earliest)
        return Group(earliest, jnp.asarray(group).astype(jnp.int32))

    return Policy(init, _select_timely)


def _select_timely(key: Array, state: Group, context: RoundContext) -> tuple[Group, Decision]:
    context = checked(context)
    available = available_of(context)
    group = largest(-uniforms(key, context), state.m, available)
    upload = uploads_of(
        dataclasses.replace(context, observation=dataclasses.replace(context.observation, available=group))
    )
    scheme = scheme_of(context.cell)
    earliest, _ = scheme.fastest_set(state.n, jax.lax.stop_gradient(upload))
    scheduled = jnp.where(jnp.sum(group) <= state.n, group, earliest & group)
    return state, scheme.allocate(scheduled, upload)
