import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from derivatives import check_derivatives

import fcjax
from fcjax import bounds


def draw(rng, num_devices):
    return {
        "rho": rng.uniform(0.5, 3, num_devices),
        "beta": rng.uniform(1, 30, num_devices),
        "delta": rng.uniform(0.1, 5, num_devices),
        "num_samples": rng.integers(100, 5000, num_devices).astype(float),
        "learning_rate": rng.uniform(1e-3, 0.05),
        "local_steps": float(rng.integers(1, 20)),
        "phi": 10 ** rng.uniform(-2, 0.7),
    }


def without(parameters, *names):
    return {name: value for name, value in parameters.items() if name not in names}


def cast(parameters, dtype):
    return {name: jnp.asarray(value, dtype) for name, value in parameters.items()}


def test_bounds_match_the_papers_sums(dtype):
    rng = np.random.default_rng(0)
    # Raising 1 + eta beta to the power tau multiplies its rounding error by tau.
    rtol = 2e-5 if dtype == np.float32 else 1e-12
    for _ in range(50):
        num_devices = int(rng.choice([2, 7, 30]))
        n, k = int(rng.integers(1, num_devices + 1)), int(rng.integers(1, 300))
        drawn = draw(rng, num_devices)
        parameters, expected = cast(drawn, dtype), oracles.bound(n, k, **drawn)
        for constant in ("published", "valid", "tight"):
            a = bounds.sampling_constant(**without(parameters, "phi"), constant=constant)
            np.testing.assert_allclose(a, expected[constant], rtol=rtol)
        penalty = fcjax.bounds.scheduling_penalty(n, **without(parameters, "rho", "phi"))
        np.testing.assert_allclose(penalty, expected["penalty"], rtol=rtol)
        np.testing.assert_allclose(bounds.convergence_bound(n, k, **parameters), expected["bound"], rtol=rtol)
        weight = drawn["num_samples"] / drawn["num_samples"].sum()
        mean = {"beta": weight @ drawn["beta"]} | {x: drawn[x] for x in ("learning_rate", "local_steps")}
        np.testing.assert_allclose(
            bounds.local_drift(delta=parameters["delta"], **cast(mean, dtype)), expected["g"], rtol=rtol
        )
        h = bounds.mean_drift(delta=jnp.asarray(weight @ drawn["delta"], dtype), **cast(mean, dtype))
        np.testing.assert_allclose(h, expected["h"] if drawn["local_steps"] > 1 else 0, rtol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize("constant", ["published", "valid"])
def test_gradients_match_finite_differences(constant, x64):
    parameters = cast(draw(np.random.default_rng(1), 6), np.float64)

    def bound(relative):
        n, k, changed = 3 * relative["n"], 80 * relative["k"], jax.tree.map(jnp.multiply, parameters, relative["rest"])
        return bounds.convergence_bound(n, k, **changed, constant=constant)

    check_derivatives(bound, {"n": 1.0, "k": 1.0, "rest": jax.tree.map(jnp.ones_like, parameters)}, rtol=1e-6)


def test_drift_is_accurate_for_small_steps(dtype):
    """At eta beta = 1e-6, the terms of h agree to all digits of float32."""
    learning_rate, beta, tau = np.asarray(1e-7, dtype), np.asarray(10, dtype), np.asarray(5, dtype)
    x = oracles.mpmath.mpf(float(learning_rate)) * float(beta)
    exact = float(((1 + x) ** 5 - 1 - 5 * x) / float(beta))
    h = bounds.mean_drift(delta=np.asarray(1, dtype), beta=beta, learning_rate=learning_rate, local_steps=tau)
    np.testing.assert_allclose(h, exact, rtol=8 * float(np.finfo(dtype).eps))


def test_beta_zero_gives_the_limit(x64):
    def h(beta):
        return bounds.mean_drift(delta=2.0, beta=beta, learning_rate=0.01, local_steps=5.0)

    assert h(0.0) == 0
    np.testing.assert_allclose(jax.grad(h)(0.0), 2.0 * 0.01**2 * 5 * 4 / 2)
    np.testing.assert_allclose(jax.grad(h)(1e-9), jax.grad(h)(0.0), rtol=1e-6)
    assert bounds.local_drift(delta=2.0, beta=0.0, learning_rate=0.01, local_steps=5.0) == 2.0 * 0.01 * 5


FIXED = {
    "rho": 1.5,
    "beta": 12.0,
    "delta": np.linspace(1, 3, 20),
    "num_samples": 3000,
    "learning_rate": 0.01,
    "local_steps": 5,
    "phi": 0.05,
}


def test_scalars_apply_to_all_devices(dtype):
    full = {name: np.full(20, FIXED[name], float) for name in ("rho", "beta", "num_samples")}
    np.testing.assert_allclose(
        bounds.convergence_bound(5, 90, **FIXED), bounds.convergence_bound(5, 90, **{**FIXED, **full}), rtol=1e-6
    )


def test_edge_cases(dtype):
    assert bounds.scheduling_penalty(20, **without(FIXED, "rho", "phi")) == 0
    assert bounds.scheduling_penalty(0, **without(FIXED, "rho", "phi")) == np.inf
    assert bounds.convergence_bound(5, 0, **FIXED) == np.inf
    assert bounds.convergence_bound(0, 10, **FIXED) == np.inf
    alone = {**FIXED, "delta": np.array([2.0])}
    for constant in ("published", "valid", "tight"):
        assert bounds.scheduling_penalty(1, **without(alone, "phi"), constant=constant) == 0
    assert np.isfinite(bounds.convergence_bound(1, 10, **alone))
    for n, k in ((5.0, 0.0), (0.0, 5.0), (0.0, 0.0)):
        gradient = jax.grad(lambda p, n=n, k=k: bounds.convergence_bound(n, k, **{**FIXED, **p}))(
            {"phi": 0.05, "learning_rate": 0.01, "local_steps": 5.0, "rho": 1.5, "beta": 12.0}
        )
        assert all(leaf == 0 for leaf in jax.tree.leaves(gradient))


def test_objective_rounds_down_the_number_of_rounds(dtype):
    objective = jax.vmap(lambda t: bounds.scheduling_objective(5, t, budget_s=60.0, **FIXED))
    round_s = np.array([0.7, 0.70588, 59.0, 60.0, 60.1, np.inf, 0.0], dtype)
    expected = [bounds.convergence_bound(5, k, **FIXED) for k in (85, 85, 1, 1, 0, 0, 0)]
    np.testing.assert_allclose(objective(round_s), expected, rtol=1e-6)


def test_more_devices_or_rounds_never_hurt():
    n = np.arange(1, 21)
    assert np.all(np.diff(bounds.scheduling_penalty(n, **without(FIXED, "rho", "phi"))) < 0)
    assert np.all(np.diff(bounds.convergence_bound(n, 50, **FIXED)) < 0)
    assert np.all(np.diff(bounds.convergence_bound(5, np.arange(1, 100), **FIXED)) < 0)


def test_valid_constant_bounds_the_gap_of_a_quadratic(x64):
    """Checks Theorem 2 on F_i(w) = beta/2 |w - c_i|^2, for which the expected gap has a closed form."""
    rng = np.random.default_rng(3)
    beta, eta, tau, dimensions = 2.0, 0.1, 5, 3
    for num_devices in (2, 5, 9):
        centre = rng.normal(size=(num_devices, dimensions))
        # After tau steps from 0: w_i = (1 - (1 - eta beta)^tau) c_i, and ||grad F_i - grad F|| = beta |c_i - mean c|.
        local = (1 - (1 - eta * beta) ** tau) * centre
        delta = beta * np.linalg.norm(centre - centre.mean(0), axis=1)
        variance = np.mean(np.sum((local - local.mean(0)) ** 2, axis=1))
        for n in range(1, num_devices + 1):
            gap = beta / 2 * variance * (num_devices - n) / (n * max(num_devices - 1, 1))
            penalty = bounds.scheduling_penalty(
                n, beta=beta, delta=delta, num_samples=10, learning_rate=eta, local_steps=tau, constant="valid"
            )
            assert penalty >= gap


def descend(hessian, centre, start, eta, tau):
    """Takes tau steps on |H^(1/2) (w - c)|^2/2."""
    iterates = [start]
    for _ in range(tau):
        iterates.append(iterates[-1] - eta * hessian @ (iterates[-1] - centre))
    return np.array(iterates)


@pytest.mark.parametrize("kind", ["random", "aligned", "equal sizes"])
def test_tight_constant_bounds_the_gap_of_all_subsets(kind, x64, quick_compilation):
    """Averages F(w^Pi) - F(w) over all subsets, for quadratics with known beta, and delta_i and rho at the iterates."""
    rng = np.random.default_rng(7)
    largest = 0.0
    for _ in range(30):
        num_devices, dimensions, tau = int(rng.integers(2, 7)), int(rng.integers(1, 4)), int(rng.integers(1, 6))
        sizes = rng.integers(1, 6, num_devices).astype(float)
        roots = rng.normal(size=(num_devices, dimensions, dimensions))
        centre = rng.normal(size=(num_devices, dimensions))
        if kind == "equal sizes":
            sizes[:] = 4.0
        if kind == "aligned":  # equal Hessians, and the small devices are on the way: the bias is large
            roots[:], centre = np.eye(dimensions), centre / 10 + sizes[:, None]
        hessian = roots @ roots.transpose(0, 2, 1)
        beta = np.linalg.eigvalsh(hessian).max()
        eta, weight, start = 10 ** rng.uniform(-3, 0) / beta, sizes / sizes.sum(), np.zeros(dimensions)

        def gradients(w, hessian=hessian, centre=centre):
            return np.einsum("ijk,ik->ij", hessian, w - centre)

        def loss(w, hessian=hessian, centre=centre, weight=weight):
            return weight @ np.einsum("ij,ijk,ik->i", w - centre, hessian, w - centre) / 2

        mean_hessian = np.tensordot(weight, hessian, 1)
        v = descend(mean_hessian, np.linalg.solve(mean_hessian, -weight @ gradients(start)), start, eta, tau)
        delta = np.max([np.linalg.norm(gradients(w) - weight @ gradients(w), axis=1) for w in v[:-1]], axis=0)
        local = np.array([descend(*of_device, start, eta, tau)[-1] for of_device in zip(hessian, centre, strict=True)])
        everybody = weight @ local
        known = {"beta": beta, "delta": delta, "num_samples": sizes, "learning_rate": eta, "local_steps": tau}
        rho = np.linalg.norm(weight @ gradients(everybody))
        for n in range(1, num_devices):
            subsets = [list(subset) for subset in itertools.combinations(range(num_devices), n)]
            gap = np.mean([loss(np.average(local[s], 0, sizes[s])) for s in subsets]) - loss(everybody)
            penalty = float(bounds.scheduling_penalty(n, **known, constant="tight", rho=rho))
            assert gap <= penalty * (1 + 1e-9)
            largest = max(largest, gap / penalty)
    assert largest > 0.3  # the bound is not vacuous


def test_tight_constant_is_attained(x64):
    """For equal D_i, tau = 1 and F_i(w) = |w - c_i|^2/2, the expected gap is the bound, M/2 times the published one."""
    centre = np.random.default_rng(8).normal(size=(5, 3))
    eta, delta = 0.3, np.linalg.norm(centre - centre.mean(0), axis=1)
    known = {"beta": 1.0, "delta": delta, "num_samples": 10, "learning_rate": eta, "local_steps": 1}
    for n in range(1, 5):
        subsets = [list(subset) for subset in itertools.combinations(range(5), n)]
        # F(w^Pi) - F(w) is |w^Pi - w|^2/2 and a term of mean 0.
        gap = np.mean([np.sum((eta * (centre[s].mean(0) - centre.mean(0))) ** 2) / 2 for s in subsets])
        penalty = bounds.scheduling_penalty(n, **known, constant="tight", rho=1.0)
        np.testing.assert_allclose(penalty, gap, rtol=1e-12)
        np.testing.assert_allclose(penalty, 5 / 2 * bounds.scheduling_penalty(n, **known), rtol=1e-12)


@pytest.mark.slow
def test_gradients_of_the_tight_constant(x64, quick_compilation):
    parameters = cast(without(draw(np.random.default_rng(1), 4), "phi"), np.float64)

    def constant(relative):
        return bounds.sampling_constant(**jax.tree.map(jnp.multiply, parameters, relative), constant="tight")

    check_derivatives(constant, jax.tree.map(jnp.ones_like, parameters), rtol=1e-6)
    gradient = jax.jit(jax.grad(constant))
    for zero in ({"num_samples": 100 / parameters["num_samples"]}, {"delta": jnp.zeros(4)}):  # where a root is 0
        at = jax.tree.map(jnp.ones_like, parameters) | zero
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient(at)))


