"""Leaves of pytrees, which may be numbers, arrays of the host, arrays of a device, and random keys."""

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
    """A type that holds the values of both."""
    return one if one == other else np.result_type(one, other)


def as_type(wanted: Any, leaf: Any) -> Any:
    return leaf if is_key(leaf) else np.asarray(leaf, wanted)


def stack(trees: Sequence[T]) -> T:
    return jax.tree.map(lambda *leaves: (jnp if is_key(leaves[0]) else np).stack(leaves), *trees)


def promoted(trees: list[T]) -> list[T]:
    """The same trees, with leaves as arrays, and equal leaves of equal types: 2 beside 2.9 is 2.0."""
    leaves = [jax.tree.leaves(tree) for tree in trees]
    types = [functools.reduce(common, map(dtype, column)) for column in zip(*leaves, strict=True)]
    rows = [[as_type(wanted, leaf) for wanted, leaf in zip(types, row, strict=True)] for row in leaves]
    return [jax.tree.unflatten(jax.tree.structure(tree), row) for tree, row in zip(trees, rows, strict=True)]
