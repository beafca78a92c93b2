"""Size of the interactive page, and how long it takes to write and to open, against the number of runs.

The results are those of FC on MNIST over 60 simulated seconds with 5 seeds. More runs are copies of these under other
names of policies and distributions and with other seeds. Opening ends with the load event of headless Chromium, after
everything is drawn.

    python experiments/benchmarks/report_page.py      # about 2 minutes
"""

import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import report
import xarray as xr
from selenium import webdriver

import fcjax

SIZES = ((1, 1, 5), (4, 5, 5), (10, 10, 10))  # policies, distributions, seeds
SEEDS = 5


def main(argv: list[str] | None = None) -> None:
    args = report.parser(__doc__).parse_args(argv)
    print(report.machine())
    measured = fcjax.sweep("fc", seeds=SEEDS, progress=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        for size in SIZES:
            results = copies(measured, *size)
            write_s = [write_s_of(results, path) for _ in range(1 + args.repetitions)]
            rows.append(
                {
                    "runs": results.sizes["run"],
                    "cells": size[0] * size[1],
                    "size (MB)": path.stat().st_size / 1e6,
                    "first writing (s)": write_s[0],
                    "writing (s)": float(np.median(write_s[1:])),
                    "opening (s)": float(np.median([open_s(path) for _ in range(args.repetitions)])),
                }
            )
    report.write("report_page", "The interactive page", rows, args.out)


def copies(results: xr.Dataset, num_policies: int, num_distributions: int, num_seeds: int) -> xr.Dataset:
    """Returns copies of runs for each combination of policies, distributions and seeds."""
    policy, distribution, seed = (axis.ravel() for axis in np.indices((num_policies, num_distributions, num_seeds)))
    labels = {
        "policy": ("run", [f"policy {number}" for number in policy]),
        "distribution": ("run", [f"l{number + 1}" for number in distribution]),
        "seed": ("run", seed),
    }
    return results.isel(run=seed % results.sizes["run"]).assign_coords(labels)


def write_s_of(results: xr.Dataset, path: Path) -> float:
    start = time.perf_counter()
    fcjax.report.write(results, path)
    return time.perf_counter() - start


def open_s(path: Path) -> float:
    """Opens the page in a new browser and returns the time until its load event has ended."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1000"):
        options.add_argument(argument)
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))) as browser:
        browser.get(path.as_uri())
        return browser.execute_script("return performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000


if __name__ == "__main__":
    main()
