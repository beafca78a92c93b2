"""Helpers of policies: checked parameters as state, and the available devices, reports and uploads of a round."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fcjax import checks, keys
from fcjax.types import Cell, Policy, Reports, RoundContext
from fcjax.wireless.access import equal_share, send_time
from fcjax.wireless.radio import Upload, uploads


def uploads_of(context: RoundContext) -> Upload:
    return uploads(*checks.uplink(context.observation, context.cell))


def checked(context: RoundContext) -> RoundContext:
    """Checks channels, computation times and cell; call it before a policy reads them."""
    observation, cell = checks.uplink(context.observation, context.cell)
    return dataclasses.replace(context, observation=observation, cell=cell)


def samples_of(context: RoundContext) -> Array:
    """Returns the number of samples of each device, (M,)."""
    per_device = (checks.num_devices(context.cell),)
    number = checks.positive("training.num_samples", context.training.num_samples, (), per_device)
    return jnp.broadcast_to(jnp.asarray(number, float), per_device)


def available_of(context: RoundContext) -> Array:
    """Returns which devices are available, (M,) bool."""
    per_device = (checks.num_devices(context.cell),)
    available = checks.booleans_of("observation.available", context.observation.available, per_device)
    return jnp.broadcast_to(available, per_device)


def reports_of(context: RoundContext) -> Reports:
    if context.reports is None:
        raise ValueError("this policy needs context.reports, which a run provides, got None")
    return context.reports


def upload_time(n: Array, context: RoundContext) -> Array:
    """Returns how long each device would send, (M,) s, if n devices shared the uplink equally."""
    observation, cell = context.observation, context.cell
    number, everyone = n.astype(float), jnp.ones(checks.num_devices(cell))
    if cell.access == "tdma":
        return number * send_time(everyone, observation, cell)
    return send_time(everyone * equal_share(number, cell), observation, cell)


def largest(values: Array, n: ArrayLike, available: Array, *, tie: Array | None = None) -> Array:
    """Returns the mask of the n available devices with the largest values, all if there are fewer.

    Of equal values, those with the largest `tie` come first, and then those with the lowest index.
    """
    order = jnp.lexsort((*(() if tie is None else (-tie,)), -values, ~available))
    return jnp.zeros(values.shape, bool).at[order].set(jnp.arange(values.size) < n) & available


def uniforms(key: Array, context: RoundContext) -> Array:
    """Draws a number between 0 and 1 for each device, (M,)."""
    return jax.vmap(jax.random.uniform)(keys.per_device(key, checks.num_devices(context.cell)))


def draw(key: Array, weights: Array, n: ArrayLike, available: Array) -> Array:
    """Draws n available devices one after another, each in proportion to the weights of those left, (M,) bool.

    The n largest sums of a log weight and a Gumbel variable have this distribution. Devices of weight 0 come last.
    """
    most = jnp.max(jnp.where(available, weights, 0))
    relative = jnp.maximum(weights / jnp.where(most > 0, most, 1), jnp.finfo(weights.dtype).tiny)
    gumbel = jax.vmap(jax.random.gumbel)(keys.per_device(key, weights.size))
    return largest(jnp.log(relative) + gumbel, n, available)


def with_parameter(name: str, value: ArrayLike, select: Callable) -> Policy:
    positive(name, value)
    return Policy(lambda cell: positive(name, value), select)


def positive(name: str, value: ArrayLike) -> Array:
    """Checks a positive parameter; returns it as an array, ()."""
    # A positive float64 may be 0 in float32, so the converted value is checked too.
    checks.positive(name, value, ())
    return jnp.asarray(checks.positive(name, jnp.asarray(value, float), ()))


def with_number(n: ArrayLike, select: Callable, *, asks_norms: bool = False) -> Policy:
    return Policy(lambda cell: number_of(n, cell), select, asks_norms)


def number_of(n: ArrayLike, cell: Cell) -> Array:
    """Checks a number of devices that can send in one round; returns it as an array, ()."""
    checks.access(cell)
    most, of_what = checks.num_devices(cell), "devices"
    if cell.access == "ofdma" and cell.num_blocks < most:
        most, of_what = cell.num_blocks, "blocks"
    return _whole("n", n, most, of_what)


class Choice(NamedTuple):
    """The state of a policy that chooses n devices from some candidates."""

    n: Array  # ()
    candidates: Array  # () how many there are


def with_candidates(
    n: ArrayLike, candidates: ArrayLike | None, select: Callable, *, asks_norms: bool = False
) -> Policy:
    """Makes a policy that chooses n devices from a number of candidates: by default 2n."""

    def init(cell: Cell) -> Choice:
        number, most = number_of(n, cell), checks.num_devices(cell)
        if candidates is None:
            return Choice(number, jnp.minimum(2 * number, most))
        many = _whole("candidates", candidates, most, "devices")
        checks.not_negative("candidates - n", many - number)
        return Choice(number, many)

    return Policy(init, select, asks_norms)


def block_for_each(name: str, cell: Cell) -> None:
    """Checks that all devices can send in one round."""
    checks.access(cell)
    if cell.access == "ofdma" and checks.num_devices(cell) > cell.num_blocks:
        raise ValueError(
            f"{name} needs a block for each device: cell.num_blocks must be {checks.num_devices(cell)} or more, "
            f"got {cell.num_blocks}"
        )


def _whole(name: str, value: ArrayLike, most: int, of_what: str) -> Array:
    allowed = f"a whole number from 1 to {most}, the number of {of_what}"
    is_allowed = lambda x: (x >= 1) & (x <= most) & (x == x.round())  # noqa: E731
    return jnp.asarray(checks.within(name, value, is_allowed, allowed, ())).astype(jnp.int32)
