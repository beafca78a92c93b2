"""One round of learning: local training of the scheduled devices, aggregation and estimation.

Eq. (2), (3) and steps 11 to 22 of Alg. 3. All devices start from the global model. Each takes tau steps of an optax
optimizer, whose state is reset each round unless devices keep it. The new global model is their mean, weighted by data
size.

There are two ways to compute a round, with the same result. With `width=None`, all M devices train under one vmap, and
those not scheduled get no weight. This suits accelerators and supports reverse-mode differentiation. With a width, only
the scheduled devices train, `width` at a time. Neither recompiles when the schedule changes.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from fcjax.learning import batches
from fcjax.learning.batches import LocalData
from fcjax.learning.models import Model, Params
from fcjax.types import Estimates, Training

OptimizerFactory: TypeAlias = Callable[[Training], optax.GradientTransformation] | optax.GradientTransformation
EstimateOn = Literal["batch", "local"] | None
DivergenceOf = Literal["displacement", "gradient"]
DrawBatches = Callable[[Array, Array, Training], Array]  # key, size of the local data, settings -> positions, (tau, d)


class Trained(NamedTuple):
    params: Params  # w_k
    loss: Array  # () F(w_{k-1}) as the scheduled devices report it
    estimates: Estimates
    optimizer_states: optax.OptState | None  # (M, ...) if devices keep them


def sgd(training: Training) -> optax.GradientTransformation:
    """Returns stochastic gradient descent with momentum."""
    return optax.sgd(training.learning_rate, training.momentum)


def _optimizer(make: OptimizerFactory, training: Training) -> optax.GradientTransformation:
    return make(training) if callable(make) else make


class _Local(NamedTuple):
    params: Params
    gradient: Params | None  # at w_{k-1}, if requested
    loss: Array
    rho: Array
    beta: Array
    optimizer_state: optax.OptState | None  # if devices keep it

    @property
    def ruler(self) -> Params:
        """The quantity that the divergence of devices is measured on."""
        return self.params if self.gradient is None else self.gradient


def train_device(
    params: Params,
    samples: Array,
    data: LocalData,
    model: Model,
    optimizer: optax.GradientTransformation,
    estimate: bool = True,
    whole: tuple[Array, Array, Array] | None = None,
    keep_gradient: bool = False,
    optimizer_state: optax.OptState | None = None,
) -> _Local:
    """Trains one device on mini-batches, given as sample indices, (tau, d).

    F_i and its gradient are estimated on the first mini-batch, or on `whole`, the local data as inputs, targets and a
    mask. The optimizer starts from `optimizer_state`, or from its initial state.
    """
    keeps = optimizer_state is not None

    def slope(params, batch):
        # Gathering flat rows is faster than gathering images.
        x = data.x.reshape(len(data.x), -1)[batch].reshape(*batch.shape, *data.x.shape[1:])
        return jax.value_and_grad(model.loss)(params, x, data.y[batch])

    def step(carry, batch):
        params, state = carry
        return _apply(optimizer, slope(params, batch)[1], state, params), None

    # The first step is separate because the estimates need its loss and gradient.
    loss, gradient = slope(params, samples[0])
    carry = _apply(optimizer, gradient, optimizer_state if keeps else optimizer.init(params), params)
    (trained, last_state), _ = lax.scan(step, carry, samples[1:])
    kept = last_state if keeps else None
    if not estimate:
        return _Local(trained, None, loss, jnp.full_like(loss, jnp.nan), jnp.full_like(loss, jnp.nan), kept)
    if whole is None:
        new_loss, new_gradient = slope(trained, samples[0])
    else:
        local_slope = jax.value_and_grad(lambda params: jnp.mean(model.losses(params, *whole[:2]), where=whole[2]))
        (loss, gradient), (new_loss, new_gradient) = local_slope(params), local_slope(trained)
    moved = _distance(params, trained)
    safe = jnp.where(moved > 0, moved, 1)
    rho, beta = jnp.abs(loss - new_loss) / safe, _distance(gradient, new_gradient) / safe
    return _Local(trained, gradient if keep_gradient else None, loss, rho, beta, kept)


def _apply(optimizer, gradient, state, params):
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


def aggregate(stacked: Params, share: Array) -> Params:
    """Eq. (3): averages models stacked along the first axis, weighted by shares; those with share 0 are left out."""

    def mean(leaf):
        # A model that is left out may have diverged, and 0 times inf is NaN.
        counted = jnp.where((share > 0).reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0)
        return jnp.tensordot(share.astype(leaf.dtype), counted, 1)

    return jax.tree.map(mean, stacked)


def train_round(
    keys: Array,
    params: Params,
    scheduled: Array,
    estimates: Estimates,
    data: LocalData,
    training: Training,
    model: Model,
    *,
    make_optimizer: OptimizerFactory = sgd,
    width: int | None = None,
    estimate_on: EstimateOn = "batch",
    divergence_of: DivergenceOf = "displacement",
    draw_batches: DrawBatches = batches.draw,
    optimizer_states: optax.OptState | None = None,
) -> Trained:
    """Trains one round from the global model `params`.

    Args:
      keys: (M,) random keys of the mini-batches, one per device.
      params: w_{k-1}.
      scheduled: (M,) bool; if no device is scheduled, the model does not change.
      estimates: the current estimates.
      data: the shared data set and its partition.
      training: the settings of local training.
      model: the model to train.
      make_optimizer: the local optimizer, or a function that makes one from the training settings.
      width: how many scheduled devices train at a time; None for all M under a mask.
      estimate_on: "batch" estimates losses and gradients on the first mini-batch, at the cost of one additional
        gradient; "local" uses all data of the device; None leaves the estimates unchanged.
      divergence_of: how delta is estimated. "displacement" takes (w_{k-1} - w_i)/(tau eta) as the gradient of device
        i, as in step 20 of Alg. 3; "gradient" takes the gradient at w_{k-1}.
      draw_batches: draws the mini-batches.
      optimizer_states: (M, ...) initial states of the devices' optimizers; None resets them.
    """
    if estimate_on not in (None, "batch", "local"):
        raise ValueError(f"estimate_on must be None, 'batch' or 'local', got {estimate_on!r}")
    if divergence_of not in ("displacement", "gradient"):
        raise ValueError(f"divergence_of must be 'displacement' or 'gradient', got {divergence_of!r}")
    if width is not None and width < 1:
        raise ValueError(f"width must be 1 or more, or None for all devices under a mask, got {width}")
    scheduled, estimates, data = jax.tree.map(jnp.asarray, (scheduled, estimates, data))
    batches.check(data, training, model)
    optimizer = _optimizer(make_optimizer, training)

    def train(device):
        positions = draw_batches(keys[device], data.sizes[device], training)
        own, size = data.indices[device], data.sizes[device]
        whole = None
        if estimate_on == "local":
            whole = data.x[own], data.y[own], jnp.arange(own.size) < size
        estimate, by_gradient = estimate_on is not None, divergence_of == "gradient"
        before = jax.tree.map(lambda leaf: leaf[device], optimizer_states)
        return train_device(params, own[positions], data, model, optimizer, estimate, whole, by_gradient, before)

    weights = jnp.where(scheduled, data.sizes, 0)
    share = weights / jnp.maximum(jnp.sum(weights), 1)
    do_all = _under_a_mask if width is None else functools.partial(_in_slots, width=width)
    mean, local, distance = do_all(train, scheduled, share)
    anybody = jnp.any(scheduled)
    new_params = jax.tree.map(lambda new, old: jnp.where(anybody, new, old), mean, params)
    if estimate_on is not None:
        # With (w_{k-1} - w_i)/(tau eta) for the gradient of device i, their mean is (w_{k-1} - w_k)/(tau eta).
        step_size = training.local_steps * jnp.asarray(training.learning_rate)
        delta = jnp.where(step_size > 0, distance / jnp.where(step_size > 0, step_size, 1), 0)
        delta = delta if divergence_of == "displacement" else distance
        news = Estimates(local.rho, local.beta, delta)
        estimates = jax.tree.map(lambda new, old: jnp.where(scheduled, new, old), news, estimates)
    if optimizer_states is not None:
        optimizer_states = jax.tree.map(
            lambda new, old: jnp.where(scheduled.reshape(-1, *[1] * (old.ndim - 1)), new, old),
            local.optimizer_state,
            optimizer_states,
        )
    loss = jnp.sum(jnp.where(share > 0, share * local.loss, 0))
    return Trained(new_params, loss, estimates, optimizer_states)


def first_optimizer_states(
    params: Params, training: Training, make_optimizer: OptimizerFactory, num_devices: int
) -> optax.OptState:
    """Returns the initial optimizer states, (M, ...), for devices that keep them."""
    state = _optimizer(make_optimizer, training).init(params)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_devices, *jnp.shape(leaf))), state)


class _All(NamedTuple):
    """Results of all devices: the mean model, and the local results of those scheduled."""

    mean: Params
    local: _Local  # without models and gradients
    distance: Array  # (M,) distance of the device's model, or gradient, from the mean


def _under_a_mask(train: Callable[[Array], _Local], scheduled: Array, share: Array) -> _All:
    local = jax.vmap(train)(jnp.arange(scheduled.size))
    mean = aggregate(local.params, share)
    middle = mean if local.gradient is None else aggregate(local.gradient, share)
    distance = jax.vmap(_distance, (0, None))(local.ruler, middle)
    return _All(mean, local._replace(params=None, gradient=None), distance)


def _in_slots(train: Callable[[Array], _Local], scheduled: Array, share: Array, width: int) -> _All:
    """Trains `width` scheduled devices at a time; memory holds the models of all devices."""
    num_devices = scheduled.size
    width = min(width, num_devices)
    order = jnp.argsort(~scheduled, stable=True)  # the scheduled first
    order = jnp.concatenate([order, jnp.full(-num_devices % width, order[0])])
    counted = jnp.where(jnp.arange(order.size) < num_devices, share[order], 0)
    num_scheduled = jnp.sum(scheduled)

    def in_turn(visit, state):
        """Applies visit(start, state) to all chunks that hold a scheduled device."""
        step = lambda carry: (carry[0] + width, visit(*carry))  # noqa: E731
        return lax.while_loop(lambda carry: carry[0] < num_scheduled, step, (jnp.array(0), state))[1]

    def take(array, start):
        return lax.dynamic_slice_in_dim(array, start, width)

    def put(array, new, start):
        return lax.dynamic_update_slice_in_dim(array, new, start, 0)

    def train_some(start, state):
        sums, all_ = state
        local = jax.vmap(train)(take(order, start))
        sums = jax.tree.map(jnp.add, sums, aggregate((local.params, local.gradient), take(counted, start)))
        return sums, jax.tree.map(lambda buffer, new: put(buffer, new, start), all_, local)

    def measure_some(start, distance):
        rulers = jax.tree.map(lambda leaf: take(leaf, start), local.ruler)
        middle = mean if local.gradient is None else mean_gradient
        return put(distance, jax.vmap(_distance, (0, None))(rulers, middle), start)

    shapes = jax.eval_shape(train, order[0])
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes.params, shapes.gradient))
    room = jax.tree.map(lambda s: jnp.zeros((order.size, *s.shape), s.dtype), shapes)
    (mean, mean_gradient), local = in_turn(train_some, (nothing, room))
    distance = in_turn(measure_some, jnp.zeros_like(local.rho))

    def by_device(leaf):
        return jnp.zeros((num_devices, *leaf.shape[1:]), leaf.dtype).at[order[:num_devices]].set(leaf[:num_devices])

    scalars = local._replace(params=None, gradient=None)
    return _All(mean, jax.tree.map(by_device, scalars), by_device(distance))


def _distance(a: Params, b: Params) -> Array:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jnp.sqrt(sum(jnp.sum((x - y) ** 2) for x, y in pairs))
