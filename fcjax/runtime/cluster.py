"""Dask clusters: starts a local one, and checks the workers of any."""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jaxlib

from fcjax.runtime.hardware import is_accelerated, use_one_thread

if TYPE_CHECKING:
    from distributed import Client

_START_S = 20.0  # time for the first worker to start
_LOCAL = "fcjax"  # the name of the cluster that `local_client` starts


def is_local(client: "Client") -> bool:
    return getattr(client.cluster, "name", None) == _LOCAL


def address_of(client: "Client") -> str:
    return str(getattr(client.scheduler, "address", "an unknown address"))


@dataclasses.dataclass(frozen=True)
class Versions:
    """Versions that must be the same on all workers."""

    fcjax: str  # digest of the package's code
    jax: str
    jaxlib: str


@functools.cache
def versions() -> Versions:
    folder = Path(__file__).parents[1]
    files = sorted(folder.rglob("*.py"))
    code = hashlib.sha256(b"".join(str(file.relative_to(folder)).encode() + file.read_bytes() for file in files))
    return Versions(code.hexdigest()[:12], jax.__version__, jaxlib.__version__)


def _introduce(dask_worker: Any) -> tuple[Versions, int, bool]:
    """Describes a worker, which Dask passes to any argument of this name."""
    use_one_thread()
    return versions(), dask_worker.state.nthreads, is_accelerated()


def differences(found: Versions, wanted: Versions) -> str:
    """Describes the versions that differ and what to do about it; returns "" if none does."""
    apart = [
        f"{field.name} {getattr(found, field.name)} instead of {getattr(wanted, field.name)}"
        for field in dataclasses.fields(wanted)
        if getattr(found, field.name) != getattr(wanted, field.name)
    ]
    return f"{', '.join(apart)}: install the same versions there and here, then restart the worker" if apart else ""


def check_workers(client: "Client") -> None:
    """Raises RuntimeError if a worker cannot execute runs or would give different results."""
    try:
        client.wait_for_workers(1, timeout=_START_S)
    except TimeoutError as error:
        if is_local(client):
            raise RuntimeError(f"no worker process has started within {_START_S:.0f} s: try again") from error
        address = address_of(client)
        warnings.warn(
            f"no worker has joined the scheduler at {address}: waiting for one; start workers with dask worker "
            f"{address} --nworkers auto --nthreads 1",
            stacklevel=2,
        )
        client.wait_for_workers(1)
    for address, found in client.run(_introduce, on_error="return").items():
        if isinstance(found, OSError):
            continue  # it has just left; Dask reassigns its runs
        if isinstance(found, Exception):
            raise RuntimeError(f"worker {address} cannot be used: {type(found).__name__}: {found}")
        about, nthreads, accelerated = found
        if apart := differences(about, versions()):
            raise RuntimeError(f"worker {address} has {apart}")
        if nthreads > 1 and not accelerated:
            raise RuntimeError(
                f"worker {address} has {nthreads} threads, but a run uses one: start workers with --nworkers auto "
                "--nthreads 1"
            )


# Environment of local workers. Dask's profiler samples them 100 times a second and slows runs by up to a quarter.
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # so that files in the current folder do not shadow libraries
    "DASK_LOGGING__DISTRIBUTED": "error",
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "10s",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__GIL__ENABLED": "False",
}


@contextlib.contextmanager
def local_client(number: int, cores: int = 1) -> Iterator["Client"]:
    """Starts a cluster of workers on this machine that listens on the loopback interface only.

    Args:
      number: how many workers.
      cores: how many cores JAX sees in each.
    """
    import dask
    from distributed import Client, Scheduler
    from distributed.deploy.spec import SpecCluster
    from distributed.deploy.subprocess import SubprocessWorker

    options = {
        "nthreads": 1,
        "host": "127.0.0.1",
        "dashboard": False,
        "memory_limit": 0,
        "preload": ["fcjax.sweeps.executor"],
        "death_timeout": 60,  # ends a worker whose driver was killed before it joined
    }
    worker = {
        "cls": SubprocessWorker,
        "options": {"worker_class": "distributed.Worker", "worker_kwargs": options},
    }
    quiet = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "port": 0, **quiet}}
    # It logs a traceback when a connection closes during shutdown, after silence_logs has ended.
    logging.getLogger("distributed.batched").setLevel(logging.ERROR)
    # Preparing a data set sets up the root logger, which would print what silence_logs silences.
    logging.getLogger("distributed").propagate = False
    environment = _ENVIRONMENT | ({"JAX_NUM_CPU_DEVICES": str(cores)} if cores > 1 else {})
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        # Without a time to live, workers survive when the user suspends the command: a dead one closes its connection.
        with dask.config.set({"distributed.worker.profile.enabled": False, "distributed.scheduler.worker-ttl": None}):
            cluster = SpecCluster(
                workers=dict.fromkeys(range(number), worker),
                scheduler=scheduler,
                silence_logs=logging.ERROR,
                name=_LOCAL,
            )
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    with cluster, Client(cluster) as client:
        yield client
