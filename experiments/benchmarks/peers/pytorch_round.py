# /// script
# requires-python = "==3.11.*"
# dependencies = ["torch==2.13.0", "numpy==2.4.6"]
# ///
"""Plain PyTorch as a peer: federated averaging written by hand, without a framework.

One model is trained for one client after the other in eager mode, with torch.optim.SGD. Each client starts from a copy
of the global weights, held as one flat vector. The scaled data are tensors in memory from the start, a client's five
mini-batches are gathered in one indexing, and the test set is evaluated in one batch. Nothing is compiled and no
clients run in parallel, so a second core can only help inside an operation. Trials on a throwaway model before the
warm-up alternate between 1 and 2 threads, and the lower median round time wins.
"""

import argparse

import torch
import workload
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def play(data: workload.Data, scheduled: int, seed: int, rounds: int, tick: workload.Tick) -> None:
    torch.manual_seed(seed)
    client_x, client_y, test_x, test_y = (torch.from_numpy(array) for array in data)
    model = torch.nn.Sequential(
        torch.nn.Linear(workload.INPUTS, workload.HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(workload.HIDDEN, workload.CLASSES),
    )
    cross_entropy = torch.nn.functional.cross_entropy
    weights = parameters_to_vector(model.parameters()).detach()
    for _ in range(rounds):
        chosen = torch.randperm(workload.CLIENTS)[:scheduled].tolist()
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
                cross_entropy(model(batch_x), batch_y).backward()
                optimizer.step()
            mean.add_(local, alpha=size / sum(sizes))
        weights = mean
        vector_to_parameters(weights, model.parameters())
        with torch.inference_mode():
            logits = model(test_x)
            cross_entropy(logits, test_y).item()
            tick((logits.argmax(1) == test_y).float().mean().item())


def measure(args: argparse.Namespace, data: workload.Data, watch: workload.Stopwatch) -> None:
    workload.choose_threads(
        torch.set_num_threads, lambda rounds, tick: play(data, args.scheduled, args.seed, rounds, tick)
    )
    play(data, args.scheduled, args.seed, args.warmup + args.rounds, watch.tick)


if __name__ == "__main__":
    workload.main("PyTorch", ("torch",), measure, __doc__)
