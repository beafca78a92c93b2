import math

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fcjax.data import partition

NUM_LABELS = 10


def draw_labels(seed, num_samples):
    """Draws labels of unequal frequency, each at least once."""
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.5, 1.5, NUM_LABELS)
    rest = rng.choice(NUM_LABELS, num_samples - NUM_LABELS, p=weights / weights.sum())
    return rng.permutation(np.concatenate([np.arange(NUM_LABELS), rest])).astype(np.int32)


def samples(parts):
    return np.concatenate([parts.of_device(i) for i in range(parts.num_devices)])


def assert_disjoint(parts, labels):
    used = samples(parts)
    assert used.size == np.unique(used).size == parts.sizes.sum()
    assert used.min() >= 0
    assert used.max() < labels.size
    for row, size in zip(parts.indices, parts.sizes, strict=True):
        assert set(row) == set(row[:size])


seeds = st.integers(0, 10_000)


@given(seed=seeds, num_devices=st.integers(1, 40), equal=st.booleans())
def test_iid(seed, num_devices, equal):
    labels = draw_labels(seed, 500)
    parts = partition.iid(labels, num_devices, seed=seed, equal=equal)
    assert_disjoint(parts, labels)
    if equal:
        assert set(parts.sizes) == {500 // num_devices}
    else:
        assert parts.sizes.sum() == 500
        assert np.ptp(parts.sizes) <= 1


@given(seed=seeds, num_devices=st.integers(1, 40), count=st.integers(1, NUM_LABELS), equal=st.booleans())
def test_distinct_label_shards(seed, num_devices, count, equal):
    labels = draw_labels(seed, 2000)
    parts = partition.label_shards(labels, num_devices, count, seed=seed, equal=equal)
    assert_disjoint(parts, labels)
    counts = parts.label_counts(labels)
    assert np.all(np.sum(counts > 0, axis=1) == count)
    owners = np.sum(counts > 0, axis=0)
    assert np.ptp(owners) <= 1
    if equal:
        assert np.unique(counts[counts > 0]).size == 1
        assert np.unique(parts.sizes).size == 1
    else:
        assert parts.sizes.sum() == np.sum(np.bincount(labels)[owners > 0])


@given(seed=seeds, num_devices=st.integers(1, 40), count=st.integers(1, NUM_LABELS))
def test_shuffled_label_shards(seed, num_devices, count):
    labels = draw_labels(seed, 2000)
    parts = partition.label_shards(labels, num_devices, count, seed=seed, distinct=False)
    assert_disjoint(parts, labels)
    counts = parts.label_counts(labels)
    shard_size = parts.sizes[0] // count
    assert set(parts.sizes) == {shard_size * count}
    assert np.all(counts % shard_size == 0)
    assert np.ptp(counts.sum(0)[counts.sum(0) > 0] // shard_size) <= 1


def test_shuffled_shards_repeat_labels_by_chance():
    """Each label has 10 of 100 shards, so 5 draws miss it with probability C(90,5)/C(100,5)."""
    labels = np.repeat(np.arange(NUM_LABELS), 100)
    drawn = [partition.by_name("l5-shuffled", labels, 20, seed=seed).label_counts(labels) for seed in range(200)]
    distinct = np.sum(np.stack(drawn) > 0, axis=2)
    expected = NUM_LABELS * (1 - math.comb(90, 5) / math.comb(100, 5))
    error = distinct.mean(1).std(ddof=1) / np.sqrt(len(drawn))
    assert abs(distinct.mean() - expected) < 4 * error


def test_both_rules_agree_for_one_label_per_device():
    labels = draw_labels(0, 2000)
    for seed in range(5):
        shuffled, distinct = (partition.by_name(name, labels, 20, seed=seed) for name in ("l1-shuffled", "l1"))
        np.testing.assert_array_equal(shuffled.indices, distinct.indices)


@given(seed=seeds, num_devices=st.integers(1, 20), alpha=st.floats(0.05, 100))
def test_dirichlet(seed, num_devices, alpha):
    labels = draw_labels(seed, 1000)
    try:
        parts = partition.dirichlet(labels, num_devices, alpha, seed=seed)
    except ValueError as error:
        assume("leaves some of" not in str(error))
        raise
    assert_disjoint(parts, labels)
    assert parts.sizes.sum() == 1000
    assert parts.sizes.min() >= 1


@pytest.mark.parametrize("seed", range(12))
def test_scarce_labels_get_fewer_shards(seed):
    for labels, num_devices in ((np.repeat([0, 1, 2], [4, 1, 4]), 4), (np.repeat([0, 1, 2], [1000, 3, 1000]), 12)):
        parts = partition.label_shards(labels, num_devices, 1, seed=seed)
        assert_disjoint(parts, labels)
        assert np.all((parts.label_counts(labels) > 0).sum(1) == 1)


def test_larger_alpha_gives_more_even_proportions():
    labels = draw_labels(0, 20_000)

    def unevenness(alpha):
        counts = partition.dirichlet(labels, 10, alpha, seed=1).label_counts(labels)
        return np.std(counts / counts.sum(0), axis=0).mean()

    assert unevenness(0.2) > 3 * unevenness(10) > 6 * unevenness(1000)


@given(seed=seeds, sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_given_sizes(seed, sizes):
    labels = draw_labels(seed, 500)
    parts = partition.iid(labels, len(sizes), seed=seed, sizes=np.array(sizes))
    assert_disjoint(parts, labels)
    np.testing.assert_array_equal(parts.sizes, sizes)


@pytest.mark.parametrize("name", ["iid", "l1", "l2", "l2-shuffled", "l10", "dir0.5", "dir1e-1", "dir.3"])
def test_partitions_by_name_depend_on_the_seed(name):
    labels = draw_labels(3, 3000)
    first, again, other = (partition.by_name(name, labels, 8, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.indices, again.indices)
    np.testing.assert_array_equal(first.sizes, again.sizes)
    assert not np.array_equal(first.of_device(0), other.of_device(0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda y: partition.by_name("l11", y, 5, seed=0), r"1 to 10 distinct labels.*got l = 11"),
        (lambda y: partition.by_name("l٣", y, 5, seed=0), r"unknown distribution 'l٣'"),
        (lambda y: partition.by_name("l0", y, 5, seed=0), r"got l = 0"),
        (lambda y: partition.by_name("noniid", y, 5, seed=0), r"unknown distribution 'noniid': use iid, l1"),
        (lambda y: partition.by_name("dir0", y, 5, seed=0), r"alpha must be positive.*got 0"),
        (lambda y: partition.label_shards(y, 400, 10, seed=0), r"400 devices of 10 labels need 4000 shards.*for 500"),
        (lambda y: partition.iid(y, 501, seed=0), r"num_devices must be a whole number from 1 to 500.*got 501"),
        (lambda y: partition.iid(y[:0], 3, seed=0), r"num_devices must be a whole number from 1 to 0.*got 3"),
        (lambda y: partition.label_shards(y, 5, 1.5, seed=0), r"labels_per_device must be a whole number.*got 1.5"),
        (lambda y: partition.iid(y, 0, seed=0), r"num_devices must be a whole number from 1 to 500.*got 0"),
        (lambda y: partition.iid(y, 2, seed=0, sizes=np.array([400, 200])), r"sum to at most 500.*got 600"),
        (lambda y: partition.iid(y, 2, seed=0, sizes=np.array([4, 0])), r"sizes must be 2 integers of 1 or more"),
        (lambda y: partition.iid(y - 1, 2, seed=0), r"labels must be 0 or more, got -1"),
        (lambda y: partition.iid(y / 2, 2, seed=0), r"labels must be one integer per sample.*float64"),
        (lambda y: partition.dirichlet(y, 40, 1e-3, seed=0, max_tries=3), r"alpha = 0.001 leaves some of 40 devices"),
    ],
)
def test_errors_name_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(draw_labels(0, 500))


def test_plot(tmp_path):
    mpl.use("Agg")
    labels = draw_labels(0, 3000)
    ax = partition.plot(partition.by_name("l2", labels, 20, seed=0), labels)
    ax.figure.savefig(tmp_path / "partition.png")
    shown = ax.images[0].get_array()
    assert shown.shape == (20, NUM_LABELS)
    assert np.all((shown > 0).sum(1) == 2)


def test_rows_of_other_seeds_mostly_have_the_same_length():
    """Programs depend on it, so they are compiled once for most seeds."""
    labels = np.repeat(np.arange(10), 600)
    lengths = [partition.dirichlet(labels, 20, 0.3, seed=seed).indices.shape[1] for seed in range(20)]
    largest = [partition.dirichlet(labels, 20, 0.3, seed=seed).sizes.max() for seed in range(20)]
    assert len(set(largest)) > 15
    assert lengths.count(1024) >= 17
    assert all(size <= length < 2 * size for size, length in zip(largest, lengths, strict=True))
    assert partition.iid(labels, 20, seed=0).indices.shape == (20, 300)  # equal sizes need no room
