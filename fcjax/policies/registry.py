"""Policies by name: built in, or from the user's file."""

import ast
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping

from jax.typing import ArrayLike

from fcjax.policies.baselines import everybody, proportional_fair, random
from fcjax.policies.convergence import exact, fast_converge, fixed
from fcjax.policies.deadlines import asymptotic, client_selection
from fcjax.runtime.plugins import load_module, of_user
from fcjax.types import Policy

REGISTRY: dict[str, Callable[..., Policy]] = {
    "fc": fast_converge,
    "exact": exact,
    "fixed": fixed,
    "rd": random,
    "pf": proportional_fair,
    "cs": client_selection,
    "as": asymptotic,
    "everybody": everybody,
}
SHORT = {
    "cs-l": "cs(threshold_s=0.4)",
    "cs-h": "cs(threshold_s=1.5)",
    "as-l": "as(threshold_s=0.4)",
    "as-h": "as(threshold_s=1.5)",
}


def factory_by_name(name: str) -> Callable[..., Policy]:
    """Returns the factory of a named policy: "fc", "cs-l", "fixed(n=5)" or "fixed-5", "my_file:my_policy(x=2)"."""
    if not isinstance(name, str):
        raise ValueError(f"the name of a policy must be a string, got {name!r}")
    long = SHORT.get(name, name)
    if match := re.fullmatch(r"fixed-(0|[1-9][0-9]*)", name):
        long = f"fixed(n={match[1]})"
    match = re.fullmatch(r"([^()]+)(\(.*\))?", long, flags=re.DOTALL)
    base, arguments = (match[1], match[2]) if match else (long, None)
    if base in REGISTRY:
        factory = REGISTRY[base]
    elif ":" in base:
        factory = _users_factory(name, base)
    elif base == "centralized":
        raise ValueError("centralized is not a policy: use everybody with fcjax.presets.centralized(experiment)")
    else:
        close = difflib.get_close_matches(base, [*REGISTRY, *SHORT], n=1)
        raise ValueError(
            f"unknown policy {name!r}{f', did you mean {close[0]}?' if close else ':'} use {', '.join(known_names())}, "
            "or my_file:my_policy"
        )
    given = _arguments(name, arguments or "()")
    parameters = _parameters(factory)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for argument in given:
        if argument not in parameters and not takes_any:
            raise ValueError(f"policy {name!r} has no parameter {argument!r}: it has {', '.join(parameters) or 'none'}")
    required = [
        parameter.name
        for parameter in parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in ("phi", *given)
    ]
    if required:
        example = ", ".join(f"{parameter}=..." for parameter in required)
        raise ValueError(f"policy {name!r} needs {', '.join(required)}: use '{base}({example})'")
    return functools.partial(factory, **given) if given else factory


def known_names() -> list[str]:
    """Returns the names of the built-in policies."""
    names = []
    for name, factory in REGISTRY.items():
        required = [p.name for p in _parameters(factory).values() if p.default is p.empty]
        names.append(f"{name}({', '.join(f'{parameter}=...' for parameter in required)})" if required else name)
    return [*names, *SHORT, "fixed-N"]


def _arguments(name: str, text: str) -> dict[str, object]:
    """Parses keyword arguments in parentheses."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"policy {name!r}: give parameters by name, with plain values, as in fixed(n=5)") from None


def takes_phi(factory: Callable[..., Policy]) -> bool:
    return "phi" in _parameters(factory) and "phi" not in getattr(factory, "keywords", {})


def _parameters(factory: Callable[..., Policy]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except ValueError:  # some built-in functions have no signature
        return {}


def is_built_in(policy: Policy) -> bool:
    return all(str(getattr(function, "__module__", "")).startswith("fcjax.policies.") for function in policy)


def by_name(name: str, *, phi: ArrayLike = 0.05) -> Policy:
    """Returns a policy by name, such as "fc" or "fixed(n=5)"; `phi` is passed to policies that take it."""
    factory = factory_by_name(name)
    make = functools.partial(factory, phi=phi) if takes_phi(factory) else factory
    policy = make() if ":" not in name else of_user(f"policy {name!r}", make)
    if not isinstance(policy, Policy):
        raise ValueError(f"policy {name!r} must return a fcjax.Policy(init, select), got {type(policy).__name__}")
    return policy


def _users_factory(name: str, base: str) -> Callable[..., Policy]:
    module_name, _, attribute = base.rpartition(":")
    module = of_user(f"policy {name!r}: {module_name!r}", lambda: load_module(module_name))
    found = getattr(module, attribute, None)
    if isinstance(found, Policy):
        return lambda: found
    if not callable(found):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(
            f"policy {name!r}: {module_name!r} has no policy or factory {attribute!r}; it has {', '.join(names) or '-'}"
        )
    return found
