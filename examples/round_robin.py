"""A policy with memory: devices take turns. It runs beside FC, on the same channels.

python examples/round_robin.py
"""

import jax.numpy as jnp

import fcjax


def select(key, following, context):
    num_devices = context.observation.gain.size
    scheduled = (jnp.arange(num_devices) - following) % num_devices < 3
    return (following + 3) % num_devices, fcjax.allocate(scheduled, context.observation, context.cell)


def round_robin():
    """Schedules three devices per round, in turns: the state is the first of the next three."""
    return fcjax.Policy(init=lambda cell: jnp.array(0), select=select)


policies = {"round robin": round_robin(), "fc": fcjax.policies.fast_converge()}
results = fcjax.sweep(policies, distribution="l2", budget_s=20, seeds=3, progress=True)
print(fcjax.results.summary(results).groupby("policy")[["rounds", "mean_scheduled", "best_accuracy"]].mean())
