"""Convex tasks, and the sequences of the paper's Fig. 1 on them: what `theory.py` measures.

Full-gradient local descent. `play_round` gives w_k and v_k of a round, `play` whole runs with random schedules, and
`minimiser` w*. The tasks themselves are described in `theory.py`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree

import fcjax
from fcjax import models

EQUAL = np.full(20, 50)  # samples of each device


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["x", "y", "sizes", "beta"], meta_fields=["losses", "num_parameters"]
)
@dataclasses.dataclass(frozen=True)
class Task:
    """A convex task: F_i is the mean loss of the first sizes[i] samples of row i."""

    x: Array  # (M, N, features)
    y: Array  # (M, N)
    sizes: Array  # (M,) D_i
    beta: Array  # () all F_i are beta-smooth
    losses: Callable[[Array, Array, Array], Array]  # w (P,), x (N, features), y (N,) -> (N,)
    num_parameters: int  # P

    @property
    def weight(self) -> Array:
        """D_i/D."""
        return self.sizes / jnp.sum(self.sizes)

    def loss(self, w: Array) -> Array:
        """Returns F(w)."""
        return self.weight @ jax.vmap(self._local_loss, (None, 0, 0, 0))(w, self.x, self.y, self.sizes)

    def gradients(self, w: Array) -> Array:
        """Returns the gradients of all F_i, (M, P): at one w, (P,), or each at its own, (M, P)."""
        each = jax.vmap(jax.grad(self._local_loss), (0 if w.ndim == 2 else None, 0, 0, 0))
        return each(w, self.x, self.y, self.sizes)

    def _local_loss(self, w: Array, x: Array, y: Array, size: Array) -> Array:
        return jnp.mean(self.losses(w, x, y), where=jnp.arange(len(y)) < size)


class Round(NamedTuple):
    """The sequences of the paper's Fig. 1 after a round; all leave from the same model."""

    local: Array  # (M, P) w_i
    everybody: Array  # (P,) w_k
    central: Array  # (P,) v_k
    delta: Array  # (M,) largest ||grad F_i - grad F|| over the iterates of v
    rho: Array  # () largest ||grad F_i|| over the iterates of v, and at w_k


class History(NamedTuple):
    """What is measured in a round; a leading axis of runs, then of rounds."""

    excess: Array  # F(w^Pi_k) - F(w*)
    everybody: Array  # F(w_k) - F(w*)
    central: Array  # F(v_k) - F(w*)
    gap: Array  # F(w^Pi_k) - F(w_k), less the control variate
    distance: Array  # ||w^Pi_{k-1} - w*||
    delta: Array  # (M,)
    rho: Array


def play_round(task: Task, start: Array, eta: Array, tau: Array) -> Round:
    """Runs tau local steps of all devices, and tau steps of centralised descent."""
    norm = functools.partial(jnp.linalg.norm, axis=-1)
    starts = jnp.broadcast_to(start, (task.sizes.size, start.size))
    local = lax.fori_loop(0, tau, lambda _, w: w - eta * task.gradients(w), starts)

    def step(_, carry):
        v, delta, rho = carry
        gradients = task.gradients(v)
        mean = task.weight @ gradients
        return v - eta * mean, jnp.maximum(delta, norm(gradients - mean[None])), jnp.maximum(rho, norm(gradients).max())

    central, delta, rho = lax.fori_loop(0, tau, step, (start, jnp.zeros_like(task.weight), jnp.zeros(())))
    everybody = task.weight @ local
    return Round(local, everybody, central, delta, jnp.maximum(rho, norm(task.gradients(everybody)).max()))


def aggregate(local: Array, sizes: Array, scheduled: Array) -> Array:
    """Averages the scheduled models, weighted by D_i."""
    counted = jnp.where(scheduled, sizes, 0)
    return counted @ local / jnp.sum(counted)


def draw_ranks(key: Array, *shape: int) -> Array:
    """Draws random orders along the last axis: devices with rank below n are a uniformly random subset of size n."""
    return jnp.argsort(jax.random.uniform(key, shape), axis=-1)


