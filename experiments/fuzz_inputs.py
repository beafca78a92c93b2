"""Random input for `fuzz.py`: physical, absurd, not finite, of wrong shapes and types, or no number at all."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fcjax


class Rng(np.random.Generator):
    """Random numbers, and how often what is made of them is spoilt."""

    spoilt = 0.0


NUM_DEVICES = (1, 2, 5, 20)
JUNK: tuple[Any, ...] = (
    "many",
    None,
    1j,
    [1.0, [2.0]],
    object(),
    True,
    b"7",
    {},
    (),
    np.array("x"),
    np.datetime64("2020"),
)


_SPOILT = np.array([0.35, 0.2, 0.1, 0.07, 0.07, 0.07, 0.07, 0.07])


def number(rng: Rng, low: float, high: float) -> Any:
    """A number, mostly physical: between two bounds in logarithm."""
    kind = rng.choice(np.arange(1, 9), p=_SPOILT) if rng.random() < rng.spoilt else 0
    plain = 10 ** rng.uniform(np.log10(low), np.log10(high))
    absurd = 10 ** rng.uniform(-44, 38)
    values = (plain, absurd, 0.0, -plain, np.nan, np.inf, -np.inf, int(min(plain, 2.0**62)), None)
    return values[kind] if kind < 8 else JUNK[rng.integers(len(JUNK))]


def whole(rng: Rng, low: int, high: int) -> Any:
    """A whole number, mostly: at least `low` and below `high`."""
    return int(rng.integers(low, high)) if rng.random() >= rng.spoilt else number(rng, max(low, 1), high)


def array(rng: Rng, low: float, high: float, size: int) -> Any:
    """Numbers, one for each device; now and then of another shape or type."""
    values = 10 ** rng.uniform(np.log10(low), np.log10(high), size)
    kind = rng.choice(np.arange(1, 9), p=_SPOILT) if rng.random() < rng.spoilt else 0
    if kind == 1:
        values = 10 ** rng.uniform(-44, 38, size)
    elif kind == 2:
        values[rng.integers(size)] = rng.choice([0.0, -1.0, np.nan, np.inf, 1e38, 1e-38])
    elif kind == 3:
        values = values * rng.integers(0, 2, size)
    elif kind == 4:
        values = values[:-1] if rng.random() < 0.5 else np.stack([values, values])
    elif kind == 5:
        return list(values)
    elif kind == 6:
        return number(rng, low, high)
    elif kind == 7:
        return np.clip(values, 0, 1e9).astype(rng.choice([np.int32, np.int64, np.uint8, np.float16]))
    elif kind == 8:
        return JUNK[rng.integers(len(JUNK))]
    dtype = rng.choice([np.float32, np.float64])
    with np.errstate(all="ignore"):
        values = values.astype(dtype)
    return jnp.asarray(values) if rng.random() < 0.3 else values


def cell(rng: Rng, size: int) -> fcjax.Cell:
    return fcjax.Cell(
        bandwidth_hz=number(rng, 1e4, 1e9),
        noise_psd_w_hz=number(rng, 1e-22, 1e-18),
        power_w=array(rng, 1e-4, 10, size),
        upload_bits=number(rng, 1e3, 1e10) if rng.random() < 0.7 else array(rng, 1e3, 1e10, size),
        radius_m=number(rng, 10, 1e4),
        min_distance_m=number(rng, 0.1, 100),
        reference_gain=number(rng, 1e-16, 1e-8),
        path_loss_exponent=number(rng, 1, 6),
        scatter=number(rng, 1e-3, 1),
        shadowing_db=number(rng, 0.1, 12),
        sample_floor_s=number(rng, 1e-6, 1e-1),
        sample_rate_hz=number(rng, 10, 1e6),
    )


def observation(rng: Rng, size: int) -> fcjax.Observation:
    return fcjax.Observation(gain=array(rng, 1e-16, 1e-6, size), compute_s=array(rng, 1e-3, 1e2, size))


def scheduled(rng: Rng, size: int) -> Any:
    return rng.random(size) < 0.5 if rng.random() < 0.9 else array(rng, 1, 2, size)


def training(rng: Rng, size: int) -> fcjax.Training:
    return fcjax.Training(
        learning_rate=number(rng, 1e-4, 1),
        momentum=number(rng, 0.1, 0.99),
        budget_s=number(rng, 1, 1e4),
        num_samples=array(rng, 1, 1e5, size),
        # Always the same local_steps and batch_size: policies are compiled for them.
    )


def context(rng: Rng, size: int) -> fcjax.RoundContext:
    return fcjax.RoundContext(
        observation(rng, size),
        fcjax.Estimates(array(rng, 0.1, 10, size), array(rng, 0.1, 100, size), array(rng, 0.01, 10, size)),
        cell(rng, size),
        training(rng, size),
        elapsed_s=number(rng, 1e-2, 60),
        round_index=int(rng.integers(0, 1000)),
    )


def of_bounds(rng: Rng, size: int) -> dict[str, Any]:
    chosen = {
        "beta": number(rng, 0.1, 100) if rng.random() < 0.5 else array(rng, 0.1, 100, size),
        "delta": array(rng, 0.01, 10, size),
        "num_samples": array(rng, 1, 1e5, size),
        "learning_rate": number(rng, 1e-4, 1),
        "local_steps": number(rng, 1, 50),
    }
    return chosen | ({"constant": rng.choice(["valid", "published", "other"])} if rng.random() < 0.3 else {})


def key(rng: Rng) -> Any:
    return jax.random.key(int(rng.integers(2**31)))


def drift(rng: Rng, size: int) -> dict[str, Any]:
    return {
        "delta": array(rng, 0.01, 10, size),
        "beta": number(rng, 0.1, 100),
        "learning_rate": number(rng, 1e-4, 1),
        "local_steps": number(rng, 1, 50),
    }


def is_finite(value: Any) -> bool:
    """Whether all that is in a call are numbers, and finite."""
    for leaf in jax.tree.leaves(value, is_leaf=lambda x: x is None):
        if (
            isinstance(leaf, str | bytes | bool)
            or callable(leaf)
            or (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
        ):
            continue
        try:
            if not np.isfinite(np.asarray(leaf, float)).all():
                return False
        except (TypeError, ValueError):
            return False
    return True
