"""Things by name: built in, or from the user's file, with parameters in parentheses."""

import ast
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from fcjax.runtime.plugins import is_file, load_module, of_user

T = TypeVar("T")


class Registry(Generic[T]):
    """Named factories of one kind of thing, such as policies.

    A name is that of a factory, with any parameters in parentheses ("fc", "fixed(n=5)"), a short form ("cs-l",
    "fixed-5"), or a factory in the user's file ("my_file:my_policy(x=2)").
    """

    def __init__(
        self,
        kind: type[T],
        factories: Mapping[str, Callable[..., T]],
        short: Mapping[str, str] | None = None,
        *,
        word: str | None = None,
    ):
        """Makes a registry.

        Args:
          kind: the type that factories return.
          factories: the built-in factories by name.
          short: short forms and the names they stand for; N stands for a number, as in {"fixed-N": "fixed(n=N)"}.
          word: what such a thing is called, if not by its type.
        """
        self._kind, self._word = kind, word or kind.__name__.lower()
        self._factories, self._short = dict(factories), dict(short or {})

    def names(self, *, short: bool = True) -> list[str]:
        """Returns the names, and the short forms, of everything built in, with the parameters that are required."""
        names = []
        for name, factory in self._factories.items():
            required = [p.name for p in _parameters(factory).values() if _is_required(p)]
            names.append(f"{name}({', '.join(f'{parameter}=...' for parameter in required)})" if required else name)
        return [*names, *self._short] if short else names

    def factory(self, name: str, *optional: str) -> Callable[..., T]:
        """Returns the factory of a name, with the parameters in the name set.

        Args:
          name: the name.
          optional: parameters that may be missing because the caller supplies them.
        """
        if not isinstance(name, str):
            raise ValueError(f"{self._word}: the name must be a string, got {name!r}")
        match = re.fullmatch(r"([^()]+)(\(.*\))?", self._long(name), flags=re.DOTALL)
        if match is None and "(" in name:
            raise ValueError(f"{self._word} {name!r}: a parenthesis is missing, or text follows the last one")
        base, arguments = (match[1], match[2]) if match else (name, None)
        if base in self._factories:
            factory = self._factories[base]
        elif ":" in base:
            factory = self._users_factory(name, base)
        else:
            raise ValueError(f"unknown {self._word} {name!r}{self._instead(base)}")
        given = _arguments(f"{self._word} {name!r}", arguments or "()")
        parameters = _parameters(factory)
        if unknown := not_taken(factory, given):
            known = ", ".join(parameters) or "none"
            raise ValueError(f"{self._word} {name!r} has no parameter {unknown[0]!r}: it has {known}")
        required = [
            parameter.name
            for parameter in parameters.values()
            if _is_required(parameter) and parameter.name not in (*optional, *given)
        ]
        if required:
            example = ", ".join(f"{parameter}=..." for parameter in required)
            raise ValueError(f"{self._word} {name!r} needs {', '.join(required)}: use '{base}({example})'")
        return functools.partial(factory, **given) if given else factory

    def make(self, name: str, **optional: Any) -> T:
        """Makes a named thing, with those `optional` parameters that it takes and that the name does not set."""
        factory = self.factory(name, *optional)
        make = functools.partial(factory, **{key: value for key, value in optional.items() if takes(factory, key)})
        made = make() if ":" not in name else of_user(f"{self._word} {name!r}", make)
        if not isinstance(made, self._kind):
            expected = f"fcjax.{self._kind.__name__}({', '.join(inspect.signature(self._kind).parameters)})"
            raise ValueError(f"{self._word} {name!r} must return a {expected}, got {type(made).__name__}")
        return made

    def _long(self, name: str) -> str:
        for short, long in self._short.items():
            if match := re.fullmatch(re.escape(short).replace("N", "(0|[1-9][0-9]*)"), name):
                return long.replace("=N", f"={match[1]}") if match.groups() else long
        return name

    def _instead(self, base: str) -> str:
        close = difflib.get_close_matches(base.lower(), [*self._factories, *self._short], n=1)
        if is_file(base):
            return f": to use the file, name its function too, as in {base}:my_{self._word}"
        question = f", did you mean {close[0]}?" if close else ":"
        return f"{question} use {', '.join(self.names())}, or my_file:my_{self._word}"

    def _users_factory(self, name: str, base: str) -> Callable[..., T]:
        module_name, _, attribute = base.rpartition(":")
        module = of_user(f"{self._word} {name!r}: {module_name!r}", lambda: load_module(module_name))
        found = getattr(module, attribute, None)
        if isinstance(found, self._kind):
            return lambda: found
        if not callable(found):
            names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise ValueError(
                f"{self._word} {name!r}: {module_name!r} has no {self._word} or factory {attribute!r}; "
                f"it has {', '.join(names) or '-'}"
            )
        return found


def takes(factory: Callable, parameter: str) -> bool:
    """Returns whether a factory has a parameter that is not set yet."""
    return parameter in _parameters(factory) and parameter not in getattr(factory, "keywords", {})


def not_taken(factory: Callable, names: Iterable[str]) -> list[str]:
    """Returns the names that are not parameters of a factory; none if it takes any."""
    parameters = _parameters(factory)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return [] if takes_any else [name for name in names if name not in parameters]


def _is_required(parameter: inspect.Parameter) -> bool:
    takes_any = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not takes_any


def _parameters(factory: Callable) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except ValueError:  # some built-in functions have no signature
        return {}


def _arguments(what: str, text: str) -> dict[str, object]:
    """Parses keyword arguments in parentheses."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ValueError(
            f"{what}: give parameters by name, with numbers or quoted texts, as in f(n=5, path='x.nc')"
        ) from None
