"""Draws a run's metrics file as PNG images; needs matplotlib (`pip install 'jaxrl[plots]'`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl.errors import DataError, JaxrlError, OutputError
from jaxrl.observe import names
from jaxrl.observe.writers import read_metrics

PANELS = (names.REWARD, names.ACCURACY, names.STALENESS, names.LENGTH, names.LOGP_GAP)
_COLOUR = "#1f6f8b"


def plot_metrics(
    metrics_path: Path | str, png_path: Path | str, *, panels: Sequence[str] = PANELS
) -> Path:
    """One image with a panel for each metric that the file holds, over the update count.

    Returns the path of the image. Raises `JaxrlError` without matplotlib, `DataError` if the file
    holds none of the metrics, `OutputError` if the image cannot be written.
    """
    figure_class = _figure_class()
    records = read_metrics(metrics_path)
    series = {name: s for name in panels if (s := _series(records, name))}
    if not series:
        raise DataError(f"{metrics_path} holds none of the metrics {list(panels)}")
    columns = min(2, len(series))
    rows = math.ceil(len(series) / columns)
    figure = figure_class(figsize=(6.0 * columns, 3.0 * rows), dpi=110, layout="constrained")
    for index, (name, points) in enumerate(series.items(), start=1):
        _draw(figure.add_subplot(rows, columns, index), name, points)
    try:
        figure.savefig(png_path, format="png")
    except OSError as error:
        raise OutputError(f"cannot write the plot {png_path}: {error.strerror}") from error
    return Path(png_path)


def _figure_class() -> Any:
    """matplotlib's Figure on the Agg canvas; the host application's backend stays as it is."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise JaxrlError(
            "plots need matplotlib: pip install 'jaxrl[plots]', or set observe.plots=False"
        ) from error

    def figure(**options: Any) -> Any:
        made = Figure(**options)
        FigureCanvasAgg(made)
        return made

    return figure


def _series(records: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of every record with the metric; values that are not finite leave a gap."""
    return [
        (record["step"], record[name] if math.isfinite(record[name]) else math.nan)
        for record in records
        if name in record
    ]


def _draw(axes: Any, name: str, points: list[tuple[int, float]]) -> None:
    steps, values = zip(*points, strict=True)
    # Few points (evaluations) are shown as such; a hundred markers would hide the line.
    axes.plot(steps, values, color=_COLOUR, linewidth=1.4, marker="o" if len(steps) < 20 else "")
    axes.set_title(names.LABELS.get(name, name), fontsize=11, loc="left")
    axes.set_xlabel("update")
    axes.set_ylabel(names.UNITS.get(name, ""))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
