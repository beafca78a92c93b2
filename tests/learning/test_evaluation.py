import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fcjax import models
from fcjax.learning import evaluation

MODEL = models.mlp((4,), 3, hidden=())


@pytest.mark.parametrize("num_samples", [1, 2, 7, 8, 12, 13, 17, 40])
def test_scores_do_not_depend_on_block_size(num_samples, monkeypatch, x64):
    monkeypatch.setattr(evaluation, "_BLOCK", 4 * 8)  # 8 samples of 4 numbers
    rng = np.random.default_rng(num_samples)
    x, y = rng.standard_normal((num_samples, 4)), rng.integers(0, 3, num_samples)
    params = jax.tree.map(lambda leaf: leaf.astype(float), MODEL.init(jax.random.key(0)))
    score = evaluation.evaluate(params, MODEL, jnp.asarray(x), jnp.asarray(y))
    logits = x @ np.asarray(params["Dense_0"]["kernel"]) + np.asarray(params["Dense_0"]["bias"])
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(num_samples), y]
    np.testing.assert_allclose(score.loss, losses.mean(), rtol=1e-12)
    assert score.accuracy == np.mean(logits.argmax(1) == y)


@pytest.mark.parametrize(("num_samples", "most", "size"), [(10_000, 334, 250), (10_000, 85, 80), (7, 8, 7), (13, 8, 8)])
def test_blocks_divide_samples_evenly_if_possible(num_samples, most, size):
    assert evaluation._block_size(num_samples, most) == size
