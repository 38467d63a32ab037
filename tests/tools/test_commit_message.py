"""The commit-message hook."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture
def problem(repo_root):
    path = repo_root / "tools" / "check_commit_message.py"
    spec = importlib.util.spec_from_file_location("check_commit_message", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.problem


@pytest.mark.parametrize(
    "message", ["feat: add a thing", "fix(train): keep the mask\n\nBody.", "perf!: drop a copy"]
)
def test_problem_conventional_subject_is_accepted(problem, message):
    assert problem(message) is None


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        ("add a thing", "must read"),
        ("feat add", "must read"),
        ("feat: added a thing", "imperative"),
        ("feat: add a thing.", "full stop"),
        ("feat: " + "x" * 100, "at most"),
        ("feat: add\nno gap", "empty line"),
    ],
)
def test_problem_bad_subject_is_refused_with_the_rule(problem, message, rule):
    assert rule in problem(message)
