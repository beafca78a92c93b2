# /// script
# requires-python = "==3.11.*"
# dependencies = ["pfl==0.6.0", "torch==2.13.0", "numpy==2.4.6", "scipy==1.17.1"]
# ///
"""pfl-research as a peer: FederatedAveraging over a SimulatedBackend, with its PyTorch model and datasets.

One process trains the cohort's users one after the other; the framework could spread them over several processes with
torch.distributed. Two parts are custom, because pfl leaves them to the user. Its samplers either repeat users within a
cohort or take them in a fixed order, so the sampler here draws a random cohort without repetition. It takes batches in
the order of the dataset, so a user's dataset is rebuilt in each round from 640 shuffled samples of its 3,000.
WeightByDatapoints therefore sees 640 samples for every user; all clients have equal data, so the mean is the same.
CentralEvaluationCallback evaluates the test set, except after the first round, where it has done so before training.
Threads are chosen as for plain PyTorch.
"""

import argparse
import functools
from collections.abc import Iterator

import numpy as np
import torch
import workload
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


class Network(torch.nn.Module):
    def __init__(self, model: str) -> None:
        super().__init__()
        self.layers = workload.torch_network(model)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layers(x), y)

    @torch.inference_mode()
    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        logits = self.layers(x)
        loss = torch.nn.functional.cross_entropy(logits, y, reduction="sum").item()
        correct = (logits.argmax(1) == y).sum().item()
        return {"loss": Weighted(loss, len(y)), "accuracy": Weighted(correct, len(y))}


class RoundEnd(TrainingProcessCallback):
    """Comes after the central evaluation in the list of callbacks, so that it sees its metrics."""

    def __init__(self, tick: workload.Tick) -> None:
        self.tick = tick

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.tick(float(aggregate_metrics.to_simple_dict()["Central val | accuracy"]))
        return False, Metrics()


def cohorts(size: int, rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from rng.permutation(workload.CLIENTS)[:size].tolist()


def play(data: workload.Data, args: argparse.Namespace, rounds: int, tick: workload.Tick) -> None:
    torch.manual_seed(args.seed)
    client_x, client_y, test_x, test_y = (torch.from_numpy(array) for array in data)

    def make_dataset(client: int) -> PyTorchTensorDataset:
        rows = torch.randperm(workload.SAMPLES)[: workload.STEPS * workload.BATCH]
        return PyTorchTensorDataset((client_x[client][rows], client_y[client][rows]))

    users = cohorts(args.scheduled, np.random.default_rng(args.seed))
    train = FederatedDataset(make_dataset, functools.partial(next, users))
    network = Network(args.model)
    model = PyTorchModel(
        network,
        local_optimizer_create=functools.partial(torch.optim.SGD, momentum=workload.MOMENTUM),
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    evaluation = NNEvalHyperParams(local_batch_size=workload.TEST_BLOCK[args.model])
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            # This evaluates the users' own data, which no other peer does, so only the first round's remains.
            evaluation_frequency=rounds,
            train_cohort_size=args.scheduled,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(train, train, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=None,
            local_num_steps=workload.STEPS,
            local_batch_size=workload.BATCH,
            local_learning_rate=workload.LEARNING_RATE,
        ),
        model_eval_params=evaluation,
        callbacks=[CentralEvaluationCallback(PyTorchTensorDataset((test_x, test_y)), evaluation), RoundEnd(tick)],
        send_metrics_to_platform=False,
    )


def measure(args: argparse.Namespace, data: workload.Data, watch: workload.Stopwatch) -> None:
    run = functools.partial(play, data, args)
    workload.choose_threads(args, torch.set_num_threads, run)
    run(args.warmup + args.rounds, watch.tick)


if __name__ == "__main__":
    workload.main(("pfl", "torch"), measure, __doc__)
