"""The notebook of the documentation runs from top to bottom."""

from __future__ import annotations

import re

import nbformat
import pytest
from nbclient import NotebookClient


def test_quickstart_notebook_runs_and_shows_versions(tmp_path, repo_root, monkeypatch):
    pytest.importorskip("reasoning_gym", reason="the notebook needs the extra `tasks`")
    monkeypatch.setenv("PYTHONPATH", str(repo_root))
    # The test process asks for eight devices; the notebook runs as a user would, on one.
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    notebook = nbformat.read(repo_root / "docs" / "quickstart.ipynb", as_version=4)

    client = NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()

    text = "".join(
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    assert "before RL" in text
    assert "by weights v50:" in text
    # Sampled one update ahead at most.
    assert re.search(r"v4[89] [0-9a-f]{12}", text)
