"""What sweeps run on: all accelerators, or the cores of a CPU, each as a device of its own; and their memory."""

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax


def for_programs(number: int) -> Sequence[jax.Device]:
    """Up to so many devices, for programs that run at the same time."""
    with _LOCK:
        if is_accelerated():
            return jax.local_devices()[:number]
        # JAX may have been told to make several devices of a CPU, more or fewer than its cores.
        told = jax.local_device_count()
        return _cores(num_cores() if told == 1 else told)[:number]


def is_accelerated() -> bool:
    return jax.default_backend() != "cpu"


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_USED = 0.9  # of the free memory


def free_bytes(device: jax.Device) -> int | None:
    """What of a device's memory programs may still take, None where it is not known."""
    if is_accelerated():
        stats = device.memory_stats() or {}
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else None
    else:
        free = min((size for size in (_available(), *_left_by_limits()) if size is not None), default=None)
    return None if free is None else int(_USED * free)


def _available() -> int | None:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return None


def _left_by_limits() -> Iterator[int]:
    """What the control groups of this process leave, as a job on a cluster has them, beside caches of files."""
    with contextlib.suppress(OSError, ValueError):
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        roots = {"": ("/sys/fs/cgroup", "memory.max", "memory.current", "file")}
        roots["memory"] = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "cache")
        for _, controller, path in lines:
            if controller not in roots:
                continue
            root, limit, used, cached = roots[controller]
            for folder in (Path(root + path), *Path(root + path).parents):
                with contextlib.suppress(OSError, ValueError, StopIteration):
                    stat = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    files = next(int(size) for name, size in stat if name == cached)
                    yield int((folder / limit).read_text()) - int((folder / used).read_text()) + files


_LOCK = threading.Lock()


@functools.cache
def _cores(number: int) -> tuple[jax.Device, ...]:
    """A client of XLA with a single thread for each core; where that cannot be had, the one client that JAX has.

    Programs that share a client share its threads. Each of their matrix products is then cut into as many pieces as
    there are cores, and what they work on wanders between the caches of the cores. Moreover XLA sums in an order that
    depends on the number of threads: with one, a run gives the same bits on any number of cores.
    """
    try:
        from jaxlib.xla_client import make_cpu_client

        with _environment("NPROC", "1"):  # where XLA looks up how many threads a client is to have
            clients: list[Any] = [make_cpu_client(asynchronous=False) for _ in range(number)]
            return tuple(client.local_devices()[0] for client in clients)
    except Exception as error:  # it is no public function of JAX, and may change
        warnings.warn(f"runs share the threads of one client and will be slower: {error}", RuntimeWarning, stacklevel=2)
        return (jax.local_devices()[0],) * number


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
