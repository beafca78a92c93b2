import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fcjax.learning import compressors
from fcjax.types import Compressor

KEY = jax.random.key(0)
ALL = [compressors.none(), compressors.quantise(4), compressors.top_k(0.3)]


def draw(dtype, size=100, seed=0):
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


def send(compressor, update, key=KEY):
    return np.asarray(jax.jit(compressor.apply)(key, compressor.parameters, update))


def levels(bits, largest):
    num_levels = 2 ** (bits - 1) - 1
    return largest * np.arange(num_levels + 1) / num_levels


def neighbours(bits, update):
    """The levels below and above each magnitude, by a search."""
    grid = levels(bits, max(abs(float(x)) for x in update))
    below = [max(i for i in range(len(grid) - 1) if grid[i] <= abs(float(x))) for x in update]
    return np.array([grid[i] for i in below]), np.array([grid[i + 1] for i in below])


def largest_entries(update, k):
    """Keeps the k entries of largest magnitude; of equal ones the first."""
    order = sorted(range(len(update)), key=lambda i: (-abs(update[i]), i))
    kept = np.zeros_like(update)
    for i in order[:k]:
        kept[i] = update[i]
    return kept


def test_none_sends_everything(dtype):
    update = draw(dtype)
    np.testing.assert_array_equal(send(compressors.none(), update), update)


def test_bits():
    assert compressors.none().bits(50_890) == 32 * 50_890
    assert compressors.none(bits_per_parameter=16).bits(1000) == 16_000
    assert compressors.none(0.5).bits(1001) == 500.5
    assert compressors.quantise(2).bits(1) == 34
    assert compressors.quantise(4).bits(50_890) == 4 * 50_890 + 32
    assert compressors.top_k(0.01).bits(50_890) == 509 * (32 + 16)  # 508.9 entries; 2^15 < 50,890 <= 2^16
    assert compressors.top_k(0.25).bits(1024) == 256 * (32 + 10)
    assert compressors.top_k(1.0).bits(1) == 32
    assert all(isinstance(compressor.bits(100), float) for compressor in ALL)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantise_is_unbiased_with_the_variance_of_its_levels(bits):
    num_draws, update = 10_000, draw(np.float32, size=40)
    compressor = compressors.quantise(bits)
    keys = jax.random.split(jax.random.key(bits), num_draws)
    apply = jax.jit(jax.vmap(compressor.apply, (0, None, None)))
    decoded = np.asarray(apply(keys, compressor.parameters, update), np.float64)
    low, high = neighbours(bits, update)
    chance = (np.abs(update.astype(np.float64)) - low) / (high - low)
    variance = (high - low) ** 2 * chance * (1 - chance)
    limit = stats.norm.isf(1e-3 / update.size / 2)  # a correct compressor fails once in 1000 seeds
    rounding = 1e-6 * np.abs(update).max()
    assert np.all(np.abs(decoded.mean(0) - update) <= limit * np.sqrt(variance / num_draws) + rounding)
    # Of a Bernoulli variable x with chance p, (x - p)^2 has the mean p (1 - p) and the variance p (1 - p) (1 - 2 p)^2.
    found = np.mean((decoded - update) ** 2, axis=0)
    error = (high - low) ** 2 * np.sqrt(chance * (1 - chance) * (1 - 2 * chance) ** 2 / num_draws)
    assert np.all(np.abs(found - variance) <= limit * error + rounding**2 + rounding * (high - low))


@pytest.mark.parametrize("bits", range(2, 17))
def test_quantise_returns_a_neighbouring_level(bits, dtype):
    update = draw(dtype, seed=bits)
    decoded = send(compressors.quantise(bits), update)
    largest, eps = np.abs(update).max(), np.finfo(dtype).eps
    grid = levels(bits, float(largest))
    distance = np.abs(np.abs(decoded)[:, None] - grid).min(1)
    assert np.all(distance <= 4 * eps * np.abs(decoded))
    assert np.all(np.abs(decoded.astype(np.float64) - update) <= grid[1] + 8 * eps * largest)
    assert np.all(np.abs(decoded) <= largest)
    assert np.all((decoded == 0) | (np.sign(decoded) == np.sign(update)))
    assert decoded.dtype == dtype


