import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fcjax import batches, compressors, keys, models
from fcjax.data import partition, synthetic
from fcjax.learning import updates
from fcjax.types import Estimates, Training

pytestmark = pytest.mark.usefixtures("quick_compilation")
NUM_DEVICES = 6


def setting(dtype, *, name="dir1", batch_size=8, local_steps=3, model="mlp"):
    """A small task on devices with unequal data, entirely in one precision."""
    data = synthetic.classification(400, num_features=5, num_labels=3, seed=1)
    parts = partition.by_name(name, data.train_y, NUM_DEVICES, seed=4)
    local = batches.LocalData(jnp.asarray(data.train_x, dtype), data.train_y, parts.indices, parts.sizes)
    training = Training(learning_rate=0.05, momentum=0.9, local_steps=local_steps, batch_size=batch_size)
    batches.check_sizes(training, parts.sizes)
    made = models.mlp((5,), 3, hidden=(4,)) if model == "mlp" else model
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), made.init(jax.random.key(0)))
    start = Estimates(*(jnp.full(NUM_DEVICES, value, dtype) for value in (1.5, 12.0, 2.0)))
    return local, training, made, params, start


STATIC = ("width", "estimate_on", "divergence_of", "make_optimizer", "draw_batches")
train = jax.jit(updates.train_round, static_argnums=6, static_argnames=STATIC)
slope = jax.jit(lambda model, params, x, y: jax.value_and_grad(model.loss)(params, x, y), static_argnums=0)


def cross_entropy(params, x, y):
    """The mean loss of the MLP, written out in NumPy."""
    first, second = (jax.tree.map(np.asarray, params[name]) for name in ("Dense_0", "Dense_1"))
    logits = np.maximum(np.asarray(x) @ first["kernel"] + first["bias"], 0) @ second["kernel"] + second["bias"]
    return np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), np.asarray(y)])


def round_by_hand(device_keys, params, scheduled, data, training, model, velocities=None):
    """Alg. 3, steps 11 to 22, device by device, with momentum written out.

    If `velocities` is a dictionary, each device starts from its velocity there and stores its last one.
    """
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    flat = np.asarray(flat)

    def loss(w, x, y):
        return slope(model, unravel(w), x, y)[0]

    def gradient_of_loss(w, x, y):
        return np.asarray(jax.flatten_util.ravel_pytree(slope(model, unravel(w), x, y)[1])[0])

    trained, reports = {}, {}
    for i in np.flatnonzero(scheduled):
        positions = np.asarray(batches.draw(device_keys[i], data.sizes[i], training))
        drawn = [(data.x[data.indices[i][p]], data.y[data.indices[i][p]]) for p in positions]
        w, velocity = flat, (velocities or {}).get(i, np.zeros_like(flat))
        for x, y in drawn:
            velocity = training.momentum * velocity + gradient_of_loss(w, x, y)
            w = w - training.learning_rate * velocity
        if velocities is not None:
            velocities[i] = velocity
        x, y = drawn[0]
        moved = np.linalg.norm(flat - w)
        rho = abs(loss(flat, x, y) - loss(w, x, y)) / moved
        beta = np.linalg.norm(gradient_of_loss(flat, x, y) - gradient_of_loss(w, x, y)) / moved
        trained[i], reports[i] = w, (loss(flat, x, y), rho, beta)
    weight = {i: data.sizes[i] / sum(data.sizes[j] for j in trained) for i in trained}
    gradient = {i: (flat - w) / (training.local_steps * training.learning_rate) for i, w in trained.items()}
    mean = sum(weight[i] * gradient[i] for i in trained)
    delta = {i: np.linalg.norm(gradient[i] - mean) for i in trained}
    return (
        sum(weight[i] * w for i, w in trained.items()),
        sum(weight[i] * reports[i][0] for i in trained),
        {i: (*reports[i][1:], delta[i]) for i in trained},
    )