def gap(task: Task, played: Round, scheduled: Array) -> Array:
    """Returns F(w^Pi) - F(w) less a control variate.

    D_Pi (w^Pi - w) is a sum over the scheduled devices of vectors that sum to 0 over all devices, so its mean is 0, and
    so is that of grad F(w) . (w^Pi - w) D_Pi/E[D_Pi]. Without it, the first-order term hides the mean for small steps.
    """
    loss, slope = jax.value_and_grad(task.loss)(played.everybody)
    model = aggregate(played.local, task.sizes, scheduled)
    share = jnp.mean(task.sizes, where=scheduled) / jnp.mean(task.sizes)
    return task.loss(model) - loss - share * (slope @ (model - played.everybody))


@jax.jit
def measure(task: Task, ranks: Array, n: Array, eta: Array, tau: Array) -> tuple[Array, Round]:
    """Returns the gaps of the first round, (numbers of devices, orders), and the round."""
    played = play_round(task, jnp.zeros(task.num_parameters), eta, tau)
    of_order = jax.vmap(lambda rank, n: gap(task, played, rank < n), (None, 0))
    return lax.map(lambda rank: of_order(rank, n), ranks, batch_size=200).T, played


@functools.partial(jax.jit, static_argnames="num_rounds")
def play(task: Task, keys: Array, best: Array, n: Array, eta: Array, tau: Array, *, num_rounds: int) -> History:
    """Runs training with n random devices per round, once per key; `best` is w*."""
    least = task.loss(best)

    def one_round(start, key):
        played = play_round(task, start, eta, tau)
        scheduled = draw_ranks(key, task.sizes.size) < n
        model = aggregate(played.local, task.sizes, scheduled)
        excess = [task.loss(w) - least for w in (model, played.everybody, played.central)]
        distance = jnp.linalg.norm(start - best)
        return model, History(*excess, gap(task, played, scheduled), distance, played.delta, played.rho)

    def run(key):
        return lax.scan(one_round, jnp.zeros(task.num_parameters), jax.random.split(key, num_rounds))[1]

    return jax.vmap(run)(keys)


def minimiser(task: Task) -> Array:
    """Returns w* by Newton's method, with steps halved until they reduce the norm of the gradient."""
    w = jnp.zeros(task.num_parameters)
    gradient, step = _newton_step(task, w)
    while True:
        size = jnp.linalg.norm(gradient)
        for scale in 0.5 ** np.arange(10):
            new = w - scale * step
            new_gradient, new_step = _newton_step(task, new)
            if jnp.linalg.norm(new_gradient) < size:
                break
        else:
            return w  # rounding errors dominate
        w, gradient, step = new, new_gradient, new_step


@jax.jit
def _newton_step(task: Task, w: Array) -> tuple[Array, Array]:
    slope = jax.grad(task.loss)
    gradient, hessian_times = jax.linearize(slope, w)
    return gradient, jax.scipy.sparse.linalg.cg(hessian_times, gradient, tol=1e-8)[0]


