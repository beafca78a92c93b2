"""How far the paper's greedy scheduling (fc) is from the optimum (exact), in the objective of P4.

Draws random rounds in the paper's cell, with estimates within a factor of 10 of the initial ones, and compares the
decisions of both policies.

    python experiments/studies/greedy_gap.py                          # R = 200, 600 and 1000 m, phi = 0.05
    python experiments/studies/greedy_gap.py --radius 600 --phi 0.005 0.05 0.5 5 --rounds 10000
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

import fcjax
from fcjax import policies, radio

BATCH = 500


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--radius", type=float, nargs="+", default=[200.0, 600.0, 1000.0], help="radii in m")
    parser.add_argument("--phi", type=float, nargs="+", default=[0.05])
    parser.add_argument("--rounds", type=int, default=4000, help="rounds per radius and phi (default: %(default)s)")
    parser.add_argument("--devices", type=int, default=20)
    args = parser.parse_args(argv)
    fcjax.programs.keep_on_disk()

    @jax.jit
    def compare(keys, radius_m, phi):
        cell = fcjax.Cell(
            bandwidth_hz=20e6,
            noise_psd_w_hz=radio.dbm_to_w(-114) / 1e6,
            power_w=jnp.full(args.devices, radio.dbm_to_w(10)),
            upload_bits=32.0 * 50890,
            radius_m=radius_m,
        )

        def one(key):
            context = fcjax.random_context(key, cell, fcjax.Training())
            found = []
            for policy in (policies.fast_converge(phi), policies.exact(phi)):
                _, decision = policy.select(key, policy.init(cell), context)
                n = jnp.sum(decision.scheduled)
                found += [n, policies.objective(n, decision.round_s, phi, context)]
            return found

        return jax.vmap(one)(keys)

    titles = ("R (m)", "phi", "mean gap", "worst gap", "same size", "n of fc", "n of exact")
    print(" ".join(f"{title:>10}" for title in titles))
    gaps = []
    for radius_m in args.radius:
        for phi in args.phi:
            parts = []
            for batch in tqdm(range(-(-args.rounds // BATCH)), desc=f"R = {radius_m:g} m", leave=False):
                keys = jax.random.split(jax.random.key(batch), BATCH)
                parts.append(compare(keys, radius_m, phi))
            together = [np.concatenate(part)[: args.rounds] for part in zip(*parts, strict=True)]
            n_greedy, greedy, n_exact, exact = together
            gap = greedy.astype(float) / exact - 1
            gaps.append(float(gap.mean()))
            values = (f"{radius_m:g}", f"{phi:g}", f"{gap.mean():.3%}", f"{gap.max():.3%}")
            sizes = (f"{np.mean(n_greedy == n_exact):.1%}", f"{n_greedy.mean():.2f}", f"{n_exact.mean():.2f}")
            print(" ".join(f"{value:>10}" for value in values + sizes))
    return gaps


if __name__ == "__main__":
    main()
