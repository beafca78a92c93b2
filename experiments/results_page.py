"""Writes the results page: what the studies have found, as Markdown beside their files.

The words are those of results_page.md; all tables are made of the csv and json files that the studies wrote to the
folder. Run the studies first.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pandas as pd
import table3
from claims import judged_by
from reproduction import PERCENT, told

from fcjax.results import write_whole

NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}


def markdown(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(str(entry) for entry in row) + " |" for row in rows) + "\n"


def of_table(cells: pd.DataFrame) -> str:
    """Table III: ours, the published figure and the difference in each cell."""
    order = list(dict.fromkeys(cells.distribution))
    written = "as_written_percent" in cells
    head = ["policy", "R (m)", *(f"{d}: ours / published / difference" for d in order)]
    lines = []
    for (policy, radius_m), row in cells.groupby(["policy", "radius_m"], sort=False):
        by = row.set_index("distribution")
        line = [policy, f"{radius_m:g}"]
        for d in order:
            cell = by.loc[d]
            entry = told(cell, PERCENT)
            if cell.published_percent == cell.published_percent:
                entry += f" / {cell.published_percent:.1f} / {cell.difference:+.1f}"
            elif policy == "fixed-best":
                entry += f" (n = {cell.mean_scheduled:.0f})"
            line.append(entry)
        if written:
            line.append(" / ".join(f"{x:.1f}" for x in by.as_written_percent[order] if x == x) or "")
        lines.append(line)
    text = markdown(head + ([f"plain SGD: {' / '.join(order)}"] if written else []), lines)
    apart = table3.differences(cells)
    text += (
        f"\nMean absolute difference to the {apart['cells']} published cells: **{apart['mean']:.2f} points** (largest "
        f"{apart['largest']:.2f}, mean with sign {apart['bias']:+.2f})."
    )
    if written:
        other = (cells.as_written_percent - cells.published_percent).dropna()
        text += f" With plain SGD, as the paper writes it: {other.abs().mean():.2f} (with sign {other.mean():+.2f})."
    ours, all_ = table3.wins(cells, PERCENT)
    stated, _ = table3.wins(cells, "published_percent")
    text += (
        f"\nFC is the best of the paper's policies, or within 0.3 points of it, in {ours} of {all_} settings; "
        f"as published, in {stated}.\n"
    )
    return text + _misses(cells)


def _misses(cells: pd.DataFrame) -> str:
    """Cells that are far off, and settings in which FC is not among the best."""
    lines = []
    known = cells[cells.published_percent.notna()]
    for _, c in known[known.difference.abs() > 2.5].iterrows():
        where = f"{c.policy}, {c.distribution}, R = {c.radius_m:g} m"
        lines.append(f"- {where}: {told(c, PERCENT)}, published {c.published_percent:.1f} ({c.difference:+.1f})")
    for (radius_m, d), row in known.groupby(["radius_m", "distribution"], sort=False):
        by = row.set_index("policy")
        best, fc = by.loc[by[PERCENT].idxmax()], by.loc["fc"]
        if fc[PERCENT] < best[PERCENT] - 0.3:
            where = f"{d}, R = {radius_m:g} m"
            lines.append(f"- {where}: {best.name} has {told(best, PERCENT)}, FC {told(fc, PERCENT)}")
    if not lines:
        return ""
    return (
        "\nWhat misses: cells off by more than 2.5 points, and settings where FC is not within 0.3 of the best:\n\n"
        + ("\n".join(lines) + "\n")
    )


def of_claims(rows: pd.DataFrame) -> str:
    counts = ", ".join(f"{number} {verdict}" for verdict, number in rows.verdict.value_counts().items())
    lines = []
    for _, r in rows.iterrows():
        verdict = r.verdict if r.verdict == "holds" else f"**{r.verdict}**"
        needs = r.needs.replace(">=", "≥").replace("<=", "≤")
        lines.append([r["where"], r.statement, verdict, judged_by(r), needs])
    return f"{len(rows)} statements: {counts}.\n\n" + markdown(["where", "statement", "", "judged by", "needs"], lines)


def of_ways(rows: pd.DataFrame) -> str:
    numbers = [name for name in rows if name not in ("dataset", "way", "seeds")]
    lines = [[r.way, *(f"{r[name]:.2f}" for name in numbers)] for _, r in rows.iterrows()]
    return markdown(["", *(name.replace("_", " ") for name in numbers)], lines)


def of_questions(rows: pd.DataFrame) -> str:
    columns = {"mean_scheduled": "scheduled", "mean_round_s": "round (s)", PERCENT: "best accuracy (%)"}
    lines = []
    for _, r in rows.iterrows():
        figures = [told(r, name, 3 if name == "mean_round_s" else 2) for name in columns]
        lines.append([r.distribution, r.way, *figures, *(f"{r[name]:.3g}" for name in ("rho", "beta", "delta"))])
    text = markdown(["", "estimates", *columns.values(), "rho", "beta", "delta"], lines)
    chosen = []
    for _, r in rows[rows.way == "as the preset"].iterrows():
        for name in rows:
            if name.startswith("better (") and not name.endswith("_half"):
                choice = name.removeprefix("better (").removesuffix(")")
                figures = (told(r, f"{what} ({choice})") for what in ("better", "worse", "final"))
                chosen.append([r.distribution, choice, *figures])
    head = ["", "w~ by which loss", "rounds in which it is better (%)", "worse (%)", "its accuracy at the end (%)"]
    return f"{text}\n{markdown(head, chosen)}"


def of_commands(folder: Path) -> str:
    lines = []
    for path in sorted(folder.glob("*.json")):
        about = json.loads(path.read_text())
        versions = f"Python {about['versions']['python']}, jax {about['versions']['jax']}"
        seeds = f"{len(about['seeds'])} seeds from {about['seeds'][0]}"
        command, revision = about["command"], about["revision"][:10]
        lines.append([path.stem, f"`{command}`", seeds, about["runs"], versions, revision, about["date"]])
    return markdown(["file", "command", "seeds", "runs", "versions", "revision", "date"], lines)


# For each study its heading, and what tells its rows beside the picture.
STUDIES: dict[str, tuple[str, Callable[[pd.DataFrame], str] | None]] = {
    "table3": ("## Table III, {}", of_table),
    "figure2": ("## Fig. 2, {}: accuracy and scheduled devices against phi, without and with errors", None),
    "figure3": ("## Fig. 3, {}: FC round by round", None),
    "figure4": ("## Fig. 4, {}: a fixed number of devices, FC, and centralized training", None),
    "figure5": ("## Fig. 5, {}: accuracy against time, and what rounds are like", None),
    "claims": ("## What the paper says in words, {}", of_claims),
    "recovered_settings": ("### {}", of_ways),
    "open_questions": ("### {}", of_questions),
}


def page(folder: Path) -> str:
    """The page of all that the folder holds."""
    text = (Path(__file__).parent / "results_page.md").read_text()
    for name, (heading, tell) in STUDIES.items():
        parts = []
        for dataset, title in NAMES.items():
            stem = f"{name}_{dataset}"
            if not (folder / f"{stem}.csv").exists():
                continue
            part = heading.format(title) + "\n"
            if (folder / f"{stem}.png").exists():
                part += f"\n![{name} on {title}]({stem}.png)\n"
            parts.append(part + (f"\n{tell(pd.read_csv(folder / f'{stem}.csv'))}" if tell else ""))
        text = text.replace("{{" + name + "}}", "\n".join(parts).rstrip())
    return text.replace("{{commands}}", of_commands(folder).rstrip())


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  python experiments/results_page.py --folder out/paper",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Path(__file__).parent / "results" / "paper"
    p.add_argument("--folder", type=Path, default=default, help="of the studies' files (default: the committed ones)")
    folder = p.parse_args(argv).folder
    if not list(folder.glob("*.csv")):
        print(f"error: {folder} holds no results of a study; run one first, such as table3.py", file=sys.stderr)
        return 2
    write_whole(folder / "README.md", lambda part: Path(part).write_text(page(folder)))
    print(f"written to {folder / 'README.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
