"""Plots of a metrics file."""

from __future__ import annotations

import math
import sys

import pytest

from jaxrl.errors import DataError, JaxrlError, OutputError
from jaxrl.observe import names
from jaxrl.observe.plots import PANELS, plot_metrics
from jaxrl.observe.writers import JsonlWriter


@pytest.fixture
def metrics(tmp_path):
    """A metrics file of 40 updates with an evaluation every ten, and one NaN."""
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    for step in range(41):
        values = {
            names.REWARD: 1 - math.exp(-step / 15),
            names.STALENESS: 0.5 + 0.4 * math.sin(step),
            names.LENGTH: 12 + step / 10,
            names.LOGP_GAP: math.nan if step == 20 else 0.01 + step / 5000,
        }
        if step % 10 == 0:
            values[names.ACCURACY] = step / 50
        writer.write(step, values, 0.0)
    writer.close()
    return path


def test_plot_metrics_writes_a_png_with_all_panels(metrics, tmp_path):
    pytest.importorskip("matplotlib")

    path = plot_metrics(metrics, tmp_path / "run.png")

    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(PANELS) == 5


def test_plot_metrics_leaves_pyplot_and_the_backend_alone(metrics, tmp_path):
    pytest.importorskip("matplotlib")
    before = "matplotlib.pyplot" in sys.modules

    plot_metrics(metrics, tmp_path / "run.png", panels=[names.REWARD])

    assert ("matplotlib.pyplot" in sys.modules) == before


def test_plot_metrics_without_matplotlib_says_how_to_get_it(metrics, tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(JaxrlError, match=r"pip install 'jaxrl\[plots\]'"):
        plot_metrics(metrics, tmp_path / "run.png")


def test_plot_metrics_nothing_to_draw_is_data_error(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 0, "other": 1.0}\n')

    with pytest.raises(DataError, match="holds none of the metrics"):
        plot_metrics(tmp_path / "metrics.jsonl", tmp_path / "run.png")


def test_plot_metrics_image_that_cannot_be_written_is_output_error(metrics, tmp_path):
    pytest.importorskip("matplotlib")

    with pytest.raises(OutputError, match="cannot write the plot"):
        plot_metrics(metrics, tmp_path / "none" / "run.png")
