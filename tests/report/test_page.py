"""The interactive page: its data against plain loops over the results, bad input, and the page in a browser."""

import base64
import html.parser
import json
import math
import re
import shutil

import jax
import numpy as np
import pandas as pd
import pytest
import tiny
from scipy import stats
from selenium import webdriver
from selenium.webdriver.support.ui import Select, WebDriverWait

import fcjax
from fcjax import cli, metrics
from fcjax.report import page, rasters
from fcjax.report.digest import digest

POLICIES = ("fc", "rd", "cs-h")


def run_sweep(policies=POLICIES, distribution=("l2", "iid"), **settings):
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        how = {"dataset": tiny.dataset(), "preset": tiny.experiment, "seeds": 3, "budget_s": 5.0, **settings}
        return fcjax.sweep(policies, distribution=distribution, **how)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def results():
    return run_sweep()


def members(data, results):
    """Yields each cell of the page with the numbers of its runs, found by their labels."""
    names = [axis["name"] for axis in data["axes"]]
    for cell in data["cells"]:
        wanted = {name: data["axes"][i]["values"][cell["at"][i]] for i, name in enumerate(names)}
        runs = range(results.sizes["run"])
        yield cell, [run for run in runs if all(str(results[name].values[run]) == wanted[name] for name in names)]


def accuracy_at(results, run, name, x, kind):
    """The accuracy when x seconds, joules or rounds have been spent, by a loop over rounds."""
    spent, best, current = 0.0, None, float(results.start_accuracy[run])
    for k in range(int(results.rounds[run])):
        joules = float(results.energy_j[run, k].sum())
        spent = {"time": float(results.elapsed_s[run, k]), "energy": spent + joules, "rounds": k + 1}[name]
        if spent > x * (1 + 1e-6):
            break
        current = float(results.accuracy[run, k])
        best = current if best is None else max(best, current)
    return current if kind == "current" or best is None else best