def test_tight_constant_needs_rho():
    with pytest.raises(ValueError, match="constant='tight' needs rho"):
        bounds.scheduling_penalty(5, **without(FIXED, "rho", "phi"), constant="tight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phi": 0.0}, r"phi must be positive.*got 0"),
        ({"learning_rate": -0.1}, r"learning_rate must be positive.*got -0.1"),
        ({"beta": np.array([1.0, 2.0])}, r"beta must have shape \(\) or \(20,\), got \(2,\)"),
        ({"rho": -1.0}, r"rho must be zero or more.*got -1"),
        ({"delta": 2.0}, r"delta must have shape \(M,\).*\(\)"),
        ({"num_samples": np.r_[0.0, np.ones(19)]}, r"num_samples\[0\] must be positive.*got 0"),
        ({"local_steps": 0.5}, r"local_steps must be 1 or more.*got 0.5"),
        ({"local_steps": np.ones(3)}, r"local_steps must have shape \(\), got \(3,\)"),
        ({"learning_rate": np.full(20, 0.1)}, r"learning_rate must have shape \(\), got \(20,\)"),
        ({"rho": None}, r"rho must be a real number or an array of them, got None"),
        ({"constant": "printed"}, r"constant must be one of 'published', 'valid', 'tight', got 'printed'"),
    ],
)
def test_errors_name_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        bounds.convergence_bound(5, 10, **{**FIXED, **change})


