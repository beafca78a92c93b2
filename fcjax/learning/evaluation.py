"""Evaluates models on the test set."""

import jax.numpy as jnp
from jax import Array, lax

from fcjax.learning.models import Model, Params
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


_BLOCK = 2**18  # input numbers per block: as floats they fit in a core's cache


def evaluate(params: Params, model: Model, x: Array, y: Array) -> Score:
    """Returns mean accuracy and loss, computed block by block."""

    def totals(x, y):
        correct, losses = model.correct(params, x, y), model.losses(params, x, y)
        return jnp.sum(correct, dtype=float), jnp.sum(losses, dtype=float)

    size = _block_size(len(y), most=max(1, _BLOCK * len(y) // max(x.size, 1)))
    num_blocks, rest = divmod(len(y), size)
    blocks = tuple(part[: num_blocks * size].reshape(num_blocks, size, *part.shape[1:]) for part in (x, y))
    correct, loss = (jnp.sum(by_block) for by_block in lax.map(lambda block: totals(*block), blocks))
    if rest:
        of_rest = totals(x[-rest:], y[-rest:])
        correct, loss = correct + of_rest[0], loss + of_rest[1]
    return Score(accuracy=correct / len(y), loss=loss / len(y))


def _block_size(num_samples: int, most: int) -> int:
    """Returns a block size of at most `most`, preferably a divisor: a remainder would be compiled separately."""
    most = min(most, num_samples)
    return max((size for size in range(most // 2 + 1, most + 1) if num_samples % size == 0), default=most)
