"""JAX settings that affect results, and how to apply them in other threads and processes."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax

T = TypeVar("T")

_BY_THREAD: dict[str, Callable[[Any], contextlib.AbstractContextManager]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_default_matmul_precision": jax.default_matmul_precision,
}
_BY_PROCESS = ("jax_disable_most_optimizations",)
_NO_MATTER = ("--xla_force_host_platform_device_count", "--xla_dump")


def current() -> dict[str, Any]:
    """Returns the settings that results depend on."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_NO_MATTER)]
    others = {name: jax.config.read(name) for name in _BY_PROCESS}
    return _by_thread() | others | {"XLA_FLAGS": " ".join(flags)}


def carried(function: Callable[..., T]) -> Callable[..., T]:
    """Wraps a function for another thread, which would not inherit `with jax.enable_x64(...)` and the like."""
    given = current()

    def call(*args: Any) -> T:
        with applied(given):
            return function(*args)

    return call


@contextlib.contextmanager
def applied(given: Mapping[str, Any]) -> Iterator[None]:
    """Applies the settings that `current` returned in another thread or process.

    Disables JAX's checks for NaN: rounds that do not take place hold NaN, and fcjax checks the others itself.
    """
    for name in _BY_PROCESS:
        if jax.config.read(name) != given[name]:
            jax.config.update(name, given[name])
    with contextlib.ExitStack() as stack:
        for name, context in _BY_THREAD.items():
            stack.enter_context(context(given[name]))
        stack.enter_context(jax.debug_nans(False))
        stack.enter_context(jax.debug_infs(False))
        yield


def _by_thread() -> dict[str, Any]:
    return {name: getattr(jax.config, name) for name in _BY_THREAD}