@pytest.mark.parametrize("extreme", ["smallest", "largest"])
def test_quantise_returns_levels_exactly(extreme, dtype, monkeypatch):
    """Even if the draw is extreme, which happens once in millions of entries."""
    drawn = 0.0 if extreme == "smallest" else 1 - float(np.finfo(dtype).eps) / 2
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: jnp.full(shape, drawn, dtype))
    apply = jax.jit(lambda *arguments: compressors.quantise(2).apply(KEY, *arguments))
    for bits in (2, 3, 4, 8, 16):
        for largest in (1.0, 0.1, 1.37e-20, 3e30):
            positive = levels(bits, largest).astype(dtype)
            update = np.resize(np.concatenate([positive, -positive]), 2**16)
            np.testing.assert_array_equal(apply(compressors.quantise(bits).parameters, update), update)


def test_quantised_updates_stay_as_they_are(dtype):
    for bits in (2, 5, 16):
        once = send(compressors.quantise(bits), draw(dtype))
        np.testing.assert_array_equal(send(compressors.quantise(bits), once, jax.random.key(1)), once)


@pytest.mark.parametrize("bits", [2, 8, 16])
def test_quantise_at_the_edges(bits, dtype):
    compressor, limits = compressors.quantise(bits), np.finfo(dtype)
    np.testing.assert_array_equal(send(compressor, np.zeros(4, dtype)), np.zeros(4))
    np.testing.assert_array_equal(send(compressor, np.array([-3.5], dtype)), [-3.5])
    np.testing.assert_array_equal(send(compressor, np.array([2, -2, 0], dtype)), [2, -2, 0])
    for scale in (limits.max, limits.tiny, limits.smallest_subnormal):
        update = scale * np.array([1, -0.5, 0.3, 0], dtype)
        decoded = send(compressor, update)
        assert np.all(np.isfinite(decoded))
        assert np.all(np.abs(decoded) <= scale)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_divergence_stays_visible(bad, dtype):
    update = np.array([1, bad, -2, 0.5], dtype)
    for bits in (2, 4, 16):
        assert not np.any(np.isfinite(send(compressors.quantise(bits), update)))
    np.testing.assert_array_equal(send(compressors.top_k(0.25), update), [0, bad, 0, 0])
    np.testing.assert_array_equal(send(compressors.top_k(0.5), update), [0, bad, -2, 0])
    np.testing.assert_array_equal(send(compressors.none(), update), update)


@pytest.mark.parametrize("fraction", [1e-9, 0.01, 0.02, 0.3, 0.5, 0.99, 1.0])
def test_top_k_against_sorting(fraction, dtype):
    for update in (draw(dtype), np.round(draw(dtype)), np.ones(100, dtype), np.zeros(100, dtype)):
        expected = largest_entries(update, max(math.ceil(fraction * 100), 1))
        np.testing.assert_array_equal(send(compressors.top_k(fraction), update), expected)


def test_ties_keep_no_more_than_k():
    update = np.array([1, -2, 2, 2, -2, 3, 2], np.float32)
    np.testing.assert_array_equal(send(compressors.top_k(3 / 7), update), [0, -2, 2, 0, 0, 3, 0])
    np.testing.assert_array_equal(send(compressors.top_k(1 / 7), update), [0, 0, 0, 0, 0, 3, 0])
    np.testing.assert_array_equal(send(compressors.top_k(1), update), update)
    same = send(compressors.top_k(0.01), np.full(50_890, -0.25, np.float32))
    assert np.count_nonzero(same) == 509


def test_top_k_counts_as_with_exact_fractions():
    """Both the entries kept and their bits, also where the product of floats exceeds a whole number."""
    for size in (1, 7, 100, 200, 5000, 50_890):
        update = np.arange(1, size + 1, dtype=np.float32)
        for percent in (1, 5, 7, 9, 15, 30, 35, 60, 70, 99, 100):
            expected = math.ceil(Fraction(percent, 100) * size)
            compressor = compressors.top_k(percent / 100)
            assert np.count_nonzero(send(compressor, update)) == expected
            assert compressor.bits(size) == expected * (32 + (size - 1).bit_length())


def test_error_feedback_sends_everything_in_the_end(x64):
    compressor = compressors.top_k(0.1)
    assert compressor.error_feedback
    residual, sent, updates = np.zeros(100), np.zeros(100), np.zeros(100)
    for index in range(200):
        update = draw(np.float64, seed=index)
        decoded = send(compressor, update + residual)
        residual = update + residual - decoded
        sent, updates = sent + decoded, updates + update
        np.testing.assert_allclose(sent + residual, updates, atol=1e-12)
    assert np.all(sent != 0)
    assert np.abs(residual).max() < 10  # it does not grow with the number of rounds


