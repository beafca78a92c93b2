"""Evaluates models on the test set."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fcjax.learning.models import Model, Params
from fcjax.runtime.cores import spread
from fcjax.types import pytree


@pytree
class Score:
    """Accuracy and loss on the test set.

    Attributes:
      accuracy: () fraction.
      loss: ().
    """

    accuracy: Array
    loss: Array


_BLOCK = 2**19  # input numbers per block; dense networks favour larger blocks, convolutional ones smaller


def evaluate(params: Params, model: Model, x: Array, y: Array, cores: int = 1) -> Score:
    """Returns mean accuracy and loss, computed block by block, and on several cores inside `on_cores`."""

    def totals(x, y):
        correct, losses = model.correct(params, x, y), model.losses(params, x, y)
        return jnp.sum(correct, dtype=float), jnp.sum(losses, dtype=float)

    size = _block_size(len(y), most=max(1, _BLOCK * len(y) // max(x.size, 1)))
    num_blocks, rest = divmod(len(y), size)
    blocks = tuple(part[: num_blocks * size].reshape(num_blocks, size, *part.shape[1:]) for part in (x, y))
    every = functools.partial(lax.map, lambda block: totals(*block))
    correct, loss = (jnp.sum(by_block) for by_block in _on_each(every, blocks, num_blocks, cores))
    if rest:
        of_rest = totals(x[-rest:], y[-rest:])
        correct, loss = correct + of_rest[0], loss + of_rest[1]
    return Score(accuracy=correct / len(y), loss=loss / len(y))


def _on_each(every: Callable[[Any], Any], blocks: Any, num_blocks: int, cores: int) -> Any:
    """Returns every(blocks); each core computes the same number of blocks, and all compute those left over."""
    if cores == 1:
        return every(blocks)
    each = num_blocks // cores
    parts = jax.tree.map(lambda leaf: leaf[: each * cores].reshape(cores, each, *leaf.shape[1:]), blocks)
    found = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), spread(every)(parts))
    left = every(jax.tree.map(lambda leaf: leaf[each * cores :], blocks))
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), found, left)


def _block_size(num_samples: int, most: int) -> int:
    """Returns a block size of at most `most`, preferably a divisor: a remainder would be compiled separately."""
    most = min(most, num_samples)
    return max((size for size in range(most // 2 + 1, most + 1) if num_samples % size == 0), default=most)
