import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from observing import CELL, KEY, TRAINING, cell_of, observe_in_turn, rows_of

from fcjax.wireless import radio, worlds

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def csv_file(tmp_path):
    def write(text, name="measured.csv"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_trace_replays_its_rows_and_repeats(dtype):
    gain, compute_s, available = rows_of(3, 4)
    observation = observe_in_turn(worlds.trace(gain, compute_s, available), CELL, 8)
    rows = np.arange(8) % 3
    np.testing.assert_array_equal(observation.gain, gain[rows].astype(dtype))
    np.testing.assert_array_equal(observation.compute_s, compute_s[rows].astype(dtype))
    np.testing.assert_array_equal(observation.available, available[rows])


def test_trace_takes_lists_and_jax_arrays():
    for kind in (np.ndarray.tolist, jnp.asarray):
        observation = observe_in_turn(worlds.trace(*map(kind, rows_of(3, 4))), CELL, 3)
        np.testing.assert_allclose(observation.gain, rows_of(3, 4)[0], rtol=1e-6)
        np.testing.assert_array_equal(observation.available, rows_of(3, 4)[2])


def test_trace_may_have_one_round_and_nobody_available():
    world = worlds.trace(np.zeros((1, 4)), np.zeros((1, 4)), np.zeros((1, 4), bool))
    assert not np.any(observe_in_turn(world, CELL, 3).available)


def test_limits_of_a_trace_are_its_extremes():
    gain, compute_s, _ = rows_of(5, 4)
    repeated = worlds.trace(gain, compute_s).limits(CELL, TRAINING)
    np.testing.assert_allclose(repeated.gain, gain.max(axis=0), rtol=1e-6)
    np.testing.assert_allclose(repeated.compute_s, compute_s.min(axis=0), rtol=1e-6)
    assert repeated.num_rounds is None
    assert worlds.trace(gain, compute_s, at_end="error").limits(CELL, TRAINING).num_rounds == 5


def test_trace_is_differentiable():
    gain, compute_s, _ = rows_of(3, 4)

    def first_gain(gain):
        world = worlds.trace(gain, compute_s)
        return world.observe(KEY, world.init(KEY, CELL), CELL, TRAINING)[1].gain.sum()

    np.testing.assert_array_equal(jax.grad(first_gain)(jnp.asarray(gain)), [[1] * 4, [0] * 4, [0] * 4])


ONES = np.ones((4, 2))
BAD = ONES.copy()
BAD[3, 1] = -1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((BAD, ONES), r"^gain\[3, 1\] must be zero or more, and finite, got -1"),
        ((np.where(BAD < 0, np.nan, 1), ONES), r"^gain\[3, 1\] must be.*got nan"),
        ((np.where(BAD < 0, np.inf, 1), ONES), r"^gain\[3, 1\] must be.*got inf"),
        ((ONES, BAD), r"^compute_s\[3, 1\] must be zero or more, and finite, got -1"),
        ((ONES, np.where(BAD < 0, np.inf, 1)), r"^compute_s\[3, 1\] must be.*got inf"),
        ((ONES[0], ONES), r"^gain must have shape \(K, M\).*got \(2,\)"),
        ((ONES[:0], ONES[:0]), r"^gain must have shape \(K, M\), for K >= 1.*got \(0, 2\)"),
        ((1.0, 1.0), r"^gain must have shape \(K, M\).*got \(\)"),
        ((ONES, ONES[:3]), r"^compute_s must have the shape of gain, \(4, 2\), got \(3, 2\)"),
        ((ONES, ONES, ONES[:3] > 0), r"^available must have the shape of gain, \(4, 2\), got \(3, 2\)"),
        ((ONES, ONES, ONES), r"^available must be booleans, got dtype float64"),
        (("gain", ONES), r"^gain must be a real number or an array of them, got 'gain'"),
    ],
)
def test_errors_name_bad_traces(arguments, message):
    with pytest.raises(ValueError, match=message):
        worlds.trace(*arguments)


def test_errors_name_the_number_of_devices(csv_file):
    world = worlds.trace(ONES, ONES)
    message = "the number of devices is 2 in the trace and 4 in the cell: use the same number"
    with pytest.raises(ValueError, match=message):
        world.init(KEY, CELL)
    with pytest.raises(ValueError, match=message):
        world.limits(CELL, TRAINING)
    from_csv = worlds.from_file(csv_file("round,device,compute_s,upload_s\n0,0,1,1\n"))
    with pytest.raises(ValueError, match=r"the number of devices is 1 in .*measured.csv and 4 in the cell"):
        from_csv.init(KEY, CELL)


# Files


