"""Compiled programs, cached on disk for later processes."""

import contextlib
import hashlib
import os
import platform
from collections.abc import Callable
from pathlib import Path

import filelock
import jax
from jax.stages import Compiled, Lowered

from fcjax.runtime import files

_PATIENCE_S = 120.0  # longest wait for another process that compiles the same program


def keep_on_disk(cache_dir: str | os.PathLike | None = None) -> None:
    """Turns on JAX's compilation cache on disk, unless the user has already set its folder.

    A CPU program uses the instructions of the CPU that compiled it, and JAX's cache does not distinguish CPUs. Each
    kind of CPU therefore gets its own folder, so that several machines can share a home folder.

    Args:
      cache_dir: by default FCJAX_CACHE_DIR or the user's cache folder.
    """
    if kept_in():
        return
    with contextlib.suppress(OSError):  # works without a cache, only slower
        folder = files.cache_folder(cache_dir) / "programs" / processor()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            jax.config.update("jax_compilation_cache_dir", str(folder))
            # Small programs too: a command compiles about a hundred of them.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def kept_in() -> str | None:
    """Returns the cache folder, or None."""
    return getattr(jax.config, "jax_compilation_cache_dir", None)


def compile_once(lowered: Lowered, meanwhile: Callable[[], object]) -> Compiled:
    """Compiles a program. If several processes need it at the same time, one compiles it and the others load it.

    Args:
      lowered: the program.
      meanwhile: called by the processes that wait; use it for work such as compiling the next program.
    """
    folder = kept_in()
    if not folder or not Path(folder).is_dir():
        return lowered.compile()
    name = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]
    lock = filelock.FileLock(Path(folder) / f".{name}.lock")
    try:
        if not _acquired(lock, 0):
            meanwhile()
            _acquired(lock, _PATIENCE_S)  # if in vain, a suspended process may hold it
        return lowered.compile()
    finally:
        lock.release()


def _acquired(lock: filelock.BaseFileLock, timeout_s: float) -> bool:
    """Acquires a lock; returns False if another process holds it. A read-only folder has no locks to wait for."""
    try:
        lock.acquire(timeout=timeout_s)
    except filelock.Timeout:
        return False
    except OSError:
        pass
    return True


def processor() -> str:
    """Returns a name for this kind of processor, derived from its features."""
    features = {platform.machine(), platform.processor()}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features |= {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return hashlib.sha256("\n".join(sorted(features)).encode()).hexdigest()[:16]
