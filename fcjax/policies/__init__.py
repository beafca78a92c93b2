"""Scheduling policies: which devices take part in a round, and with what share of the bandwidth.

Each factory returns a `Policy`. Its parameters (phi, n, a threshold) are part of the policy's state, so all policies
from one factory share one compiled program. Every policy schedules at least one device. `client_selection` and
`everybody` use equal shares, except under TDMA, and `ocean` and `frugal` save energy; the others allocate the uplink
optimally (Alg. 1 under FDMA). `by_name` looks policies up by name.
"""

from jax.typing import ArrayLike

from fcjax.policies.bandits import cs_ucb
from fcjax.policies.baselines import everybody, proportional_fair, random
from fcjax.policies.convergence import exact, fast_converge, fixed, objective, optimality_gap
from fcjax.policies.deadlines import asymptotic, client_selection, frugal
from fcjax.policies.joint import joint
from fcjax.policies.local_steps import adaptive_steps
from fcjax.policies.losses import oort, power_of_choice
from fcjax.policies.online import online_converge
from fcjax.policies.plus import fast_converge_plus
from fcjax.policies.queues import ocean
from fcjax.policies.turns import age, round_robin, timely
from fcjax.policies.update_aware import best_channel_best_norm, best_norm, best_norm_after_channel, importance
from fcjax.runtime.registry import Registry
from fcjax.types import Policy

__all__ = [
    "REGISTRY",
    "adaptive_steps",
    "age",
    "asymptotic",
    "best_channel_best_norm",
    "best_norm",
    "best_norm_after_channel",
    "by_name",
    "client_selection",
    "cs_ucb",
    "everybody",
    "exact",
    "fast_converge",
    "fast_converge_plus",
    "fixed",
    "frugal",
    "importance",
    "is_built_in",
    "joint",
    "objective",
    "ocean",
    "online_converge",
    "oort",
    "optimality_gap",
    "power_of_choice",
    "proportional_fair",
    "random",
    "round_robin",
    "timely",
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
        "frugal": frugal,
        "everybody": everybody,
        "fc+": fast_converge_plus,
        "fc-online": online_converge,
        "joint": joint,
        "round-robin": round_robin,
        "age": age,
        "timely": timely,
        "cs-ucb": cs_ucb,
        "local-steps": adaptive_steps,
        "bn2": best_norm,
        "bc-bn2": best_channel_best_norm,
        "bn2-c": best_norm_after_channel,
        "importance": importance,
        "power-of-choice": power_of_choice,
        "oort": oort,
        "ocean": ocean,
    },
    short={
        "cs-l": "cs(threshold_s=0.4)",
        "cs-h": "cs(threshold_s=1.5)",
        "as-l": "as(threshold_s=0.4)",
        "as-h": "as(threshold_s=1.5)",
        "fixed-N": "fixed(n=N)",
        "bc": "pf",
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
