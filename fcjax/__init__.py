"""Vectorised, differentiable simulation of latency-constrained federated learning over a wireless cell."""

from fcjax import bounds, data, latency, policies, presets, programs, radio, results
from fcjax.bandwidth import allocate
from fcjax.contract import check_policy
from fcjax.experiment import Experiment
from fcjax.lambertw import lambertw
from fcjax.radio import required_share
from fcjax.sets import fastest_sets
from fcjax.simulate import simulate
from fcjax.sweep import sweep
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
    "check_policy",
    "data",
    "fastest_sets",
    "lambertw",
    "latency",
    "policies",
    "presets",
    "programs",
    "radio",
    "required_share",
    "results",
    "simulate",
    "sweep",
]
