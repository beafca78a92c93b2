"""What sweeps run on: all accelerators, or the cores of a CPU, each as a device of its own; and compiling for them."""

import contextlib
import functools
import hashlib
import os
import platform
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled, Lowered

from fcjax import settings
from fcjax.data import store


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


def needed_bytes(compiled: Compiled) -> int:
    """What a program needs while it runs, with what it is given and what it returns; 0 where it is not known."""
    sizes = compiled.memory_analysis()
    if sizes is None:
        return 0
    given_and_returned = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return given_and_returned + sizes.temp_size_in_bytes


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


def compile_for(devices: Sequence[jax.Device], lower: Callable[[jax.Device], Lowered]) -> dict[jax.Device, Compiled]:
    """A program for each device, given how it is lowered for one."""
    first, *others = dict.fromkeys(devices)
    with _LOCK:
        lowered = lower(first)
        with _disk_events() as events:
            compiled = lowered.compile()
        executable = compiled.runtime_executable()
        if executable not in _programs:
            parts = _serialized(compiled) if _is_copyable(events) else None
            _programs[executable] = parts, {first: compiled}
            if len(_programs) > _MOST_PROGRAMS:
                del _programs[next(iter(_programs))]
        parts, programs = _programs[executable]
        missing = [device for device in others if device not in programs]
        programs |= _compiled(missing, lower) if parts is None else {core: _load(parts, core) for core in missing}
    return programs


_LOCK = threading.RLock()
_MOST_PROGRAMS = 16  # each takes memory maps, of which a process can have some 65,000
_programs: dict[Any, tuple[tuple | None, dict[jax.Device, Compiled]]] = {}  # by what was compiled for the first device


def _compiled(devices: Sequence[jax.Device], lower: Callable[[jax.Device], Lowered]) -> dict[jax.Device, Compiled]:
    with ThreadPoolExecutor() as pool:
        return dict(zip(devices, pool.map(settings.carried(lambda d: lower(d).compile()), devices), strict=True))


def _is_copyable(events: set[str]) -> bool:
    """Whether a program was compiled just now, and for a core of a CPU.

    Of one that JAX read from its cache on disk XLA makes copies that do not run, without telling: the others read it
    too, then. Where nothing is known of where it comes from, it counts as read.
    """
    asked, found = _ASKED in events, _FOUND in events
    return not is_accelerated() and not found and (asked or not _reads_from_disk())


_ASKED, _FOUND = "/jax/compilation_cache/compile_requests_use_cache", "/jax/compilation_cache/cache_hits"


@contextlib.contextmanager
def _disk_events() -> Iterator[set[str]]:
    """What JAX tells meanwhile of its cache on disk, and of what this thread does."""
    events: set[str] = set()
    here = threading.get_ident()

    def note(event: str, **_: Any) -> None:
        if threading.get_ident() == here:
            events.add(event)

    jax.monitoring.register_event_listener(note)
    try:
        yield events
    finally:
        with contextlib.suppress(AssertionError, ValueError):  # somebody has removed all listeners
            jax.monitoring.unregister_event_listener(note)


def _serialized(compiled: Compiled) -> tuple | None:
    """What was compiled for one core, to be loaded for others; each is the first device of its own client.

    None if it cannot be: XLA cannot copy a program that calls back to Python, nor one that has run (hence this before
    that).
    """
    try:
        return serialize_executable.serialize(compiled)
    except Exception:  # of various kinds, by what could not be copied
        return None


def _load(parts: tuple, core: jax.Device) -> Compiled:
    payload, in_tree, out_tree = parts
    load = serialize_executable.deserialize_and_load
    return load(payload, in_tree, out_tree, backend=core.client, execution_devices=[core])


def _reads_from_disk() -> bool:
    global _has_read_from_disk
    _has_read_from_disk |= bool(_kept_in())  # JAX goes on to do so when it is told to stop
    return _has_read_from_disk


_has_read_from_disk = False


def keep_programs(cache_dir: str | os.PathLike | None = None) -> None:
    """Lets JAX keep what it compiles on disk, for the next process; where it has been told a place, that one stays.

    Programs for a CPU hold the instructions of the CPU that compiled them, and JAX does not tell one from another: each
    kind gets a folder of its own, so that a home folder can be shared by several. A damaged entry costs a warning.

    Args:
      cache_dir: by default FCJAX_CACHE_DIR or the user's cache folder.
    """
    if _kept_in():
        return
    folder = store.cache_folder(cache_dir) / "programs" / _processor()
    with contextlib.suppress(OSError):  # then they are compiled anew
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            jax.config.update("jax_compilation_cache_dir", str(folder))


def _kept_in() -> str | None:
    return getattr(jax.config, "jax_compilation_cache_dir", None)


def _processor() -> str:
    """A name for this kind of processor, made from what it can do."""
    features = {platform.machine(), platform.processor()}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features |= {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return hashlib.sha256("\n".join(sorted(features)).encode()).hexdigest()[:16]
