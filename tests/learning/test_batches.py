import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fcjax import batches
from fcjax.types import Training


@pytest.mark.parametrize("size", [8, 9, 60, 97, 3000])
def test_no_sample_repeats_in_a_batch(size):
    training = Training(local_steps=5, batch_size=8)
    draw = jax.jit(lambda key: batches.draw(key, jnp.asarray(size), training))
    for seed in range(20):
        drawn = np.asarray(draw(jax.random.key(seed)))
        assert drawn.shape == (5, 8)
        assert drawn.min() >= 0
        assert drawn.max() < size
        assert all(len(set(batch)) == 8 for batch in drawn)
        if size >= 40:
            assert len(set(drawn.ravel())) == 40


def test_samples_and_pairs_are_equally_likely():
    """Over many keys and orders, all samples are equally likely, and so are all pairs."""
    size, batch_size, draws = 12, 4, 6000
    training = Training(local_steps=1, batch_size=batch_size)
    rng = np.random.default_rng(0)
    draw = jax.vmap(lambda key: batches.draw(key, jnp.asarray(size), training)[0])
    positions = np.asarray(draw(jax.random.split(jax.random.key(0), draws)))
    chosen = np.zeros((draws, size))
    for row, batch in zip(chosen, positions, strict=True):
        row[rng.permutation(size)[batch]] = 1
    np.testing.assert_allclose(chosen.mean(0), batch_size / size, atol=0.03)
    together = (chosen.T @ chosen / draws)[~np.eye(size, dtype=bool)]
    np.testing.assert_allclose(together, batch_size * (batch_size - 1) / (size * (size - 1)), atol=0.025)


def test_batches_do_not_depend_on_the_default_precision():
    def draw():
        return np.asarray(batches.draw(jax.random.key(1), 97, Training(batch_size=8)))

    with jax.enable_x64(True):
        double = draw()
    np.testing.assert_array_equal(draw(), double)


@pytest.mark.parametrize(
    ("training", "sizes", "message"),
    [
        (Training(batch_size=128), [200, 100], r"batch_size 128 is more than the 100 samples of device 1"),
        (Training(batch_size=0), [200], r"must be 1 or more, got 5 and 0"),
        (Training(local_steps=0), [200], r"must be 1 or more, got 0 and 128"),
        (Training(batch_size=10_000), [100_000], r"below 2\^31.*got 100000"),
    ],
)
def test_errors_name_impossible_batches(training, sizes, message):
    with pytest.raises(ValueError, match=message):
        batches.check_sizes(training, np.array(sizes))


def test_errors_name_non_finite_inputs():
    x = np.zeros((5, 2, 2), np.float32)
    batches.check_finite("x", x)
    batches.check_finite("x", np.zeros((5, 2), np.uint8))
    x = x.copy()
    x[3, 1, 0] = np.nan
    with pytest.raises(ValueError, match=r"x must hold finite numbers, but sample 3 has NaN or infinity"):
        batches.check_finite("x", x)
