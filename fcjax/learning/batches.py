"""Local data of devices, and their mini-batches."""

import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fcjax.learning.models import Model
from fcjax.types import Training


class LocalData(NamedTuple):
    """The shared data set and its partition among devices (see `fcjax.data.partition`)."""

    x: Array | np.ndarray  # (N, ...)
    y: Array | np.ndarray  # (N,)
    indices: Array | np.ndarray  # (M, N_max) int32
    sizes: Array | np.ndarray  # (M,) int32, D_i

    def __repr__(self) -> str:
        return f"LocalData({len(self.x)} samples {self.x.shape[1:]}, on {len(self.sizes)} devices)"


def check(data: LocalData, training: Training, model: Model) -> None:
    """Raises ValueError if data, settings and model do not fit together; traced values are not checked."""
    concrete = [None if isinstance(part, jax.core.Tracer) else np.asarray(part) for part in data]
    _, y, indices, sizes = concrete
    num_samples = data.x.shape[0]
    check_finite("x", data.x)
    if data.y.shape != (num_samples,):
        raise ValueError(f"y must hold one target for each of {num_samples} samples, got shape {data.y.shape}")
    if indices is not None and not (indices.min() >= 0 and indices.max() < num_samples):
        raise ValueError(f"indices must be 0 to {num_samples - 1}, got {indices.min()} to {indices.max()}")
    if y is not None:
        model.check_targets(y)
    if sizes is not None:
        check_sizes(training, sizes)


def check_finite(name: str, inputs: Any) -> None:
    """Raises ValueError if inputs hold NaN or infinity; each NumPy array is checked once."""
    if not isinstance(inputs, np.ndarray) or not np.issubdtype(inputs.dtype, np.floating):
        return
    if _finite.get(id(inputs)) is inputs:
        return
    if not np.all(np.isfinite(inputs)):
        sample = int(np.argmin(np.isfinite(inputs.reshape(len(inputs), -1)).all(1)))
        raise ValueError(
            f"{name} must hold finite numbers, but sample {sample} has NaN or infinity: remove or repair it"
        )
    _finite[id(inputs)] = inputs


_finite: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()


def check_sizes(training: Training, sizes: Any) -> None:
    """Raises ValueError unless each device has enough samples for a batch; sizes must be concrete."""
    sizes = np.asarray(sizes)
    if training.local_steps < 1 or training.batch_size < 1:
        raise ValueError(
            f"local_steps and batch_size must be 1 or more, got {training.local_steps} and {training.batch_size}"
        )
    if sizes.min() < training.batch_size:
        device = int(np.argmin(sizes))
        raise ValueError(
            f"batch_size {training.batch_size} is more than the {sizes[device]} samples of device {device}: "
            "use a smaller batch or more data per device"
        )
    if sizes.max() > _MOST_SAMPLES or int(sizes.max()) * training.local_steps * training.batch_size >= 2**31:
        raise ValueError(
            f"a device may have up to {_MOST_SAMPLES} samples, and their number times {training.local_steps} steps of "
            f"{training.batch_size} must be below 2^31; got {sizes.max()} samples"
        )


def draw(key: Array, size: Array, training: Training) -> Array:
    """Draws the mini-batches of a round as positions 0..size-1, (tau, d); none repeats within size/d batches.

    The positions are an arithmetic progression modulo the size, with a random offset and a random stride that is
    coprime to the size. This takes two random numbers. A partition stores samples in random order, so each batch is by
    itself a uniform draw without replacement. Batches of different rounds are not independent: two rounds with the same
    one of a thousand strides group the same neighbours.
    """
    offset_key, stride_key = jax.random.split(key)
    strides = jnp.asarray(_PRIMES)
    # Always int32, so that a key draws the same batches in any precision.
    size = jnp.asarray(size, jnp.int32)
    stride = strides[jax.random.randint(stride_key, (), 0, strides.size, jnp.int32)] % size
    offset = jax.random.randint(offset_key, (), 0, size, jnp.int32)
    steps = jnp.arange(training.local_steps * training.batch_size, dtype=jnp.int32)
    return ((offset + stride * steps) % size).reshape(training.local_steps, training.batch_size)


def _primes(count: int, above: int) -> np.ndarray:
    sieve = np.ones(above + 30 * count, bool)
    for i in range(2, int(len(sieve) ** 0.5) + 1):
        sieve[i * i :: i] = False
    return np.flatnonzero(sieve)[np.flatnonzero(sieve) > above][:count].astype(np.int32)


# Strides are primes larger than any device's number of samples, hence coprime to it.
_MOST_SAMPLES = 2_000_000
_PRIMES = _primes(1000, above=_MOST_SAMPLES)
