"""What `fuzz.py` calls: for each target, how often, how a call is made, and who judges the answer."""

from collections.abc import Callable

import fuzz_calls
import numpy as np
from fuzz_calls import Call
from fuzz_inputs import Rng, array, cell, drift, key, number, observation, of_bounds, scheduled, whole
from fuzz_judges import (
    no_nan,
    right_decision,
    right_gradient,
    right_partition,
    right_required,
    right_sets,
    right_shares,
    right_slope_of_bound,
    right_task,
    right_w,
)

import fcjax
from fcjax import bandwidth, bounds, contract, latency, policies, radio
from fcjax.data import partition

LABELS = np.arange(600) % 10

# name: how often, how a call is made, what is true of the answer
Target = tuple[float, Callable[[Rng, int], Call], Callable[..., str]]
TARGETS: dict[str, Target] = {
    "lambertw": (8, fuzz_calls.of_lambertw, right_w),
    "required_share": (
        10,
        lambda r, m: (fcjax.required_share, (number(r, 1e-3, 1e3), observation(r, m), cell(r, m)), {}),
        right_required,
    ),
    "allocate": (10, lambda r, m: (fcjax.allocate, (scheduled(r, m), observation(r, m), cell(r, m)), {}), right_shares),
    "fastest_sets": (10, lambda r, m: (fcjax.fastest_sets, (observation(r, m), cell(r, m)), {}), right_sets),
    "bandwidth.round_time": (
        4,
        lambda r, m: (bandwidth.round_time, (scheduled(r, m), array(r, 1e-6, 1, m), observation(r, m), cell(r, m)), {}),
        no_nan,
    ),
    "gradient of allocate": (
        2,
        lambda r, m: (
            fuzz_calls.with_gradient(fuzz_calls.round_s),
            (scheduled(r, m), observation(r, m), cell(r, m)),
            {},
        ),
        right_gradient,
    ),
    "gradient of convergence_bound": (
        2,
        lambda r, m: (
            fuzz_calls.with_gradient(bounds.convergence_bound),
            (number(r, 1, m), number(r, 1, 1e4)),
            of_bounds(r, m) | {"rho": number(r, 0.1, 10), "phi": number(r, 1e-3, 10)},
        ),
        right_slope_of_bound,
    ),
    "radio.required_efficiency": (3, lambda r, m: (radio.required_efficiency, (array(r, 1e-9, 1, m),), {}), no_nan),
    "radio.rate": (8, lambda r, m: (radio.rate, (array(r, 1e-6, 1, m), observation(r, m), cell(r, m)), {}), no_nan),
    "radio.path_gain": (5, lambda r, m: (radio.path_gain, (array(r, 1, 1e4, m), cell(r, m)), {}), no_nan),
    "radio.place": (3, lambda r, m: (radio.place, (key(r), cell(r, m)), {}), no_nan),
    "radio.fade": (3, lambda r, m: (radio.fade, (key(r), cell(r, m)), {}), no_nan),
    "radio.dbm_to_w": (3, lambda r, m: (radio.dbm_to_w, (array(r, 1e-3, 200, m),), {}), no_nan),
    "latency.compute_time": (
        4,
        lambda r, m: (latency.compute_time, (key(r), number(r, 1, 1e6), cell(r, m)), {}),
        no_nan,
    ),
    "bounds.scheduling_penalty": (
        8,
        lambda r, m: (bounds.scheduling_penalty, (number(r, 1, m),), of_bounds(r, m)),
        no_nan,
    ),
    "bounds.convergence_bound": (
        8,
        lambda r, m: (
            bounds.convergence_bound,
            (number(r, 1, m), number(r, 1, 1e4)),
            of_bounds(r, m) | {"rho": number(r, 0.1, 10), "phi": number(r, 1e-3, 10)},
        ),
        no_nan,
    ),
    "bounds.mean_drift": (2, lambda r, m: (bounds.mean_drift, (), drift(r, m)), no_nan),
    "bounds.local_drift": (2, lambda r, m: (bounds.local_drift, (), drift(r, m)), no_nan),
    "bounds.sampling_constant": (2, lambda r, m: (bounds.sampling_constant, (), of_bounds(r, m)), no_nan),
    "bounds.scheduling_objective": (
        4,
        lambda r, m: (
            bounds.scheduling_objective,
            (number(r, 1, m), number(r, 1e-2, 1e3)),
            of_bounds(r, m) | {"rho": number(r, 0.1, 10), "phi": number(r, 1e-3, 10), "budget_s": number(r, 1, 1e4)},
        ),
        no_nan,
    ),
    "policies.select": (1, fuzz_calls.select, right_decision),
    "policies by factory": (0.5, fuzz_calls.by_factory, right_decision),
    "partition": (
        4,
        lambda r, m: (
            partition.by_name,
            (
                str(r.choice(["iid", "l1", "l3", "l10", "l11", "dir0.3", "dir1e-9", "dir0", "x"])),
                LABELS,
                whole(r, 1, m + 1),
            ),
            {"seed": whole(r, 0, 1000), "min_size": whole(r, 0, 40)},
        ),
        right_partition,
    ),
    "data.load": (2, fuzz_calls.name_of_data, lambda *_: ""),
    "results.load": (1, fuzz_calls.results_file, lambda *_: ""),
    "data.synthetic": (1, fuzz_calls.task, right_task),
    "models": (0.2, fuzz_calls.model, no_nan),
    "sweep": (0.1, fuzz_calls.sweep, no_nan),
    "presets and simulate": (0.2, fuzz_calls.simulate, no_nan),
    "check_policy": (
        0.1,
        lambda r, m: (
            contract.check_policy,
            (policies.by_name(str(r.choice(fuzz_calls.POLICY_NAMES[:8]))), cell(r, m)),
            {},
        ),
        no_nan,
    ),
}
