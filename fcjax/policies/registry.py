"""Policies by name, as command lines have them: built in, or from a file of the user's."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping

from jax.typing import ArrayLike

from fcjax.policies.baselines import centralized, proportional_fair, random
from fcjax.policies.convergence import exact, fast_converge, fixed
from fcjax.policies.deadlines import asymptotic, client_selection
from fcjax.runtime.plugins import load_module, of_user
from fcjax.types import Policy

_NAMED: dict[str, Callable[..., Policy]] = {
    "fc": fast_converge,
    "exact": exact,
    "rd": random,
    "pf": proportional_fair,
    "cs-l": functools.partial(client_selection, 0.4),
    "cs-h": functools.partial(client_selection, 1.5),
    "as-l": functools.partial(asymptotic, 0.4),
    "as-h": functools.partial(asymptotic, 1.5),
    "centralized": centralized,
}


def factory_by_name(name: str) -> Callable[..., Policy]:
    """What makes the policy of a name: "fc", "fixed-5", ..., or "my_file:my_policy", a factory or a policy."""
    if not isinstance(name, str):
        raise ValueError(f"the name of a policy must be a string, got {name!r}")
    if name in _NAMED:
        return _NAMED[name]
    if match := re.fullmatch(r"fixed-(0|[1-9]\d*)", name):
        return functools.partial(fixed, int(match[1]))
    if ":" in name:
        return _users_factory(name)
    raise ValueError(
        f"unknown policy {name!r}: use {', '.join(_NAMED)}, fixed-N (such as fixed-5), or my_file:my_policy"
    )


def takes_phi(factory: Callable[..., Policy]) -> bool:
    return "phi" in _parameters(factory)


def _parameters(factory: Callable[..., Policy]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except ValueError:  # some built-in functions have none to look at
        return {}


def is_built_in(policy: Policy) -> bool:
    return all(getattr(function, "__module__", "").startswith("fcjax.policies.") for function in policy)


def by_name(name: str, *, phi: ArrayLike = 0.05) -> Policy:
    """The policy of a name; a policy that has a parameter phi gets it."""
    factory = factory_by_name(name)
    make = functools.partial(factory, phi=phi) if takes_phi(factory) else factory
    policy = make() if ":" not in name else of_user(f"policy {name!r}", make)
    if not isinstance(policy, Policy):
        raise ValueError(f"policy {name!r} must give a fcjax.Policy(init, select), got {type(policy).__name__}")
    return policy


def _users_factory(name: str) -> Callable[..., Policy]:
    module_name, _, attribute = name.rpartition(":")
    module = of_user(f"policy {name!r}: {module_name!r}", lambda: load_module(module_name))
    found = getattr(module, attribute, None)
    if isinstance(found, Policy):
        return lambda: found
    if not callable(found):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(
            f"policy {name!r}: {module_name!r} has no policy or factory {attribute!r}; it has {', '.join(names) or '-'}"
        )
    required = [
        parameter.name
        for parameter in _parameters(found).values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name != "phi"
    ]
    if required:
        raise ValueError(f"policy {name!r}: the factory needs a default for {', '.join(required)}")
    return found
