import numpy as np
import pytest

from fcjax.data import Dataset, synthetic


def test_classification_is_deterministic_and_learnable():
    data = synthetic.classification(2000, 500, num_features=5, num_labels=4, spread=0.3, seed=1)
    again = synthetic.classification(2000, 500, num_features=5, num_labels=4, spread=0.3, seed=1)
    np.testing.assert_array_equal(data.train_x, again.train_x)
    assert data.train_x.shape == (2000, 5)
    assert set(data.train_y) == set(range(4))
    assert not np.array_equal(
        data.train_x, synthetic.classification(2000, num_features=5, num_labels=4, seed=2).train_x
    )
    means = np.stack([data.train_x[data.train_y == label].mean(0) for label in range(4)])
    nearest = np.argmin(((data.test_x[:, None] - means) ** 2).sum(-1), axis=1)
    assert np.mean(nearest == data.test_y) > 0.9


def test_regression_data_are_linear():
    data = synthetic.regression(5000, 10, num_features=3, noise=0.01, seed=3)
    weights, *_ = np.linalg.lstsq(data.train_x, data.train_y, rcond=None)
    np.testing.assert_allclose(data.test_x @ weights, data.test_y, atol=0.05)
    assert data.num_labels == 0


def test_errors_name_bad_sizes_and_labels():
    with pytest.raises(ValueError, match=r"num_train must be a whole number from 1 to .*, got 0"):
        synthetic.classification(0)
    with pytest.raises(ValueError, match=r"num_features must be a whole number from 1 to .*, got 2.5"):
        synthetic.regression(10, num_features=2.5)
    with pytest.raises(ValueError, match=r"num_test must be a whole number from 0 to .*, got 1e\+36"):
        synthetic.classification(10, 1e36)
    x, y = np.zeros((3, 2)), np.array([0, 1, 2])
    with pytest.raises(ValueError, match=r"train_y must be labels from 0 to 1, got 0 to 2"):
        Dataset("mine", x, y, x[:0], y[:0], ("a", "b"), "here")
    with pytest.raises(ValueError, match=r"train_x and train_y must have the same length, got 3 and 2"):
        Dataset("mine", x, y[:2], x[:0], y[:0], ("a", "b"), "here")
