"""Scheduling policies: which devices take part in a round, and with what share of the bandwidth.

Each factory returns a `Policy`. Its parameters (phi, n, a threshold) are part of the policy's state, so all policies
from one factory share one compiled program. Every policy schedules at least one device. `client_selection` and
`everybody` use equal shares, except under TDMA; the others allocate the uplink optimally (Alg. 1 under FDMA). `by_name`
looks policies up by name.
"""

from jax.typing import ArrayLike

from fcjax.policies.baselines import everybody, proportional_fair, random
from fcjax.policies.convergence import exact, fast_converge, fixed, objective
from fcjax.policies.deadlines import asymptotic, client_selection
from fcjax.runtime.registry import Registry
from fcjax.types import Policy

__all__ = [
    "REGISTRY",
    "asymptotic",
    "by_name",
    "client_selection",
    "everybody",
    "exact",
    "fast_converge",
    "fixed",
    "is_built_in",
    "objective",
    "proportional_fair",
    "random",
]

REGISTRY = Registry(
    Policy,
    {
        "fc": fast_converge,
        "exact": exact,
        "fixed": fixed,
        "rd": random,
        "pf": proportional_fair,
        "cs": client_selection,
        "as": asymptotic,
        "everybody": everybody,
    },
    short={
        "cs-l": "cs(threshold_s=0.4)",
        "cs-h": "cs(threshold_s=1.5)",
        "as-l": "as(threshold_s=0.4)",
        "as-h": "as(threshold_s=1.5)",
        "fixed-N": "fixed(n=N)",
        "centralized": "everybody",  # with presets.centralized(experiment); a sweep applies both
    },
)


def by_name(name: str, *, phi: ArrayLike = 0.05) -> Policy:
    """Returns a policy by name, such as "fc" or "fixed(n=5)"; `phi` is passed to policies that take it."""
    return REGISTRY.make(name, phi=phi)


def is_built_in(policy: Policy) -> bool:
    """Returns whether a policy is fcjax's own."""
    functions = policy.init, policy.select
    return all(str(getattr(function, "__module__", "")).startswith("fcjax.policies.") for function in functions)
