"""Vectorised, differentiable simulation of latency-constrained federated learning over a wireless cell."""

import importlib
from typing import TYPE_CHECKING, Any

from fcjax import data, policies, presets
from fcjax.learning import batches, models
from fcjax.policies.contract import check_policy
from fcjax.runtime import programs
from fcjax.simulation.experiment import Experiment
from fcjax.simulation.simulate import simulate
from fcjax.theory import bounds
from fcjax.types import Cell, Decision, Estimates, Observation, Policy, RoundContext, Training
from fcjax.wireless import latency, radio
from fcjax.wireless.bandwidth import allocate
from fcjax.wireless.lambertw import lambertw
from fcjax.wireless.radio import required_share
from fcjax.wireless.sets import fastest_sets

if TYPE_CHECKING:
    from fcjax.sweeps import results
    from fcjax.sweeps.run import sweep

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
    "batches",
    "bounds",
    "check_policy",
    "data",
    "fastest_sets",
    "lambertw",
    "latency",
    "models",
    "plots",
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
_LAZY = {"plots": "fcjax.report.plots", "results": "fcjax.sweeps.results", "sweep": "fcjax.sweeps.run"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fcjax' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
