"""Cores, accelerators and threads."""

import functools
import os

import jax

from fcjax.runtime import programs


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_accelerated() -> bool:
    """Returns whether JAX computes on accelerators."""
    return jax.default_backend() != "cpu"


@functools.cache
def use_one_thread() -> None:
    """Makes XLA compute with one thread but compile with all. Call it before JAX is used.

    The order in which XLA sums depends on its number of threads; with one thread, a run has the same bits on any
    worker. XLA reads NPROC when its client starts, and again when it compiles.
    """
    before = os.environ.get("NPROC")
    os.environ["NPROC"] = "1"
    try:
        jax.local_devices()
    finally:
        del os.environ["NPROC"]
        if before is not None:
            os.environ["NPROC"] = before
    programs.keep_on_disk()
