"""Your own data, a flax model, another optimizer, and a preset of your own that puts them together.

python examples/own_model.py
"""

import flax.linen as nn
import jax
import optax

import fcjax

# Any arrays will do: inputs (N, ...), labels (N,).
clouds = fcjax.data.synthetic.classification(6000, 1000, num_features=16, num_labels=10, spread=0.8)


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.tanh(nn.Dense(32)(x)))


def mine(dataset=clouds, **settings):
    """The paper's cell with half its bandwidth and Rayleigh fading, where devices train with Adam."""
    return fcjax.presets.shi2020(
        dataset,
        model=Network(),
        make_optimizer=optax.adam(0.003),
        batch_size=32,
        bandwidth_hz=10e6,
        scatter=1.0,
        **settings,
    )


print(mine())
run = fcjax.simulate(jax.random.key(0), fcjax.policies.by_name("fc"), mine(budget_s=5))
print(run)
results = fcjax.sweep(["fc", "pf"], dataset=clouds, preset=mine, budget_s=5, seeds=2)
print(fcjax.results.summary(results)[["policy", "seed", "rounds", "best_accuracy"]])
