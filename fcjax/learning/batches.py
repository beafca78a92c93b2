"""What a device trains on: its part of the one data set, and the mini-batches that it takes from it."""

import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fcjax.learning.models import Model
from fcjax.types import Training


class LocalData(NamedTuple):
    """The one shared data set and who has which part of it (see `fcjax.data.partition`)."""

    x: Array | np.ndarray  # (N, ...)
    y: Array | np.ndarray  # (N,)
    indices: Array | np.ndarray  # (M, N_max) int32
    sizes: Array | np.ndarray  # (M,) int32, D_i

    def __repr__(self) -> str:
        return f"LocalData({len(self.x)} samples {self.x.shape[1:]}, on {len(self.sizes)} devices)"


def check(data: LocalData, training: Training, model: Model) -> None:
    """Raises ValueError where data, settings and model do not fit each other; what is traced is passed over."""
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
    """Raises ValueError for inputs that hold NaN or infinity; arrays of the host are looked at once."""
    if not isinstance(inputs, np.ndarray) or not np.issubdtype(inputs.dtype, np.floating):
        return
    if _finite.get(id(inputs)) is inputs:
        return
    if not np.all(np.isfinite(inputs)):
        sample = int(np.argmin(np.isfinite(inputs.reshape(len(inputs), -1)).all(1)))
        raise ValueError(
            f"{name} must hold finite numbers, and sample {sample} has NaN or infinity: remove or repair it"
        )
    _finite[id(inputs)] = inputs


_finite: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()


def check_sizes(training: Training, sizes: Any) -> None:
    """Raises ValueError unless each device has the samples of a batch; sizes must be concrete."""
    sizes = np.asarray(sizes)
    if training.local_steps < 1 or training.batch_size < 1:
        raise ValueError(
            f"local_steps and batch_size must be 1 or more, got {training.local_steps} and {training.batch_size}"
        )
    if sizes.min() < training.batch_size:
        device = int(np.argmin(sizes))
        raise ValueError(
            f"batch_size {training.batch_size} is more than the {sizes[device]} samples of device {device}: "
            "take a smaller batch or more data a device"
        )
    if sizes.max() > _MOST_SAMPLES or int(sizes.max()) * training.local_steps * training.batch_size >= 2**31:
        raise ValueError(
            f"a device may have {_MOST_SAMPLES} samples, and these times {training.local_steps} steps of "
            f"{training.batch_size} must be below 2^31, in which mini-batches are computed; got {sizes.max()}"
        )


def draw(key: Array, size: Array, training: Training) -> Array:
    """Positions 0..size-1 of the mini-batches of a round, (tau, d): none repeats in a batch, nor in size/d batches.

    An arithmetic progression modulo the size, from a random offset with a random stride that has no divisor in common
    with it. It costs two random numbers. On samples in random order, as a partition has them, every batch is by itself
    a uniform draw without replacement; what is given up is independence between the batches of different rounds, which
    share the order: two rounds with the same stride, of about a thousand, meet the same neighbours.
    """
    offset_key, stride_key = jax.random.split(key)
    strides = jnp.asarray(_PRIMES)
    # In int32 whatever the default, so that the same key draws the same batches.
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


# Strides are primes above any number of samples of a device, so that none divides it.
_MOST_SAMPLES = 2_000_000
_PRIMES = _primes(1000, above=_MOST_SAMPLES)
