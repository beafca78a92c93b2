"""The processors of this machine, and how many threads a process uses of them."""

import functools
import os

import jax

from fcjax.runtime import programs


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_accelerated() -> bool:
    return jax.default_backend() != "cpu"


@functools.cache
def use_one_thread() -> None:
    """Lets XLA compute with one thread in this process, but compile with all; before JAX is used.

    XLA sums in an order that depends on the number of its threads: with one, a run has the same bits on any worker. It
    reads NPROC when its client starts, and again when it compiles.
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
