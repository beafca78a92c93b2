"""One run on several cores.

JAX must see each core as a processor of its own: set JAX_NUM_CPU_DEVICES, or call `fcjax.hardware.use_cores`, before
JAX is used. All cores execute the same program on the same values, and `spread` divides the expensive parts among them.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

_AXIS = "cores"


def spread(function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps a function over the first axis of its arguments, with one element per core, inside `on_cores`."""

    def each(*args: Any) -> Any:
        mine = jax.tree.map(lambda leaf: leaf[lax.axis_index(_AXIS)], args)
        return lax.all_gather(function(*mine), _AXIS)

    return each


def on_cores(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Makes a function, in which `spread` may be used, compute on a number of cores."""
    if number == 1:
        return function
    whole = PartitionSpec()  # every core has all arguments and results
    return jax.shard_map(function, mesh=_mesh(number), in_specs=whole, out_specs=whole, check_vma=False)


def place(number: int) -> Sharding:
    """Returns where the arguments of a function of `on_cores` belong."""
    if number == 1:
        return SingleDeviceSharding(jax.local_devices()[0])
    return NamedSharding(_mesh(number), PartitionSpec())


def _mesh(number: int) -> Mesh:
    check(number)
    return Mesh(np.array(jax.local_devices()[:number]), (_AXIS,))


def check(number: int) -> None:
    """Raises ValueError if JAX does not see that many cores."""
    found = jax.local_devices()
    if number > 1 and found[0].platform != "cpu":
        raise ValueError(f"cores must be 1 on accelerators, got {number}: use side_by_side there")
    if number > len(found):
        raise ValueError(
            f"cores must be at most {len(found)}, the cores that JAX sees, got {number}: call "
            f"fcjax.hardware.use_cores({number}) before JAX is used, or set JAX_NUM_CPU_DEVICES={number}"
        )
