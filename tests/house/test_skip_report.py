"""The run reports what it did not run, and why."""

from __future__ import annotations

import json
import subprocess
import sys

SUITE = """
import pytest

@pytest.mark.skip(reason="needs the moon")
def test_skipped(): ...

@pytest.mark.slow
def test_slow(): ...

def test_passes(): ...
"""


def test_skip_report_skipped_and_deselected_tests_are_listed_with_reasons(tmp_path, repo_root):
    (tmp_path / "test_sample.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: slow\n")
    command = [sys.executable, "-m", "pytest", "-p", "skip_report", "-m", "not slow", str(tmp_path)]
    env = {"PYTHONPATH": str(repo_root / "tests"), "PATH": ""}

    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    report = json.loads((tmp_path / "test-report" / "skipped.json").read_text())
    assert result.returncode == 0, result.stdout + result.stderr
    assert "needs the moon" in result.stdout
    assert report["skipped"] == [
        {"test": "test_sample.py::test_skipped", "reason": "needs the moon"}
    ]
    assert report["deselected"] == [
        {"test": "test_sample.py::test_slow", "reason": "-m 'not slow'"}
    ]