@pytest.mark.parametrize("width", [None, 1, 4, 100])
@pytest.mark.parametrize("scheduled", [[1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 1, 0], [1] * 6])
def test_round_matches_a_loop_over_devices(width, scheduled, x64):
    data, training, model, params, start = setting(np.float64)
    assert params["Dense_0"]["kernel"].shape == (5, 4)  # taller than wide, hence transposed while devices train
    scheduled = np.array(scheduled, bool)
    device_keys = keys.per_device(jax.random.key(3), NUM_DEVICES)
    result = train(device_keys, params, scheduled, start, data, training, model, width=width)
    weights, loss, estimates = round_by_hand(device_keys, params, scheduled, data, training, model)
    np.testing.assert_allclose(jax.flatten_util.ravel_pytree(result.params)[0], weights, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(result.loss, loss, rtol=1e-10)
    for i in range(NUM_DEVICES):
        got = [float(x[i]) for x in (result.estimates.rho, result.estimates.beta, result.estimates.delta)]
        expected = estimates[i] if scheduled[i] else (1.5, 12.0, 2.0)
        np.testing.assert_allclose(got, np.array(expected, float), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "kept", "divergence_of"), [(1, 1, "displacement"), (1, 3, "gradient"), (2, 4, "displacement")]
)
def test_memory_for_fewer_models_gives_the_same_round(width, kept, divergence_of, monkeypatch):
    data, training, model, params, start = setting(np.float32)
    device_keys = keys.per_device(jax.random.key(3), NUM_DEVICES)

    @jax.jit
    def round_of(scheduled):
        how = {"width": width, "divergence_of": divergence_of}
        return updates.train_round(device_keys, params, scheduled, start, data, training, model, **how)

    schedules = [np.arange(NUM_DEVICES) < n for n in range(NUM_DEVICES + 1)]
    expected = [round_of(scheduled) for scheduled in schedules]
    monkeypatch.setattr(updates, "_MOST_KEPT", kept)
    jax.clear_caches()
    for scheduled, usual in zip(schedules, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, round_of(scheduled), usual)


@pytest.mark.parametrize("width", [None, 1, 4])
def test_devices_keep_their_momentum(width, x64):
    """Compares three rounds with a loop. A device that skipped a round starts from its last velocity."""
    data, training, model, params, start = setting(np.float64)
    states = updates.first_optimizer_states(params, training, updates.sgd, NUM_DEVICES)
    velocities, by_hand = {}, params
    for number, scheduled in enumerate(([1, 0, 1, 1, 0, 0], [0, 0, 1, 0, 1, 0], [1, 1, 0, 0, 1, 0])):
        scheduled = np.array(scheduled, bool)
        device_keys = keys.per_device(jax.random.key(number), NUM_DEVICES)
        result = train(
            device_keys, params, scheduled, start, data, training, model, width=width, optimizer_states=states
        )
        params, states = result.params, result.optimizer_states
        weights, *_ = round_by_hand(device_keys, by_hand, scheduled, data, training, model, velocities)
        by_hand = jax.flatten_util.ravel_pytree(params)[1](weights)
        np.testing.assert_allclose(jax.flatten_util.ravel_pytree(params)[0], weights, rtol=1e-9, atol=1e-12)
    kept = states[0].trace
    for device in range(NUM_DEVICES):
        velocity = jax.flatten_util.ravel_pytree(jax.tree.map(lambda leaf, i=device: leaf[i], kept))[0]
        np.testing.assert_allclose(velocity, velocities.get(device, np.zeros(velocity.size)), rtol=1e-8, atol=1e-11)


def test_custom_mini_batches(x64):
    """Steps on the first sample alone are gradient descent on that sample."""
    data, training, model, params, start = setting(np.float64)

    def first_sample(key, size, training):
        return jnp.zeros((training.local_steps, training.batch_size), jnp.int32)

    scheduled = np.arange(NUM_DEVICES) == 2
    device_keys = keys.per_device(jax.random.key(0), NUM_DEVICES)
    result = train(device_keys, params, scheduled, start, data, training, model, draw_batches=first_sample)
    x, y = data.x[data.indices[2][:1]], data.y[data.indices[2][:1]]
    w, velocity = params, jax.tree.map(jnp.zeros_like, params)
    for _ in range(training.local_steps):
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, slope(model, w, x, y)[1])
        w = jax.tree.map(lambda a, v: a - 0.05 * v, w, velocity)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), result.params, w)


