"""Programs that are compiled once, for one device, and run on many; and their cache on disk."""

import contextlib
import dataclasses
import gc
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

from fcjax import devices, settings
from fcjax.data import store


def needed_bytes(compiled: Compiled) -> int:
    """What a program needs while it runs, with what it is given and what it returns; 0 where it is not known."""
    sizes = compiled.memory_analysis()
    if sizes is None:
        return 0
    given_and_returned = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return given_and_returned + sizes.temp_size_in_bytes


def compile_for(where: Sequence[jax.Device], lower: Callable[[jax.Device], Lowered]) -> dict[jax.Device, Compiled]:
    """A program for each device, given how it is lowered for one; for fewer, with a warning, where not all can have it.

    Each kernel of a program takes maps of memory, some 1000 for all, and again for each core. A process of Linux may
    have 65,530 of them, and XLA crashes when it gets no more.
    """
    first, *others = dict.fromkeys(where)
    with _LOCK:
        _make_room()
        lowered = lower(first)
        with _disk_events() as events:
            compiled = lowered.compile()
        executable = compiled.runtime_executable()
        if executable not in _programs:
            _programs[executable] = _Program(_serialized(compiled) if _is_copyable(events) else None, {first: compiled})
            if len(_programs) > _MOST_PROGRAMS:
                del _programs[next(iter(_programs))]
        program = _programs[executable]
        missing = [device for device in others if device not in program.on]
        if len(missing) > 1 and not devices.is_accelerated():
            before = _free_maps()
            program.put_on(missing[:1], lower)  # which shows how many maps it takes
            missing = missing[1:]
            if before is not None:
                each = max(1, before - (_free_maps() or 0))
                missing = _that_have_room(missing, each, program)
        program.put_on(missing, lower)
        return dict(program.on)


@dataclasses.dataclass
class _Program:
    parts: tuple | None  # as it can be loaded for other cores, if it can be
    on: dict[jax.Device, Compiled]

    def put_on(self, missing: Sequence[jax.Device], lower: Callable[[jax.Device], Lowered]) -> None:
        def make(device: jax.Device) -> Compiled:
            return lower(device).compile() if self.parts is None else _load(self.parts, device)

        with ThreadPoolExecutor() as pool:
            self.on |= zip(missing, pool.map(settings.carried(make), missing), strict=True)


_LOCK = threading.RLock()
_MOST_PROGRAMS = 16
_programs: dict[Any, _Program] = {}  # by what was compiled for the first device


def _make_room(needed: int = 0, wanted: _Program | None = None) -> int:
    """Sees to it that so many maps of memory can be had, beside a reserve, and returns how many can.

    If need be it lets go of all other programs, those in JAX's own caches too: they are compiled again when they are
    called again.
    """
    free = _free_maps()
    if free is None or free >= needed:
        return needed
    for key in [key for key, program in _programs.items() if program is not wanted]:
        del _programs[key]
    jax.clear_caches()
    gc.collect()
    free = _free_maps() or 0
    if free < 0 and wanted is None:
        raise RuntimeError(
            f"this process has nearly all of the {_most_maps()} maps of memory that it may have (vm.max_map_count), "
            "and one more program could crash it: start a new process, or raise the limit"
        )
    return max(0, free)


def _that_have_room(cores: list[jax.Device], each: int, program: _Program) -> list[jax.Device]:
    """Those of some cores that a program can be put on, which takes so many maps of memory on each."""
    number = min(len(cores), _make_room(each * len(cores), program) // each)
    if number < len(cores):
        warnings.warn(
            f"{len(program.on) + number} of {len(program.on) + len(cores)} cores take part: on each, a program takes "
            f"{each} of the {_most_maps()} maps of memory that a process may have (vm.max_map_count); several "
            "processes together can use more cores",
            RuntimeWarning,
            stacklevel=3,
        )
    return cores[:number]


def _most_maps() -> int:
    return int(Path("/proc/sys/vm/max_map_count").read_text())


def _free_maps() -> int | None:
    """How many maps of memory this process may still take, beside a reserve; None where there is no such limit."""
    try:
        with open("/proc/self/maps", "rb") as lines:
            return int(_USED_MAPS * _most_maps()) - sum(1 for _ in lines)
    except (OSError, ValueError):
        return None


_USED_MAPS = 0.9  # the rest is for what is compiled and allocated otherwise


def _is_copyable(events: set[str]) -> bool:
    """Whether a program was compiled just now, and for a core of a CPU.

    Of one that JAX read from its cache on disk XLA makes copies that do not run, without telling: the others read it
    too, then. Where nothing is known of where it comes from, it counts as read.
    """
    asked, found = _ASKED in events, _FOUND in events
    return not devices.is_accelerated() and not found and (asked or not _reads_from_disk())


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


def keep_on_disk(cache_dir: str | os.PathLike | None = None) -> None:
    """Lets JAX keep what it compiles on disk, for the next process; where it has been told a place, that one stays.

    Programs for a CPU hold the instructions of the CPU that compiled them, and JAX does not tell one from another: each
    kind gets a folder of its own, so that a home folder can be shared by several. A damaged entry costs a warning.

    Args:
      cache_dir: by default FCJAX_CACHE_DIR or the user's cache folder.
    """
    if _kept_in():
        return
    with contextlib.suppress(OSError):  # then they are compiled anew
        folder = store.cache_folder(cache_dir) / "programs" / _processor()
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
