"""fcjax on the workload of the peers, and on all of Alg. 3: a sweep of 10 seeds on all cores.

Without --full, n devices are drawn at random in each round and nothing is estimated, as in the peers, but bandwidth is
allocated. With --full, all of Alg. 3 runs with FC, in a cell of 500 m, where FC schedules 6 of 20 devices on average or
slightly more; --scheduled is then ignored. A run has as many rounds as fit into 60 simulated seconds. With 20 devices
these are about 35, fewer than the peers', so its accuracy is slightly lower. The clock starts after compilation.
"""

import argparse
import dataclasses
import importlib.metadata
import json

import numpy as np

import fcjax

SEEDS = 10


def plain(*args, **settings) -> fcjax.Experiment:
    return dataclasses.replace(fcjax.presets.shi2020(*args, **settings), estimate_on=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheduled", type=int, default=6, help="devices that train in a round (%(default)s)")
    parser.add_argument("--full", action="store_true", help="all of Alg. 3, with FC")
    parser.add_argument("--rounds", type=int, default=45, help="round whose accuracy is reported (%(default)s)")
    args = parser.parse_args()
    if args.full:
        results = fcjax.sweep("fc", distribution="l1", radius_m=500, seeds=SEEDS)
    else:
        policy = {"random": fcjax.policies.random(args.scheduled)}
        results = fcjax.sweep(policy, distribution="iid", seeds=SEEDS, preset=plain)
    first = results.accuracy.values[:, : args.rounds]
    reached = [run[~np.isnan(run)][-1] for run in first]
    total = int(np.sum(~np.isnan(results.accuracy)))
    line = {
        "peer": "fcjax, all of Alg. 3 with FC" if args.full else "fcjax",
        "versions": {name: importlib.metadata.version(name) for name in ("fcjax", "jax")},
        "scheduled": float(results.scheduled.sum()) / total,
        "rounds": total,
        "seconds": results.run_s,
        "rounds_per_s": total / results.run_s,
        "accuracy": float(np.mean(reached)),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
