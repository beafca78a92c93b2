"""What does bandwidth buy? A sweep over an axis, its picture, and the derivative that a single round gives.

python examples/bandwidth.py
"""

import jax

import fcjax

bands = [5e6, 10e6, 20e6]
results = fcjax.sweep(
    ["fc", "rd"], dataset="mnist", budget_s=10, seeds=3, axes={"cell.bandwidth_hz": bands}, progress=True
)
print(fcjax.results.summary(results).groupby(["policy", "cell.bandwidth_hz"])[["rounds", "best_accuracy"]].mean())
fcjax.plots.against(results, "cell.bandwidth_hz").savefig("bandwidth.png")

first = results.isel(run=0, round=0)  # a round of FC at 5 MHz
observation = fcjax.Observation(first.gain.values, first.compute_s.values)
cell = fcjax.presets.shi2020("mnist", bandwidth_hz=bands[0]).cell
slope = jax.grad(lambda cell: fcjax.allocate(first.scheduled.values, observation, cell).round_s)(cell).bandwidth_hz
print(f"the first round takes {float(first.round_s):.3f} s; 1 MHz more changes it by {1e6 * slope:+.4f} s")
