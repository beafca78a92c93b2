import dataclasses
import itertools

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import oracles
import pytest
import worlds

import fcjax
from fcjax import design, latency, radio

mpl.use("Agg")
pytestmark = pytest.mark.usefixtures("quick_compilation")
KEY = jax.random.key(3)
SCHEDULED = np.array([True, True, False, True, True])


def setting(**cell):
    """A cell, settings of training, and estimates, all of which differ between devices."""
    rng = np.random.default_rng(0)
    fields = {
        **worlds.RADIO,
        "power_w": rng.uniform(0.005, 0.02, 5),
        "sample_rate_hz": rng.uniform(1000, 4000, 5),
        "capacitance": rng.uniform(1e-28, 3e-28, 5),
        "download_bits": 1.6e6,
    }
    training = fcjax.Training(num_samples=rng.uniform(100, 900, 5), local_steps=5, batch_size=64)
    estimates = fcjax.Estimates(rng.uniform(1, 2, 5), rng.uniform(8, 16, 5), rng.uniform(1, 3, 5))
    return fcjax.Cell(**{**fields, **cell}), training, estimates


def observe(cell, training):
    """Draws the same places and the same random numbers for any cell."""
    gain = radio.path_gain(radio.place(KEY, cell), cell)
    return fcjax.Observation(gain, latency.compute_time(KEY, training.local_steps * training.batch_size, cell))


def quantities(cell, training, estimates, phi):
    observation = observe(cell, training)
    decision = fcjax.allocate(SCHEDULED, observation, cell)
    energy_j = np.sum(fcjax.round_energy(decision, observation, cell, training))
    parameters = {name: np.asarray(getattr(estimates, name), float).tolist() for name in ("rho", "beta", "delta")} | {
        "num_samples": training.num_samples.tolist(),
        "learning_rate": training.learning_rate,
    }
    n, num_rounds = int(SCHEDULED.sum()), training.budget_s / float(decision.round_s)
    bound = oracles.bound(n, num_rounds, **parameters, local_steps=training.local_steps, phi=phi)["bound"]
    return np.array([decision.round_s, energy_j, bound], float)


@pytest.mark.slow
@pytest.mark.parametrize("access", ["fdma", "ofdma", "tdma"])
def test_sensitivities_match_finite_differences_of_the_draws(access, x64):
    cell, training, estimates = setting(access=access)
    table = design.sensitivities(SCHEDULED, observe(cell, training), cell, training, estimates, 0.07)
    now = quantities(cell, training, estimates, 0.07)
    assert len(table) == 3 * table.parameter.nunique()
    assert {"cell.radius_m", "cell.broadcast_w", "training.local_steps", "training.batch_size"} < set(table.parameter)
    for parameter, rows in table.groupby("parameter"):
        part, _, field = parameter.partition(".")

        def changed(exponent, part=part, field=field):
            parts = {"cell": cell, "training": training, "estimates": estimates}
            if not field:
                return np.log(quantities(**parts, phi=0.07 * np.exp(exponent)))
            value = np.asarray(getattr(parts[part], field)) * np.exp(exponent)
            parts[part] = dataclasses.replace(parts[part], **{field: value if value.ndim else float(value)})
            return np.log(quantities(**parts, phi=0.07))

        expected = (changed(1e-4) - changed(-1e-4)) / 2e-4
        np.testing.assert_allclose(rows.percent_per_percent, expected, rtol=1e-6, atol=1e-8, err_msg=parameter)
        np.testing.assert_allclose(rows.quantity_value, now, rtol=1e-12)
        np.testing.assert_allclose(rows.per_unit * rows.value, rows.percent_per_percent * now, rtol=1e-12)


@pytest.mark.slow
def test_sensitivities_of_a_common_round():
    """In single precision, and with an unscheduled device that never finishes."""
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(1), 5), np.float32)
    observation = dataclasses.replace(observation, compute_s=np.where(SCHEDULED, observation.compute_s, np.inf))
    estimates = fcjax.Estimates(np.full(5, 1.5), np.full(5, 12.0), np.full(5, 2.0))
    table = design.sensitivities(SCHEDULED, observation, cell, fcjax.Training(), estimates)
    assert np.isfinite(table.select_dtypes(float)).all(axis=None)
    assert not {"cell.download_bits", "cell.broadcast_w", "training.proximal"} & set(table.parameter)
    by_name = table.pivot(index="parameter", columns="quantity", values="percent_per_percent")
    # Only P h^2/N0 matters for the time. More bandwidth, power or speed never hurts it.
    np.testing.assert_allclose(by_name.round_s["cell.power_w"], -by_name.round_s["cell.noise_psd_w_hz"], rtol=1e-4)
    assert (by_name.round_s[["cell.bandwidth_hz", "cell.power_w", "cell.sample_rate_hz"]] < 0).all()
    assert by_name.bound["phi"] < 0, "the bound falls as phi grows"
    figure = fcjax.plots.sensitivities(table)
    assert [axes.get_title().split(" = ")[0] for axes in figure.axes] == ["round_s", "energy_j", "bound"]
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert "cell.cpu_hz" in names
    assert len(figure.axes[0].patches) == len(names)
    mpl.pyplot.close(figure)
    with pytest.raises(ValueError, match=r"table must be one of fcjax.design.sensitivities, .* no column 'parameter'"):
        fcjax.plots.sensitivities(table.drop(columns="parameter"))
    for mask in (np.zeros(5, bool), np.ones(5, bool)):
        with pytest.raises(ValueError, match="scheduled must have one or more devices, all of which can finish"):
            design.sensitivities(mask, observation, cell, fcjax.Training(), estimates)


