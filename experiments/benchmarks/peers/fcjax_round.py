"""fcjax on the workload of the peers, and on all of Alg. 3.

With --sweep, `fcjax.sweep` executes several seeds on one single-threaded process per core. Otherwise it executes one
run, with `cores` set to one or to all, whichever is faster in a trial. Everything is executed twice, and the second
time counts, so that programs are compiled and processes have started. It includes testing the first model, sending work
to processes and waiting for the last one. A run has --warmup + --rounds rounds, as in the peers; all of them are timed.

Without --full, n devices are drawn at random in each round and nothing is estimated, as in the peers, but channels are
drawn and bandwidth is allocated. With --full, all of Alg. 3 runs with FC, in a cell of 500 m; --scheduled is then
ignored. FC schedules about 6 of 20 devices there, but fewer in the first rounds, and so in the CNN's short runs: see
"scheduled" in the table. The CNN's uploads then have the size of the MLP's, so that FC schedules as many devices.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
from typing import Any

import numpy as np
import workload

import fcjax
from fcjax.runtime import cluster, hardware
from fcjax.types import Limits
from fcjax.wireless import worlds

SEEDS_PER_CORE = {"mlp": 5, "cnn": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=workload.PARAMETERS, default="mlp")
    parser.add_argument("--scheduled", type=int, default=6, help="devices that train in a round (%(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="further rounds (%(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="rounds (%(default)s)")
    parser.add_argument("--sweep", action="store_true", help="several seeds, on one process per core")
    parser.add_argument("--full", action="store_true", help="all of Alg. 3, with FC")
    args = parser.parse_args()
    settings: dict[str, Any] = {"model": args.model, "rounds": args.warmup + args.rounds, "full": args.full}
    policy: Any = "fc" if args.full else {"random": fcjax.policies.random(args.scheduled)}
    run = functools.partial(
        fcjax.sweep,
        policy,
        distribution="l1" if args.full else "iid",
        radius_m=500,
        budget_s=60 if args.full else 1e4,
        preset=functools.partial(preset, **settings),
    )
    cores = hardware.num_cores()
    workers, cores_each = (cores, 1) if args.sweep else (1, cores)
    with cluster.local_client(workers, cores_each) as client:
        client.wait_for_workers(workers)
        client.run(hardware.use_one_thread)
        if args.sweep:
            ways = [functools.partial(run, seeds=cores * SEEDS_PER_CORE[args.model], client=client)]
        else:
            ways = [functools.partial(run, seeds=1), functools.partial(run, seeds=1, cores=cores, client=client)]
        trials_s = [way().run_s for way in ways]
        results = ways[int(np.argmin(trials_s))]()
    if args.sweep and results.compile_s > 0.1:
        raise RuntimeError(f"a process compiled for {results.compile_s:.1f} s while others may have run")
    total = int(np.sum(~np.isnan(results.accuracy)))
    if total != results.sizes["run"] * settings["rounds"]:
        raise RuntimeError(f"expected {settings['rounds']} rounds per run, got {total} in all")
    line = {
        "versions": {name: importlib.metadata.version(name) for name in ("fcjax", "jax")},
        "scheduled": float(results.scheduled.sum()) / total,
        "rounds_per_s": total / results.run_s,
        "accuracy": float(results.accuracy.isel(round=-1).mean()),
    }
    print(json.dumps(line, allow_nan=False))


def preset(*args: Any, model: str, rounds: int, full: bool, **settings: Any) -> fcjax.Experiment:
    """Makes the paper's experiment, with a fixed number of rounds."""
    if full:
        settings["upload_bits"] = 32.0 * workload.PARAMETERS["mlp"]
    experiment = fcjax.presets.shi2020(*args, model=model, **settings)
    workload.check_size(model, fcjax.models.num_parameters(experiment.model))

    def limits(cell: fcjax.Cell, training: fcjax.Training) -> Limits:
        return worlds.limits_of_cell(cell, training)._replace(num_rounds=rounds, may_end=True)

    return dataclasses.replace(
        experiment,
        world=experiment.world._replace(limits=limits),
        estimate_on=experiment.estimate_on if full else None,
    )


if __name__ == "__main__":
    main()
