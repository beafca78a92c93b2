"""Vectorised, differentiable simulation of latency-constrained federated learning over a wireless cell."""

from fcjax import bounds, data, latency, radio
from fcjax.bandwidth import allocate, fastest_sets
from fcjax.lambertw import lambertw
from fcjax.radio import required_share
from fcjax.types import Cell, Decision, Estimates, Observation, Training

__all__ = [
    "Cell",
    "Decision",
    "Estimates",
    "Observation",
    "Training",
    "allocate",
    "bounds",
    "data",
    "fastest_sets",
    "lambertw",
    "latency",
    "radio",
    "required_share",
]
