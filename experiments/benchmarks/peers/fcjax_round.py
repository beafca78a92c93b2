"""fcjax itself on the workload of the peers, and on all of Alg. 3: a sweep of 10 seeds on all cores.

Without --full, n devices are drawn at random in each round and nothing is estimated: what the peers do, and the
allocation of bandwidth. With --full, FC decides who takes part and all of Alg. 3 is done, in a cell of 500 m, where it
schedules 6 of 20 on average or a little more; --scheduled then does nothing. Rounds are as many as fit into 60
simulated seconds: with 20 devices some 35, fewer than the peers', whose accuracy is a little higher for that. The clock
runs while the sweep does, after it has compiled its program.
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
    parser.add_argument("--rounds", type=int, default=45, help="after which the accuracy is told (%(default)s)")
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
