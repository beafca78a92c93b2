"""Memory of a round of local training against the number of seeds: all seeds share one copy of MNIST.

Prints the peak resident memory of the process and what the compiled round needs, with seeds one after another
(`jax.lax.map`) or side by side (`jax.vmap`). The peak is the process's, so that each line takes a run of its own.

    python experiments/benchmarks/learning_memory.py --seeds 1
    python experiments/benchmarks/learning_memory.py --seeds 100
    python experiments/benchmarks/learning_memory.py --seeds 100 --side-by-side
"""

import argparse
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np

from fcjax import data, keys, learning, models
from fcjax.types import Estimates, Training

NUM_DEVICES = 20


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--side-by-side", action="store_true", help="jax.vmap over the seeds instead of jax.lax.map")
    args = parser.parse_args(argv)

    dataset = data.load("mnist")
    model, training = models.mlp((28, 28, 1), 10, mean=0.1307, std=0.3081), Training()
    x, y = jnp.asarray(dataset.train_x), jnp.asarray(dataset.train_y)
    partitions = [data.partition.iid(dataset.train_y, NUM_DEVICES, seed=seed) for seed in range(args.seeds)]
    seed_keys = jax.random.split(jax.random.key(0), args.seeds)
    runs = (
        seed_keys,
        jax.vmap(model.init)(seed_keys),
        jnp.asarray(np.random.default_rng(0).random((args.seeds, NUM_DEVICES)) < 0.3).at[:, 0].set(True),
        Estimates(*(jnp.full((args.seeds, NUM_DEVICES), value) for value in (1.5, 12.0, 2.0))),
        jnp.asarray(np.stack([p.indices for p in partitions])),
        jnp.asarray(np.stack([p.sizes for p in partitions])),
    )

    def one_round(key, params, scheduled, estimates, indices, sizes):
        local = learning.LocalData(x, y, indices, sizes)
        device_keys = keys.per_device(key, NUM_DEVICES)
        return learning.train_round(device_keys, params, scheduled, estimates, local, training, model, width=1)

    batched = jax.vmap(one_round) if args.side_by_side else lambda *runs: jax.lax.map(lambda run: one_round(*run), runs)
    compiled = jax.jit(batched).lower(*runs).compile()
    jax.block_until_ready(compiled(*runs))
    start = time.perf_counter()
    jax.block_until_ready(compiled(*runs))
    seconds = time.perf_counter() - start
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    memory = compiled.memory_analysis()
    print(
        f"{args.seeds} seeds {'side by side' if args.side_by_side else 'in turn'}: peak {peak_gb:.2f} GB, "
        f"of which temporaries {memory.temp_size_in_bytes / 1e9:.2f} GB; a round of all takes {seconds:.2f} s"
    )


if __name__ == "__main__":
    main()
