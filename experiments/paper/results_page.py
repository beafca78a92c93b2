"""Writes the results page: the findings of the studies as Markdown, next to their files.

The text comes from results_page.md; all tables come from the csv and json files that the studies wrote to the folder.
Run the studies first.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import claims
import dealing
import figure2
import figure3
import figure4
import figure5
import hypotheses
import open_questions
import pandas as pd
import recovered_settings
import table3
from reproduction import as_markdown
from verdicts import FAILS, HOLDS, UNDECIDED

from fcjax import files

NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
# Studies and their headings. The tables of the figures are long, hence folded.
STUDIES = (
    (table3.STUDY, "## Table III, {}"),
    (figure2.STUDY, "## Fig. 2, {}: accuracy and scheduled devices against phi, without and with errors"),
    (figure3.STUDY, "## Fig. 3, {}: FC round by round"),
    (figure4.STUDY, "## Fig. 4, {}: a fixed number of devices, FC, and centralized training"),
    (figure5.STUDY, "## Fig. 5, {}: accuracy against time, and what rounds are like"),
    (claims.STUDY, "## What the paper says in words, {}"),
    (dealing.STUDY, "### {}"),
    (recovered_settings.STUDY, "### {}"),
    (open_questions.STUDY, "### {}"),
    (hypotheses.STUDY, "### {}"),
)

FOLDED = ("figure2", "figure3", "figure4", "figure5")


# Known reasons why a statement of the paper does not hold or is undecided, by the beginning of the statement.
REASONS = {
    "w~ is mostly": "the loss is that of the scheduled devices, and w~ is one round late (see below)",
    "fc has 6.26 devices": "Alg. 3 measures delta from the scheduled devices' mean, which is too short (see below)",
    "fc has 0.62 s": "rounds are shorter because fewer devices are scheduled (see above)",
}


def _reason(statement: str) -> str:
    return next((why for start, why in REASONS.items() if statement.startswith(start)), "")


def overview(folder: Path) -> str:
    """Summarises what holds, what does not, and what is undecided."""
    distance = [["data set", "seeds", "cells", "mean abs. difference", "by chance", "p", "significantly off"]]
    counts = [["data set", "seeds", "statements", "hold", "do not hold", "undecided"]]
    lists = []
    for dataset, title in NAMES.items():
        if (path := folder / f"table3_{dataset}.csv").exists():
            cells = pd.read_csv(path)
            whole, off = table3.beside_chance(cells)["all"], table3.significant(cells)
            chance = f"{whole.floor:.2f}", f"{whole.p:.2g}", str(len(off))
            figures = f"{whole.found:.2f}", *(chance if whole.floor == whole.floor else ("-", "-", "-"))
            distance.append([title, str(table3.known(cells).seeds.iloc[0]), str(whole.cells), *figures])
        if (path := folder / f"claims_{dataset}.csv").exists():
            rows = pd.read_csv(path)
            number = rows.verdict.value_counts()
            figures = [str(number.get(verdict, 0)) for verdict in (HOLDS, FAILS, UNDECIDED)]
            counts.append([title, str(rows.seeds[0]), str(len(rows)), *figures])
            for verdict, words in ((FAILS, "does not hold"), (UNDECIDED, "could not be decided")):
                found = rows[rows.verdict == verdict]
                figures = [f"{r.estimate:.3g} ({r.low:.3g} to {r.high:.3g}) {r.what}" for _, r in found.iterrows()]
                lines = [
                    [r["where"], r.statement, figure, r.needs, _reason(r.statement)]
                    for figure, (_, r) in zip(figures, found.iterrows(), strict=True)
                ]
                if lines:
                    head = ["where", "statement", "found", "needs", "reason, if known"]
                    lists += [f"**What {words} on {title}:**", [head, *lines]]
    return as_markdown([distance, counts, *lists])


def page(folder: Path) -> str:
    """Returns the page for all results in a folder."""
    text = (Path(__file__).parent / "results_page.md").read_text().replace("{{overview}}", overview(folder))
    commands = [["file", "command", "seeds", "runs", "versions", "revision", "date"]]
    for study, heading in STUDIES:
        parts = []
        for dataset, title in NAMES.items():
            stem = f"{study.name}_{dataset}"
            if not (folder / f"{stem}.csv").exists():
                continue
            part = [heading.format(title)]
            if (folder / f"{stem}.png").exists():
                part.append(f"![{study.name} on {title}]({stem}.png)")
            shown = as_markdown(study.show(pd.read_csv(folder / f"{stem}.csv")))
            part.append(
                f"<details><summary>figures</summary>\n\n{shown}\n\n</details>" if study.name in FOLDED else shown
            )
            parts.append("\n\n".join(part))
            commands.append(command(folder / f"{stem}.json"))
        text = text.replace("{{" + study.name + "}}", "\n\n".join(parts) or "(not run)")
    return text.replace("{{commands}}", as_markdown([commands]))


def command(path: Path) -> list[str]:
    """Returns the provenance of a study's files."""
    about = json.loads(path.read_text())
    seeds = f"{about['seeds'][0]} to {about['seeds'][-1]}"
    versions = f"Python {about['versions']['python']}, jax {about['versions']['jax']}"
    return [
        path.stem,
        f"`{about['command']}`",
        seeds,
        str(about["runs"]),
        versions,
        about["revision"][:10],
        about["date"],
    ]


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  python experiments/paper/results_page.py --folder out/paper",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Path(__file__).parents[1] / "results" / "paper"
    p.add_argument("--folder", type=Path, default=default, help="folder of the results (default: the committed ones)")
    folder = p.parse_args(argv).folder
    if not list(folder.glob("*_*.csv")):
        print(f"error: {folder} holds no results of a study; run a study first, such as table3.py", file=sys.stderr)
        return 2
    try:
        text = page(folder)
        files.write_whole(folder / "README.md", lambda part: Path(part).write_text(text))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"written to {folder / 'README.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
