"""Random worlds, drawn in float32 so that both precisions and the oracles see the same numbers."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import fcjax

RADIO = {"bandwidth_hz": 20e6, "noise_psd_w_hz": float(np.float32(10**-20.4)), "upload_bits": 1628480.0}


def draw(rng, num_devices, radius_m=(50, 5000), power_w=(1e-3, 1.0)):
    """Draws a gain, a computation time and a power for each device."""
    radius_m = np.exp(rng.uniform(*np.log(radius_m)))
    distance_km = radius_m * np.sqrt(rng.uniform(size=num_devices)) / 1e3
    gain = 10**-12.81 * np.maximum(distance_km, 1e-3) ** -3.76
    compute_s = 0.32 + rng.exponential(0.32, num_devices)
    power_w = np.exp(rng.uniform(*np.log(power_w), num_devices))
    return {"gain": np.float32(gain), "compute_s": np.float32(compute_s), "power_w": np.float32(power_w)}


def build(world, dtype, **radio):
    """The same world as an observation and a cell."""
    gain, compute_s, power_w = (np.asarray(world[name], dtype) for name in ("gain", "compute_s", "power_w"))
    return fcjax.Observation(gain, compute_s), fcjax.Cell(power_w=power_w, **{**RADIO, **radio})


def for_oracle(world):
    return {name: np.asarray(value, np.float64) for name, value in world.items()} | RADIO


def log_leaves(function, observation, cell):
    """Rewrites `function` in terms of log scale factors of the six relevant leaves. Also returns zero factors."""
    names = {observation: ("gain", "compute_s"), cell: ("bandwidth_hz", "noise_psd_w_hz", "power_w", "upload_bits")}

    def by_exponents(exponents):
        scaled = (
            dataclasses.replace(o, **{n: jnp.asarray(getattr(o, n)) * jnp.exp(exponents[n]) for n in names[o]})
            for o in names
        )
        return function(*scaled)

    return by_exponents, {n: jnp.zeros(jnp.shape(getattr(o, n))) for o in names for n in names[o]}
