"""The interactive page: one HTML file with its data, its script and Plotly.

Plotly's script is several times as large as Bokeh's or Vega's, but still fits, and its settings alone give what the
page needs: bands, rasters and one hover label for all lines. It is read from the installed package, which is slow to
import.
"""

import importlib.util
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import xarray as xr

from fcjax.report.digest import digest
from fcjax.report.plots import COLOURS
from fcjax.runtime.files import write_whole
from fcjax.sweeps import folders

NAME = "report.html"
_HERE = Path(__file__).parent


def write(
    results: xr.Dataset,
    path: str | os.PathLike,
    *,
    reference: pd.DataFrame | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Writes the page; see `fcjax.report.write`. The page shows the notes at its top."""
    text = html(digest(results, notes, reference))
    write_whole(path, lambda part: Path(part).write_text(text, encoding="utf-8"))


def write_folder(out: Path, reference: pd.DataFrame | None = None) -> tuple[Path, list[str]]:
    """Writes the page of a folder of results; returns its path, and says what could not be read."""
    results, faults = folders.load(out)
    write(results, out / NAME, reference=reference, notes=faults)
    return out / NAME, faults


def html(data: dict) -> str:
    """Returns the page that shows the data of `digest`."""
    data = {"colours": COLOURS, **data}
    parts = {
        "style": (_HERE / "page.css").read_text(encoding="utf-8"),
        "plotly": _plotly(),
        "script": (_HERE / "page.js").read_text(encoding="utf-8"),
        # Text of the user must not end the element that holds it.
        "data": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    template = (_HERE / "page.html").read_text(encoding="utf-8")
    return re.sub(r"/\*(\w+)\*/", lambda match: parts[match[1]], template)


def _plotly() -> str:
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        raise OSError("the page needs the package plotly: run pip install plotly")
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
