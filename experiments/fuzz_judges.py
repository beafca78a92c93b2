"""What is always true of the answers that `fuzz.py` gets, by physics of its own: double precision, and without fcjax.

A judge is given the answer and what was asked, and returns what is wrong, or "".
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fcjax
from fcjax.data import partition

_TOLERANCE = 1e-4  # in time: single precision, with room for what is summed


def no_nan(answer: Any, *_: Any, **__: Any) -> str:
    numbers = [leaf for leaf in jax.tree.leaves(answer) if _is_float(leaf)]
    return "NaN from finite input" if any(np.isnan(np.asarray(leaf, float)).any() for leaf in numbers) else ""


def right_w(answer: Any, z: Any, branch: int = 0) -> str:
    """Holds if w exp(w) = z, in double precision, as far as the precision of w goes."""
    tolerance = max(1e-5, 4 * float(jnp.finfo(answer.dtype).eps))
    z, w = np.asarray(z, float), np.asarray(answer, float)
    inside = (z > -0.3678) & ((z < 0) if branch else True) & (np.abs(z) > 1e-37) & (np.abs(z) < 1e37)
    z, w = z[inside], w[inside]
    if np.isnan(w).any():
        return "NaN inside the domain"
    wrong = ~(np.abs(w * np.exp(w) - z) <= tolerance * (1 + np.abs(w)) * np.abs(z)) | ((w > -1) == bool(branch))
    return f"w = {w[wrong]} for z = {z[wrong]}" if wrong.any() else ""


def right_required(answer: Any, round_s: Any, seen: fcjax.Observation, cell: fcjax.Cell) -> str:
    """Holds if devices with these shares are done at the given time, and if others could not be with any."""
    share, world = np.asarray(answer, float), World(seen, cell)
    if not world.is_plain or np.isnan(share).any():
        return no_nan(answer)
    round_s = float(round_s)
    early = np.isinf(share) & (world.earliest_s < round_s * (1 - _TOLERANCE))
    done_s = world.done_s(np.where(np.isinf(share) | (share == 0), 1, share))
    wrong = np.isfinite(share) & (share > 0) & (np.abs(done_s - round_s) > _TOLERANCE * round_s)
    return (
        f"not done at {round_s}: {done_s[wrong]}, could be: {world.earliest_s[early]}" if np.any(early | wrong) else ""
    )


def right_shares(answer: fcjax.Decision, who: Any, seen: fcjax.Observation, cell: fcjax.Cell) -> str:
    """Holds if shares sum to 1, and if all who have one are done at the same time, that of the round."""
    share, who, world = np.asarray(answer.share, float), np.asarray(answer.scheduled), World(seen, cell)
    round_s = float(answer.round_s)
    if np.isnan(share).any() or np.isnan(round_s):
        return "NaN from finite input"
    if np.any(share[~who] != 0):
        return "a share without being scheduled"
    if not who.any() or not np.isfinite(round_s):
        return ""
    if abs(share.sum() - 1) > 1e-5:
        return f"shares sum to {share.sum()}"
    if not world.is_plain:
        return ""
    done_s = world.done_s(np.where(share > 0, share, 1))
    late = (share > 0) & (np.abs(done_s - round_s) > _TOLERANCE * round_s)
    return f"done at {done_s[late]} in a round of {round_s}" if late.any() else ""


def right_sets(answer: Any, seen: fcjax.Observation, cell: fcjax.Cell) -> str:
    """Holds if no set is faster: n devices can be done by t if the n smallest shares they need sum to at most 1."""
    round_s, sets = np.asarray(answer[0], float), np.asarray(answer[1])
    world, finite = World(seen, cell), np.isfinite(round_s)
    sizes = np.arange(1, len(sets) + 1)
    if np.isnan(round_s).any():
        return "NaN from finite input"
    if np.any(np.diff(round_s[finite]) < 0):
        return "a larger set is faster"
    if np.any(sets.sum(1)[finite] != sizes[finite]):
        return "a set of another size"
    if not world.is_plain:
        return ""
    for factor, enough in ((1 + _TOLERANCE, True), (1 - _TOLERANCE, False)):
        needed = np.sort(world.needed(round_s[finite][:, None] * factor), axis=1)
        total = np.cumsum(needed, axis=1)[np.arange(finite.sum()), sizes[finite] - 1]
        wrong = (total <= 1) != enough
        if wrong.any():
            return (
                f"sets of {sizes[finite][wrong]} are {'slower' if enough else 'faster'} than {round_s[finite][wrong]} s"
            )
    return ""


class World:
    """The physics of an upload once more, in double precision and without fcjax."""

    def __init__(self, seen: fcjax.Observation, cell: fcjax.Cell):
        numbers = (cell.bandwidth_hz, cell.noise_psd_w_hz, cell.power_w, cell.upload_bits, seen.gain, seen.compute_s)
        self._band, noise, power, self._bits, gain, self._compute_s = (np.asarray(x, float) for x in numbers)
        self._snr = power * gain / (self._band * noise)
        with np.errstate(all="ignore"):
            self.earliest_s = self._compute_s + self._bits * np.log(2) / (self._band * self._snr)
        # Beyond these, single precision has no numbers for what comes in between.
        between = (self._snr, self._band * noise, self._bits / self._band, self.earliest_s)
        self.is_plain = all(np.all((x > 1e-18) & (x < 1e18)) for x in between)

    def done_s(self, share: np.ndarray) -> np.ndarray:
        """When devices are done that have these shares."""
        return self._compute_s + self._bits * np.log(2) / (share * self._band * np.log1p(self._snr / share))

    def needed(self, round_s: np.ndarray) -> np.ndarray:
        """With which shares devices are done by then, inf where with none: by bisection."""
        low, high = (np.full(np.broadcast_shapes(round_s.shape, self._snr.shape), x) for x in (1e-30, 1e30))
        for _ in range(60):
            middle = np.sqrt(low * high)
            late = self.done_s(middle) > round_s
            low, high = np.where(late, middle, low), np.where(late, high, middle)
        return np.where(self.earliest_s < round_s, high, np.inf)


def right_decision(answer: Any, *_: Any) -> str:
    decision = answer[1]
    if not np.any(decision.scheduled):
        return "nobody is scheduled"
    return "shares sum to more than 1" if float(jnp.sum(decision.share)) > 1 + 1e-5 else no_nan(decision)


def right_partition(answer: partition.Partition, *_: Any, **__: Any) -> str:
    held = np.concatenate([answer.of_device(i) for i in range(answer.num_devices)])
    return "a sample is on two devices" if len(np.unique(held)) < len(held) else ""


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def right_slope_of_bound(answer: Any, *_: Any, beta: Any, learning_rate: Any, local_steps: Any, **__: Any) -> str:
    """Holds if no derivative is NaN where the bound is one, and does not overflow: for eta <= 1/beta."""
    value, gradient = answer
    holds = np.all(np.asarray(beta, float) * float(learning_rate) <= 1) and float(local_steps) <= 60
    return no_nan(gradient) if holds and np.isfinite(value) else no_nan(value)


def right_gradient(answer: Any, *asked: Any) -> str:
    """Holds if no derivative is NaN where the value is finite, and what it is made of are numbers of float32."""
    value, gradient = answer
    plain = all(World(*asked[i : i + 2]).is_plain for i in range(len(asked)) if isinstance(asked[i], fcjax.Observation))
    return no_nan(gradient) if plain and np.isfinite(value) else no_nan(value)


def right_task(answer: fcjax.data.Dataset, *_: Any, **__: Any) -> str:
    arrays = (answer.train_x, answer.train_y, answer.test_x, answer.test_y)
    return "" if all(np.isfinite(array).all() for array in arrays) else "a task with what is not finite"
