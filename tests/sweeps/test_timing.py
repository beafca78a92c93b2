"""How rounds spend their time, against the rate of every device in plain Python."""

import math

import numpy as np
import pytest
import tiny

import fcjax
from fcjax.sweeps.setups import setup_of
from fcjax.sweeps.timing import round_parts

pytestmark = pytest.mark.usefixtures("quick_compilation")


def finish_times(results, run, k, cell, training):
    """When each scheduled device of a round has computed, and has sent; {device: (s, s)}."""

    def decided(name, device, otherwise):
        values = results.get(f"decided_{name}")
        value = math.nan if values is None else float(values[run, k, device])
        return otherwise if math.isnan(value) else value

    found = {}
    for device in np.flatnonzero(results.scheduled.values[run, k]):
        samples = decided("local_steps", device, training.local_steps) * decided(
            "batch_size", device, training.batch_size
        )
        slower = cell.cpu_hz / decided("cpu_hz", device, cell.cpu_hz)
        compute_s = float(results.compute_s[run, k, device]) * slower
        compute_s *= samples / (training.local_steps * training.batch_size)
        share = 1.0 if cell.access == "tdma" else float(results.share[run, k, device])
        band_hz = share * cell.bandwidth_hz
        received_w = decided("power_w", device, 0.01) * float(results.gain[run, k, device])
        send_s = cell.upload_bits / (band_hz * math.log2(1 + received_w / (band_hz * cell.noise_psd_w_hz)))
        found[int(device)] = compute_s, send_s
    if cell.access != "tdma":
        return {device: (compute_s, compute_s + send_s) for device, (compute_s, send_s) in found.items()}
    now_s, done = 0.0, {}
    for device, (compute_s, send_s) in sorted(found.items(), key=lambda item: item[1][0]):
        now_s = max(now_s, compute_s) + send_s
        done[device] = compute_s, now_s
    return done


@pytest.mark.parametrize(
    ("access", "policies"),
    [
        pytest.param("fdma", ["fc", "cs-h", "frugal(deadline_s=1.5)", "local-steps"], marks=pytest.mark.slow),
        ("tdma", ["fc", "rd"]),
    ],
)
def test_round_parts_against_loops(access, policies):
    how = {"dataset": tiny.dataset(), "preset": tiny.experiment, "seeds": 2, "budget_s": 6.0}
    results = fcjax.sweep(policies, axes={"cell.access": [access]}, distribution="iid", **how)
    parts = round_parts(results)
    together, rounds = {}, 0
    for run in range(results.sizes["run"]):
        setup = setup_of(results.setup.values[run], tiny.NUM_DEVICES)
        assert setup.cell.access == results["cell.access"].values[run]
        for k in range(int(results.rounds[run])):
            found = finish_times(results, run, k, setup.cell, setup.training)
            end_s = max(finish_s for _, finish_s in found.values())
            assert float(results.round_s[run, k]) == pytest.approx(end_s, rel=1e-3)
            last = [device for device, (_, finish_s) in found.items() if finish_s >= 0.999 * end_s]
            slowest = max(last, key=lambda device: found[device][0])
            assert int(parts.last[run, k]) == slowest
            assert float(parts.computing_s[run, k]) == pytest.approx(found[slowest][0], rel=1e-4)
            assert float(parts.sending_s[run, k]) == pytest.approx(end_s - found[slowest][0], rel=1e-2, abs=1e-3)
            if access == "fdma":
                assert float(parts.together[run, k]) == pytest.approx(len(last) / len(found))
                together.setdefault(str(results.policy.values[run]), []).append(len(last) == len(found))
            rounds += 1
        assert np.isnan(parts.last.values[run, int(results.rounds[run]) :]).all()
    assert rounds > 20
    if access == "fdma":
        assert {"decided_cpu_hz", "decided_power_w", "decided_local_steps"} <= set(results)
        assert all(together["fc"]), "under the optimal allocation all finish together"
        assert not all(together["cs-h"]), "with equal shares they do not"


@pytest.mark.slow
def test_devices_that_wait_for_the_slowest_to_report():
    how = {"dataset": tiny.dataset(), "preset": tiny.experiment, "seeds": 1, "budget_s": 4.0, "distribution": "iid"}
    results = fcjax.sweep("bn2", **how)
    assert '"asks_norms": true' in results.setup.values[0]
    parts = round_parts(results)
    happened = results.round_s.notnull().values[0]
    slowest_s = results.compute_s.max("device").values[0, happened]
    np.testing.assert_allclose(parts.computing_s.values[0, happened], slowest_s, rtol=1e-6)
    assert (parts.sending_s.values[0, happened] > 0).all()


@pytest.mark.slow
def test_setup_survives_files_and_concatenation(tmp_path):
    how = {"dataset": tiny.dataset(), "preset": tiny.experiment, "seeds": 1, "budget_s": 2.0, "distribution": "l2"}
    results = fcjax.sweep("rd", **how, keep=tmp_path / "runs", out=tmp_path / "histories.nc")
    samples = results.samples.values[0]
    assert samples.shape == (tiny.NUM_DEVICES, 4)
    assert ((samples > 0).sum(axis=1) == 2).all(), "two labels per device"
    older = results.drop_vars(["setup", "samples"]).assign_coords(seed=("run", [7]))
    both = fcjax.results.concat([results.load(), older.load()])
    assert both.setup.values.tolist() == [results.setup.values[0], ""]
    parts = round_parts(both)
    assert parts.computing_s.notnull().any("round").values.tolist() == [True, False]