def test_curves_and_bands(results):
    data = digest(results)
    assert data["notes"] == []
    assert [(axis["name"], axis["values"]) for axis in data["axes"]] == [
        ("policy", list(POLICIES)),
        ("distribution", ["l2", "iid"]),
    ]
    assert len(data["cells"]) == 6, "no two settings are pooled"
    checked = 0
    for cell, runs in members(data, results):
        assert len(runs) == cell["seeds"] == 3
        assert data["lines"][cell["line"]] == results.policy.values[runs[0]]
        assert data["panels"][cell["panel"]] == f"distribution {results.distribution.values[runs[0]]}"
        for name in ("time", "energy", "rounds"):
            x = cell["curves"][name]["x"]
            for place in (0, len(x) // 3, len(x) // 2, len(x) - 1):
                for kind in ("current", "best"):
                    values = [accuracy_at(results, run, name, x[place], kind) for run in runs]
                    mean, half = cell["curves"][name][kind]
                    assert mean[place] == pytest.approx(sum(values) / 3, abs=2e-6)
                    deviation = math.sqrt(sum((value - sum(values) / 3) ** 2 for value in values) / 2)
                    assert half[place] == pytest.approx(stats.t.ppf(0.975, 2) * deviation / math.sqrt(3), abs=2e-6)
                    checked += 1
    assert checked == 6 * 3 * 4 * 2


def test_curves_end_with_the_summary(results):
    data, summary = digest(results), fcjax.results.summary(results)
    for cell, runs in members(data, results):
        for name, curve in cell["curves"].items():
            for kind, column in (("best", "best_accuracy"), ("current", "final_accuracy")):
                assert curve[kind][0][-1] == pytest.approx(summary[column][runs].mean(), abs=1e-6), name
        for column in ("mean_round_s", "rounds", "energy_j", "mean_scheduled"):
            assert cell["means"][column][0] == pytest.approx(summary[column][runs].mean(), rel=1e-5)
    for row, values in zip(data["runs"], summary.itertuples(), strict=True):
        assert row["seed"] == values.seed
        assert row["values"][list(data["columns"]).index("best_accuracy")] == pytest.approx(values.best_accuracy)


def test_pairs_are_those_of_metrics(results):
    data = digest(results)
    assert set(data["pairs"]) == {"best_accuracy", "final_accuracy", "area_under_curve", "jain_index", "energy_j"}
    for name in ("best_accuracy", "area_under_curve", "jain_index"):
        assert len(data["pairs"][name]) == 3 * 2
        for pair in data["pairs"][name]:
            a, b = (data["lines"][pair[which]] for which in "ab")
            distribution = data["panels"][pair["panel"]].removeprefix("distribution ")
            setting = results.isel(run=(results.distribution == distribution).values)
            expected = metrics.paired(setting, a, b, name)
            for column in ("difference", "low", "high"):
                assert pair[column] == pytest.approx(getattr(expected, column), rel=1e-5, abs=1e-9)


def decoded(text, run):
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(run["rounds"], run["devices"])


def test_rasters_partitions_and_settings(results):
    data = digest(results)["rasters"]
    assert sorted(data["runs"]) == list(range(18))
    for number, run in data["runs"].items():
        scheduled = results.scheduled.values[number, : run["rounds"]]
        np.testing.assert_array_equal(decoded(run["scheduled"], run), scheduled)
        for name in ("gain", "share", "energy_j"):
            exact = results[name].values[number, : run["rounds"]].astype(float)
            exact = 10 * np.log10(exact) if name == "gain" else exact
            low, high = run[name]["low"], run[name]["high"]
            found = low + decoded(run[name]["levels"], run) / 255 * (high - low)
            np.testing.assert_allclose(found[scheduled], exact[scheduled], atol=(high - low) / 255 + 1e-5 * abs(high))
        seed, distribution = int(results.seed[number]), str(results.distribution.values[number])
        held = tiny.experiment(distribution=distribution, seed=seed).data
        for device, counts in enumerate(data["partitions"][run["partition"]]):
            labels = list(held.y[held.indices[device, : held.sizes[device]]])
            assert counts == [labels.count(label) for label in range(4)]
    assert len(data["partitions"]) == 6, "the same for all policies, one per distribution and seed"
    assert data["setups"][0]["cell"]["bandwidth_hz"] == 1e6


def test_only_as_many_rasters_as_fit(results, monkeypatch):
    size = int((results.rounds * (6 * results.devices + 30)).max())
    monkeypatch.setattr(rasters, "_MOST_BYTES", 8 * size)
    data = digest(results)
    shown = sorted(data["rasters"]["runs"])
    assert 6 < len(shown) < 18
    assert {run["cell"] for number, run in enumerate(data["runs"]) if number in shown} == set(range(6))
    assert f"it has the rounds of {len(shown)} of 18 runs" in data["notes"][0]


def test_lines_of_phi_and_of_an_axis(results):
    """Here distributions stand for values of phi or of an axis."""
    is_l2 = results.distribution.values == "l2"
    is_fc = results.policy.values == "fc"
    iid = {"distribution": ("run", ["iid"] * 18)}
    phi = np.where(is_fc, np.where(is_l2, 0.05, 5.0), np.nan)
    runs = is_fc | ~is_l2
    data = digest(results.assign_coords(phi=("run", phi), **iid).isel(run=runs & (results.seed.values < 2)))
    assert data["lines"] == ["fc(phi=0.05)", "fc(phi=5.0)", "rd", "cs-h"]
    assert [(axis["name"], axis["values"]) for axis in data["axes"]] == [
        ("policy", list(POLICIES)),
        ("phi", ["0.05", "5", "none"]),
    ]
    assert len(data["pairs"]["best_accuracy"]) == 6
    assert [cell["curves"]["time"]["best"][1] for cell in data["cells"]] == [None] * 4, "2 seeds have no band"
    axis = {"cell.bandwidth_hz": ("run", np.where(is_l2, 1e6, 5e5))}
    data = digest(results.assign_coords(**axis, **iid).isel(run=is_fc))
    assert sorted(data["lines"]) == ["1000000", "500000"]
    assert data["panels"] == [""]
    assert data["pairs"] == {}


class Resources(html.parser.HTMLParser):
    """Collects what elements of a page refer to."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "href", "data", "action")]


def embedded(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_page_is_self_contained(results, tmp_path):
    evil = "</script><script>alert(1)</script>"
    names = np.where(results.policy.values == "rd", evil, results.policy.values)
    fcjax.report.write(results.assign_coords(policy=("run", names)), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert evil not in text
    assert embedded(text)["lines"] == ["fc", evil, "cs-h"]
    parser = Resources()
    parser.feed(text)
    assert parser.found == []
    assert "default-src 'none'" in text, "browsers refuse any request"
    own = [(page._HERE / f"page.{kind}").read_text() for kind in ("html", "css", "js")]
    assert not re.search(r"https?://|@import|url\(", "".join(own))


def test_reference(results):
    table = pd.DataFrame({"policy": ["fc", "rd"], "distribution": ["iid", "iid"], "published_percent": [91.5, 80.0]})
    shown = {
        (POLICIES[cell["at"][0]], cell["at"][1]): cell["published"] for cell in digest(results, (), table)["cells"]
    }
    assert shown == {("fc", 1): 0.915, ("rd", 1): 0.8, ("cs-h", 1): None} | {(policy, 0): None for policy in POLICIES}
    with pytest.raises(ValueError, match="must have the column published_percent and columns of settings"):
        digest(results, (), table.drop(columns="published_percent"))
    with pytest.raises(ValueError, match="one row per combination of policy: some have several"):
        digest(results, (), pd.DataFrame({"policy": ["fc", "fc"], "published_percent": [1.0, 2.0]}))


def test_run_without_rounds(results):
    first = np.arange(18) == 0
    nothing = {
        name: values.where(~first[(...,) + (None,) * (values.ndim - 1)], False if values.dtype == bool else np.nan)
        for name, values in results.data_vars.items()
        if "round" in values.dims
    }
    rounds = results.rounds.where(~first, 0).astype(np.int32)
    data = digest(results.assign(nothing).assign(rounds=rounds))
    assert data["rasters"]["runs"][0]["rounds"] == 0
    assert data["runs"][0]["values"][0] == pytest.approx(float(results.start_accuracy[0]))
    json.dumps(data, allow_nan=False)


@pytest.fixture
def folder(results, tmp_path):
    """A folder of results, without runs."""
    fcjax.results.save(results, tmp_path / "histories.nc")
    return tmp_path


def report(folder, capsys):
    code = cli.main(["report", str(folder)])
    return code, capsys.readouterr()


def test_command_writes_the_page_and_prints_its_path(folder, results, capsys):
    code, printed = report(folder, capsys)
    assert code == 0
    assert printed.out == f"{folder / 'report.html'}\n"
    assert printed.err == ""
    found = embedded((folder / "report.html").read_text())
    assert found["cells"] == json.loads(json.dumps(digest(results)["cells"]))


def test_older_results_have_the_rest_of_the_page(folder, results, capsys):
    lacking = ["energy_j", "received", "available", "setup", "samples"]
    fcjax.results.save(results.drop_vars(lacking), folder / "histories.nc")
    code, _ = report(folder, capsys)
    assert code == 0
    data = embedded((folder / "report.html").read_text())
    assert len(data["notes"]) == 2
    assert "no energy_j: an older version wrote them" in data["notes"][0]
    assert "The parts of round times are missing" in data["notes"][1]
    assert set(data["cells"][0]["curves"]) == {"time", "rounds"}
    assert set(data["quantities"]) == {"gain", "share"}


def test_damaged_variable_is_left_out(folder, capsys):
    content = bytearray((folder / "histories.nc").read_bytes())
    heap = content.rindex(b"GCOL", 0, content.rindex(b'{"cell"'))  # where the file keeps texts
    content[heap : heap + 4] = b"XXXX"
    (folder / "histories.nc").write_bytes(content)
    code, printed = report(folder, capsys)
    assert code == 0
    assert "histories.nc is damaged: setup cannot be read" in printed.err
    assert "is damaged: setup" in embedded((folder / "report.html").read_text())["notes"][0]


@pytest.mark.parametrize(
    "damage", ["missing", *(pytest.param(how, marks=pytest.mark.slow) for how in ("cut", "other"))]
)
def test_finished_runs_stand_in_for_a_damaged_file(damage, tmp_path, capsys):
    run_sweep(["rd"], "iid", keep=tmp_path / "runs", budget_s=3.0)
    path = tmp_path / "histories.nc"
    if damage == "cut":
        path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    if damage == "other":
        fcjax.results.xr.Dataset({"x": 1}).to_netcdf(path)
    first, second, _ = sorted((tmp_path / "runs").glob("*.npz"))
    first.write_bytes(b"not a run")
    code, printed = report(tmp_path, capsys)
    assert code == 0
    why = {"missing": "there is no", "cut": "cannot be read as results", "other": "is not a results file: it has no"}
    assert why[damage] in printed.err
    assert "the page shows the 2 finished runs in" in printed.err
    assert f"{first} cannot be read" in printed.err
    data = embedded((tmp_path / "report.html").read_text())
    assert len(data["runs"]) == 2
    assert len(data["notes"]) >= 2
    assert second.exists()


def test_folders_without_results(tmp_path, capsys):
    for folder, message in (
        (tmp_path / "nowhere", "there is no folder"),
        (tmp_path, f"{tmp_path} holds no results that can be shown: there is no {tmp_path / 'histories.nc'}"),
    ):
        code, printed = report(folder, capsys)
        assert code == 2
        assert f"error: {message}" in printed.err
        assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium, with logs of its console and its requests."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()


SEVEN = ("fc", "rd", "pf", "cs-l", "cs-h", "as-l", "as-h")
THREE = ("l1", "l2", "iid")


@pytest.fixture(scope="module")
def swept():
    return run_sweep(SEVEN, THREE)


@pytest.fixture
def opened(browser, swept, tmp_path):
    """The page of a sweep with 21 cells."""
    fcjax.report.write(swept, tmp_path / "report.html")
    browser.get((tmp_path / "report.html").as_uri())
    return browser


HOVER = ".hoverlayer .legendtext"
DRAWN = """return [...document.querySelectorAll('.js-plotly-plot')].map(
    (plot) => [plot.closest('section').id, plot.data.map((trace) => [trace.name, trace.x, trace.y])])"""


def drawn(browser):
    """What all charts show, as text; those of the run stay when cells are filtered."""
    return json.dumps([chart for chart in browser.execute_script(DRAWN) if chart[0] != "run"])


def click(browser, selector):
    browser.execute_script("document.querySelector(arguments[0]).click()", selector)


@pytest.mark.slow
def test_browser_draws_without_errors_or_requests(opened):
    charts = [name for name, _ in opened.execute_script(DRAWN)]
    assert {name: charts.count(name) for name in set(charts)} == {
        **dict.fromkeys(("accuracy", "differences", "parts", "fairness"), 3),
        "run": 2,
    }
    lines = opened.execute_script("return document.querySelectorAll('#curves .scatterlayer .js-line').length")
    assert lines == 2 * 21, "a line and a band for each cell"
    for mode in ("dark", "light"):
        feature = {"name": "prefers-color-scheme", "value": mode}
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        ground = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == (mode == "dark")
    assert opened.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    urls = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert {url for url in urls if not url.startswith("data:")} == {opened.current_url}


@pytest.mark.slow
def test_browser_hover_shows_the_summary(opened, swept, tmp_path):
    fcjax.results.summary(swept).to_csv(tmp_path / "summary.csv", index=False)
    rows = pd.read_csv(tmp_path / "summary.csv")
    checked = 0
    for place, distribution in enumerate(THREE):
        chart = opened.find_elements("css selector", "#curves .js-plotly-plot")[place]
        opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
        # A unified label lists all lines at the mouse: at the end of the budget.
        inner = """const {xaxis, yaxis, width, height} = arguments[0]._fullLayout;
            return [xaxis._offset + xaxis.l2p(5) - 1 - width / 2, yaxis._offset + yaxis._length / 2 - height / 2]"""
        x, y = opened.execute_script(inner, chart)
        webdriver.ActionChains(opened).move_to_element_with_offset(chart, int(x), int(y)).perform()
        WebDriverWait(opened, 5).until(lambda _, chart=chart: chart.find_elements("css selector", HOVER))
        shown = [one.get_attribute("textContent") for one in chart.find_elements("css selector", HOVER)]
        labels = dict(text.split(" : ") for text in shown)
        for policy in SEVEN:
            best = rows[(rows.policy == policy) & (rows.distribution == distribution)].best_accuracy.to_numpy()
            half = stats.t.ppf(0.975, 2) * best.std(ddof=1) / math.sqrt(3)
            assert labels[policy] == f"{100 * best.mean():.2f} ± {100 * half:.2f}%"
            checked += 1
    assert checked == 21


@pytest.mark.slow
def test_browser_filters_and_switches_change_what_is_drawn(opened):
    everything = drawn(opened)
    for name, values in (("policy", SEVEN), ("distribution", THREE)):
        for value in values:
            box = f"#filters input[name='{name}'][value='{value}']"
            click(opened, box)
            now = drawn(opened)
            assert now != everything
            if name == "policy":
                assert f'"{value}"' in everything
                assert f'"{value}"' not in now
            else:
                titles = [one.text for one in opened.find_elements("css selector", "#curves h3")]
                assert titles == [f"distribution {other}" for other in THREE if other != value]
            click(opened, box)
            assert drawn(opened) == everything
    for switch in ("#curve-x [value=energy]", "#curve-x [value=rounds]", "#curve-kind [value=current]"):
        before = drawn(opened)
        click(opened, switch)
        assert drawn(opened) != before
    for value in ("final_accuracy", "area_under_curve", "jain_index", "energy_j"):
        before = drawn(opened)
        click(opened, f"#pair-metric [value={value}]")
        assert drawn(opened) != before
    before = drawn(opened)
    Select(opened.find_element("id", "pair-base")).select_by_visible_text("rd")
    assert drawn(opened) != before
    assert opened.get_log("browser") == []


@pytest.mark.slow
def test_browser_raster_is_that_of_the_clicked_run(opened, swept):
    for number in (0, 20, 62):
        row = opened.find_element("css selector", f"#runs-table tr[data-run='{number}']")
        opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", row)
        row.click()
        title = opened.find_element("id", "run-title").text
        labels = (swept[name].values[number] for name in ("policy", "distribution", "seed"))
        assert title == "policy {}, distribution {}, seed {}".format(*labels)
        values = opened.execute_script("return document.getElementById('raster').data[0].z")
        shown = np.array([[value is not None for value in device] for device in values]).T
        np.testing.assert_array_equal(shown, swept.scheduled.values[number, : int(swept.rounds[number])])
    before = values
    click(opened, "#raster-by [value=share]")
    values = opened.execute_script("return document.getElementById('raster').data[0].z")
    assert values != before
    shares = np.nan_to_num(np.array(values, float)).sum(axis=0)
    np.testing.assert_allclose(shares, 1, atol=0.02)
