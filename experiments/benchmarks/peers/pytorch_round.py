# /// script
# requires-python = "==3.11.*"
# dependencies = ["torch==2.13.0", "numpy==2.4.6"]
# ///
"""Plain PyTorch as a peer: federated averaging written by hand, without a framework.

One model is trained for one client after the other in eager mode, with torch.optim.SGD. Each client starts from a copy
of the global weights, held as one flat vector. The scaled data are tensors in memory from the start, and a client's
five mini-batches are gathered in one indexing. Nothing is compiled and no clients run in parallel, so in a single run a
second core can only help inside an operation. Trials on a throwaway model before the warm-up then alternate between one
thread and one per core, and the lower median round time wins.
"""

import argparse
import functools

import torch
import workload
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def play(data: workload.Data, args: argparse.Namespace, rounds: int, tick: workload.Tick) -> None:
    torch.manual_seed(args.seed)
    client_x, client_y, test_x, test_y = (torch.from_numpy(array) for array in data)
    model = workload.torch_network(args.model)
    weights = parameters_to_vector(model.parameters()).detach()
    for _ in range(rounds):
        chosen = torch.randperm(workload.CLIENTS)[: args.scheduled].tolist()
        sizes = [len(client_y[client]) for client in chosen]
        mean = torch.zeros_like(weights)
        for client, size in zip(chosen, sizes, strict=True):
            local = weights.clone()
            # The parameters become views, so that the optimizer's steps in place end up in `local`.
            vector_to_parameters(local, model.parameters())
            optimizer = torch.optim.SGD(model.parameters(), lr=workload.LEARNING_RATE, momentum=workload.MOMENTUM)
            rows = torch.randperm(size)[: workload.STEPS * workload.BATCH]
            x, y = client_x[client][rows], client_y[client][rows]
            for batch_x, batch_y in zip(x.split(workload.BATCH), y.split(workload.BATCH), strict=True):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(batch_x), batch_y).backward()
                optimizer.step()
            mean.add_(local, alpha=size / sum(sizes))
        weights = mean
        vector_to_parameters(weights, model.parameters())
        _, accuracy = workload.torch_evaluate(model, test_x, test_y, workload.TEST_BLOCK[args.model])
        tick(accuracy)


def measure(args: argparse.Namespace, data: workload.Data, watch: workload.Stopwatch) -> None:
    run = functools.partial(play, data, args)
    workload.choose_threads(args, torch.set_num_threads, run)
    run(args.warmup + args.rounds, watch.tick)


if __name__ == "__main__":
    workload.main(("torch",), measure, __doc__)
