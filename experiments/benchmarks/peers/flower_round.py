# /// script
# requires-python = "==3.11.*"
# dependencies = ["flwr[simulation]==1.41.0", "ray==2.55.1", "torch==2.13.0", "numpy==2.4.6"]
# ///
"""Flower as a peer: a ServerApp with the FedAvg strategy and a ClientApp in PyTorch, with run_simulation over Ray.

As many Ray actors as cores, with one PyTorch thread each, train clients side by side. A run thus uses all cores with
several processes, and there is no sweep of it. The server, a thread of this process, averages and then evaluates the
test set with PyTorch's default number of threads. Each actor reads the data once; no client evaluates. Unlike the other
peers, Flower sends each client's model between processes as a message. Its simulation polls for messages every 0.1 s at
both ends, which bounds the rounds per second from above. The older start_simulation does not poll and can be faster
when few clients train, but it is deprecated since Flower 1.13 and does not support ServerApp. --seed fixes the initial
weights and each client's batches, but not which clients train, because node names are random.

Ray always listens on all interfaces. The script therefore refuses to run, with exit code 3, unless loopback is the only
interface, as within
    unshare --user --map-root-user --net sh -c 'ip link set lo up && exec python flower_round.py ...'
"""

import argparse
import functools
import os
import socket
import sys

# Both are read at import.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np
import torch
import workload
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client_app = ClientApp()


# One network per process; its weights are overwritten before every use.
network = functools.cache(workload.torch_network)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    config, client = message.content["config"], int(context.node_config["partition-id"])
    data = workload.load(config["data"])
    model = network(config["model"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.LEARNING_RATE, momentum=workload.MOMENTUM)
    rng = np.random.default_rng((config["seed"], config["server-round"], client))
    rows = torch.from_numpy(rng.permutation(workload.SAMPLES)[: workload.STEPS * workload.BATCH])
    x, y = torch.from_numpy(data.client_x[client])[rows], torch.from_numpy(data.client_y[client])[rows]
    for batch_x, batch_y in zip(x.split(workload.BATCH), y.split(workload.BATCH), strict=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch_x), batch_y).backward()
        optimizer.step()
    reply = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(data.client_y[client])}),
    }
    return Message(content=RecordDict(reply), reply_to=message)


def count_replies(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
    return MetricRecord({"replies": len(replies)})


def measure(args: argparse.Namespace, data: workload.Data, watch: workload.Stopwatch) -> None:
    torch.manual_seed(args.seed)
    test_x, test_y = torch.from_numpy(data.test_x), torch.from_numpy(data.test_y)
    rounds = args.warmup + args.rounds
    server_app = ServerApp()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = network(args.model)
        model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = workload.torch_evaluate(model, test_x, test_y, workload.TEST_BLOCK[args.model])
        if server_round:
            watch.tick(accuracy)
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=args.scheduled / workload.CLIENTS,
            fraction_evaluate=0.0,
            min_train_nodes=args.scheduled,
            min_available_nodes=workload.CLIENTS,
            train_metrics_aggr_fn=count_replies,
        )
        result = strategy.start(
            grid,
            ArrayRecord(network(args.model).state_dict()),
            num_rounds=rounds,
            train_config=ConfigRecord({"data": os.path.abspath(args.data), "model": args.model, "seed": args.seed}),
            evaluate_fn=evaluate,
        )
        # Flower only logs a client that fails, and the round would count as a fast one.
        replies = [metrics["replies"] for metrics in result.train_metrics_clientapp.values()]
        if replies != [args.scheduled] * rounds:
            raise RuntimeError(f"expected {args.scheduled} replies in each of {rounds} rounds, got {replies}")

    run_simulation(
        server_app,
        client_app,
        num_supernodes=workload.CLIENTS,
        backend_config={
            "init_args": {"num_cpus": workload.CORES},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    if (interfaces := [name for _, name in socket.if_nameindex()]) != ["lo"]:
        print(f"refused: Ray would listen on {interfaces}; run in a network namespace with only lo", file=sys.stderr)
        sys.exit(3)
    # Imported by name: Ray would send functions of __main__ by value each time, and their caches would be lost.
    import flower_round

    workload.main(("flwr", "ray", "torch"), flower_round.measure, __doc__)