def means(seed: int, skew: float, sizes: np.ndarray = EQUAL, *, aligned: bool = False) -> Task:
    """Makes F_i = |w - c_i|^2/2. If aligned, w_0 = 0 is on the side of the small devices."""
    rng = np.random.default_rng([seed, 20])
    num, features = len(sizes), 10
    common, own = rng.normal(size=features), rng.normal(size=(num, features))
    if aligned:
        common, own = np.full(features, 2.0), np.where(sizes > sizes.mean(), 1, -1)[:, None]
    centres = common + skew * own + 0.1 * rng.normal(size=(num, features))
    x = [np.tile(np.sqrt(features) * np.eye(features), (size // features, 1)) for size in sizes]
    y = [np.tile(np.sqrt(features) * centre, size // features) for centre, size in zip(centres, sizes, strict=True)]
    return _task(x, y, 1.0, *_linear(features))


def regression(seed: int, skew: float, sizes: np.ndarray = EQUAL, *, unit: float = 1.0) -> Task:
    """Makes a regression in which the optimum of each device differs from the common one by skew times a normal."""
    rng = np.random.default_rng([seed, 21])
    drawn = fcjax.data.synthetic.regression(int(sizes.sum()), num_features=20, seed=seed)
    x = _split(drawn.train_x.astype(float), sizes)
    y = [unit * (y + x @ rng.normal(0, skew, 20)) for x, y in zip(x, _split(drawn.train_y, sizes), strict=True)]
    return _task(x, y, _largest_eigenvalue(x), *_linear(20))


def svm(seed: int, skew: float, sizes: np.ndarray = EQUAL) -> Task:
    """Makes a squared SVM on two clouds with skewed labels."""
    drawn = fcjax.data.synthetic.classification(int(sizes.sum()), num_features=20, num_labels=2, seed=seed)
    parts = deal(drawn.train_y, sizes, skew, np.random.default_rng([seed, 22]))
    x = [drawn.train_x[part].astype(float) for part in parts]
    return _task(x, [2.0 * drawn.train_y[part] - 1 for part in parts], 0.1 + _largest_eigenvalue(x), *_svm(20, 0.1))


def softmax(seed: int, skew: float, sizes: np.ndarray = EQUAL) -> Task:
    """Makes softmax regression on MNIST with skewed labels."""
    rng = np.random.default_rng([seed, 23])
    mnist = _mnist()
    chosen = rng.choice(len(mnist.train_x), int(sizes.sum()), replace=False)
    pixels = mnist.train_x[chosen].reshape(-1, 7, 4, 7, 4).mean((2, 4)).reshape(-1, 49)
    images, labels = (pixels / 255 - 0.1307) / 0.3081, mnist.train_y[chosen]
    parts = deal(labels, sizes, skew, rng)
    x = [images[part] for part in parts]
    # The Hessian of the cross-entropy in the logits is at most 1/2; the bias is a constant feature.
    beta = 0.01 + _largest_eigenvalue([np.c_[rows, np.ones(len(rows))] for rows in x]) / 2
    return _task(x, [labels[part] for part in parts], beta, *_softmax(49, 10, 0.01))


TASKS: dict[str, Callable[..., Task]] = {"means": means, "regression": regression, "svm": svm, "softmax": softmax}


def deal(labels: np.ndarray, sizes: np.ndarray, skew: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Deals a part of the samples sorted by label and the others at random; returns the indices of each device."""
    order = rng.permutation(len(labels))
    in_order = np.round(skew * sizes).astype(int)
    first, rest = np.split(order, [in_order.sum()])
    first = first[np.argsort(labels[first], kind="stable")]
    return [np.r_[a, b] for a, b in zip(_split(first, in_order), _split(rest, sizes - in_order), strict=True)]


def _split(rows: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    return np.split(rows, np.cumsum(sizes)[:-1])


def _task(x: list[np.ndarray], y: list[np.ndarray], beta: float, losses: Callable, num_parameters: int) -> Task:
    sizes = np.array([len(rows) for rows in x], float)
    padded = [[np.resize(rows, (int(sizes.max()), *rows.shape[1:])) for rows in part] for part in (x, y)]
    return Task(*map(jnp.asarray, map(np.stack, padded)), jnp.asarray(sizes), jnp.asarray(beta), losses, num_parameters)


def _largest_eigenvalue(x: list[np.ndarray]) -> float:
    return max(float(np.linalg.eigvalsh(rows.T @ rows / len(rows))[-1]) for rows in x)


# One object per loss, so that tasks share compiled programs.
@functools.cache
def _linear(features: int) -> tuple[Callable, int]:
    return models.linear_regression(features).losses, features


@functools.cache
def _svm(features: int, regularisation: float) -> tuple[Callable, int]:
    return models.squared_svm(features, regularisation=regularisation).losses, features


@functools.cache
def _softmax(features: int, num_labels: int, regularisation: float) -> tuple[Callable, int]:
    model = models.mlp((features,), num_labels, hidden=())
    start, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf.astype(float), model.init(jax.random.key(0))))

    def losses(w, x, y):
        return model.losses(unravel(w), x, y) + regularisation / 2 * jnp.sum(w**2)

    return losses, start.size


@functools.cache
def _mnist() -> Any:
    return fcjax.data.load("mnist")