def random_task(rng, num_devices):
    """A random round in which uploads or computation may dominate, and a random task."""
    observation, cell = worlds.build(worlds.draw(rng, num_devices, radius_m=(300, 5000)), float)
    observation = dataclasses.replace(observation, compute_s=observation.compute_s * 10 ** rng.uniform(-2, 0))
    training = fcjax.Training(
        learning_rate=float(rng.uniform(0.002, 0.05)),
        budget_s=float(10 ** rng.uniform(0.5, 2.5)),
        num_samples=rng.uniform(100, 900, num_devices),
        local_steps=4,
        batch_size=20,
    )
    spread = lambda low, high: rng.uniform(low, high, num_devices)  # noqa: E731
    estimates = fcjax.Estimates(spread(0.5, 3), spread(2, 20), spread(0.1, 4))
    return observation, cell, training, estimates, float(10 ** rng.uniform(-2, 0.5))


STEPS, SIZES = np.arange(1, 13), np.arange(1, 41)


@jax.jit
def time_of_subsets(subsets, products, observation, cell):
    """The round time of each subset, for each number of samples per round."""

    def one(product, subset):
        slower = dataclasses.replace(observation, compute_s=observation.compute_s * product / 80)
        return fcjax.allocate(subset, slower, cell).round_s

    return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(products, subsets)


def grid(observation, cell, training, estimates, phi, noise):
    """The least bound of each number of devices, local steps and batch size, over all subsets of devices."""
    num_devices = len(observation.gain)
    subsets = np.array(list(itertools.product([False, True], repeat=num_devices)))[1:]
    products = np.unique(np.outer(STEPS, SIZES))
    times_s = np.asarray(time_of_subsets(subsets, products.astype(float), observation, cell))
    bounds = np.empty((num_devices, len(STEPS), len(SIZES)))
    known = {"num_samples": training.num_samples, "learning_rate": training.learning_rate, "phi": phi}
    known |= {"rho": estimates.rho, "beta": estimates.beta}
    for n, tau, size in itertools.product(range(1, num_devices + 1), STEPS, SIZES):
        best_s = times_s[np.searchsorted(products, tau * size), subsets.sum(1) == n].min()
        delta = np.sqrt(estimates.delta**2 + noise**2 / size)
        bound = oracles.bound(n, training.budget_s / best_s, **known, delta=delta, local_steps=int(tau))["bound"]
        bounds[n - 1, tau - 1, size - 1] = bound
    return bounds


def compare_with_grid(seeds):
    limits = {"max_local_steps": len(STEPS), "max_batch_size": len(SIZES)}
    found = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        task, noise = random_task(rng, 3), float(10 ** rng.uniform(-0.5, 1.5))
        bounds = grid(*task, noise)
        best = design.best_training(*task, gradient_noise=noise, **limits)
        place = tuple(int(x) - 1 for x in (best.num_scheduled, best.local_steps, best.batch_size))
        np.testing.assert_allclose(best.bound, bounds[place], rtol=1e-9)
        np.testing.assert_allclose(best.bound, bounds.min(), rtol=1e-9, err_msg=f"seed {seed}")
        assert best.scheduled.sum() == best.num_scheduled
        found.append(place)
    return np.array(found)


@pytest.mark.slow
def test_best_training_matches_exhaustive_search(x64):
    compare_with_grid(range(2))


@pytest.mark.slow
def test_best_training_matches_exhaustive_search_in_many_worlds(x64):
    found = compare_with_grid(range(2, 102))
    assert all(len(np.unique(column)) > 1 for column in found.T), "the designs must differ"
    inside = (found[:, 1] > 0) & (found[:, 1] < len(STEPS) - 1) & (found[:, 2] > 0) & (found[:, 2] < len(SIZES) - 1)
    assert inside.sum() >= 10, "some designs must lie inside the grid"


@pytest.mark.slow
def test_best_local_steps_match_exhaustive_search(x64):
    for seed in range(20):
        task = random_task(np.random.default_rng(seed), 3)
        best = design.best_training(*task, max_local_steps=len(STEPS))
        assert best.batch_size == 20
        np.testing.assert_allclose(best.bound, grid(*task, 0.0)[:, :, 19].min(), rtol=1e-9, err_msg=f"seed {seed}")


