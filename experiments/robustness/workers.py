"""Disturbs the workers of a cluster during a sweep: one is killed, one is suspended for a minute, and one joins.

The script starts a scheduler and three workers on this machine, with the commands of the documentation. A sweep on them
must exit with code 0, and its results must be identical to those of a local sweep, to the last byte.

    python experiments/robustness/workers.py      # about 4 minutes
"""

import collections
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from cluster import Cluster, differences, finished, start_sweep, wait_until
from distributed import Client

from fcjax.sweeps.executor import TOPIC

OPTIONS = ["--policy", "fc", "rd", "--seeds", "10", "--budget", "60"]  # 20 runs
STOPPED_S = 60.0


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, Cluster("127.0.0.1", 8786) as cluster:
        local, out = Path(folder, "local"), Path(folder, "cluster")
        start_sweep(OPTIONS, local).communicate()
        print(f"on this machine: {finished(local)} runs", flush=True)
        cluster.start_scheduler()
        doomed, pausing, _ = (cluster.start_worker() for _ in range(3))
        time.sleep(10)
        process = start_sweep([*OPTIONS, "--scheduler", cluster.url], out)
        wait_until(lambda: finished(out) >= 3, process)
        print(
            f"after {finished(out)} runs: one worker is killed, one suspended for {STOPPED_S:.0f} s, one started",
            flush=True,
        )
        doomed.kill()
        pausing.send_signal(signal.SIGSTOP)
        threading.Timer(STOPPED_S, pausing.send_signal, [signal.SIGCONT]).start()
        before = set(_workers(cluster.url))
        cluster.start_worker()
        _, errors = process.communicate()
        with Client(cluster.url) as client:
            events = [event for _, event in client.get_events(TOPIC)]
        tried = collections.defaultdict(set)
        for event in events:
            tried[event["task"]].add(event["worker"])
        late = sum(bool(workers - before) for workers in tried.values())
        twice = sum(len(workers) > 1 for workers in tried.values())
        print(f"exit code {process.returncode}; runs started by more than one worker: {twice}; by the late one: {late}")
        wrong = list(differences(local, out))
        print("; ".join(wrong) or "the results are the same to the last byte")
        if process.returncode:
            print(errors)
    return int(bool(wrong) or process.returncode != 0)


def _workers(url: str) -> list[str]:
    with Client(url) as client:
        return list(client.scheduler_info(n_workers=-1)["workers"])


if __name__ == "__main__":
    sys.exit(main())
