"""Whether `fastest_sets` and the policy `exact` are exact: all subsets of devices are tried, for each access scheme.

Draws random rounds in cells of 2 to 8 devices and 50 to 2000 m, with 20 blocks under OFDMA, and allocates the uplink
to every subset. `fastest_sets` must find a set as fast as the fastest subset of each size. The objective of P4 under
`exact` must be the least over all subsets, and that of `fc` not less.

    python experiments/studies/exactness.py --worlds 200
"""

import argparse
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

import fcjax
from fcjax import policies, radio

SCHEMES = ("fdma", "ofdma", "tdma")
PHI = 0.05


def main(argv: list[str] | None = None) -> dict[str, int]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=200, help="random rounds per scheme (default: %(default)s)")
    args = parser.parse_args(argv)
    fcjax.programs.keep_on_disk()
    titles = (
        "access",
        "worlds",
        "sets",
        "slower sets",
        "exact worse",
        "fc better",
        "mean gap of fc",
        "worst gap of fc",
    )
    print(" ".join(f"{title:>15}" for title in titles))
    faults = {}
    with jax.enable_x64(True):
        for access in SCHEMES:
            rows = [compare(access, seed) for seed in tqdm(range(args.worlds), desc=access, leave=False)]
            sets, slower, exact_worse, fc_better = (sum(int(row[i]) for row in rows) for i in range(4))
            gap = np.array([row[4] for row in rows])
            faults[access] = slower + exact_worse + fc_better
            figures = (access, len(rows), sets, slower, exact_worse, fc_better, f"{gap.mean():.3%}", f"{gap.max():.3%}")
            print(" ".join(f"{figure:>15}" for figure in figures))
    return faults


def compare(access: str, seed: int) -> tuple[int, int, bool, bool, float]:
    """Returns the number of sets, how many are slower than enumeration, faults of `exact` and `fc`, and fc's gap."""
    rng = np.random.default_rng(seed)
    num_devices = int(rng.integers(2, 9))
    cell = fcjax.Cell(
        bandwidth_hz=20e6,
        noise_psd_w_hz=float(radio.dbm_to_w(-114)) / 1e6,
        power_w=10 ** rng.uniform(-3, -1, num_devices),
        upload_bits=32.0 * 50890,
        radius_m=np.exp(rng.uniform(np.log(50), np.log(2000))),
        access=access,
        num_blocks=20,
    )
    subsets = np.array(list(itertools.product([False, True], repeat=num_devices)))[1:]
    times_s, round_s, scheduled, found = solve(jax.random.key(seed), cell, subsets)
    sizes = subsets.sum(1)
    best_s = np.array([times_s[sizes == n].min() for n in range(1, num_devices + 1)])
    of_sets_s = np.array([times_s[(subsets == row).all(1)][0] for row in np.asarray(scheduled)])
    slower = (of_sets_s > best_s * (1 + 1e-9)) | ~np.isclose(round_s, best_s, rtol=1e-9)
    least, exact, greedy = (float(value) for value in found)
    return num_devices, int(slower.sum()), exact > least * (1 + 1e-9), greedy < least * (1 - 1e-9), greedy / least - 1


@jax.jit
def solve(key, cell, subsets):
    context = fcjax.random_context(key, cell, fcjax.Training(num_samples=jnp.ones(cell.power_w.size)))
    context = dataclasses.replace(context, elapsed_s=jnp.zeros(()))
    times_s = jax.vmap(lambda subset: fcjax.allocate(subset, context.observation, cell).round_s)(subsets)
    objectives = jax.vmap(lambda n, t: policies.objective(n, t, PHI, context))(subsets.sum(1), times_s)
    found = [jnp.min(objectives)]
    for policy in (policies.exact(PHI), policies.fast_converge(PHI)):
        _, decision = policy.select(key, policy.init(cell), context)
        found.append(policies.objective(jnp.sum(decision.scheduled), decision.round_s, PHI, context))
    return times_s, *fcjax.fastest_sets(context.observation, cell), found


if __name__ == "__main__":
    raise SystemExit(sum(main().values()) > 0)
