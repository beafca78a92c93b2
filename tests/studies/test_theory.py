"""Tests the theory bench against plain loops and enumeration."""

import itertools
import types

import convex
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import theory

SIZES = np.array([10, 40, 20, 30, 20])


@pytest.fixture
def mnist(monkeypatch):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (500, 28, 28), np.uint8), rng.integers(0, 10, 500)
    monkeypatch.setattr(convex, "_mnist", lambda: types.SimpleNamespace(train_x=images, train_y=labels))


def svm_gradient(w, x, y):
    total = 0.1 * w
    for row, sign in zip(x, y, strict=True):
        total = total - max(0.0, 1 - sign * (row @ w)) * sign * row / len(x)
    return total


def test_round_matches_a_plain_loop(x64, quick_compilation):
    task, eta, tau = convex.svm(3, 0.7, SIZES), 0.02, 3
    data = [(np.asarray(x[:size]), np.asarray(y[:size])) for x, y, size in zip(task.x, task.y, SIZES, strict=True)]
    start = np.linspace(-0.3, 0.3, 20)
    local = []
    for x, y in data:
        w = start
        for _ in range(tau):
            w = w - eta * svm_gradient(w, x, y)
        local.append(w)
    v, delta, rho = start, np.zeros(5), 0.0
    for _ in range(tau):
        gradients = np.array([svm_gradient(v, x, y) for x, y in data])
        mean = np.average(gradients, 0, SIZES)
        delta = np.maximum(delta, np.linalg.norm(gradients - mean, axis=1))
        rho = max(rho, np.linalg.norm(gradients, axis=1).max())
        v = v - eta * mean
    everybody = np.average(local, 0, SIZES)
    rho = max(rho, max(np.linalg.norm(svm_gradient(everybody, x, y)) for x, y in data))
    played = jax.jit(convex.play_round)(task, jnp.asarray(start), eta, tau)
    for found, expected in zip(played, (np.array(local), everybody, v, delta, rho), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-14)


def test_mean_gap_is_that_of_all_subsets(x64, quick_compilation):
    """The control variate leaves the mean unchanged, also for unequal sizes, and random orders find the same mean."""
    task, numbers = convex.svm(4, 1.0, SIZES), (1, 3)
    ranks = convex.draw_ranks(jax.random.key(0), 3000, 5)
    gaps, played = convex.measure(task, ranks, np.array(numbers), 0.01, 4)
    loss, local = jax.jit(task.loss), np.asarray(played.local)
    adjusted = jax.jit(jax.vmap(convex.gap, (None, None, 0)))
    for n, found in zip(numbers, gaps, strict=True):
        subsets = np.array([[i in subset for i in range(5)] for subset in itertools.combinations(range(5), n)])
        models = [np.average(local[subset], 0, SIZES[subset]) for subset in subsets]
        expected = np.mean([loss(model) for model in models]) - loss(played.everybody)
        np.testing.assert_allclose(adjusted(task, played, subsets).mean(), expected, rtol=1e-9)
        assert abs(found.mean() - expected) < 4 * found.std() / np.sqrt(found.size)


def test_subsets_are_uniform(x64):
    chosen = np.asarray(convex.draw_ranks(jax.random.key(1), 10_000, 5) < 2)
    _, counts = np.unique(chosen, axis=0, return_counts=True)
    assert chosen.sum(1).tolist() == [2] * 10_000
    assert len(counts) == 10
    assert np.all(np.abs(counts - 1000) < 4 * 30)


@pytest.mark.parametrize("name", convex.TASKS)
def test_minimiser_and_smoothness(name, mnist, x64, quick_compilation):
    task = convex.TASKS[name](1, 0.5, SIZES)
    best, gradients = convex.minimiser(task), jax.jit(task.gradients)
    assert np.linalg.norm(task.weight @ gradients(best)) < 1e-12
    for step in np.random.default_rng(2).normal(size=(5, best.size)):
        change = np.linalg.norm(gradients(best + step) - gradients(best), axis=1)
        assert np.all(change <= task.beta * np.linalg.norm(step) * (1 + 1e-12))


def test_runs_follow_the_sequences(x64, quick_compilation):
    """In one round with all devices, the run is w_1, and the excess losses are those of the sequences."""
    task = convex.regression(0, 1.0, SIZES)
    best = convex.minimiser(task)
    rounds, after = theory.third(
        task, best, jax.random.split(jax.random.key(0), 3), n=5, tau=2, eta_beta=0.1, num_rounds=2
    )
    start, loss, play_round = jnp.zeros(20), jax.jit(task.loss), jax.jit(convex.play_round)
    for _, row in rounds.iterrows():
        played = play_round(task, start, 0.1 / float(task.beta), 2)
        start = played.everybody
        np.testing.assert_allclose([row.excess, row.everybody], loss(start) - loss(best), rtol=1e-9)
        np.testing.assert_allclose(row.central, loss(played.central) - loss(best), rtol=1e-9)
        assert abs(row.measured) < 1e-12
    np.testing.assert_allclose(after.measured, rounds.excess, rtol=1e-9)  # the loss falls in each round
    assert np.all(after.measured <= after.corrected)


def test_labels_are_dealt_sorted():
    labels = np.random.default_rng(0).integers(0, 10, 120)
    parts = convex.deal(labels, SIZES, 1.0, np.random.default_rng(1))
    assert [len(part) for part in parts] == SIZES.tolist()
    assert sorted(np.concatenate(parts)) == list(range(120))
    assert np.all(np.diff(labels[np.concatenate(parts)]) >= 0)


@pytest.mark.slow
def test_command_writes_tables_and_figures(tmp_path, capsys):
    theory.main(["--quick", "--task", "means", "--out", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {
        *(f"{name}.csv" for name in ("theorem2", "rounds", "theorem3", "unequal", "units")),
        *("ratios.png", "unequal.png", "summary.txt"),
    }
    rows = pd.read_csv(tmp_path / "theorem2.csv")
    single = rows[rows.tau == 1]
    np.testing.assert_allclose(single.measured / single.tight, 1, rtol=0.2)  # equality holds for means
    assert "published" in capsys.readouterr().out
