"""Leaves of pytrees: numbers, NumPy arrays, JAX arrays and random keys."""

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def as_numbers(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def on_host(leaf: Any) -> Any:
    return leaf if is_key(leaf) else np.asarray(leaf)


def dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def common(one: Any, other: Any) -> Any:
    """Returns a dtype that holds the values of both."""
    return one if one == other else np.result_type(one, other)


def as_type(wanted: Any, leaf: Any) -> Any:
    return leaf if is_key(leaf) else np.asarray(leaf, wanted)


def stack(trees: Sequence[T]) -> T:
    return jax.tree.map(lambda *leaves: (jnp if is_key(leaves[0]) else np).stack(leaves), *trees)


def promoted(trees: list[T]) -> list[T]:
    """Turns leaves into arrays and promotes corresponding leaves to a common dtype, such as 2 and 2.9 to float."""
    leaves = [jax.tree.leaves(tree) for tree in trees]
    types = [functools.reduce(common, map(dtype, column)) for column in zip(*leaves, strict=True)]
    rows = [[as_type(wanted, leaf) for wanted, leaf in zip(types, row, strict=True)] for row in leaves]
    return [jax.tree.unflatten(jax.tree.structure(tree), row) for tree, row in zip(trees, rows, strict=True)]
