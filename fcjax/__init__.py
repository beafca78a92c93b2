"""Vectorised, differentiable simulation of latency-constrained federated learning over a wireless cell."""

from fcjax import bounds, data, latency, policies, presets, radio
from fcjax.bandwidth import allocate
from fcjax.experiment import Experiment
from fcjax.lambertw import lambertw
from fcjax.radio import required_share
from fcjax.sets import fastest_sets
from fcjax.simulate import simulate
from fcjax.types import Cell, Decision, Estimates, Observation, Policy, RoundContext, Training

__all__ = [
    "Cell",
    "Decision",
    "Estimates",
    "Experiment",
    "Observation",
    "Policy",
    "RoundContext",
    "Training",
    "allocate",
    "bounds",
    "data",
    "fastest_sets",
    "lambertw",
    "latency",
    "policies",
    "presets",
    "radio",
    "required_share",
    "simulate",
]
