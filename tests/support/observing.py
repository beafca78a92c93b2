"""Worlds that are observed round by round, and random traces."""

import dataclasses

import jax
import numpy as np

import fcjax

CELL = fcjax.Cell(
    bandwidth_hz=20e6, noise_psd_w_hz=10**-20.4, power_w=np.full(4, 0.01), upload_bits=1.6e6, sample_rate_hz=1000.0
)
TRAINING = fcjax.Training(local_steps=5, batch_size=128)
KEY = jax.random.key(11)
NUM_RUNS, NUM_ROUNDS, NUM_DEVICES = 2, 200, 250  # the same in all tests, so that each world is compiled once


def cell_of(num, **fields):
    return dataclasses.replace(CELL, power_w=np.full(num, 0.01), **fields)


def run_keys():
    return jax.random.split(KEY, NUM_RUNS), jax.random.split(jax.random.key(3), (NUM_RUNS, NUM_ROUNDS))


def observe_in_turn(world, cell, num_rounds, run=0):
    """Observes the first rounds of a run one by one, without jit; returns the observations, (round, device)."""
    init_keys, rounds_keys = run_keys()
    state = world.init(init_keys[run], cell)
    observations = []
    for key in rounds_keys[run, :num_rounds]:
        state, observation = world.observe(key, state, cell, TRAINING)
        observations.append(observation)
    return jax.tree.map(lambda *rows: np.stack(rows), *observations)


def rows_of(num_rounds, num_devices, seed=0):
    """Draws gains, computation times and availability for a trace."""
    rng = np.random.default_rng(seed)
    shape = num_rounds, num_devices
    return rng.uniform(1e-12, 1e-9, shape), rng.uniform(0.1, 1, shape), rng.uniform(size=shape) < 0.7