def test_errors_name_bad_counts():
    with pytest.raises(ValueError, match=r"num_scheduled must be between 0 and M = 20, got 21"):
        bounds.convergence_bound(21, 10, **FIXED)
    with pytest.raises(ValueError, match=r"num_scheduled and num_rounds.*got \(3,\) and \(2,\)"):
        bounds.convergence_bound(np.arange(1, 4), np.arange(2), **FIXED)
    with pytest.raises(ValueError, match=r"num_rounds must be zero or more.*got -1"):
        bounds.convergence_bound(5, -1, **FIXED)
    with pytest.raises(ValueError, match=r"budget_s must be positive.*got 0"):
        bounds.scheduling_objective(5, 1.0, budget_s=0.0, **FIXED)


def test_overflow_is_infinite_and_harmless_if_unused(dtype):
    """If all devices are scheduled, the penalty is 0, even if the constant overflows."""
    steep = cast({**FIXED, "beta": 60.0, "learning_rate": 1.0, "local_steps": 400.0}, dtype)
    constants = without(steep, "rho", "phi")
    assert bounds.sampling_constant(**constants) == np.inf
    assert bounds.scheduling_penalty(19, **constants) == np.inf
    assert bounds.scheduling_penalty(20, **constants) == 0
    assert np.isfinite(bounds.convergence_bound(20, 9, **{**steep, "rho": 0.0}))
    large = {**constants, "beta": 0.0, "delta": np.full(20, 1e29), "local_steps": 5.0}
    assert bounds.sampling_constant(**large) == 0


