"""Pytest plug-in: the run ends with a list of what was not run and why, also as a JSON file.

The file is `test-report/skipped.json` below the root directory (`--skip-report PATH` moves it).
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

_REPORT = pytest.StashKey[dict]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--skip-report`."""
    parser.addoption(
        "--skip-report",
        default="test-report/skipped.json",
        help="where the report of skipped and deselected tests is written",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start with an empty report."""
    config.stash[_REPORT] = {"skipped": [], "deselected": []}


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Remember tests that the command line left out, with the marker expression responsible."""
    for item in items:
        options = item.config.option
        reason = f"-m {options.markexpr!r}" if options.markexpr else f"-k {options.keyword!r}"
        item.config.stash[_REPORT]["deselected"].append({"test": item.nodeid, "reason": reason})


def _skips(reports: list) -> list[dict[str, str]]:
    """Test and reason of each skip report; a reason is required of every skip."""
    rows = []
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        rows.append({"test": report.nodeid, "reason": reason.removeprefix("Skipped: ")})
    return rows


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Print the report and write it to the file."""
    report = config.stash[_REPORT]
    report["skipped"] = _skips(terminalreporter.stats.get("skipped", []))
    path = Path(config.rootpath, config.getoption("--skip-report"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    terminalreporter.section("skipped tests and why")
    for row in report["skipped"]:
        terminalreporter.write_line(f"SKIPPED {row['test']}: {row['reason']}")
    for reason, count in Counter(row["reason"] for row in report["deselected"]).items():
        terminalreporter.write_line(f"DESELECTED {count} tests by {reason}")
    total = len(report["skipped"]) + len(report["deselected"])
    terminalreporter.write_line(f"{total} tests did not run; the list is in {path.name}")
