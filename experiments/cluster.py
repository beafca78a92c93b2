"""How a script joins the other processes of a sweep, on one machine or many."""

import argparse
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

_JOIN_S = 300  # within which all processes have to be there
_PART_S = 60  # within which all have to leave after the first that does: `fcjax.sweep` returns to all at the same time


def add_options(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group(
        "several processes, on one machine or many", "All are given the same command, and an OUT that they share."
    )
    group.add_argument(
        "--distributed",
        action="store_true",
        help="join the others, as Slurm, Kubernetes or MPI say, or as the options that follow do",
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 is")
    group.add_argument("--processes", type=int, metavar="N", help="how many there are")
    group.add_argument("--process", type=int, metavar="I", help="which this one is: 0, 1, ...")


def join(args: argparse.Namespace) -> int:
    """Joins the other processes of a sweep, if there are any, and returns the number of this one."""
    import jax

    told = {"coordinator_address": args.coordinator, "num_processes": args.processes, "process_id": args.process}
    if not args.distributed and all(value is None for value in told.values()):
        return 0
    _check(args)
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM stays with us
    # Not here, where it could not be interrupted; and it gives up after us, because it does so by ending the process.
    limits = {"initialization_timeout": 2 * _JOIN_S, "shutdown_timeout_seconds": _PART_S}
    joining = ThreadPoolExecutor(1).submit(jax.distributed.initialize, **told, **limits)
    try:
        try:
            joining.result(2)
        except TimeoutError:
            print(f"waiting up to {_JOIN_S} s for the other processes{_unknown(args.coordinator)}", file=sys.stderr)
            joining.result(_JOIN_S)
    except TimeoutError:
        raise RuntimeError(
            f"not all processes have joined within {_JOIN_S} s{_unknown(args.coordinator)}: start all of them at about "
            "the same time; the others must be able to reach the coordinator, which is process 0"
        ) from None
    except ValueError as error:
        raise ValueError(
            f"no cluster was found ({error}): give --coordinator HOST:PORT, --processes N and --process I, or start it "
            "by Slurm, Kubernetes or Open MPI"
        ) from error
    return jax.process_index()


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError for what is no cluster."""
    if args.coordinator is not None:
        host, _, port = args.coordinator.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
            raise ValueError(f"--coordinator must be HOST:PORT, with a port from 1 to 65535, got {args.coordinator!r}")
        if args.process == 0:
            _check_port(int(port))
    if args.processes is not None and args.processes < 1:
        raise ValueError(f"--processes must be 1 or more, got {args.processes}")
    if args.process is not None and args.process < 0:
        raise ValueError(f"--process must be 0 or more, got {args.process}")
    if None not in (args.process, args.processes) and args.process >= args.processes:
        raise ValueError(f"--process must be less than --processes {args.processes}, got {args.process}")


def _check_port(port: int) -> None:
    """Raises ValueError for a port that process 0 could not listen at; JAX would crash."""
    both = socket.has_dualstack_ipv6()
    try:
        socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
        ).close()
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise ValueError(
            f"--coordinator: port {port} of this machine cannot be had: {why}; choose another, for all processes"
        ) from error


def _unknown(coordinator: str | None) -> str:
    """Says so if the name of the coordinator means nothing here; it may still come to."""
    if coordinator is None:
        return ""
    host = coordinator.rpartition(":")[0].strip("[]")
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return f" (no machine of the name {host} is known here)"
    return ""


def part() -> None:
    """Leaves the other processes, when all have done their part: JAX would end them if the first were gone before."""
    import jax

    try:
        jax.distributed.shutdown()
    except RuntimeError as error:
        print(f"warning: the results are complete, but not all processes ended in order: {error}", file=sys.stderr)