def test_full_batch_step_equals_centralized_descent(x64):
    data, _, model, params, start = setting(np.float64, name="iid")
    size = int(data.sizes[0])
    training = Training(learning_rate=0.1, momentum=0.0, local_steps=1, batch_size=size)
    everybody = np.ones(NUM_DEVICES, bool)
    device_keys = keys.per_device(jax.random.key(0), NUM_DEVICES)
    result = train(device_keys, params, everybody, start, data, training, model, width=2)
    every_sample = data.indices.ravel()
    gradient = jax.grad(model.loss)(params, data.x[every_sample], data.y[every_sample])
    expected = jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), result.params, expected)


def test_estimates_of_linear_regression_have_closed_forms(x64):
    """With full batches, beta is |X'X (w - w')|/(d |w - w'|), between the eigenvalues of X'X/d."""
    drawn = synthetic.regression(120, num_features=3, seed=2)
    indices = np.arange(120, dtype=np.int32).reshape(2, 60)
    data = batches.LocalData(
        jnp.asarray(drawn.train_x, float), jnp.asarray(drawn.train_y, float), indices, np.full(2, 60)
    )
    training = Training(learning_rate=0.05, momentum=0.0, local_steps=4, batch_size=60)
    start = Estimates(jnp.zeros(2), jnp.zeros(2), jnp.zeros(2))
    model, w0 = models.linear_regression(3), jnp.array([0.3, -0.2, 0.1])
    result = updates.train_round(
        keys.per_device(jax.random.key(0), 2), w0, np.ones(2, bool), start, data, training, model
    )
    trained = []
    for i in range(2):
        x, y = (np.asarray(part)[indices[i]] for part in (data.x, data.y))
        hessian, w = x.T @ x / 60, np.asarray(w0)
        for _ in range(4):
            w = w - 0.05 * (hessian @ w - x.T @ y / 60)
        moved = w - np.asarray(w0)
        trained.append(w)
        beta = np.linalg.norm(hessian @ moved) / np.linalg.norm(moved)
        assert np.linalg.eigvalsh(hessian)[0] <= beta <= np.linalg.eigvalsh(hessian)[-1]
        np.testing.assert_allclose(result.estimates.beta[i], beta, rtol=1e-10)
        losses = [np.mean((y - x @ v) ** 2) / 2 for v in (np.asarray(w0), w)]
        rho = abs(losses[0] - losses[1]) / np.linalg.norm(moved)
        np.testing.assert_allclose(result.estimates.rho[i], rho, rtol=1e-10)
    delta = np.linalg.norm(trained[0] - trained[1]) / 2 / (4 * 0.05)
    np.testing.assert_allclose(result.estimates.delta, delta, rtol=1e-10)


@pytest.mark.slow
def test_estimates_on_all_local_data(x64):
    data, training, model, params, start = setting(np.float64)
    everybody, device_keys = np.ones(NUM_DEVICES, bool), keys.per_device(jax.random.key(3), NUM_DEVICES)

    def run(**changes):
        return train(device_keys, params, everybody, start, data, training, model, width=1, **changes)

    whole, batch = run(estimate_on="local"), run()
    jax.tree.map(np.testing.assert_array_equal, whole.params, batch.params)
    np.testing.assert_array_equal(whole.estimates.delta, batch.estimates.delta)
    weight = data.sizes / data.sizes.sum()
    own = [data.indices[i][: data.sizes[i]] for i in range(NUM_DEVICES)]
    losses = [cross_entropy(params, data.x[mine], data.y[mine]) for mine in own]
    np.testing.assert_allclose(whole.loss, np.dot(weight, losses), rtol=1e-12)
    # One device's rho by definition, from the model that the device trains alone.
    alone = np.arange(NUM_DEVICES) == 2
    trained = train(device_keys, params, alone, start, data, training, model).params
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, params, trained))
    new_loss = cross_entropy(trained, data.x[own[2]], data.y[own[2]])
    np.testing.assert_allclose(whole.estimates.rho[2], abs(losses[2] - new_loss) / moved, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "estimate_on"), [(None, "batch"), (4, "batch"), (1, "local")])
