"""Speed and accuracy of the physics core compared with its peers, as ratios measured in one run.

Prints three tables: `lambertw` against SciPy's and TFP's, `allocate` against a loop over SciPy's brentq, and the growth
of `fastest_sets` with the number of devices. Timings are medians over interleaved repetitions, after compiling.

    python experiments/benchmarks/physics.py                 # about a minute
    python experiments/benchmarks/physics.py --out results   # also writes results/physics.csv
"""

import argparse
import csv
import importlib.metadata
import math
import platform
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
from scipy import optimize, special

import fcjax

RADIO = {"bandwidth_hz": 20e6, "noise_psd_w_hz": 10**-20.4, "upload_bits": 32.0 * 50890}  # the paper's, on MNIST


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1_000_000, help="arguments of lambertw (default: %(default)s)")
    parser.add_argument("--worlds", type=int, default=10_000, help="worlds to allocate in (default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[20, 200, 2000], help="devices of fastest_sets")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each timing (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for physics.csv")
    args = parser.parse_args(argv)
    if min(args.points, args.worlds, args.repeats, *args.sizes) < 1:
        parser.error("--points, --worlds, --sizes and --repeats must be 1 or more")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)

    jax.config.update("jax_enable_x64", True)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "scipy", "numpy", "tfp-nightly")}
    print(f"Python {platform.python_version()}, {', '.join(f'{k} {v}' for k, v in versions.items())}; ", end="")
    print(f"{jax.devices()[0].device_kind}, {jax.device_count()} processor(s)")
    rows = [
        *lambertw_rows(args.points, args.repeats),
        *allocate_rows(args.worlds, args.repeats),
        *fastest_sets_rows(args.sizes, args.repeats),
    ]
    if args.out:
        with (args.out / "physics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["what", "who", "seconds", "ratio", "note", *versions])
            writer.writeheader()
            writer.writerows(row | versions for row in rows)


def timed(candidates, repeats):
    """Returns the median time of each candidate, measured in turns."""
    seconds = {name: [] for name in candidates}
    for function in candidates.values():
        jax.block_until_ready(function())
    for _ in range(repeats):
        for name, function in candidates.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def show(title, rows):
    print(f"\n{title}")
    width = max(len(row["who"]) for row in rows)
    for row in rows:
        print(f"  {row['who']:<{width}}  {1e3 * row['seconds']:>11.3f} ms  {row['ratio']:>9.2f}x  {row['note']}")
    return rows


def progress(text):
    print(f"... {text}", file=sys.stderr, flush=True)


def lambertw_rows(num_points, repeats):
    import tensorflow_probability.substrates.jax as tfp  # slow to import, and not needed for --help

    rng = np.random.default_rng(0)
    middle = rng.uniform(-np.exp(-1), 1, num_points // 2)
    points = {0: np.r_[middle, np.exp(rng.uniform(0, 14, num_points - middle.size))]}
    points[-1] = -rng.uniform(0, np.exp(-1), num_points)
    for branch, z in points.items():
        progress(f"lambertw, branch {branch}: {num_points} points")
        compiled = jax.jit(lambda z, branch=branch: fcjax.lambertw(z, branch))
        candidates = {
            f"fcjax {z.dtype}": lambda f=compiled, z=z: f(z)
            for z in (jnp.asarray(z, jnp.float32), jnp.asarray(z, jnp.float64))
        }
        if branch == 0:
            peer = jax.jit(tfp.math.lambertw)
            candidates |= {
                f"TFP {z.dtype}": lambda f=peer, z=z: f(z)
                for z in (jnp.asarray(z, jnp.float32), jnp.asarray(z, jnp.float64))
            }
        candidates["SciPy complex128"] = lambda z=z, branch=branch: special.lambertw(z, branch)
        seconds = timed(candidates, repeats)
        sample = {
            "fcjax": lambda z, branch=branch: fcjax.lambertw(z, branch),
            "SciPy": lambda z, branch=branch: special.lambertw(np.float64(z), branch).real,
            "TFP": tfp.math.lambertw,
        }
        rows = []
        for name, value in seconds.items():
            who, dtype = name.split()
            error = largest_error(sample[who], branch, np.float32 if dtype == "float32" else np.float64)
            note = f"largest relative error {error:.3g} eps"
            ratio = value / seconds["fcjax float32" if dtype == "float32" else "fcjax float64"]
            rows.append({"what": f"lambertw {branch}", "who": name, "seconds": value, "ratio": ratio, "note": note})
        yield from show(
            f"lambertw, branch {branch}, {num_points} points (time, ratio to fcjax of that precision)", rows
        )


def largest_error(function, branch, dtype):
    """Returns the largest error against mpmath, over points of all magnitudes and near the branch point."""
    rng = np.random.default_rng(1)
    near = -np.exp(-1) + 10 ** rng.uniform(-6 if dtype == np.float32 else -15, -1, 500)
    small = -(10 ** rng.uniform(-30, -0.5, 500))
    z = np.r_[near, small, 10 ** rng.uniform(-30, 30, 500) if branch == 0 else []].astype(dtype)
    z = z[z > dtype(-np.exp(-1))]
    with mpmath.workdps(40):
        exact = np.array([float(mpmath.lambertw(mpmath.mpf(float(x)), branch).real) for x in z])
    return np.max(np.abs(np.float64(function(z)) / exact - 1)) / np.finfo(dtype).eps


def draw_worlds(num_worlds, num_devices, dtype):
    """Draws worlds of the paper's 600 m cell, with powers over a decade and half of the devices scheduled."""
    rng = np.random.default_rng(2)
    distance_km = np.maximum(0.6 * np.sqrt(rng.uniform(size=(num_worlds, num_devices))), 1e-3)
    compute_s = 0.32 + rng.exponential(0.32, (num_worlds, num_devices))
    power_w = 10 ** rng.uniform(-2.5, -1.5, (num_worlds, num_devices))
    scheduled = rng.uniform(size=(num_worlds, num_devices)) < 0.5
    scheduled[:, 0] = True
    gain = 10**-12.81 * distance_km**-3.76
    return scheduled, *(x.astype(dtype) for x in (gain, compute_s, power_w))


def round_time_by_brentq(gain, compute_s, power_w):
    """Alg. 1, written with SciPy."""
    unit_s = RADIO["upload_bits"] * math.log(2) / RADIO["bandwidth_hz"]
    floor_s = RADIO["noise_psd_w_hz"] * RADIO["upload_bits"] * math.log(2) / (power_w * gain)

    def excess(time_s):
        gamma = floor_s / (time_s - compute_s)
        return (
            np.sum(unit_s / ((time_s - compute_s) * -(special.lambertw(-gamma * np.exp(-gamma), -1).real + gamma))) - 1
        )

    alone_s = unit_s / np.log1p(unit_s / floor_s)  # with the whole band; unit_s/floor_s is the signal-to-noise ratio
    low_s = np.max(compute_s + alone_s) * (1 - 1e-9)
    high_s = 2 * low_s
    while excess(high_s) > 0:
        high_s *= 2
    return optimize.brentq(excess, low_s, high_s, xtol=1e-14, rtol=1e-14)


def allocate_rows(num_worlds, repeats):
    progress(f"allocate: {num_worlds} worlds; SciPy's loop takes a while")

    @jax.jit
    @jax.vmap
    def allocate(scheduled, gain, compute_s, power_w):
        return fcjax.allocate(scheduled, fcjax.Observation(gain, compute_s), fcjax.Cell(power_w=power_w, **RADIO))

    arrays = {dtype: draw_worlds(num_worlds, 20, dtype) for dtype in (np.float32, np.float64)}
    candidates = {f"fcjax {np.dtype(dtype)}": lambda a=a: allocate(*a) for dtype, a in arrays.items()}
    seconds = timed(candidates, repeats)
    start = time.perf_counter()
    expected = np.array(
        [round_time_by_brentq(*(x[s] for x in world)) for s, *world in zip(*arrays[np.float64], strict=True)]
    )
    seconds["SciPy loop"] = time.perf_counter() - start
    notes = {
        f"fcjax {np.dtype(dtype)}": f"differs by {np.max(np.abs(allocate(*a).round_s / expected - 1)):.1e}"
        for dtype, a in arrays.items()
    }
    rows = [
        {
            "what": f"allocate x {num_worlds}",
            "who": name,
            "seconds": value,
            "ratio": value / seconds["fcjax float64"],
            "note": f"{1e6 * value / num_worlds:.1f} us per world; {notes.get(name, 'the reference')}",
        }
        for name, value in seconds.items()
    ]
    yield from show(f"allocate, {num_worlds} worlds of 20 devices, half scheduled (time, ratio to fcjax float64)", rows)


def fastest_sets_rows(sizes, repeats):
    rows = []
    for num_devices in sizes:
        progress(f"fastest_sets: {num_devices} devices")
        _, gain, compute_s, power_w = (x[0] for x in draw_worlds(1, num_devices, np.float32))
        observation, cell = fcjax.Observation(gain, compute_s), fcjax.Cell(power_w=power_w, **RADIO)
        start = time.perf_counter()
        compiled = jax.jit(fcjax.fastest_sets).lower(observation, cell).compile()
        compile_s = time.perf_counter() - start
        name = f"{num_devices} devices"
        seconds = timed({name: lambda f=compiled, o=observation, c=cell: f(o, c)}, repeats)[name]
        note = f"compiles in {compile_s:.1f} s, {compiled.memory_analysis().temp_size_in_bytes / 1e6:.2f} MB of memory"
        if rows:
            previous = rows[-1]
            growth = math.log(seconds / previous["seconds"]) / math.log(num_devices / previous["devices"])
            note += f", growth exponent {growth:.2f}"
        ratio = seconds / (rows[0]["seconds"] if rows else seconds)
        rows.append({"who": name, "seconds": seconds, "ratio": ratio, "note": note, "devices": num_devices})
    for row in show("fastest_sets, all sizes, float32 (time, ratio to the first)", rows):
        del row["devices"]
        yield {"what": "fastest_sets"} | row


if __name__ == "__main__":
    main()
