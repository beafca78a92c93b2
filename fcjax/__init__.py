"""Vectorised, differentiable simulation of latency-constrained federated learning over a wireless cell."""

import importlib
from typing import TYPE_CHECKING, Any

from fcjax import bounds, data, latency, policies, presets, programs, radio
from fcjax.bandwidth import allocate
from fcjax.contract import check_policy
from fcjax.experiment import Experiment
from fcjax.lambertw import lambertw
from fcjax.radio import required_share
from fcjax.sets import fastest_sets
from fcjax.simulate import simulate
from fcjax.types import Cell, Decision, Estimates, Observation, Policy, RoundContext, Training

if TYPE_CHECKING:
    from fcjax import results
    from fcjax._sweep import sweep

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

# Their modules need xarray and pandas: importing these takes as long as JAX, and a worker does without.
_LAZY = {"results": "fcjax.results", "sweep": "fcjax._sweep"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fcjax' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