def test_csv_of_gains(csv_file):
    path = csv_file(
        "\ufeffround, device, gain, compute_s, place\n"  # with a byte order mark and a column of no interest
        "2.5,1,4e-10,0.4,b\n"
        "\n"
        "1,0,1e-10,0.1,a\n"
        "1,1,2e-10,0.2,b\n"
        "2.5,0,3e-10,0.3,a\n"
    )
    observation = observe_in_turn(worlds.from_file(path), cell_of(2), 3)
    np.testing.assert_allclose(observation.gain, [[1e-10, 2e-10], [3e-10, 4e-10], [1e-10, 2e-10]], rtol=1e-6)
    np.testing.assert_allclose(observation.compute_s, [[0.1, 0.2], [0.3, 0.4], [0.1, 0.2]], rtol=1e-6)
    assert np.all(observation.available)


def test_csv_of_upload_times(csv_file, dtype):
    """The example of the docstring, with different powers and payloads."""
    path = csv_file("round,device,compute_s,upload_s\n0,0,0.71,0.120\n0,1,0.55,0.095\n")
    power_w, bits = [0.01, 0.02], [1.6e6, 0.8e6]
    cell = dataclasses.replace(CELL, power_w=np.array(power_w), upload_bits=np.array(bits))
    world = worlds.from_file(str(path), at_end="error")
    state = world.init(KEY, cell)
    _, observation = world.observe(KEY, state, cell, TRAINING)
    expected = [
        (2 ** (s / (20e6 * t)) - 1) * 20e6 * 10**-20.4 / p for s, t, p in zip(bits, [0.12, 0.095], power_w, strict=True)
    ]
    np.testing.assert_allclose(observation.gain, expected, rtol=1e-5 if dtype == np.float32 else 1e-12)
    upload_s = cell.upload_bits / radio.rate(np.ones(2), observation, cell)
    np.testing.assert_allclose(upload_s, [0.12, 0.095], rtol=1e-5 if dtype == np.float32 else 1e-12)
    limits = world.limits(cell, TRAINING)
    np.testing.assert_array_equal(limits.gain, observation.gain)
    np.testing.assert_array_equal(limits.compute_s, observation.compute_s)
    assert limits.num_rounds == 1


def test_upload_times_in_many_cells(csv_file):
    """With more bandwidth, less gain is enough for the same time."""
    world = worlds.from_file(csv_file("round,device,compute_s,upload_s\n0,0,0.71,0.120\n0,1,0.55,0.095\n"))
    gains = jax.vmap(lambda band: world.init(KEY, dataclasses.replace(cell_of(2), bandwidth_hz=band)).gain)
    assert np.all(np.diff(gains(np.array([10e6, 20e6, 40e6])), axis=0) < 0)


@pytest.mark.parametrize("channel", ["gain", "upload_s"])
def test_devices_without_a_row_are_not_available(csv_file, channel):
    path = csv_file(
        f"round,device,compute_s,{channel},available\n0,0,0.1,0.5,true\n0,1,0.2,0.5,False\n3,1,0.4,0.5,1\n7,0,0.3,0.5,0\n"
    )
    world = worlds.from_file(path)
    observation = observe_in_turn(world, cell_of(2), 3)
    np.testing.assert_array_equal(observation.available, [[True, False], [False, True], [False, False]])
    np.testing.assert_array_equal(np.asarray(observation.gain) == 0, [[False, False], [True, False], [False, True]])
    np.testing.assert_allclose(observation.compute_s, [[0.1, 0.2], [0.3, 0.4], [0.3, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(world.limits(cell_of(2), TRAINING).compute_s, [0.1, 0.2], rtol=1e-6)


HEADER = "round,device,compute_s,gain,available\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"measured.csv has no column round, device, compute_s, gain or upload_s: it has none"),
        ("round,device,time\n", r"measured.csv has no column compute_s, gain or upload_s: it has round, device, time"),
        ("round,device,compute_s,gain,upload_s\n", r"measured.csv must have one of the columns gain and upload_s"),
        (HEADER, r"measured.csv has no rows"),
        (HEADER + "0,0,1,1,1\n0,0,1,1,1\n", r"measured.csv, line 3: round 0 already has a row for device 0"),
        (HEADER + "0,0,nan,1,1\n", r"line 2: compute_s must be between 0 and 1e\+30, got 'nan'"),
        (HEADER + "0,0,,1,1\n", r"line 2: compute_s must be between.*got ''"),
        (HEADER + "0,0,1\n", r"line 2: gain must be between.*got None"),
        (HEADER + "\n0,0,-1,1,1\n", r"line 3: compute_s must be between.*got '-1'"),
        (HEADER + "0,0,1,-2,1\n", r"line 2: gain must be between.*got '-2'"),
        (HEADER + "0,0,1,inf,1\n", r"line 2: gain must be between.*got 'inf'"),
        (HEADER + "0,phone,1,1,1\n", r"line 2: device must be a whole number of 0 or more, got 'phone'"),
        (HEADER + "0,0.5,1,1,1\n", r"line 2: device must be a whole number of 0 or more, got '0.5'"),
        (HEADER + "inf,0,1,1,1\n", r"line 2: round must be a number, got 'inf'"),
        (HEADER + "0,0,1,1,maybe\n", r"line 2: available must be true or false, got 'maybe'"),
        (HEADER + "0,0,1,1,1\n0,2,1,1,1\n", r"without gaps, got device 2 but no device 1"),
        ("round,device,compute_s,upload_s\n0,0,1,0\n", r"line 2: upload_s must be positive.*got '0'"),
    ],
)
def test_errors_name_bad_csv(csv_file, text, message):
    with pytest.raises(ValueError, match=message):
        worlds.from_file(csv_file(text))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"upload_bits": 1e10},
            r"measured.csv: the spectral efficiency of upload_s\[0, 0\] must be at most 60.*got 500",
        ),
        ({"upload_bits": 0.0}, r"cell.upload_bits must be positive.*got 0"),
        ({"power_w": np.zeros(1)}, r"cell.power_w\[0\] must be positive.*got 0"),
    ],
)
def test_errors_name_cells_without_upload_times(csv_file, fields, message):
    world = worlds.from_file(csv_file("round,device,compute_s,upload_s\n0,0,1,1\n"))
    with pytest.raises(ValueError, match=message):
        world.init(KEY, dataclasses.replace(cell_of(1), **fields))