@pytest.mark.parametrize("compressor", ALL, ids=lambda compressor: compressor.apply.__name__)
def test_jit_and_vmap_change_nothing(compressor, dtype):
    updates = np.stack([draw(dtype, seed=seed) for seed in range(3)])
    keys = jax.random.split(KEY, 3)
    eager = compressor.apply(keys[0], compressor.parameters, jnp.asarray(updates[0]))
    one_by_one = [send(compressor, update, key) for update, key in zip(updates, keys, strict=True)]
    together = jax.jit(jax.vmap(compressor.apply, (0, None, 0)))(keys, compressor.parameters, updates)
    np.testing.assert_array_equal(together, one_by_one)
    np.testing.assert_array_equal(eager, one_by_one[0])
    assert eager.dtype == dtype


@pytest.mark.parametrize(
    ("factory", "values"), [(compressors.quantise, [2, 4, 8, 16]), (compressors.top_k, [0.01, 0.1, 1])]
)
def test_one_program_serves_all_parameters(factory, values):
    made = [factory(value) for value in values]
    assert all(compressor == made[0] for compressor in made)
    assert len({hash(compressor) for compressor in made}) == 1
    num_traces = 0

    @jax.jit
    def apply(parameters, update):
        nonlocal num_traces
        num_traces += 1
        return made[0].apply(KEY, parameters, update)

    update = draw(np.float32)
    for compressor in made:
        np.testing.assert_array_equal(apply(compressor.parameters, update), send(compressor, update))
    assert num_traces == 1
    stacked = np.stack([compressor.parameters for compressor in made])
    together = jax.jit(jax.vmap(made[0].apply, (None, 0, None)))(KEY, stacked, update)
    np.testing.assert_array_equal(together, [send(compressor, update) for compressor in made])


def test_parameters_keep_the_precision_of_the_update(x64):
    for compressor in ALL:
        for dtype in (np.float32, np.float64):
            assert send(compressor, draw(dtype)).dtype == dtype


def test_by_name():
    update = draw(np.float32)
    for name, compressor in {
        "none": compressors.none(),
        "none(bits_per_parameter=16)": compressors.none(16),
        "quantise(bits=4)": compressors.quantise(4),
        "top_k(fraction=0.1)": compressors.top_k(0.1),
    }.items():
        named = compressors.by_name(name)
        assert isinstance(named, Compressor)
        assert named == compressor
        assert named.bits(1000) == compressor.bits(1000)
        np.testing.assert_array_equal(send(named, update), send(compressor, update))
    assert compressors.REGISTRY.names() == ["none", "quantise(bits=...)", "top_k(fraction=...)"]
    with pytest.raises(ValueError, match=r"unknown compressor 'topk', did you mean top_k\?"):
        compressors.by_name("topk")
    with pytest.raises(ValueError, match=r"compressor 'quantise' needs bits: use 'quantise\(bits=...\)'"):
        compressors.by_name("quantise")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: compressors.none(0), r"bits_per_parameter must be positive and finite, got 0"),
        (lambda: compressors.none(np.inf), r"bits_per_parameter must be positive and finite, got inf"),
        (lambda: compressors.none("32"), r"bits_per_parameter must be a real number.*'32'"),
        (lambda: compressors.none([32, 16]), r"bits_per_parameter must have shape \(\), got \(2,\)"),
        (lambda: compressors.quantise(1), r"bits must be a whole number from 2 to 16, got 1"),
        (lambda: compressors.quantise(17), r"bits must be a whole number from 2 to 16, got 17"),
        (lambda: compressors.quantise(4.5), r"bits must be a whole number from 2 to 16, got 4.5"),
        (lambda: compressors.quantise(True), r"bits must be a whole number from 2 to 16, got True"),
        (lambda: compressors.quantise(np.nan), r"bits must be a whole number from 2 to 16, got nan"),
        (lambda: compressors.quantise(None), r"bits must be a whole number from 2 to 16, got None"),
        (lambda: compressors.top_k(0), r"fraction must be greater than 0 and at most 1, got 0"),
        (lambda: compressors.top_k(-0.1), r"fraction must be greater than 0 and at most 1, got -0.1"),
        (lambda: compressors.top_k(1.01), r"fraction must be greater than 0 and at most 1, got 1.01"),
        (lambda: compressors.top_k(np.nan), r"fraction must be greater than 0 and at most 1, got nan"),
        (lambda: compressors.top_k("0.1"), r"fraction must be a real number.*'0.1'"),
        (lambda: compressors.top_k(np.array([0.1, 0.2])), r"fraction must have shape \(\), got \(2,\)"),
    ],
)
def test_errors_name_bad_parameters(make, message):
    with pytest.raises(ValueError, match=message):
        make()
