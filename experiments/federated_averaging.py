"""Plain federated averaging, all devices in every round, no radio: what the learning half does by itself.

Prints the test accuracy of each seed after the last round. The paper's CS-h and AS-h cells do the same work on iid
MNIST (20 of 20 devices, about 45 rounds) and are published as 89.9 to 90.3 percent.

    python experiments/federated_averaging.py                                 # 5 seeds of 45 rounds on iid MNIST
    python experiments/federated_averaging.py --distribution l2 --rounds 100
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from fcjax import data, keys, learning, models
from fcjax.types import Estimates, Training

NORMALISATION = {"mnist": (0.1307, 0.3081), "cifar10": (0.5, 0.5)}  # mean and standard deviation, as PyTorch's examples


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="mnist", choices=NORMALISATION)
    parser.add_argument("--distribution", default="iid", help="iid, l1, l2, ..., dir0.1, ... (default: %(default)s)")
    parser.add_argument("--devices", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=45)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--width", type=int, default=1, help="devices trained at a time (default: %(default)s)")
    args = parser.parse_args(argv)

    dataset = data.load(args.dataset)
    training = Training(learning_rate=0.01 if args.dataset == "mnist" else 0.02)
    mean, std = NORMALISATION[args.dataset]
    model = models.mlp(dataset.train_x.shape[1:], dataset.num_labels, mean=mean, std=std)
    test_x, test_y, train_x, train_y = map(
        jnp.asarray, (dataset.test_x, dataset.test_y, dataset.train_x, dataset.train_y)
    )

    @jax.jit
    def one_round(key, params, estimates, local):
        device_keys = keys.per_device(key, args.devices)
        everybody = jnp.ones(args.devices, bool)
        return learning.train_round(device_keys, params, everybody, estimates, local, training, model, width=args.width)

    accuracy = jax.jit(lambda params: jnp.mean(model.correct(params, test_x, test_y)))
    results, start = [], time.perf_counter()
    for seed in range(args.seeds):
        parts = data.partition.by_name(args.distribution, dataset.train_y, args.devices, seed=seed)
        learning.check_batches(training, parts.sizes)
        local = learning.LocalData(train_x, train_y, jnp.asarray(parts.indices), jnp.asarray(parts.sizes))
        init_key, round_key = jax.random.split(jax.random.key(seed))
        params = model.init(init_key)
        estimates = Estimates(*(jnp.full(args.devices, x) for x in (1.5, 12.0, 2.0)))
        for index in tqdm(range(args.rounds), desc=f"seed {seed}", unit=" rounds", leave=False):
            trained = one_round(jax.random.fold_in(round_key, index), params, estimates, local)
            params, estimates = trained.params, trained.estimates
        results.append(float(accuracy(params)))
        shown = {name: float(np.mean(getattr(estimates, name))) for name in ("rho", "beta", "delta")}
        print(f"seed {seed}: accuracy {results[-1]:.4f}, " + ", ".join(f"mean {k} {v:.3g}" for k, v in shown.items()))
    spread = f" +- {statistics.stdev(results):.4f}" if len(results) > 1 else ""
    print(f"mean {statistics.mean(results):.4f}{spread}, {time.perf_counter() - start:.1f} s")
    return results


if __name__ == "__main__":
    main()
