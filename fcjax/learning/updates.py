"""One round of learning: local training of the scheduled devices, compression, aggregation and estimation.

Eq. (2), (3) and steps 11 to 22 of Alg. 3. All devices start from the global model. Each takes tau steps of an optax
optimizer, whose state is reset each round unless devices keep it. Updates that the base station receives are averaged,
weighted by data size. An optax optimizer of the server can replace the mean as the next model.

There are two ways to compute a round, with the same result. With `width=None`, all M devices train under one vmap, and
those not scheduled get no weight. This suits accelerators and supports reverse-mode differentiation. With a width, only
the scheduled devices train, `width` at a time, or one on each of several cores. Neither recompiles when the schedule
changes.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from fcjax.learning import batches
from fcjax.learning.batches import LocalData
from fcjax.learning.models import Model, Params
from fcjax.runtime.cores import spread
from fcjax.types import Compressor, Estimates, Training

OptimizerFactory: TypeAlias = Callable[[Training], optax.GradientTransformation] | optax.GradientTransformation
EstimateOn = Literal["batch", "local"] | None
DivergenceOf = Literal["displacement", "gradient"]
DrawBatches = Callable[[Array, Array, Training], Array]  # key, size of the local data, settings -> positions, (tau, d)


class Trained(NamedTuple):
    params: Params  # w_k
    loss: Array  # () F(w_{k-1}) as reported; inf if no report is received
    estimates: Estimates
    optimizer_states: optax.OptState | None  # (M, ...) if devices keep them
    losses: Array  # (M,) F_i(w_{k-1}), 0 for devices that are not scheduled
    update_norms: Array  # (M,) |w_i - w_{k-1}|, 0 for devices that are not scheduled
    residuals: Array | None  # (M, P) with error feedback: what devices have not sent yet


class Compression(NamedTuple):
    """How the updates of a round are compressed."""

    compressor: Compressor
    parameters: Any  # of the compressor
    keys: Array  # (M,) random keys
    residuals: Array | None  # (M, P) if the compressor has error feedback


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
    moved: Array  # |w_i - w_{k-1}|
    optimizer_state: optax.OptState | None  # if devices keep it
    residual: Array | None = None  # with error feedback

    @property
    def ruler(self) -> Params:
        """The quantity that the divergence of devices is measured on."""
        return self.params if self.gradient is None else self.gradient


class Effort(NamedTuple):
    """How much a device trains; None for all steps and whole batches."""

    local_steps: Array | None = None  # ()
    batch_size: Array | None = None  # ()


_ALL = Effort()


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
    effort: Effort = _ALL,
    proximal: ArrayLike | None = None,
) -> _Local:
    """Trains one device on mini-batches, given as sample indices, (tau, d).

    F_i and its gradient are estimated on the first mini-batch, or on `whole`, the local data as inputs, targets and a
    mask. The optimizer starts from `optimizer_state`, or from its initial state.
    """
    keeps = optimizer_state is not None

    def take(batch):
        return data.x.reshape(len(data.x), -1)[batch]  # flat rows, which is faster than images

    def slope(params, rows, batch):
        x = rows.reshape(-1, *data.x.shape[1:])
        if effort.batch_size is None:
            return jax.value_and_grad(model.loss)(params, x, data.y[batch])
        counted = jnp.arange(batch.size) < effort.batch_size
        return jax.value_and_grad(lambda w: jnp.mean(model.losses(w, x, data.y[batch]), where=counted))(params)

    def step(carry, batches):
        new, state, rows = carry
        batch, following = batches
        gradient = slope(new, rows, batch)[1]
        if proximal is not None:
            gradient = jax.tree.map(lambda g, w, start: g + proximal * (w - start), gradient, new, params)
        return (*_apply(optimizer, gradient, state, new), take(following)), None

    # Each step gathers the inputs of the next: XLA's CPU backend is slow at gathering bytes and scaling them at once.
    following = jnp.roll(samples, -1, axis=0)
    first, second = take(jnp.stack([samples[0], following[0]]))
    # The first step is separate because the estimates need its loss and gradient. Its proximal gradient is 0.
    loss, gradient = slope(params, first, samples[0])
    carry = (*_apply(optimizer, gradient, optimizer_state if keeps else optimizer.init(params), params), second)
    if effort.local_steps is None:
        (trained, last_state, _), _ = lax.scan(step, carry, (samples[1:], following[1:]))
    else:
        steps = jnp.minimum(effort.local_steps, len(samples))
        one = lambda index, carry: step(carry, (samples[index], following[index]))[0]  # noqa: E731
        trained, last_state, _ = lax.fori_loop(1, steps, one, carry)
    kept = last_state if keeps else None
    moved = _distance(params, trained)
    if not estimate:
        return _Local(trained, None, loss, jnp.full_like(loss, jnp.nan), jnp.full_like(loss, jnp.nan), moved, kept)
    if whole is None:
        new_loss, new_gradient = slope(trained, first, samples[0])
    else:
        local_slope = jax.value_and_grad(lambda params: jnp.mean(model.losses(params, *whole[:2]), where=whole[2]))
        (loss, gradient), (new_loss, new_gradient) = local_slope(params), local_slope(trained)
    safe = jnp.where(moved > 0, moved, 1)
    rho, beta = jnp.abs(loss - new_loss) / safe, _distance(gradient, new_gradient) / safe
    return _Local(trained, gradient if keep_gradient else None, loss, rho, beta, moved, kept)


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
    cores: int = 1,
    estimate_on: EstimateOn = "batch",
    divergence_of: DivergenceOf = "displacement",
    draw_batches: DrawBatches = batches.draw,
    optimizer_states: optax.OptState | None = None,
    received: Array | None = None,
    local_steps: Array | None = None,
    batch_size: Array | None = None,
    compression: Compression | None = None,
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
      cores: if more than 1, replaces `width`: each core trains one device at a time; see `fcjax.runtime.cores`.
      estimate_on: "batch" estimates losses and gradients on the first mini-batch, at the cost of one additional
        gradient; "local" uses all data of the device; None leaves the estimates unchanged.
      divergence_of: how delta is estimated. "displacement" takes (w_{k-1} - w_i)/(tau eta) as the gradient of device
        i, as in step 20 of Alg. 3; "gradient" takes the gradient at w_{k-1}.
      draw_batches: draws the mini-batches.
      optimizer_states: (M, ...) initial states of the devices' optimizers; None resets them.
      received: (M,) bool, whether the upload of a scheduled device arrives; None if all do.
      local_steps: (M,) steps of each device; None for those of the training.
      batch_size: (M,) samples that count in each mini-batch; None for all.
      compression: how updates are compressed; None to send them as they are.
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
    # Other optimizers, and compressors, may depend on the order of a model's numbers.
    any_order = make_optimizer is sgd and optimizer_states is None and compression is None
    turn = _turning(params) if any_order else lambda model: model
    first, params = params, turn(params)
    model = model._replace(losses=functools.partial(_losses_of_turned, model, turn))
    arrived = scheduled if received is None else scheduled & received

    def train(device):
        positions = draw_batches(keys[device], data.sizes[device], training)
        own, size = data.indices[device], data.sizes[device]
        whole = None
        if estimate_on == "local":
            whole = data.x[own], data.y[own], jnp.arange(own.size) < size
        estimate, by_gradient = estimate_on is not None, divergence_of == "gradient"
        before = jax.tree.map(lambda leaf: leaf[device], optimizer_states)
        effort = Effort(*(None if of is None else of[device] for of in (local_steps, batch_size)))
        how = estimate, whole, by_gradient, before, effort, training.proximal
        local = train_device(params, own[positions], data, model, optimizer, *how)
        if compression is not None:
            local = _compress(local, params, device, arrived[device], compression)
        if effort.local_steps is not None and not by_gradient:
            # Devices take different numbers of steps, so their displacements are compared per step.
            per_step = jax.tree.map(lambda old, new: (old - new) / effort.local_steps, params, local.params)
            local = local._replace(gradient=per_step)
        return local

    weights = jnp.where(arrived, data.sizes, 0)
    share = weights / jnp.maximum(jnp.sum(weights), 1)
    width = cores if cores > 1 else width
    do_all = _under_a_mask if width is None else functools.partial(_in_slots, width=width, cores=cores)
    mean, local, distance = do_all(train, scheduled, share)
    anybody = jnp.any(arrived)
    new_params = jax.tree.map(lambda new, old: jnp.where(anybody, new, old), turn(mean), first)
    if estimate_on is not None:
        # With (w_{k-1} - w_i)/(tau eta) for the gradient of device i, their mean is (w_{k-1} - w_k)/(tau eta).
        steps = training.local_steps if local_steps is None else 1
        step_size = steps * jnp.asarray(training.learning_rate)
        delta = jnp.where(step_size > 0, distance / jnp.where(step_size > 0, step_size, 1), 0)
        delta = delta if divergence_of == "displacement" else distance
        news = Estimates(local.rho, local.beta, delta)
        estimates = jax.tree.map(lambda new, old: jnp.where(arrived, new, old), news, estimates)
    if optimizer_states is not None:
        optimizer_states = _of_scheduled(scheduled, local.optimizer_state, optimizer_states)
    residuals = None if compression is None else compression.residuals
    if residuals is not None:
        residuals = _of_scheduled(scheduled, local.residual, residuals)
    loss = jnp.sum(jnp.where(share > 0, share * local.loss, 0))
    loss = jnp.where(anybody, loss, jnp.inf)
    losses, norms = (jnp.where(scheduled, values, 0) for values in (local.loss, local.moved))
    return Trained(new_params, loss, estimates, optimizer_states, losses, norms, residuals)


def _turning(params: Params) -> Callable[[Params], Params]:
    """Returns a function that transposes matrices of a model if they are taller than wide; it undoes itself.

    XLA's CPU backend computes the gradient of such a matrix transposed, and takes long to turn it back in each step.
    """
    turned = jax.tree.map(lambda leaf: leaf.ndim == 2 and leaf.shape[0] > leaf.shape[1], params)
    return lambda model: jax.tree.map(lambda leaf, turns: leaf.T if turns else leaf, model, turned)


def _losses_of_turned(model: Model, turn: Callable[[Params], Params], params: Params, x: Array, y: Array) -> Array:
    return model.losses(turn(params), x, y)


def _of_scheduled(scheduled: Array, new: Any, old: Any) -> Any:
    """Replaces the rows of scheduled devices."""
    return jax.tree.map(lambda new, old: jnp.where(scheduled.reshape(-1, *[1] * (old.ndim - 1)), new, old), new, old)


def _compress(local: _Local, params: Params, device: Array, arrives: Array, how: Compression) -> _Local:
    """Replaces a device's model by the one that the base station decodes."""
    update, unravel = ravel_pytree(jax.tree.map(jnp.subtract, local.params, params))
    if how.residuals is not None:
        update = update + how.residuals[device]
    decoded = how.compressor.apply(how.keys[device], how.parameters, update)
    # A device knows when its upload is lost, and keeps all of its update.
    residual = None if how.residuals is None else update - jnp.where(arrives, decoded, 0)
    return local._replace(params=jax.tree.map(jnp.add, params, unravel(decoded)), residual=residual)


