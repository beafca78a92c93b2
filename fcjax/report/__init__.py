"""What people look at: plots, tables, files, and the interactive page."""

from __future__ import annotations  # short types in help()

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


def write(results: xr.Dataset, path: str | os.PathLike, *, reference: pd.DataFrame | None = None) -> None:
    """Writes an interactive page about the results of a sweep: one HTML file that needs no network.

    Args:
      results: the results of `fcjax.sweep`.
      path: the file, such as report.html.
      reference: accuracies to show beside the results, such as a paper's. The column published_percent holds them. The
        other columns that are also settings of the sweep, such as policy and distribution, say which runs they are for.
    """
    from fcjax.report import page  # on demand, because it is slow to import

    page.write(results, path, reference=reference)
