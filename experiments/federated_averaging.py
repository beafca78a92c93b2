"""Plain federated averaging, all devices in every round, no radio: what the learning half does by itself.

Prints the test accuracy of each seed after the last round. The paper's CS-h and AS-h cells do the same work on iid
MNIST (20 of 20 devices, about 45 rounds) and are published as 89.9 to 90.3 percent.

    python experiments/federated_averaging.py                                 # 5 seeds of 45 rounds on iid MNIST
    python experiments/federated_averaging.py --distribution l2 --rounds 100
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from fcjax import batches, data, keys, learning, presets, programs


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="mnist", choices=("mnist", "cifar10"))
    parser.add_argument("--distribution", default="iid", help="iid, l1, l2, ..., dir0.1, ... (default: %(default)s)")
    parser.add_argument("--devices", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=45)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--width", type=int, default=1, help="devices trained at a time (default: %(default)s)")
    args = parser.parse_args(argv)
    programs.keep_on_disk()

    dataset = data.load(args.dataset)
    setting = functools.partial(presets.shi2020, dataset, distribution=args.distribution, num_devices=args.devices)
    first = setting(seed=0)
    training, model = first.training, first.model
    test_x, test_y, train_x, train_y = map(jnp.asarray, (first.test_x, first.test_y, first.data.x, first.data.y))

    @jax.jit
    def one_round(key, params, estimates, local):
        device_keys = keys.per_device(key, args.devices)
        everybody = jnp.ones(args.devices, bool)
        return learning.train_round(device_keys, params, everybody, estimates, local, training, model, width=args.width)

    accuracy = jax.jit(lambda params: jnp.mean(model.correct(params, test_x, test_y)))
    results, start = [], time.perf_counter()
    for seed in range(args.seeds):
        experiment = setting(seed=seed)
        batches.check_sizes(training, experiment.data.sizes)
        local = experiment.data._replace(x=train_x, y=train_y)
        init_key, round_key = jax.random.split(jax.random.key(seed))
        params = model.init(init_key)
        estimates = jax.tree.map(jnp.asarray, experiment.estimates)
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
