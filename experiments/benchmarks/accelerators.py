"""Programs of a sweep for accelerators, and their speed where there is one.

Everywhere, it lowers the program of each policy for CUDA and TPU, in the paper's setting with 16 runs side by side, and
counts its operations. It also compiles the same program for this machine, for the bytes of its temporaries. A construct
that only CPUs have would be an error. On a machine with an accelerator, it also measures rounds per second against the
number of runs side by side.

    python experiments/benchmarks/accelerators.py      # some minutes
"""

import collections
import dataclasses
import functools
import re

import jax
import report

import fcjax
from fcjax.sweeps import engine, jobs

PLATFORMS = ("cuda", "tpu")
SIDE_BY_SIDE = (1, 4, 16, 64, 256)


def main(argv: list[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--policy", nargs="+", default=names(), help="policies to export (default: all)")
    parser.add_argument("--no-compile", action="store_true", help="do not compile programs for their temporaries")
    args = parser.parse_args(argv)
    print(report.machine())
    rows = []
    for name in args.policy:
        group = group_of(name)
        operations = {platform: sum(operations_of(exported(group, platform)).values()) for platform in PLATFORMS}
        row = {"policy": name} | {f"operations, {platform}": number for platform, number in operations.items()}
        if not args.no_compile:
            row["temporaries (MB)"] = temporaries_mb(group)
        rows.append(row)
        print(row, flush=True)
    report.write("accelerators_programs", "Programs for accelerators, 16 runs side by side", rows, args.out)
    if jax.default_backend() == "cpu":
        print("this machine has no accelerator: speed was not measured")
        return
    speeds = [{"hardware": jax.devices()[0].device_kind} | speed(number) for number in SIDE_BY_SIDE]
    report.write("accelerators_speed", "FC on MNIST, l1", speeds, args.out)


def names() -> list[str]:
    return [name for name in fcjax.policies.REGISTRY.names() if "..." not in name and "-N" not in name]


def group_of(policy: str, **settings) -> jobs.Group:
    """Plans one run as an accelerator executes it: all devices train under a mask."""
    preset = functools.partial(_under_a_mask, fcjax.presets.shi2020)
    settings = {"preset": preset, "distribution": "iid", "seeds": 1} | settings
    (group,) = jobs.groups(fcjax.plan(policy, **settings))
    return group


def _under_a_mask(make, *args, **settings) -> fcjax.Experiment:
    return dataclasses.replace(make(*args, **settings), width=None)


def exported(group: jobs.Group, platform: str) -> jax.export.Exported:
    """Lowers the program of a group for other hardware."""
    program, shapes = engine.program_of(group, engine.SIDE_BY_SIDE)
    return jax.export.export(program, platforms=(platform,))(*shapes, group.shared())


def operations_of(program: jax.export.Exported) -> collections.Counter[str]:
    """Counts the operations of a program by name."""
    return collections.Counter(re.findall(r"(?:= |^\s*)\"?(stablehlo\.\w+)", program.mlir_module(), flags=re.MULTILINE))


def temporaries_mb(group: jobs.Group) -> float:
    program, shapes = engine.program_of(group, engine.SIDE_BY_SIDE)
    return program.lower(*shapes, group.shared()).compile().memory_analysis().temp_size_in_bytes / 1e6


def speed(side_by_side: int) -> dict[str, float]:
    """Measures a sweep of twice as many runs as fit side by side, without compilation."""
    results = fcjax.sweep("fc", seeds=2 * side_by_side, side_by_side=side_by_side)
    rounds = float(results.rounds.sum())
    return {"side by side": side_by_side, "runs": results.sizes["run"], "rounds/s": rounds / results.run_s}


if __name__ == "__main__":
    main()
