"""Named experiments: `shi2020`, the paper's, and scenarios beyond it.

A preset is a function that makes an `Experiment` from a data set, a distribution, a seed and further settings.
`by_name` looks presets up by name, with parameters in parentheses, or in the user's file.
"""

from collections.abc import Callable

from fcjax.presets.paper import centralized, shi2020, shi2020_as_written
from fcjax.presets.scenarios import cnn, crowd, energy, heterogeneous, mobile, resnet
from fcjax.runtime.registry import Registry
from fcjax.simulation.experiment import Experiment

__all__ = [
    "REGISTRY",
    "by_name",
    "centralized",
    "cnn",
    "crowd",
    "energy",
    "heterogeneous",
    "mobile",
    "resnet",
    "shi2020",
    "shi2020_as_written",
]

REGISTRY = Registry(
    Experiment,
    {
        "shi2020": shi2020,
        "shi2020_as_written": shi2020_as_written,
        "heterogeneous": heterogeneous,
        "energy": energy,
        "mobile": mobile,
        "crowd": crowd,
        "cnn": cnn,
        "resnet": resnet,
    },
    word="preset",
)


def by_name(name: str) -> Callable[..., Experiment]:
    """Returns a preset by name, such as "mobile(speed_m_s=20)" or "my_file:my_preset"."""
    return REGISTRY.factory(name, "dataset", "distribution", "num_devices", "radius_m", "budget_s", "seed")
