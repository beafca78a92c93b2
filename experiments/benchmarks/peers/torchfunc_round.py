# /// script
# requires-python = "==3.11.*"
# dependencies = ["torch==2.13.0", "numpy==2.4.6"]
# ///
"""PyTorch with torch.func as a peer: the clients of a round train side by side, by vmap over grad of a functional call.

The weights of all clients of a round are stacked, and each of the five steps is one call for all of them. SGD with
momentum updates the stacked weights in place. torch.func.vmap turns convolutions with a weight per client into grouped
ones. Nothing is compiled. Threads are chosen as for plain PyTorch.
"""

import argparse
import functools

import torch
import workload
from torch.func import functional_call, grad, vmap


def play(data: workload.Data, args: argparse.Namespace, rounds: int, tick: workload.Tick) -> None:
    torch.manual_seed(args.seed)
    client_x, client_y, test_x, test_y = (torch.from_numpy(array) for array in data)
    model = workload.torch_network(args.model)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(functional_call(model, weights, (x,)), y)

    gradients_of = vmap(grad(loss))
    for _ in range(rounds):
        chosen = torch.randperm(workload.CLIENTS)[: args.scheduled]
        draws = [torch.randperm(workload.SAMPLES)[: workload.STEPS * workload.BATCH] for _ in chosen]
        rows = torch.stack(draws).view(len(chosen), workload.STEPS, workload.BATCH)
        local = {name: weight.expand(len(chosen), *weight.shape).clone() for name, weight in weights.items()}
        velocity = {name: torch.zeros_like(weight) for name, weight in local.items()}
        for step in range(workload.STEPS):
            which = chosen[:, None], rows[:, step]
            gradients = gradients_of(local, client_x[which], client_y[which])
            for name, gradient in gradients.items():
                velocity[name].mul_(workload.MOMENTUM).add_(gradient)
                local[name].sub_(velocity[name], alpha=workload.LEARNING_RATE)
        weights = {name: weight.mean(0) for name, weight in local.items()}
        apply = functools.partial(functional_call, model, weights)
        _, accuracy = workload.torch_evaluate(apply, test_x, test_y, workload.TEST_BLOCK[args.model])
        tick(accuracy)


def measure(args: argparse.Namespace, data: workload.Data, watch: workload.Stopwatch) -> None:
    run = functools.partial(play, data, args)
    workload.choose_threads(args, torch.set_num_threads, run)
    run(args.warmup + args.rounds, watch.tick)


if __name__ == "__main__":
    workload.main(("torch",), measure, __doc__)
