"""Runs a sweep on three hosts, cuts the link of one, and kills the scheduler.

The hosts are network namespaces of this machine, joined by a bridge in a fourth; creating them needs root and iproute2.
Host 1 has the scheduler and the command, hosts 2 and 3 have one worker each. First, the link of host 3 goes down during
the sweep, which must still exit with code 0 and give the results of a local sweep. Then, in another folder, the
scheduler is killed: the command must report it, exit with code 2, and resume when rerun.

    sudo .venv/bin/python experiments/robustness/hosts.py      # about 6 minutes
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cluster import Cluster, differences, finished, start_sweep, wait_until

OPTIONS = ["--policy", "fc", "rd", "--seeds", "10", "--budget", "60"]  # 20 runs
SWITCH = "fcjax-switch"


def name(host: int) -> str:
    return f"fcjax-host-{host}"


def address(host: int) -> str:
    return f"10.77.0.{host}"


def on(host: int) -> list[str]:
    """Returns the prefix of a command that runs on a host."""
    return ["ip", "netns", "exec", name(host)]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def hosts(number: int) -> Iterator[None]:
    """Creates hosts that can connect to each other and nothing else."""
    spaces = [SWITCH, *(name(host) for host in range(1, number + 1))]
    try:
        for space in spaces:
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "bridge", "up")
        for host in range(1, number + 1):
            plug = f"port{host}"
            ip("link", "add", plug, "netns", SWITCH, "type", "veth", "peer", "name", "eth0", "netns", name(host))
            ip("-n", SWITCH, "link", "set", plug, "master", "bridge", "up")
            ip("-n", name(host), "address", "add", f"{address(host)}/24", "dev", "eth0")
            ip("-n", name(host), "link", "set", "eth0", "up")
        yield
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], stderr=subprocess.DEVNULL)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, hosts(3):
        local, cut, killed = (Path(folder, part) for part in ("local", "cut", "killed"))
        start_sweep(OPTIONS, local).communicate()
        print(f"on this machine: {finished(local)} runs", flush=True)
        faults = link_down(local, cut) + scheduler_killed(local, killed)
    return int(bool(faults))


def start(cluster: Cluster, out: Path) -> tuple[subprocess.Popen, subprocess.Popen]:
    """Starts a scheduler, two workers and a sweep on them; returns the scheduler and the sweep."""
    scheduler = cluster.start_scheduler(on(1))
    for host in (2, 3):
        cluster.start_worker(address(host), on(host))
    time.sleep(10)
    return scheduler, start_sweep([*OPTIONS, "--scheduler", cluster.url], out, on(1))


def link_down(local: Path, out: Path) -> int:
    with Cluster(address(1), 8786) as cluster:
        _, process = start(cluster, out)
        wait_until(lambda: finished(out) >= 5, process)
        before = time.monotonic()
        print(f"after {finished(out)} runs the link of host 3 goes down", flush=True)
        ip("-n", name(3), "link", "set", "eth0", "down")
        _, errors = process.communicate()
        print(f"{time.monotonic() - before:.0f} s later: exit code {process.returncode}, {finished(out)} runs")
        return verdict(local, out, process.returncode, errors)


def scheduler_killed(local: Path, out: Path) -> int:
    with Cluster(address(1), 8786) as cluster:
        scheduler, process = start(cluster, out)
        wait_until(lambda: finished(out) >= 5, process)
        before = time.monotonic()
        print(f"after {finished(out)} runs the scheduler is killed", flush=True)
        subprocess.run(["pkill", "-KILL", "-P", str(scheduler.pid)])
        scheduler.kill()
        _, errors = process.communicate()
        print(f"{time.monotonic() - before:.0f} s later: exit code {process.returncode}: {errors.splitlines()[-1]}")
        if process.returncode != 2:
            return 1
    with Cluster(address(1), 8786) as cluster:
        _, process = start(cluster, out)
        printed, errors = process.communicate()
        print(f"the same command once more: {printed.splitlines()[-1].partition(';')[0]}")
        return verdict(local, out, process.returncode, errors)


def verdict(local: Path, out: Path, code: int, errors: str) -> int:
    wrong = list(differences(local, out)) + ([errors] if code else [])
    print("; ".join(wrong) or "the results are the same to the last byte", flush=True)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
