"""Helpers of policies: a checked parameter as state, and the uploads of a round."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.types import Cell, Policy, RoundContext
from fcjax.wireless.radio import Upload, uploads


def uploads_of(context: RoundContext) -> Upload:
    return uploads(*checks.uplink(context.observation, context.cell))


def with_parameter(name: str, value: ArrayLike, select: Callable) -> Policy:
    # A positive float64 may be 0 in float32, so the converted value is checked too.
    checks.positive(name, value, ())
    checks.positive(name, jnp.asarray(value, float), ())
    return Policy(lambda cell: jnp.asarray(value, float), select)


def with_number(n: ArrayLike, select: Callable) -> Policy:
    def init(cell: Cell) -> Array:
        checks.access(cell)
        most, of_what = checks.num_devices(cell), "devices"
        if cell.access == "ofdma" and cell.num_blocks < most:
            most, of_what = cell.num_blocks, "blocks"
        allowed = f"a whole number from 1 to {most}, the number of {of_what}"
        is_allowed = lambda x: (x >= 1) & (x <= most) & (x == x.round())  # noqa: E731
        return jnp.asarray(checks.within("n", n, is_allowed, allowed, ())).astype(jnp.int32)

    return Policy(init, select)
