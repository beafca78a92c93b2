"""Vectorised, differentiable simulation of latency-constrained federated learning over a wireless cell."""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fcjax import data, policies, presets, report
    from fcjax.learning import batches, compressors, models
    from fcjax.policies.contract import check_policy, check_world, random_context
    from fcjax.report import plots
    from fcjax.runtime import console, files, hardware, programs
    from fcjax.simulation.experiment import Experiment
    from fcjax.simulation.records import Stop
    from fcjax.simulation.simulate import Run, simulate
    from fcjax.sweeps import archive, metrics, results
    from fcjax.sweeps.grid import plan
    from fcjax.sweeps.jobs import Job
    from fcjax.sweeps.run import run_all, sweep
    from fcjax.theory import bounds, design
    from fcjax.theory.least_energy import least_energy
    from fcjax.types import (
        Cell,
        Compressor,
        Decision,
        Estimates,
        Limits,
        Observation,
        Outages,
        Policy,
        Reports,
        RoundContext,
        Training,
        World,
    )
    from fcjax.wireless import latency, outages, radio, worlds
    from fcjax.wireless.access import allocate, fastest_sets, required_share, round_time
    from fcjax.wireless.decisions import as_decided
    from fcjax.wireless.energy import round_energy
    from fcjax.wireless.lambertw import lambertw

# The module of each name. Names are imported on first use, so that `fcjax --help` does not wait for JAX.
_WHERE = {
    "Cell": "types",
    "Compressor": "types",
    "Decision": "types",
    "Estimates": "types",
    "Experiment": "simulation.experiment",
    "Job": "sweeps.jobs",
    "Limits": "types",
    "Observation": "types",
    "Outages": "types",
    "Policy": "types",
    "Reports": "types",
    "RoundContext": "types",
    "Run": "simulation.simulate",
    "Stop": "simulation.records",
    "Training": "types",
    "World": "types",
    "allocate": "wireless.access",
    "archive": "sweeps",
    "as_decided": "wireless.decisions",
    "batches": "learning",
    "bounds": "theory",
    "check_policy": "policies.contract",
    "check_world": "policies.contract",
    "compressors": "learning",
    "console": "runtime",
    "data": "",
    "design": "theory",
    "fastest_sets": "wireless.access",
    "files": "runtime",
    "hardware": "runtime",
    "lambertw": "wireless.lambertw",
    "latency": "wireless",
    "least_energy": "theory.least_energy",
    "metrics": "sweeps",
    "models": "learning",
    "outages": "wireless",
    "plan": "sweeps.grid",
    "plots": "report",
    "policies": "",
    "presets": "",
    "programs": "runtime",
    "radio": "wireless",
    "random_context": "policies.contract",
    "report": "",
    "required_share": "wireless.access",
    "results": "sweeps",
    "round_energy": "wireless.energy",
    "round_time": "wireless.access",
    "run_all": "sweeps.run",
    "simulate": "simulation.simulate",
    "sweep": "sweeps.run",
    "worlds": "wireless",
}
__all__ = [
    "Cell",
    "Compressor",
    "Decision",
    "Estimates",
    "Experiment",
    "Job",
    "Limits",
    "Observation",
    "Outages",
    "Policy",
    "Reports",
    "RoundContext",
    "Run",
    "Stop",
    "Training",
    "World",
    "allocate",
    "archive",
    "as_decided",
    "batches",
    "bounds",
    "check_policy",
    "check_world",
    "compressors",
    "console",
    "data",
    "design",
    "fastest_sets",
    "files",
    "hardware",
    "lambertw",
    "latency",
    "least_energy",
    "metrics",
    "models",
    "outages",
    "plan",
    "plots",
    "policies",
    "presets",
    "programs",
    "radio",
    "random_context",
    "report",
    "required_share",
    "results",
    "round_energy",
    "round_time",
    "run_all",
    "simulate",
    "sweep",
    "worlds",
]
__version__ = importlib.metadata.version("fcjax")


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'fcjax' has no attribute {name!r}")
    home = ".".join(filter(None, ("fcjax", _WHERE[name])))
    found = getattr(importlib.import_module(home), name, None) if home != "fcjax" else None
    globals()[name] = found = importlib.import_module(f"{home}.{name}") if found is None else found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
