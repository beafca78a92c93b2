"""Policies that prefer devices with large losses: power of choice and Oort."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
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
    uniforms,
    upload_time,
    with_candidates,
)
from fcjax.types import Cell, Decision, Policy, RoundContext
from fcjax.wireless.access import allocate
from fcjax.wireless.radio import ready_time


def power_of_choice(n: ArrayLike = 3, candidates: ArrayLike | None = None) -> Policy:
    """Draws candidates in proportion to their data, and schedules the n of them with the largest losses.

    Y. J. Cho, J. Wang, G. Joshi, "Towards Understanding Biased Client Selection in Federated Learning", International
    Conference on Artificial Intelligence and Statistics, 2022. This is their pi_rpow-d, which uses the last loss that a
    device reported instead of asking all candidates: infinity if it never reported, and ties are broken at random.
    There, the loss is the mean over the device's last local steps; here, that of the model before them.

    Args:
      n: the number of devices, m.
      candidates: the number of candidates, d, from n to M; by default 2n. With d = n, this is random selection.
    """
    return with_candidates(n, candidates, _select_power_of_choice)


def _select_power_of_choice(key: Array, state: Choice, context: RoundContext) -> tuple[Choice, Decision]:
    context = checked(context)
    draw_key, tie_key = jax.random.split(key)
    reports = reports_of(context)
    loss = jnp.where(jnp.asarray(reports.last_round) >= 0, reports.loss, jnp.inf)
    candidate = draw(draw_key, samples_of(context), state.candidates, available_of(context))
    scheduled = largest(loss, state.n, candidate, tie=uniforms(tie_key, context))
    return state, allocate(scheduled, context.observation, context.cell)


def oort(
    n: ArrayLike = 3, step_s: ArrayLike = 0.5, penalty: ArrayLike = 2.0, cut_off: ArrayLike = 0.95, window: int = 20
) -> Policy:
    """Draws n devices: some of those with a large loss that are fast enough, and some that never took part.

    F. Lai, X. Zhu, H. V. Madhyastha, M. Chowdhury, "Oort: Efficient Federated Learning via Guided Participant
    Selection", USENIX Symposium on Operating Systems Design and Implementation, 2021, Alg. 1. In round R = 1, 2, ...,
    with U_i the statistical utility of device i, L_i the last round in which it reported and t_i its duration:

    - If the utilities of the participants of the last `window` rounds sum to less than those of the `window` rounds
      before, the preferred duration T, which starts at `step_s`, grows by `step_s`.
    - The utility of a device that has reported is U_i + sqrt(0.1 log(R)/L_i), times (T/t_i)^penalty if t_i > T.
    - With epsilon = max(0.9 * 0.98^(R - 1), 0.2), (1 - epsilon) n devices, rounded down, are drawn in proportion to
      utility. A device can be drawn if it has at least `cut_off` times the utility of the last of them, when sorted.
    - The others are drawn from the devices that never reported, in proportion to their speed, 1/t_i.

    Adapted: Devices report the mean loss of their samples, so |B_i| sqrt(mean of squared losses) becomes num_samples
    times loss. As in the authors' program, U_i is this utility, clipped at its 95th percentile and scaled such that all
    unclipped ones lie between 0 and 1. t_i is the time of computing and sending over 1/n of the uplink in this round.
    If there are too few devices of one kind, more of the other are drawn. Devices that took part often are not
    excluded, because a cell has few devices.

    Args:
      n: the number of devices, K.
      step_s: s, the pacer's step, Delta.
      penalty: the exponent alpha for slow devices.
      cut_off: c, at most 1.
      window: rounds, W.
    """
    step, exponent = positive("step_s", step_s), positive("penalty", penalty)
    fraction = jnp.asarray(checks.fraction("cut_off", cut_off, ()), float)
    num_rounds = checks.whole("window", window, 1, 10_000)

    def init(cell: Cell) -> _Oort:
        return _Oort(
            number_of(n, cell), step, exponent, fraction, step, jnp.zeros(2 * num_rounds), jnp.array(0), jnp.array(-1)
        )

    return Policy(init, _select_oort)


class _Oort(NamedTuple):
    n: Array
    step_s: Array
    penalty: Array
    cut_off: Array
    preferred_s: Array  # () s, T
    gained: Array  # (2W,) utilities of the participants of the last rounds, the latest one last
    num_rounds: Array  # () rounds so far
    round_index: Array  # () of the last one; rounds in which nobody is available are left out


def _select_oort(key: Array, state: _Oort, context: RoundContext) -> tuple[_Oort, Decision]:
    context = checked(context)
    reports, available = reports_of(context), available_of(context)
    last_round = jnp.asarray(reports.last_round)
    reported = last_round >= 0
    gain = jnp.where(reported, samples_of(context) * jnp.abs(jnp.asarray(reports.loss)), 0)
    latest = last_round == state.round_index
    state = _pace(state, jnp.sum(jnp.where(reported & latest, gain, 0)), context)

    duration_s = upload_time(state.n, context) + ready_time(context.observation, context.cell)
    explored = reported & available
    now = jnp.asarray(context.round_index, float) + 1
    uncertainty = jnp.sqrt(0.1 * jnp.log(now) / jnp.where(reported, last_round + 1, 1).astype(float))
    slowness = jnp.minimum(state.preferred_s / duration_s, 1) ** state.penalty
    utility = jnp.where(explored, (_scaled(gain, explored) + uncertainty) * slowness, 0)

    num_available, num_explored = jnp.sum(available), jnp.sum(explored)
    n = jnp.minimum(state.n, num_available)
    epsilon = jnp.maximum(0.9 * 0.98 ** (now - 1), 0.2)
    # The small number keeps rounding from taking a device away.
    exploited = jnp.floor((1 - epsilon) * state.n + 1e-4).astype(int)
    exploited = jnp.clip(exploited, n - (num_available - num_explored), jnp.minimum(num_explored, n))
    last = jnp.sort(jnp.where(explored, utility, -jnp.inf), descending=True)[jnp.maximum(exploited - 1, 0)]
    admitted = explored & (utility >= state.cut_off * last)
    # No device is in both groups, so one random number per device suffices.
    scheduled = draw(key, utility, exploited, admitted)
    scheduled |= draw(key, 1 / duration_s, n - exploited, available & ~reported)
    return state, allocate(scheduled, context.observation, context.cell)


def _pace(state: _Oort, gained: Array, context: RoundContext) -> _Oort:
    """Records what the last round gained, and raises the preferred duration if recent rounds gained less."""
    now = jnp.asarray(context.round_index, state.round_index.dtype)
    window = state.gained.size // 2
    # No round precedes the first.
    history = jnp.where(state.num_rounds > 0, jnp.append(state.gained[1:], gained), state.gained)
    falls = (jnp.sum(history[:window]) > jnp.sum(history[window:])) & (state.num_rounds >= 2 * window)
    preferred_s = jnp.where(falls, state.preferred_s + state.step_s, state.preferred_s)
    return state._replace(preferred_s=preferred_s, gained=history, num_rounds=state.num_rounds + 1, round_index=now)


def _scaled(gain: Array, explored: Array) -> Array:
    """Returns utilities clipped at the 95th percentile of the explored devices, (M,): the least one as 0."""
    number = jnp.sum(explored)
    ascending = jnp.sort(jnp.where(explored, gain, jnp.inf))
    low, high = ascending[0], ascending[jnp.maximum(number - 1, 0)]
    clip = ascending[jnp.clip((0.95 * number + 1e-4).astype(int), 0, jnp.maximum(number - 1, 0))]
    spread = high - low
    inside = explored & (spread > 0)
    return jnp.where(inside, (jnp.minimum(gain, clip) - low) / jnp.where(inside, spread, 1), 0)
