"""Cores, accelerators and threads."""

import functools
import os

import jax

from fcjax import checks
from fcjax.runtime import programs


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_accelerated() -> bool:
    """Returns whether JAX computes on accelerators."""
    return jax.default_backend() != "cpu"


def use_cores(number: int) -> None:
    """Makes JAX see several cores as separate processors, for experiments with `cores`. Call it before JAX is used."""
    number = checks.whole("cores", number, 1, num_cores(), why=", the cores of this process")
    try:
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError as error:
        raise RuntimeError(
            f"JAX has been used already: call use_cores earlier, or set JAX_NUM_CPU_DEVICES={number}"
        ) from error


@functools.cache
def use_one_thread() -> None:
    """Makes XLA compute with one thread on each core that JAX sees, but compile with all. Call it before JAX is used.

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