@pytest.mark.slow
@pytest.mark.parametrize("tuned", ["learning rate", "model size"])
def test_best_learning_rate_and_model_size_match_a_fine_grid(tuned, x64):
    loss = lambda bits: (2e4 / bits) ** 0.5  # noqa: E731
    steps, numbers = jnp.arange(1.0, 7.0), jnp.arange(1, 4)

    @jax.jit
    def costs(observation, cell, training, estimates, phi, omega, beta):
        """The bounds of all local steps, learning rates or sizes, and numbers of devices."""

        def one(local_steps, relative):
            slower = dataclasses.replace(observation, compute_s=observation.compute_s * local_steps / 4)
            factor = relative if tuned == "model size" else 1
            eta = relative / beta if tuned == "learning rate" else training.learning_rate
            round_s, _ = fcjax.fastest_sets(slower, dataclasses.replace(cell, upload_bits=cell.upload_bits * factor))
            bound = fcjax.bounds.convergence_bound(
                numbers,
                training.budget_s / round_s,
                **vars(estimates),
                num_samples=training.num_samples,
                learning_rate=eta,
                local_steps=local_steps,
                phi=omega * (1 - beta * eta / 2),
            )
            return bound + (loss(cell.upload_bits * factor) if tuned == "model size" else 0)

        low, high = (1e-3, 1e3) if tuned == "model size" else (1e-4, 1)
        relative = jnp.geomspace(low, high, 2001)
        return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(steps, relative)

    for seed in range(10):
        observation, cell, training, estimates, phi = random_task(np.random.default_rng(seed), 3)
        beta = np.average(estimates.beta, weights=training.num_samples)
        omega = phi / (1 - beta * training.learning_rate / 2)
        least = np.min(costs(observation, cell, training, estimates, phi, omega, beta))
        settings = {"tune_learning_rate": True} if tuned == "learning rate" else {"model_loss": loss}
        best = design.best_training(observation, cell, training, estimates, phi, **settings, max_local_steps=6)
        np.testing.assert_allclose(best.bound, least, rtol=2e-5, err_msg=f"seed {seed}")
        assert best.bound <= least * (1 + 2e-6)
        np.testing.assert_allclose(best.phi, omega * (1 - beta * best.learning_rate / 2))
        assert best.learning_rate <= 1 / beta


@pytest.mark.slow
def test_best_training_at_the_edges(dtype):
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(2), 3), dtype)
    estimates = fcjax.Estimates(np.full(3, 1.5), np.full(3, 12.0), np.full(3, 2.0))
    best = lambda o, e: design.best_training(o, cell, fcjax.Training(), e, max_local_steps=30)  # noqa: E731
    # Without divergence, nothing limits the local steps.
    assert best(observation, dataclasses.replace(estimates, delta=np.zeros(3))).local_steps == 30
    far = dataclasses.replace(observation, gain=np.zeros(3, dtype))
    assert best(far, estimates).bound == np.inf
    alone = dataclasses.replace(observation, available=np.arange(3) == 1)
    np.testing.assert_array_equal(best(alone, estimates).scheduled, alone.available)
    together = jax.vmap(best, (0, None))(jax.tree.map(lambda x, y: np.stack([x, y]), observation, far), estimates)
    one = best(observation, estimates)
    assert together.local_steps[0] == one.local_steps
    np.testing.assert_allclose(together.bound, [one.bound, np.inf], rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phi": 0.0}, "phi must be positive"),
        ({"gradient_noise": 0.0}, "gradient_noise must be positive and finite, got 0"),
        ({"max_local_steps": 0}, "max_local_steps must be a whole number of 1 or more, got 0"),
        ({"max_batch_size": 2.5}, "max_batch_size must be a whole number of 1 or more, got 2.5"),
        ({"training": fcjax.Training(batch_size=0)}, "training.batch_size must be positive"),
        ({"training": fcjax.Training(local_steps=0)}, "training.local_steps must be positive"),
        ({"training": fcjax.Training(budget_s=-1.0)}, "training.budget_s must be positive"),
        (
            {"tune_learning_rate": True, "training": fcjax.Training(learning_rate=0.5)},
            "1 - beta training.learning_rate/2",
        ),
        ({"model_loss": lambda bits: -bits}, r"model_loss\(cell.upload_bits\) must be positive"),
        ({"constant": "printed"}, "constant must be one of 'published', 'valid'"),
    ],
)
def test_best_training_names_bad_input(change, message):
    observation, cell = worlds.build(worlds.draw(np.random.default_rng(2), 3), np.float32)
    estimates = fcjax.Estimates(np.full(3, 1.5), np.full(3, 12.0), np.full(3, 2.0))
    with pytest.raises(ValueError, match=message):
        design.best_training(observation, cell, **{"training": fcjax.Training(), "estimates": estimates, **change})
