# /// script
# requires-python = "==3.11.*"
# dependencies = [
#     "fedjax==0.0.17",
#     "jax==0.5.3",
#     "jaxlib==0.5.3",
#     "dm-haiku==0.0.17",
#     "ml-dtypes==0.6.0",
#     "numpy==2.4.6",
#     "optax==0.2.8",
#     "scipy==1.17.1",
# ]
# ///
"""FedJAX as a peer: its federated_averaging, client sampler, shuffled batches, metrics and a Haiku model.

JAX 0.5.3 is the newest version that FedJAX 0.0.17 supports: JAX 0.6 removed jax.tree_map, which FedJAX calls. Clients
train one after the other on the default for-each-client backend, "jit", which compiles a step, not a client or a round.
In a single run, XLA may use all cores within a step. "debug" does not compile, and "pmap" over two JAX CPU devices
needs a flag on JAX 0.5 and was not faster. The scaled data stay numpy arrays, as FedJAX keeps them, so each step
gathers its mini-batch on the host. The test set consists of JAX arrays. The algorithm also computes the norm of each
client's update, which cannot be disabled. --seed fixes the initial weights and the choice of clients. Batches are
shuffled without a seed, because with one FedJAX would shuffle a client's data identically in all rounds.
"""

import argparse
import functools

import fedjax
import haiku as hk
import jax
import numpy as np
import workload


def linear(inputs: int, outputs: int) -> hk.Linear:
    uniform = hk.initializers.RandomUniform(-(inputs**-0.5), inputs**-0.5)
    return hk.Linear(outputs, w_init=uniform, b_init=uniform)


def forward(batch: fedjax.BatchExample, model: str) -> jax.Array:
    x, hidden = batch["x"], workload.HIDDEN
    if model == "cnn":
        x, hidden = x.reshape(-1, workload.PIXELS, workload.PIXELS, 1), workload.DENSE
        for channels in workload.CHANNELS:
            x = hk.max_pool(jax.nn.relu(hk.Conv2D(channels, workload.KERNEL)(x)), (2, 2, 1), (2, 2, 1), "VALID")
        x = hk.Flatten()(x)
    x = jax.nn.relu(linear(x.shape[-1], hidden)(x))
    return linear(hidden, workload.CLASSES)(x)


def measure(args: argparse.Namespace, data: workload.Data, watch: workload.Stopwatch) -> None:
    # JAX has no 64-bit integers by default, and would convert every batch of labels.
    client_y, test_y = data.client_y.astype(np.int32), data.test_y.astype(np.int32)
    examples = {i: {"x": x, "y": y} for i, (x, y) in enumerate(zip(data.client_x, client_y, strict=True))}
    test = fedjax.ClientDataset({"x": data.test_x, "y": test_y})
    model = fedjax.create_model_from_haiku(
        hk.transform(functools.partial(forward, model=args.model)),
        sample_batch={"x": data.test_x[:1], "y": test_y[:1]},
        train_loss=lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits),
        eval_metrics={"loss": fedjax.metrics.CrossEntropyLoss(), "accuracy": fedjax.metrics.Accuracy()},
    )
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        client_optimizer=fedjax.optimizers.sgd(workload.LEARNING_RATE, workload.MOMENTUM),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=workload.BATCH, num_steps=workload.STEPS),
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(
        fedjax.InMemoryFederatedData(examples), num_clients=args.scheduled, seed=args.seed
    )
    test_batches = jax.device_put(list(test.padded_batch(batch_size=workload.TEST_BLOCK[args.model])))
    params = model.init(jax.random.PRNGKey(args.seed))
    workload.check_size(args.model, sum(leaf.size for leaf in jax.tree_util.tree_leaves(params)))
    state = algorithm.init(params)
    for _ in range(args.warmup + args.rounds):
        state, _ = algorithm.apply(state, sampler.sample())
        metrics = fedjax.evaluate_model(model, state.params, test_batches)
        float(metrics["loss"])
        watch.tick(float(metrics["accuracy"]))


if __name__ == "__main__":
    workload.main(("fedjax", "jax"), measure, __doc__)
