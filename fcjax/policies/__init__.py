"""Scheduling policies: which devices take part in a round, and with what share of the bandwidth.

Each factory returns a `Policy`. Its parameters (phi, n, a threshold) are part of the policy's state, so all policies
from one factory share one compiled program. Every policy schedules at least one device. `client_selection` and
`everybody` use equal shares; the others split the bandwidth optimally (Alg. 1). `by_name` looks policies up by name.
"""

from fcjax.policies.baselines import everybody, proportional_fair, random
from fcjax.policies.convergence import exact, fast_converge, fixed, objective
from fcjax.policies.deadlines import asymptotic, client_selection
from fcjax.policies.registry import by_name, factory_by_name, is_built_in, known_names, takes_phi

__all__ = [
    "asymptotic",
    "by_name",
    "client_selection",
    "everybody",
    "exact",
    "factory_by_name",
    "fast_converge",
    "fixed",
    "is_built_in",
    "known_names",
    "objective",
    "proportional_fair",
    "random",
    "takes_phi",
]
