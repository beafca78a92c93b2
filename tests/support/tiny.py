"""A small experiment for tests: clouds of points, a linear classifier and a few devices."""

import functools

import jax.numpy as jnp
import numpy as np

import fcjax
from fcjax import batches, data, models

NUM_DEVICES = 6
MODEL = models.mlp((8,), 4, hidden=())


@functools.cache
def dataset():
    return data.synthetic.classification(900, 200, num_features=8, num_labels=4, spread=0.6, seed=1)


def experiment(
    loaded=None, *, distribution="l1", num_devices=NUM_DEVICES, radius_m=600.0, budget_s=6.0, seed=0, **changes
):
    """A preset for `fcjax.sweep`."""
    loaded = dataset() if loaded is None else loaded
    training = fcjax.Training(learning_rate=0.05, budget_s=budget_s, local_steps=3, batch_size=16)
    parts = data.partition.by_name(distribution, loaded.train_y, num_devices, seed=seed, min_size=16)
    return fcjax.Experiment(
        **{
            "cell": fcjax.Cell(
                bandwidth_hz=1e6,
                noise_psd_w_hz=10**-20.4,
                power_w=np.full(num_devices, 0.01, np.float32),
                upload_bits=1e5,
                radius_m=radius_m,
                sample_floor_s=5e-3,
                sample_rate_hz=200.0,
            ),
            "training": training,
            "data": batches.LocalData(loaded.train_x, loaded.train_y, parts.indices, parts.sizes),
            "test_x": loaded.test_x,
            "test_y": loaded.test_y,
            "estimates": fcjax.Estimates(*(np.full(num_devices, x, np.float32) for x in (1.5, 12.0, 2.0))),
            "model": MODEL,
            **changes,
        }
    )


def select_loud(key, fraction, context):
    gain = context.observation.gain
    return fraction, fcjax.allocate(gain >= fraction * gain.max(), context.observation, context.cell)


def loud(fraction):
    """A user's policy: schedules the devices whose gain is at least a fraction of the largest gain."""
    return fcjax.Policy(lambda cell: jnp.asarray(fraction), select_loud)


def round_robin(n=3):
    """A user's policy with a state: the index of the next device."""

    def select(key, following, context):
        num_devices = context.observation.gain.size
        scheduled = (jnp.arange(num_devices) - following) % num_devices < n
        decision = fcjax.allocate(scheduled, context.observation, context.cell)
        return (following + n) % num_devices, decision

    return fcjax.Policy(lambda cell: jnp.array(0), select)
