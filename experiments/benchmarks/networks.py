"""Local training of convolutional networks, with XLA's gradients and with fcjax's.

Both train the same flax module on a CPU core, 5 steps of 128 samples inside a scan, as a device does in a round.

    taskset -c 0 python experiments/benchmarks/networks.py
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report

from fcjax import models
from fcjax.learning.models import CNN, ResNet

SHAPES = {"MNIST": (28, 28, 1), "CIFAR-10": (32, 32, 3)}
NETWORKS = {"cnn": CNN((16, 32), (128, 10)), "resnet": ResNet((16, 32, 64), 10)}
STEPS, BATCH = 5, 128


def main(argv: list[str] | None = None) -> None:
    args = report.parser(__doc__).parse_args(argv)
    print(report.machine())
    rows = []
    for network, module in NETWORKS.items():
        for name, shape in SHAPES.items():
            model = models.from_flax(module, shape, 10)
            x = np.random.default_rng(0).normal(size=(STEPS, BATCH, *shape)).astype(np.float32)
            y = np.zeros((STEPS, BATCH), np.int32)
            params = jax.jit(model.init)(jax.random.key(0))
            ways = {
                "XLA": training(plain_loss(module), params, x, y),
                "fcjax": training(model.loss, params, x, y),
            }
            ms = report.in_turns(ways, args.repetitions)
            figures = {f"{way} (ms per step)": value for way, value in ms.items()}
            rows.append({"network": network, "images": name, **figures, "ratio": ms["XLA"] / ms["fcjax"]})
    report.write("networks", "Local training on one core", rows, args.out)


def plain_loss(module):
    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(module.apply({"params": params}, x), y).mean()

    return loss


def training(loss, params, x, y):
    """Returns a function that measures the time of a step in ms."""

    @jax.jit
    def train(params, x, y):
        def step(params, batch):
            gradient = jax.grad(loss)(params, *batch)
            return jax.tree.map(lambda w, g: w - 0.01 * g, params, gradient), None

        return jax.lax.scan(step, params, (x, y))[0]

    x, y = jnp.asarray(x), jnp.asarray(y)
    jax.block_until_ready(train(params, x, y))  # compile

    def measure():
        start = time.perf_counter()
        jax.block_until_ready(train(params, x, y))
        return 1e3 * (time.perf_counter() - start) / STEPS

    return measure


if __name__ == "__main__":
    main()
