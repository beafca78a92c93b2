"""What sweeps run on: all accelerators, or the cores of a CPU, each as a device of its own."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled, Lowered

from fcjax.progress import in_this_precision


def available() -> Sequence[jax.Device]:
    """One entry for each program that can run at the same time as the others."""
    devices = jax.devices()
    return devices if is_accelerated() else _cores(_num_cores())


def is_accelerated() -> bool:
    return jax.default_backend() != "cpu"


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _cores(number: int) -> tuple[jax.Device, ...]:
    """A client of XLA with a single thread for each core; where that cannot be had, the one client that JAX has.

    Programs that share a client share its threads. Each of their matrix products is then cut into as many pieces as
    there are cores, and what they work on wanders between the caches of the cores: the products of a mini-batch take up
    to twice as long.
    """
    try:
        from jaxlib.xla_client import make_cpu_client

        with _environment("NPROC", "1"):  # where XLA looks up how many threads a client is to have
            clients: list[Any] = [make_cpu_client(asynchronous=False) for _ in range(number)]
            return tuple(client.local_devices()[0] for client in clients)
    except (ImportError, AttributeError, TypeError):  # it is no public function of JAX, and may change
        return (jax.devices()[0],) * number


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def compile_for(devices: Sequence[jax.Device], lower: Callable[[jax.Device], Lowered]) -> dict[jax.Device, Compiled]:
    """A program for each device, given how it is lowered for one."""
    devices = list(dict.fromkeys(devices))
    if is_accelerated():
        with ThreadPoolExecutor() as pool:
            return dict(zip(devices, pool.map(in_this_precision(lambda d: lower(d).compile()), devices), strict=True))
    # What was compiled for one core runs on all: each is the first device of its own client.
    compiled = lower(devices[0]).compile()
    executable = compiled.runtime_executable()
    if executable not in _copies:
        # At once, because a program that has run can no longer be copied.
        _copies[executable] = serialize_executable.serialize(compiled), {devices[0]: compiled}
    (payload, *trees), programs = _copies[executable]
    for core in devices:
        if core not in programs:
            programs[core] = serialize_executable.deserialize_and_load(
                payload, trees[0], trees[1], backend=core.client, execution_devices=[core]
            )
    return programs


_copies: dict[Any, tuple[tuple, dict[jax.Device, Compiled]]] = {}  # by what was compiled