def test_divergence_of_gradients(width, estimate_on, x64):
    """With "gradient", delta_i is the distance of grad F_i(w_{k-1}) from its mean over the scheduled devices."""
    data, training, model, params, start = setting(np.float64)
    scheduled, device_keys = np.array([1, 0, 1, 1, 0, 1], bool), keys.per_device(jax.random.key(3), NUM_DEVICES)
    arguments = device_keys, params, scheduled, start, data, training, model
    result = train(*arguments, width=width, estimate_on=estimate_on, divergence_of="gradient")
    usual = train(*arguments, width=width, estimate_on=estimate_on)
    gradients = {}
    for i in np.flatnonzero(scheduled):
        positions = np.asarray(batches.draw(device_keys[i], data.sizes[i], training))[0]
        mine = data.indices[i][positions] if estimate_on == "batch" else data.indices[i][: data.sizes[i]]
        _, gradient = slope(model, params, data.x[mine], data.y[mine])
        gradients[i] = np.asarray(jax.flatten_util.ravel_pytree(gradient)[0])
    total = sum(data.sizes[i] for i in gradients)
    mean = sum(data.sizes[i] / total * gradient for i, gradient in gradients.items())
    expected = [np.linalg.norm(gradients[i] - mean) if i in gradients else 2.0 for i in range(NUM_DEVICES)]
    np.testing.assert_allclose(result.estimates.delta, expected, rtol=1e-10)
    others = lambda trained: (trained.params, trained.estimates.rho, trained.estimates.beta)  # noqa: E731
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), others(result), others(usual))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 0}, r"width must be 1 or more.*got 0"),
        ({"estimate_on": "all"}, r"'batch' or 'local', got 'all'"),
        ({"divergence_of": "model"}, r"'displacement' or 'gradient', got 'model'"),
    ],
)
def test_errors_name_bad_options(change, message):
    data, training, model, params, start = setting(np.float32)
    device_keys = keys.per_device(jax.random.key(3), NUM_DEVICES)
    with pytest.raises(ValueError, match=message):
        updates.train_round(device_keys, params, np.ones(6, bool), start, data, training, model, **change)


def test_only_scheduled_devices_train_without_recompiling():
    data, training, model, params, start = setting(np.float32)
    traced, visited = [], []

    def losses(params, x, y):
        traced.append(1)
        jax.debug.callback(lambda _: visited.append(1), x[0, 0], ordered=False)
        return model.losses(params, x, y)

    watched = model._replace(losses=losses)
    device_keys = keys.per_device(jax.random.key(3), NUM_DEVICES)
    one_round = jax.jit(
        lambda scheduled: updates.train_round(device_keys, params, scheduled, start, data, training, watched, width=1)
    )
    one_round(np.arange(NUM_DEVICES) < 1).loss.block_until_ready()
    jax.effects_barrier()
    once, for_one = len(traced), len(visited)
    for n in (2, 5, 6):
        visited.clear()
        one_round(np.arange(NUM_DEVICES) < n).loss.block_until_ready()
        jax.effects_barrier()
        assert len(visited) == n * for_one
    assert len(traced) == once


def test_custom_optimizer():
    data, training, model, params, start = setting(np.float32)
    device_keys = keys.per_device(jax.random.key(3), NUM_DEVICES)

    def run(**changes):
        scheduled = np.ones(NUM_DEVICES, bool)
        return train(device_keys, params, scheduled, start, data, training, model, width=2, **changes)

    adam = run(make_optimizer=lambda training: optax.adam(training.learning_rate))
    assert np.isfinite(adam.loss)
    assert not np.allclose(adam.params["Dense_0"]["kernel"], run().params["Dense_0"]["kernel"], atol=1e-3)