def test_errors_name_unreadable_files(tmp_path, csv_file):
    for name in ("none.csv", "none.nc"):
        with pytest.raises(FileNotFoundError, match=f"there is no trace {tmp_path / name}"):
            worlds.from_file(tmp_path / name)
    with pytest.raises(ValueError, match=r"trace.txt must end in .nc or .csv"):
        worlds.from_file("trace.txt")
    with pytest.raises(ValueError, match=r"path must be the path of a file, got 3"):
        worlds.from_file(3)
    with pytest.raises(ValueError, match=r"measured.nc cannot be read as netCDF"):
        worlds.from_file(csv_file("round,device\n", "measured.nc"))
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\x89HDF\xff\x00")
    with pytest.raises(ValueError, match=r"binary.csv cannot be read as CSV"):
        worlds.from_file(binary)


def dataset_of(*, dims=("round", "device"), **changes):
    gain, compute_s, available = rows_of(6, 4)
    arrays = {"gain": gain, "compute_s": compute_s, "available": available} | changes
    return xr.Dataset({name: (dims, array) for name, array in arrays.items() if array is not None})


def test_netcdf_is_replayed(tmp_path):
    path = tmp_path / "trace.nc"
    gain, compute_s, available = rows_of(6, 4)
    with_units = dataset_of()
    with_units.compute_s.attrs["units"] = "seconds"
    padded = xr.concat([dataset_of(), dataset_of(gain=gain * np.nan, compute_s=gain * np.nan)], "round")
    for dataset in (
        with_units,
        dataset_of(available=available.astype("i1")),
        dataset_of().transpose("device", "round"),
        dataset_of().expand_dims(run=1, seed=1),  # results of one run
        padded,  # results of a run that ended before others
    ):
        dataset.to_netcdf(path)
        observation = observe_in_turn(worlds.from_file(path), CELL, 8)
        rows = np.arange(8) % 6
        np.testing.assert_allclose(observation.gain, gain[rows], rtol=1e-6)
        np.testing.assert_allclose(observation.compute_s, compute_s[rows], rtol=1e-6)
        np.testing.assert_array_equal(observation.available, available[rows])
    dataset_of(available=None).to_netcdf(path)
    assert np.all(observe_in_turn(worlds.from_file(path), CELL, 8).available)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (xr.Dataset(), r"trace.nc has no gain, compute_s: it has no variables"),
        (dataset_of().drop_vars("compute_s"), r"trace.nc has no compute_s: it has gain, available"),
        (dataset_of(gain=BAD, compute_s=ONES, available=None), r"trace.nc: gain\[3, 1\] must be zero or more.*got -1"),
        (dataset_of(gain=ONES * np.nan, compute_s=ONES, available=None), r"trace.nc: gain\[0, 0\] must be.*got nan"),
        (dataset_of(available=np.full((6, 4), 2)), r"trace.nc: available\[0, 0\] must be 0 or 1, got 2"),
        (dataset_of(gain=np.full((6, 4), "a")), r"trace.nc: gain must be numbers, got dtype"),
        (dataset_of(dims=("time", "device")), r"gain must have the dimensions round and device, got time, device"),
        (
            xr.concat([dataset_of(), dataset_of()], "run"),
            r"trace.nc: gain must have length 1 along run, got 2: choose one, as in dataset.isel\(run=\[0\]\)",
        ),
    ],
)
def test_errors_name_bad_netcdf(tmp_path, dataset, message):
    dataset.to_netcdf(tmp_path / "trace.nc")
    with pytest.raises(ValueError, match=message):
        worlds.from_file(tmp_path / "trace.nc")
