"""Compression of updates: what a device sends instead of its update, and how many bits that takes.

Each factory returns a `Compressor`. Its tunable number is data, so that compressors from one factory share one compiled
program. `by_name` looks compressors up by name. P is the number of parameters of the model.
"""

from __future__ import annotations  # short types in help()

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from fcjax import checks
from fcjax.runtime.registry import Registry
from fcjax.types import Compressor

_FLOAT_BITS = 32


def none(bits_per_parameter: float = _FLOAT_BITS) -> Compressor:
    """Sends the update as it is, in `bits_per_parameter` bits per parameter."""
    bits = checks.scalar("bits_per_parameter", bits_per_parameter, checks.positive)
    return Compressor(lambda size: bits * size, _send_all)


def _send_all(key: Array, parameters: tuple, update: Array) -> Array:
    return update


def quantise(bits: int) -> Compressor:
    """Rounds each entry at random to one of two neighbouring levels, so that the mean of the result is the update.

    The levels are 0, 1/s, 2/s, ..., 1 times the largest magnitude of the update, with s = 2^(bits - 1) - 1. An upload
    holds the sign and level of each entry, in `bits` bits, and the largest magnitude, in 32. If one entry of the update
    is not finite, no entry of the result is.

    D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization
    and Encoding", Advances in Neural Information Processing Systems 30, pp. 1709-1720, 2017 (there, levels are
    fractions of the Euclidean norm).
    A. Reisizadeh, A. Mokhtari, H. Hassani, A. Jadbabaie, R. Pedarsani, "FedPAQ: A Communication-Efficient Federated
    Learning Method with Periodic Averaging and Quantization", AISTATS, PMLR 108, pp. 2021-2031, 2020.

    Args:
      bits: a whole number from 2 to 16, the bits per parameter.
    """
    bits = checks.whole("bits", bits, 2, 16)
    return Compressor(
        lambda size: float(bits * size + _FLOAT_BITS), _quantise, parameters=np.float32(2 ** (bits - 1) - 1)
    )


def _quantise(key: Array, num_levels: Array, update: Array) -> Array:
    num_levels = jnp.asarray(num_levels, update.dtype)
    limits = jnp.finfo(update.dtype)
    magnitude = jnp.abs(update)
    largest = jnp.max(magnitude)
    below = jnp.minimum(jnp.floor(magnitude / jnp.maximum(largest, limits.tiny) * num_levels), num_levels - 1)
    # Not largest/num_levels: with `vmap`, XLA would multiply by a rounded reciprocal, and the bits would differ.
    step = largest * (1 / num_levels)
    low, high = below * step, jnp.where(below + 1 == num_levels, largest, (below + 1) * step)
    # The chance of rounding up follows from the levels as decoded, so rounding errors of `below` cause no bias.
    draw = jax.random.uniform(key, update.shape, update.dtype)
    decoded = jnp.where(draw * (high - low) < magnitude - low, high, low)
    # Rounding errors must not move an entry off its level; XLA also fuses products and differences, so 0 is not exact.
    on_level = jnp.minimum(jnp.abs(magnitude - low), jnp.abs(high - magnitude)) <= 4 * limits.eps * magnitude
    return jnp.where(on_level, update, jnp.copysign(decoded, update))


def top_k(fraction: float) -> Compressor:
    """Keeps the k = ceil(fraction P) entries of largest magnitude and sets the others to 0, with error feedback.

    The result is biased: its mean is not the update. Error feedback makes up for this: the simulator keeps what a
    device's uploads left out, and adds it to the next update of the device. Of entries with the same magnitude, the
    first are kept. An upload holds the value of each kept entry, in 32 bits, and its index, in ceil(log2 P).

    S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", Advances in Neural Information Processing
    Systems 31, pp. 4447-4458, 2018.
    Error feedback: F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, "1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs", Interspeech, pp. 1058-1062, 2014.

    Args:
      fraction: in (0, 1], the fraction of entries to keep.
    """
    is_allowed = lambda x: (x > 0) & (x <= 1)  # noqa: E731
    checks.within("fraction", fraction, is_allowed, "greater than 0 and at most 1", ())
    # Rounded down: in float32, 0.3 rounds up, and 31 of 100 entries would be kept.
    kept = np.float32(fraction)
    if float(kept) > float(fraction):
        kept = np.nextafter(kept, np.float32(0))

    def bits(size: int) -> float:
        num_kept = max(math.ceil(kept * np.float32(size)), 1)
        return float(num_kept * (_FLOAT_BITS + math.ceil(math.log2(size))))

    return Compressor(bits, _keep_largest, parameters=kept, error_feedback=True)


def _keep_largest(key: Array, fraction: Array, update: Array) -> Array:
    num_kept = jnp.maximum(jnp.ceil(fraction * np.float32(update.size)), 1).astype(jnp.int32)
    # Non-negative floats have the order of their bit patterns, and NaN comes last, so that it is kept. Finding the k-th
    # largest pattern bit by bit takes a tenth of the time of sorting.
    num_bits = jnp.finfo(update.dtype).bits
    pattern = lax.bitcast_convert_type(jnp.abs(update), jnp.dtype(f"int{num_bits}"))

    def set_bit(kth: Array, bit: ArrayLike) -> tuple[Array, None]:
        return jnp.where(jnp.sum(pattern >= kth + bit) >= num_kept, kth + bit, kth), None

    bits = np.asarray([2**i for i in reversed(range(num_bits - 1))], pattern.dtype)
    kth, _ = lax.scan(set_bit, jnp.zeros((), pattern.dtype), bits)
    larger, equal = pattern > kth, pattern == kth
    keep = larger | (equal & (jnp.cumsum(equal) <= num_kept - jnp.sum(larger)))
    return jnp.where(keep, update, 0)


REGISTRY = Registry(Compressor, {"none": none, "quantise": quantise, "top_k": top_k})


def by_name(name: str) -> Compressor:
    """Returns a compressor by name, such as "none", "quantise(bits=4)" or "top_k(fraction=0.01)"."""
    return REGISTRY.make(name)