@pytest.mark.parametrize("width", [None, 1, 2, NUM_DEVICES])
def test_unscheduled_devices_do_not_affect_the_model(width):
    data, training, model, params, start = setting(np.float32)
    huge = np.array(data.x)
    huge[data.indices[5]] = 1e30
    scheduled = np.arange(NUM_DEVICES) < 1
    device_keys = keys.per_device(jax.random.key(3), NUM_DEVICES)
    spoilt, clean = (
        train(device_keys, params, scheduled, start, data._replace(x=x), training, model, width=width)
        for x in (huge, data.x)
    )
    jax.tree.map(np.testing.assert_array_equal, spoilt, clean)


def test_empty_schedule_changes_nothing():
    data, training, model, params, start = setting(np.float32)
    device_keys = keys.per_device(jax.random.key(3), NUM_DEVICES)
    for width in (None, 1):
        result = train(device_keys, params, np.zeros(NUM_DEVICES, bool), start, data, training, model, width=width)
        jax.tree.map(np.testing.assert_array_equal, (result.params, result.estimates), (params, start))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": np.arange(400) % 4}, r"MLP needs integer labels from 0 to 2, got int\d+ 0 to 3"),
        ({"y": np.zeros((400, 1), int)}, r"y must hold one target for each of 400 samples, got shape \(400, 1\)"),
        ({"indices": np.full((6, 90), 400)}, r"indices must be 0 to 399, got 400 to 400"),
        ({"sizes": np.array([90, 90, 5, 90, 90, 90])}, r"batch_size 8 is more than the 5 samples of device 2"),
    ],
)
def test_errors_name_mismatched_data(change, message):
    data, training, model, params, start = setting(np.float32)
    device_keys = keys.per_device(jax.random.key(3), NUM_DEVICES)
    with pytest.raises(ValueError, match=message):
        updates.train_round(
            device_keys, params, np.ones(6, bool), start, data._replace(**change), training, model, width=1
        )


@pytest.mark.parametrize("width", [None, 2])
def test_model_does_not_depend_on_estimation(width):
    data, training, model, params, start = setting(jnp.float32)
    arguments = (keys.per_device(jax.random.key(3), NUM_DEVICES), params, np.arange(NUM_DEVICES) % 2 == 0, start)
    with_, without = (
        train(*arguments, data, training, model, width=width, estimate_on=estimate_on)
        for estimate_on in ("batch", None)
    )
    jax.tree.map(np.testing.assert_array_equal, without.params, with_.params)
    assert without.loss == with_.loss
    jax.tree.map(np.testing.assert_array_equal, without.estimates, start)


def test_lost_updates_are_not_aggregated(dtype):
    data, training, model, params, start = setting(dtype)
    device_keys = keys.per_device(jax.random.key(3), NUM_DEVICES)
    scheduled, received = np.array([1, 0, 1, 1, 0, 1], bool), np.array([1, 1, 0, 1, 0, 0], bool)
    some = train(device_keys, params, scheduled, start, data, training, model, width=1, received=received)
    arrived = train(device_keys, params, scheduled & received, start, data, training, model, width=1)
    jax.tree.map(np.testing.assert_array_equal, some.params, arrived.params)
    jax.tree.map(np.testing.assert_array_equal, some.estimates, arrived.estimates)
    np.testing.assert_allclose(some.loss, arrived.loss, rtol=1e-6)
    none = train(device_keys, params, scheduled, start, data, training, model, width=1, received=~scheduled)
    jax.tree.map(np.testing.assert_array_equal, none.params, params)
    assert none.loss == np.inf