def update_norms(
    keys: Array,
    params: Params,
    asked: Array,
    data: LocalData,
    training: Training,
    model: Model,
    **how: Any,
) -> Array:
    """Returns the norms of the updates of all devices that are asked, (M,), if they trained this round.

    The arguments are those of `train_round`.
    """
    nothing = Estimates(*(jnp.zeros(asked.shape) for _ in range(3)))
    trained = train_round(keys, params, asked, nothing, data, training, model, **how | {"estimate_on": None})
    return trained.update_norms


def server_step(
    old: Params, mean: Params, optimizer: optax.GradientTransformation, state: optax.OptState
) -> tuple[Params, optax.OptState]:
    """Takes a step of the server's optimizer, with old - mean as the gradient.

    S. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar, H. B. McMahan, "Adaptive Federated
    Optimization", International Conference on Learning Representations, 2021.
    """
    return _apply(optimizer, jax.tree.map(jnp.subtract, old, mean), state, old)


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
    return _All(mean, _without_models(local), distance)


_MOST_KEPT = 64  # models in memory at a time, besides the global one


def _in_slots(train: Callable[[Array], _Local], scheduled: Array, share: Array, width: int, cores: int = 1) -> _All:
    """Trains `width` scheduled devices at a time, on one core or each on its own.

    Memory holds the models of up to `_MOST_KEPT` devices. If more are scheduled, the first ones train again once the
    mean is known, to measure how far from it they are.
    """
    num_devices = scheduled.size
    width = width if cores > 1 else min(width, num_devices)
    train_each = spread(train) if cores > 1 else _alone(train) if width == 1 else jax.vmap(train)
    order = jnp.argsort(~scheduled, stable=True)  # the scheduled first
    order = jnp.concatenate([order, jnp.full(-num_devices % width, order[0])])
    counted = jnp.where(jnp.arange(order.size) < num_devices, share[order], 0)
    num_scheduled = jnp.sum(scheduled)
    num_kept = min(order.size, -(-_MOST_KEPT // width) * width)
    holds_all = num_kept == order.size

    def in_turn(visit, state, first=None, end=num_scheduled):
        """Applies visit(start, state) to all chunks from `first` on that hold a device before `end`."""
        step = lambda carry: (carry[0] + width, visit(*carry))  # noqa: E731
        return lax.while_loop(lambda carry: carry[0] < end, step, (jnp.array(0) if first is None else first, state))[1]

    def take(array, start):
        return lax.dynamic_slice_in_dim(array, start, width)

    def put(array, new, start):
        return lax.dynamic_update_slice_in_dim(array, new, start, 0)

    def add(sums, models, shares):
        if cores == 1:
            return jax.tree.map(jnp.add, sums, aggregate(models, shares))
        for one in range(width):  # in the order in which a single core adds them
            part = jax.tree.map(lambda leaf, one=one: leaf[one : one + 1], models)
            sums = jax.tree.map(jnp.add, sums, aggregate(part, shares[one : one + 1]))
        return sums

    def slot(start):
        """Returns where models are kept: later ones replace earlier ones."""
        return start if holds_all else start % num_kept

    def train_some(start, state):
        sums, kept, others = state
        local = train_each(take(order, start))
        models = local.params, local.gradient
        sums = add(sums, models, take(counted, start))
        kept = jax.tree.map(lambda buffer, new: put(buffer, new, slot(start)), kept, models)
        rest = _without_models(local)
        return sums, kept, jax.tree.map(lambda buffer, new: put(buffer, new, start), others, rest)

    def measure_some(start, distance, rulers=None):
        if rulers is None:
            rulers = jax.tree.map(lambda leaf: take(leaf, slot(start)), kept[0] if kept[1] is None else kept[1])
        middle = mean if mean_gradient is None else mean_gradient
        return put(distance, jax.vmap(_distance, (0, None))(rulers, middle), start)

    def measure_again(start, distance):
        return measure_some(start, distance, train_each(take(order, start)).ruler)

    def room(shapes, number):
        return jax.tree.map(lambda s: jnp.zeros((number, *s.shape), s.dtype), shapes)

    shapes = jax.eval_shape(train, order[0])
    models = shapes.params, shapes.gradient
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), models)
    start = nothing, room(models, num_kept), room(_without_models(shapes), order.size)
    (mean, mean_gradient), kept, local = in_turn(train_some, start)
    distance, first_kept = jnp.zeros_like(local.rho), None
    if not holds_all:
        first_kept = jnp.maximum((num_scheduled + width - 1) // width * width - num_kept, 0)
        distance = in_turn(measure_again, distance, end=first_kept)
    distance = in_turn(measure_some, distance, first_kept)

    def by_device(leaf):
        return jnp.zeros((num_devices, *leaf.shape[1:]), leaf.dtype).at[order[:num_devices]].set(leaf[:num_devices])

    return _All(mean, jax.tree.map(by_device, local), by_device(distance))


def _alone(train: Callable[[Array], _Local]) -> Callable[[Array], _Local]:
    """Returns jax.vmap(train) for one device; XLA's CPU backend is slower at matrix products with a leading axis."""
    return lambda devices: jax.tree.map(lambda leaf: leaf[None], train(devices[0]))


def _without_models(local: _Local) -> _Local:
    return local._replace(params=None, gradient=None)


def _distance(a: Params, b: Params) -> Array:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jnp.sqrt(sum(jnp.sum((x - y) ** 2) for x, y in pairs))