def test_errors_name_mismatched_shapes():
    with pytest.raises(ValueError, match=r"delta and beta must have shapes that broadcast, got \(20,\) and \(3,\)"):
        bounds.local_drift(delta=np.ones(20), beta=np.ones(3), learning_rate=0.1, local_steps=5)


@pytest.mark.parametrize("beta", [0.0, 3e-20, 1e-9, 1e-5])
def test_nearly_linear_loss(beta, dtype):
    """To first order, h = eta^2 beta delta tau (tau - 1)/2. Its derivative must agree as well."""
    drift = lambda beta: bounds.mean_drift(delta=2.0, beta=beta, learning_rate=0.1, local_steps=7.0)  # noqa: E731
    slope = 0.1**2 * 2 * 7 * 6 / 2
    value, derivative = jax.value_and_grad(drift)(jnp.asarray(beta, dtype))
    np.testing.assert_allclose(value, slope * beta, rtol=1e-5)
    np.testing.assert_allclose(derivative, slope, rtol=1e-5)


def test_integers_beyond_32_bits_are_numbers():
    settings = {"beta": 1.0, "delta": jnp.ones(2), "num_samples": 1.0, "local_steps": 5, "rho": 1.0, "phi": 0.05}
    as_float = bounds.convergence_bound(1, 9, learning_rate=2.0**31, **settings)
    assert bounds.convergence_bound(1, 9, learning_rate=2**31, **settings) == as_float