@pytest.mark.slow
@pytest.mark.parametrize("width", [None, 2])
def test_decided_steps_and_batches_match_devices_trained_alone(width, dtype):
    data, training, model, params, start = setting(dtype, local_steps=4)
    device_keys = keys.per_device(jax.random.key(3), NUM_DEVICES)
    scheduled = np.array([1, 0, 1, 1, 0, 1], bool)
    steps, size = np.array([4, 1, 1, 3, 2, 2]), np.array([8, 8, 3, 5, 1, 1])
    both = train(
        device_keys, params, scheduled, start, data, training, model, width=width, local_steps=steps, batch_size=size
    )
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    flat = np.asarray(flat)
    trained, slopes, rates = {}, {}, {}
    for i in np.flatnonzero(scheduled):
        positions = np.asarray(batches.draw(device_keys[i], data.sizes[i], training))[: steps[i], : size[i]]
        w, velocity = flat, 0
        for batch in positions:
            x, y = data.x[data.indices[i][batch]], data.y[data.indices[i][batch]]
            gradient = np.asarray(jax.flatten_util.ravel_pytree(slope(model, unravel(w), x, y)[1])[0])
            velocity = training.momentum * velocity + gradient
            w = w - training.learning_rate * velocity
        x, y = data.x[data.indices[i][positions[0]]], data.y[data.indices[i][positions[0]]]
        rates[i] = abs(slope(model, unravel(flat), x, y)[0] - slope(model, unravel(w), x, y)[0])
        rates[i] /= np.linalg.norm(w - flat)
        trained[i], slopes[i] = w, (flat - w) / (steps[i] * training.learning_rate)
    weight = {i: data.sizes[i] / sum(data.sizes[j] for j in trained) for i in trained}
    mean_slope = sum(weight[i] * slopes[i] for i in trained)
    expected = sum(weight[i] * trained[i] for i in trained)
    rtol = 2e-4 if dtype == np.float32 else 1e-10
    np.testing.assert_allclose(jax.flatten_util.ravel_pytree(both.params)[0], expected, rtol=rtol, atol=1e-6)
    for i in trained:
        np.testing.assert_allclose(both.estimates.delta[i], np.linalg.norm(slopes[i] - mean_slope), rtol=10 * rtol)
        np.testing.assert_allclose(both.estimates.rho[i], rates[i], rtol=10 * rtol, atol=1e-5)
        np.testing.assert_allclose(both.update_norms[i], np.linalg.norm(trained[i] - flat), rtol=10 * rtol)


@pytest.mark.slow
@pytest.mark.parametrize("width", [None, 2])
def test_deciding_everything_changes_nothing(width, dtype):
    data, training, model, params, start = setting(dtype)
    device_keys = keys.per_device(jax.random.key(3), NUM_DEVICES)
    scheduled = np.array([1, 0, 1, 1, 0, 1], bool)
    usual = train(device_keys, params, scheduled, start, data, training, model, width=width)
    full = {"local_steps": np.full(NUM_DEVICES, 3), "batch_size": np.full(NUM_DEVICES, 8)}
    decided = train(device_keys, params, scheduled, start, data, training, model, width=width, **full)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)  # noqa: E731
    jax.tree.map(close, decided, usual)


def test_one_trace_serves_all_decided_steps():
    data, training, model, params, start = setting(np.float32)
    traces = []

    @jax.jit
    def once(steps, size):
        traces.append(1)
        scheduled = jnp.ones(NUM_DEVICES, bool)
        device_keys = keys.per_device(jax.random.key(3), NUM_DEVICES)
        how = {"width": 1, "local_steps": steps, "batch_size": size}
        return updates.train_round(device_keys, params, scheduled, start, data, training, model, **how).loss

    for number in (1, 2, 3):
        once(jnp.full(NUM_DEVICES, number), jnp.full(NUM_DEVICES, 2 * number))
    assert len(traces) == 1


@pytest.mark.slow
def test_the_proximal_term_pulls_towards_the_global_model(dtype):
    data, training, model, params, start = setting(dtype, local_steps=2)
    training = dataclasses.replace(training, momentum=0.0, proximal=0.3)
    device_keys = keys.per_device(jax.random.key(3), NUM_DEVICES)
    alone = np.arange(NUM_DEVICES) == 2
    got = train(device_keys, params, alone, start, data, training, model, width=1)
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    w = np.asarray(flat)
    for batch in np.asarray(batches.draw(device_keys[2], data.sizes[2], training)):
        x, y = data.x[data.indices[2][batch]], data.y[data.indices[2][batch]]
        gradient = np.asarray(jax.flatten_util.ravel_pytree(slope(model, unravel(w), x, y)[1])[0])
        w = w - training.learning_rate * (gradient + 0.3 * (w - np.asarray(flat)))
    rtol = 1e-5 if dtype == np.float32 else 1e-12
    np.testing.assert_allclose(jax.flatten_util.ravel_pytree(got.params)[0], w, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("width", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_error_feedback_sends_what_was_left_out(width):
    """Over several rounds, with a lost upload: what arrived and what is left add up to all updates."""
    data, training, model, params, start = setting(np.float32)
    compressor = compressors.top_k(0.2)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    residuals = jnp.zeros((NUM_DEVICES, num_parameters))
    scheduled, device = np.arange(NUM_DEVICES) == 1, 1
    arrived, updates_ = np.zeros(num_parameters), np.zeros(num_parameters)
    for index, received in enumerate([True, False, True]):
        device_keys = keys.per_device(jax.random.key(index), NUM_DEVICES)
        plain = train(device_keys, params, scheduled, start, data, training, model, width=width)
        how = updates.Compression(compressor, compressor.parameters, device_keys, residuals)
        got = jax.jit(
            lambda residuals, params, device_keys, how=how, received=received: updates.train_round(
                device_keys,
                params,
                scheduled,
                start,
                data,
                training,
                model,
                width=width,
                received=np.full(NUM_DEVICES, received),
                compression=how._replace(residuals=residuals),
            )
        )(residuals, params, device_keys)
        change = [
            jax.flatten_util.ravel_pytree(one.params)[0] - jax.flatten_util.ravel_pytree(params)[0]
            for one in (plain, got)
        ]
        updates_ += np.asarray(change[0])
        if received:
            assert np.count_nonzero(np.abs(change[1]) > 1e-7) <= math.ceil(0.2 * num_parameters)
            arrived += np.asarray(change[1])
        else:
            np.testing.assert_array_equal(change[1], 0)
        residuals, params = got.residuals, got.params
        np.testing.assert_array_equal(np.asarray(residuals)[~scheduled], 0)
    np.testing.assert_allclose(arrived + np.asarray(residuals[device]), updates_, atol=2e-6)


def test_server_optimizers():
    old, mean = {"w": jnp.array([1.0, -2.0])}, {"w": jnp.array([0.5, -1.0])}
    plain = optax.sgd(1.0)
    new, _ = updates.server_step(old, mean, plain, plain.init(old))
    np.testing.assert_allclose(new["w"], mean["w"])
    heavy = optax.sgd(1.0, momentum=0.9)
    state = heavy.init(old)
    first, state = updates.server_step(old, mean, heavy, state)
    second, _ = updates.server_step(first, first, heavy, state)  # no further update: momentum continues
    np.testing.assert_allclose(second["w"], first["w"] + 0.9 * (mean["w"] - old["w"]))


@pytest.mark.slow
def test_norms_of_all_devices_without_scheduling_them(dtype):
    data, training, model, params, start = setting(dtype)
    device_keys = keys.per_device(jax.random.key(3), NUM_DEVICES)
    asked = np.array([1, 0, 1, 1, 1, 1], bool)
    norms = updates.update_norms(device_keys, params, asked, data, training, model, width=1)
    for i in range(NUM_DEVICES):
        alone = train(device_keys, params, np.arange(NUM_DEVICES) == i, start, data, training, model, width=1)
        flat = [jax.flatten_util.ravel_pytree(tree)[0] for tree in (alone.params, params)]
        np.testing.assert_allclose(norms[i], np.linalg.norm(flat[0] - flat[1]) * asked[i], rtol=1e-4)
